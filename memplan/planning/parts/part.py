"""One call of a part of a step while it is planned: how it can run, and what each way of running it would hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from memplan.capture.capture import Capture, capture_part
from memplan.capture.probe import Site, UnitCall
from memplan.capture.trace.raw_trace import PartSurroundings
from memplan.costs.measure import estimate
from memplan.logs import log
from memplan.planning.parts.request import Fuse
from memplan.plans.partial_plan import UnitRow
from memplan.plans.plan import Plan
from memplan.problem.data import Problem
from memplan.runtime.parts.part_step import PartStep
from memplan.runtime.parts.partial_step import Way, Ways
from memplan.runtime.parts.rehearsal import Visit
from memplan.runtime.program.execute import TangentLayout
from memplan.runtime.program.lower import Program, lower
from memplan.solvers import Candidate, Front, solve_front
from memplan.solvers.parts.passes import Pass, pass_of
from memplan.solvers.parts.ways import UnitChoice, UnitOption, UnitProblem
from memplan.units import format_bytes

Unscheduled = Literal["recompute", "keep"]  # ways that need no schedule


@dataclass(frozen=True, slots=True)
class Twice:
    """The way of a captured part of which forward saves nothing, and runs again when backward begins."""

    candidate: Candidate


PartWay = Candidate | Twice | Unscheduled

MOST_POINTS = 32  # of a part's front


@dataclass(eq=False)
class Part:
    """One call of a unit or of a block: what can be captured of it, and the ways in which it can run.

    - module, site: what is called, its name, and why it is a part.
    - visit: what the rehearsal saw of this call.
    - captured: the captured part; None for an opaque one.
    - further: positions of arguments that the program takes once more, for gradients of their further uses.
    - shares: some of its parameters are used elsewhere too.
    - fuse: turns it into a part over fused groups, once it is captured.
    - problem, front: of a captured part.
    - repeats: its forward can run again in backward.
    - ways: what each of its options runs: a schedule, once or twice, "recompute" or "keep".
    - options: what each of its ways would hold and take.
    """

    module: nn.Module
    site: Site
    visit: Visit | None = None
    captured: Capture | None = None
    further: tuple[int, ...] = ()
    shares: bool = False
    fuse: Fuse | None = None
    problem: Problem | None = None
    front: Front | None = None
    repeats: bool = False
    ways: list[PartWay] = field(default_factory=list)
    options: list[UnitOption] = field(default_factory=list)

    def give_up(self, reason: str) -> None:
        """Make it an opaque part, because it can't be captured after all."""
        self.captured = self.problem = self.front = None
        self.site = Site(self.site.name, "opaque", reason)

    @property
    def is_fused(self) -> bool:
        """Whether fused groups are among its ops."""
        return self.captured is not None and any(op.fused for op in self.captured.traced.graph.ops)

    @functools.cached_property
    def least(self) -> Candidate | None:
        """The schedule that saves the least, with which the part is measured."""
        if self.front is None or self.problem is None:
            return None
        problem = self.problem
        return min(
            self.front.spread(MOST_POINTS), key=lambda c: (pass_of(problem, c.schedule).saved_bytes, c.peak_bytes)
        )

    def way(self, option: int) -> Way:
        """One of its options, in a form that can run."""
        chosen = self.ways[option]
        if isinstance(chosen, Twice):
            return self.step(chosen.candidate, drops_saved=True)
        return chosen if isinstance(chosen, str) else self.step(chosen)

    def step(self, candidate: Candidate, drops_saved: bool = False) -> PartStep:
        """A step that runs this part with a schedule. drops_saved: its forward saves nothing, and runs again."""
        assert self.captured is not None
        assert self.problem is not None
        assert self.front is not None
        plan = Plan(
            self.problem, candidate.schedule, candidate.timeline, candidate.solver, self.problem.baseline_time_s,
            min(c.peak_bytes for c in self.front.points), max(c.time_s for c in self.front.points),
            self.front.truncated,
        )  # fmt: skip
        program = lower(candidate.schedule, self.captured.traced, "edges")
        again = None
        if self.visit is not None:
            planned = pass_of(self.problem, candidate.schedule)
            again = functools.partial(_planned_again, self.site, self.visit.call, self.visit.uses, self.fuse, planned)
        return PartStep.of(plan, self.module, self.captured, program, self.further, again, drops_saved)


@dataclass(frozen=True, slots=True)
class PartStage:
    """Units that run one after the other.

    block: the block that they are in, where it may run as one unit in their place.
    """

    units: tuple[Part, ...]
    block: Part | None = None

    def running(self, alternative: int) -> tuple[Part, ...]:
        """The parts that run in an alternative of this stage: 0 is its units, if it has any, and 1 is its block."""
        if self.block is not None and (alternative or not self.units):
            return (self.block,)
        return self.units

    @property
    def all(self) -> tuple[Part, ...]:
        """Units and block."""
        return self.units if self.block is None else (*self.units, self.block)


@dataclass(frozen=True, slots=True)
class Parts:
    """A step in stages, in the order of forward, with the choice between their options.

    - problem: that choice, as a solver takes it.
    - left_bytes: held once the step is over.
    - written: tensors that were there before forward, and that it writes to, buffers excepted.
    """

    stages: tuple[PartStage, ...]
    problem: UnitProblem
    left_bytes: int
    written: tuple[torch.Tensor, ...]

    def updated(self, update_bytes: int) -> Parts:
        """These parts followed by an optimizer's step, which allocates `update_bytes` for a while."""
        end_bytes = max(self.problem.end_bytes, self.left_bytes + update_bytes)
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, end_bytes=end_bytes))

    def ways(self, choice: UnitChoice) -> Ways:
        """How each call of each unit and block runs."""
        ways: dict[nn.Module, tuple[Way, ...]] = {}
        for stage, (alternative, options) in zip(self.stages, choice.picks, strict=True):
            chosen = dict(zip(map(id, stage.running(alternative)), options, strict=True))
            for part in stage.all:
                way = part.way(chosen[id(part)]) if id(part) in chosen else "keep"
                ways[part.module] = (*ways.get(part.module, ()), way)
        return ways

    def rows(self, choice: UnitChoice) -> Iterator[UnitRow]:
        """What each call of a unit and block does."""
        for stage, (alternative, options) in zip(self.stages, choice.picks, strict=True):
            for part, index in zip(stage.running(alternative), options, strict=True):
                way, figures = part.ways[index], part.options[index]
                keeps_all = part.front is not None and way is part.front.keep_all
                how = way if isinstance(way, str) else "recompute" if isinstance(way, Twice) else "planned"
                yield UnitRow(
                    part.site.name,
                    "captured" if part.captured is not None else part.site.kind,
                    "keep" if keeps_all else how,
                    figures.extra_bytes - min(option.extra_bytes for option in part.options),
                    max(0.0, figures.time_s),
                    part.site.reason,
                )


def _planned_again(
    site: Site,
    call: UnitCall,
    uses: Mapping[int, int],
    fuse: Fuse | None,
    planned: Pass,
    module: nn.Module,
    tangents: Mapping[int, TangentLayout],
) -> tuple[Capture, Program]:
    """A part for gradients of other layouts than reached it on the sample, in no more memory where that is possible.

    planned: what its schedule for the sample holds and takes. Raises UnsupportedModel.
    """
    log.info("planning %s again, because gradients of other layouts arrive", site.name)
    around = PartSurroundings(tangents, uses, site.answers)
    with torch.enable_grad(), call.autocast.context():
        captured = capture_part(module, module.forward, call.sample(), around)
    captured = dataclasses.replace(captured, call=captured.call.without_tensors())
    if fuse is not None:
        captured = captured.changed(fuse)
    problem = Problem(captured.traced.graph, estimate(captured.traced))
    found = [
        (candidate, pass_of(problem, candidate.schedule)) for candidate in solve_front(problem).spread(MOST_POINTS)
    ]
    within = [(candidate, figures) for candidate, figures in found if figures.within(planned)]
    if within:
        chosen, _ = min(within, key=lambda pair: pair[0].time_s)
    else:
        chosen, figures = min(found, key=lambda pair: (pair[1].saved_bytes, pair[1].backward_bytes))
        more = max(figures.saved_bytes - planned.saved_bytes, figures.backward_bytes - planned.backward_bytes)
        log.warning(
            "the gradient that reaches %s lies otherwise in memory than on the sample, and takes up to %s "
            "more. Put the loss into forward", site.name, format_bytes(max(0, more)),
        )  # fmt: skip
    return captured, lower(chosen.schedule, captured.traced, "edges")

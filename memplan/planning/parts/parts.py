"""The parts of a step that can't be captured whole, while they are planned: how each can run and what it would hold."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memplan.capture.capture import Capture, capture_part
from memplan.capture.ops.real_results import Facts, OtherResults
from memplan.capture.probe import Site, UnitCall, find_sites
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Call, Forward
from memplan.capture.trace.raw_trace import PartSurroundings
from memplan.config import Config
from memplan.costs.measure import estimate, measure
from memplan.errors import MemplanError, UnsupportedModel
from memplan.logs import log
from memplan.problem.data import Costs, Problem
from memplan.problem.structure import same_structure
from memplan.runtime.parts.measures import StepMeasure, UnitMeasure
from memplan.runtime.parts.part_runners import UnitStep, UnitTangents
from memplan.runtime.parts.rehearsal import EditedArguments, Passage, Rehearsal, Visit, nothing_kept
from memplan.runtime.program.execute import TangentLayout
from memplan.runtime.program.gathers import Gathers
from memplan.runtime.program.lower import Program, lower
from memplan.solvers import Candidate, Front, solve_front
from memplan.solvers.parts.passes import Pass, pass_of
from memplan.solvers.parts.ways import UnitChain, UnitOption, UnitProblem
from memplan.units import format_bytes

WholeParameters = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]

_POINTS = 32  # of a unit's front
_MOST_OPTIONS = 16  # of one unit


@dataclass(eq=False)
class Part:
    """One call of a unit or of a block. front: of a captured one. ways: what each of its options runs.

    further: positions of arguments that the program takes once more. shares: some of its parameters are used elsewhere
    too. shards: who has sharded its parameters, and has them whole around its passes. fixed: others rely on its one
    program, so that it is not made anew for other gradients.
    """

    module: nn.Module
    site: Site
    visit: Visit | None = None
    captured: Capture | None = None
    further: tuple[int, ...] = ()
    shares: bool = False
    shards: Shards | None = None
    fixed: bool = False
    problem: Problem | None = None
    front: Front | None = None
    ways: list[Candidate | str] = field(default_factory=list)
    options: list[UnitOption] = field(default_factory=list)

    @functools.cached_property
    def least(self) -> Candidate | None:
        """The schedule that saves the least: the one that is measured."""
        if self.front is None or self.problem is None:
            return None
        problem = self.problem
        return min(self.front.spread(_POINTS), key=lambda c: (pass_of(problem, c.schedule).saved_bytes, c.peak_bytes))

    def step(self, candidate: Candidate) -> UnitStep:
        """A schedule of it, ready to run."""
        assert self.captured is not None
        assert self.problem is not None
        program = lower(candidate.schedule, self.captured.traced, "edges")
        gathers = None if self.shards is None else Gathers(self.shards)
        again = None
        if self.visit is not None and not self.fixed:
            planned = pass_of(self.problem, candidate.schedule)
            again = functools.partial(_planned_again, self.site, self.visit.call, self.visit.uses, planned)
        step = UnitStep.of(self.module, self.captured, program, self.further, gathers, again)
        if self.problem.costs.source == "estimated":
            step.runner.check_first_runs()
        return step


@dataclass(frozen=True, slots=True)
class UnitStage:
    """Units that run one after the other; block: the block that they are in, where it may run as one unit instead."""

    units: tuple[Part, ...]
    block: Part | None = None

    def running(self, alternative: int) -> tuple[Part, ...]:
        """Those that run in this alternative of the stage's."""
        if self.block is not None and (alternative or not self.units):
            return (self.block,)
        return self.units

    @property
    def all(self) -> tuple[Part, ...]:
        """Units and block."""
        return self.units if self.block is None else (*self.units, self.block)


@dataclass(frozen=True, slots=True)
class Parts:
    """A step in stages, in the order of forward, and the choice that it poses. left_bytes: held once it is over.

    written: tensors that were there before forward, buffers aside, and that it writes to.
    """

    stages: tuple[UnitStage, ...]
    problem: UnitProblem
    left_bytes: int
    written: tuple[torch.Tensor, ...] = ()

    def updated(self, update_bytes: int) -> Parts:
        """These parts, followed by an optimizer's step, which allocates so much for a while."""
        end_bytes = max(self.problem.end_bytes, self.left_bytes + update_bytes)
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, end_bytes=end_bytes))


def parts_of(
    model: nn.Module,
    forward: Forward,
    call: Call,
    reason: str,
    costs: str,
    config: Config | None = None,
    decides: bool = False,
) -> Parts:
    """Find, capture, solve and measure. Raises UnsupportedModel where no part can be planned."""
    try:
        with nothing_kept(model, call) as writes, torch.enable_grad():
            sites, blocks = find_sites(model, lambda: forward(*call.variadic, **call.arguments), reason, decides)
    except MemplanError:
        raise
    except Exception as error:  # the plain forward does not run either
        raise UnsupportedModel(f"{reason}\n  and the plain forward fails: {type(error).__name__}: {error}") from error
    while sites:
        try:
            parts = _planned(model, forward, call, sites, blocks, costs, config)
            return dataclasses.replace(parts, written=writes.written)
        except EditedArguments as error:
            sites = {m: site for m, site in sites.items() if m not in error.modules}
            blocks = {m: site for m, site in blocks.items() if m not in error.modules}
    raise UnsupportedModel(f"no part of the model can be planned either. {reason}")


def _planned(
    model: nn.Module,
    forward: Forward,
    call: Call,
    sites: dict[nn.Module, Site],
    blocks: dict[nn.Module, Site],
    costs: str,
    config: Config | None,
) -> Parts:
    rehearse = functools.partial(Rehearsal, model, forward, call)
    rehearsal = rehearse()
    rehearsal.run(dict.fromkeys(sites, ()))
    units = [Part(visit.module, sites[visit.module], visit) for visit in rehearsal.visits]
    calls = Counter(unit.module for unit in units)
    for unit in units:
        capture_unit(unit, calls[unit.module] > 1 or shares_parameters(model, unit.module))
    solve_units(units, costs, solve=functools.partial(solve_front, config=config))
    while True:
        try:
            return measured_parts(rehearse, units, blocks)
        except UnitTangents as error:  # programs around it do not hand on what eager does
            for unit in units:
                if unit.module is error.module:
                    unit.captured = unit.problem = unit.front = None
                    unit.site = Site(unit.site.name, "opaque", str(error))


# -- captured units ---------------------------------------------------------------------------------------------------


def capture_unit(unit: Part, shares: bool) -> None:
    """Capture a unit for the gradients that reach it; it is opaque where that can't be exact."""
    visit, site = unit.visit, unit.site
    unit.captured, unit.shares = None, shares
    if site.kind != "captured" or visit is None:
        return
    autocast = visit.call.autocast
    around = PartSurroundings(visit.tangents, visit.uses, site.answers)
    try:
        if not visit.tangents:
            raise UnsupportedModel("no gradient reaches its results by themselves")
        if visit.twice:
            raise UnsupportedModel("it takes one tensor as two arguments")
        if visit.edited:
            raise UnsupportedModel("forward writes to its results later on")
        if shares and autocast.enabled and autocast.cache_enabled:
            raise UnsupportedModel("it shares parameters, whose casts autocast shares too")
        with autocast.context():
            unit.captured = capture_part(unit.module, unit.module.forward, visit.call.sample(), around, unit.shards)
    except UnsupportedModel as error:
        unit.site = Site(site.name, "opaque", str(error))
        return
    unit.further = tuple(position for position, _ in around.further_uses())


def shares_parameters(model: nn.Module, unit: nn.Module) -> bool:
    """Whether modules outside of the unit have parameters of it as well."""
    inside = set(unit.modules())
    outside = {id(p) for m in model.modules() if m not in inside for p in m._parameters.values() if p is not None}
    return any(id(p) in outside for p in unit.parameters())


def solve_units(
    units: Sequence[Part],
    source: str,
    solve: Callable[[Problem], Front],
    whole: WholeParameters = contextlib.nullcontext,
) -> None:
    """The front of every captured unit; equal ones are solved once.

    whole: has a unit's parameters there for as long.
    """
    known: list[tuple[Problem, Front]] = []
    for unit in units:
        if unit.captured is None:
            continue
        try:
            with whole(unit.module):
                costs = _costs(unit, source)
        except UnsupportedModel as error:  # an op does not do what its trace says
            unit.captured, unit.site = None, Site(unit.site.name, "opaque", str(error))
        if unit.captured is None:
            continue
        problem = Problem(unit.captured.traced.graph, costs)
        found = next((front for other, front in known if _equal(other, problem)), None)
        if found is None:
            found = solve(problem)
            known.append((problem, found))
        unit.problem, unit.front = problem, found
        unit.captured = dataclasses.replace(unit.captured, call=unit.captured.call.without_tensors())


def _equal(a: Problem, b: Problem) -> bool:
    """Whether the front of one is that of the other."""
    sizes = [[v.size_bytes for v in problem.graph.values] for problem in (a, b)]
    return a.costs == b.costs and sizes[0] == sizes[1] and same_structure(a.graph, b.graph)


def _costs(unit: Part, source: str) -> Costs:
    """Those of its ops. It is captured once more where they are found to give other results than were traced."""
    found: Mapping[str, Facts] = {}
    while unit.captured is not None:
        try:
            return _costs_as_captured(unit, unit.captured, source)
        except OtherResults as error:
            if error.found == found:
                raise
            found = error.found
            error.note()
            capture_unit(unit, unit.shares)
    raise UnsupportedModel(unit.site.reason)


def _costs_as_captured(unit: Part, captured: Capture, source: str) -> Costs:
    if source == "estimate":
        return estimate(captured.traced)
    tensors = dict([*unit.module.named_parameters(), *unit.module.named_buffers()])
    inputs = captured.call.tensors
    inputs = (*inputs, *(inputs[position] for position in unit.further))

    def resident(kind: str, name: str, position: int) -> torch.Tensor | None:
        if kind == "parameter" and unit.shards is not None:
            return None
        return inputs[position] if kind == "input" else tensors[name]

    return measure(captured.traced, resident)


def _planned_again(
    site: Site,
    call: UnitCall,
    uses: Mapping[int, int],
    planned: Pass,
    module: nn.Module,
    tangents: Mapping[int, TangentLayout],
) -> tuple[Capture, Program]:
    """A unit for gradients of other layouts than reached it on the sample, in no more memory where that can be.

    planned: what its schedule for the sample comes to. Raises UnsupportedModel.
    """
    log.info("planning %s again, because gradients of other layouts arrive", site.name)
    around = PartSurroundings(tangents, uses, site.answers)
    with torch.enable_grad(), call.autocast.context():
        captured = capture_part(module, module.forward, call.sample(), around)
    captured = dataclasses.replace(captured, call=captured.call.without_tensors())
    problem = Problem(captured.traced.graph, estimate(captured.traced))
    found = [(candidate, pass_of(problem, candidate.schedule)) for candidate in solve_front(problem).spread(_POINTS)]
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


# -- what the step holds ----------------------------------------------------------------------------------------------


def measured_parts(rehearse: Callable[..., Rehearsal], units: Sequence[Part], blocks: dict[nn.Module, Site]) -> Parts:
    """Run the step at the least memory, and work out from it what each option of each unit would hold.

    Where there are blocks it runs once more, each of them recomputed as a whole: that then is the way in which the step
    was measured, and what the units of a block hold is told against it.
    """
    ways: dict[nn.Module, tuple[UnitStep | None, ...]] = {}
    for unit in units:
        step = None if unit.least is None else unit.step(unit.least)
        ways[unit.module] = (*ways.get(unit.module, ()), step)
    split, passages = _rehearsed(rehearse, ways, blocks, [u.module for u in units])
    if not passages:
        for unit, around in zip(units, split.units, strict=True):
            _set_options(unit, around, 0)
        chains = tuple((UnitChain((tuple(u.options),)),) for u in units)
        problem = UnitProblem(chains, split.turn_bytes, split.end_bytes)
        return Parts(tuple(UnitStage((u,)) for u in units), problem, split.left_bytes)
    inside = {units[i].module for p in passages for i in range(p.first, p.end)}
    outside = {units[what].module for _, what in _in_order(units, passages) if isinstance(what, int)}
    if inside & outside:
        return measured_parts(rehearse, units, {})
    modules = [module for module, _ in _in_order(units, passages)]
    outer: dict[nn.Module, tuple[UnitStep | None, ...]] = {m: way for m, way in ways.items() if m in outside}
    outer |= dict.fromkeys(blocks, ())
    whole, _ = _rehearsed(rehearse, outer, {}, modules)
    return _in_stages(units, blocks, passages, split, whole)


def _rehearsed(
    rehearse: Callable[..., Rehearsal],
    ways: dict[nn.Module, tuple[UnitStep | None, ...]],
    blocks: dict[nn.Module, Site],
    expected: Sequence[nn.Module],
) -> tuple[StepMeasure, list[Passage]]:
    """What the step holds, with seconds of a second run that nobody meters."""
    rehearsals = [rehearse(metered=metered) for metered in (True, False)]
    for rehearsal in rehearsals:
        rehearsal.run(ways, blocks)
        if [v.module for v in rehearsal.visits] != list(expected):
            raise UnsupportedModel("the model calls its parts in another order each time")
    measured, timed = (rehearsal.measure for rehearsal in rehearsals)
    for unit, other in zip(measured.units, timed.units, strict=True):
        unit.rerun_s = min(unit.rerun_s, other.rerun_s)
    return measured, rehearsals[0].passages


def _in_order(units: Sequence[Part], passages: Sequence[Passage]) -> Iterator[tuple[nn.Module, Passage | int]]:
    """Calls of blocks, and of units (by index) outside of them, in the order of forward."""
    index = 0
    for passage in passages:
        yield from ((units[i].module, i) for i in range(index, passage.first))
        yield passage.block, passage
        index = passage.end
    yield from ((units[i].module, i) for i in range(index, len(units)))


def _in_stages(
    units: Sequence[Part],
    blocks: dict[nn.Module, Site],
    passages: Sequence[Passage],
    split: StepMeasure,
    whole: StepMeasure,
) -> Parts:
    """split: measured with blocks in units. whole: measured with blocks recomputed."""
    stages: list[UnitStage] = []
    alternatives: list[tuple[UnitChain, ...]] = []
    for around, (module, what) in zip(whole.units, _in_order(units, passages), strict=True):
        if isinstance(what, int):
            _set_options(units[what], around, 0)
            stages.append(UnitStage((units[what],)))
            alternatives.append((UnitChain((tuple(units[what].options),)),))
            continue
        block = Part(module, blocks[module], ways=["recompute"], options=_opaque_options(around)[:1])
        before_bytes = what.before_bytes - around.forward_bytes
        for i in range(what.first, what.end):
            _set_options(units[i], split.units[i], before_bytes)
        inner = tuple(units[what.first : what.end])
        exit_bytes = what.after_bytes - around.after_forward_bytes - before_bytes
        stages.append(UnitStage(inner, block))
        one = UnitChain((tuple(block.options),))
        alternatives.append((UnitChain(tuple(tuple(u.options) for u in inner), exit_bytes), one) if inner else (one,))
    problem = UnitProblem(tuple(alternatives), whole.turn_bytes, whole.end_bytes)
    return Parts(tuple(stages), problem, whole.left_bytes)


def _set_options(unit: Part, around: UnitMeasure, before_bytes: int) -> None:
    """The options of a unit, from the least memory to none recomputed.

    before_bytes: held when it was measured, and not in the way of running to which options are told.
    """
    if unit.front is None or unit.problem is None or unit.least is None:
        unit.ways, found = ["recompute", "keep"], _opaque_options(around)
    else:
        measured = pass_of(unit.problem, unit.least.schedule)
        unit.ways, found = [*_spread(unit.front.spread(_POINTS), _MOST_OPTIONS), "keep"], []
        for way in unit.ways:
            figures = pass_of(unit.problem, unit.front.keep_all.schedule if isinstance(way, str) else way.schedule)
            found.append(
                UnitOption(
                    figures.extra_bytes(measured),
                    max(around.before_forward_bytes, around.forward_bytes + figures.forward_bytes),
                    max(around.before_backward_bytes, around.backward_bytes + figures.backward_bytes),
                    figures.time_s - unit.front.keep_all.time_s,
                )
            )
    kept = found[-1]  # what runs as it is has no program that could do as well
    better = [i for i, o in enumerate(found[:-1]) if not _no_worse(kept, o)]
    unit.ways = [*(unit.ways[i] for i in better), unit.ways[-1]]
    unit.options = [_less(o, before_bytes) for o in (*(found[i] for i in better), kept)]


def _opaque_options(around: UnitMeasure) -> list[UnitOption]:
    """Recomputed as a whole, as it was measured; and kept."""
    return [
        UnitOption(
            0,
            max(around.before_forward_bytes, around.forward_peak_bytes),
            max(around.before_backward_bytes, around.backward_peak_bytes),
            around.rerun_s,
        ),
        UnitOption(
            around.kept_bytes,
            max(around.before_forward_bytes, around.forward_bytes + around.kept_forward_bytes),
            max(around.before_backward_bytes, around.kept_backward_bytes - around.kept_bytes),
            0.0,
        ),
    ]


def _no_worse(a: UnitOption, b: UnitOption) -> bool:
    return (
        a.extra_bytes <= b.extra_bytes
        and a.forward_peak_bytes <= b.forward_peak_bytes
        and a.backward_peak_bytes <= b.backward_peak_bytes
        and a.time_s <= b.time_s
    )


def _less(option: UnitOption, size_bytes: int) -> UnitOption:
    return dataclasses.replace(
        option,
        forward_peak_bytes=option.forward_peak_bytes - size_bytes,
        backward_peak_bytes=option.backward_peak_bytes - size_bytes,
    )


def _spread(points: Sequence[Candidate], count: int) -> list[Candidate]:
    """At most `count` of them, the first and the last included."""
    if len(points) <= count:
        return list(points)
    return [points[i * (len(points) - 1) // (count - 1)] for i in range(count)]

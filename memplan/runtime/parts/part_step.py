"""One part of a model that runs as a program: captured, planned and lowered by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memplan.capture.capture import Capture
from memplan.capture.key import StepKey
from memplan.capture.ops.real_results import once_more_where_results_differ
from memplan.capture.trace.call import Call, Forward
from memplan.errors import MemplanError
from memplan.plans.plan import Plan
from memplan.runtime.parts.recompute import NOBODY, UnitObserver
from memplan.runtime.program.decisions import OtherBranch
from memplan.runtime.program.execute import (
    Gradients,
    InFlight,
    OtherTangents,
    ParameterStore,
    PlannedTangent,
    Runner,
    TangentLayout,
    Written,
)
from memplan.runtime.program.lower import Program
from memplan.runtime.program.outputs import Outputs
from memplan.runtime.program.rng import held_rng, restore_held_rng

# Captures and plans a part of this module for gradients of such layouts, by output.
Again = Callable[[nn.Module, Mapping[int, TangentLayout]], tuple[Capture, Program]]


class PartTangents(OtherTangents):
    """In a rehearsal, a part of this module gets gradients of other layouts than it was captured for."""

    def __init__(self, module: nn.Module, problem: Exception) -> None:
        super().__init__(str(problem))
        self.module = module


class PartRunner(Runner):
    """A program of one part. Its inputs are kept only where it may have to run once more."""

    watcher: UnitObserver = NOBODY
    index: int = -1

    @staticmethod
    def of(module: nn.Module, capture: Capture, program: Program) -> PartRunner:
        traced = capture.traced
        outputs = Outputs.of(traced)
        state = [r.name for r in traced.residents.values() if r.kind in ("parameter", "buffer")]
        names_of_state = [*state, *(n for n in program.parameter_gradients if n not in state)]
        return PartRunner(
            program=program,
            store=ParameterStore(module, names_of_state, traced.device),
            trainable=program.parameter_gradients,
            backwards=((PlannedTangent.all_of(traced, outputs.names), program.backward),),
            outputs=outputs,
            device=traced.device,
            draws=any(op.random for op in traced.graph.ops[: traced.graph.boundary]),
            written=Written.of(traced),
            decisions=tuple(decision.output for decision in traced.decisions),
        )

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], InFlight]:
        if not self._decisions:
            return super().forward(inputs)
        generator = held_rng(self.device)
        try:
            return super().forward(inputs)
        except OtherBranch:
            restore_held_rng(self.device, generator)
            raise

    def _start(self, inputs: Sequence[torch.Tensor], program: Program) -> Any:
        return super()._start(inputs, program) if self.is_attended else None

    def _go_back(self, start: Any) -> None:
        if start is not None:
            super()._go_back(start)

    def backward(self, state: InFlight, tangents: dict[int, torch.Tensor]) -> Gradients:
        self.watcher.begin(self.index, "backward")
        gradients = super().backward(state, tangents)
        self.watcher.end(self.index, "backward")
        return gradients


@dataclass(frozen=True, slots=True)
class PartStep:
    """A part's program with the module that it reads, and the calls for which it was made.

    - plan: of the part alone.
    - further: positions of arguments that are handed to autograd once more, after all others, in this order.
    - again: makes the program anew where other gradients arrive than on the sample. Without it such a step is refused.
    - drops_saved: forward saves nothing, and runs again when backward begins.
    - runners: of the program, and of others with the same forward; the first is the one that was right last.
    """

    plan: Plan
    module: nn.Module
    capture: Capture
    program: Program
    key: StepKey
    further: tuple[int, ...]
    again: Again | None = None
    drops_saved: bool = False
    runners: list[PartRunner] = field(default_factory=list)

    @staticmethod
    def of(
        plan: Plan,
        module: nn.Module,
        capture: Capture,
        program: Program,
        further: tuple[int, ...],
        again: Again | None = None,
        drops_saved: bool = False,
    ) -> PartStep:
        """The step for the module that was captured."""
        step = PartStep(plan, module, capture, program, capture.key, further, again, drops_saved)
        step._use(PartRunner.of(module, capture, program))
        if plan.problem.costs.source != "measured":  # some ops have not run here
            step.runner.check_first_runs()
        return step

    @property
    def runner(self) -> PartRunner:
        """The runner that runs next."""
        return self.runners[0]

    def mismatch(self, call: Call) -> str | None:
        """What keeps this step from serving a call, in words."""
        return self.key.mismatch(call)

    def bound_to(self, model: nn.Module, forward: Forward) -> PartStep:
        """This step for a copy of the module, which has this forward of its own."""
        key = self.key.rebound(model)
        step = PartStep(self.plan, model, self.capture, self.program, key, self.further, self.again, self.drops_saved)
        step._use(PartRunner.of(model, self.capture, self.program))
        step.runner.unchecked = set(self.runner.unchecked)
        return step

    def run(self, call: Call) -> Any:
        """What the part's forward would return."""
        traced = self.capture.traced
        tensors = call.tensors
        outputs = self.runner((*tensors, *(tensors[p] for p in self.further)))
        for name, index in traced.reassigned.items():
            self.runner.store[name] = outputs[index]
        return traced.template.fill(outputs)

    def _use(self, runner: PartRunner) -> None:
        """Let this runner run next."""
        if self.again is not None:
            runner.attend(self._rescue)
        runner.drops_saved = self.drops_saved
        self.runners[:] = [runner, *(other for other in self.runners if other is not runner)]

    def _rescue(self, state: InFlight, tangents: dict[int, torch.Tensor], problem: Exception) -> Gradients:
        """Gradients of a forward whose own program was made for other gradients: another program runs forward again."""
        if not isinstance(problem, OtherTangents) or state.autocast is not None:
            raise problem
        if self.runner.watcher is not NOBODY:
            raise PartTangents(self.module, problem)
        if not self.runner.repeats(state):
            raise OtherTangents(
                f"{problem}. Forward can't run again for it, because what it read has been written to since"
            )
        return once_more_where_results_differ(self._by_another)(state, tangents, problem)

    def _by_another(self, state: InFlight, tangents: dict[int, torch.Tensor], problem: Exception) -> Gradients:
        runner = next((r for r in self.runners if r.takes(tangents, None)), None) or self._made_for(tangents, problem)
        state.spend()
        gradients = runner.repeat(state, tangents)
        self._use(runner)
        return gradients

    def _made_for(self, tangents: dict[int, torch.Tensor], problem: Exception) -> PartRunner:
        assert self.again is not None
        try:
            capture, program = self.again(self.module, {i: TangentLayout.of(str(i), t) for i, t in tangents.items()})
        except MemplanError as error:
            raise OtherTangents(f"{problem}. A plan for that fails, because {error}") from error
        if capture.traced.forward_ops != self.capture.traced.forward_ops:
            raise problem
        runner = PartRunner.of(self.module, capture, program)
        runner.check_first_runs()
        return runner

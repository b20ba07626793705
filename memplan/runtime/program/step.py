"""A planned training step of a whole model, ready to run: its key, its programs and the model that they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from memplan.capture.analysis.sized import at_sizes
from memplan.capture.arguments_key import ArgumentsKey
from memplan.capture.capture import Capture
from memplan.capture.guards import OtherRead
from memplan.capture.key import ModesKey, StepKey
from memplan.capture.ops.layout import Layout
from memplan.capture.ops.sizes import Numbers
from memplan.capture.trace.call import Call
from memplan.errors import MemplanError, Refused
from memplan.plans.plan import Plan
from memplan.runtime.program.checkpointed import checkpointing
from memplan.runtime.program.collectives import GRADIENT, Collectives
from memplan.runtime.program.execute import Runner
from memplan.runtime.program.sized_plan import SizedPlan

_BYTES_A_NODE = 4500  # of host memory that a step takes for each node of its trace, measured on a GPT-2
_UNPLANNED = Collectives.of([f"{GRADIENT}of an unplanned step, in autograd's order"])


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One plan of a model for one kind of call.

    - planned: the plan, at the sizes that it was searched for.
    - capture: without the tensors of the batch that it was captured with.
    - provisional: found in a hurry; planned in full when such a call comes again.
    - sized: the plan at other sizes, where the step serves those too.
    - others: steps with other schedules of the same capture, for longer and shorter calls.
    """

    planned: Plan
    capture: Capture
    runner: Runner
    provisional: bool = False
    sized: SizedPlan | None = None
    others: tuple[PlannedStep, ...] = ()

    @property
    def key(self) -> StepKey:
        """Tells which calls the step serves."""
        return self.capture.key

    @property
    def collectives(self) -> Collectives:
        return self.runner.collectives

    @property
    def plan(self) -> Plan:
        """The plan, at the sizes of the call that it ran for last."""
        return self.planned if self.sized is None else self.sized.at(self.sized.numbers)

    def plan_for(self, call: Call) -> Plan:
        """The plan, at the sizes of a call that the step serves."""
        return self.planned if self.sized is None else self.sized.at(self.numbers(call))

    @property
    def tangents(self) -> Mapping[int, Layout] | None:
        """The gradients with which backward starts, by output, as far as one has run; None where none has."""
        return self.runner.arrived or self.capture.options.tangents

    @property
    def kind(self) -> int:
        """A number that is the same for all steps of one capture."""
        return id(self.key.arguments)

    @property
    def kept_bytes(self) -> int:
        """About how much host memory the step takes."""
        traced = self.capture.traced
        return len(traced.fx_graph.nodes) * _BYTES_A_NODE + sum(c.nbytes for c in traced.constants.values())

    def numbers(self, call: Call) -> Numbers:
        """The values of what varies from call to call."""
        numbers = self.key.numbers(call)
        assert not isinstance(numbers, OtherRead)
        return numbers

    def peak_bytes(self, call: Call) -> int:
        return self.planned.peak_bytes if self.sized is None else self.sized.peak_bytes(self.numbers(call))

    def forward_ops(self, call: Call) -> tuple[str, ...]:
        """A signature of the forward pass of a call that the step serves."""
        traced = self.capture.traced
        return (traced if self.sized is None else at_sizes(traced, self.numbers(call))).forward_ops

    def mismatch(self, call: Call) -> str | None:
        """What keeps this step from serving a call, in words."""
        for owner, key, _ in self.capture.counters:
            if type(self.key.attributes(owner).get(key)) is not int:
                return f"{owner}.{key} is no number any more"
        return self.key.mismatch(call)

    def run(self, call: Call) -> Any:
        """What the model's forward would return."""
        traced, numbers = self.capture.traced, self.numbers(call)
        if self.sized is not None:
            self.sized.numbers = numbers
        attributes = [(self.key.attributes(owner), key) for owner, key in traced.template.attributes]
        for table, key in attributes:  # eager lets go of what they hold at some time in forward
            if key in table:
                table[key] = None
        for position in self.capture.options.requiring:
            call.tensors[position].requires_grad_()
        counters = [(self.key.attributes(owner), key, added) for owner, key, added in self.capture.counters]
        for table, key, added in counters:
            table[key] += added
        try:
            outputs = self.runner(call.tensors, numbers)
        except BaseException:  # forward may run again
            for table, key, added in counters:
                table[key] -= added
            raise
        for name, index in traced.reassigned.items():
            self.runner.store[name] = outputs[index]
        for (table, key), value in zip(attributes, traced.template.fill_attributes(outputs, numbers), strict=True):
            table[key] = value
        return traced.template.fill(outputs, numbers)


@dataclass(frozen=True, slots=True)
class EagerStep:
    """A step that runs the model's own forward, for calls that can't be captured and fit the budget as they are.

    checkpointed: paths of layers that PyTorch checkpoints in it.
    """

    forward: Callable[..., Any]
    arguments: ArgumentsKey
    modes: ModesKey
    checkpointed: tuple[str, ...] = ()
    plan: None = None
    provisional: bool = False
    sized: None = None
    others: tuple[PlannedStep, ...] = ()
    kept_bytes: int = 0
    collectives: Collectives = _UNPLANNED

    @staticmethod
    def of(
        model: nn.Module, forward: Callable[..., Any], call: Call, device_type: str, checkpointed: tuple[str, ...] = ()
    ) -> EagerStep:
        forward = checkpointing(model, checkpointed, forward)
        return EagerStep(forward, ArgumentsKey(call, None, traced=False), ModesKey(model, device_type), checkpointed)

    def mismatch(self, call: Call) -> str | None:
        return self.arguments.mismatch(call) or self.modes.mismatch()

    @property
    def kind(self) -> int:
        return id(self)

    def peak_bytes(self, call: Call) -> None:
        """Nobody knows it."""

    def run(self, call: Call) -> Any:
        return self.forward(*call.variadic, **call.arguments)


ServingStep = PlannedStep | EagerStep  # serves one kind of call of a model


def step_or_raise(found: ServingStep | Refused) -> ServingStep:
    """`or_raise` for either kind of step."""
    if isinstance(found, MemplanError):
        raise found
    return found

"""A step of which parts run planned while the rest runs eagerly.

Only while the model's forward runs, the `forward` of each part is exchanged: for its program, or for its own forward
under checkpointing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from memplan.capture.capture import model_device
from memplan.capture.key import ArgumentsKey, ModesKey
from memplan.capture.trace.call import Call, Forward
from memplan.capture.trace.forwards import forwards_exchanged
from memplan.errors import PlanMismatch
from memplan.logs import log
from memplan.plans.partial_plan import PartialPlan
from memplan.runtime.parts.part_step import PartStep
from memplan.runtime.parts.recompute import recomputed
from memplan.runtime.program.collectives import GRADIENT, Collectives
from memplan.runtime.program.decisions import OtherBranch

Way = PartStep | Literal["recompute", "keep"]  # how one call of a part runs
Ways = Mapping[nn.Module, Sequence[Way]]  # of all calls of each module in one forward, in order
Refused = Callable[[nn.Module, str], None]  # told of a call that its plan does not serve, and why


def run_in_parts(
    ways: Ways,
    forward: Forward,
    call: Call,
    refused: Refused = lambda module, problem: None,
) -> Any:
    """What the model's forward returns, with its parts run in these ways.

    refused: called for each call that is recomputed as a whole instead, with the reason.
    """
    forwards = {
        module: _exchanged(module, module.forward, of_module, refused)
        for module, of_module in ways.items()
        if any(way != "keep" for way in of_module)
    }
    with forwards_exchanged(forwards):
        return forward(*call.variadic, **call.arguments)


def _exchanged(module: nn.Module, original: Forward, ways: Sequence[Way], refused: Refused) -> Forward:
    """A forward for one forward of the model. It runs the calls of a module in these ways, one after the other."""
    left = iter(ways)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        way = next(left, "recompute")
        if way == "keep" or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if isinstance(way, PartStep):
            call = way.capture.reader.read(args, kwargs)
            problem = way.mismatch(call)
            if problem is None:
                try:
                    return way.run(call)
                except OtherBranch as error:
                    problem = str(error)
            refused(module, problem)
        return recomputed(module, original, -1, args, kwargs)

    return forward


@dataclass(eq=False)
class PartialStep:
    """A step of which parts run planned.

    - provisional: always False, because it is planned in full.
    - strict: a call that its plan does not serve is refused, because other ranks rely on the order of its gradients.
    """

    plan: PartialPlan
    ways: Ways
    model: nn.Module
    forward: Forward
    arguments: ArgumentsKey
    modes: ModesKey
    provisional: bool = False
    strict: bool = False
    _told: set[str] = field(default_factory=set)

    @staticmethod
    def of(plan: PartialPlan, ways: Ways, model: nn.Module, forward: Forward, call: Call) -> PartialStep:
        """The step for calls like this one."""
        modes = ModesKey(model, model_device(model).type)
        return PartialStep(plan, ways, model, forward, ArgumentsKey(call, None, traced=False), modes)

    @functools.cached_property
    def collectives(self) -> Collectives:
        """A signature that tells which parts run as programs, because those hand their gradients over all at once."""
        names = {m: n for n, m in self.model.named_modules()}
        programs = [
            f"{names[module]} (call {index})"
            for module, of_module in self.ways.items()
            for index, way in enumerate(of_module)
            if isinstance(way, PartStep)
        ]
        return Collectives.of([f"{GRADIENT}of a step planned in parts", *(f"{GRADIENT}of {p}" for p in programs)])

    def mismatch(self, call: Call) -> str | None:
        """What keeps this step from serving a call, in words. It serves any data in the call's arguments."""
        return self.arguments.mismatch(call) or self.modes.mismatch()

    def check(self, call: Call) -> None:
        """Raise PlanMismatch where the step does not serve a call."""
        problem = self.mismatch(call)
        if problem:
            raise PlanMismatch(f"this call does not match the plan: {problem}")

    def settle(self, model: nn.Module) -> None:
        """Does nothing: an eager forward sets all by itself."""

    def run(self, call: Call) -> Any:
        """What the model's forward returns."""
        return run_in_parts(self.ways, self.forward, call, self._tell)

    def bound_to(self, model: nn.Module, forward: Forward) -> PartialStep:
        """This step for a copy of the model, which has this forward of its own."""
        names = {m: n for n, m in self.model.named_modules()}
        ways = {
            other: tuple(w.bound_to(other, other.forward) if isinstance(w, PartStep) else w for w in of_module)
            for module, of_module in self.ways.items()
            for other in (model.get_submodule(names[module]),)
        }
        return PartialStep(
            self.plan, ways, model, forward, self.arguments, self.modes.rebound(model), strict=self.strict
        )

    def _tell(self, module: nn.Module, problem: str) -> None:
        name = next(n for n, m in self.model.named_modules() if m is module)
        if self.strict:
            raise PlanMismatch(
                f"the plan of a call of {name} does not hold: {problem}. Other ranks rely on the order in which its "
                "gradients arrive, so it can't run in another way. Plan without group= where no collective follows "
                "that order (DistributedDataParallel)"
            )
        if name not in self._told:
            self._told.add(name)
            log.warning("a call of %s is recomputed as a whole, because its plan does not hold: %s", name, problem)

"""What may be beside a planned step: gradients of earlier steps, other forwards in one backward; and who says so."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.trace.call import Call
from memplan.logs import log, show
from memplan.plans.plan import Plan
from memplan.problem.data import Surroundings
from memplan.runtime.program.step import PlannedStep, ServingStep
from memplan.units import format_bytes


class HeldGradients:
    """Gradients of earlier steps that are there as a call begins, of parameters that are on the device.

    - exist: whether there are any.
    - extra_bytes: of those that plans for one step alone do not count.
    """

    def __init__(self, model: nn.Module, host: Collection[str]) -> None:
        self.exist, self.extra_bytes = False, 0
        self._counting: list[ServingStep] = []  # steps whose plans count such
        self.belong_to(model, host)

    def belong_to(self, model: nn.Module, host: Collection[str]) -> None:
        """Look at the trained parameters of this model from now on. host: names of those that live on the host."""
        names = model.named_parameters()
        self._owners = [weakref.ref(p) for name, p in names if p.requires_grad and name not in host]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that have a gradient now."""
        return [p for owner in self._owners if (p := owner()) is not None and p.grad is not None]

    def look(self, extra: bool) -> None:
        """Note what there is as a call begins. extra: plans do not count such gradients, and could."""
        gradients = [p.grad for p in self.parameters]
        self.exist = bool(gradients)
        strided = (private.part_here(g) for g in gradients if g is not None and g.layout is torch.strided)
        self.extra_bytes = sum(g.nbytes for g in strided) if extra else 0

    def beyond(self, step: ServingStep, peak_bytes: int | None, limit_bytes: int | None) -> str | None:
        """Why the gradients do not fit beside a step whose plan does not count them; None where they do.

        peak_bytes: of the step. limit_bytes: the budget.
        """
        if not self.extra_bytes or peak_bytes is None or limit_bytes is None or self.are_counted_by(step):
            return None
        held_bytes = peak_bytes + self.extra_bytes
        if held_bytes <= limit_bytes:
            return None
        return (
            f"{format_bytes(self.extra_bytes)} of gradients are there when forward begins, which the plan does not "
            f"count: up to {format_bytes(held_bytes)} may be held, over the budget of {format_bytes(limit_bytes)}. "
            "Call optimizer.zero_grad(set_to_none=True) before forward, or say accumulate=True"
        )

    def are_counted_by(self, step: ServingStep) -> bool:
        planned_so = isinstance(step, PlannedStep) and step.planned.problem.accumulate
        return planned_so or any(step is known for known in self._counting)

    def are_counted_from_now_by(self, step: ServingStep, steps: Sequence[ServingStep]) -> None:
        """Note that a step's plan counts them. steps: all that are kept; notes of other steps are dropped."""
        self._counting = [*(s for s in self._counting if any(s is other for other in steps)), step]


def news_of_outputs(
    step: PlannedStep, call: Call, steps: Sequence[ServingStep], room_bytes: int, is_in_bytes: bool
) -> dict[str, str]:
    """A warning, by subject, where outputs of earlier calls are there while a step begins, and do not fit with it.

    - step, call: the one that begins, and what for. steps: all of the model's.
    - room_bytes: what the plan leaves room for already.
    - is_in_bytes: the budget is for what an allocator reserves, if one does.
    """
    runners = [known.runner for known in steps if isinstance(known, PlannedStep)]
    over = [runner for runner in runners if not any(state.saved for state in runner.waiting)]
    held_bytes = sum(size_bytes for runner in over for ref, size_bytes in runner.returned if not ref.expired())
    plan = step.planned
    limit_bytes, beyond_bytes = plan.problem.budget_bytes, held_bytes - room_bytes
    if limit_bytes is None or 100 * beyond_bytes <= limit_bytes:  # so few, a loss for instance, are no news
        return {}
    reserved = is_in_bytes and plan.problem.requests is not None  # else it counts that they go as forward ends
    planned_bytes = plan.reserved_bytes if reserved else plan.forward_peak_bytes
    most_bytes = beyond_bytes + planned_bytes * step.peak_bytes(call) // plan.peak_bytes
    text = (
        f"{format_bytes(held_bytes)} of outputs of earlier calls are there while the next one runs, which no plan "
        f"counts: up to {format_bytes(most_bytes)} may be held, over the budget of {format_bytes(limit_bytes)}. "
        "Let them go after backward (`del outputs`), or leave room with "
        f"memplan.Surroundings(held_bytes={held_bytes + room_bytes})"
    )
    return {"outputs": text} if most_bytes > limit_bytes else {}


def news_of_flight(
    step: PlannedStep, step_bytes: int, steps: Sequence[ServingStep], limit_bytes: int | None
) -> dict[str, str]:
    """Warnings, by subject, where forwards wait for their backward while another step begins.

    - step, step_bytes: the one that begins, and its peak. steps: all of the model's.
    - limit_bytes: the budget.
    """
    waiting = [s for known in steps if isinstance(known, PlannedStep) for s in known.runner.waiting if s.saved]
    if not waiting:
        return {}
    count, peak_bytes = len(waiting) + 1, step_bytes + sum(state.saved_bytes for state in waiting)
    news = {}
    if limit_bytes is not None and peak_bytes > limit_bytes:
        news["budget"] = (
            f"the plan is for one: they may hold {format_bytes(peak_bytes)}, over the budget of "
            f"{format_bytes(limit_bytes)}. Say in_flight={count}, or call backward after each forward"
        )
    if step.key.autocast.enabled and step.key.autocast.cache_enabled:
        news["casts"] = (
            "in one context of autocast eager shares casts of parameters between them, which a plan does not: the last "
            "bits of gradients may differ. Say cache_enabled=False to torch.autocast, and nobody shares any"
        )
    return {subject: f"{count} forwards wait for their backward at once, and {text}" for subject, text in news.items()}


class SharedBackward:
    """Notices a backward that goes through several forwards, or through parameters beside the planned forward.

    Autograd adds what each use of a parameter gives to the gradient that is there, one by one. A plan first adds up
    what the uses in its own forward give, and hands over the sum.
    """

    def __init__(self) -> None:
        self._number, self._held = -1, False

    def news(self, step: PlannedStep, held: Sequence[nn.Parameter]) -> Mapping[str, str]:
        """Warnings, by subject, as the backward of a step begins.

        held: parameters with gradients of an earlier backward.
        """
        before, self._number = self._number, private.backward_in_progress()
        surfaces, summed = step.runner.program.grads == "surface", step.capture.traced.summed
        news = {}
        if self._number != before:
            self._held = surfaces and bool(held)
            if self._held and any(private.also_arrives_otherwise(p) for p in held):
                news["order beside"] = f"through parameters beside it, and {_ORDER}"
            if surfaces and any(private.also_arrives_otherwise(step.runner.store[name]) for name in summed):
                news["sums beside"] = f"through parameters beside it, and {_sums(summed)}"
            store = step.runner.store
            if surfaces and any(private.waits_for_others(store.parameter(name)) for name in store):
                news["several"] = f"parameters with hooks of register_multi_grad_hook, {_SEVERAL}"
        else:
            if self._held:
                news["order"] = f"others, and {_ORDER}"
            if summed:
                news["sums"] = f"others, and {_sums(summed)}, or call backward for each"
        return {subject: f"one backward goes through a planned forward and {text}" for subject, text in news.items()}


_ORDER = (
    'adds to gradients that are there already in another order than eager does: last bits may differ. Say grads="edges"'
)
_SEVERAL = 'which are called for each few gradients that the plan hands over. Say grads="edges"'


def _sums(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"adds up the gradients of {names[0]}{more}, which forward uses more than once, in another order than eager "
        "does: last bits may differ. Put all of it into one plan with loss_fn="
    )


class Voice:
    """Says things of one model, each once. said: subjects that have had a line.

    surroundings: if there is an engine, it shows what it runs. Of several ranks, the first one speaks.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self.said: set[str] = set()
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._shows = surroundings == Surroundings() and (not ranks or torch.distributed.get_rank() == 0)

    def is_first(self, subject: str) -> bool:
        """Whether there has been no word of this. From now on there has."""
        first = subject not in self.said
        self.said.add(subject)
        return first

    def warn(self, news: Mapping[str, str]) -> None:
        for subject, text in news.items():
            if self.is_first(subject):
                log.warning("%s", text)

    def show_plan(self, plan: Plan, took_s: float) -> None:
        """Show the first plan. took_s: seconds of planning it."""
        if self.is_first("plan"):
            (show if took_s and self._shows else log.info)(f"{plan.summary}; planned in {took_s:.1f} s")

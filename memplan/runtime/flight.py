"""What there is to be said where several planned forwards wait for their backward at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from memplan.graph import private_api as private
from memplan.runtime.step import Step, WholeStep
from memplan.units import format_bytes


def news_of_flight(step: WholeStep, steps: Sequence[Step], limit_bytes: int | None) -> dict[str, str]:
    """By subject, what is to be known when a step begins. steps: all of the model's. limit_bytes: the budget."""
    waiting = [s for known in steps if isinstance(known, WholeStep) for s in known.runner.waiting if s.saved]
    if not waiting:
        return {}
    count, peak_bytes = len(waiting) + 1, step.plan.peak_bytes + sum(state.saved_bytes for state in waiting)
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
    """Notices backward passes that go through several forwards, or through parameters beside the planned forward.

    Autograd adds up, one by one, what all uses of a parameter give, and adds that to the gradient that is there. A plan
    adds up what the uses in its own forward give, and hands that over.
    """

    def __init__(self) -> None:
        self._number, self._held = -1, False

    def news(self, step: WholeStep, held: Sequence[nn.Parameter]) -> Mapping[str, str]:
        """By subject, what is to be known when the backward of a step begins.

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
        else:
            if self._held:
                news["order"] = f"others, and {_ORDER}"
            if summed:
                news["sums"] = f"others, and {_sums(summed)}, or call backward for each"
        return {subject: f"one backward goes through a planned forward and {text}" for subject, text in news.items()}


_ORDER = (
    'adds to gradients that are there already in another order than eager does: last bits may differ. Say grads="edges"'
)


def _sums(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"adds up the gradients of {names[0]}{more}, which forward uses more than once, in another order than eager "
        "does: last bits may differ. Put all of it into one plan with loss_fn="
    )

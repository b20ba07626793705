"""What there is to be said where a plan for one forward meets others that wait for their backward."""

from __future__ import annotations

from collections.abc import Sequence

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
    if step.runner.program.grads == "surface":
        news["order"] = (
            "one backward through them adds to gradients that are there already in another order than eager does. Say "
            'grads="edges"'
        )
    if step.key.autocast.enabled and step.key.autocast.cache_enabled:
        news["casts"] = (
            "in one context of autocast eager shares casts of parameters between them, which a plan does not: the last "
            "bits of gradients may differ. Say cache_enabled=False to torch.autocast, and nobody shares any"
        )
    return {subject: f"{count} forwards wait for their backward at once, and {text}" for subject, text in news.items()}

"""The batch and the length that suit a budget best, from a few plans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan.api import named_budget, plan_or_refusal
from memplan.capture.trace.call import CallReader, Sample
from memplan.errors import BudgetInfeasible, UnsupportedModel
from memplan.planning.remedies import PlanAt, largest_that_fits
from memplan.plans.plan import Plan
from memplan.problem.budgets import parsed
from memplan.torch_private import pytree
from memplan.units import format_bytes, format_seconds

MakeSample = Callable[[int], Sample]

_MOST = 1 << 20  # rows, or tokens
_WORTH = 0.01  # of the speed: for less, the smaller batch is taken, which leaves more room
_SLOWER = 0.05  # than the fastest so far: still smaller batches will not be faster


@dataclass(frozen=True, slots=True)
class SizedChoice:
    """A size that fits, and the others that were tried.

    - size: rows of a micro-batch, or the length.
    - accumulation: micro-batches to one step of the optimizer.
    - plan: the plan at that size; `apply(model, sample, plan=choice.plan)` runs it.
    - tried: plans by size. Their peaks and times are why.
    - tokens: of the sample at that size: elements of its `input_ids` that `attention_mask` does not leave out, packed
      rows and rows without padding included. None for a sample without `input_ids`.
    """

    size: int
    accumulation: int
    plan: Plan
    tried: dict[int, Plan]
    tokens: int | None = None

    def __str__(self) -> str:
        times = "" if self.tokens is None else f", {self.tokens} tokens a micro-batch"
        times += f", {self.accumulation} times for each step" if self.accumulation > 1 else ""
        rows = [
            f"  {size:>7d}  peak {format_bytes(found.peak_bytes):>9s}  {format_seconds(found.time_s):>8s} each, "
            f"{size / found.time_s:.4g} a second ({found.overhead:+.1%} for the budget)"
            f"{' <- taken' if size == self.size else ''}"
            for size, found in sorted(self.tried.items())
        ]
        return "\n".join([f"{self.size}{times}", *rows])


def largest_batch(
    model: nn.Module,
    make_sample: MakeSample,
    budget: int | str | None = None,
    effective_batch: int | None = None,
    **settings: Any,
) -> SizedChoice:
    """The micro-batch with which training goes through most rows a second within a budget.

        choice = memplan.largest_batch(model, lambda rows: torch.zeros(rows, 3, 224, 224), "16GiB", effective_batch=64)
        print(choice)                                       # what was tried, and how fast that is
        memplan.apply(model, make_sample(choice.size), "16GiB", accumulate=choice.accumulation > 1)

    The largest batch that fits is often not the fastest: it recomputes more. So the largest is looked for, and then
    smaller ones, as long as they are faster.

    - make_sample: gives a sample with so many rows, of any number.
    - budget: bytes, "16GiB", "auto" or None, as for `apply`.
    - effective_batch: rows to one step of the optimizer: the micro-batch divides it, and gradients are added up. None:
      any micro-batch will do, without accumulation.
    - settings: those of `plan`.

    Raises BudgetInfeasible where not even one row fits.
    """
    if effective_batch is not None and (type(effective_batch) is not int or effective_batch < 1):
        raise ValueError(f"effective_batch is a number of rows, 1 or more, got {effective_batch!r}")
    limit_bytes = _bytes_of(budget, model, settings)
    tried: dict[int, Plan] = {}

    def plan_at(rows: int) -> Plan | BudgetInfeasible:
        adds_up = settings.get("accumulate", False) or (effective_batch or rows) > rows
        return _planned(model, make_sample, rows, limit_bytes, {**settings, "accumulate": adds_up}, tried)

    most, floors = effective_batch or _MOST, dict[int, int]()
    # A whole batch adds up no gradients, so it may fit where smaller ones do not.
    whole = None if effective_batch is None else plan_at(effective_batch)
    if isinstance(whole, BudgetInfeasible):
        floors[most] = whole.floor_bytes
    size = most if isinstance(whole, Plan) else _found(plan_at, limit_bytes, most, floors)[0]
    size = size if effective_batch is None else _divisor(effective_batch, size)
    speeds = dict[int, float]()
    while size:
        found = plan_at(size)
        if isinstance(found, BudgetInfeasible):  # gradients of earlier micro-batches, which a whole batch does not have
            break
        speeds[size] = size / found.time_s
        if speeds[size] < (1 - _SLOWER) * max(speeds.values()):
            break
        size = size // 2 if effective_batch is None else _divisor(effective_batch, size - 1)
    best = min(size for size, speed in speeds.items() if speed >= (1 - _WORTH) * max(speeds.values()))
    accumulation = 1 if effective_batch is None else effective_batch // best
    return SizedChoice(best, accumulation, tried[best], tried, _tokens(model, make_sample(best), settings))


def _found(plan_at: PlanAt, limit_bytes: int, most: int, floors: dict[int, int]) -> tuple[int, Plan]:
    """The largest size that fits, with its plan. Raises BudgetInfeasible."""
    found = largest_that_fits(plan_at, limit_bytes, most, floors)
    if found is None:
        refusal = plan_at(1)
        assert isinstance(refusal, BudgetInfeasible)
        raise refusal
    return found


def _planned(
    model: nn.Module,
    make_sample: MakeSample,
    size: int,
    limit_bytes: int,
    settings: dict[str, Any],
    tried: dict[int, Plan],
) -> Plan | BudgetInfeasible:
    """The plan at a size, which is noted in `tried`, or the refusal."""
    if size in tried:
        return tried[size]
    if not callable(make_sample):
        raise TypeError(f"make_sample is a function from a size to a sample, got {type(make_sample).__name__}")
    sample = make_sample(size)
    shapes = [tuple(t.shape) for t in pytree.tree_leaves(sample) if isinstance(t, torch.Tensor)]
    if not any(size in shape for shape in shapes):
        raise ValueError(
            f"make_sample({size}) has no tensor with a size of {size}, but shapes {shapes}. Make samples of any size, "
            "for example with torch.zeros"
        )
    found = plan_or_refusal(model, sample, limit_bytes, **{"on_infeasible": "raise", **settings})
    if isinstance(found, UnsupportedModel):
        raise found
    if isinstance(found, Plan):
        tried[size] = found
    return found


def longest_sequence(
    model: nn.Module, make_sample: MakeSample, budget: int | str | None = None, most: int = _MOST, **settings: Any
) -> SizedChoice:
    """The longest sequence with which a training step fits a budget, and what that costs.

        choice = memplan.longest_sequence(model, lambda length: torch.zeros(1, length, dtype=torch.long), "16GiB")

    - make_sample: gives a sample of that length, up to the most.
    - most: the longest that model and data allow.
    - budget, settings: as for `largest_batch`.

    Raises BudgetInfeasible where not even a length of 1 fits.
    """
    limit_bytes = _bytes_of(budget, model, settings)
    tried: dict[int, Plan] = {}
    plan_at = functools.partial(_planned, model, make_sample, limit_bytes=limit_bytes, settings=settings, tried=tried)
    size, best = _found(plan_at, limit_bytes, most, {})
    return SizedChoice(size, 1, best, tried, _tokens(model, make_sample(size), settings))


def _bytes_of(budget: int | str | None, model: nn.Module, settings: dict[str, Any]) -> int:
    """The budget in bytes. Raises ValueError for one that is not."""
    named = named_budget(budget, model, settings.get("device"))
    found = parsed(named)  # type: ignore[arg-type]  # no Budget
    if not isinstance(found, int):
        raise ValueError(f"give the budget in bytes, for example '16GiB': {named!r} is another one for each size")
    return found


def _tokens(model: nn.Module, sample: Sample, settings: dict[str, Any]) -> int | None:
    """How many tokens a sample has, without padding; None if it has no `input_ids`."""
    loss_fn = settings.get("loss_fn")
    call = CallReader(model.forward if loss_fn is None else functools.partial(loss_fn, model)).read_sample(sample)
    named = {name.rpartition(".")[2]: tensor for name, tensor in zip(call.names, call.tensors, strict=True)}
    ids, mask = named.get("input_ids"), named.get("attention_mask")
    if ids is None or mask is None or mask.shape != ids.shape:
        return None if ids is None else ids.numel()
    return int((mask != 0).sum())


def _divisor(whole: int, most: int) -> int:
    """The largest divisor of a number up to a bound; 0 for a bound of 0."""
    return next((size for size in range(min(whole, most), 0, -1) if whole % size == 0), 0)

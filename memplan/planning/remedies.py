"""What would make a step fit that does not: changes that are tried, each by a plan of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from memplan.capture.trace.call import Call, Sample
from memplan.errors import BudgetInfeasible, Refused, Remedy, UnsupportedModel
from memplan.logs import log, quiet, show
from memplan.losses import chunked_loss, takes_chunked_loss
from memplan.planning.limits import memory_bytes
from memplan.planning.settings import Settings
from memplan.plans.plan import Plan
from memplan.problem.data import Link
from memplan.units import format_bytes

PlanWith = Callable[[Settings, Call | Sample], Plan | Refused]  # plans a call by other settings
PlanAt = Callable[[int], Plan | BudgetInfeasible]  # the plan at a size, or the refusal

_QUICK = "rotor"  # how remedies are looked for that take several searches, unless the user says how
_LINK = Link(25e9, 25e9)  # of PCI Express 4.0 with 16 lanes, for a device that is only described
_OF_HOST = 0.8  # of the machine's memory may be taken for what is offloaded
_TRIES = 8
_EVEN = ((1024, 64), (128, 16), (32, 4))  # sizes from the first on are multiples of the second
_GROWTH = 8  # a size that is planned next is at most so many times as large as one that fits
_CLOSE = 0.9  # a size that fits is as good as one that is larger by less


class Remedies:
    """Looks for changes with which a call fits its budget.

    - refusal: the error without any.
    - limit_bytes: the budget in bytes.
    """

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        call: Call,
        refusal: BudgetInfeasible,
        limit_bytes: int,
        plan_with: PlanWith,
    ) -> None:
        self._settings = dataclasses.replace(settings, budget=limit_bytes, on_infeasible="raise")
        self._quick = dataclasses.replace(self._settings, config=_QUICK if settings.config is None else settings.config)
        self._model, self._call, self.refusal, self._limit_bytes = model, call, refusal, limit_bytes
        self._plan_with = plan_with
        self._vain: list[str] = []

    def error(self) -> BudgetInfeasible:
        """The refusal with what was found, the cheapest first, and with what was tried in vain."""
        show(f"the step does not fit {format_bytes(self._limit_bytes)}; looking for what would make it fit")
        with quiet():
            found = tuple(sorted(self._found(), key=lambda remedy: remedy.overhead))
        lines = [
            f"  {r.change:44s} peak {format_bytes(r.peak_bytes):>9s}, {r.overhead:+.1%} time{r.note and f'; {r.note}'}"
            for r in found
        ]
        text = "\nIt fits with (time at most, against the unplanned step):" if found else ""
        text += "".join(f"\n{line}" for line in lines)
        if self._vain:
            text += f"\nNone of these is enough (least peak): {', '.join(self._vain)}"
        return self.refusal.saying(text, found)

    def _found(self) -> Iterator[Remedy]:
        for look in (
            self._on_host, self._update_in_backward, self._uncached, self._chunked, self._half_precision, self._fused,
            self._smaller_batch, self._shorter,
        ):  # fmt: skip
            try:
                yield from look()
            except Exception as error:  # if a changed model fails in any way, the refusal is raised
                log.debug("%s is no remedy: %s", look.__name__, error)

    def _on_host(self) -> Iterator[Remedy]:
        settings = self._quick
        if settings.most_on_host is not None or settings.surroundings.keeps_parameters:
            return
        measured = settings.costs == "measure"
        most_bytes = int(_OF_HOST * memory_bytes()) if measured else 1 << 50
        link = settings.link or (None if measured else _LINK)
        settings = dataclasses.replace(settings, host_budget=most_bytes, link=link)
        frozen = settings.in_flight == 1 and any(not p.requires_grad for p in self._model.parameters())
        plan = self._tried("host_budget=", settings)
        if plan is None:
            return
        more = ""
        if frozen:
            staying = self._tried("keep_frozen=", dataclasses.replace(settings, keep_frozen=True))
            if staying is not None and staying.time_s < plan.time_s:
                plan, more = staying, ", keep_frozen=True"
        unit, word = (1 << 30, "GiB") if plan.host_bytes > 1 << 30 else (1 << 20, "MiB")
        size = f"{math.ceil(plan.host_bytes * 1.02 / unit)}{word}"
        note = "" if measured or self._settings.link else f"at {_LINK.to_host_bytes_per_s / 1e9:.0f} GB/s to the host"
        yield self._remedy(f'host_budget="{size}"{more}', plan, note)

    def _update_in_backward(self) -> Iterator[Remedy]:
        settings = self._settings
        gradient_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        missing_bytes = self.refusal.floor_bytes - self._limit_bytes
        if settings.optimizer is None or settings.update == "backward" or gradient_bytes < missing_bytes:
            return
        yield from self._with('update="backward"', dataclasses.replace(settings, update="backward"))

    def _uncached(self) -> Iterator[Remedy]:
        """Without keys and values for generation, which models of transformers return also while they are trained."""
        call = self._call
        caches = getattr(getattr(self._model, "config", None), "use_cache", False) is True
        if self._settings.loss_fn is None and caches and not call.variadic and "use_cache" not in call.arguments:
            sample = {**call.arguments, "use_cache": False}
            yield from self._with("the argument use_cache=False", self._settings, call=sample)

    def _chunked(self) -> Iterator[Remedy]:
        if self._settings.loss_fn is None and takes_chunked_loss(self._model, self._call.arguments):
            yield from self._with(
                "loss_fn=memplan.chunked_loss()",
                dataclasses.replace(self._settings, loss_fn=chunked_loss()),
                "logits in chunks: rounds otherwise",
            )

    def _fused(self) -> Iterator[Remedy]:
        if self._settings.kernels == "fused" or self._settings.shards is not None:
            return
        settings, note = self._settings, "rounds otherwise"
        if settings.costs == "measure":  # which would compile them
            settings, note = dataclasses.replace(settings, costs="estimate"), "estimated; rounds otherwise"
        yield from self._with('kernels="fused"', dataclasses.replace(settings, kernels="fused"), note)

    def _half_precision(self) -> Iterator[Remedy]:
        kind = self._call.device_type
        if torch.is_autocast_enabled(kind) or all(p.dtype != torch.float32 for p in self._model.parameters()):
            return
        with torch.autocast(kind, torch.bfloat16):
            yield from self._with("torch.autocast in bfloat16", self._settings, "rounds otherwise")

    def _smaller_batch(self) -> Iterator[Remedy]:
        settings, call = self._quick, self._call
        batches = {t.shape[0] for t in call.tensors if t.dim()}
        whole = max(batches) if len(batches) == 1 else 0
        if whole < 2 or settings.update == "backward" or settings.in_flight > 1:
            return
        settings = dataclasses.replace(settings, accumulate=True)

        def plan_at(size: int) -> Plan | BudgetInfeasible:
            return self._planned(settings, _cut(call, [[(0, size)] if t.dim() else [] for t in call.tensors]))

        found = self._largest("a batch", whole, plan_at)
        if found is None:
            return
        size, plan = found
        half = size // 2  # at the largest that fits, much is recomputed
        smaller = plan_at(half) if half else self.refusal
        if isinstance(smaller, Plan) and smaller.time_s / half < plan.time_s / size:
            size, plan = half, smaller
        remedy = self._remedy(f"batches of {size} of {whole}, accumulate=True", plan, "", whole / size)
        # small batches take no less for each row: where they do, ops were timed while the machine was less busy
        yield dataclasses.replace(remedy, overhead=max(remedy.overhead, plan.overhead))

    def _shorter(self) -> Iterator[Remedy]:
        call = self._call  # tensors of integers are tokens; all sizes that are as long, but the first, become shorter
        whole = max((t.shape[1] for t in call.tensors if t.dim() > 1 and not t.is_floating_point()), default=0)
        if whole < 2:
            return

        def plan_at(size: int) -> Plan | BudgetInfeasible:
            cuts = [[(i, size) for i in range(1, t.dim()) if t.shape[i] == whole] for t in call.tensors]
            return self._planned(self._quick, _cut(call, cuts))

        found = self._largest("a length", whole, plan_at)
        if found is not None:
            size, plan = found
            yield Remedy(f"a length of {size} instead of {whole}", plan.peak_bytes, plan.overhead)

    def _largest(self, what: str, whole: int, plan_at: PlanAt) -> tuple[int, Plan] | None:
        floors = {whole: self.refusal.floor_bytes}
        found = largest_that_fits(plan_at, self._limit_bytes, whole - 1, floors)
        if found is None:
            smallest = min(floors)
            self._vain.append(f"{what} of {smallest} ({format_bytes(floors[smallest])})")
        return found

    def _with(
        self, way: str, settings: Settings, note: str = "", call: Call | Sample | None = None
    ) -> Iterator[Remedy]:
        plan = self._tried(way, settings, call)
        if plan is not None:
            yield self._remedy(way, plan, note)

    def _tried(self, change: str, settings: Settings, call: Call | Sample | None = None) -> Plan | None:
        """The plan with a change of settings, or of the call; None where there is none."""
        found = self._planned(settings, self._call if call is None else call)
        if isinstance(found, Plan):
            return found
        self._vain.append(f"{change} ({format_bytes(found.floor_bytes)})")
        return None

    def _planned(self, settings: Settings, call: Call | Sample) -> Plan | BudgetInfeasible:
        found = self._plan_with(settings, call)
        if isinstance(found, UnsupportedModel):
            raise found
        return found

    def _remedy(self, change: str, plan: Plan, note: str, times: float = 1.0) -> Remedy:
        """times: how often such a step runs for the work of one that does not fit."""
        measured = plan.problem.costs.source != "estimated"
        like = measured == (self._settings.costs == "measure")  # else seconds are not those of the unplanned step
        baseline_s = (like and self.refusal.baseline_time_s) or plan.baseline_time_s * times
        return Remedy(change, plan.peak_bytes, plan.time_s * times / baseline_s - 1 if baseline_s else 0.0, note)


def _cut(call: Call, cuts: Sequence[Sequence[tuple[int, int]]]) -> Call:
    """The call with smaller tensors. cuts: of each, which dimensions become how large."""
    tensors = []
    for tensor, dims in zip(call.tensors, cuts, strict=True):
        part = tensor.detach()
        for dim, size in dims:
            part = part.narrow(dim, 0, size)
        tensors.append(part.contiguous().requires_grad_(tensor.requires_grad) if dims else tensor)
    return call.filled(tensors)


def largest_that_fits(
    plan_at: PlanAt, limit_bytes: int, most: int, floors: dict[int, int] | None = None
) -> tuple[int, Plan] | None:
    """The largest size up to `most` at which a plan was found, with the plan. None where none was found.

    Smallest peaks grow about linearly with batches, and a little faster with lengths. So each try is where the line
    through those of the largest size that fits and the smallest that does not meets the limit.

    floors: smallest peaks in bytes that are known beforehand, by size. Those of all tries are added to it.
    """
    floors, best = {} if floors is None else floors, None
    for _ in range(_TRIES):
        fit = sorted(size for size, floor in floors.items() if floor <= limit_bytes)
        over = sorted(size for size, floor in floors.items() if floor > limit_bytes)
        if len(floors) < 2:
            size = 2 * fit[0] if fit else max(1, over[0] // 2) if over else 1
        else:
            low, high = (fit[-1], over[0]) if fit and over else (over[0], over[1]) if over else (fit[-2], fit[-1])
            slope = max(1.0, (floors[high] - floors[low]) / (high - low))
            size = int((low + (limit_bytes - floors[low]) / slope) * 0.99)
            size = max(1, min(size, over[0] - 1 if over else _GROWTH * fit[-1]))
        size = min(most, size)
        unit = next((unit for least, unit in _EVEN if size >= least), 1)
        size -= size % unit  # which kernels like
        if size in floors or (best is not None and size * _CLOSE < best[0]):
            break
        found = plan_at(size)
        if isinstance(found, BudgetInfeasible):
            floors[size] = max(found.floor_bytes, limit_bytes + 1)
        else:
            floors[size], best = min(found.floor_bytes, limit_bytes), (size, found)
    return best

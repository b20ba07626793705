"""What a step may hold on its device: the budget in bytes, and the margin below it; the budget where none is named."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from memplan import torch_private as private
from memplan.costs.known_costs import known_margin, remember_margin
from memplan.logs import log
from memplan.planning.settings import Settings
from memplan.problem.budgets import budget_bytes_of, device_bytes
from memplan.units import format_bytes


class Limits:
    """The budget of all steps of one model.

    - budget_bytes: the budget in bytes. None until the first plan.
    - learnt: how much more than predicted the model has been seen to hold on its device, as a fraction. Later processes
      read it from disk.
    - after_error: a larger margin, in this process, because a step ran out of memory.
    - accumulate: plans count gradients of earlier backward passes.
    - keeps_written: copies are kept of buffers that forward writes to, so that it can run again (on_oom="replan").
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self.budget_bytes: int | None = None
        self.learnt = self.after_error = 0.0
        self.accumulate, self.keeps_written = settings.accumulate, False
        if settings.in_flight > 1:  # the first backward's gradients are there while the others run
            self.accumulate = not settings.surroundings.takes_gradients
        self._with_gradients: int | None = None  # `budget_bytes` of plans that count gradients where others do not

    @property
    def margin(self) -> float:
        """How much more than predicted a step may hold, as a fraction of its peak."""
        return max(self.learnt, self.after_error)

    @property
    def known_bytes(self) -> int | None:
        """The budget of the device in bytes; None where it depends on the step and there is no plan yet."""
        budget = self._settings.budget
        return self.budget_bytes or (None if budget is None else device_bytes(budget))

    @property
    def is_in_bytes(self) -> bool:
        """Whether the budget is one of bytes, which a device has, and no figure relative to the step."""
        budget = self._settings.budget
        return budget is None or device_bytes(budget) is not None

    def fix_budget(self, unplanned_bytes: int, resident_bytes: int, floor_bytes: int) -> int:
        """The budget in bytes. It stays until a method here changes it. The figures are of the step that is planned.

        With on_infeasible="min" it is at least `floor_bytes`.
        """
        if self.budget_bytes is None:
            budget = self._settings.budget
            assert budget is not None
            self.budget_bytes = budget_bytes_of(budget, unplanned_bytes, resident_bytes, floor_bytes)
            if isinstance(budget, str):
                log.info("the budget %r is %s", budget, format_bytes(self.budget_bytes))
        return self.raised_to(floor_bytes)

    def raised_to(self, floor_bytes: int) -> int:
        """The budget in bytes, which on_infeasible="min" raises to the floor of a step that can't do with less."""
        assert self.budget_bytes is not None
        if self._settings.on_infeasible == "min" and self.budget_bytes < floor_bytes:
            log.warning(
                "no schedule fits %s; the budget is raised to the least, %s",
                format_bytes(self.budget_bytes), format_bytes(floor_bytes),
            )  # fmt: skip
            self.budget_bytes = floor_bytes
        return self.budget_bytes

    def reset(self, budget_bytes: int | None) -> None:
        """Set the budget. None: it is not known."""
        self.budget_bytes = budget_bytes

    def less_margin(self, limit_bytes: int) -> int:
        """What a plan may peak at, so that a step stays within the limit with the margin added."""
        return int(limit_bytes / (1 + self.margin))

    def recall(self, device: torch.device | None) -> None:
        """Take the margin that earlier processes have learnt for such a model on a device; None is the model's own."""
        self.learnt = known_margin(self._model, device)

    def set_margin(self, margin: float) -> None:
        """Use this margin from now on, in this process."""
        self.after_error = margin

    def learn(self, device: torch.device, margin: float) -> None:
        """Use this margin for the model from now on, in later processes too."""
        self.learnt = margin
        remember_margin(self._model, device, margin)

    @property
    def may_hold_gradients(self) -> bool:
        """Whether forward may begin with gradients of earlier steps that plans could count, and do not yet."""
        shards, surroundings = self._settings.shards, self._settings.surroundings
        engine_has_them = surroundings.takes_gradients or (shards is not None and shards.takes_gradients)
        return not (self.accumulate or engine_has_them or self._settings.update == "backward")

    @contextlib.contextmanager
    def counting_held_gradients(self) -> Iterator[None]:
        """Within this context, plans count gradients of earlier steps.

        A budget that is a fraction is then one of the unplanned peak with these gradients.
        """
        before, known = self.budget_bytes, self.is_in_bytes
        self.accumulate, self.budget_bytes = True, before if known else self._with_gradients
        try:
            yield
        finally:
            if not known:
                self._with_gradients, self.budget_bytes = self.budget_bytes, before
            self.accumulate = False


AUTOMATIC = "auto"
_RESERVE = 0.1  # of the device: for libraries, and what other processes come to need
_RESERVE_FOR_PIECES = 0.25  # the same, and memory that lies in pieces between blocks


def budget_of_environment() -> str | None:
    """`MEMPLAN_BUDGET`, for calls that name no budget; None where it is not set. Raises ValueError where it is none."""
    given = os.environ.get("MEMPLAN_BUDGET", "").strip()
    if given and given != AUTOMATIC:
        try:
            device_bytes(given)
        except ValueError as error:
            raise ValueError(f"MEMPLAN_BUDGET is {given!r}: {error}") from error
    return given or None


def automatic_bytes(device: torch.device) -> int:
    """What a step may hold on a device, in bytes, less a reserve (`reserve_of`).

    On a GPU: what is free, and what this process holds already. On a CPU: physical memory, or the limit of the
    container.
    """
    if device.type == "cuda":
        free_bytes, whole_bytes = torch.cuda.mem_get_info(device)
        room_bytes = free_bytes + torch.cuda.memory_reserved(device)
    else:
        room_bytes = whole_bytes = memory_bytes()
    reserve = reserve_of(device)
    budget_bytes = max(1, room_bytes - int(reserve * whole_bytes))
    log.info(
        "the budget 'auto' is %s: %s of %s %s, less a reserve of %d%%",
        format_bytes(budget_bytes), format_bytes(room_bytes), device, "free or this process's" if
        device.type == "cuda" else "memory", 100 * reserve,
    )  # fmt: skip
    return budget_bytes


def reserve_of(device: torch.device) -> float:
    """The share of a device that the budget "auto" leaves: a tenth, more where the allocator wastes memory."""
    wastes = device.type == "cuda" and not private.can_expand_segments(device)
    return _RESERVE_FOR_PIECES if wastes else _RESERVE


def prepare_allocator(device: torch.device) -> None:
    """On CUDA, keep PyTorch's allocator from leaving memory in pieces that no block fits. Warns where that can't be."""
    if device.type != "cuda" or private.segments_expand():
        return
    if private.can_expand_segments(device):
        private.expand_segments()
        log.info("PyTorch's allocator has expandable_segments:True from now on, so that memory is not left in pieces")
    else:
        log.warning(
            "PyTorch's allocator may leave a fifth of the device in pieces that fit nothing: start the program with "
            "PYTORCH_ALLOC_CONF=expandable_segments:True where that works, or choose a lower budget"
        )


def memory_bytes() -> int:
    """Physical memory, or less where a container is limited to that."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found = min(found, int(Path(path).read_text()))
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
    return found

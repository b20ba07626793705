"""Everything memplan raises on purpose. A message says what was got, what the limit is, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


class MemplanError(Exception):
    """Base class of every error below."""


def or_raise(found: _T | MemplanError) -> _T:
    """What was found. Raises it if it is an error, which layers hand on as a result."""
    if isinstance(found, MemplanError):
        raise found
    return found


class UnsupportedModel(MemplanError):
    """The training step can't be captured exactly; names the module, the source line and a way out."""


class NothingToTrain(UnsupportedModel):
    """No output of the model depends on anything that requires grad."""


class PlanMismatch(MemplanError):
    """A call, or a plan file, does not fit the plan: something that the capture depended on has changed."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with which a step was found to fit the budget.

    - change: the argument to paste, or what to do, in words.
    - peak_bytes: what the step then peaks at.
    - overhead: the time that it takes at most beyond that of the unplanned step, for equal work (0.31 is +31%).
    - note: what to know of it, in words.
    """

    change: str
    peak_bytes: int
    overhead: float
    note: str = ""


class BudgetInfeasible(MemplanError, RuntimeError):
    """No schedule that memplan knows fits the budget.

    What looks for a batch size that fits (`auto_find_batch_size` of transformers, `find_executable_batch_size` of
    accelerate) takes it for the out-of-memory error that it prevents.

    - floor_bytes: the smallest budget that can be met (where the device has no room even to time single ops, what the
      largest of them takes).
    - floor_overhead: what that costs in time (0.31 is +31%; infinite where it is not known).
    - baseline_time_s: seconds of the unplanned step; None where they are not known.
    - remedies: changes with which the step was found to fit, the cheapest first; empty where none was looked for.
    """

    def __init__(
        self,
        message: str,
        floor_bytes: int,
        floor_overhead: float = float("inf"),
        baseline_time_s: float | None = None,
        remedies: tuple[Remedy, ...] = (),
    ) -> None:
        super().__init__(message)
        self.floor_bytes, self.floor_overhead = floor_bytes, floor_overhead
        self.baseline_time_s, self.remedies = baseline_time_s, remedies

    def saying(self, more: str, remedies: tuple[Remedy, ...] = ()) -> BudgetInfeasible:
        """This error with more text, and with further remedies."""
        return BudgetInfeasible(
            f"{self}{more}", self.floor_bytes, self.floor_overhead, self.baseline_time_s, (*self.remedies, *remedies)
        )


Refused = BudgetInfeasible | UnsupportedModel  # what the planning layers return in place of a plan or a step


class IllegalSchedule(MemplanError):
    """A schedule that would read what is not there, lose what is needed, or free twice. `step` is its index."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step = step
        self.reason = reason


class InvalidPlanFile(MemplanError):
    """A plan file that is damaged, of another format, or inconsistent with itself."""

"""Everything memplan raises on purpose. A message says what was got, what the limit is, and what to do next."""


class MemplanError(Exception):
    """Base class of every error below."""


class UnsupportedModel(MemplanError):
    """The training step can't be captured exactly; names the module, the source line and a way out."""


class NothingToTrain(UnsupportedModel):
    """No output of the model depends on anything that requires grad."""


class PlanMismatch(MemplanError):
    """A call, or a plan file, does not fit the plan: something that the capture depended on has changed."""


class BudgetInfeasible(MemplanError, RuntimeError):
    """No schedule that memplan knows fits the budget.

    What looks for a batch size that fits (`auto_find_batch_size` of transformers, `find_executable_batch_size` of
    accelerate) takes it for the out-of-memory error that it prevents.

    `floor_bytes` is the smallest budget that can be met (where the device has no room even to time single ops, what the
    largest of them takes), and `floor_overhead` what it costs in time (0.31 is +31%; infinite where that is not known).
    """

    def __init__(self, message: str, floor_bytes: int, floor_overhead: float = float("inf")) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.floor_overhead = floor_overhead


class IllegalSchedule(MemplanError):
    """A schedule that would read what is not there, lose what is needed, or free twice. `step` is its index."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step = step
        self.reason = reason


class InvalidPlanFile(MemplanError):
    """A plan file that is damaged, of another format, or inconsistent with itself."""

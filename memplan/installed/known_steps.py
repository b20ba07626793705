"""The steps of one model: which of them serve a call, and which go when there are too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memplan.capture.ops.sizes import Varying
from memplan.capture.trace.call import Call
from memplan.installed.beside import HeldGradients
from memplan.planning.limits import Limits
from memplan.runtime.program.step import PlannedStep, ServingStep
from memplan.units import format_bytes

_MOST_KINDS = 64  # of calls for which a model keeps steps; those that were not used for longest go first
_MOST_KEPT_BYTES = 1 << 30  # that all steps of a model take on the host; the same ones go

Mismatches = dict[int, str | None]  # by kind of step: what keeps it from serving one call


class KnownSteps:
    """The steps of one model, one for each kind of call, the last one used first.

    - limits: with the budget. held: gradients of earlier steps.
    - declined: steps that the present call has left by another branch, and where.
    """

    def __init__(self, limits: Limits, held: HeldGradients) -> None:
        self.all: list[ServingStep] = []
        self.declined: list[tuple[ServingStep, str]] = []
        self._limits, self._held = limits, held

    @property
    def kinds(self) -> int:
        """How many captures the steps are of."""
        return len({step.kind for step in self.all})

    def planned(self) -> Iterator[PlannedStep]:
        """The steps that have a plan, the last one used first."""
        return (step for step in self.all if isinstance(step, PlannedStep))

    def serving(self, call: Call) -> Iterator[ServingStep]:
        """Steps that serve a call, the most suitable first.

        Steps with a plan come first: their keys check the data on which forward branches, while unplanned steps serve
        any data. Steps that leave room for gradients that are not there come last.
        """
        latest: dict[int, int] = {}  # steps of one capture, by which of all was used last
        for place, step in enumerate(self.all):
            latest.setdefault(step.kind, place)

        def rank(step: ServingStep) -> tuple[bool, bool, int, float]:
            overhead = 0.0 if step.sized is None else step.sized.planned.overhead
            counts_more = not self._held.extra_bytes and self._held.are_counted_by(step)
            return not isinstance(step, PlannedStep), counts_more, latest[step.kind], overhead

        mismatches: Mismatches = {}
        steps = sorted(self.all, key=rank)
        return (step for step in steps if not step.provisional and self.mismatch(step, call, mismatches) is None)

    def mismatch(self, step: ServingStep, call: Call, mismatches: Mismatches) -> str | None:
        """What keeps a step from serving a call, in words, as far as that is known before the step runs."""
        if (why := self._other_kind(step, call, mismatches)) is not None:
            return why
        limit_bytes, peak_bytes = self._limits.budget_bytes, step.peak_bytes(call)
        if isinstance(step, PlannedStep) and step.sized is not None and peak_bytes is not None:
            if limit_bytes is not None and peak_bytes > limit_bytes:
                return f"a call of this size peaks at {format_bytes(peak_bytes)}, beyond {format_bytes(limit_bytes)}"
            if step.sized.outgrows_host(step.numbers(call)):
                return "its copies on the host have room for smaller calls only"
        return self._held.beyond(step, peak_bytes, limit_bytes)

    def _other_kind(self, step: ServingStep, call: Call, mismatches: Mismatches) -> str | None:
        """Why a call is not of the kind that a step is for. mismatches: so far, of all that share a key."""
        if step.kind not in mismatches:
            declined = (why for other, why in self.declined if other.kind == step.kind)
            mismatches[step.kind] = next(declined, None) or step.mismatch(call)
        return mismatches[step.kind]

    def of_same_kind(self, call: Call, mismatches: Mismatches) -> Iterator[PlannedStep]:
        """Steps for calls of any size that serve this call, if there is room."""
        sized = (step for step in self.planned() if step.sized is not None)
        return (step for step in sized if self._other_kind(step, call, mismatches) is None)

    def of_other_size(self, call: Call) -> tuple[PlannedStep | None, Varying]:
        """A step for such a call of another size, and the sizes that vary; None and none where there is none."""
        found = ((step, step.key.varying(call)) for step in self.planned())
        return next(((step, varying) for step, varying in found if varying), (None, Varying()))

    def use(self, step: ServingStep) -> ServingStep:
        """Note that a step is used now."""
        if self.all[0] is not step:
            self.all[:] = [step, *(other for other in self.all if other is not step)]
        return step

    def add(self, step: ServingStep) -> None:
        """Add a step and its `others`, as the ones that were used last. The oldest steps may go for them."""
        self.all[:0] = [step, *step.others]
        kept, kept_bytes = set[int](), 0
        for known in self.all:
            if known.kind not in kept:
                kept_bytes += known.kept_bytes
                if kept and (kept_bytes > _MOST_KEPT_BYTES or len(kept) == _MOST_KINDS):
                    break
                kept.add(known.kind)
        self.keep(lambda known: known.kind in kept)

    def keep(self, wanted: Callable[[ServingStep], bool]) -> None:
        """Let all other steps go."""
        self.all[:] = [step for step in self.all if wanted(step)]

    def let_go(self) -> None:
        """Free copies that stay on the device between steps, because something else runs next and may need the room."""
        for step in self.planned():
            step.runner.store.transfers.standing.free()

    def forget(self) -> None:
        """Drop all steps, because they are out of date."""
        self.let_go()
        self.all.clear()

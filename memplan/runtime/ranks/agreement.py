"""Ranks that train one model together agree before each planned step: all of them run the same collectives, or none.

A collective that only some ranks enter hangs. Gradients that reach hooks in another order on one rank may be reduced
with the wrong partner, which nobody notices. So before each step each rank tells all others in sixteen bytes, over gloo
on the CPU, what it is about to run:

- All ranks have a step, and the signatures are equal: they run their steps.
- Some have none: all take part in a round of planning. Ranks that ask for the same plan get the one that one of them
  makes; ranks that ask for other plans make theirs at the same time.
- The signatures differ, and ranks have further steps for their calls: they tell each other of those, and run one that
  all have.
- Something goes wrong on one rank: it is raised on all of them. Where its ops gave other results than were traced,
  there is another round instead.

Each exchange waits as long as the group's own timeout says, because a rank may be planning or evaluating. A rank that
has died is noticed at once. A rank that plans may wait elsewhere for others (in a collective of the model's forward, in
a gather). They may never come, so it gives up after a short while, and that is an error on all ranks.

Where steps gather parameters, all ranks have to run one schedule. In a round of planning, ranks whose batches differ in
size exchange these sizes, and one of them plans for the largest. A rank may then have several steps for one call, made
for different batches of other ranks. It runs the one that all ranks have; where there is none, there is a new round.

A rank may also change its plan alone, in the middle of a step, where it runs out of memory or backward starts from
other outputs than planned. The new plan must have the signature that was agreed on, and must run no collective of its
own, which would run twice. Otherwise the rank raises, and tells the others when they next agree.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from memplan import errors
from memplan import torch_private as private
from memplan.capture.ops.real_results import note_results
from memplan.capture.ops.ways import OtherResults, way_of
from memplan.capture.shards import NetworkSpeed
from memplan.errors import BudgetInfeasible, MemplanError, PlanMismatch, UnsupportedModel
from memplan.problem.data import GatherSpeed
from memplan.runtime.program.step import ServingStep

_T = TypeVar("_T")

# Of planning: others answer in the agreement alone, so whoever waits for them elsewhere waits in vain.
_LONGEST_WAIT_S = 20
_SMALL_BYTES, _LARGE_BYTES = 1 << 14, 1 << 22  # of the whole of a collective whose speed is measured
_RUNS = 3  # of each size; the best counts

Share = Callable[..., tuple[bytes, list[bytes]]]  # `_PlanningRound.share`


class _RankState(enum.IntEnum):
    """What a rank says: it has a step, it needs a plan, it only takes part, something went wrong."""

    READY = 1
    PLANS = 2
    IDLE = 3
    FAILED = 4


class _Word(NamedTuple):
    """What a rank says before a step, in sixteen bytes: its state, and the digest of its collectives."""

    state: _RankState
    digest: bytes


class Ranks:
    """Exchanges bytes between the ranks of a group, over gloo. All of the ranks must make it."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        """Find or make the gloo group. Raises ValueError where this process is not one of the group's."""
        members = torch.distributed.get_process_group_ranks(group)
        own = torch.distributed.get_rank()
        if own not in members:
            raise ValueError(f"rank {own} is not in the group= that it was given, which has ranks {members}")
        self.names = sorted(members)  # the ranks as the whole job numbers them
        self.rank = self.names.index(own)
        self._group = private.gloo_group(group)
        self._word = torch.empty(16, dtype=torch.uint8, device="cpu")  # gloo's, also if the default device is another
        self._words = [torch.empty_like(self._word) for _ in members]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context for work of this rank alone: waiting for other ranks in it ends soon. Raises MemplanError then.

        Messages to the other ranks may wait as ever.
        """
        try:
            with private.waits_end_within(_LONGEST_WAIT_S, but=self._group):
                yield
        except RuntimeError as error:
            if not private.is_timeout(error):
                raise
            raise MemplanError(
                f"while it planned, this rank waited for other ranks, which know nothing of that, {_LONGEST_WAIT_S} s "
                f"at most. Leave what communicates out of forward, or plan such a call on all ranks: {error}"
            ) from error

    def words(self, word: bytes) -> list[bytes]:
        """Sixteen bytes from each rank. Raises MemplanError where a rank does not answer."""
        self._word.numpy()[:] = memoryview(word)
        try:
            torch.distributed.all_gather(self._words, self._word, group=self._group)
        except RuntimeError as error:
            raise MemplanError(
                "a rank of the group did not answer before a planned step. Either it has died, or it has not called "
                f"the planned model as often as this one, which every rank has to do: {error}"
            ) from error
        return [word.numpy().tobytes() for word in self._words]

    def messages(self, message: Any) -> list[Any]:
        """One message of each rank: anything that JSON can hold."""
        data = json.dumps(message).encode()
        sizes = [int.from_bytes(w, "little") for w in self.words(len(data).to_bytes(16, "little"))]
        padded = torch.frombuffer(bytearray(data.ljust(max(sizes))), dtype=torch.uint8)
        told = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(told, padded, group=self._group)
        return [json.loads(t.numpy().tobytes()[:size]) for t, size in zip(told, sizes, strict=True)]

    def broadcast(self, data: bytes, size_bytes: int, source: int) -> bytes:
        """The bytes of rank `source`, on all ranks. data: these bytes, on that rank."""
        buffer = torch.frombuffer(bytearray(data.ljust(size_bytes)), dtype=torch.uint8)
        torch.distributed.broadcast(buffer, self.names[source], group=self._group)
        return buffer.numpy().tobytes()


class Agreement:
    """What the ranks of a group agree on before each step of one model. All of them must make it.

    one_schedule: all ranks run one schedule, so all of them take part in planning.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, one_schedule: bool) -> None:
        self.group, self._ranks, self._one_schedule = group, Ranks(group), one_schedule
        self._broken: Exception | None = None  # what went wrong on this rank alone

    def step(
        self,
        look: Callable[[], ServingStep | None],
        plan: Callable[[Share], ServingStep] | None,
        others: Callable[[], Sequence[ServingStep]] = tuple,
    ) -> ServingStep | None:
        """The step that this rank runs next.

        - look: returns the known step that serves the call, if there is one.
        - plan: makes a step. None where this rank only takes part while others plan, and has no step to run.
        - others: returns further known steps that serve the call as well.

        Errors of these are raised on every rank. Raises PlanMismatch where the ranks' steps have different collectives.
        """
        step, problem = (None, self._broken) if self._broken is not None else _attempt(look)
        planned, noted = False, OtherResults()
        while True:
            words = self._words(step, problem, idle=plan is None)
            states = {word.state for word in words}
            if _RankState.FAILED in states:
                raise self._failure(problem)
            if _RankState.PLANS not in states:
                if len({word.digest for word in words if word.state == _RankState.READY}) <= 1:
                    return step
                own: dict[str, ServingStep] = {}
                for one in () if step is None else (step, *others()):
                    own.setdefault(one.collectives.digest.hex(), one)
                first, *rest = [digests for digests in self._ranks.messages(list(own)) if digests]
                common = next((digest for digest in first if all(digest in digests for digests in rest)), None)
                if common is not None:  # steps with equal collectives on all ranks
                    return own.get(common)
                if planned or not self._one_schedule:
                    raise self._mismatch(words, step)
            planning, planned = _PlanningRound(self._ranks), True
            if plan is not None and (step is None or self._one_schedule):
                step, problem = _attempt(functools.partial(plan, planning.share), self._ranks.alone())
                problem = None if planning.leader_failed else problem  # the leader tells the reason itself
                way = way_of(problem)
                if isinstance(way, OtherResults) and way != noted:  # this rank traces again in another round
                    note_results(way.found, way.unsteady)
                    problem, noted = None, way
            planning.finish()

    def together(self, run: Callable[[], _T]) -> _T:
        """What something gives that runs on all ranks. What goes wrong in it on one rank is raised on all."""
        found, problem = _attempt(run, self._ranks.alone())
        if any(word.state == _RankState.FAILED for word in self._words(None, problem, idle=True)):
            raise self._failure(problem)
        return cast(_T, found)

    def _words(self, step: ServingStep | None, problem: Exception | None, idle: bool) -> list[_Word]:
        """What each rank says. This one has a step or a problem, only takes part, or needs a plan."""
        state, digest = _RankState.IDLE if idle else _RankState.PLANS, bytes(8)
        if problem is not None:
            state = _RankState.FAILED
        elif step is not None:
            state, digest = _RankState.READY, step.collectives.digest
        words = self._ranks.words(bytes([state]) + bytes(7) + digest)
        return [_Word(_RankState(word[0]), word[8:]) for word in words]

    def keep(self, before: ServingStep, after: ServingStep) -> None:
        """Check a step that takes the place of the agreed one on this rank alone.

        Raises PlanMismatch where other ranks would notice: here, and at the next step of every rank.
        """
        if not before.collectives.only_gradients:
            reason = "the step has run collectives already, which would run again on this rank alone"
        elif before.collectives.digest != after.collectives.digest:
            difference = _first_difference(before.collectives.events, after.collectives.events)
            reason = f"the plan that takes its place runs other collectives: {difference}"
        else:
            return
        self._broken = PlanMismatch(
            f"a step that the ranks of the group had agreed on can't go on with another plan: {reason}. Lower the "
            "budget where memory ran out; where backward starts from other outputs than planned, put the loss inside "
            "with loss_fn="
        )
        raise self._broken

    def _mismatch(self, words: Sequence[_Word], step: ServingStep | None) -> PlanMismatch:
        """The error for every rank where steps have different collectives."""
        told = self._ranks.messages(None if step is None else list(step.collectives.events))
        names = self._ranks.names
        kinds: dict[bytes, list[int]] = {}
        for rank, word in enumerate(words):
            if word.state == _RankState.READY:
                kinds.setdefault(word.digest, []).append(rank)
        first, *others = kinds.values()
        lines = [
            f"{_named(names, first)} and {_named(names, other)}: {_first_difference(told[first[0]], told[other[0]])}"
            for other in others
        ]
        return PlanMismatch(
            "the ranks of the group would run other collectives in this step, or in another order. "
            f"{'; '.join(lines)}. All ranks must train the same model, with the same parameters frozen, from the "
            "same outputs"
        )

    def _failure(self, problem: Exception | None) -> Exception:
        """The error for this rank where something went wrong on some rank: its own, or one that tells of another's."""
        floor_bytes = getattr(problem, "floor_bytes", None)
        own = {"kind": type(problem).__name__, "text": str(problem), "floor_bytes": floor_bytes}
        told = self._ranks.messages(None if problem is None else own)
        if problem is not None:
            return problem
        rank = next(r for r, message in enumerate(told) if message is not None)
        name, where, what = told[rank]["kind"], self._ranks.names[rank], told[rank]["text"]
        text, kind = f"on rank {where} of the group: {what}", getattr(errors, name, None)
        if kind is BudgetInfeasible:  # of the same kind where it is one of memplan's
            return BudgetInfeasible(text, told[rank]["floor_bytes"])
        if kind in (UnsupportedModel, PlanMismatch):
            return kind(text)  # type: ignore[no-any-return]
        return MemplanError(f"on rank {where} of the group: {name}: {what}")


class _PlanningRound:
    """One round of planning. Every rank of the group takes part, whether it plans or not."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._shared = self.leader_failed = False

    def share(
        self,
        kind: str,
        budget_bytes: int,
        make: Callable[[list[Any]], bytes],
        exact: str = "",
        figures: Callable[[], Any] = lambda: None,
    ) -> tuple[bytes, list[bytes]]:
        """The bytes of the plan that this rank asks for, and those of other kinds, in the order of their makers.

        Called once in a round at most. Among ranks that ask for one kind of plan, the one with the lowest known budget
        makes it; of equal ones, the one with the lowest number.

        - kind: equal for ranks that can share a plan.
        - budget_bytes: this rank's budget; 0 is one that is not known.
        - make: makes the plan, from the figures of these ranks, in any order; from none where `exact` is equal on all
          of them.
        - exact: equal for ranks whose steps are equal.
        - figures: gives what this rank tells the others, in a form that JSON can hold.
        """
        assert not self._shared, "a step has one plan"
        self._shared = True
        requests = self._ranks.messages([kind, budget_bytes, exact])
        alike = [rank for rank, (other, *_) in enumerate(requests) if other == kind]
        leader = min(alike, key=lambda rank: (not requests[rank][1], requests[rank][1], rank))
        uneven = len({requests[rank][2] for rank in alike}) > 1
        own, problem = _attempt(figures) if uneven else (None, None)
        told = self._tell(requests, own)
        plan: bytes | None = b""
        if leader == self._ranks.rank and problem is None and not (uneven and any(told[r] is None for r in alike)):
            plan, problem = _attempt(functools.partial(make, [told[rank] for rank in alike] if uneven else []))
        plans = self._hand_over(plan or b"")
        if problem is not None:
            raise problem
        self.leader_failed = not plans[leader]
        if self.leader_failed:
            raise RuntimeError("the rank that makes the plan has failed")
        return plans[leader], [made for rank, made in plans.items() if made and rank not in alike]

    def finish(self) -> None:
        """Take part in the rest of the round."""
        if not self._shared:
            self._tell(self._ranks.messages([None, 0, ""]), None)
            self._hand_over(b"")

    def _tell(self, requests: Sequence[Any], own: Any) -> list[Any]:
        """The figures of each rank, where ranks that ask for one kind of plan have different steps; else nothing."""
        kinds = {kind for kind, *_ in requests if kind is not None}
        uneven = any(len({exact for other, _, exact in requests if other == kind}) > 1 for kind in kinds)
        return self._ranks.messages(own) if uneven else []

    def _hand_over(self, plan: bytes) -> dict[int | None, bytes]:
        """The plans that were made, by rank."""
        sizes = self._ranks.messages(len(plan))
        return {
            rank: self._ranks.broadcast(plan if rank == self._ranks.rank else b"", size, rank) if size else b""
            for rank, size in enumerate(sizes)
        }


def _attempt(
    run: Callable[[], _T], around: contextlib.AbstractContextManager[None] | None = None
) -> tuple[_T | None, Exception | None]:
    """What `run` gives in the context `around` it, or the error that it ends with."""
    try:
        with around or contextlib.nullcontext():
            return run(), None
    except Exception as error:
        return None, error


def _named(names: Sequence[int], ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(names[rank]) for rank in ranks)}"


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Where two lists of events differ first, in words."""
    for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return f"number {index + 1} of them is {a} on the one and {b} on the other"
    longer = mine if len(mine) > len(theirs) else theirs
    at = min(len(mine), len(theirs))
    return f"there are {len(mine)} on the one and {len(theirs)} on the other; only one has {longer[at]}"


def measure_network(group: torch.distributed.ProcessGroup, device: torch.device) -> NetworkSpeed:
    """The speed of collectives of each kind, from two sizes. All ranks of the group call it together.

    A kind that the group's backend does not have keeps the figure of `NetworkSpeed()`.
    """
    found = NetworkSpeed()
    for kind in NetworkSpeed._fields if device.type != "meta" else ():
        try:
            small_s, large_s = (_seconds(kind, size, group, device) for size in (_SMALL_BYTES, _LARGE_BYTES))
        except RuntimeError as error:
            if "not support" not in str(error) and "No backend" not in str(error):
                raise
            continue
        bytes_per_s = (_LARGE_BYTES - _SMALL_BYTES) / max(large_s - small_s, 1e-9)
        found = found._replace(**{kind: GatherSpeed(bytes_per_s, max(0.0, small_s - _SMALL_BYTES / bytes_per_s))})
    return found


def _seconds(kind: str, size_bytes: int, group: torch.distributed.ProcessGroup, device: torch.device) -> float:
    """Seconds of the best of some collectives of this size."""
    part = torch.zeros(size_bytes // 4 // group.size(), dtype=torch.float32, device=device)
    whole, times = part.new_zeros(part.numel() * group.size()), []
    for _ in range(_RUNS):
        start = time.perf_counter()
        if kind == "all_gather":
            torch.distributed.all_gather_into_tensor(whole, part, group)
        elif kind == "reduce_scatter":
            torch.distributed.reduce_scatter_tensor(part, whole, group=group)
        else:
            torch.distributed.all_reduce(whole, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)

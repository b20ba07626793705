"""A block with fewer values: what is only made to be read once is made in one run with the op that reads it.

Where op `p` makes a value `v` that op `o` alone reads, a run of `o` can nearly always be taken back together with the
run of `p` that it reads from. Then `v` is never demanded between two moves. This holds under the conditions below, as
one sees by moving runs about in an order of least time (the order of the search, from the end):

- `o` is not taken back twice for one run of `p`, nor is `v` saved, where the outputs of `o` are no larger than `v`:
  keeping those instead spares a run of `o`. Nor can it be where `o` and the forward part write over `v`.
- *At once*: `p` comes right after `o` where its operands, beside what `o` reads anyway, are no larger than `v`. They
  stand instead of it from there on, and where another move takes one of them back, it is taken back for both.
- *At last*: else `o` comes right before `p`, where it reads nothing but `v`; its outputs stand instead of `v` until
  then. If the operands of `p` have all come to be demanded in between, both come just before the last of them did.

What moves has to fit where it comes to. Where that does not follow from what fitted before, bytes of the run are left
out until it does: scratch, mostly. So a block that comes out has a least time that bounds that of the block that went
in from below, and its orders are measured before they count. So it is with small values, which may be let go as well:
they are there for nothing, except while what reads them runs. On layers of GPT-2, Llama and BERT a half to two thirds
of the values go.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memplan.solvers.exact.block import Reversed, Rows
from memplan.solvers.orders.flat import compressed

Values = frozenset[int]
FuseStage = tuple[Values, int]


@dataclass(frozen=True, slots=True)
class _Run:
    """Repeated runs of some ops, in turn.

    Fields are as in `Reversed`; stages go from the last op's to the first's.
    """

    makes: Values
    reads: Values
    takes: Values
    stages: tuple[FuseStage, ...]
    ticks: int
    parts: tuple[int, ...]

    @property
    def full_bytes(self) -> int:
        """The most on top of all that it reads."""
        return max(held for reads, held in self.stages if reads == self.reads)


class _Fusing:
    """Joins runs of a block. runs: by the op whose outputs are demanded. demanded: values that can come to be that."""

    def __init__(self, b: Reversed, free_bytes: int) -> None:
        self.b = b
        self.taken_by_steps = _union(b.step_takes.lists())
        kept = self.taken_by_steps | _union(b.takes.lists()) | set(np.flatnonzero(b.barred).tolist())
        self.free = frozenset(np.flatnonzero(b.size_bytes <= free_bytes).tolist()) - kept
        self.by_steps = _union(b.step_reads.lists()) - self.free
        reads = [frozenset(row) for row in b.reads.lists()]
        demanded, stack = set[int](), list(self.by_steps)
        while stack:
            v = stack.pop()
            maker = int(b.maker[v])
            if v not in demanded and maker >= 0 and b.again[maker]:
                stack += reads[maker] - self.free
            demanded.add(v)
        self.demanded = frozenset(demanded)
        self.runs: dict[int, _Run] = {}
        for op, (makes, takes) in enumerate(zip(b.makes.lists(), b.takes.lists(), strict=True)):
            made, read = self.demanded & frozenset(makes), reads[op] - self.free
            if made and b.again[op]:
                held = int(b.stage_bytes[b.stage_start[op]]) + self.bytes_of(reads[op] & self.free)
                taken = self.demanded & frozenset(takes)
                self.runs[op] = _Run(made, read, taken, ((read, held),), int(b.ticks[op]), (op,))
        self.calm = bool((b.between_bytes[1:] <= b.step_bytes).all())  # what a step leaves stood while it ran

    def bytes_of(self, values: Values) -> int:
        return int(sum(self.b.size_bytes[v] for v in values))

    def joins(self, op: int) -> bool:
        """Whether a run was joined to that of `op`."""
        run, taken = self.runs[op], self.taken_by_steps.union(*(run.takes for run in self.runs.values()))
        inner = [v for v in sorted(run.reads, reverse=True) if self._inside(op, v, taken)]
        for count in (1, 2):
            for values in itertools.combinations(inner, count):
                if not run.takes <= set(values):
                    continue
                joined = self._at_once(run, values) or (self._at_last(run, values[0], taken) if count == 1 else None)
                if joined:
                    self.runs[op] = joined
                    for v in values:
                        del self.runs[int(self.b.maker[v])]
                    return True
        return False

    def _inside(self, op: int, v: int, taken: Values) -> bool:
        """Whether v has to do with `op` and its maker alone, and is neither saved nor read by two runs of `op`."""
        b, run, maker = self.b, self.runs[op], self.runs.get(int(self.b.maker[v]))
        if maker is None or v in self.by_steps or b.cut[v] or maker.makes != {v} or maker.takes or maker.reads & taken:
            return False
        if any(v in other.reads for reader, other in self.runs.items() if reader != op):
            return False
        return self._replaces(run.makes, v, taken) or (v in run.takes and bool(b.barred[v]))

    def _replaces(self, outputs: Values, v: int, taken: Values) -> bool:
        """Whether these values can stand, and be saved, wherever v is."""
        b = self.b
        if self.bytes_of(outputs) > b.size_bytes[v] or outputs & taken or b.barred[list(outputs)].any():
            return False
        ahead = b.forward_extra[:, list(outputs)] @ b.size_bytes[list(outputs)]
        return bool((ahead <= b.forward_extra[:, v] * b.size_bytes[v]).all())

    def _at_once(self, run: _Run, values: tuple[int, ...]) -> _Run | None:
        makers = [self.runs[int(self.b.maker[v])] for v in values]
        rest = run.reads.difference(values)
        numbers = range(len(values))
        subsets = (itertools.combinations(numbers, size) for size in range(1, len(values) + 1))
        for left in itertools.chain.from_iterable(subsets):  # not taken back yet, where the others are
            gone = rest.union(*(makers[i].reads for i in numbers if i not in left))
            more = frozenset[int]().union(*(makers[i].reads for i in left)) - gone
            if self.bytes_of(more) > self.bytes_of(frozenset(values[i] for i in left)):
                return None
        full_bytes = run.full_bytes
        stages = [(r.difference(values), held + self.bytes_of(r.intersection(values))) for r, held in run.stages]
        stood, room = rest, self.bytes_of(frozenset(values)) + full_bytes
        for i, maker in enumerate(makers):
            beside = self.bytes_of(frozenset(values[i + 1 :]))
            for reads, held in maker.stages:
                most = room - beside - self.bytes_of((stood | reads) - rest)
                stages.append((stood | reads, min(held, most) + beside))
            stood |= maker.reads
        return _joined(run, makers, stood, stages)

    def _at_last(self, run: _Run, v: int, taken: Values) -> _Run | None:
        maker, size_bytes = self.runs[int(self.b.maker[v])], int(self.b.size_bytes[v])
        others = [r for r in self.runs.values() if r is not maker and r.reads & maker.reads]
        calm = self.calm and all(other.full_bytes >= self.bytes_of(other.makes) for other in others)
        if not calm or run.reads != {v} or not self._replaces(run.makes, v, taken):
            return None
        late = [(reads, min(held, size_bytes)) for reads, held in maker.stages]
        full_bytes = max(held for reads, held in late if reads == maker.reads)
        most = full_bytes + min(int(self.b.size_bytes[r]) for r in maker.reads) - size_bytes
        if most < 0:
            return None
        stages = [(reads - {v}, min(held, most) + self.bytes_of(reads & {v})) for reads, held in run.stages]
        return _joined(run, [maker], maker.reads, [*stages, *late])

    def block(self) -> Reversed:
        """What is left, values and ops numbered anew."""
        b, runs = self.b, [self.runs[op] for op in sorted(self.runs)]
        values = sorted(self.by_steps.union(*(run.reads | run.makes for run in runs)) & self.demanded)
        number = {v: k for k, v in enumerate(values)}
        maker = {v: k for k, run in enumerate(runs) for v in run.makes}

        def rows(sets: Iterable[Iterable[int]]) -> Rows:
            return Rows(*compressed([sorted(number[v] for v in row if v in number) for row in sets]))

        return b._replace(
            size_bytes=b.size_bytes[values],
            maker=np.array([maker.get(v, -1) for v in values], dtype=np.int64),
            reads=rows(run.reads for run in runs),
            makes=rows(run.makes for run in runs),
            takes=rows(run.takes for run in runs),
            stage_start=np.cumsum([0, *(len(run.stages) for run in runs)], dtype=np.int64),
            stage_reads=rows(reads for run in runs for reads, _held in run.stages),
            stage_bytes=np.array([held for run in runs for _reads, held in run.stages], dtype=np.int64),
            ticks=np.array([run.ticks for run in runs], dtype=np.int64),
            again=np.ones(len(runs), dtype=np.bool_),
            parts=tuple(run.parts for run in runs),
            step_reads=rows(b.step_reads.lists()),
            step_takes=rows(b.step_takes.lists()),
            step_bytes=b.step_bytes
            + np.array([self.bytes_of(self.free.intersection(row)) for row in b.step_reads.lists()], dtype=np.int64),
            cut=b.cut[values],
            barred=b.barred[values],
            forward_extra=b.forward_extra[:, values],
        )


def fused(b: Reversed, free_bytes: int = -1) -> Reversed:
    """A block with fewer values and ops, whose least time is no more than that of the block that went in.

    free_bytes: values of no more bytes take no memory, except while what reads them runs.
    """
    fusing = _Fusing(b, free_bytes)
    for op in sorted(fusing.runs):
        while op in fusing.runs and fusing.joins(op):
            pass
    return fusing.block()


def _joined(run: _Run, makers: list[_Run], reads: Values, stages: list[FuseStage]) -> _Run:
    first = [part for maker in reversed(makers) for part in maker.parts]
    ticks = run.ticks + sum(maker.ticks for maker in makers)
    return _Run(run.makes, reads, frozenset(), tuple(stages), ticks, (*first, *run.parts))


def _union(rows: list[list[int]]) -> Values:
    return frozenset(itertools.chain.from_iterable(rows))

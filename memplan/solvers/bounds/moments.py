"""A linear programme over a few moments of the backward pass that every schedule keeps.

A **moment** is a backward op while it runs; a **stage** is what lies between one moment and the next, or the end. For
each stage and forward op `runs` says whether the op runs in that stage. For each moment and value `live` says whether
the value stands then. In every schedule that runs the backward ops in their order:

- what a stage's backward ops read is live at the moment before the stage, or its op runs in the stage;
- an op that runs in a stage has its operands live at that moment, or their ops run in the stage;
- what is live at a moment was live at the moment before, or its op ran between the two;
- live values weigh at most what the budget leaves at a moment beside what nothing can free and the op's operands.

These are the stages of Checkmate (Jain et al., arXiv 1910.02653), but fewer of them. Fractions would make that weak:
half a value kept lets half an op run, in every stage anew. So these rows stand once more for all that lies after a
moment, with `later` runs: an op that runs after a moment runs in its stage or after the next moment. With them no
moment says less than it says alone, where the programme is a minimum cut. A run is paid where the op has run before for
certain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memplan.solvers.orders.flat import Flags, Flat, Floats, Ints


class MomentProgram(NamedTuple):
    """Minimise `cost` x within 0 <= x <= most, under two kinds of rows.

    - For each row x[left] + x[right] - x[needs] >= least.
    - For moment k, `size_bytes` x over the columns with `moment` k is at most budget - `fixed_bytes[k]`.

    Column 0 is always zero: rows of fewer terms point there. moment and value are -1 for columns of runs, which no
    moment weighs.
    """

    cost: Floats
    most: Floats
    left: Ints
    right: Ints
    needs: Ints
    least: Floats
    moment: Ints
    value: Ints
    size_bytes: Ints
    fixed_bytes: Ints


@dataclass(frozen=True, slots=True)
class StepMoments:
    """What the programmes of a step share: forward values that can be freed, who reads what, who has run when.

    - reader, read: pairs of a forward op and a value that it reads, held ones left out.
    - certain[op]: the first backward op by which a forward op has run in every schedule; the number of ops where that
      is none.
    - overwriter[v]: a forward op that takes over v, else -1.
    - ahead: by moment what `_ahead` found already.
    """

    flat: Flat
    reader: Ints
    read: Ints
    certain: Ints
    overwriter: Ints
    ahead: dict[int, tuple[Flags, Flags]] = field(default_factory=dict, compare=False, repr=False)


def step_of(flat: Flat) -> StepMoments:
    a = flat.arrays
    pairs = [(op, v) for op in range(a.boundary) for v in flat.reads[op] if not a.held[v]]
    overwriter = np.full(len(a.size_bytes), -1, dtype=np.int64)
    for op in range(a.boundary):
        overwriter[overtaken(flat, op)] = op
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    certain = np.where(a.deferrable[: a.boundary], flat.op_count, a.boundary - 1)
    for b in range(a.boundary, flat.op_count):
        stack = [int(a.producer[v]) for v in flat.reads[b]]
        while stack:
            op = stack.pop()
            if 0 <= op < a.boundary and certain[op] > b:
                certain[op] = b
                stack += [int(a.producer[v]) for v in flat.reads[op]]
    return StepMoments(flat, columns[0].copy(), columns[1].copy(), certain, overwriter)


def asked(flat: Flat, ops: Iterable[int]) -> Flags:
    """Forward values, held ones left out, that these backward ops read."""
    a = flat.arrays
    found = np.zeros(len(a.size_bytes), dtype=np.bool_)
    for op in ops:
        for v in flat.reads[op]:
            found[v] = 0 <= a.producer[v] < a.boundary and not a.held[v]
    return found


def overtaken(flat: Flat, op: int) -> list[int]:
    """Values whose memory an op takes over: it counts as the output's, and they are gone afterwards."""
    a = flat.arrays
    return [int(a.taken[v]) for v in flat.makes[op] if a.taken[v] >= 0]


def runnable(step: StepMoments, moment: int) -> Flags:
    """Forward ops that may run after a moment."""
    a = step.flat.arrays
    return np.asarray(a.rerunnable[: a.boundary] | (step.certain > moment))


def reached(flat: Flat, wanted: Flags, can: Flags) -> Flags:
    """Values that what is wanted may ask for: themselves, and operands of ops that run for them. can: ops that may."""
    a = flat.arrays
    found = wanted.copy()
    stack = np.nonzero(wanted)[0].tolist()
    while stack:
        op = int(a.producer[stack.pop()])
        if can[op]:
            for v in flat.reads[op]:
                if not found[v] and not a.held[v]:
                    found[v] = True
                    stack.append(v)
    return found


def _ahead(step: StepMoments, moment: int) -> tuple[Flags, Flags]:
    """What backward ops after a moment read, and what that may ask for."""
    if moment not in step.ahead:
        wanted = asked(step.flat, range(moment + 1, step.flat.op_count))
        step.ahead[moment] = wanted, reached(step.flat, wanted, runnable(step, moment))
    return step.ahead[moment]


class _ProgramBuilder:
    """Columns and rows as they come, in pieces."""

    def __init__(self) -> None:
        self.count = 1
        none, zero = np.full(1, -1, dtype=np.int64), np.zeros(1)
        self.columns: list[tuple[Floats, Floats, Ints, Ints, Ints]] = [(zero, zero, none, none, zero.astype(np.int64))]
        self.rows: list[tuple[Ints, Ints, Ints, Floats]] = []

    def add(self, chosen: Flags, cost: Floats, most: Floats, moment: int, size_bytes: Ints) -> Ints:
        """Columns for these items; returns the column of each item, 0 where there is none."""
        column = np.zeros(len(chosen), dtype=np.int64)
        count = int(chosen.sum())
        column[chosen] = np.arange(self.count, self.count + count)
        self.count += count
        at = np.full(count, moment, dtype=np.int64)
        values = np.nonzero(chosen)[0] if moment >= 0 else at
        self.columns.append((cost[chosen], most[chosen], at, values, size_bytes[chosen]))
        return column

    def row(self, left: Ints, right: Ints, needs: Ints, least: float) -> None:
        self.rows.append((left, right, needs, np.full(len(left), least)))


class _Columns(NamedTuple):
    """Columns of one moment.

    - free: is each value available for nothing?
    - live: of values that are live.
    - runs: of runs in the stage after the moment.
    - later: of runs at any time after it.
    """

    free: Flags
    live: Ints
    runs: Ints
    later: Ints


def program_of(step: StepMoments, moments: tuple[int, ...], fixed_bytes: Ints) -> MomentProgram:
    """The programme of these moments, backward ops in order. fixed_bytes: what nothing can free at each of them."""
    flat, a = step.flat, step.flat.arrays
    builder = _ProgramBuilder()
    ends = (*moments[1:], flat.op_count)
    held = []
    columns: list[_Columns] = []
    made = (a.producer >= 0) & (a.producer < a.boundary)  # before the first moment for certain
    made[made] = step.certain[a.producer[made]] <= moments[0]
    none = np.zeros(a.boundary, dtype=np.int64)
    for k, moment in enumerate(moments):
        operands = asked(flat, (moment,))
        operands[overtaken(flat, moment)] = False
        held.append(int(fixed_bytes[k]) + int(a.size_bytes[operands].sum()))
        within, free = _ahead(step, moment)[1], operands | ((a.size_bytes == 0) & (step.overwriter < 0) & made)
        live = within & ~free
        live[overtaken(flat, moment)] = False
        live_column = builder.add(live, np.zeros(len(live)), np.ones(len(live)), k, a.size_bytes)
        makers = np.zeros(a.boundary, dtype=np.bool_)
        makers[a.producer[within]] = True
        most = runnable(step, moment).astype(np.float64)
        cost = np.where(step.certain <= moment, a.time_s[: a.boundary], 0.0)
        runs = builder.add(makers, cost, most, -1, none)
        later = runs if k + 1 == len(moments) else builder.add(makers, np.zeros(a.boundary), most, -1, none)
        columns.append(_Columns(free, live_column, runs, later))
    for k, moment in enumerate(moments):
        here = columns[k]
        soon = asked(flat, range(moment + 1, min(ends[k] + 1, flat.op_count)))
        _needs(step, builder, here, here.runs, soon)
        if k + 1 == len(moments):
            continue
        _needs(step, builder, here, here.later, _ahead(step, moment)[0])
        after = columns[k + 1]
        kept = np.nonzero((after.live > 0) & ~here.free)[0]
        builder.row(here.live[kept], here.runs[a.producer[kept]], after.live[kept], 0.0)
        ops = np.nonzero(here.later > 0)[0]
        builder.row(here.runs[ops], after.later[ops], here.later[ops], 0.0)
    _second_runs(step, builder, columns[0], moments[0])
    all_costs, mosts, at, values, sizes = (np.concatenate(x) for x in zip(*builder.columns, strict=True))
    left, right, needs, least = (np.concatenate(x) for x in zip(*builder.rows, strict=True))
    fixed = np.array(held, dtype=np.int64)
    return MomentProgram(all_costs, mosts, left, right, needs, least, at, values, sizes, fixed)


def _needs(step: StepMoments, builder: _ProgramBuilder, here: _Columns, runs: Ints, wanted: Flags) -> None:
    """What is wanted after a moment is live at it or made after it, and so are the operands of what makes it."""
    a = step.flat.arrays
    values = np.nonzero(wanted & ~here.free)[0]
    builder.row(here.live[values], runs[a.producer[values]], np.zeros(len(values), dtype=np.int64), 1.0)
    pairs = (runs[step.reader] > 0) & ~here.free[step.read]
    readers, values = step.reader[pairs], step.read[pairs]
    builder.row(here.live[values], runs[a.producer[values]], runs[readers], 0.0)


def _second_runs(step: StepMoments, builder: _ProgramBuilder, first: _Columns, moment: int) -> None:
    """A value that was overwritten is live at the first moment only where its op has run twice by then."""
    a = step.flat.arrays
    values = np.nonzero(((first.live > 0) | first.free) & (step.overwriter >= 0))[0]
    values = values[step.certain[step.overwriter[values]] <= moment]
    ops = np.zeros(a.boundary, dtype=np.bool_)
    ops[a.producer[values]] = True
    again = builder.add(ops, a.time_s[: a.boundary], np.ones(a.boundary), -1, np.zeros(a.boundary, dtype=np.int64))
    chosen, operands = values[~first.free[values]], values[first.free[values]]
    none = np.zeros(len(values), dtype=np.int64)
    builder.row(again[a.producer[chosen]], none[: len(chosen)], first.live[chosen], 0.0)
    builder.row(again[a.producer[operands]], none[: len(operands)], none[: len(operands)], 1.0)

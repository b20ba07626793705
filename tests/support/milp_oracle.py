"""Least recomputation by other means: mixed-integer programmes, and a shortest path over sets.

The programmes follow Checkmate (Jain et al., arXiv 1910.02653): a stage for each op that has to run, and within a stage
every forward op may run again once, in topological order. `joint` has a stage for every op of a whole step;
`checkmate` is the reduced one, for blocks too, whose stages are the backward ops, for the forward part runs once. HiGHS
solves them through SciPy. The shortest path allows any order and any number of runs, and evicts values one by one; it
only suits a dozen values.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from memplan.solvers.chain.options import LocalBlock
from memplan.solvers.exact.exact import NO_LIMIT, BlockBudget

STATE = 10**6  # the kept generator state of op i is value STATE + i


@dataclass
class Facts:
    """A block in sets. size: of forward values that can be dropped, and of generator states. during, between: bytes
    without them, while each backward op runs and before each and after the last."""

    size: dict[int, int]
    reads: list[set[int]]
    makes: list[set[int]]
    takes: list[set[int]]
    run_bytes: list[int]
    time_s: list[float]
    again: list[bool]
    barred: set[int]
    cut: set[int]
    step_reads: list[set[int]]
    step_takes: list[set[int]]
    during: list[int]
    between: list[int]

    @property
    def ops(self) -> range:
        return range(len(self.reads))

    def bytes_of(self, values: set[int] | frozenset[int]) -> int:
        return sum(self.size[v] for v in values)


def facts_of(block: LocalBlock) -> Facts:
    a, flat = block.flat.arrays, block.flat
    n, end = a.boundary, flat.op_count
    size = {v: int(a.size_bytes[v]) for op in range(n) for v in flat.makes[op] if not a.held[v]}
    dropped = set(size)
    reads = [set(flat.reads[op]) & dropped for op in range(n)]
    for op in range(n):
        if a.random[op] and a.rerunnable[op] and a.rng_state_bytes:
            size[STATE + op] = a.rng_state_bytes
            reads[op].add(STATE + op)

    def takes(op: int) -> set[int]:
        return {int(a.taken[v]) for v in flat.makes[op]} & dropped

    def new_bytes(op: int) -> int:
        return sum(int(a.size_bytes[v]) for v in flat.makes[op] if not a.in_place[v])

    during, between = [], []
    live = {v: int(a.size_bytes[v]) for v in flat.makes[n]}
    owed = block.incoming_bytes - sum(live.values())  # what stands outside, less memory that is given back
    for op in range(n, end):
        for v in flat.makes[op] if op > n else ():
            over = int(a.taken[v])
            if a.in_place[v] and over not in live and over not in dropped:
                owed -= int(a.size_bytes[v])
            live.pop(over, None)
            live[v] = 0 if over in dropped else int(a.size_bytes[v])
        if op > n:
            during.append(sum(live.values()) + owed + int(a.scratch_bytes[op]))
            for v in flat.makes[op]:
                live[v] = int(a.size_bytes[v])
        for v in list(live):
            if not a.held[v] and not any(v in flat.reads[later] for later in range(op + 1, end)):
                del live[v]
        between.append(sum(live.values()) + owed)
    return Facts(
        size, reads, [set(flat.makes[op]) & dropped for op in range(n)], [takes(op) for op in range(n)],
        [new_bytes(op) + int(a.scratch_bytes[op]) + (a.rng_state_bytes if a.random[op] else 0) for op in range(n)],
        [float(a.time_s[op]) for op in range(n)], [bool(a.rerunnable[op]) for op in range(n)],
        {v for v in dropped if a.overwritten[v]}, set(flat.reads[n]) & dropped,
        [set(flat.reads[op]) & dropped for op in range(n + 1, end)], [takes(op) for op in range(n + 1, end)],
        during, between,
    )  # fmt: skip


def forward_trace(block: LocalBlock, saved: set[int] | frozenset[int]) -> tuple[int, list[int]]:
    """(bytes saved at the boundary, bytes while each op runs for the first time) where these values are kept."""
    a, flat, f = block.flat.arrays, block.flat, facts_of(block)
    between, during = first_runs(block)
    live: set[int] = set()
    for op in range(a.boundary):
        during[op] += f.bytes_of(live | ({STATE + op} & saved))
        live = (live | f.makes[op] | ({STATE + op} & saved)) - f.takes[op]
        live = {v for v in live if v in saved or any(v in flat.reads[q] for q in range(op + 1, a.boundary + 1))}
    outside = block.incoming_bytes - sum(int(a.size_bytes[v]) for v in flat.makes[a.boundary])
    return between[-1] - outside + f.bytes_of(live), during


def first_runs(block: LocalBlock) -> tuple[list[int], list[int]]:
    """Bytes beside values that can go: before the first run of each forward op and after the last, and during it, its
    own new memory included."""
    a, flat = block.flat.arrays, block.flat
    fixed = a.base_bytes
    between, during = [fixed], []
    for op in range(a.boundary):
        new = sum(int(a.size_bytes[v]) for v in flat.makes[op] if not a.in_place[v])
        during.append(fixed + new + int(a.scratch_bytes[op]))
        for v in flat.makes[op]:
            size, over = int(a.size_bytes[v]), int(a.taken[v])
            tracked = over >= 0 and not a.held[over]
            if a.held[v]:
                fixed += size if not a.in_place[v] or tracked else 0
            elif a.in_place[v] and not tracked:
                fixed -= size  # it was there before the step, and goes with the value
        between.append(fixed)
    return between, during


def forward_held(block: LocalBlock, saved: set[int] | frozenset[int]) -> tuple[int, int]:
    """(bytes saved at the boundary, forward peak) where these values are kept."""
    saved_bytes, during = forward_trace(block, saved)
    return saved_bytes, max([0, *during])


def shortest(block: LocalBlock, budget: BlockBudget) -> float:
    """Least seconds of repeated runs; infinite where nothing keeps the budget."""
    f = facts_of(block)
    everything = frozenset(v for v in f.size if v not in f.barred)
    start = (-1, everything)
    best = {start: 0.0}
    queue: list[tuple[float, int, tuple[int, frozenset[int]]]] = [(0.0, 0, start)]
    serial = 0
    while queue:
        spent, _serial, state = heapq.heappop(queue)
        if spent > best[state]:
            continue
        if state[0] == len(f.step_reads):
            return spent
        for cost, after in _moves(block, f, budget, *state):
            if spent + cost < best.get(after, math.inf):
                best[after] = spent + cost
                serial += 1
                heapq.heappush(queue, (spent + cost, serial, after))
    return math.inf


def _moves(block: LocalBlock, f: Facts, budget: BlockBudget, step: int,
           live: frozenset[int]) -> Iterator[tuple[float, tuple[int, frozenset[int]]]]:  # fmt: skip
    for v in live:
        yield 0.0, (step, live - {v})
    if step < 0:
        saved_bytes, peak = forward_held(block, live)
        if saved_bytes <= budget.saved_bytes and peak <= budget.forward_peak_bytes:
            yield 0.0, (0, live)
        return
    for op in f.ops:
        if f.again[op] and f.reads[op] <= live:
            held = f.between[step] + f.bytes_of(live - f.makes[op]) + f.run_bytes[op]
            if held <= budget.backward_peak_bytes:
                yield f.time_s[op], (step, (live | f.makes[op]) - f.takes[op])
    if f.step_reads[step] <= live and f.during[step] + f.bytes_of(live) <= budget.backward_peak_bytes:
        yield 0.0, (step + 1, live - f.step_takes[step])


@dataclass
class _Programme:
    """A mixed-integer programme of variables 0 and 1 by name: a cost for some, constraints as (coefficients, limit)."""

    index: dict[tuple[object, ...], int]
    cost: dict[int, float]
    rows: list[tuple[dict[int, float], float]]

    def var(self, *name: object) -> int:
        return self.index.setdefault(name, len(self.index))

    def at_most(self, limit: float, *terms: tuple[float, int]) -> None:
        row: dict[int, float] = {}
        for coefficient, variable in terms:
            row[variable] = row.get(variable, 0.0) + coefficient
        self.rows.append((row, limit))

    def solved(self, limit_s: float) -> tuple[float, bool]:
        """(least cost found, whether HiGHS closed it); infinite where it found nothing."""
        if not self.rows:
            return 0.0, True
        cost = np.zeros(len(self.index))
        cost[list(self.cost)] = list(self.cost.values())
        data = [(x, i, j) for i, (row, _limit) in enumerate(self.rows) for j, x in row.items()]
        values, rows, columns = zip(*data, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self.rows), len(cost)))
        limits = np.array([limit for _row, limit in self.rows])
        result = milp(cost, constraints=LinearConstraint(matrix, -np.inf, limits), integrality=np.ones(len(cost)),
                      bounds=Bounds(0, 1), options={"time_limit": limit_s, "mip_rel_gap": 1e-9})  # fmt: skip
        if result.status == 2:
            return math.inf, True
        return (float(result.fun) if result.x is not None else math.inf), result.status == 0


Live = dict[int, int]  # value -> the variable that says whether it stands


def variables(block: LocalBlock, whole: bool) -> int:
    """About how many variables a programme has; whole: the joint one."""
    f = facts_of(block)
    stages = len(f.step_reads) + (len(f.reads) + 1 if whole else 0)
    return stages * (len(f.size) + sum(2 + len(reads) for reads in f.reads))


def checkmate(block: LocalBlock, budget: BlockBudget, limit_s: float = 60.0) -> tuple[float, bool]:
    """(least seconds of repeated runs, whether HiGHS closed it). Infinite where it proves that there is no schedule.

    One programme for everything: bytes saved, the forward peak and the backward peak.
    """
    f, p = facts_of(block), _Programme({}, {}, [])
    if f.step_reads:
        _boundary(p, block, f, budget)
        _backward(p, f, budget.backward_peak_bytes)
    return p.solved(limit_s)


def joint(block: LocalBlock, limit_bytes: int, limit_s: float = 60.0) -> tuple[float, bool]:
    """The same for a whole step (`exact_step.whole_step`) within a peak. Forward ops may run again before the boundary,
    too: this is never more than `checkmate`."""
    f, p = facts_of(block), _Programme({}, {}, [])
    between, during = first_runs(block)
    for t in f.ops:
        there = [v for v in f.size if _maker(block, v) < t]
        live = _stage(p, f, t, range(t), {v: p.var("kept", t, v) for v in there}, between[t], limit_bytes)
        state = [(float(f.size[STATE + t]), p.var("kept", t + 1, STATE + t))] if STATE + t in f.size else []
        held = [(float(f.size[v]), live[v]) for v in there]
        p.at_most(limit_bytes - during[t], *held, *state)
        _afterwards(p, t, live, f.reads[t] - {STATE + t}, f.takes[t])
    live = {v: p.var("kept", len(f.reads), v) for v in f.size}
    live = _stage(p, f, len(f.reads), f.ops, live, between[-1], limit_bytes)
    for v, last in live.items():
        p.at_most(0.0, (1.0, p.var("kept", _after_boundary(f), v)), (-1.0, last))
    _backward(p, f, limit_bytes)
    return p.solved(limit_s)


def _after_boundary(f: Facts) -> int:
    """The number of the first backward op's stage."""
    return len(f.reads) + 1


def _maker(block: LocalBlock, v: int) -> int:
    return v - STATE if v >= STATE else int(block.flat.arrays.producer[v])


def _stage(p: _Programme, f: Facts, t: int, ops: range, live: Live, fixed_bytes: int, limit_bytes: int) -> Live:
    """Repeated runs of these ops, in order; what stands after them. fixed_bytes: held beside values that can go.

    What stands changes only where an op reads, makes or takes over a value, so that only there a value gets a variable.
    """
    live = dict(live)
    for k in ops:
        if not f.again[k]:
            continue
        run = p.var("run", t, k)
        p.cost[run] = f.time_s[k]
        held = [(float(f.size[v]), variable) for v, variable in live.items()]
        p.at_most(limit_bytes - fixed_bytes, *held, (float(f.run_bytes[k]), run))
        for v in f.reads[k] | f.takes[k]:
            after = p.var("stands", t, k, v)
            p.at_most(0.0, (1.0, run), (-1.0, live[v]))
            p.at_most(0.0, (1.0, after), (-1.0, live[v]))
            if v in f.takes[k]:
                p.at_most(1.0, (1.0, run), (1.0, after))
            live[v] = after
        for v in f.makes[k]:
            after = p.var("stands", t, k, v)
            p.at_most(0.0, (1.0, after), (-1.0, live[v]), (-1.0, run))
            live[v] = after
    return live


def _afterwards(p: _Programme, t: int, live: Live, reads: set[int], takes: set[int]) -> None:
    """The op of stage t runs: it reads and takes over; what stands then was there before."""
    for v, last in live.items():
        if v in reads | takes:
            p.at_most(-1.0, (-1.0, last))
        p.at_most(0.0, (1.0, p.var("kept", t + 1, v)), *([] if v in takes else [(-1.0, last)]))


def _backward(p: _Programme, f: Facts, limit_bytes: int) -> None:
    for t in range(len(f.step_reads)):
        stage = _after_boundary(f) + t
        live = {v: p.var("kept", stage, v) for v in f.size}
        live = _stage(p, f, stage, f.ops, live, f.between[t], limit_bytes)
        p.at_most(limit_bytes - f.during[t], *((float(f.size[v]), last) for v, last in live.items()))
        _afterwards(p, stage, live, f.step_reads[t], f.step_takes[t])


def _boundary(p: _Programme, block: LocalBlock, f: Facts, budget: BlockBudget) -> None:
    """What is kept from the forward part."""
    base, alone = forward_trace(block, set())
    kept = {v: p.var("kept", _after_boundary(f), v) for v in f.size}
    p.at_most(budget.saved_bytes - base, *((float(f.size[v]), kept[v]) for v in f.size if v not in f.cut))
    for v in f.barred:
        p.at_most(0.0, (1.0, kept[v]))
    if budget.forward_peak_bytes >= NO_LIMIT:
        return
    beside = {v: forward_trace(block, {v})[1] for v in f.size if v not in f.barred}
    for k in f.ops:  # what each saved value adds while an op runs for the first time does not depend on the others
        ahead = [(float(held[k] - alone[k]), kept[v]) for v, held in beside.items()]
        p.at_most(budget.forward_peak_bytes - alone[k], *ahead)

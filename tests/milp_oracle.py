"""Least recomputation of a block by other means: a mixed-integer programme, and a shortest path over sets.

The programme follows Checkmate (Jain et al., arXiv 1910.02653): a stage for each backward op, and within a stage every
forward op may run once, in topological order. HiGHS solves it through SciPy. The shortest path allows any order and any
number of runs, and evicts values one by one; it only suits a dozen values.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from memplan.solvers.exact_local import NO_LIMIT, BlockBudget
from memplan.solvers.options import LocalBlock

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
    owed = 0  # memory that was there before the step and is given back
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
    during = []
    live: set[int] = set()
    for op in range(a.boundary):
        state = {STATE + op} & saved
        new = {v for v in f.makes[op] if not a.in_place[v]}
        outside = sum(int(a.size_bytes[v]) for v in flat.makes[op] if v not in f.size and not a.in_place[v])
        during.append(f.bytes_of(live | new | state) + int(a.scratch_bytes[op]) + outside)
        live = (live | f.makes[op] | state) - f.takes[op]
        live = {v for v in live if v in saved or any(v in flat.reads[q] for q in range(op + 1, a.boundary + 1))}
    return f.bytes_of(live), during


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
    """Rows of a mixed-integer programme: variables by name, each constraint as (coefficients, at most)."""

    index: dict[tuple[object, ...], int]
    rows: list[tuple[dict[int, float], float]]

    def var(self, *name: object) -> int:
        return self.index.setdefault(name, len(self.index))

    def at_most(self, limit: float, *terms: tuple[float, int]) -> None:
        row: dict[int, float] = {}
        for coefficient, variable in terms:
            row[variable] = row.get(variable, 0.0) + coefficient
        self.rows.append((row, limit))


def checkmate(block: LocalBlock, budget: BlockBudget, limit_s: float = 60.0) -> tuple[float, bool]:
    """(least seconds of repeated runs, whether HiGHS closed it). Infinite where it proves that there is no schedule.

    One programme for everything: bytes saved, the forward peak and the backward peak.
    """
    f = facts_of(block)
    p = _Programme({}, [])
    stages, ops = len(f.step_reads), len(f.reads)

    def live(stage: int, position: int, v: int) -> int:
        """v stands in memory after the op at this position of this stage; position -1 is the one before the first."""
        return p.var("live", stage, position, v)

    def run(stage: int, op: int) -> int:
        return p.var("run", stage, op)

    for t in range(stages):
        for k in f.ops:
            _one_position(p, f, budget, t, k, live, run)
        for v in f.size:
            last = live(t, ops - 1, v)
            if v in f.step_reads[t]:
                p.at_most(-1.0, (-1.0, last))
            if t + 1 < stages:
                p.at_most(0.0, (1.0, live(t + 1, -1, v)), (-1.0, last))
                if v in f.step_takes[t]:
                    p.at_most(0.0, (1.0, live(t + 1, -1, v)))
        held = [(float(size), live(t, ops - 1, v)) for v, size in f.size.items()]
        p.at_most(budget.backward_peak_bytes - f.during[t], *held)
    if stages:
        _boundary(p, block, f, budget, live)
    return _solved(p, f, stages, limit_s)


def _one_position(p: _Programme, f: Facts, budget: BlockBudget, t: int, k: int, live, run) -> None:  # type: ignore[no-untyped-def]
    held: list[tuple[float, int]] = [(float(f.run_bytes[k]), run(t, k))]
    if not f.again[k]:
        p.at_most(0.0, (1.0, run(t, k)))
    for v, size in f.size.items():
        before, after = live(t, k - 1, v), live(t, k, v)
        stands = p.var("stands", t, k, v)  # held while the op of this position runs, or would
        held.append((float(size), stands))
        if v in f.makes[k]:
            p.at_most(0.0, (1.0, after), (-1.0, before), (-1.0, run(t, k)))
            p.at_most(0.0, (1.0, after), (-1.0, run(t, k)), (-1.0, stands))
            continue
        p.at_most(0.0, (1.0, after), (-1.0, stands))
        p.at_most(0.0, (1.0, stands), (-1.0, before))
        if v in f.reads[k]:
            p.at_most(0.0, (1.0, run(t, k)), (-1.0, stands))
        if v in f.takes[k]:
            p.at_most(1.0, (1.0, run(t, k)), (1.0, after))
    p.at_most(budget.backward_peak_bytes - f.between[t], *held)


def _boundary(p: _Programme, block: LocalBlock, f: Facts, budget: BlockBudget, live) -> None:  # type: ignore[no-untyped-def]
    base, _during = forward_trace(block, set())
    kept = [(float(size), live(0, -1, v)) for v, size in f.size.items() if v not in f.cut]
    p.at_most(budget.saved_bytes - base, *kept)
    for v in f.barred:
        p.at_most(0.0, (1.0, live(0, -1, v)))
    if budget.forward_peak_bytes >= NO_LIMIT:
        return
    _bytes, alone = forward_trace(block, set())
    beside = {v: forward_trace(block, {v})[1] for v in f.size if v not in f.barred}
    for k in f.ops:  # what each saved value adds while an op runs for the first time does not depend on the others
        ahead = [(float(held[k] - alone[k]), live(0, -1, v)) for v, held in beside.items()]
        p.at_most(budget.forward_peak_bytes - alone[k], *ahead)


def _solved(p: _Programme, f: Facts, stages: int, limit_s: float) -> tuple[float, bool]:
    if not stages:
        return 0.0, True
    cost = np.zeros(len(p.index))
    for name, column in p.index.items():
        if name[0] == "run":
            cost[column] = f.time_s[int(str(name[2]))]
    data = [(x, i, j) for i, (row, _limit) in enumerate(p.rows) for j, x in row.items()]
    values, rows, columns = zip(*data, strict=True)
    matrix = csr_array((values, (rows, columns)), shape=(len(p.rows), len(p.index)))
    limits = np.array([limit for _row, limit in p.rows])
    result = milp(cost, constraints=LinearConstraint(matrix, -np.inf, limits), integrality=np.ones(len(cost)),
                  bounds=Bounds(0, 1), options={"time_limit": limit_s, "mip_rel_gap": 1e-9})  # fmt: skip
    if result.status == 2:
        return math.inf, True
    return (float(result.fun) if result.x is not None else math.inf), result.status == 0

"""Values that span the middle of a step, made again behind it instead of kept: modes of interface values.

A U-Net nests: enc1[enc2[...]dec2]dec1. What enc1 hands to dec1 crosses everything between them, so in a chain it
widens every cut there. Here the step is written anew: the ops that make such a value from little stand a second time
right before its first reader behind the middle, which then reads the copy. Cuts of the new step carry the little
instead. Which values to carry at a price of memory is a minimum cut, as for a whole step. Any order of the new step is
one of the old step, op by op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.solvers.chain import crossing_bytes
from memplan.solvers.flat import Arrays, Flat, Ints, compressed
from memplan.solvers.mincut import saved_sets

_SPAN = 4  # a value spans the middle where it lives through a quarter of the forward pass
_SHARE = 32  # of the most that crosses: spanning values that weigh less than that part are left alone
_CUTS = 6
_MOST = 2  # detours of one step


@dataclass(frozen=True, slots=True)
class Detour:
    """A step with copies of ops. ops[i]: the op of the step itself that op i of this one is."""

    flat: Flat
    ops: tuple[int, ...]

    def order(self, order: Ints) -> Ints:
        """An order of this step as one of the step itself."""
        found = np.array([*self.ops, -1], dtype=np.int64)  # BOUNDARY, which is -1, stays
        return found[order]


def detours(flat: Flat) -> Iterator[Detour]:
    """The step with copies for what spans its middle, at different prices of memory; none where nothing does.

    No more copies than forward ops, for they run in the forward pass, too.
    """
    a = flat.arrays
    middle, needed = _spanning(flat)
    if not needed:
        return
    most_s = float(a.time_s[: a.boundary].sum())
    found: dict[frozenset[int], Detour] = {}
    for carried in saved_sets(flat, needed, _CUTS):
        missing = needed - carried.saved
        if not missing or missing in found or carried.recompute_s > most_s:
            continue
        detour = _rewritten(flat, middle, missing, carried.saved)
        if len(detour.ops) - flat.op_count <= a.boundary:
            found[missing] = detour
    yield from sorted(found.values(), key=lambda detour: len(detour.ops))[-_MOST:]


def _spanning(flat: Flat) -> tuple[int, frozenset[int]]:
    """The position that long-lived values cross with the most bytes, and those values."""
    a = flat.arrays
    spans: dict[int, tuple[int, int]] = {}
    for op in range(a.boundary):
        for v in flat.reads[op]:
            made = int(a.producer[v])
            if made >= 0 and a.rerunnable[made] and not a.overwritten[v] and not a.held[v]:
                spans[v] = (made + 1, op)
    long = {v: (start, end) for v, (start, end) in spans.items() if _SPAN * (end - start) >= a.boundary}
    weight = np.zeros(a.boundary + 1, dtype=np.int64)
    for v, (start, end) in long.items():
        weight[start : end + 1] += a.size_bytes[v]
    middle = int(np.argmax(weight))
    if _SHARE * weight[middle] < crossing_bytes(flat).max():
        return middle, frozenset()
    return middle, frozenset(v for v, (start, end) in long.items() if start <= middle <= end)


def _rewritten(flat: Flat, middle: int, missing: frozenset[int], carried: frozenset[int]) -> Detour:
    a = flat.arrays
    readers: dict[int, list[int]] = {}
    for v in sorted(missing):
        first = min(op for op in range(middle, a.boundary) if v in flat.reads[op])
        readers.setdefault(first, []).append(v)
    ops: list[int] = []
    reads: list[tuple[int, ...]] = []
    makes: list[tuple[int, ...]] = []
    copied: list[int] = []  # the value that each new value is a copy of
    current: dict[int, int] = {}
    known: list[tuple[int, dict[int, int]]] = []  # positions of the forward pass, and what to read instead behind them
    count = len(a.size_bytes)
    for op in range(a.boundary):
        if op in readers:
            local: dict[int, int] = {}
            for again in _closure(flat, readers[op], carried, middle):
                row = []
                for v in flat.makes[again]:
                    local[v] = count + len(copied)
                    copied.append(v)
                    row.append(local[v])
                ops.append(again)
                reads.append(tuple(local.get(v, v) for v in flat.reads[again]))
                makes.append(tuple(row))
            current |= {v: local[v] for v in readers[op]}
            known.append((op, local))
        ops.append(op)
        reads.append(tuple(current.get(v, v) for v in flat.reads[op]) if op >= middle else flat.reads[op])
        makes.append(flat.makes[op])
    boundary = len(ops)
    ends = _ends(flat, [op for op, _local in known])
    for op in range(a.boundary, flat.op_count):
        instead: dict[int, int] = {}
        for (_start, local), end in zip(known, ends, strict=True):
            if op < end:
                instead |= local
        ops.append(op)
        reads.append(tuple(instead.get(v, v) for v in flat.reads[op]))
        makes.append(flat.makes[op])
    return Detour(Flat(_arrays(a, boundary, ops, reads, makes, copied), tuple(reads), tuple(makes)), tuple(ops))


def _closure(flat: Flat, values: Sequence[int], carried: frozenset[int], middle: int) -> list[int]:
    """Ops before the middle that make these values from what is carried and what always stands, in turn."""
    a = flat.arrays
    found: set[int] = set()
    stack = list(values)
    while stack:
        op = int(a.producer[stack.pop()])
        if op in found:
            continue
        found.add(op)
        stack += [v for v in flat.reads[op] if v not in carried and not a.held[v] and _again(a, v)]
    return sorted(found)


def _again(a: Arrays, value: int) -> bool:
    return bool(a.rerunnable[a.producer[value]])


def _ends(flat: Flat, starts: Sequence[int]) -> list[int]:
    """For each position of the forward pass one past the last backward op that reads what is made from there on."""
    a = flat.arrays
    made_by = [max([int(a.producer[v]) for v in flat.reads[op] if 0 <= a.producer[v] < a.boundary and not a.held[v]],
                   default=-1) for op in range(a.boundary, flat.op_count)]  # fmt: skip
    ends = []
    for start in starts:
        last = max([i for i, made in enumerate(made_by) if made >= start], default=-1)
        ends.append(a.boundary + last + 1)
    return ends


def _arrays(a: Arrays, boundary: int, ops: list[int], reads: list[tuple[int, ...]], makes: list[tuple[int, ...]],
            copied: list[int]) -> Arrays:  # fmt: skip
    rows = np.array(ops, dtype=np.int64)
    source = np.array([*range(len(a.size_bytes)), *copied], dtype=np.int64)
    producer = np.full(len(source), -1, dtype=np.int64)
    for op, row in enumerate(makes):
        producer[list(row)] = op
    taken = a.taken[source]
    for row, read in zip(makes, reads, strict=True):
        for v in row:
            if v >= len(a.size_bytes) and taken[v] >= 0:
                taken[v] = next(u for u in read if source[u] == taken[v])
    read_start, read_row = compressed(reads)
    made_start, made_row = compressed(makes)
    return a._replace(
        boundary=boundary, read_start=read_start, read=read_row, made_start=made_start, made=made_row,
        size_bytes=a.size_bytes[source], taken=taken, in_place=a.in_place[source], held=a.held[source],
        gradient=a.gradient[source], producer=producer, overwritten=a.overwritten[source],
        rerunnable=a.rerunnable[rows], deferrable=a.deferrable[rows], random=a.random[rows],
        time_s=a.time_s[rows], scratch_bytes=a.scratch_bytes[rows],
    )  # fmt: skip

"""Values that span the middle of a step, made again behind it instead of kept: modes of interface values.

A U-Net nests: enc1[enc2[...]dec2]dec1. What enc1 hands to dec1 crosses everything between them, so in a chain it widens
every cut there. Here the step is written anew. The ops that make such a value from little stand a second time right
before its first reader behind the middle, which then reads the copy. Cuts of the new step carry the little instead.
Which values to carry at a price of memory is a minimum cut, as for a whole step. Any order of the new step is one of
the old step, op by op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from memplan.solvers.bounds.mincut import saved_sets
from memplan.solvers.chain.partition import crossing_bytes
from memplan.solvers.orders.flat import Arrays, Flat, Ints, compressed

_SPAN = 4  # a value spans the middle where it lives through a quarter of the forward pass
_SHARE = 32  # of the most that crosses: spanning values that weigh less than that part are left alone
_CUTS = 6
_MOST = 1  # detours of one step; a second is worth next to nothing (docs/research.md)


@dataclass(frozen=True, slots=True)
class Detour:
    """A step with copies of ops. ops[i]: the op of the step itself that op i of this step runs."""

    flat: Flat
    ops: tuple[int, ...]

    def order(self, order: Ints) -> Ints:
        """An order of this step as one of the step itself."""
        found = np.array([*self.ops, -1], dtype=np.int64)  # BOUNDARY, which is -1, stays
        return found[order]


def detours(flat: Flat) -> Iterator[Detour]:
    """The step with copies for what spans its middle, at different prices of memory; none where nothing does.

    There are no more copies than forward ops, for copies run in the forward pass, too.
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


@dataclass(slots=True)
class _Rewriting:
    """The new step while it is written.

    copied: the value that each new value is a copy of. New values are numbered on from the step's own.
    """

    flat: Flat
    ops: list[int] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    makes: list[tuple[int, ...]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)

    def add(self, op: int, instead: dict[int, int]) -> None:
        """The op itself, with other values to read."""
        self.ops.append(op)
        self.reads.append(tuple(instead.get(v, v) for v in self.flat.reads[op]))
        self.makes.append(self.flat.makes[op])

    def copy(self, op: int, copies: dict[int, int]) -> None:
        """A copy of the op, which reads and makes copies of values."""
        self.ops.append(op)
        self.reads.append(tuple(copies.get(v, v) for v in self.flat.reads[op]))
        for v in self.flat.makes[op]:
            copies[v] = len(self.flat.arrays.size_bytes) + len(self.copied)
            self.copied.append(v)
        self.makes.append(tuple(copies[v] for v in self.flat.makes[op]))


def _rewritten(flat: Flat, middle: int, missing: frozenset[int], carried: frozenset[int]) -> Detour:
    a = flat.arrays
    wanted: dict[int, list[int]] = {}  # by the first reader behind the middle
    for v in sorted(missing):
        first = min(op for op in range(middle, a.boundary) if v in flat.reads[op])
        wanted.setdefault(first, []).append(v)
    new = _Rewriting(flat)
    current: dict[int, int] = {}
    known: list[tuple[int, dict[int, int]]] = []  # positions of the forward pass, and the copies made there
    for op in range(a.boundary):
        if op in wanted:
            copies: dict[int, int] = {}
            for again in _closure(flat, wanted[op], carried):
                new.copy(again, copies)
            current |= {v: copies[v] for v in wanted[op]}
            known.append((op, copies))
        new.add(op, current)
    boundary = len(new.ops)
    ends = _ends(flat, [op for op, _copies in known])
    for op in range(a.boundary, flat.op_count):
        instead: dict[int, int] = {}
        for (_start, copies), end in zip(known, ends, strict=True):
            if op < end:  # the backward part of what stands behind the copies
                instead |= copies
        new.add(op, instead)
    arrays = _arrays(a, boundary, new)
    return Detour(Flat(arrays, tuple(new.reads), tuple(new.makes)), tuple(new.ops))


def _closure(flat: Flat, values: Sequence[int], carried: frozenset[int]) -> list[int]:
    """Ops that make these values from what is carried and what always stands, in turn."""
    a = flat.arrays
    found: set[int] = set()
    stack = list(values)
    while stack:
        op = int(a.producer[stack.pop()])
        if op in found:
            continue
        found.add(op)
        stack += [v for v in flat.reads[op] if v not in carried and not a.held[v] and a.rerunnable[a.producer[v]]]
    return sorted(found)


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


def _arrays(a: Arrays, boundary: int, new: _Rewriting) -> Arrays:
    rows = np.array(new.ops, dtype=np.int64)
    source = np.array([*range(len(a.size_bytes)), *new.copied], dtype=np.int64)
    producer = np.full(len(source), -1, dtype=np.int64)
    for op, row in enumerate(new.makes):
        producer[list(row)] = op
    taken = a.taken[source]
    for row, read in zip(new.makes, new.reads, strict=True):
        for v in row:
            if v >= len(a.size_bytes) and taken[v] >= 0:
                taken[v] = next(u for u in read if source[u] == taken[v])
    read_start, read_row = compressed(new.reads)
    made_start, made_row = compressed(new.makes)
    return a._replace(
        boundary=boundary, read_start=read_start, read=read_row, made_start=made_start, made=made_row,
        size_bytes=a.size_bytes[source], taken=taken, in_place=a.in_place[source], held=a.held[source],
        gradient=a.gradient[source], producer=producer, overwritten=a.overwritten[source],
        rerunnable=a.rerunnable[rows], deferrable=a.deferrable[rows], random=a.random[rows],
        time_s=a.time_s[rows], scratch_bytes=a.scratch_bytes[rows],
    )  # fmt: skip

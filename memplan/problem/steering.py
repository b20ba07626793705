"""Where PyTorch's CUDA allocator puts the blocks of a planned step, and how it is led there.

A planned step has memory of its own, its arena: one segment of the allocator, of which nothing is held between steps.
`pack_slab` says where in it each block should go. But the allocator has a rule: a block goes to the smallest hole that
is large enough, to its start. So holes that would be taken in place of the right one are closed for a while by *plugs*,
blocks that nobody uses:

    offset ^  bbbb          c goes to the lower hole, though it fits the upper one better:
           |  ....          the upper one is plugged before c is asked for
           |  aaaa
           |  cc..

A plug stays until a block is to go where it is. Nothing can be plugged between two requests of one op. So where a small
block takes the hole of a larger one that comes after it, the larger one is packed anew with more room. Where a step
asks for other blocks than it was led for, its results are the same, and it reserves more.

Blocks of at most 1 MiB are elsewhere: the allocator has segments of 2 MiB for those.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.problem.caching_allocator import MIN_BLOCK_BYTES, ROUND_LARGE_BYTES, SMALL_BYTES
from memplan.problem.packing import LiveRange, columns, eject, most_alive, pack_slab

# Arenas that are tried, as multiples of packings. At 1.0, blocks that were missed before are packed with more room.
_ARENAS = (1.0, 1.0, 1.0, 1.0, 1.01, 1.03, 1.1)
_CLOSE = 1.05  # of what is alive: an arena that is worth no further trial, where it misses no block
GUARD_BYTES = ROUND_LARGE_BYTES  # a block at the end of an arena, so that its last hole is one like others
_MOST_MOVES = 24  # before one step of a schedule
_MOST_TRIES = 60  # of places for the blocks of steps, beyond the first of each
_REPAIRS = 400  # blocks that are placed anew for those of one step

_Ints = NDArray[np.int64]
Move = tuple[int, int]  # (bytes, offset) of a plug that is set; 0 bytes: the one at this offset is taken away
Moves = dict[int, tuple[Move, ...]]  # what is done before steps of a schedule, by their index


class Request(NamedTuple):
    """A block that is asked for. Each name is given once."""

    name: int
    size_bytes: int


class Release(NamedTuple):
    """A block that is freed."""

    name: int


Moment = tuple[int, tuple[Request | Release, ...]]  # what a step of a schedule, by its index, does in the arena


@dataclass(frozen=True, slots=True)
class Steering:
    """How microbatches are led through an arena.

    - arena_bytes: of the arena, without the guard at its end.
    - moves: of a microbatch that begins while no gradients are there, and, where they are added up, of further ones.
    - outside: ops that make large blocks for the caller to hold, which are outside of the arena, with all that they ask
      for, and the bytes of those blocks. Plugs hold places for these until the op runs: else a small block that
      comes before a large one would split the hole that the large one of the last microbatch has left.
    - kept_bytes: what is in the arena when a further microbatch begins.
    - plugged_bytes: how much higher the peak of what is allocated is for the plugs.
    """

    arena_bytes: int
    moves: tuple[Moves, ...]
    outside: dict[int, tuple[int, ...]]
    kept_bytes: int = 0
    plugged_bytes: int = 0

    @property
    def places(self) -> list[tuple[int, int]]:
        """(op, bytes) of each block that is made for the caller to hold, the largest first."""
        blocks = [(op, size_bytes) for op, sizes in self.outside.items() for size_bytes in sizes]
        return sorted(blocks, key=lambda block: -block[1])


def lead(
    microbatches: Sequence[Sequence[Moment]], expandable: bool, outside: dict[int, tuple[int, ...]]
) -> Steering | None:
    """How microbatches are led through an arena that is as small as is found; None where blocks are always missed.

    expandable: the allocator's setting `expandable_segments`. outside: ops whose blocks are not in these moments.
    """
    blocks = _live_ranges([moment for moments in microbatches for moment in moments])
    if not blocks:
        return Steering(0, tuple({} for _ in microbatches), outside)
    events = {event for _, events in microbatches[0] for event in events}
    kept_bytes = sum(e.size_bytes for e in events if isinstance(e, Request) and Release(e.name) not in events)
    close_bytes = _CLOSE * most_alive(blocks.values())
    best, roomy = None, dict(blocks)
    for seed, spare in enumerate(_ARENAS):
        packing = pack_slab(list((roomy if spare == 1.0 else blocks).values()), seed=seed)
        arena_bytes = math.ceil(packing.size_bytes * spare / ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        leader = _Leader(arena_bytes, expandable, blocks, packing.offsets)
        moves = tuple(leader.run(moments) for moments in microbatches)
        if not leader.missed and (best is None or arena_bytes < best.arena_bytes):
            best = Steering(arena_bytes, moves, outside, kept_bytes)
        if best is not None and best.arena_bytes <= close_bytes:
            break
        for index, asked in (moment for moments in microbatches for moment in moments):
            for name, room_bytes in _rooms(asked) if index in leader.missed else ():
                roomy[name] = roomy[name]._replace(size_bytes=room_bytes)
    return best


def _rooms(events: Iterable[Request | Release]) -> Iterator[tuple[int, int]]:
    """What requests of one step need that are larger than some before: more room, in bytes, than all before take.

    Else one of those would go to the hole that is for the larger one, where it is the smallest that has room for both.
    """
    before = list[int]()
    for request in (event for event in events if isinstance(event, Request)):
        if before and request.size_bytes > min(before):
            yield request.name, max(request.size_bytes, sum(before) + SMALL_BYTES)
        before.append(request.size_bytes)


def _live_ranges(moments: Iterable[Moment]) -> dict[int, LiveRange]:
    """When each block lives, in numbers of requests."""
    found: dict[int, LiveRange] = {}
    begun: dict[int, tuple[int, int]] = {}
    now = 0
    for event in (event for _, events in moments for event in events):
        if isinstance(event, Request):
            begun[event.name] = event.size_bytes, now
            now += 1
        else:
            found[event.name] = LiveRange(*begun.pop(event.name), now)
    found |= {name: LiveRange(*begin, now) for name, begin in begun.items()}
    return dict(sorted(found.items()))


@dataclass(slots=True)
class _Holes:
    """The holes of an arena, and what the allocator does to them.

    - least_bytes: a smaller rest is not split off.
    - holes: bytes by offset.
    - ends: offsets of holes, by where they end.
    - held: bytes of blocks by offset, plugs too.
    """

    least_bytes: int
    holes: dict[int, int]
    ends: dict[int, int]
    held: dict[int, int] = field(default_factory=dict)

    def after(self, moves: Iterable[Move]) -> _Holes:
        """A copy, after moves."""
        copy = dataclasses.replace(self, holes=dict(self.holes), ends=dict(self.ends), held=dict(self.held))
        for size_bytes, offset in moves:
            if size_bytes:
                copy.allocate(size_bytes)
            else:
                copy.free(offset)
        return copy

    def fit(self, size_bytes: int) -> int | None:
        """The hole that the allocator takes, by its offset."""
        fitting = [(hole_bytes, offset) for offset, hole_bytes in self.holes.items() if hole_bytes >= size_bytes]
        return min(fitting)[1] if fitting else None

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of a new block; None where no hole is large enough."""
        offset = self.fit(size_bytes)
        if offset is None:
            return None
        hole_bytes = self.holes.pop(offset)
        if hole_bytes - size_bytes >= self.least_bytes:
            self.holes[offset + size_bytes] = hole_bytes - size_bytes
            self.ends[offset + hole_bytes] = offset + size_bytes
        else:
            size_bytes = hole_bytes
            del self.ends[offset + hole_bytes]
        self.held[offset] = size_bytes
        return offset

    def free(self, offset: int) -> None:
        end = offset + self.held.pop(offset)
        end += self.holes.pop(end, 0)
        offset = self.ends.pop(offset, offset)
        self.holes[offset] = end - offset
        self.ends[end] = offset


class _Leader:
    """An arena while it is led through microbatches.

    - offsets: where each block is, was, or should go, in the order of `blocks`.
    - begun: which of them have been asked for.
    - places: offsets of live blocks; None of those for which no hole was large enough.
    - plugs: bytes by offset.
    - missed: steps some of whose blocks had no place.
    - tries: how many are left.
    """

    def __init__(self, size_bytes: int, expandable: bool, blocks: dict[int, LiveRange], offsets: Sequence[int]) -> None:
        """An empty arena. offsets: where each block should go."""
        least_bytes = MIN_BLOCK_BYTES if expandable else SMALL_BYTES + 1
        self.size_bytes, self.holes = size_bytes, _Holes(least_bytes, {0: size_bytes}, {size_bytes: 0})
        self.index = {name: index for index, name in enumerate(blocks)}
        self.size, self.first, self.last = columns(blocks.values())
        self.offsets, self.begun = np.array(offsets), np.zeros(len(blocks), bool)
        self.places: dict[int, int | None] = {}
        self.plugs: dict[int, int] = {}
        self.missed, self.tries, self.draws = set[int](), _MOST_TRIES, np.random.default_rng(0)

    def run(self, moments: Sequence[Moment]) -> Moves:
        """Moves for a microbatch. No plugs are there before and after it."""
        found: Moves = {}
        for index, events in moments:
            if moves := tuple(self._lead(index, events)):
                found[index] = moves
        self.holes = self.holes.after((0, offset) for offset in self.plugs)
        self.plugs.clear()
        return found

    def _lead(self, index: int, events: Sequence[Request | Release]) -> list[Move]:
        """Moves before the events of one step, which are then done.

        Where blocks can't be led to their places, or those that come later have no room then, other places are tried.
        """
        requests = [event for event in events if isinstance(event, Request)]
        wishes = {r.name: int(self.offsets[self.index[r.name]]) for r in requests}
        while True:
            attempt = self._attempt(wishes, events)
            offsets = self._repaired(requests, attempt.places)
            if (offsets is not None and not attempt.misses) or not self.tries:
                break
            wishes, self.tries = self._other_places(requests), self.tries - 1
        if attempt.misses:
            self.missed.add(index)
        self.holes, self.places = attempt.holes, attempt.places
        if offsets is not None:
            self.offsets = offsets
        self.begun[[self.index[request.name] for request in requests]] = True
        for request in requests:
            if (at := self.places.get(request.name)) is not None:
                self.offsets[self.index[request.name]] = at
        for size_bytes, offset in attempt.moves:
            if size_bytes:
                self.plugs[offset] = size_bytes
            else:
                del self.plugs[offset]
        return attempt.moves

    def _attempt(self, wishes: dict[int, int], events: Sequence[Request | Release]) -> _Attempt:
        """Lead the requests of a step to these places, and do its events."""
        spans = [(wishes[e.name], wishes[e.name] + e.size_bytes) for e in events if isinstance(e, Request)]
        moves = [(0, p) for p, n in self.plugs.items() if any(p < end and begin < p + n for begin, end in spans)]
        settled: set[int] = set()  # what goes where the allocator puts it
        while True:
            begin = self.holes.after(moves)
            attempt = _Attempt(moves, begin.after(()), dict(self.places))
            wrong = attempt.run(events, wishes, settled)
            if wrong is None:
                return attempt
            taken = attempt.holes.fit(wrong.size_bytes)
            more = None
            if taken is not None and len(moves) < _MOST_MOVES:
                more = _close_around(begin, (taken, wishes[wrong.name]), spans)
            settled |= set() if more else {wrong.name}
            moves = moves + (more or [])

    def _repaired(self, requests: Sequence[Request], places: dict[int, int | None]) -> _Ints | None:
        """Offsets of all blocks, where these requests went elsewhere; None where no room is found for those to come."""
        offsets, ahead = self.offsets.copy(), ~self.begun
        new = [self.index[r.name] for r in requests if places.get(r.name) is not None]
        offsets[new] = [at for r in requests if (at := places.get(r.name)) is not None]
        ahead[[self.index[r.name] for r in requests]] = False
        for block in new:
            meets = ahead & (self.first < self.last[block]) & (offsets < offsets[block] + self.size[block])
            offsets[meets & (offsets + self.size > offsets[block])] = -1
        if offsets.min() >= 0:
            return offsets
        there = ahead.copy()
        there[[self.index[name] for name, at in places.items() if at is not None]] = True
        found = eject(
            self.size[there], self.first[there], self.last[there], offsets[there], ~ahead[there], self.size_bytes,
            int(self.draws.integers(1 << 32)), _REPAIRS,
        )  # fmt: skip
        if found.min() < 0:
            return None
        offsets[there] = found
        return offsets

    def _other_places(self, requests: Sequence[Request]) -> dict[int, int]:
        """Places for the requests of a step, drawn: apart, in what is free but for plugs."""
        holes = self.holes.after((0, offset) for offset in self.plugs).holes.items()
        found: dict[int, int] = {}
        placed: list[tuple[int, int]] = []
        for number in self.draws.permutation(len(requests)).tolist():
            name, size_bytes = requests[number]
            places = [at for o, n in holes for at in (o, o + n - size_bytes)]
            places += [at for low, top in placed for at in (top, low - size_bytes)]
            places = [at for at in places if any(o <= at and at + size_bytes <= o + n for o, n in holes)]
            places = [at for at in places if not any(at < top and low < at + size_bytes for low, top in placed)]
            found[name] = at = int(self.draws.choice(places or [self.offsets[self.index[name]]]))
            placed.append((at, at + size_bytes))
        return found


@dataclass(slots=True)
class _Attempt:
    """What comes of moves before a step, and of the step. misses: no hole was large enough for some request."""

    moves: list[Move]
    holes: _Holes
    places: dict[int, int | None]
    misses: bool = False

    def run(
        self, events: Sequence[Request | Release], wishes: dict[int, int], settled: Collection[int]
    ) -> Request | None:
        """Do events, up to the first request that would go wrong, which is given. settled: what may go anywhere."""
        for event in events:
            if isinstance(event, Release):
                if (at := self.places.pop(event.name)) is not None:
                    self.holes.free(at)
                continue
            at = self.holes.fit(event.size_bytes)
            right = at is not None and abs(at - wishes[event.name]) <= SMALL_BYTES
            if not right and event.name not in settled:
                return event
            self.places[event.name] = self.holes.allocate(event.size_bytes)
            self.misses |= at is None
        return None


def _close_around(begin: _Holes, offsets: Iterable[int], spans: Sequence[tuple[int, int]]) -> list[Move] | None:
    """Moves that close a part of a hole at one of these offsets, or a little above, but for these spans, if any can."""
    for hole in (o for at in offsets for o, n in begin.holes.items() if o - SMALL_BYTES <= at < o + n):
        low, top = hole, hole + begin.holes[hole]
        for start, end in [*sorted(span for span in spans if span[0] < top and hole < span[1]), (top, top)]:
            if moves := _close(begin, low, start - low):
                return moves
            low = max(low, end)
    return None


def _close(holes: _Holes, offset: int, size_bytes: int) -> list[Move] | None:
    """Moves that set a plug here. Holes that it would go to instead are closed meanwhile. None where that can't be."""
    if size_bytes <= SMALL_BYTES:
        return None
    moves: list[Move] = []
    while len(moves) < _MOST_MOVES:
        holes = holes.after(moves[-1:])
        taken = holes.fit(size_bytes)
        if taken is None:
            return None
        if taken == offset:
            return [*moves, (size_bytes, offset), *((0, at) for _, at in moves)]
        below = offset - taken
        if not 0 < below < holes.holes[taken]:
            moves.append((holes.holes[taken], taken))
        elif below <= SMALL_BYTES:
            return None
        else:  # the part of the hole that is below, once that is where a block of its size goes
            first = holes.fit(below)
            assert first is not None
            moves.append((below, taken) if first == taken else (holes.holes[first], first))
    return None

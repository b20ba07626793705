"""Where PyTorch's CUDA allocator puts the blocks of a planned step, and how it is led there.

A planned step has memory of its own, its arena: one segment of the allocator, of which nothing is held between steps.
`pack_slab` says where in it each block should go. But the allocator has a rule: a block goes to the smallest hole that
is large enough, to its start. So holes that would be taken in place of the right one are closed for a while by *plugs*,
blocks that nobody uses:

    offset ^  bbbb          c goes to the lower hole, though it fits the upper one better:
           |  ....          the upper one is plugged before c is asked for
           |  aaaa
           |  cc..

A plug stays until a block is to go where it is. Where a step asks for other blocks than it was led for, its results are
the same, and it reserves more.

Blocks of at most 1 MiB are elsewhere: the allocator has segments of 2 MiB for those.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memplan.problem.caching_allocator import MIN_BLOCK_BYTES, ROUND_LARGE_BYTES, SMALL_BYTES
from memplan.problem.packing import LiveRange, most_alive, pack_slab

# Packings that are tried until one leads to a good arena: what sizes are rounded up to, and which slab is small enough,
# as a multiple of the least. Those with room to spare can be led through an arena more often than the tightest. The
# last is what first fit finds.
_PACKINGS = (
    (MIN_BLOCK_BYTES, 1.015), (SMALL_BYTES // 16, 1.015), (MIN_BLOCK_BYTES, 1.03), (SMALL_BYTES // 4, 1.02),
    (MIN_BLOCK_BYTES, 2.0),
)  # fmt: skip
_GOOD = 1.02  # of the least, for an arena
GUARD_BYTES = ROUND_LARGE_BYTES  # a block at the end of an arena, so that its last hole is one like others
_MOST_MOVES = 24  # before one step of a schedule

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
      for.
    - kept_bytes: what is in the arena when a further microbatch begins.
    - missed: steps of the schedule that ask for blocks which have no place in the arena.
    - reserved_bytes: of the arena, and of such blocks.
    - plugged_bytes: how much higher the peak of what is allocated is for the plugs.
    """

    arena_bytes: int
    moves: tuple[Moves, ...]
    outside: frozenset[int]
    kept_bytes: int = 0
    missed: frozenset[int] = frozenset()
    reserved_bytes: int = 0
    plugged_bytes: int = 0


def lead(
    microbatches: Sequence[Sequence[Moment]], expandable: bool, outside: frozenset[int] = frozenset()
) -> list[Steering]:
    """Ways to lead microbatches through an arena that is as small as is found: with no block missed, then with some.

    The second is only given where it reserves less. expandable: the allocator's setting `expandable_segments`.
    """
    blocks = _live_ranges([moment for moments in microbatches for moment in moments])
    if not blocks:
        return [Steering(0, tuple({} for _ in microbatches), outside)]
    bound_bytes, events = most_alive(blocks.values()), {event for _, events in microbatches[0] for event in events}
    kept_bytes = sum(e.size_bytes for e in events if isinstance(e, Request) and Release(e.name) not in events)
    found: list[Steering] = []
    tried = set[tuple[int, ...]]()
    for unit, enough in _PACKINGS:
        rounded = [LiveRange(-(-b.size_bytes // unit) * unit, b.first, b.last) for b in blocks.values()]
        packing = pack_slab(rounded, int(enough * bound_bytes))
        if packing.offsets in tried:
            continue
        tried.add(packing.offsets)
        targets = dict(zip(blocks, packing.offsets, strict=True))
        roomy = _Leader(2 * packing.size_bytes, expandable, targets, blocks)
        for moments in microbatches:
            roomy.run(moments)
        for size_bytes in dict.fromkeys((packing.size_bytes, roomy.top_bytes, roomy.top_bytes * 21 // 20)):
            arena_bytes = -(-size_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
            leader = _Leader(arena_bytes, expandable, targets, blocks)
            moves = tuple(leader.run(moments) for moments in microbatches)
            missed, all_bytes = frozenset(leader.missed), arena_bytes + leader.outside_bytes
            found.append(Steering(arena_bytes, moves, outside, kept_bytes, missed, all_bytes))
        found.sort(key=lambda one: (one.reserved_bytes, len(one.missed)))
        if found[0].reserved_bytes <= _GOOD * bound_bytes:
            break
    whole = [one for one in found if not one.missed][:1]
    return whole + [found[0]] * bool(found[0].missed)


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

    def hole_at(self, offset: int) -> int | None:
        """Where the hole begins that has this offset, or that begins a little after it."""
        return next((o for o, n in self.holes.items() if o - SMALL_BYTES <= offset < o + n), None)

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
    """An arena while it is led through a training step.

    - top_bytes: the highest end of a block.
    - missed: steps some of whose blocks had no place.
    - outside_bytes: the most of blocks for which no hole was large enough.
    """

    def __init__(
        self, size_bytes: int, expandable: bool, targets: dict[int, int], ranges: dict[int, LiveRange]
    ) -> None:
        """An empty arena. targets, ranges: where each block should go, and when it lives."""
        least_bytes = MIN_BLOCK_BYTES if expandable else SMALL_BYTES + 1
        self.holes = _Holes(least_bytes, {0: size_bytes}, {size_bytes: 0})
        self.targets, self.ranges = dict(targets), ranges
        self.limit_bytes = max(at + ranges[name].size_bytes for name, at in targets.items())
        self.places: dict[int, int | None] = {}  # offsets of live blocks
        self.plugs: dict[int, int] = {}  # bytes by offset
        self.top_bytes = self.outside_bytes = 0
        self.missed: set[int] = set()

    def run(self, moments: Sequence[Moment]) -> Moves:
        """Moves for a microbatch. No plugs are there before and after it."""
        found: Moves = {}
        for index, events in moments:
            if moves := tuple(self._lead(index, events)):
                found[index] = moves
        self.holes = self.holes.after((0, offset) for offset in self.plugs)
        self.plugs.clear()
        return found

    def _lead(self, index: int, events: tuple[Request | Release, ...]) -> list[Move]:
        """Moves before the events of one step, which are then done."""
        requests = [event for event in events if isinstance(event, Request)]
        moves = [(0, p) for p, n in self.plugs.items() if any(self._meets(p, n, r) for r in requests)]
        holes = self.holes.after(moves)
        alike: dict[tuple[int, int | None], list[Request]] = {}
        for request in (r for r in requests if self._lasts(r, requests)):
            alike.setdefault((request.size_bytes, holes.hole_at(self.targets[request.name])), []).append(request)
        for group in alike.values():  # equal blocks in one hole lie in the order in which they are asked for
            offsets = sorted(self.targets[r.name] for r in group)
            self.targets.update((r.name, offset) for r, offset in zip(group, offsets, strict=True))
        settled: set[int] = set()  # what goes where the allocator puts it
        opened = False
        while True:
            begin = self.holes.after(moves)
            holes, places = begin.after(()), dict(self.places)
            wrong, is_homeless = self._attempt(holes, places, events, settled)
            if wrong is None:
                break
            if holes.fit(wrong.size_bytes) is None:  # there was no room beside the plugs
                settled |= {wrong.name} if opened else set()
                moves, opened = [(0, offset) for offset in self.plugs], True
                continue
            more = self._plugs(begin, holes, wrong, requests) if len(moves) < _MOST_MOVES else None
            if more is None:
                settled.add(wrong.name)
            else:
                moves += more
        self.holes, self.places = holes, places
        for size_bytes, offset in moves:
            if size_bytes:
                self.plugs[offset] = size_bytes
            else:
                del self.plugs[offset]
        self.missed |= {index} if is_homeless else set()
        return moves

    def _meets(self, plug: int, size_bytes: int, request: Request) -> bool:
        target = self.targets[request.name]
        return plug < target + request.size_bytes and target < plug + size_bytes

    def _attempt(
        self, holes: _Holes, places: dict[int, int | None], events: Sequence[Request | Release], settled: set[int]
    ) -> tuple[Request | None, bool]:
        """Do events, up to the first request that would go wrong, which is given; and whether one had no place."""
        is_homeless = False
        top_bytes = self.top_bytes
        for number, event in enumerate(events):
            if isinstance(event, Release):
                at = places.pop(event.name)
                if at is not None:
                    holes.free(at)
                continue
            at = holes.fit(event.size_bytes)
            right = at is not None and abs(at - self.targets[event.name]) <= SMALL_BYTES
            if not right and event.name not in settled and not self._may_go_to(at, event, events[number + 1 :]):
                return event, is_homeless
            places[event.name] = at = holes.allocate(event.size_bytes)
            is_homeless |= at is None
            top_bytes = max(top_bytes, 0 if at is None else at + event.size_bytes)
        outside_bytes = sum(self.ranges[name].size_bytes for name, at in places.items() if at is None)
        self.outside_bytes, self.top_bytes = max(self.outside_bytes, outside_bytes), top_bytes
        return None, is_homeless

    def _may_go_to(self, offset: int | None, request: Request, later: Sequence[Request | Release]) -> bool:
        """Whether a block may go to another place than its own, because it is gone when the step is done."""
        if offset is None or Release(request.name) not in later:
            return False
        return not any(isinstance(r, Request) and self._meets(offset, request.size_bytes, r) for r in later)

    def _plugs(self, begin: _Holes, holes: _Holes, wrong: Request, requests: Sequence[Request]) -> list[Move] | None:
        """Moves that bring a request nearer to its place; none, but other places; None where nothing helps.

        - begin, holes: before the step, and when the request is made.
        - requests: all of the step.
        """
        targets = self.targets
        target, taken = targets[wrong.name], holes.fit(wrong.size_bytes)
        wanted = holes.hole_at(target)
        if taken is None or wanted is None:
            return None
        later = requests[requests.index(wrong) + 1 :]
        top, end = max(target, wanted) + wrong.size_bytes, wanted + holes.holes[wanted]
        if taken == wanted:
            below = [r for r in later if wanted - SMALL_BYTES <= targets[r.name] < target]
            below = [r for r in below if self._lasts(r, requests) or not self._has_room(begin, r, {wanted: top})]
            cut = max((targets[r.name] + r.size_bytes for r in below), default=wanted)
            if target - cut > SMALL_BYTES:  # theirs and ours become holes of their own
                return _close(begin, cut, target - cut)
            if below:
                self._put_below(wrong, below)
                return []
            return _close(begin, wanted, target - wanted)
        takings = [r for r in later if begin.hole_at(targets[r.name]) == taken]
        closed = {taken: math.inf, wanted: top}
        takings = [r for r in takings if self._lasts(r, requests) or not self._has_room(begin, r, closed)]
        taking = next(iter(takings), None)
        if taking is None:
            return _close(begin, taken, holes.holes[taken])
        if taking.size_bytes == wrong.size_bytes:
            targets[wrong.name], targets[taking.name] = targets[taking.name], target
            return []
        if target - wanted > SMALL_BYTES:  # the other's hole stays open, and the wanted one is made to fit better
            return _close(begin, wanted, target - wanted)
        return None if any(top <= targets[r.name] < end for r in later) else _close(begin, top, end - top)

    def _lasts(self, request: Request, requests: Sequence[Request]) -> bool:
        """Whether a block is there when others are asked for after the step."""
        return self.ranges[request.name].last > self.ranges[requests[-1].name].first + 1

    def _has_room(self, holes: _Holes, request: Request, closed: dict[int, float]) -> bool:
        """Whether there is room for a block within the slab. closed: up to where holes are taken, by their offset."""
        parts = ((max(o, closed.get(o, o)), o + n) for o, n in holes.holes.items())
        return any(o + request.size_bytes <= min(end, self.limit_bytes) for o, end in parts)

    def _put_below(self, request: Request, later: Sequence[Request]) -> None:
        """Exchange a block with those of its step that come later and were to be below it in the same hole.

        What was to come there while it lives, moves up with them.
        """
        bottom = min(self.targets[r.name] for r in later)
        top, ours, names = self.targets[request.name], self.ranges[request.name], {r.name for r in later}
        for name, theirs in self.ranges.items():
            at = self.targets[name]
            meanwhile = ours.first < theirs.first and theirs.last <= ours.last
            if (meanwhile or name in names) and bottom <= at and at + theirs.size_bytes <= top:
                self.targets[name] += request.size_bytes
        self.targets[request.name] = bottom


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

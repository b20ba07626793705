"""PyTorch's caching allocator of CUDA memory, replayed: what it reserves on the device for a sequence of requests.

A device runs out of *reserved* bytes, those of the segments that the allocator has asked the driver for. They are more
than the *allocated* ones, which tensors hold, by what rounding and fragmentation leave unused:

    allocator = CachingAllocator()
    a = allocator.allocate(3 << 20)      # a segment of 20 MiB, of which 3 are allocated
    allocator.free(a)                    # the segment stays reserved, all of it free

The rules are those of c10/cuda/CUDACachingAllocator.cpp (`DeviceCachingAllocator`), whose functions are named at each.
Sizes in c10/core/AllocatorConfig.h. The same in PyTorch 2.12 to 2.15; tests hold this replay to traces of the real one.

Left out: `record_stream`, private pools of CUDA graphs, and settings of the allocator other than `expandable_segments`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 1 << 20  # kSmallSize: the largest request that the pool of small blocks serves
SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 << 20  # large_segment_size
MIN_OWN_SEGMENT_BYTES = 10 << 20  # kMinLargeAlloc: from here on a request has a segment of its own size
ROUND_LARGE_BYTES = 2 << 20  # kRoundLarge
_ADDRESS_SPACE_BYTES = 1 << 46  # of one expandable segment: more than any device has


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment that holds something, or of one that expands, a range of pages with memory behind them.

    - stream: 0 is that of the steps.
    - small: it is for small requests.
    - blocks: bytes of each, whether it is held, and the name of what holds it.
    """

    address: int
    stream: int
    small: bool
    expands: bool
    blocks: tuple[tuple[int, bool, str], ...]


@dataclass(eq=False, slots=True)
class _Chunk:
    """A range of a segment.

    - expands: the segment is an expandable one.
    - free: nobody holds it. mapped: there is memory behind it (always, but in expandable segments).
    - before, after: neighbours in the segment.
    """

    address: int
    size_bytes: int
    pool: _Pool
    expands: bool = False
    free: bool = True
    mapped: bool = True
    before: _Chunk | None = None
    after: _Chunk | None = None


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks of one stream, of segments for small requests or of those for large ones.

    - free: (size, address) of mapped free blocks, sorted.
    - unmapped: addresses of unmapped blocks, sorted.
    - at: blocks by address.
    """

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    unmapped: list[int] = field(default_factory=list)
    at: dict[int, _Chunk] = field(default_factory=dict)

    @property
    def page_bytes(self) -> int:
        """What an expandable segment grows by."""
        return SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES

    def put(self, block: _Chunk) -> None:
        """Enter a free or unmapped block."""
        self.at[block.address] = block
        if block.mapped:
            insort(self.free, (block.size_bytes, block.address))
        else:
            insort(self.unmapped, block.address)

    def take(self, block: _Chunk) -> None:
        """Remove a free or unmapped block."""
        del self.at[block.address]
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]


class CachingAllocator:
    """The state of one device's allocator.

    - reserved_bytes, peak_reserved_bytes: of all segments, now and at most.
    - allocated_bytes: of blocks that are held. Where a rest is too small to be split off, a block is larger than what
      was asked for.
    """

    def __init__(self, expandable: bool = False, limit_bytes: int | None = None) -> None:
        """An allocator that has reserved nothing.

        - expandable: the setting `expandable_segments`, which may change.
        - limit_bytes: the most that it may reserve, as `torch.cuda.set_per_process_memory_fraction` sets it.
        """
        self.expandable, self._limit = expandable, limit_bytes
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._held: dict[int, _Chunk] = {}
        self._end = SMALL_SEGMENT_BYTES  # of all segments so far
        self.reserved_bytes = self.peak_reserved_bytes = self.allocated_bytes = 0

    @property
    def free_blocks(self) -> dict[tuple[int, bool], tuple[tuple[int, int], ...]]:
        """(bytes, address) of all free blocks, by stream and whether they are for small requests."""
        return {key: tuple(pool.free) for key, pool in self._pools.items()}

    def restore(self, segments: Sequence[Segment]) -> dict[str, list[int]]:
        """Begin with what a process has reserved. Gives addresses of blocks that are held, by the names of holders."""
        found: dict[str, list[int]] = {}
        ends: dict[tuple[int, bool], _Chunk] = {}  # of segments that expand
        for segment in sorted(segments, key=lambda segment: segment.address):
            key, address, before = (segment.stream, segment.small), segment.address, None
            pool = self._pools.setdefault(key, _Pool(segment.small))
            if segment.expands and (before := ends.get(key)) is not None:
                end = before.address + before.size_bytes
                before = self._append(before, _Chunk(end, address - end, pool, True, mapped=False))
            for size_bytes, held, name in segment.blocks:
                before = self._append(before, _Chunk(address, size_bytes, pool, segment.expands, not held))
                if held:
                    found.setdefault(name, []).append(address)
                address += size_bytes
            self._grow(address - segment.address)
            self._end = max(self._end, address)
            if segment.expands and before is not None:
                ends[key] = before
        for last in ends.values():
            address = last.address + last.size_bytes
            self._append(last, _Chunk(address, _ADDRESS_SPACE_BYTES, last.pool, True, mapped=False))
            self._end = max(self._end, address + _ADDRESS_SPACE_BYTES)
        return found

    def _append(self, before: _Chunk | None, block: _Chunk) -> _Chunk:
        """Enter a block that is made behind another one of its segment."""
        block.before = before
        if before is not None:
            before.after = block
        if block.free:
            block.pool.put(block)
        else:
            self._held[block.address] = block
            self.allocated_bytes += block.size_bytes
        return block

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """The address of a new block; 0 for no bytes, and for a request that is refused. (`malloc`)

        A request is refused if it can't be served within the limit, even with all cached blocks given back.
        """
        if not size_bytes:
            return 0
        size = -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        small = size <= SMALL_BYTES
        pool = self._pools.get((stream, small)) or self._pools.setdefault((stream, small), _Pool(small))
        block = self._best_fit(pool, size) or self._reserve(pool, size)
        if block is None:
            self.empty_cache()
            block = self._reserve(pool, size)
        if block is None:
            return 0
        left = block.size_bytes - size
        if left >= MIN_BLOCK_BYTES if small or self.expandable else left > SMALL_BYTES:  # `should_split`
            pool.put(self._cut(block, size))
        block.free = False
        self._held[block.address] = block
        self.allocated_bytes += block.size_bytes
        return block.address

    def free(self, address: int) -> None:
        """Free a block: it is merged with free neighbours and stays reserved. (`free_block`)"""
        if not address:
            return
        block = self._held.pop(address)
        self.allocated_bytes -= block.size_bytes
        block.free = True
        self._merge(block)
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Give back segments of which nothing is held; of expandable ones, pages of which nothing is held.

        (`release_cached_blocks`)
        """
        for pool in sorted(self._pools.values(), key=lambda pool: pool.small):
            for _, address in list(pool.free):
                block = pool.at[address]
                if block.expands:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self._grow(-block.size_bytes)

    def _place(self, size_bytes: int) -> int:
        """The address of a new segment. Of free blocks of one size, that of the oldest segment is taken first."""
        address, self._end = self._end, self._end + size_bytes
        return address

    def _grow(self, size_bytes: int) -> None:
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _best_fit(self, pool: _Pool, size: int) -> _Chunk | None:
        """The smallest free block that is large enough, taken out of the pool. (`get_free_block`)

        In an expandable segment the block that can still grow counts with what it can grow to.
        """
        index = bisect_left(pool.free, (size, 0))
        if index == len(pool.free):
            return None
        block = pool.at[pool.free[index][1]]
        if self.expandable:
            while index + 1 < len(pool.free):
                other = pool.at[pool.free[index + 1][1]]
                if _growable_bytes(other) >= _growable_bytes(block):
                    break
                block, index = other, index + 1
        pool.take(block)
        return block

    def _cut(self, block: _Chunk, size: int) -> _Chunk:
        """Shorten a block to this size; returns the rest, a block of its own. (`alloc_found_block`)"""
        left = block.size_bytes - size
        rest = _Chunk(block.address + size, left, block.pool, block.expands, True, block.mapped, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size_bytes, block.after = size, rest
        return rest

    def _merge(self, block: _Chunk) -> None:
        """Merge a block, which is in no pool, with neighbours that are free like it. (`try_merge_blocks`)"""
        before, after = block.before, block.after
        if before is not None and before.free and before.mapped == block.mapped:
            before.pool.take(before)
            block.address, block.size_bytes = before.address, before.size_bytes + block.size_bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free and after.mapped == block.mapped:
            after.pool.take(after)
            block.size_bytes, block.after = block.size_bytes + after.size_bytes, after.after
            if block.after is not None:
                block.after.before = block

    def _reserve(self, pool: _Pool, size: int) -> _Chunk | None:
        """A free block of new memory; None over the limit. (`alloc_block`)"""
        new_bytes = SMALL_SEGMENT_BYTES if pool.small else segment_bytes(size)
        if self._limit is not None and self.reserved_bytes + new_bytes > self._limit:
            return None
        if not self.expandable:
            self._grow(new_bytes)
            return _Chunk(self._place(new_bytes), new_bytes, pool)
        block = self._room(pool, size)  # pages are mapped where they are missing (`try_allocate_expandable_block`)
        if not block.mapped:
            block = self._map(block, size)
        while block.size_bytes < size:
            assert block.after is not None
            block = self._map(block.after, size - block.size_bytes)
        pool.take(block)
        return block

    def _room(self, pool: _Pool, size: int) -> _Chunk:
        """Where the segment has room for this size, pages that are not mapped included. (`find_expandable_block`)

        It is the lowest unmapped block, with the free one before it, behind which enough is free or unmapped.
        """
        if not pool.unmapped:
            pool.put(_Chunk(self._place(_ADDRESS_SPACE_BYTES), _ADDRESS_SPACE_BYTES, pool, expands=True, mapped=False))
        for address in pool.unmapped:
            first = pool.at[address]
            if first.before is not None and first.before.free:
                first = first.before
            room = 0
            block: _Chunk | None = first
            while room < size and block is not None and block.free:
                room, block = room + block.size_bytes, block.after
            if room >= size:
                return first
        raise AssertionError("an expandable segment ends with more address space than a device has memory")

    def _map(self, block: _Chunk, size: int) -> _Chunk:
        """Map pages at the start of an unmapped block, for this size or all of the block. (`map_block`)"""
        pool = block.pool
        mapped_bytes = min(block.size_bytes, -(-size // pool.page_bytes) * pool.page_bytes)
        pool.take(block)
        if mapped_bytes < block.size_bytes:
            pool.put(self._cut(block, mapped_bytes))
        block.mapped = True
        self._merge(block)
        pool.put(block)
        self._grow(mapped_bytes)
        return block

    def _unmap(self, block: _Chunk) -> None:
        """Unmap the whole pages of a free block. (`unmap_block`)"""
        pool, page = block.pool, block.pool.page_bytes
        first = block
        while first.before is not None:
            first = first.before
        start = first.address  # of the segment
        begin = start + -(-(block.address - start) // page) * page
        end = start + (block.address + block.size_bytes - start) // page * page
        if begin >= end:
            return
        pool.take(block)
        if begin > block.address:
            rest = self._cut(block, begin - block.address)
            pool.put(block)
            block = rest
        if end < block.address + block.size_bytes:
            pool.put(self._cut(block, end - block.address))
        block.mapped = False
        self._grow(begin - end)
        self._merge(block)
        if block.before is not None or block.after is not None:  # else the whole segment goes
            pool.put(block)


def segment_bytes(size_bytes: int) -> int:
    """Bytes of a segment that is made for a large request of this size. (`get_allocation_size`)"""
    least_bytes = LARGE_SEGMENT_BYTES if size_bytes < MIN_OWN_SEGMENT_BYTES else size_bytes
    return -(-least_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _growable_bytes(block: _Chunk) -> int:
    after = block.after
    return block.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)

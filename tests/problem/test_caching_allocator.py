"""The replay of PyTorch's CUDA allocator against recorded traces of the real one, and against a real one at hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from memplan import torch_private as private
from memplan.problem.caching_allocator import CachingAllocator, Segment
from tests.support.allocator_traces import FOLDER, KINDS, NEEDS_ALLOCATOR, Trace, first_difference, record_in_a_process

MIB = 1 << 20
TRACES = sorted(FOLDER.glob("*.json.gz"))


def test_there_are_traces_of_every_kind() -> None:
    assert {path.name.split("_")[0] for path in TRACES} == {kind for kind, _ in KINDS} and len(TRACES) == len(KINDS)
    kinds = {event[0] for path in TRACES for event in Trace.load(path).events}
    assert kinds >= {"alloc", "free", "empty", "expand", "refused"}


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.split(".")[0])
def test_the_replay_does_what_the_allocator_did(path: Path) -> None:
    """Each address, each growth of what is reserved and each refusal."""
    assert first_difference(Trace.load(path)) is None


@pytest.mark.gpu
@pytest.mark.twin
@NEEDS_ALLOCATOR
@pytest.mark.parametrize(("kind", "expandable"), KINDS)
def test_the_replay_does_what_this_allocator_does(kind: str, expandable: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    record_in_a_process(kind, expandable, 1, 800, path)
    assert first_difference(Trace.load(path)) is None


@pytest.mark.gpu
@pytest.mark.twin
@NEEDS_ALLOCATOR
@pytest.mark.skipif(torch.__version__ < "2.12", reason="the lowest address decides")
def test_of_equal_holes_that_of_the_oldest_segment_is_taken() -> None:
    size_bytes = 512 << 10  # four to a segment
    blocks = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(64)]
    holes = [blocks.pop(at).data_ptr() for at in (57, 49, 41)][::-1]
    holders = {block.data_ptr(): f"block {age}" for age, block in enumerate(blocks)}
    allocator = CachingAllocator(private.segments_expand())
    found = allocator.restore([Segment(*one) for one in private.reserved_before(torch.device("cuda"), holders)])
    taken = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in holes]
    assert [block.data_ptr() for block in taken] == holes
    for hole in holes:
        address = allocator.allocate(size_bytes)
        moved = {hole - real: address - found[name][0] for real, name in holders.items() if abs(hole - real) < 2 << 20}
        assert all(real == replayed for real, replayed in moved.items() if abs(real) == size_bytes)


@pytest.mark.parametrize(
    ("size_bytes", "reserved"), [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)]
)
def test_segments_come_in_these_sizes(size_bytes: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size_bytes)
    assert allocator.reserved_bytes == reserved * MIB


def test_a_rest_of_up_to_a_mebibyte_is_not_split_off() -> None:
    allocator, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for each in (allocator, expandable):
        each.free(each.allocate(12 * MIB))
        each.allocate(11 * MIB)
    assert allocator.allocated_bytes == 12 * MIB and expandable.allocated_bytes == 11 * MIB


def test_segments_from_before_they_expand_go_back_whole() -> None:
    allocator = CachingAllocator()
    held, whole = allocator.allocate(3 * MIB), allocator.allocate(40 * MIB)  # segments of 20 and 40 MiB
    allocator.expandable = True
    in_hole, grown = allocator.allocate(10 * MIB), allocator.allocate(30 * MIB)  # two pages of a segment that expands
    assert held < in_hole < whole < grown and allocator.reserved_bytes == 100 * MIB
    for address in (in_hole, whole, grown):
        allocator.free(address)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_no_two_blocks_overlap(expandable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied, empty_cache = list[CachingAllocator](), CachingAllocator.empty_cache

    def noted(self: CachingAllocator) -> None:
        emptied.append(self)
        empty_cache(self)

    monkeypatch.setattr(CachingAllocator, "empty_cache", noted)
    rng, allocator = random.Random(0), CachingAllocator(expandable, 300 * MIB)
    held: dict[int, int] = {}
    for _ in range(2000):
        if held and rng.random() < 0.48:
            address = rng.choice(list(held))
            del held[address]
            allocator.free(address)
            continue
        size = int(2 ** rng.uniform(0, 25))
        address = allocator.allocate(size, rng.randrange(2))
        if not address:
            continue
        assert address not in held
        held[address] = size
        assert sum(held.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes <= 300 * MIB
    ends = 0
    for address in sorted(held):
        assert address >= ends
        ends = address + held[address]
    assert emptied  # all cached blocks were given back, because a request was over the limit
    for address in held:
        allocator.free(address)
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0


def segments_of(allocator: CachingAllocator, stream: int = 0) -> list[Segment]:
    """What the allocator has reserved, as PyTorch describes it: each range of memory of a segment is one of its own."""
    chunks = [*allocator._held.values(), *(chunk for pool in allocator._pools.values() for chunk in pool.at.values())]
    found = []
    for chunk in chunks:
        if not chunk.mapped or (chunk.before is not None and chunk.before.mapped):
            continue
        blocks, one = [], chunk
        while one is not None and one.mapped:
            blocks.append((one.size_bytes, not one.free, "" if one.free else f"block {one.address}"))
            one = one.after
        found.append(Segment(chunk.address, stream, chunk.pool.small, chunk.expands, tuple(blocks)))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("expandable", [False, True])
def test_an_allocator_goes_on_from_what_a_process_has_reserved(expandable: bool, seed: int) -> None:
    rng, allocator = random.Random(seed), CachingAllocator(expandable)
    stay = [allocator.allocate(1000), allocator.allocate(3 * MIB)]  # where ranges begin that expand, nobody is told
    held: list[int] = []

    def goes_on(*allocators: CachingAllocator) -> bool:
        """Make a random request of them all: whether they give it the same place."""
        if held and rng.random() < 0.5:
            address = held.pop(rng.randrange(len(held)))
            for each in allocators:
                each.free(address)
            return True
        size_bytes = rng.choice([1000, 300_000, 3 * MIB, 7 * MIB, 24 * MIB])
        first, *others = (each.allocate(size_bytes) for each in allocators)
        held.append(first)
        return others == [first] * len(others)

    assert all(goes_on(allocator) for _ in range(300))
    allocator.empty_cache()
    other = CachingAllocator(expandable)
    found = other.restore(segments_of(allocator)[::-1])
    assert found == {f"block {address}": [address] for address in (*stay, *held)}
    assert other.reserved_bytes == allocator.reserved_bytes and other.allocated_bytes == allocator.allocated_bytes
    other._end = allocator._end  # new segments may be anywhere
    assert all(goes_on(allocator, other) for _ in range(300))
    assert other.reserved_bytes == allocator.reserved_bytes and other.free_blocks == allocator.free_blocks

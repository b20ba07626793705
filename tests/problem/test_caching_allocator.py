"""The replay of PyTorch's CUDA allocator against recorded traces of the real one, and against a real one at hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from memplan.problem.caching_allocator import CachingAllocator
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

"""Packing against exhaustive search."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.problem.packing import LiveRange, Packing, columns, eject, most_alive, pack_slab
from tests.support.parameters import examples

FUZZ = settings(max_examples=examples(100), deadline=None, derandomize=True, database=None)


@st.composite
def lifetimes(draw: st.DrawFn, most: int) -> list[LiveRange]:
    count, found = draw(st.integers(1, most)), list[LiveRange]()
    for _ in range(count):
        first = draw(st.integers(0, 7))
        found.append(LiveRange(draw(st.integers(1, 9)), first, first + draw(st.integers(1, 5))))
    return found


def meet(a: LiveRange, b: LiveRange) -> bool:
    return a.first < b.last and b.first < a.last


def least_slab(blocks: Sequence[LiveRange]) -> int:
    """The smallest slab. Blocks of it, let down in order of their offsets, lie where first fit puts them."""
    least = sum(b.size_bytes for b in blocks)
    for order in permutations(blocks):
        placed: list[tuple[LiveRange, int]] = []
        for block in order:
            beside = sorted((at, at + other.size_bytes) for other, at in placed if meet(block, other))
            offset = 0
            for start, end in beside:
                if start - offset >= block.size_bytes:
                    break
                offset = max(offset, end)
            placed.append((block, offset))
        least = min(least, max(at + block.size_bytes for block, at in placed))
    return least


def assert_sound(blocks: Sequence[LiveRange], packing: Packing) -> None:
    ends = [at + b.size_bytes for at, b in zip(packing.offsets, blocks, strict=True)]
    assert packing.size_bytes == max(ends, default=0) and min(packing.offsets, default=0) >= 0
    assert packing.size_bytes >= most_alive(blocks)
    by_time = sorted(range(len(blocks)), key=lambda i: blocks[i].first)
    alive: list[int] = []
    for i in by_time:
        alive = [j for j in alive if blocks[j].last > blocks[i].first]
        assert all(ends[j] <= packing.offsets[i] or ends[i] <= packing.offsets[j] for j in alive)
        alive.append(i)


def test_nothing_takes_no_slab() -> None:
    assert pack_slab(()) == Packing((), 0)


@FUZZ
@given(lifetimes(6))
def test_few_blocks_are_packed_as_well_as_they_can_be(blocks: list[LiveRange]) -> None:
    packing = pack_slab(blocks)
    assert_sound(blocks, packing)
    assert packing.size_bytes == least_slab(blocks)


@FUZZ
@given(lifetimes(60), st.integers(0, 60))
def test_blocks_that_live_at_one_time_share_no_byte(blocks: list[LiveRange], enough_bytes: int) -> None:
    packing = pack_slab(blocks, enough_bytes)
    assert_sound(blocks, packing)
    assert packing == pack_slab(blocks, enough_bytes)
    assert packing.size_bytes <= enough_bytes or packing == pack_slab(blocks)


@pytest.mark.parametrize("seed", [2, 5])
def test_hard_blocks_are_packed_tighter_than_by_first_fit(seed: int) -> None:
    """No slab of 1.008 times the bound is found at first. First fit takes 1.05 and 1.08 times."""
    draw = random.Random(seed)
    firsts = [draw.randrange(60) for _ in range(150)]
    blocks = [LiveRange(draw.randint(1, 100), first, first + draw.randint(1, 20)) for first in firsts]
    assert pack_slab(blocks).size_bytes <= 1.02 * most_alive(blocks)


@pytest.mark.parametrize("name", ["vit", "densenet_two_batches"])
def test_floors_of_models_are_packed_to_a_hundredth(name: str) -> None:
    """Blocks over 1 MiB of planned steps, by (size in 512 bytes, end). Each begins one later than the one before."""
    with gzip.open(Path(__file__).with_name("floors.json.gz")) as file:
        recorded = json.load(file)[name]
    blocks = [LiveRange(512 * size, first, last) for first, (size, last) in enumerate(recorded)]
    packing = pack_slab(blocks)
    assert_sound(blocks, packing)
    assert packing.size_bytes <= 1.01 * most_alive(blocks)


@FUZZ
@given(lifetimes(40), st.randoms(use_true_random=False))
def test_blocks_find_places_beside_those_that_stay(blocks: list[LiveRange], draw: random.Random) -> None:
    packing = pack_slab(blocks)
    stay = np.array([draw.random() < 0.5 for _ in blocks])
    offsets = np.where(stay, packing.offsets, -1)
    limit_bytes = packing.size_bytes + draw.randrange(10)
    found = eject(*columns(blocks), offsets, stay, limit_bytes, 0, 500)
    assert found.min() >= 0
    assert_sound(blocks, Packing(tuple(found.tolist()), max(at + b.size_bytes for at, b in zip(found, blocks))))
    assert (found + columns(blocks)[0] <= limit_bytes).all() and (found[stay] == offsets[stay]).all()


def test_a_block_that_meets_one_that_stays_everywhere_has_no_place() -> None:
    blocks = [LiveRange(4, 0, 3), LiveRange(5, 1, 2)]
    stay = np.array([True, False])
    assert eject(*columns(blocks), np.array([0, -1]), stay, 8, 0, 500).tolist() == [0, -1]

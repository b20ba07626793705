"""Random modules made of Python habits: four planned steps and four eager ones leave every object the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.parameters import quickly
from tests.support.python_habits import difference, program, run_program

_AT_ONCE = 25
_IN_PLACE = "modified by an inplace operation"  # autograd's check, also where what it guards does not matter


def plan(seed: int, net: nn.Module, arguments: Any) -> nn.Module:
    """Plan a program's model, in one of a few ways."""
    options: dict[str, Any] = {"host_budget": "1GiB"} if seed % 10 == 3 else {"budget": ("1GiB", "min")[seed % 2]}
    return memplan.apply(net, arguments, costs="estimate", **{"budget": "1GiB", **options})


def runs_the_same(seed: int, folder: Path) -> bool:
    """Whether four planned steps ran. What did not is refused in words; what did is the same."""
    torch.set_num_threads(1)
    plain = run_program(seed, folder, lambda net, arguments: net)
    planned = run_program(seed, folder, functools.partial(plan, seed))
    for number, (a, b) in enumerate(zip(plain.records, planned.records)):
        where = difference(a, b)
        assert where is None, f"program {seed}, step {number}: {where}\n{program(seed)[-1500:]}"
    if planned.refusal:
        return False
    if plain.error or planned.error:
        same = plain.error.partition(":")[0] == planned.error.partition(":")[0]
        assert same or _IN_PLACE in plain.error, f"program {seed}: {plain.error!r}, planned {planned.error!r}"
    return True


def run_programs(first: int, count: int, folder: Path) -> None:
    ran = [runs_the_same(seed, folder) for seed in range(first, first + count)]
    assert sum(ran) >= 0.8 * count  # few are refused


@pytest.mark.filterwarnings("ignore")  # of PyTorch, about what these programs do
@pytest.mark.parametrize("first", quickly(range(0, 150, _AT_ONCE), 0, 50))
def test_nothing_is_lost(first: int, tmp_path: Path) -> None:
    run_programs(first, _AT_ONCE, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(150, 5150, 100))
def test_nothing_is_lost_in_thousands(first: int, tmp_path: Path) -> None:
    run_programs(first, 100, tmp_path)

"""The SFTTrainer of TRL with dynamic padding: one plan for every length, and the plain run's bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

pytest.importorskip("trl")

from benchmarks.sft import Run, build
from memplan.integrations.huggingface import MemplanCallback
from tests.support.parameters import quickly


@pytest.mark.parametrize(
    ("name", "budget"), quickly(itertools.product(("gpt2", "llama"), ("1TiB", "110MiB")), ("gpt2", "110MiB"))
)
def test_twelve_batches(name: str, budget: str, plans_made: Callable[[], int]) -> None:
    """Its loss is made of log_probs, which the first backward tells. The second plan is for all lengths."""
    plain = Run(build(name, layers=2, width=64), 12)
    planned = Run(build(name, layers=2, width=64), 12, MemplanCallback(budget, costs="estimate"))
    assert len(set(plain.shapes)) >= 10
    assert plans_made() == 2
    assert planned.equals(plain)


def test_its_default_of_gradient_checkpointing() -> None:
    """SFTConfig switches it on. The plan switches it off, and the bits are those of either."""
    runs = [
        Run(build("gpt2", layers=2, width=64), 3, *callbacks, activation_checkpointing=True)
        for callbacks in ((), (MemplanCallback("1TiB", costs="estimate"),))
    ]
    assert runs[0].equals(runs[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_hundred_batches(name: str, plans_made: Callable[[], int]) -> None:
    plain = Run(build(name, layers=4, width=128), 200)
    planned = Run(build(name, layers=4, width=128), 200, MemplanCallback("1TiB"))
    assert len(set(plain.shapes)) >= 60
    assert plans_made() == 2
    assert planned.equals(plain)

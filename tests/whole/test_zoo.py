"""The zoo itself: every model trains, repeats itself bit for bit, and a difference is found where there is one."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import zoo


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_plain_training_repeats_itself(name: str, autocast: bool) -> None:
    runs = []
    for _ in range(2):
        net, sample = zoo.MODELS[name](1)
        assert net.training
        runs.append(zoo.run_steps(net, sample, autocast=autocast))
    zoo.assert_same_bits(*runs)
    losses = [float(loss) for loss in runs[0]["losses"]]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("name", zoo.MODELS)
def test_another_seed_gives_another_run(name: str) -> None:
    first, second = (zoo.run_steps(*zoo.MODELS[name](seed), steps=1) for seed in (1, 2))
    with pytest.raises(AssertionError, match=r"^result\.outputs\[0\]"):
        zoo.assert_same_bits(first, second)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2), torch.zeros(3), "shape"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype"),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), "strides"),
        (torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]), r"1 of 2 elements differ, first at \(1,\)"),
        (torch.tensor(1.0), torch.tensor(1.0000001), "1 of 1 elements"),
        (torch.tensor(1j), torch.tensor(2j), "1 of 1 elements"),
        ({"a": 1}, {"b": 1}, "keys"),
        ({"a": [1, (2,)]}, {"a": [1, (3,)]}, r"result\.a\[1\]\[0\]: 2 against 3"),
        ([1], [1, 2], "length"),
        ([1], (1,), "type list against tuple"),
        (None, 0, "type NoneType against int"),
    ],
)
def test_differences_are_found(a: object, b: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        zoo.assert_same_bits(a, b)


def test_equal_nan_bits_are_equal() -> None:
    a = {"x": [torch.tensor([math.nan, 1.0]), math.nan, "s", None, torch.ones(2, dtype=torch.bool)]}
    zoo.assert_same_bits(a, zoo.copied(a))


def test_copies_keep_strides_and_share_nothing() -> None:
    base = torch.arange(6.0)
    tree = {"expanded": base[:1].expand(4), "transposed": base.view(2, 3).t()}
    copy = zoo.copied(tree)
    zoo.assert_same_bits(tree, copy)
    base.zero_()
    assert float(copy["transposed"][2, 1]) == 5.0

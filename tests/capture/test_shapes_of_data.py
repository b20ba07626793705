"""Shapes that depend on the data of inputs: planned whole, checked before each call, with bits of the plain step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import UnsupportedModel
from tests.support.zoo import assert_same_bits, run_steps

Select = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.nn.functional.gelu(self.wide(x)))


class Net(nn.Module):
    def __init__(self, select: Select) -> None:
        super().__init__()
        self.embed, self.layers, self.select = nn.Embedding(50, 16), nn.ModuleList(Block() for _ in range(4)), select

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.select(self.embed(ids), ids, mask)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def images(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As the vision towers of Qwen cut a row of patches into images of several sizes."""
    lengths = mask.sum(1)
    ends = torch.repeat_interleave(lengths, 2).cumsum(0)
    pieces = torch.split(x[mask], lengths.tolist())
    widest = torch.tensor([n.max() for n in lengths.split(2)]).max()
    return torch.cat(pieces) * (ends.max() / (widest + ends.numel()))


WAYS: dict[str, Select] = {
    "a mask": lambda x, ids, mask: x[mask],
    "a mask of rows and one of columns": lambda x, ids, mask: x[mask.any(1)][:, mask.any(0)],
    "a mask and an index": lambda x, ids, mask: x.unsqueeze(0).expand(3, -1, -1, -1)[ids[0, 0] % 3, mask],
    "nonzero": lambda x, ids, mask: x.flatten(0, 1)[mask.flatten().nonzero().squeeze(1)],
    "where": lambda x, ids, mask: x[torch.where(mask)],
    "masked_select": lambda x, ids, mask: torch.masked_select(x, mask.unsqueeze(-1)).view(-1, 16),
    "repeat_interleave": lambda x, ids, mask: x.flatten(0, 1).repeat_interleave(mask.flatten().int(), dim=0),
    "unique": lambda x, ids, mask: x.flatten(0, 1)[torch.unique(ids[mask])],
    "unique with counts": lambda x, ids, mask: x.flatten(0, 1)[torch.unique(ids, return_counts=True)[1]],
    "a count of nonzero": lambda x, ids, mask: x * mask.nonzero().shape[0],
    "images": images,
}


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (8, 64), generator=generator)
    return ids, torch.arange(64)[None] < torch.randint(20, 64, (8, 1), generator=generator)


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_planned_whole(way: str) -> None:
    torch.manual_seed(0)
    net = Net(WAYS[way])
    planned = copy.deepcopy(net)
    memplan.apply(planned, batch(0), "min", costs="estimate")
    plan = memplan.plan_of(planned)
    assert isinstance(plan, memplan.Plan)
    assert not plan.islands
    assert plan.peak_bytes < 0.85 * plan.baseline_peak_bytes
    assert_same_bits(run_steps(net, batch(0), 2), run_steps(planned, batch(0), 2))


@pytest.mark.parametrize("way", ["a mask", "unique", "images"])
def test_each_batch_may_have_another_shape(way: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net = Net(WAYS[way])
    planned = copy.deepcopy(net)
    memplan.apply(planned, batch(0), "700KB", costs="estimate")
    for seed in (1, 2, 0, 3, 4, 5, 6):
        assert_same_bits(run_steps(net, batch(seed), 1), run_steps(planned, batch(seed), 1))
    if way != "unique":
        assert "has changed in each of" in caplog.text  # after a few plans, steps run as they are
        assert "layers checkpointed by PyTorch" in caplog.text


def test_masks_that_parameters_make_are_no_sizes() -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModel, match="shape of a result depends on data"):
        memplan.plan(Net(lambda x, ids, mask: x[x.sum(-1) > 0]), batch(0), "1GiB", costs="estimate")


class Positions(nn.Module):
    """Keeps what it made of the latest batch, and asks whether there is any."""

    def __init__(self, use: Callable[[Positions, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net, self.latest, self.use = Net(lambda x, ids, mask: x), None, use
        self.bank, self.counts = list[torch.Tensor](), {"n": 0}

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        used = self.use(self, mask)
        self.latest = mask.sum(1) * 2
        return self.net(ids, mask) * used / 512


def asks_for_none(net: Positions, mask: torch.Tensor) -> torch.Tensor:
    return mask[0, 0].float() if net.latest is None or mask.dim() == 2 else mask.float().sum()


def test_attributes_that_are_only_compared_with_none_are_set_anew() -> None:
    torch.manual_seed(0)
    net = Positions(asks_for_none)
    planned = copy.deepcopy(net)
    memplan.apply(planned, batch(0), "min", costs="estimate")
    plan = memplan.plan_of(planned)
    assert isinstance(plan, memplan.Plan)
    assert not plan.islands
    for seed in range(3):
        assert_same_bits(run_steps(net, batch(seed), 1), run_steps(planned, batch(seed), 1))
        assert_same_bits(net.latest, planned.latest)


class TellsOfTheFirst(Positions):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:  # type: ignore[override]
        is_first = self.latest is None
        return super().forward(ids, mask), is_first


def test_what_forward_returns_may_depend_on_none() -> None:
    torch.manual_seed(0)
    net = TellsOfTheFirst(asks_for_none)
    memplan.apply(net, batch(0), "1GiB", costs="estimate")
    assert [net(*batch(0))[1] for _ in range(3)] == [True, False, False]


class Peaks(nn.Module):
    """Asks for the largest of what a mask selects, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(lambda x, ids, mask: x)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        chosen = ids[mask]
        factor = 2 if chosen.shape[0] > 0 and chosen.max() > 40 else 1
        return self.net(ids, mask) * factor


def test_numbers_that_a_batch_does_not_have() -> None:
    torch.manual_seed(0)
    net = Peaks()
    planned = copy.deepcopy(net)
    memplan.apply(planned, batch(0), "1GiB", costs="estimate")
    for ids, mask in (batch(0), (batch(1)[0], torch.zeros(8, 64, dtype=torch.bool)), batch(0)):
        assert_same_bits(run_steps(net, (ids, mask), 1), run_steps(planned, (ids, mask), 1))


@pytest.mark.parametrize(
    "use",
    [
        lambda net, mask: mask.sum() if net.latest is None else net.latest.sum(),
        lambda net, mask: mask.sum() * (1 if net.latest is None else 2),
        lambda net, mask: mask.sum() * (2 if isinstance(net.latest, torch.Tensor) else 1),
        lambda net, mask: mask.sum() * (2 if type(net.latest) is torch.Tensor else 1),
        lambda net, mask: mask.sum() + (0 if net.latest is None else len(net.bank.append(net.latest) or "")),
        lambda net, mask: mask.sum() + (0 if net.latest is None else len(net.counts.update(n=1) or "")),
    ],
)
def test_attributes_that_forward_reads_keep_their_bits(use: Callable[[Positions, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    net = Positions(use)
    planned = copy.deepcopy(net)
    memplan.apply(planned, batch(0), "1GiB", costs="estimate")
    for seed in range(3):
        assert_same_bits(run_steps(net, batch(seed), 1), run_steps(planned, batch(seed), 1))
        assert_same_bits(net.latest, planned.latest)

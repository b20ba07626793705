"""Shapes that depend on the data of inputs: planned whole, checked before each call, with bits of the plain step."""

from __future__ import annotations

import copy
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import UnsupportedModel
from memplan.installed.planned_forward import planned_forward
from tests.support.meter import LiveMeter
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


def pieces(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A row of several lengths, cut into these."""
    lengths = mask.sum(1).tolist()
    return torch.cat([piece * n / 64 for piece, n in zip(torch.split(x[mask], lengths), lengths)])


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
    "pieces": pieces,
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


@pytest.mark.parametrize("way", [way for way in WAYS if way != "images"])
def test_one_plan_serves_many_shapes(way: str) -> None:
    """What a second batch shows to vary is a size of the plan, as a length is. Its peak is predicted for each batch."""
    torch.manual_seed(0)
    net = Net(WAYS[way])
    planned = copy.deepcopy(net)
    memplan.apply(planned, batch(0), "1MiB", costs="estimate")
    for seed in (1, 2, 3, 4, 5, 6):
        assert_same_bits(run_steps(net, batch(seed), 1), run_steps(planned, batch(seed), 1))
        planned.zero_grad()
        meter, sample = LiveMeter(), batch(seed)
        meter.register([list(planned.parameters()), sample])
        with meter:
            planned(*sample).backward()
        plan = memplan.plan_of(planned)
        assert isinstance(plan, memplan.Plan)
        assert meter.peak_bytes <= plan.live_peak_bytes
    numbers = 3 if way == "a mask and an index" else 1  # ids[0, 0] % 3 is a number of a plan, and no size
    assert planned_forward(planned).choice.known.kinds <= 1 + numbers


def test_each_batch_may_have_other_numbers(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net = Net(images)
    planned = copy.deepcopy(net)
    memplan.apply(planned, batch(0), "700KB", costs="estimate")
    for seed in (1, 2, 0, 3, 4, 5, 6):
        assert_same_bits(run_steps(net, batch(seed), 1), run_steps(planned, batch(seed), 1))
    assert "has changed in each of" in caplog.text  # after a few plans, steps run as they are
    assert "layers checkpointed by PyTorch" in caplog.text


def selected_at_most(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A part of what a mask selects, by positions that depend on how much that is, and by what is selected of it."""
    chosen, kept = x[mask], ids[mask]
    every_third = torch.arange(chosen.shape[0])
    return torch.cat([chosen[every_third % 3 == 0], chosen[kept > 20], chosen.view(-1, 16)])


def test_sizes_follow_from_sizes_that_follow_from_data() -> None:
    """No element, and one, have plans of their own; all other counts share one."""
    torch.manual_seed(0)
    net = Net(selected_at_most)
    planned = copy.deepcopy(net)
    memplan.apply(planned, batch(0), "1MiB", costs="estimate")
    for seed in range(1, 7):
        assert_same_bits(run_steps(net, batch(seed), 1), run_steps(planned, batch(seed), 1))
    assert planned_forward(planned).choice.known.kinds <= 2
    for count in (1, 2, 9, 1, 30, 500):
        few = torch.arange(512).reshape(8, 64) < count
        assert_same_bits(run_steps(net, (batch(0)[0], few), 1), run_steps(planned, (batch(0)[0], few), 1))
    assert planned_forward(planned).choice.known.kinds < 8


class Sized(nn.Module):
    """Returns sizes that vary: of a result, of an input, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        chosen = self.net(x)[mask]
        return {"loss": chosen.square().sum(), "count": chosen.shape[0], "sizes": [x.shape[1], 2 * chosen.numel()]}


def test_numbers_that_forward_returns_are_those_of_the_call() -> None:
    torch.manual_seed(0)
    net = Sized()
    memplan.apply(net, (torch.randn(4, 10, 16), torch.rand(4, 10) < 0.5), "1GiB", costs="estimate")
    for length in (10, 11, 12, 12, 7):
        mask = torch.rand(4, length) < 0.5
        output = net(torch.randn(4, length, 16), mask)
        count = int(mask.sum())
        assert (output["count"], output["sizes"]) == (count, [length, 32 * count])
    assert planned_forward(net).choice.known.kinds <= 4


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


def matches_an_int(n: Any) -> bool:
    match n:
        case int() if n > 20:
            return True
    return False


@functools.singledispatch
def is_long(n: object) -> bool:
    return False


@is_long.register
def _(n: int) -> bool:
    return n > 20


class AsksForKinds(nn.Module):
    def __init__(self, asks: Callable[[Any], bool]) -> None:
        super().__init__()
        self.net, self.asks = nn.Linear(16, 16), asks

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        chosen = x[mask]
        return self.net(chosen) * (2 if self.asks(x.shape[1]) else 1) * (3 if self.asks(chosen.shape[0]) else 1)


@pytest.mark.parametrize(
    "asks",
    [
        lambda n: isinstance(n, int) and n > 20,
        lambda n: isinstance(n, (float, int)) and n > 20,
        lambda n: isinstance(n, numbers.Integral) and n > 20,
        lambda n: isinstance(n * 0.5, float) and n > 20,
        lambda n: isinstance(n > 20, bool) and n > 20,
        lambda n: n.__class__ is int and n > 20,
        matches_an_int,
        is_long,
    ],
)
def test_sizes_that_vary_are_of_the_kind_that_eager_has(asks: Callable[[Any], bool]) -> None:
    """Where the sizes that were captured do not tell, others do."""
    torch.manual_seed(0)
    net = AsksForKinds(asks)
    planned = copy.deepcopy(net)
    for number, (length, chosen) in enumerate([(10, 4), (12, 8), (15, 30), (30, 8), (11, 9), (40, 31)]):
        x, mask = torch.randn(4, length, 16), torch.zeros(4, length, dtype=torch.bool)
        mask.view(-1)[:chosen] = True
        if not number:
            memplan.apply(planned, (x, mask), "1GiB", costs="estimate")
        assert_same_bits(run_steps(net, (x, mask), 1), run_steps(planned, (x, mask), 1))


def shares(x: torch.Tensor, mask: torch.Tensor) -> Any:
    """Of tokens for each expert, as mixtures count them: SymPy folds the constants, and would round otherwise."""
    return math.ceil(mask.sum().item() / 6 * 1.1 * 3)


def kept_part(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return int(mask.nonzero().shape[0] * 0.75)


def after_writes(x: torch.Tensor, mask: torch.Tensor) -> Any:
    """Numbers are read when forward reads them, and not after a later write."""
    count = mask.sum()
    first = count.item()
    count += 1
    return 100 * first + count.item()


def without_autocast(x: torch.Tensor, mask: torch.Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return ((x @ x.mT) > 0.01).sum().item()


def divides_by_what_may_be_zero(x: torch.Tensor, mask: torch.Tensor) -> Any:
    length = x.shape[1]
    least = 24 // (length - 9) if length != 9 else 1
    return (mask.sum(0) >= least).nonzero().shape[0]


NUMBERS = [shares, kept_part, after_writes, without_autocast, divides_by_what_may_be_zero]


class Scaled(nn.Module):
    def __init__(self, number: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.net, self.number = nn.Linear(16, 16), number

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.net(x).float().square().mean() * self.number(x, mask)  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.__name__)
def test_numbers_are_those_of_the_plain_step(number: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    net = Scaled(number)
    planned = copy.deepcopy(net)

    def sample(length: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, length, 16), torch.arange(8 * length).reshape(8, length) < count

    with torch.autocast("cpu", torch.bfloat16):
        memplan.apply(planned, sample(12, 25), "1GiB", costs="estimate")
        for length, count in [(12, 25), (12, 37), (12, 40), (13, 80), (15, 60), (9, 33), (20, 160)]:
            batch = sample(length, count)
            assert_same_bits(run_steps(net, batch, 1), run_steps(planned, batch, 1))


def test_masks_in_one_memory_of_which_one_is_written() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            one[:4] = True
            return self.net(x).sum() * other.sum().item()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Writes()
    planned = copy.deepcopy(net)
    mask = torch.arange(32) % 3 == 0
    memplan.apply(planned, (torch.randn(32, 16), mask.clone(), mask.clone()), "1GiB", costs="estimate")
    for seed in range(4):
        x, mask = torch.randn(32, 16), torch.rand(32, generator=torch.Generator().manual_seed(seed)) < 0.5
        masks = [mask.clone() for _ in range(2)]
        assert torch.equal(planned(x, masks[0], masks[0]), net(x, masks[1], masks[1]))


def test_a_buffer_that_masks_may_go() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 16)
            self.register_buffer("mask", torch.arange(32) < 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = getattr(self, "mask", None)
            return self.net(x if mask is None else x[mask]).square().sum()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Masked()
    planned = copy.deepcopy(net)
    x = torch.randn(32, 16)
    memplan.apply(planned, x, "1GiB", costs="estimate")
    for count in (20, 25, 9):
        for one in (net, planned):
            one.mask = torch.arange(32) < count
        assert_same_bits(run_steps(net, x, 1), run_steps(planned, x, 1))
    for one in (net, planned):
        del one.mask
    assert_same_bits(run_steps(net, x, 1), run_steps(planned, x, 1))

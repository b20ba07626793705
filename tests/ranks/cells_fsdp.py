"""Planned blocks in the units of `fully_shard`, over two gloo ranks, against the same training without plans."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import memplan
from memplan.integrations.fsdp import apply_blocks
from tests.ranks.cells_agreement import rank, refused, told_by_all
from tests.ranks.spawn import Cell
from tests.support.meter import gloo_lets_go, profiler_peak
from tests.support.zoo import MODELS, call, copied, first_difference, loss_of

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "CPU offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "no reshard": {"reshard_after_forward": False},
}
WAYS = ("apply, then shard", "shard, then apply", "apply_blocks")
ALONE = 0.95  # of a block's own peak: what is kept in it is little of that


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    """Parameters of its own before and after the blocks, which the root unit has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def batches(count: int, rows: int = 4) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank())
    for _ in range(count):
        yield torch.randint(0, 50, (rows, 12), generator=generator)


def sharded(net: nn.Module, blocks: Any, **policy: Any) -> nn.Module:
    for block in blocks:
        fully_shard(block, **policy)
    return fully_shard(net, **policy)


def build(policy: str, way: str) -> Net:
    torch.manual_seed(0)
    net = Net().train()
    if way == "apply, then shard":
        for block in net.blocks:
            memplan.apply(block, None, ALONE, costs="estimate")
    sharded(net, net.blocks, **POLICIES[policy])
    if way == "shard, then apply":
        for block in net.blocks:
            memplan.apply(block, None, ALONE, costs="estimate")
    if way == "apply_blocks":
        with gloo_lets_go():  # what its threads hold a moment longer is measured, too, and 0.9 leaves no room for that
            apply_blocks(net, next(batches(1)), 0.9, costs="estimate")
    return net


def train(net: nn.Module, samples: Any) -> Any:
    """Losses, and parameters put together again."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5 + rank())
    losses = []
    for sample in samples:
        loss = loss_of(call(net, sample))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(copied(loss))
    return losses, {name: copied(p.full_tensor()) for name, p in net.named_parameters()}  # type: ignore[operator]


@functools.cache
def plain(policy: str) -> Any:
    return train(build(policy, "plain"), batches(5))


def compare_training(policy: str, way: str) -> str | None:
    net = build(policy, way)
    found = first_difference(plain(policy), train(net, batches(5)), "result")
    plans = [plan for block in net.blocks if (plan := memplan.plan_of(block)) is not None]
    return found or (None if any(plan.recomputed for plan in plans) else "nothing was recomputed")


def other_budgets() -> str | None:
    """Each rank keeps its own budget, and what is held is what was predicted."""
    net, sample = build("plain", "plain"), next(batches(1))
    with gloo_lets_go():
        top = apply_blocks(net, sample, 1 << 40, costs="estimate")
        budget = (top.baseline_peak_bytes, (top.baseline_peak_bytes + top.floor_bytes) // 2)[rank()]
        plan = apply_blocks(net, sample, budget, costs="estimate")
        results = train(net, batches(5))
        resident_bytes = sum(p.to_local().untyped_storage().nbytes() for p in net.parameters())  # type: ignore[operator]
        held = profiler_peak(lambda: net(sample).backward(), resident_bytes + sample.untyped_storage().nbytes())
    again = told_by_all(sum(row.way != "keep" for row in plan.units))
    if again[0] or not again[1]:
        return f"{again} blocks recompute"
    if held > budget or held < 0.8 * plan.peak_bytes:
        return f"{held} of {budget} bytes are held, predicted {plan.peak_bytes}"
    return first_difference(plain("plain"), results, "result")


def optimizer_state() -> str | None:
    """Of the optimizer's state this rank's part counts."""
    net, sample = build("plain", "plain"), next(batches(1))
    optimizer = torch.optim.AdamW(net.parameters())
    with_state, without = (
        apply_blocks(net, sample, 1 << 40, costs="estimate", optimizer=counted) for counted in (optimizer, None)
    )
    net(sample).backward()
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values()]
    held = sum((t.to_local() if hasattr(t, "to_local") else t).untyped_storage().nbytes() for t in states)
    counted = with_state.resident_bytes - without.resident_bytes
    return None if counted == held else f"{counted} bytes are counted, {held} are held"


def no_room() -> str | None:
    """A budget that one rank can't meet is refused on both, and training goes on as it was."""
    net = build("plain", "plain")
    found = refused(
        lambda: apply_blocks(net, next(batches(1)), 1 << 40 if rank() == 0 else 1000, costs="estimate"),
        memplan.BudgetInfeasible,
        "Raise the budget",
    )
    return found or first_difference(plain("plain"), train(net, batches(5)), "result")


def other_batch() -> str | None:
    """A call unlike the sample is recomputed as a whole."""
    results = []
    for way in ("plain", "apply_blocks"):
        net = build("plain", way)
        results.append(train(net, [*batches(2), *batches(1, rows=3), *batches(1)]))
    return first_difference(*results, "result")


def llama() -> str | None:
    """Blocks of transformers, which are called with keyword arguments and share some of those."""
    results = []
    for planned in (False, True):
        net, sample = MODELS["llama"](0)
        sharded(net, net.model.layers)  # type: ignore[union-attr]
        if planned:
            apply_blocks(net, sample, 0.8, costs="estimate")
            if not any(memplan.plan_of(layer) for layer in net.model.layers):  # type: ignore[union-attr]
                return "nothing is planned"
        results.append(train(net, [sample] * 3))
    return first_difference(*results, "result")


def refusals() -> str | None:
    """What a plan can't reach over, or see, is refused with what to do instead."""
    net, sample = build("plain", "plain"), next(batches(1))
    inside = torch.zeros(4, 12, 16)
    return (
        refused(lambda: memplan.apply(net, sample, 0.9), memplan.UnsupportedModel, "fsdp.apply_blocks")
        or refused(lambda: memplan.apply(net.blocks[0], inside, 0.9), memplan.UnsupportedModel, "leave the sample out")
        or refused(lambda: apply_blocks(Net(), sample, 0.9), ValueError, "fully_shard")
        or refused(lambda: apply_blocks(fully_shard(Net()), sample, 0.9), ValueError, "one single unit")
    )


QUICK = {("plain", "apply, then shard"), ("mixed precision", "shard, then apply"), ("CPU offload", "apply_blocks")}
CELLS = {
    f"{policy}: {way}": Cell(functools.partial(compare_training, policy, way), full=(policy, way) not in QUICK)
    for policy in POLICIES
    for way in WAYS
}
CELLS |= {
    "other budgets": Cell(other_budgets, full=True),
    "optimizer state": Cell(optimizer_state),
    "no room": Cell(no_room),
    "another batch": Cell(other_batch, full=True),
    "llama": Cell(llama, full=True, needs=("transformers",)),
    "refusals": Cell(refusals),
}

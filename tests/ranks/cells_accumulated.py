"""Micro-batches of `fully_shard` that leave whole gradients, and the one after them that reduces all: whole plans.

Each is compared with the same training without plans: losses, gradients, parameters, and peaks of tensors alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.program.step import PlannedStep
from tests.ranks.cells_agreement import rank, refused, told_by_all
from tests.ranks.cells_models import NAMES, sharded_model
from tests.ranks.sharded_models import (
    BF16,
    HOST,
    Made,
    Net,
    frozen,
    half_a_group,
    held_in_step,
    ids_of,
    of_several_dtypes,
    part_of,
    replicated,
    run_again,
    sharded,
    train,
    units,
    unlike,
)
from tests.ranks.spawn import Cell
from tests.support.meter import LiveMeter, plans_wait_for_gloo
from tests.support.zoo import copied, first_difference, loss_of


def reduces(net: nn.Module, now: bool) -> None:
    net.set_requires_gradient_sync(now)  # type: ignore[operator]


def floor_bytes(net: nn.Module, batch: dict[str, Any]) -> int:
    """What any rank needs for a micro-batch that leaves its gradients, and for one that reduces them with its own.

    That is the least, and 2%, because all ranks have to have one schedule.
    """
    floors = []
    for now in (False, True):
        reduces(net, now)
        floors.append(memplan.plan(net, batch, "min", costs="estimate").floor_bytes)
        loss_of(net(**batch)).backward()
    net.zero_grad()
    return int(1.02 * max(told_by_all(max(floors))))


def compare(make: Callable[[], Made], **options: Any) -> str | None:
    """Three steps of three micro-batches with plans give what they give without, down to the least that both need."""
    plain, (net, batch) = train(*make(), 3, True), make()
    least_bytes = floor_bytes(net, batch)
    reduces(net, False)
    most_bytes = max(least_bytes, memplan.plan(net, batch, 1.0, costs="estimate").peak_bytes)
    for budget in (most_bytes, (least_bytes + most_bytes) // 2, least_bytes):
        net, batch = make()
        reduces(net, False)
        memplan.apply(net, batch, budget, costs="estimate", **options)
        found, planned = first_difference(plain, train(net, batch, 3, True), f"{budget}: result"), planned_forward(net)
        assert planned is not None
        if found or [type(step) for step in planned.steps] != [PlannedStep] * 2:
            return found or f"{budget}: {planned.steps}"
        plans = [step.plan for step in planned.steps]
        if budget == least_bytes and not all(
            plan is not None and (plan.recomputed or plan.host_bytes) for plan in plans
        ):
            return "nothing was recomputed or offloaded"
    return None


def peaks(make: Callable[[], Made]) -> str | None:
    """What is held in each of three micro-batches is what was predicted."""
    net, batch = make()
    limit = floor_bytes(net, batch)
    reduces(net, False)
    meter = LiveMeter()  # of all micro-batches, so that it has whole gradients
    with plans_wait_for_gloo():  # that of the last micro-batch, too, which comes when it is called
        memplan.apply(net, batch, limit, costs="estimate")
        for micro_batch in range(6):
            reduces(net, micro_batch % 3 == 2)
            if micro_batch < 3:  # calls without a plan may have left whole parameters
                loss_of(net(**batch)).backward()
                continue
            if micro_batch == 3:
                net.zero_grad()
            meter.reset_peak()
            if found := unlike(held_in_step(net, batch, meter), net):
                return f"micro-batch {micro_batch}: {found}"
    return None


def gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: copied(part_of(p.grad)) for name, p in net.named_parameters() if p.grad is not None}


def plans_come_and_go() -> str | None:
    """Micro-batches with and without plans add to one sum, whichever comes first; so does one after `remove`."""
    found = []
    for last in range(4):
        for eager in ((), (0,), (1,), (last,), (0, last)):
            results: list[Any] = []
            for planned in (False, True):
                net, batch = units(mp_policy=BF16) if last % 2 else units()
                if planned:
                    memplan.apply(net, batch, 0.9, costs="estimate", on_infeasible="min")
                torch.manual_seed(rank())
                for index in range(last + 1):
                    reduces(net, index == last)
                    if planned and index in eager:
                        with saved_tensors_hooks(lambda t: t, lambda t: t):
                            loss = loss_of(net(**batch))
                    else:
                        loss = loss_of(net(**batch))
                    loss.backward()
                    if planned and last == 3 and index == 1:
                        memplan.remove(net)
                results.append(gradients(net))
            found.append(first_difference(*results, f"{last}, {eager}: gradients"))
    return "; ".join(text for text in found if text) or None


class Chooses(Net):
    """A net that skips blocks where the batch has few rows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        scale = self.scale(x)
        for block in self.blocks[: 1 if len(ids) < 3 else 4]:
            x = block(x, scale)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def not_reached() -> str | None:
    """Gradients are reduced by a micro-batch that does not run their unit; others stay None."""
    found = []
    for rows in ((4, 2, 2), (2, 4, 2), (2, 2, 2), (2, 2, 4)):
        results: list[Any] = []
        for planned in (False, True):
            torch.manual_seed(0)
            net = Chooses().train()
            sharded(net, net.blocks)
            if planned:
                memplan.apply(net, None, "1MiB", costs="estimate")
            torch.manual_seed(rank())
            for step in range(2):
                for index, count in enumerate(rows):
                    reduces(net, index == 2)
                    loss_of(net(**ids_of(rank() + 10 * step, count))).backward()
                results.append(gradients(net))
        found.append(first_difference(results[:2], results[2:], f"{rows}: gradients"))
    return "; ".join(text for text in found if text) or None


def in_flight() -> str | None:
    """Two forwards wait for their backward."""
    results: list[Any] = []
    for planned in (False, True):
        net, batch = units()
        if planned:
            reduces(net, False)
            memplan.apply(net, batch, 1.0, costs="estimate")
        torch.manual_seed(rank())
        reduces(net, False)
        losses = [loss_of(net(**batch)) for _ in range(2)]
        for loss in losses:
            loss.backward()
        reduces(net, True)
        loss_of(net(**batch)).backward()
        results.append(gradients(net))
    return first_difference(*results, "gradients")


def switched_before_backward() -> str | None:
    """FSDP2 looks at its switch in backward, a plan in forward: where they differ, backward raises."""
    net, batch = units()
    memplan.apply(net, batch, 1.0, costs="estimate")
    reduces(net, True)
    loss = loss_of(net(**batch))
    reduces(net, False)
    return refused(lambda: loss.backward(), RuntimeError, "between a forward and its backward")


def with_several_lengths() -> str | None:
    """Batches of other sizes, that of one rank alone among them."""
    results = []
    for planned in (False, True):
        net = units()[0]
        if planned:
            memplan.apply(net, None, "1MiB", costs="estimate")
        torch.manual_seed(rank())
        for index, rows in enumerate((4, 3 + rank(), 2, 4, 4, 2 + rank())):
            reduces(net, index % 3 == 2)
            loss_of(net(**ids_of(rank(), rows))).backward()
        results.append(gradients(net))
    return first_difference(*results, "gradients")


CELLS = {
    "units": Cell(functools.partial(compare, units)),
    "mixed precision": Cell(functools.partial(compare, functools.partial(units, mp_policy=BF16)), full=True),
    "frozen": Cell(functools.partial(compare, frozen), full=True),
    "half a group": Cell(functools.partial(compare, half_a_group), full=True),
    "several dtypes": Cell(functools.partial(compare, of_several_dtypes), full=True),
    "run again": Cell(functools.partial(compare, run_again), full=True),
    "HSDP": Cell(functools.partial(compare, replicated), world=4, full=True),
    "four ranks": Cell(functools.partial(compare, units), world=4, full=True),
    "offloaded": Cell(functools.partial(compare, units, **HOST), full=True),
    "peaks": Cell(functools.partial(peaks, units)),
    "peaks in mixed precision": Cell(functools.partial(peaks, functools.partial(units, mp_policy=BF16)), full=True),
    "plans come and go": Cell(plans_come_and_go, full=True),
    "not reached": Cell(not_reached, full=True),
    "in flight": Cell(in_flight, full=True),
    "switched before backward": Cell(switched_before_backward),
    "lengths": Cell(with_several_lengths, full=True),
}
CELLS |= {
    f"{kind}, {way}": Cell(
        functools.partial(compare, functools.partial(sharded_model, kind, way)),
        world,
        True,
        ("transformers", "peft"),
    )
    for kind in NAMES
    for way, world in (("FSDP2", 2), ("FSDP2, bf16", 2), ("FSDP2 x TP", 4))
}

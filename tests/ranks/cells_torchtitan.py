"""Loops in the style of torchtitan over gloo ranks: logits and losses are DTensors, on one- and two-dimensional meshes.

Each is compared with the same training without plans: losses, gradients, parameters.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.program.step import PlannedStep
from tests.ranks.cells_accumulated import gradients, reduces
from tests.ranks.cells_agreement import refused
from tests.ranks.sharded_models import BF16, Net, ids_of, part_of, sharded
from tests.ranks.spawn import Cell
from tests.support.zoo import copied, first_difference


class GivesLogits(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        scale = self.scale(x)
        for block in self.blocks:
            x = block(x, scale)
        return self.head(x)  # type: ignore[no-any-return]


def split(mesh: DeviceMesh, logits: Placement) -> GivesLogits:
    """The net, split over ranks, with DTensors as logits."""
    torch.manual_seed(0)
    net = GivesLogits().train()
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=logits, use_local_output=False),
    }
    parallelize_module(net, mesh, outer)
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def loss_of_logits(net: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(ids).float().flatten(0, 1), ids.flatten(), reduction="sum")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return copied(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def tensor_parallel(layout: Placement, parallel_loss: bool) -> str | None:
    """Logits are DTensors, and so is the loss where ranks compute it together."""
    results: list[Any] = []
    for budget in (None, 1.0, 0.7):
        net, found = split(init_device_mesh("cpu", (2,)), layout), list[Any]()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
        torch.manual_seed(7)
        with loss_parallel() if parallel_loss else contextlib.nullcontext():
            if budget is not None:
                memplan.apply(net, ids_of(0), budget, costs="estimate")
            for step in range(3):
                ids = ids_of(step)["ids"]
                logits = net(ids=ids)
                assert isinstance(logits, DTensor)
                loss = loss_of_logits(lambda _: logits, ids) if parallel_loss else (logits.full_tensor() ** 2).mean()  # type: ignore[arg-type]  # noqa: B023
                loss.backward()
                found += [str((logits.placements, logits.shape)), whole(loss.detach()), gradients(net)]
                optimizer.step()
                optimizer.zero_grad()
        if budget is not None and [type(s) for s in planned_forward(net).steps] != [PlannedStep]:  # type: ignore[union-attr]
            return f"{budget}: {planned_forward(net).steps}"  # type: ignore[union-attr]
        results.append(found)
    return first_difference(results[0], results[1], "1.0") or first_difference(results[0], results[2], "0.7")


def torchtitan(planned: bool, adds_up: bool, loss_inside: bool = False) -> list[Any]:
    """FSDP2 over tensor parallel, layers that are checkpointed, gradients that are not divided, in two loops.

    adds_up: the last of three micro-batches alone reduces gradients. loss_inside: of the plan.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net, own, found = split(mesh["tensor"], Shard(-1)), mesh["data"].get_local_rank(), list[Any]()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = checkpoint_wrapper(block)
    sharded(net, net.blocks, mesh=mesh["data"], mp_policy=BF16)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # as NCCL reduces without it
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    torch.manual_seed(7 + own)
    with loss_parallel():
        if planned:
            reduces(net, not adds_up)
            inside: dict[str, Any] = {"loss_fn": loss_of_logits} if loss_inside else {}
            memplan.apply(net, ids_of(own), 0.8, costs="estimate", accumulate=not adds_up, **inside)
        for step in range(2):
            for index in range(3):
                reduces(net, not adds_up or index == 2)
                ids = ids_of(own + 10 * step + index)["ids"]
                loss = (net(ids) if planned and loss_inside else loss_of_logits(net, ids)) / 100
                loss.backward()
                found.append(whole(loss.detach()))
            found.append(gradients(net))
            optimizer.step()
            optimizer.zero_grad()
    steps = planned_forward(net).steps if planned else []  # type: ignore[union-attr]
    assert [type(s) for s in steps] == [PlannedStep] * (planned * (1 + adds_up)), steps
    assert all(s.plan.recomputed for s in steps if s.plan is not None)
    return [*found, *(copied(part_of(p)) for p in net.parameters())]


def compare(adds_up: bool) -> str | None:
    plain = torchtitan(False, adds_up)
    runs = {inside: first_difference(plain, torchtitan(True, adds_up, inside), "result") for inside in (True, False)}
    return "; ".join(f"loss inside {inside}: {text}" for inside, text in runs.items() if text) or None


def other_gradient() -> str | None:
    """A gradient that ranks split unlike the DTensor is refused."""
    net = split(init_device_mesh("cpu", (2,)), Shard(-1))
    memplan.apply(net, ids_of(0), 1.0, costs="estimate")
    logits = net(**ids_of(0))
    gradient = DTensor.from_local(torch.ones(logits.shape), logits.device_mesh, [Replicate()])  # type: ignore[attr-defined]
    return refused(lambda: logits.backward(gradient), RuntimeError, "Put the loss inside")


CELLS = {
    "loss parallel": Cell(functools.partial(tensor_parallel, Shard(-1), True)),
    "split logits": Cell(functools.partial(tensor_parallel, Shard(-1), False), full=True),
    "whole logits": Cell(functools.partial(tensor_parallel, Replicate(), False), full=True),
    "other gradient": Cell(other_gradient),
    "FSDP2 and tensor parallel": Cell(functools.partial(compare, False), world=4, full=True),
    "FSDP2 and tensor parallel, adding up": Cell(functools.partial(compare, True), world=4, full=True),
}

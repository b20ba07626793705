"""Models whose parameters are DTensors, over gloo ranks, and their training with and without plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import memplan
from memplan.installed.planned_forward import planned_forward
from tests.ranks.cells_agreement import rank
from tests.support.meter import LiveMeter, plans_wait_for_gloo
from tests.support.zoo import copied, first_difference, loss_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HOST: dict[str, Any] = {"host_budget": "1MiB", "link": memplan.Link(1e12, 1e12, 0.0)}
ON_HOST = CPUOffloadPolicy(pin_memory=False)
BUDGETS: tuple[Any, ...] = (1.0, 0.7, "min")

Made = tuple[nn.Module, dict[str, torch.Tensor]]


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x))))) * scale


class Net(nn.Module):
    """Parameters of its own before and after the blocks, which the root unit has. All blocks read `scale`."""

    def __init__(self, width: int = 16, inner: int = 32, words: int = 50) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.scale = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        scale = self.scale(x)
        for block in self.blocks:
            x = block(x, scale)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def ids_of(seed: int, rows: int = 4, words: int = 50) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, words, (rows, 12), generator=generator)}


def sharded(net: nn.Module, blocks: Any, **options: Any) -> nn.Module:
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def units(width: int = 16, inner: int = 32, words: int = 50, **options: Any) -> Made:
    """The net with each block a unit."""
    torch.manual_seed(0)
    net = Net(width, inner, words).train()
    return sharded(net, net.blocks, **options), ids_of(rank(), words=words)


def divided(divisor: float, **options: Any) -> Made:
    """Units whose gradients are divided by a number of one's own, once they are summed."""
    net, batch = units(**options)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(divisor)
            module.set_force_sum_reduction_for_comms(True)
    return net, batch


def without_division() -> str | None:
    """A divisor of 1, as torchtitan sets it. NCCL then multiplies by it while it reduces, which gloo can't."""
    plain, (net, batch) = train(*divided(1.0)), divided(1.0)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(False)
    memplan.apply(net, batch, 0.7, costs="estimate")
    return first_difference(plain, train(net, batch), "result")


def frozen() -> Made:
    """Units without a gradient, and units with gradients of some of their parameters."""
    torch.manual_seed(0)
    net = Net().train()
    net.embed.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    net.blocks[2].up.requires_grad_(False)
    return sharded(net, net.blocks), ids_of(rank())


class Again(Net):
    """A net that runs its blocks twice or more, one of them first without gradients."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        scale = self.scale(x)
        with torch.no_grad():
            refined = self.blocks[3](self.blocks[2](x, scale), scale)
        x = x + refined
        for index in (0, 1, 0, 2, 1, 3, 0):
            x = self.blocks[index](x, scale)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def run_again() -> Made:
    """Units that run several times in a step."""
    torch.manual_seed(0)
    net = Again().train()
    return sharded(net, net.blocks), ids_of(rank())


class WithoutLast(Net):
    """A net that does not run its last block."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        scale = self.scale(x)
        for block in self.blocks[:-1]:
            x = block(x, scale)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def half_a_group(**options: Any) -> Made:
    """A unit of two modules; only the first runs."""
    torch.manual_seed(0)
    net = WithoutLast().train()
    fully_shard(list(net.blocks[2:]), **options)
    return sharded(net, net.blocks[:2], **options), ids_of(rank())


class WithDTensors(Net):
    """A net whose loss is computed on logits split by words."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks[0](self.embed(ids), 1.0)).flatten(0, 1)  # type: ignore[arg-type]
        loss = nn.functional.cross_entropy(logits, DTensor.from_local(ids.flatten(), logits.device_mesh, [Replicate()]))
        return loss.full_tensor()  # type: ignore[attr-defined, no-any-return]


class Settles(Net):
    """A net that sets an attribute in its first run, so that it is traced twice."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: str | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "words"
        return super().forward(ids)


def traced_twice() -> Made:
    torch.manual_seed(0)
    net = Settles().train()
    return sharded(net, net.blocks), ids_of(rank())


def grouped() -> Made:
    """A unit of two modules, one in another, and parameters that two modules share."""
    torch.manual_seed(0)
    net = Net().train()
    net.head.weight = net.embed.weight
    fully_shard([net.blocks[0], net.blocks[1]])
    fully_shard(net.blocks[2].up)
    return sharded(net, net.blocks[2:]), ids_of(rank())


class Cast(Block):
    """Its inner weights may be of another dtype than the rest."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(self.norm(x))).to(self.down.weight.dtype)
        return x + self.down(inner).to(x.dtype) * scale


def of_several_dtypes() -> Made:
    """Frozen weights in bfloat16 beside trained ones in float32, in one unit."""
    torch.manual_seed(0)
    net = Net()
    net.blocks = nn.ModuleList(Cast(16, 32) for _ in range(3))
    for block in net.blocks:
        block.down.to(torch.bfloat16).requires_grad_(False)  # type: ignore[union-attr]
    return sharded(net.train(), net.blocks), ids_of(rank())


def replicated(**options: Any) -> Made:
    """Units that two groups of ranks have copies of (HSDP)."""
    return units(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")), **options)


def parallel(mesh: DeviceMesh) -> Net:
    """The net with its blocks split over a mesh, column by column and row by row."""
    torch.manual_seed(0)
    net = Net().train()
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def tensor_parallel() -> Made:
    return parallel(init_device_mesh("cpu", (2,))), ids_of(0)


def sequence_parallel() -> Made:
    torch.manual_seed(0)
    mesh, net = init_device_mesh("cpu", (2,)), Net().train()
    parallelize_module(
        net, mesh,
        {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
         "scale": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True),
         "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())},
    )  # fmt: skip
    for block in net.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return net, ids_of(0)


class Spread(nn.Module):
    """Parameters spread over ranks by `distribute_tensor` alone. Forward makes DTensors of its batch."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        sizes = {"up": (64, 16), "down": (16, 64)}
        self.layers = nn.ModuleList(
            nn.ParameterDict({name: torch.randn(size) / 8 for name, size in sizes.items()}) for _ in range(4)
        )
        for layer in self.layers:
            for name, place in (("up", Shard(0)), ("down", Shard(1))):
                layer[name] = nn.Parameter(distribute_tensor(layer[name], mesh, [place]))  # type: ignore[index]
        self.scale, self.mesh = nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Replicate()])), mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = DTensor.from_local(nn.functional.dropout(x, 0.1), self.mesh, [Replicate()])
        for layer in self.layers:
            inner = nn.functional.gelu(y @ layer["up"].T)  # type: ignore[index]
            y = y + (inner @ layer["down"].T).redistribute(placements=[Replicate()]) * self.scale  # type: ignore[index]
        parts = DTensor.from_local(y.to_local().tanh(), self.mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        half = distribute_tensor(torch.full_like(x, 0.5), self.mesh, [Shard(0)], src_data_rank=None)
        loss: torch.Tensor = (parts * half).square().sum().full_tensor()
        return loss


def distributed_tensors() -> Made:
    torch.manual_seed(0)
    return Spread(init_device_mesh("cpu", (2,))).train(), {"x": torch.randn(64, 16)}


def two_dimensions() -> Made:
    """Blocks split over two ranks, and each part sharded over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = parallel(mesh["tensor"])
    return sharded(net, net.blocks, mesh=mesh["data"]), ids_of(mesh["data"].get_local_rank())


def slack_bytes() -> int:
    """Bytes of what ranks tell each other, sixteen each and a rank's own, and of scalars that DTensors make."""
    return 16 * (torch.distributed.get_world_size() + 2)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(net: nn.Module, batch: dict[str, Any], accumulated: int = 1, adds_up: bool = False) -> list[Any]:
    """What each of three steps gives: losses, this rank's parts of gradients and how they are sharded; parameters.

    adds_up: the last micro-batch alone reduces gradients.
    """
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    torch.manual_seed(5 + rank())
    results: list[Any] = []
    for _ in range(3):
        for index in range(accumulated):
            if adds_up:
                net.set_requires_gradient_sync(index == accumulated - 1)  # type: ignore[operator]
            loss = loss_of(net(**batch))
            loss.backward()
            results.append(copied(loss))
        grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        results += [{n: copied(part_of(g)) for n, g in grads.items()}]
        results += [str(getattr(g, "placements", "")) for g in grads.values()]
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            results.append(copied(loss_of(net(**batch))))
        net.train()
    results += [copied(part_of(p)) for p in net.parameters()]
    return results


def compare(make: Callable[[], Made], accumulated: int = 1, **options: Any) -> str | None:
    """The training with plans gives what it gives without, at three budgets."""
    plain = train(*make(), accumulated)
    for budget in BUDGETS:
        net, batch = make()
        memplan.apply(net, batch, budget, **{"costs": "estimate", "accumulate": accumulated > 1, **options})
        found = first_difference(plain, train(net, batch, accumulated), f"budget {budget}: result")
        planned = planned_forward(net)
        if found or planned is None or len(planned.steps) > 1:
            return found or "calls like the sample got another plan"
    plan = memplan.plan_of(net)
    if not isinstance(plan, memplan.Plan) or not plan.recomputed:
        return "nothing was recomputed"
    return None


def peaks(make: Callable[[], Made], accumulates: bool = False) -> str | None:
    """What is held is what was predicted."""
    found = []
    for budget in BUDGETS:
        net, batch = make()
        with plans_wait_for_gloo():
            memplan.apply(net, batch, budget, costs="estimate", accumulate=accumulates)
        found.append(unlike_predicted(net, batch, accumulates))
    return "; ".join(text for text in found if text) or None


def unlike_predicted(net: nn.Module, batch: dict[str, Any], accumulates: bool = False) -> str | None:
    """How what a step holds is not what its plan predicts. accumulates: gradients of another step are there already."""
    loss_of(net(**batch)).backward()  # calls without a plan may have left whole parameters
    if not accumulates:
        net.zero_grad()
    return unlike(held_in_step(net, batch), net)


def unlike(held_bytes: int, net: nn.Module) -> str | None:
    """How bytes of tensors that a step holds are not those that its plan predicts, and up to `slack_bytes()` more."""
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    if plan.live_peak_bytes <= held_bytes <= plan.live_peak_bytes + slack_bytes():
        return None
    return f"{held_bytes} bytes are held, {plan.live_peak_bytes} predicted"


def held_in_step(net: nn.Module, batch: dict[str, Any], meter: LiveMeter | None = None) -> int:
    """The most bytes that tensors alive hold in one step. meter: watches it."""
    meter = meter or LiveMeter()
    held = [t for p in net.parameters() for t in (p, p.grad) if t is not None]
    meter.register([part_of(t) for t in held] + [*net.buffers(), *batch.values()])
    with meter:
        output = net(**batch)
        loss_of(output).backward()
    return meter.peak_bytes

"""Whole plans of models with DTensors as parameters, over gloo ranks: `fully_shard`, tensor and sequence parallel.

Each is compared with the same training without plans: losses, gradients, parameters, and peaks of tensors alive.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import memplan
from memplan.capture.ops import real_results
from memplan.capture.ops.ways import Refusal
from memplan.errors import MemplanError
from memplan.installed.planned_forward import planned_forward
from memplan.planning.placement import Placement
from memplan.planning.settings import Settings
from memplan.problem.schedule import Compute
from memplan.runtime.ranks import agreement, sharded_model
from memplan.torch_private import run_in_mode
from tests.ranks.cells_agreement import Stack, rank, refused, told_by_all
from tests.ranks.sharded_models import (
    BF16,
    BUDGETS,
    HOST,
    ON_HOST,
    Block,
    Made,
    Net,
    WithDTensors,
    compare,
    distributed_tensors,
    divided,
    frozen,
    grouped,
    half_a_group,
    held_in_step,
    ids_of,
    of_several_dtypes,
    part_of,
    peaks,
    replicated,
    run_again,
    sequence_parallel,
    sharded,
    slack_bytes,
    tensor_parallel,
    traced_twice,
    train,
    two_dimensions,
    units,
    unlike,
    without_division,
)
from tests.ranks.spawn import Cell
from tests.support.meter import plans_wait_for_gloo, storage_bytes
from tests.support.offloads import CountingStreams, DeviceMeter
from tests.support.zoo import copied, first_difference, loss_of


def tight(runs: int = 40) -> str | None:
    """At a budget near the floor, no plan of measured costs holds more in a step, or has other bits."""
    plain, found = train(*units()), []
    for run in range(runs):
        net, batch = units()
        with plans_wait_for_gloo():
            memplan.apply(net, batch, "min")
            budget = int(1.02 * memplan.plan_of(net).peak_bytes)  # type: ignore[union-attr]
            memplan.apply(net, batch, budget)
        held_bytes = held_in_step(net, batch)
        net.zero_grad()
        difference = unlike(held_bytes, net) or first_difference(plain, train(net, batch), "result")
        if difference or held_bytes > budget + slack_bytes():
            found.append(f"run {run}: {difference or f'{held_bytes} bytes are held of {budget}'}")
    return "; ".join(found) or None


def gathers_again() -> str | None:
    """A tight plan gathers units again. The other ranks have its schedule, though their budgets are larger."""
    net, batch = units()
    memplan.apply(net, batch, "min", costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    ran = [plan.problem.graph.ops[s.op].kind for s in plan.schedule if isinstance(s, Compute)]
    made = [op.kind for op in plan.problem.graph.ops]
    gathers, reductions = ("all_gather" in kind for kind in ran), [k for k in ran if "reduce_scatter" in k]
    if sum(gathers) <= sum("all_gather" in kind for kind in made):
        return "nothing is gathered again"
    if len(reductions) != len(net.blocks) + 1:  # type: ignore[arg-type]
        return f"{len(reductions)} reductions"
    budget = plan.peak_bytes if rank() == 0 else 4 * plan.peak_bytes
    plain, (net, batch) = train(*units()), units()
    memplan.apply(net, batch, budget, costs="estimate")
    return first_difference(plain, train(net, batch), "result")


class Calls(TorchDispatchMode):
    """Notes the ops of a step, and of each collective which products of matrices run while it is under way.

    - starts: names of collectives as they start, in order.
    - beside: by collective, products that run between its start and its wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[str] = []
        self.beside: list[list[str]] = []
        self._flying: dict[int, int] = {}  # by storage of the result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = run_in_mode(func, args, kwargs), str(func)
        if name.startswith("_c10d_functional.wait_tensor"):
            self._flying.pop(args[0].untyped_storage()._cdata)
        elif name.startswith("_c10d_functional."):
            self._flying[result.untyped_storage()._cdata] = len(self.starts)
            self.starts.append(name)
            self.beside.append([])
        elif "mm" in name:
            for number in self._flying.values():
                self.beside[number].append(name)
        return result


def overlaps() -> str | None:
    """Gathers start before the layer in front of them is over, reductions are waited for after the next has begun.

    All ranks start them in one order, and the bits are those without a plan.
    """
    plain, found = train(*units()), []
    for budget in BUDGETS:
        net, batch = units()
        memplan.apply(net, batch, budget, costs="estimate")
        loss_of(net(**batch)).backward()
        net.zero_grad()
        with Calls() as calls:
            loss_of(net(**batch)).backward()
        net.zero_grad()
        torch.manual_seed(0)
        if len(set(map(tuple, told_by_all(calls.starts)))) > 1:
            found.append("ranks start collectives in other orders")
        for kind in ("all_gather", "reduce_scatter"):
            beside = [ran for name, ran in zip(calls.starts, calls.beside, strict=True) if kind in name]
            if budget != "min" and sum(map(bool, beside)) < len(beside) - 2:
                found.append(f"budget {budget}: {kind} runs beside {beside}")
        net, batch = units()
        memplan.apply(net, batch, budget, costs="estimate")
        found.append(first_difference(plain, train(net, batch), f"budget {budget}: result"))
    return "; ".join(text for text in found if text) or None


class Fails(Calls):
    """Fails where products of matrices run beside a collective, in backward or before."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self._kind = "reduce_scatter" if in_backward else "all_gather"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if any(ran and self._kind in name for name, ran in zip(self.starts, self.beside, strict=True)):
            raise ZeroDivisionError("of all things")
        return result


def given_up() -> str | None:
    """A step that fails on all ranks while collectives are under way leaves none behind, and the next one runs."""
    plain, (net, batch) = train(*units()), units()
    memplan.apply(net, batch, 1.0, costs="estimate")
    loss_of(net(**batch)).backward()
    for in_backward in (False, True):
        with contextlib.suppress(ZeroDivisionError), Fails(in_backward):
            loss_of(net(**batch)).backward()
            return "nothing failed"
        if torch._C._distributed_c10d._get_work_registry_size():
            return "a collective is left under way"
    net.zero_grad()
    return first_difference(plain, train(net, batch), "result")


class Shared(nn.Module):
    """A forward that gathers by functional collectives itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = all_gather_tensor_autograd(torch.tanh(layer(x)), 0, torch.distributed.group.WORLD)
            x = x.chunk(torch.distributed.get_world_size())[0]
        return x.square().mean()


class Branching(Block):
    """Branches on what it computes, which no trace follows."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = super().forward(x, scale)
        return x if x.sum() > 1e9 else 2 * x


def left_gathered() -> str | None:
    """A pass without gradients leaves the root gathered: a plan is made, and runs, with its parameters sharded.

    The training without plans has no such pass: FSDP2 itself goes on with the weights that it gathered for it.
    """
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        net, batch = fully_shard(Net().train()), ids_of(rank())  # one single unit
        if planned:
            with torch.no_grad():
                net(**batch)
            memplan.apply(net, batch, 0.8, costs="estimate")
            memplan.prepare(net, [ids_of(rank(), 2)])
        results.append(train(net, batch))
    return first_difference(*results, "result")


def one_of_the_units() -> str | None:
    """Units within others may have plans of their own, made before the first forward of the model around them."""
    results = []
    for planned in (False, True):
        net, batch = units()
        for block in net.blocks if planned else ():  # type: ignore[union-attr]
            memplan.apply(block, None, 0.9, costs="estimate")
        results.append(train(net, batch))
    return first_difference(*results, "result")


def changed_later() -> str | None:
    """What a plan does not do, and is asked for later, runs without it."""
    results: list[Any] = []
    for planned in (False, True):
        net, batch = units()
        if planned:
            memplan.apply(net, batch, 0.8, costs="estimate")
        net.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        parameter = next(net.parameters())
        parameter.register_hook(lambda grad: 2 * grad)  # which FSDP2 does not call
        try:
            results.append(train(net, batch))
        except RuntimeError as error:
            results.append(str(error))
    return first_difference(*results, "result")


def left_as_it_is() -> str | None:
    """A model that can't be planned trains on as before."""

    def make() -> Made:
        torch.manual_seed(0)
        net = Net()
        net.blocks[1] = Branching(16, 32)
        return sharded(net.train(), net.blocks), ids_of(rank())

    plain, (net, batch) = train(*make()), make()
    words = "control flow depends on computed data", "With sharded parameters a step has to be planned"
    found = refused(lambda: memplan.apply(net, batch, 0.8, costs="estimate"), memplan.UnsupportedModel, *words)
    return found or first_difference(plain, train(net, batch), "result")


def own_collectives() -> str | None:
    """Collectives of forward's own are never timed by one rank alone, and take a group."""
    world, batch = torch.distributed.group.WORLD, {"x": torch.rand(64, 16)}
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        net = Shared()
        if planned:
            found = refused(lambda: memplan.apply(net, batch, 0.8), memplan.UnsupportedModel, "group=")  # noqa: B023
            if found:
                return found
            memplan.apply(net, batch, "min", group=world)
        results.append(train(net, batch))
    return first_difference(*results, "result")


class Exchanging(Shared):
    """Sends more rows to one rank than to the other, as routing by data does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [16, 48] if rank() == 0 else [48, 16]
        for layer in self.layers:
            sent = torch.tanh(layer(x).sin().cos().sin())
            x = all_to_all_single_autograd(sent, sizes, sizes, torch.distributed.group.WORLD).sin().cos()
        return x.square().mean()


def uneven() -> str | None:
    """Uneven exchanges run once in each pass at the smallest budget, where all else of forward runs again."""
    results, batch = [], {"x": torch.rand(64, 16, generator=torch.Generator().manual_seed(rank()))}
    for planned in (False, True):
        torch.manual_seed(0)
        net = Exchanging()
        if planned:
            memplan.apply(net, batch, "min", group=torch.distributed.group.WORLD, costs="estimate")
            plan = memplan.plan_of(net)
            assert isinstance(plan, memplan.Plan)
            again = {plan.problem.graph.ops[op].kind for op in plan.recomputed}
            if not again or any("all_to_all" in kind for kind in again):
                return f"{again} run again"
        results.append(train(net, batch))
    return first_difference(*results, "result")


def in_loss_parallel() -> str | None:
    """Steps inside of `loss_parallel` and outside of it have other bits, and a plan of each."""

    def step(net: nn.Module, inside: bool) -> list[Any]:
        torch.manual_seed(5)
        with loss_parallel() if inside else contextlib.nullcontext():
            loss = net(**ids_of(0))
            loss.backward()
        results = [copied(loss), *(copied(part_of(p.grad)) for p in net.parameters() if p.grad is not None)]
        net.zero_grad()
        return results

    def make() -> nn.Module:
        torch.manual_seed(0)
        columns = ColwiseParallel(use_local_output=False)
        return parallelize_module(WithDTensors().train(), init_device_mesh("cpu", (2,)), {"head": columns})

    expected = {inside: step(make(), inside) for inside in (True, False)}
    for planned_inside in (True, False):
        net = make()
        with loss_parallel() if planned_inside else contextlib.nullcontext():
            memplan.apply(net, ids_of(0), 0.9, costs="estimate")
        for inside in (True, False, True, False):
            name = f"planned {'inside' if planned_inside else 'outside'}, called {'inside' if inside else 'outside'}"
            if found := first_difference(expected[inside], step(net, inside), name):
                return found
        planned = planned_forward(net)
        if planned is None or len(planned.steps) != 2:
            return "steps inside and outside do not have a plan each"
    return None


def in_context_parallel() -> str | None:
    """Neither planned nor run in `context_parallel`."""
    mesh, (net, batch) = init_device_mesh("cpu", (2,)), units()
    memplan.apply(net, batch, 0.9, costs="estimate")
    plain = Net()
    with context_parallel(mesh, buffers=[torch.zeros(2, 8)], buffer_seq_dims=[1]):
        for run in (
            lambda: memplan.apply(units()[0], batch, 0.9),
            lambda: memplan.apply(plain, batch, 0.9),
            lambda: net(**batch),
        ):
            if found := refused(run, memplan.UnsupportedModel, "context_parallel is on"):
                return found
    return first_difference(train(*units()), train(net, batch), "result")


def with_a_loss() -> str | None:
    """A loss function in the plan calls the model, which is the root unit, twice as its module."""

    def twice(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return 2 * loss_of(model(ids)) - loss_of(model(ids.flip(0)))

    results: list[Any] = []
    for planned in (False, True):
        net, batch = units()
        if planned:
            memplan.apply(net, batch, 0.7, loss_fn=twice, costs="estimate")
        torch.manual_seed(rank())
        loss = net(**batch) if planned else twice(net, **batch)
        loss.backward()
        with torch.no_grad():
            results.append((copied(loss), [copied(part_of(p.grad)) for p in net.parameters()], copied(net(**batch))))  # type: ignore[arg-type]
    return first_difference(*results, "result")


def on_host(make: Callable[[], Made], accumulated: int = 1, moved: str | None = "") -> str | None:
    """Parts that are on the host are fetched, and gradients go there. Peaks are as predicted.

    moved: the name of a module has this in it if CPUOffloadPolicy has its parts on the host. None: plans decide.
    """
    plain, floor_bytes, found = train(*make(), accumulated), 0, []
    for seed, budget in enumerate((1.0, 0.6, None)):
        net, batch = make()
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.0, foreach=False)
        with plans_wait_for_gloo():
            memplan.apply(
                net, batch, budget or int(1.02 * floor_bytes), costs="estimate", optimizer=optimizer,
                accumulate=accumulated > 1, **HOST,
            )  # fmt: skip
        plan, planned = memplan.plan_of(net), planned_forward(net)
        assert isinstance(plan, memplan.Plan)
        assert planned is not None
        fetched = {v.name for v in plan.problem.graph.values if v.fetched}
        parts = {n: p for n, p in net.named_parameters() if (n in fetched if moved is None else moved in n)}
        if fetched != parts.keys() or (moved is None and not parts and not budget):
            return f"parts of {parts.keys()} are on the device, or others on the host"
        if set(parts.values()) != fetched_without_a_plan(net):
            return "calls without a plan don't know which parts are on the host"
        floor_bytes = plan.floor_bytes
        if plan.problem.extra_host_bytes < 2 * storage_bytes(part_of(p) for p in parts.values() if p.requires_grad):
            return f"{plan.problem.extra_host_bytes} bytes of the optimizer's state on the host"
        if accumulated == 1:
            streams = CountingStreams(seed or None)
            planned.steps[0].runner.store.transfers._streams = streams
            meter = DeviceMeter(streams, storage_bytes(map(part_of, parts.values())))
            loss_of(net(**batch)).backward()
            optimizer.step()
            net.zero_grad()
            meter.register([state for p, state in optimizer.state.items() if all(p is not q for q in parts.values())])
            held_in_step(net, batch, meter)
            found.append(unlike(meter.device_peak_bytes, net))
            net.zero_grad()
        found.append(first_difference(plain, train(net, batch, accumulated), f"budget {budget}: result"))
    return "; ".join(text for text in found if text) or None


def fetched_without_a_plan(net: nn.Module) -> set[nn.Parameter]:
    """Parameters whose parts units bring to the device before they gather them."""
    states = (module._get_fsdp_state() for module in net.modules() if isinstance(module, FSDPModule))
    groups = (group for state in states for group in state._fsdp_param_groups)
    return {p.sharded_param for group in groups for p in group.fsdp_params if p.offload_to_cpu}


def some_on_host() -> Made:
    """Blocks have their parts on the host, some of them without gradients; all else is on the device."""
    torch.manual_seed(0)
    net = Net().train()
    net.blocks[1].requires_grad_(False)
    net.blocks[2].up.requires_grad_(False)
    for block in net.blocks:
        fully_shard(block, offload_policy=ON_HOST)
    return fully_shard(net), ids_of(rank())


def offloaded() -> str | None:
    """With a host budget activations are offloaded; parts of parameters stay."""
    plain, (net, batch) = train(*units(mp_policy=BF16)), units(mp_policy=BF16)
    memplan.apply(net, batch, 0.5, costs="estimate", **HOST)
    plan = memplan.plan_of(net)
    if not isinstance(plan, memplan.Plan) or not plan.host_bytes:
        return "nothing is offloaded"
    return first_difference(plain, train(net, batch), "result")


def lengths(make: Callable[[], Made] = units, budget: float = 0.8, moves: bool = False, **options: Any) -> str | None:
    """Batches of other sizes, that of one rank alone among them. moves: the first plan has parts on the host."""
    results = []
    for planned in (False, True):
        net, _ = make()
        if planned:
            memplan.apply(net, None, budget, costs="estimate", **options)
        torch.manual_seed(rank())
        losses = []
        for rows in (4, 4, 3 + rank(), 2, 4):
            losses.append(copied(loss_of(net(**ids_of(rank(), rows)))))
            loss_of(net(**ids_of(rank(), rows))).backward()
        results.append((losses, [copied(part_of(p.grad)) for p in net.parameters() if p.grad is not None]))
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    if plan.floor_bytes >= plan.peak_bytes and not moves:
        return "no budget under the peak of a plan would do"
    if moves and not fetched_without_a_plan(net):
        return "no part is on the host"
    return first_difference(*results, "result")


def own_budgets() -> str | None:
    """A rank with more rows has a larger budget. No schedule for its rows fits the budget of the other rank."""

    def make() -> Made:
        return units()[0], ids_of(rank(), 8 if rank() else 3)

    plain, (net, batch) = train(*make()), make()
    least = [memplan.plan(net, ids_of(0, rows), "min", costs="estimate").peak_bytes for rows in (3, 8)]
    budget = 2 * least[1] if rank() else (least[0] + least[1]) // 2
    memplan.apply(net, batch, budget, costs="estimate")
    found = first_difference(plain, train(net, batch), "result")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    if not plan.peak_bytes <= budget == plan.problem.budget_bytes:
        return f"peaks at {plan.peak_bytes} of {budget}, and the plan says {plan.problem.budget_bytes}"
    peaks = told_by_all(plan.peak_bytes)
    return found or (None if peaks[1] > min(told_by_all(budget)) else f"{peaks} fit the lowest budget")


def measured() -> str | None:
    """Ranks time collectives together, and ops alone."""
    return compare(units, costs="measure")


def clipped() -> str | None:
    """Clipping, a state dict and what `remove` leaves are those of the model without a plan."""
    results: list[Any] = []
    for way in ("plain", "planned", "removed"):
        net, batch = units()
        if way != "plain":
            memplan.apply(net, batch, 0.8, costs="estimate")
        if way == "removed":
            memplan.remove(net)
        torch.manual_seed(rank())
        loss_of(net(**batch)).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        state = {name: copied(t.full_tensor()) for name, t in net.state_dict().items()}
        net.load_state_dict(net.state_dict())
        tables = [table for m in net.modules() for table in (m._forward_pre_hooks, m._forward_hooks)]
        hooks = [] if way == "planned" else [[h.__name__ for h in table.values()] for table in tables]
        results.append((copied(part_of(norm)), state, str(hooks)))
    return first_difference(results[0], results[2], "removed") or first_difference(
        results[0][:2], results[1][:2], "planned"
    )


def own_hooks() -> str | None:
    """Hooks on the model keep their places among those of `fully_shard`, and see what they see without a plan."""
    results: list[Any] = []
    for way in ("plain", "planned", "removed"):
        seen: list[Any] = []
        torch.manual_seed(0)
        net, batch = Net().train(), ids_of(rank())
        net.register_forward_hook(lambda *_: seen.append("first"))  # noqa: B023
        sharded(net, net.blocks)
        net.register_forward_pre_hook(lambda *_: seen.append("before"))  # noqa: B023
        net.register_forward_hook(lambda _, __, output: seen.append(copied(output)))  # noqa: B023
        if way != "plain":
            memplan.apply(net, batch, 0.8, costs="estimate")
        found = train(net, batch)
        if way == "removed":
            memplan.remove(net)
        net.register_forward_hook(lambda *_: seen.append("last"))  # noqa: B023
        loss_of(net(**batch)).backward()
        names = [] if way == "planned" else [h.__name__ for h in net._forward_hooks.values()]
        results.append((found, seen, names))
    return first_difference(results[0][:2], results[1][:2], "planned") or first_difference(
        results[0], results[2], "removed"
    )


class TakesScale(Net):
    def forward(self, ids: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        loss = super().forward(ids)
        return loss if weight is None else loss * weight.to(loss.dtype)


def hooks_between_casts() -> str | None:
    """A hook that would see another dtype than without a plan is refused, also where it comes later."""
    inputs, results = MixedPrecisionPolicy(param_dtype=torch.bfloat16), MixedPrecisionPolicy(output_dtype=torch.float16)
    batch, more = ids_of(rank()), {**ids_of(rank()), "weight": torch.tensor(0.5)}
    early, after, later, unseen = (TakesScale().train() for _ in range(4))
    after.register_forward_hook(lambda *_: None)
    for net in (early, after, later, unseen):
        fully_shard(net, mp_policy=results if net is after else inputs)
    for net in (early, unseen):
        net.register_forward_pre_hook(lambda *_: None)
    for net, sample in ((later, more), (unseen, batch)):
        memplan.apply(net, sample, 0.9, costs="estimate")
        net(**sample).backward()
    later.register_forward_pre_hook(lambda *_: None)
    found = []
    for run in (
        lambda: memplan.apply(early, more, 0.9),
        lambda: memplan.apply(after, batch, 0.9),
        lambda: later(**more),
        lambda: later.eval()(**more),
        lambda: unseen(**more),
    ):
        found.append(refused(run, memplan.UnsupportedModel, "where fully_shard has cast"))
    memplan.remove(later)
    later(**batch)
    return next((text for text in found if text), None)


def fails_on_one_rank(breaks: int) -> str | None:
    """A rank that can't be planned, or that fails while collectives are timed, is an error on both, soon."""
    group = torch.distributed.new_group([0, 1])
    net, batch = units()
    hook = None
    if rank() == breaks:
        hook = next(net.parameters()).register_hook(lambda grad: grad)
    words = () if rank() == breaks else (f"on rank {breaks}",)
    run = functools.partial(memplan.apply, net, batch, 0.9, group=group)
    found = refused(run, memplan.UnsupportedModel, "hooks on sharded parameters", *words)
    if hook is not None:
        hook.remove()
    error = ZeroDivisionError("of all things")
    timing = mock.patch.object(agreement, "_seconds", side_effect=error)
    kind, text = (ZeroDivisionError, "of all") if rank() == breaks else (MemplanError, "waited for other ranks")
    with timing if rank() == breaks else contextlib.nullcontext(), mock.patch.object(agreement, "_LONGEST_WAIT_S", 2):
        found = found or refused(run, kind, text)
    results = train(*units()), train(net, batch)
    return found or first_difference(*results, "result")


def no_room(lacks: int) -> str | None:
    """The budget of one rank can't be met: all raise, soon, and train on as before."""
    plain, (net, batch) = train(*units()), units()
    budget = 1000 if rank() == lacks else 1 << 30
    found = refused(lambda: memplan.apply(net, batch, budget, costs="estimate"), memplan.BudgetInfeasible, "budget")
    return found or first_difference(plain, train(net, batch), "result")


def again_and_again() -> str | None:
    """A second plan takes the place of the first, and one that fails leaves the first."""
    plain, (net, batch) = train(*units()), units()
    memplan.apply(net, batch, 1.0, costs="estimate")
    memplan.apply(net, batch, 0.7, costs="estimate")
    found = refused(lambda: memplan.apply(net, batch, 1000, costs="estimate"), memplan.BudgetInfeasible, "budget")
    return found or first_difference(plain, train(net, batch), "result")


def first_a_plan() -> str | None:
    """Blocks that had a plan before `fully_shard`: their parameters are whole while they run."""
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        net = Net().train()
        for block in net.blocks if planned else ():
            memplan.apply(block, None, 0.95, costs="estimate")
        results.append(train(sharded(net, net.blocks), ids_of(rank())))
    return first_difference(*results, "result")


def refusals() -> str | None:
    net, batch = units()
    memplan.plan(net, batch, 0.8, costs="estimate")
    net(**batch)
    with_factor = units()[0]
    with_factor.set_gradient_divide_factor(3.0)  # type: ignore[operator]
    fresh = units()[0]
    spread = DTensor.from_local(batch["ids"], init_device_mesh("cpu", (2,)))
    torch.manual_seed(0)
    too_late = memplan.apply(Net().train(), batch, 0.8, costs="estimate")
    sharded(too_late, too_late.blocks)

    uneven, on_gpu = units(15, 31, 49, offload_policy=ON_HOST)[0], units(offload_policy=ON_HOST)[0]
    elsewhere = mock.patch.object(sharded_model.ShardedModel, "device", torch.device("cuda"))

    def without_host_budget() -> None:
        with elsewhere:
            Placement(on_gpu, Settings(budget=0.9, shards=sharded_model.ShardedModel.of(on_gpu)))

    return (
        refused(lambda: too_late(**batch), memplan.UnsupportedModel, "once it is sharded")
        or refused(lambda: memplan.apply(net.blocks[0], None, 0.9), memplan.UnsupportedModel, "a unit within")  # type: ignore[index]
        or refused(lambda: memplan.apply(with_factor, batch, 0.9), memplan.UnsupportedModel, "divisor of gradients")
        or refused(lambda: memplan.apply(fresh, {"ids": spread}, 0.9), Refusal, "is a DTensor")
        or refused(
            lambda: memplan.apply(uneven, batch, 0.9, host_budget="1MiB"), memplan.UnsupportedModel, "not split evenly"
        )
        or refused(without_host_budget, memplan.UnsupportedModel, "give host_budget=")
    )


ODD = torch.library.Library("memplan_test_ranks", "DEF")
ODD.define("odd(Tensor x) -> Tensor")
ODD.impl("odd", lambda x: x.t().contiguous().t(), "CPU")
ODD.impl("odd", lambda x: torch.empty_like(x), "Meta")


class Odd(Stack):
    """Has an op whose fake kernel is wrong about how its result lies in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x) + torch.ops.memplan_test_ranks.odd.default(x).square().sum()
        return loss


def other_results(rows: tuple[int, int], in_units: bool) -> str | None:
    """Ranks on which ops give other results than were traced plan in one more round. rows: of each rank's batch."""

    def made() -> Made:
        torch.manual_seed(0)
        net, x = Odd().train(), torch.randn(rows[rank()], 16)
        return sharded(net, net.layers) if in_units else net, {"x": x}

    real_results._NOTED.clear()
    plain, (net, sample) = train(*made()), made()
    memplan.apply(net, sample, 1.0, config="checkmate", group=torch.distributed.group.WORLD)
    return first_difference(plain, train(net, sample), "result") or (None if memplan.plan_of(net) else "no plan")


TWO: dict[str, tuple[Callable[[], Made], bool]] = {
    "units": (units, False),
    "uneven parts": (functools.partial(units, 15, 31, 49), False),
    "mixed precision": (functools.partial(units, mp_policy=BF16), False),
    "no reshard": (functools.partial(units, reshard_after_forward=False), True),
    "other dimension": (functools.partial(units, shard_placement_fn=lambda p: Shard(p.dim() - 1)), True),
    "frozen": (frozen, True),
    "groups": (grouped, True),
    "half a group": (half_a_group, True),
    "half a group, mixed precision": (functools.partial(half_a_group, mp_policy=BF16), True),
    "several dtypes": (of_several_dtypes, True),
    "run again": (run_again, True),
    "divided by 3": (functools.partial(divided, 3.0), True),
    "divided by 3, mixed precision": (functools.partial(divided, 3.0, mp_policy=BF16), True),
    "traced twice": (traced_twice, True),
    "tensor parallel": (tensor_parallel, False),
    "distribute_tensor": (distributed_tensors, False),
    "sequence parallel": (sequence_parallel, True),
}
FOUR = {
    "four ranks": units,
    "run again on four ranks": run_again,
    "reshards to groups of two": functools.partial(units, reshard_after_forward=2),
    "HSDP": replicated,
    "FSDP and tensor parallel": two_dimensions,
}
CELLS = {name: Cell(functools.partial(compare, make), full=full) for name, (make, full) in TWO.items()}
CELLS |= {name: Cell(functools.partial(compare, make), world=4, full=name != "HSDP") for name, make in FOUR.items()}
CELLS |= {
    "other results": Cell(lambda: other_results((64, 64), True)),
    "other results, other batches": Cell(lambda: other_results((16, 64), True)),
    "other results, no units": Cell(lambda: other_results((64, 64), False)),
    "other results, other batches, no units": Cell(lambda: other_results((64, 16), False)),
    "accumulated": Cell(functools.partial(compare, units, 3), full=True),
    "peaks": Cell(functools.partial(peaks, units)),
    "peaks of tensor parallel": Cell(functools.partial(peaks, tensor_parallel), full=True),
    "gathers again": Cell(gathers_again),
    "overlaps": Cell(overlaps, full=True),
    "given up": Cell(given_up),
    "left as it is": Cell(left_as_it_is),
    "left gathered": Cell(left_gathered, full=True),
    "one of the units": Cell(one_of_the_units, full=True),
    "changed later": Cell(changed_later),
    "own collectives": Cell(own_collectives),
    "uneven exchanges": Cell(uneven),
    "loss parallel": Cell(in_loss_parallel),
    "context parallel": Cell(in_context_parallel),
    "with a loss": Cell(with_a_loss),
    "offloaded": Cell(offloaded, full=True),
    "on the host, HSDP": Cell(
        functools.partial(on_host, functools.partial(replicated, offload_policy=ON_HOST)), world=4, full=True
    ),
    "on the host, planned": Cell(functools.partial(on_host, units, moved=None)),
    "on the host, planned, mixed precision": Cell(
        functools.partial(on_host, functools.partial(units, mp_policy=BF16), moved=None), full=True
    ),
    "on the host, planned, accumulated": Cell(functools.partial(on_host, units, 3, moved=None), full=True),
    "on the host, planned, HSDP": Cell(functools.partial(on_host, replicated, moved=None), world=4, full=True),
    "some on the host": Cell(functools.partial(on_host, some_on_host, moved="blocks"), full=True),
    "some on the host, lengths": Cell(functools.partial(lengths, some_on_host, **HOST), full=True),
    "on the host": Cell(functools.partial(on_host, functools.partial(units, offload_policy=ON_HOST)), full=True),
    "on the host, mixed precision": Cell(
        functools.partial(on_host, functools.partial(units, mp_policy=BF16, offload_policy=ON_HOST)), full=True
    ),
    "on the host, accumulated": Cell(
        functools.partial(on_host, functools.partial(units, offload_policy=ON_HOST), 3), full=True
    ),
    "lengths": Cell(lengths),
    "lengths, on the host, planned": Cell(functools.partial(lengths, budget=0.18, moves=True, **HOST), full=True),
    "budgets and rows of a rank": Cell(own_budgets),
    "measured": Cell(measured, full=True),
    "clipped, saved, removed": Cell(clipped),
    "without division": Cell(without_division),
    "hooks of one's own": Cell(own_hooks),
    "hooks between casts": Cell(hooks_between_casts),
    "tight": Cell(tight, full=True),
    "one rank fails": Cell(functools.partial(fails_on_one_rank, 1)),
    "the first rank fails": Cell(functools.partial(fails_on_one_rank, 0)),
    "no room": Cell(functools.partial(no_room, 1)),
    "no room on the first rank": Cell(functools.partial(no_room, 0)),
    "distribute_tensor, accumulated": Cell(functools.partial(compare, distributed_tensors, 3), full=True),
    "peaks of distribute_tensor": Cell(functools.partial(peaks, distributed_tensors)),
    "peaks of distribute_tensor, accumulated": Cell(functools.partial(peaks, distributed_tensors, True), full=True),
    "again and again": Cell(again_and_again, full=True),
    "first a plan": Cell(first_a_plan),
    "refusals": Cell(refusals),
}

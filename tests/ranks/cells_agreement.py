"""Ranks of a group that agree before each planned step, and what happens where one of them would do something else."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memplan
from memplan.errors import MemplanError
from memplan.planning import plan_search
from memplan.planning import planner as planner_module
from memplan.planning.capturing import Capturing
from memplan.planning.plan_search import PlanSearch
from tests.installed.test_replan import NoMemory
from tests.ranks.spawn import Cell
from tests.support.fake_shards import FakeShards
from tests.support.zoo import copied, first_difference

BUDGET = 0.7
REFUSED_WITHIN_S = 30


class Stack(nn.Module):
    """Layers that run in a given order: that in which gradients arrive is the reverse of it."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x.pow(2).mean()


def stack(order: tuple[int, ...] = (0, 1, 2, 3)) -> Stack:
    torch.manual_seed(0)
    return Stack(order).train()


def rank() -> int:
    return torch.distributed.get_rank()


def batch(rows: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(100 * seed + rank()))


def planned(net: nn.Module, sample: Any = None, budget: Any = BUDGET, **options: Any) -> nn.Module:
    group = torch.distributed.group.WORLD
    return memplan.apply(net, sample, budget, costs="estimate", group=group, **options)


def told_by_all(found: Any) -> list[Any]:
    """What each rank found."""
    table: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(table, found)
    return table


@contextlib.contextmanager
def counted_plans() -> Iterator[list[int]]:
    """The number of plans that this rank looks for itself, as the list's length."""
    searched: list[int] = []
    original = plan_search.solve_front

    def solve(*args: Any, **kwargs: Any) -> Any:
        searched.append(1)
        return original(*args, **kwargs)

    with mock.patch.object(plan_search, "solve_front", solve):
        yield searched


def refused(run: Callable[[], Any], kind: type[Exception], *texts: str) -> str | None:
    """What is wrong where `run` is not refused, soon, with an error of this kind that says all of this."""
    start = time.monotonic()
    try:
        run()
    except Exception as error:
        took_s = time.monotonic() - start
        missing = [text for text in texts if text not in str(error)]
        if type(error) is not kind or missing or took_s > REFUSED_WITHIN_S:
            return f"{type(error).__name__} after {took_s:.1f} s, without {missing}: {error}"
        return None
    return "nothing was refused"


# -- what is refused on all ranks -------------------------------------------------------------------------------------


def other_order(sample: bool) -> str | None:
    """One rank would hand its gradients over in another order."""
    net = stack((0, 1, 2, 3) if rank() == 0 else (1, 0, 2, 3))
    memplan.plan(net, batch(), BUDGET, costs="estimate")  # solvers are compiled

    def run() -> None:
        planned(net, batch() if sample else None)
        net(batch()).backward()

    found = refused(run, memplan.PlanMismatch, "rank 0 and rank 1", "gradient layers.0", "gradient layers.1")
    return found or (None if net.layers[0].weight.grad is None else "something ran")


def other_graph() -> str | None:
    """One rank trains fewer parameters, from the second step on."""
    net = planned(stack())
    net(batch()).backward()
    if rank() == 1:
        net.layers[2].requires_grad_(False)  # type: ignore[union-attr]
    return refused(lambda: net(batch()), memplan.PlanMismatch, "rank 0 and rank 1", "layers.2")


def extra_gather() -> str | None:
    """The step of one rank has a collective more."""

    def with_gather(*args: Any, **options: Any) -> Any:
        program = original(*args, **options)
        return dataclasses.replace(program, collectives=("gather layers.3.weight", *program.collectives))

    original = planner_module.lower
    net = stack()
    with mock.patch.object(planner_module, "lower", with_gather if rank() == 1 else original):
        return refused(lambda: planned(net, batch()), memplan.PlanMismatch, "gather layers.3.weight")


def unplanned_rank() -> str | None:
    """One rank can't capture what it runs and runs it as it is, in autograd's order."""
    net = planned(stack(), batch(), 1 << 30)
    if rank() == 1:
        net.layers[0].register_forward_hook(lambda module, args, output: setattr(output, "note", "no island does that"))
    return refused(lambda: net(batch()), memplan.PlanMismatch, "rank 0 and rank 1", "unplanned")


def no_room() -> str | None:
    """The budget of one rank can't be met."""
    found = refused(
        lambda: planned(stack(), batch(), 1 << 30 if rank() == 0 else 1000),
        memplan.BudgetInfeasible,
        *(["on rank 1"] if rank() == 0 else []),
        "Raise the budget",
    )
    return found


def broken_planning() -> str | None:
    """Something breaks while one rank plans for both, and while the other one captures."""
    for owner, name, breaks in ((PlanSearch, "plan", 0), (Capturing, "capture", 1)):

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("of all things")

        net = planned(stack())
        with mock.patch.object(owner, name, broken) if rank() == breaks else contextlib.nullcontext():
            if rank() == breaks:
                found = refused(lambda net=net: net(batch()), ZeroDivisionError, "of all things")
            else:
                found = refused(lambda net=net: net(batch()), MemplanError, f"on rank {breaks}", "ZeroDivisionError")
        if found:
            return f"{name}: {found}"
        net(batch()).backward()  # nothing has run, so training can go on
    return None


def other_call() -> str | None:
    """A call that no plan serves, on one rank, with on_mismatch="raise"."""
    net = planned(stack(), batch(), on_mismatch="raise")
    net(batch()).backward()
    rows = 64 if rank() == 0 else 32
    texts = ["does not match the plan", *(["on rank 1"] if rank() == 0 else [])]
    return refused(lambda: net(batch(rows)), memplan.PlanMismatch, *texts)


# -- plans that are shared, or not ------------------------------------------------------------------------------------


def losses(net: nn.Module, batches: list[torch.Tensor]) -> list[Any]:
    results = []
    for x in batches:
        net.zero_grad()
        loss = net(x)
        loss.backward()
        results.append((copied(loss), [copied(p.grad) for p in net.parameters()]))
    return results


def one_plans() -> str | None:
    """Ranks with equal steps search once; a rank with a batch of another size searches by itself, for all sizes."""
    batches = [batch(seed=i) for i in range(3)] + [batch(64 if rank() == 0 else 48), batch(seed=4)]
    with counted_plans() as searched:
        net = planned(stack())
        results = losses(net, batches)
    plans = told_by_all(memplan.plan_of(net).schedule)  # type: ignore[union-attr]
    counts = told_by_all(len(searched))
    if counts != [1, 1] or plans[0] != plans[1]:
        return f"searches: {counts}; one plan: {plans[0] == plans[1]}"
    return first_difference(losses(stack(), batches), results, "result")


def one_plans_copies() -> str | None:
    """The same where values are copied to the host, also for batches that come later."""
    batches = [batch(), batch(48), batch(32)]
    net = stack()
    with counted_plans() as searched:
        planned(net, batches[0], 0.6, host_budget="1MiB")
        found = losses(net, batches)
    counts = told_by_all(len(searched))
    plans = told_by_all([step.plan.schedule for step in net.forward.steps])  # type: ignore[attr-defined]
    if counts[1] != 1 or plans[0] != plans[1]:
        return f"searches: {counts}; equal plans: {plans[0] == plans[1]}"
    return first_difference(losses(stack(), batches), found, "result")


def other_budgets() -> str | None:
    """Ranks with other budgets have other plans, with the same collectives."""
    net = stack()
    top, floor = (f(p.peak_bytes for p in memplan.explore(net, batch(), costs="estimate")) for f in (max, min))
    budget = top if rank() == 0 else (top + floor) // 2
    planned(net, batch(), budget)
    plan = memplan.plan_of(net)
    assert plan is not None
    recomputed = told_by_all(len(plan.recomputed))
    if recomputed[0] or not recomputed[1] or plan.peak_bytes > budget:
        return f"recomputed {recomputed}, {plan.peak_bytes} of {budget}"
    return first_difference(losses(stack(), [batch()] * 2), losses(net, [batch()] * 2), "result")


def two_plan() -> str | None:
    """Of four ranks with two budgets two search, each for another one; then one of them has a call of its own."""
    net = stack()
    top, floor = (f(p.peak_bytes for p in memplan.explore(net, batch(), costs="estimate")) for f in (max, min))
    batches = [batch(), batch(48 if rank() == 3 else 64, seed=1)]
    with counted_plans() as searched:
        planned(net, batch(), top if rank() % 2 else (top + floor) // 2)
    plans = told_by_all(memplan.plan_of(net).schedule)  # type: ignore[union-attr]
    counts = told_by_all(len(searched))
    if counts != [1, 1, 0, 0] or plans[0] != plans[2] or plans[1] != plans[3] or plans[0] == plans[1]:
        return f"searches: {counts}"
    return first_difference(losses(stack(), batches), losses(net, batches), "result")


def gathers() -> str | None:
    """Where plans have gathers in them, all ranks run the plan for the lowest budget."""
    whole = stack()
    expected = [copied(whole(batch())) for _ in range(2)]
    top, floor = (f(p.peak_bytes for p in memplan.explore(whole, batch(), costs="estimate")) for f in (max, min))
    net = stack()
    with counted_plans() as searched:
        planned(net, None, 2 * top if rank() == 0 else (top + floor) // 2, shards=FakeShards(net))
        found = []
        for _ in range(2):
            loss = net(batch())
            loss.backward()
            found.append(copied(loss))
    plans = told_by_all(memplan.plan_of(net).schedule)  # type: ignore[union-attr]
    counts = told_by_all(len(searched))
    if counts != [0, 1] or plans[0] != plans[1]:
        return f"searches: {counts}; one plan: {plans[0] == plans[1]}"
    return first_difference(expected, found, "losses")


def uneven_gathers(
    rows: tuple[tuple[int, ...], ...], searches: list[int], sample: bool, changed_at: int | None = None
) -> str | None:
    """Batches of other sizes on each rank from the first step on: all ranks gather in one order at each of them.

    rows: of each step's batches, by rank. searches: by rank. changed_at: the step before which a mode changes that is
    of no concern, so that ranks have schedules at hand that others need not have.
    """
    batches = [batch(of_rank[rank()], seed) for seed, of_rank in enumerate(rows)]
    most = [batch(max(map(max, rows)))]
    top, floor = (f(p.peak_bytes for p in memplan.explore(stack(), *most, costs="estimate")) for f in (max, min))
    net, limit, found, problem = stack(), floor + (top - floor) // 8 + 1000, [], None
    shards, orders = FakeShards(net), set[tuple[str, ...]]()
    with counted_plans() as searched:
        planned(net, batches[0] if sample else None, limit, shards=shards)
        for index, x in enumerate(batches):
            if index == changed_at:
                net.layers[0].eval()  # type: ignore[union-attr]
            shards.log.clear()
            found += losses(net, [x])
            plan = memplan.plan_of(net)
            assert plan is not None
            gathered = told_by_all([name for what, name in shards.log if what == "gather"])
            peaks = told_by_all(plan.peak_bytes)
            if gathered[0] != gathered[1] or not gathered[0] or max(peaks) > limit:
                problem = problem or f"gathered {gathered}; peaks {peaks} of {limit}"
            orders.add(tuple(gathered[0]))
    counts = told_by_all(len(searched))
    if counts != searches or len(orders) != searches[0]:
        problem = problem or f"searches: {counts}, {len(orders)} orders"
    return problem or first_difference(losses(stack(), batches), found, "result")


class Masked(Stack):
    """A batch with nothing to mask takes other ops."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            x = x * mask.expand_as(x).float()
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
            if mask is not None:
                x = x.masked_fill(~mask, 0.1)
        return x.pow(2).mean()


def masked_gathers(masks: tuple[tuple[int, ...], ...], rows: tuple[tuple[int, ...], ...], at_first: bool) -> str | None:
    """Steps of ranks run other ops, and gather in one order.

    masks: whether there is one, at each step by rank. rows: of the batches.
    """
    torch.manual_seed(0)
    whole, calls = Masked().train(), []
    for seed, (of_rank, masked) in enumerate(zip(rows, masks, strict=True)):
        x = batch(of_rank[rank()], seed)
        calls.append((x, x[:, :1] > -1) if masked[rank()] else (x,))
    points = memplan.explore(whole, (batch(128), batch(128)[:, :1] > -1), costs="estimate")
    top, floor = (f(p.peak_bytes for p in points) for f in (max, min))
    net, found, gathered = copy.deepcopy(whole), [], []
    expected = [masked_losses(whole, call) for call in calls]
    shards = FakeShards(net)
    planned(net, calls[0] if at_first else None, floor + (top - floor) // 8 + 1000, shards=shards)
    for call in calls:
        shards.log.clear()
        found.append(masked_losses(net, call))
        gathered.append(told_by_all([name for what, name in shards.log if what == "gather"]))
    if any(a != b or not a for a, b in gathered):
        return f"gathered {gathered}"
    return first_difference(expected, found, "result")


def masked_losses(net: nn.Module, call: tuple[Any, ...]) -> Any:
    net.zero_grad()
    loss = net(*call)
    loss.backward()
    return copied(loss), [copied(p.grad) for p in net.parameters()]


def prepared() -> str | None:
    """Plans for further samples are agreed on like those for steps: each rank has one for all sizes, and what one can't
    meet is raised on both."""
    net, ladder = planned(stack(), batch()), [batch(32), batch(48 if rank() == 0 else 40)]
    with counted_plans() as searched:
        plans = memplan.prepare(net, ladder)
        counts = told_by_all(len(searched))
        results = losses(net, [*ladder, batch()])
        again = told_by_all(len(searched))
    if counts != [1, 1] or again != counts:
        return f"searches: {counts}, then {again}"
    if any(plan is None or plan.peak_bytes > (plan.problem.budget_bytes or 0) for plan in plans):
        return f"not within the budget: {plans}"
    found = refused(
        lambda: memplan.prepare(net, [batch(4096 if rank() else 64)]), memplan.BudgetInfeasible, "no schedule"
    )
    return found or first_difference(losses(stack(), [*ladder, batch()]), results, "result")


def prepared_gathers() -> str | None:
    """With sharded parameters all ranks run the one plan."""
    net, whole = stack(), stack()
    planned(net, batch(), 1 << 30, shards=FakeShards(net))
    with counted_plans() as searched:
        plan, *_ = memplan.prepare(net, [batch(32)])
    loss = net(batch(32))
    loss.backward()
    plans, counts = told_by_all(plan.schedule), told_by_all(len(searched))
    if counts != [1, 0] or plans[0] != plans[1] or memplan.plan_of(net) is not plan:
        return f"searches: {counts}; one plan: {plans[0] == plans[1]}"
    return first_difference(copied(whole(batch(32))), copied(loss), "loss")


def looks_on() -> str | None:
    """A rank without a sample waits while others plan theirs, and evaluates in between without them."""
    net = planned(stack(), batch() if rank() == 0 else None)
    if rank() == 1:
        with torch.no_grad():
            net(batch())
    return first_difference(losses(stack(), [batch()] * 2), losses(net, [batch()] * 2), "result")


# -- what one rank does alone -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_remembered() -> Iterator[None]:
    """What a device has been seen to hold is of no concern to later cells."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"MEMPLAN_CACHE_DIR": folder}):
        yield


@nothing_remembered()
def out_of_memory() -> str | None:
    """One rank runs out of memory, plans with a margin and goes on with the same collectives."""
    net = planned(stack(), batch(), on_oom="replan")
    before = losses(net, [batch()])
    with NoMemory(10) if rank() == 1 else contextlib.nullcontext():
        during = losses(net, [batch()])
    return first_difference(losses(stack(), [batch()] * 3), before + during + losses(net, [batch()]), "result")


@nothing_remembered()
def copies_of_buffers() -> str | None:
    """The rank that keeps copies of buffers, to run steps again, counts them in its plan."""
    layers = (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    net = nn.Sequential(*layers).train()
    planned(net, batch(), "1GiB", on_oom="replan" if rank() else "raise", loss_fn=lambda net, x: net(x).square().mean())
    plan = memplan.plan_of(net)
    assert plan is not None
    plain, kept = told_by_all(plan.problem.extra_resident_bytes)
    buffer_bytes = sum(buffer.nbytes for buffer in net.buffers())
    return None if kept - plain == buffer_bytes else f"{kept} and {plain} bytes beside the step"


@nothing_remembered()
def alone_with_gathers() -> str | None:
    """One rank runs out of memory in a step that has run collectives: it raises, and the others when they next ask."""

    def with_gather(*args: Any, **options: Any) -> Any:
        program = original(*args, **options)
        return dataclasses.replace(program, collectives=("gather layers.3.weight", *program.collectives))

    original = planner_module.lower
    with mock.patch.object(planner_module, "lower", with_gather):
        net = planned(stack(), batch(), on_oom="replan")
        losses(net, [batch()])  # the first step is checked
        if rank() == 1:
            with NoMemory(10):
                found = refused(lambda: losses(net, [batch()]), memplan.PlanMismatch, "run collectives already")
        else:
            found = None if losses(net, [batch()]) else "nothing ran"
        return found or refused(lambda: net(batch()), memplan.PlanMismatch, "run collectives already")


def dies() -> str | None:
    """A rank dies in backward; the others get an error, from its collectives or before the next step."""
    start = time.monotonic()
    net = planned(stack())
    outer = DistributedDataParallel(net)
    outer(batch()).backward()
    if rank() == 1:
        net.layers[1].weight.register_hook(lambda gradient: os._exit(1))  # type: ignore[union-attr]
        net.layers[1].weight.register_post_accumulate_grad_hook(lambda p: os._exit(1))  # type: ignore[union-attr]
    try:
        outer(batch()).backward()
        outer(batch())
    except Exception:
        took_s = time.monotonic() - start
        return None if took_s < REFUSED_WITHIN_S else f"after {took_s:.0f} s"
    return "went on without the other rank"


def dies_between() -> str | None:
    """A rank dies and no collective but the exchange would tell."""
    net = planned(stack())
    net(batch()).backward()
    if rank() == 1:
        os._exit(1)
    return refused(lambda: net(batch()), MemplanError, "did not answer")


CELLS = {
    "another order, at apply": Cell(lambda: other_order(True)),
    "another order, at the first call": Cell(lambda: other_order(False)),
    "another graph": Cell(other_graph),
    "an extra gather": Cell(extra_gather),
    "an unplanned rank": Cell(unplanned_rank),
    "no room": Cell(no_room),
    "broken planning": Cell(broken_planning),
    "another call": Cell(other_call),
    "one plans": Cell(one_plans),
    "one plans copies": Cell(one_plans_copies),
    "other budgets": Cell(other_budgets),
    "two plan": Cell(two_plan, world=4, full=True),
    "gathers": Cell(gathers),
    "gathers, other batches at first": Cell(lambda: uneven_gathers(((64, 40), (40, 64), (64, 64)), [1, 0], True)),
    "gathers, the first call": Cell(lambda: uneven_gathers(((40, 64), (12, 12), (40, 40)), [1, 0], False)),
    "gathers, batches that grow": Cell(
        lambda: uneven_gathers(
            ((16, 16), (16, 128), (16, 16), (128, 16), (128, 128), (16, 16), (20, 128)), [2, 0], True
        )
    ),
    "gathers, a mode of no concern": Cell(
        lambda: uneven_gathers(
            ((64, 64), (64, 128), (128, 64), (64, 64), (64, 64), (64, 128)), [2, 0], False, changed_at=4
        )
    ),
    "gathers, other ops at first": Cell(
        lambda: masked_gathers(((1, 0), (0, 1), (1, 1), (0, 0)), ((128, 16), (16, 64), (16, 128), (128, 128)), True)
    ),
    "gathers, other ops later": Cell(
        lambda: masked_gathers(
            ((0, 0), (0, 1), (1, 0), (0, 0), (1, 1)), ((16, 16), (16, 128), *((128, 128),) * 3), False
        )
    ),
    "prepared": Cell(prepared),
    "prepared, with gathers": Cell(prepared_gathers),
    "looks on": Cell(looks_on),
    "out of memory": Cell(out_of_memory),
    "copies of buffers": Cell(copies_of_buffers),
    "out of memory with gathers": Cell(alone_with_gathers),
    "dies in backward": Cell(dies, alone=True),
    "dies between steps": Cell(dies_between, full=True, alone=True),
}

"""While a rank plans, no other takes part: nothing may wait for one, and what does all the same ends, on every rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import memplan
from memplan.errors import MemplanError
from memplan.planning.problems import Problems
from memplan.runtime.ranks import agreement
from tests.ranks.cells_agreement import batch, planned, rank, refused, stack
from tests.ranks.cells_zero3 import LENGTH, NEEDS, WIDTH, WORDS, Net, apply_it, batches, engine_of, weights
from tests.ranks.spawn import Cell
from tests.support.meter import COLLECTIVES
from tests.support.zoo import copied, first_difference

WAITING = (*COLLECTIVES, "alltoall", "alltoall_base", "all_to_all_single", "barrier", "gather", "scatter")


class Alone(AssertionError):
    """A rank that plans waited for others."""


@contextlib.contextmanager
def nothing_waits_in_planning() -> Iterator[list[str]]:
    """Collectives of this rank fail while it looks for a step or plans one, but for those of the agreement itself.

    Gives the kinds of what ran so, as a list that grows.
    """
    kind, ran = torch.distributed.ProcessGroup, list[str]()
    before = {name: vars(kind)[name] for name in WAITING if name in vars(kind)}
    agrees = agreement.Agreement.step
    allowed: Any = None  # the group of the agreement under way

    def refusing(name: str) -> Callable[..., Any]:
        original = before[name]

        def run(group: Any, *args: Any, **kwargs: Any) -> Any:
            if allowed is not None and group is not allowed:
                raise Alone(f"{name} while this rank plans")
            return original(group, *args, **kwargs)

        return run

    def agreeing(between: Any, look: Any, plan: Any, *others: Any) -> Any:
        nonlocal allowed

        def planning(share: Any) -> Any:
            ran.append("plan")
            return plan(share)

        allowed = between._ranks._group
        try:
            return agrees(between, look, None if plan is None else planning, *others)
        finally:
            allowed = None

    patches = [mock.patch.object(kind, name, refusing(name)) for name in before]
    with contextlib.ExitStack() as stack, mock.patch.object(agreement.Agreement, "step", agreeing):
        for patch in patches:
            stack.enter_context(patch)
        yield ran


def qwen3() -> nn.Module:
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=WORDS, hidden_size=2 * WIDTH, intermediate_size=WIDTH, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=WIDTH, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def loss_of(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    found = engine(ids) if isinstance(engine.module, Net) else engine(input_ids=ids, labels=ids).loss
    return found  # type: ignore[no-any-return]


def train(build: Callable[[], nn.Module], sample: bool, threshold: int, accumulation: int, planned: bool) -> Any:
    """Batches of two lengths, the second of which is planned when it comes."""
    engine = engine_of("fp32", accumulation, build, stage3_param_persistence_threshold=threshold)
    data = [x[:, : LENGTH if i % 3 else LENGTH - 8] for i, x in enumerate(batches(4 * accumulation))]
    try:
        with nothing_waits_in_planning() if planned else contextlib.nullcontext([]) as ran:
            if planned:
                named = {"ids": data[0]} if build is Net else {"input_ids": data[0], "labels": data[0]}
                first: Any = data[0] if build is Net else named
                apply_it(engine, first if sample else None, memplan.Budget(activations=0.6), costs="measure")
                if sample:
                    memplan.prepare(engine.module, [{name: x[:1] for name, x in named.items()}])
            losses = []
            for x in data:
                loss = loss_of(engine, x)
                engine.backward(loss)
                engine.step()
                losses.append(copied(loss))
        assert not planned or len(ran) >= 2, ran
        return losses, weights(engine)
    finally:
        engine.destroy()


def compare(build: Callable[[], nn.Module], sample: bool, threshold: int, accumulation: int) -> str | None:
    plain, planned = (train(build, sample, threshold, accumulation, planned) for planned in (False, True))
    return first_difference(plain, planned, "result")


# -- a rank that waits all the same -----------------------------------------------------------------------------------


def waits_alone(wait: Callable[[Any], Any], sample: bool, breaks: int, longest_s: int) -> str | None:
    """One rank, while it plans, waits for another, which waits for it in the agreement.

    longest_s: how long a rank may."""
    group = torch.distributed.new_group([0, 1])
    original = Problems.costs

    def costs(*args: Any) -> Any:
        wait(group)
        return original(*args)

    net = stack()
    memplan.plan(net, batch(), 0.7, costs="estimate")  # solvers are compiled
    rows = 64 if rank() == 0 else 48  # each rank plans for itself
    words = ["waited for other ranks", *([] if rank() == breaks else [f"on rank {breaks}"])]

    def run() -> None:
        planned(net, batch(rows) if sample else None)
        net(batch(rows)).backward()

    with contextlib.ExitStack() as stack_:
        stack_.enter_context(mock.patch.object(agreement, "_LONGEST_WAIT_S", longest_s))
        if rank() == breaks:
            stack_.enter_context(mock.patch.object(Problems, "costs", costs))
        found = refused(run, MemplanError, *words)
    return found or message_arrives()


def times_an_op_after_gathers() -> str | None:
    """FSDP2, and an op that can be timed neither on made-up data, nor on what is gathered, for others are elsewhere."""
    for _ in range(2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).double()
        torch.distributed.fsdp.fully_shard(net)
        memplan.apply(net, torch.randn(64, 32), "min")  # of another dtype than the parameters, which its ops refuse
    return message_arrives()


def message_arrives() -> str | None:
    """Whether one rank can send to another, as ever."""
    message = torch.tensor([float(rank())])
    if rank() == 0:
        torch.distributed.send(message, 1)
    else:
        torch.distributed.recv(message, 0)
    return None if message.item() == 0 else "a message is lost"


def _receives(group: Any) -> None:
    torch.distributed.recv(torch.zeros(1), 1 - rank(), group=group)


def _asks_the_store(group: Any) -> None:
    torch.distributed.distributed_c10d._get_default_store().get(f"never set by rank {1 - rank()}")


QUICK = {("toy", True, 0, 1)}
QUICK_WAITS = {"a barrier", "a message", "a key of the store"}
CELLS = {
    f"{name}{', with a sample' if sample else ''}, {'all' if threshold else 'none'} whole, accumulation {n}": Cell(
        functools.partial(compare, build, sample, threshold, n),
        full=(name, sample, threshold, n) not in QUICK,
        needs=(*NEEDS, "transformers"),
    )
    for name, build in (("toy", Net), ("Qwen3", qwen3))
    for sample in (False, True)
    for threshold in (0, 100_000)
    for n in (1, 2)
}
CELLS |= {
    f"{name} in planning of {'the first call' if not sample else 'a sample'}": Cell(
        functools.partial(waits_alone, wait, sample, breaks, longest_s), full=name not in QUICK_WAITS
    )
    for name, wait, sample, breaks, longest_s in (
        ("a barrier", lambda group: torch.distributed.barrier(group=group), False, 0, 2),
        ("a reduction", lambda group: torch.distributed.all_reduce(torch.zeros(1), group=group), False, 1, 20),
        ("a message", _receives, True, 1, 2),
        ("a key of the store", _asks_the_store, True, 1, 2),
        ("a new group", lambda _: torch.distributed.new_group([0, 1]), False, 0, 2),
        ("a monitored barrier", lambda _: torch.distributed.monitored_barrier(), False, 1, 2),
    )
}
CELLS["an op that fails on made-up data, after gathers"] = Cell(times_an_op_after_gathers)

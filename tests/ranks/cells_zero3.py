"""ZeRO-3 over two gloo ranks with planned gathers, against the same engine without memplan."""

from __future__ import annotations

import functools
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

import memplan
from memplan.problem.schedule import Drop, Prefetch
from tests.ranks.cells_agreement import refused
from tests.ranks.cells_islands import Net as NetWithIslands
from tests.ranks.spawn import Cell
from tests.support.meter import LiveMeter, gloo_lets_go
from tests.support.zoo import copied, first_difference

BUDGET = memplan.Budget(activations=0.4)  # 1: all parameters are whole throughout, and nothing is recomputed
STEPS = 5
WIDTH, WORDS, LENGTH = 32, 50, 40


class Block(nn.Module):
    """Attention and a perceptron, with a parameter that no module of its own holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(2 * WIDTH, 1))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended)) * self.gate[:1]
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm_2(x)))))


class Net(nn.Module):
    """Tied weights, a frozen one, a parameter of the model itself, and biases small enough to stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(2 * WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(2))
        # Its attention asks whether query is key, and reads parameters of a module that it does not call.
        self.layers.append(nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, batch_first=True))
        self.layers[0].up.weight.requires_grad_(False)  # type: ignore[union-attr, operator]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale[:WIDTH]
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def engine_of(dtype: str = "fp32", accumulation: int = 1, build: Callable[[], nn.Module] = Net, **zero: Any) -> Any:
    """A fresh engine of the same weights on every call."""
    import deepspeed

    torch.manual_seed(0)
    net = build().train()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 40, "reduce_bucket_size": 2000,
            "stage3_prefetch_bucket_size": 3000, **zero,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": dtype == "bf16"},
        "torch_autocast": {"enabled": dtype == "autocast", "dtype": "bfloat16"},
    }  # fmt: skip
    trainable = [p for p in net.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=net, config=config, model_parameters=trainable)[0]
    torch.manual_seed(10 + torch.distributed.get_rank())
    return engine


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(20 + torch.distributed.get_rank())
    return [torch.randint(0, WORDS, (2, LENGTH), generator=generator) for _ in range(count)]


def apply_it(engine: Any, sample: Any, budget: Any = BUDGET, **keywords: Any) -> None:
    from memplan.integrations.deepspeed.engine import apply_plan

    keywords = {"costs": "estimate", "gather_speed": memplan.GatherSpeed(1e8, 1e-4), **keywords}
    apply_plan(engine, sample, budget, **keywords)


def plan_it(engine: Any, budget: Any = BUDGET, sample: Any = None, **keywords: Any) -> memplan.Plan:
    apply_it(engine, batches(1)[0] if sample is None else sample, budget, **keywords)
    plan = memplan.plan_of(engine.module)
    assert plan is not None
    return plan


def weights(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: copied(p) for name, p in named.items()}


def step(engine: Any, batch: torch.Tensor, style: str = "engine") -> torch.Tensor:
    loss = engine(batch)
    if style == "engine":
        engine.backward(loss)
    else:
        loss.backward()
    engine.step()
    return loss.detach().clone()  # type: ignore[no-any-return]


def train(dtype: str, accumulation: int, style: str, planned: Any, **zero: Any) -> Any:
    """planned: a budget; False is none."""
    engine = engine_of(dtype, accumulation, **zero)
    try:
        if planned:
            plan = plan_it(engine, planned)
            assert plan.recomputed
            assert plan.problem.graph.gathers == (zero.get("stage3_param_persistence_threshold", 0) < 1_000_000)
        losses = [step(engine, batch, style) for batch in batches(STEPS * accumulation)]
        return losses, weights(engine), torch.get_rng_state()
    finally:
        engine.destroy()


def compare_training(dtype: str, accumulation: int, style: str = "engine", **zero: Any) -> str | None:
    plain, planned = (train(dtype, accumulation, style, planned, **zero) for planned in (False, BUDGET))
    return first_difference(plain, planned, "result")


def afresh(run: Callable[[], str | None]) -> str | None:
    """What a cell finds with DeepSpeed as in a new process: it keeps some settings for all later engines."""
    from deepspeed.runtime import torch_autocast
    from deepspeed.utils import groups

    with (
        mock.patch.object(torch_autocast, "TORCH_AUTOCAST_INITIALIZED", False),
        mock.patch.object(torch_autocast, "TORCH_AUTOCAST_DTYPE", None),
        mock.patch.object(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None),
    ):
        return run()


def compare_at_budgets(dtype: str, accumulation: int = 1, **zero: Any) -> str | None:
    """Roomy, half way and at the floor."""
    plain = train(dtype, accumulation, "engine", False, **zero)
    for budget in (memplan.Budget(activations=0.8), BUDGET, "min"):
        difference = first_difference(plain, train(dtype, accumulation, "engine", budget, **zero), "result")
        if difference:
            return f"{budget}: {difference}"
    return None


# -- what is held -----------------------------------------------------------------------------------------------------


def check_whole_step(dtype: str, accumulation: int, length: int = LENGTH, most: float = 1.1, **zero: Any) -> str | None:
    """All that a step holds, gathered parameters, buckets and the optimizer's part included, is what was predicted.

    The engine is planned before its optimizer has any state. With few words the optimizer's part is the peak.
    """
    from memplan.integrations.deepspeed.memory import held_by

    engine = engine_of(dtype, accumulation, **zero)
    try:
        data = [x[:, :length] for x in batches(3 * accumulation)]
        plan = plan_it(engine, BUDGET if length == LENGTH else 1 << 30, sample=data[0])
        for x in data[: 2 * accumulation]:
            step(engine, x)
        meter = LiveMeter()
        meter.register(held_by(engine, data[0]))
        with gloo_lets_go(), meter:
            for x in data[2 * accumulation :]:
                step(engine, x)
        assert memplan.plan_of(engine.module) is plan
    finally:
        engine.destroy()
    if not meter.peak_bytes <= plan.peak_bytes <= min(1.1 * meter.peak_bytes, plan.problem.budget_bytes or 0):
        return f"held {meter.peak_bytes} bytes, predicted {plan.peak_bytes} of {plan.problem.budget_bytes}"
    return None


# -- what is gathered when --------------------------------------------------------------------------------------------


class GatherCounter:
    """Watches what DeepSpeed gathers and lets go of, below memplan. events: (what, name, bytes then whole)."""

    def __init__(self, module: nn.Module) -> None:
        self.events: list[tuple[str, str, int]] = []
        self._whole: dict[str, Any] = {}  # weak references to storages, whose objects live as long as they do
        for name, parameter in module.named_parameters():
            if not parameter.ds_persist:
                self._watch(name, parameter)

    def _watch(self, name: str, parameter: Any) -> None:
        gather, partition = parameter.all_gather_coalesced, parameter.partition

        def gathered(*args: Any, **kwargs: Any) -> Any:
            handle = gather(*args, **kwargs)
            self._whole[name] = weakref.ref(parameter.data.untyped_storage())
            self.events.append(("gather", name, self.whole_bytes()))
            return handle

        def partitioned(*args: Any, **kwargs: Any) -> None:
            partition(*args, **kwargs)
            end = time.monotonic() + 10
            while self._is_whole(name) and time.monotonic() < end:  # gloo's thread lets go late
                time.sleep(1e-4)
            self.events.append(("release", name, self.whole_bytes()))

        parameter.all_gather_coalesced, parameter.partition = gathered, partitioned

    def _is_whole(self, name: str) -> bool:
        return name in self._whole and self._whole[name]() is not None

    def whole_bytes(self) -> int:
        return sum(storage.nbytes() for ref in self._whole.values() if (storage := ref()) is not None)


def planned_events(plan: memplan.Plan) -> list[tuple[str, str, int]]:
    """The same, as the plan has it."""
    values, whole_bytes = plan.problem.graph.values, 0
    events = []
    for done in plan.schedule:
        if isinstance(done, (Prefetch, Drop)) and values[done.value].home == "sharded":
            size_bytes = values[done.value].size_bytes
            whole_bytes += size_bytes if isinstance(done, Prefetch) else -size_bytes
            kind = "gather" if isinstance(done, Prefetch) else "release"
            events.append((kind, values[done.value].name, whole_bytes))
    return events


def gathers_are_those_of_the_plan() -> str | None:
    """At every gather and release exactly those parameters are whole, and take the bytes, that the plan says."""
    for share in (0.4, 0.8):
        budget = memplan.Budget(activations=share)
        engine = engine_of()
        try:
            for batch in batches(3):  # from the third step on DeepSpeed leaves whole what it will use again
                step(engine, batch)
            engine(batches(1)[0])
            plan = plan_it(engine, budget)
            expected = planned_events(plan)
            counter = GatherCounter(engine.module)
            loss = engine(batches(1)[0])
            engine.backward(loss)
            begun = next(i for i, event in enumerate(counter.events) if event[0] == "gather")
            found = counter.events[begun:]  # before that, what was left is freed
            whole = {name for what, name, _ in expected if what == "gather"}
            if share == 0.4:
                assert len(expected) > 2 * len(whole), "some are gathered again for the backward pass"
                assert max(b for _, _, b in expected) < sum(_bytes(p) for p in engine.module.parameters())
            if found != expected:
                return f"at {share}: {found} against {expected}"
        finally:
            engine.destroy()
    return None


def _bytes(parameter: Any) -> int:
    return int(parameter.ds_numel * parameter.element_size())


# -- a life with more than steps --------------------------------------------------------------------------------------


def lead_a_life(planned: bool, dtype: str = "fp32", **zero: Any) -> Any:
    """Steps with evaluation, a checkpoint, edited weights and, at the end, no plan any more between them."""
    import deepspeed

    engine, found = engine_of(dtype, 2, **zero), []
    data = batches(12)
    try:
        if planned:
            plan_it(engine, memplan.Budget(activations=0.8))
            plan_it(engine)
        with tempfile.TemporaryDirectory() as own:
            folders: list[Any] = [own]
            torch.distributed.broadcast_object_list(folders)
            found += [step(engine, x) for x in data[:2]]
            for _ in range(3):  # DeepSpeed records what it gathers, and gathers ahead from the third time on
                engine.eval()
                with torch.no_grad():
                    found.append(engine(data[2]).clone())
                engine.train()
                with torch.no_grad():
                    found.append(engine(data[2]).clone())
            found += [step(engine, x) for x in data[2:4]]
            engine.save_checkpoint(folders[0], tag="kept")
            found += [step(engine, x) for x in data[4:6]]
            engine.load_checkpoint(folders[0], tag="kept")
            found += [step(engine, x) for x in data[6:8]]
            torch.distributed.barrier()
        weight = engine.module.layers[1].up.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                weight.data.mul_(0.5)
        loss = engine(data[8])
        with torch.no_grad():
            engine.eval()
            found.append(engine(data[8]).clone())  # between a forward and its backward
            engine.train()
        engine.backward(loss)
        engine.step()
        found.append(step(engine, data[9]))
        memplan.remove(engine.module)
        found += [step(engine, x) for x in data[10:]]
        return found, weights(engine), torch.get_rng_state()
    finally:
        engine.destroy()


def compare_lives(dtype: str = "fp32", **zero: Any) -> str | None:
    return first_difference(lead_a_life(False, dtype, **zero), lead_a_life(True, dtype, **zero), "result")


def train_other_lengths(planned: bool) -> Any:
    """The first call is planned when it comes, and further kinds of calls when those come, by both ranks at once."""
    engine = engine_of()
    try:
        if planned:
            apply_it(engine, None)
        losses = [step(engine, x[:, : LENGTH - 9 * (i % 3)]) for i, x in enumerate(batches(6))]
        plan = memplan.plan_of(engine.module)
        assert not planned or (plan is not None and plan.problem.graph.gathers)
        return losses, weights(engine), torch.get_rng_state()
    finally:
        engine.destroy()


def compare_other_lengths() -> str | None:
    return first_difference(train_other_lengths(False), train_other_lengths(True), "result")


def train_uneven(planned: bool) -> Any:
    """Batches of other lengths on each rank, as a sampler's last ones are."""
    engine, rank = engine_of(), torch.distributed.get_rank()
    try:
        if planned:
            apply_it(engine, batches(1)[0])
        short = (False, rank == 1, True, rank == 0, False)
        losses = [step(engine, x[:1, : 9 if less else LENGTH]) for x, less in zip(batches(5), short, strict=True)]
        return losses, weights(engine), torch.get_rng_state()
    finally:
        engine.destroy()


def compare_uneven() -> str | None:
    return first_difference(train_uneven(False), train_uneven(True), "result")


LENGTHS = ((40, 17), (9, 33), (25, 40), (40, 8), (12, 40), (40, 17), (9, 12), (40, 40))  # of each step, by rank


def other_lengths(steps: int = len(LENGTHS)) -> list[torch.Tensor]:
    """Batches that are padded to their longest text each, so that ranks have other lengths from the first step on."""
    rank = torch.distributed.get_rank()
    return [x[:, : of[rank]].contiguous() for x, of in zip(batches(steps), LENGTHS[:steps], strict=True)]


def train_dynamically(planned: bool, sample: bool, steps: int) -> Any:
    engine = engine_of()
    data = other_lengths(steps)
    try:
        if planned:
            apply_it(engine, data[0] if sample else None)
        losses = [step(engine, x) for x in data]
        if planned:
            plan = memplan.plan_of(engine.module)
            assert plan is not None
            assert plan.problem.graph.gathers
        return losses, weights(engine), torch.get_rng_state()
    finally:
        engine.destroy()


def compare_dynamic(sample: bool, steps: int = len(LENGTHS)) -> str | None:
    plain, planned = (train_dynamically(planned, sample, steps) for planned in (False, True))
    return first_difference(plain, planned, "result")


def llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3,
            num_attention_heads=2, max_position_embeddings=64, use_cache=False,
        )
    )  # fmt: skip


def train_texts(planned: bool, share: float) -> Any:
    """Texts of other lengths in each batch, padded to the longest. A model of transformers asks whether any is padded,
    and leaves its mask out where none is."""
    engine, rank = engine_of(build=llama), torch.distributed.get_rank()
    try:
        if planned:
            apply_it(engine, None, memplan.Budget(activations=share))
        losses = []
        for i, ids in enumerate(batches(6)):
            length = LENGTH - 7 * ((i + rank) % 3)
            ids, mask = ids[:, :length].contiguous(), torch.ones(2, length, dtype=torch.long)
            if (i, rank) not in ((0, 1), (3, 0), (4, 0), (4, 1)):
                mask[1, length - 3 :] = 0
            loss = engine(input_ids=ids, attention_mask=mask, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(copied(loss))
        return losses, weights(engine), torch.get_rng_state()
    finally:
        engine.destroy()


def compare_texts(share: float) -> str | None:
    plain, planned = (train_texts(planned, share) for planned in (False, True))
    return first_difference(plain, planned, "result")


def check_peaks_of_other_lengths() -> str | None:
    """What each rank holds is within the budget, also where its batch is the longest so far, or another rank's is."""
    from memplan.integrations.deepspeed.memory import held_by

    engine, problem = engine_of(), None
    try:
        apply_it(engine, None)
        data = other_lengths()
        for x in data:  # plans are made, and the optimizer has state
            step(engine, x)
        for x in data:
            meter = LiveMeter()
            meter.register(held_by(engine, x))
            with gloo_lets_go(), meter:
                step(engine, x)
            plan = memplan.plan_of(engine.module)
            assert plan is not None
            if not meter.peak_bytes <= plan.peak_bytes <= (plan.problem.budget_bytes or 0):
                problem = problem or f"held {meter.peak_bytes}, predicted {plan.peak_bytes} of {tuple(x.shape)}"
    finally:
        engine.destroy()
    return problem


# -- islands ----------------------------------------------------------------------------------------------------------


class WithIslands(NetWithIslands):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Linear(WIDTH, WIDTH)  # type: ignore[assignment]


def vectors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(20 + torch.distributed.get_rank())
    return [torch.randn(2, LENGTH, WIDTH, generator=generator) for _ in range(count)]


def compare_islands(dtype: str) -> str | None:
    """Calls that can't be traced run as they are, on parameters that the plan has gathered."""
    rows = [x.to(getattr(torch, dtype)) for x in vectors(STEPS)]

    def run(budget: Any) -> Any:
        engine = engine_of({"float32": "fp32", "bfloat16": "bf16"}[dtype], build=WithIslands)
        try:
            if budget is not None:
                plan = plan_it(engine, budget, rows[0])
                assert len(plan.islands) == 1 and plan.problem.graph.gathers, plan.islands
                assert bool(plan.recomputed) == (budget == "min")
            return [step(engine, x) for x in rows], weights(engine)
        finally:
            engine.destroy()

    plain = run(None)
    found = ((budget, first_difference(plain, run(budget), "result")) for budget in (1.0, "min"))
    return next((f"{budget}: {difference}" for budget, difference in found if difference), None)


# -- refusals ---------------------------------------------------------------------------------------------------------


def what_cant_be_planned_is_refused_by_all() -> str | None:
    """With the reason and the fix, and what one rank alone meets is an error on the other too."""
    import deepspeed

    found = []
    engine = engine_of()
    try:
        deepspeed.utils.set_z3_leaf_modules(engine.module, [Block])
        found.append(_refusal(engine, "leaf modules (Block)"))
        deepspeed.utils.unset_z3_leaf_modules(engine.module, [Block])
        engine.eval()
        found.append(_refusal(engine, "engine.train()"))
        engine.train()
        found.append(_refusal(engine, "no schedule fits", budget=1000))
        found.append(_refusal(engine, 'grads="surface"', grads="edges"))
        rank = torch.distributed.get_rank()
        found.append(_refusal(engine, "ranks' budgets differ", budget=0.5 + 0.1 * rank))
        plan = plan_it(engine, 600_000 + rank)
        found.append(None if plan.problem.budget_bytes == 600_000 else "the lowest budget is that of all")
        found.append(_disagreement(engine))
    finally:
        engine.destroy()
    return next((text for text in found if text is not None), None)


def autocast_is_refused() -> str | None:
    engine = engine_of("autocast")
    try:
        return _refusal(engine, '"bf16": {"enabled": true} instead')
    finally:
        engine.destroy()


class BranchingNet(Net):
    """Which way it goes depends on what it computes."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale[:WIDTH]
        for layer in self.layers:
            x = layer(x)
            if float(x.detach().sum()) > 0:
                x = x * 0.5
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def what_cant_be_captured_is_refused(
    sample: bool, build: Callable[[], nn.Module] = BranchingNet, data: Callable[[int], list[torch.Tensor]] = batches
) -> str | None:
    """No step of it runs unplanned, and the engine trains on without a plan."""
    words = ("depends on", "With sharded parameters a step has to be planned", "ZeRO stage 2")
    if build is NetWithIslands:  # whose module with Python state calls another one
        words = ("in it run hooks of what shards its parameters", *words)
    plain, engine = engine_of(build=build), engine_of(build=build)
    try:

        def run() -> None:
            apply_it(engine, data(1)[0] if sample else None)
            step(engine, data(1)[0])

        problem = refused(run, memplan.UnsupportedModel, *words)
        memplan.remove(engine.module)
        found = []
        for each in (plain, engine):
            torch.manual_seed(3)
            found.append(([step(each, x) for x in data(2)], weights(each)))
        return problem or first_difference(*found, "result")
    finally:
        plain.destroy()
        engine.destroy()


def _disagreement(engine: Any) -> str | None:
    """With a call on one rank that gathers in another order: no rank begins it."""
    batch = batches(1)[0]
    if torch.distributed.get_rank():
        engine.module.layers[0], engine.module.layers[1] = engine.module.layers[1], engine.module.layers[0]
    try:
        engine(batch)
    except memplan.PlanMismatch as error:
        return None if "other collectives" in str(error) else str(error)
    return "another order of gathers was not refused"


def _refusal(engine: Any, expected: str, budget: Any = BUDGET, **keywords: Any) -> str | None:
    try:
        plan_it(engine, budget, **keywords)
    except Exception as error:
        return None if expected in str(error) else f"{error} does not say {expected}"
    return f"{expected} was not refused"


CASES = [(dtype, accumulation) for dtype in ("fp32", "bf16") for accumulation in (1, 2)]
QUICK = {("bf16", 1)}
NEEDS = ("deepspeed",)
CELLS = {
    f"{dtype} accumulation {n}": Cell(
        functools.partial(compare_training, dtype, n), full=(dtype, n) not in QUICK, needs=NEEDS
    )
    for dtype, n in CASES
}
CELLS |= {
    f"loss.backward() {dtype} accumulation {n}": Cell(  # gradients are reduced when all of backward is over
        functools.partial(compare_training, dtype, n, "loss", reduce_bucket_size=1_000_000),
        full=True,
        needs=NEEDS,
    )
    for dtype, n in CASES
}
OPTIONS: dict[str, dict[str, Any]] = {
    "gradients not contiguous": {"contiguous_gradients": False},
    "all-reduced gradients": {"reduce_scatter": False},
    "one large bucket": {"reduce_bucket_size": 1_000_000},
    "nothing stays": {"stage3_param_persistence_threshold": 0},
    "everything stays": {"stage3_param_persistence_threshold": 1_000_000},
    "parameters on the CPU": {"offload_param": {"device": "cpu"}},
    "optimizer on the CPU": {"offload_optimizer": {"device": "cpu"}},
}
CELLS |= {
    name: Cell(functools.partial(compare_training, "bf16", 2, **zero), full=True, needs=NEEDS)
    for name, zero in OPTIONS.items()
}
CELLS |= {
    f"whole step of {dtype} accumulation {n}{words}": Cell(
        functools.partial(check_whole_step, dtype, n, length),
        full=(dtype, n, length) != ("bf16", 1, LENGTH),
        needs=NEEDS,
    )
    for dtype, n in CASES
    for length, words in ((LENGTH, ""), (8, ", few words"))
}
CELLS |= {
    f"whole step, {name}{words}": Cell(
        functools.partial(check_whole_step, "bf16", 2, length, **zero), full=True, needs=NEEDS
    )
    for name, zero in OPTIONS.items()
    if name != "optimizer on the CPU"  # where the engine itself is
    for length, words in ((LENGTH, ""), (8, ", few words"))
}
CELLS |= {
    "gathers are those of the plan": Cell(gathers_are_those_of_the_plan, needs=NEEDS),
    "evaluation and checkpoints between steps": Cell(compare_lives, needs=NEEDS),
    "uneven batches": Cell(compare_uneven, full=True, needs=NEEDS),
    "some lengths on each rank": Cell(functools.partial(compare_dynamic, False, 4), full=True, needs=NEEDS),
    "other lengths on each rank": Cell(functools.partial(compare_dynamic, False), full=True, needs=NEEDS),
    "other lengths on each rank, with a sample": Cell(functools.partial(compare_dynamic, True), full=True, needs=NEEDS),
    "padded texts of transformers": Cell(
        functools.partial(compare_texts, 0.5), full=True, needs=(*NEEDS, "transformers")
    ),
    "padded texts of transformers, with room": Cell(
        functools.partial(compare_texts, 0.9), full=True, needs=(*NEEDS, "transformers")
    ),
    "peaks of other lengths": Cell(check_peaks_of_other_lengths, full=True, needs=NEEDS),
    "batches of several lengths": Cell(compare_other_lengths, full=True, needs=NEEDS),
    "islands fp32": Cell(functools.partial(compare_islands, "float32"), needs=NEEDS),
    "islands bf16": Cell(functools.partial(compare_islands, "bfloat16"), full=True, needs=NEEDS),
    "refusals": Cell(what_cant_be_planned_is_refused_by_all, needs=NEEDS),
    "what can't be captured": Cell(functools.partial(what_cant_be_captured_is_refused, True), needs=NEEDS),
    "modules that can't be captured": Cell(
        functools.partial(what_cant_be_captured_is_refused, True, NetWithIslands, vectors), full=True, needs=NEEDS
    ),
    "what can't be captured, without a sample": Cell(
        functools.partial(what_cant_be_captured_is_refused, False), full=True, needs=NEEDS
    ),
}
CELLS["autocast is refused"] = Cell(functools.partial(afresh, autocast_is_refused), needs=NEEDS)
SECONDARY: dict[str, tuple[str, dict[str, Any]]] = {
    "secondary partitions": ("fp32", {"zero_hpz_partition_size": 2}),
    "secondary partitions, nothing stays": (
        "fp32", {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    ),
    "secondary partitions of parameters on the CPU": (
        "bf16", {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}
    ),
}  # fmt: skip
for name, (dtype, zero) in SECONDARY.items():
    runs: dict[str, Callable[[], str | None]] = {
        name: functools.partial(compare_at_budgets, dtype, 2, **zero),
        f"whole step, {name}": functools.partial(check_whole_step, dtype, 2, **zero),
        f"life with {name}": functools.partial(compare_lives, dtype, **zero),
    }
    for cell, run in runs.items():
        CELLS[cell] = Cell(functools.partial(afresh, run), full=True, needs=NEEDS)
CELLS["secondary partitions of four ranks"] = Cell(
    functools.partial(afresh, functools.partial(compare_at_budgets, "fp32", 1, zero_hpz_partition_size=2)),
    world=4, full=True, needs=NEEDS,
)  # fmt: skip

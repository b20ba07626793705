"""DistributedDataParallel over two gloo ranks, with and without plans, and the Trainer that uses it."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

import memplan
from tests.ranks import sharded_models
from tests.ranks.spawn import Cell
from tests.support.architectures import ARCHITECTURES
from tests.support.plannings import plannings
from tests.support.zoo import copied, first_difference

BUDGET = 0.6

# Options of DistributedDataParallel. (PyTorch has no no_sync under static_graph.)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static-graph": {"static_graph": True},
    "bucket-views": {"gradient_as_bucket_view": True},
    "find-unused": {"find_unused_parameters": True},
}
CASES = [
    (options, sync, grads)
    for options in OPTIONS
    for sync in ("every-step", "no-sync")
    for grads in ("surface", "edges")
    if (options, sync) != ("static-graph", "no-sync") and (options, grads) != ("find-unused", "surface")
]


class Net(nn.Module):
    """A loss behind layers, dropout and batch statistics, which the first rank hands to the other one."""

    def __init__(self, with_unused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        if with_unused:
            self.unused = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return (self.norm(x) - 1).pow(2).mean()


def train(
    options: str, sync: str, grads: str | None, rows: Sequence[int] = (96,) * 6, budget: float = BUDGET, **keywords: Any
) -> Any:
    """Six steps over buckets of a few kilobytes. grads: None for the plain run. rows: of each batch."""
    torch.manual_seed(0)
    net = Net(options == "find-unused").train()
    torch.manual_seed(10 + torch.distributed.get_rank())
    data = [torch.randn(count, 32) for count in rows]
    if grads is not None:
        memplan.apply(net, None, budget, costs="estimate", grads=grads, **keywords)  # type: ignore[arg-type]
    outer = DistributedDataParallel(net, bucket_cap_mb=0.006, **OPTIONS[options])
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1, momentum=0.9)
    results: list[Any] = []
    for index, x in enumerate(data):
        last = sync == "every-step" or index % 2 == 1
        with contextlib.nullcontext() if last else outer.no_sync():
            loss = outer(x)
            loss.backward()
        results.append((copied(loss), {name: copied(p.grad) for name, p in net.named_parameters()}))
        if last:
            optimizer.step()
            optimizer.zero_grad()
        plan = memplan.plan_of(net)
        if index == 0 and plan is not None:
            assert bool(plan.recomputed) == (budget < 1), "the plan runs, and recomputes"
    assert (plan is None) == (grads is None)
    return results, dict(net.state_dict()), torch.get_rng_state()


@functools.cache
def plain(options: str, sync: str) -> Any:
    """The run without a plan."""
    return train(options, sync, None)


def compare_training(options: str, sync: str, grads: str) -> str | None:
    return first_difference(plain(options, sync), train(options, sync, grads), "result")


def compare_groups(rows: tuple[Sequence[int], Sequence[int]], budgets: tuple[float, float]) -> str | None:
    """Ranks that agree, with batches of their own sizes and budgets of their own."""
    rank = torch.distributed.get_rank()
    group, runs = torch.distributed.group.WORLD, []
    for grads in (None, "surface"):
        runs.append(train("plain", "every-step", grads, rows[rank], budgets[rank], group=group))
    return first_difference(*runs, "result")


def compare_sizes(sync: str, agree: bool) -> str | None:
    """Ranks whose batches have sizes of their own, all of which one capture serves."""
    keywords = {"group": torch.distributed.group.WORLD} if agree else {}
    rank = torch.distributed.get_rank()
    rows = [(96, 64, 80, 56, 88, 72, 64, 90), (96, 96, 40, 77, 61, 94, 85, 33)][rank]
    with plannings() as reasons:
        runs = [train("plain", sync, grads, rows, 0.75, **keywords) for grads in (None, "surface")]
    if len(reasons) > 2:
        return f"planned {len(reasons)} times: {reasons}"
    return first_difference(*runs, "result")


def compare_trainers(**options: Any) -> str | None:
    """The Trainer, which has DistributedDataParallel look for unused parameters unless told otherwise."""
    from memplan.integrations.huggingface import MemplanCallback
    from tests.integrations.test_integrations import Watch, arguments, language_model, outcome, trainer_for

    results = []
    for planned in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            watch = Watch()
            callbacks = [MemplanCallback(BUDGET, costs="estimate"), watch] if planned else [watch]
            options |= {"ddp_backend": "gloo", "per_device_train_batch_size": 4, "save_strategy": "no"}
            args = arguments(Path(folder), num_train_epochs=1, **options)
            trainer = trainer_for(language_model(), args, *callbacks)
            trainer.train()
            assert type(trainer.model_wrapped) is DistributedDataParallel
            assert not planned or watch.plans[0].recomputed
            results.append(outcome(trainer))
    return first_difference(*results, "result")


class Contrastive(nn.Module):
    """CLIP whose negatives are the pairs of all ranks: features of both kinds are gathered, with their gradients.

    functional: by a functional collective, which is an op of the plan. The other way has no plan: PyTorch checkpoints
    layers.
    """

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.clip, self.functional = ARCHITECTURES["clip"].build(0)[0], functional

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        found = self.clip(input_ids=input_ids, pixel_values=pixel_values)
        texts, images = self.gathered(found.text_embeds), self.gathered(found.image_embeds)
        scores = texts @ images.T * self.clip.logit_scale.exp()
        pairs = torch.arange(len(scores))
        cross_entropy = nn.functional.cross_entropy
        return (cross_entropy(scores, pairs) + cross_entropy(scores.T, pairs)) / 2

    def gathered(self, features: torch.Tensor) -> torch.Tensor:
        if self.functional:
            return all_gather_single_autograd(features, 0, torch.distributed.group.WORLD)
        return torch.cat(all_gather(features))


def compare_contrastive(functional: bool) -> str | None:
    """Three steps under DistributedDataParallel, with weights, at three budgets."""
    sample, runs = ARCHITECTURES["clip"].build(torch.distributed.get_rank())[1], list[Any]()
    batch = {name: sample[name] for name in ("input_ids", "pixel_values")}
    for budget in (None, 1.0, 0.7, "min"):
        net = Contrastive(functional).train()
        if budget is not None:
            memplan.apply(net, batch, budget, costs="estimate", group=torch.distributed.group.WORLD)
            plan = memplan.plan_of(net)
            assert (plan is not None) == functional
            assert plan is None or bool(plan.recomputed) == (budget != 1.0)
        runs.append(sharded_models.train(DistributedDataParallel(net), batch))
    return next((d for run in runs[1:] if (d := first_difference(runs[0], run, "result"))), None)


TRAINERS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-search": {"ddp_find_unused_parameters": False, "bf16": True},
}
EQUAL, SHORT, UNEVEN = (96,) * 6, (96, 96, 96, 96, 96, 40), (80, 64, 80, 64, 80, 64)
GROUPS: dict[str, Any] = {
    "equal": ((EQUAL, EQUAL), (BUDGET, BUDGET)),
    "a short last batch on one rank": ((EQUAL, SHORT), (BUDGET, BUDGET)),
    "other budgets": ((EQUAL, EQUAL), (1.0, BUDGET)),
    "other batches": ((EQUAL, UNEVEN), (0.75, BUDGET)),
}
QUICK = {
    ("plain", "no-sync", "surface"),
    ("static-graph", "every-step", "surface"),
    ("find-unused", "no-sync", "edges"),
}
CELLS = {" ".join(case): Cell(functools.partial(compare_training, *case), full=case not in QUICK) for case in CASES}
CELLS |= {f"group: {name}": Cell(functools.partial(compare_groups, *case)) for name, case in GROUPS.items()}
CELLS |= {
    f"Trainer {name}": Cell(
        functools.partial(compare_trainers, **options), full=True, needs=("transformers", "accelerate")
    )
    for name, options in TRAINERS.items()
}
CELLS |= {
    f"CLIP, negatives gathered by {name}": Cell(
        functools.partial(compare_contrastive, functional), full=True, needs=("transformers",)
    )
    for name, functional in (("a functional collective", True), ("torch.distributed.nn", False))
}
CELLS |= {
    "group: sizes of its own on each rank": Cell(functools.partial(compare_sizes, "every-step", True)),
    "group: sizes of its own on each rank, no-sync": Cell(functools.partial(compare_sizes, "no-sync", True), full=True),
    "sizes of its own on each rank": Cell(functools.partial(compare_sizes, "every-step", False), full=True),
}

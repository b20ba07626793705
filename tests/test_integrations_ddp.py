"""DistributedDataParallel over two gloo ranks: a planned run is the plain distributed run, bit for bit.

Run as a program this file is one rank: it trains plain and planned, compares, and writes a line for each case.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memplan
from tests.zoo import copied, first_difference

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 0.6
TIMEOUT_S = 240

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


def train(rank: int, options: str, sync: str, grads: str | None) -> Any:
    """Six steps over buckets of a few kilobytes. grads: None for the plain run."""
    torch.manual_seed(0)
    net = Net(options == "find-unused").train()
    torch.manual_seed(10 + rank)
    data = [torch.randn(96, 32) for _ in range(6)]
    if grads is not None:
        memplan.apply(net, None, BUDGET, costs="estimate", grads=grads)  # type: ignore[arg-type]
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
    if grads is not None:
        plan = memplan.plan_of(net)
        assert plan is not None
        assert plan.recomputed, "the plan runs, and recomputes"
    return results, dict(net.state_dict()), torch.get_rng_state()


def compare_training(rank: int) -> dict[str, str | None]:
    """What differs, case by case; None where nothing does."""
    torch.distributed.init_process_group("gloo")
    found = {}
    plain: dict[tuple[str, str], Any] = {}
    for options, sync, grads in CASES:
        if (options, sync) not in plain:
            plain[options, sync] = train(rank, options, sync, None)
        result = train(rank, options, sync, grads)
        found[f"{options} {sync} {grads}"] = first_difference(plain[options, sync], result, "result")
    torch.distributed.destroy_process_group()
    return found


def compare_trainers(rank: int) -> dict[str, str | None]:
    """The Trainer, which has DistributedDataParallel look for unused parameters unless told otherwise."""
    from memplan.integrations.huggingface import MemplanCallback
    from tests.test_integrations import Watch, arguments, language_model, outcome, trainer_for

    found: dict[str, str | None] = {}
    for name, options in {"default": {}, "no-search": {"ddp_find_unused_parameters": False, "bf16": True}}.items():
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
        found[name] = first_difference(*results, "result")
    torch.distributed.destroy_process_group()
    return found


def run_ranks(what: str, folder: Path) -> list[dict[str, str | None]]:
    """Both ranks' findings."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "tests.test_integrations_ddp", what, str(folder)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(texts)
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    return run_ranks("training", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_planned_steps_are_the_plain_ones_on_both_ranks(case: tuple[str, ...], training: Any) -> None:
    assert [rank[" ".join(case)] for rank in training] == [None, None]


def test_the_trainer_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert run_ranks("trainers", tmp_path) == [{"default": None, "no-search": None}] * 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    own_rank = int(os.environ["RANK"])
    work = {"training": compare_training, "trainers": compare_trainers}[sys.argv[1]]
    (Path(sys.argv[2]) / f"{sys.argv[1]}-{own_rank}.json").write_text(json.dumps(work(own_rank)))

"""FSDP2 under the Trainer of transformers and under Accelerate, over two gloo ranks, with and without plans."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import memplan
from memplan.installed.planned_forward import planned_forward
from tests.ranks.spawn import Cell
from tests.support.accelerate_state import fresh_accelerate
from tests.support.zoo import copied, first_difference


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Accelerate as on several GPUs, for it shards on no others. Its tensors are on CPUs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    with fresh_accelerate():
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        yield


def own_parts(net: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of each parameter."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: copied(p.to_local()) for name, p in net.named_parameters()}  # type: ignore[attr-defined]


def compare_trainers(accumulated: int = 1) -> str | None:
    """The Trainer, with evaluation in the middle. Micro-batches that do not reduce gradients are planned, too."""
    from memplan.integrations.huggingface import MemplanCallback
    from tests.integrations.test_integrations import TIMES, Watch, arguments, language_model, trainer_for

    results = []
    for planned in (False, True):
        with as_on_gpus(), tempfile.TemporaryDirectory() as folder:
            args = arguments(
                Path(folder), fsdp=True, fsdp_config={"version": 2}, use_cpu=False, save_strategy="no",
                accelerator_config={"use_configured_state": True}, per_device_train_batch_size=4,
                num_train_epochs=1, gradient_accumulation_steps=accumulated,
            )  # fmt: skip
            watch = Watch()
            callbacks = [MemplanCallback(memplan.Budget(activations=0.8), costs="estimate"), watch] if planned else []
            trainer = trainer_for(language_model(), args, *callbacks)
            trainer.train()
            assert isinstance(trainer.model, FSDPModule)
            assert not planned or (watch.plans and watch.plans[0].recomputed)
            history = [{k: v for k, v in entry.items() if not k.endswith(TIMES)} for entry in trainer.state.log_history]
            results.append((history, own_parts(trainer.model), torch.get_rng_state()))
    return first_difference(*results, "result")


def compare_accelerate(accumulated: int = 1) -> str | None:
    """A loop of Accelerate with a plugin for FSDP2. accumulated: micro-batches of a step."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from tests.integrations.test_integrations import language_model

    results = []
    for planned in (False, True):
        with as_on_gpus():
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
            accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=accumulated)
            net = language_model().train()
            model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
            torch.manual_seed(10 + torch.distributed.get_rank())
            batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 50, (4, 4, 24)).unbind()]
            if planned:
                memplan.apply(model, None, memplan.Budget(activations=0.8), costs="estimate")
            losses = list[Any]()
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    losses.append(copied(loss.detach()))
                    if accelerator.sync_gradients:
                        losses.append(copied(accelerator.clip_grad_norm_(model.parameters(), 1.0).full_tensor()))
                    optimizer.step()
                    optimizer.zero_grad()
            assert not planned or [bool(step.plan.recomputed) for step in planned_forward(model).steps] == [True] * (
                2 if accumulated > 1 else 1
            )
            results.append((losses, own_parts(model)))
    return first_difference(*results, "result")


HUGGING_FACE = ("transformers", "accelerate")
CELLS = {
    "Trainer": Cell(compare_trainers, needs=HUGGING_FACE),
    "Trainer, accumulation": Cell(functools.partial(compare_trainers, 2), full=True, needs=HUGGING_FACE),
    "Accelerate": Cell(compare_accelerate, needs=HUGGING_FACE),
    "Accelerate, accumulation": Cell(functools.partial(compare_accelerate, 2), full=True, needs=HUGGING_FACE),
}

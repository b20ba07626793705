"""FSDP2 under the Trainer of transformers and under Accelerate, over two gloo ranks, with and without plans."""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule

import memplan
from memplan.installed.planned_forward import planned_forward
from tests.ranks.cells_agreement import rank, told_by_all
from tests.ranks.cells_models import sharded_model
from tests.ranks.sharded_models import part_of, units
from tests.ranks.spawn import Cell
from tests.support.accelerate_state import fresh_accelerate
from tests.support.zoo import copied, first_difference, loss_of


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


BY_VERSION = {"fsdp": True, "fsdp_config": {"version": 2}}
BY_STRATEGY = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}  # which transformers deprecates


def compare_trainers(accumulated: int = 1, how: Mapping[str, Any] = BY_VERSION) -> str | None:
    """The Trainer, with evaluation in the middle. Micro-batches that do not reduce gradients are planned, too."""
    from memplan.integrations.huggingface import MemplanCallback
    from tests.integrations.test_integrations import TIMES, Watch, arguments, language_model, trainer_for

    results = []
    for planned in (False, True):
        with as_on_gpus(), tempfile.TemporaryDirectory() as folder:
            args = arguments(
                Path(folder), **copy.deepcopy(how), use_cpu=False, save_strategy="no",
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


def saved_and_loaded() -> str | None:
    """A run that torch.distributed.checkpoint saves goes on in another model, with a plan and without one."""
    results = []
    for before, after in ((None, None), (0.7, 0.7), (0.7, None), (None, 0.7)):
        folder = told_by_all(tempfile.mkdtemp() if rank() == 0 else "")[0]
        losses = list[Any]()
        for budget in (before, after):
            net, batch = units()
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            if losses:
                for parameter in net.parameters():
                    parameter.data.zero_()
                model_state, optimizer_state = get_state_dict(net, optimizer)
                state = {"model": model_state, "optimizer": optimizer_state}
                torch.distributed.checkpoint.load(state, checkpoint_id=folder)
                set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            if budget:
                memplan.apply(net, batch, budget, costs="estimate")
            for _ in range(3):
                torch.manual_seed(len(losses) + rank())
                loss = loss_of(net(**batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(copied(loss))
            plan = memplan.plan_of(net)
            assert bool(plan) == bool(budget) and (plan is None or plan.recomputed)
            model_state, optimizer_state = get_state_dict(net, optimizer)
            torch.distributed.checkpoint.save(
                {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder
            )
        states = [copied(part_of(t)) for state in optimizer.state.values() for t in state.values()]
        results.append((losses, own_parts(net), states))
        torch.distributed.barrier()
        if rank() == 0:
            shutil.rmtree(folder)
    return next((d for r in results[1:] if (d := first_difference(results[0], r, "result"))), None)


def generates_between_steps() -> str | None:
    """A planned Llama writes texts between its steps: those that it writes without a plan, and training goes on."""
    results: list[Any] = []
    for planned in (False, True):
        net, batch = sharded_model("Llama", "FSDP2")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if planned:
            memplan.apply(net, batch, 0.7, costs="estimate")
        torch.manual_seed(rank())
        found = list[Any]()
        for _ in range(3):
            loss = loss_of(net(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            net.eval()
            for cached in (False, True):
                start = batch["input_ids"][:, :4]
                options = {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": True, "pad_token_id": 0}
                found.append(copied(net.generate(start, use_cache=cached, **options)))  # type: ignore[operator]
            net.train()
            found.append(copied(loss))
        assert not planned or [bool(s.plan and s.plan.recomputed) for s in planned_forward(net).steps] == [True]
        results.append((found, own_parts(net)))
    return first_difference(*results, "result")


HUGGING_FACE = ("transformers", "accelerate")
CELLS = {
    "Trainer": Cell(compare_trainers, needs=HUGGING_FACE),
    "Trainer, accumulation": Cell(functools.partial(compare_trainers, 2), full=True, needs=HUGGING_FACE),
    "Trainer, full_shard": Cell(
        functools.partial(compare_trainers, how=BY_STRATEGY), needs=("transformers>=5", "accelerate")
    ),
    "Accelerate": Cell(compare_accelerate, needs=HUGGING_FACE),
    "Accelerate, accumulation": Cell(functools.partial(compare_accelerate, 2), full=True, needs=HUGGING_FACE),
    "saved and loaded": Cell(saved_and_loaded, full=True),
    "generates between steps": Cell(generates_between_steps, needs=("transformers",)),
}

"""DeepSpeed under the Trainer of transformers and under Accelerate, over two gloo ranks, with and without plans."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import memplan
from tests.ranks.cells_deepspeed import NEEDS
from tests.ranks.spawn import Cell
from tests.support.accelerate_state import fresh_accelerate
from tests.support.deepspeed_runs import STEPS, Net, Setting, batch
from tests.support.zoo import copied, first_difference


@contextmanager
def for_deepspeed() -> Iterator[None]:
    """Accelerate as in a process that uses it for DeepSpeed alone."""
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_DEEPSPEED": "true"}), fresh_accelerate():
        yield


def compare_trainers(stage: int, bf16: bool = False, **planned: Any) -> str | None:
    """The Trainer with a DeepSpeed config in a file, in which much is left to it.

    planned: further arguments for the run with a plan.
    """
    from memplan.integrations.deepspeed import MemplanDeepSpeedCallback
    from tests.integrations.test_integrations import Watch, arguments, language_model, outcome, trainer_for

    results = []
    # In bfloat16 more of it is resident: sums and copies in float32.
    for section in (None, Setting(stage).section | ({"budget": 0.7} if bf16 else {})):
        # The Trainer asks a GPU whether there is bfloat16; DeepSpeed has it on a CPU, too.
        on_gpu = mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True)
        with for_deepspeed(), on_gpu, tempfile.TemporaryDirectory() as folder:
            config = {
                "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
                "train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 6000},
                "zero_allow_untested_optimizer": True,
            }  # fmt: skip
            path = Path(folder) / "deepspeed.json"
            path.write_text(json.dumps(config | ({} if section is None else {"memplan": section})))
            options = {
                "deepspeed": str(path), "per_device_train_batch_size": 4, "save_strategy": "no", "use_cpu": False,
                "accelerator_config": {"use_configured_state": True}, "num_train_epochs": 1,
                "bf16": bf16,
            }  # fmt: skip
            options |= {} if section is None else planned
            trainer = trainer_for(language_model(), arguments(Path(folder), **options))
            watch = Watch()
            if section is not None:
                trainer.add_callback(MemplanDeepSpeedCallback(trainer))
                trainer.add_callback(watch)
            trainer.train()
            assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
            assert section is None or (watch.plans and all(plan.recomputed for plan in watch.plans[:1]))
            assert memplan.plan_of(trainer.model) is None, "the plan is taken off when training ends"
            results.append(outcome(trainer))
            trainer.model_wrapped.destroy()
    return first_difference(*results, "result")


def compare_accelerate(stage: int) -> str | None:
    """A loop of Accelerate with a DeepSpeedPlugin."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    from memplan.integrations.deepspeed import attach

    results = []
    for section in (None, Setting(stage).section):
        with for_deepspeed():
            config = Setting(stage, "float32", 2).config(section)
            del config["optimizer"]
            config["zero_allow_untested_optimizer"] = True
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
            torch.manual_seed(0)
            net = Net().train()
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            model, optimizer = accelerator.prepare(net, optimizer)
            attach(model)
            torch.manual_seed(10 + torch.distributed.get_rank())
            found: list[Any] = []
            for _ in range(2 * STEPS):
                with accelerator.accumulate(model):
                    loss = model(batch())
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                found.append((copied(loss), {n: copied(p) for n, p in net.named_parameters()}))
            assert section is None or memplan.plan_of(net) is not None
            results.append(found)
            model.destroy()
    return first_difference(*results, "result")


HUGGING_FACE = (*NEEDS, "transformers", "accelerate")
CELLS = {
    f"{name} ZeRO {stage}": Cell(functools.partial(run, stage), full=stage < 2, needs=HUGGING_FACE)
    for name, run in (("Trainer", compare_trainers), ("Accelerate", compare_accelerate))
    for stage in (0, 1, 2)
}
CELLS |= {
    f"Trainer ZeRO {stage} bfloat16": Cell(
        functools.partial(compare_trainers, stage, True), full=True, needs=HUGGING_FACE
    )
    for stage in (0, 1, 2)
}
CELLS["Trainer, checkpointing left on"] = Cell(
    functools.partial(compare_trainers, 1, gradient_checkpointing=True), full=True, needs=HUGGING_FACE
)

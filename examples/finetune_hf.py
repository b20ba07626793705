"""Fine-tune a small GPT-2 with the Trainer of transformers, as it is and at half of its peak.

    python examples/finetune_hf.py

Prints the loss of every step of both runs side by side, and the plan. The exit code is 0 only if all losses and all
weights are the same numbers. Under a minute on two cores; needs transformers, accelerate, and no download: the weights
are random, and the data are the bytes of this repository's licence.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

from memplan.integrations.huggingface import MemplanCallback

LENGTH = 64


class Passages(torch.utils.data.Dataset[Any]):
    """The licence in passages of one length."""

    def __init__(self) -> None:
        text = (Path(__file__).resolve().parent.parent / "LICENSE").read_bytes()
        self.passages = torch.tensor(list(text)).unfold(0, LENGTH, LENGTH)

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.passages[index], "labels": self.passages[index]}


def train(*callbacks: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every step, and the weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=8,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=Passages(), callbacks=[*callbacks])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model.state_dict()


def main() -> int:
    plain_losses, plain_weights = train()
    callback = MemplanCallback(0.5)
    losses, weights = train(callback)
    assert callback.plan is not None
    print(f"{'loss of step':12}{'unplanned':>24}{'planned':>24}")
    for index, (plain, planned) in enumerate(zip(plain_losses, losses, strict=True)):
        print(f"{index + 1:12}{plain!r:>24}{planned!r:>24}")
    print(f"\n{callback.plan.report()}")
    same = losses == plain_losses and all(torch.equal(weights[name], plain_weights[name]) for name in plain_weights)
    print(f"losses and weights are {'the same numbers' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

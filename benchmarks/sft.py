"""TRL's SFTTrainer with dynamic padding: seconds a step with a plan for every length, over plain, and what is planned.

    python -m benchmarks.sft [--models gpt2 llama] [--batches 200] [--budgets 1TiB 250MiB] [--output FILE]

Batches of 4 texts are padded to their longest, so that nearly each has another length. Losses and weights are compared
bit for bit. Steps from the 20th on are timed, of a plain run and of the planned ones, one run after the other; the
ratio is of their sums. Steps are small: what memplan adds to a step shows here at its largest.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from benchmarks.environment import environment, own_cache
from memplan.integrations.huggingface import MemplanCallback
from tests.support.plannings import plannings

WARM = 19  # steps that are not timed
BATCH = 4
WORDS = 997

Row = dict[str, Any]


def build(name: str, layers: int = 6, width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    ids = {"pad_token_id": WORDS, "eos_token_id": WORDS + 1, "bos_token_id": None}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=1000, n_positions=512, n_embd=width, n_layer=layers, n_head=4, **ids
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, **ids,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> Any:
    """One of words w0, w1 and so on."""
    special = {"[PAD]": WORDS, "[EOS]": WORDS + 1, "[UNK]": WORDS + 2}
    words = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(WORDS)}, **special}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )


def texts(batches: int) -> Any:
    """Texts whose lengths differ from batch to batch, and within one. The longest has 200 words."""
    draw, rows = random.Random(0), []
    for _ in range(batches):
        longest = draw.randint(20, 200)
        rows += [[draw.randrange(WORDS) for _ in range(draw.randint(8, longest))] for _ in range(BATCH)]
    return datasets.Dataset.from_dict({"input_ids": rows})


class Watch(transformers.TrainerCallback):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.perf_counter())


class Run:
    """One training run.

    - losses: of each step, as the Trainer logs them.
    - shapes: of each batch.
    - weights: at the end.
    - step_s: seconds of each step but the first.
    """

    def __init__(self, net: nn.Module, batches: int, *callbacks: Any, data: Any = None, **options: Any) -> None:
        """data: as `texts` makes them; by default, as many as there are batches."""
        watch, self.shapes = Watch(), list[tuple[int, ...]]()
        with tempfile.TemporaryDirectory() as folder:
            args = trl.SFTConfig(
                output_dir=folder, per_device_train_batch_size=BATCH, max_steps=batches, learning_rate=1e-3,
                max_length=None, logging_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
                dataloader_pin_memory=False, seed=3, bf16=False, **{"activation_checkpointing": False, **options},
            )  # fmt: skip
            trainer = trl.SFTTrainer(
                net, args, train_dataset=texts(batches) if data is None else data, processing_class=tokenizer(),
                callbacks=[watch, *callbacks],
            )  # fmt: skip
            trainer.remove_callback(transformers.PrinterCallback)
            collate = trainer.data_collator

            def noted(examples: Any) -> Any:
                batch = collate(examples)
                self.shapes.append(tuple(batch["input_ids"].shape))
                return batch

            trainer.data_collator = noted
            trainer.train()
        self.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        self.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        self.step_s = [end - start for start, end in zip(watch.ends_s, watch.ends_s[1:], strict=False)]

    def equals(self, other: Run) -> bool:
        """Whether losses and weights are the same, bit for bit."""
        same = (torch.equal(w, other.weights[name]) for name, w in self.weights.items())
        return self.losses == other.losses and self.shapes == other.shapes and all(same)


def measured(name: str, batches: int, budgets: list[str]) -> Row:
    plain = Run(build(name), batches)
    row: Row = {"lengths": len(set(plain.shapes)), "plain_s": sum(plain.step_s[WARM:]), "planned": {}}
    for budget in budgets:
        with plannings() as reasons:
            run = Run(build(name), batches, MemplanCallback(budget))
        row["planned"][budget] = {
            "plannings": len(reasons),
            "ratio": sum(run.step_s[WARM:]) / sum(plain.step_s[WARM:]),
            "first_steps_s": sum(run.step_s[:WARM]),
            "same_bits": run.equals(plain),
        }
    return row


@own_cache()
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=("gpt2", "llama"), default=["gpt2", "llama"])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--budgets", nargs="+", default=["1TiB", "250MiB"])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sft.json")
    args = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "trl": trl.__version__, "batches": args.batches}
    for name in args.models:
        result[name] = measured(name, args.batches, args.budgets)
        print(name, json.dumps(result[name], indent=1), flush=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

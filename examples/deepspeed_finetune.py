"""Fine-tune a small GPT-2 with DeepSpeed's ZeRO 2 on two ranks, as it is and within a budget for each rank.

    python examples/deepspeed_finetune.py

Starts both ranks itself; `torchrun --nproc_per_node 2 examples/deepspeed_finetune.py` does the same. The budgets stand
in `deepspeed_finetune.json`, beside what else DeepSpeed is told. Rank 0 prints the loss of every step of both runs side
by side, and what each rank's plan promised and held. The exit code is 0 only if all losses and all weights are the same
numbers. Under two minutes on two cores without a GPU; needs deepspeed, transformers and g++ (for DeepSpeed's own
kernels), and no download: the weights are random, and the data are the bytes of this repository's licence.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LENGTH, STEPS = 64, 6
HERE = Path(__file__).resolve().parent


def train(config: dict[str, Any]) -> tuple[list[float], list[Any]]:
    """The loss of every micro-batch of this rank, and its weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from memplan.integrations.deepspeed import initialize

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None
        )
    )
    model.loss_type = "ForCausalLM"
    model.train()
    text = torch.tensor(list((HERE.parent / "LICENSE").read_bytes())).unfold(0, LENGTH, LENGTH)
    rank, size = int(os.environ["RANK"]), config["train_micro_batch_size_per_gpu"]
    batches = [text[(2 * i + rank) * size : (2 * i + rank + 1) * size] for i in range(STEPS)]

    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(1 + rank)  # for dropout
    losses = []
    for ids in batches:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = [p.detach().clone() for p in model.parameters()]
    engine.destroy()
    return losses, weights


def compare() -> int:
    """What each rank runs."""
    import torch

    rank = int(os.environ["RANK"])
    logging.basicConfig(format="%(message)s")
    logging.getLogger("memplan").setLevel(logging.INFO)
    config = json.loads((HERE / "deepspeed_finetune.json").read_text())
    plain_losses, plain_weights = train(config | {"memplan": {"enabled": False}})
    losses, weights = train(config)
    same = losses == plain_losses and all(map(torch.equal, weights, plain_weights))
    outcomes: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(outcomes, same)
    if rank == 0:
        print(f"{'micro-batch':12}{'unplanned':>24}{'planned':>24}")
        for index, (plain, planned) in enumerate(zip(plain_losses, losses, strict=True)):
            print(f"{index + 1:<12}{plain!r:>24}{planned!r:>24}")
        print(f"losses and weights of all ranks are {'the same numbers' if all(outcomes) else 'DIFFERENT'}")
    torch.distributed.destroy_process_group()
    return 0 if all(outcomes) else 1


def main() -> int:
    if "RANK" in os.environ:
        return compare()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode


if __name__ == "__main__":
    sys.exit(main())

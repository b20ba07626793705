"""Fully fine-tune a Llama whose weights, gradients and AdamW state do not fit the device.

    python examples/offload_finetune.py [--device cuda] [--budget 0.5]

On a machine without a GPU the CPU stands for the device: copies to and from "host memory" then happen as late as the
plan's waits allow, and what is on its way holds NaN. The loop is the same in both cases. Prints the loss of every step
beside that of the plain loop; the exit code is 0 only if losses and weights are the same numbers. (On a GPU the first
loss is, and the others are near: parameters that live on the host are updated by the CPU, which rounds otherwise.)
Needs transformers, and no download: the weights are random, and the data are the bytes of this repository's licence.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memplan

LENGTH, BATCH, STEPS = 64, 8, 6
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # cuBLAS's 64 MiB on a GPU would outweigh so small a model


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(device: str) -> list[torch.Tensor]:
    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_bytes()
    passages = torch.tensor(list(text)).unfold(0, LENGTH, LENGTH)
    return [passages[i * BATCH : (i + 1) * BATCH].to(device) for i in range(STEPS)]


def train(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, device: str) -> list[float]:
    losses = []
    for ids in batches(device):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=0.5, help="share of what the plain loop holds on the device")
    args = parser.parse_args()

    plain = build().to(args.device)
    plain_losses = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True), args.device)

    model = build()  # on the CPU: the plan says what moves to the device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = batches("cpu")[0]
    sample = {"input_ids": ids, "labels": ids, "use_cache": False}
    memplan.apply(model, sample, args.budget, optimizer=optimizer, device=args.device, host_budget="1GiB")
    plan = memplan.plan_of(model)
    assert plan is not None
    print(plan.report())
    losses = train(model, optimizer, args.device)
    for step, (theirs, ours) in enumerate(zip(plain_losses, losses, strict=True)):
        print(f"step {step}: loss {theirs:.6f} plain, {ours:.6f} planned")
    if args.device != "cpu":
        near = all(abs(ours - theirs) <= 1e-3 * abs(theirs) for theirs, ours in zip(plain_losses, losses, strict=True))
        near = near and losses[0] == plain_losses[0]
        print("the first loss is the same number, and the others are near" if near else "THEY DIFFER")
        return 0 if near else 1
    same = all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    print("losses and weights are the same numbers" if same and losses == plain_losses else "THEY DIFFER")
    return 0 if same and losses == plain_losses else 1


if __name__ == "__main__":
    raise SystemExit(main())

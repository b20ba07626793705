"""What LoRA on Llama-7B would take on small cards, predicted from rooflines, with and without `keep_frozen=`.

    python -m benchmarks.lora7b [--cards 8 12 16] [--batches 1 4] [--gbs 12 25 55]

Adapters of rank 16 on queries and values, everything in bfloat16, length 512; plans from the preset "rotor". Needs
peft, and neither card nor weights.
"""

from __future__ import annotations

import argparse
import itertools
import warnings

import torch

import memplan

CARDS = {  # what a step may hold, and the speed, by gigabytes of the card
    8: ("7GiB", memplan.Roofline(100e12, 0.45e12, 5e-6)),
    12: ("11GiB", memplan.Roofline(100e12, 0.5e12, 5e-6)),
    16: ("15GiB", memplan.Roofline(150e12, 0.7e12, 5e-6)),
}


def main() -> None:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cards", type=int, nargs="+", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--gbs", type=float, nargs="+", default=[12.0, 25.0, 55.0], help="10^9 bytes a second each way")
    args = parser.parse_args()
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(LlamaForCausalLM(LlamaConfig()).to(torch.bfloat16), adapters)
        model = model.to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    for card, batch, gbs in itertools.product(args.cards, args.batches, args.gbs):
        budget, speed = CARDS[card]
        ids = torch.zeros(batch, 512, dtype=torch.long)
        sample = {"input_ids": ids, "labels": ids, "use_cache": False}
        plans = [
            memplan.plan(
                model, sample, budget, optimizer=optimizer, device="cpu", costs=speed, config="rotor",
                host_budget="64GiB", link=memplan.Link(gbs * 1e9, gbs * 1e9), keep_frozen=keep,
            )
            for keep in (False, True)
        ]  # fmt: skip
        print(
            f"{card} GB, batch {batch}, {gbs:.0f} GB/s: {plans[0].time_s:.4f} s a step, with keep_frozen "
            f"{plans[1].time_s:.4f} s ({1 - plans[1].time_s / plans[0].time_s:.1%} less; "
            f"{plans[1].staying_bytes / 2**30:.1f} GiB stay; bound {plans[1].lower_bound_s:.4f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()

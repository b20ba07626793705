"""What full fine-tuning of Llama-7B would take on two cards, predicted from rooflines. Needs neither card nor weights.

    python -m benchmarks.llama7b [--output FILE]

Fused AdamW, everything in bfloat16, length 512, batch 4; 75 and 22 GiB of the cards' memory. What the CPU takes to
update parameters on the host is counted (at 20 GB/s of its memory), after the step or in backward; what the device
takes for its own is left out. About two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch

import memplan
from benchmarks.environment import environment, own_cache
from memplan.planning.settings import Update

CARDS = {
    "80 GB": ("75GiB", memplan.Roofline(600e12, 2e12, 5e-6)),
    "24 GB": ("22GiB", memplan.Roofline(150e12, 0.9e12, 5e-6)),
}
LINKS = (25e9, 55e9)
UPDATES: tuple[Update, ...] = ("step", "backward")


@own_cache()
def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "llama7b.json")
    args = parser.parse_args()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig()).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(4, 512, dtype=torch.long)
    sample = {"input_ids": ids, "labels": ids, "use_cache": False}
    rows: list[dict[str, Any]] = []
    for card, bytes_per_s, update in itertools.product(CARDS, LINKS, UPDATES):
        budget, speed = CARDS[card]
        start = time.process_time()
        plan = memplan.plan(
            model, sample, budget, optimizer=optimizer, device="cpu", costs=speed, host_budget="200GiB",
            link=memplan.Link(bytes_per_s, bytes_per_s), update=update,
        )  # fmt: skip
        seconds = time.process_time() - start
        print(
            f"{card} at {bytes_per_s / 1e9:.0f} GB/s, update={update!r}: {plan.peak_bytes / 2**30:.1f} GiB on the "
            f"device, {plan.host_bytes / 2**30:.1f} on the host, {plan.time_s:.3f} s a step, "
            f"bound {plan.lower_bound_s:.3f}; planned in {seconds:.0f} s of a CPU",
            flush=True,
        )
        rows.append(
            {
                "card": card,
                "link_bytes_per_s": bytes_per_s,
                "update": update,
                "peak_bytes": plan.peak_bytes,
                "host_bytes": plan.host_bytes,
                "time_s": round(plan.time_s, 4),
                "baseline_time_s": round(plan.baseline_time_s, 4),
                "stall_s": round(plan.timeline.stall_s, 4),
                "lower_bound_s": round(plan.lower_bound_s, 4),
                "planning_cpu_s": round(seconds, 1),
            }
        )
    args.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

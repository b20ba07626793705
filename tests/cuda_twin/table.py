"""What plans promise, against what PyTorch's caching allocator holds and reserves in the first ten steps of training.

    make twin-table                          # table.md beside this file; half an hour
    .venv-twin/bin/python -m tests.cuda_twin.table --models gpt2 unet --out FILE

Each row is a process of its own, with an allocator that nothing has used. As plans count on, a batch arrives while the
one before is there, and outputs of the model are held until it is called again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

MIB = 1 << 20
STEPS = 10
ALLOCATORS = {"default": "", "expandable_segments": "expandable_segments:True"}
BUDGETS = ("plain", "0.7", "0.5", "min")
LOOPS = ("AdamW", "no optimizer", "AdamW, two batches a step")  # the last two at the floor alone
TRAINED = "AdamW, trained before"  # without a plan, so that memory lies in pieces when there is one
LOSS_ALONE = ", loss alone"  # is kept of the outputs, at the end of a loop's name
Row = dict[str, Any]


def measure(name: str, budget: str, loop: str, arena: str) -> Row:
    """One row, in this process. arena: "yes" or "no"."""
    import torch

    import memplan
    from tests.cuda_twin.models import MODELS, loss_of, train

    model, sample = MODELS[name]()
    optimizer = None if loop == "no optimizer" else torch.optim.AdamW(model.parameters(), fused=True)
    if "trained" in loop:
        train(model, sample, optimizer, 2)
    batches = 2 if "two batches" in loop else 1
    row: Row = {}
    if budget != "plain":
        given = budget if budget == "min" else float(budget)
        try:
            memplan.apply(model, sample, given, optimizer=optimizer, accumulate=batches > 1, on_infeasible="raise",
                          arena=arena == "yes")  # fmt: skip
        except memplan.BudgetInfeasible as error:
            return {"error": f"infeasible, floor {error.floor_bytes / MIB:.0f}"}
        plan = memplan.plan_of(model)
        assert plan is not None
        row["predicted"] = plan.peak_bytes
        row["reserved_predicted"] = getattr(plan, "reserved_bytes", None)
        row["arena"] = getattr(plan, "steering", None) is not None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    batch, output = sample, None
    del sample
    try:
        for _ in range(STEPS):
            for _ in range(batches):
                output = None
                batch = {name: tensor.clone() for name, tensor in batch.items()}
                output = model(**batch)
                if LOSS_ALONE in loop:
                    output = loss_of(output)
                loss_of(output).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
    except torch.OutOfMemoryError as error:
        row["error"] = str(error).partition(".")[0]
    row["allocated"], row["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    row["planned again"] = budget != "plain" and memplan.plan_of(model) is not plan
    return row


def in_process(words: list[str], cache: str, allocator: str, **environment: str) -> Row:
    """Run `measure` with these arguments, and an allocator with these settings, in a process of its own."""
    settings = {"MEMPLAN_CACHE_DIR": cache, "MEMPLAN_LOG": "off", "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator]}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_twin.table", "--row", *words], text=True, capture_output=True,
        env={**os.environ, **settings, **environment},
    )  # fmt: skip
    if "ROW " not in done.stdout:  # a process of the twin may fail where it ends
        return {"error": done.stderr.strip().rpartition("\n")[2][:80]}
    row: Row = json.loads(done.stdout.rpartition("ROW ")[2])
    return row


def mib(row: Row, name: str) -> str:
    return f"{row[name] / MIB:.0f}" if row.get(name) else ""


def reserved(row: Row) -> str:
    if row.get("error"):
        return str(row["error"])
    return f"{mib(row, 'reserved')} ({row['reserved'] / row.get('predicted', row['allocated']):.2f})"


def line(name: str, budget: str, loop: str, cache: str) -> str:
    """The row without an arena has another schedule where that reserves less."""
    led, alone = (in_process([name, budget, loop, arena], cache, "expandable_segments") for arena in ("yes", "no"))
    by_default = in_process([name, budget, loop, "yes"], cache, "default")
    cells = [name, budget, loop, mib(led, "predicted"), mib(led, "reserved_predicted"), reserved(led)]
    cells += [mib(alone, "reserved_predicted"), reserved(alone)]
    cells += [mib(by_default, "reserved_predicted"), reserved(by_default)]
    return f"| {' | '.join(cells)} |"


def versions() -> str:
    packages = ("torch", "triton", "transformers", "nvidia-cublas", "nvidia-cudnn-cu13")
    of = [f"{name} {metadata.version(name)}" for name in packages]
    return ", ".join([*of, f"Python {platform.python_version()}"])


HEAD = f"""# Predicted, allocated and reserved

MiB. Peaks of the first {STEPS} steps on the twin of a card of 80 GiB, as `make twin-table` writes them. Predicted is
`plan.peak_bytes`, then `plan.reserved_bytes` beside each reserved; in brackets is reserved over predicted, or over
allocated in a plain step. AdamW is fused. The first columns are of processes that begin with
`expandable_segments:True`, the last of those that begin with PyTorch's default, which `apply` changes.

{{versions}}

| model | budget | loop | predicted | arena | reserved | no arena | reserved | arena, default | reserved |
|---|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="*", help="all, unless told")
    parser.add_argument("--budgets", nargs="*", default=BUDGETS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("table.md"))
    args = parser.parse_args()
    if args.row:
        print("ROW", json.dumps(measure(*args.row)), flush=True)
        return
    from tests.cuda_twin.models import MODELS

    rows = [(name, b, LOOPS[0]) for name in args.models or MODELS for b in args.budgets]
    rows += [(name, "min", loop) for name in args.models or MODELS for loop in LOOPS[1:]]
    with tempfile.TemporaryDirectory() as cache, args.out.open("w") as out:
        out.write(HEAD.format(versions=versions()))
        for row in sorted(rows, key=lambda row: list(MODELS).index(row[0])):
            print(text := line(*row, cache), flush=True)
            out.write(f"{text}\n")


if __name__ == "__main__":
    main()

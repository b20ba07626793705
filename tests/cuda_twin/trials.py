"""How often a step runs out of memory in the budget that memplan chooses by itself, on cards with little to spare.

    make twin-trials
    .venv-twin/bin/python -m tests.cuda_twin.trials --models gpt2

For each model: `memplan.apply(model, sample, optimizer=optimizer)` and six steps, on cards from just above the least
that it plans for to a quarter more, with both settings of the allocator: 40 trials for the four models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from tests.cuda_twin.table import ALLOCATORS

MODELS = ("gpt2", "llama", "resnet", "unet")
SHARES = (1.01, 1.07, 1.13, 1.19, 1.25)  # of the least card
STEPS = 6
GIB = 1 << 30


def least_card(name: str) -> int:
    """Bytes of the smallest card for which there is a plan, to 32 MiB."""
    import torch

    import memplan
    from tests.cuda_twin import twin
    from tests.cuda_twin.models import MODELS

    model, sample = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    low, high = torch.cuda.memory_reserved(), 80 * GIB
    while high - low > 32 << 20:
        card = (low + high) // 2
        twin.set_memory(card)
        try:
            memplan.plan(model, sample, "auto", optimizer=optimizer)
            high = card
        except (memplan.BudgetInfeasible, torch.OutOfMemoryError):
            low = card
    return high


def trial(name: str) -> str:
    """What six steps come to on the card of this process."""
    import torch

    import memplan
    from tests.cuda_twin.models import MODELS, loss_of

    model, sample = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    try:
        memplan.apply(model, sample, optimizer=optimizer)
    except memplan.BudgetInfeasible:
        return "refused"
    for step in range(STEPS):
        try:
            output = model(**sample)
            loss_of(output).backward()
            del output
            optimizer.step()
            optimizer.zero_grad()
        except torch.OutOfMemoryError:
            return f"out of memory in step {step}"
    return "ran"


def in_process(words: list[str], cache: str, allocator: str, card_bytes: int) -> str:
    settings = {"MEMPLAN_CACHE_DIR": cache, "MEMPLAN_LOG": "off", "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator]}
    settings["TWIN_MEMORY_GIB"] = str(card_bytes / GIB)
    command = [sys.executable, "-m", "tests.cuda_twin.trials", *words]
    done = subprocess.run(command, text=True, capture_output=True, env={**os.environ, **settings})
    if "RESULT " not in done.stdout:  # autograd's thread may end a process that ends while it waits for Python's lock
        return done.stderr.strip().rpartition("\n")[2]
    return str(json.loads(done.stdout.rpartition("RESULT ")[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--least", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.least or args.one:
        print("RESULT", json.dumps(least_card(args.least) if args.least else trial(args.one)), flush=True)
        return
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for name in args.models:
            least = int(in_process(["--least", name], cache, "default", 80 * GIB))
            for share in SHARES:
                for allocator in ALLOCATORS:
                    results.append(in_process(["--one", name], cache, allocator, int(share * least)))
                    print(f"{name}, {share:.2f} of {least / GIB:.2f} GiB, {allocator}: {results[-1]}", flush=True)
    print(f"{sum('out of memory' in r for r in results)} of {len(results)} trials ran out of memory")


if __name__ == "__main__":
    main()

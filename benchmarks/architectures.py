"""Architectures of transformers and diffusers at half of their activation peak: what is planned, to what bits.

    python -m benchmarks.architectures [--names gpt2 swin] [--repeats 5] [--table FILE] [--output FILE]

With `--names`, rows of other names stay as the output file has them. Where a plain step gives other bits in a second
run, all runs of that row are with `torch.use_deterministic_algorithms(True)`.

Each is trained for three steps of SGD, without a plan, with one at half of the activation peak and with one at the
floor; outputs, gradients, parameters, buffers and the generator's state are compared bit for bit. The activation peak
is the total peak less parameters, buffers and inputs: gradients and kernel scratch are in it. It is measured with the
profiler's memory events. Costs are measured. Then come calls of three sizes, and the floor of fused kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as DiffusersAttention
from torch import nn
from transformers.integrations import hub_kernels

import memplan
from benchmarks.environment import environment, own_cache
from benchmarks.three_sizes import three_sizes
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.program.step import PlannedStep
from tests.support.architectures import ARCHITECTURES, Architecture, resident_tensors, train_once
from tests.support.meter import profiler_peak, storage_bytes
from tests.support.models_of_2026 import MODELS_OF_2026
from tests.support.zoo import Sample, copied, first_difference, run_steps

MEGABYTE = 1e6
REPEATS = 4  # of a plain step, to see whether it has the same bits each time
MOST_CAPTURES = 2  # of three sizes: of the first one, and of all
REASONS = {
    "reason": "",
    "difference_at_floor": " at its floor",
    "difference_at_sizes": " at other sizes",
    "not_fused": " with fused kernels",
}
OF_LOSS_BYTES = 8  # of a loss that is made outside of the model
HOME = Path(__file__).resolve().parent
MODELS = {**ARCHITECTURES, **MODELS_OF_2026}

Row = dict[str, Any]


def activation_peak(net: nn.Module, sample: Sample) -> int:
    """Bytes of one warm step beyond parameters, buffers and inputs, kernel scratch included."""
    net.zero_grad(set_to_none=True)
    peak_bytes = profiler_peak(lambda: train_once(net, sample))
    net.zero_grad(set_to_none=True)
    return peak_bytes


def seeded_steps(net: nn.Module, sample: Sample, steps: int = 3) -> dict[str, Any]:
    """Steps, with every generator that a model may draw from put to the same state first."""
    random.seed(3)
    np.random.seed(3)
    return run_steps(net, copied(sample), steps)


def step_time_s(net: nn.Module, sample: Sample) -> float:
    net.zero_grad(set_to_none=True)
    start = time.perf_counter()
    train_once(net, sample)
    return time.perf_counter() - start


def row_of(architecture: Architecture, repeats: int) -> Row:
    """What the table says of one architecture."""
    net, sample = architecture.build(0)
    with functions_without_kernels() as without:
        plain = seeded_steps(copy.deepcopy(net), sample)
    again = (seeded_steps(copy.deepcopy(net), sample) for _ in range(REPEATS))
    if not torch.are_deterministic_algorithms_enabled() and any(first_difference(plain, run, "run") for run in again):
        with deterministic():
            return {**row_of(architecture, repeats), "deterministic": True}
    row: Row = {
        "name": architecture.name,
        "family": architecture.family,
        "class": architecture.kind,
        "parameter_bytes": storage_bytes(net.parameters()),
        "resident_bytes": storage_bytes(resident_tensors(net, sample)),
        "branches": branches(net, without),
        "plain_activation_peak_bytes": activation_peak(copy.deepcopy(net), sample),
    }
    half_bytes = row["resident_bytes"] + row["plain_activation_peak_bytes"] // 2
    try:
        start = time.perf_counter()
        planned = memplan.apply(copy.deepcopy(net), copied(sample), half_bytes)
        row["planning_time_s"] = time.perf_counter() - start
    except memplan.MemplanError as error:
        facts = facts_without_limit(net, sample)
        reasons = [f"{type(error).__name__}: {first_line(error)}", facts.pop("reason", "")]
        return {**row, **facts, "reason": "; ".join(filter(None, reasons)), **beyond_half(net, sample, plain)}
    row.update(planned_facts(memplan.plan_of(planned)))
    row["same_bits"] = (difference := first_difference(plain, seeded_steps(planned, sample), "run")) is None
    row["reason"] = difference or row.get("reason", "")
    row["activation_peak_bytes"] = activation_peak(planned, sample)
    row["within_half"] = 2 * row["activation_peak_bytes"] <= row["plain_activation_peak_bytes"]
    if repeats:
        timed = copy.deepcopy(net)  # a step changes buffers
        pairs = [(step_time_s(planned, sample), step_time_s(timed, sample)) for _ in range(repeats)]
        row["measured_overhead"] = statistics.median(a / b for a, b in pairs) - 1
    return {**row, **beyond_half(net, sample, plain)}


def beyond_half(net: nn.Module, sample: Sample, plain: dict[str, Any]) -> Row:
    """What the table says of other budgets, sizes and kernels."""
    return at_the_floor(net, sample, plain) | at_three_sizes(net, sample) | fused_floor(net, sample)


def at_the_floor(net: nn.Module, sample: Sample, plain: dict[str, Any]) -> Row:
    """Bits over three steps, and the activation peak, under the smallest budget."""
    planned = memplan.apply(copy.deepcopy(net), copied(sample), "min")
    plan = memplan.plan_of(planned)
    return {
        "difference_at_floor": first_difference(plain, seeded_steps(planned, sample), "run"),
        "activation_peak_at_floor_bytes": activation_peak(planned, sample),
        "predicted_activation_peak_at_floor_bytes": plan and plan.activation_peak_bytes,
    }


def at_three_sizes(net: nn.Module, sample: Sample) -> Row:
    """What varies over three calls, how many captures serve them, and whether their bits are those of plain steps."""
    what, samples = three_sizes(sample)
    plain, planned = copy.deepcopy(net), copy.deepcopy(net)
    try:
        memplan.apply(planned, copied(samples[0]), memplan.Budget(activations=0.7))
        for given in samples:
            runs = [seeded_steps(model, given, 1) for model in (plain, planned)]
            if difference := first_difference(*runs, "run"):
                return {"sizes": what, "difference_at_sizes": difference}
    except memplan.MemplanError as error:
        return {"sizes": what, "difference_at_sizes": f"{type(error).__name__}: {first_line(error)}"}
    steps = planned_forward(planned).steps  # type: ignore[union-attr]
    captures = len({id(s.key) for s in steps if isinstance(s, PlannedStep)})
    return {"sizes": what, "captures": captures, "difference_at_sizes": None}


def fused_floor(net: nn.Module, sample: Sample) -> Row:
    """The smallest activation peak with fused kernels, or why there is none."""
    try:
        plan = memplan.plan(copy.deepcopy(net), copied(sample), "min", kernels="fused")
    except memplan.MemplanError as error:
        return {"not_fused": f"{type(error).__name__}: {first_line(error)}"}
    return {"fused_floor_bytes": plan.floor_bytes - plan.problem.resident_bytes}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def functions_without_kernels() -> Iterator[list[str]]:
    """A list that takes the names of functions of transformers that run in plain PyTorch for want of a library."""
    names: list[str] = []

    def note(message: str, *args: Any) -> None:
        if (found := re.match(r"`(\w+)` is falling back", message)) and found[1] not in names:
            names.append(found[1])

    with mock.patch.object(hub_kernels.logger, "warning_once", note):
        yield names


def branches(net: nn.Module, without_kernels: Collection[str]) -> str:
    """Which of the library's ways a model takes: those of attention, of experts, and functions without a kernel."""
    attention, experts = dict[str, None](), dict[str, None]()
    for module in net.modules():
        config = getattr(module, "config", None)
        attention |= dict.fromkeys(filter(None, [getattr(config, "_attn_implementation", None)]))
        if type(module).__name__.endswith("Experts"):
            experts |= dict.fromkeys(filter(None, [getattr(config, "_experts_implementation", None)]))
        if hasattr(module, "processor") and type(module).__module__.startswith("diffusers"):
            attention[DiffusersAttention.get_active_backend()[0].value] = None
    return "; ".join(
        [*attention, *(f"experts {name}" for name in experts), *(f"{name} in torch" for name in without_kernels)]
    )


def facts_without_limit(net: nn.Module, sample: Sample) -> Row:
    """What is captured of a model that does not fit half of its activation peak, and the smallest that it fits."""
    try:
        planned = memplan.apply(copy.deepcopy(net), copied(sample), memplan.Budget(activations=1.0))
    except memplan.MemplanError:
        return {"captured": "no"}
    return planned_facts(memplan.plan_of(planned))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without folders of this machine and without "It is made of:"."""
    line = str(error).partition("\n")[0].removesuffix(" It is made of:")
    return re.sub(r"/\S*/site-packages/", "", line)


def planned_facts(plan: memplan.Plan | None) -> Row:
    """What a plan says of itself. There is none where the model's own forward can't be captured."""
    if plan is None:
        return {"captured": "no", "reason": "it runs unplanned, with layers checkpointed"}
    return {
        "captured": islands_in_short(plan.islands) or "whole",
        "predicted_activation_peak_bytes": plan.activation_peak_bytes,
        "floor_bytes": plan.floor_bytes - plan.problem.resident_bytes,
        "overhead": plan.overhead,
        "ops": len(plan.problem.graph.ops),
    }


def islands_in_short(islands: Sequence[str]) -> str:
    """What runs as it is: the names of islands, those that differ in numbers alone once."""
    names = [re.sub(r"\b\d+\b", "*", line.partition(" at ")[0]) for line in islands]
    return ", ".join(f"{names.count(name)} islands: {name}" for name in dict.fromkeys(names))


def passes(row: Row) -> bool:
    """Whether bits are those of plain steps within half of their peak."""
    return bool(row.get("same_bits") and row["within_half"])


def is_over_at_floor(row: Row) -> bool:
    """Whether the step at the floor holds more than predicted and a loss outside of the model."""
    predicted_bytes = row.get("predicted_activation_peak_at_floor_bytes")
    return bool(predicted_bytes and row["activation_peak_at_floor_bytes"] > predicted_bytes + OF_LOSS_BYTES)


def table(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The page of documentation."""
    passed = [row for row in rows if passes(row)]
    whole = sum(row["captured"] == "whole" for row in passed)
    in_islands = sum("island" in row["captured"] for row in passed)
    tried = [row for row in rows if "difference_at_floor" in row]
    at_floor = [row["difference_at_floor"] is None and not is_over_at_floor(row) for row in tried]
    lines = [
        "# Architectures",
        "",
        f"{len(passed)} of {len(rows)} architectures train at half of their activation peak with the same bits over "
        "three steps of SGD: outputs,",
        "every gradient, parameters, buffers and the generator's state. "
        f"{whole} of them are captured whole, {in_islands} with islands, "
        f"{len(passed) - whole - in_islands} run unplanned.",
        f"{len(at_floor)} were trained at their floor as well, {sum(at_floor)} with the same bits and the peak of the "
        "plan.",
        "",
        "They are built from small configs with random weights (`tests/support/`), in train mode, with",
        "the dropout that the config has by default.",
        "",
        "- **ops**: of forward and backward in the captured step.",
        "- **captured**: whole, or with islands, calls that run as they are.",
        "- **branch**: the library's ways that ran: attention, experts, functions in PyTorch for want of a kernel.",
        "- **unplanned**: the activation peak of the plain step, measured: everything held but parameters, buffers and "
        "inputs.",
        "- **planned**: the same at the budget, measured. **floor**: the smallest that a plan can do with,",
        "  and its part of the plain step's. **fused floor**: that of fused kernels.",
        "- **sizes**: a second and a third call have fewer tokens, or fewer rows where there are no tokens, and the",
        "  bits of plain steps: one plan for all (from the second call on), or one for each size, as where forward "
        "takes",
        "  another branch once no token is masked.",
        "- **planned in**: seconds for the first plan at half, nothing cached; other programs ran beside.",
        "- **bits equal**: at each budget. *deterministic* where plain steps repeat their bits only with",
        "  `torch.use_deterministic_algorithms(True)`.",
        "- **overhead**: more time at half, predicted by the plan (measured: median of paired steps; the models are "
        "tiny).",
        "",
        f"Written by `python -m benchmarks.architectures` on {facts['processor']}, {facts['threads']} threads, "
        f"torch {facts['torch']},",
        f"transformers {facts['transformers']}, diffusers {facts['diffusers']}.",
        "",
        "| name | family | class | branch | ops | captured | sizes | unplanned MB | planned MB | floor MB "
        "| fused floor MB | overhead | planned in | bits equal |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(table_line(row) for row in rows),
        "",
    ]
    reasons = [
        f"- **{row['name']}**{where}: {row[key]}" for row in rows for key, where in REASONS.items() if row.get(key)
    ]
    return "\n".join([*lines, "## Why not whole, or not at half", "", *reasons, ""] if reasons else lines)


def table_line(row: Row) -> str:
    unplanned_bytes = row["plain_activation_peak_bytes"]

    def part(name: str) -> str:
        return f"{megabytes(row[name])} ({row[name] / unplanned_bytes:.0%})" if name in row else ""

    planned = bits = overhead = planned_in = ""
    if "same_bits" in row:
        planned = megabytes(row["activation_peak_bytes"]) + ("" if row["within_half"] else " (over)")
        overhead = f"{row['overhead']:+.1%} " if "overhead" in row else ""
        overhead += f"({row['measured_overhead']:+.0%})" if "measured_overhead" in row else ""
        planned_in = f"{row['planning_time_s']:.0f} s"
        are_equal = row["same_bits"] and not row.get("difference_at_floor")
        bits = ("yes" if are_equal else "no") + (", deterministic" if row.get("deterministic") else "")
    at_floor = "predicted_activation_peak_at_floor_bytes"  # layers of islands may be checkpointed there alone
    floor = part(at_floor if row.get(at_floor) else "floor_bytes") + (" (over)" if is_over_at_floor(row) else "")
    cells = [
        row["name"], row["family"], row["class"], row.get("branches", ""), row.get("ops", ""), row["captured"],
        sizes_of(row), megabytes(unplanned_bytes), planned, floor, part("fused_floor_bytes"), overhead,
        planned_in, bits,
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def sizes_of(row: Row) -> str:
    """How calls of several lengths or batches are served."""
    if "sizes" not in row:
        return ""
    if row["difference_at_sizes"] is not None:
        return f"{row['sizes']}: no"
    return f"{row['sizes']}: {'one plan' if row['captures'] <= MOST_CAPTURES else 'one for each'}"


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / MEGABYTE:.2f}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each side; 0 on a busy machine")
    parser.add_argument("--table", type=Path, default=HOME.parent / "docs" / "architectures.md")
    parser.add_argument("--output", type=Path, default=HOME / "results" / "architectures.json")
    return parser.parse_args()


def main() -> int:
    args = parsed()
    facts = {**environment(), "diffusers": metadata.version("diffusers")}
    rows = rows_of_before(args.output, facts, set(MODELS) - set(args.names))
    for name in args.names:
        with own_cache():
            row = rows[name] = row_of(MODELS[name], args.repeats)
        print(table_line(row), row.get("reason", ""), flush=True)
        gc.collect()
        in_order = [rows[name] for name in MODELS if name in rows]
        for path, text in (
            (args.output, json.dumps({"environment": facts, "rows": in_order}, indent=1) + "\n"),
            (args.table, table(in_order, facts)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 0 if all(row.get("same_bits", True) for row in rows.values()) else 1


def rows_of_before(path: Path, facts: dict[str, Any], names: Collection[str]) -> dict[str, Row]:
    """Rows of these names in a result file, by name. Raises SystemExit if they are of other versions or hardware."""
    if not names or not path.exists():
        return {}
    result = json.loads(path.read_text())
    same = [key for key in facts if key != "memory_bytes"]
    if any(result["environment"].get(key) != facts[key] for key in same):
        raise SystemExit(f"{path} has figures of other versions or hardware; run all rows, or give another --output")
    return {row["name"]: row for row in result["rows"] if row["name"] in names}


if __name__ == "__main__":
    sys.exit(main())

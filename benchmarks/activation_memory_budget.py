"""memplan against PyTorch's `activation_memory_budget`, both in one process.

    python -m benchmarks.activation_memory_budget [--configs gpt2 llama] [--large] [--resume] [--output FILE]

The rival runs with eager kernels through AOTAutograd and its min-cut partitioner, at every budget with every solver and
every runtime estimator that PyTorch documents. Settings that lead to one and the same program are measured once. With
--resume, the settings that the file has are left alone.
memplan runs at its floor and at the peak of each of the rival's programs.

The activation peak is the total peak less parameters, buffers and inputs: gradients and kernel scratch are in it. It
is measured with the profiler's memory events. Only the loss leaves the model; logits are not held. Step times alternate
between plain eager, the rival and memplan.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.environment import environment, own_cache
from memplan.problem.data import Op, Problem
from tests.support.meter import profiler_peak, storage_bytes
from tests.support.zoo import bits_of

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")
ESTIMATORS = ("flops", "profile", "testing")
STEP_SEED = 5
MEGABYTE = 1e6

Sample = dict[str, Any]
Step = Callable[[], None]


class LossOnly(nn.Module):
    """Returns the inner model's loss and lets go of everything else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **sample: Any) -> torch.Tensor:
        return self.inner(**sample).loss


def build_gpt2(layers: int, width: int, heads: int, vocabulary: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # its default, said aloud: the log line about it can't be compiled
    return model


def build_llama(layers: int, width: int, heads: int, vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Config:
    build: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    length: int

    def make(self) -> tuple[nn.Module, Sample]:
        torch.manual_seed(0)
        model = LossOnly(self.build()).train()
        ids = torch.randint(0, self.vocabulary, (self.batch, self.length))
        return model, {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


CONFIGS = {
    "gpt2": Config(lambda: build_gpt2(4, 128, 4, 1000, 128), 1000, batch=8, length=128),
    "llama": Config(lambda: build_llama(4, 128, 4, 1000), 1000, batch=8, length=128),
    "gpt2-large": Config(lambda: build_gpt2(12, 768, 12, 50257, 512), 50257, batch=4, length=512),
}


@dataclass(frozen=True)
class Setting:
    """One setting of the rival's knob."""

    budget: float
    solver: str
    estimator: str

    def __str__(self) -> str:
        return f"{self.budget:g} {self.solver} {self.estimator}"


@dataclass
class Program:
    """What one or several settings compile to."""

    settings: list[str]
    row: dict[str, Any]


class Bench:
    """One model with the reference run that both sides are compared with."""

    def __init__(self, config: Config, repeats: int) -> None:
        self.repeats = repeats
        self.model, self.sample = config.make()
        self.gradients, self.peak_bytes = self.watched_step(self.model, self.model)

    def step(self, run: Callable[..., torch.Tensor]) -> None:
        torch.manual_seed(STEP_SEED)
        run(**self.sample).backward()

    def watched_step(self, run: Callable[..., torch.Tensor], model: nn.Module) -> tuple[list[torch.Tensor], int]:
        """Gradients and activation peak in bytes of one step."""
        model.zero_grad(set_to_none=True)
        peak_bytes = profiler_peak(lambda: self.step(run))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return gradients, peak_bytes

    def gradient_error(self, gradients: list[torch.Tensor]) -> float:
        """Norm of the difference from plain eager's gradients over the norm of these."""
        squares = sum(float((a - b).double().pow(2).sum()) for a, b in zip(gradients, self.gradients, strict=True))
        return (squares / sum(float(b.double().pow(2).sum()) for b in self.gradients)) ** 0.5

    def same_bits(self, gradients: list[torch.Tensor]) -> bool:
        return all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(gradients, self.gradients, strict=True))

    def times_of(self, runs: dict[str, tuple[Callable[..., torch.Tensor], nn.Module]]) -> dict[str, list[float]]:
        """Seconds of a step of each, in turn."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.repeats):
            for name, (run, model) in runs.items():
                model.zero_grad(set_to_none=True)
                start = time.perf_counter()
                self.step(run)
                times[name].append(time.perf_counter() - start)
        return times


class Known(Exception):
    """The setting leads to a program that is measured already."""


def compiled(model: nn.Module, code: list[str], known: Container[str]) -> Callable[..., torch.Tensor]:
    """The model under the rival's knob. `code` receives the text of the forward and backward programs.

    Raises Known, before anything runs, where `known` has their digest.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partitioned(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        programs = min_cut_rematerialization_partition(*args, **kwargs)
        code.extend(program.code for program in programs)
        return programs

    def forward_kernels(program: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        run = boxed_nop(program, example)

        def unless_known(args: list[Any]) -> Any:
            if digest_of(code) in known:
                raise Known
            return run(args)

        unless_known._boxed_call = True  # type: ignore[attr-defined]
        return unless_known

    backend = aot_autograd(
        fw_compiler=forward_kernels,
        bw_compiler=boxed_nop,
        partition_fn=partitioned,
        keep_inference_input_mutations=True,
    )
    return torch.compile(model, backend=backend, fullgraph=True)


def digest_of(code: list[str]) -> str:
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


@contextlib.contextmanager
def knob(setting: Setting) -> Iterator[None]:
    import torch._functorch.config as config

    torch._dynamo.reset()
    with config.patch(
        activation_memory_budget=setting.budget,
        activation_memory_budget_solver=setting.solver,
        activation_memory_budget_runtime_estimator=setting.estimator,
        enable_autograd_cache=False,
    ):
        yield


def reason_of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "raised:" not in line]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


class Comparison:
    """Runs the settings of the rival one after the other, and memplan at the peak of each new program."""

    def __init__(self, bench: Bench, known: dict[str, Any]) -> None:
        self.bench = bench
        self.programs = {p["digest"]: Program(p["settings"], without(p, "settings")) for p in known.get("programs", [])}
        self.failures: list[dict[str, str]] = known.get("failures", [])
        self.rival = copy.deepcopy(bench.model)

    def has(self, setting: Setting) -> bool:
        settings = [name for program in self.programs.values() for name in program.settings]
        return str(setting) in settings or str(setting) in [failure["setting"] for failure in self.failures]

    def add(self, setting: Setting) -> None:
        code: list[str] = []
        try:
            with knob(setting):
                run = compiled(self.rival, code, self.programs)
                self.bench.step(run)
                row = self._measured(run)
        except Known:
            self.programs[digest_of(code)].settings.append(str(setting))
            return
        except Exception as error:
            self.failures.append({"setting": str(setting), "reason": reason_of(error)})
            print(f"    {setting!s:45s} failed: {reason_of(error)[:100]}", flush=True)
            return
        self.programs[digest_of(code)] = Program([str(setting)], {"digest": digest_of(code), **row})
        print_row(str(setting), row)

    def _measured(self, run: Callable[..., torch.Tensor]) -> dict[str, Any]:
        bench = self.bench
        gradients, peak_bytes = bench.watched_step(run, self.rival)
        ours = planned(bench, memplan.Budget(activations=peak_bytes))
        runs = {"plain": (bench.model, bench.model), "rival": (run, self.rival)}
        if "model" in ours:
            runs["memplan"] = (ours["model"], ours["model"])
        times = bench.times_of(runs)
        return {
            "plain": {"time_s": times["plain"]},
            "rival": {
                "peak_bytes": peak_bytes,
                "gradient_error": bench.gradient_error(gradients),
                "time_s": times["rival"],
            },
            "memplan": finished(ours, times),
        }


def planned(bench: Bench, budget: Any) -> dict[str, Any]:
    """memplan on a copy of the model: the planned model beside what it promises and what is measured, or the reason."""
    try:
        start = time.perf_counter()
        model = memplan.apply(copy.deepcopy(bench.model), bench.sample, budget)
        plan_time_s = time.perf_counter() - start
        plan = memplan.plan_of(model)
        gradients, peak_bytes = bench.watched_step(model, model)
        return {
            "model": model,
            "planning_time_s": plan_time_s,
            "predicted_peak_bytes": plan.activation_peak_bytes,
            "predicted_overhead": plan.overhead,
            "gap": plan.gap,
            "peak_bytes": peak_bytes,
            "same_bits": bench.same_bits(gradients),
        }
    except Exception as error:
        return {"reason": reason_of(error)}


def finished(ours: dict[str, Any], times: dict[str, list[float]]) -> dict[str, Any]:
    row = without(ours, "model")
    return {**row, "time_s": times["memplan"]} if "memplan" in times else row


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


def at_the_floor(bench: Bench) -> dict[str, Any]:
    """memplan at the smallest budget that it can meet."""
    try:
        plan = memplan.plan(bench.model, bench.sample, 1.0)
    except Exception as error:
        return {"memplan": {"reason": reason_of(error)}}
    ours = planned(bench, plan.floor_bytes)
    runs = {"plain": (bench.model, bench.model)}
    if "model" in ours:
        runs["memplan"] = (ours["model"], ours["model"])
    times = bench.times_of(runs)
    return {
        "plain": {"time_s": times["plain"]},
        "memplan": {"floor_bytes": plan.floor_bytes, **finished(ours, times)},
        "largest_op_bytes": largest_op_bytes(plan.problem),
    }


def largest_op_bytes(problem: Problem) -> int:
    """What the op that needs most needs by itself: operands, results and scratch, less what is resident."""
    values = problem.graph.values

    def alone_bytes(op: Op) -> int:
        own = {v for v in (*op.inputs, *op.outputs) if not values[v].resident}
        return sum(values[v].size_bytes for v in own if values[v].reuses not in own)

    return max(alone_bytes(op) + s for op, s in zip(problem.graph.ops, problem.costs.scratch_bytes, strict=True))


def ratio(row: dict[str, Any], side: str) -> tuple[float, float, float]:
    """Step time over plain eager's, of paired steps: median, lower and upper quartile."""
    pairs = sorted(a / b for a, b in zip(row[side]["time_s"], row["plain"]["time_s"], strict=True))
    low, middle, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return middle, low, high


def side_text(row: dict[str, Any], side: str) -> str:
    if side not in row or "time_s" not in row[side]:
        return row.get(side, {}).get("reason", "not run")[:70]
    middle, low, high = ratio(row, side)
    return f"{row[side]['peak_bytes'] / MEGABYTE:8.1f} MB  {middle:5.2f}x [{low:.2f}, {high:.2f}]"


def print_row(name: str, row: dict[str, Any]) -> None:
    rival = f"rival {side_text(row, 'rival')} grad error {row['rival']['gradient_error']:.1e}" if "rival" in row else ""
    bits = row["memplan"].get("same_bits")
    ours = f"memplan {side_text(row, 'memplan')}" + (
        "" if bits is None else f" {'same bits' if bits else 'OTHER BITS'}"
    )
    print(f"    {name:45s} {rival:66s} {ours}", flush=True)


def run_config(
    name: str, args: argparse.Namespace, known: dict[str, Any], save: Callable[[dict[str, Any]], None]
) -> None:
    """Measure what is not known of one configuration, and save what there is after each setting."""
    bench = Bench(CONFIGS[name], args.repeats)
    resident_bytes = storage_bytes([*bench.model.parameters(), *bench.model.buffers()])
    print(f"{name}: plain activation peak {bench.peak_bytes / MEGABYTE:.1f} MB", flush=True)
    floor = known.get("floor") or at_the_floor(bench)
    print_row("floor", floor)
    comparison = Comparison(bench, known)

    def result() -> dict[str, Any]:
        return {
            "plain_peak_bytes": bench.peak_bytes,
            "parameter_and_buffer_bytes": resident_bytes,
            "floor": floor,
            "programs": [{"settings": p.settings, **p.row} for p in comparison.programs.values()],
            "failures": comparison.failures,
        }

    for setting in settings_of(args):
        if not comparison.has(setting):
            comparison.add(setting)
            gc.collect()
            save(result())
    torch._dynamo.reset()
    print_summary(name, result())


def settings_of(args: argparse.Namespace) -> list[Setting]:
    return [Setting(*parts) for parts in itertools.product(args.budgets, args.solvers, args.estimators)]


def print_summary(name: str, result: dict[str, Any]) -> None:
    plain_bytes = result["plain_peak_bytes"]
    print(f"  {name}: {len(result['programs'])} programs, {len(result['failures'])} settings failed")
    lowest = min(result["programs"], key=lambda p: p["rival"]["peak_bytes"], default=None)
    if lowest is not None:
        peak_bytes = lowest["rival"]["peak_bytes"]
        error = lowest["rival"]["gradient_error"]
        print(
            f"  lowest rival peak {peak_bytes / MEGABYTE:.1f} MB, {peak_bytes / plain_bytes:.3f} of plain "
            f"({lowest['settings'][0]}), {ratio(lowest, 'rival')[0]:.2f}x plain's time, gradient error {error:.1e}"
        )
    ours = result["floor"]["memplan"]
    if "time_s" in ours:
        peak_bytes = ours["peak_bytes"]
        middle, _, _ = ratio(result["floor"], "memplan")
        print(
            f"  memplan's floor {peak_bytes / MEGABYTE:.1f} MB, {peak_bytes / plain_bytes:.3f} of plain, "
            f"{middle:.2f}x; the largest op needs {result['floor']['largest_op_bytes'] / MEGABYTE:.1f} MB"
        )
    pairs = [
        statistics.median(a / b for a, b in zip(p["memplan"]["time_s"], p["rival"]["time_s"]))
        for p in result["programs"]
        if "time_s" in p["memplan"]
    ]
    if pairs:
        print(
            f"  at the rival's peaks memplan's step takes {min(pairs):.2f} to {max(pairs):.2f} of the rival's, "
            f"median {statistics.median(pairs):.2f}"
        )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=["gpt2", "llama"])
    parser.add_argument("--large", action="store_true", help="also GPT-2 with 12 layers of 768: 10 GB, an hour or more")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--solvers", nargs="+", default=SOLVERS)
    parser.add_argument("--estimators", nargs="+", default=ESTIMATORS)
    parser.add_argument("--resume", action="store_true", help="keep what the file has of these configurations")
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each side")
    default = Path(__file__).parent / "results" / "activation_memory_budget.json"
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args()


def main() -> int:
    args = parsed()
    names = [*args.configs, *(["gpt2-large"] if args.large else [])]
    known = json.loads(args.output.read_text())["configs"] if args.resume else {}
    result: dict[str, Any] = {"environment": environment(), "repeats": args.repeats, "configs": known}
    with own_cache():
        _run(names, args, result)
    return 0


def _run(names: list[str], args: argparse.Namespace, result: dict[str, Any]) -> None:
    def save(name: str, found: dict[str, Any]) -> None:
        result["configs"][name] = found
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")

    for name in names:
        run_config(name, args, result["configs"].get(name, {}), functools.partial(save, name))


if __name__ == "__main__":
    sys.exit(main())

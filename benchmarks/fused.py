"""Peak against time of all ways to train in less memory: eager, torch.compile, checkpointing, memplan's plans.

    python -m benchmarks.fused [--models gpt2 llama ...] [--autocast] [--repeats 21] [--output FILE]

What the file has of other models stays in it.

Each contender is a process of its own with one thread: plain eager, gradient checkpointing of transformers,
torch.compile as it is and at several activation memory budgets, plans of eager kernels, and plans of fused ones; with
dropout also fused ones whose groups make the masks (`random="counter"`), as torch.compile's kernels do. Plans run at
the measured peaks of the compiled steps, at half of the lowest of these, and at their floors. Once all are set up, they
take turns in shuffled rounds, one step at a time, so that the machine's noise falls on all.

The activation peak is the total peak less parameters, buffers and inputs: gradients and kernel scratch are in it. It is
measured with the profiler's memory events. A step's time is CPU seconds of its process. glibc is told to keep freed
memory, as CUDA's allocator does, for page faults would be most of the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.activation_memory_budget import LossOnly, build_gpt2
from benchmarks.environment import environment, own_cache
from benchmarks.peak_picture import picture_of
from tests.support.meter import profiler_peak
from tests.support.zoo import MODELS, call, loss_of

BUDGETS = (0.7, 0.5, 0.35, 0.2, 0.0)  # of torch.compile
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "TRANSFORMERS_VERBOSITY": "error",
}
STEP_SEED = 5
MEGABYTE = 1e6

Made = tuple[nn.Module, dict[str, Any]]


class LossOf(nn.Module):
    """Returns one number for models that have no loss of their own, and lets go of everything else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, sample: Any) -> torch.Tensor:
        return loss_of(call(self.inner, sample))


def language(inner: nn.Module, vocabulary: int, batch: int, length: int) -> Made:
    ids = torch.randint(0, vocabulary, (batch, length))
    return LossOnly(inner), {"input_ids": ids, "labels": ids.clone()}


def gpt2(width: int, vocabulary: int, length: int, dropout: float = 0.0) -> Made:
    model: Any = build_gpt2(4, width, width // 32, vocabulary, length)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return language(model, vocabulary, 8, length)


def llama(width: int, vocabulary: int, length: int) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=8 * width // 3 // 32 * 32, num_hidden_layers=4,
        num_attention_heads=width // 32, num_key_value_heads=width // 32, use_cache=False,
    )  # fmt: skip
    return language(LlamaForCausalLM(config), vocabulary, 8, length)


def bert(width: int) -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4,
        num_attention_heads=width // 32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return language(BertForMaskedLM(config), 1000, 8, 128)


def t5(width: int) -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=1000, d_model=width, d_kv=32, d_ff=4 * width, num_layers=2, num_heads=width // 32,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return language(T5ForConditionalGeneration(config), 1000, 8, 128)


def vit(width: int) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=64, patch_size=8, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4,
        num_attention_heads=width // 32,
    )  # fmt: skip
    sample = {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(0, 2, (16,))}
    return LossOnly(ViTForImageClassification(config)), sample


def of_zoo(name: str) -> Made:
    inner, sample = MODELS[name](0)
    return LossOf(inner), {"sample": sample}


BUILDS: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: gpt2(128, 1000, 128),
    "gpt2-dropout": lambda: gpt2(128, 1000, 128, 0.1),
    "gpt2-256": lambda: gpt2(256, 8000, 256),
    "llama": lambda: llama(128, 1000, 128),
    "llama-256": lambda: llama(256, 8000, 256),
    "bert": lambda: bert(128),
    "t5": lambda: t5(128),
    "vit": lambda: vit(128),
    "resnet50": lambda: of_zoo("resnet50"),
    "unet": lambda: of_zoo("unet"),
}


@dataclass(frozen=True)
class Contender:
    """A way to train.

    - kind: "eager", "checkpointing", "compile", "plan", "fused", or "counter": fused, with masks made in groups.
    - budget: of torch.compile (a fraction), or of a plan (bytes of activations; 0 is its floor). None: none.
    """

    kind: str
    model: str
    autocast: bool
    budget: float | None = None

    @property
    def name(self) -> str:
        if self.budget is None:
            return self.kind
        if self.kind == "compile":
            return f"compile {self.budget:g}"
        return f"{self.kind} {'floor' if not self.budget else f'at {self.budget / MEGABYTE:.1f} MB'}"


# -- a contender's process --------------------------------------------------------------------------------------------


class Process:
    """What runs in a contender's process: set up once, then one step for each line that it reads."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        torch.manual_seed(0)
        self.model, self.sample = BUILDS[contender.model]()
        self.model.train()
        self.run: Callable[..., torch.Tensor] = self.model

    def set_up(self) -> dict[str, Any]:
        contender, begin = self.contender, time.perf_counter()
        facts: dict[str, Any] = {}
        if contender.kind == "checkpointing":
            inner: Any = self.model.inner
            inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif contender.kind == "compile":
            self._compile()
        elif contender.kind in ("plan", "fused", "counter"):
            facts = self._plan()
        for _ in range(3):
            self.step()
        facts["set_up_s"] = time.perf_counter() - begin
        self.model.zero_grad(set_to_none=True)
        facts["peak_bytes"] = profiler_peak(self.step_kept)
        return facts

    def _compile(self) -> None:
        import torch._functorch.config as functorch

        functorch.enable_autograd_cache = False
        if self.contender.budget is not None:
            functorch.activation_memory_budget = self.contender.budget
        self.run = torch.compile(self.model, dynamic=False)

    def _plan(self) -> dict[str, Any]:
        kind = self.contender.kind
        budget: Any = 1 << 60
        kernels: dict[str, Any] = {} if kind == "plan" else {"kernels": "fused"}
        if kind == "counter":
            kernels["random"] = "counter"
        with self.cast():
            if self.contender.budget:
                budget = memplan.Budget(activations=int(self.contender.budget))
            elif self.contender.budget is not None:
                budget = memplan.plan(self.model, self.sample, 1.0, **kernels).floor_bytes
            memplan.apply(self.model, self.sample, budget, **kernels)
        plan: Any = memplan.plan_of(self.model)
        return {
            "predicted_bytes": plan.activation_peak_bytes,
            "predicted_overhead": plan.overhead,
            "ops": len(plan.problem.graph.ops),
        }

    def cast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.contender.autocast)

    def step(self) -> float:
        """CPU seconds of a step."""
        self.model.zero_grad(set_to_none=True)
        begin = time.process_time()
        self.step_kept()
        return time.process_time() - begin

    def step_kept(self) -> None:
        torch.manual_seed(STEP_SEED)
        with self.cast():
            loss = self.run(**self.sample)
        loss.backward()


def serve(contender: Contender) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    process = Process(contender)
    try:
        say(process.set_up())
    except Exception as error:
        say({"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"})
        return
    for _ in sys.stdin:
        say(process.step())


# -- all of them ------------------------------------------------------------------------------------------------------


class Running:
    """A contender's process, seen from outside."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        command = [sys.executable, "-m", "benchmarks.fused", "--contender", json.dumps(asdict(contender))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL,
            env={**os.environ, **QUIET},
        )  # fmt: skip
        self.facts: dict[str, Any] = self._answer()
        self.times_s: list[float] = []
        print(f"  {contender.name:24s} {_shown(self.facts)}", flush=True)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"failed": "the process died"}

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.times_s.append(self._answer())

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _shown(facts: dict[str, Any]) -> str:
    if "failed" in facts:
        return str(facts["failed"])
    predicted = f", predicted {facts['predicted_bytes'] / MEGABYTE:.2f}" if "predicted_bytes" in facts else ""
    return f"{facts['peak_bytes'] / MEGABYTE:8.2f} MB{predicted}, set up in {facts['set_up_s']:.1f} s"


def compared(model: str, autocast: bool, repeats: int, budgets: tuple[float, ...] = BUDGETS) -> dict[str, Any]:
    """Rows of all contenders for one model."""
    print(f"{model}{' (bf16 autocast)' if autocast else ''}", flush=True)
    running: list[Running] = []

    def add(kind: str, budget: float | None = None) -> Running:
        running.append(Running(Contender(kind, model, autocast, budget)))
        if "failed" in running[-1].facts:
            running[-1].stop()
        return running[-1]

    try:
        add("eager")
        add("checkpointing")
        rivals = [add("compile"), *(add("compile", budget) for budget in budgets)]
        peaks = sorted({r.facts["peak_bytes"] for r in rivals if "peak_bytes" in r.facts}, reverse=True)
        drops = any(isinstance(m, nn.Dropout) and m.p > 0 for m in BUILDS[model]()[0].modules())
        ways = ["fused", "counter"] if drops else ["fused"]
        for way in ways:
            add(way)
        for peak in [*peaks, *(peak // 2 for peak in peaks[-1:]), 0]:
            for way in (*ways, "plan"):
                add(way, peak)
        alive = [r for r in running if "failed" not in r.facts]
        order = random.Random(0)
        for _ in range(repeats):
            order.shuffle(alive)
            for contender in alive:
                contender.step()
    finally:
        for contender in running:
            contender.stop()
    eager = next(r for r in running if r.contender.kind == "eager")
    return {r.contender.name: {**r.facts, **_ratio(r, eager)} for r in running}


def _ratio(run: Running, eager: Running) -> dict[str, Any]:
    """Step time over plain eager's of the same round: median and quartiles."""
    if not run.times_s:
        return {}
    ratios = [a / b for a, b in zip(run.times_s, eager.times_s, strict=True)]
    return {"time_s": statistics.median(run.times_s), "over_eager": statistics.quantiles(ratios, n=4)}


def print_table(rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        if "over_eager" in row:
            low, middle, high = row["over_eager"]
            print(f"    {name:24s} {row['peak_bytes'] / MEGABYTE:8.2f} MB  {middle:.3f} [{low:.3f}, {high:.3f}]")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=BUILDS, default=list(BUILDS))
    parser.add_argument("--autocast", action="store_true", help="also under bfloat16 autocast")
    parser.add_argument("--budgets", nargs="*", type=float, default=BUDGETS)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fused.json")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        serve(Contender(**json.loads(args.contender)))
        return 0
    result: dict[str, Any] = {"environment": environment(), "repeats": args.repeats, "models": {}}
    if args.output.exists():
        result["models"] = json.loads(args.output.read_text())["models"]
    with own_cache():
        for model in args.models:
            for autocast in (False, True) if args.autocast else (False,):
                rows = compared(model, autocast, args.repeats, tuple(args.budgets))
                print_table(rows)
                result["models"][f"{model}{' bf16' if autocast else ''}"] = rows
                args.output.write_text(json.dumps(result, indent=1) + "\n")
    args.output.with_suffix(".svg").write_text(picture_of(result["models"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

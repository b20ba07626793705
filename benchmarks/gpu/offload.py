"""Full fine-tuning of Llama in bfloat16 under a cap on the device's memory, against what else makes it fit.

    python -m benchmarks.gpu.offload [--models 1b 7b] [--cap GIB] [--steps N] [--rivals NAME ...] [--out FILE]
    python -m benchmarks.gpu.offload --tiny        # the same code on the CPU, which stands for the device

Fused AdamW, length 512, batch 4, random tokens and weights, the same in each layer. Each rival runs in a process of its
own. The cap is what
PyTorch's allocator may take (CUDA), and memplan's budget is a little less.

- plain: everything on the device.
- checkpointing: gradient checkpointing of transformers, the optimizer and its state on the CPU.
- deepspeed: ZeRO-Offload (stage 2, optimizer on the CPU) with checkpointing, where DeepSpeed is installed.
- memplan: recomputation and offload, the optimizer stepping after backward; memplan-backward: in it.

The result file has seconds a step (median, least and most, the first steps left out), tokens a second, the peak of the
device's memory and of the process, losses, hardware and versions. It is written after each rival, and what other rivals
took on the same machine with the same settings stays in it, so that they can be run one by one.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.environment import environment

RESULTS = Path(__file__).resolve().parent.parent / "results" / "gpu_offload.json"
SHAPES: dict[str, dict[str, int]] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "7b": {},  # what LlamaConfig has unless told otherwise
    "tiny": {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
RIVALS = ("plain", "checkpointing", "deepspeed", "memplan", "memplan-backward")
_WARM_UP = 3
_LEARNING_RATE = 1e-5

Step = Callable[[dict[str, Any]], float]


def build(model: str) -> nn.Module:
    """On the CPU, in train mode. Layers are copies of one, for to draw seven billion numbers takes minutes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(**SHAPES[model])
    count, config.num_hidden_layers = config.num_hidden_layers, 1
    try:
        net = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    config.num_hidden_layers = count
    for index in range(1, count):
        layer = copy.deepcopy(net.model.layers[0])
        layer.self_attn.layer_idx = index
        net.model.layers.append(layer)
    return net.train()


def batch(model: nn.Module, size: int, length: int, device: str) -> dict[str, Any]:
    ids = torch.randint(0, model.config.vocab_size, (size, length), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The plain loop's step."""

    def step(sample: dict[str, Any]) -> float:
        loss = model(**sample).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def plain(model: nn.Module, sample: dict[str, Any], args: argparse.Namespace) -> Step:
    model.to(args.device)
    return stepping(model, torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True))


def checkpointing(model: nn.Module, sample: dict[str, Any], args: argparse.Namespace) -> Step:
    """Gradients go to copies of the parameters on the CPU, which AdamW steps there; new values come back."""
    model.to(args.device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    pinned = args.device != "cpu"
    masters = []
    for parameter in model.parameters():
        copy = parameter.detach().cpu().clone()
        masters.append(nn.Parameter(copy.pin_memory() if pinned else copy))
    optimizer = torch.optim.AdamW(masters, lr=_LEARNING_RATE, fused=True)

    def step(sample: dict[str, Any]) -> float:
        loss = model(**sample).loss
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.cpu(), None  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master, non_blocking=pinned)
        return float(loss.detach())

    return step


def deepspeed(model: nn.Module, sample: dict[str, Any], args: argparse.Namespace) -> Step:
    if importlib.util.find_spec("deepspeed") is None:
        raise NotImplementedError("DeepSpeed is not installed")
    if args.device == "cpu":
        raise NotImplementedError("ZeRO-Offload needs a GPU")
    import deepspeed as library

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", "29511")):  # fmt: skip
        os.environ.setdefault(name, value)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = library.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": args.batch,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE}},
        },
    )

    def step(sample: dict[str, Any]) -> float:
        loss = engine(**sample).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def planned(model: nn.Module, sample: dict[str, Any], args: argparse.Namespace) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
    memplan.apply(
        model, sample, args.budget, optimizer=optimizer, device=args.device, host_budget=args.host,
        costs="estimate" if args.device == "cpu" else "measure",
        update="backward" if args.run == "memplan-backward" else "step",
    )  # fmt: skip
    return stepping(model, optimizer)


WAYS: dict[str, Callable[[nn.Module, dict[str, Any], argparse.Namespace], Step]] = {
    "plain": plain, "checkpointing": checkpointing, "deepspeed": deepspeed, "memplan": planned,
    "memplan-backward": planned,
}  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train with one rival, in this process."""
    cuda = args.device != "cpu"
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap * 2**30 / total))
    model = build(args.model)
    sample = batch(model, args.batch, args.length, args.device)
    start = time.perf_counter()
    try:
        step = WAYS[args.run](model, sample, args)
        ready_s = time.perf_counter() - start
        losses, seconds = [], []
        for index in range(_WARM_UP + args.steps):
            if cuda and index == _WARM_UP:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            losses.append(step(sample))  # waits for the device
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except (torch.OutOfMemoryError, memplan.BudgetInfeasible, NotImplementedError) as error:
        return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    timed = seconds[_WARM_UP:]
    plan = memplan.plan_of(model)
    return {
        "step_s": statistics.median(timed),
        "step_s_least": min(timed),
        "step_s_most": max(timed),
        "tokens_per_s": args.batch * args.length / statistics.median(timed),
        "ready_s": ready_s,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "device_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
        "predicted": None
        if plan is None
        else {
            "step_s": plan.time_s,
            "device_peak_bytes": plan.peak_bytes,
            "host_bytes": plan.host_bytes,
            "offloaded_bytes": plan.offloaded_bytes,
            "lower_bound_s": plan.lower_bound_s,
        },
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["1b", "7b"], choices=list(SHAPES))
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), choices=RIVALS)
    parser.add_argument("--cap", type=float, default=22.0, help="GiB that the device may hold")
    parser.add_argument("--host", default="200GiB", help="host memory that memplan may use")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, at half of its plain peak")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--run", choices=RIVALS, help=argparse.SUPPRESS)  # one rival, in this process
    parser.add_argument("--model", choices=list(SHAPES), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.device = "cpu" if args.tiny else "cuda"
    args.budget = 0.5 if args.tiny else int(args.cap * 2**30 * 0.97)  # the rest is for what the allocator adds
    if args.tiny:
        args.models, args.batch, args.length, args.host = ["tiny"], 2, 32, "1GiB"
    return args


def main() -> int:
    args = arguments()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as memplan has it, for all
    if args.run is not None:
        print(json.dumps(measure(args)))
        return 0
    if not args.tiny and not torch.cuda.is_available():
        print("there is no CUDA device; --tiny runs the same code on the CPU")
        return 1
    device = None if args.tiny else torch.cuda.get_device_name(0)
    settings = {name: getattr(args, name) for name in ("cap", "host", "steps", "batch", "length")}
    content = {"environment": environment() | {"device": device}, "settings": settings}
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    results: dict[str, Any] = before.pop("results", {})
    if before != content:
        results = {}
    args.out.parent.mkdir(exist_ok=True)
    for model in args.models:
        for rival in args.rivals:
            words = [sys.executable, "-m", "benchmarks.gpu.offload", *sys.argv[1:], "--run", rival, "--model", model]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
            lines = done.stdout.splitlines()
            found = json.loads(lines[-1]) if done.returncode == 0 and lines else {"failed": f"exit {done.returncode}"}
            results.setdefault(model, {})[rival] = found
            told = found.get("failed") or f"{found['step_s']:.3f} s a step, {found['tokens_per_s']:.0f} tokens a second"
            print(f"{model:5s} {rival:17s} {told}", flush=True)
            args.out.write_text(json.dumps(content | {"results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Training steps on a CUDA device: memplan's and those of what else makes a step fit, in time and memory.

    python -m benchmarks.gpu.steps full-8b-4x512 plain checkpointing plan:cap [--cap GIB] [--out FILE]

Ways, each from the same weights, with fused AdamW:

- plain; checkpointing: every layer, by transformers; host-optimizer: checkpointing, gradients go to the CPU, where
  AdamW steps copies of the parameters; deepspeed: ZeRO-Offload (stage 2) with checkpointing.
- compile, compile:SHARE: torch.compile, with `activation_memory_budget`.
- plan:BUDGET, fused:BUDGET (fused kernels), offload:BUDGET (host memory), backward:BUDGET (host memory, parameters are
  updated in backward). BUDGET: "min", "cap", a share of the plain peak, or "=WAY", the peak that a way before it had.

A row, as a line of JSON: seconds a step (median, least, most; the first three left out), seconds until the step's
call has returned, bytes allocated and reserved at most in all steps, what the plan predicted of these, the losses, and
a hash of the first step's gradients. --deterministic: kernels that sum in one order; then losses and gradients of plans
equal those of plain, or of two plain runs differ. Without a CUDA device the CPU stands for it, and nothing is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.environment import environment
from benchmarks.gpu.cases import CASES, DEVICE, Batch

Row = dict[str, Any]
Step = Callable[[Batch], torch.Tensor]
_WARM_UP = 3
_RATE = 1e-5


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=_RATE, fused=True)


def _stepping(
    call: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, seen: dict[str, Any]
) -> Step:
    """The plain loop's step. The first leaves a hash of its gradients."""

    def step(batch: Batch) -> torch.Tensor:
        loss = loss_of(call(**batch))
        loss.backward()
        if "gradients" not in seen:
            seen["gradients"] = _hash([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _forget() -> None:
    """Give back what the allocator keeps, and count peaks anew."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _set_cap(cap_gib: float | None) -> None:
    if DEVICE == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if cap_gib is None else min(1.0, cap_gib * 2**30 / whole))


def _peaks() -> dict[str, int]:
    if DEVICE == "cpu":
        return {}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "requested_bytes": torch.cuda.memory_stats().get("requested_bytes.all.peak", 0),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _hash(tensors: list[torch.Tensor]) -> int:
    found = 0
    for tensor in tensors:
        found = (found * 1_000_003 + int(torch.hash_tensor(tensor).view(torch.int64))) % (1 << 61)
    return found


def _host_optimizer(model: nn.Module) -> Step:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    masters = [nn.Parameter(_pinned(p.detach().cpu().clone())) for p in model.parameters()]
    grads = [_pinned(torch.empty_like(m)) for m in masters]
    optimizer = torch.optim.AdamW(masters, lr=_RATE, fused=True)

    def step(batch: Batch) -> torch.Tensor:
        loss = loss_of(model(**batch))
        loss.backward()
        for master, grad, parameter in zip(masters, grads, model.parameters(), strict=True):
            assert parameter.grad is not None
            grad.copy_(parameter.grad, non_blocking=True)
            master.grad, parameter.grad = grad, None
        _synchronize()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master, non_blocking=True)
        return loss.detach()

    return step


def _deepspeed(model: nn.Module, batch: Batch) -> Step:
    import deepspeed

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", "29511")):  # fmt: skip
        os.environ.setdefault(name, value)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    config = {
        "train_micro_batch_size_per_gpu": batch["input_ids"].shape[0],
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "optimizer": {"type": "AdamW", "params": {"lr": _RATE}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(batch: Batch) -> torch.Tensor:
        loss = loss_of(engine(**batch))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _step(way: str, model: nn.Module, batch: Batch, budget: Any, seen: dict[str, Any]) -> Step:
    kind = way.partition(":")[0]
    if kind == "host-optimizer":
        return _host_optimizer(model)
    if kind == "deepspeed":
        return _deepspeed(model, batch)
    if kind == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    if kind in ("offload", "backward"):
        model.to("cpu")
        _forget()
    optimizer, call = _adamw(model), model
    if kind == "compile":
        torch._dynamo.reset()
        share = float(way.partition(":")[2] or 1.0)
        torch._functorch.config.activation_memory_budget = share
        call = torch.compile(model)
    elif kind not in ("plain", "checkpointing"):
        memplan.apply(
            model, batch, budget, optimizer=optimizer, device=DEVICE, kernels="fused" if kind == "fused" else "eager",
            host_budget="100GiB" if kind in ("offload", "backward") else None,
            update="backward" if kind == "backward" else "step", on_infeasible="raise",
        )  # fmt: skip
    return _stepping(call, model, optimizer, seen)


def measure(case: str, way: str, budget: Any, cap_gib: float | None, steps: int) -> Row:
    """Train, from the same weights each time."""
    _forget()
    torch.manual_seed(1)
    _set_cap(None)
    began = time.perf_counter()
    model, batch = CASES[case]()
    built = time.perf_counter()
    if way.partition(":")[0] not in ("offload", "backward"):  # else the model, which is on the device now, may not fit
        _set_cap(cap_gib)
    row: Row = {"case": case, "way": way, "cap_gib": cap_gib}
    seen: dict[str, Any] = {}
    losses, seconds, calls = [], [], []
    try:
        step = _step(way, model, batch, budget, seen)
        _set_cap(cap_gib)
        row |= {"built_s": built - began, "ready_s": time.perf_counter() - built}
        torch.manual_seed(2)
        _forget()
        row["items"] = next(iter(batch.values())).shape[0]
        row["tokens"] = batch["input_ids"].numel() if "input_ids" in batch else None
        for _ in range(_WARM_UP + steps):
            batch = {name: tensor.clone() for name, tensor in batch.items()}  # the next arrives beside the last
            _synchronize()
            start = time.perf_counter()
            losses.append(step(batch))
            calls.append(time.perf_counter() - start)
            _synchronize()
            seconds.append(time.perf_counter() - start)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        if not isinstance(error, (torch.OutOfMemoryError, memplan.BudgetInfeasible)):
            traceback.print_exc()
    row |= _peaks() | {"losses": [float(loss) for loss in losses], "gradients": seen.get("gradients")}
    if timed := seconds[_WARM_UP:]:
        row |= {"step_s": statistics.median(timed), "least_s": min(timed), "most_s": max(timed)}
        row["call_s"] = statistics.median(calls[_WARM_UP:])
    plan = memplan.plan_of(model)
    if isinstance(plan, memplan.Plan):
        row["predicted"] = {
            "step_s": plan.time_s, "peak_bytes": plan.peak_bytes, "reserved_bytes": plan.reserved_bytes,
            "host_bytes": plan.host_bytes, "floor_bytes": plan.floor_bytes, "plain_bytes": plan.baseline_peak_bytes,
            "lower_bound_s": plan.lower_bound_s, "arena": plan.steering is not None, "text": repr(plan),
        }  # fmt: skip
    return row


def _budget(way: str, cap_gib: float | None, rows: dict[str, Row]) -> Any:
    _, _, told = way.partition(":")
    if told == "min" or not told:
        return told or None
    if told == "cap":
        assert cap_gib is not None
        return int(cap_gib * 2**30)
    if told[0] == "=":
        return rows[told[1:]]["reserved_bytes"]
    if "allocated_bytes" in rows.get("plain", {}):
        return int(float(told) * rows["plain"]["allocated_bytes"])
    return float(told)


@contextlib.contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    """Nobody else who names the same file, for as long as this is open."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--cap", type=float, help="GiB that the allocator may take")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path, help="a file to append rows to")
    parser.add_argument("--lock", type=Path, help="a file: one process of those that name it runs at a time")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import transformers  # noqa: F401  before it is this process's turn

    torch.use_deterministic_algorithms(args.deterministic, warn_only=True)
    with _alone(args.lock):
        device = torch.cuda.get_device_name(0) if DEVICE == "cuda" else DEVICE
        card = {"device": device, **environment()}
        rows: dict[str, Row] = {}
        for way in args.ways:
            row = measure(args.case, way, _budget(way, args.cap, rows), args.cap, args.steps)
            row["deterministic"] = args.deterministic
            rows[way] = row
            if args.out is not None:
                with args.out.open("a") as out:
                    out.write(json.dumps(row | {"on": card}) + "\n")
            mib = {k: row.get(k, 0) / 2**20 for k in ("allocated_bytes", "reserved_bytes")}
            told = row.get("predicted", {})
            print(
                f"{args.case} {way}: {row.get('step_s', 0) * 1e3:.1f} ms (call {row.get('call_s', 0) * 1e3:.1f}), "
                f"allocated {mib['allocated_bytes']:.0f} of {told.get('peak_bytes', 0) / 2**20:.0f}, reserved "
                f"{mib['reserved_bytes']:.0f} of {(told.get('reserved_bytes') or 0) / 2**20:.0f} MiB, "
                f"predicted {told.get('step_s', 0) * 1e3:.1f} ms, ready {row.get('ready_s', 0):.1f} s, "
                f"loss {(row['losses'] or [0])[-1]:.6f} {row['gradients']} {row.get('failed', '')}",
                flush=True,
            )


if __name__ == "__main__":
    main()

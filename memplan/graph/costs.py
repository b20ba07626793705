"""Seconds and scratch bytes of every distinct op: measured on the model's device, or estimated by a roofline.

Each distinct op (kind, shapes, strides, dtypes, settings) is run once with made-up data of the right layout: parameters,
buffers and inputs are read where the op reads them, and never written; the generator is put back. Results are kept on
disk by device, thread count and torch version. Real results are compared with the trace's, so a fake kernel that is
wrong about a shape, a dtype or a size is found before anything is planned on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from memplan.errors import BudgetInfeasible, UnsupportedModel
from memplan.graph.traced import Kernel, MetaTensor, Traced
from memplan.problem import Costs
from memplan.units import format_bytes

_ENOUGH_S = 0.02  # an op is run again until this much time is spent on it, or it has run `_MOST_RUNS` times
_MOST_RUNS = 7
_MARK = "memplan op "
_FORMAT = 1  # of the cache file

StateOf = Callable[[str, str, int], torch.Tensor]  # (kind, name, position) -> the real resident tensor


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What a run of an op showed."""

    time_s: float
    scratch_bytes: int


def measure(
    traced: Traced, resident: StateOf, budget_bytes: int | None = None, progress: bool = False, use_cache: bool = True
) -> Costs:
    """Run each distinct op and time it. `resident` gives the real parameters, buffers and inputs.

    Raises BudgetInfeasible where one op with its operands alone exceeds `budget_bytes`, UnsupportedModel where a real
    result differs from the traced one.
    """
    cache = _Cache.open(traced.device) if use_cache else _Cache(None, {})
    distinct = {op.key: index for index, op in reversed(list(enumerate(traced.graph.ops)))}
    missing = [index for key, index in distinct.items() if key not in cache.facts]
    _refuse_what_does_not_fit(traced, list(distinct.values()), budget_bytes)
    if missing:
        bench = _Bench(traced, resident)
        with _generator_and_grad_mode_kept(traced.device):
            times = [_with_progress(bench.time_s, index, i, len(missing), progress) for i, index in enumerate(missing)]
            scratch = bench.scratch_bytes(missing)
        for index, time_s, scratch_bytes in zip(missing, times, scratch, strict=True):
            cache.facts[traced.graph.ops[index].key] = OpFacts(time_s, scratch_bytes)
        cache.save()
    facts = [cache.facts[op.key] for op in traced.graph.ops]
    return Costs(tuple(f.time_s for f in facts), tuple(f.scratch_bytes for f in facts), "measured")


def _refuse_what_does_not_fit(traced: Traced, ops: Sequence[int], budget_bytes: int | None) -> None:
    if budget_bytes is None:
        return
    graph = traced.graph
    for index in ops:
        op = graph.ops[index]
        touched = {v for v in (*op.inputs, *op.outputs) if not graph.values[v].resident}
        needed = graph.resident_bytes + sum(
            graph.values[v].size_bytes for v in touched if graph.values[v].reuses not in touched
        )
        if needed > budget_bytes:
            raise BudgetInfeasible(
                f"{op.kind} in {op.layer or 'the model'} needs {format_bytes(needed)} with its operands and everything "
                f"resident, more than the budget of {format_bytes(budget_bytes)}, even alone. Raise the budget, or use a "
                "smaller batch"
            )


class _Bench:
    """Runs single ops of a trace on made-up data."""

    def __init__(self, traced: Traced, resident: StateOf) -> None:
        self.traced, self.resident = traced, resident
        self._generator = torch.Generator(device=traced.device)

    def time_s(self, index: int) -> float:
        """Median seconds of one run, after a first run whose result is compared with the trace."""
        kernel = self.traced.kernels[index]
        args, kwargs = self._arguments(index)
        self._compare(index, kernel.target(*args, **kwargs), (*args, *kwargs.values()))
        times: list[float] = []
        while len(times) < 3 or (sum(times) < _ENOUGH_S and len(times) < _MOST_RUNS):
            times.append(_timed(kernel.target, args, kwargs, self.traced.device))
        return sorted(times)[len(times) // 2]

    def scratch_bytes(self, indices: Sequence[int]) -> list[int]:
        """What each op's kernel holds at its peak beyond its new outputs."""
        peaks = self._peaks_cuda(indices) if self.traced.device.type == "cuda" else self._peaks_cpu(indices)
        return [max(0, peak - self._new_bytes(index)) for index, peak in zip(indices, peaks, strict=True)]

    def _new_bytes(self, index: int) -> int:
        values = self.traced.graph.values
        return sum(values[v].size_bytes for v in self.traced.graph.ops[index].outputs if values[v].reuses is None)

    def _peaks_cpu(self, indices: Sequence[int]) -> list[int]:
        """The profiler's memory events, all ops in one session (starting one costs a second the first time)."""
        results: list[Any] = []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            for index in indices:
                target = self.traced.kernels[index].target
                args, kwargs = self._arguments(index)
                with torch.profiler.record_function(f"{_MARK}{index}"):
                    results.append(target(*args, **kwargs))  # held until the mark ends
                results.clear()
                del args, kwargs
        events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())  # type: ignore[union-attr]
        memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        windows = {e.name(): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name().startswith(_MARK)}
        times = [at for at, _ in memory]
        peaks = []
        for index in indices:
            begin, end = windows[f"{_MARK}{index}"]
            deltas = [size for _, size in memory[bisect_left(times, begin) : bisect_right(times, end)]]
            peaks.append(max(accumulate(deltas), default=0))
        return [max(0, peak) for peak in peaks]

    def _peaks_cuda(self, indices: Sequence[int]) -> list[int]:
        peaks = []
        for index in indices:
            target = self.traced.kernels[index].target
            args, kwargs = self._arguments(index)
            torch.cuda.synchronize(self.traced.device)
            before = torch.cuda.memory_allocated(self.traced.device)
            torch.cuda.reset_peak_memory_stats(self.traced.device)
            target(*args, **kwargs)
            torch.cuda.synchronize(self.traced.device)
            peaks.append(torch.cuda.max_memory_allocated(self.traced.device) - before)
        return peaks

    def _arguments(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kernel, op = self.traced.kernels[index], self.traced.graph.ops[index]
        written = {self.traced.graph.values[v].reuses for v in op.outputs} | {e.old for e in op.effects}
        storages: dict[int, torch.Tensor] = {}

        def argument(thing: Any) -> Any:
            if isinstance(thing, fx.Node):
                return self._tensor(thing, kernel.reads.get(thing) in written, storages)
            if isinstance(thing, MetaTensor):
                return thing.build()
            if isinstance(thing, (list, tuple)):
                return type(thing)(argument(t) for t in thing)
            return thing

        return tuple(argument(a) for a in kernel.args), {k: argument(v) for k, v in kernel.kwargs.items()}

    def _tensor(self, node: fx.Node, is_written: bool, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        fake = node.meta["val"]
        root = node
        while root in self.traced.parents:
            root = self.traced.parents[root]
        source = self.traced.residents.get(root)
        if source is not None and not is_written:
            if source.kind == "constant":
                real = self.traced.constants[source.name]
            else:
                real = self.resident(source.kind, source.name, source.position)
            if real.dtype == fake.dtype and real.device.type == fake.device.type:
                return real.detach().as_strided(fake.shape, fake.stride(), fake.storage_offset())
        return self._made_up(fake, storages)

    def _made_up(self, fake: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        """A tensor with the layout of `fake`; what shares a storage in the trace shares one here."""
        key = fake.untyped_storage()._cdata
        if key not in storages or storages[key].dtype != fake.dtype:
            device = self.traced.device if fake.device.type == self.traced.device.type else fake.device
            flat = torch.empty(fake.untyped_storage().nbytes() // fake.element_size(), dtype=fake.dtype, device=device)
            if fake.dtype.is_floating_point and device.type == self._generator.device.type:
                flat.uniform_(0.1, 1.0, generator=self._generator)
            else:
                flat.zero_()
            storages[key] = flat
        return storages[key].as_strided(fake.shape, fake.stride(), fake.storage_offset())

    def _compare(self, index: int, result: Any, arguments: tuple[Any, ...]) -> None:
        """The real result against the traced one. Where it is an argument, written in place, bytes are not compared."""
        op, kernel = self.traced.graph.ops[index], self.traced.kernels[index]
        own = {t.untyped_storage()._cdata for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)}
        real, traced = _facts(result), _facts(kernel.node.meta["val"])
        in_place = [storage in own for storage in _storages(result)]
        differs = len(real) != len(traced) or any(
            a[:3] != b[:3] or (a != b and not here) for a, b, here in zip(real, traced, in_place, strict=True)
        )
        if differs:
            raise UnsupportedModel(
                f"{op.kind} in {op.layer or 'the model'} gives {real} (dtype, shape, strides, bytes), where the trace has "
                f"{traced}: PyTorch's fake kernel for it is wrong, and a plan would be too"
            )


def _tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(t, torch.Tensor)]


def _storages(result: Any) -> list[int]:
    return [t.untyped_storage()._cdata for t in _tensors(result)]


def _facts(result: Any) -> list[tuple[Any, ...]]:
    """(dtype, shape, strides, bytes, number of the storage) of each tensor."""
    storages = _storages(result)
    return [
        (t.dtype, tuple(t.shape), tuple(t.stride()), t.untyped_storage().nbytes(), storages.index(storage))
        for t, storage in zip(_tensors(result), storages, strict=True)
    ]


def _timed(target: Any, args: Any, kwargs: Any, device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target(*args, **kwargs)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    target(*args, **kwargs)
    return time.perf_counter() - start


@contextlib.contextmanager
def _generator_and_grad_mode_kept(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _with_progress(measure_one: Callable[[int], float], index: int, done: int, total: int, show: bool) -> float:
    result = measure_one(index)
    if show:
        _show_progress(done + 1, total)
    return result


def _show_progress(done: int, total: int) -> None:
    width = 30
    filled = width * done // total
    end = "\n" if done == total else ""
    sys.stderr.write(f"\rmemplan: timing ops [{'#' * filled}{'.' * (width - filled)}] {done}/{total}{end}")
    sys.stderr.flush()


@dataclass(slots=True)
class _Cache:
    """Facts of ops on one device, thread count and torch version, in one JSON file."""

    path: Path | None
    facts: dict[str, OpFacts]

    @staticmethod
    def open(device: torch.device) -> _Cache:
        path = cache_dir() / f"costs-{_device_name(device)}.json"
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                return _Cache(path, {})
            facts = {str(k): OpFacts(float(t), int(s)) for k, (t, s) in content["facts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return _Cache(path, {})  # absent, or damaged: measure again
        return _Cache(path, facts)

    def save(self) -> None:
        if self.path is None:
            return
        content = {"format": _FORMAT, "facts": {k: [f.time_s, f.scratch_bytes] for k, f in sorted(self.facts.items())}}
        with contextlib.suppress(OSError):  # a read-only home is no reason to fail
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(content, file)
            os.replace(file.name, self.path)


def cache_dir() -> Path:
    """`MEMPLAN_CACHE_DIR`, or memplan's folder in the user's cache."""
    given = os.environ.get("MEMPLAN_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memplan"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{platform.machine()}-{platform.processor() or 'cpu'}-{torch.get_num_threads()}threads"
    name = f"{device.type}-{hardware}-torch{torch.__version__}"
    return "".join(c if c.isalnum() or c in "-." else "_" for c in name)


# -- estimates --------------------------------------------------------------------------------------------------------

_ESTIMATED_FLOPS_PER_S = 1e11
_ESTIMATED_BYTES_PER_S = 2e10
_ESTIMATED_LAUNCH_S = 4e-6


def estimate(traced: Traced) -> Costs:
    """A roofline: the larger of arithmetic and traffic, for tests and dry runs. Nothing is run; scratch counts as 0."""
    times = []
    for op, kernel in zip(traced.graph.ops, traced.kernels, strict=True):
        values = [traced.graph.values[v] for v in (*op.inputs, *op.outputs)]
        traffic = sum(v.size_bytes for v in values)
        times.append(
            _ESTIMATED_LAUNCH_S + max(_flops(kernel) / _ESTIMATED_FLOPS_PER_S, traffic / _ESTIMATED_BYTES_PER_S)
        )
    return Costs(tuple(times), (0,) * len(times), "estimated")


def _flops(kernel: Kernel) -> float:
    """Multiply-adds count twice. PyTorch's own table knows matrix products, convolutions and attention."""
    count = flop_registry.get(getattr(kernel.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = fx.map_arg((kernel.args, kernel.kwargs), lambda n: n.meta["val"])
    return float(count(*args, **kwargs, out_val=kernel.node.meta["val"]))

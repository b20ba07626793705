"""Runs single ops of a trace on made-up data, times them, and compares their results with the traced ones.

Parameters, buffers and inputs are read where the op reads them, and never written; the generator is put back.

Some ops fail on made-up data: pivots start at 1, lengths add up, a matrix has an inverse. Such an op runs once more on
what forward computes from parameters, buffers and inputs; incoming gradients stay made up. If the op fails again, its
time is estimated, and its result is compared in the first run of the program.

Ops are timed with cold caches, because most of what an op of a step reads was made long before. An op that was
recomputed a moment ago leaves its results in caches, which these times do not know of. The fastest run counts, because
page faults come in bursts and slow down others.

Runs are repeated until two of them agree. Where none do, the machine is busy, and a later process measures again.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.analysis.traced import MetaTensor, Traced
from memplan.capture.ops.dataflow import Dataflow, computed, written_nodes
from memplan.capture.ops.layout import same_bits, storage_key, strided_parts, strides_that_matter, tensors_of
from memplan.capture.ops.op_facts import is_of_pytorch
from memplan.capture.ops.real_results import Facts, ResultFacts, call_of, can_be_noted, facts_of
from memplan.capture.ops.ways import OtherResults, Refusal, way_of
from memplan.capture.trace.generators import python_generators_kept
from memplan.costs.known_costs import agree, estimate
from memplan.logs import log, show_count
from memplan.problem.data import Blocks
from memplan.torch_private import pytree

_ENOUGH_S = 0.03  # an op is run again until this much time is spent on it and runs agree, or it has run often enough
_FEWEST_RUNS, _MOST_RUNS = 2, 5
_LONG_S = 0.1  # the first run of an op that takes longer is one of those that count
_CPU_CACHE_BYTES = 32 << 20  # the last level that a core finds on most servers
_LAUNCH_CYCLES = (100_000, 400_000, 1_600_000)  # of a GPU: longer than most CPUs take to launch an op, and slow ones
_WARM_UP_CYCLES = 20_000_000  # until its clock is up
_MARK = "memplan op "
_VARIOUS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# (kind, name, position) -> the real resident tensor, None for one that is not there as a whole
StateOf = Callable[[str, str, int], torch.Tensor | None]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_T = TypeVar("_T")


class Bench:
    """Runs single ops of a trace on made-up data.

    - failed: ops that could not be run, by index.
    - unsteady: ops that gave other bits in a second run. Only ops that are not PyTorch's own are looked at.
    """

    def __init__(self, traced: Traced, resident: StateOf, budget_bytes: int | None = None) -> None:
        self.traced, self.resident, self.budget_bytes = traced, resident, budget_bytes
        on_cuda = traced.device.type == "cuda"
        most_bytes = torch.cuda.get_device_properties(traced.device).L2_cache_size if on_cuda else _CPU_CACHE_BYTES
        # To be written so that caches hold nothing of an op's operands. A small step may fit in them whole.
        self.cache_bytes = min(int(most_bytes), sum(v.size_bytes for v in traced.graph.values if v.reuses is None))
        self._read = {v for op in traced.graph.ops for v in op.inputs}
        self._pool: list[torch.Tensor] = []  # arguments of the latest op
        self._spare: list[torch.Tensor] = []  # of those, what the next op has not taken yet
        self._other: dict[str, Facts] = {}  # results that are not those of the trace
        self._told = ""  # what is said of the first of them
        self._not_made_up = {i for i, k in enumerate(traced.kernels) if private.has_shape_of_data(k.node.target)}
        self.failed: set[int] = set()
        self.unsteady: set[int] = set()

    def times_s(self, index: int, first_s: float, scratch_bytes: int) -> list[float]:
        """Seconds of some runs with cold caches. first_s: of the first run, which counts for ops that take long."""
        if index in self.failed:
            return []
        args, kwargs = self._arguments(index)
        alone_bytes, room_bytes = self.traced.graph.op_bytes(index), self.cache_bytes
        if self.budget_bytes is not None:
            left_bytes = self.budget_bytes - self.traced.graph.resident_bytes - alone_bytes - scratch_bytes
            room_bytes = max(0, min(room_bytes, left_bytes))
        if alone_bytes > self.cache_bytes:  # the op itself reads and writes more than caches hold
            room_bytes = 0
        something_else = torch.empty(room_bytes, dtype=torch.uint8, device=self.traced.device)
        times = [first_s] if first_s > _LONG_S else []
        while len(times) < _FEWEST_RUNS or (len(times) < _MOST_RUNS and (sum(times) < _ENOUGH_S or not agree(times))):
            something_else.fill_(1)
            try:
                times.append(_timed(self.traced.kernels[index].target, *_seen_anew(args, kwargs), self.traced.device))
            except Exception as error:  # an op in place may fail on what it has left
                if private.is_out_of_memory(error):
                    raise
                return times or [first_s or estimate(self.traced).time_s[index]]
        return times

    def first_runs(self, indices: Sequence[int]) -> tuple[list[int], list[float], list[Blocks]]:
        """Run each op once, and compare its result with the traced one.

        Gives what each kernel holds at its peak beyond its new outputs, the seconds, which count for long ops, and what
        it asks for, as `Costs` says.
        """
        run = self._first_runs_cuda if self.traced.device.type == "cuda" else self._first_runs_cpu
        peaks, times, requests = run(indices)
        if self._other:
            raise Refusal(self._told, OtherResults(self._other))
        self.unsteady = {i for i in indices if self._tried(i, self._gives_other_bits, False)}
        values, ops = self.traced.graph.values, self.traced.graph.ops
        new_bytes = [sum(values[v].size_bytes for v in ops[i].outputs if values[v].reuses is None) for i in indices]
        return [max(0, peak - new) for new, peak in zip(new_bytes, peaks, strict=True)], times, requests

    def _gives_other_bits(self, index: int) -> bool:
        """Whether an op of which nobody knows how it computes gives other bits in a second run on the same values.

        Sums by atomics round in the order of threads. Equal numbers would hide that, so the op gets various ones.
        """
        op, target = self.traced.graph.ops[index], self.traced.kernels[index].target
        in_place = op.effects or any(self.traced.graph.values[v].reuses is not None for v in op.outputs)
        if index in self.failed or in_place or not op.recomputable or is_of_pytorch(target):
            return False
        args, kwargs = self._arguments(index)
        for tensor in self._pool:
            if tensor.dtype in _VARIOUS:
                tensor.uniform_(0.25, 0.75)
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            seen = _seen_anew(args, kwargs)
            found.append([p for t in tensors_of(target(*seen[0], **seen[1])) for p in strided_parts(t)])
        return not all(same_bits(*pair) for pair in zip(*found, strict=True))

    def _first_run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any]:
        """Run an op, and compare its result with the traced one. Gives the seconds and the result.

        Of a result that is an argument, written in place, bytes are not compared. Where no op reads it, as with most
        gradients of parameters, strides of dimensions of one element are not compared, because nothing depends on them.
        """
        seen = _seen_anew(args, kwargs)
        start = time.perf_counter()
        with torch.profiler.record_function(f"{_MARK}{index}"):
            result = self.traced.kernels[index].target(*seen[0], **seen[1])
        time_s = time.perf_counter() - start
        op, kernel = self.traced.graph.ops[index], self.traced.kernels[index]
        own = {storage_key(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        last = [m.index for m in kernel.made if m.index is not None and m.value not in self._read]
        real, traced = facts_of(result), facts_of(kernel.node.meta.get("val"))
        results = result if isinstance(result, (list, tuple)) else [result]
        in_place = [isinstance(t, torch.Tensor) and storage_key(t) in own for t in results]
        if len(real) == len(traced) and all(
            _alike(a, b, here, place in last)
            for place, (a, b, here) in enumerate(zip(real, traced, in_place, strict=True))
        ):
            return time_s, result
        message = (
            f"{op.kind} in {op.layer or 'the model'} gives {_shown(real)} (dtype, shape, strides, bytes), where the "
            f"trace has {_shown(traced)}: PyTorch's fake kernel for it is wrong, and a plan would be too"
        )
        own_op = not isinstance(kernel.node.target, private.OpOverload) or kernel.target is not kernel.node.target
        if own_op or any(in_place) or not can_be_noted(traced, real):
            raise Refusal(message, OtherResults())
        self._other[call_of(kernel.node)] = real
        self._told = self._told or message
        return time_s, result

    def _tried(self, index: int, run: Callable[[int], _T], otherwise: _T) -> _T:
        """What a run of an op gives, on made-up data or else on computed data; `otherwise` where it fails on both."""
        try:
            return run(index)
        except Exception as error:
            again = index in self._not_made_up
            if isinstance(way_of(error), OtherResults) or (private.is_out_of_memory(error) and not again):
                raise
            if again:
                op, said = self.traced.graph.ops[index], str(error).partition("\n")[0][:200]
                log.info("%s in %s is estimated, for it can't be timed: %s", op.kind, op.layer or "the model", said)
                self.failed.add(index)
                return otherwise
        self._not_made_up.add(index)
        return self._tried(index, run, otherwise)

    def _first_runs_cpu(self, indices: Sequence[int]) -> tuple[list[int], list[float], list[Blocks]]:
        """Peaks from the profiler's memory events, all ops in one session."""
        times = []
        with private.MemoryRecord() as record:
            for done, index in enumerate(indices):
                times.append(self._tried(index, lambda i: self._first_run(i, *self._arguments(i))[0], 0.0))
                show_count("timing ops", done + 1, len(indices))
        memory = [(e.start_ns(), e.nbytes()) for e in record.events if e.name() == "[memory]"]
        marks = {
            e.name(): (e.start_ns(), e.start_ns() + e.duration_ns())
            for e in record.events if e.name().startswith(_MARK)
        }  # fmt: skip
        starts = [at for at, _ in memory]
        peaks = []
        for index in indices:
            begin, end = marks.get(f"{_MARK}{index}", (0, 0))  # none where no arguments could be made
            changes = [size for _, size in memory[bisect_left(starts, begin) : bisect_right(starts, end)]]
            peaks.append(max(accumulate(changes), default=0))
        return peaks, times, [()] * len(indices)

    def _first_runs_cuda(self, indices: Sequence[int]) -> tuple[list[int], list[float], list[Blocks]]:
        """Peaks and requests from the allocator, in the second run of each op.

        In the first one, libraries take workspaces, which they keep, and look for the fastest algorithm.
        """
        found, device = [], self.traced.device
        nothing: tuple[int, Blocks] = (0, ())

        def peak_and_requests(index: int) -> tuple[int, Blocks]:
            args, kwargs = self._arguments(index)
            self._first_run(index, args, kwargs)
            torch.cuda.synchronize(device)
            before = private.requested_bytes(device)[0]
            torch.cuda.reset_peak_memory_stats(device)
            with private.BlockRecord(device) as record:
                _, result = self._first_run(index, args, kwargs)
                torch.cuda.synchronize(device)
            return private.requested_bytes(device)[1] - before, self._named(index, record.events, result)

        for done, index in enumerate(indices):
            found.append(self._tried(index, peak_and_requests, nothing))
            show_count("timing ops", done + 1, len(indices))
        peaks, requests = [peak for peak, _ in found], [blocks for _, blocks in found]
        return peaks, [0.0] * len(indices), requests  # launches return before kernels end

    def _named(self, index: int, events: Iterable[tuple[int, int]], result: Any) -> Blocks:
        """What an op asks for. () where an output is not among that.

        events: addresses and bytes of blocks, in order.
        """
        results = result if isinstance(result, (list, tuple)) else [result]
        values = self.traced.graph.values
        outputs = [v for v in self.traced.graph.ops[index].outputs if values[v].reuses is None]
        made = {made.value: results[made.index or 0] for made in self.traced.kernels[index].made}
        addresses = {made[v].untyped_storage().data_ptr(): i for i, v in enumerate(outputs) if v in made}
        live: dict[int, int] = {}
        blocks: list[tuple[int, int]] = []
        for address, size_bytes in events:
            if size_bytes:
                live[address] = -1 - len(blocks)
                blocks.append((live[address], size_bytes))
            elif address in live:
                blocks.append((live.pop(address), 0))
        names = {name: addresses[address] for address, name in live.items() if address in addresses}
        if sorted(names.values()) != [i for i, v in enumerate(outputs) if values[v].size_bytes]:
            return ()
        return tuple((names.get(name, name), size_bytes) for name, size_bytes in blocks)

    def _arguments(self, index: int) -> _Arguments:
        kernel, op = self.traced.kernels[index], self.traced.graph.ops[index]
        written = self.traced.graph.overwritten(op)
        wanted = {_count_and_dtype(n.meta["val"]) for n in kernel.reads}
        self._spare, self._pool = [t for t in self._pool if (t.numel(), t.dtype) in wanted], []
        storages: dict[int, torch.Tensor] = {}
        real = {node: self._tensor(node, value in written, storages) for node, value in kernel.reads.items()}
        self._spare = []
        if index in self._not_made_up:
            # What parameters, buffers, inputs and what forward computes from them give.
            nodes, sources = list(kernel.node.graph.nodes), dict[int, torch.Tensor]()
            # Of forward's nodes some are fused, and not in here.
            forward = {k.node for k in self.traced.kernels[: self.traced.graph.boundary]}
            last = max((i for i, node in enumerate(nodes) if node in forward), default=-1)
            known = set(nodes[: last + 1])
            for node in nodes:  # backward looks at what forward has computed
                if self.traced.parents.get(node) in known and not written_nodes(node):
                    known.add(node)
            known.add(kernel.node)
            behind = Dataflow(kernel.node.graph).behind(kernel.node, known)[:-1]
            exchanged = {k.node for k, o in zip(self.traced.kernels, self.traced.graph.ops) if o.is_collective}
            if exchanged.intersection(behind):
                raise RuntimeError("what other ranks give can't be had without them")
            read = [node for node in kernel.reads if node in behind]
            found = computed(behind, read, lambda source: self._tensor(source, False, sources))
            real |= {node: t.clone() if kernel.reads[node] in written else t for node, t in found.items()}

        def given(thing: Any) -> Any:
            if isinstance(thing, fx.Node):
                return real[thing]
            return thing.build() if isinstance(thing, MetaTensor) else thing

        arguments: _Arguments = pytree.tree_map(given, (kernel.args, kernel.kwargs))
        return arguments

    def _tensor(self, node: fx.Node, is_written: bool, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        """The real tensor of a node, or a made-up one. Tensors that share a storage in the trace share one here.

        Memory of the op before is used again where the size is the same: touching new memory costs more than most ops.
        """
        fake = node.meta["val"]
        root = node
        while root in self.traced.parents:
            root = self.traced.parents[root]
        source = self.traced.residents.get(root)
        if source is not None and not is_written:
            if source.kind == "constant":
                real: torch.Tensor | None = self.traced.constants[source.name]
            else:
                real = self.resident(source.kind, source.name, source.position)
            if real is not None and real.dtype == fake.dtype and real.device.type == fake.device.type:
                return private.plain(real).as_strided(fake.shape, fake.stride(), fake.storage_offset())
        key = storage_key(fake)
        if key not in storages or storages[key].dtype != fake.dtype:
            device = self.traced.device if fake.device.type == self.traced.device.type else fake.device
            count, dtype = _count_and_dtype(fake)
            fitting = [i for i, t in enumerate(self._spare) if (t.numel(), t.dtype, t.device) == (count, dtype, device)]
            flat = self._spare.pop(fitting[0]) if fitting else torch.empty(count, dtype=dtype, device=device)
            # Indices of 0 are valid everywhere. A mask that takes nothing would hide what the op holds for the rest.
            flat.fill_(0.5 if fake.dtype.is_floating_point else fake.dtype is torch.bool)
            storages[key] = flat
            self._pool.append(flat)
        return storages[key].as_strided(fake.shape, fake.stride(), fake.storage_offset())


def _alike(real: ResultFacts | None, traced: ResultFacts | None, in_place: bool, is_last: bool) -> bool:
    """Whether a result is what it was traced to be, as far as anything depends on it."""
    if real is None or traced is None:
        return traced is None  # nobody reads it then
    if traced.device_type == "meta":  # of an op of memplan's own
        traced = traced._replace(device_type=real.device_type)
    if in_place:
        traced = traced._replace(size_bytes=real.size_bytes, storage=real.storage)
    if is_last and strides_that_matter(real.shape, real.stride) == strides_that_matter(traced.shape, traced.stride):
        traced = traced._replace(stride=real.stride)
    return real == traced


def _shown(facts: Facts) -> list[tuple[Any, ...]]:
    return [tuple(t[:4]) for t in facts if t is not None]


def _seen_anew(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """The arguments as tensor objects of their own: ops such as `squeeze_` change those that they are given."""
    seen: _Arguments = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    return seen


def _count_and_dtype(fake: torch.Tensor) -> tuple[int, torch.dtype]:
    """The number of elements and the dtype with which to make a tensor's storage."""
    return fake.untyped_storage().nbytes() // fake.element_size(), fake.dtype


def _timed(target: Any, args: Any, kwargs: Any, device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for cycles in _LAUNCH_CYCLES:
            private.keep_busy(cycles)  # or the time to launch the op would count
            begin.record()
            target(*args, **kwargs)
            end.record()
            waited = begin.query()  # the device has, for the CPU
            end.synchronize()
            if not waited:
                break
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    target(*args, **kwargs)
    return time.perf_counter() - start


@contextlib.contextmanager
def generator_and_grad_mode_kept(device: torch.device) -> Iterator[None]:
    on_cuda = device.type == "cuda"
    with (
        torch.cuda.device(device) if on_cuda else contextlib.nullcontext(),  # events are those of the current device
        torch.random.fork_rng(devices=[device] if on_cuda else []),
        python_generators_kept(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        if on_cuda:
            private.keep_busy(_WARM_UP_CYCLES)
        yield

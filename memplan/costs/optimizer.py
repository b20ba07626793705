"""What a device holds in addition to a step: an optimizer's memory, and workspaces of CUDA's libraries.

An optimizer's step is run on fake tensors, which takes no memory. cuBLAS has a workspace for each thread and stream:
the forward pass runs on the thread that calls the model, the backward pass on autograd's own thread, so there are two.
They come from PyTorch's allocator when a thread first multiplies matrices, and stay: 32 MiB each on a Hopper. PyTorch
2.11 gives cuBLASLt, which multiplies where a bias is added, 1 MiB more. From PyTorch 2.15 on they are scratch of each
product instead, which measured costs have.
"""

from __future__ import annotations

import copy
import functools
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.attributes.kept_memory import written_by
from memplan.capture.ops import op_facts
from memplan.capture.ops.layout import allocated_bytes, storage_key
from memplan.errors import UnsupportedModel
from memplan.problem.data import Blocks, Roofline

_EXAMPLE = (2048, 2048)


class OptimizerMemory(NamedTuple):
    """What an optimizer takes on a device.

    - state_bytes: bytes of its state once it has stepped.
    - step_bytes: bytes that a step allocates beyond that.
    - requests: of its first step, as in `Requests.update`.
    """

    state_bytes: int = 0
    step_bytes: int = 0
    requests: Blocks = ()


def optimizer_memory(
    optimizer: torch.optim.Optimizer, device: torch.device, without: Collection[torch.Tensor] = ()
) -> OptimizerMemory:
    """What an optimizer takes with parameters on `device`.

    without: parameters that are left out, because they live elsewhere.

    Raises UnsupportedModel for an optimizer whose step needs more than gradients (LBFGS).
    """
    with private.FakeTensorMode(allow_non_fake_inputs=True), private.stepped_as_real(_parameters(optimizer)):
        memo = _fakes(optimizer, device)
        twin = _twin(optimizer, memo)
        elsewhere = {id(memo[id(p)]) for p in without if id(p) in memo}
        for group in twin.param_groups:
            here = [p for p in group["params"] if id(p) not in elsewhere]
            if len(here) < len(group["params"]) and group.get("foreach", True) is None:
                group["foreach"] = False  # parameters of several devices are stepped one by one
            group["params"] = here
        twin.state = defaultdict(dict, {p: s for p, s in twin.state.items() if id(p) not in elsewhere})
        there = tuple((-1 - i, n) for i, n in enumerate(_state_sizes(twin, device)))  # if it has stepped before
        before_bytes = sum(_state_sizes(twin, device))  # wherever it is now: it moves with its parameters before a step
        meter = _step(twin, device)
        state_bytes = sum(_state_sizes(twin, device))
        step_bytes = max(0, meter.peak_bytes - (state_bytes - before_bytes))
        return OptimizerMemory(state_bytes, step_bytes, (*there, *meter.requests))


def update_needs(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[torch.Tensor, int]:
    """Bytes that updating each parameter by itself allocates beyond its state, with parameters on `device`.

    Raises UnsupportedModel as `optimizer_memory` does.
    """
    found: dict[torch.Tensor, int] = {}
    known: dict[Any, int] = {}
    with private.FakeTensorMode(allow_non_fake_inputs=True), private.stepped_as_real(_parameters(optimizer)):
        twin = _twin(optimizer, _fakes(optimizer, device))
        for index, (group, fakes) in enumerate(zip(optimizer.param_groups, twin.param_groups, strict=True)):
            for parameter, fake in zip(group["params"], fakes["params"], strict=True):
                if not parameter.requires_grad:
                    continue
                key = (index, fake.shape, fake.stride(), fake.dtype, tuple(twin.state.get(fake, ())))
                if key not in known:
                    alone = _copied(twin)
                    alone.param_groups = [{**fakes, "params": [fake]}]
                    alone.state = defaultdict(dict, {fake: twin.state[fake]} if fake in twin.state else {})
                    before_bytes = sum(_state_sizes(alone, device))
                    peak_bytes = _step(alone, device).peak_bytes
                    known[key] = max(0, peak_bytes - (sum(_state_sizes(alone, device)) - before_bytes))
                found[parameter] = known[key]
    return found


def host_update_s_per_byte(optimizer: torch.optim.Optimizer, measured: bool) -> float:
    """Seconds that the CPU takes to update parameters, for each byte of their gradients. 0 where there are none.

    measured: time an update by an optimizer of torch.optim, the best of three. Else it is what its ops read and write,
    at the speed of a laptop's memory. Either is of the settings and the dtype of the largest parameter.

    Raises UnsupportedModel for an optimizer that can't step parameters on the CPU.
    """
    found = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not found:
        return 0.0
    group, largest = max(found, key=lambda pair: pair[1].numel())
    size_bytes: int = _EXAMPLE[0] * _EXAMPLE[1] * largest.dtype.itemsize
    cpu = torch.device("cpu")
    if measured and type(optimizer).step.__module__.startswith("torch.optim."):
        return _timed_s(_example(optimizer, group, largest.dtype)) / size_bytes
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        twin = _example(optimizer, group, largest.dtype)
        _step(twin, cpu)  # makes the state
        if group.get("fused"):  # one op, which by its schema writes to gradients too
            traffic_bytes = 3 * size_bytes + 2 * sum(_state_sizes(twin, cpu))
        else:
            traffic_bytes = _step(twin, cpu).traffic_bytes
    return traffic_bytes / size_bytes / Roofline().bytes_per_s


def _example(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype) -> torch.optim.Optimizer:
    """A copy of the optimizer that updates 4 million numbers of this dtype, with the settings of a group."""
    parameter = torch.nn.Parameter(torch.zeros(_EXAMPLE, dtype=dtype, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    twin = _copied(optimizer)
    twin.param_groups = [{**group, "params": [parameter]}]
    twin.state = defaultdict(dict)
    return twin


def _timed_s(twin: torch.optim.Optimizer) -> float:
    best_s = float("inf")
    try:
        for _ in range(4):  # the first makes the state
            start_s = time.perf_counter()
            private.step_without_hooks(twin)
            best_s = min(best_s, time.perf_counter() - start_s)
    except Exception as error:
        raise UnsupportedModel(
            f"{type(twin).__name__}.step() fails for parameters that live on the host ({error}). Change its "
            "settings, or leave host_budget= out"
        ) from error
    return best_s


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _fakes(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[int, Any]:
    """Fake tensors for parameters, with gradients, and for state, by the id of what they stand for."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    # A learning rate may be a tensor.
    states += [t for group in optimizer.param_groups for t in group.values() if isinstance(t, torch.Tensor)]
    # A count of steps on the CPU is read as a number. A fake tensor has one only where it is made from one.
    counts = [t for t in states if not t.dim() and t.device.type == "cpu"]
    memo: dict[int, Any] = {}
    for t in counts:
        with private.outside_of_tracing():
            number = t.item()
        memo[id(t)] = torch.tensor(number, dtype=t.dtype, device="cpu")
    for parameter in _parameters(optimizer):
        here = private.part_here(parameter)
        there = torch.empty_strided(here.shape, here.stride(), dtype=here.dtype, device=device)
        fake = torch.nn.Parameter(there, parameter.requires_grad)
        fake.grad = torch.empty_like(fake) if parameter.requires_grad else None
        memo[id(parameter)] = fake
    for t in states:
        if id(t) not in memo:  # it will be where its parameter is
            here = private.part_here(t)
            memo[id(t)] = torch.empty_strided(here.shape, here.stride(), dtype=here.dtype, device=device)
    return memo


def _step(twin: torch.optim.Optimizer, device: torch.device) -> _AllocationMeter:
    meter = _AllocationMeter(device)
    try:
        with meter, torch.no_grad():
            private.step_without_hooks(twin)
    except Exception as error:
        raise UnsupportedModel(
            f"the memory of {type(twin).__name__}.step() can't be foreseen ({error}). Leave optimizer= out, "
            "and allow for its state in the budget"
        ) from error
    return meter


def _twin(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """An optimizer over fake parameters with the same settings and state."""
    twin = _copied(optimizer)
    twin.param_groups = copy.deepcopy(optimizer.param_groups, memo)
    twin.state = copy.deepcopy(optimizer.state, memo)
    return twin


def _copied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy with all attributes, to whose containers a step may add.

    Optimizers' own copies leave out whether they have warned of things.
    """
    twin = copy.copy(optimizer)
    own = {**vars(optimizer), **vars(twin)}
    vars(twin).update({n: copy.copy(v) if isinstance(v, (list, dict, set, deque)) else v for n, v in own.items()})
    return twin


def _state_sizes(optimizer: torch.optim.Optimizer, device: torch.device) -> list[int]:
    tensors = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    storages = {storage_key(t): t for t in tensors if t.device.type == device.type}
    return [allocated_bytes(t.untyped_storage().nbytes(), device) for t in storages.values()]


class _AllocationMeter(private.TorchDispatchMode):
    """Counts bytes of new storages.

    - peak_bytes: the most that were alive at once.
    - traffic_bytes: what ops read and wrote.
    - requests: what was allocated and freed, in order, as in `Requests.update`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it without annotations
        self._device = device
        self._known: dict[int, tuple[int, int]] = {}  # (name among requests, bytes)
        self.requests: list[tuple[int, int]] = []
        self._live_bytes = self.peak_bytes = self.traffic_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = _tensors((args, kwargs))
        given = {storage_key(t) for t in inputs}
        try:
            result = func(*args, **(kwargs or {}))
        except private.DATA_DEPENDENT_ERRORS:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1  # a number such as a norm (Adafactor) says by how much to update, not what that takes
        if not op_facts.is_view(func):
            made = [t for t in _tensors(result) if storage_key(t) not in given]
            self.traffic_bytes += sum(t.nbytes for t in (*inputs, *made, *written_by(func, args, kwargs or {})))
        for tensor in _tensors(result):
            if tensor.device.type == self._device.type:
                key, storage = storage_key(tensor), tensor.untyped_storage()
                if key not in given and key not in self._known:
                    size = allocated_bytes(storage.nbytes(), self._device)
                    self._known[key] = name, _ = len(self.requests), size
                    if size:
                        self.requests.append((name, size))
                    self._live_bytes += size
                    self.peak_bytes = max(self.peak_bytes, self._live_bytes)
                    weakref.finalize(storage, self._remove, key)
        return result

    def _remove(self, key: int) -> None:
        name, size = self._known.pop(key, (0, 0))
        if size:
            self.requests.append((name, 0))
        self._live_bytes -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in private.pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


_THREADS = 2
_CONVOLVE = frozenset(f"aten.{name}.default" for name in ("convolution", "convolution_backward"))
_MULTIPLY = frozenset(
    f"aten.{name}.default"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "dot", "vdot", "_addmm_activation",
        "_scaled_mm", "_int_mm", "_grouped_mm",
    )
)  # fmt: skip


def multiplies_matrices(traced: Traced) -> bool:
    """Whether a step calls cuBLAS, on a CUDA device."""
    kinds = _MULTIPLY if torch.backends.cudnn.enabled else _MULTIPLY | _CONVOLVE
    return any(op.kind in kinds for op in traced.graph.ops)


def workspaces(traced: Traced, measured: bool, capability: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Bytes of each workspace that libraries hold on the device once the step has run.

    - measured: costs have the scratch of ops.
    - capability: of the CUDA device that a step on the CPU stands for.
    """
    if capability is not None:
        threads = _THREADS if torch.__version__ < "2.15" else 1
        return (private.blas_workspace_bytes(capability),) * threads if multiplies_matrices(traced) else ()
    on_cuda = traced.device.type == "cuda"
    if not (on_cuda and multiplies_matrices(traced)) or (measured and not _kept(traced.device)):
        return ()
    return _most_workspaces(traced.device)


def most_library_bytes(device: torch.device) -> int:
    """Bytes that libraries may hold while any step runs."""
    return sum(_most_workspaces(device)) if device.type == "cuda" else 0


def _most_workspaces(device: torch.device) -> tuple[int, ...]:
    if kept := _kept(device) * _THREADS:
        return kept
    with torch.cuda.device(device):
        return (allocated_bytes(private.blas_workspace_bytes(), device),)


@functools.cache
def _kept(device: torch.device) -> tuple[int, ...]:
    """Bytes of the workspaces that a thread keeps: of cuBLAS, then of cuBLASLt where it has its own."""
    with private.outside_of_tracing():
        return tuple(allocated_bytes(size, device) for size in private.kept_by_blas(device) if size)


def make_workspaces(device: torch.device) -> None:
    """Make the workspaces now, on this thread and on autograd's, so that they do not count as growth of a step."""

    def multiply(_: torch.Tensor | None = None) -> None:
        torch.mm(square, square)
        torch.addmm(square[0], square, square)

    with private.outside_of_tracing(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        square = torch.zeros(8, 8, device=device)
        multiply()
        x = torch.zeros(1, device=device, requires_grad=True)
        x.register_hook(multiply)
        torch.autograd.grad(x.sum(), x)

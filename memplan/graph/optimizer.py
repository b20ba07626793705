"""What an optimizer holds and needs: its step is run on fake tensors, at no memory."""

from __future__ import annotations

import copy
import time
import weakref
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch

from memplan.errors import UnsupportedModel
from memplan.graph import private_api as private
from memplan.graph.layout import allocated_bytes, storage_key
from memplan.problem import Roofline


def optimizer_needs(
    optimizer: torch.optim.Optimizer, device: torch.device, without: Collection[torch.Tensor] = ()
) -> tuple[int, int]:
    """(bytes of its state once it has stepped, bytes that a step allocates beyond that), with parameters on `device`.

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
        peak_bytes = _step(twin, device)
        state_bytes = _state_bytes(twin, device)
        left_out = {id(p) for p in without}
        grown = state_bytes - _state_bytes(optimizer, device, left_out)
        return state_bytes, max(0, peak_bytes - grown)


def update_needs(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[torch.Tensor, int]:
    """Bytes that updating each parameter by itself allocates beyond its state, with parameters on `device`.

    Raises UnsupportedModel as `optimizer_needs` does.
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
                    before_bytes = _state_bytes(alone, device)
                    peak_bytes = _step(alone, device)
                    known[key] = max(0, peak_bytes - (_state_bytes(alone, device) - before_bytes))
                found[parameter] = known[key]
    return found


def host_update_s_per_byte(optimizer: torch.optim.Optimizer, measured: bool) -> float:
    """Seconds that the CPU takes to update parameters, for each byte of their gradients.

    measured: time an update of 4 million numbers by an optimizer of torch.optim, the better of three; else it is what
    reading and writing parameters and state takes at the speed of a laptop's memory. 0 where nothing is to be updated.
    """
    found = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not found:
        return 0.0
    if not measured or not type(optimizer).step.__module__.startswith("torch.optim."):
        state_bytes, _ = optimizer_needs(optimizer, torch.device("cpu"))
        gradient_bytes = sum(p.numel() * p.element_size() for _, p in found)
        return float((3 + 2 * state_bytes / gradient_bytes) / Roofline().bytes_per_s)
    group, largest = max(found, key=lambda pair: pair[1].numel())
    parameter = torch.nn.Parameter(torch.zeros(2048, 2048, dtype=largest.dtype))
    twin = _copied(optimizer)
    twin.param_groups = [{**group, "params": [parameter]}]
    twin.state = defaultdict(dict)
    best_s = float("inf")
    for _ in range(4):  # the first makes the state
        parameter.grad = torch.ones_like(parameter)
        start_s = time.perf_counter()
        type(twin).step(twin)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s / (parameter.numel() * parameter.element_size())


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
        memo[id(t)] = torch.tensor(number, dtype=t.dtype)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
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


def _step(twin: torch.optim.Optimizer, device: torch.device) -> int:
    """Step a twin; the most bytes that it allocated."""
    meter = _AllocationMeter(device)
    try:
        with meter, torch.no_grad():
            type(twin).step(twin)  # not twin.step: schedulers replace that on the instance
    except Exception as error:
        raise UnsupportedModel(
            f"the memory of {type(twin).__name__}.step() can't be foreseen ({error}). Leave optimizer= out, "
            "and allow for its state in the budget"
        ) from error
    return meter.peak_bytes


def _twin(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """An optimizer over fake parameters with the same settings and state."""
    twin = _copied(optimizer)
    twin.param_groups = copy.deepcopy(optimizer.param_groups, memo)
    twin.state = copy.deepcopy(optimizer.state, memo)
    return twin


def _copied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy with all attributes; what optimizers copy of themselves leaves out whether they have warned of things."""
    twin = copy.copy(optimizer)
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name not in vars(twin)})
    return twin


def _state_bytes(optimizer: torch.optim.Optimizer, device: torch.device, left_out: Collection[int] = ()) -> int:
    states = [s for p, s in optimizer.state.items() if id(p) not in left_out]
    tensors = [t for s in states for t in s.values() if isinstance(t, torch.Tensor)]
    storages = {storage_key(t): t for t in tensors if t.device.type == device.type}
    return sum(allocated_bytes(t.untyped_storage().nbytes(), device) for t in storages.values())


class _AllocationMeter(private.TorchDispatchMode):
    """Bytes of new storages that are alive, and the most there were."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it without annotations
        self._device = device
        self._known: dict[int, int] = {}
        self._live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = torch.utils._pytree.tree_leaves((args, kwargs))
        given = {storage_key(t) for t in inputs if isinstance(t, torch.Tensor)}
        try:
            result = func(*args, **(kwargs or {}))
        except private.DATA_DEPENDENT_ERRORS:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1  # a number such as a norm (Adafactor) says by how much to update, not what that takes
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
                if storage_key(tensor) not in given and storage_key(tensor) not in self._known:
                    self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        size = allocated_bytes(storage.nbytes(), self._device)
        self._known[key] = size
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self._live_bytes -= self._known.pop(key, 0)

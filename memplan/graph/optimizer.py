"""What an optimizer holds and needs: its step is run on fake tensors, at no memory."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch

from memplan.errors import UnsupportedModel
from memplan.graph import private_api as private
from memplan.graph.layout import allocated_bytes, storage_key


def optimizer_needs(
    optimizer: torch.optim.Optimizer, device: torch.device, without: Collection[torch.Tensor] = ()
) -> tuple[int, int]:
    """(bytes of its state once it has stepped, bytes that a step allocates beyond that), with parameters on `device`.

    without: parameters that are left out, because they live elsewhere.

    Raises UnsupportedModel for an optimizer whose step needs more than gradients (LBFGS).
    """
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    # A count of steps on the CPU is read as a number. A fake tensor has one only where it is made from one.
    counts = {id(t): (t.item(), t.dtype) for t in states if not t.dim() and t.device.type == "cpu"}
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        memo: dict[int, Any] = {key: torch.tensor(number, dtype=dtype) for key, (number, dtype) in counts.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                there = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
                fake = torch.nn.Parameter(there, parameter.requires_grad)
                fake.grad = torch.empty_like(fake) if parameter.requires_grad else None
                memo[id(parameter)] = fake
        for t in states:
            if id(t) not in memo:  # it will be where its parameter is
                memo[id(t)] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        twin = _twin(optimizer, memo)
        elsewhere = {id(memo[id(p)]) for p in without if id(p) in memo}
        for group in twin.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in elsewhere]
        twin.state = defaultdict(dict, {p: s for p, s in twin.state.items() if id(p) not in elsewhere})
        meter = _AllocationMeter(device)
        try:
            with meter, torch.no_grad():
                type(optimizer).step(twin)  # not optimizer.step: schedulers replace that on the instance
        except Exception as error:
            raise UnsupportedModel(
                f"the memory of {type(optimizer).__name__}.step() can't be foreseen ({error}). Leave optimizer= out, "
                "and allow for its state in the budget"
            ) from error
        state_bytes = _state_bytes(twin, device)
        left_out = {id(p) for p in without}
        grown = state_bytes - _state_bytes(optimizer, device, left_out)
        return state_bytes, max(0, meter.peak_bytes - grown)


def _twin(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """An optimizer over fake parameters with the same settings and state."""
    twin = copy.copy(optimizer)
    twin.param_groups = copy.deepcopy(optimizer.param_groups, memo)
    twin.state = copy.deepcopy(optimizer.state, memo)
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
        result = func(*args, **(kwargs or {}))
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

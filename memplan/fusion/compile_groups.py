"""Compiles each distinct group once, and tries it: what it gives, and which memory it writes over."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.ops.layout import storage_key
from memplan.fusion.groups import FusedGroup
from memplan.fusion.step_graph import place_of_node
from memplan.logs import log

OPTIONS: Mapping[str, Any] = {"size_asserts": False}  # of Inductor


class FusedKernel:
    """A compiled group, as a function of tensors."""

    __name__ = "fused"

    def __init__(self, key: str, call: private.CompiledCall) -> None:
        self.key, self._call = key, call

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self._call([*tensors])


class NotCompiled(Exception):
    """A group can't be compiled, or does not give what it should. ops: those of the trace that it is made of."""

    def __init__(self, ops: set[int], reason: str) -> None:
        super().__init__(reason)
        self.ops = ops


class GroupCompiler:
    """Compiled groups by key, for all steps of a process."""

    def __init__(self) -> None:
        self._kernels: dict[str, tuple[FusedKernel, dict[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._kernels)

    def compiled(self, group: FusedGroup) -> FusedKernel:
        """The kernel of a group. Sets `group.over` to what is really written over what. Raises NotCompiled."""
        key = _key(*_graph_of(group))
        if key not in self._kernels:
            try:
                self._kernels[key] = self._made(key, group)
            except Exception as error:
                ops = {place_of_node(node).op for node in group.nodes}
                log.warning("a group of ops stays as it is: %s", str(error).partition("\n")[0])
                raise NotCompiled(ops, str(error)) from error
        kernel, group.over = self._kernels[key]
        return kernel

    def _made(self, key: str, group: FusedGroup) -> tuple[FusedKernel, dict[int, int]]:
        while True:
            graph, _ = _graph_of(group)
            layouts = [node.meta["val"] for node in group.inputs]
            kernel = FusedKernel(key, private.compiled_graph(graph, layouts, list(group.over.values()), OPTIONS))
            over = _tried(kernel, group)
            if over == group.over:
                return kernel, over
            group.over = over  # what was given away for nothing is kept


def _graph_of(group: FusedGroup) -> tuple[fx.Graph, list[str]]:
    """A group as a graph of its own, and as text that is equal for equal groups."""
    graph, local = fx.Graph(), dict[fx.Node, fx.Node]()
    text: list[str] = []
    donated = set(group.over.values())
    for position, node in enumerate(group.inputs):
        # The name is part of the key of Inductor's own cache, which does not know of memory that is given away.
        local[node] = graph.placeholder(f"{'donated' if position in donated else 'read'}_{position}")
        local[node].meta["val"] = node.meta["val"]
        text.append(_shown(node))

    def copy(node: fx.Node) -> fx.Node:
        if node not in local:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copy)
            local[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"n_{len(local)}")
            local[node].meta["val"] = node.meta["val"]
            text.append(f"{node.target}{args}{kwargs}{_shown(node)}")
        return local[node]

    for node in group.nodes:
        copy(node)
    outputs = [copy(node) for node in group.outputs]
    graph.output(outputs)
    text += [str(outputs), *map(_shown, group.outputs), str(sorted(group.over.items()))]
    return graph, text


def _key(graph: fx.Graph, text: list[str]) -> str:
    identity = [*text, str(sorted(OPTIONS.items())), torch.__version__, str(torch.get_num_threads())]
    return hashlib.sha256("|".join(identity).encode()).hexdigest()[:20]


def _shown(node: fx.Node) -> str:
    t = node.meta["val"]
    if not isinstance(t, torch.Tensor):
        return "several"
    return f"{t.dtype}{tuple(t.shape)}{tuple(t.stride())}{t.storage_offset()}{t.device.type}"


def _tried(kernel: FusedKernel, group: FusedGroup) -> dict[int, int]:
    """Run a group once, which loads its code, and see which outputs lie in the memory of which inputs."""
    given = [_made_up(node.meta["val"]) for node in group.inputs]
    inputs = {storage_key(t): position for position, t in enumerate(given)}
    made = kernel(*given)
    if len({storage_key(t) for t in made}) != len(made):
        raise ValueError("two results share memory")
    for tensor, node in zip(made, group.outputs, strict=True):
        wanted = node.meta["val"]
        if (tensor.shape, tensor.stride(), tensor.dtype) != (wanted.shape, wanted.stride(), wanted.dtype):
            raise ValueError(f"a result has strides {tensor.stride()} instead of {wanted.stride()}")
        if tensor.untyped_storage().nbytes() != wanted.numel() * wanted.element_size():
            raise ValueError("a result lies in something larger")
    return {o: inputs[storage_key(t)] for o, t in enumerate(made) if storage_key(t) in inputs}


def _made_up(layout: torch.Tensor) -> torch.Tensor:
    """A real tensor like a fake one. Indices of 0 are valid everywhere."""
    count = layout.untyped_storage().nbytes() // layout.element_size()
    value = 0.5 if layout.dtype.is_floating_point else 0
    flat = torch.full((count,), value, dtype=layout.dtype, device=layout.device)
    return flat.as_strided(layout.shape, layout.stride(), layout.storage_offset())

"""A step while it is analysed: values and ops that may still change, and the value that each storage holds now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memplan.capture.analysis.traced import Gradient, Made, Resident
from memplan.capture.ops.layout import device_bytes_of, storage_key
from memplan.errors import UnsupportedModel
from memplan.problem.data import Effect, Phase, Role


@dataclass(eq=False, slots=True)
class DraftStorage:
    """One allocation in the trace.

    - value: the index of its present version.
    - roots: the nodes that hold its memory.
    """

    value: int
    roots: list[fx.Node]


@dataclass(slots=True)
class DraftValue:
    """A `memplan.problem.data.Value` that is being built. roots: the nodes that hold its memory."""

    name: str
    size_bytes: int
    role: Role
    reuses: int | None = None
    held: bool = False
    roots: list[fx.Node] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class DraftOp:
    """An `Op` of the problem and its `Kernel`, while they are built.

    repeat_args: None where a recompute takes `args`.
    """

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    phase: Phase
    reads: dict[fx.Node, int]
    made: list[Made]
    outputs: list[int]
    effects: list[Effect]
    random: bool
    recomputable: bool
    layer: str
    repeat_args: tuple[Any, ...] | None = None


@dataclass(slots=True)
class Draft:
    """A step that is being built. Values are named by their index in `values`.

    - storages: by storage key.
    - parents, residents, constants, gradients: as in `Traced`.
    - tangent_values: by output.
    """

    device: torch.device
    values: list[DraftValue] = field(default_factory=list)
    ops: list[DraftOp] = field(default_factory=list)
    storages: dict[int, DraftStorage] = field(default_factory=dict)
    parents: dict[fx.Node, fx.Node] = field(default_factory=dict)
    residents: dict[fx.Node, Resident] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    tangent_values: dict[int, int] = field(default_factory=dict)
    gradients: list[Gradient] = field(default_factory=list)

    def storage(self, node: fx.Node) -> DraftStorage:
        """The storage behind `node`."""
        return self.storages[storage_key(node.meta["val"])]

    def present(self, node: fx.Node) -> int:
        """The value that the storage behind `node` holds now."""
        return self.storage(node).value

    def new_storage(self, node: fx.Node | None, tensor: torch.Tensor, role: Role, name: str) -> int:
        """Enter a new allocation. Gives its value. Raises UnsupportedModel for a sparse tensor."""
        if tensor.layout is not torch.strided:
            raise UnsupportedModel(
                f"{name} has layout {tensor.layout}; only strided tensors can be planned. Sparse gradients: set "
                "sparse=False"
            )
        size = device_bytes_of(tensor, self.device)
        index = len(self.values)
        roots = [node] if node is not None else []
        self.values.append(DraftValue(name, size, role, roots=roots))
        self.storages[storage_key(tensor)] = DraftStorage(index, list(roots))
        return index

    def add_root(self, node: fx.Node) -> None:
        """Note that `node` holds its storage's memory."""
        storage = self.storage(node)
        storage.roots.append(node)
        self.values[storage.value].roots.append(node)

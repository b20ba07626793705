"""What tensors and layers are called where people read of them, and those of repeated layers as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from memplan.problem.data import FUSED, Graph, Op

THE_MODEL = "(the model itself)"
_MOST_LETTERS = 48
_NUMBER = re.compile(r"(?<![^. ])\d+(?![^. :])")
_T = TypeVar("_T")


def op_label(op: Op) -> str:
    """An op by where it stands in the model and by its kind: "layers.3.mlp: silu"."""
    return f"{op.layer or THE_MODEL}: {short_kind(op)}"


def short_kind(op: Op) -> str:
    """Its kind without namespace and overload: "silu", "fused add+mul"."""
    if op.fused:
        kinds = op.kind.removeprefix(FUSED).strip("()")
        return f"fused {kinds if len(kinds) < _MOST_LETTERS else kinds[:_MOST_LETTERS] + '…'}"
    parts = op.kind.split(".")
    return parts[1] if len(parts) > 1 else op.kind


def value_labels(graph: Graph) -> tuple[str, ...]:
    """Each value by its own name where it has one from the model, else by the op that makes it."""
    return tuple(
        value.name
        if maker is None or value.resident or value.role != "activation" or value.held
        else op_label(graph.ops[maker]) + (" (backward)" if graph.ops[maker].phase == "backward" else "")
        for value, maker in zip(graph.values, graph.producers(), strict=True)
    )


def joined(name: str) -> str:
    """A name with a star for each number in it, so that repeated layers have one: "layers.*.mlp: silu"."""
    return _NUMBER.sub("*", name)


def named(names: Sequence[str]) -> str:
    """Names that are joined, with their number: "layers.*.mlp: silu x32"."""
    return names[0] if len(names) == 1 else f"{joined(names[0])} x{len(names)}"


def in_groups(things: Iterable[_T], key: Callable[[_T], object]) -> list[list[_T]]:
    """Those of equal key together, in the order in which keys come first."""
    groups: dict[object, list[_T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.values())

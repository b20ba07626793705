"""Layers against the tensors in them, as tables: what a plan does with each.

Layers that repeat are the columns of one table, their tensors its rows. What is in no such layer has a table of its
own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import NamedTuple

from memplan.plans.choices import TensorDecision, choices_of, reason_of
from memplan.plans.step_memory import StepMemory

_LAYER = re.compile(r"(?P<stack>(?:[^.: ]+\.)*?)(?P<number>\d+)(?=[.:]|$)\.?(?P<rest>.*)")


class MapRow(NamedTuple):
    """One tensor in each of the layers.

    cells: the layer's column, what is done there, the bytes, and why, with what the other way would cost.
    """

    label: str
    tensor: str
    cells: list[tuple[int, TensorDecision, int, str]]

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(size_bytes for _, _, size_bytes, _ in self.cells)


class LayerTable(NamedTuple):
    """Layers that are alike. title: "layers.*", or "" for what is in none; columns: their numbers."""

    title: str
    columns: tuple[str, ...]
    rows: list[MapRow]


def layer_tables(memory: StepMemory) -> tuple[LayerTable, ...]:
    """Tensors that forward makes for backward, and parameters that live elsewhere; the largest table first."""
    homes = {"host": "lives on the host, and is fetched to be read", "sharded": "sharded, and gathered to be read"}
    tensors: list[tuple[str, str, TensorDecision, int, str]] = [
        *((c.label, c.tensor, c.decision, c.size_bytes, reason_of((c,))) for c in choices_of(memory)),
        *(
            (f"{v.name}: parameter", v.tensor, "offload", v.size_bytes, homes[v.home])
            for v in memory.problem.graph.values
            if v.fetched
        ),
    ]
    columns: dict[str, dict[str, int]] = defaultdict(dict)  # by table, then by number of a layer
    rows: dict[str, dict[tuple[str, str, int], MapRow]] = defaultdict(dict)
    seen: Counter[tuple[str, str, str]] = Counter()  # of several alike in one layer the first, the second, ... are rows
    for label, tensor, decision, size_bytes, reason in tensors:
        stack = number = ""
        if match := _LAYER.match(label):
            stack, number, label = f"{match['stack']}*", match["number"], match["rest"].strip().removeprefix(": ")
        seen[stack, number, label] += 1
        which, column = seen[stack, number, label], columns[stack].setdefault(number, len(columns[stack]))
        new = MapRow(label if which == 1 else f"{label} ({which})", tensor, [])
        rows[stack].setdefault((label, tensor, which), new).cells.append((column, decision, size_bytes, reason))
    tables = [LayerTable(stack, tuple(columns[stack]), list(rows[stack].values())) for stack in rows]
    return tuple(sorted(tables, key=lambda table: -sum(row.size_bytes for row in table.rows)))

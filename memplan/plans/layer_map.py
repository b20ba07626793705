"""Layers against the tensors in them, as tables: what a plan does with each.

Layers that repeat are the columns of one table, their tensors its rows. What is in no such layer has a table of its
own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memplan.plans.choices import TensorDecision, choices_of, reason_of
from memplan.plans.labels import in_groups
from memplan.plans.step_memory import StepMemory

_LAYER = re.compile(r"(?P<stack>(?:[^.: ]+\.)*?)(?P<number>\d+)(?=[.:]|$)\.?(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class MapCell:
    """What is done with one tensor. column: of its layer; reason: why, and what the other way would cost."""

    column: int
    decision: TensorDecision
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class MapRow:
    """One tensor in each of the layers."""

    label: str
    tensor: str
    cells: tuple[MapCell, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(cell.size_bytes for cell in self.cells)


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Layers that are alike. title: "layers.*", or "" for what is in none; columns: their numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[MapRow, ...]


@dataclass(frozen=True, slots=True)
class _TableEntry:
    stack: str
    number: str
    label: str
    tensor: str
    decision: TensorDecision
    size_bytes: int
    reason: str


def layer_tables(memory: StepMemory) -> tuple[LayerTable, ...]:
    """Tensors that forward makes for backward, and parameters that live elsewhere; the largest table first."""
    entries = [_entry(c.label, c.tensor, c.decision, c.size_bytes, reason_of((c,))) for c in choices_of(memory)]
    homes = {"host": "lives on the host, and is fetched to be read", "sharded": "sharded, and gathered to be read"}
    fetched = [v for v in memory.problem.graph.values if v.fetched]
    entries += [_entry(f"{v.name}: parameter", v.tensor, "offload", v.size_bytes, homes[v.home]) for v in fetched]
    tables = [_table(group) for group in in_groups(entries, lambda e: e.stack)]
    return tuple(sorted(tables, key=lambda table: -sum(row.size_bytes for row in table.rows)))


def _entry(label: str, tensor: str, decision: TensorDecision, size_bytes: int, reason: str) -> _TableEntry:
    stack = number = ""
    if match := _LAYER.match(label):
        stack, number, label = f"{match['stack']}*", match["number"], match["rest"].strip().removeprefix(": ")
    return _TableEntry(stack, number, label, tensor, decision, size_bytes, reason)


def _table(entries: list[_TableEntry]) -> LayerTable:
    columns = tuple(dict.fromkeys(e.number for e in entries))
    seen: dict[tuple[str, str], int] = {}  # of several alike in one layer the first, the second, ... are rows
    rows: dict[tuple[str, str, int], list[MapCell]] = {}
    for e in entries:
        which = seen[e.label, e.number] = seen.get((e.label, e.number), 0) + 1
        cell = MapCell(columns.index(e.number), e.decision, e.size_bytes, e.reason)
        rows.setdefault((e.label, e.tensor, which), []).append(cell)
    return LayerTable(
        entries[0].stack, columns,
        tuple(
            MapRow(label if which == 1 else f"{label} ({which})", tensor, tuple(cells))
            for (label, tensor, which), cells in rows.items()
        ),
    )  # fmt: skip

"""Tensors that forward makes and backward reads: what is done with each, why, and what the other way would cost.

The figures are of one tensor by itself: its bytes, the seconds of the one op that makes it. Other tensors may have to
stay, or to be made again, with it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from memplan.plans.step_memory import Lifetime, StepMemory, in_groups, joined
from memplan.problem.lanes import spans_of
from memplan.problem.schedule import Compute, Offload
from memplan.units import format_bytes, format_seconds

_Number = TypeVar("_Number", int, float)
TensorDecision = Literal["keep", "recompute", "offload"]
_LAYER = re.compile(r"(?P<stack>(?:[^.: ]+\.)*?)(?P<number>\d+)(?=[.:]|$)\.?(?P<rest>.*)")
_HELD = "it is an output, which the caller holds"
_BARRED = "its op writes to what outlives the step, or may give other bits"


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done with one tensor.

    - time_s: seconds of the op that makes it.
    - share: of the step's seconds, those between its last use in forward and its first in backward.
    - at_peak: whether the peak is between these.
    - barred: why its op can't run again; "" where it can.
    - missing: how many inputs of its op are not there when backward first needs it.
    """

    value: int
    op: int
    label: str
    tensor: str
    decision: TensorDecision
    size_bytes: int
    time_s: float
    share: float
    at_peak: bool
    barred: str
    missing: int


def decisions(memory: StepMemory) -> dict[int, TensorDecision]:
    """What is done with each value that forward computes and backward reads; not with those that wait for backward."""
    ops, schedule = memory.problem.graph.ops, memory.schedule
    made = {v for step in schedule[: memory.boundary] if isinstance(step, Compute) for v in ops[step.op].outputs}
    read = {v for op in ops if op.phase == "backward" for v in op.inputs}
    offloaded = {step.value for step in schedule if isinstance(step, Offload)}
    again = {life.value for life in memory.lifetimes if life.kind == "recomputed"}
    return {v: "offload" if v in offloaded else "recompute" if v in again else "keep" for v in sorted(made & read)}


def choices_of(memory: StepMemory) -> tuple[Choice, ...]:
    """What is done with each tensor that forward makes and backward reads, in the order in which they are made."""
    graph, times_s = memory.problem.graph, memory.problem.costs.time_s
    labels, makers, begins_s = memory.labels, graph.producers(), spans_of(memory.problem, memory.schedule)[0]
    lives: dict[int, list[Lifetime]] = {}
    for life in memory.lifetimes:
        if life.value is not None and life.end > life.begin:
            lives.setdefault(life.value, []).append(life)
    ran = [(moment, graph.ops[step.op]) for moment, step in enumerate(memory.schedule) if isinstance(step, Compute)]
    last_forward = {v: moment for moment, op in ran if moment < memory.boundary for v in (*op.inputs, *op.outputs)}
    first_backward = {v: moment for moment, op in reversed(ran) if moment > memory.boundary for v in op.inputs}
    found = []
    for v, decision in decisions(memory).items():
        maker, value = makers[v], graph.values[v]
        assert maker is not None
        again = [life.begin for life in lives.get(v, ())[1:]]
        begin, end = last_forward[v], again[0] if again else first_backward[v]
        share = max(0.0, begins_s[end] - begins_s[begin + 1]) / begins_s[-1] if begins_s[-1] else 0.0
        missing = 0
        for u in graph.ops[maker].inputs:
            stays = graph.values[u].resident and not graph.values[u].fetched
            missing += not (stays or any(life.begin <= end <= life.end for life in lives.get(u, ())))
        barred = _HELD if value.held else "" if graph.ops[maker].recomputable else _BARRED
        found.append(
            Choice(
                v, maker, labels[v], value.tensor, decision, value.size_bytes, times_s[maker], share,
                begin < memory.peak_moment < end, barred, missing,
            )
        )  # fmt: skip
    return tuple(found)


def choice_groups(choices: Sequence[Choice]) -> list[list[Choice]]:
    """Choices of repeated layers with which the same is done together, the largest first."""
    groups = in_groups(choices, lambda c: (c.decision, joined(c.label), c.tensor, c.barred, c.missing > 0))
    return sorted(groups, key=lambda group: -sum(c.size_bytes for c in group))


def reason_of(choices: Sequence[Choice]) -> str:
    """Why this is done with tensors of one group, and what the other way would cost."""
    one, each = choices[0], " each" if len(choices) > 1 else ""
    bytes_text, time_text = format_bytes(one.size_bytes), _span([c.time_s for c in choices], format_seconds)
    share, missing = _span([c.share for c in choices], "{:.0%}".format), _span([c.missing for c in choices], str)
    at_peak = sum(c.at_peak for c in choices)
    peak = "at the peak" if at_peak == len(choices) else f"{at_peak} at the peak" if at_peak else "not at the peak"
    room = f"{bytes_text}{each} over {share} of the step, {peak}"
    needs = f", and {missing} of its inputs" if one.missing else ""
    again = f"can't run again: {one.barred}" if one.barred else f"recompute: {time_text}{each}{needs}"
    if one.decision == "keep":
        return again if one.barred else f"{again}; frees {room}"
    return f"keep: {room}; {again}" if one.decision == "offload" else f"its op takes {time_text}{each}; keep: {room}"


def _span(numbers: Sequence[_Number], text: Callable[[_Number], str]) -> str:
    """The least and the most of some numbers."""
    low, high = text(min(numbers)), text(max(numbers))
    return low if low == high else f"{low} to {high}"


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
    """Layers that repeat, and the tensors in them. title: "layers.*", or "" for what is in none; columns: numbers."""

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

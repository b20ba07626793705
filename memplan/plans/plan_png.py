"""A plan as a picture: memory over the step without the plan and with it, drawn by matplotlib."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from memplan.plans.figures import PlanFigures
from memplan.plans.plan_text import summary
from memplan.plans.step_memory import KINDS, MemoryKind, StepMemory, planned_memory, unplanned_memory
from memplan.problem.lanes import spans_of
from memplan.units import format_bytes

_COLOURS: dict[MemoryKind, str] = {
    "weights": "#4e79a7",
    "optimizer": "#9c755f",
    "inputs": "#98a0a8",
    "gradients": "#e8804f",
    "kept": "#4f9d69",
    "recomputed": "#e3b93c",
    "fetched": "#a06fb0",
    "temporary": "#7cc0c4",
    "scratch": "#d98ba5",
}
_AFTER = 1.02  # where what comes after backward ends, as a multiple of the step


def draw_png(plan: PlanFigures, path: str | Path) -> None:
    """Write the picture. Raises ImportError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("to_png needs matplotlib, which is not installed: pip install 'memplan[plot]'") from error
    memories = {"unplanned": unplanned_memory(plan), "planned": planned_memory(plan)}
    budget_bytes, most_bytes = plan.problem.budget_bytes, max(plan.baseline_peak_bytes, plan.peak_bytes)
    unit_bytes, unit = _unit(most_bytes)
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    for (name, memory), ax in zip(memories.items(), axes, strict=True):
        _draw(ax, memory, unit_bytes)
        ax.set_title(name, loc="left", fontsize=10)
        ax.set_ylabel(f"held on the device, {unit}")
        if budget_bytes is not None:
            ax.axhline(budget_bytes / unit_bytes, color="#c2255c", linestyle="--", linewidth=1)
    axes[1].set_xlabel("milliseconds since the step began")
    axes[0].margins(x=0)
    axes[0].set_ylim(0, 1.15 * max(most_bytes, budget_bytes or 0) / unit_bytes)
    dashed = "" if budget_bytes is None else f" (dashed: the budget, {format_bytes(budget_bytes)})"
    figure.suptitle(summary(plan) + dashed, fontsize=10)
    shown = {kind for memory in memories.values() for kind, sizes in memory.by_kind().items() if any(sizes)}
    handles = [handle for kind, handle in zip(KINDS, axes[0].collections, strict=False) if kind in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, format="png", dpi=110)


def _draw(ax: Any, memory: StepMemory, unit_bytes: int) -> None:
    """One step: areas by kind on top of one another, and the peak."""
    begins_s, _ = spans_of(memory.problem, memory.schedule)
    edges_ms = [1e3 * time_s for time_s in (*begins_s, begins_s[-1] * _AFTER)]
    kinds = list(memory.by_kind().items())
    tops = zip(*(accumulate(moment) for moment in zip(*(sizes for _, sizes in kinds), strict=True)), strict=True)
    below = [0.0] * len(edges_ms)
    for (kind, _), top in zip(kinds, tops, strict=True):
        above = [size_bytes / unit_bytes for size_bytes in (*top, top[-1])]
        ax.fill_between(edges_ms, below, above, step="post", color=_COLOURS[kind], label=KINDS[kind], linewidth=0)
        below = above
    peak_ms, peak = edges_ms[memory.peak_moment], memory.timeline.peak_bytes
    ax.plot([peak_ms], [peak / unit_bytes], "o", color="#c2255c", markersize=5)
    ax.annotate(f" peak {format_bytes(peak)}", (peak_ms, peak / unit_bytes), fontsize=9, va="bottom")
    ax.axvline(edges_ms[memory.boundary], color="#888", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _unit(most_bytes: int) -> tuple[int, str]:
    unit = format_bytes(most_bytes).split()[1]
    return 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit), unit

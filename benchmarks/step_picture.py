"""The picture on top of the README: what a step of the demo holds, unplanned, at half of its peak and at its floor.

    python -m benchmarks.step_picture docs/step.svg

The figures are the accountant's, of ops that are timed on this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import memplan
from memplan.command_line.demo import demo_batches, demo_model
from memplan.plans.step_memory import StepMemory, planned_memory, unplanned_memory
from memplan.problem.lanes import spans_of

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 900, 300, 60, 20, 40, 170
_COLOURS = ("#98a0a8", "#4e79a7", "#4f9d69")
_AFTER = 1.02  # where what comes after backward ends, as a multiple of the step


def memories() -> dict[str, StepMemory]:
    """The step of the demo by name."""
    sample = {**demo_batches()[0], "use_cache": False}
    half = memplan.plan(demo_model(), sample, "50%")
    floor = memplan.plan(demo_model(), sample, "min")
    return {"unplanned": unplanned_memory(half), "half": planned_memory(half), "floor": planned_memory(floor)}


def picture_of_steps(steps: dict[str, StepMemory]) -> str:
    """The SVG text: an area for each step, the largest behind, in milliseconds and MiB."""
    curves = {name: _curve(memory) for name, memory in steps.items()}
    most_s = max(curve[-1][0] for curve in curves.values())
    most_bytes = max(size for curve in curves.values() for _, size in curve)

    def x(time_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * time_s / most_s

    def y(size_bytes: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * size_bytes / most_bytes

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="13"><rect width="100%" height="100%" fill="white"/>'
    ]
    for (name, curve), colour in zip(curves.items(), _COLOURS, strict=True):
        peak_bytes, overhead = max(size for _, size in curve), curve[-1][0] / curves["unplanned"][-1][0] - 1
        right = _WIDTH - _RIGHT + 8
        tops = " ".join(f"{x(time_s):.1f},{y(size):.1f}" for time_s, size in curve)
        more = f", {overhead:+.0%} time" if overhead else ""
        parts += [
            f'<polygon points="{x(0):.1f},{y(0):.1f} {tops} {x(curve[-1][0]):.1f},{y(0):.1f}" fill="{colour}" '
            f'fill-opacity="0.75"/>',
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(peak_bytes):.1f}" y2="{y(peak_bytes):.1f}" '
            f'stroke="{colour}" stroke-dasharray="4"/>',
            f'<text x="{right}" y="{y(peak_bytes) + 4:.1f}" fill="#333">{name}'
            f'<tspan x="{right}" dy="16" fill="#777">{memplan.format_bytes(peak_bytes)}{more}</tspan></text>',
        ]
    parts += [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(0)}" y2="{y(0)}" stroke="#777"/>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 14}" fill="#777">time: forward, then backward</text>',
        f'<text x="8" y="{y(0):.1f}" fill="#777">0</text>',
        f'<text x="8" y="{_TOP + 10}" fill="#777">bytes held</text></svg>\n',
    ]
    return "".join(parts)


def _curve(memory: StepMemory) -> list[tuple[float, int]]:
    """What is held when each moment of the step begins: seconds since the step began, and bytes."""
    begins_s, _ = spans_of(memory.problem, memory.schedule)
    sizes = [sum(moment) for moment in zip(*memory.by_kind().values(), strict=True)]
    return [*zip(begins_s, sizes, strict=True), (begins_s[-1] * _AFTER, sizes[-1])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture. Gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args(arguments).file
    file.write_text(picture_of_steps(memories()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

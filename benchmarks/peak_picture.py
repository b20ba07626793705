"""A picture of peaks against times, as SVG: one panel for each model, one line for each kind of contender."""

from __future__ import annotations

from typing import Any

_WIDTH, _HEIGHT, _EDGE, _COLUMNS = 420, 260, 44, 2
_COLOURS = {
    "eager": "#555", "checkpointing": "#b07", "compile": "#d60", "plan": "#28c", "fused": "#083", "counter": "#6a3",
}  # fmt: skip


def picture_of(models: dict[str, dict[str, Any]]) -> str:
    """The SVG text. models: for each model, rows by the name of a contender, whose first word is its kind."""
    rows = -(-len(models) // _COLUMNS)
    parts = [_panel(name, table, index) for index, (name, table) in enumerate(models.items())]
    legend = "".join(
        f'<circle cx="{60 + 110 * i}" cy="14" r="4" fill="{colour}"/><text x="{70 + 110 * i}" y="18">{kind}</text>'
        for i, (kind, colour) in enumerate(_COLOURS.items())
    )
    size = f'width="{_COLUMNS * _WIDTH}" height="{rows * _HEIGHT + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return f'{head}<rect width="100%" height="100%" fill="white"/>{legend}{"".join(parts)}</svg>\n'


def _panel(name: str, table: dict[str, Any], index: int) -> str:
    rows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _COLOURS}
    for contender, row in table.items():
        if "over_eager" in row:
            rows[contender.split()[0]].append((row["peak_bytes"] / 1e6, row["over_eager"][1]))
    points = [point for found in rows.values() for point in found]
    most_mb = max(mb for mb, _ in points) * 1.05
    low, high = min(t for _, t in points) - 0.05, min(max(t for _, t in points), 2.0) + 0.05
    left, top = _WIDTH * (index % _COLUMNS), 24 + _HEIGHT * (index // _COLUMNS)

    def x(mb: float) -> float:
        return left + _EDGE + (_WIDTH - 2 * _EDGE) * mb / most_mb

    def y(time: float) -> float:
        return top + _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * (min(time, high) - low) / (high - low)

    parts = [
        f'<text x="{left + _EDGE}" y="{top + 24}" font-weight="bold">{name}</text>',
        f'<line x1="{x(0)}" y1="{y(low)}" x2="{x(most_mb)}" y2="{y(low)}" stroke="#999"/>',
        f'<line x1="{x(0)}" y1="{y(low)}" x2="{x(0)}" y2="{y(high)}" stroke="#999"/>',
        f'<line x1="{x(0)}" y1="{y(1)}" x2="{x(most_mb)}" y2="{y(1)}" stroke="#ddd"/>',
        f'<text x="{x(most_mb) - 90}" y="{y(low) + 26}">activation peak, MB</text>',
        f'<text x="{left + 4}" y="{top + 40}">time / eager</text>',
        *(f'<text x="{x(mb) - 8}" y="{y(low) + 14}">{mb:.0f}</text>' for mb in (most_mb / 4, most_mb / 2, most_mb)),
        *(f'<text x="{left + 12}" y="{y(t) + 4}">{t:.2f}</text>' for t in (low, (low + high) / 2, high)),
    ]
    for kind, found in rows.items():
        colour = _COLOURS[kind]
        line = " ".join(f"{x(mb):.1f},{y(time):.1f}" for mb, time in sorted(found))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts += [f'<circle cx="{x(mb):.1f}" cy="{y(time):.1f}" r="3.5" fill="{colour}"/>' for mb, time in found]
    return "".join(parts)

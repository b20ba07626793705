"""Bytes and seconds as people write them."""

from __future__ import annotations

import math
import re

_FACTORS: dict[str, int] = {  # by unit, in lower case
    "": 1,
    "b": 1,
    **{f"{prefix}{b}": 1000**power for power, prefix in enumerate("kmgt", start=1) for b in ("b", "")},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of "8GiB" (8 * 1024**3), "8GB" or "8G" (8 * 1000**3), "512 MiB" or "4096", rounded down.

    Raises ValueError for any other text, TypeError for anything else.
    """
    if not isinstance(text, str):
        raise TypeError(f"a number of bytes as text, such as '8GiB', is needed, got {text!r}")
    match = _PATTERN.fullmatch(text)
    if match is None or match.group(2).lower() not in _FACTORS:
        raise ValueError(f"can't read {text!r} as a number of bytes; write for example '8GiB', '8GB', '512MiB' or 4096")
    size = math.floor(float(match.group(1)) * _FACTORS[match.group(2).lower()])
    if size <= 0:
        raise ValueError(f"a budget must be more than 0 bytes, got {text!r}")
    return size


def format_bytes(size_bytes: float) -> str:
    """1536 -> '1.5 KiB'; four significant digits, binary units."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def format_seconds(time_s: float) -> str:
    """0.0123 -> '12.3 ms'."""
    scale, unit = (1, "s") if time_s >= 1 else (1e3, "ms") if time_s >= 1e-3 else (1e6, "us")
    return f"{time_s * scale:.3g} {unit}"

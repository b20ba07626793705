"""The hardware and the versions that figures hold for, written beside every result, and a cache of their own."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def environment() -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy", "numba", "networkx")}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """An empty folder for measured costs, margins and fronts, so that no figure depends on runs before it."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, MEMPLAN_CACHE_DIR=folder):
        yield


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"

"""Records of compiled groups, in Inductor's cache on disk: what each writes over what. They go when the code goes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from memplan import torch_private as private


def read_record(key: str) -> dict[int, int] | None:
    """What the compiled group of a key writes over what: position of an output -> that of an input. None: not known."""
    try:
        return {int(output): int(given) for output, given in json.loads(_path(key).read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def write_record(key: str, over: Mapping[int, int]) -> None:
    """Keep it, as far as the disk lets one."""
    with contextlib.suppress(OSError):
        _path(key).parent.mkdir(parents=True, exist_ok=True)
        _path(key).write_text(json.dumps(dict(over)))


def _path(key: str) -> Path:
    return Path(private.inductor_cache_dir()) / "memplan" / f"{key}.json"

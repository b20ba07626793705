"""Files that later processes read: measured costs, margins, fronts. Losing one costs time, never a bit.

A file is replaced as a whole, so readers find an old one or a new one. Whoever adds to a file holds its lock from
reading to replacing it, so that processes which write at once lose nothing. Where nothing can be written, nothing is
kept, and where there are no locks, the last writer wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """`MEMPLAN_CACHE_DIR`, or memplan's folder in the user's cache."""
    given = os.environ.get("MEMPLAN_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memplan"


def kept(name: str) -> bytes:
    """The contents of a file. Raises OSError where there is none."""
    return (cache_dir() / name).read_bytes()


def keep(name: str, data: bytes) -> None:
    """Put a file in the place of what there was under its name, as far as the disk lets one."""
    folder = cache_dir()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, folder / name)
            except OSError:
                os.unlink(file.name)


@contextlib.contextmanager
def only_writer(name: str) -> Iterator[None]:
    """A context in which no other process adds to a file: what is read in it is what is replaced in it."""
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(OSError):
            cache_dir().mkdir(parents=True, exist_ok=True)
            file = lock.enter_context((cache_dir() / f".{name}.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield


def keep_newest(pattern: str, most_bytes: int) -> None:
    """Delete the oldest files of a pattern until the others take no more than so many bytes."""
    with contextlib.suppress(OSError):  # another process may do so too
        ages = sorted(((s := f.stat()).st_mtime_ns, s.st_size, f) for f in cache_dir().glob(pattern))
        held_bytes = sum(size_bytes for _, size_bytes, _ in ages)
        for _, size_bytes, file in ages:
            if held_bytes <= most_bytes:
                break
            file.unlink(missing_ok=True)
            held_bytes -= size_bytes


def is_used(name: str) -> None:
    """Let a file count as new."""
    with contextlib.suppress(OSError):
        os.utime(cache_dir() / name)


def forget(*patterns: str) -> int:
    """Delete the files of some patterns, of all where none is given. Gives how many there were."""
    patterns = patterns or ("costs-*.json", "margin-*.json", "front-*.json.gz", "least-*.json.gz")
    files = [file for pattern in patterns for file in cache_dir().glob(pattern)]
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)

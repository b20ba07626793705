"""Files that processes share: writers at once lose nothing, and what is damaged or can't be written does no harm."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memplan import cache

ROOT = Path(__file__).resolve().parent.parent
WRITER = """
import sys, time
from pathlib import Path
import torch
from memplan.costs.known_costs import KnownCosts

name, folder = sys.argv[1:]
device = torch.device("cpu")
torch.set_num_threads(1)
(Path(folder) / f"ready-{name}").touch()
while not (Path(folder) / "go").exists():
    time.sleep(0.001)
for number in range(30):
    known = KnownCosts.read(device)
    known.enter(f"{name}-{number}", [1.0, 1.0], number, ((0, number),))
    known.save()
print(sorted(KnownCosts.read(device).facts))
"""


def test_processes_that_write_at_once_lose_nothing(cost_cache: Path) -> None:
    names = "abc"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, name, str(cost_cache)], cwd=ROOT, stdout=subprocess.PIPE)
        for name in names
    ]
    while not all((cost_cache / f"ready-{name}").exists() for name in names):
        assert not any(writer.poll() for writer in writers)
        time.sleep(0.01)
    (cost_cache / "go").touch()
    seen = [writer.communicate(timeout=60)[0].decode() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    everything = str(sorted(f"{name}-{number}" for name in names for number in range(30)))
    assert everything + "\n" in seen  # of the one that was last
    assert {file.suffix for file in cost_cache.glob(".*")} == {".lock"}  # no halves of files


def test_the_oldest_files_go_first(cost_cache: Path) -> None:
    for age, name in enumerate(("front-new", "front-used", "front-old", "front-older")):
        cache.keep(name, b"1234")
        os.utime(cost_cache / name, (1e9 - age, 1e9 - age))
    cache.keep("costs-x", b"123456789")
    cache.is_used("front-old")
    cache.keep_newest("front-*", 11)
    assert sorted(file.name for file in cost_cache.iterdir()) == ["costs-x", "front-new", "front-old"]
    assert cache.forget("front-*") == 2


def test_a_folder_that_can_not_be_written_to_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMPLAN_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with cache.only_writer("x"):
        cache.keep("x", b"1")
    cache.keep_newest("*", 0)
    assert cache.forget("*") == 0
    with pytest.raises(OSError, match="x"):
        cache.kept("x")

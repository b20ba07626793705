"""The built wheel holds exactly what the tree holds: a package that is left out imports in an editable install only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = {"memplan": "memplan", "memplan/integrations": "integrations"}  # in the wheel, in the tree


def test_the_wheel_holds_the_tree(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PLACES.values():
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = wheels.glob("memplan-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        contents = {name: archive.read(name) for name in packed}
    tree = {
        f"{package}/{path.relative_to(ROOT / folder)}": path.read_bytes()
        for package, folder in PLACES.items()
        for pattern in ("*.py", "py.typed", "page/*")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert sorted(packed) == sorted(tree)
    assert contents == tree
    assert {
        "memplan/api.py",
        "memplan/py.typed",
        "memplan/integrations/deepspeed/engine.py",
        "memplan/plans/page/report.js",
    } <= packed

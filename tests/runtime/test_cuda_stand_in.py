"""The tests that need a CUDA device, on a stand-in for one: tests/cuda_stand_in. `make test-stand-in` runs them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_stand_in import missing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(missing() is not None, reason=f"there is no stand-in: {missing()}")
@pytest.mark.parametrize(
    ("file", "which"),
    [
        ("runtime/test_gpu", "bits and gpt2-fp32 or memory or host or seeding or parts"),
        pytest.param("runtime/test_gpu", "", marks=pytest.mark.slow),
        pytest.param("runtime/test_offload_gpu", "", marks=pytest.mark.slow),
        ("cuda_stand_in/slab", ""),
    ],
)
def test_what_needs_a_device_passes_on_a_stand_in(file: str, which: str) -> None:
    words = ["-m", "pytest", "-p", "tests.cuda_stand_in.faults", "-p", "no:cacheprovider", "-q"]
    words += ["-m", "gpu and not slow", "-k", which]
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")} | {
        "STAND_IN_WORKSPACE": "1048576"
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_stand_in", *words, f"tests/{file}.py"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout.splitlines()[-1]

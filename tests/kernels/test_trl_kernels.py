"""TRL's trainers with the kernels that they take on GPUs, run by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import trl.kernels.chunked_logprob

import memplan
from benchmarks.sft import Run, build
from memplan.integrations.huggingface import MemplanCallback
from tests.integrations.test_trl import prefer
from tests.support.zoo import assert_same_bits

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl.kernels.chunked_logprob, "_use_triton", lambda device: True)


@pytest.mark.parametrize("budget", ["1TiB", "39MiB"])
def test_fine_tuning(budget: str, caplog: pytest.LogCaptureFixture) -> None:
    """The head takes `hidden[mask]`, the labelled positions alone: no count needs a plan of its own.

    Planned are the first batch, its other start of backward, and all sizes; in the budget also the longest batch.
    """
    caplog.set_level("INFO", "memplan")
    callback = MemplanCallback(budget, costs="estimate")
    plain, planned = Run(build("llama", layers=2, width=64), 6), Run(build("llama", layers=2, width=64), 6, callback)
    assert sum(record.getMessage().startswith("planning, because") for record in caplog.records) <= 4
    assert isinstance(callback.plan, memplan.Plan)
    assert any("LogProb" in line for line in callback.plan.islands)
    assert planned.equals(plain)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of TRL itself
def test_preferences(tmp_path: Path) -> None:
    callback = MemplanCallback("1TiB", costs="estimate")
    assert_same_bits(prefer("llama", tmp_path), prefer("llama", tmp_path, callback))
    assert isinstance(callback.plan, memplan.Plan)

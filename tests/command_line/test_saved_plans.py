"""`memplan report`: what saved plans say, and that they run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import memplan
from memplan.command_line.commands import main
from memplan.config import PRESETS
from tests.command_line.conftest import SMALL_GPT2, Run
from tests.conftest import QUICK
from tests.support.zoo import assert_same_bits, run_steps


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plans for a card and for this machine."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "auto", QUICK)
        for name, step in {"tight": SMALL_GPT2, "here": SMALL_GPT2[:-2]}.items():
            assert main(["plan", *step, "--budget", "min", "--out", str(folder / name)]) == 0
    return folder


def test_a_report(run: Run, plans: Path) -> None:
    plan = memplan.Plan.load(plans / "tight")
    assert run("report", plans / "tight").out == plan.report()
    facts = run("report", plans / "tight", "--json").facts
    assert facts["peak_bytes"] == plan.peak_bytes and facts["recomputed_ops"] == len(plan.recomputed)


def test_a_page(run: Run, plans: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    said = run("report", plans / "tight", "--html", page, "--json")
    assert said.facts["html"] == str(page) and memplan.Plan.load(plans / "tight").summary in page.read_text()
    assert run("report", plans / "tight", "--html", tmp_path / "no" / "page.html").status == 1


def test_a_saved_plan_runs(run: Run, plans: Path) -> None:
    """The model that was only described is made, and trained at the peak that was promised for it."""
    import transformers

    plan = memplan.Plan.load(plans / "here")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).train()
    planned = copy.deepcopy(model)
    ids = torch.randint(0, 128, (4, 64))
    sample = {"input_ids": ids, "labels": ids.clone()}
    memplan.apply(planned, sample, optimizer=torch.optim.AdamW(planned.parameters(), fused=True), plan=plan)
    assert_same_bits(run_steps(model, sample), run_steps(planned, sample), "a step")
    ran = memplan.plan_of(planned)
    assert ran is not None and ran.peak_bytes == plan.peak_bytes

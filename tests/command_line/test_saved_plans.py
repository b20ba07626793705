"""`memplan report` and `memplan diff`: what saved plans say, and what two of them do differently."""

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
    """A folder with plans of two budgets, one that offloads, one for another length and one of another model."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "auto", QUICK)
        for name, options in {
            "tight": ("--budget", "min"),
            "loose": (),
            "longer": ("--length", "96"),
            "other": ("--set", "n_layer=3"),
            "here": ("--budget", "min"),
            "offloads": ("--budget", "19.5MiB", "--host-budget", "1GiB"),
        }.items():
            step = SMALL_GPT2[:-2] if name == "here" else SMALL_GPT2
            assert main(["plan", *step, *options, "--out", str(folder / name)]) == 0
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


def test_what_one_plan_alone_recomputes(run: Run, plans: Path) -> None:
    facts = run("diff", plans / "tight", plans / "loose", "--json").facts
    plan = memplan.Plan.load(plans / "tight")
    assert facts["steps"] == "the same step" and facts["only_in"]["b"] == []
    assert sum(row["count"] for row in facts["only_in"]["a"]) == len(plan.recomputed) > 0
    layers = {plan.problem.graph.ops[index].layer for index in plan.recomputed}
    assert {row["layer"] for row in facts["only_in"]["a"]} == layers
    text = run("diff", plans / "tight", plans / "loose").out
    assert "only in b: nothing" in text and "transformer.h.*." in text and memplan.format_bytes(plan.peak_bytes) in text


def test_what_one_plan_alone_offloads(run: Run, plans: Path) -> None:
    facts = run("diff", plans / "loose", plans / "offloads", "--json").facts
    assert "offloaded" in {row["decision"] for row in facts["only_in"]["b"]}
    assert facts["b"]["offloaded_bytes"] > 0 == facts["a"]["offloaded_bytes"]


def test_plans_for_other_steps(run: Run, plans: Path) -> None:
    assert run("diff", plans / "loose", plans / "loose").out.startswith("the same step\n")
    assert run("diff", plans / "loose", plans / "longer").out.startswith("the same step at other sizes\n")
    assert run("diff", plans / "loose", plans / "other").out.startswith("different steps: ")


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

"""The page about a plan: its data are the accountant's, and a browser draws them without a complaint."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from memplan.plans.plan_html import html_text, page_data
from memplan.plans.step_memory import KINDS, planned_memory
from tests.support.browser import browser, opened
from tests.support.zoo import MODELS


@cache
def curve() -> tuple[memplan.Plan, ...]:
    net, sample = MODELS["gpt2"](0)
    return memplan.explore(net, sample, costs="estimate", config="rotor", optimizer=torch.optim.AdamW(net.parameters()))


@cache
def plan() -> memplan.Plan:
    return replace(curve()[0], problem=replace(curve()[0].problem, budget_bytes=curve()[0].peak_bytes + 1000))


@cache
def offloading() -> memplan.Plan:
    net, sample = MODELS["gpt2"](0)
    options: dict[str, Any] = {"host_budget": "1GiB", "link": memplan.Link(1e9, 1e9), "costs": "estimate"}
    found = memplan.explore(net, sample, config="rotor", **options)
    return next(p for p in found if p.offloaded_bytes and p.timeline.stall_s)


def data_in(text: str) -> dict[str, Any]:
    (content,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    found: dict[str, Any] = json.loads(content)
    return found


def test_pictures_have_the_peaks_of_the_accountant() -> None:
    data = data_in(html_text(plan(), curve()))
    assert (data["peak_bytes"], data["unplanned_peak_bytes"]) == (plan().peak_bytes, plan().baseline_peak_bytes)
    assert data["peak"]["bytes"] == planned_memory(plan()).peak_by_kind()
    for name, peak_bytes in (("planned", plan().peak_bytes), ("unplanned", plan().baseline_peak_bytes)):
        picture = data["memory"][name]
        sums = [sum(sizes) for _, _, sizes, _, _ in picture["columns"]]
        assert max(sums) == sums[picture["peak"]["column"]] == picture["peak"]["bytes"] == peak_bytes
        assert all(len(sizes) == len(KINDS) for _, _, sizes, _, _ in picture["columns"])
        edges = [column[0] for column in picture["columns"]]
        assert edges == sorted(edges)
    assert data["memory"]["planned"]["end_s"] == plan().time_s
    assert [point[:2] for point in data["curve"]["line"]] == [[p.peak_bytes, p.time_s] for p in curve()]


def test_what_is_done_with_each_tensor_is_in_the_tables() -> None:
    data = page_data(plan(), None)
    cells = [cell for table in data["tables"] for row in table["rows"] for cell in row[2]]
    left_out = sum(table["left_out"][0] for table in data["tables"])
    decided = [facts["decision"] for _, facts in plan().graph().nodes(data=True) if facts.get("decision")]
    assert len(cells) == len(decided) and not left_out
    assert sorted(cell[1] for cell in cells) == sorted(decided)
    assert data["tables"][0]["title"] == "transformer.h.*"


def test_lanes_are_there_where_something_is_copied() -> None:
    assert page_data(plan(), None)["lanes"] is None
    lanes = page_data(offloading(), None)["lanes"]
    assert {"compute", "out", "in", "stall"} <= lanes["lanes"].keys()
    stall_s = sum(end - begin for begin, end, _, _ in lanes["lanes"]["stall"])
    assert stall_s <= lanes["end_s"] == offloading().time_s


def test_what_runs_again_is_said_to_run_in_backward() -> None:
    assert any("an op of forward, in backward" in text for text in page_data(plan(), None)["strings"])


@pytest.mark.slow
def test_the_page_of_a_deep_model_stays_small() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=32, vocab_size=128, **sizes)).train()
    ids = torch.randint(0, 128, (4, 64))
    sample = {"input_ids": ids, "labels": ids, "use_cache": False}
    deep = memplan.plan(net, sample, 0.5, costs="estimate", config="rotor")
    assert len(html_text(deep).encode()) < 3_000_000
    assert len(deep.report().splitlines()) <= 60
    assert any(table["columns"] == tuple(map(str, range(32))) for table in page_data(deep, None)["tables"])


def test_names_can_not_end_the_script() -> None:
    values = tuple(replace(v, name="</script><b>@@DATA@@") for v in plan().problem.graph.values)
    problem = replace(plan().problem, graph=replace(plan().problem.graph, values=values))
    text = html_text(replace(plan(), problem=problem))
    assert "</script><b>" not in text
    assert any("</script><b>@@DATA@@" in string for string in data_in(text)["strings"])


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    plan().to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@@" not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_what_the_plan_says(scheme: str, tmp_path: Path) -> None:
    offloading().to_html(tmp_path / "report.html")
    with browser(tmp_path / "profile", scheme) as context:
        page, complaints = opened(context, tmp_path / "report.html")
        figures = {name: page.text_content(f'[data-figure="{name}"] b') for name in ("peak", "copied out")}
        assert figures["peak"] == memplan.format_bytes(offloading().peak_bytes)
        assert figures["copied out"] == memplan.format_bytes(offloading().offloaded_bytes)
        assert page.text_content("#planned .peak") == f"peak {memplan.format_bytes(offloading().peak_bytes)}"
        assert page.text_content("#unplanned .peak") == f"peak {memplan.format_bytes(offloading().baseline_peak_bytes)}"
        assert page.text_content("#report") == offloading().report()
        assert not page.is_visible("#tip")
        for place, words in (
            ("#planned .over", "kept"), ("#unplanned .over", "weights"), ("#tables .cell >> nth=3", "of the step"),
            ("#curve .dot >> nth=1", "over the unplanned step"), ("#lanes .over >> nth=2", "from"),
        ):  # fmt: skip
            page.hover(place)
            assert words in page.text_content("#tip")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")
        assert complaints == []


def test_a_browser_shows_the_budget_and_the_curve(tmp_path: Path) -> None:
    plan().to_html(tmp_path / "report.html", curve=curve())
    budget = memplan.format_bytes(plan().problem.budget_bytes or 0)
    with browser(tmp_path / "profile") as context:
        page, complaints = opened(context, tmp_path / "report.html")
        assert page.text_content('[data-figure="budget"] b') == budget
        assert page.text_content("#planned .budget + text") == f"budget {budget}"
        assert page.locator("#curve .dot").count() == len(curve()) + 3
        assert not page.is_visible("#lanes-section")
        for kind, size_bytes in planned_memory(plan()).peak_by_kind().items():
            assert memplan.format_bytes(size_bytes) in page.text_content(f'#contents tr[title="{KINDS[kind]}"]')
        assert complaints == []

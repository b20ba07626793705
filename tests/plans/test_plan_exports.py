"""What other tools open: a trace for Perfetto, a snapshot for memory_viz, a picture."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from torch.cuda import _memory_viz as viz

import memplan
from memplan.plans.memory_viz import snapshot_of
from memplan.plans.step_memory import step_memory
from memplan.problem.data import Problem
from memplan.problem.schedule import Compute, Offload, Prefetch, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers.orders.flat import flatten
from tests.solvers.test_solvers import CALM, some_orders
from tests.support.random_graphs import random_problems
from tests.support.zoo import MODELS


@cache
def offloading() -> memplan.Plan:
    net, sample = MODELS["gpt2"](0)
    options: dict[str, Any] = {"host_budget": "1GiB", "link": memplan.Link(1e9, 1e9), "costs": "estimate"}
    found = memplan.explore(net, sample, config="rotor", **options)
    return next(p for p in found if p.offloaded_bytes and p.recomputed)


def trace_of(plan: memplan.Plan, folder: Path) -> list[dict[str, Any]]:
    plan.to_chrome_trace(folder / "trace.json")
    content = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def test_a_trace_has_every_op_and_every_copy(tmp_path: Path) -> None:
    plan = offloading()
    slices = [event for event in trace_of(plan, tmp_path) if event["ph"] == "X"]
    counts = Counter(event["cat"] for event in slices)
    assert counts["compute"] == sum(isinstance(step, Compute) for step in plan.schedule)
    assert counts["out"] == sum(isinstance(step, Offload) for step in plan.schedule)
    assert counts["in"] == sum(isinstance(step, Prefetch) for step in plan.schedule)
    assert sum(event["args"].get("runs again", False) for event in slices) == len(plan.recomputed)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(plan.time_s * 1e6)
    stalls_us = sum(event["dur"] for event in slices if event["cat"] == "stall")
    assert stalls_us == pytest.approx(plan.timeline.stall_s * 1e6)


def test_counters_of_a_trace_reach_the_peak(tmp_path: Path) -> None:
    counters = [event for event in trace_of(offloading(), tmp_path) if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counters) == offloading().peak_bytes
    times = [event["ts"] for event in counters]
    assert times == sorted(set(times))


def test_arrows_of_a_trace_lead_from_copies_to_the_ops_that_read(tmp_path: Path) -> None:
    events = trace_of(offloading(), tmp_path)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys() and begins
    slices = {(event["tid"], event["ts"]): event for event in events if event["ph"] == "X"}
    for number, begin in begins.items():
        copy, run = slices[begin["tid"], begin["ts"]], slices[ends[number]["tid"], ends[number]["ts"]]
        assert (copy["cat"], run["cat"]) == ("in", "compute")
        assert copy["ts"] + copy["dur"] <= run["ts"] + 1e-3


def replayed(snapshot: dict[str, Any]) -> tuple[int, int]:
    """(most bytes, bytes at the end) of the events, none of which may lie on another."""
    held: dict[int, int] = {}
    most = 0
    whole, *events = snapshot["device_traces"][0]
    for event in events:
        begin, end = event["addr"], event["addr"] + event["size"]
        match event["action"]:
            case "alloc":
                assert whole["addr"] <= begin and end <= whole["addr"] + whole["size"]
                assert all(end <= other or other + size <= begin for other, size in held.items())
                held[begin] = event["size"]
            case "free_requested":
                assert held[begin] == event["size"]
            case "free_completed":
                del held[begin]
        most = max(most, sum(held.values()))
    active = {b["address"]: b["size"] for b in snapshot["segments"][0]["blocks"] if b["state"] == "active_allocated"}
    assert active == held
    return most, sum(held.values())


@CALM
@given(random_problems())
def test_a_snapshot_holds_what_the_accountant_counts(problem: Problem) -> None:
    for order in some_orders(flatten(problem))[:6]:
        schedule = schedule_of(problem.graph, order.tolist())
        timeline = simulate(problem, schedule)
        most, last = replayed(snapshot_of(step_memory(problem, schedule, timeline)))
        assert (most, last) == (timeline.peak_bytes, timeline.live_bytes[-1])


def plain_types(thing: Any) -> set[type]:
    if isinstance(thing, dict):
        return {dict, *(kind for pair in thing.items() for part in pair for kind in plain_types(part))}
    if isinstance(thing, (list, tuple)):
        return {type(thing), *(kind for part in thing for kind in plain_types(part))}
    return {type(thing)}


def test_pytorch_reads_a_snapshot(tmp_path: Path) -> None:
    offloading().to_memory_viz(tmp_path / "plan.pickle")
    content = (tmp_path / "plan.pickle").read_bytes()
    snapshot = pickle.loads(content)
    assert content[:2] == b"\x80\x04"  # protocol 4
    assert plain_types(snapshot) <= {dict, list, tuple, str, int, bool}
    assert replayed(snapshot)[0] == offloading().peak_bytes
    assert "segments: 1" in viz.segsum(snapshot)
    assert "transformer.h.0.mlp.act" in {
        f["name"].split(":")[0] for e in snapshot["device_traces"][0] for f in e["frames"]
    }
    assert viz.trace(snapshot).count("cudaMalloc") == 1
    assert all("snapshot.pickle" in plot(snapshot) for plot in (viz.trace_plot, viz.segment_plot))
    flames: list[str] = []
    viz.memory(snapshot, format_flamegraph=flames.append)
    assert "active_allocated" in flames[0]
    categories = {event.get("category") for event in snapshot["device_traces"][0]}
    assert {"unknown", "inputs", "kept", "fetched"} <= categories


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    offloading().to_png(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_missing_matplotlib_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'memplan\[plot\]'"):
        offloading().to_png(tmp_path / "plan.png")
    assert not (tmp_path / "plan.png").exists()

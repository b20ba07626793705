"""Plan files: what is saved comes back, and whatever else is in the file raises InvalidPlanFile and nothing else."""

from __future__ import annotations

import copy
import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.errors import InvalidPlanFile
from memplan.plans.plan import plan_from_bytes
from memplan.problem.simulate import simulate
from tests.support.zoo import assert_same_bits, run_steps

NEWER = {"knows_optimizer", "tensor", "parameters"}  # what older files do not say

FUZZ = settings(max_examples=100, deadline=None, derandomize=True, database=None)


class Small(nn.Module):
    """Something of all that a plan file can say: random ops, effects, in-place writes, several gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.inner(x)).relu_())
        hidden = self.drop(torch.tanh(self.outer(hidden)))
        return self.outer(hidden).pow(2).mean()


@cache
def built() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Small().train(), torch.randn(128, 8)


@cache
def floor_plan() -> memplan.Plan:
    net, sample = built()
    plan = memplan.explore(net, sample, costs="estimate")[0]
    assert plan.recomputed
    return plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    floor_plan().save(path)
    return path


@cache
def saved_bytes() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        floor_plan().save(path)
        return path.read_bytes()


def sound_or_refused(data: bytes) -> memplan.Plan | None:
    """A plan that keeps its own budget, or None for a file that was refused. Anything else fails the test."""
    try:
        plan = plan_from_bytes(data)
    except InvalidPlanFile as error:
        message = str(error)
        return None if message else pytest.fail("a refusal without a reason")
    timeline = simulate(plan.problem, plan.schedule)
    assert timeline == plan.timeline
    limit = plan.problem.budget_bytes
    assert limit is None or timeline.peak_bytes <= limit
    assert plan.report()
    return plan


def test_a_plan_comes_back_as_it_was(saved: Path) -> None:
    plan, loaded = floor_plan(), memplan.Plan.load(saved)
    assert loaded == plan
    assert loaded.report() == plan.report()
    assert [v.tensor for v in loaded.problem.graph.values] == [v.tensor for v in plan.problem.graph.values]
    again = saved.with_name("again.json")
    loaded.save(again)
    assert again.read_bytes() == saved.read_bytes()


def test_a_loaded_plan_runs_to_the_same_bits(saved: Path) -> None:
    net, sample = built()
    plain = run_steps(copy.deepcopy(net), sample, 3)
    planned = memplan.apply(copy.deepcopy(net), sample, plan=memplan.Plan.load(saved))
    assert memplan.plan_of(planned).recomputed
    assert_same_bits(plain, run_steps(planned, sample, 3))


def test_a_file_that_does_not_say_what_values_are_serves_all_the_same() -> None:
    content = json.loads(saved_bytes())
    for value in content["graph"]["values"]:
        assert value.pop("tensor")
    plan = plan_from_bytes(json.dumps(content).encode())
    assert plan == floor_plan()
    assert {v.tensor for v in plan.problem.graph.values} == {""}
    net, sample = built()
    assert memplan.plan_of(memplan.apply(copy.deepcopy(net), sample, plan=plan)) is not None


def test_what_kernels_ask_for_comes_back_and_fits_their_ops() -> None:
    content = json.loads(saved_bytes())
    graph = content["graph"]
    first = next(
        i for i, op in enumerate(graph["ops"]) if any(graph["values"][v]["reuses"] is None for v in op["outputs"])
    )
    blocks: list[list[int]] = [[-1, 512], [0, 512], [-1, 0]]
    requests = content["costs"]["requests"] = [blocks if i == first else [] for i in range(len(graph["ops"]))]
    read = plan_from_bytes(json.dumps(content).encode()).problem.costs.requests
    assert read[first] == ((-1, 512), (0, 512), (-1, 0))
    for wrong in ([[9, 512]], [[0, 512], [0, 0]], [[-1, 0]], [[-1, 512], [-1, 512]], [[0]], [["0", 512]]):
        requests[first] = wrong
        with pytest.raises(InvalidPlanFile):
            plan_from_bytes(json.dumps(content).encode())
    content["costs"]["requests"] = [blocks]
    with pytest.raises(InvalidPlanFile):
        plan_from_bytes(json.dumps(content).encode())


def test_a_gzipped_plan_is_read_too(saved: Path) -> None:
    assert plan_from_bytes(gzip.compress(saved.read_bytes())) == floor_plan()


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        memplan.Plan.load(tmp_path / "none.json")


def test_a_file_for_another_model_is_refused_when_applied(saved: Path) -> None:
    net, sample = built()
    other = copy.deepcopy(net)
    other.drop.p = 0.0
    with pytest.raises(memplan.PlanMismatch):
        memplan.apply(other, sample, plan=memplan.Plan.load(saved))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"null", b"3", b"\xff\xfe", b"\x1f\x8b", b"\x1f\x8b\x08\x00garbage", b'"memplan.plan"',
        b'{"format": "memplan.plan"}',
        b'{"format": "memplan.plan", "version": 99}', b'{"format": "memplan.plan", "version": true}',
        b"[" * 200_000, b'{"a":' * 200_000,
        b"1" * 10_000, b"NaN", "{}".encode("utf-16"), "{}".encode("utf-32"), b"\xef\xbb\xbf{}",
    ],
    ids=lambda d: repr(d[:20]),
)  # fmt: skip
def test_what_is_no_plan_file(data: bytes) -> None:
    assert sound_or_refused(data) is None


def test_a_gzip_bomb_is_refused_before_it_fills_memory() -> None:
    import zlib

    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    zeros = bytes(16 << 20)
    bomb = b"".join(packer.compress(zeros) for _ in range(72)) + packer.flush()
    assert len(bomb) < 8 << 20
    with pytest.raises(InvalidPlanFile, match="1 GiB"):
        plan_from_bytes(bomb)


def test_nested_gzip_is_no_plan_file() -> None:
    assert sound_or_refused(gzip.compress(gzip.compress(saved_bytes()))) is None


@pytest.mark.parametrize("packed", [False, True], ids=["json", "gzip"])
def test_every_truncation(packed: bool) -> None:
    data = gzip.compress(saved_bytes(), mtime=0) if packed else saved_bytes()
    for end in range(0, len(data) - 1, max(1, len(data) // 60)):
        assert sound_or_refused(data[:end]) is None


@FUZZ
@given(st.data(), st.booleans())
def test_flipped_bytes(data: st.DataObject, packed: bool) -> None:
    content = bytearray(gzip.compress(saved_bytes(), mtime=0) if packed else saved_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    sound_or_refused(bytes(content))


NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**6, -(10**6), 1 << 31, 1 << 63, 1 << 64, 10**40, -(10**40), 10**400, 1e308, 1e-320, -1.0, 0.5]),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.sampled_from(
        [
            "",
            "0",
            "forward",
            "backward",
            "gradient",
            "parameter",
            "tangent",
            "activation",
            "compute",
            "\ud800",
            "\x00",
            "a" * 1000,
        ]
    ),
    st.sampled_from([[], {}, [[]], [None], [0, 0], [0], {"a": 1}, [[0, 1]], [True]]),
)


def spots(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in nested lists and dicts."""
    found = [path] if path else []
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        found += spots(child, (*path, key))
    return found


@cache
def all_spots() -> list[tuple[Any, ...]]:
    return spots(json.loads(saved_bytes()))


def parent_of(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        content = content[key]
    return content


@settings(FUZZ, max_examples=250)
@given(st.data())
def test_one_field_of_the_file_replaced_by_something_nasty(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(all_spots()))
    content = json.loads(saved_bytes())
    parent_of(content, path)[path[-1]] = data.draw(NASTY)
    try:
        encoded = json.dumps(content).encode()
    except ValueError:
        return
    sound_or_refused(encoded)


@cache
def integer_spots() -> list[tuple[Any, ...]]:
    content = json.loads(saved_bytes())
    return [p for p in all_spots() if type(parent_of(content, p)[p[-1]]) is int]


@settings(FUZZ, max_examples=120)
@given(st.data())
def test_integers_of_the_file_exchanged(data: st.DataObject) -> None:
    """Off-by-some indices and sizes: the hardest to notice."""
    content = json.loads(saved_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(integer_spots()))
        parent_of(content, path)[path[-1]] += data.draw(st.sampled_from([-2, -1, 1, 2, 100]))
    sound_or_refused(json.dumps(content).encode())


@settings(FUZZ, max_examples=60)
@given(st.data())
def test_steps_duplicated_removed_or_swapped(data: st.DataObject) -> None:
    content = json.loads(saved_bytes())
    schedule = content["schedule"]
    for _ in range(data.draw(st.integers(1, 3))):
        first, second = (data.draw(st.integers(0, len(schedule) - 1)) for _ in range(2))
        match data.draw(st.sampled_from(["duplicate", "remove", "swap"])):
            case "duplicate":
                schedule.insert(second, schedule[first])
            case "remove":
                del schedule[first]
            case _:
                schedule[first], schedule[second] = schedule[second], schedule[first]
    plan = sound_or_refused(json.dumps(content).encode())
    if plan is not None and plan != floor_plan():
        net, sample = built()
        planned = memplan.apply(copy.deepcopy(net), sample, plan=plan)
        assert_same_bits(
            run_steps(copy.deepcopy(net), sample, 2), run_steps(planned, sample, 2), "another legal schedule"
        )


@settings(FUZZ, max_examples=100)
@given(st.data())
def test_keys_removed_added_or_doubled(data: st.DataObject) -> None:
    content = json.loads(saved_bytes())
    path = data.draw(st.sampled_from([p for p in all_spots() if isinstance(p[-1], str) and p[-1] not in NEWER]))
    parent = parent_of(content, path)
    match data.draw(st.sampled_from(["remove", "add", "double"])):
        case "remove":
            del parent[path[-1]]
            assert sound_or_refused(json.dumps(content).encode()) is None
        case "add":
            parent["surprise"] = 1
            sound_or_refused(json.dumps(content).encode())
        case _:
            text = json.dumps(content)
            sound_or_refused((text[:-1] + ', "schedule": []}').encode())


@pytest.mark.parametrize("budget", [0, 1, 1000])
def test_a_plan_over_its_own_budget(budget: int) -> None:
    content = json.loads(saved_bytes())
    content["budget_bytes"] = budget
    with pytest.raises(InvalidPlanFile, match=f"over its budget of {budget}"):
        plan_from_bytes(json.dumps(content).encode())


def test_smaller_sizes_do_not_smuggle_a_plan_past_the_model() -> None:
    """A file that lies about sizes is consistent with itself, and still not a plan for this model."""
    content = json.loads(saved_bytes())
    for value in content["graph"]["values"]:
        value["size_bytes"] //= 2
    content["floor_bytes"] //= 4
    plan = plan_from_bytes(json.dumps(content).encode())
    net, sample = built()
    with pytest.raises(memplan.PlanMismatch, match="size_bytes"):
        memplan.apply(copy.deepcopy(net), sample, plan=plan)


def test_figures_that_do_not_fit_the_plan_are_refused() -> None:
    """The bound is not above the plan's time, and the smallest budget not above the plan's peak."""
    for key, value in (("lower_bound_s", 1e9), ("floor_bytes", 1 << 50)):
        content = json.loads(saved_bytes())
        content[key] = value
        assert sound_or_refused(json.dumps(content).encode()) is None


def test_a_graph_that_writes_one_memory_twice_is_refused() -> None:
    """Two values can't both take over the memory of a third."""
    content = json.loads(saved_bytes())
    values = content["graph"]["values"]
    reusing = [i for i, v in enumerate(values) if v["reuses"] is not None]
    assert len(reusing) > 1
    values[reusing[1]]["reuses"] = values[reusing[0]]["reuses"]
    assert sound_or_refused(json.dumps(content).encode()) is None

"""The memplan section of a DeepSpeed config, and what is refused. Engines train in tests/ranks/cells_deepspeed.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.ranks.spawn import ROOT
from tests.support.zoo import MODELS

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.deepspeed

from deepspeed.runtime.activation_checkpointing import checkpointing  # noqa: E402

from memplan.integrations.deepspeed import MemplanConfig, attach  # noqa: E402
from memplan.integrations.deepspeed.memory import storage_bytes  # noqa: E402
from memplan.integrations.deepspeed.refusals import _checkpoints  # noqa: E402
from memplan.integrations.deepspeed.watch import Line, merged  # noqa: E402

FULL = {
    "enabled": True, "budget": "70GiB", "per_rank": {"3": "36GiB"}, "per_stage": ["60GiB", 7_000],
    "host_budget": "400GiB", "host_per_rank": {"3": "100GiB"}, "host_per_stage": [7, "9GiB"],
    "preset": "rotor", "costs": "estimate", "kernels": "fused", "random": "counter",
    "on_mismatch": "raise", "on_oom": "replan",
}  # fmt: skip


def of(**section: Any) -> MemplanConfig:
    return MemplanConfig.of({"memplan": section})


def test_a_section_with_every_key(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_batch_size": 1, "memplan": FULL}))
    for source in ({"memplan": FULL}, path, str(path)):
        config = MemplanConfig.of(source)
        assert config.per_rank == {3: "36GiB"}
        assert config.per_stage == ("60GiB", 7_000)
        assert config.host_per_rank == {3: "100GiB"}
        assert config.host_per_stage == (7, "9GiB")
        assert config.apply_keywords() == {
            "config": "rotor", "costs": "estimate", "kernels": "fused", "random": "counter",
            "on_mismatch": "raise", "on_oom": "replan",
        }  # fmt: skip


@pytest.mark.parametrize("source", [{}, {"memplan": None}, {"memplan": {}}, {"memplan": dict.fromkeys(FULL)}, None])
def test_what_is_left_out_or_null_is_automatic(source: Any) -> None:
    assert MemplanConfig.of(source) == MemplanConfig()
    assert MemplanConfig().budget_of(0, 1) is MemplanConfig().host_budget_of(0, 1) is None


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"budgets": 1, "rank": 2}, "no key 'budgets', 'rank'; it has enabled, budget"),
        ({"budget": "auto"}, 'budget is "auto". Leave it out, or write null'),
        ({"budget": "70 bananas"}, "budget: can't read '70 bananas'"),
        ({"budget": 1.5}, r"budget as a fraction of the unplanned peak must be in \(0, 1\]"),
        ({"budget": -1}, "budget must be a number of bytes above 0"),
        ({"budget": True}, "budget must be"),
        ({"budget": ["1GiB"]}, "budget must be"),
        ({"per_rank": {"first": "1GiB"}}, "per_rank has 'first'"),
        ({"per_rank": {"0": "zero"}}, "per_rank.0: can't read"),
        ({"per_rank": ["1GiB"]}, "per_rank must be budgets by global rank"),
        ({"per_stage": "1GiB"}, "per_stage must be a list"),
        ({"per_stage": ["1GiB", None]}, r"per_stage\[1\] must be"),
        ({"host_budget": 0.5}, "host_budget must be a number of bytes"),
        ({"host_per_rank": {"0": 0.5}}, "host_per_rank.0 must be a number of bytes"),
        ({"host_per_rank": {"first": 1}}, "host_per_rank has 'first'"),
        ({"host_per_stage": {"0": 1}}, "host_per_stage must be a list"),
        ({"host_per_stage": [1, 0]}, r"host_per_stage\[1\] must be a number of bytes above 0"),
        ({"enabled": "yes"}, "enabled must be true or false"),
        ({"preset": "fastest"}, "preset: unknown preset 'fastest'; there are "),
        ({"preset": ["auto"]}, "preset: "),
        ({"costs": "guess"}, "costs must be measure or estimate"),
        ({"on_oom": "ignore"}, "on_oom must be raise or replan"),
        ({"on_mismatch": []}, "on_mismatch must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_sections_are_refused_by_name(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        of(**section)


def test_a_section_is_a_section() -> None:
    with pytest.raises(ValueError, match="a section in braces, got 'auto'"):
        MemplanConfig.of({"memplan": "auto"})


def test_the_nearest_budget_goes_first() -> None:
    config = of(budget="4GiB", per_stage=["3GiB", "2GiB"], per_rank={"3": "1GiB"})
    assert [config.budget_of(rank, 4, rank // 2, 2) for rank in range(4)] == ["3GiB", "3GiB", "2GiB", "1GiB"]
    assert of(budget="4GiB", per_rank={"1": 7}).budget_of(0, 2) == "4GiB"
    assert of(per_rank={"1": 7}).budget_of(0, 2) is None
    with pytest.raises(ValueError, match="per_stage has 2 budgets, but there are 3 pipeline stages"):
        config.budget_of(0, 4, 0, 3)
    with pytest.raises(ValueError, match="per_rank has rank 3, but there are ranks 0 to 1"):
        config.budget_of(0, 2, 0, 2)


def test_host_budgets_are_found_in_the_same_way() -> None:
    config = of(host_budget="4GiB", host_per_stage=["3GiB", "2GiB"], host_per_rank={"3": "1GiB"})
    assert [config.host_budget_of(rank, 4, rank // 2, 2) for rank in range(4)] == ["3GiB", "3GiB", "2GiB", "1GiB"]
    assert of(host_budget="4GiB", host_per_rank={"1": 7}).host_budget_of(0, 2) == "4GiB"
    assert of(budget="4GiB", per_stage=["3GiB", "2GiB"]).host_budget_of(0, 2, 1, 2) is None
    with pytest.raises(ValueError, match="host_per_stage has 2 budgets, but there are 3 pipeline stages"):
        config.host_budget_of(0, 4, 0, 3)
    with pytest.raises(ValueError, match="host_per_rank has rank 3, but there are ranks 0 to 1"):
        config.host_budget_of(0, 2, 0, 2)


def test_one_line_for_each_stage_and_budget() -> None:
    lines = [Line(0, 10, 5, "a"), Line(1, 10, 5, "b"), Line(0, 10, 7, "c"), Line(1, 20, 5, "d"), Line(1, 10, 3, "e")]
    assert merged(lines) == ["stage 0, ranks 0, 2: c", "stage 1, ranks 1, 4: b", "stage 1, rank 3: d"]
    assert merged([Line(0, 10, 5, "a")] * 3) == ["stage 0, ranks 0 to 2: a"]


def test_only_engines_are_planned() -> None:
    with pytest.raises(TypeError, match="got Linear where a DeepSpeed engine is needed"):
        attach(nn.Linear(2, 2))


# -- what models bring along ------------------------------------------------------------------------------------------


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.run = checkpointing.checkpoint


class ByModule(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return checkpointing.checkpoint(torch.tanh, x)


class ByLateImport(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        import deepspeed

        return [deepspeed.checkpointing.checkpoint(torch.tanh, x) for _ in range(2)]


class Derived(ByModule):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


class ByTorch(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("build", "found"),
    [(ByAttribute, True), (ByModule, True), (ByLateImport, True), (Derived, True), (ByTorch, False)],
)
def test_checkpointing_of_deepspeed_is_found(build: Callable[[], nn.Module], found: bool) -> None:
    assert _checkpoints(build()) is found
    assert not any(map(_checkpoints, nn.Sequential(nn.Linear(2, 2), nn.Dropout()).modules()))


def test_models_of_transformers_are_not_taken_for_such() -> None:
    pytest.importorskip("transformers")
    assert not any(map(_checkpoints, MODELS["gpt2"](0)[0].modules()))


# -- what an engine holds ---------------------------------------------------------------------------------------------


def test_storages_count_once_and_by_device() -> None:
    whole = torch.zeros(100)
    views = [whole[:10], whole[50:], torch.zeros(3)]
    assert storage_bytes(views, torch.device("cpu")) == 412
    assert storage_bytes(views, torch.device("cpu"), without=[whole]) == 12
    assert storage_bytes(views, torch.device("cuda")) == 0


def plan_of_layers(takes_gradients: bool) -> memplan.Plan:
    """Twelve small layers: more gradients than are handed over at once."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)])
    around = memplan.Surroundings(held_bytes=1000, after_bytes=500, takes_gradients=takes_gradients)
    return memplan.plan(model, torch.randn(4, 16), 1.0, costs="estimate", surroundings=around)


def test_gradients_that_are_taken_are_not_held() -> None:
    held, taken = plan_of_layers(False), plan_of_layers(True)
    assert held.problem.resident_bytes == taken.problem.resident_bytes
    assert held.problem.extra_resident_bytes == 1000
    gradient_bytes = sum(v.size_bytes for v in held.problem.graph.values if v.role == "gradient")
    assert held.timeline.live_bytes[-1] - taken.timeline.live_bytes[-1] == gradient_bytes
    assert taken.peak_bytes < held.peak_bytes
    assert held.peak_bytes >= held.timeline.live_bytes[-1] + 500


def test_what_is_taken_is_in_a_saved_plan(tmp_path: Path) -> None:
    plan = plan_of_layers(True)
    plan.save(tmp_path / "plan.json")
    assert memplan.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_example() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(ROOT / "examples" / "deepspeed_finetune.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of all ranks are the same numbers" in done.stdout
    for words in ("stage 0, rank 0: budget 20 MiB", "stage 0, rank 1: budget 24 MiB", "the first step peaked at"):
        assert words in done.stderr

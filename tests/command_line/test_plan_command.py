"""`memplan plan` and `memplan explore` plan what Python would, without weights, and say whether it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from memplan import torch_private
from memplan.command_line.cards import ACHIEVED, card_named
from memplan.planning import limits
from tests.command_line.conftest import SMALL_GPT2, Run


def small_gpt2() -> tuple[torch.nn.Module, dict[str, Any]]:
    """What `SMALL_GPT2` describes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128, use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).train()
    ids = torch.zeros(4, 64, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}


def test_a_plan_has_the_figures_of_python(run: Run, tmp_path: Path) -> None:
    model, sample = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    card = card_named("RTX 4090")
    costs = memplan.Roofline(ACHIEVED * 165.2e12, ACHIEVED * 1008e9, 5e-6, (8, 9))
    expected = memplan.plan(model, sample, "19.5MiB", optimizer=optimizer, device="cpu", costs=costs)
    file = tmp_path / "a.plan"
    said = run("plan", *SMALL_GPT2, "--budget", "19.5MiB", "--out", file, "--json")
    assert said.status == 0 and said.facts["fits"]
    assert card.roofline(single=False) == costs
    for name in ("peak_bytes", "baseline_peak_bytes", "floor_bytes", "time_s", "overhead", "solver"):
        assert said.facts[name] == getattr(expected, name)
    assert said.facts["recomputed_ops"] == len(expected.recomputed) > 0
    assert said.facts["tokens_per_s"] == 4 * 64 / expected.time_s
    assert memplan.Plan.load(file).schedule == expected.schedule


def test_a_budget_that_can_not_be_met(run: Run) -> None:
    told = run("plan", *SMALL_GPT2, "--budget", "1MiB")
    assert told.status == 3
    assert "does not fit: no schedule fits 1 MiB" in told.out
    counted = run("plan", *SMALL_GPT2, "--budget", "1MiB", "--json")
    assert counted.status == 3 and counted.facts["fits"] is False
    again = run("plan", *SMALL_GPT2, "--budget", counted.facts["floor_bytes"])
    assert again.status == 0 and again.out.splitlines()[3].startswith("fits")


@pytest.mark.slow
@pytest.mark.full_search
def test_what_would_make_it_fit(run: Run) -> None:
    floor_bytes = run("plan", *SMALL_GPT2, "--budget", "min", "--json").facts["peak_bytes"]
    told = run("plan", *SMALL_GPT2, "--budget", floor_bytes - 1, "--json").facts
    assert told["remedies"] and all(r["peak_bytes"] < floor_bytes for r in told["remedies"])
    assert all(remedy["change"] in told["message"] for remedy in told["remedies"])


def test_the_batch_that_is_fastest(run: Run) -> None:
    facts = run("plan", *SMALL_GPT2, "--budget", "24MiB", "--largest-batch", 24, "--json").facts
    assert facts["fits"] and facts["batch"] * facts["accumulation"] == 24 and facts["peak_bytes"] <= 24 * 2**20
    assert run("plan", *SMALL_GPT2, "--budget", "50%", "--largest-batch").status == 1


def test_without_a_budget_a_tenth_of_the_card_is_left(run: Run) -> None:
    for memory in ((), ("--gpu-memory", "10GiB")):
        facts = run("plan", *SMALL_GPT2, *memory, "--json").facts
        whole_bytes = (10 if memory else 24) * 2**30
        assert whole_bytes * 0.9 - 1 <= facts["budget_bytes"] <= whole_bytes * 0.9


def test_figures_of_the_users_own(run: Run) -> None:
    card = ("--gpu-memory", "1GiB", "--flops", "1e12", "--bandwidth", "1e11")
    own = run("plan", *SMALL_GPT2[:-2], *card, "--json").facts
    over = run("plan", *SMALL_GPT2, *card, "--json").facts
    assert own["time_s"] == over["time_s"] > run("plan", *SMALL_GPT2, "--json").facts["time_s"]


def test_this_machine_where_no_card_is_named(run: Run) -> None:
    said = run("plan", *SMALL_GPT2[:-2], "--json")
    assert said.status == 0 and "this machine" in said.facts["device"] and said.facts["costs"] == "estimated"


def test_this_machines_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned for as a card of the table, with the memory that it has room for now."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(limits, "automatic_bytes", lambda device: 10**9)
    facts = run("plan", *SMALL_GPT2[:-2], "--json").facts
    assert abs(facts["budget_bytes"] - 10**9) <= 1
    assert facts["time_s"] == run("plan", *SMALL_GPT2, "--json").facts["time_s"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Voodoo 2")
    assert "this machine" in run("plan", *SMALL_GPT2[:-2], "--json").facts["device"]


def test_fused_kernels(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled for a plan on paper, but it is refused where nothing could be."""
    assert run("plan", *SMALL_GPT2, "--kernels", "fused", "--json").facts["exact"] == "program"
    monkeypatch.setattr(torch_private, "missing_compiler", lambda device: "a compiler")
    said = run("plan", *SMALL_GPT2, "--kernels", "fused")
    assert said.status == 1 and "it needs a compiler" in said.err


def test_a_curve(run: Run) -> None:
    facts = run("explore", *SMALL_GPT2, "--json").facts
    peaks = [point["peak_bytes"] for point in facts["points"]]
    times = [point["time_s"] for point in facts["points"]]
    assert len(peaks) > 2 and peaks == sorted(peaks) and times == sorted(times, reverse=True)
    within = (peaks[0] + peaks[-1]) // 2
    said = run("explore", *SMALL_GPT2, "--budget", within)
    marked = [line for line in said.out.splitlines() if line.startswith("*")]
    best = max(peak for peak in peaks if peak <= within)
    assert said.status == 0 and len(marked) == 1 and memplan.format_bytes(best) in marked[0]
    assert run("explore", *SMALL_GPT2, "--budget", peaks[0] - 1).status == 3


def test_adapters_and_the_host(run: Run) -> None:
    pytest.importorskip("peft")
    whole = run("plan", *SMALL_GPT2, "--json").facts
    adapted = run("plan", *SMALL_GPT2, "--lora", "2", "--json").facts
    assert adapted["baseline_peak_bytes"] < whole["baseline_peak_bytes"] and "rank 2" in adapted["model"]
    offloaded = run(
        "plan", *SMALL_GPT2, "--budget", "19.5MiB", "--host-budget", "1GiB", "--update", "backward", "--json"
    )
    assert offloaded.status == 0 and offloaded.facts["host_bytes"] > 0


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "none"])
def test_optimizers(run: Run, optimizer: str) -> None:
    with_state = run("plan", *SMALL_GPT2, "--json").facts["resident_bytes"]
    assert run("plan", *SMALL_GPT2, "--optimizer", optimizer, "--json").facts["resident_bytes"] < with_state


def test_a_config_file_and_its_folder(run: Run, tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["GPT2LMHeadModel"]}))
    expected = run("plan", *SMALL_GPT2, "--json").facts
    for place in (tmp_path, tmp_path / "config.json"):
        assert run("plan", place, *SMALL_GPT2[9:], "--json").facts == expected
    quantised = {**fields, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    assert "not quantised" in run("plan", tmp_path, *SMALL_GPT2[9:], "--json").facts["remark"]


def test_a_folder_with_the_name_of_a_model(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "other").mkdir()
    assert run("plan", *SMALL_GPT2).status == 0
    assert "folder with a config.json" in run("plan", "other").err


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("bert", "--set", "num_hidden_layers=1"), marks=pytest.mark.slow),
        pytest.param(("BertForSequenceClassification", "--set", "num_hidden_layers=1"), marks=pytest.mark.slow),
        pytest.param(("BertForQuestionAnswering", "--set", "num_hidden_layers=1"), marks=pytest.mark.slow),
        ("t5", "--set", "num_layers=1"),
        pytest.param(("vit", "--set", "num_hidden_layers=1"), marks=pytest.mark.slow),
        ("clip", "--set", "vision_config.num_hidden_layers=1", "--set", "vision_config.image_size=64"),
        pytest.param(("whisper", "--set", "encoder_layers=1", "--set", "decoder_layers=1"), marks=pytest.mark.slow),
        ("AutoencoderKL",),
        pytest.param(("UNet2DModel", "--set", "sample_size=32"), marks=pytest.mark.slow),
        pytest.param(("UNet2DConditionModel", "--lora", "4"), marks=pytest.mark.slow),
    ],
    ids=lambda arguments: arguments[0],
)
def test_kinds_of_models(run: Run, arguments: tuple[str, ...]) -> None:
    pytest.importorskip("diffusers" if arguments[0].endswith(("KL", "Model")) else "transformers")
    said = run("plan", *arguments, "--length", "32", "--gpu", "h100", "--json")
    assert said.status == 0, said
    assert said.facts["fits"] and said.facts["peak_bytes"] > 0


def test_functions_that_make_models(run: Run, builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run("plan", f"{builds}:build", "--gpu", "h100", "--json")
    assert file.status == 0
    larger = run("plan", f"{builds}:build", "--gpu", "h100", "--batch", "128", "--json")
    assert larger.facts["peak_bytes"] > file.facts["peak_bytes"]
    monkeypatch.chdir(builds.parent)
    assert run("plan", "builds:build", "--gpu", "h100", "--json").facts["peak_bytes"] == file.facts["peak_bytes"]
    assert run("plan", "builds:with_loss", "--gpu", "h100", "--json").facts["ops"] > file.facts["ops"]


def test_float32_has_its_own_speed(run: Run) -> None:
    half, single = (run("plan", *SMALL_GPT2, "--dtype", dtype, "--json").facts for dtype in ("float16", "float32"))
    assert half["peak_bytes"] < single["peak_bytes"]
    assert "82.6" not in half["device"] and f"{ACHIEVED * 82.6:.4g} TFLOP/s" in single["device"]


def test_a_card_without_bfloat16_says_so(run: Run) -> None:
    for dtype, told in (("bfloat16", True), ("float16", False), ("float32", False)):
        facts = run("plan", *SMALL_GPT2[:-1], "t4", "--dtype", dtype, "--json").facts
        assert ("it has no bfloat16" in facts["device"]) == told


def test_what_a_function_prints_is_not_in_the_json(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "talks.py"
    path.write_text(
        "import torch\ndef build():\n    print('hello')\n    return torch.nn.Linear(2, 2), torch.zeros(2, 2)\n"
    )
    said = run("plan", f"{path}:build", "--json")
    assert said.facts["fits"] and "hello" in said.err


def test_a_text_beyond_the_positions_of_rotary_embeddings(run: Run) -> None:
    small = ("--set", "num_hidden_layers=1", "--set", "hidden_size=64", "--set", "num_attention_heads=2")
    said = run("plan", "llama", *small, "--length", "4096", "--gpu", "h100", "--set", "intermediate_size=64")
    assert said.status == 0 and "note: length 4096 is beyond the 2048 positions" in said.out


@pytest.mark.slow
@pytest.mark.full_search
def test_a_large_model_on_a_card(run: Run) -> None:
    """Eight billion parameters: neither weights nor the card are here."""
    fields = {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
              "intermediate_size": 14336}  # fmt: skip
    changes = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    said = run("plan", "llama", *changes, "--lora", "--length", "2048", "--gpu", "RTX 4090", "--json")
    assert said.status == 0 and said.facts["peak_bytes"] <= said.facts["budget_bytes"] < 22 * 2**30
    assert said.facts["baseline_peak_bytes"] > 24 * 2**30

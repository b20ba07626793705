"""What a user gets wrong is answered with what is wrong, its cause and the next step, and never with a traceback."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from memplan.command_line.commands import main
from tests.command_line.conftest import SMALL_GPT2, Run

SMALL = SMALL_GPT2[:-6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "gpt3"), "'gpt3' is no model"),
        (("plan", "gpt3"), "'gpt2'"),
        (("plan", "LlamaForCausalML"), "'LlamaForCausalLM'"),
        (("plan", "meta-llama/Llama-3-8B"), "memplan downloads nothing"),
        (("plan", "nowhere/config.json"), "no such file"),
        (("plan", "nowhere.py:build"), "there is no file 'nowhere.py'"),
        (("plan", "no.where:build"), "there is no module 'no.where'"),
        (("plan", "json:loads", "--set", "a=1"), "--set and --dtype are for configs"),
        (("plan", "json:laods"), "'loads'"),
        (("plan", "json:loads", "--batch", "2"), "has no parameter 'batch'"),
        (("plan", *SMALL, "--gpu", "rtx 4900"), "'RTX 4090'"),
        (("plan", *SMALL, "--gpu", "a100"), "'A100-40GB', 'A100-80GB'"),
        (("plan", *SMALL, "--flops", "1e12"), "--gpu-memory, --bandwidth are missing"),
        (("plan", *SMALL, "--gpu-memory", "much", "--gpu", "t4"), "--gpu-memory 'much' is no memory"),
        (("plan", *SMALL, "--budget", "8XB"), "--budget '8XB' is no budget"),
        (("plan", *SMALL, "--budget", "150%"), "(0, 1]"),
        (("plan", *SMALL, "--budget", "0"), "more than 0 bytes"),
        (("plan", *SMALL, "--host-budget", "50%"), "--host-budget '50%' is no budget"),
        (("explore", *SMALL, "--budget", "8XB"), "--budget '8XB' is no budget"),
        (("plan", *SMALL, "--set", "n_layers=2"), "'n_layer'"),
        (("plan", *SMALL, "--set", "n_layer.deep=2"), "no such field"),
        (("plan", *SMALL, "--set", "n_layer"), "sets nothing"),
        (("plan", *SMALL, "--set", "n_head=7"), "can't be made of this config"),
        (("plan", *SMALL, "--set", "n_layer=many"), "can't be made of this config"),
        (("plan", *SMALL, "--length", "1025"), "--length 1025 is too long"),
        (("plan", *SMALL, "--update", "backward", "--optimizer", "none"), "do not go together"),
        (("plan", *SMALL, "--budget", "min", "--host-budget", "1GiB"), "do not go together"),
        (("plan", *SMALL, "--length", "8", "--gpu", "t4", "--out", "/nowhere/a.plan"), "can't be saved"),
        (("plan", "StableDiffusionPipeline"), "'StableDiffusionPipeline' is no model"),
        (("report", "nowhere.plan"), "there is no plan in 'nowhere.plan'"),
        (("audit", "gpt2"), "'gpt2' is no function"),
        (("audit", "json:loads", "--batch", "2"), "has no parameter 'batch'"),
    ],
    ids=lambda value: " ".join(value[:1] + value[-2:]) if isinstance(value, tuple) else None,
)
def test_what_can_be_wrong(run: Run, arguments: tuple[str, ...], words: str) -> None:
    pytest.importorskip("transformers")
    said = run(*arguments)
    assert said.status == 1 and said.out == ""
    assert re.search(r"^memplan: .+\n  cause: .+\n(         .*\n)*  next:  .+\n\Z", said.err, re.MULTILINE)
    assert words in said.err and "Traceback" not in said.err
    error = run(*arguments, "--json").facts["error"]
    assert set(error) == {"what", "cause", "next"} and all(error.values())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("broken", "ArithmeticError: of the user"),
        ("unfit", "it returned a Sequential"),
        ("number", "is no function"),
        ("biuld", "'build'"),
    ],
)
def test_functions_that_give_no_model(run: Run, builds: Path, function: str, words: str) -> None:
    said = run("plan", f"{builds}:{function}")
    assert said.status == 1 and words in said.err and "Traceback" not in said.err


def test_the_line_of_an_error_is_named(run: Run, builds: Path) -> None:
    line = builds.read_text().splitlines().index('    raise ArithmeticError("of the user")') + 1
    assert f"({builds}:{line})" in run("plan", f"{builds}:broken").err
    builds.write_text("import nothing_like_this")
    assert "ModuleNotFoundError" in run("plan", f"{builds}:build").err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is no config"),
        ("{}", "neither 'model_type' nor '_class_name'"),
        (json.dumps({"model_type": "gpt9"}), "model_type 'gpt9' is unknown"),
        (json.dumps({"_class_name": "StableDiffusionPipeline"}), "is no model of diffusers"),
        (json.dumps({"model_type": "gpt2", "n_head": 7}), "can't be made of this config"),
    ],
)
def test_configs_that_are_none(run: Run, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    said = run("plan", tmp_path)
    assert said.status == 1 and words in said.err and "Traceback" not in said.err


def test_libraries_that_are_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("transformers", "diffusers"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = run("plan", "gpt2")
    assert said.status == 1 and "pip install transformers diffusers" in said.err


def test_files_that_are_no_plan(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    path.write_text("{}")
    said = run("report", path)
    assert said.status == 1 and "not a memplan plan file" in said.err and "memplan plan" in said.err
    assert run("report", tmp_path).status == 1


def test_a_forward_that_raises(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "raises.py"
    path.write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x).foo\n"
        "def build():\n    return Net(2, 2), torch.zeros(2, 2)\n"
    )
    said = run("plan", f"{path}:build")
    assert said.status == 1 and "has no attribute 'foo'" in said.err and "Traceback" not in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("plna", "gpt2"),
        ("plan",),
        ("plan", "gpt2", "--batch", "0"),
        ("plan", "gpt2", "--length", "1.5"),
        ("plan", "gpt2", "--flops", "-1"),
        ("plan", "gpt2", "--dtype", "int8"),
        ("explore", "gpt2", "--update", "backward"),
        ("report",),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(arguments)
    assert status.value.code == 2
    assert "usage: memplan" in capsys.readouterr().err

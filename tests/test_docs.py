"""What the README and the pages show runs, what they link to is there, and the pages make a site."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memplan
from tests.support.measured_steps import Applied, measured_steps
from tests.support.zoo import MODELS, assert_same_bits, copied

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PROGRAMS = (
    "tutorial",
    "trainer",
    "own_loop",
    "trl",
    "lightning",
    "accelerate",
    "audit",
)  # with all that they need
LOOPS = (  # with and without plans: the same bits
    *("contrastive", "diffusers", "distillation", "own_networks", "peft", "trl_online", "trl_packed"),
)
OF_RANKS = ("ddp", "deepspeed", "fsdp", "pipelines")  # whose program is for torchrun
SLOW = ("fused", "largest", "lengths", "long_context", "offload", "trl", "trainer", "tutorial", "without_gpu")
# What libraries have to say about their own defaults and about a machine without a GPU.
THEIR_WARNINGS = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


def blocks_of(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


README = blocks_of(ROOT / "README.md")
OTHERS = [path for path in PAGES if path.stem not in OF_RANKS + LOOPS and blocks_of(path)]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_commands_and_files_that_pages_name_are_there() -> None:
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    modules = set(re.findall(r"python -m\s((?:benchmarks|tests|memplan)[\w.]*)", text))
    files = {ROOT / re.sub(r"\.$", "", name).replace(".", "/") for name in modules}
    assert len(files) > 5
    assert [file for file in files if not (file.is_dir() or file.with_suffix(".py").exists())] == []
    named = set(re.findall(r"`((?:examples|benchmarks|tests|constraints)/[\w./-]+)`", text))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_pages_make_a_site(tmp_path: Path) -> None:
    """Strictly: a link, an anchor or a name of the reference that leads nowhere is an error."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "memplan.apply" in (tmp_path / "reference" / "index.html").read_text()
    loaded = r'<(?:script|link)[^>]*(?:src|href)="https?://'
    assert not [page for page in tmp_path.rglob("*.html") if re.search(loaded, page.read_text())]


def test_the_complete_script(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = README[0].replace("max_steps=8", "max_steps=2").replace("n_layer=4", "n_layer=2")
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    assert re.search(r"^memplan: peak .* of .* \(unplanned .*; planned in .* s$", child.stderr, re.MULTILINE)
    assert "<memplan.Plan: peak" in child.stdout


@THEIR_WARNINGS
@pytest.mark.parametrize("block", README[1:], ids=lambda block: block.splitlines()[0][:40])
def test_a_block(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are a part of a program, in one that has what they name."""
    monkeypatch.chdir(tmp_path)
    exec(block, _surroundings(tmp_path))


@THEIR_WARNINGS
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in OTHERS],
)
def test_the_blocks_of_a_page(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as the page has them. Recipes are programs of their own."""
    for package in re.findall(r"^(?:from|import) (\w+)", "\n".join(blocks_of(path)), re.MULTILINE):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"} if path.stem in PROGRAMS else _surroundings(tmp_path)
    for block in blocks_of(path):
        exec(compile(block.replace('device="cuda"', 'device="cpu"'), path.name, "exec"), names)
    if path.stem == "report":
        assert (tmp_path / "report.html").exists()


def trained(path: Path) -> tuple[Any, list[Any]]:
    """Losses of the programs of a page, and the state of each model that they have at the end of a block."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    states: list[Any] = []
    for block in blocks_of(path):
        exec(compile(block, path.name, "exec"), names)
        models = [m for m in (*names.values(), *names.get("trained", ())) if isinstance(m, torch.nn.Module)]
        states += [copied({k: t for k, t in m.state_dict().items() if isinstance(t, torch.Tensor)}) for m in models]
    return names["losses"], states


@pytest.mark.slow
@THEIR_WARNINGS
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_has_the_bits_of_the_unplanned_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the written budgets, at the floor, and half way from there to the unplanned peak: plans that recompute.

    Budgets beside host memory stay as written: there, "min" is refused, and nothing has to be recomputed. At the floor
    of the first call, others of another length, or of other parameters, have the least that they can do with.
    """
    path = DOCS / "recipes" / f"{name}.md"
    for package in re.findall(r"^(?:from|import) (\w+)", "\n".join(blocks_of(path)), re.MULTILINE):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMPLAN_DISABLE", "1")
    plain = trained(path)
    plans = capsys.readouterr().out.count("None\n")
    monkeypatch.delenv("MEMPLAN_DISABLE")
    assert len(plain[0]) >= 3

    def planned(budgets: list[Any] | None) -> list[Applied]:
        with measured_steps(budgets) as calls:
            assert_same_bits(plain, trained(path))
        assert capsys.readouterr().out.count("<memplan.Plan") == plans > 0
        for applied in calls:
            assert applied.over == []
            assert any(plan.recomputed or plan.offloaded_bytes for plan in applied.plans), applied.budget
        return calls

    written = planned(None)
    on_host = [any(plan.host_bytes for plan in applied.plans) for applied in written]
    at_floor = planned([None if host else "min" for host in on_host])
    half_way = [None if host else applied.half_way for host, applied in zip(on_host, at_floor, strict=True)]
    for applied, limit_bytes in zip(planned(half_way), half_way, strict=True):
        assert limit_bytes is None or max(plan.peak_bytes for plan in applied.plans) <= limit_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_RANKS)
def test_a_program_of_two_ranks(name: str, tmp_path: Path) -> None:
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    (program,) = blocks_of(DOCS / "recipes" / f"{name}.md")
    (tmp_path / "train.py").write_text(program)
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ran = subprocess.run(
        [*torchrun, "train.py"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("<memplan.P") == 2


def _surroundings(folder: Path) -> dict[str, Any]:
    """What blocks find that are a part of a program: a small model, batches for it, and what trains it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from memplan.integrations.huggingface import MemplanCallback

    model, batch = MODELS["gpt2"](0)
    sample = {key: of.repeat(8, 1) if isinstance(of, torch.Tensor) else of for key, of in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return {
        "memplan": memplan, "torch": torch, "Trainer": transformers.Trainer, "MemplanCallback": MemplanCallback,
        "LlamaForCausalLM": transformers.LlamaForCausalLM, "config": MODELS["llama"](0)[0].config,
        "model": model, "module": types.SimpleNamespace(net=model), "peft_model": model,
        "sample": sample, "loader": [sample] * 2, "optimizer": optimizer,
        "fill": lambda name, tensor: tensor.normal_(std=0.02),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "args": transformers.TrainingArguments(str(folder), **options),
        "data": [{"input_ids": row, "labels": row} for row in sample["input_ids"]],
    }  # fmt: skip

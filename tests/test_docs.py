"""What the README shows runs, and what it links to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from tests.support.zoo import MODELS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
REPORT_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "report.md").read_text(), re.DOTALL)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("path", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_the_complete_script(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = BLOCKS[0].replace("max_steps=8", "max_steps=2")
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    assert re.search(r"^memplan: peak .* of .* \(unplanned .*; planned in .* s$", child.stderr, re.MULTILINE)
    assert "<memplan.Plan: peak" in child.stdout


@pytest.mark.parametrize("block", BLOCKS[1:], ids=lambda block: block.splitlines()[0][:40])
def test_a_block(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are a part of a program, in one that has what they name."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).train()
    ids = torch.randint(0, 64, (4, 16))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    options = {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    names: dict[str, Any] = {
        "memplan": memplan, "model": model, "sample": batch, "loader": [batch] * 2,
        "optimizer": torch.optim.AdamW(model.parameters()), "Trainer": transformers.Trainer,
        "args": transformers.TrainingArguments(str(tmp_path), **options),
        "data": [{"input_ids": row, "labels": row} for row in ids],
    }  # fmt: skip
    if "MemplanCallback" in block:
        from memplan.integrations.huggingface import MemplanCallback

        names["MemplanCallback"] = MemplanCallback
    exec(block, names)


def test_the_blocks_about_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as the page has them."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    model, batch = MODELS["gpt2"](0)
    sample = {key: of.repeat(8, 1) if isinstance(of, torch.Tensor) else of for key, of in batch.items()}
    names = {"memplan": memplan, "model": model, "sample": sample, "optimizer": torch.optim.AdamW(model.parameters())}
    for block in REPORT_BLOCKS:
        exec(block, names)
    files = {"report.html", "memory.png", "trace.json", "plan.pickle"}
    assert files <= {path.name for path in tmp_path.iterdir()}

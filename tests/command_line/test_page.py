"""What docs/command_line.md shows is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from memplan.command_line.cards import ACHIEVED, CARDS
from tests.command_line.conftest import Run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "command_line.md").read_text()
(FUNCTION,) = re.findall(r"```python\n# my_model.py\n(.*?)```", PAGE, re.DOTALL)
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", "")
FOUND = re.findall(r"^\$ memplan (.*)\n((?:(?!\$ ).*\n)*)", CONSOLE, re.MULTILINE)
COMMANDS = [(line, shown.strip().splitlines()) for line, shown in FOUND]
LARGE = "num_hidden_layers=32"


def check(run: Run, commands: list[tuple[str, list[str]]]) -> None:
    """Each prints the first line that the page has, and lines that begin like the others: figures may differ."""
    for line, shown in commands:
        said = run(*shlex.split(line))
        printed = (said.out + said.err).splitlines()
        begins = {text.split()[0] for text in printed if text}
        assert said.status == (1 if shown and shown[0].startswith("memplan: ") else 0), said
        assert not shown or shown[0] == printed[0]
        assert [text for text in shown if text and text.split()[0] not in begins] == []


def test_small_examples(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(FUNCTION)
    small = [(line, shown) for line, shown in COMMANDS if LARGE not in line]
    assert len(small) > 4
    check(run, small)


@pytest.mark.slow
def test_large_examples(run: Run) -> None:
    pytest.importorskip("peft")
    large = [(line, shown) for line, shown in COMMANDS if LARGE in line]
    assert large
    check(run, large)


def test_the_table_of_cards() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([\d.]+) GiB \|" + r" ([\d.]+) TFLOP/s \|" * 2 + r" ([\d.]+) GB/s \|" * 2, PAGE, re.M
    )
    scales = (2**30, 1e12, 1e12, 1e9, 1e9)
    figures = [
        (c.memory_bytes, c.half_flops_per_s, c.single_flops_per_s, c.bytes_per_s, c.link_bytes_per_s) for c in CARDS
    ]
    shown = [tuple(f"{size / scale:.4g}" for size, scale in zip(row, scales)) for row in figures]
    assert [(name, tuple(cells)) for name, *cells in rows] == [(c.name, row) for c, row in zip(CARDS, shown)]
    assert f"reckon with {ACHIEVED} of every speed" in PAGE

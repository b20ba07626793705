"""`memplan audit`: what it prints, its JSON and its exit status."""

from __future__ import annotations

from pathlib import Path

from tests.command_line.conftest import Run


def test_a_step_without_faults(run: Run, builds: Path) -> None:
    said = run("audit", f"{builds}:with_loss")
    assert said.status == 0
    assert "exact: 1 output" in said.out
    assert run("audit", f"{builds}:with_loss", "--json").facts["exact"]


def test_a_step_with_a_fault(run: Run, builds: Path) -> None:
    said = run("audit", f"{builds}:wrong")
    assert said.status == 3
    assert "not exact: " in said.out
    facts = run("audit", f"{builds}:wrong", "--json").facts
    assert not facts["exact"]
    assert facts["switched_off"] == ["1 checkpoint"]
    assert {one["kind"] for one in facts["findings"]} >= {"gradient", "generator"}
    assert {one["largest"] for one in facts["findings"] if one["kind"] == "generator"} == {None}


def test_a_step_that_fails(run: Run, builds: Path) -> None:
    said = run("audit", f"{builds}:broken")
    assert said.status == 1
    assert "ArithmeticError: of the user" in said.err

"""Every message that users can meet is in the page about them, and the page has no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PATTERNS = re.findall(r"^\| `([^`]+)` \| .* \| .*\|$", PAGE, re.MULTILINE)
ERRORS = {
    "BudgetInfeasible", "MemplanError", "NothingToTrain", "OtherBranch",
    "PlanMismatch", "Refusal", "UnsupportedModel",
}  # fmt: skip
TREES = [ast.parse(p.read_text()) for folder in ("memplan", "integrations") for p in (ROOT / folder).rglob("*.py")]


def text_of(node: ast.AST) -> str:
    """A message as the source has it, with `…` for what is not known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d)?[a-z]", "…", node.value).replace("%%", "%")
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return "…"


def messages() -> Iterator[str]:
    """First arguments of errors that are made, and of warnings that are logged, where they have words of their own."""
    for tree in TREES:
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and call.args:
                name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                text = text_of(call.args[0])
                if name in ERRORS | {"warning"} and len(re.findall(r"\w{3,}", text)) > 1:
                    yield text


def expression(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("…"))), re.DOTALL)


def test_every_message_is_in_the_page() -> None:
    known = [expression(pattern) for pattern in PATTERNS]
    assert len(known) > 100
    assert sorted({text for text in messages() if not any(e.match(text) for e in known)}) == []


def test_the_page_has_no_message_that_is_gone() -> None:
    texts = [text_of(node) for tree in TREES for node in ast.walk(tree)]
    assert [pattern for pattern in PATTERNS if not any(map(expression(pattern).match, texts))] == []

"""How often memplan steers by exceptions of its own, read from the source. Between layers go results.

Errors of `memplan/errors.py` are for users. An exception of another kind has to cross frames that are not memplan's:
the user's forward, PyTorch's engine. Both figures may fall, and must not rise.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "memplan"
FILES = sorted(PACKAGE.rglob("*.py"))
PUBLIC = PACKAGE / "errors.py"

MOST_KINDS = 5
MOST_CATCHES = 12  # `except`, and `contextlib.suppress`, that name errors of memplan


def name_of_type(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def kinds_in(trees: Iterable[ast.Module], known: Iterable[str] = ()) -> set[str]:
    """Names of classes of exceptions, those of Python and those that are known left out."""
    bases = {
        node.name: {name_of_type(base) for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    python = {n for n, t in vars(builtins).items() if isinstance(t, type) and issubclass(t, BaseException)}
    found = set(known)
    while new := {name for name, of in bases.items() if of & (found | python)} - found:
        found |= new
    return {name for name in found if not name.endswith("Warning")} - set(known)


def catches_in(tree: ast.Module, kinds: set[str]) -> Iterator[int]:
    """Lines at which exceptions of these kinds are caught."""
    for node in ast.walk(tree):
        caught: list[ast.expr] = []
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = [node.type]
        elif isinstance(node, ast.Call) and name_of_type(node.func) == "suppress":
            caught = node.args
        if any(name_of_type(part) in kinds for one in caught for part in ast.walk(one)):
            yield node.lineno


def parsed(paths: Iterable[Path]) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in paths}


def test_few_kinds_of_exceptions_are_internal() -> None:
    public = kinds_in(parsed([PUBLIC]).values())
    found = kinds_in(parsed(FILES).values(), public)
    assert len(found) <= MOST_KINDS, sorted(found)


def test_own_errors_are_rarely_caught() -> None:
    trees = parsed(FILES)
    kinds = kinds_in(trees.values())
    places = [f"{path.relative_to(PACKAGE)}:{line}" for path, tree in trees.items() for line in catches_in(tree, kinds)]
    assert len(places) <= MOST_CATCHES, places


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("class A(ValueError): ...\nclass B(A): ...\ntry: ...\nexcept (B, KeyError): ...", [4]),
        ("class A(Exception): ...\nwith contextlib.suppress(x.A): ...", [2]),
        ("class A: ...\ntry: ...\nexcept ValueError: ...", []),
    ],
)
def test_the_check_of_catches_itself(text: str, lines: list[int]) -> None:
    tree = ast.parse(text)
    assert list(catches_in(tree, kinds_in([tree]))) == lines

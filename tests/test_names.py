"""One name, one thing: no two classes, public functions or files share a name, for readers search by names.

And words that say nothing to a reader who is in a hurry are not in docstrings, comments and pages.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [p for folder in ("memplan", "integrations") for p in sorted((ROOT / folder).rglob("*.py"))]

# What different engines have of the same kind, under one name.
ONE_THING = {
    "MemplanCallback": "plans what a Trainer trains, of transformers or of Lightning",
    "in_flight": "counts forwards in flight, of a PyTorch schedule and of a DeepSpeed engine",
}

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
VAGUE = re.compile(r"\b(at hand|such calls|what is held|whatever)\b", re.IGNORECASE)


def names_of(path: Path) -> Iterator[str]:
    """A module's classes, named types and public functions. A leading underscore makes no other name of a class."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name) and _is_type(t.id))


def _is_type(name: str) -> bool:
    return name[0].isupper() and not name.isupper()


def several(paths: list[Path]) -> dict[str, list[str]]:
    """The names that more than one module gives to something of its own, with those modules."""
    homes = defaultdict(list)
    for path in paths:
        for name in set(names_of(path)):
            homes[name].append(str(path))
    return {name: found for name, found in homes.items() if len(found) > 1}


def test_no_two_things_have_one_name() -> None:
    assert several(FILES).keys() == ONE_THING.keys()


def test_no_two_files_have_one_name() -> None:
    names = [path.name for path in FILES if path.name != "__init__.py"]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("class Step: ...", "class _Step: ...", {"Step"}),
        ("def lower(): ...", "def lower(): ...", {"lower"}),
        ("def _lower(): ...", "def _lower(): ...", set()),
        ("Forward = Callable[..., int]", "class Forward: ...", {"Forward"}),
        ("from x import Step", "class Step: ...", set()),
    ],
)
def test_the_check_of_names_itself(tmp_path: Path, one: str, other: str, shared: set[str]) -> None:
    paths = [tmp_path / "one.py", tmp_path / "other.py"]
    for path, text in zip(paths, (one, other), strict=True):
        path.write_text(text)
    assert several(paths).keys() == shared


def test_docstrings_stand_alone() -> None:
    """None begins by pointing at its neighbour, which a reader who came by a search does not see."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    leaning = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
        and (text := ast.get_docstring(node) or "").startswith(("The same", "As above", "Ditto"))
    ]
    assert leaning == []


def prose_of(path: Path) -> str:
    """Docstrings and comments of a module; a page without its code, for messages are quoted in it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    with tokenize.open(path) as file:
        comments = [t.string for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.COMMENT]
    return "\n".join([*docstrings, *comments])


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_is_plain(path: Path) -> None:
    assert not VAGUE.findall(" ".join(prose_of(path).split()))

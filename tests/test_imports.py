"""Which module may import which, read from the source; and what importing memplan does and does not drag in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "memplan"
INTEGRATIONS = ROOT / "integrations"  # imported as memplan.integrations

PLAIN = {"units", "errors", "logs", "config", "problem", "schedule", "simulate"}
ANYTHING = {
    "__init__",
    "__main__",
    "api",
    "blocks",
    "choosing",
    "partial",
    "parts",
    "planner",
    "planning",
    "residency",
}
# What each layer may import of memplan, itself always included.
OURS: dict[str, set[str]] = {
    "units": set(),
    "errors": set(),
    "logs": set(),
    "config": set(),
    "problem": set(),
    "schedule": {"problem"},
    "lanes": {"problem", "schedule"},
    "simulate": {"errors", "lanes", "problem", "schedule"},
    "addresses": {"problem", "schedule"},
    "budgets": {"problem", "units"},
    "solvers": PLAIN | {"addresses"},
    "graph": PLAIN,
    "runtime": PLAIN | {"addresses", "graph"},
    "report": PLAIN,
    "problem_file": {"errors", "problem"},
    "plans": PLAIN | {"addresses", "problem_file", "report"},
    "uneven": {"plans", "problem", "schedule"},
}
# What a layer may name in annotations only, under `if TYPE_CHECKING:`.
ANNOTATIONS = {"report": {"plans", "partial", "solvers"}}
# What each layer may import of other projects, beside the standard library.
NUMERIC = {"numpy", "numba", "networkx"}
THEIRS: dict[str, set[str]] = {
    **{
        layer: set() for layer in PLAIN | {"addresses", "budgets", "lanes", "problem_file", "report", "plans", "uneven"}
    },
    "solvers": NUMERIC,
    "graph": NUMERIC | {"torch"},
    "runtime": NUMERIC | {"torch"},
    **{layer: NUMERIC | {"torch"} for layer in ANYTHING},
}
# Extras may be imported where they are used, by those layers that know about torch.
EXTRAS = {"transformers"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """(dotted name, when it is imported: at the "top", "late" or in "annotations") of every import of a module.

    `from a import b` gives both a and a.b.
    """
    tree = ast.parse(path.read_text(), str(path))
    when = {id(node): "top" for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            when.update({id(inner): "annotations" for inner in node.body})
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        time = when.get(id(node), "late")
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, time
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base, time
            for alias in node.names:
                yield f"{base}.{alias.name}", time


def forbidden(path: Path) -> list[str]:
    """The imports of one module that its layer may not have."""
    layer = layer_of(path)
    bad = []
    for name, time in imported_names(path):
        first, *rest = name.split(".")
        if first == "memplan":
            named_only = ANNOTATIONS.get(layer, set()) if time == "annotations" else set()
            if layer not in ANYTHING and rest and rest[0] not in OURS[layer] | {layer} | named_only:
                bad.append(name)
        elif first not in sys.stdlib_module_names and first != "__future__":
            late = time != "top" and first in EXTRAS and "torch" in THEIRS[layer]
            if first not in THEIRS[layer] and not late:
                bad.append(name)
    return bad


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    assert layer_of(path) in OURS.keys() | ANYTHING, "a new top-level module needs its place in the layers above"
    assert forbidden(path) == []


@pytest.mark.parametrize(
    ("layer", "line", "bad"),
    [
        ("solvers/x.py", "def f():\n    import torch.nn", ["torch.nn"]),
        ("runtime/x.py", "from memplan.solvers import solve", ["memplan.solvers", "memplan.solvers.solve"]),
        ("runtime/x.py", "from memplan import solvers", ["memplan.solvers"]),
        ("runtime/x.py", "from memplan import apply", ["memplan.apply"]),
        ("runtime/x.py", "from ..solvers import solve", ["memplan.solvers", "memplan.solvers.solve"]),
        ("report/x.py", "import memplan.graph.call", ["memplan.graph.call"]),
        ("report/x.py", "if TYPE_CHECKING:\n    import memplan.plans", []),
        ("report/x.py", "import memplan.plans", ["memplan.plans"]),
        ("report/x.py", "if TYPE_CHECKING:\n    import memplan.graph", ["memplan.graph"]),
        ("graph/x.py", "import transformers", ["transformers"]),
        ("graph/x.py", "def f():\n    import transformers", []),
        ("schedule.py", "from memplan.problem import Op\nimport math", []),
        ("schedule.py", "from memplan.errors import MemplanError", ["memplan.errors", "memplan.errors.MemplanError"]),
        ("problem.py", "import memplan.units", ["memplan.units"]),
        ("api.py", "from memplan.solvers import solve\nimport torch", []),
    ],
)
def test_the_check_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: str, line: str, bad: list[str]
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "memplan")
    path = tmp_path / "memplan" / layer
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert forbidden(path) == bad


def public_names() -> set[str]:
    """The names in `memplan.__all__`, read from the source."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (homes,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_HOMES"]
    return set(ast.literal_eval(homes)) | {"__version__"}


def private_names(path: Path) -> list[str]:
    """What a module takes from memplan that is neither one of its public names nor of its own integration."""
    public = public_names()
    own = ".".join(("memplan", *path.relative_to(ROOT).parent.parts))  # files of a package are one integration
    bad = [
        name
        for name, _ in imported_names(path)
        if name.split(".")[0] == "memplan"
        and name != "memplan"
        and name.partition(".")[2] not in public
        and not (own.count(".") > 1 and (name == own or name.startswith(f"{own}.")))
    ]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "memplan":
            if node.attr not in public:
                bad.append(f"memplan.{node.attr}")
    return bad


@pytest.mark.parametrize("path", sorted(INTEGRATIONS.rglob("*.py")), ids=lambda p: str(p.relative_to(INTEGRATIONS)))
def test_integrations_use_public_names_only(path: Path) -> None:
    assert private_names(path) == []


@pytest.mark.parametrize(
    ("place", "line", "bad"),
    [
        ("x.py", "import memplan\nmemplan.apply, memplan.__version__", []),
        ("x.py", "from memplan import Plan, plan_of", []),
        ("x.py", "import memplan.planner", ["memplan.planner"]),
        ("x.py", "from memplan.units import format_bytes", ["memplan.units", "memplan.units.format_bytes"]),
        ("x.py", "import memplan\nmemplan.planner.Planner", ["memplan.planner"]),
        ("x.py", "import memplan.integrations.y", ["memplan.integrations.y"]),
        ("y/x.py", "import memplan.integrations.y.z", []),
        ("y/x.py", "import memplan.integrations.x", ["memplan.integrations.x"]),
        ("y/x.py", "import memplan.integrations.yes", ["memplan.integrations.yes"]),
    ],
)
def test_the_check_of_integrations_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, line: str, bad: list[str]
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "integrations" / place
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert private_names(path) == bad


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_solvers_does_not_import_torch() -> None:
    names = run_python(
        "import sys, memplan.solvers, memplan.simulate; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    assert "memplan" in names.split()
    assert "torch" not in names.split()


def test_importing_memplan_imports_no_integration() -> None:
    names = run_python("""
import sys, memplan
for name in memplan.__all__:
    getattr(memplan, name)
print(*sys.modules)
""").split()
    assert "memplan.api" in names
    assert not [n for n in names if n.startswith(("memplan.integrations", "transformers", "deepspeed"))]


def test_integrations_are_found_beside_the_package() -> None:
    """They lie in another folder than their package; an editable install knows, as `make` makes it."""
    found = run_python("import memplan.integrations as i; print(*i.__path__)").strip()
    assert Path(found) == INTEGRATIONS


def test_public_names_do_not_depend_on_the_order_of_use() -> None:
    """A submodule must not take the place of the public function of its name."""
    source = """
import memplan
for name in ("apply", "plan", "explore", "plan_of", "remove", "Plan", "Budget", "BudgetInfeasible"):
    assert callable(getattr(memplan, name)), name
"""
    run_python(source)


def test_core_runs_with_every_extra_missing() -> None:
    source = """
import sys

class Missing:
    names = {"transformers", "diffusers", "peft", "accelerate", "rich", "matplotlib", "deepspeed", "scipy"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Missing())

import torch
import memplan

torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers)
sample = torch.randn(512, 64)
assert memplan.apply(model, sample, 0.9) is model
model(sample).pow(2).sum().backward()
assert all(p.grad is not None for p in model.parameters())
assert not Missing.names & {name.split(".")[0] for name in sys.modules}
print("ran")
"""
    assert run_python(source).strip() == "ran"

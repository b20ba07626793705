"""Which module may import which, read from the source; and what importing memplan does and does not drag in."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "memplan"
INTEGRATIONS = ROOT / "integrations"  # imported as memplan.integrations

# What each folder, or file beside them, may import of memplan, itself always included. "solvers" is all that is in it.
ARROWS = {
    "units": "",
    "errors": "",
    "logs": "",
    "config": "",
    "cache": "",
    "jit": "logs",
    "problem": "errors jit units",
    "plans": "errors problem units",
    "solvers/orders": "jit problem",
    "solvers/bounds": "jit problem solvers/orders",
    "solvers/search": "config jit solvers/bounds solvers/orders",
    "solvers/chain": "config jit problem solvers/bounds solvers/orders",
    "solvers/exact": "jit problem solvers/bounds solvers/chain solvers/orders solvers/search",
    "solvers/front": "config jit problem solvers/bounds solvers/chain solvers/exact solvers/orders solvers/search",
    "solvers/offload": "jit problem solvers/front solvers/orders",
    "solvers": "solvers/bounds solvers/front",
    "torch_private": "errors",
    "capture/ops": "errors logs torch_private",
    "capture/attributes": "capture/ops errors torch_private",
    "capture/trace": "capture/attributes capture/ops errors torch_private",
    "capture/analysis": "capture/ops capture/trace errors problem torch_private",
    "capture": "capture/analysis capture/attributes capture/ops capture/trace errors problem torch_private",
    "costs": "cache capture errors logs problem torch_private units",
    "fusion": "capture logs problem torch_private",
    "runtime/watch": "capture torch_private",
    "runtime/host": "capture problem torch_private",
    "runtime/program": "capture errors plans problem runtime/host runtime/watch torch_private",
    "runtime/trial": "capture errors runtime/program runtime/watch torch_private",
    "runtime/ranks": "capture errors problem runtime/program torch_private",
    "runtime": "",
    "losses": "",
    "planning": "cache capture config costs errors fusion logs losses plans problem runtime solvers "
    "torch_private units",
    "installed": "capture costs errors logs planning plans problem runtime torch_private units",
    "planned_models": "installed plans",
    "api": "capture config costs errors installed logs planned_models planning plans problem runtime torch_private "
    "units",
    "batch_size": "api capture errors planning plans problem torch_private units",
    "kernel_errors": "api capture planned_models planning torch_private",
    "exactness": "capture errors installed planning runtime torch_private",
    "command_line": "api batch_size cache capture costs errors exactness jit logs planning plans problem torch_private "
    "units",
    "__main__": "command_line",
    "__init__": "api batch_size capture config errors exactness kernel_errors logs losses planned_models plans problem "
    "units",
}
# What the folders at the top may import of other projects, beside the standard library.
NUMERIC = {"numpy", "numba", "networkx"}
THEIRS = {
    **{place: set[str]() for place in ("units", "errors", "logs", "config", "cache", "__init__", "__main__")},
    "problem": {"numpy"},
    "plans": {"networkx"},
    "jit": NUMERIC,
    "solvers": NUMERIC,
    **dict.fromkeys(
        (
            *("torch_private", "capture", "costs", "fusion", "runtime", "planning", "installed", "api", "losses"),
            *("planned_models", "batch_size", "kernel_errors", "exactness", "command_line"),
        ),
        NUMERIC | {"torch"},
    ),
    "torch_private": NUMERIC | {"torch", "sympy"},  # in which PyTorch's symbolic sizes are written
}
# Extras may be imported where they are used, by these layers.
EXTRAS = {
    "diffusers": {"command_line"},
    "peft": {"command_line"},
    "transformers": {place for place, names in THEIRS.items() if "torch" in names},
}

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [*MODULES, *sorted(INTEGRATIONS.rglob("*.py"))]


def place_of(path: Path) -> str:
    """The folder of a module below the package; of a file at the top the file itself."""
    inside = path.relative_to(PACKAGE)
    return inside.stem if len(inside.parts) == 1 else inside.parent.as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it is imported at the top of the module) of every import, those for annotations included.

    `from a import b` gives both a and a.b.
    """
    tree = ast.parse(path.read_text(), str(path))
    top = {id(node) for node in tree.body}
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base, id(node) in top
            for alias in node.names:
                yield f"{base}.{alias.name}", id(node) in top


def may_import(place: str, name: str) -> bool:
    """Whether a place may import a module of memplan, given by its name without "memplan."."""
    inside = name.replace(".", "/") + "/"
    return any(inside.startswith(f"{allowed}/") for allowed in (place, *ARROWS[place].split()))


def forbidden(path: Path) -> list[str]:
    """The imports of one module that its place may not have."""
    place = place_of(path)
    layer = place.split("/")[0]
    bad = []
    for name, at_top in imported_names(path):
        first, _, rest = name.partition(".")
        if first == "memplan":
            if not may_import(place, rest) and not _is_door(rest, path):
                bad.append(name)
        elif first not in sys.stdlib_module_names and first != "__future__":
            late = not at_top and layer in EXTRAS.get(first, ())
            if first not in THEIRS[layer] and not late:
                bad.append(name)
    return bad


def _is_door(rest: str, path: Path) -> bool:
    """Whether what is imported is a folder on the way to what is named next: `from memplan import torch_private`."""
    return not rest or any(
        may_import(place_of(path), other) for other in ARROWS if other.startswith(f"{rest.replace('.', '/')}/")
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    assert place_of(path) in ARROWS, "a new folder needs its place among the arrows"
    assert forbidden(path) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {module_of(path): path for path in MODULES if path != PACKAGE / "__init__.py"}
    arrows = {name: {n for n, _ in imported_names(path) if n in modules} - {name} for name, path in modules.items()}
    tuple(graphlib.TopologicalSorter(arrows).static_order())


def test_files_and_folders_are_small() -> None:
    long = {str(path.relative_to(ROOT)): n for path in SOURCES if (n := len(path.read_text().splitlines())) > 450}
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in SOURCES)
    assert not long
    assert not {folder: count for folder, count in folders.items() if count > 18}


def test_new_code_pays_for_its_lines_with_old_ones() -> None:
    """Whoever takes lines away lowers the number."""
    assert sum(len(path.read_text().splitlines()) for path in MODULES) <= 40_722


def test_folders_say_what_is_in_them() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(text) > 40, path


@pytest.mark.parametrize(
    ("place", "line", "bad"),
    [
        ("solvers/chain/x.py", "def f():\n    import torch.nn", ["torch.nn"]),
        ("solvers/chain/x.py", "from memplan.solvers.bounds.mincut import f", []),
        ("solvers/bounds/x.py", "from memplan.solvers.chain.rotor import f", None),
        ("runtime/program/x.py", "from memplan.solvers import solve", ["memplan.solvers", "memplan.solvers.solve"]),
        ("runtime/program/x.py", "from memplan import solvers", ["memplan.solvers"]),
        ("runtime/program/x.py", "from memplan import apply", ["memplan.apply"]),
        ("runtime/program/x.py", "from memplan import torch_private as private", []),
        ("runtime/program/x.py", "from ...solvers import solve", ["memplan.solvers", "memplan.solvers.solve"]),
        ("plans/x.py", "if TYPE_CHECKING:\n    import memplan.capture", ["memplan.capture"]),
        ("plans/x.py", "import networkx", []),
        ("fusion/x.py", "import deepspeed", ["deepspeed"]),
        ("plans/x.py", "def f():\n    import diffusers", ["diffusers"]),
        ("problem/x.py", "import networkx", ["networkx"]),
        ("capture/x.py", "import transformers", ["transformers"]),
        ("capture/x.py", "def f():\n    import transformers", []),
        ("problem/x.py", "from memplan.problem.data import Op\nimport math", []),
        ("api.py", "from memplan.planning.planner import Planner\nimport torch", []),
    ],
)
def test_the_check_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, line: str, bad: list[str] | None
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "memplan")
    path = tmp_path / "memplan" / place
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert forbidden(path) == bad if bad is not None else forbidden(path)


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
        ("x.py", "import memplan.planning.planner", ["memplan.planning.planner"]),
        ("x.py", "from memplan.units import format_bytes", ["memplan.units", "memplan.units.format_bytes"]),
        ("x.py", "import memplan\nmemplan.planning.planner.Planner", ["memplan.planning"]),
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


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_private_names_of_pytorch_are_in_their_folder(path: Path) -> None:
    used = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    names = {name for name in used if re.match(r"torch(\.\w+)*\._(?!_)", name) and not name.startswith("torch.ops.")}
    names |= {name for name, _ in imported_names(path) if re.match(r"torch(\.\w+)*\._(?!_)", name)}
    assert not names or place_of(path) == "torch_private", sorted(names)


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_solvers_does_not_import_torch() -> None:
    names = run_python(
        "import sys, memplan.solvers, memplan.plans.plan; print(*sorted({m.split('.')[0] for m in sys.modules}))"
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
    names = {"transformers", "diffusers", "peft", "accelerate", "rich", "deepspeed", "scipy"}

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

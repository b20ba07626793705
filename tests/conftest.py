"""Threads are fixed, so that kernels take the same scratch each time. What is kept on disk stays inside the session.

Of that, tests read measured costs. They search for every front anew, but for those in
`tests/planning/test_kept_fronts.py`.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memplan.config import PRESETS, Config
from memplan.planning.remedies import Remedies
from memplan.solvers.bounds import lower_bound
from tests.support.configs import with_figures
from tests.support.plannings import plannings, searched_anew

QUICK = with_figures(
    Config(("rotor", "cuts", "blocks")), moments=1, cuts=8, block_cuts=4, options=12, sizes=8, grid=10, descents=3,
    rounds=100, exchanges=10, neighbours=20,
)  # fmt: skip
QUICK_BOUND = {"_SPREAD": (0.5, 0.15), "_MORE_TRIES": 0, "_LAST_WORK": 0}  # a looser one
LONGEST = ("tests/ranks/test_distributed.py", "tests/whole/test_any_length.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: each is for one worker, and at the end the others would wait for it."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def _fixed_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, searched_anew():
        patch.setenv("MEMPLAN_CACHE_DIR", str(tmp_path_factory.mktemp("costs")))
        folder = tmp_path_factory.getbasetemp()
        # All workers wait for one build of DeepSpeed's extensions. Elsewhere one that was killed leaves its lock.
        folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "torch_extensions"))
        for name in ("MEMPLAN_BUDGET", "MEMPLAN_DISABLE"):
            patch.delenv(name, raising=False)
        torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # workers share the cores
        yield


@pytest.fixture(scope="session", autouse=True)
def _traces_not_told_to_pytest() -> Iterator[None]:
    """PyTorch describes each tensor and the stack at each trace of it as soon as one handler would take that.

    pytest hands its own to all loggers that do not propagate, this one among them.
    """
    told = logging.getLogger("torch.__trace")
    told.handlers.clear()
    told.propagate = True
    yield
    told.propagate = False


@pytest.fixture(scope="module", autouse=True)
def _imports_left_alone_by_the_collector() -> None:
    """What modules have made when they were imported stays; to look at it takes half a second for each collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cost_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what later processes read."""
    monkeypatch.setenv("MEMPLAN_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def plans_made() -> Iterator[Callable[[], int]]:
    """How often there was planning since the test began."""
    with plannings() as reasons:
        yield lambda: len(reasons)


@pytest.fixture(autouse=True)
def quick_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans from fewer methods, which do not go far, and looser bounds: most tests are about what is done with a plan.

    Where nothing fits, nobody looks for remedies either. Tests of the search itself are marked `full_search`.
    """
    if request.node.get_closest_marker("full_search") is None:
        monkeypatch.setitem(PRESETS, "auto", QUICK)
        for name, value in QUICK_BOUND.items():
            monkeypatch.setattr(lower_bound, name, value)
        monkeypatch.setattr(Remedies, "error", lambda remedies: remedies.refusal)

"""Groups are compiled in the process of the tests. Others, which `test_compiler_faults` has, take seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memplan.fusion import fuse_step


@pytest.fixture(scope="module", autouse=True)
def compiled_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """No group is compiled elsewhere, but where that is what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_compiler_faults"):
            patch.setattr(fuse_step, "compile_elsewhere", lambda programs: {})
        yield

"""A pytest plugin: a test fails where a device would have read or written memory at the wrong time."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    torch.cuda.stand_in.fault()
    yield
    torch.cuda.synchronize()
    assert not torch.cuda.stand_in.fault()

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def own_allocator() -> Iterator[None]:
    """An allocator that holds nothing, without fragments: segments grow."""
    if not torch.cuda.is_available():
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    gc.collect()
    torch.cuda.empty_cache()

"""Tests of kernels are there where the kernels are: see `make test-kernels`."""

import gc
import importlib
import importlib.util
import warnings
from typing import Any

import pytest
import transformers.utils
from transformers.utils import import_utils, kernel_config

collect_ignore_glob = ["test_*"]

if importlib.util.find_spec("liger_kernel"):
    collect_ignore_glob = []
    # transformers asks for another version of `kernels`, and takes its kernels on no CPU. It asks when it is imported.
    for module in (import_utils, transformers.utils):
        module.is_kernels_available = lambda *_, **__: True
    kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
    with warnings.catch_warnings():  # it is imported with torch.jit.script
        warnings.simplefilter("ignore")
        importlib.import_module("torch_geometric.nn")


@pytest.fixture(autouse=True)
def without_what_the_interpreter_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter holds arguments of a kernel in a cycle of references, until Python collects it."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    call = executor.__call__

    def collected(self: Any, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs)
        gc.collect()

    monkeypatch.setattr(executor, "__call__", collected)

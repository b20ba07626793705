"""Tests of kernels are there where the kernels are: see `make test-kernels`."""

import importlib
import importlib.util
import warnings

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

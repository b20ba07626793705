"""Tests of kernels are there where the kernels are: see `make test-kernels`."""

import importlib
import importlib.util
import warnings

collect_ignore_glob = ["test_*"]

if importlib.util.find_spec("liger_kernel"):
    collect_ignore_glob = []
    with warnings.catch_warnings():  # it is imported with torch.jit.script
        warnings.simplefilter("ignore")
        importlib.import_module("torch_geometric.nn")

"""Fused kernels are no further from float64 than those of torch.compile."""

from __future__ import annotations

import copy
import functools
import shutil

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.trace.call import CallReader
from memplan.kernel_errors import _error, _StaysDouble, _step
from tests.support.zoo import MODELS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Inductor
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
]


def without_dropout(net: nn.Module) -> nn.Module:
    """torch.compile draws other masks."""
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return net


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_gradients_are_as_near_to_float64_as_those_of_torch_compile(name: str, autocast: bool) -> None:
    net, sample = MODELS[name](0)
    without_dropout(net)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        errors = memplan.compare_kernels(net, sample)
    call = CallReader(net.forward).read_sample(sample)
    step = functools.partial(_step, loss_fn=None, device=torch.device("cpu"))
    with _StaysDouble():
        doubles = [t.double() if t.is_floating_point() else t for t in call.tensors]
        exact = step(copy.deepcopy(net).double(), call.filled(doubles))
    torch._dynamo.reset()
    net.compile(dynamic=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        compiled = step(net, call)
    assert errors.fused_gradients <= 1.1 * _error(compiled[1:], exact[1:])

"""Which outputs backward starts from, where that is not said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memplan.capture.ops.edges import leaves_behind
from memplan.capture.trace.call import OutputTemplate
from memplan.errors import NothingToTrain


def shared_objects(model: nn.Module) -> list[Any]:
    """Objects of the model that an output may refer to (its config), and that are never copied."""
    held = (v for m in model.modules() for v in vars(m).values())
    return [model, *(v for v in held if hasattr(v, "__dict__") and not isinstance(v, torch.Tensor))]


def differentiated_outputs(template: OutputTemplate, requires_grad: Sequence[bool]) -> list[int]:
    """Outputs that backward is taken to start from: the loss where there is one, else everything differentiable.

    The loss is the output called "loss". It may also be the only differentiable scalar, if it depends on all leaves
    that the other outputs depend on: a temperature, or what a router is to be balanced by, does not. Scalars that
    forward leaves in attributes are taken to be terms of a loss outside, where the model does not return a loss itself.
    """
    everything = [i for i, wanted in enumerate(requires_grad) if wanted]
    able = [i for i in everything if i < template.returned]
    terms = [i for i in everything if i >= template.returned and template.tensors[i].dim() == 0]
    if not able:
        able, terms = terms or everything, []
    if not able:
        raise NothingToTrain(
            "no output of the model depends on a parameter or input that requires grad; there is nothing to plan. "
            "Is the model frozen, or does forward run under no_grad?"
        )
    named = [i for i in able if template.names[i].strip(".[]'\"") == "loss"]
    if named:
        return named[:1]
    scalars = [i for i in able if template.tensors[i].dim() == 0]
    if len(scalars) != 1:
        return able + terms
    behind = leaves_behind(template.tensors[scalars[0]])
    return scalars if all(leaves_behind(template.tensors[i]) <= behind for i in able) else able + terms

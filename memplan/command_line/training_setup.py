"""What a step is trained with: adapters, an optimizer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from memplan.command_line.outcomes import Mistake


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """The model with low-rank adapters at its linear layers, which alone are trained. Raises Mistake."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of what no plan needs as peft imports it
    try:
        import peft
    except ImportError:
        raise Mistake("--lora needs peft", "it is not installed", "pip install peft") from None
    targets: Any = "all-linear"
    if not hasattr(model, "get_output_embeddings"):  # by which peft leaves out the head
        targets = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    is_on_paper = any(p.is_meta for p in model.parameters())
    try:
        with torch.device("meta" if is_on_paper else "cpu"):
            return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=targets)).train()
    except (ValueError, TypeError) as error:
        raise Mistake(
            "adapters can't be put into this model",
            str(error),
            "leave --lora out, or put them in yourself in a function",
        ) from error


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer | None:
    """An optimizer of what is trained. Raises Mistake where nothing is."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise Mistake("the model has nothing to train", "no parameter requires grad", "let some, or give --lora")
    match name:
        case "adamw":
            return torch.optim.AdamW(parameters, fused=True)
        case "sgd":
            return torch.optim.SGD(parameters, fused=True)
        case "adafactor":
            return torch.optim.Adafactor(parameters)
        case _:
            return None

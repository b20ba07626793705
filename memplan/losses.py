"""Losses to be given as `loss_fn=`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def chunked_loss(chunk_tokens: int = 1024, ignore_index: int = -100) -> Callable[..., Any]:
    """A `loss_fn` for causal language models of transformers that never holds the logits of a whole batch.

        memplan.apply(model, batch, "16GiB", loss_fn=memplan.chunked_loss())
        model(**batch).loss.backward()

    The decoder runs once. Head and loss, which are the model's own (with adapters, soft caps and scales), then run for
    so many tokens of a row at a time, and the plan runs those of a chunk again in backward. Logits of 8192 tokens and
    128256 words are 7.8 GiB in float32 with their gradients on top; here they are an eighth of that. The loss is the
    model's mean over all tokens, added up in another order, so it differs by rounding from that of the model alone.

    - chunk_tokens: tokens of each row in a chunk.
    - ignore_index: the label that does not count.

    Called with the arguments of the model, `labels` among them, it gives the model's output with the loss, and without
    logits. It raises ValueError for models that are built otherwise, saying what it misses.
    """
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is a number of tokens, 1 or more, got {chunk_tokens!r}")

    def loss_fn(model: nn.Module, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        whole = _causal_model(model)
        if labels is None:
            raise ValueError("chunked_loss needs labels=, of the shape of input_ids")
        name = whole.base_model_prefix
        count = inputs.pop("num_items_in_batch", None)
        if "logits_to_keep" in inputs:
            raise ValueError("chunked_loss takes no logits_to_keep=: it makes no more than those of a chunk")
        following = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]  # each token is to foretell the next
        if count is None:
            count = (following != ignore_index).sum()
        found = getattr(whole, name)(**inputs)
        if getattr(found, "router_logits", None) is not None:
            raise ValueError("chunked_loss would add the load-balancing loss of experts once for each chunk")
        outputs = [
            _head_alone(whole, name, type(found)(last_hidden_state=hidden))(
                labels=labels.new_empty(0),  # a loss that shifts labels by itself fails on these
                shift_labels=wanted.contiguous(),
                num_items_in_batch=count,
            )
            for hidden, wanted in zip(found[0].split(chunk_tokens, 1), following.split(chunk_tokens, 1), strict=True)
        ]
        return type(outputs[0])(loss=torch.stack([output.loss for output in outputs]).sum())

    return loss_fn


def takes_chunked_loss(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether calls with such arguments, by name, can have a chunked loss."""
    try:
        _causal_model(model)
    except ValueError:
        return False
    return isinstance(arguments.get("labels"), torch.Tensor) and "logits_to_keep" not in arguments


def _causal_model(model: Any) -> Any:
    """The causal language model, without what peft has put around it. Raises ValueError."""
    found = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = getattr(found, "base_model_prefix", "")
    if name not in found._modules or not callable(getattr(found, "get_output_embeddings", None)):
        raise ValueError(
            f"chunked_loss is for causal language models of transformers: a decoder with a head on top, got "
            f"{type(found).__name__}. Write a loss_fn(model, ...) that applies head and loss to a part at a time"
        )
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("chunked_loss calls the decoder alone, without the virtual tokens that peft puts first")
    if any(part._forward_hooks or part._forward_pre_hooks for part in (model, found)):
        raise ValueError(
            f"chunked_loss runs decoder and head of {type(found).__name__} by themselves, so hooks on its forward "
            "would run at other times. Take them off"
        )
    inner = vars(found).get("forward", found.forward)
    inner = getattr(inner, "original", inner)  # of a plan
    if getattr(inner, "__func__", None) is not type(found).forward:
        raise ValueError(
            f"chunked_loss runs decoder and head of {type(found).__name__} by themselves, and something has replaced "
            "its forward, which would be left out. In place of Accelerate's mixed precision use torch.autocast"
        )
    return found


def _head_alone(whole: Any, name: str, found: Any) -> Any:
    """The model with its decoder replaced by what that has found."""
    shell, stands = copy.copy(whole), _HasRun(found)
    vars(stands).update(dict.fromkeys(whole._modules[name]._modules, stands))  # some models call a part of it
    vars(shell)["_modules"] = {**whole._modules, name: stands}
    vars(shell).pop("forward", None)  # a plan, which is for the whole
    return shell


class _HasRun(nn.Module):
    """Stands for a decoder that has run."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self._found = found

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._found

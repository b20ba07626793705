"""What the command line says of a model, what comes of that, and what all kinds of models are made and trained with."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan.capture.trace.call import Sample
from memplan.command_line.outcomes import Mistake, nearest
from memplan.planning.settings import LossFunction

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says of a model. None where it says nothing.

    - source: a name, a path or `place:function`.
    - changes: fields of the config, by their dotted names.
    """

    source: str
    changes: Mapping[str, Any]
    batch: int | None
    length: int | None
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Described:
    """A training step without its data.

    - title: the model in a few words.
    - items, unit: how many of what a step takes: tokens, images, batches.
    - remark: what a reader should know of it; empty where there is nothing.
    """

    title: str
    model: nn.Module
    sample: Sample
    loss_fn: LossFunction | None
    items: int
    unit: str
    remark: str = ""


def with_changes(fields: dict[str, Any], known: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config with some changed, `text_config.hidden_size` within another.

    known: a config as a dict, in which a name must be. Raises Mistake.
    """
    result = dict(fields)
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if first not in known or (rest and not isinstance(known[first], dict)):
            near = nearest(first, known)
            raise Mistake(
                f"--set {name}: the config has no such field",
                f"the nearest names are {near}" if near else f"it has {', '.join(sorted(known))}",
                "take one that it has",
            )
        result[first] = with_changes(result.get(first) or {}, known[first], {rest: value}) if rest else value
    return result


def library(name: str) -> Any:
    """A library that models come from; None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def class_in(of_library: Any, name: str, base: str) -> Any:
    """The class of this name, derived from that called `base`; None where a library has none that can be had here."""
    try:
        found = getattr(of_library, name, None)
    except (ImportError, RuntimeError):  # it needs another library that is not here
        return None
    return found if inspect.isclass(found) and issubclass(found, getattr(of_library, base)) else None


def unmade(name: str, error: Exception) -> Mistake:
    """What to say of a config, or of a model of it, that can't be made."""
    return Mistake(
        f"{name} can't be made of this config",
        f"{type(error).__name__}: {error}",
        "change the config, or fields of it with --set NAME=VALUE",
    )


def without_batch(model: nn.Module, takes: str) -> Mistake:
    """What to say of a model for which no batch can be made up."""
    return Mistake(
        f"a batch for {type(model).__name__} can't be made up",
        f"it takes {takes}",
        "give a function that makes model and batch: path/file.py:build",
    )


@contextlib.contextmanager
def on_paper(dtype: str) -> Iterator[None]:
    """A context in which models are made without memory, in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def title_of(model: nn.Module, dtype: str, batch: str) -> str:
    """The class, the number of parameters, the dtype and the batch."""
    count = sum(p.numel() for p in model.parameters())
    shown = f"{count / 1e9:.2f}e9" if count >= 1e8 else f"{count / 1e6:.2f}e6"
    return f"{type(model).__name__}, {shown} parameters, {dtype}, {batch}"


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
    try:
        with torch.device("meta" if any(p.is_meta for p in model.parameters()) else "cpu"):
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
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}
    fused = {} if name == "adafactor" else {"fused": True}
    return kinds[name](parameters, **fused) if name in kinds else None

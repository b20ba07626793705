"""What the command line says of a model, what comes of that, and what all kinds of models need for it."""

from __future__ import annotations

import contextlib
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

"""A step of a diffusers model, from its class or its config: made on the meta device, without weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from memplan.command_line import described
from memplan.command_line.described import Described, Wanted
from memplan.command_line.outcomes import Mistake

_MODELS = "ModelMixin"  # what its models derive from
_LENGTH = 77  # of a text that an image is made for
_SIZE = 64  # of a latent image, where the config has none


def is_a_model_of_diffusers(name: str) -> bool:
    return described.class_in(described.library("diffusers"), name, _MODELS) is not None


def names_of_diffusers() -> list[str]:
    return [name for name in dir(described.library("diffusers")) if name.endswith(("Model", "2D"))]  # None has none


def diffusers_step(class_name: str, fields: dict[str, Any], wanted: Wanted) -> Described:
    """The step of a model. The loss is the mean square of what it gives. Raises Mistake."""
    model_class = described.class_in(described.library("diffusers"), class_name, _MODELS)
    if model_class is None:
        raise Mistake(
            f"{class_name!r} is no model of diffusers",
            "it is a pipeline, diffusers does not have it, or diffusers is not installed",
            "give the config of the network in the pipeline's folder (unet, transformer); pip install diffusers",
        )
    dtype = wanted.dtype or "bfloat16"
    known = dict.fromkeys(inspect.signature(model_class.__init__).parameters)
    changed = described.with_changes({k: v for k, v in fields.items() if k in known}, known, wanted.changes)
    try:
        with described.on_paper(dtype):
            model = model_class(**changed).train()
    except Exception as error:
        raise described.unmade(class_name, error) from error
    batch, config = wanted.batch or 1, model.config
    size = config.get("sample_size") or _SIZE
    sides = (size, size) if isinstance(size, int) else tuple(size)
    latents = torch.zeros(batch, config.get("in_channels") or 3, *sides)
    made = {"sample": latents, "hidden_states": latents, "timestep": torch.zeros(batch, dtype=torch.long)}
    widths = ("cross_attention_dim", "joint_attention_dim", "caption_channels")
    width = next((config[name] for name in widths if isinstance(config.get(name), int)), None)
    if width is not None:
        made["encoder_hidden_states"] = torch.zeros(batch, wanted.length or _LENGTH, width)
    if isinstance(config.get("pooled_projection_dim"), int):
        made["pooled_projections"] = torch.zeros(batch, config["pooled_projection_dim"])
    takes = inspect.signature(model.forward).parameters
    missing = [n for n, p in takes.items() if p.default is p.empty and n not in made and "kwargs" not in n]
    if missing:
        raise described.without_batch(model, ", ".join(missing))
    floats = described.DTYPES[dtype]
    sample = {n: t.to(floats) if t.is_floating_point() else t for n, t in made.items() if n in takes}
    first = next(tensor for tensor in sample.values() if tensor.dim() > 1)
    title = described.title_of(model, dtype, f"batch {batch} of {' x '.join(map(str, first.shape[1:]))}")
    remark = "the loss is taken to be the mean square of what the model gives"
    return Described(title, model, sample, mean_square, batch, "images", remark)


def mean_square(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    """A loss that stands for that of a denoising step."""
    return model(**batch, return_dict=False)[0].float().pow(2).mean()  # type: ignore[no-any-return]

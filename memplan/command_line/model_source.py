"""Which model is meant: a config, a function, or a name that transformers or diffusers has; steps of the latter."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memplan.command_line import described
from memplan.command_line.described import Described, Wanted
from memplan.command_line.from_build import built_step
from memplan.command_line.from_transformers import knows, names, transformers_step
from memplan.command_line.outcomes import Mistake, nearest

_MODELS = "ModelMixin"  # what its models derive from
_LENGTH = 77  # of a text that an image is made for
_SIZE = 64  # of a latent image, where the config has none


def described_step(wanted: Wanted) -> Described:
    """The step that is meant. Raises Mistake."""
    path = Path(wanted.source)
    if path.is_file() or (path / "config.json").is_file():
        file = path / "config.json" if path.is_dir() else path
        try:
            fields = json.loads(file.read_text())
        except OSError as error:
            what = f"{str(file)!r} can't be read"
            raise Mistake(what, str(error), "give a config.json, or the folder of one") from None
        except ValueError as error:
            raise Mistake(f"{str(file)!r} is not JSON", str(error), "give the config.json of a model") from None
        if not isinstance(fields, dict):
            raise Mistake(f"{str(file)!r} is no config", "its JSON is no object", "give the config.json of a model")
        if "_class_name" in fields:
            return diffusers_step(str(fields["_class_name"]), fields, wanted)
        if not isinstance(fields.get("model_type"), str):
            raise Mistake(
                f"{str(path)!r} is no config of transformers or diffusers",
                "it has neither 'model_type' nor '_class_name'",
                "give the config.json of a model",
            )
        return transformers_step(fields["model_type"], (fields.get("architectures") or [None])[0], fields, wanted)
    if ":" in wanted.source:
        return built_step(wanted)
    if knows(wanted.source):
        return transformers_step(wanted.source, None, {}, wanted)
    if is_a_model_of_diffusers(wanted.source):
        return diffusers_step(wanted.source, {}, wanted)
    name = wanted.source
    if "/" in name or name.endswith(".json") or path.exists():
        raise Mistake(
            f"there is no config {name!r}",
            "no such file, or folder with a config.json, is here, and memplan downloads nothing from a hub",
            "give the path of a config.json or of its folder; no weights are needed",
        )
    near = nearest(name, names() + names_of_diffusers())
    absent = [library for library in ("transformers", "diffusers") if importlib.util.find_spec(library) is None]
    raise Mistake(
        f"{name!r} is no model",
        "it is no path, and neither transformers nor diffusers has it"
        + (f"; the nearest names are {near}" if near else "")
        + (f"; {' and '.join(absent)} can't be asked (pip install {' '.join(absent)})" if absent else ""),
        "give a type (gpt2), a class (LlamaForCausalLM), a config.json, or a function (path/file.py:build)",
    )


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

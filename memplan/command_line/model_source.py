"""Which model is meant: a config, a function of the user's, or a name that transformers or diffusers has."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from memplan.command_line import described
from memplan.command_line.described import Described, Wanted
from memplan.command_line.from_transformers import knows, names, transformers_step
from memplan.command_line.outcomes import Mistake, nearest

_T = TypeVar("_T")
_NEXT = "let it return (model, sample) or (model, sample, loss_fn), as memplan.plan takes them"
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


def built_step(wanted: Wanted) -> Described:
    """What the function gives. It is called with batch= and length=, where it has such parameters. Raises Mistake."""
    if wanted.changes or wanted.dtype is not None:
        raise Mistake("--set and --dtype are for configs", f"{wanted.source} makes the whole model", "leave them out")
    place, _, name = wanted.source.rpartition(":")
    before = list(sys.path)  # modules are found where the user is, and beside the file
    sys.path[:0] = [str(Path(place).resolve().parent)] if place.endswith(".py") else [str(Path.cwd())]
    try:
        module = _module(place, wanted.source)
        build = getattr(module, name, None)
        if not callable(build):
            near = nearest(name, [n for n, v in vars(module).items() if inspect.isfunction(v)])
            cause = f"the nearest names are {near}" if near else "nothing there has a name like this"
            raise Mistake(f"{wanted.source} is no function", cause, "give the name of a function behind the colon")
        asked = {"batch": wanted.batch, "length": wanted.length}
        arguments = {option: value for option, value in asked.items() if value is not None}
        takes = inspect.signature(build).parameters
        for option in (option for option in arguments if option not in takes):
            raise Mistake(
                f"--{option} does not reach {wanted.source}",
                f"the function has no parameter {option!r}",
                "give it one, or leave the option out",
            )
        given = _called(lambda: build(**arguments), f"{wanted.source} raises an error")
    finally:
        sys.path[:] = before
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
        returned = f"a {type(given).__name__}"
        if isinstance(given, tuple):
            returned = f"a tuple of {', '.join(type(part).__name__ for part in given) or 'nothing'}"
        raise Mistake(f"{wanted.source} gives no model and sample", f"it returned {returned}", _NEXT)
    model, sample, *loss_fn = given
    count = sum(p.numel() for p in model.parameters())
    title = f"{type(model).__name__} of {wanted.source}, {count / 1e6:.2f}e6 parameters"
    return Described(title, model, sample, loss_fn[0] if loss_fn else None, 1, "batches")


def _module(place: str, source: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            found = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise Mistake(
                f"there is no module {place!r}",
                "it is neither installed nor in this folder",
                "give package.module:function or path/file.py:function",
            )
        return _called(lambda: importlib.import_module(place), f"{place} can't be imported")
    path = Path(place)
    if not path.is_file():
        raise Mistake(f"there is no file {place!r}", f"{source} names it", "give path/file.py:function")

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"memplan_build_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where classes of it are looked up
        spec.loader.exec_module(module)
        return module

    return _called(load, f"{place} can't be imported")


def _called(function: Callable[[], _T], what: str) -> _T:
    """What the function gives. What it raises becomes a Mistake, with the user's line in it."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        frames = [f for f in frames if not f.filename.startswith("<frozen")]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise Mistake(what, f"{type(error).__name__}: {error}{where}", "repair that, and try it in Python") from error

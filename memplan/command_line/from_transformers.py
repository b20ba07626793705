"""A step of a transformers model, from its type, its class or its config: made on the meta device, without weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from memplan.command_line import described
from memplan.command_line.described import Described, Wanted
from memplan.command_line.outcomes import Mistake

# What a type is trained as, where nobody says so; the first that transformers has for it.
_TASKS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")
_LENGTH = 1024
_OFFSET = 8  # rows that tables of positions have beyond the positions, at most


def knows(name: str) -> bool:
    """Whether transformers has a type or a model class of this name."""
    transformers = _transformers()
    return transformers is not None and (name in transformers.CONFIG_MAPPING or _model_class(name) is not None)


def names() -> list[str]:
    """The types and model classes that transformers has."""
    transformers = _transformers()
    if transformers is None:
        return []
    return [*transformers.CONFIG_MAPPING, *(name for name in dir(transformers) if "For" in name or "Model" in name)]


def transformers_step(kind: str, class_name: str | None, fields: dict[str, Any], wanted: Wanted) -> Described:
    """The step of a model.

    kind: its type or its class. class_name: its class, where a config names one beside the type. fields: of the config;
    what is not in there is the default. Raises Mistake.
    """
    transformers = _transformers()
    if transformers is None:
        raise Mistake("this is a model of transformers", "transformers is not installed", "pip install transformers")
    model_class: Any = _model_class(class_name or kind)
    if model_class is None and kind not in transformers.CONFIG_MAPPING:
        raise Mistake(
            f"model_type {kind!r} is unknown",
            f"transformers {transformers.__version__} has no such model",
            "install a version of transformers that has it",
        )
    config_class = transformers.CONFIG_MAPPING[kind] if model_class is None else model_class.config_class
    plain = _made(config_class, dict(fields))
    changes = {plain.attribute_map.get(name, name): value for name, value in wanted.changes.items()}
    config = _made(config_class, described.with_changes(fields, {**plain.to_dict(), **dict.fromkeys(fields)}, changes))
    if model_class is None:
        known = (getattr(transformers, f"MODEL_FOR_{task}_MAPPING").get(config_class, None) for task in _TASKS)
        model_class = next((found for found in known if found is not None), None)
        if model_class is None:
            raise Mistake(
                f"what {config_class.__name__} is trained as is not clear",
                "transformers has no language model and no classifier for it",
                "name the class, such as LlamaForCausalLM, or give a function: path/file.py:build",
            )
        model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    config.use_cache = False  # of no use in training
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # without it labels can't become inputs of the decoder
    try:
        with described.on_paper(wanted.dtype or "bfloat16"):
            model = model_class(config).train()
    except Exception as error:
        raise described.unmade(model_class.__name__, error) from error
    sample, items, unit, batch = _sample(model, wanted)
    title = described.title_of(model, wanted.dtype or "bfloat16", batch)
    remarks = [_positions(model, sample)]
    if "quantization_config" in fields:
        remarks.append("weights are not quantised here, as the config says that they are")
    return Described(title, model, sample, None, items, unit, "; ".join(filter(None, remarks)))


def _transformers() -> Any:
    found = described.library("transformers")
    if found is not None:
        found.logging.set_verbosity_error()
    return found


def _model_class(name: str) -> Any:
    found = described.class_in(_transformers(), name, "PreTrainedModel")
    return found if getattr(found, "config_class", None) is not None else None


def _made(config_class: Any, fields: dict[str, Any]) -> Any:
    try:
        return config_class.from_dict(fields)
    except Exception as error:
        raise described.unmade(config_class.__name__, error) from error


def _sample(model: Any, wanted: Wanted) -> tuple[dict[str, torch.Tensor], int, str, str]:
    """A batch with which the model gives its loss, how many of what it has, and it in words. Raises Mistake."""
    batch, config = wanted.batch or 1, model.config
    takes = inspect.signature(model.forward).parameters
    most = getattr(config, "max_position_embeddings", None)
    length = wanted.length or min(_LENGTH, most if isinstance(most, int) and most > 0 else _LENGTH)
    ids = torch.zeros(batch, length, dtype=torch.long)
    sample, items, unit = {"input_ids": ids}, batch * length, "tokens"
    words = f"batch {batch} of length {length}"
    if model.main_input_name == "pixel_values":
        seen = getattr(config, "vision_config", config)
        size, channels = getattr(seen, "image_size", None) or 224, getattr(seen, "num_channels", 3)
        size = (size, size) if isinstance(size, int) else tuple(size)
        sample, items, unit = {"pixel_values": torch.zeros(batch, channels, *size)}, batch, "images"
        words = f"batch {batch} of images of {size[0]} x {size[1]}"
    elif model.main_input_name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", _LENGTH)
        sample = {"input_features": torch.zeros(batch, config.num_mel_bins, frames)}
    elif model.main_input_name != "input_ids":
        raise described.without_batch(model, model.main_input_name)
    dtype = next(model.parameters()).dtype
    sample = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in sample.items()}
    one_each, kind = torch.zeros(batch, dtype=torch.long), type(model).__name__
    if {"start_positions", "end_positions"} <= set(takes):
        sample |= {"start_positions": one_each, "end_positions": one_each.clone()}
    elif "labels" in takes:
        sample["labels"] = one_each if kind.endswith("Classification") and "Token" not in kind else ids.clone()
    return sample, items, unit, words


def _positions(model: Any, sample: dict[str, torch.Tensor]) -> str:
    """A remark where the text is longer than the config says. Raises Mistake where a table of positions ends before."""
    most = getattr(model.config, "max_position_embeddings", None)
    if "input_ids" not in sample or not isinstance(most, int) or not 0 < most < sample["input_ids"].shape[1]:
        return ""
    length, vocabulary = sample["input_ids"].shape[1], getattr(model.config, "vocab_size", None)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings != vocabulary]
    if any(most <= table.num_embeddings <= most + _OFFSET for table in tables):
        raise Mistake(
            f"--length {length} is too long for this model",
            f"it learns {most} positions (max_position_embeddings)",
            f"give --length {most} or less, or --set max_position_embeddings={length}",
        )
    return f"length {length} is beyond the {most} positions of the config; the step takes the same"

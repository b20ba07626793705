"""Which model is meant: a config, a function, or a name that transformers or diffusers has."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from memplan.command_line.described import Described, Wanted
from memplan.command_line.from_build import built_step
from memplan.command_line.from_diffusers import diffusers_step, is_a_model_of_diffusers, names_of_diffusers
from memplan.command_line.from_transformers import knows, names, transformers_step
from memplan.command_line.outcomes import Mistake, nearest


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

"""The options that say which step is planned, and what they come to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memplan.command_line.outcomes import Mistake
from memplan.command_line.target import add_device_options, asked_card, device_settings
from memplan.problem.budgets import parsed

if TYPE_CHECKING:
    import torch

    from memplan.command_line.described import Described

_MODEL = (
    "a type (gpt2), a class (LlamaForCausalLM), a config.json or its folder, or a function that gives (model, sample) "
    "or (model, sample, loss_fn): package.module:build or path/file.py:build"
)


@dataclass(frozen=True, slots=True)
class AskedStep:
    """What the options come to: the step, a line about the device, and the settings of `memplan.plan`."""

    step: Described
    device: str
    settings: dict[str, Any]


def add_step_options(command: argparse.ArgumentParser) -> None:
    step = command.add_argument_group("the step")
    step.add_argument("model", help=_MODEL)
    step.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a field of the config")
    step.add_argument("--batch", type=count, help="examples in a batch (1)")
    step.add_argument("--length", type=count, help="tokens of each (1024, or all positions where they are fewer)")
    step.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights and inputs (bfloat16)")
    step.add_argument("--lora", type=count, nargs="?", const=16, metavar="RANK", help="train adapters alone (rank 16)")
    optimizers = ("adamw", "sgd", "adafactor", "none")
    step.add_argument("--optimizer", choices=optimizers, default="adamw", help="whose state is counted (adamw)")
    step.add_argument("--kernels", choices=("eager", "fused"), default="eager", help="see docs/fused.md (eager)")
    limits = command.add_argument_group("limits")
    limits.add_argument("--budget", help="8GiB, 8GB, 50%%, min (what the device has, less a tenth)")
    limits.add_argument("--host-budget", help="host memory that the step may use, as 64GiB (none)")
    add_device_options(command)


def asked_step(given: argparse.Namespace) -> AskedStep:
    """The step, the device and the settings that the options name. Raises Mistake."""
    budget, host_budget = _limit("--budget", given.budget), _limit("--host-budget", given.host_budget)
    card, changes = asked_card(given), dict[str, Any]()
    for text in given.set:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise Mistake(f"--set {text!r} sets nothing", "it is no NAME=VALUE", "write --set num_hidden_layers=4")
        try:
            changes[name] = json.loads(value)
        except ValueError:  # text
            changes[name] = value
    import torch

    from memplan import torch_private as private
    from memplan.command_line.described import Wanted, optimizer_of, with_adapters
    from memplan.command_line.model_source import described_step
    from memplan.planning.settings import Settings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about themselves
        step = described_step(Wanted(given.model, changes, given.batch, given.length, given.dtype))
        if given.lora is not None:
            title = f"{step.title}, adapters of rank {given.lora}"
            step = dataclasses.replace(step, title=title, model=with_adapters(step.model, given.lora))
    missing = private.missing_compiler(torch.device("cpu")) if given.kernels == "fused" else ""
    if missing:
        raise Mistake("--kernels fused can't be planned", f"it needs {missing}", "install that, or leave it out")
    optimizer = optimizer_of(step.model, given.optimizer)
    elements: Counter[torch.dtype] = Counter()
    for parameter in step.model.parameters():
        elements[parameter.dtype] += parameter.numel()
    device, settings = device_settings(given, card, budget, elements.most_common(1)[0][0])
    settings |= {"loss_fn": step.loss_fn, "optimizer": optimizer, "kernels": given.kernels, "host_budget": host_budget}
    try:
        Settings(**settings, update=getattr(given, "update", "step"))
    except (ValueError, TypeError) as error:
        raise Mistake("these options do not go together", str(error), "change what is named there") from None
    return AskedStep(step, device, settings)


def _limit(option: str, text: str | None) -> str | None:
    """A budget as it was given. Raises Mistake for what is none."""
    if text is None or (option == "--budget" and text.strip().lower() == "auto"):
        return text
    try:
        limit = parsed(text)
    except ValueError as error:
        raise Mistake(f"{option} {text!r} is no budget", str(error), f"write for example {option} 8GiB") from None
    if option == "--host-budget" and not isinstance(limit, int):
        raise Mistake(f"{option} {text!r} is no budget", "it is a number of bytes", f"write for example {option} 64GiB")
    return text


def count(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)

"""The options that say which step is planned, and for which device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memplan.command_line.cards import ACHIEVED, Card, card_named
from memplan.command_line.outcomes import Mistake
from memplan.problem.budgets import budget_bytes_of, parsed
from memplan.problem.data import Link
from memplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memplan.command_line.described import Described
    from memplan.plans.figures import PlanFigures

_RESERVE = 0.1  # of a card, as of devices that are here
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
    """Options for the step and the device."""
    step = command.add_argument_group("the step")
    step.add_argument("model", help=_MODEL)
    step.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a field of the config")
    step.add_argument("--batch", type=_count, help="examples in a batch (1)")
    step.add_argument("--length", type=_count, help="tokens of each (1024, or all positions where they are fewer)")
    step.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights and inputs (bfloat16)")
    step.add_argument(
        "--lora", type=_count, nargs="?", const=16, metavar="RANK", help="train adapters alone (of rank 16)"
    )
    optimizers = ("adamw", "sgd", "adafactor", "none")
    step.add_argument("--optimizer", choices=optimizers, default="adamw", help="whose state is counted (adamw)")
    step.add_argument("--kernels", choices=("eager", "fused"), default="eager", help="see docs/fused.md (eager)")
    limits = command.add_argument_group("limits")
    limits.add_argument("--budget", help="8GiB, 8GB, 50%%, min (what the device has, less a tenth)")
    limits.add_argument("--host-budget", help="host memory that the step may use, as 64GiB (none)")
    device = command.add_argument_group("the device")
    device.add_argument("--gpu", metavar="NAME", help='a card, as "RTX 4090" (this machine)')
    device.add_argument("--gpu-memory", metavar="BYTES", help="its memory, as 24GiB")
    device.add_argument("--flops", type=_rate, help="operations a second that it reaches, as 100e12")
    device.add_argument("--bandwidth", type=_rate, help="bytes a second that its memory reaches, as 0.7e12")
    device.add_argument("--link", type=_rate, help="bytes a second to and from the host, each way, as 20e9")


def asked_step(given: argparse.Namespace) -> AskedStep:
    """The step, the device and the settings that the options name. Raises Mistake."""
    budget, host_budget = _limit("--budget", given.budget), _limit("--host-budget", given.host_budget)
    device, settings = _device(given, budget)
    from memplan.command_line.described import Wanted
    from memplan.command_line.model_source import described
    from memplan.command_line.training_setup import optimizer_of, with_adapters
    from memplan.planning.settings import Settings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about themselves
        step = described(Wanted(given.model, _changes(given.set), given.batch, given.length, given.dtype))
        if given.lora is not None:
            title = f"{step.title}, adapters of rank {given.lora}"
            step = dataclasses.replace(step, title=title, model=with_adapters(step.model, given.lora))
    settings |= {
        "loss_fn": step.loss_fn, "optimizer": optimizer_of(step.model, given.optimizer), "kernels": given.kernels,
        "host_budget": host_budget,
    }  # fmt: skip
    try:
        Settings(**settings, update=getattr(given, "update", "step"))
    except (ValueError, TypeError) as error:
        raise Mistake("these options do not go together", str(error), "change what is named there") from None
    return AskedStep(step, device, settings)


def device_budget_bytes(budget: str | None, plan: PlanFigures) -> int:
    """Bytes of a budget for the step of this plan; None is what this machine has room for."""
    if budget is None or budget.strip().lower() == "auto":
        import torch

        from memplan.planning.automatic import automatic_bytes

        return automatic_bytes(torch.device("cpu"))
    return budget_bytes_of(budget, plan.baseline_peak_bytes, plan.problem.resident_bytes, plan.floor_bytes)


def _device(given: argparse.Namespace, budget: str | None) -> tuple[str, dict[str, Any]]:
    """A line about the device, and what `memplan.plan` has to know of it."""
    card = _card(given)
    if card is None:
        settings: dict[str, Any] = {"budget": budget, "costs": "estimate", "device": "cpu"}
        if given.link is not None:
            settings["link"] = Link(given.link, given.link)
        return "this machine's memory; seconds are rough estimates for a laptop's CPU (--gpu names a card)", settings
    roofline, link = card.roofline(given.dtype or "bfloat16"), card.link
    if given.flops is not None:
        roofline = dataclasses.replace(roofline, flops_per_s=given.flops)
    if given.bandwidth is not None:
        roofline = dataclasses.replace(roofline, bytes_per_s=given.bandwidth)
    if given.link is not None:
        link = Link(given.link, given.link)
    memory_bytes = card.memory_bytes if given.gpu_memory is None else _bytes("--gpu-memory", given.gpu_memory)
    words = (
        f"{card.name}, {format_bytes(memory_bytes)}, {roofline.flops_per_s / 1e12:.4g} TFLOP/s, "
        f"{roofline.bytes_per_s / 1e9:.4g} GB/s, host {link.to_device_bytes_per_s / 1e9:.3g} GB/s"
    )
    if budget is None or budget.strip().lower() == "auto":
        budget = str(memory_bytes - math.ceil(_RESERVE * memory_bytes))
    return words, {"budget": budget, "costs": roofline, "device": "cpu", "link": link}


def _card(given: argparse.Namespace) -> Card | None:
    """The card of the options; None is this machine. Raises Mistake."""
    if given.gpu is not None:
        return card_named(given.gpu)
    if given.gpu_memory is given.flops is given.bandwidth is None:
        return None
    missing = [n for n in ("gpu_memory", "flops", "bandwidth") if getattr(given, n) is None]
    if missing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise Mistake(
            "the card is not known well enough",
            f"{names} are missing",
            'give them, or a card by name: --gpu "RTX 4090"',
        )
    link = given.link or 25e9 / ACHIEVED
    return Card("a card of these figures", 0, given.flops, given.flops, given.bandwidth, link)


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


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise Mistake(f"{option} {text!r} is no memory", str(error), f"write for example {option} 24GiB") from None


def _changes(texts: list[str]) -> dict[str, Any]:
    """Fields and values of `--set NAME=VALUE`: values as in JSON, else text. Raises Mistake."""
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise Mistake(f"--set {text!r} sets nothing", "it is no NAME=VALUE", "write --set num_hidden_layers=4")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    return changes


def _count(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _rate(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, such as 150e12")
    return rate

"""The options that say which step is planned, and for which device, and what they come to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memplan.command_line.cards import ACHIEVED, Card, card_named, cards_named
from memplan.command_line.outcomes import Mistake
from memplan.problem.budgets import budget_bytes_of, parsed
from memplan.problem.data import Link
from memplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

    from memplan.command_line.described import Described
    from memplan.plans.figures import PlanFigures

_RESERVE = 0.1  # of a card, as of devices that are here
_USUAL_CAPABILITY = (8, 0)  # of a card without a name
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


def add_device_options(command: argparse.ArgumentParser) -> None:
    device = command.add_argument_group("the device")
    device.add_argument("--gpu", metavar="NAME", help='a card, as "RTX 4090" (this machine)')
    device.add_argument("--gpu-memory", metavar="BYTES", help="its memory, as 24GiB")
    device.add_argument("--flops", type=_rate, help="operations a second that it reaches, as 100e12")
    device.add_argument("--bandwidth", type=_rate, help="bytes a second that its memory reaches, as 0.7e12")
    device.add_argument("--link", type=_rate, help="bytes a second to and from the host, each way, as 20e9")


def asked_card(given: argparse.Namespace) -> Card | None:
    """The card of the options; None is this machine. Raises Mistake.

    Where no option names one, it is the GPU of this machine, with the memory that it has room for.
    """
    if given.gpu is not None:
        return card_named(given.gpu)
    if given.gpu_memory is given.flops is given.bandwidth is None:
        import torch

        from memplan.planning.limits import automatic_bytes

        cards = cards_named(torch.cuda.get_device_name()) if torch.cuda.is_available() else []
        if len(cards) != 1:  # the table does not have the speed of what is here
            return None
        memory_bytes = math.ceil(automatic_bytes(torch.device("cuda")) / (1 - _RESERVE))
        return dataclasses.replace(cards[0], memory_bytes=memory_bytes)
    missing = [n for n in ("gpu_memory", "flops", "bandwidth") if getattr(given, n) is None]
    if missing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise Mistake(
            "the card is not known well enough",
            f"{names} are missing",
            'give them, or a card by name: --gpu "RTX 4090"',
        )
    link = given.link or 25e9 / ACHIEVED
    return Card("a card of these figures", 0, given.flops, given.flops, given.bandwidth, link, _USUAL_CAPABILITY)


def device_settings(
    given: argparse.Namespace, card: Card | None, budget: str | None, dtype: torch.dtype
) -> tuple[str, dict[str, Any]]:
    """A line about the device, and what `memplan.plan` has to know of it.

    card: from `asked_card`. dtype: of the model. Raises Mistake.
    """
    import torch

    link = None if given.link is None else Link(given.link, given.link)
    if card is None:
        settings = {"budget": budget, "costs": "estimate", "device": "cpu", "link": link}
        return "this machine; seconds are rough estimates for a laptop's CPU (--gpu names a card)", settings
    roofline, link = card.roofline(single=dtype == torch.float32), link or card.link
    if given.flops is not None:
        roofline = dataclasses.replace(roofline, flops_per_s=given.flops)
    if given.bandwidth is not None:
        roofline = dataclasses.replace(roofline, bytes_per_s=given.bandwidth)
    memory_bytes, asked = card.memory_bytes, given.gpu_memory
    if asked is not None:
        try:
            memory_bytes = parse_bytes(asked)
        except ValueError as error:
            next_step = "write for example --gpu-memory 24GiB"
            raise Mistake(f"--gpu-memory {asked!r} is no memory", str(error), next_step) from None
    words = (
        f"{card.name}, {format_bytes(memory_bytes)}, {roofline.flops_per_s / 1e12:.4g} TFLOP/s, "
        f"{roofline.bytes_per_s / 1e9:.4g} GB/s, host {link.to_device_bytes_per_s / 1e9:.3g} GB/s"
    )
    if dtype == torch.bfloat16 and not card.has_bfloat16:
        words += "; it has no bfloat16: seconds are those of float16"
    if budget is None or budget.strip().lower() == "auto":
        budget = str(memory_bytes - math.ceil(_RESERVE * memory_bytes))
    return words, {"budget": budget, "costs": roofline, "device": "cpu", "link": link}


def device_budget_bytes(budget: str | None, plan: PlanFigures) -> int:
    """Bytes of a budget for the step of this plan; None is what this machine has room for."""
    if budget is None or budget.strip().lower() == "auto":
        import torch

        from memplan.planning.limits import automatic_bytes

        return automatic_bytes(torch.device("cpu"))
    return budget_bytes_of(budget, plan.baseline_peak_bytes, plan.problem.resident_bytes, plan.floor_bytes)


def _rate(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, such as 150e12")
    return rate

"""The options that say for which device a step is planned."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from memplan.command_line.cards import ACHIEVED, Card, card_named, cards_named
from memplan.command_line.outcomes import Mistake
from memplan.problem.budgets import budget_bytes_of
from memplan.problem.data import Link
from memplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

    from memplan.plans.figures import PlanFigures

_RESERVE = 0.1  # of a card, as of devices that are here
_USUAL_CAPABILITY = (8, 0)  # of a card without a name


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

        from memplan.planning.automatic import automatic_bytes

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

        from memplan.planning.automatic import automatic_bytes

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

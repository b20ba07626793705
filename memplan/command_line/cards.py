"""Graphics cards, by their vendors' data sheets: what they hold, and how fast they are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memplan.command_line.outcomes import Mistake, nearest
from memplan.problem.data import Link, Roofline

# Kernels reach less than a data sheet says, of arithmetic as of traffic. One share for all keeps cards comparable.
ACHIEVED = 0.7
_LAUNCH_S = 5e-6


@dataclass(frozen=True, slots=True)
class Card:
    """A card as its data sheet has it.

    - memory_bytes: what programs see: less a sixteenth on cards that keep error correction in the same memory.
    - half_flops_per_s: dense matrix products of bfloat16 (of float16, where it has no other), sums in float32.
    - single_flops_per_s: of float32, without TF32, as PyTorch has it by default.
    - bytes_per_s: to and from its memory.
    - link_bytes_per_s: to and from the host, each way.
    - capability: compute capability, by which PyTorch chooses kernels; None where it is no CUDA device, or not known.
    """

    name: str
    memory_bytes: int
    half_flops_per_s: float
    single_flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    capability: tuple[int, int] | None = None

    @property
    def has_bfloat16(self) -> bool:
        """Whether it multiplies matrices of bfloat16."""
        return self.capability is None or self.capability >= (8, 0)

    def roofline(self, single: bool) -> Roofline:
        """The speed that is reckoned with: `ACHIEVED` of the data sheet's. single: for a model in float32."""
        flops_per_s = self.single_flops_per_s if single else self.half_flops_per_s
        return Roofline(ACHIEVED * flops_per_s, ACHIEVED * self.bytes_per_s, _LAUNCH_S, self.capability)

    @property
    def link(self) -> Link:
        """The connection that is reckoned with: `ACHIEVED` of the data sheet's."""
        return Link(ACHIEVED * self.link_bytes_per_s, ACHIEVED * self.link_bytes_per_s)


def _card(
    name: str, capability: tuple[int, int] | None, memory_gib: float, half: float, single: float, bandwidth: float,
    link: float,
) -> Card:  # fmt: skip
    """Figures as data sheets print them: GiB, TFLOP/s, TFLOP/s, GB/s, GB/s each way."""
    return Card(name, int(memory_gib * 2**30), half * 1e12, single * 1e12, bandwidth * 1e9, link * 1e9, capability)


CARDS = (
    _card("RTX 3090", (8, 6), 24, 71, 35.6, 936, 32),
    _card("RTX 4080", (8, 9), 16, 97.5, 48.7, 717, 32),
    _card("RTX 4090", (8, 9), 24, 165.2, 82.6, 1008, 32),
    _card("RTX 5080", (12, 0), 16, 112.6, 56.3, 960, 64),
    _card("RTX 5090", (12, 0), 32, 209.5, 104.8, 1792, 64),
    _card("RTX A6000", (8, 6), 48, 154.8, 38.7, 768, 32),
    _card("T4", (7, 5), 15, 65, 8.1, 320, 16),
    _card("V100", (7, 0), 16, 125, 15.7, 900, 16),
    _card("V100-32GB", (7, 0), 32, 125, 15.7, 900, 16),
    _card("A10", (8, 6), 22.5, 125, 31.2, 600, 32),
    _card("A10G", (8, 6), 22.5, 70, 35, 600, 32),
    _card("L4", (8, 9), 22.5, 121, 30.3, 300, 32),
    _card("L40S", (8, 9), 45, 362, 91.6, 864, 32),
    _card("A100-40GB", (8, 0), 40, 312, 19.5, 1555, 32),
    _card("A100-80GB", (8, 0), 80, 312, 19.5, 2039, 32),
    _card("H100", (9, 0), 80, 989, 67, 3350, 64),
    _card("H100 PCIe", (9, 0), 80, 756, 51, 2000, 64),
    _card("H200", (9, 0), 141, 989, 67, 4800, 64),
    _card("B200", (10, 0), 180, 2250, 75, 7700, 64),
    _card("MI300X", None, 192, 1307, 163.4, 5300, 64),
)


def card_named(name: str) -> Card:
    """A card by a name like "RTX 4090", "rtx-4090", "4090" or "NVIDIA GeForce RTX 4090". Raises Mistake."""
    found = cards_named(name)
    if len(found) == 1:
        return found[0]
    if found:
        others = ", ".join(repr(card.name) for card in found)
        raise Mistake(f"--gpu {name!r} is the name of several cards", f"the table has {others}", "name one of them")
    near = nearest(name, [card.name for card in CARDS]) or ", ".join(repr(card.name) for card in CARDS)
    raise Mistake(
        f"--gpu {name!r} is no card that memplan knows",
        f"the table of cards has the nearest names {near}",
        "take one of them, or give the figures: --gpu-memory 24GiB --flops 150e12 --bandwidth 0.9e12 --link 25e9",
    )


def cards_named(name: str) -> list[Card]:
    """The cards that a name may stand for."""
    asked, words = _plain(name), _words(name)
    exact = [card for card in CARDS if _plain(card.name) == asked]
    among = [card for card in CARDS if _words(card.name) <= words]  # drivers add memory, socket and vendor
    found = exact or sorted(among, key=lambda card: -len(_words(card.name)))[:1]
    return found or [card for card in CARDS if asked and asked in _plain(card.name)]


def _plain(name: str) -> str:
    return "".join(re.findall(r"[a-z0-9]", name.lower()))


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))

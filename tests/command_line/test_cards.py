"""Cards are found by the names that people have for them."""

from __future__ import annotations

import pytest

from memplan.command_line.cards import CARDS, card_named
from memplan.command_line.outcomes import Mistake


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *(
            (text, "RTX 4090")
            for text in ("rtx-4090", "RTX4090", "4090", "NVIDIA GeForce RTX 4090", "geforce rtx 4090")
        ),
        *((text, "A100-80GB") for text in ("a100-80gb", "A100 80GB", "NVIDIA A100-SXM4-80GB")),
        *((text, "H100") for text in ("h100", "NVIDIA H100 80GB HBM3")),
        *((text, "T4") for text in ("t4", "Tesla T4")),
        *(("v100", "V100"), ("Tesla V100-SXM2-32GB", "V100-32GB"), ("AMD Instinct MI300X", "MI300X")),
        *((text, "RTX A6000") for text in ("a6000", "rtx a6000", "NVIDIA RTX A6000")),
        *(("A10", "A10"), ("a10g", "A10G"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("h100-pcie", "H100 PCIe")),
    ],
)
def test_names(given: str, name: str) -> None:
    assert card_named(given).name == name


def test_every_card_has_its_own_name() -> None:
    assert [card_named(card.name) for card in CARDS] == list(CARDS)


@pytest.mark.parametrize("given", ["rtx", "a100", "", "radeon", "??"])
def test_names_of_several_cards_or_none(given: str) -> None:
    with pytest.raises(Mistake) as mistake:
        card_named(given)
    assert "'" in mistake.value.cause  # names that there are


def test_figures_are_of_one_scale() -> None:
    """A digit too many, or a unit mixed up, would stand out."""
    for card in CARDS:
        assert 15 * 2**30 <= card.memory_bytes <= 192 * 2**30
        assert card.single_flops_per_s < card.half_flops_per_s
        assert 50 < card.half_flops_per_s / card.bytes_per_s < 500
        assert 5 < card.bytes_per_s / card.link_bytes_per_s < 130
        assert card.roofline(single=True).flops_per_s < card.roofline(single=False).flops_per_s

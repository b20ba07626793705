"""Every architecture trains over fused groups, with the bits of the fused program at any budget, offload included."""

from __future__ import annotations

import copy
import shutil

import pytest

import memplan
from tests.fusion.test_fused_steps import allocator_peak
from tests.support.architectures import ARCHITECTURES
from tests.support.zoo import MODELS, assert_same_bits, copied
from tests.whole.test_architectures import seeded_steps
from tests.whole.test_exact import loss_inside

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Inductor
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
]
NO_LIMIT = 1 << 40
LINK = memplan.Link(1e9, 1e9)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "zoo unet", "zoo resnet50", "zoo transformer"])
def test_bits_at_all_kept_half_way_floor_and_with_offload(name: str) -> None:
    build = MODELS[name.split()[1]] if name.startswith("zoo") else ARCHITECTURES[name].build
    net, sample = build(0)
    whole = memplan.apply(copy.deepcopy(net), copied(sample), NO_LIMIT, kernels="fused", costs="estimate")
    plan = memplan.plan_of(whole)
    assert plan is not None
    assert plan.exact == "program"
    expected = seeded_steps(whole, sample)
    budgets: list[int] = [plan.floor_bytes, (plan.floor_bytes + plan.peak_bytes) // 2]
    for budget in budgets:
        planned = memplan.apply(copy.deepcopy(net), copied(sample), budget, kernels="fused", costs="estimate")
        assert_same_bits(expected, seeded_steps(planned, sample))
    if isinstance(plan, memplan.Plan):
        offloading = memplan.apply(
            copy.deepcopy(net), copied(sample), plan.floor_bytes, kernels="fused", costs="estimate",
            host_budget="1GiB", link=LINK,
        )  # fmt: skip
        assert_same_bits(expected, seeded_steps(offloading, sample))


@pytest.mark.parametrize("name", list(MODELS))
def test_held_bytes_are_the_predicted_ones(name: str) -> None:
    """By the allocator's own events: what groups allocate no dispatch mode sees."""
    net, sample = MODELS[name](0)
    loss_fn = loss_inside(sample)
    points = memplan.explore(net, sample, kernels="fused", loss_fn=loss_fn)
    assert [p.peak_bytes for p in points] == sorted({p.peak_bytes for p in points})
    assert [p.time_s for p in points] == sorted({p.time_s for p in points}, reverse=True)
    for point in (points[0], points[len(points) // 2], points[-1]):
        planned = memplan.apply(copy.deepcopy(net), sample, plan=point, loss_fn=loss_fn)
        assert point.live_peak_bytes <= allocator_peak(planned, sample) <= point.peak_bytes

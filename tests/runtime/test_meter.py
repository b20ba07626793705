"""The measurements themselves, on cases that can be computed by hand, and against each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memplan.runtime.watch import meter as own
from tests.support import zoo
from tests.support.meter import LiveMeter, gloo_lets_go, profiler_peak, storage_bytes

KIB = 1024  # bytes of 256 float32 elements


def test_peak_counts_what_is_held_together() -> None:
    with LiveMeter() as meter:
        a = torch.zeros(256)
        b = a + 1
        del a
        c = torch.cat([b, b])
        del b
        assert meter.live_bytes == 2 * KIB
    assert meter.peak_bytes == 3 * KIB
    del c
    assert meter.live_bytes == 0


def test_views_and_in_place_writes_cost_nothing() -> None:
    with LiveMeter() as meter:
        a = torch.zeros(256)
        rows = a.view(16, 16)
        row = rows[3].t()
        row.add_(1)
        rows.relu_()
        del a, rows
        assert meter.live_bytes == KIB
    assert meter.peak_bytes == KIB
    del row
    assert meter.live_bytes == 0


def test_a_view_of_a_storage_counts_all_of_it() -> None:
    with LiveMeter() as meter:
        first = torch.zeros(512)[:1]
        assert meter.live_bytes == 2 * KIB
    del first


def test_several_outputs_and_nested_lists() -> None:
    x = torch.zeros(256)
    with LiveMeter() as meter:
        meter.register({"x": [x, (x,)]})
        assert meter.live_bytes == KIB
        parts = torch.split(x, 64)
        values, indices = torch.sort(x)
        assert meter.live_bytes == KIB + KIB + 2 * KIB
        copies = torch._foreach_add([x, x], 1.0)
        assert meter.live_bytes == 6 * KIB
        del copies, values
        assert meter.live_bytes == 3 * KIB
    del parts, indices
    assert meter.live_bytes == KIB


def test_a_storage_that_grows_is_counted_at_its_new_size() -> None:
    with LiveMeter() as meter:
        a = torch.zeros(256)
        a.resize_(512)
        assert meter.live_bytes == 2 * KIB
    del a
    assert meter.live_bytes == 0


@pytest.mark.parametrize("kind", [LiveMeter, own.LiveMeter])
def test_zeros_of_forward_mode_have_no_memory(kind: type[LiveMeter]) -> None:
    with kind() as meter:
        zeros = torch._efficientzerotensor((256,))
        assert zeros.view(16, 16).untyped_storage().nbytes() == KIB
        assert meter.live_bytes == 0
        others = zeros.clone()
        assert meter.live_bytes == KIB
    del others


def test_of_what_an_allocator_gave_no_memory_nothing_counts() -> None:
    with own.LiveMeter() as meter:
        meta = torch.zeros(256, device="meta")
        sparse = torch.eye(16).to_sparse()
        assert meter.live_bytes == 16 * (2 * 8 + 4)  # indices and values
    del meta, sparse
    values, offsets = torch.zeros(256, 4), torch.tensor([0, 100, 256])
    with own.LiveMeter() as meter:
        twice = torch.nested.nested_tensor_from_jagged(values, offsets) * 2
        assert meter.live_bytes == offsets.nbytes + 2 * values.nbytes
    del twice


def test_backward_is_seen_and_a_gradient_counts_once() -> None:
    weight = nn.Parameter(torch.ones(256))
    with LiveMeter() as meter:
        meter.register(weight)
        product = weight * weight  # held to the end: 1 KiB
        total = product.sum()
        total.backward()
        gradient = weight.grad
        assert gradient is not None
        alias = gradient.view(16, 16)
        # weight, product and gradient, and the loss with its gradient gone again
        assert meter.live_bytes == 3 * KIB + 4
        # in backward: both halves of the gradient and their sum, beside weight, product and two scalars
        assert meter.peak_bytes == 5 * KIB + 8
    assert storage_bytes([gradient, alias, None]) == KIB


def test_profiler_peak_sees_the_same() -> None:
    def step() -> torch.Tensor:
        a = torch.zeros(256)
        b = a + 1
        del a
        return torch.cat([b, b])

    assert profiler_peak(step, resident_bytes=100) == 3 * KIB + 100


# Llama's kernels take no memory of their own; Handmade's reductions take a few bytes, which only the profiler sees.
@pytest.mark.parametrize(("name", "scratch_bytes"), [("llama", 0), ("handmade", 64)])
def test_meter_and_profiler_agree(name: str, scratch_bytes: int) -> None:
    model, sample = zoo.MODELS[name](0)
    held = [*model.parameters(), *model.buffers(), *zoo.tensors_of(sample)]

    def step() -> None:
        zoo.loss_of(zoo.call(model, sample)).backward()

    step()  # warm: kernels keep what they set up once
    model.zero_grad(set_to_none=True)
    with LiveMeter() as meter:
        meter.register(held)
        resident_bytes = meter.live_bytes
        step()
    model.zero_grad(set_to_none=True)
    peak_bytes = profiler_peak(step, resident_bytes)
    assert resident_bytes == storage_bytes(held)
    assert meter.peak_bytes > 1.5 * resident_bytes
    assert 0 <= peak_bytes - meter.peak_bytes <= scratch_bytes


@pytest.mark.filterwarnings("ignore:.*reduce_scatter:FutureWarning")  # newer releases have another name for it
def test_a_collective_is_over_with_all_that_was_made_for_it() -> None:
    """gloo's thread lets go of the copy that it reduced a moment after the collective is over."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with gloo_lets_go(), LiveMeter() as meter:
            whole, part = torch.ones(256), torch.zeros(256)
            for _ in range(300):
                torch.distributed.reduce_scatter_tensor(part, whole)
                assert meter.live_bytes == 2 * KIB
        assert meter.peak_bytes == 3 * KIB
    finally:
        torch.distributed.destroy_process_group()

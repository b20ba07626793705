"""One rank of `fully_shard` on the twin: plans move parts of parameters to pinned host memory, and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memplan
from tests.cuda_twin import twin
from tests.cuda_twin.test_on_twin import held_bytes

pytestmark = [pytest.mark.twin, pytest.mark.skipif(twin.missing() is not None, reason=str(twin.missing()))]

HOST = {"host_budget": "1GiB", "link": memplan.Link(1e12, 1e12, 0.0)}


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def places(tensor: torch.Tensor) -> tuple[str, str, bool]:
    """The type of a DTensor's device and of its part's, and whether the part is pinned."""
    part = tensor._local_tensor  # type: ignore[attr-defined]
    return tensor.device.type, part.device.type, part.is_pinned()


def test_parts_move_to_the_host_and_back(one_rank: None) -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)]).cuda()
    for block in (*net, net):
        fully_shard(block, mesh=init_device_mesh("cuda", (1,)))
    x, optimizer = torch.randn(64, 1024, device="cuda"), torch.optim.AdamW(net.parameters())
    there, pinned, unpinned = ("cuda", "cuda", False), ("cpu", "cpu", True), ("cpu", "cpu", False)

    def step() -> None:
        net(x).sum().backward()
        found.append({places(p.grad) for p in net.parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()

    floor_bytes = 0
    for options in ({"budget": 1.0, **HOST}, {"budget": None, **HOST}, {"budget": "1GiB"}):
        budget = options.pop("budget") or int(1.05 * floor_bytes)
        memplan.apply(net, x, budget, costs="estimate", optimizer=optimizer, **options)  # type: ignore[arg-type]
        plan, found = memplan.plan_of(net), list[set[tuple[str, str, bool]]]()
        assert isinstance(plan, memplan.Plan)
        moved = bool(floor_bytes) and bool(options)
        assert {places(p) for p in net.parameters()} == {pinned if moved else there}
        step()
        assert held_bytes(step) <= plan.peak_bytes
        assert {places(optimizer.state[p]["exp_avg"]) for p in net.parameters()} == {unpinned if moved else there}
        with torch.no_grad():
            net(x)
        memplan.remove(net)
        step()  # by the hooks of fully_shard
        assert {place[:2] for places in found for place in places} == {(pinned if moved else there)[:2]}
        floor_bytes = plan.floor_bytes

"""What the CPU takes to update parameters that live on the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import memplan
from memplan.costs.optimizer import host_update_s_per_byte
from memplan.planning import problems
from tests.support.small import net_and_sample
from tests.support.zoo import MODELS

AdamW = torch.optim.AdamW


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_estimates_count_what_each_op_reads_and_writes(dtype: torch.dtype) -> None:
    def passes(optimizer: torch.optim.Optimizer) -> float:
        return host_update_s_per_byte(optimizer, measured=False) * memplan.Roofline().bytes_per_s

    assert passes(torch.optim.SGD(parameters(dtype), lr=0.1)) == pytest.approx(3)  # p.add_(gradient)
    assert passes(AdamW(parameters(dtype), fused=True)) == pytest.approx(7)  # reads 4, writes 3
    assert passes(AdamW(parameters(dtype))) == pytest.approx(21, abs=0.01)  # nine ops
    assert passes(AdamW(parameters(dtype), amsgrad=True)) > 21


def test_timing_leaves_the_optimizer_as_it_is() -> None:
    net = torch.nn.Linear(3, 3)
    optimizer = AdamW(net.parameters(), foreach=True)
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    assert host_update_s_per_byte(optimizer, measured=True) > 0
    assert str(before) == str((net.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("update", ["step", "backward"])
def test_hooks_on_steps_hear_of_the_loops_own_alone(update: Any) -> None:
    """Plans step copies of the optimizer: to foresee memory, to time it, to update in backward."""
    net, sample = net_and_sample()
    optimizer = AdamW(net.parameters())
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *step: heard.append("before"))
    optimizer.register_step_post_hook(lambda *step: heard.append("after"))
    of_all = register_optimizer_step_post_hook(lambda *step: heard.append("of all"))
    memplan.apply(net, sample, 0.9, optimizer=optimizer, update=update, host_budget="1GiB")
    net(sample).backward()
    assert heard == []
    optimizer.step()
    of_all.remove()
    assert heard == ["before", "after", "of all"]


def test_a_step_that_is_foreseen_leaves_nothing_in_the_optimizers_lists() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.steps.append(closure)
            return super().step(closure)

    net, sample = net_and_sample()
    optimizer = Counts(net.parameters(), lr=0.1)
    optimizer.steps = []
    memplan.apply(net, sample, 0.9, optimizer=optimizer, costs="estimate")
    assert optimizer.steps == []


def test_what_can_not_step_on_the_host_is_refused() -> None:
    net, sample = MODELS["handmade"](0)
    with pytest.raises(memplan.UnsupportedModel, match=r"host.*capturable"):
        memplan.plan(net, sample, 0.5, optimizer=AdamW(net.parameters(), capturable=True), host_budget="1GiB")


@pytest.mark.parametrize(
    ("rate", "kind", "settings", "told"),
    [
        (1.0, AdamW, {}, True),
        (1.0, AdamW, {"fused": True}, False),
        (1.0, torch.optim.RMSprop, {}, False),  # has no fused kernel
        (1e-12, AdamW, {}, False),
    ],
)
def test_it_is_said_that_a_fused_optimizer_would_save_time(
    rate: float,
    kind: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, where updates are much of a step. The rates are made up."""
    monkeypatch.setattr(problems, "host_update_s_per_byte", lambda optimizer, measured: rate)
    net, sample = MODELS["handmade"](0)
    optimizer = kind(net.parameters(), **settings)
    low = memplan.plan(net, sample, 1.0, optimizer=optimizer, costs="estimate").floor_bytes
    arguments: dict[str, Any] = {"optimizer": optimizer, "host_budget": "1GiB", "link": memplan.Link(1e9, 1e9)}
    memplan.apply(net, sample, int(0.6 * low), **arguments)
    assert ("fused=True" in caplog.text) is told
    caplog.clear()
    assert isinstance(sample, torch.Tensor)
    memplan.prepare(net, [sample[:40]])
    assert "fused=True" not in caplog.text


def test_the_report_says_what_the_cpu_takes() -> None:
    net, sample = MODELS["handmade"](0)
    optimizer = AdamW(net.parameters())
    low = memplan.plan(net, sample, 1.0, optimizer=optimizer, costs="estimate").floor_bytes
    for update in ("step", "backward"):
        plan = memplan.plan(
            net, sample, int(0.6 * low), optimizer=optimizer, costs="estimate", host_budget="1GiB",
            link=memplan.Link(1e9, 1e9), update=update,
        )  # type: ignore[arg-type]  # fmt: skip
        assert f"{'beside' if update == 'backward' else 'after'} the step" in plan.report()

"""What the environment says: the budget where a call names none, and no plans at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.installed.planned_forward import planned_forward
from tests.support.zoo import MODELS, assert_same_bits, call, copied, loss_of, run_steps


@pytest.mark.parametrize("given", ["50 MiB", "52428800", "0.95", "95%", "min"])
def test_the_budget_of_calls_that_name_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = MODELS["handmade"](0)
    named = memplan.plan(net, sample, given, costs="estimate")
    monkeypatch.setenv("MEMPLAN_BUDGET", given)
    assert memplan.plan(net, sample, costs="estimate") == named
    assert memplan.plan_of(memplan.apply(net, sample, costs="estimate")) == named


def test_a_budget_in_the_call_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = MODELS["handmade"](0)
    plans = [memplan.plan(net, sample, budget, costs="estimate") for budget in ("1MiB", None)]
    monkeypatch.setenv("MEMPLAN_BUDGET", "2MiB")
    assert [memplan.plan(net, sample, budget, costs="estimate") for budget in ("1MiB", "auto")] == plans
    memplan.apply(net, sample, plan=plans[0])
    assert memplan.plan_of(net) == plans[0]
    monkeypatch.setenv("MEMPLAN_BUDGET", "auto")
    assert memplan.plan(net, sample, costs="estimate") == plans[1]


@pytest.mark.parametrize("given", ["much", "-1", "120%", "0"])
def test_what_is_no_budget_is_told(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = MODELS["handmade"](0)
    monkeypatch.setenv("MEMPLAN_BUDGET", given)
    with pytest.raises(ValueError, match=f"MEMPLAN_BUDGET is '{given}'"):
        memplan.apply(net, sample)


@pytest.fixture
def _disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPLAN_DISABLE", "1")


@pytest.mark.usefixtures("_disabled")
def test_disabled_the_model_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    plain, sample = MODELS["handmade"](0)
    net = copy.deepcopy(plain)
    assert memplan.apply(net, sample, 0.5) is net
    assert "forward" not in vars(net) and memplan.plan_of(net) is None
    assert memplan.prepare(net, [sample, sample]) == (None, None)
    memplan.on_remove(net, lambda: pytest.fail("there is nothing to undo"))
    with memplan.fetching(net):
        assert not torch.is_grad_enabled()
    assert_same_bits(run_steps(plain, sample), run_steps(memplan.remove(net), sample))
    assert [r.getMessage() for r in caplog.records] == [
        f"MEMPLAN_DISABLE is set: {type(net).__name__} trains without a plan"
    ]


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.usefixtures("_disabled")
def test_disabled_a_loss_function_still_runs_in_place_of_the_model(own_forward: bool) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).pow(2).mean()

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    if own_forward:
        plain.forward = plain.forward
    x, y = torch.randn(2, 3, 4)
    net = memplan.apply(copy.deepcopy(plain), (x, y), 0.5, loss_fn=loss_fn)
    found: list[Any] = []
    for model, run in (
        (plain, lambda: loss_fn(plain, x, y)),
        (net, lambda: net(x, y)),
        (twin := copy.deepcopy(net), lambda: twin(x, y)),
    ):
        torch.manual_seed(1)
        loss = run()
        loss.backward()
        found.append([copied(loss), [copied(p.grad) for p in model.parameters()]])
        with torch.no_grad():
            assert model(x).shape == x.shape
        assert model.eval()(x).shape == x.shape
    assert_same_bits(*found[:2])
    assert_same_bits(*found[1:])
    memplan.remove(net)
    assert ("forward" in vars(net)) == own_forward
    assert net(x).shape == x.shape


@pytest.mark.usefixtures("_disabled")
def test_disabled_what_trains_with_a_plan_only_is_refused() -> None:
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="init= trains with a plan only"):
        memplan.apply(net, torch.ones(2, 2), 0.5, device="cpu", init=lambda name, tensor: None)


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_not_disabled(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPLAN_DISABLE", value)
    net, sample = MODELS["handmade"](0)
    memplan.apply(net, sample, 1.0, costs="estimate")
    assert planned_forward(net) is not None
    loss_of(call(net, sample)).backward()

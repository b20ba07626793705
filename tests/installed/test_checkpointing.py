"""Gradient checkpointing that is on when a plan is made: it is off beside the plan, and back when the plan is gone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

import memplan
from tests.support.small import nothing_changes
from tests.support.zoo import MODELS, assert_same_bits, run_steps

TOLD = "gradient checkpointing is switched off, for the plan decides what is recomputed"


def checkpointed(require_grads: bool = False) -> tuple[Any, Any]:
    net, sample = MODELS["gpt2"](0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older and newer versions have other names for it
        net.gradient_checkpointing_enable()
    if require_grads:
        net.enable_input_require_grads()
    return net, sample


def is_on(net: Any) -> bool:
    return any(getattr(m, "gradient_checkpointing", False) for m in net.modules())


@pytest.mark.parametrize("require_grads", [False, True])
def test_it_is_off_while_the_plan_is_on(require_grads: bool, caplog: pytest.LogCaptureFixture) -> None:
    plain, sample = checkpointed(require_grads)
    net = copy.deepcopy(plain)
    memplan.apply(net, sample, 0.7, costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan) and plan.recomputed
    assert [r.message for r in caplog.records if "checkpointing" in r.message] == [TOLD]
    assert not is_on(net)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
    memplan.apply(net, sample, 0.9, costs="estimate")
    assert not is_on(net)
    assert is_on(memplan.remove(net))


def test_it_stays_on_where_there_is_no_plan() -> None:
    net, sample = checkpointed()
    with nothing_changes(net), pytest.raises(memplan.BudgetInfeasible):
        memplan.apply(net, sample, 1, costs="estimate")
    assert is_on(net)
    plan = memplan.plan(net, sample, 0.7, costs="estimate")
    assert is_on(net)
    plain, _ = MODELS["gpt2"](0)
    assert plan == memplan.plan(plain, sample, 0.7, costs="estimate")


def test_switched_on_later_it_is_told_of() -> None:
    net, sample = checkpointed()
    memplan.apply(net, None, 0.7, costs="estimate", on_mismatch="raise")
    for module in net.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
    with pytest.raises(memplan.MemplanError, match="gradient_checkpointing_disable"):
        net(**sample)

"""Arguments that are wrong: what was got, what would do, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan

SAMPLE = torch.ones(4, 8)
# Of `apply`: what is given, the error, and words of it.
GIVEN: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a budget in words": ({"budget": "lots"}, ValueError, "write for example '8GiB'"),
    "a negative budget": ({"budget": -5}, ValueError, "more than 0 bytes"),
    "a budget over one": ({"budget": 1.5}, ValueError, "fraction is one of the unplanned peak"),
    "a budget of True": ({"budget": True}, TypeError, "a budget is an int"),
    "a sample in words": ({"sample": "x"}, TypeError, "sample must be a tensor"),
    "a loss in words": ({"loss_fn": "mse"}, TypeError, "loss_fn is a function"),
    "a criterion": ({"loss_fn": nn.MSELoss()}, TypeError, "loss_fn=lambda model, x, y: criterion"),
    "a class of optimizers": ({"optimizer": torch.optim.SGD}, TypeError, "optimizer is a torch.optim.Optimizer"),
    "a device of no kind": ({"device": "gpu"}, ValueError, "device is 'cpu', 'cuda'"),
    "a device that can't be planned": ({"device": "mps"}, ValueError, "only those on CPUs and on CUDA devices"),
    "costs": ({"costs": "fast"}, ValueError, "costs must be 'measure' or 'estimate'"),
    "costs of nothing": ({"costs": memplan.Roofline(0, 0)}, ValueError, "more than 0 flops"),
    "accumulate": ({"accumulate": 4}, TypeError, "accumulate is True or False"),
    "grads": ({"grads": "edge"}, ValueError, "grads must be 'surface' or 'edges'"),
    "a preset": ({"config": "best"}, ValueError, "unknown preset 'best'; there are"),
    "a host budget": ({"host_budget": 0.5}, TypeError, "host_budget is an int or a str"),
    "a link": ({"link": 3}, TypeError, "link is a memplan.Link"),
    "a link of no speed": ({"link": memplan.Link(0, 0)}, ValueError, "more than 0 bytes a second"),
    "update": ({"update": "now"}, ValueError, "update must be 'step' or 'backward'"),
    "update without optimizer": ({"update": "backward"}, ValueError, "needs optimizer="),
    "in_flight": ({"in_flight": 0}, ValueError, "a count of forwards, 1 or more"),
    "shards": ({"shards": 3}, TypeError, "shards is a memplan.Shards"),
    "init": ({"init": 3}, TypeError, "init is a function"),
    "keep_frozen": ({"keep_frozen": "yes"}, TypeError, "keep_frozen is True or False"),
    "arena": ({"arena": 1}, TypeError, "arena is True or False"),
    "kernels": ({"kernels": "fast"}, ValueError, "kernels must be 'eager' or 'fused'"),
    "random": ({"random": "counted"}, ValueError, "random must be 'eager' or 'counter'"),
    "dynamic": ({"dynamic": "yes"}, ValueError, "dynamic must be 'auto'"),
    "sizes of an argument": ({"dynamic": {"input": 1}}, TypeError, r"dynamic={'input': {dimension: \(least, most\)}}"),
    "a size without a range": ({"dynamic": {"input": {0: 4}}}, ValueError, r"{0: \(least, most\)}}, got 4"),
    "sizes of no argument": ({"dynamic": {"x": {0: (1, 4)}}}, ValueError, "names dimension 0 of 'x'; tensors are inp"),
    "on_mismatch": ({"on_mismatch": "plan"}, ValueError, "on_mismatch must be 'replan' or 'raise'"),
    "on_oom": ({"on_oom": "retry"}, ValueError, "on_oom must be 'raise' or 'replan'"),
    "on_infeasible": ({"on_infeasible": "no"}, ValueError, "on_infeasible must be 'advise', 'raise' or 'min'"),
    "surroundings": ({"surroundings": 5}, TypeError, "surroundings is a memplan.Surroundings"),
    "negative surroundings": ({"surroundings": memplan.Surroundings(-1)}, ValueError, "no less than 0 bytes"),
    "a plan's name": ({"plan": "plan.json", "budget": None}, TypeError, "as memplan.Plan.load reads from a file"),
    "a group's name": ({"group": "world"}, TypeError, "group is a process group"),
    "no such argument": ({"budgets": 1}, TypeError, "unexpected keyword argument 'budgets'"),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def planned() -> nn.Module:
    return memplan.apply(net(), SAMPLE, "1GiB", costs="estimate", config="noremat")


@pytest.mark.parametrize("what", GIVEN)
def test_apply(what: str) -> None:
    given, error, words = GIVEN[what]
    model = net()
    with pytest.raises(error, match=words):
        memplan.apply(model, **{"sample": SAMPLE, "budget": "1GiB", "costs": "estimate", **given})
    assert "forward" not in vars(model)


def rows(count: int) -> torch.Tensor:
    return torch.ones(count, 8)


OTHERS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "apply to no module": (lambda: memplan.apply("model", SAMPLE, 1), TypeError, "model must be a torch.nn.Module"),
    "a plan of no module": (lambda: memplan.plan(3, SAMPLE), TypeError, "model must be a torch.nn.Module"),
    "plan: another argument": (lambda: memplan.plan(net(), SAMPLE, on_oom="raise"), TypeError, "it takes"),
    "explore: a budget": (lambda: memplan.explore(net(), SAMPLE, budget=3), TypeError, "it takes"),
    "explore no module": (lambda: memplan.explore("x", SAMPLE), TypeError, "model must be a torch.nn.Module"),
    "prepare, unplanned": (lambda: memplan.prepare(net(), [SAMPLE]), ValueError, "call memplan.apply"),
    "prepare one sample": (lambda: memplan.prepare(planned(), SAMPLE), TypeError, r"write \[sample\] for one"),
    "remove from no module": (lambda: memplan.remove("x"), TypeError, "model must be a torch.nn.Module"),
    "the plan of no module": (lambda: memplan.plan_of("x"), TypeError, "model must be a torch.nn.Module"),
    "a report of no module": (lambda: memplan.report("x"), TypeError, "model must be a torch.nn.Module"),
    "what no module has grown by": (lambda: memplan.grown_bytes(3), TypeError, "model must be a torch.nn.Module"),
    "one sample for all batches": (
        lambda: memplan.largest_batch(net(), SAMPLE, "1GiB"), TypeError, "make_sample is a function"
    ),
    "samples of one size": (
        lambda: memplan.largest_batch(net(), lambda count: SAMPLE, "1GiB", 64), ValueError, "Make samples of any size"
    ),
    "an effective batch": (lambda: memplan.largest_batch(net(), rows, "1GiB", "8"), ValueError, "a number of rows"),
    "a batch for a fraction": (lambda: memplan.largest_batch(net(), rows, 0.5), ValueError, "give the budget in bytes"),
    "one sample for all lengths": (
        lambda: memplan.longest_sequence(net(), SAMPLE, "1GiB"), TypeError, "make_sample is a function"
    ),
    "chunks": (lambda: memplan.chunked_loss("all"), ValueError, "chunk_tokens is a number of tokens"),
    "kernels of no module": (lambda: memplan.compare_kernels(3, SAMPLE), TypeError, "model must be a torch.nn.Module"),
    "an audit of no module": (lambda: memplan.audit(rows, SAMPLE), TypeError, "model must be a torch.nn.Module"),
    "an audit of a criterion": (lambda: memplan.audit(net(), SAMPLE, nn.MSELoss()), TypeError, "loss_fn is called"),
    "a reference of others": (
        lambda: memplan.audit(net(), SAMPLE, reference=nn.Linear(8, 1)), ValueError, "has other parameters"
    ),
    "a method": (lambda: memplan.Config(("best",)), ValueError, "unknown method 'best'; there are"),
    "a field": (lambda: memplan.generate_config(speed=1), TypeError, "has no field 'speed'; it has"),
    "no configuration to save": (lambda: memplan.save_config(3, "x"), TypeError, "a memplan.Config or the name of"),
    "bytes in words": (lambda: memplan.parse_bytes("lots"), ValueError, "write for example '8GiB'"),
    "bytes of no text": (lambda: memplan.parse_bytes(None), TypeError, "as text, such as '8GiB'"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_others(what: str) -> None:
    run, error, words = OTHERS[what]
    with pytest.raises(error, match=words):
        run()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_files(content: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not a memplan configuration"):
        memplan.load_config(path)
    with pytest.raises(memplan.InvalidPlanFile, match=r"Make it again|not a memplan plan file"):
        memplan.Plan.load(path)


def test_a_sample_that_the_model_does_not_take_says_why_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        memplan.apply(net(), torch.ones(4, 9), "1GiB", costs="estimate")
    assert "Traceback" not in capfd.readouterr().err

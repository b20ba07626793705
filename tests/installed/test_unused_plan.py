"""A planned model that trains without its plan says so: Lightning's modules, and models of which a part is called."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import memplan
from tests.support.zoo import assert_same_bits, copied

pl = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)))


class CallsNet(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Without a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.outputs(batch[0]).pow(2).mean()
        self.log("loss", loss)
        self.losses.append(copied(loss))
        return loss

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class HasForward(CallsNet):
    """With one that `training_step` does not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class CallsItself(HasForward):
    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)  # type: ignore[no-any-return]


def fit(module: Any) -> Any:
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=64)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(module, data)
    return module.losses, copied(module.state_dict())


@pytest.mark.parametrize("kind", [CallsItself, CallsNet])
def test_lightning_trains_with_a_plan_as_without(kind: Any) -> None:
    plain, module = kind(), kind()
    target = module if kind is CallsItself else module.net
    memplan.apply(target, None, 0.9, costs="estimate")
    assert_same_bits(fit(plain), fit(module))
    plan = memplan.plan_of(target)
    assert plan is not None and plan.recomputed


def test_a_lightning_module_without_forward_is_refused() -> None:
    with pytest.raises(memplan.UnsupportedModel, match=r"no forward of its own.*memplan\.apply\(module\.net, "):
        memplan.apply(CallsNet(), None, 0.6)


def test_a_lightning_module_whose_training_step_passes_forward_by_is_refused() -> None:
    module = memplan.apply(HasForward(), None, 0.6)
    with pytest.raises(memplan.UnsupportedModel, match=r"training_step, and that does not call.*apply\(module\.net, "):
        fit(module)
    fit(memplan.remove(module))


# -- loops of one's own -----------------------------------------------------------------------------------------------


def train(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], steps: int = 2) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        run(torch.randn(64, 16)).sum().backward()
        optimizer.step()


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum("trains without its plan" in record.message for record in caplog.records)


def test_a_model_of_which_a_part_is_called_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    net = memplan.apply(nn.Sequential(network(), nn.Linear(16, 2)), torch.randn(64, 16), 0.9, costs="estimate")
    train(net, net[0])  # type: ignore[index]
    assert told(caplog) == 1


def test_a_model_that_runs_planned_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    net = memplan.apply(network(), torch.randn(64, 16), 0.9, costs="estimate")
    stranger = network()
    train(stranger, stranger)
    train(net, net)
    train(memplan.remove(net), net[0])  # type: ignore[index]
    assert not told(caplog)


def test_a_planned_model_is_collected_while_optimizers_run_their_hooks() -> None:
    """The garbage collector runs when it likes: also between two hooks."""
    planned = [memplan.apply(network(), torch.randn(64, 16), 0.9, costs="estimate")]
    stranger = network()

    def drop(*_: Any) -> None:
        planned.clear()
        gc.collect()

    hook = register_optimizer_step_post_hook(drop)
    try:
        train(stranger, stranger)
    finally:
        hook.remove()
    assert not planned


def test_plans_are_told_of_while_others_are_watched(caplog: pytest.LogCaptureFixture) -> None:
    nets = [nn.Sequential(network(), nn.Linear(16, 2)) for _ in range(2)]
    for net in nets:
        memplan.apply(net, torch.randn(64, 16), 0.9, costs="estimate")
    for net in nets:
        train(net, net[0])  # type: ignore[arg-type]
    assert told(caplog) == 2

"""MemplanCallback in Lightning: what is trained with it is what is trained without, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memplan
from tests.support.zoo import assert_same_bits, copied

pl = pytest.importorskip("pytorch_lightning")

from memplan.integrations.lightning import MemplanCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Its training_step calls itself, or only its network."""

    def __init__(self, calls: str = "self") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)))
        self.calls, self.fails_at, self.seen = calls, -1, list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise RuntimeError("a batch is broken")
        loss: torch.Tensor = (self if self.calls == "self" else self.net)(batch[0]).pow(2).mean()
        self.log("loss", loss)
        self.seen.append(copied(loss))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(copied(self(batch[0]).mean()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(module: Any, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(240, 16)), batch_size=64)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", enable_model_summary=False, callbacks=[*callbacks], **quiet, **options
    )
    trainer.fit(module, data, data)
    return module.seen, copied(module.state_dict()), torch.get_rng_state()


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (None, {}),
        ("net", {}),
        (None, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ("net", {"precision": "bf16-mixed"}),
    ],
    ids=["itself", "part", "accumulated", "bfloat16"],
)
def test_a_planned_run_is_the_plain_run(part: str | None, options: Any, plans_made: Callable[[], int]) -> None:
    calls = "self" if part is None else part
    callback = MemplanCallback(0.75, part=part, costs="estimate")
    module = Module(calls)
    assert_same_bits(fit(Module(calls), **options), fit(module, callback, **options))
    plan = callback.plan
    assert isinstance(plan, memplan.Plan) and plan.recomputed
    assert plan.problem.accumulate
    assert plans_made() == 2  # for the first batch, and, when the short one comes, for all sizes
    assert memplan.plan_of(module) is None and memplan.plan_of(module.net) is None


def test_the_optimizer_is_counted() -> None:
    plans = []
    for count in (False, None):
        callback = MemplanCallback(1.0, costs="estimate", count_optimizer=count)
        fit(Module(), callback)
        plans.append(callback.plan)
    assert plans[1].problem.extra_resident_bytes > plans[0].problem.extra_resident_bytes == 0


def test_an_optimizer_that_runs_the_model_itself_is_not_counted() -> None:
    class OfLBFGS(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    callback = MemplanCallback(0.9, costs="estimate")
    assert_same_bits(fit(OfLBFGS()), fit(OfLBFGS(), callback))
    assert callback.plan is not None and callback.plan.problem.extra_resident_bytes == 0


def test_an_interruption_takes_the_plan_off() -> None:
    module, callback = Module(), MemplanCallback(0.9, costs="estimate")
    module.fails_at = 2
    with pytest.raises(RuntimeError, match="a batch is broken"):
        fit(module, callback)
    assert memplan.plan_of(module) is None and callback.plan is not None
    module.fails_at = -1
    fit(module, callback)
    assert memplan.plan_of(module) is None


def test_a_training_step_that_calls_a_part_is_told_of() -> None:
    with pytest.raises(memplan.UnsupportedModel, match=r"training_step"):
        fit(Module("net"), MemplanCallback(0.9, costs="estimate"))


@pytest.mark.parametrize("name", ["sample", "plan", "optimizer", "loss_fn"])
def test_keywords_that_lightning_answers_for_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"takes no {name}="):
        MemplanCallback(0.9, **{name: None})


def test_strategies_that_shard_are_refused() -> None:
    class FSDPStrategy:
        pass

    trainer = type("Trainer", (), {"strategy": FSDPStrategy()})()
    with pytest.raises(ValueError, match="FSDPStrategy, which shards the model"):
        MemplanCallback(0.9).on_train_start(trainer, Module())

"""memplan in the Trainer of Lightning, of the package `lightning` or `pytorch_lightning`.

trainer = Trainer(max_epochs=3, callbacks=[MemplanCallback("8GiB", part="net")])
trainer.fit(module, loader)
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import memplan

try:
    from pytorch_lightning import Callback, LightningModule, Trainer
except ImportError:
    from lightning.pytorch import Callback, LightningModule, Trainer  # type: ignore[no-redef]

log = logging.getLogger("memplan")

_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class MemplanCallback(Callback):
    """Plans what a Trainer trains: the first batch, when that comes, and later ones that are unlike it.

    The plan is on the model while `trainer.fit()` trains, and is taken off when that ends; `plan` still has it then.

    - budget, apply_keywords: as for `memplan.apply`. Two keywords follow the Trainer unless they are given here.
      `accumulate` is on, for gradients of the step before are there until `training_step` has run. `grads` is "edges"
      where DistributedDataParallel looks for unused parameters.
    - part: the name of the submodule that `training_step` calls, such as "net". None is the LightningModule itself, for
      a `training_step` that calls `self(...)`.
    - count_optimizer: count the state of the optimizer, and its `step()`, into the budget. None: yes, if there is one,
      of PyTorch; else a warning says that nothing is counted.

    When training begins, raises ValueError for a Trainer that a plan can't be combined with, saying what to change,
    AttributeError where there is no such part, and what `memplan.apply` raises.
    """

    def __init__(
        self,
        budget: int | float | str | memplan.Budget | None = None,
        *,
        part: str | None = None,
        count_optimizer: bool | None = None,
        **apply_keywords: Any,
    ) -> None:
        for name in ("sample", "plan", "optimizer", "loss_fn"):
            if name in apply_keywords:
                raise TypeError(
                    f"MemplanCallback takes no {name}=: Lightning has the batches, the optimizer (see "
                    "count_optimizer=) and the loss, and the plan is made for the first batch"
                )
        self._budget, self._part, self._count_optimizer = budget, part, count_optimizer
        self._keywords = apply_keywords
        self._model: Any = None
        self._plan: memplan.Plan | None = None

    @property
    def plan(self) -> memplan.Plan | None:
        """The plan that ran last, also after training; None before the first step."""
        return self._plan if self._model is None else memplan.plan_of(self._model)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
        sharding = [name for name in _SHARDING if name in kinds]
        if sharding:
            raise ValueError(
                f"MemplanCallback got a Trainer with {sharding[0]}, which shards the model that would be planned. Use "
                'strategy="ddp" or one device, or plan in a loop of your own with fully_shard and '
                "memplan.apply, or memplan.integrations.deepspeed"
            )
        self._finish()
        looks = isinstance(trainer.model, DistributedDataParallel) and trainer.model.find_unused_parameters
        keywords = {
            "grads": "edges" if looks else "surface",
            "accumulate": self._keywords.get("update") != "backward",  # which leaves no gradients
            **self._keywords,
        }
        if _counts_optimizer(trainer, self._count_optimizer):
            if len(trainer.optimizers) != 1:
                raise ValueError(
                    f"MemplanCallback got count_optimizer=True and a module with {len(trainer.optimizers)} optimizers, "
                    "and counts one. Leave count_optimizer out, and lower the budget by what their states take"
                )
            (keywords["optimizer"],) = trainer.optimizers
        model = pl_module if self._part is None else pl_module.get_submodule(self._part)
        self._model = memplan.apply(model, None, self._budget, **keywords)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish()

    def _finish(self) -> None:
        """Take the plan off the model, also where training was interrupted."""
        if self._model is not None:
            self._plan = self.plan
            memplan.remove(self._model)
            self._model = None


def _counts_optimizer(trainer: Trainer, asked: bool | None) -> bool:
    """Whether plans count the optimizer. asked: None is yes if there is one and its step can be foreseen."""
    if asked is not None:
        return asked
    kinds = [type(optimizer) for optimizer in trainer.optimizers]
    known = len(kinds) == 1 and kinds[0].step.__module__.startswith("torch.optim.") and not _needs_closure(kinds[0])
    if not known:
        names = ", ".join(kind.__name__ for kind in kinds) or "no optimizer"
        log.warning("optimizer state is not in the budget: the module has %s. Leave room for what it takes", names)
    return known


def _needs_closure(kind: type) -> bool:
    """Whether an optimizer's step runs the model itself, as that of LBFGS does."""
    closure = inspect.signature(kind.step).parameters.get("closure")  # type: ignore[attr-defined]
    return closure is not None and closure.default is inspect.Parameter.empty

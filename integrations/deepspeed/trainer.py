"""memplan in the Trainer of transformers where it trains through DeepSpeed.

trainer = Trainer(model, TrainingArguments(deepspeed="config.json", ...), train_dataset=data)
trainer.add_callback(MemplanDeepSpeedCallback(trainer))
trainer.train()
"""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import memplan

from .engine import engine_config, plan_engine
from .section import MemplanConfig
from .watch import Watch


class MemplanDeepSpeedCallback(TrainerCallback):
    """Plans what a Trainer trains through DeepSpeed, as the `memplan` section of its DeepSpeed config says.

    The plan is on the model while `trainer.train()` runs, and is taken off when that ends; `plan` still has it then.

    - trainer: the Trainer that the callback is added to. It makes its engine when training begins.

    Raises ValueError when training begins, for what `attach` refuses and for a Trainer without DeepSpeed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        self._engine: DeepSpeedEngine | None = None
        self._watch: Watch | None = None
        self._plan: memplan.Plan | None = None

    @property
    def plan(self) -> memplan.Plan | None:
        """The plan that ran last on this rank, also after training; None before the first step."""
        return self._plan if self._engine is None else memplan.plan_of(self._engine.module)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._finish()
        trainer = self._trainer()
        engine = None if trainer is None else trainer.model_wrapped
        if not isinstance(engine, DeepSpeedEngine):
            raise ValueError(
                "MemplanDeepSpeedCallback got a Trainer without DeepSpeed. Give TrainingArguments(deepspeed=...), or "
                "use memplan.integrations.huggingface.MemplanCallback"
            )
        section = MemplanConfig.of(engine_config(engine))
        if section.enabled:
            engine.module.train()  # as the Trainer does before each step: the plan is one of training
            self._watch = plan_engine(engine, section)
            self._engine = engine

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        """Take the plan off the model, also where training was interrupted."""
        if self._engine is not None and self._watch is not None:
            self._plan = self.plan
            self._watch.end()
            memplan.remove(self._engine.module)
            self._engine = self._watch = None

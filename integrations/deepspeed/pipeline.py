"""Stages of a DeepSpeed pipeline: each is planned with its own budget and its own number of microbatches in flight."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

import memplan

log = logging.getLogger("memplan")


def apply_to_stage(engine: PipelineEngine, sample: Any, budget: Any, **apply_keywords: Any) -> None:
    """Plan the stage that an engine runs on this rank: `memplan.apply` on `engine.module`.

    - sample: what this stage is called with, a tensor or a tuple of them. On the last stage, where the module has a
      `loss_fn`, it is a pair of that and the labels. None: the first microbatch is planned when it comes, which needs
      nothing of other ranks.
    - budget: for all microbatches that the stage has in flight, and for the engine's buffers of inputs, outputs and
      gradients. A host budget is for the activations of all these microbatches.
    - apply_keywords: as for `memplan.apply`.

    On the last stage the loss is part of the plan. Activation checkpointing of the module is switched off: the plan
    decides what is recomputed. Raises ValueError for a pipeline that can't be planned, with what to change.
    """
    _refuse(engine)
    module: PipelineModule = engine.module
    memplan.remove(module)
    stage = _StageForward(engine)
    count = in_flight(engine)
    if sample is not None:
        sample = tuple(sample) if stage.has_loss else (sample,)
    around = apply_keywords.pop("surroundings", memplan.Surroundings())
    around = dataclasses.replace(around, keeps_parameters=True, buffers=_buffers(engine, count))
    stage.begin()
    try:
        memplan.apply(module, sample, budget, **apply_keywords, in_flight=count, surroundings=around)
    except BaseException:
        stage.remove()
        raise
    stage.install()
    memplan.on_remove(module, stage.remove)


def in_flight(engine: PipelineEngine) -> int:
    """The most forwards that wait for their backward at once, counted over the instructions of this rank's schedule."""
    waiting = most = 0
    for commands in engine._train_schedule():
        for command in commands:
            waiting += isinstance(command, schedule.ForwardPass)
            most = max(most, waiting)
            waiting -= isinstance(command, schedule.BackwardPass)
    return most


def _buffers(engine: PipelineEngine, count: int) -> memplan.Buffers:
    """What the engine holds of a stage's inputs and outputs, in all.

    The module gets a copy of each input. The first stage's inputs stay in their slots until others take their place. On
    other stages, what arrives passes through one more buffer. Gradients arrive in a buffer that stays, and are scaled
    into another. The last stage keeps the loss of every microbatch.
    """
    slots = engine._train_schedule().num_pipe_buffers()
    inputs = slots if engine.is_first_stage() else max(count, slots if engine.is_last_stage() else 0) + 1
    last = engine.is_last_stage()
    return memplan.Buffers(
        inputs=count + inputs,
        outputs=engine.micro_batches + slots if last else None,
        output_gradients=None if last else 2,
    )


class _StageForward:
    """The forward of one stage, with the labels on the last stage.

    `PipelineModule.forward` counts its calls, which a planned step would not do. This runs the same layers.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine, self._layers = engine, tuple(engine.module.forward_funcs)
        self._loss_fn = engine.module.loss_fn if engine.is_last_stage() else None
        self._labels: Any = None
        self._interval: int = engine.module.activation_checkpoint_interval
        self._hook: Any = None  # that hands labels over, once it is there

    @property
    def has_loss(self) -> bool:
        return self._loss_fn is not None

    def forward(self, forward_input: Any, labels: Any = None) -> Any:
        """What the layers make of an input; with labels, the loss."""
        x = forward_input
        for layer in self._layers:
            x = layer(x)
        if labels is not None and self._loss_fn is not None:
            return self._loss_fn(x, labels)
        if self._trains() and isinstance(x, tuple) and sum(t.is_floating_point() for t in x) > 1:
            raise ValueError(
                f"stage {self._engine.stage_id} hands {sum(t.is_floating_point() for t in x)} floating-point tensors "
                "on, and DeepSpeed runs one backward after the other for them (retain_graph=True), each of which would "
                "run forward again. Let the layers hand on one, with what else is wanted packed into it"
            )
        return x

    def begin(self) -> None:
        """Let the module run these layers, all of them without checkpoints."""
        if self._interval:
            log.info("activation checkpointing of the pipeline is off: the plan decides what is recomputed")
        self._engine.module.activation_checkpoint_interval = 0
        self._engine.module.forward = self.forward

    def install(self) -> None:
        """On the last stage, let the engine call the module with labels and take the loss from it. Else do nothing."""
        if not self.has_loss:
            return
        self._engine._INSTRUCTION_MAP = {
            **self._engine._INSTRUCTION_MAP,
            schedule.ForwardPass: lambda engine, buffer_id: self._forward_pass(buffer_id),
        }
        self._hook = self._engine.module.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs if self._labels is None else {**kwargs, "labels": self._labels}),
            with_kwargs=True,
        )

    def remove(self) -> None:
        self._engine.module.activation_checkpoint_interval = self._interval
        del self._engine.module.forward
        if self._hook is not None:
            self._hook.remove()
            del self._engine._INSTRUCTION_MAP

    def _trains(self) -> bool:
        return bool(self._engine.module.training and torch.is_grad_enabled())

    def _forward_pass(self, buffer_id: int) -> None:
        """Run the engine's forward pass with the labels given, and without the engine's own loss."""
        engine = self._engine
        if not self._trains():
            PipelineEngine._exec_forward_pass(engine, buffer_id)
            return
        before, engine._compute_loss = engine._compute_loss, False
        self._labels = engine.pipe_buffers["labels"][buffer_id]
        try:
            PipelineEngine._exec_forward_pass(engine, buffer_id)
        finally:
            engine._compute_loss, self._labels = before, None


def _refuse(engine: PipelineEngine) -> None:
    """Raise ValueError for a pipeline that a plan can't be combined with."""
    if type(engine) is not PipelineEngine:
        raise ValueError(
            f"{type(engine).__name__} runs two stages of one module on a rank in turns (DualPipeV), and a plan is for "
            "one. Use a PipelineModule"
        )
    if engine.module.seed_layers:
        raise ValueError(
            "the PipelineModule has seed_layers=True: each layer seeds the generator anew from Python, which a planned "
            "step would not. Say seed_layers=False"
        )
    if engine.is_pipe_partitioned or engine.is_grad_partitioned:
        raise ValueError(
            "the engine partitions what stages hand to each other, and empties outputs that a planned backward reads. "
            'Say "pipeline": {"pipe_partitioned": false, "grad_partitioned": false} in the DeepSpeed config'
        )

"""memplan in the Trainer of transformers.

trainer = Trainer(model, args, train_dataset=data, callbacks=[MemplanCallback("8GiB")])
trainer.train()
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import ParallelMode

import memplan

log = logging.getLogger("memplan")


class MemplanCallback(TrainerCallback):
    """Plans the model that a Trainer trains: its first batch, when that comes, and later ones that are unlike it.

    The plan is on the model while `trainer.train()` runs, and is taken off when that ends; `plan` still has it then.
    Where parameters live on the host it stays, so that the model can be evaluated; `memplan.remove` takes it off.
    Gradient checkpointing is switched off, with a line in the log: the plan decides what is recomputed.

    - budget, apply_keywords: as for `memplan.apply`. Three keywords follow the training arguments unless they are given
      here. `accumulate` is on where gradients are accumulated over several batches. `grads` is "edges" where
      DistributedDataParallel looks for unused parameters, as the Trainer asks for by default. `device` is the Trainer's
      where there is a `host_budget`.
    - count_optimizer: count the state of the Trainer's optimizer, and its `step()`, into the budget. None: yes, if it
      is one of PyTorch or transformers; of another one a warning says that it is not counted.
    - model: one that does not fit on the device, for a `host_budget`. The Trainer moves other models to the device when
      it is made, and leaves this one on the CPU. What the plan wants on the device goes there with the first batch.

    Raises ValueError for training arguments that a plan can't be combined with, saying what to change: when the Trainer
    is made, or when training begins if the callback was added later.
    """

    def __init__(
        self,
        budget: int | float | str | memplan.Budget | None = None,
        *,
        count_optimizer: bool | None = None,
        model: nn.Module | None = None,
        **apply_keywords: Any,
    ) -> None:
        for name in ("sample", "plan", "optimizer", "loss_fn"):
            if name in apply_keywords:
                raise TypeError(
                    f"MemplanCallback takes no {name}=: the Trainer has the batches, the optimizer (see "
                    "count_optimizer=) and the loss, and the plan is made for the first batch"
                )
        self._budget, self._count_optimizer, self._keywords = budget, count_optimizer, apply_keywords
        self._model: nn.Module | None = None
        self._plan: memplan.Plan | None = None
        self._place: _InPlace | None = None
        if model is not None:
            if not self._offloads:
                raise ValueError(
                    "MemplanCallback got model= without a host_budget=, so there is nothing it would keep there"
                )
            device = str(apply_keywords.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
            self._place = None if device == "cpu" else _InPlace(model, device)

    @property
    def _offloads(self) -> bool:
        return "host_budget" in self._keywords or getattr(self._budget, "host", None) is not None

    @property
    def plan(self) -> memplan.Plan | None:
        """The plan that ran last, also after training; None before the first step."""
        return self._plan if self._model is None else memplan.plan_of(self._model)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        _check(args, self._keywords)
        _switch_checkpointing_off(args, kwargs.get("model"))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _check(args, self._keywords)
        model: nn.Module = kwargs["model"]
        _switch_checkpointing_off(args, model)
        if self._model is not model:
            self._finish()
        self._may_move()
        keywords = {"grads": _grads(args), "accumulate": args.gradient_accumulation_steps > 1, **self._keywords}
        if args.auto_find_batch_size:  # the next try is a smaller batch anyway
            keywords.setdefault("on_infeasible", "raise")
        if self._offloads:  # some may be there from training before
            keywords.setdefault("device", args.device)
        optimizer = kwargs.get("optimizer")
        if optimizer is not None and _counts_optimizer(_own_optimizer(optimizer), self._count_optimizer):
            keywords["optimizer"] = _own_optimizer(optimizer)
        model.train()  # as the Trainer does before each step: the plan is one of training
        self._model = memplan.apply(model, None, self._budget, **keywords)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._model is None:
            return
        if all(p.device.type == args.device.type for p in self._model.parameters()):
            self._finish()
        else:
            self._place = _InPlace(self._model, str(args.device))  # until it is trained again

    def _may_move(self) -> None:
        if self._place is not None:
            self._place.end()
            self._place = None

    def _finish(self) -> None:
        """Take the plan off the model, also where training was interrupted."""
        self._may_move()
        if self._model is not None:
            self._plan = self.plan
            memplan.remove(self._model)
            self._model = None


class _InPlace:
    """Makes the Trainer and Accelerate leave a model's parameters where they are, as they do with a device map.

    The map has several entries, because Accelerate ignores one with a single entry. It does not name the CPU, because
    `save_pretrained` would then look for what Accelerate has offloaded.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        if device == "cuda" and torch.cuda.is_available():
            device = f"cuda:{torch.cuda.current_device()}"
        self._model, self._before = model, vars(model).get("hf_device_map")
        names = ("", *(name for name, _ in model.named_parameters()))
        vars(model)["hf_device_map"] = dict.fromkeys(names, device)

    def end(self) -> None:
        """Let the model be moved again."""
        del vars(self._model)["hf_device_map"]
        if self._before is not None:
            vars(self._model)["hf_device_map"] = self._before


def _switch_checkpointing_off(args: TrainingArguments, model: nn.Module | None) -> None:
    """Switch gradient checkpointing off in the arguments, and in the model with what it had made inputs require."""
    asked = [name for name in ("gradient_checkpointing", "activation_checkpointing") if getattr(args, name, False)]
    for name in asked:
        setattr(args, name, False)
    modules: list[Any] = [] if model is None else list(model.modules())
    on = any(getattr(module, "gradient_checkpointing", False) is True for module in modules)
    for module in modules if on or asked else ():
        older = getattr(module, "gradient_checkpointing_disable", None)
        disable = getattr(module, "activation_checkpointing_disable", older)
        if on and callable(disable):
            disable()
        if hasattr(module, "_require_grads_hook"):
            module.disable_input_require_grads()
    if asked or on:
        log.warning("gradient checkpointing is switched off, for the plan decides what is recomputed")


def _check(args: TrainingArguments, keywords: dict[str, Any]) -> None:
    """Raise ValueError for training arguments that a plan can't be combined with."""
    if args.torch_compile:
        raise ValueError(
            "MemplanCallback got TrainingArguments(torch_compile=True), but a plan is made of the ops that eager "
            "PyTorch runs. Set torch_compile=False, and leave torch_compile_backend and torch_compile_mode out"
        )
    if args.deepspeed:
        raise ValueError(
            "MemplanCallback got TrainingArguments(deepspeed=...), but can't know what DeepSpeed's engine holds. Use "
            "memplan.integrations.deepspeed: trainer.add_callback(MemplanDeepSpeedCallback(trainer)), which plans by "
            "the memplan section of the DeepSpeed config"
        )
    sharding = args.fsdp_config if args.fsdp and isinstance(args.fsdp_config, dict) else {}
    if sharding.get("xla") or int(sharding.get("version", 2)) != 2:
        raise ValueError(
            "MemplanCallback got TrainingArguments(fsdp=...) of FSDP's first version, or for XLA, and plans what FSDP2 "
            'shards. Set fsdp_config={"version": 2}'
        )
    if args.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
        raise ValueError(
            f"MemplanCallback got {args.n_gpu} GPUs in one process, which the Trainer uses through nn.DataParallel. "
            "Start it with torchrun, one process for each GPU, or show it one GPU with CUDA_VISIBLE_DEVICES"
        )
    if keywords.get("update") == "backward" and args.max_grad_norm:
        raise ValueError(
            f"MemplanCallback got update='backward' and TrainingArguments(max_grad_norm={args.max_grad_norm}), but the "
            "Trainer would find no gradients to clip. Set max_grad_norm=0, or leave update='backward' out"
        )
    if keywords.get("grads") == "surface" and _grads(args) == "edges":
        raise ValueError(
            'MemplanCallback got grads="surface", but DistributedDataParallel would take every parameter for unused. '
            "Set TrainingArguments(ddp_find_unused_parameters=False), or leave grads out"
        )


def _grads(args: TrainingArguments) -> str:
    """The `grads` that the training arguments need: looking for unused parameters in autograd's graph takes "edges"."""
    # Accelerate may take DistributedDataParallel all the same, on CPUs.
    shards = args.fsdp and AcceleratorState().distributed_type == DistributedType.FSDP
    by_ddp = args.parallel_mode == ParallelMode.DISTRIBUTED and not shards
    return "edges" if by_ddp and args.ddp_find_unused_parameters is not False else "surface"


def _own_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer without the wrapper that Accelerate puts around it."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def _counts_optimizer(optimizer: torch.optim.Optimizer, asked: bool | None) -> bool:
    """Whether plans count an optimizer. asked: None is yes if its step can be foreseen; a warning says if not."""
    if asked is not None:
        return asked
    known = type(optimizer).step.__module__.startswith(("torch.optim.", "transformers."))
    if not known:
        log.warning(
            "the state of %s is not in the budget, for its step may not be foreseen: leave room for it, or try "
            "count_optimizer=True", type(optimizer).__name__,
        )  # fmt: skip
    return known

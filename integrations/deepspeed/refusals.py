"""What a plan can't be combined with in an engine: refused with the reason and the fix."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

_CHECKPOINTS = ("checkpoint", "non_reentrant_checkpoint")


def refuse(engine: DeepSpeedEngine) -> None:
    """Raise ValueError for an engine that can't be planned as it is."""
    if engine.is_deepcompile_enabled():
        raise ValueError(
            'the DeepSpeed config says "compile": {"deepcompile": true}: DeepCompile runs the compiled graphs of its '
            'own passes, and a plan is made of the ops that eager PyTorch runs. Take "deepcompile" out, or set '
            '"memplan": {"enabled": false}'
        )
    compiled = engine.is_compiled or hasattr(engine.module, "_orig_mod")
    if compiled or any(m._compiled_call_impl is not None for m in engine.module.modules()):
        raise ValueError(
            "the engine's module is compiled, and a plan is made of the ops that eager PyTorch runs. Leave "
            "engine.compile() and torch.compile out"
        )
    if engine.flops_profiler_enabled():
        raise ValueError(
            'the DeepSpeed config says "flops_profiler": {"enabled": true}: at its step rank 0 alone has hooks on all '
            "modules, which a planned step does not call. Profile without a plan, and leave it out here"
        )
    # In a pipeline the model-parallel group has the stages in it.
    pipeline = isinstance(engine, PipelineEngine)
    slices = engine.grid.get_slice_parallel_world_size() if pipeline else engine.mp_world_size
    reasons = {
        "mixture-of-experts layers of DeepSpeed": engine.has_moe_layers,
        "tensor parallelism": engine.autotp_size() > 1 or slices > 1,
        "sequence parallelism": engine.sequence_parallel_size > 1,
        "ZenFlow": engine.zenflow,
    }
    talkative = next((what for what, there in reasons.items() if there), None)
    if talkative is not None:
        raise ValueError(
            f"the engine has {talkative}, with which ranks talk to each other in the middle of a step: a rank that "
            'recomputed would talk alone. Train without it, or set "memplan": {"enabled": false}'
        )
    for name, module in engine.module.named_modules():
        if _checkpoints(module):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) runs layers through deepspeed.checkpointing, which "
                "decides what is recomputed; that is what the plan does. Call the layers directly"
            )


def _checkpoints(module: nn.Module) -> bool:
    """Whether a module holds a checkpointing function of DeepSpeed, or its class names one in its code."""
    if type(module).__module__.startswith("deepspeed."):
        return False  # a PipelineModule checkpoints where its activation_checkpoint_interval says so
    functions = [getattr(checkpointing, name) for name in _CHECKPOINTS]
    if any(value in functions for value in vars(module).values() if isinstance(value, types.FunctionType)):
        return True
    return any(_names_checkpoint(function) for function in _functions(type(module)))


def _functions(kind: type[Any]) -> Iterator[types.FunctionType]:
    """Python functions of a class and of its base classes, except those of torch."""
    for base in kind.__mro__:
        if not base.__module__.startswith(("torch.", "builtins")):
            yield from (f for f in map(inspect.unwrap, vars(base).values()) if isinstance(f, types.FunctionType))


def _names_checkpoint(function: types.FunctionType) -> bool:
    """Whether a function's code names a checkpointing function of DeepSpeed, directly or as a module's attribute."""
    names = set(_names(function.__code__))
    if not names & set(_CHECKPOINTS):
        aliases = [function.__globals__.get(name) for name in names]
        return any(value is getattr(checkpointing, name) for value in aliases for name in _CHECKPOINTS)
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in values]
    return any(str(m).startswith("deepspeed") for m in modules) or any(n.startswith("deepspeed") for n in names)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)

"""Run a step as a training loop does, note what it gives and leaves, and put everything back.

start = StepStart(model, sample)
start.record(model).values[("gradient", "layers.0.weight")]
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan import torch_private as private
from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.attributes.tables import held_in
from memplan.capture.ops.layout import same_bits, strided_parts
from memplan.capture.trace.call import CallReader, OutputTemplate, Sample, differentiated_outputs, leaf_names
from memplan.runtime.trial.unplanned_peak import OtherLeaves, bits_of
from memplan.torch_private import pytree

ResultKey = tuple[str, str]  # ("gradient", "layers.0.weight")
Parts = tuple[torch.Tensor, ...]  # copies in host memory: one tensor, or those that a sparse one consists of


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step gave and left.

    - values: outputs, gradients, inputs, buffers, parameters and generator states.
    - differentiable: names of the outputs that require grad.
    """

    values: dict[ResultKey, Parts]
    differentiable: frozenset[str]


class StepStart:
    """The state from which steps of a model are run: parameters, buffers, tensors in attributes, generators, sample."""

    def __init__(self, model: nn.Module, sample: Sample) -> None:
        self._model = model
        self._sample = dict(sample) if isinstance(sample, Mapping) else sample
        self._held = [(t, parts_of(t)) for t in _contents(model)]
        self._generators = {name: (state(), put) for name, state, put in _generators(model)}

    def record(
        self, run: Callable[..., Any], heard: ModulesHeard | None = None, twin: nn.Module | None = None
    ) -> StepRecord:
        """Run a step from this state. Everything is put back, also where it raises.

        - run: what is called with the sample.
        - heard: listens to the modules.
        - twin: another module that runs in the model's place. It gets the values that the model has, by name.
        """
        model, modules = twin or self._model, {id(module): module for module in self._model.modules()}
        leaves = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), self._sample)
        sample = copy.deepcopy(leaves, modules)  # tensors of its own, which share memory where the sample's do
        before = [] if twin is None else [(t, parts_of(t)) for t in _contents(twin)]
        own = {} if twin is None else dict(named_tensors(self._model))
        for name, tensor in named_tensors(model) if own else ():
            if name in own:
                _put(tensor, parts_of(own[name]))
        call = CallReader(run).read_sample(sample)
        try:
            with (
                _python_state_kept(model, run),
                heard or contextlib.nullcontext(),
                torch.enable_grad(),
                OtherLeaves((*model.parameters(), *call.tensors)) as others,
            ):
                output = run(*call.variadic, **call.arguments)
                template = OutputTemplate(output, model)
                names = [_bare(name) or "output" for name in template.names]
                values = {("output", n): parts_of(t) for n, t in zip(names, template.tensors, strict=True)}
                numbers = [torch.tensor(n, dtype=torch.float64) for n in template.plain()[2] if type(n) in (int, float)]
                values |= {("output", f"number {i}"): (number,) for i, number in enumerate(numbers)}
                differentiable = frozenset(n for n, t in zip(names, template.tensors, strict=True) if t.requires_grad)
                _run_backward(template, others)
                del output, template
                return StepRecord(values | self._left(model, sample), differentiable)
        finally:
            for tensor, parts in (*before, *self._held):
                _put(tensor, parts)
            for state, put in self._generators.values():
                put(state)
            torch.clear_autocast_cache()

    def _left(self, model: nn.Module, sample: Any) -> dict[ResultKey, Parts]:
        found: dict[ResultKey, torch.Tensor | None] = {}
        leaves = pytree.tree_leaves(sample)
        for path, leaf in zip(leaf_names(sample, len(leaves)), leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                name = _bare(path) or "sample"
                found["input", name], found["gradient", f"input {name}"] = leaf, leaf.grad
        for name, parameter in model.named_parameters():
            found["parameter", plain_name(name)] = parameter
            found["gradient", plain_name(name)] = parameter.grad
        found |= {("buffer", plain_name(name)): buffer for name, buffer in model.named_buffers()}
        states = {("generator", name): (_as_bytes(state()),) for name, state, _ in _generators(self._model)}
        return {key: parts_of(tensor) for key, tensor in found.items() if tensor is not None} | states


class ModulesHeard:
    """Listens to the modules of a model: what their calls give, in the order in which these end.

    - calls: (module, its outputs in short) in forward.
    - again: the same in backward, where checkpoints run functions again.
    - gradients: parameters in the order in which their last gradient arrives.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.again: list[tuple[str, Any]] = []
        self.gradients: dict[str, None] = {}
        self._model, self._handles = model, list[Any]()

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(functools.partial(self._note, plain_name(name))))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                arrive = functools.partial(self._arrive, plain_name(name))
                self._handles.append(parameter.register_post_accumulate_grad_hook(arrive))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            in_backward = private.backward_in_progress() >= 0
            (self.again if in_backward else self.calls).append((name, bits_of(output)))

    def _arrive(self, name: str, parameter: torch.Tensor) -> None:
        self.gradients.pop(name, None)
        self.gradients[name] = None


def plain_name(name: str) -> str:
    """A name without the modules that `torch.compile` and PyTorch's `checkpoint_wrapper` put around others."""
    return re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)", "", name).lstrip(".")


def _bare(path: str) -> str:
    return path.strip(".[]'\"")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by their plain names; shared ones under each of their names."""
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        yield plain_name(name), tensor


def parts_of(tensor: torch.Tensor) -> Parts:
    """Copies in host memory of what a tensor consists of, each contiguous."""
    parts = strided_parts(tensor.detach())
    return tuple(p.resolve_conj().resolve_neg().to("cpu", copy=True).contiguous() for p in parts)


def _put(tensor: torch.Tensor, parts: Parts) -> None:
    """Let a tensor have the contents that it had. One that has them already is not touched."""
    for part, now, kept in zip(strided_parts(tensor.detach()), parts_of(tensor), parts, strict=True):
        if not same_bits(now, kept):
            part.data.copy_(kept)  # autograd graphs of the caller need not hear of it


def _contents(model: nn.Module) -> list[torch.Tensor]:
    return [t for t in held_in(model, torch.Tensor) if not t.is_meta]


def _run_backward(template: OutputTemplate, others: OtherLeaves) -> None:
    """Run backward outside of autocast, as training loops do. Outputs beside a loss get numbers that vary."""
    torch.clear_autocast_cache()
    wanted = [t.requires_grad for t in template.tensors]
    if not any(wanted):  # the loop that is audited may have run backward itself
        return
    chosen = differentiated_outputs(template, wanted)
    starts, source = [template.tensors[i] for i in chosen], torch.Generator().manual_seed(0)
    gradients = [torch.randn(t.shape, generator=source).to(t) if t.dim() else torch.ones_like(t) for t in starts]
    others.look_behind(starts)
    with torch.autocast(starts[0].device.type, enabled=False):
        torch.autograd.backward(starts, gradients)


def _generators(model: nn.Module) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """(name, what gives its state, what sets it) of the generators that a step may draw from."""
    yield "torch", torch.get_rng_state, torch.set_rng_state
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        generator = torch.cuda.default_generators[index]
        yield f"cuda:{index}", generator.get_state, generator.set_state
    yield "random", random.getstate, random.setstate
    yield "numpy.random", np.random.get_state, np.random.set_state
    for index, own in enumerate(held_in(model, torch.Generator)):
        yield f"generator {index} of the model", own.get_state, own.set_state


def _as_bytes(state: Any) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        return state.clone()
    listed = pytree.tree_map_only(np.ndarray, np.ndarray.tolist, state)
    return torch.frombuffer(bytearray(repr(listed).encode()), dtype=torch.uint8)


@contextlib.contextmanager
def _python_state_kept(model: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """A context that puts back attributes, gradients and the state of optimizers that step in it."""
    optimizers = set[torch.optim.Optimizer]()

    def keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in optimizers:
            optimizers.add(optimizer)
            state = {p: {k: copy.deepcopy(v) for k, v in of.items()} for p, of in optimizer.state.items()}
            stack.callback(optimizer.state.update, state)
            stack.callback(optimizer.state.clear)

    with contextlib.ExitStack() as stack:
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.grad = None
        stack.callback(register_optimizer_step_pre_hook(keep).remove)
        with AttributesKept(model, run=run):
            yield

"""Parts of a model's step that run planned while the rest runs eagerly.

A unit is a submodule. While the model's forward runs, and only then, its `forward` is exchanged: for its program, or
for its own forward under checkpointing. The latter builds the very autograd graph that the plain forward builds, so
gradients are added in the same order; what the graph saves is recomputed when backward first asks for it.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from memplan.capture.attributes.attributes import CHECKED_ELSEWHERE, is_plain
from memplan.capture.capture import Capture
from memplan.capture.key import StepKey
from memplan.capture.ops.real_results import once_more_where_results_differ
from memplan.capture.trace.call import Call, Forward
from memplan.errors import MemplanError
from memplan.runtime.program.decisions import OtherBranch
from memplan.runtime.program.execute import (
    Gradients,
    InFlight,
    OtherTangents,
    ParameterStore,
    Runner,
    TangentLayout,
    Written,
)
from memplan.runtime.program.gathers import Gathers
from memplan.runtime.program.lower import Program
from memplan.runtime.program.outputs import Outputs
from memplan.runtime.program.rng import held_rng, restore_held_rng

# Captures and plans a unit of this module for gradients of such layouts, by output.
Again = Callable[[nn.Module, Mapping[int, TangentLayout]], tuple[Capture, Program]]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class UnitObserver:
    """Told when passes of units begin and end; does nothing. `rerun`: a unit's forward runs again in its backward."""

    def begin(self, index: int, phase: str) -> None: ...

    def end(self, index: int, phase: str) -> None: ...


NOBODY = UnitObserver()


def recomputed(
    module: nn.Module,
    forward: Forward,
    index: int,
    args: Any,
    kwargs: Any,
    observer: UnitObserver = NOBODY,
    ignored: Collection[str] = (),
) -> Any:
    """`forward(*args, **kwargs)` of a module, saving only its arguments and the generator's state.

    ignored: attributes of modules that change without changing what forward computes.
    Raises RuntimeError in backward where an argument, or (in a step that counts, with no observer) the module, is
    another than it was when forward began.
    """
    given = tensors_in((args, kwargs))
    versions = [t._version for t in given]
    before = _state_of(module, ignored)
    runs, drew = 0, False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        nonlocal drew
        if runs == 1:
            generators = _python_generators()
            try:
                return forward(*args, **kwargs)
            finally:
                drew = _python_generators() != generators
        if [t._version for t in given] != versions:
            raise RuntimeError(
                "memplan: an argument of a part of the model that is recomputed in backward has been modified by an "
                "inplace operation since forward. Call memplan.remove(model) to train without a plan"
            )
        if observer is NOBODY and (drew or _state_of(module, ignored) != before):
            what = "random of Python or numpy" if drew else "parameters, buffers, modes or attributes"
            raise RuntimeError(
                f"memplan: {what} of a {type(module).__name__} that is recomputed in backward have changed since its "
                "forward began, so it can't run again as it did. Call "
                "memplan.remove(model) to train without a plan"
            )
        observer.begin(index, "rerun")
        forward(*args, **kwargs)  # for what it saves; its results are let go
        observer.end(index, "rerun")
        return None

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _state_of(module: nn.Module, ignored: Collection[str]) -> tuple[Any, ...]:
    """What a forward may depend on: tensors with their versions, modes, attributes as far as they are easily told."""
    tensors = tuple((id(t), t._version) for t in (*module.parameters(), *module.buffers()))
    checked_elsewhere = _OF_NO_CONCERN.union(ignored)
    plain = tuple(
        (inner.training, tuple((k, _told(v)) for k, v in vars(inner).items() if k not in checked_elsewhere))
        for inner in module.modules()
    )
    return tensors, plain


_OF_NO_CONCERN = CHECKED_ELSEWHERE | {"forward"}  # which is exchanged while the model's own forward runs


def _python_generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), rest


def _told(value: Any) -> Any:
    """A value that does not change in place, or as much of another as can be told at little cost."""
    if is_plain(value):
        return value
    if isinstance(value, (list, tuple, deque)):
        return tuple(v if is_plain(v) else id(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, v if is_plain(v) else id(v)) for k, v in value.items())
    return (id(value), value._version) if isinstance(value, torch.Tensor) else id(value)


class UnitTangents(OtherTangents):
    """A unit of this module, in a step that is being rehearsed, gets other gradients than it was captured for."""

    def __init__(self, module: nn.Module, problem: Exception) -> None:
        super().__init__(str(problem))
        self.module = module


class UnitRunner(Runner):
    """A program of one unit. It keeps what its backward reads, and its inputs where it may have to run once more."""

    watcher: UnitObserver = NOBODY
    index: int = -1

    @staticmethod
    def of(module: nn.Module, capture: Capture, program: Program, gathers: Gathers | None = None) -> UnitRunner:
        traced = capture.traced
        outputs = Outputs.of(traced)
        state = [r.name for r in traced.residents.values() if r.kind in ("parameter", "buffer")]
        names_of_state = [*state, *(n for n in program.parameter_gradients if n not in state)]
        return UnitRunner(
            program=program,
            store=ParameterStore(module, names_of_state, traced.device, gathers),
            trainable=program.parameter_gradients,
            backwards=((TangentLayout.all_of(traced, outputs.names), program.backward),),
            outputs=outputs,
            device=traced.device,
            draws=any(op.random for op in traced.graph.ops[: traced.graph.boundary]),
            written=Written(),
            decisions=tuple(decision.output for decision in traced.decisions),
        )

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], InFlight]:
        if not self._decisions:
            return super().forward(inputs)
        generator = held_rng(self.device)
        try:
            return super().forward(inputs)
        except OtherBranch:
            restore_held_rng(self.device, generator)
            raise

    def _start(self, inputs: Sequence[torch.Tensor]) -> Any:
        return super()._start(inputs) if self.is_attended else None

    def _go_back(self, start: Any) -> None:
        if start is not None:
            super()._go_back(start)

    def backward(self, state: InFlight, tangents: dict[int, torch.Tensor]) -> Gradients:
        self.watcher.begin(self.index, "backward")
        gradients = super().backward(state, tangents)
        self.watcher.end(self.index, "backward")
        return gradients


@dataclass(frozen=True, slots=True)
class UnitStep:
    """A unit's program with the module that it reads, and the calls for which it was made.

    further: positions of arguments that are handed to autograd once more, after all others, in this order. again: makes
    it anew where other gradients arrive than on the sample; without it such a step is refused. runners: the program's,
    and others with the same forward; the first is the one that was right last.
    """

    module: nn.Module
    capture: Capture
    program: Program
    key: StepKey
    further: tuple[int, ...]
    again: Again | None = None
    runners: list[UnitRunner] = field(default_factory=list)

    @staticmethod
    def of(
        module: nn.Module,
        capture: Capture,
        program: Program,
        further: tuple[int, ...],
        gathers: Gathers | None = None,
        again: Again | None = None,
    ) -> UnitStep:
        step = UnitStep(module, capture, program, capture.key, further, again)
        step._use(UnitRunner.of(module, capture, program, gathers))
        return step

    @property
    def runner(self) -> UnitRunner:
        """The one that runs next."""
        return self.runners[0]

    def bound_to(self, module: nn.Module) -> UnitStep:
        """This step for a copy of the module."""
        key = self.key.rebound(module)
        step = UnitStep(module, self.capture, self.program, key, self.further, self.again)
        step._use(UnitRunner.of(module, self.capture, self.program))
        step.runner.unchecked = set(self.runner.unchecked)
        return step

    def run(self, call: Call) -> Any:
        """What the unit's forward would return."""
        traced = self.capture.traced
        tensors = call.tensors
        outputs = self.runner((*tensors, *(tensors[p] for p in self.further)))
        for name, index in traced.reassigned.items():
            self.runner.store[name] = outputs[index]
        return traced.template.fill(outputs)

    def _use(self, runner: UnitRunner) -> None:
        """Let this runner be the one that runs next."""
        if self.again is not None:
            runner.attend(self._rescue)
        self.runners[:] = [runner, *(other for other in self.runners if other is not runner)]

    def _rescue(self, state: InFlight, tangents: dict[int, torch.Tensor], problem: Exception) -> Gradients:
        """Gradients of a forward whose own program was made for others: another program runs forward again."""
        if not isinstance(problem, OtherTangents) or state.autocast is not None:
            raise problem
        if self.runner.watcher is not NOBODY:
            raise UnitTangents(self.module, problem)
        if not self.runner.repeats(state):
            raise OtherTangents(
                f"{problem}. Forward can't run again for it, because what it read has been written to since"
            )
        return once_more_where_results_differ(self._by_another)(state, tangents, problem)

    def _by_another(self, state: InFlight, tangents: dict[int, torch.Tensor], problem: Exception) -> Gradients:
        runner = next((r for r in self.runners if r.takes(tangents, None)), None) or self._made_for(tangents, problem)
        state.saved.clear()
        gradients = runner.repeat(state, tangents)
        self._use(runner)
        return gradients

    def _made_for(self, tangents: dict[int, torch.Tensor], problem: Exception) -> UnitRunner:
        assert self.again is not None
        try:
            capture, program = self.again(self.module, {i: TangentLayout.of(str(i), t) for i, t in tangents.items()})
        except MemplanError as error:
            raise OtherTangents(f"{problem}. A plan for that fails, because {error}") from error
        if capture.traced.forward_ops != self.capture.traced.forward_ops:
            raise problem
        runner = UnitRunner.of(self.module, capture, program)
        runner.check_first_runs()
        return runner


class UnitCalls:
    """The forwards of the units of one model, for one forward of the model.

    ways[module]: how each of its calls runs, in order: a UnitStep, "recompute" or "keep".
    """

    def __init__(
        self,
        ways: Mapping[nn.Module, Sequence[UnitStep | str]],
        refused: Callable[[nn.Module, str], None],
    ) -> None:
        """refused: told of a call that its plan does not serve, and why; it is recomputed as a whole."""
        self._ways, self._refused = ways, refused

    def forwards(self) -> dict[nn.Module, Forward]:
        """What to exchange the units' forwards for. Each set serves one forward of the model."""
        return {
            m: self._forward(m, m.forward, ways) for m, ways in self._ways.items() if any(way != "keep" for way in ways)
        }

    def _forward(self, module: nn.Module, original: Forward, ways: Sequence[UnitStep | str]) -> Forward:
        left = iter(ways)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            way = next(left, "recompute")
            if way == "keep" or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            if isinstance(way, UnitStep):
                call = way.capture.reader.read(args, kwargs)
                problem = way.key.mismatch(call)
                if problem is None:
                    try:
                        return way.run(call)
                    except OtherBranch as error:
                        problem = str(error)
                self._refused(module, problem)
            return recomputed(module, original, -1, args, kwargs)

        return forward

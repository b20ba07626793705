"""Look for the parts of a model that can be planned, where the whole can't be captured.

One forward runs with real data and saves nothing for backward. Each call of a submodule is judged as it comes, from the
outside in:

- A module that can be captured is a unit.
- A module that can't be captured is looked into.
- If it has no units in it, and a second run of its forward would change nothing, it is a unit that may run under
  checkpointing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from memplan import torch_private as private
from memplan.capture.attributes.attributes import AttributesKept, held_tensors, is_plain, own_generators
from memplan.capture.attributes.kept_memory import written_by
from memplan.capture.capture import capture_part
from memplan.capture.ops import op_facts
from memplan.capture.ops.layout import storage_key, tensors_of
from memplan.capture.trace.call import Call, CallReader, Forward
from memplan.capture.trace.forwards import forwards_exchanged
from memplan.capture.trace.generators import python_generators
from memplan.capture.trace.islands import CompiledCode
from memplan.capture.trace.op_watch import OpenBranch
from memplan.capture.trace.raw_trace import Answer, Autocast
from memplan.capture.trace.source_lines import lines_within, stack_depth
from memplan.errors import UnsupportedModel

Kind = Literal["captured", "opaque", "block", "plain"]


@dataclass(frozen=True, slots=True)
class TensorSeen:
    """A tensor without its data. storage: equal for those of one call that share memory."""

    storage: int
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of_all(tensors: Sequence[torch.Tensor]) -> tuple[TensorSeen, ...]:
        numbers: dict[int, int] = {}
        return tuple(
            TensorSeen(
                numbers.setdefault(storage_key(t), len(numbers)), t.untyped_storage().nbytes(),
                int(t.storage_offset()), tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.requires_grad,
            )
            for t in tensors
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class UnitCall:
    """A call of a unit.

    - template: its arguments, without tensors.
    - tensors: its tensors, without their data.
    - autocast: the autocast in which it came.
    """

    template: Call
    tensors: tuple[TensorSeen, ...]
    autocast: Autocast

    @staticmethod
    def of(call: Call) -> UnitCall:
        autocast = Autocast.ambient(call.device_type)
        return UnitCall(call.without_tensors(), TensorSeen.of_all(call.tensors), autocast)

    def sample(self) -> Call:
        """The call with tensors of the same layout, all zero."""
        storages: dict[int, torch.UntypedStorage] = {}
        made = []
        for facts in self.tensors:
            if facts.storage not in storages:
                whole = torch.zeros(facts.storage_bytes, dtype=torch.uint8, device=facts.device)
                storages[facts.storage] = whole.untyped_storage()
            tensor = torch.empty(0, dtype=facts.dtype, device=facts.device)
            tensor.set_(storages[facts.storage], facts.offset, facts.shape, facts.stride)
            made.append(tensor.requires_grad_(facts.requires_grad))
        return self.template.filled(made)


@dataclass(frozen=True, slots=True)
class Site:
    """A module that was found.

    - kind: "captured" or "opaque" (a unit), "block" (it has units in it, and can run again as a whole), or "plain"
      (none of these).
    - reason: why it can't be captured (an opaque one, a block), or what is around it can't (a captured one).
    - answers: what its forward reads from tensors.
    """

    name: str
    kind: Kind
    reason: str
    answers: tuple[Answer, ...] = ()


def find_sites(
    model: nn.Module, run: Callable[[], Any], reason: str, decides: bool = False, unsteady: Collection[str] = ()
) -> tuple[dict[nn.Module, Site], dict[nn.Module, Site]]:
    """The units, and the blocks, among the submodules that `run` calls.

    - run: runs the model, under grad mode. The caller has to put back what it changes in the model.
    - reason: why the model can't be captured.
    - decides: units may branch on what they compute, and are captured with the branches that they take here.
    - unsteady: values that no unit may depend on.

    A block is as large as possible with no more than half of the units in it.
    """
    search = _PartSearch(model, reason, decides, unsteady)
    with nothing_saved():
        search.run(run)
    return search.sites(), search.blocks()


def nothing_saved() -> contextlib.AbstractContextManager[object]:
    """A context in which forward runs under grad mode and saves nothing. No backward may follow.

    What traces save, as higher-order ops make them in forward, takes no memory and is kept.
    """
    return saved_tensors_hooks(lambda tensor: tensor if isinstance(tensor, private.FakeTensor) else None, _unpacked)


class BackwardWithin(UnsupportedModel):
    """Forward runs a backward pass itself, so it can't be looked at without what that reads."""


def _unpacked(packed: torch.Tensor | None) -> torch.Tensor:
    if packed is None:
        raise BackwardWithin("forward runs a backward pass itself")
    return packed


class NotedReads(private.RealOps):
    """Notes the numbers that are read from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is noted."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __enter__(self) -> NotedReads:
        self._depth = stack_depth()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run_op(func, args, kwargs)
        if func is private.READ_SCALAR and not self._is_paused:
            self.answers.append(Answer(result, lines_within(self._depth)))
        return result


class DataFollowed(private.RealOps):
    """Follows the data of some tensors, and random numbers.

    was_read: whether numbers were read from tensors that they reached.
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.was_read = False
        self._reached = WeakIdKeyDictionary(dict.fromkeys(sources, True))

    def reached(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on the data."""
        return tensor in self._reached

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run_op(func, args, kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        unseen = isinstance(func, private.HigherOrderOperator)  # it reads numbers, and tensors that it isn't given
        if unseen or any(map(self.reached, given)) or op_facts.draws_random_numbers(func, args, kwargs or {}):
            self.was_read |= unseen or func is private.READ_SCALAR
            for tensor in (*tensors_of(result), *written_by(func, args, kwargs or {})):
                self._reached[tensor] = True
        return result


class _PartSearch:
    def __init__(self, model: nn.Module, reason: str, decides: bool, unsteady: Collection[str]) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._own = {module: vars(module).get("forward") for module in self._names}
        self._generators = own_generators(model)
        self._root = model
        self._reasons = [reason]
        self._decides, self._unsteady = decides, unsteady
        self._looking = True
        self._verdicts: dict[
            Any, UnsupportedModel | tuple[Answer, ...]
        ] = {}  # why not, or what forward reads from data
        self._ways: dict[nn.Module, tuple[Answer, ...] | None] = {}  # which branches are taken; None: not always these
        self._sites: dict[nn.Module, Site] = {}
        self._blocks: dict[nn.Module, Site] = {}
        self._plain: set[nn.Module] = set()

    def run(self, run: Callable[[], Any]) -> None:
        forwards = {
            m: self._judged(m, m.forward)
            for m in self._names
            if m is not self._root and not isinstance(m, torch.jit.ScriptModule) and _trains(m)
        }
        with forwards_exchanged(forwards):
            run()

    def sites(self) -> dict[nn.Module, Site]:
        """The units, without those inside of others and those that were found unfit at some call."""
        inside = {inner for m in self._sites for inner in m.modules() if inner is not m}
        return {m: site for m, site in self._sites.items() if m not in inside | self._plain}

    def blocks(self) -> dict[nn.Module, Site]:
        """The largest blocks, none inside another."""
        sites = self.sites().keys()
        in_sites = {inner for m in sites for inner in m.modules()}
        fit = {
            m: site
            for m, site in self._blocks.items()
            if m not in self._plain | in_sites and 2 * len(sites & set(m.modules())) <= len(sites)
        }
        inside = {inner for m in fit for inner in m.modules() if inner is not m}
        return {m: site for m, site in fit.items() if m not in inside}

    def _judged(self, module: nn.Module, original: Forward) -> Forward:
        reader = CallReader(original)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._looking or not torch.is_grad_enabled():
                if module in self._sites:
                    self._plain.add(module)
                return original(*args, **kwargs)
            call = reader.read(args, kwargs)
            verdict = self._verdict(module, original, call)
            if isinstance(verdict, tuple):
                self._enter(module, Site(self._names[module], "captured", self._reasons[-1], verdict))
                with self._not_looking():
                    return original(*args, **kwargs)
            decides, reads = self._decides and isinstance(verdict, OpenBranch), NotedReads()
            with reads if decides else contextlib.nullcontext():
                output, kind = self._look_into(module, original, args, kwargs, str(verdict))
            site = Site(self._names[module], kind, str(verdict))
            if decides and kind != "plain":
                verdict = self._verdict(module, original, call, tuple(reads.answers))
                if isinstance(verdict, tuple) and self._ways.setdefault(module, verdict) == verdict:
                    site = Site(self._names[module], "captured", self._reasons[-1], verdict)
                elif module in self._ways:
                    self._ways[module] = None
                    self._sites.pop(module, None)
            self._enter(module, site)
            return output

        return forward

    def _enter(self, module: nn.Module, site: Site) -> None:
        if site.kind == "plain":
            self._plain.add(module)
        elif site.kind == "block":
            self._blocks[module] = site
        elif self._sites.setdefault(module, site).kind != site.kind:
            self._plain.add(module)

    @contextlib.contextmanager
    def _not_looking(self) -> Iterator[None]:
        self._looking = False
        try:
            yield
        finally:
            self._looking = True

    def _verdict(
        self, module: nn.Module, original: Forward, call: Call, seen: tuple[Answer, ...] | None = None
    ) -> UnsupportedModel | tuple[Answer, ...]:
        signature = _signature(module, call), seen
        if signature not in self._verdicts:
            with private.outside_of_tracing(), forwards_exchanged(self._own), private.without_saved_tensor_hooks():
                try:
                    self._verdicts[signature] = capture_part(
                        module, original, call, seen=seen, unsteady=self._unsteady
                    ).answers
                except CompiledCode:
                    raise
                except UnsupportedModel as error:  # which would keep its frames alive
                    kind = OpenBranch if isinstance(error, OpenBranch) else UnsupportedModel
                    self._verdicts[signature] = kind(str(error))
        return self._verdicts[signature]

    def _look_into(self, module: nn.Module, original: Forward, args: Any, kwargs: Any, reason: str) -> tuple[Any, Kind]:
        """Run a module and look into it. Gives its results and its kind."""
        trial = _SecondRun(module, args, kwargs)
        self._reasons.append(f"{self._names[module]}: {reason}")
        with _OncePerStep(self._generators) as watch:
            output = original(*args, **kwargs)
        self._reasons.pop()
        if watch.seen or trial.would_show(output):
            return output, "plain"
        inside = any(inner in self._sites for inner in module.modules() if inner is not module)
        return output, "block" if inside else "opaque"


class _SecondRun:
    """Tells whether running a forward a second time would change anything but the generator's state.

    It looks at arguments, buffers, Python attributes, those of tensors too, Python's generators, and hooks inside.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._module = module
        self._leaves = pytree.tree_leaves((args, kwargs))
        self._written = [t for t in (*self._leaves, *held_tensors(module)) if isinstance(t, torch.Tensor)]
        self._versions = [_version(t) for t in self._written]
        self._buffers = [id(b) for b in module.buffers()]
        self._attributes = AttributesKept(module)
        self._generators = python_generators()

    def would_show(self, output: Any) -> bool:
        odd = [x for x in self._leaves if not (isinstance(x, (torch.Tensor, Enum)) or is_plain(x))]
        tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        inside = [getattr(m, table) for m in self._module.modules() if m is not self._module for table in tables]
        hooked = any(inside) if private.collects_outputs() else any(private.foreign_hooks(t) for t in inside)
        results = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        differentiable = any(t.requires_grad for t in results)
        named = any(map(private.attributes_set_on, [t for t in self._leaves if isinstance(t, torch.Tensor)] + results))
        return (
            bool(odd)
            or named  # attributes that views of such tensors, which a rehearsal passes on, do not have
            or hooked
            or not differentiable
            or [_version(t) for t in self._written] != self._versions
            or [id(b) for b in self._module.buffers()] != self._buffers
            or python_generators() != self._generators
            or self._attributes.changed()
        )


class _OncePerStep(private.RealOps):
    """Tells whether an op runs that a second run of forward must not run again.

    It draws from another generator than the default one, whose state the second run would not find. Or it is a
    higher-order op: `scan` runs a backward in its forward, which fails within a checkpoint.

    known: generators that are put back. Raises UnsupportedModel before an op draws from any other.
    """

    def __init__(self, known: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.seen = False
        self._known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= isinstance(func, private.HigherOrderOperator)
        for generator in [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Generator)]:
            self.seen = True
            if not any(generator is known for known in self._known):
                raise UnsupportedModel(
                    f"{func} draws from a generator that is no attribute of the model; planning would advance it. Make "
                    "it an attribute of a module"
                )
        return self.run_op(func, args, kwargs)


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """A key that changes when the tensor is written to, or its `.data` is exchanged."""
    return tensor._version, storage_key(tensor) if tensor.layout is torch.strided else 0


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _signature(module: nn.Module, call: Call) -> Any:
    """A key that is equal for calls that can, or can't, be captured for one reason. Differences show later."""
    state = [*module.named_parameters(), *module.named_buffers()]
    return (
        tuple((name, type(m), m.training) for name, m in module.named_modules()),
        tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in state),
        tuple(
            (t.shape, t.stride(), t.dtype, t.requires_grad) if isinstance(t, torch.Tensor) else repr(t)
            for t in call.leaves
        ),
        call.paths,
        Autocast.ambient(call.device_type),
        private.collects_outputs(),
    )

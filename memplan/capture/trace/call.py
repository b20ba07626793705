"""One call of a model, and what it returns: taken apart into tensors and everything else, and put together again."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.code_facts import content_of
from memplan.capture.ops.recorded_graph import Edges
from memplan.capture.ops.sizes import Expression, Numbers
from memplan.errors import NothingToTrain, UnsupportedModel
from memplan.torch_private import pytree

Sample = torch.Tensor | Sequence[Any] | Mapping[str, Any]
Forward = Callable[..., Any]  # of a model: its own, or one that stands in for it
_Tree = tuple[Any, tuple[Any, ...]]  # how values are nested; slots, objects with tensors inside, what stays as it is


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call.

    - arguments: by name. Positional arguments are filed under their parameter's name, so `model(x)` and
      `model(input_ids=x)` are one call.
    - variadic: those that can't be filed by name.
    - leaves, paths: tensors and other values in all of them, and where each stands.
    - spec: how the leaves are nested.
    - reads: what guards read from the data of its tensors, by guards.
    """

    arguments: dict[str, Any]
    variadic: tuple[Any, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    paths: tuple[str, ...]
    reads: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    @property
    def device_type(self) -> str:
        """The type of device that its tensors are on. Where some are on a GPU and some on the host, it is the GPU's."""
        return next((t.device.type for t in self.tensors if t.device.type != "cpu"), "cpu")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p for p, leaf in zip(self.paths, self.leaves, strict=True) if isinstance(leaf, torch.Tensor))

    @property
    def others(self) -> tuple[tuple[str, Any], ...]:
        pairs = zip(self.paths, self.leaves, strict=True)
        return tuple((p, leaf) for p, leaf in pairs if not isinstance(leaf, torch.Tensor))

    def filled(self, tensors: Sequence[torch.Tensor]) -> Call:
        """The call with other tensors."""
        left = iter(tensors)
        leaves = tuple(next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves)
        variadic, arguments = pytree.tree_unflatten(leaves, self.spec)
        return Call(arguments, variadic, leaves, self.spec, self.paths)

    def copied(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a trial. Objects are copies, for forward may change them. Raises UnsupportedModel for some."""
        lasting = [*self.tensors, *shared_objects(model), *model.modules()]
        lasting += [p for leaf in self.leaves if isinstance(leaf, nn.Module) for p in leaf.parameters()]
        inside = (t for _, leaf in self.others for t in tensors_inside(leaf, set())[0] if not t.is_leaf)
        apart = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in inside}
        try:
            return copy.deepcopy((self.variadic, self.arguments), {id(t): t for t in lasting} | apart)
        except Exception as error:
            raise UnsupportedModel(f"a trial may change arguments that can't be copied: {error}") from error

    def detached(self, device: torch.device | None = None) -> Call:
        """The call with tensors of the same data on the device, which are not part of the caller's autograd graph."""
        apart = {id(t): t.detach().to(device or t.device).requires_grad_(t.requires_grad) for t in self.tensors}
        return self.filled([apart[id(t)] for t in self.tensors])

    def requiring_grad(self, positions: Sequence[int]) -> Call:
        """The call with tensors at these positions that require grad, in the same memory."""
        apart = {id(t): t.detach().requires_grad_() for i, t in enumerate(self.tensors) if i in positions}
        return self.filled([apart.get(id(t), t) for t in self.tensors]) if positions else self

    def without_tensors(self) -> Call:
        """The call with empty tensors, which a plan may keep without holding a batch."""
        return self.filled([torch.empty(0) for _ in self.tensors])


class CallReader:
    """Reads the arguments of calls of one function. Costs a few microseconds a call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._positional_only = any(p.kind == p.POSITIONAL_ONLY for p in parameters)
        self._named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        variadic, arguments = tuple(args), dict(kwargs)
        if not (self._positional_only or len(args) > len(self._positional)):  # those of *args must stay positions
            variadic, arguments = (), {**dict(zip(self._positional, args, strict=False)), **kwargs}
        # Of arguments that the function names the order is of no concern; of those in **kwargs it is.
        first = {k: arguments[k] for k in sorted(arguments.keys() & self._named)}
        arguments = {**first, **{k: v for k, v in arguments.items() if k not in first}}
        with_paths, spec = pytree.tree_flatten_with_path((variadic, arguments))
        paths = tuple(_path_name(path) for path, _ in with_paths)
        return Call(arguments, variadic, tuple(leaf for _, leaf in with_paths), spec, paths)

    def read_sample(self, sample: Sample) -> Call:
        """Read a sample: a tensor (the one argument), a mapping (keyword arguments) or a sequence (positional ones)."""
        if isinstance(sample, torch.Tensor):
            return self.read((sample,), {})
        if isinstance(sample, Mapping):
            return self.read((), dict(sample))
        if isinstance(sample, (tuple, list)):
            return self.read(tuple(sample), {})
        raise TypeError(
            f"sample must be a tensor, a tuple of arguments or a dict of keyword arguments, got {type(sample).__name__}"
        )


def _path_name(path: tuple[Any, ...]) -> str:
    """(1, 'input_ids') -> 'input_ids'; (0, 2) -> '2'."""
    return pytree.keystr(path[1:]).replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").lstrip(".")


class OutputTemplate:
    """What a model returned at capture, without its tensors; `fill` puts other tensors into it.

    Tensors are also found inside objects that pytree does not open (a key/value cache): such an object is copied with
    its tensors exchanged.

    - tensors, names: the tensors that were found, until it lets go of them, and where each stands.
    - returned: how many of these the model returned; it left the others elsewhere.
    - out_of_reach: things that hold tensors which can't be exchanged.
    - attributes: (name of the table, key) of each attribute that the model has set.
    - specs: of tensors that are DTensors, by position: how ranks split it, and its gradient (None: it gets none).
    """

    def __init__(self, output: Any, model: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.out_of_reach: list[str] = []
        self._shared = {id(thing): thing for thing in shared_objects(model)}
        self.attributes: list[tuple[str, str]] = []
        self.specs: dict[int, tuple[Any, Any]] = {}
        self._trees = [self._without_tensors(output, "")]  # what the model returned, then what it left in attributes
        self.returned = len(self.tensors)

    def add_attribute(self, owner: str, key: str, value: Any) -> None:
        """Add what the model left in an attribute. owner: the name of the attribute table."""
        self.attributes.append((owner, key))
        self._trees.append(self._without_tensors(value, f"attribute {owner}.{key}"))

    def _without_tensors(self, value: Any, name: str) -> _Tree:
        def kept(path: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return _Slot(self.add(leaf, name + path))
            if private.is_symbolic(leaf):
                return leaf
            inner, closed = tensors_inside(leaf, set(self._shared))
            self.out_of_reach += [f"{name}{path} ({type(thing).__name__})".strip() for thing in closed]
            indices = tuple(self.add(tensor, f"{name}{path}.{number}") for number, tensor in enumerate(inner))
            return _Object(leaf, tuple(inner), indices) if inner else leaf

        leaves, spec = pytree.tree_flatten(value)
        paths = leaf_names(value, len(leaves))
        return spec, tuple(kept(path, leaf) for path, leaf in zip(paths, leaves, strict=True))

    def add(self, tensor: torch.Tensor, name: str) -> int:
        """The position of a tensor among `tensors`, to which it is added if it is new."""
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return index
        self.tensors.append(tensor)
        self.names.append(name)
        return len(self.tensors) - 1

    def let_go(self, number: Callable[[Any], Any]) -> None:
        """Let go of the tensors: `fill` needs none of them. What holds others is copied with empty ones.

        number: gives the expression for a number that depends on sizes which vary.
        """

        def emptied(leaf: Any) -> Any:
            if isinstance(leaf, _Object):
                empty = tuple(torch.empty(0) for _ in leaf.tensors)
                memo = self._shared | {id(old): new for old, new in zip(leaf.tensors, empty, strict=True)}
                return _Object(copy.deepcopy(leaf.template, memo), empty, leaf.indices)
            return number(leaf) if private.is_symbolic(leaf) else leaf

        self._trees = [(spec, tuple(map(emptied, leaves))) for spec, leaves in self._trees]
        self.tensors = []

    def plain(self, numbers: Numbers = ()) -> tuple[Any, ...]:
        """All but the tensors: structures, positions of tensors, and other leaves. An object is there as its class.

        numbers: of a call's sizes, where they vary.
        """
        leaves = [_number(leaf, numbers) for _, leaves in self._trees for leaf in leaves]
        specs = [spec for spec, _ in self._trees]
        lasting = (bool, int, float, complex, str, bytes, type(None), _Slot)
        return (self.attributes, specs, [leaf if type(leaf) in lasting else type(leaf) for leaf in leaves])

    def fill(self, tensors: Sequence[torch.Tensor], numbers: Numbers) -> Any:
        """The output with other tensors, one for each of `self.tensors`. numbers: of the call's sizes."""
        return self._filled(self._trees[0], tensors, numbers)

    def fill_attributes(self, tensors: Sequence[torch.Tensor], numbers: Numbers) -> list[Any]:
        """A value for each of `attributes`, with other tensors."""
        return [self._filled(tree, tensors, numbers) for tree in self._trees[1:]]

    def _filled(self, tree: _Tree, tensors: Sequence[torch.Tensor], numbers: Numbers) -> Any:
        def filled(leaf: Any) -> Any:
            if isinstance(leaf, _Slot):
                return tensors[leaf.index]
            if isinstance(leaf, _Object):
                new = {id(old): tensors[i] for old, i in zip(leaf.tensors, leaf.indices, strict=True)}
                return copy.deepcopy(leaf.template, self._shared | new)
            return _number(leaf, numbers)

        spec, leaves = tree
        return pytree.tree_unflatten(map(filled, leaves), spec)


def _number(leaf: Any, numbers: Numbers) -> Any:
    """The number that an expression is; any other thing as it is."""
    return private.evaluator([leaf.text])(numbers)[0] if isinstance(leaf, Expression) and numbers else leaf


def leaf_names(output: Any, count: int) -> list[str]:
    """Where each leaf of nested values stands: "['loss']". Not every class that pytree opens tells names."""
    if isinstance(output, torch.Tensor):
        return [""]
    try:
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(output)[0]]
    except ValueError:
        names = [f"[{key!r}]" for key in output] if isinstance(output, Mapping) else []
        return names if len(names) == count else [f"[{i}]" for i in range(count)]


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a tensor in the output, by the tensor's position among all."""

    index: int


@dataclass(frozen=True, slots=True)
class _Object:
    """An object with tensors inside; `indices` are their positions among all."""

    template: Any
    tensors: tuple[torch.Tensor, ...]
    indices: tuple[int, ...]


_NO_TENSORS_INSIDE = (
    *(str, bytes, int, float, bool, type(None), type, torch.dtype, torch.device),
    *(torch.nn.Module, ModuleType, BuiltinFunctionType),
)


def tensors_inside(thing: Any, seen: set[int]) -> tuple[list[torch.Tensor], list[Any]]:
    """Tensors that an object holds, each once, and things that hold some out of reach, or may.

    Tensors are found through attributes, lists, tuples, sets and dicts. Out of reach are those in closures of
    functions, in generators and in iterators, and numbers that depend on sizes which vary.
    """
    if id(thing) in seen or isinstance(thing, _NO_TENSORS_INSIDE):
        return [], []
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return [thing], []
    if isinstance(thing, GeneratorType) or private.is_symbolic(thing):
        return [], [thing]
    children, are_copied = _children(thing)
    inside = [tensors_inside(child, seen) for child in children]
    tensors, closed = [t for found, _ in inside for t in found], [c for _, found in inside for c in found]
    return (tensors, closed) if are_copied else ([], [thing] if tensors or closed else [])


def _children(thing: Any) -> tuple[list[Any], bool]:
    """What an object holds, and whether `copy.deepcopy` copies that with it."""
    if isinstance(thing, Mapping):
        return list(thing.values()), True
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return list(thing), True
    if isinstance(thing, FunctionType):
        return [c for cell in thing.__closure__ or () if (c := content_of(cell)) is not None], False
    if isinstance(thing, MethodType):
        return [thing.__self__], True
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()], True
    if hasattr(thing, "__dict__") or hasattr(thing, "__slots__"):
        slots = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
        return [*getattr(thing, "__dict__", {}).values(), *slots], True
    return gc.get_referents(thing), False


def shared_objects(model: nn.Module) -> list[Any]:
    """Objects of the model that an output may refer to (its config), and that are never copied."""
    held = (v for m in model.modules() for v in vars(m).values())
    return [model, *(v for v in held if hasattr(v, "__dict__") and not isinstance(v, torch.Tensor))]


def nothing_to_train() -> NothingToTrain:
    return NothingToTrain(
        "no output of the model depends on a parameter or input that requires grad; there is nothing to plan. "
        "Is the model frozen, or does forward run under no_grad?"
    )


def differentiated_outputs(template: OutputTemplate, requires_grad: Sequence[bool]) -> list[int]:
    """Outputs that backward is taken to start from: the loss where there is one, else everything differentiable.

    The loss is the output called "loss". It may also be the only differentiable scalar, if it depends on all leaves
    that the other outputs depend on: a temperature, or what a router is to be balanced by, does not. Scalars that
    forward leaves in attributes are taken to be terms of a loss outside, where the model does not return a loss itself.
    """
    everything = [i for i, wanted in enumerate(requires_grad) if wanted]
    able = [i for i in everything if i < template.returned]
    terms = [i for i in everything if i >= template.returned and template.tensors[i].dim() == 0]
    if not able:
        able, terms = terms or everything, []
    if not able:
        raise nothing_to_train()
    named = [i for i in able if template.names[i].strip(".[]'\"") == "loss"]
    if named:
        return named[:1]
    scalars = [i for i in able if template.tensors[i].dim() == 0]
    if len(scalars) != 1:
        return able + terms
    behind = Edges([template.tensors[scalars[0]]]).leaves
    return scalars if Edges(template.tensors[i] for i in able).leaves <= behind else able + terms

"""What Python does to tensors of a step without an op: a plan would lose it.

A trace runs forward and backward on stand-ins of the model's and the call's tensors. What ops do to these is in the
trace, and so is a hook that changes a gradient. Other Python effects are not:

    batch["aux"] = loss          # an argument that is a container
    loss.backward()              # within forward: gradients land in .grad
    x.requires_grad_()           # an argument becomes a leaf of the graph
    self.weight.data = other     # memory is exchanged
    x.note = "seen"              # an argument gets an attribute
    y.register_hook(print)       # a hook only looks at a gradient
    y.retain_grad()              # a gradient is retained

Attributes that forward reads from these tensors are noted, because they may change from call to call. Stand-ins are
taken for what they stand for by `isinstance(w, nn.Parameter)`; in the user's own files by `type(x)` and `id(w)`, too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import CellType, FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.named_state import own_modules, state_behind
from memplan.capture.attributes.tables import ABSENT, is_plain
from memplan.capture.ops.layout import storage_key
from memplan.capture.ops.ways import LetRequireGrad, MakeIslands, Never, Refusal
from memplan.capture.trace.source_lines import caller_line
from memplan.errors import UnsupportedModel
from memplan.torch_private import pytree

_ONLY_WAIT = ("deepspeed", "memplan", "torch.distributed")
_READ_NOTHING = ("torch", "deepspeed", "memplan")  # packages in which such an attribute does not change what ops run


class StandIns:
    """The stand-ins of one trace: of parameters and buffers by name, and of the tensors of the call, by name too.

    - reads: (name of a tensor, attribute) -> its value, or ABSENT, for attributes that forward or backward has read.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        real: Mapping[str, torch.Tensor],
    ) -> None:
        """Note what is there. real: what each stands for; arguments are called "argument x" there."""
        self._state, self._given, self._arguments = state, given, arguments
        self._tensors = {**state, **{f"argument {name}": tensor for name, tensor in given.items()}}
        self._before = {name: (storage_key(t), t.requires_grad, set(vars(t))) for name, t in self._tensors.items()}
        self._leaves, self._spec = pytree.tree_flatten(arguments)
        self._real = {id(t): (name, real[name]) for name, t in self._tensors.items() if private.is_ordinary(real[name])}
        self.reads: dict[tuple[str, str], Any] = {}
        self._fresh: set[int] = set()  # arguments that came to require grad before an op read them

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """A context in which forward may put hooks on tensors that change gradients.

        Raises UnsupportedModel, from forward or its backward, for hooks that only look at gradients, where forward
        retains a gradient, and where it exchanges the memory of a tensor.
        """
        method: Any = torch.Tensor.requires_grad_
        setter: Any = torch.Tensor.requires_grad
        data: Any = torch.Tensor.data

        def requires(tensor: torch.Tensor, wanted: bool = True) -> Any:
            self._note_requires_grad(tensor)
            return method(tensor, wanted)

        def set_requires(tensor: torch.Tensor, wanted: bool) -> None:
            self._note_requires_grad(tensor)
            setter.__set__(tensor, wanted)

        return private.exchanged(
            private.FakeTensor,
            register_hook=_register,
            retain_grad=_retain,
            requires_grad_=requires,
            requires_grad=property(setter.__get__, set_requires),
            data=property(data.__get__, _exchange),
            __hash__=lambda tensor: self._looked_up(tensor),
            __getattr__=lambda tensor, name: self._read(tensor, name),
        )

    @contextlib.contextmanager
    def taken_for_real(self) -> Iterator[None]:
        """A context in which `type(x)` and `id(x)` in the user's own files are of the tensor that x stands for."""
        real = dict(self._real)  # the class below is garbage that only a collection finds

        class Kind(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                if len(args) > 1 or type(args[0]) is not private.FakeTensor:
                    return type(*args, **kwargs)
                return type(real[id(args[0])][1]) if id(args[0]) in real else torch.Tensor

            def __instancecheck__(cls, thing: Any) -> bool:
                return isinstance(thing, type)

        names = {"type": Kind("type", (type,), {}), "id": lambda t: id(real[id(t)][1] if id(t) in real else t)}
        with contextlib.ExitStack() as stack:
            for module in own_modules():
                here = {name: value for name, value in names.items() if name not in vars(module)}
                stack.enter_context(private.exchanged(module, **here))
            stack.callback(real.clear)
            yield

    def _looked_up(self, tensor: torch.Tensor) -> int:
        """The hash of a tensor. Raises a Refusal where the user's code looks up one that stands for another."""
        name, _ = self._real.get(id(tensor), ("", tensor))
        if name and str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] not in _READ_NOTHING:
            raise Refusal(
                f"forward looks {name} up in a dict or a set, at {caller_line()}; a trace has another tensor in its "
                "place. Look it up by name, or in __init__",
                MakeIslands(),
            )
        return id(tensor)

    def _note_requires_grad(self, tensor: torch.Tensor) -> None:
        """Note that `requires_grad` of a tensor is about to be set."""
        if any(tensor is given for given in self._given.values()):
            node = private.tracer_node(tensor)
            if node is not None and not node.users:
                self._fresh.add(id(tensor))

    def _read(self, tensor: torch.Tensor, key: str) -> Any:
        """The value of an attribute that a tensor of the trace does not have, from the tensor that it stands for.

        Raises AttributeError if that tensor does not have it either, UnsupportedModel if the value may change in place.
        """
        name, real = self._real.get(id(tensor), ("", tensor))
        if name and key == "_is_param":  # by which `isinstance` knows
            return isinstance(real, nn.Parameter)
        reader = str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]
        if name and not key.startswith("__") and reader not in _READ_NOTHING:
            value = self.reads[name, key] = vars(real).get(key, ABSENT)
            if value is not ABSENT and not is_plain(value):
                raise UnsupportedModel(
                    f"forward reads the attribute {key} of {name}, a {type(value).__name__}, which may change; a "
                    "planned step would not notice. Keep it in an attribute of a module"
                )
            if value is not ABSENT:
                return value
        raise AttributeError(f"{type(real).__name__!r} object has no attribute {key!r}")

    def check(self, phase: str) -> None:
        """Raise UnsupportedModel where forward or backward did something that a planned step would not do.

        phase: "forward" or "backward", for the words.
        """
        started = []
        for name, tensor in self._tensors.items():
            storage, required, attributes = self._before[name]
            if storage_key(tensor) != storage:
                raise UnsupportedModel(
                    f"{phase} exchanges the memory of {name}; a planned step would not. Write to {name} in place "
                    "under torch.no_grad() instead of setting its .data"
                )
            if tensor.is_leaf and tensor.grad is not None:
                raise UnsupportedModel(
                    f"{phase} puts a gradient into {name}.grad itself (a call of backward() in it, or an assignment); "
                    "a planned step would not"
                )
            if tensor.is_leaf and tensor.requires_grad != required:
                if required or id(tensor) not in self._fresh or name in self._state:
                    raise UnsupportedModel(f"{phase} changes whether {name} requires grad; a planned step would not")
                started.append(name)
            new = sorted(vars(tensor).keys() - attributes)
            if new:
                raise UnsupportedModel(f"{phase} sets the attribute {new[0]} of {name}; a planned step would not")
        leaves, spec = pytree.tree_flatten(self._arguments)
        if spec != self._spec or not all(map(operator.is_, leaves, self._leaves)):
            raise UnsupportedModel(
                f"{phase} changes a container among its arguments; a planned step would not. Return what it puts there"
            )
        if started:
            names = [f"argument {name}" for name in self._given]
            raise Refusal(
                f"forward calls requires_grad_() on {', '.join(started)}; a planned step would not",
                LetRequireGrad(tuple(names.index(name) for name in started)),
            )


def only_waits(hook: Any) -> bool:
    """Whether a hook only has to know when a gradient arrives, to gather sharded parameters then."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(tuple(f"{home}." for home in _ONLY_WAIT))


def _register(tensor: torch.Tensor, hook: Any) -> Any:
    where = caller_line()
    state = None if only_waits(hook) else state_behind(hook)
    if state is not None:
        raise UnsupportedModel(
            f"forward puts a hook on a tensor, at {where}, that reads {state}, which may change between forward and "
            "backward; a planned step would not notice"
        )

    def hooked(gradient: Any) -> Any:
        version = gradient._version
        result = hook(gradient)
        if result is None and gradient._version == version:
            raise UnsupportedModel(
                f"forward puts a hook on a tensor, at {where}, that only looks at its gradient; a planned step would "
                "not call it"
            )
        return result

    register: Any = torch.Tensor.register_hook
    return register(tensor, hook if only_waits(hook) else hooked)


def _exchange(tensor: torch.Tensor, value: Any) -> None:
    raise UnsupportedModel(
        f"the memory of a tensor is exchanged (.data = ...), at {caller_line()}; a planned step would not. Write to it "
        "in place under torch.no_grad(), or compute another tensor"
    )


def _retain(tensor: torch.Tensor) -> None:
    if tensor.is_leaf:
        return
    raise UnsupportedModel(f"forward retains the gradient of a tensor, at {caller_line()}; a planned step would not")


_WAIT_S, _MOST_WAITS = 0.01, 50


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python's cyclic garbage collector from running.

    While a trace is made, it would go through all objects of the process again and again, and find nothing, because
    what a trace consists of stays. One full collection takes half a second where a large library is loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class MadeTensors:
    """The tensors that traces have made. It keeps none alive: those that stay have escaped, to a list for instance.

    After a planned step no tensor would be there.
    """

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.Tensor]] = []

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note results of an op, or what stands for the model's tensors."""
        self._made += (weakref.ref(t) for t in tensors if isinstance(t, private.FakeTensor))

    def __enter__(self) -> MadeTensors:
        """A context for traces. No tensor of theirs may outlive it.

        Where one does, it is taken away from whoever holds it, and a Refusal is raised. Nothing that a trace consists
        of may be referred to at the end.
        """
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, UnsupportedModel):
            return
        cause: BaseException | None = error
        while cause is not None:  # their frames hold what the trace consists of
            cause.__traceback__, cause = None, cause.__cause__ or cause.__context__
        holders = self._take_back()
        if holders and error is None:
            raise Refusal(
                f"forward or backward leaves tensors in {', '.join(map(_in_words, holders[:3]))}, which a planned step "
                "would not. Return them from forward, or put them into attributes of modules",
                Never(),
            )

    def _take_back(self) -> list[Any]:
        """Take tensors that are still there away from whoever holds them. Gives the holders.

        What was made while Python's collector was off is in its youngest generation, so only that is collected. A
        tensor without a holder is in autocast's cache, in a context of the caller.
        """
        if self._there():
            gc.collect(0)
        for _ in range(_MOST_WAITS):  # autograd's thread of a device lets go of its last op after backward has returned
            if all(t.device.type == "cpu" for t in self._there()):
                break
            time.sleep(_WAIT_S)
        escaped = self._there()
        wanted: list[Any] = list(escaped)
        found, holders = list[Any](), list[Any]()
        while wanted:
            ids = {id(thing) for thing in wanted}
            known = {*map(id, (wanted, escaped, found, holders)), id(sys._getframe())}
            holders = [h for h in gc.get_referrers(*wanted) if id(h) not in known and not isinstance(h, FrameType)]
            for holder in holders:
                with contextlib.suppress(Exception):  # some containers refuse it
                    _take_from(holder, ids)
            found += holders
            wanted = [holder for holder in holders if isinstance(holder, tuple)]  # whose holders can be mended
        return found

    def _there(self) -> list[torch.Tensor]:
        return list({id(t): t for ref in self._made if (t := ref()) is not None}.values())


def _in_words(holder: Any) -> str:
    """A name for what holds a tensor: "BAG of module megablocks.moe", or its type."""
    for name, module in tuple(sys.modules.items()):
        if isinstance(module, ModuleType):
            for key, value in tuple(vars(module).items()):
                if value is holder or (isinstance(holder, dict) and _attributes(value) is holder):
                    return f"{key} of module {name}"
    return f"a {type(holder).__name__}"


def _attributes(value: Any) -> Any:
    try:
        return object.__getattribute__(value, "__dict__")  # past those of lazy modules and deprecated names
    except AttributeError:
        return None


def _take_from(holder: Any, ids: set[int]) -> None:
    """Take tensors out of a container, a closure variable, or the slots of an object."""
    if isinstance(holder, (list, deque)):
        kept = [v for v in holder if id(v) not in ids]
        holder.clear()
        holder.extend(kept)
    elif isinstance(holder, MutableMapping):
        for key in [k for k, v in holder.items() if id(v) in ids]:
            del holder[key]
    elif isinstance(holder, set):
        holder -= {v for v in holder if id(v) in ids}
    elif isinstance(holder, CellType):
        del holder.cell_contents
    else:
        for kind in type(holder).__mro__:
            for name in (slots,) if isinstance(slots := vars(kind).get("__slots__", ()), str) else slots:
                if id(getattr(holder, name, None)) in ids:
                    delattr(holder, name)

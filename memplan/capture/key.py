"""The key of a plan: everything that the trace depended on. Without it a stale plan would give wrong results silently.

`StepKey.mismatch` runs before each planned call and says what changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.arguments_key import ArgumentsKey, _lazy, _same, _stride, _Tensor
from memplan.capture.attributes.attribute_reads import AttributeReads
from memplan.capture.attributes.snapshot import Snapshot
from memplan.capture.attributes.tables import ABSENT, attribute_tables
from memplan.capture.guards import Guards, OtherRead
from memplan.capture.ops.layout import storage_key, strided_parts
from memplan.capture.ops.sizes import FROM_DATA, DataSize, Numbers, Sizes, Varying, symbols_in
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Call
from memplan.capture.trace.raw_trace import AttributeRead, Autocast, RawTrace, line_of_place


class ModesKey:
    """Which submodules there are, which train, how many hooks each has, what parameters are like, and autocast."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._model, self._device_type = model, device_type
        self._facts = self._now()

    def _now(self) -> tuple[Any, ...]:
        modules = tuple((id(m), type(m), m.training) for m in self._model.modules())
        hooks = tuple(private.foreign_hooks(table) for _, table in _hook_tables(self._model))
        tensors = tuple(_Tensor.of(t) for t in (*self._model.parameters(), *self._model.buffers()))
        return modules, hooks, tensors, Autocast.ambient(self._device_type)

    def mismatch(self) -> str | None:
        """What kind of thing differs, in words; None where nothing does."""
        return None if self._now() == self._facts else "submodules, parameters, hooks, modes or autocast were changed"


class StepKey:
    """What a capture depended on, to be compared with a call. Costs about 2 microseconds for each submodule.

    - arguments: the part that is about the call.
    - autocast: the state at capture.
    - tables: (name, attributes) of each object and namespace that the step may read.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        autocast: Autocast,
        device_type: str | None,
        shards: Shards | None,
        reads: AttributeReads,
        run: Callable[..., Any],
    ) -> None:
        """Note what a capture depends on.

        - reads: attributes that the step reads or sets, the only ones that matter.
        - run: what the step calls: the model's forward, or a loss function.
        """
        self.arguments = ArgumentsKey(call, device_type)
        self.autocast = autocast
        self._shards, self._run = shards, run
        self._way = None if shards is None else shards.way
        self._switches = kernel_switches()
        self._state_facts = _facts_of(model, shards)
        self._hook_counts = tuple(unplanned_hooks(table, shards) for _, table in _hook_tables(model))
        self._guards: Guards | None = None
        self._sizes: Sizes | None = None
        self._attribute_reads: tuple[AttributeRead, ...] = ()
        self._constants: tuple[torch.Tensor, ...] = ()  # that forward reads: no parameters, buffers or arguments
        self._tensor_reads: Mapping[tuple[str, str], Any] = {}
        self._written: tuple[str, ...] = ()
        self._beside: dict[str, str] = {}
        self._taken: dict[int, str] = {}  # what the step writes to, by the key of its memory
        self._model = model
        self._bind()
        self._looks = self._look()
        self._snapshots = [Snapshot(self.tables, model, reads, () if shards is None else shards.attributes)]

    def _bind(self) -> None:
        """Look up the live tables of the model, which are compared with the snapshots."""
        model, ignored = self._model, () if self._shards is None else self._shards.attributes
        modules = self._modules = tuple(model.named_modules())
        self._vars = [vars(module) for _, module in modules]
        self.tables = attribute_tables(model, ignored, self._run)
        self._attributes = dict(self.tables)
        self._homes = tuple((name, home, len(home)) for name, m in modules for home in (m._parameters, m._buffers))
        self._state = tuple(zip(_state(model), self._state_facts, strict=True))
        self._gets = [(home.get, leaf) for (_, home, leaf, _, _), _ in self._state]
        self._seen_ids: list[int] = []
        self._seen_keys: list[int] | None = None  # of the memory of parameters and buffers that lie as planned
        self._alike: Callable[..., bool] | None = None
        self._hooks = tuple(zip(_hook_tables(model), self._hook_counts, strict=True))
        self._tables_of_hooks = [table for (_, table), _ in self._hooks]

    def moved(self) -> None:
        """Note where parameters and buffers are now, after the plan has moved them."""
        self._state_facts = _facts_of(self._model, self._shards)
        self._bind()
        arguments = {name: written for name, written in self._beside.items() if name.startswith("argument ")}
        self._beside = arguments | self._beside_written()

    def guard(self, traced: Traced, raw: RawTrace, call: Call) -> None:
        """Attach what forward read from tensors, to be read again before each call, and what it writes to."""
        self._guards, self._tensor_reads = Guards(traced), raw.tensor_reads
        taken = {v.reuses for v in traced.graph.values if v.reuses is not None}
        written = [traced.residents[n] for v in taken for n in traced.roots.get(v, ()) if n in traced.residents]
        self._written = tuple("argument " * (one.kind == "input") + one.name for one in written)
        self._beside = self._beside_written(call)
        self._attribute_reads, self._constants = tuple(raw.attribute_reads), tuple(traced.constants.values())
        self._sizes = traced.sizes
        if traced.sizes is not None:
            self.arguments.generalise(traced.sizes, self.numbers)

    def numbers(self, call: Call) -> Numbers | OtherRead:
        """The values of what varies from call to call; why there are none, where forward would read other data."""
        if self._sizes is None:
            return ()
        assert self._guards is not None
        reads = self._guards.reads(call, self._model.get_buffer) if self._sizes.from_data else ()
        return reads if isinstance(reads, OtherRead) else self._sizes.numbers(call.tensors, reads)

    def attributes(self, owner: str) -> dict[str, Any]:
        """The attributes of the module, or of the object behind one, that has this name."""
        table = self._attributes[owner]
        assert isinstance(table, dict)  # of a class there is but a view
        return table

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Names of what the step may read and whose changes are not seen."""
        return tuple(dict.fromkeys(name for snapshot in self._snapshots for name in snapshot.unchecked))

    def heed(self, other: StepKey) -> bool:
        """Depend also on the attributes that another capture of this step has read.

        False where other objects hang on the model by now.
        """
        if len(self.tables) != len(other.tables) or not all(
            name == other_name and (table is other_table or not isinstance(table, dict))  # of these there are views
            for (name, table), (other_name, other_table) in zip(self.tables, other.tables)
        ):
            return False
        self._snapshots = [*self._snapshots, *other._snapshots]
        self._tensor_reads = {**self._tensor_reads, **other._tensor_reads}
        return True

    def varying(self, call: Call) -> Varying:
        """The sizes in which a call differs from the captured one; empty where it differs in anything else."""
        if self._model_changed() or self._sharing_changed(call) or self._hooks_changed() or self._environment_changed():
            return frozenset()
        varying = self.arguments.varying(call)
        if self._guards is None or (not varying and self.arguments.mismatch(call) is not None):
            return varying
        from_data = self._guards.varying(call, self._model.get_buffer)
        return varying | from_data | ({FROM_DATA} if varying and self._guards.of_shapes else frozenset())

    def mismatch(self, call: Call, hooks: bool = True) -> str | None:
        """Why a call of the model now would not run the captured step, in words; None where it would.

        hooks: whether hooks of submodules count.
        """
        return (
            self.arguments.mismatch(call)
            or self._model_changed()
            or self._sharing_changed(call)
            or (self._hooks_changed() if hooks else None)
            or self._environment_changed()
            or (None if (other := self._data_changed(call)) is None else other.why)
        )

    def other_value(self, call: Call) -> str | None:
        """The one value that keeps the step from serving a call: a number that forward reads, or an attribute.

        It is the line that reads a number from data, or a name. None where the step serves the call, and where
        something else keeps it from that: an argument, a mode.
        """
        if self.arguments.mismatch(call) is not None:
            if self.arguments.unlike(call) is not None or self._sizes is None or not self._sizes.from_data:
                return None
            numbers = self.numbers(call)
            if isinstance(numbers, OtherRead):
                return numbers.line
            assert self._guards is not None
            broken = self._sizes.broken(numbers)  # from which lines do the sizes follow that break a condition?
            sources = [self._sizes.sources[i] for i in (() if broken is None else symbols_in(broken))]
            return next((self._guards.lines[s.read] for s in sources if isinstance(s, DataSize)), None)
        if (problem := self._attribute_changed()) is not None:
            return problem[0]
        if self._model_changed() or self._hooks_changed() or self._environment_changed():
            return None
        return None if (other := self._data_changed(call)) is None else other.line

    @property
    def lines_of_sizes(self) -> Collection[str]:
        """The lines from which sizes follow of which the step serves several."""
        if self._sizes is None or self._guards is None:
            return set()
        sources = (source for i, source in enumerate(self._sizes.sources) if not self._sizes.is_fixed(i))
        return {self._guards.lines[source.read] for source in sources if isinstance(source, DataSize)}

    def depends_on(self, values: Collection[str]) -> str | None:
        """The first of these values, as `other_value` names them, on which the step depends; None for none."""
        guards = self._guards.lines if self._guards is not None else ()
        reads = (line_of_place(read.where) for read in self._attribute_reads)
        names = (name for snapshot in self._snapshots for name in snapshot.names)
        known = {*guards, *reads, *names, *map(".".join, self._tensor_reads)}
        return next((value for value in sorted(values) if value in known), None)

    def _attribute_changed(self) -> tuple[str, str] | None:
        found = (snapshot.difference(self.tables) for snapshot in self._snapshots)
        return next((problem for problem in found if problem is not None), None)

    def _model_changed(self) -> str | None:
        looks = self._look()
        changed = zip(self._modules, zip(*looks), zip(*self._looks)) if looks != self._looks else ()
        for (name, _), (kind, mode, children), then in changed:
            if kind is not then[0]:
                return f"module {name or '(the model itself)'} is of another class, {kind.__name__}"
            if mode is not then[1]:
                return f"module {name or '(the model itself)'} is in {'train' if mode else 'eval'} mode"
            if children != then[2]:
                return f"submodules of {name or 'the model'} were exchanged"
        problem = self._attribute_changed()
        if problem is not None:
            return problem[1]
        for name, home, count in self._homes:
            if len(home) != count:
                return f"parameters or buffers were added to {name or 'the model'}, or removed"
        return self._state_changed()

    def _look(self) -> tuple[list[Any], ...]:
        """Classes, modes and children of all modules. Modules are equal only to themselves."""
        children = [tuple(table.get("_modules", {}).values()) for table in self._vars]
        return [type(module) for _, module in self._modules], [v.get("training") for v in self._vars], children

    def _state_changed(self) -> str | None:
        """What differs about parameters and buffers. The third call with the same ones is checked by PyTorch's code."""
        if any(tensor.requires_grad for tensor in self._constants):
            return "a tensor that is neither parameter, buffer nor argument requires grad now"
        tensors = [get(leaf) for get, leaf in self._gets]
        there, ids = [t for t in tensors if t is not None], list(map(id, tensors))
        same, self._seen_ids = ids == self._seen_ids, ids
        if same and self._alike is not None and self._alike(*there):
            return None
        self._alike = None
        problem = self._state_differs()
        if same and problem is None and self._shards is None and all(t.layout is torch.strided for t in there):
            self._alike = private.alike(there)
        return problem

    def _state_differs(self) -> str | None:
        owners: dict[int, tuple[int, str]] = {}
        for (name, home, leaf, first_home, first_leaf), facts in self._state:
            tensor = home.get(leaf)
            if facts is None:
                if tensor is not None:
                    return f"{name} was None and is a tensor now"
                continue
            if tensor is not first_home.get(first_leaf) or tensor is None:
                return f"{name} is gone, or no longer shared as it was"
            if owners.setdefault(id(tensor), (id(first_home), first_leaf)) != (id(first_home), first_leaf):
                return f"{name} is the same tensor as another, which it was not"
            if (
                tensor.dtype != facts.dtype
                or tensor.requires_grad != facts.requires_grad
                or tensor.device != facts.device
                or _lazy(tensor) != facts.lazy
                or (not facts.sharded and (tensor.shape != facts.shape or _stride(tensor) != facts.stride))
            ):
                return f"{name} is {_Tensor.of(tensor)}, planned for {facts}"
        return None

    def _beside_written(self, call: Call | None = None) -> dict[str, str]:
        """Names of arguments, parameters and buffers that lie in memory to which the step writes, by another's name."""
        arguments = () if call is None else zip(map("argument {}".format, call.names), call.tensors, strict=True)
        state = ((name, home.get(leaf)) for (name, home, leaf, _, _), _ in self._state)
        keys = {name: _memory(tensor) for name, tensor in (*arguments, *state) if tensor is not None}
        written = self._taken = {keys[name]: name for name in self._written if name in keys}
        return {name: written[key] for name, key in keys.items() if key in written}

    def _sharing_changed(self, call: Call) -> str | None:
        if not self._written:
            return None
        there, keys = [tensor for get, leaf in self._gets if (tensor := get(leaf)) is not None], None
        if self._alike is not None and private.are_ordinary(there):
            keys = [storage._cdata for storage in map(torch.Tensor.untyped_storage, there)]
            if keys == self._seen_keys and self._taken.keys().isdisjoint(map(_memory, call.tensors)):
                return None
        if (now := self._beside_written(call)) == self._beside:
            self._seen_keys = None if any(name.startswith("argument ") for name in now) else keys
            return None
        name = next(n for n in (*now, *self._beside) if now.get(n) != self._beside.get(n))
        return f"{name} shares memory with other tensors than planned for, and the step writes to some"

    def _hooks_changed(self) -> str | None:
        if not any(self._tables_of_hooks) and not any(self._hook_counts):
            return None
        for (name, table), count in self._hooks:
            if (len(table) or count) and unplanned_hooks(table, self._shards) != count:
                return f"hooks were added to module {name}, or removed"
        return None

    def _environment_changed(self) -> str | None:
        now = Autocast.ambient(self.autocast.device_type)
        if now != self.autocast and (now.enabled or self.autocast.enabled):
            names = [f"{s.dtype} on {s.device_type}" if s.enabled else "off" for s in (now, self.autocast)]
            return f"autocast is {names[0]}, planned for {names[1]}"
        if (switch := self.changed_switch(kernel_switches())) is not None:
            return switch
        if self._shards is not None and self._shards.way != self._way:
            return "other gradients add up before they are reduced (set_requires_gradient_sync)"
        return None

    def changed_switch(self, now: Mapping[str, Any]) -> str | None:
        """The first of these settings that is not as planned, in words; None for none."""
        changed = ((name, value, self._switches[name]) for name, value in now.items() if self._switches[name] != value)
        return next((f"{name} is {value}, planned for {planned}" for name, value, planned in changed), None)

    def _data_changed(self, call: Call) -> OtherRead | None:
        """A number, or an attribute of a tensor, that forward would now read another of."""
        given = {f"argument {name}": t for name, t in zip(call.names, call.tensors)} if self._tensor_reads else {}
        for (name, key), then in self._tensor_reads.items():
            tensor = given[name] if name in given else operator.attrgetter(name)(self._model)
            now = vars(tensor).get(key, ABSENT)
            if not _same(now, then):
                texts = ["absent" if value is ABSENT else repr(value) for value in (now, then)]
                why = f"the attribute {key} of {name} is {texts[0]}, planned for {texts[1]}"
                return OtherRead(f"{name}.{key}", why, of_shape=False)
        for read in self._attribute_reads:
            value = getattr(self._model.get_submodule(read.module), read.key).item()
            if repr(value) != repr(read.value):  # 0.0 is equal to -0.0
                text = f"forward reads {value!r} from {read.key}, planned for {read.value!r} ({read.where})"
                return OtherRead(line_of_place(read.where), text, of_shape=False)
        return None if self._guards is None else self._guards.changed(call, self._model.get_buffer)


def _memory(tensor: torch.Tensor) -> int:
    """`storage_key`, in less time for most tensors, as it is asked for before each call."""
    if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
        return int(tensor.untyped_storage()._cdata)
    return storage_key(strided_parts(tensor)[-1])


def unplanned_hooks(table: dict[int, Any], shards: Shards | None) -> int:
    """The number of hooks in a module's table whose work is neither part of a trace nor done by the plan instead."""
    if shards is not None:
        table = {key: hook for key, hook in table.items() if not shards.owns(hook)}
    return private.foreign_hooks(table)


def _facts_of(model: nn.Module, shards: Shards | None) -> tuple[_Tensor | None, ...]:
    tensors = [home[leaf] for _, home, leaf, _, _ in _state(model)]
    sharded = {id(p) for p in model.parameters() if shards is not None and shards.shard(p) is not None}
    return tuple(None if tensor is None else _Tensor.of(tensor, id(tensor) in sharded) for tensor in tensors)


def _state(model: nn.Module) -> list[tuple[str, dict[str, Any], str, dict[str, Any], str]]:
    """Every parameter and buffer, None ones too, under every name, with home and leaf of the tensor's first name."""
    first: dict[int, tuple[dict[str, Any], str]] = {}
    found = []
    for path, module in model.named_modules():
        for home in (module._parameters, module._buffers):
            for leaf, tensor in home.items():
                origin = (home, leaf) if tensor is None else first.setdefault(id(tensor), (home, leaf))
                found.append((f"{path}.{leaf}".lstrip("."), home, leaf, *origin))
    return found


def _hook_tables(model: nn.Module) -> list[tuple[str, Any]]:
    """Hook tables of every submodule; the model's own hooks run around the planned forward and need no check."""
    inner = [(name, module) for name, module in model.named_modules() if module is not model]
    tables = [(name, getattr(module, kind)) for name, module in inner for kind in private.HOOK_TABLES]
    return [*tables, *(("(every module)", table) for table in private.global_hook_tables())]


def switches_of_ops() -> dict[str, Any]:
    """Global settings by which ops of a plan choose kernels when they run."""
    cudnn = torch.backends.cudnn
    return private.float32_precisions() | {
        "cudnn": cudnn.enabled,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms' warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def kernel_switches() -> dict[str, Any]:
    """Global settings that choose kernels, in a trace or when ops run."""
    cuda = torch.backends.cuda
    return switches_of_ops() | {
        "flash sdp": cuda.flash_sdp_enabled(),
        "memory-efficient sdp": cuda.mem_efficient_sdp_enabled(),
        "math sdp": cuda.math_sdp_enabled(),
        "cudnn sdp": cuda.cudnn_sdp_enabled(),
        "order of sdp backends": private.attention_order(),
        "default dtype": torch.get_default_dtype(),
        "function modes": private.function_modes(),
        "contexts of DTensors": private.parallel_contexts(),
    }

"""From a raw trace to values and ops: who shares memory with whom, who writes over what, what can run again.

Two nodes share memory when their fake tensors share a storage. A node that makes no new storage and writes nothing is a
view: it belongs to the value that it looks at. A write gives the storage a new version, that is a new value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memplan.errors import UnsupportedModel
from memplan.graph import private_api as private
from memplan.graph.trace import RawTrace, evaluate, nodes_behind, written_nodes
from memplan.graph.traced import Gradient, Guard, Kernel, Made, MetaTensor, OutputTensor, Resident, Traced
from memplan.problem import Effect, Graph, Op, Phase, Role, Value

aten = torch.ops.aten

CUDA_BLOCK_BYTES = 512  # PyTorch's CUDA allocator rounds each request up to this
SAME_TENSOR = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})


def gradient_copy(gradient: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The copy that AccumulateGrad makes of a gradient that it can't take over, in the parameter's own layout."""
    return gradient.new_empty_strided(size, stride).copy_(gradient)


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """Bytes that the device's allocator sets aside for a storage."""
    if device.type == "cuda":
        return -(-size_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES
    return size_bytes


def generator_state_bytes(device: torch.device) -> int:
    """Bytes on the planned device of one saved generator state. A CUDA state is kept on the host."""
    return torch.Generator().get_state().numel() if device.type == "cpu" else 0


@dataclass(eq=False, slots=True)
class _Storage:
    """One allocation in the trace; `value` is the index of its present version."""

    value: int
    roots: list[fx.Node]


@dataclass(slots=True)
class _Value:
    name: str
    size_bytes: int
    role: Role
    reuses: int | None = None
    held: bool = False
    roots: list[fx.Node] = field(default_factory=list)

    def freeze(self, renumbered: dict[int, int]) -> Value:
        reuses = None if self.reuses is None else renumbered[self.reuses]
        return Value(self.name, self.size_bytes, self.role, self.held, reuses)


@dataclass(eq=False, slots=True)
class _Op:
    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    phase: Phase
    reads: dict[fx.Node, int]
    made: list[Made]
    outputs: list[int]
    effects: list[Effect]
    random: bool
    recomputable: bool
    layer: str
    key: str = ""
    repeat_args: tuple[Any, ...] | None = None


def build_traced(
    raw: RawTrace, inputs: Sequence[torch.Tensor], input_names: Sequence[str], device: torch.device
) -> Traced:
    """Analyse a raw trace. Raises UnsupportedModel where the program can't be represented exactly."""
    return _Builder(raw, inputs, input_names, device).build()


class _Builder:
    def __init__(
        self, raw: RawTrace, inputs: Sequence[torch.Tensor], input_names: Sequence[str], device: torch.device
    ) -> None:
        self.raw, self.device = raw, device
        self.inputs, self.input_names = inputs, tuple(input_names)
        self.values: list[_Value] = []
        self.ops: list[_Op] = []
        self.storages: dict[int, _Storage] = {}
        self.parents: dict[fx.Node, fx.Node] = {}
        self.residents: dict[fx.Node, Resident] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.tangent_values: dict[int, int] = {}
        self.gradients: list[Gradient] = []

    def build(self) -> Traced:
        phase: Phase = "forward"
        placeholders = self._sources()
        tangents = {node: index for index, node in self.raw.tangents.items()}
        output_values: list[int] = []
        for node in self.raw.module.graph.nodes:
            if node.op == "placeholder":
                self._add_resident(node, placeholders[node])
            elif node.op == "get_attr":
                self._add_constant(node)
            elif node in tangents:
                value = self._new_storage(
                    node, node.meta["val"], "tangent", f"tangent of {self._output_name(tangents[node])}"
                )
                self.tangent_values[tangents[node]] = value
            elif node.op == "call_function":
                self._add_node(node, phase)
            if node is self.raw.boundary:
                phase = "backward"
                output_values = [self._present(n) for n in self.raw.outputs]
        outputs = self._hold_outputs(output_values)
        self._take_gradients()
        self._drop_dead_ops(outputs)
        self._accumulate_in_place()
        return self._freeze(outputs)

    # -- resident tensors -------------------------------------------------------------------------------------------

    def _sources(self) -> dict[fx.Node, Resident]:
        nodes = [n for n in self.raw.module.graph.nodes if n.op == "placeholder"]
        sources = [Resident("parameter", n) for n in self.raw.parameter_names]
        sources += [Resident("buffer", n) for n in self.raw.buffer_names]
        sources += [Resident("input", n, i) for i, n in enumerate(self.input_names)]
        return dict(zip(nodes, sources, strict=True))

    def _add_resident(self, node: fx.Node, source: Resident) -> None:
        tensor = node.meta["val"]
        self.residents[node] = source
        known = self.storages.get(_key(tensor))
        if known is not None:
            known.roots.append(node)
            self.values[known.value].roots.append(node)
            return
        role: Role = "parameter" if source.kind == "parameter" else "buffer" if source.kind == "buffer" else "input"
        self._new_storage(node, tensor, role, source.name)

    def _add_constant(self, node: fx.Node) -> None:
        tensor = getattr(self.raw.module, str(node.target))
        fake = node.meta.get("val", tensor)
        self._refuse_foreign_parameter(tensor)
        self.residents[node] = Resident("constant", str(node.target))
        self.constants[str(node.target)] = tensor
        node.meta["val"] = fake
        known = self.storages.get(_key(fake))
        if known is not None:
            known.roots.append(node)
            self.values[known.value].roots.append(node)
        else:
            self._new_storage(node, fake, "constant", str(node.target))

    def _refuse_foreign_parameter(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            raise UnsupportedModel(
                f"forward uses a tensor of shape {tuple(tensor.shape)} that requires grad and is neither a parameter, nor "
                "a buffer, nor an argument. Register it as a parameter, or pass it in"
            )

    # -- ops --------------------------------------------------------------------------------------------------------

    def _add_node(self, node: fx.Node, phase: Phase) -> None:
        result = node.meta.get("val")
        if node.target.__name__ == "getitem" and node.target.__module__ == "_operator":
            self._add_getitem(node)
            return
        tensors = _tensors(result)
        writes = written_nodes(node)
        if not tensors and not writes:
            return  # an assertion on sizes or dtypes: it held at capture, and the key holds it
        arguments = {
            _key(n.meta["val"]): n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)
        }
        if not writes and all(_key(t) in arguments for t in tensors):
            self._add_view(node, arguments, tensors)
            return
        self._add_op(node, phase, writes)

    def _add_view(self, node: fx.Node, arguments: dict[int, fx.Node], tensors: Sequence[torch.Tensor]) -> None:
        if len(arguments) > 1 or len(node.all_input_nodes) > 1:
            raise UnsupportedModel(f"{node.target} returns views of several tensors at once")
        self.parents[node] = arguments[_key(tensors[0])]

    def _add_getitem(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return  # a gradient that was not asked for
        if source in self.parents:
            self.parents[node] = source
            return
        for op in reversed(self.ops):
            if op.node is source:
                storage = self.storages.get(_key(node.meta["val"]))
                assert storage is not None
                if not any(m.index == node.args[1] and m.node is not source for m in op.made):
                    op.made.append(Made(node, int(node.args[1]), self._first_version(op, storage)))  # type: ignore[arg-type]
                    storage.roots.append(node)
                    self.values[storage.value].roots.append(node)
                return
        raise AssertionError(f"getitem of unknown node {source}")

    def _first_version(self, op: _Op, storage: _Storage) -> int:
        value = storage.value
        while value not in op.outputs:
            older = self.values[value].reuses
            assert older is not None
            value = older
        return value

    def _add_op(self, node: fx.Node, phase: Phase, writes: Sequence[fx.Node]) -> None:
        if node.target in private.UNPLANNABLE:
            where = self.raw.layers.get(node.name) or "the model"
            raise UnsupportedModel(f"{node.target} in {where} can't be planned: {private.UNPLANNABLE[node.target]}")
        target, args, kwargs = self._simplified(node)
        reads: dict[fx.Node, int] = {}
        for argument in _nodes_in((args, kwargs)):
            reads[argument] = self._present(argument)
        op = _Op(
            node=node, target=target, args=args, kwargs=kwargs, phase=phase, reads=reads, made=[], outputs=[], effects=[],
            random=private.draws_random_numbers(target, args, kwargs), recomputable=True,
            layer=self.raw.layers.get(node.name, ""),
        )  # fmt: skip
        hidden = private.HIDDEN_WRITES.get(node.target)
        written_storages = {id(self.storages[_key(w.meta["val"])]): w for w in writes}
        for written in written_storages.values():
            self._write(op, written, once=hidden is not None)
        self._collect_outputs(op, node)
        if hidden is not None and op.effects:
            op.repeat_args = tuple(None if i in hidden[0] else a for i, a in enumerate(args))
        self.ops.append(op)

    def _simplified(self, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The call without false dependencies: factories keep only the metadata of their model tensor."""
        args, kwargs = node.args, dict(node.kwargs)
        if node.target in private.METADATA_ONLY:
            like = args[0]
            assert isinstance(like, fx.Node)
            tensor = like.meta["val"]
            stand_in = MetaTensor(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
            kwargs["device"] = kwargs.get("device") or tensor.device
            return _plain_factory(node, kwargs) or (node.target, (stand_in, *args[1:]), kwargs)
        if node.target is aten.lift_fresh_copy.default:
            constant = args[0]
            assert isinstance(constant, fx.Node)
            tensor = getattr(self.raw.module, str(constant.target), None) if constant.op == "get_attr" else None
            if tensor is not None and tensor.numel() == 1 and not tensor.is_complex():
                return (
                    aten.full.default,
                    (list(tensor.shape), tensor.item()),
                    {"dtype": tensor.dtype, "device": node.meta["val"].device},
                )
        return node.target, args, kwargs

    def _write(self, op: _Op, node: fx.Node, *, once: bool) -> None:
        """`op` writes to the storage behind `node`: a new version of it."""
        storage = self.storages[_key(node.meta["val"])]
        old = self.values[storage.value]
        new = len(self.values)
        self.values.append(
            _Value(
                f"{old.name.split('@')[0]}@{op.node.name}",
                old.size_bytes,
                old.role,
                storage.value,
                False,
                storage.roots,
            )
        )
        resident = old.role in ("parameter", "buffer", "input", "constant")
        if once and resident:
            op.effects.append(Effect(storage.value, new))
        else:
            op.outputs.append(new)
            op.recomputable = op.recomputable and not resident and old.role != "tangent"
        storage.value = new

    def _collect_outputs(self, op: _Op, node: fx.Node) -> None:
        result = node.meta.get("val")
        several = isinstance(result, (list, tuple))
        for index, tensor in enumerate(result if several else [result]):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = self.storages.get(_key(tensor))
            if storage is None:
                value = self._new_storage(None, tensor, "activation", f"{node.name}.{index}" if several else node.name)
                op.outputs.append(value)
                if not several:
                    self._root(op, node, value)
            elif not several and storage.value in [*op.outputs, *(e.new for e in op.effects)]:
                written = next(n for n in written_nodes(node) if _key(n.meta["val"]) == _key(tensor))
                self.parents[node] = written  # an in-place op returns the tensor that it wrote to
            elif several and storage.value in op.outputs:
                continue  # two results in one storage
            else:
                raise UnsupportedModel(
                    f"{node.target} at {op.layer or 'the model'} returns one of its arguments beside new results"
                )

    def _root(self, op: _Op, node: fx.Node, value: int) -> None:
        op.made.append(Made(node, None, value))
        storage = self.storages[_key(node.meta["val"])]
        storage.roots.append(node)
        self.values[value].roots.append(node)

    def _new_storage(self, node: fx.Node | None, tensor: torch.Tensor, role: Role, name: str) -> int:
        if tensor.layout is not torch.strided:
            raise UnsupportedModel(
                f"{name} has layout {tensor.layout}; only strided tensors can be planned. Sparse gradients: set sparse=False"
            )
        size = allocated_bytes(tensor.untyped_storage().nbytes(), self.device)
        index = len(self.values)
        roots = [node] if node is not None else []
        self.values.append(_Value(name, size, role, roots=roots))
        self.storages[_key(tensor)] = _Storage(index, list(roots))
        return index

    def _present(self, node: fx.Node) -> int:
        """The version of the storage behind `node` as it stands now."""
        return self.storages[_key(node.meta["val"])].value

    # -- outputs and gradients --------------------------------------------------------------------------------------

    def _output_name(self, index: int) -> str:
        return self.raw.template.names[index].strip(".") or "output"

    def _hold_outputs(self, values: Sequence[int]) -> tuple[OutputTensor, ...]:
        outputs = []
        for index, (node, value) in enumerate(zip(self.raw.outputs, values, strict=True)):
            requires_grad = self.raw.requires_grad[index]
            held = self.values[value]
            if held.role == "activation":
                held.held = True
                held.name = f"output {self._output_name(index)}"
            if requires_grad and index in self.raw.reassigned.values():
                raise UnsupportedModel(
                    f"forward puts a tensor that requires grad into {self._output_name(index)}; detach it, or return it"
                )
            if requires_grad and held.role != "activation":
                raise UnsupportedModel(
                    f"output {self._output_name(index)} is a view of {held.role} {held.name}; its gradient would bypass "
                    "the plan. Return a copy (.clone()) of it"
                )
            outputs.append(OutputTensor(node, value, requires_grad, self.tangent_values.get(index)))
        return tuple(outputs)

    def _take_gradients(self) -> None:
        """Mark gradients, and copy those that AccumulateGrad could not take over as they are."""
        by_value: dict[int, list[tuple[str, fx.Node]]] = {}
        for name, node in self.raw.gradients.items():
            if node is not None:
                by_value.setdefault(self._present(node), []).append((name, node))
        for value, nodes in by_value.items():
            copied, kept = self._split_gradients(value, nodes)
            for name, node in copied:
                self._copy_gradient(name, node, value)
            if kept:
                self.values[value].role, self.values[value].held = "gradient", True
                self.gradients.append(Gradient(value, tuple(kept)))
                self.values[value].name = "gradient of " + ", ".join(name for name, _ in kept)

    def _split_gradients(self, value: int, nodes: list[tuple[str, fx.Node]]) -> tuple[list[Any], list[Any]]:
        producer = next((i for i, op in enumerate(self.ops) if value in op.outputs), None)
        read_later = producer is None or any(value in op.reads.values() for op in self.ops[producer + 1 :])
        foreign = (
            self.values[value].role != "activation"
            or self.values[value].held
            or self.ops[producer or 0].phase == "forward"
        )
        if foreign or read_later or _overlap([n.meta["val"] for _, n in nodes]):
            return nodes, []
        fits = [self._obeys_layout(name, node) for name, node in nodes]
        copied = [pair for pair, ok in zip(nodes, fits, strict=True) if not ok]
        return copied, [pair for pair, ok in zip(nodes, fits, strict=True) if ok]

    def _leaf(self, name: str) -> torch.Tensor:
        kind, _, leaf = name.partition(" ")
        node = next(n for n, r in self.residents.items() if r.kind == kind and r.name == leaf)
        tensor = node.meta["val"]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _obeys_layout(self, name: str, node: fx.Node) -> bool:
        return _strides_matter(node.meta["val"]) == _strides_matter_like(self._leaf(name))

    def _copy_gradient(self, name: str, node: fx.Node, value: int) -> None:
        leaf = self._leaf(name)
        size, stride = _dense_layout(leaf)
        fake = torch.empty_strided(size, stride, dtype=node.meta["val"].dtype, device="meta")
        graph = self.raw.module.graph
        with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
            copy = graph.call_function(gradient_copy, (node, size, stride))
        copy.meta["val"] = fake
        position = max((i for i, op in enumerate(self.ops) if value in op.outputs), default=-1)
        position = max(position, sum(op.phase == "forward" for op in self.ops) - 1) + 1
        made = self._new_storage(copy, fake, "gradient", f"gradient of {name}")
        self.values[made].held = True
        self.values[made].size_bytes = allocated_bytes(self.values[made].size_bytes, self.device)
        op = _Op(
            node=copy, target=gradient_copy, args=(node, size, stride), kwargs={}, phase="backward", reads={node: value},
            made=[Made(copy, None, made)], outputs=[made], effects=[], random=False, recomputable=True,
            layer=name.partition(" ")[2].rpartition(".")[0],
        )  # fmt: skip
        self.ops.insert(position, op)
        self.gradients.append(Gradient(made, ((name, copy),)))

    # -- clean-up ---------------------------------------------------------------------------------------------------

    def _drop_dead_ops(self, outputs: Sequence[OutputTensor]) -> None:
        """Leave out ops whose results nobody reads, unless they draw random numbers or write to what outlives the step."""
        needed = {o.value for o in outputs} | {g.value for g in self.gradients}
        kept = []
        for op in reversed(self.ops):
            lasting = op.random or op.effects or not op.recomputable
            if lasting or any(v in needed for v in op.outputs):
                kept.append(op)
                needed.update(op.reads.values())
                needed.update(r for v in op.outputs if (r := self.values[v].reuses) is not None)
        self.ops = kept[::-1]

    def _accumulate_in_place(self) -> None:
        """Sum gradients into the first of them where nobody reads it afterwards, as autograd's engine does."""
        last_read: dict[int, int] = {}
        for position, op in enumerate(self.ops):
            for value in op.reads.values():
                last_read[value] = position
        made_by = {v: op for op in self.ops for v in op.outputs}
        for position, op in enumerate(self.ops):
            if op.phase != "backward" or op.target is not aten.add.Tensor or op.kwargs:
                continue
            first, second = op.args
            if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
                continue
            old, new = op.reads[first], op.outputs[0]
            producer = made_by.get(old)
            free = (
                producer is not None
                and producer.phase == "backward"
                and self.values[old].role == "activation"
                and not self.values[old].held
                and last_read[old] == position
                and old != op.reads[second]
                and first in self.values[old].roots
                and _same_layout(first.meta["val"], op.node.meta["val"])
            )
            if free:
                op.target = aten.add_.Tensor
                self.values[new].reuses = old

    def _freeze(self, outputs: Sequence[OutputTensor]) -> Traced:
        guards = self._guards()
        used = sorted(self._used_values(outputs, guards))
        number = {old: new for new, old in enumerate(used)}
        roots = {number[v]: tuple(dict.fromkeys(self.values[v].roots)) for v in used}
        rooted = {node for nodes in roots.values() for node in nodes}
        graph = Graph(
            values=tuple(self.values[v].freeze(number) for v in used),
            ops=tuple(self._freeze_op(op, number) for op in self.ops),
            boundary=sum(op.phase == "forward" for op in self.ops),
            rng_state_bytes=generator_state_bytes(self.device),
        )
        return Traced(
            graph=graph,
            kernels=tuple(self._kernel(op, number) for op in self.ops),
            roots=roots,
            parents=self.parents,
            residents=self.residents,
            outputs=tuple(
                OutputTensor(o.node, number[o.value], o.requires_grad, None if o.tangent is None else number[o.tangent])
                for o in outputs
            ),
            template=self.raw.template,
            gradients=tuple(Gradient(number[g.value], g.nodes) for g in self.gradients),
            tangent_nodes={number[v]: self.raw.tangents[i] for i, v in self.tangent_values.items()},
            constants={
                r.name: self.constants[r.name]
                for n, r in self.residents.items()
                if r.kind == "constant" and n in rooted
            },
            guards=guards,
            reassigned=self.raw.reassigned,
            device=self.device,
        )

    def _used_values(self, outputs: Sequence[OutputTensor], guards: Sequence[Guard]) -> set[int]:
        used = {o.value for o in outputs} | {g.value for g in self.gradients} | set(self.tangent_values.values())
        for op in self.ops:
            used.update(op.outputs, op.reads.values(), *op.effects)
        used.update(self._present(n) for guard in guards for n in guard.nodes if n.op == "get_attr")
        resident = {i for i, v in enumerate(self.values) if v.role in ("parameter", "buffer", "input")}
        used |= {i for i in resident if self.values[i].reuses is None}
        for value in list(used):
            while (older := self.values[value].reuses) is not None:
                used.add(older)
                value = older
        return used

    def _freeze_op(self, op: _Op, number: dict[int, int]) -> Op:
        taken = [self.values[v].reuses for v in op.outputs if self.values[v].reuses is not None]
        first_only = {effect.old for effect in op.effects}
        reads = dict.fromkeys(v for v in [*op.reads.values(), *taken] if v is not None and v not in first_only)
        return Op(
            name=op.node.name,
            kind=_kind(op.target),
            phase=op.phase,
            inputs=tuple(number[v] for v in reads),
            outputs=tuple(number[v] for v in op.outputs),
            effects=tuple(Effect(number[e.old], number[e.new]) for e in op.effects),
            random=op.random,
            recomputable=op.recomputable,
            layer=op.layer,
            key=signature(op.target, op.args, op.kwargs),
        )

    def _kernel(self, op: _Op, number: dict[int, int]) -> Kernel:
        written = {n: number[v] for n, v in op.reads.items()}
        return Kernel(
            node=op.node,
            target=op.target,
            args=op.args,
            kwargs=op.kwargs,
            reads=written,
            made=tuple(Made(m.node, m.index, number[m.value]) for m in op.made),
            repeat_args=op.args if op.repeat_args is None else op.repeat_args,
        )

    def _guards(self) -> tuple[Guard, ...]:
        nodes = list(self.raw.module.graph.nodes)
        return tuple(Guard(tuple(nodes_behind(r.node, nodes)), r.node, r.value, r.where) for r in self.raw.scalar_reads)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [t for t in result if isinstance(t, torch.Tensor)]
    return []


def _plain_factory(node: fx.Node, kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The common factories without a model tensor, for those over meta tensors run through slow Python kernels."""
    made = node.meta["val"]
    size, stride = list(made.shape), list(made.stride())
    options = {"dtype": made.dtype, "device": kwargs["device"]}
    if node.target in (aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default):
        return aten.empty_strided.default, (size, stride), options
    if made.is_contiguous() and node.target in (aten.zeros_like.default, aten.new_zeros.default):
        return aten.zeros.default, (size,), options
    if made.is_contiguous() and node.target in (aten.ones_like.default, aten.new_ones.default):
        return aten.ones.default, (size,), options
    return None


def _nodes_in(arguments: Any) -> Iterable[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return dict.fromkeys(n for n in found if isinstance(n.meta.get("val"), torch.Tensor))


def _kind(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else f"memplan.{target.__name__}"


def signature(target: Any, args: Any, kwargs: Any) -> str:
    """A short hash, equal for calls of one kernel with equal shapes, strides, dtypes, devices and settings."""

    def shown(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            t = argument.meta.get("val")
            if isinstance(t, torch.Tensor):
                return f"{t.dtype}{tuple(t.shape)}{tuple(t.stride())}{t.device}"
            return argument.name
        if isinstance(argument, (list, tuple)):
            return [shown(a) for a in argument]
        return repr(argument)

    text = f"{_kind(target)}|{[shown(a) for a in args]}|{sorted((k, str(shown(v))) for k, v in kwargs.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _strides_matter(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _dense_layout(leaf: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size = tuple(leaf.shape)
    if _is_dense(leaf):
        return size, tuple(leaf.stride())
    return size, tuple(torch.empty(size, device="meta").stride())


def _strides_matter_like(leaf: torch.Tensor) -> tuple[int, ...]:
    size, stride = _dense_layout(leaf)
    return tuple(s for s, n in zip(stride, size, strict=True) if n != 1)


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.untyped_storage().nbytes() == a.numel() * a.element_size()
    )


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether views of one storage may share elements (conservative: their address ranges meet)."""
    ranges = []
    for t in tensors:
        reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        ranges.append((t.storage_offset(), t.storage_offset() + reach))
    ranges.sort()
    return any(later[0] <= earlier[1] for earlier, later in zip(ranges, ranges[1:], strict=False))


__all__ = ["allocated_bytes", "build_traced", "evaluate", "generator_state_bytes", "gradient_copy", "signature"]

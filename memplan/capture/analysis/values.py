"""From a raw trace to values and ops: which tensors share memory, what is overwritten, what can run again.

Two nodes share memory when their fake tensors share a storage. A node that makes no new storage and writes nothing is a
view: it belongs to the value that it shows. A write gives the storage a new version, which is a new value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memplan.capture.analysis.draft import Draft, DraftOp, DraftStorage, DraftValue, drop_dead_ops, freeze
from memplan.capture.analysis.gradients import add_in_place, order_gradients, take_gradients
from memplan.capture.analysis.sized import with_sizes
from memplan.capture.analysis.traced import Made, MetaTensor, OutputTensor, Resident, Traced
from memplan.capture.ops import op_facts
from memplan.capture.ops.dataflow import written_nodes
from memplan.capture.ops.island_ops import kernel_of
from memplan.capture.ops.layout import storage_key, tensors_of
from memplan.capture.ops.ways import MakeIslands, Refusal
from memplan.capture.trace.islands import calls_around
from memplan.capture.trace.raw_trace import RawTrace
from memplan.errors import UnsupportedModel
from memplan.problem.data import RESIDENT_ROLES, Effect, Phase, Role

aten = torch.ops.aten


def build_traced(raw: RawTrace, input_names: Sequence[str], device: torch.device) -> Traced:
    """Analyse a raw trace. Raises UnsupportedModel where the program can't be represented exactly."""
    builder = _StepBuilder(raw, input_names, device)
    outputs = builder.hold_outputs(builder.read_nodes())
    take_gradients(builder.draft, raw)
    drop_dead_ops(builder.draft, outputs)
    add_in_place(builder.draft)
    order_gradients(builder.draft, raw.arrivals)
    traced = freeze(builder.draft, raw, outputs)
    return traced if raw.symbolic is None else with_sizes(traced, raw)


class _StepBuilder:
    """Reads the nodes of a trace, in order, into a draft."""

    def __init__(self, raw: RawTrace, input_names: Sequence[str], device: torch.device) -> None:
        self.raw, self.input_names = raw, tuple(input_names)
        self.draft = Draft(device)
        self._constants: dict[int, DraftStorage] = {}  # by key of the real storage

    def read_nodes(self) -> list[int]:
        """Fill the draft. Gives the values that hold the outputs at the boundary."""
        phase: Phase = "forward"
        sources = [Resident("parameter", n) for n in self.raw.parameter_names]
        sources += [Resident("buffer", n) for n in self.raw.buffer_names]
        sources += [Resident("input", n, i) for i, n in enumerate(self.input_names)]
        placeholders = (n for n in self.raw.module.graph.nodes if n.op == "placeholder")
        self.draft.residents.update(zip(placeholders, sources, strict=True))
        tangents = {node: index for index, node in self.raw.tangents.items()}
        output_values: list[int] = []
        for node in self.raw.module.graph.nodes:
            if node.op == "placeholder":
                source = self.draft.residents[node]
                self._add_root_or_storage(node, node.meta["val"], source.kind, source.name)
            elif node.op == "get_attr" and node not in self.draft.residents:
                self._add_constant(node)
            elif node in tangents:
                index, name = tangents[node], f"tangent of {self._output_name(tangents[node])}"
                self.draft.tangent_values[index] = self.draft.new_storage(node, node.meta["val"], "tangent", name)
            elif node.target is operator.getitem:
                self._add_getitem(node)
            elif node.op == "call_function":
                self._add_node(node, phase)
            if node is self.raw.boundary:
                phase = "backward"
                for output in self.raw.outputs:  # a constant that is only returned comes at the end of a trace
                    if output.op == "get_attr" and output not in self.draft.residents:
                        self._add_constant(output)
                output_values = [self.draft.present(n) for n in self.raw.outputs]
        return output_values

    def hold_outputs(self, values: Sequence[int]) -> tuple[OutputTensor, ...]:
        """The outputs. `values` hold them, and stay to the end of the step."""
        outputs = []
        overwritten = {value.reuses for value in self.draft.values}
        for index, (node, value) in enumerate(zip(self.raw.outputs, values, strict=True)):
            requires_grad = self.raw.requires_grad[index]
            held = self.draft.values[value]
            if held.role == "activation":
                if value in overwritten:
                    raise UnsupportedModel(
                        f"backward writes to output {self._output_name(index)} in place, which the caller holds. "
                        "Return a copy (.clone()) of it, or let backward write to a copy"
                    )
                held.held = True
                held.name = f"output {self._output_name(index)}"
            if requires_grad and index in self.raw.reassigned.values():
                raise UnsupportedModel(
                    f"forward puts a tensor that requires grad into {self._output_name(index)}; detach it, or return it"
                )
            if requires_grad and held.role != "activation":
                raise UnsupportedModel(
                    f"output {self._output_name(index)} is a view of {held.role} {held.name}; its gradient would "
                    "bypass the plan. Return a copy (.clone()) of it"
                )
            outputs.append(OutputTensor(node, value, requires_grad, self.draft.tangent_values.get(index)))
        return tuple(outputs)

    def _output_name(self, index: int) -> str:
        return self.raw.template.names[index].strip(".") or "output"

    def _add_constant(self, node: fx.Node) -> None:
        name = str(node.target)
        tensor = getattr(self.raw.module, name)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModel(
                f"forward uses a {type(tensor).__name__} of its own; a planned step can replay only the default "
                "generator"
            )
        if tensor.requires_grad:
            raise UnsupportedModel(
                f"forward uses a tensor of shape {tuple(tensor.shape)} that requires grad and is neither a parameter, "
                "nor a buffer, nor an argument. Register it as a parameter, or pass it in; a teacher has to have "
                "requires_grad_(False); where forward calls torch.utils.checkpoint, leave that out"
            )
        self.draft.residents[node] = Resident("constant", name)
        self.draft.constants[name] = tensor
        seen = node.meta.setdefault("val", tensor)
        if storage_key(tensor) in self._constants:  # under a fake of its own
            self.draft.storages.setdefault(storage_key(seen), self._constants[storage_key(tensor)])
        self._add_root_or_storage(node, seen, "constant", name)
        self._constants.setdefault(storage_key(tensor), self.draft.storage(node))

    def _add_root_or_storage(self, node: fx.Node, tensor: torch.Tensor, role: Role, name: str) -> None:
        if storage_key(tensor) in self.draft.storages:
            self.draft.add_root(node)
        else:
            self.draft.new_storage(node, tensor, role, name)

    def _refusal(self, node: fx.Node, message: str) -> Refusal:
        """A refusal of an op, which a call around it could run as an island."""
        return Refusal(message, MakeIslands([calls_around(self.raw.layers.get(node.name, ""))]))

    def _add_node(self, node: fx.Node, phase: Phase) -> None:
        tensors = tensors_of(node.meta.get("val"))
        if any(t.layout is not torch.strided for t in tensors):
            raise self._refusal(
                node,
                f"{node.target} gives a tensor of layout {tensors[0].layout}; only strided tensors can be planned. "
                "Sparse gradients: set sparse=False",
            )
        if op_facts.gives_numbers(node.target):
            raise self._refusal(node, f"{node.target} gives a number, and a plan would have that of its fake kernel")
        writes = written_nodes(node)
        if not tensors and not writes and not op_facts.checks_data(node.target):
            return  # an assertion on sizes or dtypes: it held at capture, and the key holds it
        given = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        arguments = {storage_key(n.meta["val"]): n for n in given}
        constants = [n for n in node.all_input_nodes if n.op == "get_attr"]
        if len(constants) == 1 and op_facts.is_view(node.target):  # the trace looks at a constant through fakes
            for tensor in tensors:
                self.draft.storages.setdefault(storage_key(tensor), self.draft.storage(constants[0]))
            arguments = {storage_key(tensor): constants[0] for tensor in tensors} or arguments
        if tensors and not writes and all(storage_key(t) in arguments for t in tensors):
            if len(arguments) > 1 or len(node.all_input_nodes) > 1:
                raise self._refusal(node, f"{node.target} returns views of several tensors at once")
            self.draft.parents[node] = arguments[storage_key(tensors[0])]
            return
        self._add_op(node, phase, writes)

    def _add_getitem(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return  # a gradient that was not asked for
        if source in self.draft.parents:
            self.draft.parents[node] = source
            return
        op = next((op for op in reversed(self.draft.ops) if op.node is source), None)
        assert op is not None, f"getitem of unknown node {source}"
        if not any(m.index == index and m.node is not source for m in op.made):
            value = self.draft.present(node)
            while value not in op.outputs:  # later ops have written to it
                older = self.draft.values[value].reuses
                assert older is not None
                value = older
            op.made.append(Made(node, index, value))
            self.draft.add_root(node)

    def _add_op(self, node: fx.Node, phase: Phase, writes: Sequence[fx.Node]) -> None:
        if node.target in op_facts.UNPLANNABLE:
            where = self.raw.layers.get(node.name, "")
            reason = op_facts.UNPLANNABLE[node.target]
            raise self._refusal(node, f"{node.target} in {where or 'the model'} can't be planned: {reason}")
        if any(isinstance(a, torch.Generator) for a in (*node.args, *node.kwargs.values())):
            raise self._refusal(
                node,
                f"{node.target} draws from a generator of its own; a planned step can replay only the default "
                "generator",
            )
        island = kernel_of(node.target, str(node.args[0]), self.raw.islands) if node.args else None
        target, args, kwargs = self._simplified(node) if island is None else (island, node.args[1:], node.kwargs)
        given: list[fx.Node] = []
        fx.map_arg((args, kwargs), given.append)
        op = DraftOp(
            node=node, target=target, args=args, kwargs=kwargs, phase=phase,
            reads={n: self.draft.present(n) for n in given if isinstance(n.meta.get("val"), torch.Tensor)},
            made=[], outputs=[], effects=[],
            random=op_facts.draws_random_numbers(target, args, kwargs)
            if island is None
            else island.forward and island.island.random,
            recomputable=not op_facts.checks_data(target)
            and not op_facts.is_uneven_exchange(target, args)
            and not op_facts.may_give_other_bits(target, args, kwargs, node.meta.get("val"))
            if island is None
            else island.repeats,
            layer=self.raw.layers.get(node.name, ""),
        )  # fmt: skip
        hidden = op_facts.HIDDEN_WRITES.get(node.target)
        written_storages = {storage_key(w.meta["val"]): w for w in writes}
        for written in written_storages.values():
            self._write(op, written, once=hidden is not None)
        for position in island.island.writes if island is not None and island.forward else ():
            assert island is not None
            self._write(op, node.args[1][position], once=island.island.alike)  # type: ignore[index, arg-type]
        self._collect_outputs(op, node)
        if hidden is not None and op.effects:
            op.repeat_args = tuple(None if i in hidden[0] else a for i, a in enumerate(args))
        self.draft.ops.append(op)

    def _simplified(self, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(target, args, kwargs) of a call. Factories keep only the metadata of their model tensor."""
        args, kwargs = node.args, dict(node.kwargs)
        if node.target in op_facts.METADATA_ONLY:
            like: Any = args[0]
            tensor = like.meta["val"]
            stand_in = MetaTensor(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
            kwargs["device"] = kwargs.get("device") or tensor.device
            # Factories over meta tensors run through slow Python kernels, so common ones do without.
            made = node.meta["val"]
            size, stride = list(made.shape), list(made.stride())
            options = {"dtype": made.dtype, "device": kwargs["device"]}
            if node.target in (aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default):
                return aten.empty_strided.default, (size, stride), options
            if made.is_contiguous() and node.target in (aten.zeros_like.default, aten.new_zeros.default):
                return aten.zeros.default, (size,), options
            if made.is_contiguous() and node.target in (aten.ones_like.default, aten.new_ones.default):
                return aten.ones.default, (size,), options
            return node.target, (stand_in, *args[1:]), kwargs
        if node.target is aten.lift_fresh_copy.default:
            constant: Any = args[0]
            tensor = getattr(self.raw.module, str(constant.target), None) if constant.op == "get_attr" else None
            if tensor is not None and tensor.numel() == 1 and not tensor.is_complex():
                options = {"dtype": tensor.dtype, "device": node.meta["val"].device}
                return aten.full.default, (list(tensor.shape), tensor.item()), options
        return node.target, args, kwargs

    def _write(self, op: DraftOp, node: fx.Node, *, once: bool) -> None:
        """`op` writes to the storage behind `node`, which makes a new version of it."""
        storage = self.draft.storage(node)
        old = self.draft.values[storage.value]
        new = len(self.draft.values)
        name = f"{old.name.split('@')[0]}@{op.node.name}"
        self.draft.values.append(DraftValue(name, old.size_bytes, old.role, storage.value, roots=storage.roots))
        resident = old.role in RESIDENT_ROLES
        if once and resident:
            op.effects.append(Effect(storage.value, new))
        else:
            op.outputs.append(new)
            op.recomputable = op.recomputable and not resident and old.role != "tangent"
        storage.value = new

    def _collect_outputs(self, op: DraftOp, node: fx.Node) -> None:
        result = node.meta.get("val")
        several = isinstance(result, (list, tuple))
        results: Sequence[Any] = result if isinstance(result, (list, tuple)) else [result]
        for index, tensor in enumerate(results):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = self.draft.storages.get(storage_key(tensor))
            if storage is None:
                name = f"{node.name}.{index}" if several else node.name
                value = self.draft.new_storage(None, tensor, "activation", name)
                op.outputs.append(value)
                if not several:
                    op.made.append(Made(node, None, value))
                    self.draft.add_root(node)
            elif not several and storage.value in [*op.outputs, *(e.new for e in op.effects)]:
                written = next(n for n in written_nodes(node) if storage_key(n.meta["val"]) == storage_key(tensor))
                self.draft.parents[node] = written  # an in-place op returns the tensor that it wrote to
            elif several and storage.value in op.outputs:
                continue  # two results in one storage
            else:
                raise self._refusal(
                    node, f"{node.target} at {op.layer or 'the model'} returns one of its arguments beside new results"
                )

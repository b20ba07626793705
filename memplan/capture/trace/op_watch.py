"""Sees each op of a trace before it is recorded: corrects fake kernels, answers reads of tensor data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.attributes.kept_memory import KeptMemory, written_by
from memplan.capture.ops.dataflow import Dataflow, answer_to_any_draw, computed, draws, written_nodes
from memplan.capture.ops.layout import is_dense, storage_key, tensors_of
from memplan.capture.ops.real_results import corrected_outputs, with_noted_results
from memplan.capture.ops.sizes import SymbolicInputs
from memplan.capture.ops.ways import MakeIslands, Refusal, TakeBranches
from memplan.capture.trace.generators import CountedRandom
from memplan.capture.trace.memo import Memo
from memplan.capture.trace.raw_trace import OTHER_READS, AttributeRead, Guard, TraceNotes
from memplan.capture.trace.source_lines import caller_line, in_python_backward
from memplan.capture.trace.stand_ins import MadeTensors
from memplan.errors import UnsupportedModel
from memplan.torch_private import pytree

aten = torch.ops.aten


class OpWatch(private.TorchDispatchMode):
    """Sees each op of the trace first.

    It corrects what fake kernels get wrong. Where forward reads data that derives from the inputs alone, it gives the
    number, and notes it for the guards.
    """

    supports_higher_order_operators = True  # they come here, to be refused

    def __init__(
        self,
        notes: TraceNotes,
        memo: Memo,
        memory: KeptMemory,
        made: MadeTensors,
        symbolic: SymbolicInputs,
        counted: bool = False,
    ) -> None:
        """Prepare for a trace.

        - memory: keeps real tensors that forward writes to and that are neither parameters, buffers nor arguments.
        - made: notes the results of ops.
        - symbolic: symbols in the place of sizes that vary.
        - counted: masks of dropout are functions of a seed.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it without annotations
        self._notes, self._memo, self._memory, self._made = notes, memo, memory, made
        self._views: list[torch.Tensor] = []  # of real tensors
        self._symbolic = symbolic
        self._random = CountedRandom(self._run) if counted else None

    def __enter__(self) -> OpWatch:
        self._recording = private.Recording()
        self._dataflow, self._known = Dataflow(private.tracer_graph()), dict[fx.Node, Any]()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def refuse_higher_order(self, name: str) -> None:
        """Raise a Refusal for a call of a higher-order op."""
        raise Refusal(
            f"{name} is a higher-order op, which can't be part of a plan: module {self._notes.module}, at "
            f"{caller_line()}. Modules that call none can be planned, so call it in a module of its own",
            MakeIslands([self._notes.around()]),
        )

    def _run(self, op: Any, *args: Any) -> Any:
        return self.__torch_dispatch__(op, (), args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, private.HigherOrderOperator):
            self.refuse_higher_order(str(func))
        if private.is_of_dtensors(types):
            return NotImplemented
        if func.namespace == "c10d":  # whose fake kernels draw from Python's generator
            raise UnsupportedModel(
                f"forward runs the collective {func}, at {caller_line()}; those of "
                "torch.distributed._functional_collectives can be ops of a plan"
            )
        if private.is_wait(func):  # the op that begins a collective is over when it returns, in a plan
            func = torch.ops.aten.alias.default
        instead = None if self._random is None else self._random.instead(func, args)
        if instead is not None:
            return instead
        if func is aten._ctc_loss.Tensor:
            longest = self._run(private.READ_SCALAR, self._run(aten.max.default, args[3]))
            return private.ctc_loss(args[0], args[1], args[2], args[3], longest, *args[4:])
        for tensor in written_by(func, args, kwargs):
            if not isinstance(tensor, private.FakeTensor):  # ops on real tensors alone do run
                self._memory.keep(tensor, self._notes.around())
            elif any(storage_key(view) == storage_key(tensor) for view in self._views):
                raise UnsupportedModel(
                    f"forward writes to a view of a tensor that is no buffer (.data, .detach(), a slice), in module "
                    f"{self._notes.module}, at {caller_line()}; a planned step would not. "
                    "Register the tensor as a buffer"
                )
        if func is private.READ_DEVICE and isinstance(args[0], private.FakeTensor):
            return args[0].device
        if func in (private.READ_SCALAR, aten.item.default):  # the second under inference mode
            node = private.tracer_node(args[0])
            if node is not None or not isinstance(args[0], private.FakeTensor):
                seen = self._notes.next_seen(args[0])
                value = self._read_attribute(args[0]) if node is None else self._read(args[0], node, seen)
                self._notes.answers.append(private.number_here(value))
                return value
        trace = functools.partial(self._trace, func, args, kwargs)
        if private.has_shape_of_data(func):
            outputs = trace()
        else:
            outputs = self._memo.run(self._recording, func, args, kwargs, trace)
        self._made.note(tensors_of(outputs))
        if func is torch.ops.aten.add.Tensor and self._notes.template is not None:
            outputs = self._summed(outputs, *args, **kwargs)
        if any(result.alias_info is not None for result in func._schema.returns):
            if isinstance(args[0], torch.Tensor) and not isinstance(args[0], private.FakeTensor):
                self._views += [t for t in tensors_of(outputs) if isinstance(t, private.FakeTensor)]
        return outputs

    def _summed(self, total: torch.Tensor, first: Any, second: Any, alpha: Any = 1) -> torch.Tensor:
        """The result of an addition in backward, with the strides that it has where eager adds in place."""
        number, self._notes.additions = self._notes.additions, self._notes.additions + 1
        tensors = isinstance(first, private.FakeTensor) and isinstance(second, private.FakeTensor)
        if alpha != 1 or not tensors or first._is_view() or first.stride() == total.stride():
            return total
        alike = first.shape == second.shape == total.shape and first.dtype == second.dtype == total.dtype
        if not alike or not is_dense(first) or in_python_backward():
            return total
        if number in self._notes.in_place:
            return private.with_layout(total, stride=first.stride())
        nodes = private.tracer_node(total), private.tracer_node(first)
        if nodes[0] is not None and nodes[1] is not None:
            self._notes.odd_sums.append((number, nodes[0], nodes[1]))
        return total

    def _trace(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = [t for t in written_by(func, args, kwargs) if isinstance(t, private.FakeTensor)]
        before = self._memory_sizes(written)
        outputs = func(*args, **kwargs)
        exchanges = getattr(func, "overloadpacket", None) is torch.ops.aten.set_
        if exchanges or before != self._memory_sizes(written):
            raise UnsupportedModel(
                f"{func} changes the memory of a tensor, or its size, in module {self._notes.module}, at "
                f"{caller_line()}; a planned step would not. Make the tensor in its final shape, without resize_() and "
                "set_(), also where it is given as out="
            )
        if private.has_shape_of_data(func) and private.has_symbolic_shape(outputs):
            return self._with_shapes_of_data(func, args, outputs)
        return with_noted_results(func, args, kwargs, corrected_outputs(func, args, outputs))

    def _with_shapes_of_data(self, func: Any, args: Any, outputs: Any) -> Any:
        """The results of an op whose shapes depend on data: as they are for the data of this call's inputs.

        Raises UnsupportedModel where the shapes depend on parameters, or on random numbers.
        """
        if func in (aten.index.Tensor, aten.masked_select.default):
            return self._selected(func, args, outputs)
        why = (
            f"the shape of a result depends on data: {func} in module {self._notes.module}, at {caller_line()}. "
            "Compute it outside of the model and pass it in, or use operations whose result shapes are fixed, such as "
            "torch.where"
        )

        def sized(output: Any) -> Any:
            node = private.tracer_node(output) if private.has_symbolic_shape(output) else None
            if node is None:
                return output
            closure = self._dataflow.behind(node)
            if not self._derives_from_inputs(closure) or any(map(draws, closure)):
                raise UnsupportedModel(why)
            real = self._real(closure, node)
            with self._recording.unwritten():
                size, stride = self._symbolic.shaped(len(self._notes.scalar_reads), real, output)
            fixed = tuple(None if private.is_symbolic(n) else n for n in size)
            self._notes.scalar_reads.append(Guard(node, fixed, self._notes.place(caller_line())))
            return private.with_layout(output, size=size, stride=stride)

        return pytree.tree_map(sized, outputs)

    def _selected(self, func: Any, args: Any, outputs: torch.Tensor) -> torch.Tensor:
        """What masks select. Its shape depends on how many elements of the masks are true, and on no other data."""
        x, picks = args[:2]
        if func is aten.masked_select.default:
            picks = [self._run(aten.expand.default, picks, torch.broadcast_shapes(x.shape, picks.shape))]
        masks = [pick.dtype in (torch.bool, torch.uint8) if pick is not None else False for pick in picks]
        found = [self._run(aten.nonzero.default, p) if mask else p for p, mask in zip(picks, masks, strict=True)]
        with self._recording.unwritten():
            if func is aten.masked_select.default:
                like = x.new_empty(found[0].shape[:1])
            else:
                columns = [p.unbind(1) if mask else (p,) for p, mask in zip(found, masks, strict=True)]
                like = func(x, [column for of_one in columns for column in of_one])
        return private.with_layout(outputs, size=like.shape, stride=like.stride())

    def _derives_from_inputs(self, closure: Sequence[fx.Node]) -> bool:
        """Whether nodes depend on no parameter."""
        return not any(n.op == "placeholder" and n.name not in self._notes.sources for n in closure)

    def _real(self, closure: Sequence[fx.Node], wanted: fx.Node) -> torch.Tensor:
        """What a closure computes for a node on the call's inputs, the buffers and the constants."""
        constants = private.tracer_constants()

        def source(node: fx.Node) -> torch.Tensor:
            if node.op == "placeholder":  # the sample may be elsewhere than it will be
                return self._notes.sources[node.name].to(node.meta["val"].device)
            return getattr(constants, str(node.target))  # type: ignore[no-any-return]

        # A constant may be written to while forward is traced. Results that stay as they are serve other closures.
        changes = any(n.op == "get_attr" or written_nodes(n) for n in closure)
        return computed(closure, [wanted], source, None if changes else self._known)[wanted]  # type: ignore[no-any-return]

    def _memory_sizes(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        with self._recording.unwritten():
            return [private.key_of_size(t.untyped_storage().nbytes()) for t in tensors]

    def _read_attribute(self, tensor: torch.Tensor) -> Any:
        """A number read from a tensor that is a plain attribute of a module."""
        where = self._notes.place(caller_line())
        for module, path in self._notes.names.items():
            for key, held in vars(module).items():
                if held is tensor:
                    if any(storage_key(written) == storage_key(tensor) for written in self._memory.written):
                        raise Refusal(
                            f"forward writes to the tensor attribute {key} of a module, and reads a number from it: "
                            f"module {where}. Register it as a buffer",
                            MakeIslands([self._notes.around()]),
                        )
                    value = tensor.item()
                    self._notes.attribute_reads.append(AttributeRead(path, key, value, where))
                    return value
        raise UnsupportedModel(
            f"forward reads a number from a tensor that is neither an argument, nor a buffer, nor an attribute: module "
            f"{where}. Register the tensor as a buffer"
        )

    def _read(self, tensor: torch.Tensor, node: fx.Node, seen: bool | None) -> Any:
        closure = self._dataflow.behind(node)
        certain = answer_to_any_draw(closure)
        if certain is not None:
            return certain
        source = caller_line()
        if not self._derives_from_inputs(closure):
            branches = tensor.dtype is torch.bool and self._notes.template is None
            if seen is None or not branches:
                raise Refusal(
                    f"control flow depends on computed data: module {self._notes.module} "
                    f"reads a number that depends on parameters, at {source}. Compute it outside of the model and pass "
                    "it in, or use tensor operations such as torch.where",
                    TakeBranches([self._notes.around()]) if branches else None,
                )
            # The branch that forward took when it ran. The boolean is copied, for it may be written to later.
            self._notes.decided.append((tensor.clone(), seen, self._notes.place(source)))
            return bool(seen)
        if any(map(draws, closure)):
            raise UnsupportedModel(
                f"control flow depends on random numbers: module {self._notes.module}, "
                f"at {source}. Draw them outside of the model and pass them in"
            )
        value = self._real(closure, node).item()
        if seen is not None and seen != value:
            raise UnsupportedModel(f"{OTHER_READS}, at {source}")
        number = self._symbolic.number(len(self._notes.scalar_reads), value)
        varies = private.is_symbolic(number)
        self._notes.scalar_reads.append(Guard(node, None if varies else value, self._notes.place(source)))
        if varies:
            self._recording.bind_number(number, node)
        return number

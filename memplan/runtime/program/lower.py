"""From a schedule to a program: two plain fx GraphModules, one for forward and one for backward.

A recompute is a repeated node. Memory is freed by fx's own `x = None` after the last use, which is where the schedule
drops the value. Views cost nothing: they are derived again wherever an op needs them. Both modules are boxed: they take
one list and empty it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.analysis.traced import MetaTensor, Traced
from memplan.capture.ops import op_facts
from memplan.capture.ops.dataflow import written_nodes
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.ops.layout import tensors_of
from memplan.capture.ops.sizes import Expression, expressions_in, put
from memplan.capture.trace.collector import without_collections
from memplan.problem.addresses import place_host_copies
from memplan.problem.schedule import (
    Boundary,
    Compute,
    Drop,
    DropHost,
    DropRng,
    Offload,
    Prefetch,
    SaveRng,
    Schedule,
    Stay,
    SurfaceGrads,
    Wait,
)
from memplan.problem.steering import Steering
from memplan.runtime.host.arena import enter_arena, leave_arena, steer_arena
from memplan.runtime.host.transfers import (
    contents,
    leave,
    offload,
    offload_gradient,
    on_host,
    open_slab,
    prefetch,
    stayed,
    viewed_as,
    wait,
)
from memplan.runtime.program.bindings import binding
from memplan.runtime.program.check import TRACED, as_traced, is_read
from memplan.runtime.program.collectives import GRADIENT, complete, start
from memplan.runtime.program.decisions import decide
from memplan.runtime.program.gathers import gather, gathered, open_gathers, release
from memplan.runtime.program.rng import ReplayedIsland, held_rng, replay_all, replay_random, save_rng

Grads = Literal["surface", "edges"]
Instance = dict[fx.Node, fx.Node]  # node of the trace -> node of the program, for one live value


def get_state(store: Any, names: tuple[str, ...]) -> list[torch.Tensor]:
    """The parameters and buffers of these names, looked up when the program begins."""
    return [tensor if private.is_ordinary(tensor) else private.plain(tensor) for tensor in store.tensors(names)]


def made_meta(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the meta device, of which an op reads only the layout."""
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def surface_grads(sink: Any, names: tuple[str, ...], gradients: tuple[torch.Tensor, ...]) -> None:
    """Hand final gradients to autograd."""
    sink(names, gradients)


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered plan.

    - forward: takes [store, sizes, *inputs] and returns [*outputs, *saved].
    - backward: takes [store, sink, *tangents, *saved] and returns the gradients of the inputs that require grad, then,
      under grads="edges", those of parameters.
    - forward_inputs: positions of the inputs that forward takes.
    - sizes: what the numbers in `sizes` are; none where the program is for one size.
    - backward_inputs: positions of the inputs that backward reads.
    - backward_state: parameters and buffers that backward reads or gives gradients to.
    - backward_outputs: positions of the outputs whose memory backward reads.
    - input_outputs: outputs that are inputs themselves: position of the output -> position of the input.
    - output_count: the number of outputs.
    - tangents: output index of each tangent.
    - input_gradients: position of the input that each of the first results of backward belongs to.
    - parameter_gradients: names of the parameters that the other results of backward belong to.
    - grads: what `lower` was told.
    - collectives: events that other ranks have to run in the same order, as in `Collectives`.
    - staying: parameters of which copies stay on the device between steps.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_inputs: tuple[int, ...]
    sizes: tuple[Expression, ...]
    backward_inputs: tuple[int, ...]
    backward_state: tuple[str, ...]
    backward_outputs: tuple[int, ...]
    input_outputs: dict[int, int]
    output_count: int
    tangents: tuple[int, ...]
    input_gradients: tuple[int, ...]
    parameter_gradients: tuple[str, ...]
    grads: Grads
    collectives: tuple[str, ...]
    staying: tuple[str, ...]


def lower(
    schedule: Schedule,
    traced: Traced,
    grads: Grads = "surface",
    checks: bool = False,
    steering: Steering | None = None,
) -> Program:
    """Write `schedule` as a program. The schedule must have passed `simulate`.

    - grads: "surface" hands each gradient over in the middle of backward, as soon as it is final; "edges" returns all
      of them from backward.
    - checks: the program compares results whose sizes vary with the traced ones.
    - steering: leads what the program asks the device's allocator for through an arena.
    """
    with without_collections():
        return _Lowering(schedule, traced, grads, checks, steering).program()


def _is_seen_as(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a view is one tensor of this dtype, and not several, as of unbind."""
    tensor = node.meta["val"]
    return isinstance(tensor, torch.Tensor) and tensor.dtype == dtype


class _Side:
    """One of the two graphs, while it is written."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.state_names: list[str] = []
        self.residents: Instance = {}
        self.numbers: dict[Expression, fx.Node] = {}
        self.views: dict[Any, fx.Node] = {}  # by what they are views of, and their layout
        self._last_placeholder: fx.Node | None = None
        self._state: fx.Node | None = None
        self.store = self.placeholder("store")

    def placeholder(self, name: str) -> fx.Node:
        if self._last_placeholder is None:
            node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self._last_placeholder):
                node = self.graph.placeholder(name)
        self._last_placeholder = node
        return node

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, name: str = "") -> fx.Node:
        return self.graph.create_node("call_function", target, args, kwargs or {}, name=name or None)

    def constant(self, name: str, tensor: torch.Tensor) -> fx.Node:
        self.constants[name] = tensor
        return self.graph.get_attr(name)

    def state(self, name: str) -> fx.Node:
        if self._state is None:
            with self.graph.inserting_after(self._last_placeholder):
                self._state = self.call(get_state, (self.store, ()))
        self.state_names.append(name)
        return self.call(operator.getitem, (self._state, len(self.state_names) - 1), name=name)

    def module(self, results: Sequence[fx.Node], name: str) -> fx.GraphModule:
        if self._state is not None:
            self._state.args = (self.store, tuple(self.state_names))
        self.graph.output(list(results))
        private.boxed(self.graph)
        root = torch.nn.Module()
        for attribute, tensor in self.constants.items():
            root.register_buffer(attribute, tensor, persistent=False)
        module = fx.GraphModule(root, self.graph, class_name=name)
        self.graph.lint()
        return module


class _Lowering:
    def __init__(
        self, schedule: Schedule, traced: Traced, grads: Grads, checks: bool, steering: Steering | None
    ) -> None:
        self.schedule, self.traced, self.graph = schedule, traced, traced.graph
        self.grads, self.checks = grads, checks
        self.outside = frozenset() if steering is None else steering.outside
        self.steered = {index for moves in (() if steering is None else steering.moves) for index in moves}
        self.returned: dict[str, fx.Node] = {}  # gradients of parameters that backward returns
        self.collectives: list[str] = []
        self.gradients = {g.value: g for g in traced.gradients}
        self.decisions = {traced.outputs[d.output].value: d for d in traced.decisions}
        self.side = self.forward = _Side()
        self.sizes = self.forward.placeholder("sizes")
        self.expressions: list[Expression] = []  # what is in them
        self.live: dict[int, Instance] = {}
        self.rng: dict[int, fx.Node] = {}
        self.ran: set[int] = set()
        self.inputs: dict[int, fx.Node] = {}  # by position, in the forward program
        self.carried: dict[fx.Node, fx.Node] = {}  # node of the forward program -> its placeholder in the backward one
        self.carried_values: set[int] = set()
        self.tangents: tuple[int, ...] = ()
        self.outputs: list[fx.Node] = []
        self.host_memory = place_host_copies(self.graph, schedule)
        self.slab: fx.Node | None = None
        self.host_copies: dict[int, fx.Node] = {}  # tickets of copies to the host
        self.fetches: dict[int, fx.Node] = {}  # tickets of copies to the device that nobody waited for yet
        self.started: dict[int, tuple[fx.Node, ...]] = {}  # collectives under way, and what they read
        self.gathers: fx.Node | None = None
        self.staying: dict[int, fx.Node] = {}  # what is on the device between steps, and what it held at the beginning
        self.awaited: set[int] = set()  # of these, what the first step may still be fetching

    def program(self) -> Program:
        for index, step in enumerate(self.schedule):
            if index in self.steered:
                self.side.call(steer_arena, (self.side.store, index))
            match step:
                case Compute(op) if op in self.outside:
                    self.side.call(leave_arena, (self.side.store,))
                    self._compute(op, self._dead_after(index))
                    self.side.call(enter_arena, (self.side.store,))
                case Compute(op):
                    self._compute(op, self._dead_after(index))
                case Drop(value):
                    self._drop(value)
                case SaveRng(op):
                    keep = held_rng if self._replaying(op)[0] is replay_all else save_rng
                    self.rng[op] = self.side.call(keep, (self._replaying(op)[1],))
                case DropRng(op):
                    del self.rng[op]
                case Boundary():
                    self._cross_boundary()
                case SurfaceGrads(values):
                    self._surface(values)
                case Stay(value):
                    self._stay(value)
                case Offload(value):
                    self._offload(value, index)
                case Prefetch(value):
                    self._prefetch(value)
                case Wait(value):
                    self._wait(value)
                case DropHost(value):
                    del self.host_copies[value]
        return self._finish()

    def _dead_after(self, index: int) -> set[int]:
        """Values that are dropped at once after the run at `index`."""
        dead = set()
        for step in self.schedule[index + 1 :]:
            if isinstance(step, Drop):
                dead.add(step.value)
            elif not isinstance(step, DropRng):
                break
        return dead

    # -- tensors ----------------------------------------------------------------------------------------------------

    def _tensor(self, node: fx.Node, value: int) -> fx.Node:
        """The program's node for `node` of the trace, as a view of `value`'s memory."""
        if self.graph.values[value].resident and not self.graph.values[value].fetched:
            return self._look(node, self.side.residents, value)
        return self._look(node, self.live[value], value)

    def _look(self, node: fx.Node, instance: Instance, value: int) -> fx.Node:
        if node in instance:
            if instance[node].graph is not self.side.graph:
                self.carried_values.add(value)
                instance[node] = self._carry(instance[node])
            return instance[node]
        if node in self.traced.residents:
            instance[node] = self._resident(node)
            return instance[node]
        parent = self.traced.parents[node]
        if (alike := self._seen_alike(node)) is not None:
            found = self._look(alike, instance, value)
        elif node.target in op_facts.SAME_TENSOR or written_nodes(node):
            found = self._look(parent, instance, value)
        elif (shortcut := self._strided(node, parent, instance, value)) is not None:
            found = shortcut
        else:
            base, sizes = self._look(parent, instance, value), self.traced.sizes
            call = (node.args, node.kwargs)
            if sizes is not None and node.name in sizes.nodes:
                call = put((sizes.nodes[node.name].args, sizes.nodes[node.name].kwargs), self._number)
            args, kwargs = fx.map_arg(call, lambda n: n if n.graph is self.side.graph else base)
            found = self.side.call(binding(node.target, node.args, node.kwargs), args, kwargs)
        instance[node] = found
        return found

    def _seen_alike(self, node: fx.Node) -> fx.Node | None:
        """The tensor that a view is a view of, if it has the same layout as the view: `w` for `w.t().t()`.

        With dimensions of one element, whose strides vary from call to call, the view is made.
        """
        seen, sizes = node.meta["val"], self.traced.sizes
        if not isinstance(seen, torch.Tensor) or 1 in seen.shape or seen.is_complex() or sizes is not None:
            return None
        above = self.traced.parents.get(node)
        while above is not None and not (_is_seen_as(above, seen.dtype) and self._layout(above) == self._layout(node)):
            above = self.traced.parents.get(above)
        return above

    def _strided(self, node: fx.Node, parent: fx.Node, instance: Instance, value: int) -> fx.Node | None:
        """A view of an op's result, or a chain of them, in one step, by the call that takes Python the least time."""
        root = nearest = parent
        while root in self.traced.parents:
            root = self.traced.parents[root]
        if node.target is operator.getitem or root in self.traced.residents or root not in self.traced.roots[value]:
            return None
        seen, made = node.meta["val"], root.meta["val"]
        if not isinstance(seen, torch.Tensor) or seen.dtype != made.dtype or seen.is_complex():
            return None
        while nearest is not root and (nearest not in instance or not _is_seen_as(nearest, made.dtype)):
            nearest = self.traced.parents[nearest]
        base, (shape, stride, offset) = self._look(nearest, instance, value), self._layout(node)
        key = (base, *shape, *stride, offset)
        if key not in self.side.views:
            self.side.views[key] = self.side.call(torch.as_strided, (base, shape, stride, offset))
        return self.side.views[key]

    def _layout(self, node: fx.Node) -> tuple[list[Any], list[Any], Any]:
        """(shape, stride, offset) of a tensor of the trace, in numbers of the program."""
        sizes, tensor = self.traced.sizes, node.meta["val"]
        found = None if sizes is None or node.name not in sizes.results else sizes.results[node.name][0]
        if found is None:
            return list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        shape, stride, offset = put((list(found.shape), list(found.stride), found.offset), self._number)
        return shape, stride, offset

    def _number(self, expression: Expression) -> fx.Node:
        """The program's number for an expression."""
        if expression not in self.expressions:
            self.expressions.append(expression)
        place = self.expressions.index(expression)
        if expression not in self.side.numbers:
            self.side.numbers[expression] = self.side.call(operator.getitem, (self._carry(self.sizes), place))
        return self.side.numbers[expression]

    def _resident(self, node: fx.Node) -> fx.Node:
        source = self.traced.residents[node]
        if source.kind == "constant":
            return self.side.constant(source.name, self.traced.constants[source.name])
        if source.name in self.traced.reassigned and self.side is not self.forward:  # backward reads the old tensor
            if node not in self.forward.residents:
                self.forward.residents[node] = self.forward.state(source.name)
            return self._carry(self.forward.residents[node])
        if source.kind != "input":
            return self.side.state(source.name)
        if source.position not in self.inputs:
            self.inputs[source.position] = self.forward.placeholder(f"input_{source.position}")
        return self._carry(self.inputs[source.position])

    def _carry(self, node: fx.Node) -> fx.Node:
        """`node` on the present side: what the forward program made is handed to the backward program."""
        if node.graph is self.side.graph:
            return node
        if node not in self.carried:
            self.carried[node] = self.side.placeholder(f"saved_{node.name}")
        return self.carried[node]

    # -- steps ------------------------------------------------------------------------------------------------------

    def _compute(self, index: int, dead: set[int]) -> None:
        op, kernel = self.graph.ops[index], self.traced.kernels[index]
        again = index in self.ran
        self.ran.add(index)
        for value in op.inputs:
            self._arrive(value)
        if op.is_collective:
            self.collectives.append(f"{op.kind} {index}")
        given = kernel.repeat_args if again else kernel.args
        args, kwargs = self._arguments(*self._sized(index, given), kernel.reads)
        again_as, target = None, kernel.target
        if isinstance(target, IslandKernel):
            args, target = (self.side.store, *args), dataclasses.replace(target, again=again)
        if again and op.random:
            state = self.rng[index] = self._carry(self.rng[index])
            again_as, device = self._replaying(index)
            if isinstance(target, IslandKernel):
                again_as = ReplayedIsland(target)
                run = self.side.call(again_as, (state, device, *args), kwargs, op.name)
            else:
                run = self.side.call(again_as, (state, device, target, *args), kwargs, op.name)
        elif op.is_asynchronous:
            run = self.side.call(start, (self.side.store, target, *args), kwargs, op.name)
            self.started[op.outputs[0]] = (run, *(a for a in args if isinstance(a, fx.Node)))
        elif op.is_collective:
            run = self.side.call(private.completed, (target, *args), kwargs, op.name)
        else:
            target = binding(target, given, kernel.kwargs)
            run = self.side.call(target, args, kwargs, op.name)
            if kernel.args is kernel.repeat_args or not again:
                run.meta[TRACED] = kernel.node
        if self.checks and run.target is not again_as:
            self._check(kernel.node, run)
        fresh = self._take_over(index)
        wanted = fresh | {m.value for m in kernel.made if m.value not in self.live and m.value not in dead}
        for made in kernel.made:
            if made.value in wanted:
                tensor = run if made.index is None else self.side.call(operator.getitem, (run, made.index))
                self.live.setdefault(made.value, {})[made.node] = tensor
            if made.value in self.decisions and not again:
                decision = self.decisions[made.value]
                self.side.call(decide, (self.live[made.value][made.node], decision.value, decision.where))

    def _check(self, node: fx.Node, run: fx.Node) -> None:
        """Compare the results of a run that vary with the traced ones."""
        sizes, several = self.traced.sizes, isinstance(node.meta.get("val"), (list, tuple))
        for place, size in enumerate(() if sizes is None else sizes.results.get(node.name, ())):
            if size is None:
                continue
            result = self.side.call(operator.getitem, (run, place)) if several else run
            tensor = node.meta["val"][place] if several else node.meta["val"]
            shape, stride = put((size.shape, size.stride), self._number)
            if not is_read(node, place):
                stride = tuple(None if n == 1 else s for n, s in zip(tensor.shape, stride, strict=True))
            self.side.call(as_traced, (result, tensor.dtype, shape, stride))

    def _replaying(self, index: int) -> tuple[Any, torch.device]:
        """How a random op runs again, and whose generator is put back for it.

        PyTorch's ops draw from the generator of the device that their results are on. That may be the host in a step on
        a GPU. What a user's own op draws from is not known, so all generators are put back for it.
        """
        kernel, device = self.traced.kernels[index], self.traced.device
        if not op_facts.is_of_pytorch(kernel.target) or isinstance(kernel.target, IslandKernel):
            return replay_all, device
        result = tensors_of(kernel.node.meta["val"])[0]
        return replay_random, device if result.device.type == device.type else result.device

    def _sized(self, index: int, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """Arguments of a kernel, with expressions for numbers that depend on sizes."""
        sizes, kernel = self.traced.sizes, self.traced.kernels[index]
        if sizes is None or index not in sizes.kernels:
            return args, kernel.kwargs
        by_name = {node.name: node for node in kernel.node.all_input_nodes}
        call = sizes.kernels[index]
        sized: tuple[Any, Any] = fx.map_arg((call.args, call.kwargs), lambda node: by_name[node.name])
        return sized

    def _arguments(self, args: Any, kwargs: Any, reads: dict[fx.Node, int]) -> tuple[Any, Any]:
        def argument(thing: Any) -> Any:
            if isinstance(thing, Expression):
                return self._number(thing)
            if isinstance(thing, fx.Node):
                return (
                    self._tensor(thing, reads[thing]) if thing in reads else self._look(thing, self.side.residents, -1)
                )
            if isinstance(thing, MetaTensor) and expressions_in(thing):
                return self.side.call(made_meta, (argument(thing.size), argument(thing.stride), thing.dtype))
            if isinstance(thing, MetaTensor):
                return self.side.constant(f"meta_{len(self.side.constants)}", thing.build())
            if isinstance(thing, (list, tuple)):
                return type(thing)(argument(t) for t in thing)
            return thing

        return tuple(argument(a) for a in args), {k: argument(v) for k, v in kwargs.items()}

    def _take_over(self, index: int) -> set[int]:
        """Let values that are written in place keep the program's nodes of the values that they take over.

        Gives the values that were not live before.
        """
        fresh = set()
        for value in self.graph.ops[index].outputs:
            taken = self.graph.values[value].reuses
            if taken is None or self.graph.values[value].resident:
                continue
            instance = self.live.pop(taken)
            if value not in self.live:
                self.live[value] = instance
                fresh.add(value)
        return fresh

    def _drop(self, value: int) -> None:
        self._arrive(value)
        self.live.pop(value, None)  # an output that nobody reads was never bound
        if self._is_sharded(value):
            self.side.call(release, (self._the_gathers(), self._parameter(value)))

    # -- copies -----------------------------------------------------------------------------------------------------

    def _the_slab(self) -> fx.Node:
        if self.slab is None:
            self.slab = self.side.call(open_slab, (self.side.store, self.host_memory.size_bytes))
        return self._carry(self.slab)

    def _offload(self, value: int, index: int) -> None:
        slab, instance = self._the_slab(), self.live[value]
        tensor = self._look(next(n for n in self.traced.roots[value] if n in instance), instance, value)
        if value in self.graph.gradients:
            self.host_copies[value] = self.side.call(offload_gradient, (slab, tensor))
        else:
            self.host_copies[value] = self.side.call(offload, (slab, tensor, self.host_memory.offsets[index]))

    def _is_sharded(self, value: int) -> bool:
        return self.graph.values[value].resident and self.graph.values[value].home == "sharded"

    def _parameter(self, value: int) -> str:
        """The name of a parameter that lives elsewhere."""
        return next(r.name for n in self.traced.roots[value] if (r := self.traced.residents.get(n)) is not None)

    def _the_gathers(self) -> fx.Node:
        if self.gathers is None:
            self.gathers = self.side.call(open_gathers, (self.side.store,))
        return self._carry(self.gathers)

    def _prefetch(self, value: int) -> None:
        if self._is_sharded(value):
            name = self._parameter(value)
            self.collectives.append(f"gather {name}")
            self.fetches[value] = self.side.call(gather, (self._the_gathers(), name))
            self.live[value] = {}
            return
        if self.graph.values[value].fetched:
            source = self.side.state(self._parameter(value))
        else:
            source = self.host_copies[value] = self._carry(self.host_copies[value])
        self.fetches[value] = self.side.call(prefetch, (self._the_slab(), source))
        self.live[value] = {}

    def _stay(self, value: int) -> None:
        source = self.side.state(self._parameter(value))
        self.staying[value] = self.side.call(contents, (source,))
        self.fetches[value] = self.side.call(stayed, (self._the_slab(), source))
        self.live[value] = {}
        self.awaited.add(value)

    def _arrive(self, value: int) -> None:
        """Wait for the copy of a value that stays between steps, where the value is used first.

        Only a first step has to wait.
        """
        if value in self.awaited:
            self.awaited.remove(value)
            self._wait(value)

    def _leave(self) -> None:
        """Hand what stays to the next step."""
        copies = []
        for value in self.staying:
            self._arrive(value)
            instance = self.live[value]
            copies.append(self._look(next(n for n in self.traced.roots[value] if n in instance), instance, value))
        if copies:
            began = tuple(self._carry(node) for node in self.staying.values())
            self.side.call(leave, (self._the_slab(), began, tuple(copies)))

    def _wait(self, value: int) -> None:
        if value in self.started:
            self.side.call(complete, (self.side.store, *self.started.pop(value)))
            return
        if self._is_sharded(value):
            ticket = self._carry(self.fetches.pop(value))
            whole = self.side.call(gathered, (self._the_gathers(), ticket))
            self.live[value] = dict.fromkeys(self.traced.roots[value], whole)
            return
        slab = self._the_slab()
        if value in self.fetches:
            self._see_copy(value, self.side.call(wait, (slab, self._carry(self.fetches.pop(value)))))
        else:
            self.host_copies[value] = self._carry(self.host_copies[value])
            self.side.call(wait, (slab, self.host_copies[value]))

    def _see_copy(self, value: int, memory: fx.Node) -> None:
        """Bind a value to memory that holds a copy of it."""
        self.live[value] = instance = {}
        for root in self.traced.roots[value]:
            layout = (root.meta["val"].dtype, *self._layout(root))
            instance[root] = self.side.call(viewed_as, (memory, *layout), name=root.name)

    def _see_on_host(self, value: int) -> None:
        """Bind a gradient to its copy on the host, with the strides that its kernel gave it.

        In dimensions of one element, the trace may have other strides.
        """
        roots = self.traced.roots[value]
        self.live[value] = instance = {}
        for root in roots:
            shape, stride, offset = self._layout(root)
            layout = (root.meta["val"].dtype, shape, None if len(roots) == 1 else stride, offset)
            arguments = (self._the_slab(), self.host_copies[value], *layout)
            instance[root] = self.side.call(on_host, arguments, name=root.name)

    def _cross_boundary(self) -> None:
        for output in self.traced.outputs:
            self.outputs.append(self._tensor(output.node, output.value))
        self.side = self.backward = _Side()
        self.sink = self.side.placeholder("sink")
        for value, instance in self.live.items():
            roots = self.traced.roots[value]
            self.live[value] = {n: p for n, p in instance.items() if n in roots}
        with_tangent = [(i, o.tangent) for i, o in enumerate(self.traced.outputs) if o.tangent is not None]
        self.tangents = tuple(i for i, _ in with_tangent)
        for index, value in with_tangent:
            self.live[value] = {self.traced.tangent_nodes[value]: self.side.placeholder(f"tangent_{index}")}

    def _surface(self, values: tuple[int, ...]) -> None:
        names, tensors = [], []
        for value in values:
            if self.graph.values[value].home == "host":
                self._see_on_host(value)
            for name, node in self.gradients[value].nodes:
                kind, _, parameter = name.partition(" ")
                if kind == "parameter":
                    names.append(parameter)
                    tensors.append(self._tensor(node, value))
        if self.grads == "edges":
            self.returned.update(zip(names, tensors, strict=True))
        elif names:
            self.collectives += [GRADIENT + name for name in names]
            self.side.call(surface_grads, (self.sink, tuple(names), tuple(tensors)))

    def _finish(self) -> Program:
        self._leave()
        positions, results = [], []
        for gradient in self.traced.gradients:
            for name, node in gradient.nodes:
                kind, _, input_name = name.partition(" ")
                if kind == "input":
                    results.append(self._tensor(node, gradient.value))
                    positions.append(self._input_position(input_name))
        saved = list(self.carried)
        return Program(
            forward=self.forward.module([*self.outputs, *saved], "Forward"),
            backward=self.backward.module([*results, *self.returned.values()], "Backward"),
            forward_inputs=tuple(self.inputs),
            sizes=tuple(self.expressions),
            backward_inputs=tuple(p for p, n in self.inputs.items() if n in self.carried),
            backward_state=tuple(dict.fromkeys([*self.backward.state_names, *self._parameters_with_gradient()])),
            backward_outputs=tuple(i for i, o in enumerate(self.traced.outputs) if o.value in self.carried_values),
            input_outputs={i: p for i, n in enumerate(self.outputs) for p, node in self.inputs.items() if n is node},
            output_count=len(self.outputs),
            tangents=self.tangents,
            input_gradients=tuple(positions),
            parameter_gradients=tuple(self.returned),
            grads=self.grads,
            collectives=(*self.collectives, *(f"{GRADIENT}{name}, when backward ends" for name in self.returned)),
            staying=tuple(map(self._parameter, self.staying)),
        )

    def _parameters_with_gradient(self) -> list[str]:
        return [name for gradient in self.traced.gradients for name in gradient.parameters]

    def _input_position(self, name: str) -> int:
        return next(r.position for r in self.traced.residents.values() if r.kind == "input" and r.name == name)

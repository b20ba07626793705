"""From a schedule to a program: two plain fx GraphModules, one for forward and one for backward.

A recompute is a repeated node. Memory is freed by fx's own `x = None` after the last use, which is where the schedule
drops the value. Views cost nothing: they are derived again wherever an op needs them. Both modules are boxed: they take
one list and empty it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.analysis.traced import MetaTensor, Traced
from memplan.capture.ops import op_facts
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.ops.layout import tensors_of
from memplan.capture.ops.sizes import Expression, expressions_in, put
from memplan.capture.trace.stand_ins import without_collections
from memplan.problem import schedule as steps
from memplan.problem.packing import place_host_copies
from memplan.problem.schedule import Schedule
from memplan.problem.steering import Steering
from memplan.runtime.host import transfers
from memplan.runtime.host.arena import enter_arena, leave_arena, steer_arena
from memplan.runtime.program.bindings import binding
from memplan.runtime.program.check import TRACED, as_traced, decide, is_read
from memplan.runtime.program.collectives import GRADIENT, complete, gather, gathered, open_gathers, release, start
from memplan.runtime.program.program import Grads, Program, ProgramNodes, Side
from memplan.runtime.program.rng import ReplayedIsland, held_rng, replay_all, replay_random, save_rng


def surface_grads(sink: Any, names: tuple[str, ...], gradients: tuple[torch.Tensor, ...]) -> None:
    """Hand final gradients to autograd."""
    sink(names, gradients)


def lower(
    schedule: Schedule, traced: Traced, grads: Grads = "surface", checks: bool = False, steering: Steering | None = None
) -> Program:
    """Write `schedule` as a program. The schedule must have passed `simulate`.

    - grads: "surface" hands each gradient over in the middle of backward, as soon as it is final; "edges" returns all
      of them from backward.
    - checks: the program compares results whose sizes vary with the traced ones.
    - steering: leads what the program asks the device's allocator for through an arena.
    """
    with without_collections():
        return _Lowering(schedule, traced, grads, checks, steering).program()


class _Lowering(ProgramNodes):
    def __init__(
        self, schedule: Schedule, traced: Traced, grads: Grads, checks: bool, steering: Steering | None
    ) -> None:
        super().__init__(traced)
        self.schedule, self.grads, self.checks = schedule, grads, checks
        self.outside = {} if steering is None else steering.outside
        self.steered = {index for moves in (() if steering is None else steering.moves) for index in moves}
        self.returned: dict[str, fx.Node] = {}  # gradients of parameters that backward returns
        self.collectives: list[str] = []
        self.gradients = {g.value: g for g in traced.gradients}
        self.decisions = {traced.outputs[d.output].value: d for d in traced.decisions}
        self.rng: dict[int, fx.Node] = {}
        self.ran: set[int] = set()
        self.runs = Counter(step.op for step in schedule if isinstance(step, steps.Compute))
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
                case steps.Compute(op) if op in self.outside:
                    self.side.call(leave_arena, (self.side.store, op))
                    self._compute(op, self._dead_after(index))
                    self.side.call(enter_arena, (self.side.store,))
                case steps.Compute(op):
                    self._compute(op, self._dead_after(index))
                case steps.Drop(value):
                    self._arrive(value)
                    self.live.pop(value, None)  # an output that nobody reads was never bound
                    if self._is_sharded(value):
                        self.side.call(release, (self._the_gathers(), self._parameter(value)))
                case steps.SaveRng(op):
                    keep = held_rng if self._replaying(op)[0] is replay_all else save_rng
                    self.rng[op] = self.side.call(keep, (self._replaying(op)[1],))
                case steps.DropRng(op):
                    del self.rng[op]
                case steps.Boundary():
                    self._cross_boundary()
                case steps.SurfaceGrads(values):
                    self._surface(values)
                case steps.Stay(value):
                    source = self.side.state(self._parameter(value))
                    self.staying[value] = self.side.call(transfers.contents, (source,))
                    self.fetches[value] = self.side.call(transfers.stayed, (self._the_slab(), source))
                    self.live[value] = {}
                    self.awaited.add(value)
                case steps.Offload(value) if value in self.graph.gradients:
                    copied = (self._the_slab(), self._whole(value))
                    self.host_copies[value] = self.side.call(transfers.offload_gradient, copied)
                case steps.Offload(value):
                    placed = (self._the_slab(), self._whole(value), self.host_memory.offsets[index])
                    self.host_copies[value] = self.side.call(transfers.offload, placed)
                case steps.Prefetch(value):
                    self._prefetch(value)
                case steps.Wait(value):
                    self._wait(value)
                case steps.DropHost(value):
                    del self.host_copies[value]
                case _:
                    raise TypeError(f"no program can do {step}")
        return self._finish()

    def _dead_after(self, index: int) -> set[int]:
        """Values that are dropped at once after the run at `index`."""
        dead = set()
        for step in self.schedule[index + 1 :]:
            if isinstance(step, steps.Drop):
                dead.add(step.value)
            elif not isinstance(step, steps.DropRng):
                break
        return dead

    def _compute(self, index: int, dead: set[int]) -> None:
        op, kernel = self.graph.ops[index], self.traced.kernels[index]
        again = index in self.ran
        self.ran.add(index)
        for value in op.inputs:
            self._arrive(value)
        if op.is_collective:
            self.collectives.append(f"{op.kind} {index}")
        given = kernel.repeat_args if again else kernel.args
        args, kwargs = self._arguments(index, given)
        again_as, target = None, kernel.target
        if isinstance(target, IslandKernel):
            args = (self.side.store, *args)
            target = dataclasses.replace(target, again=again, repeated=self.runs[index] > 1)
        if again and op.random:
            state = self.rng[index] = self.carry(self.rng[index])
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
            shape, stride = put((size.shape, size.stride), self.number)
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

    def _arguments(self, index: int, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """The arguments of a kernel, of which these are the positional ones, as nodes of the program."""
        sizes, kernel = self.traced.sizes, self.traced.kernels[index]
        kwargs, reads = kernel.kwargs, kernel.reads
        if sizes is not None and index in sizes.kernels:  # numbers among them depend on sizes
            by_name = {node.name: node for node in kernel.node.all_input_nodes}
            args, kwargs = fx.map_arg(sizes.kernels[index], lambda node: by_name[node.name])

        def argument(thing: Any) -> Any:
            if isinstance(thing, Expression):
                return self.number(thing)
            if isinstance(thing, fx.Node):
                return self.tensor(thing, reads[thing]) if thing in reads else self.look(thing, self.side.residents, -1)
            if isinstance(thing, MetaTensor) and expressions_in(thing):
                of = {"dtype": thing.dtype, "device": "meta"}
                return self.side.call(torch.empty_strided, (argument(thing.size), argument(thing.stride)), of)
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

    def _the_slab(self) -> fx.Node:
        if self.slab is None:
            self.slab = self.side.call(transfers.open_slab, (self.side.store, self.host_memory.size_bytes))
        return self.carry(self.slab)

    def _whole(self, value: int) -> fx.Node:
        """A tensor from which all of a value's memory is reached."""
        instance = self.live[value]
        return self.look(next(n for n in self.traced.roots[value] if n in instance), instance, value)

    def _is_sharded(self, value: int) -> bool:
        return self.graph.values[value].resident and self.graph.values[value].home == "sharded"

    def _parameter(self, value: int) -> str:
        """The name of a parameter that lives elsewhere."""
        return next(r.name for n in self.traced.roots[value] if (r := self.traced.residents.get(n)) is not None)

    def _the_gathers(self) -> fx.Node:
        if self.gathers is None:
            self.gathers = self.side.call(open_gathers, (self.side.store,))
        return self.carry(self.gathers)

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
            source = self.host_copies[value] = self.carry(self.host_copies[value])
        self.fetches[value] = self.side.call(transfers.prefetch, (self._the_slab(), source))
        self.live[value] = {}

    def _arrive(self, value: int) -> None:
        """Wait for the copy of a value that stays between steps, where the value is used first.

        Only a first step has to wait.
        """
        if value in self.awaited:
            self.awaited.remove(value)
            self._wait(value)

    def _wait(self, value: int) -> None:
        if value in self.started:
            self.side.call(complete, (self.side.store, *self.started.pop(value)))
            return
        if self._is_sharded(value):
            ticket = self.carry(self.fetches.pop(value))
            whole = self.side.call(gathered, (self._the_gathers(), ticket))
            self.live[value] = dict.fromkeys(self.traced.roots[value], whole)
            return
        slab = self._the_slab()
        if value not in self.fetches:
            self.host_copies[value] = self.carry(self.host_copies[value])
            self.side.call(transfers.wait, (slab, self.host_copies[value]))
            return
        memory = self.side.call(transfers.wait, (slab, self.carry(self.fetches.pop(value))))
        self.live[value] = instance = {}
        for root in self.traced.roots[value]:
            layout = (root.meta["val"].dtype, *self.layout(root))
            instance[root] = self.side.call(transfers.viewed_as, (memory, *layout), name=root.name)

    def _cross_boundary(self) -> None:
        self.outputs = [self.tensor(output.node, output.value) for output in self.traced.outputs]
        self.side = self.backward = Side()
        self.sink = self.side.placeholder("sink")
        for value, instance in self.live.items():
            self.live[value] = {n: p for n, p in instance.items() if n in self.traced.roots[value]}
        for index, output in enumerate(self.traced.outputs):
            if output.tangent is not None:
                tangent = self.side.placeholder(f"tangent_{index}")
                self.live[output.tangent] = {self.traced.tangent_nodes[output.tangent]: tangent}

    def _surface(self, values: tuple[int, ...]) -> None:
        names, tensors = [], []
        for value in values:
            if self.graph.values[value].home == "host":  # a copy with the strides that the kernel gave
                roots = self.traced.roots[value]
                self.live[value] = instance = {}
                for root in roots:  # in dimensions of one element, the trace may have other strides
                    shape, stride, offset = self.layout(root)
                    layout = (root.meta["val"].dtype, shape, None if len(roots) == 1 else stride, offset)
                    arguments = (self._the_slab(), self.host_copies[value], *layout)
                    instance[root] = self.side.call(transfers.on_host, arguments, name=root.name)
            for name, node in self.gradients[value].nodes:
                kind, _, parameter = name.partition(" ")
                if kind == "parameter":
                    names.append(parameter)
                    tensors.append(self.tensor(node, value))
        if self.grads == "edges":
            self.returned.update(zip(names, tensors, strict=True))
        elif names:
            self.collectives += [GRADIENT + name for name in names]
            self.side.call(surface_grads, (self.sink, tuple(names), tuple(tensors)))

    def _finish(self) -> Program:
        copies = []
        for value in self.staying:  # which the next step gets
            self._arrive(value)
            copies.append(self._whole(value))
        if copies:
            began = tuple(self.carry(node) for node in self.staying.values())
            self.side.call(transfers.leave, (self._the_slab(), began, tuple(copies)))
        positions = {f"input {r.name}": r.position for r in self.traced.residents.values() if r.kind == "input"}
        named = [(name, node, g.value) for g in self.traced.gradients for name, node in g.nodes if name in positions]
        results = [self.tensor(node, value) for _, node, value in named]
        with_gradient = [name for gradient in self.traced.gradients for name in gradient.parameters]
        saved = list(self.carried)
        return Program(
            forward=self.forward.module([*self.outputs, *saved], "Forward"),
            backward=self.backward.module([*results, *self.returned.values()], "Backward"),
            forward_inputs=tuple(self.inputs),
            sizes_at=private.evaluator([expression.text for expression in self.expressions]),
            backward_inputs=tuple(p for p, n in self.inputs.items() if n in self.carried),
            backward_state=tuple(dict.fromkeys([*self.backward.state_names, *with_gradient])),
            backward_outputs=tuple(i for i, o in enumerate(self.traced.outputs) if o.value in self.carried_values),
            input_outputs={i: p for i, n in enumerate(self.outputs) for p, node in self.inputs.items() if n is node},
            gradients=(*(positions[name] for name, *_ in named), *self.returned),
            grads=self.grads,
            collectives=(*self.collectives, *(f"{GRADIENT}{name}, when backward ends" for name in self.returned)),
            staying=tuple(map(self._parameter, self.staying)),
        )

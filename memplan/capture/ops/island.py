"""A call that can't be traced, as two ops of a plan, whose Python runs in each step as its author wrote it.

    y = RawTanh.apply(x)        # an autograd function that reads x's memory by NumPy

    forward op:  x -> y, ticket                  backward op:  ticket, y, gradient of y -> gradient of x

- The forward op runs the call under autograd. All that its graph saves goes through a hook, so the graph holds places
  instead of tensors. Results of the op are the outputs and the saved tensors that lie in no input and no output. They
  are values like any others: kept, dropped, made again, or copied to the host.
- The ticket is a tensor of 8 bytes that stands for the graph. The graph lives as long as the ticket.
- The backward op puts the saved tensors back into the graph, by the same hook, and runs it.
- If the call reads an argument several times, the backward op gives the gradient of each use by itself: autograd adds
  them one by one to those of readers outside.
- If the call saves other tensors from step to step (a loop over experts), what it saves is copied to one buffer, which
  has room for the most that runs on the sample saved. What does not fit is held beside the plan, and a warning says so.

Islands are run outside of PyTorch's dispatcher: kernels of ops run beneath autograd, and record no graph.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from memplan import torch_private as private
from memplan.capture.ops.island_call import BackwardFacts, ForwardFacts, IslandCall, SizeRules, with_numbers
from memplan.capture.ops.layout import Layout, Place, PlaceFinder, Source, mark_of, storage_key, whole
from memplan.capture.ops.recorded_graph import (
    Edges,
    RecordedGraph,
    Saver,
    bytes_for,
    graph_of,
    take_attributes,
    ticket_of,
)  # fmt: skip
from memplan.capture.ops.sizes import Numbers
from memplan.capture.ops.ways import MakeNoIsland, OtherResults, Refusal
from memplan.errors import PlanMismatch, UnsupportedModel
from memplan.logs import log
from memplan.torch_private import pytree

Absent = set[tuple[str, int]]  # islands by name, and inputs that get no gradient in a step


class _Enter(torch.autograd.Function):
    """Lets a graph begin at tensors that it does not hold. A leaf would be held by its accumulator.

    copied: of the tensors that the call writes to, it is given copies.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, copied: list[bool], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(copy_of(t) if c else t.view_as(t) for c, t in zip(copied, tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None, None, *(None for _ in grads))


class Island(IslandCall):
    """One call that can't be traced, and its two ops."""

    def _other(self, message: str) -> UnsupportedModel:
        """The error for a run that gives other tensors than planned."""
        return Refusal(message, MakeNoIsland(self.called) if self.at_numbers is None else OtherResults())

    def sized(self, tensors: Sequence[torch.Tensor], static: Sequence[Any]) -> tuple[Island, Island]:
        """This island for many sizes, and at those of a trace. Raises FixedSize.

        static: arguments of the call in the trace. Symbols among them are open.
        """
        if self.varies:
            raise private.FixedSize(f"{self.function} saves other tensors from step to step")
        opened = tuple(place for place in self.integers if private.is_symbolic(static[place]))
        costs = self.forward_cost.with_margin(), self.backward_cost.with_margin()
        island = dataclasses.replace(self, open=opened, forward_cost=costs[0], backward_cost=costs[1])
        numbers = island.numbers(tensors, [static[place] for place in opened])
        island.rules = SizeRules(self.function, (*self.known, self.seen), numbers)
        return island, island._with(numbers)

    def at(self, numbers: Numbers) -> Island:
        """The island of a call with these numbers. The latest one is kept."""
        if self._latest is None or self._latest.at_numbers != numbers:
            self._latest = self._with(numbers)
        return self._latest  # type: ignore[no-any-return]

    def _with(self, numbers: tuple[Any, ...]) -> Island:
        assert self.rules is not None
        forward, backward = self.rules.at(numbers)
        found, static = iter(numbers), list(self.static)
        inputs = with_numbers(self.inputs, lambda _: next(found))
        for place in self.integers:
            static[place] = next(found)
        return dataclasses.replace(
            self, inputs=inputs, static=tuple(static), forward_facts=forward, backward_facts=backward, rules=None,
            at_numbers=numbers,
        )  # fmt: skip

    def forward(self, model: nn.Module, tensors: Sequence[torch.Tensor], again: bool = False) -> list[torch.Tensor]:
        """Run the forward op: its results, then the ticket. again: it has run in this step before.

        Raises a Refusal, and PlanMismatch where it should give what it gave before and would not.
        """
        module = None if self.module is None else model.get_submodule(self.module)
        if module is not None:
            attributes = self.attributes(module)
            if again and self._seen.get(module) != attributes:
                raise PlanMismatch(
                    f"modes or attributes of {self.title} have changed since its forward, and it runs again in "
                    "backward. Change them after backward, or plan for a larger budget"
                )
            self._seen[module] = attributes
        planned = self.forward_facts
        saver = Saver() if self.room is None else Saver(self.room.empty(self.device), tensors, planned)
        outputs, graph, spec = self._recorded(model, module, tensors, saver, again)
        places, results = PlaceFinder({("input", i): t for i, t in enumerate(tensors)}), list[torch.Tensor]()
        of_outputs = tuple(places.of(o, "result", results) if isinstance(o, torch.Tensor) else o for o in outputs)
        made, differentiable = len(results), tuple(edge is not None for edge in graph.ends)
        tensors_saved = [] if saver.buffer is not None else saver.tensors
        of_saved = tuple(places.of(t, "result", results) for t in tensors_saved)
        layouts = tuple(map(Layout.of, results))
        facts = ForwardFacts(of_outputs, spec, differentiable, of_saved, layouts, made, graph.uses)
        if planned is None:
            self.forward_facts = planned = facts
        if facts.returned != planned.returned:
            raise self._other(f"{self.title} returns other tensors than in its first run")
        graph.saved, graph.numbers = of_saved, self.at_numbers
        if saver.buffer is not None:
            self._check_uses(graph.uses, (1,) * len(graph.uses))
            results, graph.saved = [*results[:made], saver.buffer], tuple(saver.places)
            self.tell_of(saver.beside_bytes)
        elif (facts.saved, facts.results, facts.uses) != (planned.saved, planned.results, planned.uses):
            results = self._with_others_saved(planned, facts, results[:made], graph, saver)
        saver.let_go()
        return [*results, ticket_of(graph)]

    def _with_others_saved(
        self, planned: ForwardFacts, facts: ForwardFacts, made: list[torch.Tensor], graph: RecordedGraph, saver: Saver
    ) -> list[torch.Tensor]:
        """Results as planned, where other tensors were saved than that: the graph holds these. made: hold outputs."""
        if self.at_numbers is not None:
            raise self._other(f"{self.title} saves other tensors than rules tell for this size")
        if not self.looked_at:
            self.varies = True
            self.forward_facts = dataclasses.replace(planned, uses=tuple(map(max, planned.uses, facts.uses)))
        else:
            self._check_uses(facts.uses, planned.uses)
        known = {source for source in planned.kept if source[0] == "input" or source[1] < facts.made}
        held = list[Place | torch.Tensor]()
        for place, tensor in zip(facts.saved, saver.tensors, strict=True):
            apart = place.source[0] == "result" and place.source[1] >= facts.made
            held.append(place if place.source in known else tensor if apart else tensor.clone())
        graph.saved = held
        self.tell_of(sum(t.nbytes for t in held if isinstance(t, torch.Tensor)) if self.looked_at else 0)
        return [*made, *(layout.empty(self.device) for layout in planned.results[facts.made :])]

    def _check_uses(self, uses: Sequence[int], planned: Sequence[int]) -> None:
        """Raise a Refusal where gradients would be added in another order than autograd does."""
        more = any(uses[i] > planned[i] for i in (self.shared if self.loose else range(len(uses))))
        if more or (uses != planned and not self.loose):
            raise self._other(f"{self.title} reads its arguments more often, or less often, than before")

    def tell_of(self, beside_bytes: int) -> None:
        if beside_bytes and not self._told:
            self._told.append(self.title)
            log.warning(
                "%s saves %d bytes more for backward than it did when it was planned, so the step may exceed its "
                "budget. Plan with such a batch as the sample",
                self.title, beside_bytes,
            )  # fmt: skip

    def saves(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[int, Any]:
        """How large a buffer has to be for what a run saves, and something that is equal for runs that save alike."""
        saver, module = Saver(), None if self.module is None else model.get_submodule(self.module)
        outputs, graph, _ = self._recorded(model, module, tensors, saver)
        known = set(map(storage_key, tensors))
        room_bytes = bytes_for([t for t in saver.tensors if storage_key(t) not in known])
        layouts = [Layout.of(t) for t in (*saver.tensors, *outputs) if isinstance(t, torch.Tensor)]
        return room_bytes, (layouts, graph.uses, [end is None for end in graph.ends])

    def check_released(self) -> None:
        """Raise a Refusal if something outside still holds the graph of the latest run, though its ticket is gone."""
        if self._entered is not None and self._entered() is not None:
            gc.collect()
            if self._entered() is not None:
                raise Refusal(f"{self.title} leaves a tensor behind that backward could begin at")

    def give_room(self, most_bytes: int) -> None:
        """Copy what the call saves to a buffer of so many bytes from now on."""
        facts = self.forward_facts
        assert facts is not None
        self.room = Layout(torch.uint8, (most_bytes,), (1,), self.device.type)
        kept = [Place(source, self.inputs[source[1]], 0) for source in facts.kept if source[0] == "input"]
        saved = (*kept, Place(("result", facts.made), self.room, 0))
        results = (*facts.results[: facts.made], self.room)
        self.forward_facts = dataclasses.replace(facts, saved=saved, results=results)
        self.varies = self.loose = True

    def _recorded(
        self,
        model: nn.Module,
        module: nn.Module | None,
        tensors: Sequence[torch.Tensor],
        saver: Saver,
        again: bool = False,
    ) -> tuple[list[Any], RecordedGraph, pytree.TreeSpec]:
        """Run the call. Gives its outputs, the graph, and how the outputs were nested. saver: takes what it saves."""
        graph, positions = RecordedGraph(), [i for i, needed in enumerate(self.needs) if needed]
        unpacked = graph.unpacked

        def pack(tensor: torch.Tensor) -> int | torch.Tensor:
            if isinstance(tensor, private.FakeTensor):  # higher-order ops trace their branches
                return tensor
            return saver.add(tensor.detach())

        def unpack(place: int | torch.Tensor) -> torch.Tensor:
            return unpacked[place] if isinstance(place, int) else place

        before, copied = [mark_of(t) for t in tensors], {position for position, _ in self.in_place}
        given = [copy_of(t) if i in copied and not self.needs[i] else t for i, t in enumerate(tensors)]
        records = any(self.needs)
        with self.around(), saved_tensors_hooks(pack, unpack):
            if records:
                anchor = torch.empty(0, device="cpu", requires_grad=True)
                detached = (tensors[i].detach() for i in positions)
                views = _Enter.apply(anchor, [i in copied for i in positions], *detached)  # type: ignore[no-untyped-call]
                self._entered = weakref.ref(views[0].grad_fn)
                for i, tensor in zip(positions, views, strict=True):
                    given[i] = tensor
                graph.begin = [get_gradient_edge(t) for t in views]
            for tensor, own, named in zip(given, tensors, self.named(model), strict=True):
                vars(tensor).update(named if tensor is not own else {})
            attributes = _attributes_of(given)
            returned = self.call(module, self.static, *given)
        if any(storage_key(g) != storage_key(t) for i, (g, t) in enumerate(zip(given, tensors)) if i not in copied):
            raise Refusal(f"{self.title} exchanges the memory of a tensor that it is given (.data = ...)")
        outputs, spec = pytree.tree_flatten(returned)
        results = [o for o in outputs if isinstance(o, torch.Tensor)]
        if any(outputs[place] is not given[position] for position, place in self.in_place):
            raise self._other(f"{self.title} returns other tensors than in its first run")
        if _attributes_of(given) != attributes or any(map(private.attributes_set_on, results)):
            raise Refusal(f"{self.title} sets attributes of tensors that it is given or returns")
        tracked = [isinstance(o, torch.Tensor) and o.requires_grad for o in outputs]
        graph.ends = [get_gradient_edge(o) if t else None for o, t in zip(outputs, tracked, strict=True)]
        edges, uses = Edges(o for o, t in zip(outputs, tracked, strict=True) if t), [0] * len(self.inputs)
        if edges.leaves - {target for edge in graph.begin for target, _ in edge.node.next_functions}:
            raise self._other(f"{self.title} reads a tensor that requires grad, and that it is not given")
        for i, begin in zip(positions, graph.begin, strict=True):
            uses[i] = len(edges.into(begin.node, begin.output_nr)) + any(begin == end for end in graph.ends)
            planned = self.forward_facts
            if uses[i] > 1 and self.room is None and (planned is None or planned.uses[i] > 1):
                graph.diverted[i] = edges.divert(begin)  # its gradients are kept apart
        graph.uses = tuple(uses)
        take_attributes(graph, saver)
        written = {i for i, t in enumerate(tensors) if mark_of(t) != before[i]}
        late = written - (self.writes if self.looked_at else self.buffers)
        there = set() if not late or module is None or again else {*map(id, module.buffers())}  # and no copies
        if not late <= self.own or not there.issuperset(id(tensors[i]) for i in late):
            raise Refusal(f"{self.title} writes to its arguments")
        self.writes |= written - late
        graph.wrote = bool(late)
        return [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs], graph, spec

    def backward(
        self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor], absent: Absent | None = None
    ) -> list[torch.Tensor]:
        """Run the backward op: its results, then 8 bytes that nobody reads. kept: the ticket, then what backward reads.

        absent: takes this island's name with each input that gets no gradient in this step. Their results are zero.

        Raises UnsupportedModel where the gradients are others than in its first run.
        """
        assert self.forward_facts is not None
        graph = graph_of(kept[0])
        sources = dict(zip(self.forward_facts.kept, kept[1:], strict=True))
        saved = [p if isinstance(p, torch.Tensor) else p.seen_in(sources[p.source]) for p in graph.saved]
        pairs = [(end, g) for end, g in zip(graph.ends, grads, strict=True) if end is not None and g is not None]
        tensors = [g for _, g in pairs]
        versions = [t._version for t in (*tensors, *sources.values())]
        needed = [i for i, needs in enumerate(self.needs) if needs]
        with self.around_backward(), graph.holding(saved):
            at_once = torch.autograd.grad(
                [end for end, _ in pairs], graph.begin, tensors, allow_unused=True, retain_graph=not self.looked_at
            )
            del saved
            found = [
                [*([] if whole is None else [whole]), *graph.diverted.get(i, ())]
                for i, whole in zip(needed, at_once, strict=True)
            ]
        if [t._version for t in (*tensors, *sources.values())] != versions:
            raise Refusal(f"the backward of {self.title} writes to what it is given")
        sources |= {("gradient", i): g for i, g in enumerate(grads) if g is not None}
        results, given = list[torch.Tensor](), tuple(g is not None for g in grads)
        if not self.loose:
            places, uses = PlaceFinder(sources), self.forward_facts.uses
            gradients = tuple(
                tuple(places.of(t.detach(), "result of backward", results) for t in of_one)
                + (None,) * (max(1, uses[i]) - len(of_one))
                for i, of_one in zip(needed, found, strict=True)
            )
        else:
            gradients = self._apart(found, needed, sources, results, absent)
        facts = BackwardFacts(given, gradients, tuple(map(Layout.of, results)))
        if self.backward_facts is None:
            self.backward_facts = facts
        elif facts != self.backward_facts:
            raise self._other_gradients("gradients")
        del at_once, found
        results = [copy_of(t) if private.is_held_elsewhere(t) else t for t in results]  # in a list, or a workspace
        return [*results, torch.zeros((), dtype=torch.int64, device="cpu")]

    def _apart(
        self,
        found: Sequence[Sequence[torch.Tensor]],
        needed: Sequence[int],
        sources: Mapping[Source, torch.Tensor],
        results: list[torch.Tensor],
        absent: Absent | None,
    ) -> tuple[tuple[Place | None, ...], ...]:
        """Gradients in memory of their own, as many and in such layouts as in the first run.

        Those that this run does not give are -0.0, which changes no sum.
        """
        assert self.forward_facts is not None
        taken, places = {storage_key(t) for t in sources.values()}, list[tuple[Place | None, ...]]()
        for i, of_one in zip(needed, found, strict=True):
            slots = 1 if self.room is not None else max(1, self.forward_facts.uses[i])
            if not of_one and absent is not None:
                absent.add((self.name, i))
            given = [t.detach() for t in (of_one if len(of_one) <= slots else [functools.reduce(torch.add, of_one)])]
            mine = []
            for gradient in (*given, *(None for _ in range(slots - len(given)))):
                place = len(results)
                layout = self._layout_of(i, gradient, place)
                if gradient is None:
                    gradient = layout.empty(self.device).fill_(-0.0)
                elif Layout.of(gradient) != layout or storage_key(gradient) in taken or whole(gradient) is not gradient:
                    gradient = layout.empty(self.device).copy_(gradient)
                taken.add(storage_key(gradient))
                results.append(gradient)
                mine.append(Place(("result of backward", place), layout, 0))
            places.append(tuple(mine))
        return tuple(places)

    def _layout_of(self, position: int, gradient: torch.Tensor | None, place: int) -> Layout:
        """How the gradient of an input lies. place: which result it is."""
        like = self.inputs[position]
        dense = like._replace(stride=torch.empty_like(like.empty(torch.device("meta")), device="meta").stride())
        if self.owners[position] is not None:
            return dense
        if self.backward_facts is None:
            return dense if gradient is None else Layout.of(gradient)
        layout = self.backward_facts.results[place]
        if gradient is not None and Layout.of(gradient) != layout:
            raise self._other_gradients("strides of gradients")
        return layout

    def _other_gradients(self, what: str) -> UnsupportedModel:
        message = f"the backward of {self.title} gives other {what} than in its first run; remove the plan for it"
        return Refusal(message, None if self.at_numbers is None else OtherResults())


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return Layout.of(tensor).empty(tensor.device).copy_(tensor)


def _attributes_of(tensors: Sequence[torch.Tensor]) -> list[list[tuple[str, int]]]:
    """The attributes of each tensor, by name, and which object each is."""
    return [[(key, id(vars(tensor)[key])) for key in private.attributes_set_on(tensor)] for tensor in tensors]

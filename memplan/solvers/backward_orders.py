"""Other legal orders of the backward ops, for a search in each of them.

Solvers run the backward pass in the order of `Graph.ops`. So another order is another problem with the same values
(`in_order`), and a schedule for that is one for the traced problem, by the traced numbers of its ops. Forward ops keep
their order: others were tried and gain nothing (`neighbourhood`).

An order is legal (`precedence`) where every op still reads the same bits, and nobody outside can tell the difference:

- an op comes after those that make what it reads, and what is written over is read before;
- random ops, and ops that write to what outlives the step, keep their turn; nothing passes an op without a result;
- gradients keep their turn: somebody may reduce each of them as it is handed over;
- what reads a parameter, itself or in what has to be recomputed for it, stays before the hand-over of that
  parameter's gradient: a hook may update the parameter there. Gradients are handed over several at a time, so within a
  batch a gradient may come first.

Kinds of orders: "weights" makes gradients as early as it can. "greedy" runs the op next that adds the least to what is
live of the backward pass, parameters' gradients left out. "moved" is a local search that moves stretches of ops
(`backward_moves`). What the three come to on captured steps (`python -m benchmarks.solvers --orders weights greedy
moved`): overheads at shares of the unplanned activation peak, and the floor in such shares, in traced order and after
the race, with how many of the orders were searched.

    step              searched  floor           0.7             0.5             0.35
    Inception         2         0.322 0.309     4.58%  4.55%    13.03% 12.23%   30.83% 30.10%
    Llama, eager      2         0.250 0.250     0.35%  0.35%     4.63%  4.63%   11.80% 11.01%
    ViT               1         0.261 0.261     0.70%  0.70%     7.30%  7.06%   13.15% 12.91%
    Llama             1         0.207 0.207     0.37%  0.37%     3.43%  3.43%   10.28% 10.05%
    BERT              2         0.166 0.166     2.62%  2.59%     7.24%  7.24%   14.35% 14.22%
    Fourier operator  1         0.384 0.364     1.99%  1.99%    10.67% 10.67%   not met
    GPT-2             1         nothing gained, nor on ResNet-50, DenseNet and T5 (none searched)

Tried beside these:

- Gradients in any turn. Bounds fall far (Inception's at 0.35 from 28.2 to 17.9%), plans do not: Inception's stays at
  30.8% there, GPT-2's everywhere, ResNet-50's goes from 30.6 to 29.6%. Not worth giving up the turn, on which DDP's
  buckets and engines rely.
- Counting forward values, or gradients, in "greedy", and looking a dozen ops ahead to where less is held than before
  (after Liu, 1987). They lift more bounds than they lower; the latter's is the best for Inception at 0.35 (22.6%
  against 23.5%) and behind elsewhere.
- Free order: runs after the boundary moved within a schedule, ops of the backward pass and recomputed ones alike, where
  that lowers a high power of the bytes held, then `replay.fill`; ten thousand moves at each of 32 points, three times.
  From plans in traced order it takes Inception's 30.8% to 30.5% and its 12.9% to 12.7%, BERT's 14.2% to 14.1%; after
  the race next to nothing (Inception's 12.23% to 12.22%), for as long as a search takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from memplan.problem import Graph, Problem
from memplan.schedule import SURFACE_BATCH
from memplan.solvers.backward_moves import moved
from memplan.solvers.flat import flatten

BackwardOrder = tuple[int, ...]  # the ops of the backward pass, counted from the boundary
Precedence = tuple[tuple[int, ...], ...]  # for each of them those that have to run before it


def backward_orders(problem: Problem, kinds: Sequence[str], moves: int) -> Iterator[tuple[str, BackwardOrder]]:
    """Orders of these kinds that differ from the traced one and from one another. moves: tries of "moved"."""
    before = precedence(problem.graph)
    seen = {tuple(range(len(before)))}
    for kind in kinds:
        match kind:
            case "weights":
                order = _weights_first(problem.graph, before)
            case "greedy":
                order = _greedy(problem, before)
            case _:
                order = moved(flatten(problem), before, moves)
        if order not in seen:
            seen.add(order)
            yield kind, order


def in_order(problem: Problem, order: BackwardOrder) -> Problem:
    """The problem with its backward ops in this order. Values keep their numbers."""
    graph, costs, first = problem.graph, problem.costs, problem.graph.boundary
    ops = [*range(first), *(first + op for op in order)]
    return replace(
        problem,
        graph=replace(graph, ops=tuple(graph.ops[i] for i in ops)),
        costs=replace(
            costs,
            time_s=tuple(costs.time_s[i] for i in ops),
            scratch_bytes=tuple(costs.scratch_bytes[i] for i in ops),
        ),
    )


def precedence(graph: Graph) -> Precedence:
    """What has to run before each backward op."""
    ops, values = graph.ops[graph.boundary :], graph.values
    before: list[set[int]] = [set() for _ in ops]
    _order_data(graph, before)
    gradients = [i for i, op in enumerate(ops) if any(values[v].role == "gradient" for v in (*op.inputs, *op.outputs))]
    turns = [
        [i for i, op in enumerate(ops) if op.random],
        [i for i, op in enumerate(ops) if op.effects or not op.recomputable],
        gradients,
    ]
    for turn in turns:
        for earlier, later in pairwise(turn):
            before[later].add(earlier)
    for fence in [i for i, op in enumerate(ops) if not op.outputs]:
        before[fence].update(range(fence))
        for later in range(fence + 1, len(ops)):
            before[later].add(fence)
    _order_reads_of_parameters(graph, gradients, before)
    return tuple(tuple(sorted(row)) for row in before)


def _order_data(graph: Graph, before: list[set[int]]) -> None:
    """Ops come after those that make what they read or write over, and after others that read the latter."""
    first, producer = graph.boundary, graph.producers()
    readers: dict[int, list[int]] = {}
    for i, op in enumerate(graph.ops[first:]):
        for v in op.inputs:
            readers.setdefault(v, []).append(i)
    for i, op in enumerate(graph.ops[first:]):
        taken = [t for v in op.outputs if (t := graph.values[v].reuses) is not None]
        taken += [effect.old for effect in op.effects]
        made_by = (producer[v] for v in (*op.inputs, *taken))
        before[i].update(p - first for p in made_by if p is not None and p >= first)
        before[i].update(reader for v in taken for reader in readers.get(v, ()) if reader != i)


def _order_reads_of_parameters(graph: Graph, gradients: Sequence[int], before: list[set[int]]) -> None:
    """What reads a parameter in traced order before its gradient is made stays before that is handed over."""
    ops = graph.ops[graph.boundary :]
    behind = _parameters_behind(graph)
    read = [_union(behind[v] for v in op.inputs) for op in ops]
    owners = _owners(graph)
    handed_over = _hand_overs(graph, gradients)
    for i in gradients:
        owned = _union(owners[v] for v in ops[i].outputs if v in owners)
        if i in handed_over and owned:
            before[handed_over[i]].update(j for j in range(i) if read[j] & owned)


def _parameters_behind(graph: Graph) -> list[int]:
    """For each value the parameters that making it again may read, and itself where it is one, as a set of bits."""
    values = graph.values
    behind = [1 << _origin(graph, v) if value.role == "parameter" else 0 for v, value in enumerate(values)]
    for op in graph.ops[: graph.boundary]:
        read = _union(behind[v] for v in op.inputs)
        for v in op.outputs:
            behind[v] |= read
    return behind


def _owners(graph: Graph) -> dict[int, int]:
    """The parameters that each gradient belongs to, as a set of bits: by their names; all where those don't tell."""
    parameters = {
        f"parameter {value.name}": 1 << v
        for v, value in enumerate(graph.values)
        if value.role == "parameter" and value.reuses is None
    }
    every = _union(parameters.values())
    found = {}
    for v in graph.gradients:
        names = graph.values[v].name.removeprefix("gradient of ").split(", ")
        found[v] = _union(parameters.get(name, every) for name in names if not name.startswith("input "))
    return found


def _hand_overs(graph: Graph, gradients: Sequence[int]) -> dict[int, int]:
    """The op after which the gradients that each op makes are handed over (`schedule_of`), where it is not the end of
    backward. Gradients with which parameters are updated go by themselves."""
    found: dict[int, int] = {}
    pending: list[int] = []
    count = 0
    for i in gradients:
        made = [graph.values[v] for v in graph.ops[graph.boundary + i].outputs if graph.values[v].role == "gradient"]
        if any(value.updates for value in made):
            found[i] = i
        count += sum(not value.updates for value in made)
        pending.append(i)
        if count >= SURFACE_BATCH:
            found.update((j, i) for j in pending if j not in found)
            pending, count = [], 0
    return found


def _origin(graph: Graph, value: int) -> int:
    """The first version of a value's memory."""
    while (taken := graph.values[value].reuses) is not None:
        value = taken
    return value


def _union(sets: Iterable[int]) -> int:
    found = 0
    for bits in sets:
        found |= bits
    return found


# -- orders -----------------------------------------------------------------------------------------------------------


def _weights_first(graph: Graph, before: Precedence) -> BackwardOrder:
    ops = graph.ops[graph.boundary :]
    only = [bool(op.outputs) and all(graph.values[v].role == "gradient" for v in op.outputs) for op in ops]
    return _listed(before, lambda i: 0 if only[i] else 1, lambda i: None)


def _greedy(problem: Problem, before: Precedence) -> BackwardOrder:
    flat = flatten(problem)
    a, first = flat.arrays, flat.arrays.boundary
    gradients = set(problem.graph.gradients)
    sizes = [
        0 if a.held[v] or v in gradients or a.producer[v] < first else int(size) for v, size in enumerate(a.size_bytes)
    ]
    left: dict[int, int] = {}
    for row in flat.reads[first:]:
        for v in row:
            left[v] = left.get(v, 0) + 1

    def added_bytes(i: int) -> int:
        made, read = flat.makes[first + i], flat.reads[first + i]
        taken = {int(a.taken[v]) for v in made}
        new = sum(sizes[v] for v in made if not a.in_place[v])
        return new - sum(sizes[v] for v in read if left[v] == 1 and v not in taken)

    def ran(i: int) -> None:
        for v in flat.reads[first + i]:
            left[v] -= 1

    return _listed(before, added_bytes, ran)


def _listed(before: Precedence, rank: Callable[[int], int], ran: Callable[[int], None]) -> BackwardOrder:
    """Of the ops that can run next always the one of the lowest rank, the first in traced order of equal ones."""
    waits = [len(row) for row in before]
    after: list[list[int]] = [[] for _ in before]
    for i, row in enumerate(before):
        for j in row:
            after[j].append(i)
    ready = {i for i, count in enumerate(waits) if not count}
    order = []
    while ready:
        chosen = min(ready, key=lambda i: (rank(i), i))
        ready.remove(chosen)
        order.append(chosen)
        ran(chosen)
        for i in after[chosen]:
            waits[i] -= 1
            if not waits[i]:
                ready.add(i)
    return tuple(order)

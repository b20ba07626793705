"""What a schedule makes PyTorch's CUDA allocator reserve: its requests, in the order in which the runtime makes them.

Budgets and peaks count allocated bytes. What a device runs out of is reserved bytes: allocated ones, what rounding
adds, and holes between blocks that no request fits. Where the holes are depends on all requests before. So a whole
training loop is replayed: what the process has reserved when the model is planned, or new parameters, workspaces of
libraries, then up to ten steps. In the first, the optimizer makes its state.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from memplan.problem.caching_allocator import MIN_BLOCK_BYTES, SMALL_BYTES, CachingAllocator, Segment, segment_bytes
from memplan.problem.data import Graph, Problem, Requests, Value
from memplan.problem.schedule import Boundary, Compute, Drop, Prefetch, Schedule, Stay, SurfaceGrads
from memplan.problem.steering import GUARD_BYTES, Moment, Moves, Release, Request, Steering, lead

STATE, GRADIENT = "optimizer's state", "gradient"  # what holds a block, where it is not a value
_MOST_STEPS = 10
_WORTH_IT = 0.99  # of what is reserved without an arena
_ARENA = 1  # the stream that stands for it
_ARENA_ADDRESS, _BEFORE = 1 << 59, 1 << 60  # apart from what is made first; a process's addresses are moved by the last


def reserved_bytes(problem: Problem, schedule: Schedule, expandable: bool, steering: Steering | None = None) -> int:
    """The most that the allocator reserves in a training loop, in bytes.

    The loop begins with parameters and inputs, where the process has them, and with the holes between. What else the
    process holds does not count. Each step's inputs arrive while those of the step before are there; gradients are
    freed at its end. Outputs go then, or all but the loss before backward, as in `loss = model(**batch).loss`:
    whichever reserves more.

    - expandable: the allocator's setting `expandable_segments`.
    - steering: of steps in an arena.
    """
    found = []
    for dropped in {frozenset[int](), _dropped(problem, schedule)}:
        allocator = CachingAllocator(expandable)
        _Loop(problem, schedule, _Heap(allocator, steering), dropped).run(allocator)
        found.append(allocator.peak_reserved_bytes)
    return max(found) - _foreign_bytes(problem)


def holder_of(value: Value) -> str:
    """What a value that is there before a step is called where it holds a block."""
    return f"{value.role} {value.name}"


def state_of(holder: str) -> str:
    """What the optimizer's state of a parameter is called. holder: what the parameter is called."""
    return f"{STATE} of {holder}"


def _held_bytes(problem: Problem) -> Counter[str]:
    """Bytes of blocks that the process holds on the device before the loop, by holders."""
    found = Counter[str]()
    for size_bytes, held, name in (b for s in (problem.requests or Requests()).before for b in s.blocks):
        found[name] += size_bytes * held
    return found


def _away(problem: Problem) -> set[str]:
    """Holders that leave the device before the loop."""
    names = [holder_of(value) for value in problem.graph.values if value.home != "device"]
    return {*names, *map(state_of, names)}


def _has_state(problem: Problem) -> bool:
    """Whether all of the optimizer's state that it has made is on the device, and stays there. Else it counts twice."""
    held, away = _held_bytes(problem), _away(problem)
    made_bytes = sum(n for name, n in (problem.requests or Requests()).update if name < 0)
    return sum(n for name, n in held.items() if name.startswith(STATE) and name not in away) >= made_bytes > 0


def _foreign_bytes(problem: Problem) -> int:
    """What the process holds on the device that is not the loop's."""
    own = {GRADIENT, *_away(problem), *map(holder_of, problem.graph.values)}
    return sum(n for name, n in _held_bytes(problem).items() if name not in own and not name.startswith(STATE))


def _dropped(problem: Problem, schedule: Schedule) -> frozenset[int]:
    """Large outputs that are gone before backward where the caller keeps the loss alone."""
    graph, backward = problem.graph, schedule[schedule.index(Boundary()) :]
    read = {v for step in backward if isinstance(step, Compute) for v in graph.ops[step.op].inputs}
    return frozenset(v for v in graph.outputs if graph.values[v].size_bytes > SMALL_BYTES) - read


def steering_of(problem: Problem, schedule: Schedule, expandable: bool) -> Steering | None:
    """How steps are led through an arena; None where they may have none, can't be led, or reserve no less for it.

    They can't be led where several are in flight, where copies or gathers come and go, and where gradients are taken or
    parameters updated while backward runs.
    """
    taken = problem.takes_gradients or any(value.updates for value in problem.graph.values)
    moving = problem.in_flight > 1 or problem.link is not None or problem.gather is not None
    if moving or taken or (problem.requests is not None and not problem.requests.arena):
        return None
    outside = _makers_of_outputs(problem)
    steering = lead(_microbatches(problem, schedule, outside), expandable, outside)
    if steering is None or not steering.arena_bytes:
        return None
    led_bytes = reserved_bytes(problem, schedule, expandable, steering)
    if led_bytes >= _WORTH_IT * reserved_bytes(problem, schedule, expandable):
        return None
    heaps = [_Heap(CachingAllocator(expandable), one) for one in (steering, None)]
    for heap in heaps:  # in a step before the optimizer's
        _run_microbatches(_Loop(problem, schedule, heap))
    return dataclasses.replace(steering, plugged_bytes=heaps[0].peak_bytes - heaps[1].peak_bytes)


def _run_microbatches(loop: _Loop) -> None:
    """Run a microbatch, and a further one if gradients add up."""
    for _ in range(1 + loop.problem.accumulate):
        microbatch = _Microbatch(loop)
        microbatch.run(loop.forward, 0)
        microbatch.finish(loop.backward)


def _microbatches(problem: Problem, schedule: Schedule, outside: Collection[int]) -> list[list[Moment]]:
    """What microbatches between two optimizer's steps ask an arena for: one, and a further one if they add up."""
    trace = _Trace(CachingAllocator(expandable=True), outside)
    _run_microbatches(_Loop(problem, schedule, trace))
    return [[(index, tuple(events)) for index, events in moments.items()] for moments in trace.microbatches]


def _makers_of_outputs(problem: Problem) -> dict[int, tuple[int, ...]]:
    """Ops that make large blocks for the caller to hold, and their bytes. They may be there as the next step begins."""
    values, producers = problem.graph.values, problem.graph.producers()
    found: dict[int, tuple[int, ...]] = {}
    for value in problem.graph.outputs:
        while (before := values[value].reuses) is not None:
            value = before
        if (maker := producers[value]) is not None and values[value].size_bytes > SMALL_BYTES:
            found[maker] = *found.get(maker, ()), values[value].size_bytes
    return found


class _Heap:
    """PyTorch's allocator, with an arena where there is one. Its pool is like one of another stream.

    - peak_bytes: the most that was allocated, plugs included.
    """

    def __init__(self, allocator: CachingAllocator, steering: Steering | None = None) -> None:
        self._allocator, self._steering, self.restore = allocator, steering, allocator.restore
        self._pool = self.peak_bytes = 0
        self._moves: Moves = {}
        if steering is not None:
            more = segment_bytes(steering.arena_bytes + GUARD_BYTES) - steering.arena_bytes - GUARD_BYTES
            blocks = ((steering.arena_bytes, False, ""), (GUARD_BYTES, True, ""), *[(more, False, "")] * bool(more))
            allocator.restore([Segment(_ARENA_ADDRESS, _ARENA, False, False, blocks)])
        self._plugs: dict[int, int] = {}  # addresses by offset
        self._places: dict[int, list[int]] = {}  # addresses of blocks where outputs will be, by op

    def give_back(self) -> None:
        """Give cached memory back. What was reserved before does not count."""
        self._allocator.empty_cache()
        self._allocator.peak_reserved_bytes = self._allocator.reserved_bytes

    def begin(self, number: int) -> None:
        """A microbatch begins: the first since the optimizer's step, 0, or a further one."""
        for address in self._plugs.values():
            self._allocator.free(address)
        self._plugs.clear()
        if self._steering is not None:
            self._moves = self._steering.moves[min(number, len(self._steering.moves) - 1)]
            self._places = defaultdict(list)
            for op, size_bytes in self._steering.places:
                self._places[op].append(self.allocate(size_bytes))

    def step(self, index: int | None, op: int | None) -> None:
        """The next requests are those of a step of the schedule, and of this op; None: of the caller."""
        self._pool = 0
        if self._steering is None or index is None:
            return
        self._pool = _ARENA
        for size_bytes, offset in self._moves.get(index, ()):
            if size_bytes:
                self._plugs[offset] = self.allocate(size_bytes)
            else:
                self._allocator.free(self._plugs.pop(offset))
        if op in self._steering.outside:
            self._pool = 0
            for address in self._places.pop(op, ()):
                self._allocator.free(address)

    def allocate(self, size_bytes: int) -> int:
        """A name of a new block; 0 for 0 bytes."""
        address = self._allocator.allocate(size_bytes, self._pool)
        self.peak_bytes = max(self.peak_bytes, self._allocator.allocated_bytes)
        return address

    def free(self, address: int) -> None:
        self._allocator.free(address)


class _Trace(_Heap):
    """Notes what microbatches ask an arena for."""

    def __init__(self, allocator: CachingAllocator, outside: Collection[int]) -> None:
        super().__init__(allocator)
        self.microbatches: list[dict[int, list[Request | Release]]] = []  # by step
        self._outside, self._count, self._index, self._inside = outside, 0, 0, False
        self._names: dict[int, int] = {}  # of blocks that would be in the arena, by address

    def begin(self, number: int) -> None:
        self.microbatches.append({})

    def step(self, index: int | None, op: int | None) -> None:
        self._index = self._index if index is None else index
        self._inside = index is not None and op not in self._outside

    def allocate(self, size_bytes: int) -> int:
        address, size_bytes = super().allocate(size_bytes), -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        if self._inside and size_bytes > SMALL_BYTES:
            self._count += 1
            self._names[address] = self._count
            self.microbatches[-1].setdefault(self._index, []).append(Request(self._count, size_bytes))
        return address

    def free(self, address: int) -> None:
        super().free(address)
        if (name := self._names.pop(address, None)) is not None:
            self.microbatches[-1].setdefault(self._index, []).append(Release(name))


def _begin(problem: Problem, allocator: _Heap) -> list[int]:
    """What is there before a loop, as its process has it. Gives the addresses of the sample's inputs.

    What moves to the host has gone, and its memory was given back. Gradients of earlier steps go as the loop begins.
    """
    requests, graph = problem.requests or Requests(), problem.graph
    there = _held_bytes(problem)
    for role in ("parameter", "buffer", "constant"):
        _allocate(graph, role, allocator, there)
    allocator.allocate(max(0, problem.extra_resident_bytes - requests.held_bytes))  # an engine's
    inputs = _allocate(graph, "input", allocator, there)
    found = allocator.restore([dataclasses.replace(s, address=s.address + _BEFORE) for s in requests.before])
    for address in (address for name in _away(problem) for address in found.get(name, ())):
        allocator.free(address)
    allocator.give_back()
    for address in found.get(GRADIENT, ()):
        allocator.free(address)
    names = {holder_of(value) for value in graph.values if value.role == "input"}
    return inputs + [address for name in names for address in found.get(name, ())]


def _allocate(graph: Graph, role: str, allocator: _Heap, there: Collection[str]) -> list[int]:
    """Addresses of new blocks for the values of a role that are on the device when a step begins, unless they exist."""
    values = [v for v in graph.values if v.role == role and v.home == "device" and v.reuses is None]
    return [allocator.allocate(v.size_bytes) for v in values if holder_of(v) not in there]


class _Loop:
    """A training loop: what it holds between steps, and the steps themselves.

    - state: bytes of the optimizer's state, by name.
    - state_count: how many of these a parameter has that is updated in backward, by the bytes of its gradient.
    - stays: addresses of copies that stay on the device, by value.
    - gradients: addresses of gradients that wait for the optimizer, by value.
    - returned: addresses of outputs of the last microbatch, which the caller lets go before the next one.
    - left: addresses of its inputs, which go when the next ones have arrived.
    - dropped: outputs that the caller lets go before backward.
    """

    def __init__(self, problem: Problem, schedule: Schedule, allocator: _Heap, dropped: Collection[int] = ()) -> None:
        self.problem, self.graph, self.allocator, self.dropped = problem, problem.graph, allocator, dropped
        boundary = schedule.index(Boundary())
        self.forward, self.backward = schedule[:boundary], schedule[boundary + 1 :]
        requests = problem.requests or Requests()
        made, has_state = requests.state, _has_state(problem)
        self.state = {name: size for name, size in made.items() if name >= 0 or not has_state}
        self.update_requests = [one for one in requests.update if one[0] in self.state or one[0] not in made]
        updated = Counter(v.size_bytes for v in self.graph.values if v.updates and v.home == "device")
        states = Counter(self.state.values())
        self.state_count = {size: states[size] // count for size, count in updated.items()}
        self.made = False
        self.stays: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.returned: list[int] = []
        self.left = _begin(problem, allocator)  # the sample's
        for size_bytes in requests.workspaces:
            allocator.allocate(size_bytes)

    def run(self, allocator: CachingAllocator) -> None:
        """Run ten steps, or fewer if one begins with what an earlier one began with."""
        seen: list[object] = []
        while len(seen) < _MOST_STEPS and (free := allocator.free_blocks) not in seen:
            seen.append(free)
            self._step()

    def _step(self) -> None:
        """Microbatches up to an optimizer's step, and that step."""
        waiting: list[_Microbatch] = []
        in_flight = self.problem.in_flight
        several = self.problem.accumulate or in_flight > 1
        for _ in range(in_flight + several):  # so that as many are in flight when there are gradients of earlier ones
            waiting.append(_Microbatch(self))
            waiting[-1].run(self.forward, 0)
            if len(waiting) == in_flight:
                waiting.pop(0).finish(self.backward)
        for microbatch in waiting:
            microbatch.finish(self.backward)
        self._update()
        for address in self.gradients.values():
            self.allocator.free(address)
        self.gradients.clear()

    def _update(self) -> None:
        """The optimizer's step, and what else comes after backward."""
        held: dict[int, int] = {}
        held_bytes = most_bytes = 0
        for name, size_bytes in self.update_requests:
            if name in self.state:
                if not self.made and not self.state_count.get(size_bytes):  # else it came in backward
                    self.allocator.allocate(size_bytes)
            elif size_bytes:
                held[name] = self.allocator.allocate(size_bytes)
                most_bytes = max(most_bytes, held_bytes := held_bytes + size_bytes)
            else:
                self.allocator.free(held.pop(name))
        self.made = True
        self.allocator.free(self.allocator.allocate(max(0, self.problem.update_bytes - most_bytes)))


class _Microbatch:
    """What one forward and its backward hold.

    - held: addresses of live values.
    - inputs: addresses of inputs.
    """

    def __init__(self, loop: _Loop) -> None:
        self.loop, self.values, self.allocator = loop, loop.graph.values, loop.allocator
        self.held: dict[int, int] = {}
        for address in loop.returned:
            self.allocator.free(address)
        self.inputs = _allocate(loop.graph, "input", self.allocator, ())
        for address in loop.left:
            self.allocator.free(address)
        self.allocator.begin(int(bool(loop.gradients)))
        loop.returned, loop.left = [], []

    def run(self, steps: Schedule, first: int) -> None:
        """Make the requests of these steps. first: the index of the first of them in the schedule."""
        outputs: tuple[int, ...] = ()
        unread: list[int] = []  # addresses of outputs that nobody reads: the program frees them after the op's inputs
        for index, step in enumerate(steps, first):
            while unread and not isinstance(step, Drop):
                self.allocator.free(unread.pop(0))
            self.allocator.step(index, step.op if isinstance(step, Compute) else None)
            match step:
                case Compute(op):
                    unread = self._compute(op)
                    outputs = self.loop.graph.ops[op].outputs
                case Drop(value):
                    if value in outputs and value in self.held:
                        unread.append(self.held.pop(value))
                    else:
                        self._free((value,))
                case Prefetch(value):
                    self._make(value)
                case Stay(value):
                    if value not in self.loop.stays:
                        self.loop.stays[value] = self.allocator.allocate(self.values[value].size_bytes)
                case SurfaceGrads(values):
                    self._surface(values)
        for address in unread:
            self.allocator.free(address)
        self.allocator.step(None, None)

    def finish(self, backward: Schedule) -> None:
        """Run backward. What is there then, the caller holds: gradients, outputs and inputs."""
        self._free(tuple(self.loop.dropped))
        for value in self.loop.graph.tangents:
            self._make(value)
        self.run(backward, len(self.loop.forward) + 1)
        self._free(self.loop.graph.tangents)
        for value, address in self.held.items():
            if self.values[value].role == "gradient":
                self.loop.gradients[value] = address
            else:
                self.loop.returned.append(address)
        self.loop.left += self.inputs

    def _make(self, value: int) -> None:
        self.held[value] = self.allocator.allocate(self.values[value].size_bytes)

    def _free(self, values: Sequence[int]) -> None:
        for value in values:
            if value in self.held:
                self.allocator.free(self.held.pop(value))

    def _compute(self, index: int) -> list[int]:
        """A run of an op. An output that is there already is made again: gives addresses of what is thrown away."""
        op, costs = self.loop.graph.ops[index], self.loop.problem.costs
        made = [v for v in op.outputs if (taken := self.values[v].reuses) is None or taken in self.held]
        kept = {v: self.held[v] for v in made if v in self.held}
        scratch: dict[int, int] = {}
        new = [v for v in op.outputs if self.values[v].reuses is None]
        requests = costs.requests[index] if costs.requests else ()
        for name, size_bytes in requests:
            if name >= 0:
                self._make(new[name])
            elif size_bytes:
                scratch[name] = self.allocator.allocate(size_bytes)
            else:
                self.allocator.free(scratch.pop(name))
        asked = {name for name, _ in requests}
        for name, value in enumerate(new):
            if name not in asked:
                self._make(value)
        if not requests:
            scratch[-1] = self.allocator.allocate(costs.scratch_bytes[index])
        for value in made:
            if (taken := self.values[value].reuses) is not None:
                self.held[value] = self.held.pop(taken)
        for address in scratch.values():
            self.allocator.free(address)
        thrown_away = [self.held[value] for value in kept]
        self.held |= kept
        return thrown_away

    def _surface(self, values: Sequence[int]) -> None:
        """Hand gradients over. They are freed if they are added to earlier ones, or if somebody takes them."""
        for value in values:
            gradient = self.values[value]
            if gradient.updates and gradient.home == "device" and not self.loop.made:
                for _ in range(self.loop.state_count[gradient.size_bytes]):
                    self.allocator.allocate(gradient.size_bytes)
            self.allocator.free(self.allocator.allocate(gradient.update_bytes))
            if self.loop.problem.takes_gradients or value in self.loop.gradients:
                self._free((value,))

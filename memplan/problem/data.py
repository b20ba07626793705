"""What is to be planned, as plain frozen data: values, ops, their costs and a budget. No torch.

A **value** is one storage's contents between two writes. Views are not values. An **op** is one node that launches a
kernel. Every op of one training step stands in `Graph.ops` in the order in which eager PyTorch runs it: the forward
pass, then the backward pass. A value or an op is named by its index.

Sizes are bytes (of the storage, as the allocator counts them), times are seconds.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from memplan.problem.caching_allocator import Segment

Phase = Literal["forward", "backward"]
Home = Literal["device", "host", "sharded"]
Role = Literal["parameter", "buffer", "input", "constant", "tangent", "activation", "gradient"]
RESIDENT_ROLES: frozenset[str] = frozenset({"parameter", "buffer", "input", "constant"})


def total_s(times: Iterable[float]) -> float:
    """Seconds added one after the other, as a clock adds those of a schedule's steps.

    Python's own `sum` does so before 3.12, and rounds otherwise from then on.
    """
    return functools.reduce(operator.add, times, 0.0)


@dataclass(frozen=True, slots=True)
class Value:
    """One storage's contents between two writes.

    - size_bytes: bytes of the storage, not of the view of it that somebody reads.
    - role: parameters, buffers, inputs and constants are resident: held before, during and after the step. A tangent is
      handed in by the caller at the loss boundary and held to the end of the step.
    - held: once made, it stays to the end of the step, for somebody outside holds it: a model output or a parameter's
      gradient.
    - reuses: the value whose memory this one takes over, where an op writes in place. That value is gone from then on.
    - home: where it lives between steps.
        - "host": a parameter is fetched to the device to be read. Its gradient, whose home is the host too, is sent
          there once it is final.
        - "sharded": each rank has a part of the parameter, which is gathered to be read. Its gradient, sharded too, is
          on the device until it is handed over.
    - updates: of a gradient: its parameters are updated as soon as it is handed over, and then it is gone. False where
      the caller updates them after the step.
    - update_bytes: what that update takes on the device for a while.
    - lasting: of a parameter that lives on the host: nothing writes to it between steps, so that its copy on the device
      may stay there from one step to the next.
    - tensor: dtype and shape of what is stored there when it is made, as in "float32[8, 128, 768]"; "" where that is
      not known. It is there to be read: values that differ in it alone are equal.
    - parameters: of a gradient: the values that hold its parameters. Nothing may read them once it is handed over, for
      a hook may write to them. Values that differ in it alone are equal, since files of older versions don't say it.
    """

    name: str
    size_bytes: int
    role: Role = "activation"
    held: bool = False
    reuses: int | None = None
    home: Home = "device"
    updates: bool = False
    update_bytes: int = 0
    lasting: bool = False
    tensor: str = field(default="", compare=False, repr=False)
    parameters: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def resident(self) -> bool:
        return self.role in RESIDENT_ROLES

    @property
    def fetched(self) -> bool:
        """Whether it is resident elsewhere: on the device it is a copy that comes and goes."""
        return self.resident and self.home != "device"


class Effect(NamedTuple):
    """A write to a resident value that only the first run of an op makes (BatchNorm's running statistics)."""

    old: int
    new: int


FUSED = "memplan.fused"  # how kinds of ops begin that are groups of ops, compiled as one
_ISLAND = "memplan.island"
_ASYNCHRONOUS = "_c10d_functional."
_COLLECTIVES = (_ASYNCHRONOUS, "_dtensor.")


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel-launching node.

    - inputs: values read by every run of the op.
    - outputs: values written by every run. The memory is new unless the value `reuses` another.
    - effects: writes to resident values that the first run makes and a recompute leaves out.
    - random: draws from the generator. A recompute replays the generator's state as it was at the first run.
    - recomputable: False for ops that write to resident values, whose inputs are gone afterwards, and for ops that may
      give other bits in a second run.
    - key: equal for ops with the same kernel and the same shapes, strides, dtypes and settings.
    """

    name: str
    kind: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    effects: tuple[Effect, ...] = ()
    random: bool = False
    recomputable: bool = True
    layer: str = ""
    key: str = ""

    @property
    def fused(self) -> bool:
        """Whether it is a group of ops that are compiled as one."""
        return self.kind.startswith(FUSED)

    @property
    def is_island(self) -> bool:
        """Whether it is a call of the user's Python, whose ops are seen to hold its scratch memory."""
        return self.kind.startswith(_ISLAND)

    @property
    def stays(self) -> bool:
        """Whether its first run is in the pass that it belongs to, though nobody may read its results there.

        A call of the user's Python checks in each run that it gives what it is planned to give: an argument, a flag.
        """
        return bool(self.effects) or not self.recomputable or self.is_island

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of a group run it together."""
        return self.kind.startswith(_COLLECTIVES)

    @property
    def is_asynchronous(self) -> bool:
        """Whether a run only starts a collective, which a `Wait` for its output completes."""
        return self.kind.startswith(_ASYNCHRONOUS) and len(self.outputs) == 1


@dataclass(frozen=True, slots=True)
class Graph:
    """One training step.

    - boundary: the number of forward ops; `ops[boundary:]` is the backward pass.
    - rng_state_bytes: bytes of one saved generator state.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    boundary: int
    rng_state_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers, inputs and constants on the device; versions of one storage count once."""
        return sum(v.size_bytes for v in self.values if v.resident and v.home == "device" and v.reuses is None)

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs on the device."""
        return sum(v.size_bytes for v in self.values if v.role == "input" and v.home == "device" and v.reuses is None)

    @property
    def gathers(self) -> bool:
        """Whether there are sharded parameters."""
        return any(v.resident and v.home == "sharded" for v in self.values)

    @property
    def tangents(self) -> tuple[int, ...]:
        return tuple(i for i, v in enumerate(self.values) if v.role == "tangent")

    @property
    def outputs(self) -> tuple[int, ...]:
        """Values that the forward pass makes and the caller holds."""
        return tuple(i for i, v in enumerate(self.values) if v.held and v.role == "activation")

    @property
    def gradients(self) -> tuple[int, ...]:
        return tuple(i for i, v in enumerate(self.values) if v.role == "gradient")

    @property
    def gradients_of(self) -> dict[int, list[int]]:
        """By value that holds a parameter, the parameter's gradients."""
        found: dict[int, list[int]] = {}
        for gradient in self.gradients:
            for parameter in self.values[gradient].parameters:
                found.setdefault(parameter, []).append(gradient)
        return found

    def op_bytes(self, index: int) -> int:
        """Bytes that an op takes beside what is resident: its operands and results."""
        op = self.ops[index]
        touched = {v for v in (*op.inputs, *op.outputs) if self.values[v].fetched or not self.values[v].resident}
        return sum(self.values[v].size_bytes for v in touched if self.values[v].reuses not in touched)

    def overwritten(self, op: Op) -> set[int]:
        """Values that are gone once an op has run."""
        return {v for o in op.outputs if (v := self.values[o].reuses) is not None} | {e.old for e in op.effects}

    def producers(self) -> tuple[int | None, ...]:
        """The op that writes each value, None for what is there from the start."""
        makers = {v: i for i, op in enumerate(self.ops) for v in (*op.outputs, *(e.new for e in op.effects))}
        return tuple(map(makers.get, range(len(self.values))))


Blocks = tuple[tuple[int, int], ...]  # (name, bytes) of blocks in the order of requests, (name, 0) where one is freed


@dataclass(frozen=True, slots=True)
class Costs:
    """What each op of a step takes.

    - time_s[i]: seconds of op i.
    - scratch_bytes[i]: what its kernel needs beyond its outputs while it runs.
    - source: where the figures come from: "measured", "measured in part" (some ops can't be run by themselves) or
      "estimated".
    - requests[i]: what its kernel asks a CUDA device's allocator for. Names from 0 on are its outputs that take over no
      memory, counted in order. () where that is not known.
    """

    time_s: tuple[float, ...]
    scratch_bytes: tuple[int, ...]
    source: str = "measured"
    requests: tuple[Blocks, ...] = ()


@dataclass(frozen=True, slots=True)
class Roofline:
    """How fast a device is taken to be where nothing is timed. The defaults are those of a laptop's CPU.

    - flops_per_s: floating-point operations a second.
    - bytes_per_s: bytes of traffic a second.
    - launch_s: seconds that each op takes at least.
    - capability: compute capability of a CUDA device, as (9, 0) of an H100. Steps planned for the CPU then have the
      attention, the dropout, the rounding of sizes and the workspaces of such a device. None: they have the CPU's.
    - network: of collectives in forward and of DTensors. Reductions take as long as gathers, all-reduces twice that.
    """

    flops_per_s: float = 1e11
    bytes_per_s: float = 2e10
    launch_s: float = 4e-6
    capability: tuple[int, int] | None = None
    network: GatherSpeed | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between device and host memory. Both directions run at once at full speed, as on PCI Express.

    - to_host_bytes_per_s, to_device_bytes_per_s: speed of each direction.
    - latency_s: seconds that each copy takes on top.
    """

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    latency_s: float = 10e-6


@dataclass(frozen=True, slots=True)
class Buffers:
    """What an engine around the model holds of its inputs and outputs, as numbers of copies in all.

    None is no more than the steps hold by themselves: inputs and outputs once for each microbatch in flight, gradients
    once.

    - inputs, outputs: of the model.
    - output_gradients: what the backward pass starts from.
    - input_gradients: what it ends with.
    - later_outputs: copies of outputs that are there beside these once nothing is in flight any more.
    """

    inputs: int | None = None
    outputs: int | None = None
    output_gradients: int | None = None
    input_gradients: int | None = None
    later_outputs: int = 0


@dataclass(frozen=True, slots=True)
class GatherSpeed:
    """How fast sharded parameters are gathered.

    Gathers run beside the ops, one after the other. The defaults are those of ranks on one machine without a GPU.

    - bytes_per_s: bytes of whole parameters a second.
    - latency_s: seconds that each gather takes on top.
    """

    bytes_per_s: float = 1e9
    latency_s: float = 200e-6


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an engine around the training step holds on the device, so that plans leave room for it.

    - held_bytes: what it holds throughout (copies of parameters, optimizer state, buckets).
    - after_bytes: what more it needs for a while after the backward pass.
    - takes_gradients: a hook takes each gradient as it is handed over, and the memory is free then. What the hook keeps
      of it belongs to held_bytes.
    - keeps_parameters: the engine has parameters where it wants them, so that none may move to the host.
    - buffers: its copies of inputs and outputs.
    """

    held_bytes: int = 0
    after_bytes: int = 0
    takes_gradients: bool = False
    keeps_parameters: bool = False
    buffers: Buffers = Buffers()


@dataclass(frozen=True, slots=True)
class Requests:
    """What a CUDA device's caching allocator is asked for beside the values of a step.

    - expandable: its setting `expandable_segments`.
    - workspaces: bytes of each that libraries keep.
    - update: what the optimizer's first step asks for. What it does not free is state. Later steps ask for the rest.
    - arena: a step may have an arena, in which each block has a place that is planned.
    - before: segments that the process has when it plans its first step.
    """

    expandable: bool = False
    workspaces: tuple[int, ...] = ()
    update: Blocks = ()
    arena: bool = True
    before: tuple[Segment, ...] = ()

    @property
    def state(self) -> dict[int, int]:
        """Bytes of the optimizer's state, by name."""
        freed = {name for name, size_bytes in self.update if not size_bytes}
        return {name: size_bytes for name, size_bytes in self.update if name not in freed}

    @property
    def held_bytes(self) -> int:
        """Bytes that are held from the first step on."""
        return sum(self.workspaces) + sum(self.state.values())


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph with its costs and the limit that a schedule must keep.

    - budget_bytes: peak bytes allowed, everything included; None is no limit.
    - extra_resident_bytes: held throughout though no op reads it (declared optimizer state, an engine's buffers).
    - accumulate: gradients of earlier micro-batches are held throughout, and each new one is added and freed. Those
      whose home is sharded do not count, for only a part of each is held.
    - update_bytes: what the optimizer's step allocates for a while, after backward.
    - link: to host memory; None where nothing may be offloaded.
    - extra_host_bytes: held on the host throughout (optimizer state of parameters that live there).
    - in_flight: forwards that wait for their backward at once, the running one among them. One is the usual step; more
      are microbatches of a pipeline. Each holds its inputs, its outputs and what it saves.
    - gather: how fast sharded parameters come; None where there are none.
    - takes_gradients: each gradient is freed once it has been handed over, for somebody has taken it.
    - host_update_s_per_byte: seconds that the CPU takes to update parameters that live on the host, for each byte of
      their gradients.
    - knows_optimizer: what the optimizer holds is in these figures, even if that is nothing.
    - requests: what a CUDA device's allocator is asked for beside values. It is in these figures too, and says how they
      come about. None where no such allocator serves the step.
    """

    graph: Graph
    costs: Costs
    budget_bytes: int | None = None
    extra_resident_bytes: int = 0
    accumulate: bool = False
    update_bytes: int = 0
    link: Link | None = None
    extra_host_bytes: int = 0
    in_flight: int = 1
    gather: GatherSpeed | None = None
    takes_gradients: bool = False
    host_update_s_per_byte: float = 0.0
    knows_optimizer: bool = False
    requests: Requests | None = None

    @property
    def frees_gradients(self) -> bool:
        """Whether a gradient's memory is free once it has been handed over."""
        return self.accumulate or self.takes_gradients

    @property
    def resident_bytes(self) -> int:
        values = self.graph.values
        on_device = [values[g].size_bytes for g in self.graph.gradients if values[g].home == "device"]
        held = sum(on_device) if self.accumulate else 0
        return self.graph.resident_bytes + self.extra_resident_bytes + held

    @property
    def host_update_s(self) -> float:
        """Seconds that the CPU takes to update parameters that live on the host."""
        sent_bytes = sum(v.size_bytes for v in self.graph.values if v.role == "gradient" and v.home == "host")
        return sent_bytes * self.host_update_s_per_byte

    def bytes_after(self, stays: bool) -> int:
        """What comes on the device after backward, beside what is there already.

        stays: parameters stay on the device between steps. Then they are there as well when the next batch arrives
        while this one is still held, so that the next batch's inputs count.
        """
        return max(self.update_bytes, self.graph.input_bytes if stays else 0)

    @property
    def baseline_time_s(self) -> float:
        """Seconds of the step when every op runs once."""
        return total_s(self.costs.time_s)

    @property
    def network_s(self) -> float:
        """Seconds of the collectives that may run beside ops, when each runs once."""
        times = zip(self.graph.ops, self.costs.time_s, strict=True)
        return total_s(time_s for op, time_s in times if op.is_asynchronous)

    @property
    def without_network(self) -> Problem:
        """The step with a network that takes no time."""
        times = zip(self.graph.ops, self.costs.time_s, strict=True)
        time_s = tuple(0.0 if op.is_asynchronous else time_s for op, time_s in times)
        return replace(self, costs=replace(self.costs, time_s=time_s))

    @property
    def all_on_device(self) -> Problem:
        """The step as it runs without a plan: parameters and gradients on the device to its end, updates made after it.

        Gradients of sharded parameters are handed over all the same.
        """
        if all(v.home == "device" and not v.updates for v in self.graph.values):
            return self
        values = tuple(
            replace(v, home="device", held=v.held or v.role == "gradient", updates=False, update_bytes=0, lasting=False)
            if v.home == "host" or v.fetched or v.updates
            else v
            for v in self.graph.values
        )
        extra_bytes = self.extra_resident_bytes + self.extra_host_bytes
        update_bytes = max([self.update_bytes, *(v.update_bytes for v in self.graph.values)])
        return replace(
            self, graph=replace(self.graph, values=values), extra_resident_bytes=extra_bytes, extra_host_bytes=0,
            update_bytes=update_bytes,
        )  # fmt: skip

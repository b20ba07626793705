"""Seconds of ops by a roofline, and what is known of ops that never run by themselves: islands and collectives."""

from __future__ import annotations

from torch import fx
from torch.utils.flop_counter import flop_registry

from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.shards import NetworkSpeed
from memplan.costs.known_costs import OpFacts
from memplan.problem.data import Costs, Roofline


def estimate(traced: Traced, roofline: Roofline | None = None, network: NetworkSpeed | None = None) -> Costs:
    """The longer of compute time and memory traffic time, for each op. Nothing is run; scratch counts as 0.

    Of calls that can't be traced, what their run on the sample took.
    """
    roofline, known, found = roofline or Roofline(), facts_without_runs(traced, network), list[OpFacts]()
    for op, kernel in zip(traced.graph.ops, traced.kernels, strict=True):
        traffic = sum(traced.graph.values[v].size_bytes for v in (*op.inputs, *op.outputs))
        # PyTorch's own table knows matrix products, convolutions and attention. A multiply-add is two operations.
        count, flops = flop_registry.get(getattr(kernel.target, "overloadpacket", None)), 0.0
        if count is not None:
            args, kwargs = fx.map_arg((kernel.args, kernel.kwargs), lambda n: n.meta["val"])
            flops = float(count(*args, **kwargs, out_val=kernel.node.meta["val"]))
        compute_s, traffic_s = flops / roofline.flops_per_s, traffic / roofline.bytes_per_s
        found.append(known.get(op.key) or OpFacts(roofline.launch_s + max(compute_s, traffic_s), 0))
    return Costs(tuple(f.time_s for f in found), tuple(f.scratch_bytes for f in found), "estimated")


def facts_without_runs(traced: Traced, network: NetworkSpeed | None) -> dict[str, OpFacts]:
    """What is known of ops that can't be run on made-up data, by key: islands, and collectives on this network."""
    values, network, found = traced.graph.values, network or NetworkSpeed(), dict[str, OpFacts]()
    for op, kernel in zip(traced.graph.ops, traced.kernels, strict=True):
        if isinstance(kernel.target, IslandKernel):
            found[op.key] = OpFacts(*kernel.target.cost)
        elif op.is_collective:
            whole_bytes = max(sum(values[v].size_bytes for v in side) for side in (op.inputs, op.outputs))
            found[op.key] = OpFacts(network.time_s(op.kind, whole_bytes), 0)
    return found

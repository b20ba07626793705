"""Seconds and scratch bytes of every distinct op of a step, measured on the model's device or read from disk.

Each distinct op (kind, shapes, strides, dtypes, settings) is run with made-up data of the right layout. Results are
kept on disk by device, thread count and torch version. Real results are compared with traced ones, so a fake kernel
that is wrong about a shape, a dtype or a size is found before anything is planned on it.
"""

from __future__ import annotations

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.ways import OtherResults, Refusal
from memplan.capture.shards import NetworkSpeed
from memplan.costs.bench import Bench, StateOf, generator_and_grad_mode_kept
from memplan.costs.known_costs import KnownCosts, OpFacts, estimate, facts_without_runs
from memplan.errors import BudgetInfeasible
from memplan.problem.data import Costs
from memplan.units import format_bytes


def measure(
    traced: Traced,
    resident: StateOf,
    budget_bytes: int | None = None,
    quick: bool = False,
    network: NetworkSpeed | None = None,
) -> Costs:
    """Run each distinct op and time it.

    - resident: gives the real parameters, buffers and inputs.
    - budget_bytes: kept while ops are timed, as far as the largest op fits it with everything resident.
    - quick: ops that are not known run once, and are not saved. Their seconds are rough then, their scratch bytes are
      not.
    - network: of collectives, which never run here: one rank alone would wait for the others.

    An op that can't be run by itself is estimated: the source of the costs is then "measured in part".

    Raises BudgetInfeasible where the device has no room for an op, a Refusal where real results differ from traced
    ones, or an op that may run again gives other bits then. Of results that could not be traced nothing is found.
    """
    known = KnownCosts.read(traced.device)
    known.facts |= facts_without_runs(traced, network)
    distinct = {op.key: index for index, op in reversed(list(enumerate(traced.graph.ops)))}
    missing = sorted(index for key, index in distinct.items() if known.wants(key, quick))
    if missing:
        needed_bytes, index = max((traced.graph.op_bytes(i), i) for i in distinct.values())
        largest, needed_bytes = traced.graph.ops[index], needed_bytes + traced.graph.resident_bytes
        if budget_bytes is not None:
            budget_bytes = max(budget_bytes, needed_bytes)
        bench = Bench(traced, resident, budget_bytes)
        with generator_and_grad_mode_kept(traced.device):
            try:
                scratch, first_s, asked = bench.first_runs(missing)
            except RuntimeError as error:
                if not private.is_out_of_memory(error):
                    raise
                raise BudgetInfeasible(
                    f"{traced.device} has no room to time single ops: {largest.kind} in {largest.layer or 'the model'} "
                    f"takes {format_bytes(needed_bytes)}. Use a smaller batch, or costs='estimate'",
                    needed_bytes,
                ) from error
            of_all = zip(missing, first_s, scratch, strict=True)
            times = [[t] if quick else bench.times_s(i, t, scratch_bytes) for i, t, scratch_bytes in of_all]
        for index, times_s, scratch_bytes, blocks in zip(missing, times, scratch, asked, strict=True):
            if index not in bench.failed:
                known.enter(traced.graph.ops[index].key, times_s, scratch_bytes, blocks, index in bench.unsteady)
        if not quick and not private.user_records_blocks():  # or later processes would never see what ops ask for
            known.save()
    found = {key for key, facts in known.facts.items() if facts.unsteady}
    unsteady = [op for op in traced.graph.ops if op.recomputable and op.key in found]
    if unsteady:
        message = (
            f"{unsteady[0].kind} in {unsteady[0].layer or 'the model'} gives other bits in a second run on the same "
            "values, so that it may run only once in a step. This is known from now on: plan again"
        )
        raise Refusal(message, OtherResults(unsteady=frozenset(op.key for op in unsteady)))
    unknown = not all(op.key in known.facts for op in traced.graph.ops)
    estimated = estimate(traced, network=network).time_s if unknown else [0.0] * len(traced.graph.ops)
    facts = [known.facts.get(op.key, OpFacts(s, 0)) for op, s in zip(traced.graph.ops, estimated, strict=True)]
    source = "measured in part" if unknown else "measured"
    requests = tuple(f.requests for f in facts) if any(f.requests for f in facts) else ()
    return Costs(tuple(f.time_s for f in facts), tuple(f.scratch_bytes for f in facts), source, requests)

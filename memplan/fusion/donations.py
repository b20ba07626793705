"""Results of groups are written over what is read for the last time, as eager's own ops in place do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from memplan.fusion.groups import FusedGroup, Unit, kept_outside, phase_of_unit
from memplan.fusion.step_graph import StepGraph, bases_read, bytes_of_node, node_kind, place_of_node

_LEAST_BYTES = 4096  # of what is worth it


def donate(step: StepGraph, units: Sequence[Unit]) -> None:
    """Set what each group may write over what: position of an output -> that of the input."""
    kept = kept_outside(step)
    reads = [set(bases_read(step.externs[u])) if isinstance(u, int) else set(u.inputs) for u in units]
    makes = [set(step.externs[u].users) if isinstance(u, int) else set(u.outputs) for u in units]
    phases = [phase_of_unit(step, unit) for unit in units]
    last = {base: position for position, bases in enumerate(reads) for base in bases}
    readers = Counter(base for bases in reads for base in bases)
    tensors_of_value = Counter(value for value, _ in step.home.values())

    def is_free(given: fx.Node, group: FusedGroup, position: int) -> bool:
        """Whether nobody reads an input of a group once the group has run, in every schedule."""
        if given in kept or last[given] != position or node_kind(given) not in ("result", "computed"):
            return False
        value = step.home.get(given, (None, None))[0]
        if value is not None:
            facts = step.traced.graph.values[value]
            if tensors_of_value[value] != 1 or facts.role != "activation" or facts.held:
                return False
        if group.phase == "forward":
            return readers[given] == 1
        if place_of_node(given).phase == "backward":
            return True
        from_it = {given}  # what forward would make again from it: who reads that later needs the input, too
        for bases, made, phase in zip(reads, makes, phases, strict=True):
            if phase == "forward" and bases & from_it:
                from_it |= made
        return not any(bases & from_it for bases in reads[position + 1 :])

    for position, unit in enumerate(units):
        if isinstance(unit, int):
            continue
        unit.over = {}
        for o, output in enumerate(unit.outputs):
            if output in kept or bytes_of_node(output) < _LEAST_BYTES:
                continue
            for i, given in enumerate(unit.inputs):
                if i not in unit.over.values() and _fits(given, output) and is_free(given, unit, position):
                    unit.over[o] = i
                    break


def _fits(given: fx.Node, output: fx.Node) -> bool:
    a: torch.Tensor = given.meta["val"]
    b: torch.Tensor = output.meta["val"]
    whole = a.untyped_storage().nbytes() == bytes_of_node(given) and a.is_contiguous() and b.is_contiguous()
    return whole and a.dtype == b.dtype and a.numel() == b.numel()

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
    donor = _Donor(step, units)
    for position, unit in enumerate(units):
        if isinstance(unit, int):
            continue
        unit.over = {}
        for o, output in enumerate(unit.outputs):
            if output in donor.kept or bytes_of_node(output) < _LEAST_BYTES:
                continue
            for i, given in enumerate(unit.inputs):
                if i not in unit.over.values() and _fits(given, output) and donor.is_free(given, unit, position):
                    unit.over[o] = i
                    break


def _fits(given: fx.Node, output: fx.Node) -> bool:
    a: torch.Tensor = given.meta["val"]
    b: torch.Tensor = output.meta["val"]
    whole = a.untyped_storage().nbytes() == bytes_of_node(given) and a.is_contiguous() and b.is_contiguous()
    return whole and a.dtype == b.dtype and a.numel() == b.numel()


class _Donor:
    """Who reads which memory, and when. kept: what somebody outside of the step holds."""

    def __init__(self, step: StepGraph, units: Sequence[Unit]) -> None:
        self._step = step
        self.kept = kept_outside(step)
        self._reads = [set(bases_read(step.externs[u])) if isinstance(u, int) else set(u.inputs) for u in units]
        self._makes = [set(step.externs[u].users) if isinstance(u, int) else set(u.outputs) for u in units]
        self._phases = [phase_of_unit(step, unit) for unit in units]
        self._last = {base: position for position, reads in enumerate(self._reads) for base in reads}
        self._readers = Counter(base for reads in self._reads for base in reads)
        self._tensors_of_value = Counter(value for value, _ in step.home.values())

    def is_free(self, given: fx.Node, group: FusedGroup, position: int) -> bool:
        """Whether nobody reads an input of a group once the group has run, in every schedule."""
        if given in self.kept or self._last[given] != position or node_kind(given) not in ("result", "computed"):
            return False
        value = self._step.home.get(given, (None, None))[0]
        if value is not None:
            facts = self._step.traced.graph.values[value]
            if self._tensors_of_value[value] != 1 or facts.role != "activation" or facts.held:
                return False
        if group.phase == "forward":
            return self._readers[given] == 1
        if place_of_node(given).phase == "backward":
            return True
        from_it = {given}  # what forward would make again from it: who reads that later needs the input, too
        for reads, makes, phase in zip(self._reads, self._makes, self._phases, strict=True):
            if phase == "forward" and reads & from_it:
                from_it |= makes
        return not any(reads & from_it for reads in self._reads[position + 1 :])

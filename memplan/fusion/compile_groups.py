"""Compiles each distinct group once for all layers, steps and processes, and tries it.

Compilers crash and hang, and take a second a group. So groups that no process has compiled before are compiled by
others (`workers`), in parallel, which leave the code in Inductor's cache on disk. A record beside it says what the
compiled group writes over what. This process then loads the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan import torch_private as private
from memplan.fusion.group_program import GroupProgram, read_record, write_record
from memplan.fusion.groups import FusedGroup, Unit
from memplan.fusion.step_graph import place_of_node
from memplan.fusion.workers import compile_elsewhere
from memplan.logs import log


class FusedKernel:
    """A compiled group, as a function of tensors. One of a dry run has no code."""

    __name__ = "fused"

    def __init__(self, key: str, call: private.CompiledCall | None) -> None:
        self.key, self._call = key, call

    def __call__(self, *tensors: torch.Tensor) -> Any:
        assert self._call is not None, "a group of a dry run"
        return self._call([*tensors])


class GroupCompiler:
    """Compiled groups by key. Keys tell all that the code depends on, so that all steps of a process may share them."""

    def __init__(self) -> None:
        self._kernels: dict[str, tuple[FusedKernel, dict[int, int]]] = {}
        self._failed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._kernels)

    def kernels(self, units: Sequence[Unit], dry: bool = False) -> list[FusedKernel | None] | frozenset[int]:
        """The kernel of each unit that is a group. Sets their `over` to what is really written over what.

        Where groups can't be compiled, or do not give what they should: the ops of the trace that these are made of.

        dry: nothing is compiled, and groups are taken to write over all that they may.
        """
        programs = {unit: GroupProgram.of(unit) for unit in units if isinstance(unit, FusedGroup)}
        keys = {group: program.key for group, program in programs.items()}
        if dry:
            return [FusedKernel(keys[unit], None) if isinstance(unit, FusedGroup) else None for unit in units]
        known = self._kernels.keys() | self._failed.keys()
        missing = {keys[group]: program for group, program in programs.items() if keys[group] not in known}
        self._failed |= compile_elsewhere({key: p for key, p in missing.items() if read_record(key) is None})
        for key, program in missing.items():
            if key not in self._failed:
                try:
                    # Quick where a record and the code are on disk.
                    call, over = program.writing(read_record(key)).compiled()
                    write_record(key, over)
                    self._kernels[key] = FusedKernel(key, call), over
                except Exception as error:
                    self._failed[key] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        failed = [group for group, key in keys.items() if key in self._failed]
        if failed:
            log.warning(
                "%d groups of ops can't be compiled and run as they are: %s",
                len(failed), self._failed[keys[failed[0]]],
            )  # fmt: skip
            return frozenset(place_of_node(node).op for group in failed for node in group.nodes)
        for group, key in keys.items():
            group.over = self._kernels[key][1]
        return [self._kernels[keys[unit]][0] if isinstance(unit, FusedGroup) else None for unit in units]

"""Refusals that say what to try next.

    raise Refusal("forward branches on computed data", TakeBranches([("layers.0",)]))

A refusal may be raised deep in the user's forward, so it is an exception, and an `UnsupportedModel` if nobody helps.
`planning/trace_loop.py` acts on most ways. Others do on those that come up elsewhere, and are named there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.errors import UnsupportedModel

Calls = tuple[Any, ...]  # paths of modules, autograd functions and other named ones: a call, and those around it


@dataclass(frozen=True, slots=True)
class MakeIslands:
    """The step can't be traced through some calls. With a run of forward on the sample these calls could be islands.

    - calls: chains of calls, the innermost first. For each chain, one of its calls has to be an island.
    - given: by name of an island, which of its outputs get gradients, if the run had others get gradients.
    - unfit: calls that are islands, and can't be.
    - compiled: forward calls code that went through torch.compile. Such code must not even run while a step is looked
      at: from then on PyTorch would run it without what was compiled.
    """

    calls: Collection[Calls] = ()
    given: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    unfit: Collection[Any] = ()
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class MakeNoIsland:
    """A call gave other tensors than when it was looked at: see `Recovery.prepare_replan`. called: what was called."""

    called: Any


@dataclass(frozen=True, slots=True)
class TakeBranches:
    """Forward branches on a boolean that it computes from parameters. A run of forward would tell which way it goes.

    calls: chains of calls around the branch, as in `MakeIslands`.
    """

    calls: Collection[Calls]


@dataclass(frozen=True, slots=True)
class StateChanges:
    """The step depends on Python state that changes, or forward leaves some that a planned step would not.

    - owner: whose state that is, by name of the module or table.
    - at_first: perhaps only the first run of forward changes it.
    """

    owner: str
    at_first: bool = False


@dataclass(frozen=True, slots=True)
class LetRequireGrad:
    """Forward lets arguments require grad before any op reads them. positions: of these among the call's tensors."""

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Never:
    """The step can't run unplanned either: see `UnplannedSteps`."""


@dataclass(frozen=True, slots=True)
class OtherResults:
    """Ops gave other results than were traced, or other bits in a second run: see `once_more_where_results_differ`.

    - found: what ops gave, by signature of the call, as `ResultFacts`; empty if a trace could not have such results.
    - unsteady: keys of ops that gave other bits.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    unsteady: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class RunsBackward:
    """Forward runs a backward pass itself, so forward can't run without what that pass reads: see `one_forward`."""


Way = MakeIslands | MakeNoIsland | TakeBranches | StateChanges | LetRequireGrad | OtherResults | Never | RunsBackward


class Refusal(UnsupportedModel):
    """A step, or a call in it, can't be captured. way: how it could be; None: no way is known."""

    def __init__(self, message: str, way: Way | None = None) -> None:
        super().__init__(message)
        self.way = way


def way_of(error: object) -> Way | None:
    """The way of a refusal; None for everything else."""
    return error.way if isinstance(error, Refusal) else None

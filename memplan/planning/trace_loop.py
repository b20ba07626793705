"""Traces one call, and traces it again as each refusal says, until a trace succeeds or nothing is left to try.

| refusal | the next trace |
|---|---|
| `LetRequireGrad` | lets these arguments require grad |
| `TakeBranches` | takes the branches that a run of forward on the sample took |
| `StateChanges`, perhaps at first only | finds the caches that a first run of forward left |
| `FixedSize` | none: no island helps |
| any other | has the smallest calls around the failure as islands, which a run of forward has shown |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.attributes_kept import AttributesKept, LeftBehind
from memplan.capture.attributes.named_functions import NamedFunction
from memplan.capture.attributes.named_state import is_library_code
from memplan.capture.attributes.snapshot import is_unchanged
from memplan.capture.attributes.tables import attribute_tables, is_plain
from memplan.capture.capturable import model_device
from memplan.capture.capture import Capture, CaptureOptions, capture
from memplan.capture.ops.ways import Calls, LetRequireGrad, MakeIslands, StateChanges, TakeBranches, way_of
from memplan.capture.trace.call import Call, Forward, Sample
from memplan.capture.trace.forwards import is_wholly_called
from memplan.capture.trace.islands import NO_ISLANDS, Islands, calls_with, name_of
from memplan.errors import UnsupportedModel
from memplan.logs import log
from memplan.runtime.program.in_flight import Written
from memplan.runtime.trial.island_runs import IslandRuns
from memplan.runtime.trial.one_forward import ForwardFails, OneForward

LooksAtForward = Callable[
    [Islands, contextlib.AbstractContextManager[None]], OneForward | ForwardFails | UnsupportedModel
]


@dataclass
class KnownIslands:
    """What traces of a model have shown of its islands.

    - islands: those of the latest trace.
    - unfit: calls that can be no islands, with the reason for each.
    - layers: paths of modules that PyTorch checkpoints in islands.
    - compiled: something in the model is, and can't run to be looked at.
    """

    islands: Islands = NO_ISLANDS
    unfit: dict[Any, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    compiled: bool = False


class TraceLoop:
    """Traces one call until a trace succeeds, or nothing is left to try.

    - decides: forward may run on the sample to show its branches.
    - looks: forward may run on the sample to show islands, and caches that it fills.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        sample: Sample | Call,
        options: CaptureOptions,
        known: KnownIslands,
        look_at_forward: LooksAtForward,
        decides: bool,
        looks: bool,
    ) -> None:
        """look_at_forward: runs forward on the sample within a context, and notes no reads within these islands."""
        self._model, self._forward, self._sample, self._options = model, forward, sample, options
        self._run = forward if options.loss_fn is None else functools.partial(options.loss_fn, model)
        self._known, self._look_at_forward, self._decides, self._looks = known, look_at_forward, decides, looks
        self._unfit, self._saw_islands = dict(known.unfit), False
        self._given = {i.name: i.backward_facts.given for i in known.islands.calls if i.backward_facts is not None}
        self._begin_with(known.islands)

    def _begin_with(self, islands: Islands) -> None:
        """Let the next trace have these islands, and nothing that earlier traces showed beside."""
        self._islands = islands
        self._applied = dict[Any, None]()  # functions that were traced through
        self._cached: UnsupportedModel | None = None  # a refusal against which caches of a first run may help
        self._first: OneForward | None = None  # that run
        self._restart()

    def _restart(self) -> None:
        self._seen: Sequence[Any] | None = self._options.seen or None
        self._branches = False  # that a run of forward takes are traced
        self._requiring: tuple[int, ...] = ()

    def captured(self) -> Capture | UnsupportedModel:
        """The captured step, or the refusal against which nothing helps. Raises ForwardFails."""

        def note(function: Any, args: tuple[Any, ...], original: Callable[..., Any]) -> Any:
            self._applied[function] = None
            return original(*args)

        while True:
            try:
                with private.functions_applied_by(note):
                    found = self._traced()
                self._known.islands = self._islands
                return dataclasses.replace(found, left=found.left.to_come())
            except UnsupportedModel as error:
                refusal = error.with_traceback(None)
            way = way_of(refusal)
            if isinstance(way, LetRequireGrad) and not self._requiring:
                self._requiring = way.positions
            elif isinstance(way, TakeBranches) and self._decides and not self._branches:
                self._seen, self._branches, self._requiring = None, True, ()
            elif isinstance(way, StateChanges) and way.at_first and self._looks and self._cached is None:
                self._cached = refusal
                self._restart()
            elif isinstance(refusal, private.FixedSize) or isinstance(refusal.__cause__, private.FixedSize):
                return refusal  # against which no island helps
            elif not self._makes_islands(refusal):
                return refusal

    def _traced(self) -> Capture:
        """One trace, after the runs of forward that it needs."""
        if self._cached is not None and self._first is None:
            first = self._look_or_raise()
            left, caches = first.left, first.caches
            if len(left.contents) > len(caches.contents) or not (caches.values or caches.contents):
                raise self._cached  # what it leaves is no cache
            with AttributesKept(self._model, run=self._run):
                caches.put()
                again, cached = self._look_or_raise(), {(id(table), key): v for table, key, v in caches.values}
            plain = ((cached.get((id(table), key), v), v) for table, key, v in again.left.values if is_plain(v))
            if not again.gives_as(first) or not all(is_unchanged(before, now) for before, now in plain):
                raise self._cached  # a second run gives or leaves something else
            self._first = first
        with contextlib.nullcontext() if self._first is None else AttributesKept(self._model, run=self._run):
            if self._first is not None:
                there = {id(table): table for _, table in attribute_tables(self._model, run=self._run)}
                self._first.caches.put()
            if self._branches and self._seen is None:
                self._seen = self._look_or_raise().answers
            now = dataclasses.replace(self._options, islands=self._islands, seen=self._seen, requiring=self._requiring)
            captured = capture(self._model, self._forward, self._sample, now)
            if self._first is None:
                return captured
            assert self._cached is not None
            first, caches = self._first, self._first.caches
            anew = {(id(captured.key.attributes(owner)), key) for owner, key in captured.traced.template.attributes}
            for path, _, key in (name.rpartition(".") for name in captured.traced.reassigned):
                anew.add((id(self._model.get_submodule(path)._buffers), key))
            known = {(id(table), key) for table, key, _ in caches.values}
            if not {(id(table), key) for table, key, _ in first.left.values} <= anew | known:
                raise self._cached  # a first run leaves more, and no later one does
            if not first.written <= {*Written.of(captured.traced).buffers}:  # a first batch initialises them
                raise self._cached
            counters = ((captured.key.attributes(owner), key, added) for owner, key, added in captured.counters)
            # The first run has counted in objects that it made.
            uncounted = [(t, key, t[key] - added) for t, key, added in counters if id(t) not in there]
            values = [*caches.values, *uncounted, *captured.left.values]
            left = LeftBehind(values, [*caches.contents, *captured.left.contents])
            return dataclasses.replace(captured, left=left)

    def _look_or_raise(self) -> OneForward:
        """What a run of forward on the sample shows. Raises what goes wrong in it."""
        found = self._look_at_forward(self._islands, contextlib.nullcontext())
        if not isinstance(found, OneForward):
            raise found
        return found

    def _makes_islands(self, refusal: UnsupportedModel) -> bool:
        """Let the next trace have islands: calls around the failure, the smallest that can be. False if none can be."""
        way, islands, unfit = way_of(refusal), self._islands, self._unfit
        open_calls = way if isinstance(way, MakeIslands) else MakeIslands()
        self._known.compiled |= open_calls.compiled
        if not self._looks:
            return False
        before = islands.callables, len(unfit), len(self._given)
        unfit |= dict.fromkeys(open_calls.unfit, str(refusal))
        chains = self._chains(refusal)
        shards, paths = self._options.shards, {c for chain in chains for c in chain if isinstance(c, str)}
        if shards is not None:
            for path in paths:
                modules = self._model.get_submodule(path).modules()
                tables = (table for m in modules for table in (m._forward_pre_hooks, m._forward_hooks))
                if any(shards.owns(hook) for table in tables for hook in table.values()):
                    unfit[path] = "in it run hooks of what shards its parameters"
        new, known = set[Any](), islands.callables - unfit.keys()
        for chain in chains:
            if self._saw_islands:
                unfit |= {c: str(refusal) for c in chain[:1] if c in known}
            fit = next((c for c in chain if c not in unfit and _is_callable(c, self._model)), None)
            new |= set() if fit is None else _alike(fit, self._model, refusal) - unfit.keys()
        self._given |= open_calls.given
        callables = (known | new) - unfit.keys()
        if (self._saw_islands or not callables) and before == (callables, len(unfit), len(self._given)):
            told = dict.fromkeys(unfit[c] for chain in chains for c in chain if c in unfit and unfit[c] != str(refusal))
            if told:
                refusal.args = (f"{refusal}. It can't run as it is either: {'; '.join(told)}",)
            return False
        reasons = {**dict.fromkeys(new, str(refusal).partition("\n")[0]), **islands.reasons}
        device = self._options.device or model_device(self._model)
        parts = [p for p in self._model.parameters() if shards is not None and shards.shard(p) is not None]
        run = IslandRuns(self._model, frozenset(callables), self._given, device, reasons, self._known.layers, parts)
        self._saw_islands = True
        shown = self._look_at_forward(NO_ISLANDS, run.watching())
        if not isinstance(shown, OneForward):
            log.info("no islands are made of %s, because %s", ", ".join(map(name_of, new)), shown)
            return False
        for called, why in run.unfit.items():
            log.info("no island is made of %s, because %s", name_of(called), why)
        unfit |= run.unfit
        if new and new == run.unfit.keys():  # the next trace would be as the last one
            return self._makes_islands(refusal)
        self._begin_with(run.islands.knowing(self._known.islands))
        return True

    def _chains(self, refusal: UnsupportedModel) -> list[Calls]:
        """Calls of which one each has to be an island, the innermost first, after a refusal.

        Any function that was traced through may have the side effect that the refusal is about.
        """
        way = way_of(refusal)
        if isinstance(way, (MakeIslands, TakeBranches)):
            return [chain for chain in way.calls if chain]
        functions = [(f,) for f in self._applied if f not in self._islands.callables and not is_library_code(f)]
        of_state = calls_with(self._model, way.owner) if isinstance(way, StateChanges) else []
        return functions or of_state


def _is_callable(called: Any, model: nn.Module) -> bool:
    """Whether something is called: a list of modules is not."""
    module = model.get_submodule(called) if isinstance(called, str) else None
    return module is None or "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _alike(called: Any, model: nn.Module, refusal: UnsupportedModel) -> set[Any]:
    """A call that is to be an island, and modules of the same class, whose code is the same.

    Hooks and compiled code are of one module alone.
    """
    if isinstance(called, NamedFunction) and called.path is not None:
        methods = (called.of(module, path) for path, module in model.named_modules())
        return {method for method in methods if method is not None}
    module = model.get_submodule(called) if isinstance(called, str) else None
    if module is None or is_wholly_called(module):
        return {called}
    kind = type(module)
    if kind.__module__.startswith("torch.") or len(getattr(way_of(refusal), "calls", ())) > 1:
        return {called}
    return {called, *(path for path, module in model.named_modules() if path and type(module) is kind)}

"""From a call to a captured step, with the branches that forward takes and the caches that it leaves."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.analysis.sized import at_sizes
from memplan.capture.analysis.traced import Traced
from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.capturable import model_device
from memplan.capture.capture import Capture, CaptureOptions
from memplan.capture.ops.layout import Layout, allocated_bytes, generator_state_bytes
from memplan.capture.ops.sizes import FROM_DATA, DataSize, Dimension, Varying, all_sizes, without_numbers
from memplan.capture.ops.ways import TakeBranches, way_of
from memplan.capture.trace.call import Call, CallReader, Forward, Sample
from memplan.capture.trace.islands import NO_ISLANDS, Islands
from memplan.capture.trace.raw_trace import Autocast
from memplan.costs.optimizer import update_needs
from memplan.errors import MemplanError, NothingToTrain, UnsupportedModel
from memplan.fusion.fuse_step import fuse_step
from memplan.logs import log
from memplan.planning.homes import with_others_in_flight, with_updates
from memplan.planning.placement import Placement
from memplan.planning.settings import Settings
from memplan.planning.trace_loop import KnownIslands, TraceLoop
from memplan.runtime.host.fetch import FetchedWhereUsed, MadeUpWhereUsed
from memplan.runtime.program.checkpointed import checkpointing, layers_of, may_be_checkpointed, noting_writes
from memplan.runtime.ranks.sharded_model import ShardedModel
from memplan.runtime.trial.one_forward import ForwardFails, LocalCollectives, OneForward, one_forward, other_ops_in
from memplan.runtime.trial.unplanned_peak import unplanned_peak

_CapturedFor = Callable[[Mapping[int, Layout] | None, Varying], Capture | UnsupportedModel]

_MOST_TRIES = 3  # of captures for all sizes, each of which takes longer than one for a single size


class Capturing:
    """Captures the steps of one model.

    - decides: forward is run on the sample where it branches on what it computes, and the step is captured with the
      branches that it took.
    - grouped, trains_alone: whether other ranks plan the same steps. They do if parameters are sharded, too.
    - unsteady: values that have changed so often from step to step that no plan may depend on them.
    """

    def __init__(
        self, model: nn.Module, forward: Forward, settings: Settings, placement: Placement, grouped: bool
    ) -> None:
        self._model, self._forward, self.grouped = model, forward, grouped
        self._settings, self._placement = settings, placement
        self.trains_alone = not grouped and settings.shards is None
        self.decides = self.trains_alone and settings.in_flight == 1
        self._refused = 0  # captures for all sizes that failed, one after the other
        self.unsteady: frozenset[str] = frozenset()
        self._known = KnownIslands()
        self._compared = set[Any]()  # ops of forwards that ran as they were traced

    def decide(self, decides: bool) -> None:
        """Capture from now on with, or without, the branches that a run of forward takes."""
        self.decides = decides

    def depend_on(self, value: str, depends: bool) -> None:
        """Capture from now on what depends on this value, or only what does not."""
        self.unsteady = self.unsteady - {value} if depends else self.unsteady | {value}

    def make_no_island_of(self, called: Any, why: str) -> None:
        """Make no island of this function or module from now on: it gives something else each time."""
        self._known.unfit[called] = why
        self._known.islands = NO_ISLANDS

    def checkpoint_islands(self, sample: Sample | Call) -> bool:
        """Have islands checkpoint their layers, or themselves, from now on. True: capture the step again.

        False if they can't, or do so already. They can if two steps run on the sample, one with checkpoints and one
        without, give the same bits and leave the same state. With other ranks no step runs: it would wait for them.
        """
        paths = [called for called in self._known.islands.callables if isinstance(called, str)]
        found, written = list[str](), set[str]()
        for path in sorted(paths):  # the layers of a module, or else the module as a whole
            module = self._model.get_submodule(path)
            found += [f"{path}.{layer}" for layer in layers_of(module)] or [path] * may_be_checkpointed(module)
        if not self.trains_alone or self._known.layers or not found or self._placement.host or self._known.compiled:
            return False
        call = self.call_of(sample)

        def left(run: Forward) -> tuple[Any, ...]:
            return contextvars.copy_context().run(unplanned_peak, self._model, call, run, 0).left

        try:
            plain = left(noting_writes(self._model, found, self.run, written))
            found = [path for path in found if path not in written]
            is_exact = bool(found) and left(checkpointing(self._model, found, self.run)) == plain
        except Exception as error:  # the model's own, or of a device that is full
            log.info("no layers of islands are checkpointed, because %s", error)
            return False
        if is_exact:
            islands = self._known.islands  # how their calls run with checkpoints is not known yet
            self._known.layers, self._known.islands = tuple(found), Islands(islands.callables, reasons=islands.reasons)
        return is_exact

    @private.without_saved_tensor_hooks()
    def capture(
        self,
        sample: Sample | Call,
        tangents: Mapping[int, Layout] | None = None,
        backward: Autocast | None = None,
        seen: Sequence[Any] = (),
        dry: bool = False,
        varying: Varying = frozenset(),
        like: Mapping[int, Layout] | None = None,
    ) -> Capture | UnsupportedModel:
        """The captured step, or why there is none.

        - tangents: outputs at which gradients arrive, with their layouts.
        - backward: the autocast that backward runs under.
        - seen: what forward read from tensors on this very call, where an earlier capture tells.
        - dry: it is not to run, so that nothing is compiled.
        - varying: sizes of which other calls have others. Where the step can't be captured for all of them, it is
          captured for this call's alone.
        - like: the gradients that arrived in a call of another size, where that is known. It serves where sizes vary.
        """
        captured = functools.partial(self._captured, sample, backward, seen, dry)
        # All that may vary; without numbers that forward reads; without shapes that depend on data; this call's sizes.
        for sizes in dict.fromkeys((varying, without_numbers(varying), without_numbers(varying) - {FROM_DATA})):
            if not sizes or self._refused >= _MOST_TRIES:
                continue
            found = self._for_all(captured, tangents or like, sizes)
            if isinstance(found, Capture):
                self._refused = 0
                return found
            if isinstance(found, NothingToTrain) or isinstance(way_of(found), TakeBranches):
                return found
            self._refused += not isinstance(found, private.FixedSize)
            log.info("each size gets a plan of its own, because %s", found)
        return captured(tangents, Varying())

    def declared(self, call: Call) -> Varying:
        """The sizes of a call of which the user says that they vary. Raises ValueError where there are none such."""
        dynamic = self._settings.dynamic
        if dynamic == "all":
            return all_sizes(call.tensors)
        found = set()
        for name, ranges in dynamic.items() if isinstance(dynamic, Mapping) else ():
            for index in ranges:
                position = call.names.index(name) if name in call.names else -1
                if position < 0 or not -call.tensors[position].dim() <= index < call.tensors[position].dim():
                    raise ValueError(
                        f"dynamic= names dimension {index} of {name!r}; tensors are {', '.join(call.names)}"
                    )
                found.add(Dimension(position, index % call.tensors[position].dim()))
        return frozenset(found)

    def at_largest(self, captured: Capture) -> Capture:
        """The captured step at the largest sizes of which the user says that they occur."""
        dynamic, traced = self._settings.dynamic, captured.traced
        if not isinstance(dynamic, Mapping) or traced.sizes is None:
            return captured
        names, most = captured.call.names, []
        for source, here in zip(traced.sizes.sources, traced.sizes.here, strict=True):
            if isinstance(source, DataSize) or source.is_stride:  # nobody says how large they get
                return captured
            ranges = dynamic.get(names[source.tensor], {})
            dims = captured.call.tensors[source.tensor].dim()
            bounds = {index % dims: high for index, (_, high) in ranges.items()}
            most.append(bounds.get(source.index, here))
        numbers = tuple(most)
        if (broken := traced.sizes.mismatch(numbers)) is not None:
            log.warning("dynamic= is planned for the sample's sizes first, because %s", broken)
            return captured
        pairs = zip(captured.call.tensors, traced.sizes.layouts(numbers), strict=True)
        tensors = [t.new_zeros(()).expand(size).contiguous().requires_grad_(t.requires_grad) for t, (size, _) in pairs]
        return dataclasses.replace(captured, traced=at_sizes(traced, numbers), call=captured.call.filled(tensors))

    def _for_all(
        self, captured_for: _CapturedFor, tangents: Mapping[int, Layout] | None, varying: Varying
    ) -> Capture | UnsupportedModel:
        """The step for all sizes, compared with the one for this size."""
        captured = captured_for(tangents, varying)
        if isinstance(captured, UnsupportedModel):
            return captured
        step, sizes = captured.traced, captured.traced.sizes
        assert sizes is not None
        nodes = {i: step.tangent_nodes[o.tangent] for i, o in enumerate(step.outputs) if o.tangent is not None}
        arriving = {i: Layout.of(node.meta["val"]) for i, node in nodes.items()}
        for_one = captured_for(arriving, Varying())  # without a second trace for `out.sum()`
        if isinstance(for_one, UnsupportedModel):
            return for_one
        ops, ops_of_one = (
            # Keys of islands say for which sizes they are, and names of ops how many there were before.
            [dataclasses.replace(op, name="", key="" if op.is_island else op.key) for op in step.graph.ops]
            for step in (captured.traced, for_one.traced)
        )
        if ops != ops_of_one or captured.traced.template.plain(sizes.here) != for_one.traced.template.plain():
            return UnsupportedModel("forward does something else where a size is no int: isinstance, str, hash")
        for place in sizes.fixed:
            log.info("a size that varies is fixed, because PyTorch turns it into the number %s", place)
        return captured

    def _captured(
        self,
        sample: Sample | Call,
        backward: Autocast | None,
        seen: Sequence[Any],
        dry: bool,
        tangents: Mapping[int, Layout] | None,
        varying: Varying,
    ) -> Capture | UnsupportedModel:
        settings = self._settings
        options = CaptureOptions(
            loss_fn=settings.loss_fn, device=self._placement.device, tangents=tangents, shards=settings.shards,
            backward=backward, varying=varying, counted=settings.random == "counter", unsteady=self.unsteady,
            capability=settings.capability, seen=seen,
        )  # fmt: skip
        is_real = not any(t.is_meta for t in (*self._model.parameters(), *self._model.buffers()))
        # One run does not tell how islands go with sizes.
        sees = is_real and (not varying or bool(self._known.islands.calls))
        look = functools.partial(self._look_at_forward, sample)
        loop = TraceLoop(self._model, self._forward, sample, options, self._known, look, self.decides and is_real, sees)
        captured = loop.captured()
        if isinstance(captured, UnsupportedModel):
            cause, ours = captured.__cause__, (MemplanError, *private.DATA_DEPENDENT_ERRORS)
            may_be_own = not (cause is None or self._known.compiled or isinstance(cause, ours))
            if self.trains_alone and sees and not varying and may_be_own:
                found = look(NO_ISLANDS, contextlib.nullcontext())
                if isinstance(found, ForwardFails) and type(found.error) is type(cause):
                    raise found  # forward raises it without a plan too
            return captured
        is_whole = settings.shards is None and not self._placement.host and not (varying or dry)
        if is_real and is_whole and (other := self._other_ops(sample, captured)) is not None:
            return UnsupportedModel(
                f"forward goes another way in a trace than when it runs: on the sample it runs {other}. It may ask "
                "what can't be answered for the tensors of a trace: `is`, `__class__`, weak references"
            )
        if settings.kernels == "fused":
            captured = captured.changed(lambda step: fuse_step(step, dry=dry))
        if settings.capability is not None:
            captured = captured.changed(_as_cuda_allocates)
        if settings.update == "backward":
            assert settings.optimizer is not None
            needs, updates = update_needs(settings.optimizer, captured.traced.device), self._placement.updates
            if updates is not None:  # a later one of their plans
                needs = {p: needs.get(p, 0) for p in updates.parameters}
            update_bytes = {name: needs[p] for name, p in self._model.named_parameters() if p in needs}
            captured = captured.changed(lambda step: with_updates(step, update_bytes))
        if self._settings.in_flight > 1:
            captured = captured.changed(with_others_in_flight)
        return self._placement.homed(captured)

    def _other_ops(self, sample: Sample | Call, captured: Capture) -> str | None:
        """How a run of forward differs from its trace, in words; None where it does not, or can't be compared."""
        device, options, graph = self._placement.device, captured.options, captured.traced.graph
        forward = ((op.kind, *(graph.values[v].name for v in op.inputs)) for op in graph.ops[: graph.boundary])
        ops = captured.traced.recorded, *forward
        elsewhere = device not in (None, model_device(self._model)) or options.capability is not None
        if elsewhere or options.counted or ops in self._compared:
            return None  # counted: it has other masks
        with AttributesKept(self._model, run=self.run):
            captured.left.put()
            ran = self._look_at_forward(sample, self._known.islands, contextlib.nullcontext())
        if not isinstance(ran, OneForward):
            log.info("what forward runs is not compared with its trace, because %s", ran)
        elif ran.ops is not None and (other := other_ops_in(captured.traced, ran.ops)) is not None:
            return other
        self._compared.add(ops)  # at other sizes, too
        return None

    @property
    def run(self) -> Forward:
        """What a step runs: forward, or the loss function around it."""
        loss_fn = self._settings.loss_fn
        return self._forward if loss_fn is None else functools.partial(loss_fn, self._model)

    def call_of(self, sample: Sample | Call) -> Call:
        """The call that a sample stands for."""
        return sample if isinstance(sample, Call) else CallReader(self.run).read_sample(sample)

    def _look_at_forward(
        self, sample: Sample | Call, islands: Islands, watching: contextlib.AbstractContextManager[None]
    ) -> OneForward | ForwardFails | UnsupportedModel:
        """Run forward where its parameters are, to see what it does outside of islands; or what goes wrong in it.

        watching: a context that forward runs in. It sees collectives before they are made up.
        """
        model, run, device, call = self._model, self.run, self._placement.device, self.call_of(sample)
        shards = self._settings.shards
        gathering = contextlib.nullcontext() if shards is None else shards.tracing()
        made_up = None if shards is None or isinstance(shards, ShardedModel) else MadeUpWhereUsed(model, shards)

        def look() -> OneForward:
            with gathering, LocalCollectives(), watching:
                if device is None or not self._placement.host:
                    here = call.detached(None if device is None else model_device(model))
                    with torch.enable_grad():
                        return one_forward(model, run, here, made_up, islands)
                with torch.no_grad():
                    fetched = FetchedWhereUsed(self._placement.away(), device, model)
                    return one_forward(model, run, call.detached(device), fetched, islands)

        try:
            return contextvars.copy_context().run(look)
        except (UnsupportedModel, ForwardFails) as error:
            return error.with_traceback(None)


def _as_cuda_allocates(step: Traced) -> Traced:
    """A step with sizes as CUDA's allocator rounds them, and states of generators on the host."""
    device = torch.device("cuda")
    values = tuple(dataclasses.replace(v, size_bytes=allocated_bytes(v.size_bytes, device)) for v in step.graph.values)
    graph = dataclasses.replace(step.graph, values=values, rng_state_bytes=generator_state_bytes(device))
    return dataclasses.replace(step, graph=graph)

"""A model whose forward runs plans. Its class, parameters, `state_dict` keys and output types stay as they are."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.named_state import NamedState
from memplan.capture.ops.op_facts import is_of_pytorch
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Call, Forward
from memplan.errors import MemplanError
from memplan.installed.choice import OnMismatch, StepChoice
from memplan.installed.passes import UnplannedLoss, UnplannedPasses, end_watch, watch_optimizers
from memplan.installed.recovery import OnOutOfMemory, Recovery
from memplan.logs import log
from memplan.planning.planner import Planner
from memplan.plans.plan import Plan
from memplan.runtime.host.fetch import FetchedWhereUsed
from memplan.runtime.program.execute import may_run_again
from memplan.runtime.program.step import PlannedStep, ServingStep
from memplan.runtime.ranks.agreement import Agreement
from memplan.runtime.trial.one_forward import ForwardFails

_COPIED = "a copy of a planned model has no plan; where it trains, call memplan.apply on it"


class PlannedForward:
    """Stands in for `model.forward`: runs plans in training, the original for evaluation and for tracers.

    - original: the forward that was there before. In eval mode it runs where the model was planned in train mode.
    - agreement: see `StepChoice`. on_mismatch, on_oom: as for `memplan.apply`.
    - choice: which step serves a call. recovery: what it takes to go on where a step can't.
    - passes: calls that run without a plan.
    - undo: what else to call when the plan is taken off.
    """

    def __init__(
        self, planner: Planner, on_mismatch: OnMismatch, on_oom: OnOutOfMemory, agreement: Agreement | None
    ) -> None:
        self.model, self.original, self._planner = planner.model, planner.forward, planner
        self.choice = StepChoice(planner, on_mismatch, agreement, self.stepping_aside, self._attend)
        self.recovery = Recovery(self.choice, on_oom)
        self.passes = UnplannedPasses(self.model, planner.limits, planner.placement, self.choice.voice)
        self.undo: list[Callable[[], None]] = []
        self._training = self.model.training
        self._own_attribute = "forward" in vars(self.model)
        self._is_set_aside = False  # the model's own forward is wanted
        self.is_off = False  # for good, but what others have put around this forward still calls it
        self._lock = threading.RLock()  # held by the thread that calls it, for planning exchanges parts of the model
        functools.update_wrapper(self, self.original)

    @property
    def steps(self) -> list[ServingStep]:
        """The steps, one or more for each kind of call, the last one used first."""
        return self.choice.known.all

    @property
    def shards(self) -> Shards | None:
        """The interface to the engine that has sharded the parameters; None if they are whole."""
        return self._planner.settings.shards

    @property
    def plan(self) -> Plan | None:
        """The plan that ran last, or will run first. None before there is one."""
        return self.steps[0].plan if self.steps else None

    @private.uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = private.called_module()
        if module is not None and module is not self.model and vars(module).get("forward") is self:  # a shallow copy
            self.choice.voice.warn({"copy": _COPIED})
            self.leave(module)
            return module.forward(*args, **kwargs)
        with contextlib.nullcontext() if private.someone_traces() else self._lock:
            if self._is_aside():
                self.choice.known.let_go()
                if self._is_set_aside or self.is_off:
                    return self.original(*args, **kwargs)
                with self.fetching(), self.passes.watching(self.plan, self.model, (args, kwargs)):
                    return self.original(*args, **kwargs)
            call = self.choice.reader.read(args, kwargs)
            with contextlib.suppress(ForwardFails):
                try:
                    return self._run_planned(call)
                finally:
                    self.choice.known.declined.clear()  # they may serve the next call
            with self.stepping_aside(), self.fetching():
                # It fails as it does without a plan, after its own side effects.
                return self._planner.capturing.run(*args, **kwargs)

    def _run_planned(self, call: Call) -> Any:
        end_watch(self.model)
        step, again = self.choice.begin(call), False
        while True:
            try:
                if isinstance(step, PlannedStep):
                    return step.run(call)
                with self.stepping_aside(), self.fetching():
                    return step.run(call)
            except Exception as error:
                if not may_run_again(error):
                    if self._may_be_caught(step, error):
                        raise ForwardFails(error) from error
                    raise
                problem = error.with_traceback(None)  # or its frames would keep tensors alive
            repeats = isinstance(step, PlannedStep) and not step.runner.written.for_good
            again = not again and self.recovery.free_memory(problem, repeats)
            if not again:
                self.recovery.prepare_replan(problem, step, repeats)
                step = self.choice.another(call, step)

    def _may_be_caught(self, step: ServingStep, error: Exception) -> bool:
        """Whether the model's own forward runs in place of a plan whose op raised an error: it may catch that error."""
        if not isinstance(step, PlannedStep) or step.runner.undo is None or isinstance(error, MemplanError):
            return False
        placement, settings, traced = self._planner.placement, self._planner.settings, step.capture.traced
        moved = placement.updates or placement.brought or settings.host_budget is not None or self.shards is not None
        users = any(kernel.made and not is_of_pytorch(kernel.target) for kernel in traced.kernels)  # may draw, and log
        if moved or users or traced.template.attributes or any(op.is_collective for op in traced.graph.ops):
            return False
        if not NamedState(self.model, settings.loss_fn).catches:
            return False
        step.runner.undo()
        self.choice.voice.warn({"caught": f"an op of the plan raises {error!r}; that call runs unplanned"})
        return True

    def _is_aside(self) -> bool:
        """Whether this call runs the model's own forward."""
        on_host = self._planner.placement.brought  # where gradients go, so such parameters need a plan in eval mode too
        evaluates = self._training and not self.model.training and not on_host
        if self._is_set_aside or self.is_off or not torch.is_grad_enabled() or evaluates:
            return True
        around: dict[str, str | bool | None] = {
            "tracers": private.someone_traces() and "torch.func, forward-mode differentiation and tracers",
            "saved": private.exchanges_saved_tensors() and "hooks on saved tensors (saved_tensors_hooks, save_on_cpu)",
            "parametrizations": private.parametrizations_are_cached() and "what calls share (parametrize.cached)",
            "shards": self.shards is not None and self.shards.unplanned_because(),
        }
        for subject, reason in around.items():
            if isinstance(reason, str):
                self.choice.voice.warn({subject: f"the model runs unplanned under {reason}"})
                return True
        return False

    def fetching(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the model's own forward, and parts of it, find parameters that live on the host."""
        device = self._planner.placement.device  # in the trace of a model around this one, all is there
        away = [t for t in self._planner.placement.away() if not isinstance(t, private.FakeTensor)]
        return FetchedWhereUsed(away, device, self.model) if away and device is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def stepping_aside(self) -> Iterator[Forward]:
        """A context in which calls of the model run its own forward."""
        with self._lock:
            before, self._is_set_aside = self._is_set_aside, True
            self.choice.known.let_go()
            try:
                yield self.original
            finally:
                self._is_set_aside = before

    def _attend(self, step: ServingStep) -> None:
        if vars(self.model).get("forward") is self:
            self.install()  # the first plan says what else that takes
        if isinstance(step, PlannedStep):
            self.recovery.attend(step)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def install(self) -> None:
        if vars(self.model).get("forward") is not self:
            watch_optimizers(self.model)
        if self.is_off:
            self.is_off = False
        else:
            self.model.forward = self
        if self._planner.placement.updates is not None:
            self._planner.placement.updates.install()

    def uninstall(self) -> None:
        self.choice.known.let_go()
        self._planner.placement.let_go()
        end_watch(self.model)
        if self._planner.placement.updates is not None:
            self._planner.placement.updates.remove()
        self.leave(self.model)

    def leave(self, model: nn.Module) -> None:
        """Give a model, or a shallow copy of it, the forward back that was there before."""
        if vars(model).get("forward") is not self:
            self.is_off = True
        elif self._own_attribute:
            model.forward = self.original
        else:
            del model.forward

    def warn_of_host(self) -> None:
        """Warn that parameters live on the host, where the model's own forward does not find them."""
        device = self._planner.placement.device
        if self._planner.placement.brought and device is not None and device.type != "cpu":
            log.warning(
                "%d parameters live on the host; call model.to(%r) before the model runs without a plan",
                len(self._planner.placement.brought), str(device),
            )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward of a copied model, which has no plan: what a plan knows is about the objects of this one."""
        model = memo.get(id(self.model))
        if model is None:
            return self
        log.warning("%s", _COPIED)
        return copy.deepcopy(self.original, memo) if self._own_attribute else _class_forward(model)

    def __reduce__(self) -> Any:
        """Pickling a model leaves the plan out: what is loaded is the plain model."""
        return _class_forward, (self.model,)


def _class_forward(model: nn.Module) -> Callable[..., Any]:
    return MethodType(type(model).forward, model)


def planned_forward(model: nn.Module) -> PlannedForward | None:
    """The planned forward of a model, or of the one that is compiled in it; None where it has none.

    A shallow copy loses the one of the model that it is a copy of.
    """
    model = private.beneath_compiled(model)
    forward: Any = vars(model).get("forward")
    if isinstance(forward, PlannedForward) and forward.model is not model:
        forward.leave(model)
        return None
    forward = inspect.unwrap(forward, stop=lambda inner: isinstance(inner, PlannedForward))  # accelerate wraps it
    return forward if isinstance(forward, PlannedForward) and not forward.is_off else None


@contextlib.contextmanager
def plans_set_aside(model: nn.Module) -> Iterator[int]:
    """A context in which a model, and those in it, run without their plans, and with the loss that is in the plan.

    Gives the number of these plans. Raises ValueError for a plan that updates parameters in backward.
    """
    count = 0
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            planned = vars(module).get("forward")
            if isinstance(planned, PlannedForward):
                if planned._planner.placement.updates is not None:
                    raise ValueError("a plan with update='backward' leaves no gradients; call memplan.remove first")
                count += 1
                stack.enter_context(planned.stepping_aside())
                stack.enter_context(planned.fetching())
                if (loss_fn := planned._planner.settings.loss_fn) is not None:
                    stack.enter_context(private.exchanged(module, forward=UnplannedLoss(module, loss_fn)))
        yield count

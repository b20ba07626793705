"""memplan in the stages of torch.distributed.pipelining.

schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
plans = plan_stages(schedule, "8GiB")
schedule.step(batch)
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import memplan

StageBudget = int | float | str
StageHostBudget = int | str
PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti

# A forward or backward in a schedule's order: the stage that runs, and by stage how many forwards are in flight then.
ActionMoment = tuple[int, dict[int, int]]

_COMBINATIONS = 4096  # of points of the stages' curves that are tried where stages share a budget


def plan_stages(
    schedule: PipelineSchedule,
    budget: StageBudget | Mapping[int, StageBudget],
    *,
    host_budget: StageHostBudget | Mapping[int, StageHostBudget] | None = None,
    return_outputs: bool = True,
    **apply_keywords: Any,
) -> StagePlans:
    """Plan the stages that a schedule runs on this rank, when its first `step` comes; before anything of it runs.

    - schedule: GPipe, 1F1B, Interleaved 1F1B, or any other that runs each backward in one piece, with its loss
      function. On the last stage the loss is part of the plan.
    - budget: the most bytes that the stages of this rank may hold together, with all microbatches in flight, receive
      buffers and what the schedule keeps to the end of a step: an int or "8GiB". With one stage on the rank it may be a
      fraction of the unplanned peak. With several stages, each has a curve of peak against time, and one point of each
      is chosen, so that all fit together in the least time. What they hold is worked out at each action of the
      schedule's order, with what every stage then has in flight. A dict gives each stage, by its index, a budget of its
      own.
    - host_budget: pinned host memory to which the stages of this rank may offload activations, those of all
      microbatches in flight: an int or "64GiB". Several stages have equal parts of it. A dict gives each stage, by its
      index, one of its own. None: nothing is offloaded. Parameters stay on the device.
    - return_outputs: as `schedule.step` will be told. Without outputs, those of the last stage are freed in each step.
    - apply_keywords: as for `memplan.apply`.

    How many microbatches are in flight is counted from the schedule's own order. Without `input_args` and `output_args`
    of `PipelineStage`, PyTorch's first step runs one microbatch ahead, unplanned, to learn of shapes. Nothing is
    communicated for planning. Raises ValueError for what can't be planned, with what to change; the first step raises
    what `memplan.apply` raises.
    """
    for name in ("sample", "plan", "loss_fn", "in_flight", "surroundings"):
        if name in apply_keywords:
            raise TypeError(f"plan_stages takes no {name}=: that comes from the schedule and its first step")
    _refuse(schedule)
    counts = in_flight(schedule)
    for name, given in (("budgets", budget), ("host budgets", host_budget)):
        if isinstance(given, Mapping) and set(given) != set(counts):
            raise ValueError(f"{name} are for stages {sorted(given)}, but this rank runs stages {sorted(counts)}")
    return StagePlans(schedule, budget, counts, _host_budgets(host_budget, counts), return_outputs, apply_keywords)


def in_flight(schedule: PipelineSchedule) -> dict[int, int]:
    """The most forwards that wait for their backward at once, for each stage of this rank, by its index.

    They are counted over the order of actions that the schedule has worked out. Raises ValueError for a schedule that
    has none, or that splits backward.
    """
    moments = [counts for _, counts in _moments(schedule)]
    return {index: max(counts[index] for counts in moments) for index in moments[0]}


class StagePlans:
    """The plans of one rank's stages. in_flight: microbatches in flight, by stage index."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        budget: StageBudget | Mapping[int, StageBudget],
        counts: dict[int, int],
        host_budgets: Mapping[int, int],
        return_outputs: bool,
        keywords: dict[str, Any],
    ) -> None:
        """Prepare to plan the stages.

        counts, host_budgets: by stage index. Stages without a host budget do not offload.
        """
        self.in_flight = counts
        self._schedule, self._budget, self._host_budgets = schedule, budget, host_budgets
        self._keywords, self._loss_fn = keywords, schedule._loss_fn
        self._stages = {
            stage.stage_index: _Stage(stage, self._loss_fn if stage.is_last else None, return_outputs)
            for stage in _stages(schedule)
        }
        self._planned = False
        self._begins = _begins(schedule)
        setattr(schedule, self._begins, functools.partial(self._begin, getattr(schedule, self._begins)))
        schedule._loss_fn = self._loss

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the stages of this rank hold together, as planned. Raises ValueError before plans."""
        return _together(self._all_plans(), _moments(self._schedule))

    @property
    def host_bytes(self) -> int:
        """Host memory that the stages of this rank need together. Raises ValueError before plans."""
        return sum(plan.host_bytes for plan in self._all_plans().values())

    @property
    def plans(self) -> dict[int, memplan.Plan]:
        """The plan of each stage by its index; empty before the first step."""
        found = {index: memplan.plan_of(stage.whole) for index, stage in self._stages.items()}
        return {index: plan for index, plan in found.items() if isinstance(plan, memplan.Plan)}

    def remove(self) -> None:
        """Take the plans off and put the schedule back as it was. Does nothing the second time."""
        if self._begins not in vars(self._schedule):
            return
        delattr(self._schedule, self._begins)
        self._schedule._loss_fn = self._loss_fn
        for stage in self._stages.values():
            stage.remove()

    def _all_plans(self) -> dict[int, memplan.Plan]:
        plans = self.plans
        if len(plans) < len(self._stages):
            raise ValueError("the stages are planned when the schedule's first step comes")
        return plans

    def _begin(self, initialize: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Plan, beside what a schedule does before a step's first microbatch. That runs unplanned."""
        for stage in self._stages.values():
            stage.aside = True
        initialize(*arguments, **keywords)
        if not self._schedule._has_backward:
            return
        if not self._planned:
            self._plan(*arguments, **keywords)
            self._planned = True
        for stage in self._stages.values():
            stage.aside = False

    def _loss(self, output: Any, target: Any, **keywords: Any) -> Any:
        for stage in self._stages.values():
            if stage.called is not None and output is stage.called[0]:
                return stage.loss(target, keywords)
        assert self._loss_fn is not None
        return self._loss_fn(output, target, **keywords)

    # -- planning ---------------------------------------------------------------------------------------------------

    def _plan(self, args: tuple[Any, ...], kwargs: Any, target: Any = None, loss_kwargs: Any = None) -> None:
        samples = {i: stage.sample(args, kwargs, target, loss_kwargs) for i, stage in self._stages.items()}
        options = {i: self._options(stage.stage) for i, stage in self._stages.items()}
        if isinstance(self._budget, Mapping) or len(self._stages) == 1:
            for i, stage in self._stages.items():
                budget = self._budget[i] if isinstance(self._budget, Mapping) else self._budget
                memplan.apply(stage.whole, samples[i], budget, **options[i])
            return
        if not isinstance(self._budget, (str, int)) or isinstance(self._budget, bool):
            raise ValueError(
                "several stages share this rank's budget, which then is a number of bytes or a str such as '8GiB', got "
                f"{self._budget!r}. A dict gives each stage a budget of its own"
            )
        budget_bytes = memplan.parse_bytes(self._budget) if isinstance(self._budget, str) else self._budget
        known = ("loss_fn", "on_mismatch", "on_oom")  # what exploring does not take
        curves = {
            i: memplan.explore(
                stage.whole, samples[i], **{name: o for name, o in options[i].items() if name not in known}
            )
            for i, stage in self._stages.items()
        }
        chosen = _fastest(curves, _moments(self._schedule), budget_bytes)
        for i, stage in self._stages.items():
            memplan.apply(stage.whole, samples[i], plan=chosen[i], **options[i])

    def _options(self, stage: Any) -> dict[str, Any]:
        """Arguments of `memplan.apply` for one stage, with what PyTorch holds of its inputs and outputs.

        - Buffers for what arrives are there for all microbatches from the first step on. Newer releases than 2.13 make
          them as they are needed, which leaves the difference free.
        - What was sent is held to the end of the step, except by 1F1B, which waits for what it sends.
        - Outputs of the last stage are held to the end too. They are then returned in one piece, when nothing else is
          left of what was in flight.
        - The state of an optimizer counts for one of the stages only.
        """
        count, every = self.in_flight[stage.stage_index], self._schedule._n_microbatches
        sent = (count + 1, 3) if isinstance(self._schedule, Schedule1F1B) else (every, every + 1)
        buffers = memplan.Buffers(
            inputs=every,
            outputs=every if stage.is_last else sent[0],
            output_gradients=None if stage.is_last else every,
            input_gradients=None if stage.is_first else sent[1],
            later_outputs=every + count - 1 if stage.is_last else 0,
        )
        first = stage.stage_index == min(self._stages)
        keywords = {name: value for name, value in self._keywords.items() if first or name != "optimizer"}
        return {
            **keywords,
            "accumulate": True,
            "in_flight": count,
            "host_budget": self._host_budgets.get(stage.stage_index),
            "surroundings": memplan.Surroundings(keeps_parameters=True, buffers=buffers),
        }


class _Whole(nn.Module):
    """What is planned of a stage: its submodule, and on the last stage the loss, with the output if it is wanted."""

    def __init__(
        self, submodule: nn.Module, forward: Callable[..., Any], loss_fn: Callable[..., Any] | None, output: bool
    ) -> None:
        super().__init__()
        self.submodule, self.call, self.loss_fn, self.output = submodule, forward, loss_fn, output

    def forward(self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Any = None) -> Any:
        output = self.call(*args, **kwargs)
        if self.loss_fn is None:
            return output
        loss = self.loss_fn(output, target, **loss_kwargs)
        return loss, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output) if self.output else None


class _Stage:
    """One stage, with a forward that runs the plan where the schedule trains.

    On the last stage forward returns a stand-in. The step runs when the schedule asks for the loss, right after.

    - whole: what is planned.
    - aside: the stage's own forward runs.
    - called: on the last stage, the stand-in that forward returned last, and its arguments.
    """

    def __init__(self, stage: Any, loss_fn: Callable[..., Any] | None, return_outputs: bool) -> None:
        self.stage, self.aside = stage, True
        self._own_attribute = "forward" in vars(stage.submod)
        self._original, self._loss_fn = stage.submod.forward, loss_fn
        self.called: tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]] | None = None
        self.whole = _Whole(stage.submod, self._original, loss_fn, return_outputs)
        stage.submod.forward = self._forward

    def remove(self) -> None:
        if self._own_attribute:
            self.stage.submod.forward = self._original
        else:
            del self.stage.submod.forward
        memplan.remove(self.whole)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        training = self.stage.has_backward and self.stage.submod.training and torch.is_grad_enabled()
        if self.aside or not training:
            return self._original(*args, **kwargs)
        if self._loss_fn is None:
            return self.whole(args, kwargs)
        stand_in = torch.empty(0, device=self.stage.device)
        self.called = stand_in, args, kwargs
        return stand_in

    def loss(self, target: Any, keywords: dict[str, Any]) -> Any:
        """Run the step of the last forward, and put its output where the schedule collects outputs."""
        assert self.called is not None
        stand_in, args, kwargs = self.called
        self.called = None
        loss, output = self.whole(args, kwargs, target, keywords)
        chunks = self.stage.output_chunks
        if chunks and chunks[-1] is stand_in:
            if output is None:
                raise ValueError("the step is to return outputs, but plan_stages was told return_outputs=False")
            chunks[-1] = output
        return loss

    def sample(self, args: tuple[Any, ...], kwargs: Any, target: Any, loss_kwargs: Any) -> tuple[Any, ...]:
        """Arguments like those that `whole` will be called with. For what arrives from another stage they are zeros.

        They are copies, because microbatches are views of a batch, and a plan counts all of the memory behind an input.
        """
        if not self.stage.is_first:
            args = tuple(
                torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self.stage.device)
                .zero_()
                .requires_grad_(meta.requires_grad)
                for meta in (info.tensor_meta for info in self.stage.args_recv_info[0])
            )
        found: list[Any] = [tuple(args), dict(kwargs or {})]
        if self._loss_fn is not None:
            found += [target, dict(loss_kwargs or {})]
        return tuple(
            pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), part)
            for part in found
        )


def _moments(schedule: PipelineSchedule) -> list[ActionMoment]:
    """All that this rank computes, in order. Kinds of actions are PyTorch's: F, B, I, W and others.

    Raises ValueError for a schedule without an order, or whose backward comes in parts.
    """
    order = schedule.pipeline_order
    rank = schedule._stage.stage_index if isinstance(schedule, PipelineScheduleSingle) else schedule.rank
    if not order or rank not in order:
        raise ValueError(
            f"{type(schedule).__name__} has no pipeline_order, from which the microbatches in flight are counted. Use "
            "ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
        )

    def flat(actions: Iterable[Any]) -> Iterator[tuple[str, int]]:
        for action in actions:
            if action is not None and action.sub_actions is not None:
                yield from flat(action.sub_actions)
            elif action is not None:
                yield action.computation_type.value, action.stage_index

    waiting = {stage.stage_index: 0 for stage in _stages(schedule)}
    found = []
    for kind, stage in flat(order[rank]):
        if kind in ("I", "W"):
            raise ValueError(
                f"{type(schedule).__name__} splits backward into a part for inputs and one for weights (zero bubble), "
                "and a planned backward gives both in one piece. Use Schedule1F1B or ScheduleInterleaved1F1B"
            )
        if kind == "F":
            waiting[stage] += 1
        if kind in ("F", "B"):
            found.append((stage, dict(waiting)))
        if kind == "B":
            waiting[stage] -= 1
    return found


def _together(plans: Mapping[int, memplan.Plan], moments: Iterable[ActionMoment]) -> int:
    """The most bytes that these plans of one rank's stages hold at any moment together."""
    idle = {i: plan.problem.resident_bytes - plan.problem.graph.input_bytes for i, plan in plans.items()}

    def held(moment: ActionMoment) -> int:
        stage, counts = moment
        own = plans[stage]
        running = own.peak_bytes - (own.problem.in_flight - counts[stage]) * own.waiting_bytes
        others = [idle[i] + counts[i] * plan.waiting_bytes for i, plan in plans.items() if i != stage]
        return running + sum(others)

    return max(held(moment) for moment in moments)


def _fastest(
    curves: Mapping[int, Sequence[memplan.Plan]], moments: Sequence[ActionMoment], budget_bytes: int
) -> dict[int, memplan.Plan]:
    """One plan of each curve: those that fit together in the least time. Raises BudgetInfeasible.

    Of long curves some points are left out, but not the ends, so that all combinations can be tried.
    """
    most = max(2, int(_COMBINATIONS ** (1 / len(curves))))
    thinned = [[curve[round(k * (len(curve) - 1) / (most - 1))] for k in range(most)] for curve in curves.values()]
    points = [list({id(plan): plan for plan in curve}.values()) for curve in thinned]
    distinct = list({(stage, *counts.items()): (stage, counts) for stage, counts in moments}.values())
    tried_bytes = []
    for chosen in sorted(itertools.product(*points), key=lambda plans: sum(plan.time_s for plan in plans)):
        together = dict(zip(curves, chosen, strict=True))
        held_bytes = _together(together, distinct)
        if held_bytes <= budget_bytes:
            return together
        tried_bytes.append(held_bytes)
    least_bytes = min(tried_bytes)
    raise memplan.BudgetInfeasible(
        f"no plans for stages {', '.join(map(str, curves))}, which share this rank, fit "
        f"{memplan.format_bytes(budget_bytes)} together; {least_bytes} bytes are the least. Raise the budget, use "
        "smaller microbatches, or more ranks",
        least_bytes,
    )


def _host_budgets(
    host_budget: StageHostBudget | Mapping[int, StageHostBudget] | None, stages: Collection[int]
) -> dict[int, int]:
    """Bytes for each stage. Raises TypeError or ValueError for what is not a number of bytes."""
    if host_budget is None:
        return {}
    if isinstance(host_budget, Mapping):
        return {stage: _host_bytes(given) for stage, given in host_budget.items()}
    return dict.fromkeys(stages, _host_bytes(host_budget) // len(stages))


def _host_bytes(given: StageHostBudget) -> int:
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise TypeError(f"host_budget is an int or a str such as '64GiB', got {given!r}")
    size_bytes = memplan.parse_bytes(given) if isinstance(given, str) else given
    if size_bytes <= 0:
        raise ValueError(f"host_budget must be more than 0 bytes, got {given!r}")
    return size_bytes


def _stages(schedule: PipelineSchedule) -> list[Any]:
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else list(schedule._stages)


def _refuse(schedule: PipelineSchedule) -> None:
    """Raise ValueError for what a plan can't be combined with."""
    if "target" not in inspect.signature(getattr(schedule, _begins(schedule))).parameters:
        raise ValueError(
            f"schedules of PyTorch {torch.__version__} prepare their stages without a target, and the last stage is "
            "planned with its loss. PyTorch 2.13 is new enough"
        )
    if schedule._loss_fn is None:
        raise ValueError("the schedule has no loss_fn, so it does not train. Give it one, or leave memplan out")
    if getattr(schedule, "_comp_type_to_function_map", None):
        raise ValueError(
            "the schedule has custom functions for its actions (register_custom_function), and what they hold is not "
            "known. Plan a schedule without them"
        )
    for stage in _stages(schedule):
        wrapper = next((k for k in (DistributedDataParallel, FSDPModule) if isinstance(stage.submod, k)), None)
        if wrapper is not None or any(isinstance(p, DTensor) for p in stage.submod.parameters()):
            raise ValueError(
                f"stage {stage.stage_index} is {'sharded' if wrapper is None else f'a {wrapper.__name__}'}: memplan "
                "plans plain submodules of a stage. Leave the wrapper out and reduce gradients after schedule.step"
            )
        if stage.dw_builder is not None:
            raise ValueError(
                f"stage {stage.stage_index} has a dw_builder, which runs the backward of weights apart. Leave it out"
            )


def _begins(schedule: PipelineSchedule) -> str:
    """The name of what a schedule does before a step's first microbatch."""
    return "_initialize_stage" if isinstance(schedule, PipelineScheduleSingle) else "_initialize_stages"

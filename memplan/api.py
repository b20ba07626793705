"""The public functions: they check arguments, set aside what is installed, and have a `Planner` make the steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.capturable import model_device
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Sample
from memplan.config import ConfigLike
from memplan.errors import Refused, or_raise
from memplan.installed.choice import OnMismatch
from memplan.installed.passes import is_disabled, leave_unplanned, refuse_without_forward
from memplan.installed.planned_forward import PlannedForward, planned_forward
from memplan.installed.recovery import OnOutOfMemory
from memplan.logs import log
from memplan.planned_models import refuse_no_module
from memplan.planning.limits import AUTOMATIC, automatic_bytes, budget_of_environment, prepare_allocator
from memplan.planning.planner import Planner
from memplan.planning.settings import CostSource, Dynamic, Kernels, LossFunction, OnInfeasible, Settings, Update, one_of
from memplan.plans.figures import Random
from memplan.plans.plan import Plan
from memplan.problem.budgets import BudgetLike
from memplan.problem.data import Link, Surroundings
from memplan.runtime.host.place import Init
from memplan.runtime.program.program import Grads
from memplan.runtime.program.step import ServingStep, step_or_raise
from memplan.runtime.ranks.agreement import Agreement, Share, measure_network
from memplan.runtime.ranks.sharded_model import ShardedModel
from memplan.runtime.trial.one_forward import errors_of_forward
from memplan.torch_private import pytree


def apply(
    model: nn.Module,
    sample: Sample | None = None,
    budget: BudgetLike | None = None,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    costs: CostSource = "measure",
    accumulate: bool = False,
    grads: Grads = "surface",
    config: ConfigLike = None,
    host_budget: int | str | None = None,
    link: Link | None = None,
    update: Update = "step",
    in_flight: int = 1,
    shards: Shards | None = None,
    init: Init | None = None,
    keep_frozen: bool = False,
    arena: bool = True,
    kernels: Kernels = "eager",
    random: Random = "eager",
    dynamic: Dynamic = "auto",
    on_mismatch: OnMismatch = "replan",
    on_oom: OnOutOfMemory = "raise",
    on_infeasible: OnInfeasible = "advise",
    surroundings: Surroundings | None = None,
    plan: Plan | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> nn.Module:
    """Make the model's training step fit a budget, in place; outputs and gradients stay the same bits.

    - sample: a batch like those to come: a tensor, a tuple of arguments, or a dict of keyword arguments of forward.
        None: the first call is planned when it comes.
    - budget: the most bytes that the step may hold on the device, everything included: an int, "8GiB", "8GB", a
        fraction of the unplanned peak (0.5, "0.5", "50%"), or a `Budget`. For a fraction, it is the unplanned peak of
        the first plan. "min": the least that the first plan can do with. None: `MEMPLAN_BUDGET` of the environment,
        else "auto". "auto": what the device has free and this process holds, less a tenth of the device; on a CPU, of
        the machine's memory.
    - loss_fn: `loss_fn(model, *args, **kwargs)` runs in place of `model(*args, **kwargs)`, so that the loss is part of
        the step; the planned model is then called with those arguments and returns the loss.
    - optimizer: counts its state and its `step()` into the budget.
    - device: plan for a sample that is on another device than the model.
    - costs: "measure" times each distinct op on the model's device; "estimate" times none, and knows nothing of
        kernel scratch, by which a step may then exceed the budget. A `Roofline` estimates for a device of that speed:
        with `device="cpu"` and a model on the meta device, `plan` tells what a large model would take on a card.
    - accumulate: gradients of earlier micro-batches are held while the step runs.
    - grads: "surface" puts each gradient into `.grad` in the middle of backward, as soon as it is final. "edges" gives
        all of them to autograd at the end of backward, which serves `torch.autograd.grad` and `backward(inputs=...)`.
    - config: how the plan is looked for: a `Config` or the name of a preset ("auto", "noremat", "rotor", "checkmate",
        "rockmate", "hilp", "hiremate", "offmate"). None is "auto", the best of all. Ctrl-C during a long search takes
        the best plan so far.
    - host_budget: pinned host memory that the step may use, an int or "64GiB": activations are then offloaded to it,
        and parameters may live there with their gradients and optimizer state. They stay `nn.Parameter`s of the model,
        on the CPU; `optimizer.step()`, `state_dict()` and clipping work as ever (make the optimizer with `fused=True`:
        the CPU takes much less time for that). It is for all forwards in flight, each of which has host memory of its
        own. Of a model that went through `fully_shard`, units with a `CPUOffloadPolicy` decide instead. None:
        nothing is offloaded.
    - link: speed of the connection to host memory, where it should not be measured.
    - update: "backward" updates each parameter with the optimizer as soon as its gradient arrives and frees the
        gradient, so that gradients of the whole model never exist at once. `optimizer.step()` then finds none; go on
        calling it, for it ends the step, as schedulers and hooks expect. Any optimizer of torch.optim but LBFGS.
        Nothing may look at all gradients between backward and step: clipping by global norm finds none, and clips
        nothing; accumulating over several batches, a GradScaler and several processes are refused.
    - in_flight: forwards that wait for their backward at once, as in a stage of a pipeline: the budget is for all of
        them together, with gradients that accumulate. A schedule's count is its most forwards minus backwards.
    - shards: the engine that has sharded the parameters over ranks. The plan then says when each is gathered and
        freed; what is gathered is in the peak. Every rank must run the same plan: give group=, or make it on one rank
        and give it to all with plan=; without group= calls that it does not serve raise PlanMismatch, for a rank that
        plans alone would gather in another order.
    - init: for a model on the meta device, with `device=`: `init(name, tensor)` fills each parameter and buffer, in
        place and where it will live, so that the model never exists as a whole on the device. It may be called more
        than once for a name where ops are timed. Parameters become new objects, also in an optimizer given here.
    - keep_frozen: with a host budget, copies of frozen parameters that live on the host may stay on the device from one
        step to the next, where there is room between steps: what backward reads last, forward reads first. You promise
        that nothing writes to frozen parameters through `.data`, NumPy or other tensors that share their memory; copies
        would then be stale. All other changes are noticed (in place, `load_state_dict`, other parameters), and copies
        are freed where the model runs in eval mode or under no_grad (so `merge_adapter` of peft for an evaluation is
        fine), or another plan runs.
    - arena: on CUDA, a step has memory of its own where that lets PyTorch's allocator reserve less: each block of more
        than 1 MiB has a place there that is planned. `torch.cuda.max_memory_allocated` then counts blocks that keep
        places free. Others get of that memory when the rest of the device is full. False: the allocator chooses.
    - kernels: "eager" runs the kernels that the model runs by itself, and gives its bits. "fused" compiles groups of
        pointwise ops and reductions with PyTorch's Inductor, which is faster and takes less memory. The step then gives
        the bits of that program, the same at any budget and in any process with the same versions and device; they
        differ from plain PyTorch's by rounding (`plan.exact` says which, `compare_kernels` how much). It needs a C++
        compiler, or Triton on a GPU.
    - random: whose masks dropout has. "eager": those of PyTorch's kernels. "counter", with fused kernels: groups make
        them, other ones, from seeds that PyTorch's generator gives once a step. Dropout is then no kernel of its own,
        and a mask that is kept takes a byte for each number. Random ops beside dropout and `bernoulli_`, and calls that
        run as they are, keep PyTorch's.
    - dynamic: sizes of the arguments that vary from call to call (lengths, batches, images). One capture then serves
        all of them, with schedules for long and short calls, and each call takes the fastest that fits at its own
        sizes. "auto": those in which the first two calls differ. A dict says which, and how far: {"input_ids": {1: (8,
        4096)}}; it is planned for the largest. "all": every size. "never": each size gets a plan of its own. It
        does too with fused kernels, sharded parameters or update="backward", and where forward itself depends on a
        size.
    - on_mismatch: what a call does that no plan serves (other shapes, modes, settings): "replan" makes a plan for it,
        which is kept; "raise" raises PlanMismatch with what changed.
    - on_oom: what an out-of-memory error of the device does: "raise" adds advice to it; "replan" runs the step again
        with all free memory in one piece, then with plans of larger and larger margins, and nothing is lost. The margin
        is kept until the process ends.
    - on_infeasible: what happens where no schedule fits the budget: "advise" looks for what would make it fit (offload,
        smaller batches, another loss, ...), each by a plan of its own, and raises BudgetInfeasible with what it found;
        "raise" raises at once; "min" raises the budget to the least, with a warning.
    - surroundings: what an engine around the model holds on the device beside the step.
    - plan: run this plan (from `plan`, `explore` or a file) instead of making one.
    - group: the ranks that train this model together, where collectives follow the order in which gradients arrive, or
        are part of the plan (ZeRO). Before each planned step they make sure that all of them run the same collectives
        in the same order, else PlanMismatch is raised on all; ranks with equal steps and budgets share one plan; what
        goes wrong in planning on one is raised on all. Each has to call `apply`, and then the planned model equally
        often. None: this rank decides alone.

    Returns the same model, without a plan where `MEMPLAN_DISABLE` is set. Raises BudgetInfeasible (with the smallest
    budget that can be met), UnsupportedModel, PlanMismatch (`plan` belongs to another step), ValueError or TypeError
    (bad arguments); then the model is as it was.
    """
    if is_disabled():
        needs = [name for name, given in (("init", init), ("shards", shards)) if given is not None]
        return leave_unplanned(model, loss_fn, needs[0] if needs else None)
    # 1. Arguments are checked. PyTorch's allocator alone is set anew, for plans are made for its setting.
    refuse_no_module(model)
    one_of("on_mismatch", on_mismatch, get_args(OnMismatch))
    one_of("on_oom", on_oom, get_args(OnOutOfMemory))
    shards = shards or _sharded(model)
    if isinstance(shards, ShardedModel):
        group = group or shards.group()
    _refuse_combinations(sample, budget, plan, group, shards, on_oom)
    named = named_budget(budget, model, device) if plan is None else None
    automatic = type(named) is int and named is not budget  # bytes that nobody named
    settings = Settings(
        budget=named, loss_fn=loss_fn, optimizer=optimizer, device=device, costs=costs, accumulate=accumulate,
        grads=grads, config=config, host_budget=host_budget, link=link, update=update, in_flight=in_flight,
        shards=shards, surroundings=surroundings or Surroundings(), init=init, keep_frozen=keep_frozen, arena=arena,
        kernels="fused" if plan is not None and plan.exact == "program" else kernels,
        random=random if plan is None else plan.random, dynamic=dynamic, on_infeasible=on_infeasible,
    )  # fmt: skip
    if settings.capability is not None:
        raise ValueError(
            "costs=Roofline(capability=...) plans the kernels of a device that is not here, for plan and explore to "
            "tell of; leave capability= out to run a step"
        )
    of_units = shards.device if isinstance(shards, ShardedModel) else None
    here = settings.target_device or of_units or next((p.device for p in model.parameters()), torch.device("cpu"))
    if automatic and here.type == "cuda" and optimizer is None and settings.surroundings == Surroundings():
        log.warning("the budget 'auto' leaves no room for an optimizer's state, which comes later: pass optimizer=")
    prepare_allocator(here)

    # 2. What runs in place of the model's own forward is set aside: compiled code, a plan, hooks of FSDP, checkpoints.
    given, began_s = model, time.monotonic()
    is_compiled = settings.kernels == "fused" and any(map(private.is_compiled, model.modules()))
    agreement = None if group is None else Agreement(group, one_schedule=shards is not None)
    with contextlib.ExitStack() as aside:
        with _own_forward(given, settings, aside, agreement) as (model, checkpointed):
            refuse_without_forward(model)

            # 3. A planner makes the first step, which the planned model will find among those that it chooses from.
            planner = Planner(model, model.forward, settings, grouped=group is not None)
            planner.check_optimizer()
            if agreement is not None and settings.costs == "measure":
                measured = functools.partial(measure_network, agreement.group, here)
                planner.placement.network = agreement.together(measured)
                if isinstance(shards, ShardedModel):
                    shards.network = planner.placement.network
            planned = PlannedForward(planner, on_mismatch, on_oom, agreement)
            planner.limits.recall(planner.placement.device)
            planner.limits.keeps_written = on_oom == "replan"
            make = None if sample is None else functools.partial(_first_step, planner, sample, plan)
            if agreement is not None:
                step = agreement.step(lambda: None, make)
            else:
                with errors_of_forward():
                    step = None if make is None else make()
            if step is not None:
                planned.choice.add(step, time.monotonic() - began_s)

        # 4. The planned model's forward is put in the place of the model's own. `memplan.remove` undoes what 2. did.
        if (before := planned_forward(model)) is not None:  # `_own_forward` has put it back
            before.uninstall()
            planned.undo = before.undo
        planned.undo.append(aside.pop_all().close)
        planned.install()
    if is_compiled:
        log.warning("the plan compiles groups of ops itself, and runs in place of what torch.compile made")
    if checkpointed:
        log.warning("gradient checkpointing is switched off, for the plan decides what is recomputed")
    return given


def _first_step(planner: Planner, sample: Sample, plan: Plan | None, share: Share | None = None) -> ServingStep:
    """The step for the sample. plan: which it runs."""
    with planner.tracing():
        if plan is not None:
            return or_raise(planner.adopt(sample, plan))
        return step_or_raise(planner.step(sample, share=share))


def _refuse_combinations(
    sample: Sample | None,
    budget: BudgetLike | None,
    plan: Plan | None,
    group: torch.distributed.ProcessGroup | None,
    shards: Shards | None,
    on_oom: OnOutOfMemory,
) -> None:
    """Raise TypeError or ValueError for arguments of the wrong kind, or that do not go together."""
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan is a memplan.Plan, as memplan.Plan.load reads from a file, got {type(plan).__name__}")
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"group is a process group, such as torch.distributed.group.WORLD, got {group!r}")
    if plan is not None and budget is not None:
        raise TypeError("give a budget or a plan, not both: a plan has its budget in it")
    if plan is not None and sample is None:
        raise TypeError("with plan= give the sample that it was made for")
    if shards is not None and on_oom == "replan":
        raise ValueError('on_oom="replan" would plan on one rank alone, in another order of gathers. Leave it out')
    if shards is not None and sample is None and group is None:
        raise TypeError("with shards= give a sample or group=: in training each rank would plan for itself")


def _sharded(model: nn.Module) -> ShardedModel | None:
    """The shards of a model with DTensors as parameters, the same ones while it has a plan; None for other models."""
    before = planned_forward(model)
    known = None if before is None else before.shards
    return known if isinstance(known, ShardedModel) else ShardedModel.of(model)


def named_budget(budget: BudgetLike | None, model: nn.Module, device: torch.device | str | None) -> BudgetLike:
    """The budget; where none is named that of the environment, and where that is to be found out, the device's room."""
    budget = budget_of_environment() if budget is None else budget
    if budget is not None and budget != AUTOMATIC:
        return budget
    shards = _sharded(model)  # whose parts may be on the host
    return automatic_bytes(torch.device(device or (shards and shards.device) or model_device(model)))


def plan(model: nn.Module, sample: Sample, budget: BudgetLike | None = None, **settings: Any) -> Plan:
    """The plan that `apply` would run, without touching the model.

    settings: loss_fn, optimizer, device, costs, accumulate, grads, config, host_budget, link, update, in_flight,
    shards, keep_frozen, arena, kernels, random, on_infeasible and surroundings, as for `apply`, which says what they
    are and what they raise.
    """
    return or_raise(plan_or_refusal(model, sample, budget, **settings))


def plan_or_refusal(model: nn.Module, sample: Sample, budget: BudgetLike | None, **settings: Any) -> Plan | Refused:
    """What `plan` returns or raises, as a result."""
    refuse_no_module(model)
    budget = named_budget(budget, model, settings.get("device"))
    with _to_look_at(model, _settings("plan", model, budget, settings, but=("dynamic",))) as planner:
        return planner.plan(sample)


def explore(model: nn.Module, sample: Sample, **settings: Any) -> tuple[Plan, ...]:
    """The curve of peak against time: plans from the smallest budget to the unplanned step, peaks up and times down.

    Each plan can run: `apply(model, sample, plan=point)`. settings: those of `plan` but for update, shards,
    keep_frozen and on_infeasible. With a host budget, which is the same for all points, they may offload.
    """
    refuse_no_module(model)
    without = ("update", "shards", "keep_frozen", "dynamic", "on_infeasible")
    with _to_look_at(model, _settings("explore", model, None, settings, without)) as planner:
        return or_raise(planner.explore(sample))


@contextlib.contextmanager
def _to_look_at(model: nn.Module, settings: Settings) -> Iterator[Planner]:
    """A context with a planner for the model beneath `torch.compile`. What is installed is set aside."""
    with contextlib.ExitStack() as aside, _own_forward(model, settings, aside) as (model, _), errors_of_forward():
        planner = Planner(model, model.forward, settings)
        planner.check_optimizer()
        yield planner


def _settings(
    function: str, model: nn.Module, budget: BudgetLike | None, given: dict[str, Any], but: Collection[str] = ()
) -> Settings:
    """Settings from the keywords of a function. Raises TypeError for those that it does not take."""
    known = {field.name for field in dataclasses.fields(Settings)} - {"budget", "init", *but}
    strange = sorted(given.keys() - known)
    if strange:
        raise TypeError(f"{function}() got an unexpected keyword argument {strange[0]!r}; it takes {sorted(known)}")
    if given.get("surroundings", 0) is None:
        given.pop("surroundings")
    given["shards"] = given.get("shards") or _sharded(model)
    return Settings(budget, **given)


def prepare(model: nn.Module, samples: Sequence[Sample]) -> tuple[Plan | None, ...]:
    """Plan a planned model for further kinds of calls ahead of time, the largest first. Gives their plans in order.

    Where ranks train the model together (`group=` of `apply`), each calls this with equally many samples. The ranks
    agree on a plan for each sample in turn, as they do before steps.

    Raises BudgetInfeasible where one can't fit the budget, now instead of in the middle of training. Raises ValueError
    where the model has no plan yet. In a group, what goes wrong on one rank is raised on all.
    """
    refuse_no_module(model)
    if isinstance(samples, (torch.Tensor, Mapping)):
        raise TypeError(f"samples is a list of samples, got {type(samples).__name__}: write [sample] for one")
    planned = planned_forward(model)
    if is_disabled():
        return (None,) * len(samples)
    if planned is None:
        raise ValueError("the model is not planned yet; call memplan.apply(model, sample, budget) first")
    tensors = [[t for t in pytree.tree_leaves(sample) if isinstance(t, torch.Tensor)] for sample in samples]
    sizes_bytes = [sum(t.numel() * t.element_size() for t in of_one) for of_one in tensors]
    order = sorted(range(len(samples)), key=sizes_bytes.__getitem__, reverse=True)
    plans = {index: planned.choice.prepare(samples[index]) for index in order}
    return tuple(plans[index] for index in range(len(samples)))


@contextlib.contextmanager
def _own_forward(
    model: nn.Module, settings: Settings, aside: contextlib.ExitStack, agreement: Agreement | None = None
) -> Iterator[tuple[nn.Module, bool]]:
    """A context with the model beneath `torch.compile`, which has its own forward, and whether it had checkpoints on.

    For fused kernels, modules in it run as they are. An installed plan is back when the context ends; checkpoints by
    the flag `gradient_checkpointing`, as models of transformers have it, hooks of FSDP and compiled code are once
    `aside` closes.
    """
    if settings.kernels == "fused":
        model = aside.enter_context(private.compiled_aside(model))
    before = planned_forward(model)
    if before is not None:
        before.uninstall()
    try:
        if isinstance(settings.shards, ShardedModel):
            take_over = functools.partial(settings.shards.take_over, aside)
            take_over() if agreement is None else agreement.together(take_over)
        checkpointed: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
        for module in checkpointed:
            module.gradient_checkpointing = False
            aside.callback(setattr, module, "gradient_checkpointing", True)
        yield model, bool(checkpointed)
    finally:
        if before is not None:
            before.install()

"""Plans for the step that a DeepSpeed engine runs on each rank."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled

import memplan

from .memory import needs_of
from .pipeline import apply_to_stage
from .refusals import refuse
from .section import MemplanConfig, RankBudget
from .watch import Watch
from .zero3 import apply_sharded


def initialize(*arguments: Any, sample: Any = None, **keywords: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` with the same arguments and result, and a plan for what each rank runs.

    sample: as for `attach`, whose errors are raised too.
    """
    engine, optimizer, loader, scheduler = deepspeed.initialize(*arguments, **keywords)
    attach(engine, sample)
    return engine, optimizer, loader, scheduler


def attach(engine: DeepSpeedEngine, sample: Any = None) -> DeepSpeedEngine:
    """Plan what an engine runs on this rank, as the `memplan` section of its config says. Call it on every rank.

    The engine comes from `deepspeed.initialize`, or is what `accelerator.prepare` of Accelerate gives for a model. The
    loop around it does not change; `memplan.remove(engine.module)` takes the plan off again.

    - sample: a batch like those that the engine will be called with: a tensor, a tuple of arguments, or a dict of
      keyword arguments, on the engine's device. None: the first call is planned when it comes.

    Returns the same engine. Raises ValueError for a section or an engine that can't be planned, with what to change,
    and what `memplan.apply` raises.
    """
    section = MemplanConfig.of(engine_config(engine))
    if section.enabled:
        plan_engine(engine, section, sample)
    return engine


def engine_config(engine: DeepSpeedEngine) -> Any:
    """The DeepSpeed config that an engine was made with. Raises TypeError for what is not an engine."""
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"memplan got {type(engine).__name__} where a DeepSpeed engine is needed: what deepspeed.initialize, or "
            "accelerator.prepare under a DeepSpeedPlugin, returns for the model"
        )
    return engine.config


def plan_engine(engine: DeepSpeedEngine, section: MemplanConfig, sample: Any = None) -> Watch:
    """`attach`, with a section that was read already. The watch ends by itself once it has told everything."""
    refuse(engine)
    stage, stages = (engine.stage_id, engine.num_stages) if isinstance(engine, PipelineEngine) else (0, 1)
    place = torch.distributed.get_rank(), torch.distributed.get_world_size(), stage, stages
    budget, host_budget = section.budget_of(*place), section.host_budget_of(*place)
    watch = Watch(engine, stage)
    apply_plan(engine, sample, budget, host_budget=host_budget, **section.apply_keywords())
    watch.begin()
    return watch


def apply_plan(engine: DeepSpeedEngine, sample: Any, budget: RankBudget | None, **apply_keywords: Any) -> None:
    """Plan what an engine runs on this rank, in the way that suits the engine. Raises what `memplan.apply` raises."""
    if engine.zero_optimization_partition_weights():
        apply_sharded(engine, sample, budget, **apply_keywords)
        return
    replicas = engine.data_parallel_group
    group = replicas if torch.distributed.get_world_size(replicas) > 1 else None
    keywords = {**needs_of(engine)._asdict(), **apply_keywords, "group": group}
    with autocast_if_enabled(engine):  # as around the engine's forward
        if isinstance(engine, PipelineEngine):
            apply_to_stage(engine, sample, budget, **keywords)
        else:
            memplan.apply(engine.module, sample, budget, **keywords)

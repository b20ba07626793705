"""memplan makes a PyTorch training step fit a byte budget, with the same bits in outputs and gradients.

    memplan.apply(model, sample, "8GiB")

Names are loaded when first used, so that `memplan.solvers` works without torch.
"""

from typing import TYPE_CHECKING, Any

from memplan import logs as logs  # lines of integrations go through it, too

if TYPE_CHECKING:
    from memplan.api import apply as apply
    from memplan.api import explore as explore
    from memplan.api import plan as plan
    from memplan.api import prepare as prepare
    from memplan.batch_size import SizedChoice as SizedChoice
    from memplan.batch_size import largest_batch as largest_batch
    from memplan.batch_size import longest_sequence as longest_sequence
    from memplan.capture.shards import Shard as Shard
    from memplan.capture.shards import Shards as Shards
    from memplan.capture.trace.islands import opaque as opaque
    from memplan.config import Config as Config
    from memplan.config import generate_config as generate_config
    from memplan.config import load_config as load_config
    from memplan.config import save_config as save_config
    from memplan.errors import BudgetInfeasible as BudgetInfeasible
    from memplan.errors import IllegalSchedule as IllegalSchedule
    from memplan.errors import InvalidPlanFile as InvalidPlanFile
    from memplan.errors import MemplanError as MemplanError
    from memplan.errors import PlanMismatch as PlanMismatch
    from memplan.errors import Remedy as Remedy
    from memplan.errors import UnsupportedModel as UnsupportedModel
    from memplan.exactness import Audit as Audit
    from memplan.exactness import Finding as Finding
    from memplan.exactness import audit as audit
    from memplan.kernel_errors import KernelErrors as KernelErrors
    from memplan.kernel_errors import compare_kernels as compare_kernels
    from memplan.losses import chunked_loss as chunked_loss
    from memplan.planned_models import fetching as fetching
    from memplan.planned_models import grown_bytes as grown_bytes
    from memplan.planned_models import on_remove as on_remove
    from memplan.planned_models import plan_of as plan_of
    from memplan.planned_models import remove as remove
    from memplan.planned_models import report as report
    from memplan.planned_models import watch as watch
    from memplan.plans.plan import Plan as Plan
    from memplan.problem.budgets import Budget as Budget
    from memplan.problem.data import Buffers as Buffers
    from memplan.problem.data import GatherSpeed as GatherSpeed
    from memplan.problem.data import Link as Link
    from memplan.problem.data import Roofline as Roofline
    from memplan.problem.data import Surroundings as Surroundings
    from memplan.units import format_bytes as format_bytes
    from memplan.units import parse_bytes as parse_bytes

__version__ = "0.1.0"

_HOMES = {
    "apply": "api", "explore": "api", "plan": "api", "prepare": "api",
    "fetching": "planned_models", "grown_bytes": "planned_models", "on_remove": "planned_models",
    "plan_of": "planned_models", "remove": "planned_models", "report": "planned_models",
    "watch": "planned_models",
    "largest_batch": "batch_size", "longest_sequence": "batch_size", "SizedChoice": "batch_size",
    "audit": "exactness", "Audit": "exactness", "Finding": "exactness",
    "compare_kernels": "kernel_errors", "KernelErrors": "kernel_errors",
    "Config": "config", "generate_config": "config", "load_config": "config", "save_config": "config",
    "BudgetInfeasible": "errors", "IllegalSchedule": "errors", "InvalidPlanFile": "errors", "MemplanError": "errors",
    "PlanMismatch": "errors", "Remedy": "errors", "UnsupportedModel": "errors", "chunked_loss": "losses",
    "opaque": "capture.trace.islands",
    "Plan": "plans.plan", "Budget": "problem.budgets", "Buffers": "problem.data", "GatherSpeed": "problem.data",
    "Link": "problem.data", "Roofline": "problem.data", "Surroundings": "problem.data",
    "Shard": "capture.shards", "Shards": "capture.shards", "format_bytes": "units", "parse_bytes": "units",
}  # fmt: skip

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memplan' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"memplan.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

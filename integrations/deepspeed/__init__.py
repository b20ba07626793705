"""memplan in DeepSpeed: each rank's step is planned within that rank's budget.

from memplan.integrations.deepspeed import initialize
engine, optimizer, loader, scheduler = initialize(model=model, config=config, sample=batch)

The budget is given in the `memplan` section of the DeepSpeed config; `MemplanConfig` lists its keys. For the Trainer of
transformers there is `MemplanDeepSpeedCallback`. With Accelerate, call `attach` on the model that `accelerator.prepare`
returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .engine import attach as attach
from .engine import initialize as initialize
from .section import MemplanConfig as MemplanConfig

if TYPE_CHECKING:
    from .trainer import MemplanDeepSpeedCallback as MemplanDeepSpeedCallback

__all__ = ["MemplanConfig", "MemplanDeepSpeedCallback", "attach", "initialize"]


def __getattr__(name: str) -> Any:
    if name != "MemplanDeepSpeedCallback":  # which needs transformers
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .trainer import MemplanDeepSpeedCallback

    return MemplanDeepSpeedCallback

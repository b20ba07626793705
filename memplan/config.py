"""How plans are looked for: which methods, and how hard.

Presets carry the names of the published systems whose method they run:

- "noremat": nothing is recomputed. What eager PyTorch does.
- "rotor": a chain of blocks, each kept whole or run again whole (Herrmann et al., arXiv 1911.13214).
- "checkmate": any op of the whole step may run again (Jain et al., arXiv 1910.02653): exact where the step is small,
  minimum cuts where it is not.
- "rockmate": a chain of blocks with many options for each, found exactly (Zhao et al., arXiv 2307.01236).
- "hilp", "hiremate": the same hierarchically, on any graph (Gusak et al., HiRemate, 2024).
- "offmate": those of "hiremate", with activations, weights, gradients and optimizer state on the host where that is
  faster (OffMate, in the same repository as Rockmate). It takes a host budget; without one it is "hiremate".
- "auto": all of them, and a local search from what they find. Never worse than any of the others.

Whatever the preset, a plan that is given a host budget may offload, and is never slower than the same preset's without.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("textbook", "rotor", "cuts", "blocks", "exact", "flat", "moments", "hierarchy")
_GONE = ("backward_orders", "order_moves")  # fields of earlier versions
_FORMAT = "memplan.config"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Config:
    """Everything but `timeout_s` is a choice or a count, so that a plan is the same on every machine.

    methods: where schedules come from. "textbook": recompute every block, or sqrt(n) segments. "rotor": plain Rotor.
        "cuts": minimum cuts over the whole step. "blocks": Rotor over blocks with options from minimum cuts. "exact":
        the same with exact options as well. "flat": the whole step as one block: exact where it is small.
        "moments": saved sets that suit the moments at which the lower bound is tight. "hierarchy": Rotor over blocks
        that are chains of blocks themselves. Keeping everything is always among the schedules.
    polish: a local search on flat schedules, from all that the methods found.
    timeout_s: a safety stop. After so many seconds the best schedules so far are taken and the plan says `truncated`.
    coarse_blocks, fine_blocks: most blocks of the two chains. coarse_slots, fine_slots: memory sizes told apart.
    cuts, block_cuts: minimum cuts for the whole step and for a block. options: most options of a block.
    exact_nodes: nodes that an exact search may expand for one budget of one block. exact_parts: limits tried on the
        bytes that a block saves, and as many on its peak. exact_ops: most forward ops of the largest blocks.
        exact_work: ops of blocks that are searched at all, fewer in long steps; beyond that a block's options are not
        proven to be best.
    flat_nodes, flat_parts: the same for the whole step. flat_work: cap on its budgets for long steps, times ops.
    sizes: plans expanded for each chain. points: most points that are kept of the curve of peak against time.
    grid, passes: peaks to which plans are lowered and filled, up to three times as many for short steps, and how often.
    descents, descent_steps: schedules taken down towards the floor, and in how many steps at most.
    rounds, width: splits of a value's life that lower a peak, and values tried for each.
    exchanges, neighbours: recomputations that are traded for others at each point, and several left out at once.
    moments: moments of the backward pass that the lower bound tries at each budget; it keeps the best lines at as many
        budgets as `cuts`.
    lower_work, exchange_work, neighbour_work, moment_work: caps on the same for long steps, as ops times what is
        counted; grid_work: steps so short that they stay below it have more of the grid.
    """

    methods: tuple[str, ...] = METHODS
    polish: bool = True
    timeout_s: float = 600.0
    coarse_blocks: int = 96
    fine_blocks: int = 160
    coarse_slots: int = 600
    fine_slots: int = 300
    cuts: int = 20
    block_cuts: int = 8
    options: int = 24
    exact_nodes: int = 50
    exact_parts: int = 5
    exact_ops: int = 45
    exact_work: int = 300
    flat_nodes: int = 1_000
    flat_parts: int = 10
    flat_work: int = 5_000
    sizes: int = 16
    points: int = 32
    grid: int = 40
    passes: int = 1
    descents: int = 6
    descent_steps: int = 20
    rounds: int = 400
    width: int = 6
    exchanges: int = 60
    neighbours: int = 200
    moments: int = 10
    lower_work: int = 1_500_000
    exchange_work: int = 400_000
    neighbour_work: int = 800_000
    moment_work: int = 10_000
    grid_work: int = 20_000

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(self.methods))
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown:
            raise ValueError(f"unknown method {unknown[0]!r}; there are {', '.join(METHODS)}")
        if type(self.polish) is not bool:
            raise TypeError(f"polish must be True or False, got {self.polish!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("polish", "methods"):
                continue
            kinds = (int, float) if field.name == "timeout_s" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(f"{field.name} must be {'a number' if float in kinds else 'an int'}, got {value!r}")
            least = 1 if field.name in _AT_LEAST_ONE else 0
            if not value >= least:
                raise ValueError(f"{field.name} must be {least} or more, got {value!r}")


_AT_LEAST_ONE = frozenset(
    {"coarse_blocks", "fine_blocks", "coarse_slots", "fine_slots", "options", "sizes", "points", "passes"}
)

PRESETS: dict[str, Config] = {
    "noremat": Config((), polish=False),
    "rotor": Config(("rotor",), polish=False),
    "checkmate": Config(("cuts", "flat"), polish=False),
    "rockmate": Config(("exact",), polish=False),
    "hilp": Config(("blocks", "exact", "hierarchy"), polish=False),
    "hiremate": Config(("blocks", "exact", "hierarchy"), polish=False),
    "offmate": Config(("blocks", "exact", "hierarchy"), polish=False),
    "auto": Config(),
}

ConfigLike = Config | str | None


def generate_config(preset: str = "auto", **changes: Any) -> Config:
    """A preset by its name, with these fields changed. Raises ValueError for an unknown preset, TypeError for an
    unknown field."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[preset], **changes)


def config_of(config: ConfigLike) -> Config:
    """A Config, the name of a preset, or None for "auto"."""
    if isinstance(config, Config):
        return config
    if config is not None and not isinstance(config, str):
        raise TypeError(f"config must be a memplan.Config or the name of a preset, got {config!r}")
    return generate_config(config or "auto")


def save_config(config: Config, path: str | Path) -> None:
    """Write a configuration as JSON."""
    content = {"format": _FORMAT, "version": _VERSION} | dataclasses.asdict(config)
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def load_config(path: str | Path) -> Config:
    """Read a configuration; fields that are absent have their defaults.

    Raises ValueError or TypeError for anything but a sound one (an unknown field is named), OSError where the file
    can't be read.
    """
    content = json.loads(Path(path).read_text())
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError(f"{path} is not a memplan configuration")
    version = content.pop("version", None)
    if version != _VERSION:
        raise ValueError(f"{path} has version {version!r}; this memplan reads version {_VERSION}")
    content = {name: value for name, value in content.items() if name not in _GONE}
    known = {field.name for field in dataclasses.fields(Config)}
    unknown = sorted(set(content) - known)
    if unknown:
        raise ValueError(f"{path} has an unknown field {unknown[0]!r}; there are {', '.join(sorted(known))}")
    if not isinstance(content.get("methods", []), list):
        raise TypeError(f"methods must be a list of names, got {content['methods']!r}")
    return Config(**content)

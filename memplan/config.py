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

With any preset, a plan that is given a host budget may offload, and is never slower than the same preset's without.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("rotor", "cuts", "blocks", "exact", "flat", "moments", "hierarchy")
_FORMAT = "memplan.config"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SearchFigures:
    """How far each part of a search goes. All are counts, so that a plan is the same on every machine.

    - coarse_blocks, fine_blocks: most blocks of the two chains. coarse_slots, fine_slots: memory sizes told apart.
    - cuts, block_cuts: minimum cuts for the whole step and for a block. options: most options of a block.
    - exact_nodes: nodes that an exact search may expand for one budget of one block.
    - exact_parts: limits tried on the bytes that a block saves, and as many on its peak.
    - exact_ops: most forward ops of the largest blocks.
    - exact_work: ops of blocks that are searched at all, fewer in long steps; beyond that a block's options are not
      proven to be best.
    - flat_nodes, flat_parts: nodes and limits for the whole step. flat_work: cap on its budgets for long steps, times
      ops.
    - sizes: plans expanded for each chain.
    - grid, passes: peaks to which plans are lowered and filled, up to three times as many for short steps, and how
      often.
    - descents, descent_steps: schedules taken down towards the floor, and in how many steps at most.
    - rounds, width: splits of a value's life that lower a peak, and values tried for each.
    - exchanges, neighbours: recomputations that are traded for others at each point, and several left out at once.
    - moments: moments of the backward pass that the lower bound tries at each budget; it keeps the best lines at as
      many budgets as `cuts`.
    - lower_work, exchange_work, neighbour_work, moment_work: caps on rounds, exchanges, neighbours and moments for long
      steps, as ops times what is counted. grid_work: steps so short that they stay below it have more of the grid.
    """

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

    def at(self, effort: float) -> SearchFigures:
        """The figures of a search that goes so many times as far. What a chain is cut into stays as it is."""
        scaled = {name: max(1, round(getattr(self, name) * effort)) for name in _SCALED}
        return dataclasses.replace(self, **scaled)


_SCALED = (
    "cuts", "block_cuts", "options", "exact_nodes", "exact_work", "flat_nodes", "flat_work", "sizes", "grid",
    "descents", "rounds", "exchanges", "neighbours", "moments", "lower_work", "exchange_work", "neighbour_work",
    "moment_work", "grid_work",
)  # fmt: skip
# Of earlier versions, in their files.
_GONE = ("backward_orders", "order_moves", *(field.name for field in dataclasses.fields(SearchFigures)))
_METHODS_GONE = ("textbook",)


@dataclass(frozen=True, slots=True)
class Config:
    """Which methods look for a plan, and how hard. A plan is the same on every machine, where `timeout_s` suffices.

    - methods: where schedules come from. Keeping everything is always among them.
        - "rotor": plain Rotor.
        - "cuts": minimum cuts over the whole step.
        - "blocks": Rotor over blocks with options from minimum cuts.
        - "exact": "blocks" with exact options as well.
        - "flat": the whole step as one block: exact where it is small.
        - "moments": saved sets that suit the moments at which the lower bound is tight.
        - "hierarchy": Rotor over blocks that are chains of blocks themselves.
    - polish: a local search on schedules, from all that the methods found.
    - effort: how far methods and search go, 1 as usual: 0.2 is for a quick look, 4 for a step that will run for weeks.
    - timeout_s: a safety stop. After so many seconds the best schedules so far are taken, and the plan says
      `truncated`.
    - points: most points that are kept of the curve of peak against time.

    Raises ValueError or TypeError for values that can't be.
    """

    methods: tuple[str, ...] = METHODS
    polish: bool = True
    effort: float = 1.0
    timeout_s: float = 600.0
    points: int = 32
    _figures: SearchFigures = SearchFigures()

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(self.methods))
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown:
            raise ValueError(f"unknown method {unknown[0]!r}; there are {', '.join(METHODS)}")
        if type(self.polish) is not bool:
            raise TypeError(f"polish must be True or False, got {self.polish!r}")
        for name, kinds in (("effort", (int, float)), ("timeout_s", (int, float)), ("points", (int,))):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(f"{name} must be {'a number' if float in kinds else 'an int'}, got {value!r}")
        if not 0 < self.effort <= _MOST_EFFORT:
            raise ValueError(f"effort must be more than 0, and {_MOST_EFFORT} or less, got {self.effort!r}")
        if not self.timeout_s >= 0:
            raise ValueError(f"timeout_s must be 0 or more, got {self.timeout_s!r}")
        if self.points < 1:
            raise ValueError(f"points must be 1 or more, got {self.points!r}")

    @property
    def figures(self) -> SearchFigures:
        """How far each part of the search goes."""
        return self._figures if self.effort == 1 else self._figures.at(self.effort)


_MOST_EFFORT = 1000
_FIELDS = tuple(field.name for field in dataclasses.fields(Config) if not field.name.startswith("_"))

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
    """A preset by its name, with these fields changed: `generate_config("rockmate", effort=2)`.

    Raises ValueError for an unknown preset, TypeError for an unknown field.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
    unknown = sorted(changes.keys() - set(_FIELDS))
    if unknown:
        raise TypeError(f"a Config has no field {unknown[0]!r}; it has {', '.join(_FIELDS)}")
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
    config = config_of(config)
    content = {"format": _FORMAT, "version": _VERSION} | {name: getattr(config, name) for name in _FIELDS}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def load_config(path: str | Path) -> Config:
    """Read a configuration; fields that are absent have their defaults.

    Figures and methods that earlier versions had are left out. Raises ValueError or TypeError for anything but a
    sound one (an unknown field is named), OSError where the file can't be read.
    """
    try:
        content = json.loads(Path(path).read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError(f"{path} is not a memplan configuration")
    version = content.pop("version", None)
    if version != _VERSION:
        raise ValueError(f"{path} has version {version!r}; this memplan reads version {_VERSION}")
    content = {name: value for name, value in content.items() if name not in _GONE}
    unknown = sorted(content.keys() - set(_FIELDS))
    if unknown:
        raise ValueError(f"{path} has an unknown field {unknown[0]!r}; there are {', '.join(_FIELDS)}")
    if not isinstance(content.get("methods", []), list):
        raise TypeError(f"methods must be a list of names, got {content['methods']!r}")
    if "methods" in content:
        content["methods"] = [method for method in content["methods"] if method not in _METHODS_GONE]
    return Config(**content)

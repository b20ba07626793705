"""The `memplan` section of a DeepSpeed config.

"memplan": {"budget": "70GiB", "per_rank": {"3": "36GiB"}, "per_stage": ["60GiB", "70GiB"],
            "host_budget": "400GiB", "host_per_rank": {"3": "100GiB"}, "host_per_stage": ["500GiB", "300GiB"]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import memplan

HostBudget = int | str
RankBudget = HostBudget | float
_Some = TypeVar("_Some", bound=RankBudget)


@dataclass(frozen=True, slots=True)
class MemplanConfig:
    """The keys of the section. Every key may be left out, or be null in JSON.

    - enabled: False leaves the engine as it is.
    - budget: the most bytes that a rank may hold on its device, everything included: parameters, gradients, optimizer
      state, DeepSpeed's buffers, activations. An int, "70GiB", or a fraction of the unplanned peak. Without any budget
      it is what the device has room for, as for `memplan.apply`.
    - per_rank: budgets of single ranks, by global rank. They override per_stage, which overrides budget.
    - per_stage: a budget for each pipeline stage, the first stage first.
    - host_budget: pinned host memory to which activations of a rank may be offloaded, under any ZeRO stage. In a
      pipeline it is for all microbatches in flight. What DeepSpeed itself has on the host (offload_optimizer,
      offload_param) is not in it. Without it nothing is offloaded.
    - host_per_rank, host_per_stage: host budgets of single ranks and stages, as per_rank and per_stage are for budgets.
    - preset: how plans are looked for: the name of a preset of `memplan.generate_config`.
    - costs, kernels, random, on_mismatch, on_oom: as for `memplan.apply`.
    """

    enabled: bool = True
    budget: RankBudget | None = None
    per_rank: Mapping[int, RankBudget] = field(default_factory=dict)
    per_stage: tuple[RankBudget, ...] = ()
    host_budget: HostBudget | None = None
    host_per_rank: Mapping[int, HostBudget] = field(default_factory=dict)
    host_per_stage: tuple[HostBudget, ...] = ()
    preset: str = "auto"
    costs: Literal["measure", "estimate"] = "measure"
    kernels: Literal["eager", "fused"] = "eager"
    random: Literal["eager", "counter"] = "eager"
    on_mismatch: Literal["replan", "raise"] = "replan"
    on_oom: Literal["raise", "replan"] = "raise"

    @staticmethod
    def of(source: object) -> MemplanConfig:
        """The section of a DeepSpeed config: a dict, or a path of a JSON file. All keys have defaults.

        Raises ValueError for unknown keys and for values that mean nothing.
        """
        if isinstance(source, (str, Path)):
            source = json.loads(Path(source).read_text())
        section = source.get("memplan") if isinstance(source, Mapping) else None
        if section is None:
            return MemplanConfig()
        if not isinstance(section, Mapping):
            raise ValueError(f'"memplan" in a DeepSpeed config is a section in braces, got {section!r}')
        known = [f.name for f in fields(MemplanConfig)]
        unknown = [key for key in section if key not in known]
        if unknown:
            raise ValueError(f'"memplan" has no key {", ".join(map(repr, unknown))}; it has {", ".join(known)}')
        given = {key: value for key, value in section.items() if value is not None}
        for key, value in given.items():
            if value == "auto" and key != "preset":
                raise ValueError(f'"memplan": {key} is "auto". Leave it out, or write null')
        return MemplanConfig(**{key: _READERS[key](key, value) for key, value in given.items()})

    def budget_of(self, rank: int, ranks: int, stage: int = 0, stages: int = 1) -> RankBudget | None:
        """The budget of a global rank in a pipeline stage; None where it is what the device has room for.

        Raises ValueError where the section names a rank that is not there, or another number of stages.
        """
        return self._closest("", rank, ranks, stage, stages)  # type: ignore[no-any-return]

    def host_budget_of(self, rank: int, ranks: int, stage: int = 0, stages: int = 1) -> HostBudget | None:
        """The host budget of a global rank in a pipeline stage; None where nothing is offloaded."""
        return self._closest("host_", rank, ranks, stage, stages)  # type: ignore[no-any-return]

    def _closest(self, kind: str, rank: int, ranks: int, stage: int, stages: int) -> Any:
        """The budget that says most of a rank. kind: begins the names of the keys."""
        per_rank, per_stage = getattr(self, f"{kind}per_rank"), getattr(self, f"{kind}per_stage")
        strange = [r for r in per_rank if r >= ranks]
        if strange:
            raise ValueError(f'"memplan": {kind}per_rank has rank {strange[0]}, but there are ranks 0 to {ranks - 1}')
        if per_stage and len(per_stage) != stages:
            raise ValueError(
                f'"memplan": {kind}per_stage has {len(per_stage)} budgets, but there are {stages} pipeline stages. '
                f"Give one for each, or leave {kind}per_stage out"
            )
        if rank in per_rank:
            return per_rank[rank]
        return per_stage[stage] if per_stage else getattr(self, f"{kind}budget")

    def apply_keywords(self) -> dict[str, Any]:
        """Arguments of `memplan.apply`, beside the budgets."""
        return {
            "config": self.preset, "costs": self.costs, "kernels": self.kernels, "random": self.random,
            "on_mismatch": self.on_mismatch, "on_oom": self.on_oom,
        }  # fmt: skip


def _switch(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f'"memplan": {key} must be true or false, got {value!r}')
    return value


def _budget(key: str, value: object) -> RankBudget:
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(f'"memplan": {key} as a fraction of the unplanned peak must be in (0, 1], got {value}')
        return value
    return _bytes(key, value)


def _bytes(key: str, value: object) -> int | str:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or (isinstance(value, int) and value <= 0):
        raise ValueError(
            f'"memplan": {key} must be a number of bytes above 0, or a text such as "70GiB", got {value!r}'
        )
    if isinstance(value, str):
        try:
            memplan.parse_bytes(value)
        except ValueError as error:
            raise ValueError(f'"memplan": {key}: {error}') from None
    return value


def _per_rank(read: Callable[[str, object], _Some]) -> Callable[[str, object], dict[int, _Some]]:
    def read_all(key: str, value: object) -> dict[int, _Some]:
        if not isinstance(value, Mapping):
            raise ValueError(f'"memplan": {key} must be budgets by global rank such as {{"3": "36GiB"}}, got {value!r}')
        for rank in value:
            if isinstance(rank, bool) or not str(rank).isdecimal():
                raise ValueError(f'"memplan": {key} has {rank!r}, which is not a global rank')
        return {int(rank): read(f"{key}.{rank}", budget) for rank, budget in value.items() if budget is not None}

    return read_all


def _per_stage(read: Callable[[str, object], _Some]) -> Callable[[str, object], tuple[_Some, ...]]:
    def read_all(key: str, value: object) -> tuple[_Some, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f'"memplan": {key} must be a list with a budget for each pipeline stage, got {value!r}')
        return tuple(read(f"{key}[{stage}]", budget) for stage, budget in enumerate(value))

    return read_all


def _preset(key: str, value: object) -> str:
    try:
        memplan.generate_config(value)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ValueError(f'"memplan": {key}: {error}') from None
    return str(value)


def _word(*words: str) -> Any:
    def read(key: str, value: object) -> object:
        if value not in words:
            raise ValueError(f'"memplan": {key} must be {" or ".join(words)}, got {value!r}')
        return value

    return read


_READERS: dict[str, Any] = {
    "enabled": _switch,
    "budget": _budget,
    "per_rank": _per_rank(_budget),
    "per_stage": _per_stage(_budget),
    "host_budget": _bytes,
    "host_per_rank": _per_rank(_bytes),
    "host_per_stage": _per_stage(_bytes),
    "preset": _preset,
    "costs": _word("measure", "estimate"),
    "kernels": _word("eager", "fused"),
    "random": _word("eager", "counter"),
    "on_mismatch": _word("replan", "raise"),
    "on_oom": _word("raise", "replan"),
}

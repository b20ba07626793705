"""Runs before and after the calls of an engine's module, and reports plans and peaks.

Rank 0 logs one line for each stage and budget. Ranks leave their lines in the store of the process group. Rank 0 looks
there before each of its steps until it has them all. No rank waits for another, so a pipeline can't hang because of its
log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import count
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.distributed import distributed_c10d

import memplan

from .memory import held_bytes_of

log = logging.getLogger("memplan")


class Watch:
    """Leaves two lines about the plan of an engine for rank 0 to log. Its hooks on the module end once both are logged.

    stage: of the pipeline that the engine is.
    """

    def __init__(self, engine: DeepSpeedEngine, stage: int) -> None:
        self._engine, self._stage = engine, stage
        self._before_bytes: int | None = None  # held when the first planned step began
        self._without_state = ""
        self._posted: set[str] = set()
        self._board = Board()
        self._hooks: list[Any] = []

    def begin(self) -> None:
        # Functions, and not methods: a copy of the module keeps them as they are.
        self._hooks = [
            self._engine.module.register_forward_pre_hook(lambda _, *inputs: self._before(inputs), with_kwargs=True),
            self._engine.module.register_forward_hook(lambda *_: self._tell()),
        ]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # -- beside the calls -------------------------------------------------------------------------------------------

    def _before(self, inputs: object) -> None:
        if not (self._engine.module.training and torch.is_grad_enabled()):
            return
        self._tell()
        if self._before_bytes is None:
            self._before_bytes = held_bytes_of(self._engine, inputs)
            stateless = self._engine.basic_optimizer is not None and not self._engine.basic_optimizer.state
            self._without_state = ", when the optimizer had no state yet" if stateless else ""

    # -- what is told -----------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Leave a line once there is a plan, and one once its first step is over. End when both are logged."""
        plan = memplan.plan_of(self._engine.module)
        grown_bytes = memplan.grown_bytes(self._engine.module)
        if plan is not None and "plan" not in self._posted:
            self._post("plan", plan, plan.peak_bytes, promise(plan))
        if plan is not None and grown_bytes is not None and self._before_bytes is not None:
            if "peak" not in self._posted:
                peak_bytes = self._before_bytes + grown_bytes
                text = f"the first step peaked at {memplan.format_bytes(peak_bytes)}{self._without_state}"
                self._post("peak", plan, peak_bytes, text)
        if self._board.tell() and "peak" in self._posted:
            self.end()

    def _post(self, topic: str, plan: memplan.Plan, peak_bytes: int, text: str) -> None:
        self._posted.add(topic)
        self._board.post(topic, Line(self._stage, _budget_bytes(plan), peak_bytes, text))


def promise(plan: memplan.Plan) -> str:
    """The budget and the predictions of a plan, as a line of text."""
    ways = f"recompute {len(plan.recomputed)} ops, offload {memplan.format_bytes(plan.offloaded_bytes)}"
    return (
        f"budget {memplan.format_bytes(_budget_bytes(plan))}, predicted peak {memplan.format_bytes(plan.peak_bytes)} "
        f"(unplanned {memplan.format_bytes(plan.baseline_peak_bytes)}), {ways}, overhead {plan.overhead:+.1%}"
    )


def _budget_bytes(plan: memplan.Plan) -> int:
    budget_bytes = plan.problem.budget_bytes
    assert isinstance(budget_bytes, int)
    return budget_bytes


_boards: Iterator[int] = count()  # engines get plans in the same order on all ranks


@dataclass(frozen=True, slots=True)
class Line:
    """What a rank says of its plan. stage: that rank's stage of the pipeline."""

    stage: int
    budget_bytes: int
    peak_bytes: int
    text: str


class Board:
    """Where the ranks of one engine leave lines. Every rank makes its boards in the same order."""

    def __init__(self) -> None:
        self._rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._name = f"memplan/{next(_boards)}"
        self._store = distributed_c10d._get_default_store()
        self._wanted: list[str] = []

    def post(self, topic: str, line: Line) -> None:
        self._store.set(self._key(topic, self._rank), json.dumps(astuple(line)))
        if self._rank == 0:
            self._wanted.append(topic)

    def tell(self) -> bool:
        """Log, on rank 0, the topics on which all ranks have left lines. Gives whether no topic is left."""
        while self._wanted:
            keys = [self._key(self._wanted[0], rank) for rank in range(self._ranks)]
            if not self._store.check(keys):
                return False
            del self._wanted[0]
            for text in merged([Line(*json.loads(self._store.get(key))) for key in keys]):
                log.info("%s", text)
        return True

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._name}/{topic}/{rank}"


def merged(lines: list[Line]) -> list[str]:
    """One text for each stage and budget, in that order, with the ranks that it is about.

    Ranks of one stage differ by the size of their optimizer's partition. The line is that of the rank that holds most.
    """
    groups: dict[tuple[int, int], list[tuple[int, Line]]] = {}
    for rank, line in enumerate(lines):
        groups.setdefault((line.stage, line.budget_bytes), []).append((rank, line))
    texts = []
    for (stage, _), members in sorted(groups.items()):
        fullest = max(members, key=lambda member: member[1].peak_bytes)[1]
        texts.append(f"stage {stage}, {_named([rank for rank, _ in members])}: {fullest.text}")
    return texts


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"

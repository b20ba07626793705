"""What rank 0 logs of all ranks' plans: one line for each stage and budget.

Ranks leave their lines in the store of the process group. Rank 0 looks there before each of its steps until it has them
all. No rank waits for another, so a pipeline can't hang because of its log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import count

import torch.distributed
from torch.distributed import distributed_c10d

log = logging.getLogger("memplan")

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
        """Leave this rank's line on a topic."""
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

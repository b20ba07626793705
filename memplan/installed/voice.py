"""What a planned model says of itself while it trains: each thing once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memplan.logs import log, show
from memplan.plans.plan import Plan
from memplan.problem.data import Surroundings


class Voice:
    """Says things of one model, each once. said: subjects that have had a line.

    surroundings: if there is an engine, it shows what it runs. Of several ranks, the first one speaks.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self.said: set[str] = set()
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._shows = surroundings == Surroundings() and (not ranks or torch.distributed.get_rank() == 0)

    def is_first(self, subject: str) -> bool:
        """Whether there has been no word of this. From now on there has."""
        first = subject not in self.said
        self.said.add(subject)
        return first

    def warn(self, news: Mapping[str, str]) -> None:
        for subject, text in news.items():
            if self.is_first(subject):
                log.warning("%s", text)

    def show_plan(self, plan: Plan, took_s: float) -> None:
        """Show the first plan. took_s: seconds of planning it."""
        if self.is_first("plan"):
            (show if took_s and self._shows else log.info)(f"{plan.summary}; planned in {took_s:.1f} s")

"""Searches that know nothing of one another, side by side: kernels run without the interpreter lock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TypeVar

_Item = TypeVar("_Item")
_LOOK_S = 0.1  # between looks at the clock


def side_by_side(
    searches: Sequence[Iterator[_Item]], found: Sequence[list[_Item]], deadline_s: float, ended: Callable[[int], None]
) -> None:
    """Exhaust all searches, at most as many at once as there are cores; items go to the list at the same position.

    ended: called with the position of each search that is exhausted. What is found does not depend on the number of
    cores. Raises TimeoutError at `deadline_s` of the monotonic clock, and what `ended`, a search or Ctrl-C raises;
    then every search has stopped after an item, and what was found until then is there.
    """
    stop = threading.Event()

    def exhaust(search: Iterator[_Item], into: list[_Item]) -> None:
        while not stop.is_set():
            try:
                into.append(next(search))
            except StopIteration:
                return

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max(1, min(len(searches), cores)), "memplan") as pool:
        running = {pool.submit(exhaust, search, into): i for i, (search, into) in enumerate(zip(searches, found))}
        try:
            while running:
                done, _ = wait(running, _LOOK_S, FIRST_COMPLETED)
                for future in sorted(done, key=running.__getitem__):
                    future.result()
                    ended(running.pop(future))
                if time.monotonic() > deadline_s:
                    raise TimeoutError
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

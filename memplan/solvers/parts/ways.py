"""Which way each unit of a step runs: kept, recomputed, or in between, such that the whole step fits a budget.

Units run one after the other in forward and in the reverse order in backward (autograd runs the nodes that were made
last first). So what is held while a unit runs, in forward or in backward, depends on the choices before it through one
number: the sum of the bytes that are saved. That makes it a dynamic programme over that sum. Where a block of units may
also run as one unit, the programme goes both ways and takes what is best for each sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MOST_STATES = 4000  # sums told apart after each unit

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class UnitOption:
    """One way to run a unit.

    - extra_bytes: what it saves from its forward to its backward beyond the way in which the step was measured.
    - forward_peak_bytes, backward_peak_bytes: the most that the whole step holds from the unit before up to the end of
      this one's pass, where all others run as measured. In backward `extra_bytes` of its own comes on top of it.
    - time_s: seconds more than where nothing is recomputed.
    """

    extra_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class UnitChain:
    """Units that run one after the other.

    - units: the options of each, in the order of forward, one at least.
    - exit_bytes: saved beyond those options' bytes, once all units have run.
    """

    units: tuple[tuple[UnitOption, ...], ...]
    exit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UnitProblem:
    """The units of a step, and what it holds beside them.

    - stages: the alternatives of each stage, in the order of forward: a unit by itself, or the units of a block and the
      block as one unit.
    - turn_bytes: the most held between forward and backward.
    - end_bytes: the most held after the last unit's backward, whatever is chosen.
    """

    stages: tuple[tuple[UnitChain, ...], ...]
    turn_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """A way for every unit of a step, and what they come to.

    - picks: for each stage the alternative, and the option of each of its units.
    - peak_bytes: of the whole step.
    - time_s: seconds more than where nothing is recomputed.
    """

    picks: tuple[tuple[int, tuple[int, ...]], ...]
    peak_bytes: int
    time_s: float


def appraise(problem: UnitProblem, picks: Sequence[tuple[int, tuple[int, ...]]]) -> UnitChoice:
    """What a choice comes to."""
    before_bytes, peak_bytes, time_s = 0, problem.end_bytes, 0.0
    for alternatives, (alternative, options) in zip(problem.stages, picks, strict=True):
        chain = alternatives[alternative]
        for choices, index in zip(chain.units, options, strict=True):
            option = choices[index]
            peak_bytes = max(peak_bytes, before_bytes + option.forward_peak_bytes)
            before_bytes += option.extra_bytes
            peak_bytes = max(peak_bytes, before_bytes + option.backward_peak_bytes)
            time_s += option.time_s
        before_bytes += chain.exit_bytes
    return UnitChoice(tuple(picks), max(peak_bytes, before_bytes + problem.turn_bytes), time_s)


def choose_ways(problem: UnitProblem, budget_bytes: int) -> UnitChoice | None:
    """The fastest choice within the budget; None where there is none.

    It is exact while fewer sums than `_MOST_STATES` are reached. Beyond that, of sums near each other the fastest
    stays, and the least sum of all.
    """
    if problem.end_bytes > budget_bytes:
        return None
    trail = _Trail()
    states = _States(np.zeros(1, dtype=np.int64), np.zeros(1), np.full(1, -1, dtype=np.int64))
    for alternatives in problem.stages:
        states = _merged([_through(states, chain, budget_bytes, trail, i) for i, chain in enumerate(alternatives)])
    fitting = np.flatnonzero(states.sums + problem.turn_bytes <= budget_bytes)
    if not len(fitting):
        return None
    picks = trail.back_from(int(states.ids[fitting[np.argmin(states.times[fitting])]]))
    return appraise(problem, _by_stage(problem, picks))


def smallest(problem: UnitProblem) -> UnitChoice:
    """The choice with the least peak, to the byte, and of those the fastest."""
    some = appraise(problem, [(0, tuple(0 for _ in alternatives[0].units)) for alternatives in problem.stages])
    low, high, best = -1, some.peak_bytes, some
    while high - low > 1:
        middle = (low + high) // 2
        found = choose_ways(problem, middle)
        if found is None:
            low = middle
        else:
            high, best = found.peak_bytes, found
    return choose_ways(problem, high) or best


@dataclass(frozen=True, slots=True)
class _States:
    """Sums of saved bytes that can be reached, the seconds of each, and its number in the trail."""

    sums: _Integers
    times: npt.NDArray[np.float64]
    ids: _Integers

    def some(self, which: _Integers) -> _States:
        return _States(self.sums[which], self.times[which], self.ids[which])


class _Trail:
    """How each state came about: the state before it, and which alternative's unit took which option."""

    def __init__(self) -> None:
        self._parents: list[_Integers] = []
        self._picks: list[_Integers] = []
        self._count = 0

    def extend(self, parents: _Integers, picks: _Integers) -> _Integers:
        self._parents.append(parents)
        self._picks.append(picks)
        self._count += len(parents)
        return np.arange(self._count - len(parents), self._count, dtype=np.int64)

    def back_from(self, state: int) -> list[int]:
        """The picks that led to a state, first to last."""
        if not self._parents:
            return []
        parents, all_picks = np.concatenate(self._parents), np.concatenate(self._picks)
        picks = []
        while state >= 0:
            picks.append(int(all_picks[state]))
            state = int(parents[state])
        return picks[::-1]


_ALTERNATIVE = 1 << 20  # an option of alternative a is picked as a * _ALTERNATIVE + option


def _by_stage(problem: UnitProblem, picks: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    left = iter(picks)
    found = []
    for alternatives in problem.stages:
        alternative, option = divmod(next(left), _ALTERNATIVE)
        rest = [next(left) % _ALTERNATIVE for _ in alternatives[alternative].units[1:]]
        found.append((alternative, (option, *rest)))
    return found


def _through(states: _States, chain: UnitChain, budget_bytes: int, trail: _Trail, alternative: int) -> _States:
    for options in chain.units:
        states = _extended(states, options, budget_bytes, trail, alternative * _ALTERNATIVE)
    return _States(states.sums + chain.exit_bytes, states.times, states.ids)


def _extended(
    states: _States, options: Sequence[UnitOption], budget_bytes: int, trail: _Trail, first_pick: int
) -> _States:
    """States after one more unit."""
    sums, times, parents, picks = [], [], [], []
    for index, option in enumerate(options):
        fits = (states.sums + option.forward_peak_bytes <= budget_bytes) & (
            states.sums + option.extra_bytes + option.backward_peak_bytes <= budget_bytes
        )
        sums.append(states.sums[fits] + option.extra_bytes)
        times.append(states.times[fits] + option.time_s)
        parents.append(states.ids[fits])
        picks.append(np.full(int(fits.sum()), first_pick + index, dtype=np.int64))
    numbers = np.arange(sum(map(len, sums)), dtype=np.int64)
    best = _best(_States(np.concatenate(sums), np.concatenate(times), numbers))
    ids = trail.extend(np.concatenate(parents)[best.ids], np.concatenate(picks)[best.ids])
    return _States(best.sums, best.times, ids)


def _merged(several: Sequence[_States]) -> _States:
    if len(several) == 1:
        return several[0]
    columns = ([getattr(s, name) for s in several] for name in ("sums", "times", "ids"))
    return _best(_States(*(np.concatenate(column) for column in columns)))


def _best(states: _States) -> _States:
    """Those that no other beats in both sum and seconds; at most `_MOST_STATES`.

    Of too many the least sum stays, and the last, which is the fastest, of each stretch of sums.
    """
    states = states.some(np.lexsort((states.times, states.sums)))
    if not len(states.sums):
        return states
    least = np.minimum.accumulate(states.times)
    states = states.some(np.flatnonzero(np.append(True, states.times[1:] < least[:-1])))
    if len(states.sums) <= _MOST_STATES:
        return states
    low, high = int(states.sums[0]), int(states.sums[-1])
    stretch = (states.sums - low) // max(1, -(-(high - low) // (_MOST_STATES - 2)))
    last = np.append(stretch[1:] != stretch[:-1], True)
    last[0] = True
    return states.some(np.flatnonzero(last))

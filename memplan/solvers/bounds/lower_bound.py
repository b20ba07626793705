"""Lower bounds that hold for every schedule of a problem that runs the backward pass in the given order.

**Seconds.** Take a few moments at which backward ops run. What the backward pass reads from the forward pass is live at
the moment before it or is computed after that, with all that this takes. What is live at a moment, the op's operands
among it, weighs at most what the budget leaves. `moments` writes that down as a linear programme, `dual` finds
multipliers for it, and each set of multipliers is a line: seconds against budget, true at every budget. Which moments
count depends on the budget. A greedy search looks for them at a few budgets, and every line on its way is kept. Sets of
moments are compared after equally many rounds from nothing, so that none is taken because it only had more rounds.

**Bytes.** An op needs its operands, its outputs and its scratch beside what nothing can free.

Microbatches that wait hold their inputs, their outputs and what they save. The first two are bytes that nothing can
free. What is saved counts in lines of its own, from minimum cuts at the boundary: what is not saved is recomputed. The
programmes leave it out, so they hold, but less tightly than with one microbatch alone.

Other orders of the backward pass have bounds of their own. Solvers take the given order (docs/research.md says what
others came to).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memplan.solvers.bounds.dual import BoundLine, Look, ascend
from memplan.solvers.bounds.mincut import saved_sets
from memplan.solvers.bounds.moments import MomentProgram, StepMoments, asked, overtaken, program_of, step_of
from memplan.solvers.orders.flat import Flat, Floats, Ints, last_reads

# Budgets tried, as shares of the way from the floor to the peak.
_SPREAD = (0.8, 0.65, 0.5, 0.38, 0.26, 0.15, 0.06, 0.012)
_JOINT = 5  # moments of one programme at most
_LOOK_ROUNDS = 250  # rounds that judge a set of moments
_LAST_ROUNDS, _MOST_ROUNDS = 300, 2000  # more for the sets that are taken, and for those of short steps
_LAST_WORK = 400_000  # rounds times ops, where that is more rounds
_MORE_TRIES = 6000  # moments tried beside those asked for, divided by the number of ops
_GAIN = 2e-4  # of the baseline: what another moment has to add
_FAILURES = 3  # moments that add nothing, the most promising first, after which no other one is tried
_THOROUGH = 2  # lowest budgets, where all are tried


class Guide(NamedTuple):
    """What the programme of a budget's moments comes to, as a guide to schedules.

    At the first of the moments, `kept` of each of `values` stands.
    """

    moment: int
    values: Ints
    kept: Floats


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds on the seconds of a problem for every budget, and on its bytes.

    - baseline_s: every op once.
    - floor_bytes: no schedule peaks below it.
    - lines: seconds beyond the baseline.
    - guides: to schedules, for some budgets (`saved_of_moments`).
    """

    baseline_s: float
    floor_bytes: int
    lines: tuple[BoundLine, ...]
    guides: tuple[Guide, ...] = field(default=(), compare=False, repr=False)

    def time_s(self, budget_bytes: int | None) -> float:
        """Seconds that no schedule which peaks within the budget goes below; infinite below `floor_bytes`."""
        if budget_bytes is None:
            return self.baseline_s
        if budget_bytes < self.floor_bytes:
            return float("inf")
        return self.baseline_s + max([0.0, *(line.at(budget_bytes) for line in self.lines)])


def bound_of(flat: Flat, baseline_s: float, moments: int, cuts: int) -> Bound:
    """Bounds of a step.

    - baseline_s: every op once.
    - moments: moments tried at each budget, more for short steps.
    - cuts: most lines that are kept.
    """
    fixed = backward_bytes(flat)
    floor_bytes = _floor(flat, fixed)
    if flat.op_count == flat.arrays.boundary or flat.lost_late:
        return Bound(baseline_s, floor_bytes, ())
    # With b bytes saved by each microbatch that waits, the boundary holds b bytes for all of them, and any backward op
    # for all but one.
    waiting, others = list[BoundLine](), flat.arrays.others
    for cut in saved_sets(flat, needed_after(flat, flat.arrays.boundary), cuts, twice=True) if others else ():
        for held, count in ((int(fixed[0]), others + 1), (int(fixed.max()), others)):
            slope = cut.line_s_per_byte / count
            waiting.append(BoundLine(cut.line_s + slope * held, slope))
    search = _BoundSearch(flat, fixed[1:], baseline_s)
    high = int(search.whole_bytes.max())
    budgets = [floor_bytes + int(share * (high - floor_bytes)) for share in _SPREAD if high > floor_bytes]
    tries = moments + _MORE_TRIES // flat.op_count
    guides = search.exchange(budgets, [search.improve(b, tries, b in budgets[-_THOROUGH:]) for b in budgets])
    high = max([high, *(int(line.at_zero_s / line.s_per_byte) for line in waiting if line.s_per_byte > 0.0)])
    lines = [*search.lines, *waiting]
    if not lines or high <= floor_bytes:
        return Bound(baseline_s, floor_bytes, (), guides)
    # Those stay that are highest at as many budgets evenly apart; those that steepen come last.
    at = np.linspace(floor_bytes, high, max(cuts, 2))
    heights = np.array([line.at_zero_s for line in lines])[:, None] - np.outer([x.s_per_byte for x in lines], at)
    best = np.unique(heights.argmax(axis=0))
    kept = sorted((lines[int(i)] for i in best if heights[i].max() > 0.0), key=lambda line: line.s_per_byte)
    return Bound(baseline_s, floor_bytes, tuple(kept), guides)


def _waiting_bytes(flat: Flat, boundary_bytes: int) -> int:
    """Inputs and outputs of the microbatches that wait. boundary_bytes: what nothing can free at the boundary."""
    a = flat.arrays
    return a.others * (boundary_bytes - a.tangent_bytes - a.base_bytes + a.input_bytes)


class _BoundSearch:
    """Looks for sets of moments.

    - lines: all lines found on the way.
    - alone: the line of each moment that was tried, from where it was tried first.
    - programs, looks: of each set that was tried, and where the last look at it stopped.
    - fixed_bytes: what nothing can free while each backward op runs.
    - whole_bytes: that, and all that the rest of the backward pass reads.
    """

    def __init__(self, flat: Flat, fixed_bytes: Ints, baseline_s: float) -> None:
        self.step: StepMoments = step_of(flat)
        self.first = flat.arrays.boundary
        self.fixed_bytes = fixed_bytes
        self.needed_bytes = needed_bytes(flat)
        self.whole_bytes = fixed_bytes + self.needed_bytes
        self.least_gain_s = _GAIN * baseline_s
        self.chosen: tuple[int, ...] = ()
        self.lines: list[BoundLine] = []
        self.alone: dict[int, BoundLine] = {}
        self.programs: dict[tuple[int, ...], MomentProgram] = {}
        self.looks: dict[tuple[int, ...], Look] = {}

    def improve(self, budget_bytes: int, tries: int, thorough: bool) -> tuple[int, ...]:
        """Add moments to those of the last budget as long as that lifts the bound at this one; returns the moments.

        Candidates are backward ops above the budget: there the most bytes have to go, or the most of what is needed
        has to, or the least can be held.
        """
        excess = (self.whole_bytes - budget_bytes).astype(np.float64)
        share = excess / np.maximum(self.needed_bytes, 1)
        narrow = np.where(excess > 0.0, self.fixed_bytes, 0).astype(np.float64)
        apart, candidates = len(excess) // (6 * tries), dict[int, None]()
        for height in (excess, share, narrow):  # its highest positions above zero, each more than `apart` from others
            for _ in range(-(-tries // 3)):
                b = int(np.argmax(height))
                if height[b] <= 0.0:
                    break
                candidates[b] = None
                height[max(0, b - apart) : b + apart + 1] = 0.0
        for b in candidates:
            if b not in self.alone:
                self.alone[b] = self._look((b,), budget_bytes)
        best_s = self._look(self.chosen, budget_bytes).at(budget_bytes) if self.chosen else 0.0
        failures = 0
        for b in sorted(candidates, key=lambda b: (-self.alone[b].at(budget_bytes), b)):
            trial = tuple(sorted({*self.chosen, b}))
            if trial == self.chosen:
                continue
            found_s = self._look(trial, budget_bytes).at(budget_bytes)
            if found_s > best_s + self.least_gain_s:
                best_s, self.chosen = found_s, trial
                if len(trial) > _JOINT:  # without the one that matters least
                    fewer = [tuple(m for m in trial if m != b) for b in trial]
                    self.chosen = max(fewer, key=lambda rest: self._look(rest, budget_bytes).at(budget_bytes))
                continue
            failures += 1
            if failures == _FAILURES and not thorough:
                break
        return self.chosen

    def exchange(self, budgets: list[int], sets: list[tuple[int, ...]]) -> tuple[Guide, ...]:
        """A longer look at each budget at its own moments and those of its neighbours."""
        guides = []
        rounds = max(_LAST_ROUNDS, min(_MOST_ROUNDS, _LAST_WORK // self.step.flat.op_count))
        for i, budget_bytes in enumerate(budgets):
            for moments in dict.fromkeys(sets[max(0, i - 1) : i + 2]):
                if moments:
                    self._look(moments, budget_bytes, rounds)
                if moments and moments == sets[i]:
                    program, columns = self.programs[moments], self.looks[moments].columns
                    first = np.nonzero(program.moment == 0)[0]
                    guides.append(Guide(self.first + moments[0], program.value[first], columns[first]))
        return tuple(guides)

    def _look(self, moments: tuple[int, ...], budget_bytes: int, rounds: int = 0) -> BoundLine:
        """A look from nothing, so that looks can be compared; with `rounds`, from where the last one stopped."""
        if moments not in self.programs:
            at = np.array(moments, dtype=np.int64)
            self.programs[moments] = program_of(self.step, tuple((self.first + at).tolist()), self.fixed_bytes[at])
        before = self.looks.get(moments) if rounds else None
        line, self.looks[moments] = ascend(self.programs[moments], budget_bytes, rounds or _LOOK_ROUNDS, before)
        self.lines.append(line)
        return line


def needed_bytes(flat: Flat) -> Ints:
    """Bytes of what each backward op and those after it read from the forward pass."""
    a = flat.arrays
    found = np.zeros(flat.op_count - a.boundary, dtype=np.int64)
    seen = np.zeros(len(a.size_bytes), dtype=np.bool_)
    total = 0
    for b in range(flat.op_count - 1, a.boundary - 1, -1):
        for v in flat.reads[b]:
            if 0 <= a.producer[v] < a.boundary and not a.held[v] and not seen[v]:
                seen[v] = True
                total += int(a.size_bytes[v])
        found[b - a.boundary] = total
    return found


def needed_after(flat: Flat, first: int) -> frozenset[int]:
    """Forward values, held ones left out, that backward ops from `first` on read.

    What `first` itself overwrites is left out too: its memory counts as that of the op's output.
    """
    read = asked(flat, range(first, flat.op_count))
    read[overtaken(flat, first) if first < flat.op_count else []] = False
    return frozenset(np.nonzero(read)[0].tolist())


def backward_bytes(flat: Flat) -> Ints:
    """Bytes that nothing can free: at the boundary, then while each backward op runs.

    Those are residents, held values, tangents, backward values still to be read, the op's own outputs and scratch, and
    inputs and outputs of microbatches that wait. Forward values do not count. Where a backward op overwrites one, its
    memory counts from then on.
    """
    a, last_read = flat.arrays, last_reads(flat)
    live = a.base_bytes + a.tangent_bytes - _given_back(flat, range(a.boundary), held=True)
    live += sum(int(a.size_bytes[v]) for op in range(a.boundary) for v in flat.makes[op] if a.held[v])
    fixed = [live]
    for op in range(a.boundary, flat.op_count):
        # An output takes over the memory of a value: of a gradient it is counted already, of a forward value not yet.
        taken = {int(a.taken[v]) for v in flat.makes[op]}
        over = [v for v in flat.makes[op] if a.taken[v] >= 0 and a.producer[a.taken[v]] < a.boundary]
        live += sum(int(a.size_bytes[v]) for v in flat.makes[op] if v in over or not a.in_place[v])
        fixed.append(live + int(a.scratch_bytes[op]))
        gone = [v for v in flat.reads[op] if a.producer[v] >= a.boundary and last_read[v] == op and v not in taken]
        gone += [v for v in flat.makes[op] if last_read[v] < 0]
        live -= sum(int(a.size_bytes[v]) for v in gone if not a.held[v])
        if a.accumulate:
            live -= sum(int(a.size_bytes[v]) for v in flat.makes[op] if a.gradient[v])
    return np.array(fixed, dtype=np.int64) + _waiting_bytes(flat, fixed[0])


def _given_back(flat: Flat, ops: range, held: bool) -> int:
    """Bytes of residents and tangents whose memory values of these ops take over: freed with those values.

    held: with the memory that held values take over. This is for callers that count held values by themselves.
    """
    a = flat.arrays
    made = (v for op in ops for v in flat.makes[op])
    return sum(int(a.size_bytes[v]) for v in made if a.in_place[v] and a.taken[v] < 0 and (held or not a.held[v]))


def _floor(flat: Flat, fixed: Ints) -> int:
    a = flat.arrays
    worst = int(fixed.max())
    if a.update_bytes > 0:
        held = [v for row in flat.makes for v in row if a.held[v] and not (a.gradient[v] and a.accumulate)]
        new = sum(int(a.size_bytes[v]) for v in held if not a.in_place[v])
        given_back = _given_back(flat, range(flat.op_count), held=False)
        worst = max(worst, a.base_bytes + a.tangent_bytes - given_back + new + a.update_bytes)
    owned = a.base_bytes - _given_back(flat, range(a.boundary), held=False)
    owned += _waiting_bytes(flat, int(backward_bytes(flat.alone)[0]))
    for op in range(flat.op_count):
        forward = {v for v in flat.reads[op] if 0 <= a.producer[v] < a.boundary and not a.held[v]}
        if op < a.boundary:
            new = sum(int(a.size_bytes[v]) for v in flat.makes[op] if not a.in_place[v])
            read = sum(int(a.size_bytes[v]) for v in forward)
            worst = max(worst, owned + new + int(a.scratch_bytes[op]) + read)
        else:
            read = sum(int(a.size_bytes[v]) for v in forward.difference(overtaken(flat, op)))
            worst = max(worst, int(fixed[1 + op - a.boundary]) + read)
    return worst

"""What the step holds around each of its parts, and from that what each way of running them would hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from memplan.capture.probe import Site
from memplan.errors import UnsupportedModel
from memplan.planning.parts.part import MOST_POINTS, Part, Parts, PartStage, PartWay, Twice
from memplan.runtime.parts.measures import StepMeasure, UnitMeasure
from memplan.runtime.parts.partial_step import Way, Ways
from memplan.runtime.parts.rehearsal import Passage, Rehearsal
from memplan.solvers import Candidate
from memplan.solvers.parts.passes import pass_of, pass_of_twice
from memplan.solvers.parts.ways import UnitChain, UnitOption, UnitProblem

_MOST_OPTIONS = 16  # of one unit


def measured_parts(
    rehearse: Callable[..., Rehearsal], units: Sequence[Part], blocks: Mapping[nn.Module, Site]
) -> Parts:
    """Run the step at the least memory, and work out from it what each option of each unit would hold.

    Where there are blocks, the step runs once more with each block recomputed as a whole. Figures are then relative to
    that run, those of the units in a block too.
    """
    ways: dict[nn.Module, tuple[Way, ...]] = {}
    for unit in units:
        way: Way = "recompute" if unit.least is None else unit.step(unit.least)
        ways[unit.module] = (*ways.get(unit.module, ()), way)
    split, rehearsal = _rehearsed(rehearse, ways, blocks, [u.module for u in units])
    passages, written = rehearsal.passages, rehearsal.written
    for unit, visit in zip(units, rehearsal.visits, strict=True):
        unit.repeats = visit.repeats
    if not passages:
        for unit, around in zip(units, split.units, strict=True):
            _set_options(unit, around, 0)
        chains = tuple((UnitChain((tuple(u.options),)),) for u in units)
        problem = UnitProblem(chains, split.turn_bytes, split.end_bytes)
        return Parts(tuple(PartStage((u,)) for u in units), problem, split.left_bytes, written)
    inside = {units[i].module for p in passages for i in range(p.first, p.end)}
    outside = {units[what].module for _, what in _in_order(units, passages) if isinstance(what, int)}
    if inside & outside:
        return measured_parts(rehearse, units, {})
    modules = [module for module, _ in _in_order(units, passages)]
    outer: dict[nn.Module, tuple[Way, ...]] = {m: way for m, way in ways.items() if m in outside}
    outer |= dict.fromkeys(blocks, ())
    whole, _ = _rehearsed(rehearse, outer, {}, modules)
    stages, problem = _in_stages(units, blocks, passages, split, whole)
    return Parts(stages, problem, whole.left_bytes, written)


def _rehearsed(
    rehearse: Callable[..., Rehearsal],
    ways: Ways,
    blocks: Mapping[nn.Module, Site],
    expected: Sequence[nn.Module],
) -> tuple[StepMeasure, Rehearsal]:
    """What the step holds in a metered run, with seconds of a second run without a meter."""
    rehearsals = [rehearse(metered=metered) for metered in (True, False)]
    for rehearsal in rehearsals:
        rehearsal.run(ways, blocks)
        if [v.module for v in rehearsal.visits] != list(expected):
            raise UnsupportedModel("the model calls its parts in another order each time")
    measured, timed = (rehearsal.measure for rehearsal in rehearsals)
    for unit, other in zip(measured.units, timed.units, strict=True):
        unit.rerun_s = min(unit.rerun_s, other.rerun_s)
    return measured, rehearsals[0]


def _in_order(units: Sequence[Part], passages: Sequence[Passage]) -> Iterator[tuple[nn.Module, Passage | int]]:
    """Calls of blocks, and of units (by index) outside of them, in the order of forward."""
    index = 0
    for passage in passages:
        yield from ((units[i].module, i) for i in range(index, passage.first))
        yield passage.block, passage
        index = passage.end
    yield from ((units[i].module, i) for i in range(index, len(units)))


def _in_stages(
    units: Sequence[Part],
    blocks: Mapping[nn.Module, Site],
    passages: Sequence[Passage],
    split: StepMeasure,
    whole: StepMeasure,
) -> tuple[tuple[PartStage, ...], UnitProblem]:
    """The stages of the step, and the choice between their options.

    split: measured with blocks in units. whole: measured with blocks recomputed.
    """
    stages: list[PartStage] = []
    alternatives: list[tuple[UnitChain, ...]] = []
    for around, (module, what) in zip(whole.units, _in_order(units, passages), strict=True):
        if isinstance(what, int):
            _set_options(units[what], around, 0)
            stages.append(PartStage((units[what],)))
            alternatives.append((UnitChain((tuple(units[what].options),)),))
            continue
        block = Part(module, blocks[module], ways=["recompute"], options=_opaque_options(around)[:1])
        before_bytes = what.before_bytes - around.forward_bytes
        for i in range(what.first, what.end):
            _set_options(units[i], split.units[i], before_bytes)
        inner = tuple(units[what.first : what.end])
        exit_bytes = what.after_bytes - around.after_forward_bytes - before_bytes
        stages.append(PartStage(inner, block))
        one = UnitChain((tuple(block.options),))
        alternatives.append((UnitChain(tuple(tuple(u.options) for u in inner), exit_bytes), one) if inner else (one,))
    problem = UnitProblem(tuple(alternatives), whole.turn_bytes, whole.end_bytes)
    return tuple(stages), problem


def _set_options(unit: Part, around: UnitMeasure, before_bytes: int) -> None:
    """Set the options of a unit, from the least memory to keeping everything.

    before_bytes: held when the unit was measured, but not in the run to which figures are relative.
    """
    if unit.front is None or unit.problem is None or unit.least is None:
        unit.ways, found = ["recompute", "keep"], _opaque_options(around)
    else:
        front, measured = unit.front, pass_of(unit.problem, unit.least.schedule)
        keeps_all: PartWay = "keep" if unit.fuse is None else front.keep_all
        lowest = min(front.points, key=lambda point: point.peak_bytes)
        twice = [Twice(lowest), Twice(front.keep_all)] if unit.repeats else []
        unit.ways, found = [*twice, *_spread(front.spread(MOST_POINTS), _MOST_OPTIONS), keeps_all], []
        for way in unit.ways:
            if isinstance(way, Twice):
                figures = pass_of_twice(unit.problem, way.candidate.schedule)
            else:
                figures = pass_of(unit.problem, (front.keep_all if isinstance(way, str) else way).schedule)
            found.append(
                UnitOption(
                    figures.extra_bytes(measured),
                    max(around.before_forward_bytes, around.forward_bytes + figures.forward_bytes),
                    max(around.before_backward_bytes, around.backward_bytes + figures.backward_bytes),
                    figures.time_s - front.keep_all.time_s,
                )
            )
    kept = found[-1]  # what runs as it is has no program that could do as well
    better = [i for i, o in enumerate(found[:-1]) if not _no_worse(kept, o)]
    unit.ways = [*(unit.ways[i] for i in better), unit.ways[-1]]
    unit.options = [_less(o, before_bytes) for o in (*(found[i] for i in better), kept)]


def _opaque_options(around: UnitMeasure) -> list[UnitOption]:
    """The two options of what has no program: recomputed as a whole, as it was measured, and kept."""
    return [
        UnitOption(
            0,
            max(around.before_forward_bytes, around.forward_peak_bytes),
            max(around.before_backward_bytes, around.backward_peak_bytes),
            around.rerun_s,
        ),
        UnitOption(
            around.kept_bytes,
            max(around.before_forward_bytes, around.forward_bytes + around.kept_forward_bytes),
            max(around.before_backward_bytes, around.kept_backward_bytes - around.kept_bytes),
            0.0,
        ),
    ]


def _no_worse(a: UnitOption, b: UnitOption) -> bool:
    return (
        a.extra_bytes <= b.extra_bytes
        and a.forward_peak_bytes <= b.forward_peak_bytes
        and a.backward_peak_bytes <= b.backward_peak_bytes
        and a.time_s <= b.time_s
    )


def _less(option: UnitOption, size_bytes: int) -> UnitOption:
    return dataclasses.replace(
        option,
        forward_peak_bytes=option.forward_peak_bytes - size_bytes,
        backward_peak_bytes=option.backward_peak_bytes - size_bytes,
    )


def _spread(points: Sequence[Candidate], count: int) -> list[Candidate]:
    """At most `count` of them, the first and the last included."""
    if len(points) <= count:
        return list(points)
    return [points[i * (len(points) - 1) // (count - 1)] for i in range(count)]

"""What a rehearsal held at each unit, worked out from its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """The begin or end of a pass of a unit.

    - index: the unit.
    - phase: "forward", "turn" (between forward and backward of the step), "backward", or "rerun" (of a forward in a
      backward).
    - begins: whether it is the begin of the pass.
    - live_bytes: held now.
    - peak_bytes: the most held since the event before.
    - time_s: when it was.
    """

    index: int
    phase: str
    begins: bool
    live_bytes: int
    peak_bytes: int
    time_s: float


@dataclass(slots=True)
class UnitMeasure:
    """What the whole step holds around one unit.

    - forward_bytes, backward_bytes: when the pass begins.
    - after_forward_bytes: when forward ends.
    - before_forward_bytes, before_backward_bytes: the most between the event before and the begin of the pass.
    - forward_peak_bytes, backward_peak_bytes: the most during the pass.
    - kept_bytes: what a forward that saves everything leaves.
    - kept_forward_bytes: the most that such a forward adds while it runs.
    - kept_backward_bytes: the most that the step holds in the backward after such a forward.
    - rerun_s: seconds of such a forward.
    """

    forward_bytes: int = 0
    after_forward_bytes: int = 0
    before_forward_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_bytes: int = 0
    before_backward_bytes: int = 0
    backward_peak_bytes: int = 0
    kept_bytes: int = 0
    kept_forward_bytes: int = 0
    kept_backward_bytes: int = 0
    rerun_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """What a step holds, by unit.

    - units: in the order of forward.
    - turn_bytes: the most held between the last forward and the loss's gradient.
    - end_bytes: the most held after the last unit's backward.
    - left_bytes: held once backward is over.
    """

    units: tuple[UnitMeasure, ...]
    turn_bytes: int
    end_bytes: int
    left_bytes: int


def step_measure(events: Sequence[Event], unit_count: int, last_bytes: int, left_bytes: int) -> StepMeasure:
    """What was held, sorted by unit.

    last_bytes: the most held after the last event. left_bytes: held in the end.
    """
    units = [UnitMeasure() for _ in range(unit_count)]
    turn_bytes = end_bytes = 0
    running = -1  # the unit whose backward has begun and not ended
    begun: Event | None = None
    for event in events:
        if running >= 0:
            unit = units[running]
            unit.backward_peak_bytes = max(unit.backward_peak_bytes, event.peak_bytes)
            if begun is None and unit.rerun_s:
                unit.kept_backward_bytes = max(unit.kept_backward_bytes, event.peak_bytes)
        match event.phase, event.begins:
            case "forward", True:
                units[event.index].forward_bytes = event.live_bytes
                units[event.index].before_forward_bytes = event.peak_bytes
            case "forward", False:
                units[event.index].forward_peak_bytes = event.peak_bytes
                units[event.index].after_forward_bytes = event.live_bytes
            case "turn", _:
                turn_bytes = event.peak_bytes
            case "backward", True:
                units[event.index].backward_bytes = event.live_bytes
                units[event.index].before_backward_bytes = event.peak_bytes
                running = event.index
            case "backward", False:
                running = -1
            case "rerun", True:
                begun = event
            case _:
                assert begun is not None
                unit = units[event.index]
                unit.kept_bytes = max(0, event.live_bytes - begun.live_bytes)
                unit.kept_forward_bytes = event.peak_bytes - begun.live_bytes
                unit.kept_backward_bytes = event.live_bytes
                unit.rerun_s = event.time_s - begun.time_s
                begun = None
    if running >= 0:
        units[running].backward_peak_bytes = max(units[running].backward_peak_bytes, last_bytes)
    end_bytes = max(last_bytes, events[-1].peak_bytes if events and events[-1].phase == "turn" else 0)
    return StepMeasure(tuple(units), turn_bytes, end_bytes, left_bytes)

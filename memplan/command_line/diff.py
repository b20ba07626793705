"""`memplan diff`: what two saved plans do differently."""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.command_line.outcomes import Outcome
from memplan.command_line.report import figures_as_json, loaded_plan
from memplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memplan.plans.plan import Plan

_MOST_ROWS = 12
Decisions = Counter[tuple[str, str, str]]  # how often: what is done, in which layer, with what kind of op


def add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `memplan diff`."""
    command = commands.add_parser("diff", help="peak, time and what is recomputed or offloaded in one plan of two")
    command.add_argument("a", type=Path, help="a saved plan")
    command.add_argument("b", type=Path, help="another")
    command.set_defaults(run=_diff)
    return command


def _diff(given: argparse.Namespace) -> Outcome:
    from memplan.problem.structure import first_difference, same_structure

    a, b = loaded_plan(given.a), loaded_plan(given.b)
    one, other = a.problem.graph, b.problem.graph
    kind = "the same step"
    if not same_structure(one, other):
        kind = f"different steps: {first_difference(one, other)}"
    elif [v.size_bytes for v in one.values] != [v.size_bytes for v in other.values]:
        kind = "the same step at other sizes"
    only = {"a": _decisions(a) - _decisions(b), "b": _decisions(b) - _decisions(a)}
    facts = {
        "steps": kind, "a": figures_as_json(a), "b": figures_as_json(b),
        "only_in": {name: _rows_of(found) for name, found in only.items()},
    }  # fmt: skip
    lines = [kind, "", f"  {'':16}{'a':>14}{'b':>14}", *_figures_of_both(a, b)]
    for name, found in only.items():
        lines += ["", *_shown_decisions(name, found)]
    return Outcome("\n".join(lines), facts)


def _figures_of_both(a: Plan, b: Plan) -> list[str]:
    rows = {
        "budget": [format_bytes(p.problem.budget_bytes or 0) for p in (a, b)],
        "peak": [format_bytes(p.peak_bytes) for p in (a, b)],
        "time a step": [format_seconds(p.time_s) for p in (a, b)],
        "overhead": [f"{p.overhead:+.1%}" for p in (a, b)],
        "ops run again": [str(len(p.recomputed)) for p in (a, b)],
        "offloaded": [format_bytes(p.offloaded_bytes) for p in (a, b)],
        "host memory": [format_bytes(p.host_bytes) for p in (a, b)],
    }
    return [f"  {name:16}{one:>14}{other:>14}" for name, (one, other) in rows.items()]


def _decisions(plan: Plan) -> Decisions:
    """What a plan does beyond running each op once, by layer: this is how plans of different steps are joined."""
    from memplan.problem.schedule import Offload

    graph = plan.problem.graph
    found: Decisions = Counter()
    for index in plan.recomputed:
        found["recomputed", graph.ops[index].layer, graph.ops[index].kind] += 1
    producers = graph.producers()
    for step in plan.schedule:
        if isinstance(step, Offload):
            maker = producers[step.value]
            place = graph.values[step.value].name if maker is None else graph.ops[maker].layer
            kind = graph.values[step.value].role if maker is None else graph.ops[maker].kind
            found["offloaded", place, kind] += 1
    return found


def _rows_of(found: Decisions) -> list[dict[str, Any]]:
    return [
        {"decision": decision, "layer": layer, "kind": kind, "count": count}
        for (decision, layer, kind), count in sorted(found.items())
    ]


def _shown_decisions(name: str, found: Decisions) -> list[str]:
    """Decisions that only one plan has, with layers that differ in their number alone in one line."""
    if not found:
        return [f"only in {name}: nothing"]
    rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for (decision, layer, kind), count in sorted(found.items()):
        rows[decision, re.sub(r"\d+", "*", layer) or "(the model itself)"][_short(kind)] += count
    ordered = sorted(rows.items(), key=lambda row: -row[1].total())
    lines = [f"only in {name}: {found.total()} decisions"]
    for (decision, layer), kinds in ordered[:_MOST_ROWS]:
        lines.append(f"  {decision} {layer:40} {', '.join(f'{n} x {kind}' for kind, n in kinds.most_common())}")
    if len(ordered) > _MOST_ROWS:
        lines.append(f"  and {len(ordered) - _MOST_ROWS} more")
    return lines


def _short(kind: str) -> str:
    """ "aten.mm.default" -> "mm"."""
    return kind.split(".")[1] if "." in kind else kind

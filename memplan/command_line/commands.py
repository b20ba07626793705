"""The parser of all commands, and how answers and mistakes are shown."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

import memplan
from memplan.command_line.demo import add_demo
from memplan.command_line.doctor import add_clear_costs, add_doctor, add_warmup
from memplan.command_line.outcomes import MISTAKEN, Mistake, Outcome
from memplan.command_line.plan_command import add_audit, add_explore, add_plan, add_report
from memplan.errors import InvalidPlanFile, MemplanError

_COMMANDS = (add_plan, add_explore, add_report, add_audit, add_demo, add_warmup, add_doctor, add_clear_costs)
_STATUS = (
    "exit status: 0 done, and it fits; 1 a mistake that you can put right; 2 wrong usage; 3 no plan fits, or an audit "
    "has findings"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Gives the exit status: 0 done, 1 a user's mistake, 3 no plan fits the budget.

    Raises SystemExit(2) for wrong usage, as argparse does.
    """
    parser = argparse.ArgumentParser(
        "memplan", description="Makes a PyTorch training step fit a byte budget.", epilog=_STATUS
    )
    parser.add_argument("--version", action="version", version=f"memplan {memplan.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in _COMMANDS:
        add(commands)
    for command in commands.choices.values():
        command.epilog = _STATUS
        command.add_argument("--json", action="store_true", help="print one JSON object, and nothing else on stdout")
    given = parser.parse_args(arguments)
    # With --json, stdout is the object alone: what else is printed meanwhile is for people.
    with contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext():
        try:
            outcome: Outcome = given.run(given)
        except (Mistake, MemplanError) as error:
            remedy = "change what is named there, or give a function that makes model and sample: path/file.py:build"
            mistake = Mistake("the step can't be planned", str(error), remedy)
            if isinstance(error, Mistake):
                mistake = error
            elif isinstance(error, InvalidPlanFile):
                remedy = "make it anew: memplan plan ... --out FILE"
                mistake = Mistake("the plan file can't be used", str(error), remedy)
            cause = mistake.cause.replace("\n", "\n         ")
            text = f"memplan: {mistake.what}\n  cause: {cause}\n  next:  {mistake.next_step}"
            facts = {"what": mistake.what, "cause": mistake.cause, "next": mistake.next_step}
            outcome = Outcome(text, {"error": facts}, MISTAKEN)
    if given.json:
        print(json.dumps(outcome.facts))
    else:
        print(outcome.text, file=sys.stderr if outcome.status == MISTAKEN else sys.stdout)
    return outcome.status

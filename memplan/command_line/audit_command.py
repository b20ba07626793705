"""`memplan audit`: whether checkpoints, compiled code or offload of the user's own change what a step gives."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import memplan
from memplan.command_line.outcomes import DONE, NO_FIT, Commands, Mistake, Outcome
from memplan.command_line.plan_command import errors_of_the_model
from memplan.command_line.step_options import count


def add_audit(commands: Commands) -> None:
    command = commands.add_parser("audit", help="whether your own checkpointing, compilation or offload is exact")
    command.add_argument(
        "model",
        help="a function that gives (model, sample) or (model, sample, loss_fn): package.module:build or "
        "path/file.py:build",
    )
    command.add_argument("--batch", type=count, help="for the function, if it has such a parameter")
    command.add_argument("--length", type=count, help="for the function, if it has such a parameter")
    command.set_defaults(run=_audit)


def _audit(given: argparse.Namespace) -> Outcome:
    from memplan.command_line.described import Wanted
    from memplan.command_line.from_build import built_step

    if ":" not in given.model:
        cause = "an audit runs the step, which takes weights and a batch"
        raise Mistake(f"{given.model!r} is no function", cause, "give path/file.py:build, which makes model and sample")
    step = built_step(Wanted(given.model, {}, given.batch, given.length, None))
    with errors_of_the_model():
        audit = memplan.audit(step.model, step.sample, step.loss_fn)
    facts: dict[str, Any] = {"model": step.title, "exact": audit.exact} | dataclasses.asdict(audit)
    for found in [*facts["findings"], *facts["nondeterministic"]]:
        found |= {name: None for name, value in found.items() if value == math.inf}  # which JSON has not
    return Outcome(f"{step.title}\n\n{audit}", facts, NO_FIT if audit.findings else DONE)

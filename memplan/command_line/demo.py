"""`memplan demo`: a model is trained as it is, at half of its peak and at the least peak, with the same losses."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util

from memplan.command_line.outcomes import DONE, MISTAKEN, Commands, Mistake, Outcome

_MEBIBYTE = 2**20
_FAR_OFF = 0.25


def add_demo(commands: Commands) -> None:
    commands.add_parser(
        "demo",
        help="train a small GPT-2 as it is, at half of its peak and in as little as it can",
        description="Prints for each run the measured and the predicted peak, the seconds of a step and the loss of "
        "every step. Exit status 1 where losses differ, or a measured peak is above its budget. Under three minutes on "
        "two cores; needs transformers and no download.",
    ).set_defaults(run=_demo)


def _demo(given: argparse.Namespace) -> Outcome:
    if importlib.util.find_spec("transformers") is None:
        raise Mistake("the demo trains a GPT-2", "transformers is not installed", "pip install transformers")
    from memplan.command_line.demo_runs import demo_runs

    runs = demo_runs()
    same = all(run.losses == runs[0].losses for run in runs)
    fits = all(run.fits for run in runs)
    losses, peaks = "the same numbers" if same else "DIFFERENT", "within" if fits else "ABOVE"
    lines = [
        f"\n{'':12}{'budget':>12}{'predicted':>12}{'measured':>12}{'of unplanned':>14}{'s a step':>10}{'predicted':>11}"
    ]
    for run in runs:
        sizes = [run.budget_bytes, run.predicted_bytes, run.peak_bytes]
        cells = "".join(f"{'-' if size is None else f'{size / _MEBIBYTE:.2f} MiB':>12}" for size in sizes)
        times = f"{run.step_s:>11.3f}{runs[0].step_s * (1 + run.overhead):>11.3f}"
        lines.append(f"{run.name:12}{cells}{run.peak_bytes / runs[0].peak_bytes:>13.1%}{times}")
    lines.append(f"\n{'loss of step':12}" + "".join(f"{run.name:>24}" for run in runs))
    for index in range(len(runs[0].losses)):
        lines.append(f"{index + 1:12}" + "".join(f"{run.losses[index]!r:>24}" for run in runs))
    lines.append(f"\nlosses are {losses}; peaks are {peaks} budget")
    if any(abs(run.step_s / runs[0].step_s / (1 + run.overhead) - 1) > _FAR_OFF for run in runs):
        lines.append("seconds are not as predicted: the machine does other work too. Bytes and losses are")
    facts = {"same_losses": same, "fits": fits, "runs": [dataclasses.asdict(run) for run in runs]}
    return Outcome("\n".join(lines), facts, DONE if same and fits else MISTAKEN)

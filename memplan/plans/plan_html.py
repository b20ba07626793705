"""A plan as one HTML file with pictures: nothing is loaded from elsewhere, and what it shows is JSON inside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from memplan.plans.figures import PlanFigures
from memplan.plans.page_data import page_data
from memplan.plans.plan_text import report_text, summary


def html_text(plan: PlanFigures, curve: Sequence[PlanFigures] | None = None) -> str:
    """The contents of the file. curve: the points of peak against time, if there are any beside the plan."""
    data = json.dumps(page_data(plan, curve), separators=(",", ":"), allow_nan=False)
    parts = {
        "SUMMARY": escape(summary(plan)),
        "REPORT": escape(report_text(plan)),
        "DATA": data.replace("<", "\\u003c"),  # a name in it must not end the script
        "STYLE": _read("report.css"),
        "SCRIPT": _read("drawing.js") + _read("report.js"),
    }
    head, *pieces = _read("report.html").split("@@")
    names, texts = pieces[::2], pieces[1::2]
    return head + "".join(parts[name] + text for name, text in zip(names, texts, strict=True))


def _read(name: str) -> str:
    return (files("memplan.plans") / "page" / name).read_text(encoding="utf-8")

"""Log lines have the name once, whatever the program does with them."""

from __future__ import annotations

import subprocess
import sys

import pytest

BODY = """
import logging
{setup}
from memplan.logs import log
log.warning("of %s", "note")
log.info("of none")
"""


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("", "memplan: of note\n"),
        ("logging.basicConfig()", "WARNING:memplan:of note\n"),
        ("logging.basicConfig(format='%(name)s: %(message)s')", "memplan: of note\n"),
        ("logging.getLogger('memplan').setLevel('INFO')", "memplan: of note\n"),
        ("logging.getLogger('memplan').setLevel('ERROR')", ""),
        ("logging.getLogger('memplan').addHandler(logging.StreamHandler())", "of note\n"),
    ],
)
def test_lines_on_stderr(setup: str, expected: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BODY.format(setup=setup)], check=True, capture_output=True, text=True, timeout=60
    )
    assert run.stderr == expected

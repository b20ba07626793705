"""A headless Chromium for tests that look at pages; a visible skip where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def browser(folder: Path, scheme: str = "light") -> Iterator[Any]:
    """A browser's context with a new profile in a folder, offline. scheme: "light" or "dark"."""
    api = pytest.importorskip("playwright.sync_api")
    path = next((found for name in _NAMES if (found := shutil.which(name)) is not None), None)
    if path is None:
        pytest.skip("no Chromium was found: apt-get install chromium")
    with api.sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            str(folder), executable_path=path, args=_QUIET, viewport={"width": 1280, "height": 800},
            color_scheme=scheme, offline=True,
        )  # fmt: skip
        try:
            yield context
        finally:
            context.close()


def opened(context: Any, path: Path) -> tuple[Any, list[str]]:
    """A page, and all that it complained of or asked the network for, which goes on as it is used."""
    page, complaints = context.new_page(), list[str]()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:")) else complaints.append(request.url),
    )
    page.goto(path.as_uri())
    return page, complaints

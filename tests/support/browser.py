"""A real browser for tests of pages, where one is installed."""

from __future__ import annotations

import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
"""Path of the browser; None if there is none."""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]
"""Options with which it shows nothing on a screen, and asks for nothing of its own."""
with_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"there is no browser here: none of {', '.join(NAMES)}"
)

"""What the pages of docs/ hold: their code blocks, and the metrics that docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable

from support.commands import ROOT

DOCS = ROOT / "docs"


def block(head: str) -> str:
    """The code block of docs/ whose first line is "```" and `head`, such as "python judge", without
    that line and the last. Fails unless exactly one block of all pages has that head.
    """
    pattern = re.compile(rf"^```{re.escape(head)}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    (found,) = [one for page in DOCS.rglob("*.md") for one in pattern.findall(page.read_text())]
    return found


def undocumented(names: Iterable[str]) -> set[str]:
    """Those of `names` of metrics that the page does not have, NAME standing for a user's word."""
    page = (DOCS / "metrics.md").read_text()
    known = {re.escape(name) for name in re.findall(r"`([\w/@.]+)`", page)}
    known = {name.replace("NAME", r"\w+").replace(r"\.\.\.", ".+") for name in known}
    return {name for name in names if not any(re.fullmatch(one, name) for one in known)} - {"step"}

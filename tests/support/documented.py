"""What README, CONTRIBUTING and docs/ hold: their code blocks, and the metrics that docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from support.commands import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    """Path from the root of the repository."""
    line: int
    """Line of the page in which it begins, from 1."""
    head: str
    """What follows the backticks: a language, and perhaps a name, such as "python judge"."""
    body: str
    """The lines between the two fences."""

    @property
    def language(self) -> str:
        return self.head.partition(" ")[0]


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    return [
        Block(name, text.count("\n", 0, one.start()) + 1, one[1].strip(), one[2])
        for one in FENCE.finditer(text)
    ]


def blocks(head: str) -> list[str]:
    """The bodies of the code blocks whose first line is "```" and `head`, such as "python judge",
    in all pages.
    """
    return [one.body for page in PAGES for one in blocks_of(page) if one.head == head]


def block(head: str) -> str:
    """The body of the only code block with this head; fails if there are none or several."""
    (found,) = blocks(head)
    return found


def undocumented(names: Iterable[str]) -> set[str]:
    """Those of `names` of metrics that the page does not have, NAME standing for a user's word."""
    page = (DOCS / "metrics.md").read_text()
    known = {re.escape(name) for name in re.findall(r"`([\w/@.]+)`", page)}
    known = {name.replace("NAME", r"\w+").replace(r"\.\.\.", ".+") for name in known}
    return {name for name in names if not any(re.fullmatch(one, name) for one in known)} - {"step"}

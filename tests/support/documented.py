"""Which metrics docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable

from support.commands import ROOT


def undocumented(names: Iterable[str]) -> set[str]:
    """Those of `names` of metrics that the page does not have, NAME standing for a user's word."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    known = {re.escape(name) for name in re.findall(r"`([\w/@.]+)`", page)}
    known = {name.replace("NAME", r"\w+").replace(r"\.\.\.", ".+") for name in known}
    return {name for name in names if not any(re.fullmatch(one, name) for one in known)} - {"step"}

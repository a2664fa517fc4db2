"""The report as a reader of its HTML finds it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest


class Page(HTMLParser):
    """Parses strictly: every element that must be closed is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.charts: dict[str, Any] = {}
        """{title: what the page's script draws}"""
        self.script = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and self.seen[-1][1].get("type") == "application/json":
            chart = json.loads(data, parse_constant=lambda name: pytest.fail(name))
            self.charts[chart["title"]] = chart
        if self.open[-1:] == ["script"]:
            self.script = data  # the last one
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data

    def count(self, tag: str, name: str = "") -> int:
        return sum(
            t == tag and (not name or name in (attrs.get("class") or "").split())
            for t, attrs in self.seen
        )

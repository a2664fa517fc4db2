"""README and docs: links lead somewhere, commands exist, and keys are keys of a recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megarl import config
from megarl.command_line.table import COMMANDS
from megarl.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*).*?\n(.*?)^```", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_files_exist(page: Path) -> None:
    text = "\n".join(body for kind, body in BLOCK.findall(page.read_text()) if kind == "bash")
    commands = set(re.findall(r"^(?:python -m )?megarl ([a-z][\w-]+)", text, re.M))
    assert commands <= set(COMMANDS) | {"torchrun"}, commands
    files = set(re.findall(r"(?<![\w/.-])((?:launch|tools|tests)/[\w/.-]+\.(?:py|sh|yaml))", text))
    assert not [name for name in files if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", ["README.md", "docs/from_others.md"])
def test_recipes_have_no_unknown_key(page: str) -> None:
    recipes = [body for kind, body in BLOCK.findall((ROOT / page).read_text()) if kind == "yaml"]
    assert recipes
    for recipe in recipes:
        assert not config.unknown_keys(RunConfig, yaml.safe_load(recipe))


def test_keys_beside_those_of_others_exist() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / "from_others.md").read_text(), re.M)
    keys = [key.partition(":")[0] for row in rows for key in re.findall(r"`([\w.:]+)", row)]
    keys = [f"algorithm.{key}" if key == "clip_high" else key for key in keys]
    assert len(keys) > 20
    for key in keys:
        tree: object = "x"
        for part in reversed(key.split(".")):
            tree = {part: tree}
        assert not config.unknown_keys(RunConfig, tree), key

"""README and docs: links lead somewhere, keys of other systems have ours beside them, and the site is
built of the pages. Their code blocks are in test_doc_blocks.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import make_notebook
import pytest
from support.commands import python
from support.documented import PAGES

from megarl.command_line.settings import settings
from megarl.command_line.table import COMMANDS
from megarl.settings import config
from megarl.settings.config import RunConfig
from megarl.settings.recipe_file import has_key

ROOT = Path(__file__).resolve().parents[2]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*).*?\n(.*?)^```", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@EACH_PAGE
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


def test_keys_beside_those_of_others_exist() -> None:
    """In the last column of the tables of docs/howto/from_*.md."""
    texts = [page.read_text() for page in (ROOT / "docs" / "howto").glob("from_*.md")]
    cells = re.findall(r"^\|.*\| ([^|]+) \|$", "\n".join(texts), re.M)
    keys = [key for cell in cells for key in re.findall(r"`([\w.]+)(?=[:`])", cell)]
    keys = [f"algorithm.{key}" if key == "clip_high" else key for key in keys]
    assert len(texts) == 4 and len(keys) > 80
    for key in keys:
        assert has_key(RunConfig, key), key


@EACH_PAGE
def test_lines_are_short(page: Path) -> None:
    """At most 120 characters, but rows of tables and what has no space to break at."""
    lines = [line.strip() for line in page.read_text().splitlines() if len(line) > 120]
    assert not [line for line in lines if " " in line and not line.startswith("|")]


def test_the_notebook_is_that_of_its_page() -> None:
    """Otherwise run `python tools/make_notebook.py`."""
    page = make_notebook.PAGE
    assert page.with_suffix(".ipynb").read_text() == make_notebook.notebook(page.read_text())


def test_pictures_are_described_and_shown() -> None:
    """Each has a title and a description, at most 1000 px, and stands in a page."""
    text = "".join(page.read_text() for page in PAGES)
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert f"pictures/{picture.name})" in text, picture
        if picture.suffix == ".svg":
            root = ElementTree.parse(picture).getroot()
            title, description = (root[n].text for n in (0, 1))
            assert title and description and int(root.attrib["width"]) <= 1000, picture


def test_the_site_is_built_of_every_page(tmp_path: Path) -> None:
    """Strictly: a warning of mkdocs, as about a link, an anchor or a page that the navigation lacks,
    is an error. Nothing that a page loads comes from the network.
    """
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: bash launch/env.sh")
    done = python("-m", "mkdocs", "build", "-f", "tools/mkdocs.yml", "-d", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        built = (tmp_path / page.relative_to(ROOT / "docs")).with_suffix(".html").read_text()
        loaded = re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=\"([^\"]*)", built)
        assert len(loaded) > 3 and not [one for one in loaded if ":" in one or one[:2] == "//"]
        assert not re.search(r"<p>(\* |- |\||```)", built), (
            f"{page}: a list, table or block is text"
        )
    found = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    assert {"index.html", "source/index.html"} <= {one["location"] for one in found}
    commands = (tmp_path / "reference/commands.html").read_text()
    for name, command in COMMANDS.items():
        assert f'id="megarl-{name}"' in commands
        assert all(f"<code>{option}" in commands for option in command.option_names)
    for name, kind in (config.TASKS | {"serve-reward": config.ServeRewardConfig}).items():
        page = (tmp_path / f"reference/{name}.html").read_text()
        assert all(f"<code>{one.key}</code>" in page for one in settings(kind))

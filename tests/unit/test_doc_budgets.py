"""The pages of docs/ keep to their numbers of words, their sentences are short, and the plots of the
results are those of their tables.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plot_results
import pytest
import which_gpu
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WORDS = {"Tutorials": (500, 800), "How-to": (0, 600), "Concepts": (0, 700)}
"""{part of the site: fewest and most words of a page}"""
OTHERS = {"index.md": (0, 700), "results.md": (0, 600)}
NO_CONCEPT = {"design.md"}
"""For those who work on the code."""


def pages(part: Any) -> Iterator[str]:
    """The pages below a part of the site's navigation."""
    if isinstance(part, str):
        yield part
    for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from pages(one)


NAVIGATION = yaml.safe_load((ROOT / "tools/mkdocs.yml").read_text().partition("\nnav:\n")[2])
BUDGETS = OTHERS | {
    page: WORDS[name]
    for part in NAVIGATION
    for name in WORDS
    if name in part
    for page in pages(part)
    if not page.startswith("source/") and page not in NO_CONCEPT
}
# These have the subjects of two pages each.
BUDGETS |= {f"concepts/{name}.md": (0, 1050) for name in ("layouts", "ledger", "system", "weights")}
PROSE = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))]
PROSE = [page for page in PROSE if not page.startswith("results/")]


def sentences(text: str) -> list[str]:
    """The sentences of a page without its code blocks, tables and headings. An item of a list ends
    a sentence; code is one word.
    """
    text = re.sub(r"^```.*?^```", "\n\n", text, flags=re.M | re.S)
    text = re.sub(r"^ *(\||#|!\[).*|^ {4,}.*", "\n", text, flags=re.M)
    text = re.sub(r"^ *([*-]|\d+\.) ", "\n\n", text, flags=re.M)
    text = re.sub(r"`[^`]+`", "CODE", re.sub(r"\]\([^)]*\)", "]", text))
    found = (
        part
        for paragraph in re.split(r"\n\s*\n", text)
        for part in re.split(r"(?<=[.?!])[*)\"]*\s+(?=[*\[(\"]*[A-Z0-9])", paragraph)
    )
    return [one for one in found if re.search(r"\w", one)]


@pytest.mark.parametrize("page", BUDGETS)
def test_a_page_has_as_many_words_as_it_may(page: str) -> None:
    fewest, most = BUDGETS[page]
    assert fewest <= len((DOCS / page).read_text().split()) <= most


def test_every_page_of_these_folders_has_a_budget() -> None:
    found = {page for page in PROSE if page.startswith(("howto/", "concepts/", "tutorials/"))}
    assert found <= set(BUDGETS) and len(BUDGETS) > 40


@pytest.mark.parametrize("page", PROSE)
def test_half_of_the_sentences_have_at_most_20_words(page: str) -> None:
    lengths = [len(one.split()) for one in sentences((DOCS / page).read_text())]
    assert statistics.median(lengths or [0]) <= 20


def test_the_table_of_gpus_is_computed() -> None:
    page = (DOCS / "howto" / "which_gpu.md").read_text()
    assert which_gpu.table(4096) in page, "python tools/which_gpu.py"


@pytest.mark.parametrize("name", plot_results.PLOTS)
def test_a_plot_is_that_of_its_table(name: str) -> None:
    drawn = plot_results.PLOTS[name]()
    assert (DOCS / "results" / name).read_text() == drawn, "python tools/plot_results.py"
    assert f"results/{name})" in (DOCS / "results.md").read_text()

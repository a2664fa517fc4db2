"""Pages of the documentation's site that are no files of docs/: a hook of mkdocs (mkdocs.yml).

Pages link to files of the repository by relative paths, which GitHub follows. On the site such a
file is a page below source/, which is found by its link and not by the search.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file of the repository that a page links to, and so on from those that
    are Markdown.
    """
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        file = files.get_file_from_path(page)
        assert file is not None
        for link in LINK.findall(file.content_string):
            path = _path(page, link)
            new = _site_page(path)
            if path.startswith("docs/") or ":" in link or files.get_file_from_path(new):
                continue
            if (ROOT / path).exists():
                files.append(File.generated(config, new, content=_content(path)))
                waiting += [new] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links to the site's pages. A code block that is named as a file has the name
    for a title; other names, by which tests find blocks, are left out.
    """
    own = page.file.src_uri
    if own.startswith("source/") and not (ROOT / own.removeprefix("source/")).exists():
        return markdown  # a program, in which nothing is a link

    def there(link: re.Match[str]) -> str:
        if ":" in link[1]:
            return link[1]
        return posixpath.relpath(_site_page(_path(own, link[1])), posixpath.dirname(own) or ".")

    text = re.sub(r"^```(\w+) \w+$", r"```\1", LINK.sub(there, markdown), flags=re.MULTILINE)
    return re.sub(r"^```(\w+) (\w+\.\w+)$", r'```\1 title="\2"', text, flags=re.MULTILINE)


def _path(page: str, link: str) -> str:
    """The path in the repository that a link leads to, from a page of the site."""
    source = page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _site_page(path: str) -> str:
    """The page of the site about a path of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _content(path: str) -> str:
    """A file of the repository, or the names in a folder, as Markdown."""
    source = ROOT / path
    if path.endswith(".md"):
        return source.read_text()
    if source.is_dir():
        names = sorted(one.name for one in source.iterdir() if one.name != "__pycache__")
        body, language = "\n".join(names), ""
    else:
        body, language = source.read_text().rstrip(), LANGUAGES.get(source.suffix, "")
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# `{path}`\n\n"
    return f"{head}````{language}\n{body}\n````\n"

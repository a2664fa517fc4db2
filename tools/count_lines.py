"""Lines of code by package, without blank lines, comments and docstrings, as a Markdown table.

python tools/count_lines.py

A docstring is every string that stands alone as a statement, so those below fields count too.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
CORE = ("megarl", "kernels", "parallel")
PRONOUNS = {
    *("found", "one", "said", "made", "place", "told", "mine"),
    *("here", "kind", "given", "wanted", "taken", "part"),
}
"""Names of variables that say nothing about their values."""


def code_lines(text: str) -> int:
    """Lines of a Python file's text on which code stands."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def package(path: Path) -> str:
    """The row of the table for a file, given by its path from the repository's root."""
    folders = path.parts[:-1]
    if path.parts[:2] == ("megarl", "apps"):
        return "/".join(folders[:3])
    return "/".join(folders[:2]) if folders[0] in ("megarl", "tests", "tools") else folders[0]


def files() -> list[Path]:
    """The Python files of the core, the apps, the tests and the tools, from the root."""
    paths = (path for base in (*CORE, "tests", "tools") for path in (ROOT / base).rglob("*.py"))
    names = (path.relative_to(ROOT) for path in paths)
    links = [("megarl", "kernels"), ("megarl", "parallel")]
    return [name for name in names if name.parts[:2] not in links]


def by_package() -> dict[str, int]:
    """{package: its lines of code}, of the core, the apps, the tests and the tools."""
    lines: dict[str, int] = {}
    for path in files():
        name = package(path)
        lines[name] = lines.get(name, 0) + code_lines((ROOT / path).read_text(encoding="utf-8"))
    return lines


def prose_of_core() -> tuple[float, float]:
    """(words of docstrings per line of code, names in `PRONOUNS` per 1,000 assignments)."""
    words = lines = pronouns = names = 0
    for path in files():
        if group(package(path)) != "core":
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        lines += code_lines(text)
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(value=ast.Constant(value=str(docstring))):
                    words += len(docstring.split())
                case ast.Name(id=name, ctx=ast.Store()):
                    names, pronouns = names + 1, pronouns + (name in PRONOUNS)
    return words / lines, 1000 * pronouns / names


def group(name: str) -> str:
    """The sum that a package counts for: "core", "apps", "tests" or "tools"."""
    top = name.split("/")[0]
    if name.startswith("megarl/apps"):
        return "apps"
    return "core" if top in CORE else top


def sums(packages: dict[str, int]) -> dict[str, int]:
    """Lines of code altogether: {"core": 24000, "apps": ..., "tests": ..., "tools": ...}.
    `packages`: {package: its lines of code}.
    """
    total = dict.fromkeys(("core", "apps", "tests", "tools"), 0)
    for name, lines in packages.items():
        total[group(name)] += lines
    return total


def table(packages: dict[str, int]) -> str:
    """A Markdown table with a row for each package, and below them those of `sums`."""
    rows = [f"| {name} | {lines:,} |" for name, lines in sorted(packages.items())]
    rows += [f"| **{name}** | **{lines:,}** |" for name, lines in sums(packages).items()]
    return "\n".join(["| package | lines of code |", "|---|---:|", *rows])


if __name__ == "__main__":
    sys.stdout.write(table(by_package()) + "\n\n")
    words, pronouns = prose_of_core()
    sys.stdout.write(f"Core: {words:.1f} words of docstrings a line of code;")
    sys.stdout.write(f" {pronouns:.0f} of 1,000 assigned names are pronouns\n")

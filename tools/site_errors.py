"""Index of the messages with which megarl refuses an input, for the documentation's site. They are
read from the source, where a message is an argument of `require`, `UserError` or `ValueError`.

    messages([Path("megarl"), ...]) -> {message: file}
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

CALLS = {"require": 1, "UserError": 0, "ValueError": 0}
"""{function: the position of the message among its arguments}"""


def messages(folders: Iterable[Path]) -> dict[str, Path]:
    """{message, with "..." for each value in it: Python file below `folders` that has it first}.
    Left out are messages without a semicolon, which say nothing of what to do.
    """
    found: dict[str, Path] = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                position = CALLS.get(node.func.id, len(node.args))
                said = _text(node.args[position]) if position < len(node.args) else ""
                if ";" in said:
                    found.setdefault(said, path)
    return found


def _text(node: ast.expr) -> str:
    """The text of an expression, with "..." for what only a run knows."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "..."


def errors_page(root: Path) -> Iterator[str]:
    """The lines of the page, a section for each package of the checkout `root`."""
    yield from (
        "# Messages",
        "",
        "What megarl says of a recipe, a file or an option that it refuses,",
    )
    yield "and what to do. `...` stands for a name or value of yours. The sections are the packages"
    yield "that say it."
    packages: dict[str, list[str]] = {}
    for said, path in messages(root / name for name in ("megarl", "parallel", "kernels")).items():
        within = path.relative_to(root).with_suffix("").parts
        packages.setdefault(".".join(within[: 2 if len(within) > 2 else 1]), []).append(said)
    for package, said in sorted(packages.items()):
        yield from ("", f"## {package}", "")
        yield from (f"* {' '.join(one.split())}" for one in sorted(said, key=str.lower))

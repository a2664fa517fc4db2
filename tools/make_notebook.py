"""Write docs/tutorials/notebook.ipynb from notebook.md: cells of text, and of code that can run.

python tools/make_notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tutorials" / "notebook.md"
CODE = re.compile(r"^```(python cell|bash)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def cell(number: int, kind: str, text: str) -> dict[str, object]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    lines = text.strip().splitlines(keepends=True)
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines} | code


def notebook(page: str) -> str:
    """The notebook (nbformat 4.5) of a page's text."""
    cells, texts = [], CODE.split(page)  # text, head, code, text, head, code, ..., text
    for number in range(0, len(texts), 3):
        cells.append(cell(number, "markdown", texts[number]))
        if number + 2 < len(texts):
            code = texts[number + 2]
            if texts[number + 1] == "bash":  # by the kernel's Python
                code = code.replace("python", "%run").partition("  #")[0]
            cells.append(cell(number + 1, "code", code))
    cells = [cell for cell in cells if cell["source"]]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text()))

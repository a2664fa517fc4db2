"""Multiple choice: a column of choices becomes lines of the prompt, the answer becomes a label.

{"question": "2+2?", "choices": ["3", "4"], "answer": 1} -> "2+2?\\nA. 3\\nB. 4", answer "B"
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from megarl.data.rows import kind_of
from megarl.schema import require


@dataclass(frozen=True)
class Choices:
    """The choices of one row: labels and texts, of equal number."""

    labels: list[str]
    texts: list[str]
    place: str
    """Where the row was found, for error messages."""
    lettered: bool
    """Whether the labels are the letters given to a list, and not labels of the row itself."""

    @classmethod
    def of(cls, value: Any, *, place: str, setting: str) -> Choices:
        """Read a list of texts, labelled A, B, ..., or a dict {label: [...], text: [...]}, or a
        dict from labels to texts. Raises `ValueError`, naming the recipe key `setting`, for
        anything else.
        """
        lettered = not isinstance(value, dict)
        if isinstance(value, dict) and isinstance(value.get("text"), list):
            texts, labels = value["text"], value.get("label")
            lettered = labels is None
            labels = list(string.ascii_uppercase[: len(texts)]) if labels is None else labels
        elif isinstance(value, dict):
            labels, texts = list(value), list(value.values())
        else:
            texts = value if isinstance(value, list) else []
            labels = list(string.ascii_uppercase[: len(texts)])
        sound = (
            isinstance(labels, list)
            and len(labels) == len(texts) >= 2
            and all(isinstance(one, str | int | float) for one in (*labels, *texts))
            and len({str(label) for label in labels}) == len(labels)
        )
        require(
            sound,
            f"{place}: the choices are {kind_of(value)} that holds no list of 2 to 26 texts (or"
            f" {{label: [...], text: [...]}}, or {{A: text, B: text}}); set {setting} to another"
            " column, or drop the row",
        )
        return cls([str(one) for one in labels], [str(one) for one in texts], place, lettered)

    def lines(self) -> str:
        """The choices as lines of a prompt, such as "A. 3"."""
        pairs = zip(self.labels, self.texts, strict=True)
        return "\n".join(f"{label}. {text}" for label, text in pairs)

    def label(self, answer: Any) -> str:
        """The label that a row's answer means. A number is the number of a choice, counted from 0.
        A text is a label of the row, the text of a choice, or digits that number a choice.

        Raises `ValueError` for another answer, and for a text with two meanings: "2" for the
        choices ["8", "2", "24"] is the text of B and the number of C.
        """
        said = str(answer).strip()
        number = _number(said) if isinstance(answer, int | str) else None
        by_number = set(self.labels[number : number + 1]) if number is not None else set()
        pairs = zip(self.labels, self.texts, strict=True)
        by_text = {label for label, text in pairs if text.strip() == said}
        by_label = {said} & set(self.labels)
        if isinstance(answer, int):
            found = by_number | (set() if self.lettered else by_label)
        elif by_label:
            found = by_label | (by_text if self.lettered else set())
        else:
            found = by_text | by_number
        require(
            bool(found),
            f"{self.place}: the answer '{said[:80]}' is none of the labels"
            f" {', '.join(self.labels)}, no text of a choice, and no number from 0 to"
            f" {len(self.labels) - 1}; mend the row or set another prompts.answer_column",
        )
        require(
            len(found) == 1,
            f"{self.place}: the answer '{said[:80]}' may mean {' or '.join(sorted(found))}, since"
            " it fits as a label, as the text of a choice or as its number from 0 more than once;"
            " write the answers of the column as letters, or as integers from 0",
        )
        return found.pop()


def _number(said: str) -> int | None:
    """The number that a text of digits is, None for any other text."""
    return int(said) if said.isascii() and said.isdigit() and len(said) < 4 else None

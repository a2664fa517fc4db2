"""Prompts for reinforcement learning.

PromptsConfig --load_prompts--> PromptList --at(ordinal)--> Prompt
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from megarl.data.chat_template import ChatTemplate, Tools
from megarl.data.chats import check_question, plain_prompt, tools_of, turns_of
from megarl.data.control_tokens import unmarked
from megarl.data.order import Interleaving, MixedOrder, Order
from megarl.data.reading import Reading, picked
from megarl.data.rows import Cells, fingerprint, kind_of, text_of
from megarl.data.tokens import TokenLists
from megarl.settings.data import PromptsConfig, exact
from megarl.settings.schema import require
from megarl.system.files import canonical_json
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class PromptList:
    """The tokenised prompts of a run: `at(n)` is the n-th of training; iterating gives all once in
    file order.
    """

    prompts: list[Prompt]
    """In file order, without indices and token ids."""
    token_ids: TokenLists
    order: Order | MixedOrder
    fingerprint: str
    """Of the prompts, their answers and their order."""
    warning: str = ""
    """What the user should know of the prompts; may be empty."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.token_ids.lengths.max())

    @property
    def environments(self) -> list[str] | None:
        """The verifier of each prompt, in file order, as a key of `environment.mixture`; None
        without a mixture.
        """
        names = [prompt.environment for prompt in self.prompts]
        return names if any(names) else None

    def __iter__(self) -> Iterator[Prompt]:
        return (self._row(index) for index in range(len(self)))

    def at(self, ordinal: int) -> Prompt:
        """The prompt at position `ordinal` of training, from 0 over all epochs; depends on seed and
        ordinal only.
        """
        return self._row(self.order.row(ordinal))

    def _row(self, index: int) -> Prompt:
        return replace(self.prompts[index], index=index, token_ids=self.token_ids[index])

    @classmethod
    def mixed(cls, parts: Sequence[PromptList], weights: Sequence[Fraction]) -> PromptList:
        """One list of the prompts of `parts`, in file order one part after the other. In training
        order, each part gets a share of the positions in proportion to its entry of `weights`
        (above 0, of any sum).
        """
        settings = [
            ["mixture", str(weight), source.fingerprint]
            for source, weight in zip(parts, weights, strict=True)
        ]
        prompts = [prompt for source in parts for prompt in source]
        orders = cast("list[Order]", [source.order for source in parts])
        return cls(
            [replace(prompt, token_ids=[]) for prompt in prompts],
            TokenLists(prompt.token_ids for prompt in prompts),
            MixedOrder(Interleaving(weights), orders),
            # Not of the texts, which may hold today's date; the parts' digests cover the prompts.
            fingerprint(settings, ((None, prompt.answer) for prompt in prompts)),
            "; ".join(dict.fromkeys(source.warning for source in parts if source.warning)),
        )


class Problem(NamedTuple):
    """A row of a data set, checked but not yet rendered."""

    cells: Cells[PromptsConfig]
    value: Any
    """The prompt, as the data set has it."""
    answer: str
    choices: str
    """The lines "A. text" of a multiple choice; empty without."""
    tools: Tools
    """Tools of this row only."""


def load_prompts(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    setting: str = "prompts",
    tools: Tools = (),
    are_read: bool = True,
) -> PromptList:
    """Read, check and tokenise all prompts of the section `config` of a recipe, one source or a
    mixture. `seed`: of shuffling. `setting`: name of the section, for messages. `tools`: shown by
    the chat template with every prompt; rows must then have none of their own. `are_read`: False
    where an agent reads the prompts, so that texts without a chat template are right. Raises
    `ValueError` that names the file, the row and the setting to change.
    """
    if config.sources:
        parts = [
            load_prompts(
                source,
                tokenizer,
                seed=seed + (number << 32),  # of its own, since a file may be there twice
                setting=f"{setting}.sources[{number}]",
                tools=tools,
                are_read=are_read,
            )
            for number, source in enumerate(config.parts)
        ]
        return PromptList.mixed(parts, [exact(source.weight) for source in config.sources])
    require(
        not tools or config.template == "chat",
        f"{setting}.template is '{config.template}', but environment.tools are shown to the model"
        f" by its chat template; set {setting}.template to 'chat'",
    )
    data = Reading(config, tokenizer, seed, setting)
    config = data.config
    if config.unique:  # the first row of each prompt is kept
        first: dict[str, Cells[PromptsConfig]] = {}
        for cells in data.rows:
            first.setdefault(canonical_json(cells.value("prompt_column")), cells)
        data.rows = [*first.values()]
    problems = [_problem(cells, data.template, tools) for cells in data.rows]
    texts = [_rendered(problem, data.template, tools or problem.tools) for problem in problems]
    data.check_texts(texts, [problem.answer for problem in problems])
    token_ids = data.prompt_tokens(texts, are_read=are_read)
    kept, fitted = data.fit(token_ids)
    for row in np.flatnonzero(fitted.lengths != token_ids.lengths):
        texts[row] = str(tokenizer.decode(fitted[row]))
    texts, problems = [*map(unmarked, texts)], picked(problems, kept)
    names = [_environment(problem.cells) for problem in problems]
    settings = [config.template, config.system, config.instruction, config.shuffle]
    settings += [problem.choices for problem in problems if problem.choices] + data.settings
    shown = tools or [problem.tools for problem in problems]
    if any(shown):
        settings.append(canonical_json(list(shown)))
    settings += data.cut_settings
    if any(names):
        settings += ["environments", *names]
    prompts = [
        Prompt(0, text, [], problem.answer, problem.cells.row, name)
        for text, problem, name in zip(picked(texts, kept), problems, names, strict=True)
    ]
    digest = fingerprint(settings, ((problem.value, problem.answer) for problem in problems))
    return PromptList(prompts, fitted.only(kept), data.order(len(kept)), digest, data.warning)


def _problem(cells: Cells[PromptsConfig], template: ChatTemplate | None, tools: Tools) -> Problem:
    """The prompt and the answer of a row. `tools`: those of every row."""
    config = cells.config
    choices = Choices.of(cells) if config.choices_column else None
    answer = _answer(cells, choices) if config.answer_column else ""
    value = cells.value("prompt_column")
    row_tools = tools_of(cells) if template is not None else []
    require(
        not (tools and row_tools),
        f"{cells.setting}: rows have tools (column '{config.tools_column}') beside"
        f" environment.tools, which alone can be called; set {cells.setting}.tools_column to ''",
    )
    return Problem(cells, value, answer, choices.lines() if choices else "", row_tools)


def _answer(cells: Cells[PromptsConfig], choices: Choices | None) -> str:
    """The reference answer of a row, behind the marker if `answer_after` is set; of `choices` a
    label.
    """
    named, marker = f"(column '{cells.config.answer_column}')", cells.config.answer_after
    value = cells.value("answer_column")
    answer = text_of(value, what=f"the answer {named}", place=cells.place)
    if choices and isinstance(value, int) and not marker:
        return choices.label(value)
    if marker:
        _, separator, answer = answer.rpartition(marker)
        cells.require(
            separator,
            f"the answer does not contain {cells.setting}.answer_after = '{marker}'; set the marker"
            " that this data set uses, or none",
        )
    cells.require(
        bool(answer.strip()),
        f"the answer {named} is empty; drop the row or set {cells.setting}.answer_column",
    )
    return choices.label(answer) if choices else answer.strip()


def _rendered(problem: Problem, template: ChatTemplate | None, tools: Tools) -> str:
    """The text that the model sees: the prompt with its choices and the instruction; without
    `template` as it stands. Raises `ValueError` for a chat that asks nothing or that the template
    does not write fully.
    """
    cells = problem.cells
    more = "".join(f"\n{text}" for text in (problem.choices, cells.config.instruction) if text)
    if template is None:
        return plain_prompt(cells) + more
    chat = turns_of(cells, "prompt_column", role="user")
    check_question(chat, cells)
    if more:
        asked = [number for number, turn in enumerate(chat) if turn["role"] == "user"]
        cells.require(
            bool(asked),
            f"the chat has no user message to append {cells.setting}.instruction to; remove the"
            " instruction",
        )
        chat[asked[-1]]["content"] += more
    if cells.config.system:
        cells.require(
            chat[0]["role"] != "system",
            f"the chat has a system message of its own; remove {cells.setting}.system",
        )
        chat.insert(0, {"role": "system", "content": cells.config.system})
    text = template.text(chat, cells.place, asks=True, tools=tools)
    template.check_whole(chat, cells.place, tools)
    return text


def _environment(cells: Cells[PromptsConfig]) -> str:
    """The row's key of `environment.mixture`, from `environment_column` or the setting
    `environment`; "" if both are empty. Raises `ValueError` for a row without one.
    """
    if not cells.config.environment_column:
        return cells.config.environment
    value, named = cells.value("environment_column"), cells.config.environment_column
    cells.require(
        isinstance(value, str) and bool(value),
        f"the verifier's name (column '{named}') is {value!r:.80}; fill it with a name of"
        " environment.mixture, or drop the row",
    )
    return value


@dataclass(frozen=True)
class Choices:
    """Labels and texts of one row's multiple choice:

    {"question": "2+2?", "choices": ["3", "4"], "answer": 1} -> "2+2?\\nA. 3\\nB. 4", answer "B"
    """

    labels: list[str]
    texts: list[str]
    lettered: bool
    """Whether the labels are letters given to a list, not the row's own."""
    cells: Cells[PromptsConfig]
    """The row, for messages."""

    @classmethod
    def of(cls, cells: Cells[PromptsConfig]) -> Choices:
        """Read `choices_column`: a list of texts, labelled A, B, ...; {label: [...], text: [...]};
        or {label: text}. Raises `ValueError` for anything else, or fewer than two choices.
        """
        value = cells.value("choices_column")
        labels, texts = None, value if isinstance(value, list) else []
        if isinstance(value, dict) and isinstance(value.get("text"), list):
            labels, texts = value.get("label"), value["text"]
        elif isinstance(value, dict):
            labels, texts = list(value), list(value.values())
        lettered = labels is None
        labels = list(string.ascii_uppercase[: len(texts)]) if labels is None else labels
        sound = (
            isinstance(labels, list)
            and len(labels) == len(texts) >= 2
            and all(isinstance(item, str | int | float) for item in (*labels, *texts))
            and len({str(label) for label in labels}) == len(labels)
        )
        cells.require(
            sound,
            f"the choices are {kind_of(value)} that holds no list of 2 to 26 texts (or {{label:"
            f" [...], text: [...]}}, or {{A: text, B: text}}); set {cells.setting}.choices_column"
            " to another column, or drop the row",
        )
        return cls([str(label) for label in labels], [str(text) for text in texts], lettered, cells)

    def lines(self) -> str:
        """The choices as lines of a prompt ("A. 3"), without a newline at the end."""
        pairs = zip(self.labels, self.texts, strict=True)
        return "\n".join(f"{label}. {text}" for label, text in pairs)

    def label(self, answer: Any) -> str:
        """The label that a row's answer means. A number counts the choices from 0. A text is a
        label, the text of a choice, or digits that number a choice.

        Raises `ValueError` for another answer, and for a text with two meanings: "2" for the
        choices ["8", "2", "24"] is the text of B and the number of C.
        """
        key = str(answer).strip()
        is_number = isinstance(answer, int | str) and re.fullmatch("[0-9]{1,3}", key)
        by_number = set(self.labels[int(key) : int(key) + 1]) if is_number else set()
        pairs = zip(self.labels, self.texts, strict=True)
        by_text = {label for label, text in pairs if text.strip() == key}
        by_label = {key} & set(self.labels)
        if isinstance(answer, int):
            labels = by_number | (set() if self.lettered else by_label)
        elif by_label:
            labels = by_label | (by_text if self.lettered else set())
        else:
            labels = by_text | by_number
        self.cells.require(
            bool(labels),
            f"the answer '{key[:80]}' is none of the labels"
            f" {', '.join(self.labels)}, no text of a choice, and no number from 0 to"
            f" {len(self.labels) - 1}; mend the row or set another prompts.answer_column",
        )
        self.cells.require(
            len(labels) == 1,
            f"the answer '{key[:80]}' may mean {' or '.join(sorted(labels))}, since"
            " it fits as a label, as the text of a choice or as its number from 0 more than once;"
            " write the answers of the column as letters, or as integers from 0",
        )
        return labels.pop()

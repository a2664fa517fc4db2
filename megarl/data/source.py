"""Prompts for reinforcement learning: rows of a data set, checked and tokenised before the run
starts, then asked for by their position in training.

    PromptsConfig --load_prompts--> PromptList --at(ordinal)--> Prompt

Other file formats are added in `megarl.data.rows`.
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
    """The tokenised prompts of a run, made by `load_prompts`: `at(n)` returns the n-th prompt of
    training as a `Prompt` (text, token ids, reference answer, row), `len` the number of prompts,
    and iterating gives all of them once in file order.
    """

    prompts: list[Prompt]
    """The prompts in file order, without their indices and token ids."""
    token_ids: TokenLists
    order: Order | MixedOrder
    fingerprint: str
    """Number of rows and xxh3-128 digest of the prompts, their answers and their order."""
    warning: str = ""
    """What the user should know of the prompts; empty if nothing."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return int(self.token_ids.lengths.max())

    @property
    def environments(self) -> list[str] | None:
        """One name for each prompt, in file order: the verifier that scores the prompt's responses,
        as a key of `environment.mixture`, the recipe's table of verifiers. None if the recipe has
        no mixture.
        """
        names = [prompt.environment for prompt in self.prompts]
        return names if any(names) else None

    def __iter__(self) -> Iterator[Prompt]:
        """Iterate over all prompts once, in file order: for evaluation."""
        return (self._row(index) for index in range(len(self)))

    def at(self, ordinal: int) -> Prompt:
        """The `Prompt` (text, token ids, reference answer, row) at position `ordinal` of training,
        from 0 over all epochs. It depends only on the seed and the ordinal.
        """
        return self._row(self.order.row(ordinal))

    def _row(self, index: int) -> Prompt:
        return replace(self.prompts[index], index=index, token_ids=self.token_ids[index])

    @classmethod
    def mixed(cls, parts: Sequence[PromptList], weights: Sequence[Fraction]) -> PromptList:
        """One list of the prompts of `parts`. In file order, the prompts of one part follow those
        of the part before. In training order, the parts are interleaved: each gets a share of the
        positions in proportion to its entry of `weights` (above 0, of any sum).
        """
        settings = [
            ["mixture", str(weight), part.fingerprint]
            for part, weight in zip(parts, weights, strict=True)
        ]
        prompts = [prompt for part in parts for prompt in part]
        orders = cast("list[Order]", [part.order for part in parts])
        return cls(
            [replace(prompt, token_ids=[]) for prompt in prompts],
            TokenLists(prompt.token_ids for prompt in prompts),
            MixedOrder(Interleaving(weights), orders),
            # Not of the texts, which may hold today's date; the parts' digests cover the prompts.
            fingerprint(settings, ((None, prompt.answer) for prompt in prompts)),
            "; ".join(dict.fromkeys(part.warning for part in parts if part.warning)),
        )


class Problem(NamedTuple):
    """A row of a data set, checked but not yet rendered with the chat template: its prompt
    (`value`), reference answer, lines of multiple choice, and tools.
    """

    cells: Cells[PromptsConfig]
    value: Any
    """The prompt, as the data set has it."""
    answer: str
    choices: str
    """The lines "A. text" that are added to the prompt of a multiple choice; empty without."""
    tools: Tools
    """Tools that the model is shown with this row only, in OpenAI's format."""


def load_prompts(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    setting: str = "prompts",
    tools: Tools = (),
    are_read: bool = True,
) -> PromptList:
    """Read, check and tokenise all prompts of the section `config` of a recipe, of one source or a
    mixture; blocks until that is done. Returns a `PromptList`, whose `at(n)` is the n-th prompt of
    training. `seed`: of shuffling. `setting`: name of the section, for messages. `tools`: in
    OpenAI's format, shown to the model by the chat template with every prompt; rows must then have
    no tools of their own. `are_read`: False where an agent reads the prompts, and not the model:
    texts without a chat template are then as they should be. Raises `ValueError` that names the
    file, the row and the setting to change.
    """
    if not config.sources:
        return _load_source(config, tokenizer, seed, setting, tools, are_read=are_read)
    parts = [
        # Shuffled by seeds of their own, since a file may be in a mixture twice.
        _load_source(
            *(part, tokenizer, seed + (number << 32), f"{setting}.sources[{number}]", tools),
            are_read=are_read,
        )
        for number, part in enumerate(config.parts)
    ]
    return PromptList.mixed(parts, [exact(part.weight) for part in config.sources])


def _load_source(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    setting: str,
    tools: Tools,
    *,
    are_read: bool,
) -> PromptList:
    """The prompts of a single source."""
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
    texts = [_rendered(one, data.template, tools or one.tools) for one in problems]
    data.check_texts(texts, [one.answer for one in problems])
    token_ids = data.prompt_tokens(texts, are_read=are_read)
    kept, cut = data.fit(token_ids)
    for row in np.flatnonzero(cut.lengths != token_ids.lengths):
        texts[row] = str(tokenizer.decode(cut[row]))
    texts, problems = [*map(unmarked, texts)], picked(problems, kept)
    names = [_environment(one.cells) for one in problems]
    settings = [config.template, config.system, config.instruction, config.shuffle]
    settings += [one.choices for one in problems if one.choices] + data.settings
    shown = tools or [one.tools for one in problems]
    if any(shown):
        settings.append(canonical_json(list(shown)))
    settings += data.cut_settings
    if any(names):
        settings += ["environments", *names]
    prompts = [
        Prompt(0, text, [], one.answer, one.cells.row, name)
        for text, one, name in zip(picked(texts, kept), problems, names, strict=True)
    ]
    digest = fingerprint(settings, ((one.value, one.answer) for one in problems))
    return PromptList(prompts, cut.only(kept), data.order(len(kept)), digest, data.warning)


def _problem(cells: Cells[PromptsConfig], template: ChatTemplate | None, tools: Tools) -> Problem:
    """The prompt and the answer of a row. `tools`: those of every row."""
    config = cells.config
    choices = Choices.of(cells) if config.choices_column else None
    answer = _answer(cells, choices) if config.answer_column else ""
    value = cells.value("prompt_column")
    own = tools_of(cells) if template is not None else []
    require(
        not (tools and own),
        f"{cells.setting}: rows have tools (column '{config.tools_column}') beside"
        f" environment.tools, which alone can be called; set {cells.setting}.tools_column to ''",
    )
    return Problem(cells, value, answer, choices.lines() if choices else "", own)


def _answer(cells: Cells[PromptsConfig], choices: Choices | None) -> str:
    """The reference answer of a row; if `answer_after` is set, only the text after that marker. Of
    `choices` a label.
    """
    named, marker = f"(column '{cells.config.answer_column}')", cells.config.answer_after
    value = cells.value("answer_column")
    answer = text_of(value, what=f"the answer {named}", place=cells.place)
    if choices and isinstance(value, int) and not marker:
        return choices.label(value)
    if marker:
        _, found, answer = answer.rpartition(marker)
        cells.require(
            found,
            f"the answer does not contain {cells.setting}.answer_after = '{marker}'; set the marker"
            " that this data set uses, or none",
        )
    cells.require(
        bool(answer.strip()),
        f"the answer {named} is empty; drop the row or set {cells.setting}.answer_column",
    )
    return choices.label(answer) if choices else answer.strip()


def _rendered(problem: Problem, template: ChatTemplate | None, tools: Tools) -> str:
    """The text that the model sees before its response: the prompt with its choices and the
    instruction. Raises `ValueError` for a chat that asks nothing (see `check_question`), or of
    which the template leaves something out. Without `template` the prompt is a text, which stays as
    it is. `tools`: what the model may call.
    """
    cells = problem.cells
    more = "".join(f"\n{one}" for one in (problem.choices, cells.config.instruction) if one)
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
    """The name of a row's verifier in `environment.mixture`, from the column `environment_column`
    or else the setting `environment`; "" if both are empty. Raises `ValueError` for a row without a
    name.
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
    """The choices of one row of multiple choice: labels and texts, of equal number. Made by
    `Choices.of`; `lines` are added to the prompt, and `label` turns the row's answer into a label:

        {"question": "2+2?", "choices": ["3", "4"], "answer": 1} -> "2+2?\\nA. 3\\nB. 4", answer "B"
    """

    labels: list[str]
    texts: list[str]
    lettered: bool
    """Whether the labels are the letters given to a list, and not labels of the row itself."""
    cells: Cells[PromptsConfig]
    """The row, for error messages."""

    @classmethod
    def of(cls, cells: Cells[PromptsConfig]) -> Choices:
        """Read the choices from a row of the data set, `cells`, in the column that the setting
        `choices_column` names: a list of texts, labelled A, B, ..., or a dict {label: [...], text:
        [...]}, or a dict from labels to texts. Raises `ValueError` for anything else, or fewer than
        two choices.
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
            and all(isinstance(one, str | int | float) for one in (*labels, *texts))
            and len({str(label) for label in labels}) == len(labels)
        )
        cells.require(
            sound,
            f"the choices are {kind_of(value)} that holds no list of 2 to 26 texts (or {{label:"
            f" [...], text: [...]}}, or {{A: text, B: text}}); set {cells.setting}.choices_column"
            " to another column, or drop the row",
        )
        return cls([str(one) for one in labels], [str(one) for one in texts], lettered, cells)

    def lines(self) -> str:
        """The choices as lines of a prompt, such as "A. 3", joined by newlines, without one at the
        end.
        """
        pairs = zip(self.labels, self.texts, strict=True)
        return "\n".join(f"{label}. {text}" for label, text in pairs)

    def label(self, answer: Any) -> str:
        """The label that a row's answer means. A number is the number of a choice, counted from 0.
        A text is a label of the row, the text of a choice, or digits that number a choice.

        Raises `ValueError` for another answer, and for a text with two meanings: "2" for the
        choices ["8", "2", "24"] is the text of B and the number of C.
        """
        said = str(answer).strip()
        is_number = isinstance(answer, int | str) and re.fullmatch("[0-9]{1,3}", said)
        by_number = set(self.labels[int(said) : int(said) + 1]) if is_number else set()
        pairs = zip(self.labels, self.texts, strict=True)
        by_text = {label for label, text in pairs if text.strip() == said}
        by_label = {said} & set(self.labels)
        if isinstance(answer, int):
            found = by_number | (set() if self.lettered else by_label)
        elif by_label:
            found = by_label | (by_text if self.lettered else set())
        else:
            found = by_text | by_number
        self.cells.require(
            bool(found),
            f"the answer '{said[:80]}' is none of the labels"
            f" {', '.join(self.labels)}, no text of a choice, and no number from 0 to"
            f" {len(self.labels) - 1}; mend the row or set another prompts.answer_column",
        )
        self.cells.require(
            len(found) == 1,
            f"the answer '{said[:80]}' may mean {' or '.join(sorted(found))}, since"
            " it fits as a label, as the text of a choice or as its number from 0 more than once;"
            " write the answers of the column as letters, or as integers from 0",
        )
        return found.pop()

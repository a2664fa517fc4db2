"""Prompts for reinforcement learning: rows of a data set, checked and tokenised before the run
starts, then asked for by ordinal.

    PromptsConfig --load_prompts--> PromptList --at(ordinal)--> Prompt

To read another kind of file, see `megarl.data.rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from megarl.chat_template import Tools
from megarl.data.chats import as_written, parsed_chat, tools_of
from megarl.data.choices import Choices
from megarl.data.config import PromptsConfig, exact
from megarl.data.forms import prompts_as_read
from megarl.data.lengths import fit, picked
from megarl.data.order import Interleaving, MixedOrder, Order
from megarl.data.render import chat_template, column, render, template_settings, text_of
from megarl.data.round_trip import check_texts, lost_text, unwrapped
from megarl.data.rows import Row, Table, canonical_json, fingerprint, read_rows
from megarl.data.tokens import TokenLists, prompt_tokens
from megarl.schema import require
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptList:
    """The prompts of a run in their training order; implements
    `megarl.rollout.attempts.PromptSource`.
    """

    def __init__(
        self,
        rows: list[Row],
        texts: list[str],
        token_ids: TokenLists,
        answers: list[str],
        order: Order | MixedOrder,
        fingerprint: str,
        warning: str = "",
        environments: list[str] | None = None,
    ) -> None:
        """`environments`: for each row the name of its verifier; None without a mixture."""
        self._rows, self._texts, self._token_ids, self._answers = rows, texts, token_ids, answers
        self._order = order
        self.environments = environments
        self.fingerprint = fingerprint
        """Digest of the prompts, their answers and their order."""
        self.warning = warning
        """What the user should know of the prompts; empty if nothing."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self._token_ids.lengths.max())

    def __iter__(self) -> Iterator[Prompt]:
        """Iterate over all prompts once, in file order: for evaluation."""
        return (self._row(index) for index in range(len(self)))

    def at(self, ordinal: int) -> Prompt:
        """The prompt at position `ordinal` of training, over all epochs. It depends only on the
        seed and the ordinal.
        """
        return self._row(self._order.row(ordinal))

    def _row(self, index: int) -> Prompt:
        return Prompt(
            index=index,
            text=self._texts[index],
            token_ids=self._token_ids[index],
            answer=self._answers[index],
            fields=self._rows[index],
            environment=self.environments[index] if self.environments else "",
        )

    @classmethod
    def mixed(cls, parts: Sequence[PromptList], weights: Sequence[Fraction]) -> PromptList:
        """The mixture of several lists of prompts, whose rows follow each other in file order and
        are interleaved by weight in training order.
        """
        orders = [part._order for part in parts]
        assert all(isinstance(order, Order) for order in orders), "a mixture of mixtures"
        settings = [
            ["mixture", str(weight), part.fingerprint]
            for part, weight in zip(parts, weights, strict=True)
        ]
        texts = [text for part in parts for text in part._texts]
        answers = [answer for part in parts for answer in part._answers]
        names = [part.environments or [""] * len(part) for part in parts]
        return cls(
            [row for part in parts for row in part._rows],
            texts,
            TokenLists(
                [
                    ids[number]
                    for ids in (part._token_ids for part in parts)
                    for number in range(len(ids))
                ]
            ),
            answers,
            MixedOrder(Interleaving(weights), cast("list[Order]", orders)),
            # Not of the texts, which may hold today's date; the parts' digests cover the prompts.
            fingerprint(settings, ((None, answer) for answer in answers)),
            "; ".join(dict.fromkeys(part.warning for part in parts if part.warning)),
            [name for part in names for name in part],
        )


def load_prompts(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    setting: str = "prompts",
    tools: Tools = (),
) -> PromptList:
    """Read, check and tokenise all prompts of a source or a mixture. Raises `ValueError` that names
    the file, the row and the setting to change. `setting`: the section of the recipe that `config`
    is. `tools`: shown to the model by the chat template with every prompt, in OpenAI's format; rows
    then have no tools of their own.
    """
    if not config.sources:
        return _load_source(config, tokenizer, seed, setting, tools)
    parts = [
        # Shuffled by seeds of their own, since a file may be in a mixture twice.
        _load_source(part, tokenizer, seed + (number << 32), f"{setting}.sources[{number}]", tools)
        for number, part in enumerate(config.parts)
    ]
    return PromptList.mixed(parts, [exact(part.weight) for part in config.sources])


def _load_source(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    setting: str,
    tools: Tools,
) -> PromptList:
    """The prompts of a single source."""
    require(
        not tools or config.template == "chat",
        f"{setting}.template is '{config.template}', but environment.tools are shown to the model"
        f" by its chat template; set {setting}.template to 'chat'",
    )
    table = read_rows(
        config.source,
        split=config.split,
        limit=config.limit,
        setting=setting,
        subset=config.subset,
    )
    table = as_written(table, config.tools_column)
    config = prompts_as_read(config, table, setting)
    if config.unique:
        table = _unique(config, table, setting)
    template = chat_template(tokenizer, config, setting)
    answers = [_answer(config, table, index, setting) for index in range(len(table.rows))]
    values = _prompts(config, table, setting)
    row_tools = _row_tools(config, table, setting) if template is not None else [[] for _ in values]
    require(
        not tools or not any(row_tools),
        f"{setting}: rows have tools (column '{config.tools_column}') beside environment.tools,"
        f" which alone can be called; set {setting}.tools_column to ''",
    )
    texts = [
        render(
            parsed_chat(value),
            template,
            system=config.system,
            instruction=_instruction(config, table, index, setting),
            place=table.place(index),
            setting=setting,
            tools=tools or row_tools[index],
        )
        for index, value in enumerate(values)
    ]
    check_texts(table, setting, texts, answers)
    token_ids = prompt_tokens(tokenizer, texts, config.template)
    lost = lost_text(tokenizer, texts, token_ids, what=f"prompts of {setting}")
    bare = unwrapped(tokenizer, texts, config.template, setting)
    kept, cut, note = fit(
        table,
        token_ids,
        0,
        limit=config.max_prompt_tokens,
        key="max_prompt_tokens",
        too_long=config.too_long,
        setting=setting,
    )
    for row in np.flatnonzero(cut.lengths != token_ids.lengths):
        texts[row] = str(tokenizer.decode(cut[row]))
    table, token_ids = table.only(kept), cut.only(kept)
    answers, values, texts = picked(answers, kept), picked(values, kept), picked(texts, kept)
    row_tools = picked(row_tools, kept)
    environments = _environments(config, table, setting)
    settings = _settings(config, table, tokenizer, setting, tools or row_tools)
    if note and config.too_long == "truncate_left":
        settings.append(f"truncated to {config.max_prompt_tokens}")
    if environments is not None:
        settings += ["environments", *environments]
    return PromptList(
        table.rows,
        texts,
        token_ids,
        answers,
        Order(len(texts), seed=seed, shuffle=config.shuffle),
        fingerprint(settings, zip(values, answers, strict=True)),
        "; ".join(filter(None, (lost, note, bare))),
        environments,
    )


def _prompts(config: PromptsConfig, table: Table, setting: str) -> list[Any]:
    """The prompt of each row, as the data set has it."""
    named = f"{setting}.prompt_column"
    return [
        column(row, config.prompt_column, place=table.place(index), setting=named)
        for index, row in enumerate(table.rows)
    ]


def _settings(
    config: PromptsConfig,
    table: Table,
    tokenizer: PreTrainedTokenizerBase,
    setting: str,
    tools: Sequence[Any],
) -> list[Any]:
    """What the tokens of the prompts, and their order, depend on beside the rows."""
    settings: list[Any] = [config.template, config.system, config.instruction, config.shuffle]
    if config.choices_column:
        rows = range(len(table.rows))
        settings += [_choices(config, table, index, setting).lines() for index in rows]
    settings += template_settings(tokenizer, config)
    if any(tools):
        settings.append(canonical_json(list(tools)))
    return settings


def _unique(config: PromptsConfig, table: Table, setting: str) -> Table:
    """Remove repeated prompts: keeps the first row of each."""
    first: dict[str, int] = {}
    for index, prompt in enumerate(_prompts(config, table, setting)):
        first.setdefault(canonical_json(prompt), index)
    return table.only(list(first.values()))


def _answer(config: PromptsConfig, table: Table, index: int, setting: str) -> str:
    """The reference answer of a row; if `answer_after` is set, only the text after that marker."""
    if not config.answer_column:
        return ""
    place = table.place(index)
    value = column(
        table.rows[index], config.answer_column, place=place, setting=f"{setting}.answer_column"
    )
    answer = text_of(value, what=f"the answer (column '{config.answer_column}')", place=place)
    if config.choices_column and isinstance(value, int) and not config.answer_after:
        return _choices(config, table, index, setting).label(value)
    if config.answer_after:
        _, marker, answer = answer.rpartition(config.answer_after)
        require(
            bool(marker),
            f"{place}: the answer does not contain {setting}.answer_after ="
            f" '{config.answer_after}'; set the marker that this data set uses, or none",
        )
    require(
        bool(answer.strip()),
        f"{place}: the answer (column '{config.answer_column}') is empty; drop the row or set"
        f" {setting}.answer_column",
    )
    if config.choices_column:
        return _choices(config, table, index, setting).label(answer)
    return answer.strip()


def _row_tools(config: PromptsConfig, table: Table, setting: str) -> list[list[dict[str, Any]]]:
    """For each row of `table` the JSON schemas of its tools, from the column `tools_column`."""
    name, named = config.tools_column, f"{setting}.tools_column"
    return [
        tools_of(row, name, place=table.place(index), setting=named)
        for index, row in enumerate(table.rows)
    ]


def _environments(config: PromptsConfig, table: Table, setting: str) -> list[str] | None:
    """For each row of `table` the name of its verifier in `environment.mixture`, from the column
    `environment_column` or else the setting `environment`; None if both are empty. Raises
    `ValueError` for a row without a name.
    """
    if not config.environment_column:
        return [config.environment] * len(table.rows) if config.environment else None
    name, found = config.environment_column, []
    for index, row in enumerate(table.rows):
        place = table.place(index)
        value = column(row, name, place=place, setting=f"{setting}.environment_column")
        require(
            isinstance(value, str) and bool(value),
            f"{place}: the verifier's name (column '{name}') is {value!r:.80}; fill it with a name"
            " of environment.mixture, or drop the row",
        )
        found.append(value)
    return found


def _choices(config: PromptsConfig, table: Table, index: int, setting: str) -> Choices:
    """The possible answers of row `index` of `table`, from the column `choices_column`."""
    place, named = table.place(index), f"{setting}.choices_column"
    value = column(table.rows[index], config.choices_column, place=place, setting=named)
    return Choices.of(value, place=place, setting=named)


def _instruction(config: PromptsConfig, table: Table, index: int, setting: str) -> str:
    """What is appended to the prompt of a row: its choices, then the instruction."""
    choices = [_choices(config, table, index, setting).lines()] if config.choices_column else []
    return "\n".join([*choices, *([config.instruction] if config.instruction else [])])

"""Rows of a data set on their way to token ids: what prompts, demonstrations and preferences have
in common.

    DataSetConfig --Reading--> rows: list[Cells] --texts--> TokenLists --fit--> rows that are used
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from megarl.data.chat_template import ChatTemplate
from megarl.data.control_tokens import unmarked
from megarl.data.forms import as_read
from megarl.data.order import Order
from megarl.data.rows import NOT_TEXT, C, Cells, read_rows
from megarl.data.tokens import TokenLists, prompt_tokens
from megarl.settings.data import PromptsConfig
from megarl.settings.schema import require, shortened
from megarl.system import console
from megarl.system.third_party import opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

MOST_TEXTS = 1000
"""Largest number of texts that are decoded again."""
HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which JSON can write (`"\\ud800"`) and no encoding has."""


class Reading(Generic[C]):
    """The rows of one section of a recipe, and the steps from them to token ids."""

    def __init__(
        self, config: C, tokenizer: PreTrainedTokenizerBase, seed: int, setting: str
    ) -> None:
        """Read the rows. `seed`: of shuffling. `setting`: name of the section `config`, for
        messages. Raises `ValueError` for a source that cannot be read or a chat template that does
        not fit.
        """
        subset, arguments = getattr(config, "subset", ""), getattr(config, "arguments", None)
        table = read_rows(config.source, config.split, config.limit, setting, subset, arguments)
        self.config, table = as_read(config, table, setting)
        self.tokenizer, self.setting, self.seed = tokenizer, setting, seed
        self.template = self._chat_template()
        self.source = table.source
        self.rows = [
            Cells(self.config, setting, row, location)
            for row, location in zip(table.rows, table.places, strict=True)
        ]
        self.notes: list[str] = []
        """What the user should know of the rows."""
        self.is_lossy = False
        """Whether `notes` says that the tokenizer loses text."""
        self.is_cut = False
        """Whether too long prompts are used without their first tokens."""

    def _chat_template(self) -> ChatTemplate | None:
        """The tokenizer's chat template where `template` is 'chat', else None. Raises `ValueError`
        if there is none, or it does not read a variable of `template_variables`.
        """
        if self.config.template != "chat":
            return None
        require(
            bool(getattr(self.tokenizer, "chat_template", None)),
            f"{self.setting}.template is 'chat', but the tokenizer has no chat template; set"
            f" {self.setting}.template to 'none', use an instruction-tuned model, or put a"
            " chat_template.jinja beside the tokenizer",
        )
        template = ChatTemplate(
            self.tokenizer,
            self.config.template_variables,
            self.setting,
            control_tokens=self.config.control_tokens,
        )
        template.check_variables()
        return template

    @property
    def settings(self) -> list[Any]:
        """What determines how rows are rendered, for the data's fingerprint: the chat template's
        text and variables.
        """
        if self.template is None:
            return []
        config, values = self.config, [self.tokenizer.chat_template]
        if config.template_variables:
            values.append({"variables": config.template_variables})
        return [*values, "control tokens"] if config.control_tokens else values

    @property
    def cut_settings(self) -> list[str]:
        """For the data's fingerprint: [text with the limit] if prompts were cut, otherwise
        empty.
        """
        return [f"truncated to {self._limit[1]}"] if self.is_cut else []

    @property
    def warning(self) -> str:
        """What the user should know of the rows, joined by "; "; may be empty."""
        notes, count = self.notes, self.template.num_unopened if self.template else 0
        if count:
            notes = [
                *notes,
                f"the chat template writes the thoughts of {count} replies of {self.setting}, or"
                " that there are none, otherwise than it begins a reply; they are trained on as"
                " they are written",
            ]
        return "; ".join(notes)

    @property
    def _limit(self) -> tuple[str, int]:
        """(setting, value) of the most tokens of a row."""
        key = "max_prompt_tokens" if isinstance(self.config, PromptsConfig) else "max_tokens"
        return key, getattr(self.config, key)

    def order(self, num_rows: int) -> Order:
        return Order(num_rows, seed=self.seed, shuffle=self.config.shuffle)

    def check_texts(self, *texts: Sequence[str]) -> None:
        """Check marked texts before they are tokenised; each of `texts` has one for every row.
        Raises `ValueError` if one holds half of a surrogate pair, or a placeholder (`<image>`) of a
        column with images, sound or video. A line on standard error names such columns without a
        placeholder.
        """
        unseen: list[list[str]] = []
        for cells, *marked in zip(self.rows, *texts, strict=True):
            row, plain = cells.row, [*map(unmarked, marked)]
            names = sorted(
                name for name in NOT_TEXT & row.keys() if row[name] not in (None, "", [], {})
            )
            for name in names:
                mark = f"<{name.rstrip('s')}>"
                cells.require(
                    not any(mark in text for text in plain),
                    f"'{mark}' stands for column '{name}', which is not shown to the model; drop"
                    " the row",
                )
            if half := next(filter(None, map(HALF.search, plain)), None):
                raise ValueError(
                    f"{cells.place}: a text holds half of a surrogate pair (U+{ord(half[0]):04X}),"
                    " which is no character; mend the text or drop the row"
                )
            unseen += [names] if names else []
        if unseen:
            names = ", ".join(map(repr, sorted({name for names in unseen for name in names})))
            console.say(
                f"{self.setting}: {len(unseen)} of {len(self.rows)} rows have more than text"
                f" (columns {names}), which is not shown to the model"
            )

    def prompt_tokens(self, texts: Sequence[str], *, are_read: bool = True) -> TokenLists:
        """Tokenise the prompts, one for each row. Notes lost text, and bare texts for a model with
        a chat template. `are_read`: False where an agent reads them.
        """
        token_ids = prompt_tokens(self.tokenizer, texts, self.config.template)
        self.note_lost(texts, token_ids, "prompts")
        is_bare = self.config.template == "none" and bool(self.tokenizer.chat_template)
        if (
            are_read
            and is_bare
            and not any(token in texts[0] for token in self.tokenizer.all_special_tokens)
        ):
            self.notes.append(
                f"{self.setting}.template is none, so the model reads the texts of {self.setting}"
                " bare, without its chat template; a model that was trained on chats answers those"
                f" badly: set {self.setting}.template to chat, unless this is a base model"
            )
        return token_ids

    def note_lost(self, texts: Sequence[str], token_ids: TokenLists, what: str) -> None:
        """Note, once, if some of `texts` (called `what`) differ from their decoded `token_ids`,
        with the fraction and the first of them. White space that a tokenizer adds, and tokens
        around a text, do not count.
        """
        chosen = range(0, len(texts), max(1, -(-len(texts) // MOST_TEXTS)))
        lists = [token_ids[index] for index in chosen]
        with opening("the tokenizer cannot decode the data", fix="fetch the tokenizer again"):
            decoded = self.tokenizer.batch_decode(lists, clean_up_tokenization_spaces=False)
        pairs = [(unmarked(texts[at]), again) for at, again in zip(chosen, decoded, strict=True)]
        lost = [pair for pair in pairs if _loses(*pair)]
        if lost and not self.is_lossy:
            self.is_lossy = True
            text, again = (shortened(repr(side), 60) for side in lost[0])
            self.notes.append(
                f"the tokenizer changes {len(lost) / len(lists):.0%} of the {what} of"
                f" {self.setting} ({len(lost)} of {len(lists)} looked at): {text} becomes {again};"
                " set a tokenizer that has a token for every character of the data"
            )

    def fit(
        self, prompts: TokenLists, replies: np.ndarray | int = 0
    ) -> tuple[list[int], TokenLists]:
        """Apply the setting `too_long`. Returns (indices of the rows that are used, prompts of all
        rows, shortened where `too_long` is `truncate_left`).

        `replies`: [N] tokens of each response, which is never cut. Raises `ValueError` for a prompt
        without tokens, a row that is refused, a response that leaves no room for its prompt, or if
        no row is left.
        """
        (key, limit), setting, config = self._limit, self.setting, self.config
        lengths = prompts.lengths + replies
        num_rows = len(lengths)
        for index in np.flatnonzero(lengths == replies):
            raise ValueError(f"{self.rows[index].place}: the prompt has no tokens; fill its column")
        long = np.flatnonzero(lengths > limit)
        if not len(long):
            return list(range(num_rows)), prompts
        longest, first = int(lengths.max()), int(long[0])
        text = (
            f"{len(long)} of {num_rows} {'prompts' if np.all(replies == 0) else 'rows'} have more"
            f" tokens than {setting}.{key} = {limit} (the longest {longest})"
        )
        require(
            config.too_long != "refuse",
            f"{text}, the first is {self.rows[first].place} with {lengths[first]}; set {key} to at"
            f" least {longest}, or {setting}.too_long to 'drop' or 'truncate_left'",
        )
        if config.too_long == "drop":
            require(len(long) < num_rows, f"{text}, so that no row is left; raise {key}")
            self.notes.insert(0, f"{text}; they are left out")
            return np.flatnonzero(lengths <= limit).tolist(), prompts
        room = np.broadcast_to(limit - np.asarray(replies), (num_rows,))
        full = np.flatnonzero(room < 1)
        for index in full:
            raise ValueError(
                f"{setting}.too_long is 'truncate_left', which cuts prompts and never responses,"
                f" but {len(full)} of {num_rows} responses leave no room for a prompt within {key}"
                f" = {limit}, the first is {self.rows[index].place}; raise {key}, or set too_long"
                " to 'drop'"
            )
        self.notes.insert(0, f"{text}; their prompts lose the first tokens")
        self.is_cut = True
        fitted = TokenLists(prompts[row][-int(room[row]) :] for row in range(num_rows))
        return list(range(num_rows)), fitted


def _loses(text: str, again: str) -> bool:
    """Whether `again`, the decoded tokens of `text`, lacks characters of it, such as spaces."""
    left = iter(again)
    return "".join(text.split()) not in "".join(again.split()) or not all(
        character in left for character in text
    )


def picked(items: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [items[row] for row in rows]

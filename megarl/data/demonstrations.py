"""Demonstrations for supervised fine-tuning: (prompt, response) rows, checked and tokenised before
the run starts.

    DemonstrationsConfig --load_demonstrations--> DemonstrationList --at(ordinal)--> Demonstration

Prompt and response are tokenised apart, because that is how the policy meets them: the prompt's
tokens are given, and what it samples starts with a token of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.data.config import DemonstrationsConfig
from megarl.data.fingerprint import fingerprint
from megarl.data.order import Order
from megarl.data.render import check_template, column, render, text_of
from megarl.data.rows import read_rows
from megarl.data.tokens import TokenLists, prompt_tokens, response_tokens
from megarl.schema import require
from megarl.types import Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DemonstrationList:
    """The demonstrations (prompt, response) of a run in their training order."""

    def __init__(
        self, prompts: TokenLists, responses: TokenLists, order: Order, fingerprint: str
    ) -> None:
        self._prompts, self._responses, self._order = prompts, responses, order
        self.fingerprint = fingerprint
        """Digest of the demonstrations and their order."""

    def __len__(self) -> int:
        return len(self._prompts)

    def at(self, ordinal: int) -> Demonstration:
        """The demonstration at position `ordinal` of training, over all epochs. It depends only on
        the seed and the ordinal.
        """
        index = self._order.row(ordinal)
        return Demonstration(
            index=index, prompt_ids=self._prompts[index], response_ids=self._responses[index]
        )


def load_demonstrations(
    config: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> DemonstrationList:
    """Read, check and tokenise all demonstrations. Raises `ValueError` that names the file, the row
    and the setting to change.
    """
    setting = "demonstrations"
    table = read_rows(config.source, split=config.split, limit=config.limit, setting=setting)
    check_template(tokenizer, config.template, setting)
    require(
        tokenizer.eos_token_id is not None,
        "the tokenizer has no end-of-sequence token to end a response with; set its eos_token",
    )
    values: list[Any] = []
    texts: list[str] = []
    replies: list[str] = []
    for index, row in enumerate(table.rows):
        place = table.place(index)
        value = column(row, config.prompt_column, place=place, setting=f"{setting}.prompt_column")
        values.append(value)
        texts.append(
            render(value, tokenizer, template=config.template, place=place, setting=setting)
        )
        value = column(
            row, config.response_column, place=place, setting=f"{setting}.response_column"
        )
        replies.append(text_of(value, what="the response", place=place))
        require(
            bool(replies[-1].strip()),
            f"{place}: the response (column '{config.response_column}') is empty; drop the row or"
            " fill it",
        )
    prompts = prompt_tokens(tokenizer, texts, config.template)
    responses = response_tokens(tokenizer, replies)
    totals = (prompts.lengths + responses.lengths).tolist()
    for index, (asked, total) in enumerate(zip(prompts.lengths.tolist(), totals, strict=True)):
        place = table.place(index)
        require(
            asked > 0, f"{place}: the prompt has no tokens; fill column '{config.prompt_column}'"
        )
        require(
            total <= config.max_tokens,
            f"{place}: prompt and response have {total} tokens, but demonstrations.max_tokens"
            f" is {config.max_tokens}; set it to at least {total}, or drop the row",
        )
    settings = [config.template, config.shuffle]
    if config.template == "chat":
        settings.append(tokenizer.chat_template)
    return DemonstrationList(
        prompts,
        responses,
        Order(len(prompts), seed=seed, shuffle=config.shuffle),
        fingerprint(settings, zip(values, replies, strict=True)),
    )

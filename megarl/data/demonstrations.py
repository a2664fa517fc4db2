"""Demonstrations for supervised fine-tuning: (prompt, response) rows, checked and tokenised before
the run starts.

    DemonstrationsConfig --load_demonstrations--> DemonstrationList --at(ordinal)--> Demonstration

Prompt and response are tokenised apart, because that is how the policy meets them: the prompt's
tokens are given, and what it samples starts with a token of its own.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from megarl.data.config import DemonstrationsConfig
from megarl.data.rows import (
    Order,
    check_template,
    column,
    encode,
    encode_prompts,
    read_rows,
    render,
    text_of,
)
from megarl.schema import require
from megarl.types import Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 4096  # tokenised at once


class DemonstrationList:
    """Demonstrations by ordinal."""

    def __init__(
        self, prompts: list[array[int]], responses: list[array[int]], order: Order
    ) -> None:
        self._prompts, self._responses, self._order = prompts, responses, order

    def __len__(self) -> int:
        return len(self._prompts)

    def at(self, ordinal: int) -> Demonstration:
        """The demonstration trained as number `ordinal`; a pure function of (seed, ordinal)."""
        index = self._order.row(ordinal)
        return Demonstration(
            index=index,
            prompt_ids=self._prompts[index].tolist(),
            response_ids=self._responses[index].tolist(),
        )


def load_demonstrations(
    config: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> DemonstrationList:
    """Read, check and tokenise every demonstration; raises `ValueError` naming the file, the row
    and what to set.
    """
    setting = "demonstrations"
    table = read_rows(config.source, split=config.split, limit=config.limit, setting=setting)
    check_template(tokenizer, config.template, setting)
    end = tokenizer.eos_token_id
    require(
        end is not None,
        "the tokenizer has no end-of-sequence token to end a response with; set its eos_token",
    )
    texts: list[str] = []
    replies: list[str] = []
    for index, row in enumerate(table.rows):
        place = table.place(index)
        value = column(row, config.prompt_column, place=place, setting=f"{setting}.prompt_column")
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
    prompts: list[array[int]] = []
    responses: list[array[int]] = []
    for start in range(0, len(texts), BATCH_ROWS):
        part = slice(start, start + BATCH_ROWS)
        asked = encode_prompts(tokenizer, texts[part], config.template)
        answered = encode(tokenizer, replies[part], add_special_tokens=False)
        for prompt_ids, response_ids in zip(asked, answered, strict=True):
            place = table.place(len(prompts))
            require(
                bool(prompt_ids),
                f"{place}: the prompt has no tokens; fill column '{config.prompt_column}'",
            )
            if (
                not response_ids or response_ids[-1] != end
            ):  # once: some data sets carry it in the text
                response_ids = [*response_ids, end]
            total = len(prompt_ids) + len(response_ids)
            require(
                total <= config.max_tokens,
                f"{place}: prompt and response have {total} tokens, but demonstrations.max_tokens"
                f" is {config.max_tokens}; set it to at least {total}, or drop the row",
            )
            prompts.append(array("i", prompt_ids))
            responses.append(array("i", response_ids))
    return DemonstrationList(
        prompts, responses, Order(len(prompts), seed=seed, shuffle=config.shuffle)
    )

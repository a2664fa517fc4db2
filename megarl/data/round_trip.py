"""Whether a tokenizer keeps the text of a data set: characters that it has no token for are lost to
the model in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.data.tokens import TokenLists
from megarl.schema import shortened
from megarl.third_party import opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TEXTS = 1000
"""Largest number of texts that are decoded again, evenly spread over the data set."""


def lost_text(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], token_ids: TokenLists, *, what: str
) -> str:
    """A warning if some of `texts` differ from what their tokens decode to, with their share and
    the first of them; empty if none does. `what` names the texts in the warning.

    White space is not compared, since tokenizers add and join it. Tokens around a text, such as a
    beginning of sequence, do not count as a difference.
    """
    every = -(-len(texts) // MOST_TEXTS)
    chosen = range(0, len(texts), max(every, 1))
    lists = [token_ids[index] for index in chosen]
    with opening("the tokenizer cannot decode the data", fix="fetch the tokenizer again"):
        decoded = tokenizer.batch_decode(lists, clean_up_tokenization_spaces=False)
    lost = [
        (texts[index], again)
        for index, again in zip(chosen, decoded, strict=True)
        if _bare(texts[index]) not in _bare(again)
    ]
    if not lost:
        return ""
    text, again = (shortened(repr(part), 60) for part in lost[0])
    return (
        f"the tokenizer changes {len(lost) / len(lists):.0%} of the {what} ({len(lost)} of"
        f" {len(lists)} looked at): {text} becomes {again}; set a tokenizer that has a token for"
        " every character of the data"
    )


def _bare(text: str) -> str:
    """`text` without white space."""
    return "".join(text.split())

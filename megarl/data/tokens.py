"""Token ids of many texts.

texts --prompt_tokens or response_tokens--> TokenLists: [i] -> the ids of text i
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.chat_template import without_end
from megarl.data.control_tokens import MARK, ControlTokens
from megarl.settings.data import TemplateName
from megarl.system.third_party import opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TEXTS = 4096
"""Number of texts tokenised in one call; bounds the memory of the returned lists."""


class TokenLists:
    """N lists of token ids of different lengths, in one array; `lists[i]` is a Python list.
    Immutable.
    """

    ids: np.ndarray
    """[T] int32: the lists, concatenated."""
    offsets: np.ndarray
    """[N + 1] int64: index in `ids` of the first token of each list, then T."""

    def __init__(self, lists: Iterable[Sequence[int] | np.ndarray]) -> None:
        parts = [np.asarray(ids, dtype=np.int32) for ids in lists]
        self.ids = np.concatenate([np.zeros(0, np.int32), *parts])
        self.offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]].tolist()

    def only(self, indices: Sequence[int]) -> TokenLists:
        """The lists at `indices`, which ascend without repetition."""
        if len(indices) == len(self):
            return self
        return TokenLists(self.ids[self.offsets[i] : self.offsets[i + 1]] for i in indices)

    def split(self, count: int) -> tuple[TokenLists, TokenLists]:
        """Two of N lists each: the first `count` ids of each list, and its other ids."""
        rows = [self[row] for row in range(len(self))]
        return TokenLists(ids[:count] for ids in rows), TokenLists(ids[count:] for ids in rows)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64."""
        return np.diff(self.offsets)


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], template: TemplateName
) -> TokenLists:
    """Tokenise N prompts. With `template` "none" the tokenizer's initial special tokens are added;
    other templates have written theirs. An end-of-sequence token that the tokenizer appends is
    removed.
    """
    eos, end = tokenizer.eos_token, tokenizer.eos_token_id

    def lists() -> Iterator[list[int]]:
        encoded = tokenised(tokenizer, texts, add_special_tokens=template == "none")
        for text, ids in zip(texts, encoded, strict=True):
            if template == "none" and eos is not None and not text.endswith(str(eos)):
                while ids and ids[-1] == end:
                    ids.pop()
            yield ids

    return TokenLists(lists())


def response_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], ends: Sequence[int]
) -> TokenLists:
    """Tokenise N responses. Those that end with none of the token ids `ends` get the first of
    them.
    """
    encoded = tokenised(tokenizer, texts, add_special_tokens=False)
    return TokenLists(ids if ids and ids[-1] in ends else [*ids, ends[0]] for ids in encoded)


def text_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], template: TemplateName
) -> TokenLists:
    """Tokenise N whole texts, each with one end-of-sequence token at its end. With `template`
    "none" the tokenizer's initial special tokens are added too.
    """
    end: Any = tokenizer.eos_token_id
    encoded = tokenised(tokenizer, texts, add_special_tokens=template == "none")
    return TokenLists(ids if ids[-1:] == [end] else [*ids, end] for ids in encoded)


def scored_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    responses: Sequence[str],
    template: TemplateName,
    end: int,
) -> list[list[int]]:
    """Token ids of N prompts with their responses, as a reward model reads them: tokenised apart,
    as in its training, with the token id `end` once behind each response. `template`: "none" adds
    the tokenizer's initial special tokens to prompts.
    """
    asked = prompt_tokens(tokenizer, prompts, template)
    replies = response_tokens(tokenizer, without_end(tokenizer, responses, end), [end])
    return [asked[number] + replies[number] for number in range(len(prompts))]


def tokenised(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> Iterator[list[int]]:
    """Yield the token ids of each text. A `MARK` in it keeps a user's text from becoming a control
    token (`megarl.data.control_tokens`). `add_special_tokens`: let the tokenizer add its own; a
    beginning-of-sequence token is not doubled. Raises `ValueError` if the tokenizer fails.
    """
    options: dict[str, Any] = {  # masks would double the time
        "add_special_tokens": add_special_tokens,
        "return_attention_mask": False,
        "return_token_type_ids": False,
    }
    for start in range(0, len(texts), BATCH_TEXTS):
        batch = list(texts[start : start + BATCH_TEXTS])
        marked = {number: text for number, text in enumerate(batch) if MARK in text}
        batch = ["" if number in marked else text for number, text in enumerate(batch)]
        with opening("the tokenizer cannot encode the data", fix="fetch the tokenizer again"):
            encoded = tokenizer(batch, **options).input_ids
        for number, text in marked.items():
            control_tokens = ControlTokens.of(tokenizer)
            encoded[number] = control_tokens.ids(text, add_special_tokens=add_special_tokens)
        for ids in encoded:
            # A text may begin with the token that the tokenizer puts before every text.
            is_doubled = ids[:2] == [tokenizer.bos_token_id] * 2 and add_special_tokens
            yield ids[1:] if is_doubled else ids

"""Token ids of many texts: the tokenizer's output, kept as columns.

texts --prompt_tokens or response_tokens--> TokenLists: [i] -> the ids of text i
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.chat_template import without_end
from megarl.data.config import TemplateName
from megarl.third_party import opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TEXTS = 4096
"""Number of texts tokenised in one call; bounds the memory of the Python lists that are
returned."""


class TokenLists:
    """N lists of token ids in one array: list i is `ids[offsets[i]:offsets[i + 1]]`."""

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
        """The lists at `indices`."""
        if len(indices) == len(self):
            return self
        return TokenLists(self.ids[self.offsets[i] : self.offsets[i + 1]] for i in indices)

    def split(self, count: int) -> tuple[TokenLists, TokenLists]:
        """(the first `count` ids of each list, its other ids)."""
        rows = [self[row] for row in range(len(self))]
        return TokenLists(ids[:count] for ids in rows), TokenLists(ids[count:] for ids in rows)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64: number of tokens of each list."""
        return np.diff(self.offsets)


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], template: TemplateName
) -> TokenLists:
    """Tokenise prompts. A rendered chat contains its special tokens; to plain text the tokenizer's
    initial special tokens, such as beginning-of-sequence, are added.

    An end-of-sequence token that the tokenizer appends is removed, since the response follows.
    """
    eos, end = tokenizer.eos_token, tokenizer.eos_token_id

    def fix(text: str, ids: list[int]) -> list[int]:
        if template == "none" and eos is not None and not text.endswith(str(eos)):
            while ids and ids[-1] == end:
                ids.pop()
        return ids

    return tokenised(tokenizer, texts, add_special_tokens=template == "none", fix=fix)


def response_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], end: int
) -> TokenLists:
    """Tokenise responses, each with exactly one token `end` at the end; see
    `end_of_turn` and `without_end` of `megarl.chat_template`.
    """
    bare = without_end(tokenizer, texts, end)
    return tokenised(tokenizer, bare, add_special_tokens=False, fix=lambda text, ids: [*ids, end])


def text_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], template: TemplateName
) -> TokenLists:
    """Tokenise whole texts, each with one end-of-sequence token at its end; `none` also with the
    tokenizer's initial special tokens.
    """
    end: Any = tokenizer.eos_token_id

    def fix(text: str, ids: list[int]) -> list[int]:
        return ids if ids[-1:] == [end] else [*ids, end]

    return tokenised(tokenizer, texts, add_special_tokens=template == "none", fix=fix)


def scored_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    responses: Sequence[str],
    template: TemplateName,
    end: int,
) -> list[list[int]]:
    """Token ids of each prompt with its response, as a reward model reads them. Prompt and
    response are tokenised apart, as `megarl reward-model` does it with its data; the token `end`
    follows (see `response_tokens`).
    """
    asked = prompt_tokens(tokenizer, prompts, template)
    replies = response_tokens(tokenizer, responses, end)
    return [asked[number] + replies[number] for number in range(len(prompts))]


def tokenised(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    fix: Callable[[str, list[int]], list[int]],
) -> TokenLists:
    """Tokenise each text in batches; `fix(text, ids)` returns the ids to use."""
    options: dict[str, Any] = {  # without masks, half the time
        "add_special_tokens": add_special_tokens,
        "return_attention_mask": False,
        "return_token_type_ids": False,
    }

    def lists() -> Iterable[list[int]]:
        for start in range(0, len(texts), BATCH_TEXTS):
            batch = list(texts[start : start + BATCH_TEXTS])
            with opening("the tokenizer cannot encode the data", fix="fetch the tokenizer again"):
                found = tokenizer(batch, **options).input_ids
            for text, ids in zip(batch, found, strict=True):
                # A text may begin with the token that the tokenizer puts before every text.
                twice = ids[:2] == [tokenizer.bos_token_id] * 2 and add_special_tokens
                yield fix(text, ids[1:] if twice else ids)

    return TokenLists(lists())

"""Text and tokens inside an environment's worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Codec:
    """Decodes and encodes like a Hugging Face tokenizer, where possible without importing
    transformers. Can be pickled.
    """

    tokenizer: Any
    is_bare: bool
    """Whether `tokenizer` is a `tokenizers.Tokenizer` rather than a transformers tokenizer."""

    @classmethod
    def of(cls, tokenizer: Any, *, whole: bool = False) -> Codec:
        """A codec equivalent to `tokenizer`: with only its `tokenizers.Tokenizer` if that decodes
        the same, otherwise, and with `whole`, with the transformers tokenizer itself, whose chat
        template tools need.
        """
        kind = type(tokenizer)
        cleans = tokenizer.clean_up_tokenization_spaces
        if (
            hasattr(tokenizer, "backend_tokenizer")
            and kind._decode.__module__ == "transformers.tokenization_utils_tokenizers"
            and kind.decode.__module__ == "transformers.tokenization_utils_base"
            and not (cleans or whole)
        ):
            bare = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
            bare.no_truncation()
            bare.no_padding()
            return cls(bare, is_bare=True)
        return cls(tokenizer, is_bare=False)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Decode `token_ids` to text, without special tokens."""
        return self.tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Encode `text` to token ids, without adding special tokens."""
        made = self.tokenizer.encode(text, add_special_tokens=False)
        return list(made.ids if self.is_bare else made)

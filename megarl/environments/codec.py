"""Text and tokens inside an environment's worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Codec:
    """Decodes and encodes as a Hugging Face tokenizer does, in a process that may not have loaded
    transformers. Can be pickled.
    """

    tokenizer: Any
    is_bare: bool
    """Whether `tokenizer` is a `tokenizers.Tokenizer`, and not one of transformers."""

    @classmethod
    def of(cls, tokenizer: Any) -> Codec:
        """The lightest codec that does what `tokenizer` does."""
        kind = type(tokenizer)
        cleans = tokenizer.clean_up_tokenization_spaces
        if (
            hasattr(tokenizer, "backend_tokenizer")
            and kind._decode.__module__ == "transformers.tokenization_utils_tokenizers"
            and kind.decode.__module__ == "transformers.tokenization_utils_base"
            and not cleans
        ):
            bare = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
            bare.no_truncation()
            bare.no_padding()
            return cls(bare, is_bare=True)
        return cls(tokenizer, is_bare=False)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of `token_ids`, without special tokens."""
        return self.tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, no special tokens added."""
        made = self.tokenizer.encode(text, add_special_tokens=False)
        return list(made.ids if self.is_bare else made)

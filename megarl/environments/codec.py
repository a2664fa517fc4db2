"""Conversion between text and token ids inside the worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.data.chat_template import TAGS, ChatTemplate, Variables, ends_of_turns, tags_of
from megarl.data.control_tokens import MARK, ControlTokens


@dataclass(frozen=True)
class Codec:
    """Decodes and encodes like a Hugging Face tokenizer, where possible by the Rust `tokenizers`
    object alone: a worker process need not import transformers. Can be pickled.
    """

    tokenizer: Any
    is_bare: bool
    """Whether `tokenizer` is a `tokenizers.Tokenizer`."""
    thinking: tuple[str, str] = TAGS
    """(opening, closing) tag around a model's thinking."""
    kept: frozenset[int] = frozenset()
    """Ids of special tokens that are tags of thinking; they are decoded all the same."""
    ends: frozenset[int] = frozenset()
    """Ids of tokens that end a turn; not decoded at the end of a sequence."""
    variables: Variables = field(default_factory=dict)
    """Of the chat template, for results of tool calls."""
    around: tuple[str, str] = ("", "")
    """What the chat template writes around a user's turn that replies to the model; empty where
    prompts are no chats."""
    closing: str = ""
    """What the template writes to end a turn of the model."""
    opening: int | None = None
    """The token that ends a turn of the model where it is the first of the user's turn."""
    is_trimmed: bool = False
    """Whether the template strips a user's text."""
    control: ControlTokens | None = None
    allows_control: bool = False
    """Whether text of others may spell control tokens."""

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        whole: bool = False,
        variables: Variables | None = None,
        chats: bool = False,
        allows_control: bool = False,
    ) -> Codec:
        """Make the codec of `tokenizer`, a transformers tokenizer. It holds only the inner Rust
        tokenizer where that decodes to the same text. `whole`: hold all of it, as tools need the
        chat template. `chats`: users reply in the chat; raises `ValueError` if the template allows
        no second turn of the user.
        """
        template = ChatTemplate(tokenizer, variables, control_tokens=True)
        around = template.around_reply() if chats else ("", "")
        more: dict[str, Any] = {}
        if chats:
            opening = tokenizer.convert_tokens_to_ids(template.ends.turn)
            more["opening"] = opening if template.ends.opens_next else None
            more |= {
                "closing": template.ends.closing if template.ends.turn else "",
                "is_trimmed": template.is_trimmed,
            }
        control = ControlTokens.of(tokenizer)
        tokenizer_class, tags = type(tokenizer), tags_of(tokenizer.chat_template)
        special = tokenizer.added_tokens_decoder.items()
        kept = frozenset(key for key, token in special if token.special and str(token) in tags)
        ends = {tokenizer.eos_token_id, *ends_of_turns(tokenizer, "chat", variables)} - {None}
        cleans, is_bare = tokenizer.clean_up_tokenization_spaces, False
        # Where `decode` is transformers' own, not the class's, the Rust tokenizer decodes the same.
        if (
            hasattr(tokenizer, "backend_tokenizer")
            and tokenizer_class._decode.__module__ == "transformers.tokenization_utils_tokenizers"
            and tokenizer_class.decode.__module__ == "transformers.tokenization_utils_base"
            and not (cleans or whole)
        ):
            bare = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
            bare.no_truncation()
            bare.no_padding()
            control, variables = ControlTokens(bare, control.names), None  # it has no template
            tokenizer, is_bare = bare, True
        return cls(
            *(tokenizer, is_bare, tags, kept, frozenset(ends), dict(variables or {}), around),
            control=control,
            allows_control=allows_control,
            **more,
        )

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of a turn's token ids [T]. Special tokens and the end of the turn are left out;
        tags of thinking, such as `</think>`, stay.
        """
        ids = np.asarray(token_ids).tolist()
        ids = ids[:-1] if ids and ids[-1] in self.ends else ids
        parts, start = [], 0
        for position in [number for number, token_id in enumerate(ids) if token_id in self.kept]:
            parts.append(self.tokenizer.decode(ids[start:position], skip_special_tokens=True))
            parts.append(self.tokenizer.decode([ids[position]], skip_special_tokens=False))
            start = position + 1
        return "".join([*parts, self.tokenizer.decode(ids[start:], skip_special_tokens=True)])

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, to which the tokenizer adds no special tokens. A `MARK` in it
        keeps a user's text from becoming a control token (`megarl.data.control_tokens`).
        """
        if MARK in text and self.control is not None:
            return self.control.ids(text, add_special_tokens=False)
        if self.is_bare:  # a batch, as `encode` of a single text keeps Python's lock
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def reply(self, text: str, last: int | None = None) -> str:
        """What the model reads between two of its turns: the user's `text` inside the chat
        template's markup, for `encode`. `last`: the last token of the model's turn; the end of the
        turn is added if this is another token.
        """
        before, after = self.around
        if last is not None and last != self.opening:
            is_ended = self.opening is None and last in self.ends
            before = before if is_ended else self.closing + before
        shown = text.strip() if self.is_trimmed else text
        if self.control is not None and not self.allows_control:
            shown = self.control.as_text(shown)
        return before + shown + after

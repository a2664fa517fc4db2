"""Conversion between text and token ids inside the worker processes that run verifiers and
sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.data.chat_template import TAGS, ChatTemplate, Variables, ends_of_turns, tags_of
from megarl.data.control_tokens import MARK, ControlTokens


@dataclass(frozen=True)
class Codec:
    """Decodes token ids to text and encodes text to token ids like a Hugging Face tokenizer, where
    possible by the Rust `tokenizers` object alone, so that a worker process need not import
    transformers. Made by `Codec.of(tokenizer)`; can be pickled.
    """

    tokenizer: Any
    is_bare: bool
    """Whether `tokenizer` is a `tokenizers.Tokenizer` rather than a transformers tokenizer."""
    thinking: tuple[str, str] = TAGS
    """(opening, closing) tag around a model's thinking, read from the chat template."""
    kept: frozenset[int] = frozenset()
    """Ids of the tags of thinking that are special tokens; they are decoded all the same."""
    ends: frozenset[int] = frozenset()
    """Ids of tokens that end a turn. If the last token of a sequence is one of them, it is not
    decoded, although it need not be a special token of the tokenizer."""
    variables: Variables = field(default_factory=dict)
    """Variables of the chat template, with which the results of tool calls are written."""
    around: tuple[str, str] = ("", "")
    """What the chat template writes before and after a turn of the user that replies to the model:
    from behind the token that ends the model's turn to where its next turn begins. Empty texts
    where prompts are no chats."""
    closing: str = ""
    """What the template writes to end a turn of the model, up to the token that ends it."""
    opening: int | None = None
    """Id of the token that ends a turn of the model where it is the first of the user's turn."""
    is_trimmed: bool = False
    """Whether the template removes white space around a user's text."""
    control: ControlTokens | None = None
    """The control tokens that text of others does not write."""
    allows_control: bool = False
    """Whether text of others that spells a control token is that token."""

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
        """A codec that decodes and encodes like `tokenizer`, a transformers tokenizer. The codec
        holds only the inner `tokenizers.Tokenizer` if that decodes to the same text. Otherwise, or
        with `whole`, the codec holds `tokenizer` itself; tools need this, since they use its chat
        template. `variables`: values of the chat template's variables, None for none. `chats`:
        prompts are chats, so that `around` is set; `ValueError` if the template allows no second
        turn of the user. `allows_control`: text of others may write control tokens.
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
        kind, tags = type(tokenizer), tags_of(tokenizer.chat_template)
        special = tokenizer.added_tokens_decoder.items()
        kept = frozenset(one for one, token in special if token.special and str(token) in tags)
        ends = {tokenizer.eos_token_id, *ends_of_turns(tokenizer, "chat", variables)} - {None}
        cleans, is_bare = tokenizer.clean_up_tokenization_spaces, False
        if (
            hasattr(tokenizer, "backend_tokenizer")
            and kind._decode.__module__ == "transformers.tokenization_utils_tokenizers"
            and kind.decode.__module__ == "transformers.tokenization_utils_base"
            and not (cleans or whole)
        ):
            bare = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
            bare.no_truncation()
            bare.no_padding()
            control, variables = ControlTokens(bare, control.names), None
            tokenizer, is_bare = bare, True
        return cls(
            *(tokenizer, is_bare, tags, kept, frozenset(ends), dict(variables or {}), around),
            control=control,
            allows_control=allows_control,
            **more,
        )

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of one sequence of token ids, [T], without a last token that ends a turn and
        without special tokens, except the tags of thinking, such as `<think>`.
        """
        ids = np.asarray(token_ids).tolist()
        ids = ids[:-1] if ids and ids[-1] in self.ends else ids
        parts, start = [], 0
        for place in [number for number, one in enumerate(ids) if one in self.kept]:
            parts.append(self.tokenizer.decode(ids[start:place], skip_special_tokens=True))
            parts.append(self.tokenizer.decode([ids[place]], skip_special_tokens=False))
            start = place + 1
        return "".join([*parts, self.tokenizer.decode(ids[start:], skip_special_tokens=True)])

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, which may be marked, without special tokens added at its
        beginning or end.
        """
        if MARK in text and self.control is not None:
            return self.control.ids(text, add_special_tokens=False)
        if self.is_bare:  # a batch, as `encode` of a single text keeps Python's lock
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def reply(self, text: str, last: int | None = None) -> str:
        """The marked text of a turn of the user that replies to the model with `text`, from behind
        the model's turn to where its next turn begins. `last`: the last token of the model's turn;
        if it ends no turn, or is not the one that opens the user's, that token is written too.
        """
        before, after = self.around
        if last is not None and last != self.opening:
            is_ended = self.opening is None and last in self.ends
            before = before if is_ended else self.closing + before
        shown = text.strip() if self.is_trimmed else text
        if self.control is not None and not self.allows_control:
            shown = self.control.as_text(shown)
        return before + shown + after

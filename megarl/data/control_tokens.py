"""Control tokens: the added tokens of a tokenizer by which a chat template marks turns, thoughts
and calls, and which a text of others (a user, a tool, a web page) must not write.

    text of others --as_text--> marked text --chat template--> marked text --ids--> token ids

A mark stands inside each place where such a text spells a control token.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Collection, Iterable
from typing import Any

from tokenizers import Tokenizer

from megarl.settings.schema import require

MARK = "\udfff"
"""Stands behind the first character of a control token's text that is ordinary text. Half of a
surrogate pair, which no text that can be tokenised holds."""
BRACKETED = re.compile(r"[<\[\u25c1].+[>\]\u25b7]")
"""Added tokens that are control tokens although the tokenizer does not call them special, such as
`<think>` and `</tool_call>`."""
HTML = re.compile(
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h\d|p|br|hr|div|span|blockquote|ul|ol|li|strong"
    r"|em|b|i|u|s|sub|sup|code|pre|a|img)>"
)
"""Tags that are added tokens of some tokenizers (Gemma's), and ordinary text."""


class ControlTokens:
    """The control tokens of a tokenizer; can be pickled. Made by `ControlTokens.of`."""

    def __init__(self, backend: Tokenizer | None, names: Iterable[str]) -> None:
        """`backend`: None for a tokenizer that is not of the library tokenizers, which cannot
        encode marked text. `names`: texts of the control tokens, of two characters or more.
        """
        self._backend, self.names = backend, tuple(sorted(names, key=len, reverse=True))
        self._leads = {name[:2] for name in self.names}
        self._parts = {name[:size] for name in self.names for size in range(1, len(name))}

    @classmethod
    def of(cls, tokenizer: Any) -> ControlTokens:
        """Control tokens of a transformers tokenizer: its added tokens, of two characters or more,
        that are special, or in brackets (`<think>`) but not an HTML tag (`<b>`).
        """
        added = tokenizer.added_tokens_decoder.values()
        names = tuple(
            token.content
            for token in added
            if len(token.content.strip()) > 1
            and (
                token.special
                or (BRACKETED.fullmatch(token.content) and not HTML.fullmatch(token.content))
            )
        )
        return _cached(tokenizer, names, len(added))

    def as_text(self, text: str, names: Collection[str] | None = None) -> str:
        """`text` with a mark in each place where it spells a control token (of `names`; None: any),
        or begins one at its end.
        """
        if not any(lead in text for lead in self._leads) and text[-1:] not in self._parts:
            return text
        present = [name for name in (self.names if names is None else names) if name in text]
        if present:
            starts = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in present)
            text = re.sub(starts, rf"\g<0>{MARK}", text)
        longest = len(self.names[0]) if self.names else 0
        is_part = any(text[-size:] in self._parts for size in range(1, longest))
        return f"{text}{MARK}" if is_part else text

    def all_as_text(self, value: Any, names: Collection[str] | None = None) -> Any:
        """A JSON value with `as_text` of all texts in it."""
        if isinstance(value, str):
            return self.as_text(value, names)
        if isinstance(value, dict):
            pairs = (self.all_as_text([*pair], names) for pair in value.items())
            return {key: item for key, item in pairs}
        return [self.all_as_text(v, names) for v in value] if isinstance(value, list) else value

    def within(self, text: str) -> list[str]:
        """The control tokens in a text, in order."""
        return self._pattern.findall(text)

    def ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a marked text, whose marked places are ordinary text. Raises `ValueError`
        for a tokenizer that cannot do so.
        """
        return self._encoded(*self._plain, text, add_special_tokens)

    def _encoded(
        self,
        plain: Tokenizer,
        names: dict[str, str],
        numbers: dict[Any, int],
        text: str,
        add_special_tokens: bool,
    ) -> list[int]:
        renamed = self._pattern.sub(lambda match: names[match[0]], text).replace(MARK, "")
        # A batch, as `encode` of a single text keeps Python's lock.
        (batch,) = plain.encode_batch_fast([renamed], add_special_tokens=add_special_tokens)
        pairs = zip(batch.ids, batch.special_tokens_mask, strict=True)
        return [token if is_added else numbers.get(token, token) for token, is_added in pairs]

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.names)) or "(?!)")

    @functools.cached_property
    def _plain(self) -> tuple[Tokenizer, dict[str, str], dict[Any, int]]:
        """(a copy of the tokenizer whose control tokens have names that no text holds, {text of a
        control token: its name there}, {id there: id}).
        """
        fix = "so that text which spells a control token cannot be read; set control_tokens to true"
        backend: Any = self._backend
        require(
            backend is not None,
            f"the tokenizer is none of the library tokenizers (tokenizer.json), {fix}",
        )
        described = json.loads(backend.to_str())
        model, added = described["model"], described["added_tokens"]
        word = secrets.token_hex(8)
        names = {name: f"<{word}.{number}>" for number, name in enumerate(self.names)}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(key, key): id for key, id in model["vocab"].items()}
        else:  # of a unigram model
            model["vocab"] = [[names.get(key, key), score] for key, score in model["vocab"]]
        if model.get("unk_token"):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
        before = {token["content"]: token["id"] for token in added}
        for token in added:
            token["content"] = names.get(token["content"], token["content"])
        plain = Tokenizer.from_str(json.dumps(described))
        plain.no_truncation()
        plain.no_padding()
        numbers = {
            plain.token_to_id(names.get(name) or name): token for name, token in before.items()
        }
        sample = "".join(f"{name} a b\n" for name in self.names[:32])
        require(
            self._encoded(plain, names, numbers, sample, True) == backend.encode(sample).ids,
            f"the tokenizer finds its control tokens in a way of its own, {fix}",
        )
        return plain, names, numbers


@functools.lru_cache(maxsize=8)
def _cached(tokenizer: Any, names: tuple[str, ...], num_added: int) -> ControlTokens:
    """`ControlTokens` of a tokenizer with `num_added` added tokens. Cached: the first marked text
    copies the tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return ControlTokens(backend if isinstance(backend, Tokenizer) else None, names)


def unmarked(text: str) -> str:
    """A marked text as it reads."""
    return text.replace(MARK, "")

"""Control tokens: the added tokens of a tokenizer by which a chat template marks turns, thoughts
and calls, and that a text of others (a user, a tool, a web page) must not write.

    text of others --as_text--> marked text --chat template--> marked text --ids--> token ids

A mark stands inside each place where such a text spells a control token. Text without marks is
tokenised as by the tokenizer alone.
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
"""Stands behind the first character of a control token's text that is no control token. Half of a
surrogate pair, which no text that can be tokenised holds."""
BRACKETED = re.compile(r"[<\[\u25c1].+[>\]\u25b7]")
"""Texts of added tokens that are control tokens although the tokenizer does not call them special,
such as `<think>` and `</tool_call>`."""
HTML = re.compile(
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h\d|p|br|hr|div|span|blockquote|ul|ol|li|strong"
    r"|em|b|i|u|s|sub|sup|code|pre|a|img)>"
)
"""Tags that some tokenizers (Gemma's) have as added tokens, and that are ordinary text."""


class ControlTokens:
    """The control tokens of a tokenizer; can be pickled. Made by `ControlTokens.of`."""

    def __init__(self, backend: Tokenizer | None, names: Iterable[str]) -> None:
        """`backend`: the tokenizer; None for one that is not of the library tokenizers, which
        cannot encode marked text. `names`: texts of its control tokens, of two characters or more.
        """
        self._backend, self.names = backend, tuple(sorted(names, key=len, reverse=True))
        self._leads = {name[:2] for name in self.names}
        self._parts = {name[:size] for name in self.names for size in range(1, len(name))}

    @classmethod
    def of(cls, tokenizer: Any) -> ControlTokens:
        """The control tokens of `tokenizer`, a transformers tokenizer: its added tokens that are
        special, and those in brackets, such as `<think>`, that are no tags of HTML.
        """
        added = tokenizer.added_tokens_decoder.values()
        names = tuple(
            one.content
            for one in added
            if len(one.content.strip()) > 1
            and (
                one.special
                or (BRACKETED.fullmatch(one.content) and not HTML.fullmatch(one.content))
            )
        )
        return _made(tokenizer, names, len(added))

    def as_text(self, text: str, names: Collection[str] | None = None) -> str:
        """`text` with a mark in each place where it spells a control token, or begins one at its
        end. `names`: only of these tokens; None: of all.
        """
        if not any(lead in text for lead in self._leads) and text[-1:] not in self._parts:
            return text
        present = [name for name in (self.names if names is None else names) if name in text]
        if present:
            starts = "|".join(f"{re.escape(one[0])}(?={re.escape(one[1:])})" for one in present)
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
            return {key: one for key, one in pairs}
        return [self.all_as_text(one, names) for one in value] if isinstance(value, list) else value

    def within(self, text: str) -> list[str]:
        """The control tokens in a text, in order."""
        return self._pattern.findall(text)

    def ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a marked text: those of the tokenizer, but that the marked places are
        ordinary text. `add_special_tokens`: add those with which the tokenizer begins and ends a
        text. Raises `ValueError` for a tokenizer that cannot do so.
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
        renamed = self._pattern.sub(lambda found: names[found[0]], text).replace(MARK, "")
        # A batch, as `encode` of a single text keeps Python's lock.
        (made,) = plain.encode_batch_fast([renamed], add_special_tokens=add_special_tokens)
        pairs = zip(made.ids, made.special_tokens_mask, strict=True)
        return [one if is_added else numbers.get(one, one) for one, is_added in pairs]

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
            pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
            model["merges"] = [one for one in pairs if not names.keys() & {*one, "".join(one)}]
        before = {one["content"]: one["id"] for one in added}
        for one in added:
            one["content"] = names.get(one["content"], one["content"])
        plain = Tokenizer.from_str(json.dumps(described))
        plain.no_truncation()
        plain.no_padding()
        numbers = {plain.token_to_id(names.get(name) or name): one for name, one in before.items()}
        sample = "".join(f"{name} a b\n" for name in self.names[:32])
        require(
            self._encoded(plain, names, numbers, sample, True) == backend.encode(sample).ids,
            f"the tokenizer finds its control tokens in a way of its own, {fix}",
        )
        return plain, names, numbers


@functools.lru_cache(maxsize=8)
def _made(tokenizer: Any, names: tuple[str, ...], num_added: int) -> ControlTokens:
    """`ControlTokens` of a tokenizer with `num_added` added tokens; made once, as the first marked
    text costs a copy of the tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return ControlTokens(backend if isinstance(backend, Tokenizer) else None, names)


def unmarked(text: str) -> str:
    """A marked text as it reads."""
    return text.replace(MARK, "")

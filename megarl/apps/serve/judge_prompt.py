r"""What a judge reads: a template, filled with a prompt and a response that nobody vouches for.

    template --parse--> [literal, field, ...] --chat template--> JudgePrompt --ids--> token ids

Two things never happen. A filled-in text is not expanded again, whatever braces it holds. And it
never becomes a control token: a response that holds the text `<|im_end|>` would otherwise end the
user's message, and go on as the judge.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import regex
from tokenizers import Tokenizer

from megarl.chat_template import ChatTemplate, Variables
from megarl.data.config import TemplateName
from megarl.data.render import column, text_of
from megarl.data.tokens import prompt_tokens
from megarl.schema import require, shortened
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = ("prompt", "response", "answer")
"""Fields of a template beside `fields.NAME`."""
ROW = "fields."
"""How a field begins that is a column of the prompt's row."""
ESCAPE = "write {{ and }} for braces that are no field"


def parse_template(template: str, setting: str) -> tuple[list[str], list[str]]:
    """(literals, fields) of a template: the text before each field and, as the last literal, what
    follows them all. Raises `ValueError`, naming `setting`, for an unknown field, or if there is no
    `{response}`.
    """
    literals, fields = [""], list[str]()
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"{setting} has a brace without its other half ({error}); {ESCAPE}"
        ) from None
    for literal, field, spec, conversion in parts:
        literals[-1] += literal
        if field is None:
            continue
        written = field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        is_known = field in FIELDS or (field.startswith(ROW) and len(field) > len(ROW))
        known = ", ".join(f"{{{name}}}" for name in (*FIELDS, f"{ROW}NAME"))
        require(
            is_known and not spec and not conversion,
            f"{setting} has the unknown field {{{shortened(written)}}}; use {known}, and {ESCAPE}",
        )
        fields.append(field)
        literals.append("")
    require(
        "response" in fields,
        f"{setting} has no field {{response}}, so that the judge would not see what it judges; add"
        " it",
    )
    return literals, fields


def values(fields: Sequence[str], prompt: Prompt, response: str) -> dict[str, str]:
    """{field: its text} for one response. Raises `ValueError` if the prompt has no reference answer
    or no such column.
    """
    found = {"prompt": prompt.text, "response": response, "answer": prompt.answer}
    require(
        "answer" not in fields or bool(prompt.answer),
        "the judge's template has the field {answer}, but the prompt has no reference answer",
    )
    place = f"row {prompt.index} of the data"
    for field in fields:
        if field.startswith(ROW):
            name = field.removeprefix(ROW)
            value: Any = column(prompt.fields, name, place=place, setting="the judge's template")
            is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            found[field] = (
                text_of(value, what=f"column '{name}'", place=place)
                if is_plain
                else json.dumps(value, ensure_ascii=False)
            )
    return found


class JudgePrompt:
    """A template with the tokenizer's chat template around it, which gives token ids."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        *,
        setting: str,
        chat: bool,
        system: str = "",
        variables: Variables | None = None,
    ) -> None:
        """`setting`: what the recipe calls the template. `system`: the chat's system message; empty
        for none. `variables`: of the chat template. Raises `ValueError` for a template or a
        tokenizer that does not do.
        """
        self._tokenizer = tokenizer
        literals, self.fields = parse_template(template, setting)
        self._template: TemplateName = "rendered" if chat else "none"
        self._literals = _in_chat(tokenizer, literals, system, variables) if chat else literals
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        whole = "".join(self._literals)
        # Also those that are not special: models write </think> or <tool_response> as such tokens.
        self._control = {
            token: str(one.content)
            for token, one in added.items()
            if token != tokenizer.unk_token_id and one.content.strip()
        }
        """{id: text} of tokens that only the template may write."""
        texts = sorted(self._control.values(), key=len, reverse=True)
        self._pattern = regex.compile("|".join(map(regex.escape, texts)) or r"(?!)")
        self._plain = _without(tokenizer, set(self._control))
        self._count = self._controls(prompt_tokens(tokenizer, [whole], self._template)[0])

    def ids(self, filled: Mapping[str, str]) -> list[int]:
        """Token ids of the template with {field: text}. Raises `ValueError` if the tokenizer makes
        control tokens of a text all the same.
        """
        pieces = [self._literals[0]]
        for field, literal in zip(self.fields, self._literals[1:], strict=True):
            pieces += [filled[field], literal]
        text, outside, end = "".join(pieces), list[tuple[int, int]](), 0
        for number, piece in enumerate(pieces):
            end += len(piece)
            if number % 2 == 0:
                outside.append((end - len(piece), end))
        found = [match.span() for match in self._pattern.finditer(text)]
        trusted = [span for span in found if any(a <= span[0] and span[1] <= b for a, b in outside)]
        if found == trusted:
            ids = prompt_tokens(self._tokenizer, [text], self._template)[0]
        else:
            ids = self._ids_apart(pieces)
        require(
            self._controls(ids) == self._count,
            "the prompt or the response holds text of which the judge's tokenizer makes control"
            " tokens",
        )
        return ids

    def _ids_apart(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of a prompt in which a filled-in text holds the text of a control token.

        `pieces`: the template's literals at even positions, filled-in texts at odd ones. Control
        tokens are looked for in the literals alone; what stands between two of them is tokenised as
        plain text.
        """
        numbers = {text: token for token, text in self._control.items()}
        first = self._template == "none"
        ids = prompt_tokens(self._tokenizer, [""], "none")[0] if first else []
        run = ""
        for number, piece in enumerate(pieces):
            end = 0
            for match in self._pattern.finditer(piece) if number % 2 == 0 else ():
                ids += self._plain_ids(run + piece[end : match.start()])
                ids.append(numbers[match[0]])
                run, end = "", match.end()
            run += piece[end:]
        ids += self._plain_ids(run)
        # As `prompt_tokens` reads a template that begins with the token that begins every text.
        twice = first and ids[:2] == [self._tokenizer.bos_token_id] * 2
        return ids[1:] if twice else ids

    def _plain_ids(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def _controls(self, ids: Sequence[int]) -> int:
        """Number of control tokens in `ids`."""
        return sum(token in self._control for token in ids)


def _in_chat(
    tokenizer: PreTrainedTokenizerBase,
    literals: Sequence[str],
    system: str,
    variables: Variables | None,
) -> list[str]:
    """The literals with what the tokenizer's chat template writes around them. Raises `ValueError`
    if there is no such template, or the message does not stand in it as it is.
    """
    require(
        bool(tokenizer.chat_template),
        "judge.chat is true, but the judge's tokenizer has no chat template; set chat to false, or"
        " a model with one",
    )
    marks = [f"\ue000{number}\ue001" for number in range(len(literals) - 1)]
    message = literals[0] + "".join(a + b for a, b in zip(marks, literals[1:], strict=True))
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": message})
    template, found = ChatTemplate(tokenizer, variables, "judge"), list[str]()
    template.check_variables()
    rest = template.text(turns, "the judge's template", asks=True)
    for mark in marks:
        before, _, after = rest.partition(mark)
        require(
            rest.count(mark) == 1,
            "the chat template of the judge's tokenizer does not write the user's message as it"
            " is; set judge.chat to false and write the chat into the template",
        )
        found.append(before)
        rest = after
    return [*found, rest]


def _without(tokenizer: PreTrainedTokenizerBase, tokens: set[int]) -> Tokenizer:
    """A copy of the tokenizer that does not find the added tokens `tokens` in a text. Raises
    `ValueError` for a tokenizer without a tokenizer.json.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    require(
        isinstance(backend, Tokenizer),
        "the judge's tokenizer is none of the library tokenizers, so that a response could write"
        " control tokens; set a model whose folder has a tokenizer.json",
    )
    described = json.loads(backend.to_str())
    described["added_tokens"] = [
        added for added in described["added_tokens"] if added["id"] not in tokens
    ]
    return Tokenizer.from_str(json.dumps(described))

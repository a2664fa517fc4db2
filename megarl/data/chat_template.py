"""A tokenizer's chat template: the text that it makes of a chat, what it leaves out, and the token
that ends a turn of the model.

    chat [{role, content, ...}] --ChatTemplate.text--> text with special tokens
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.control_tokens import ControlTokens
from megarl.data.turn_ends import HEARD, SAID, TurnEnds
from megarl.settings.data import TemplateName
from megarl.settings.schema import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = dict[str, Any]
"""A message of a chat: role, content, and what else the row has (tool_calls, ...)."""
Variables = Mapping[str, Any]
"""{name: value} of further variables of a template, such as {enable_thinking: False}."""
Tools = Sequence[dict[str, Any]]
"""In OpenAI's format."""

OTHER = " another text"
"""Appended to a text to see whether a template writes it."""
GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables that a template gets of a chat itself."""
TAGS = ("<think>", "</think>")
"""Tags around a model's thoughts where the chat template names none."""
CLOSING = re.compile(
    r"([<\[\u25c1])/((?:\w+:)?(?:think|thinking|thoughts?|reason|reasoning))([>\]\u25b7])",
    re.IGNORECASE,
)
"""A closing tag of thoughts in a chat template, such as `</think>` and `[/THINK]`."""
NULL = re.compile(r"(?:None|null)\b(?<!\w....)")
"""What templates write for a content that is null. (`\b` in front would take seven times as long on
a long text.)"""


def end_of_turn(
    tokenizer: PreTrainedTokenizerBase,
    template: TemplateName,
    variables: Variables | None = None,
    *,
    is_last: bool = False,
) -> int:
    """Id of the token with which the assistant's turns end, in training and in rollouts: the
    special token that the chat template writes behind a turn, preferably one that also ends a
    user's turn. It is the end-of-sequence token without a chat template, with `template` 'none', or
    if the template writes no such token. `is_last`: of the last turn of a conversation, which may
    end with another token.

    Raises `ValueError` if there is neither.
    """
    token_id = tokenizer.eos_token_id
    if template != "none" and tokenizer.chat_template:
        ends = ChatTemplate(tokenizer, variables, control_tokens=True).ends
        end = (is_last and ends.chat) or ends.turn
        token_id = tokenizer.convert_tokens_to_ids(end) if end else token_id
    require(
        token_id is not None,
        "the tokenizer has no end-of-sequence token to end a response with; set its eos_token",
    )
    return int(token_id)  # pyright: ignore[reportArgumentType]


def ends_of_turns(
    tokenizer: PreTrainedTokenizerBase, template: TemplateName, variables: Variables | None = None
) -> list[int]:
    """Ids of all tokens at which a turn of the assistant stops: `end_of_turn` first, then those
    behind its calls and at the end of a conversation. A token that the template also writes inside
    a turn, behind its thoughts, is left out.
    """
    end = end_of_turn(tokenizer, template, variables)
    if template == "none" or not tokenizer.chat_template:
        return [end]
    ends = ChatTemplate(tokenizer, variables, control_tokens=True).ends
    known: Any = tokenizer.convert_tokens_to_ids([ends.call, ends.chat])
    inner = end if ends.is_inside else None
    token_ids = [token for token in dict.fromkeys([end, *known]) if token not in (None, inner)]
    return token_ids or [end]


def turn_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Texts of the control tokens that open and end turns; those that begin and end texts if there
    is no chat template, or it cannot be rendered.
    """
    return ChatTemplate(tokenizer, control_tokens=True).turn_tokens


def without_end(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], end: int) -> list[str]:
    """`texts` without the end tokens that are spelled at their ends: the token id `end` and the
    end-of-sequence token, repeated, with white space behind them.
    """
    known: Any = [token_id for token_id in (end, tokenizer.eos_token_id) if token_id is not None]
    ends = "|".join(re.escape(name[::-1]) for name in tokenizer.convert_ids_to_tokens(known))
    # Backwards, or a text of many such tokens that ends otherwise would take hours.
    at_end = re.compile(rf"(?:\s*(?:{ends}))*")
    return [text[: len(text) - at_end.match(text[::-1]).end()] for text in texts]  # pyright: ignore[reportOptionalMemberAccess]


def tags_of(chat_template: object) -> tuple[str, str]:
    """(opening, closing) tag around a model's thoughts that a chat template names; `TAGS` if it
    names none or is no text.
    """
    match = CLOSING.search(chat_template) if isinstance(chat_template, str) else None
    return (f"{match[1]}{match[2]}{match[3]}", match[0]) if match else TAGS


class ChatTemplate:
    """The chat template of a tokenizer, with fixed variables. Renders chats, splits a chat that
    ends with the assistant into prompt and answer, and checks that the template writes all content
    of a chat.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        variables: Variables | None = None,
        setting: str = "prompts",
        *,
        control_tokens: bool = False,
    ) -> None:
        """`setting`: the section of the recipe whose `template_variables` these are, for messages.
        `control_tokens`: text in a chat that spells a control token is one; otherwise `text` marks
        it (see `megarl.data.control_tokens`).
        """
        self.tokenizer, self.variables, self.setting = tokenizer, dict(variables or {}), setting
        self._control = None if control_tokens else ControlTokens.of(tokenizer)
        self._written: set[tuple[Any, ...]] = set()
        """Shapes of turns (see `_shape`) of which the template leaves nothing out."""
        self.num_unopened = 0

    @functools.cached_property
    def _added(self) -> tuple[str, ...]:
        """Texts of the tokenizer's added tokens."""
        known = (token.content for token in self.tokenizer.added_tokens_decoder.values())
        return tuple(filter(str.strip, known))

    def _unended(self, chat: Sequence[Turn]) -> list[Turn]:
        """A chat whose turns of the model have lost their end tokens; see `without_end`."""
        turns = list(chat)
        for number, turn in enumerate(turns):
            content = turn.get("content")
            is_own = turn.get("role") == "assistant"  # that token is text in what others write
            if is_own and isinstance(content, str) and content.rstrip().endswith(self._added):
                end: Any = self.tokenizer.convert_tokens_to_ids(self._end)
                turns[number] = turn | {"content": without_end(self.tokenizer, [content], end)[0]}
        return turns

    @functools.cached_property
    def _end(self) -> str:
        end = end_of_turn(self.tokenizer, "chat", self.variables)
        return str(self.tokenizer.convert_ids_to_tokens(end))

    @functools.cached_property
    def ends(self) -> TurnEnds:
        return TurnEnds.of(self.text_or_none, self.tokenizer)

    def check_variables(self) -> None:
        """Raise `ValueError` if the template does not read one of `variables`."""
        unread = sorted(set(self.variables) - set(self._reads)) if self.variables else []
        named = f"{self.setting}.template_variables"
        require(
            not unread,
            f"{named} has '{', '.join(unread)}', which is no variable of the chat template; its"
            f" variables are {', '.join(self._reads)}; set one of them"
            if self._reads
            else f"{named} is set, but the chat template has no variables; leave it out",
        )

    @functools.cached_property
    def _reads(self) -> list[str]:
        """Variables that the template reads, sorted, without those that every template gets."""
        import jinja2.meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        templates: Any = self.tokenizer.chat_template
        names: set[str] = set()
        for text in templates.values() if isinstance(templates, dict) else [templates]:
            try:
                environment = _compile_jinja_template(text).environment
                names |= jinja2.meta.find_undeclared_variables(environment.parse(text))
            except jinja2.TemplateError as error:
                raise ValueError(f"the tokenizer's chat template cannot be read: {error}") from None
            names -= set(environment.globals)
        return sorted(names - GIVEN - set(self.tokenizer.SPECIAL_TOKENS_ATTRIBUTES))

    def _as_text(self, turn: Turn) -> Turn:
        """A turn whose texts spell no control token; in the model's turns, none that opens or ends
        a turn.
        """
        if self._control is None:
            return turn
        names = self.turn_tokens if turn["role"] == "assistant" else None
        return self._control.all_as_text(turn, names)

    @functools.cached_property
    def turn_tokens(self) -> set[str]:
        asked, answer = {"role": "user", "content": HEARD}, {"role": "assistant", "content": SAID}
        names = {str(name) for name in (self.tokenizer.bos_token, self.tokenizer.eos_token) if name}
        for chat in ([asked, answer, asked], [asked, answer], [asked]):
            with contextlib.suppress(Exception):  # templates raise what they like
                names |= {*ControlTokens.of(self.tokenizer).within(self._rendered(chat, asks=True))}
        return names - {*tags_of(self.tokenizer.chat_template)}

    def text(self, chat: Sequence[Turn], place: str, *, asks: bool, tools: Tools = ()) -> str:
        """Render a chat as the model reads it, special tokens included; the text is marked. `asks`:
        end where the assistant's reply begins. An end token that a turn's content spells is not
        doubled. Raises `ValueError`, which begins with `place` (the row), if the template refuses
        the chat.
        """
        chat, shown = [*map(self._as_text, self._unended(chat))], list(tools)
        shown = self._control.all_as_text(shown) if self._control is not None else shown
        texts, errors, has_null = list[str](), list[Exception](), any(map(_is_null, chat))
        for form in _forms(chat):
            try:
                texts.append(self._rendered(form, shown, asks=asks))
            except Exception as error:  # templates raise what they like, jinja2's errors among them
                errors.append(error)
            if texts and not (has_null and NULL.search(texts[-1])):
                break
        if not texts:
            raise ValueError(
                f"{place}: the chat template refuses this chat: {errors[0]}; mend the chat or the"
                " template"
            ) from errors[0]
        return texts[0] if len(texts) == 1 else min(texts, key=lambda text: len(NULL.findall(text)))

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """Whether the template writes contents that are lists of parts, and no texts."""

        def is_written(content: Any) -> bool:
            with contextlib.suppress(Exception):  # templates raise what they like
                return HEARD in self._raw([{"role": "user", "content": content}], (), asks=True)
            return False

        return not is_written(HEARD) and is_written(_parts(HEARD))

    def _rendered(self, chat: Sequence[Turn], tools: Tools = (), *, asks: bool) -> str:
        if self._reads_parts:
            chat = [turn | {"content": _parts(turn.get("content"))} for turn in chat]
        return self._raw(chat, tools, asks=asks)

    def _raw(self, chat: Sequence[Turn], tools: Tools, *, asks: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(chat),
                tools=list(tools) or None,  # pyright: ignore[reportArgumentType]
                tokenize=False,
                add_generation_prompt=asks,
                **self.variables,
            )
        )

    def around_reply(self) -> tuple[str, str]:
        """What the template writes around a user's turn that replies to the model: (from behind the
        token that ends the model's turn to the user's text, from there to the model's next turn).
        Raises `ValueError` if the template refuses such a chat, or leaves out one of the two turns.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SAID}]
        text = self.text([*chat, {"role": "user", "content": HEARD}], self.setting, asks=True)
        before, separator, after = text.partition(SAID)[2].partition(HEARD)
        require(
            separator,
            f"{self.setting}: the chat template does not write a turn of the user behind one of the"
            " model; use another one, or set a template of 'none'",
        )
        end = before.find(self._end)
        return before[end + len(self._end) if end >= 0 else 0 :], after

    @property
    def is_trimmed(self) -> bool:
        """Whether the template removes white space around a user's text."""
        text = self.text_or_none([{"role": "user", "content": f" {HEARD} "}])
        return text is not None and f" {HEARD} " not in text

    def reply(self, chat: Sequence[Turn], place: str, tools: Tools = ()) -> tuple[str, str | None]:
        """Render a chat whose last turn is the assistant's as (prompt, answer): the prompt ends
        where the reply begins, the answer with the token that ends the turn. Joined, they are the
        text of the whole chat, except where the prompt ends with an opening tag of thoughts
        (`<think>`) and finished replies are written without thoughts. Then the answer is what the
        model has to write after the tag; of a reply without thoughts the prompt ends before the
        tag. The answer is None if the template renders the earlier turns differently once the reply
        follows. Raises as `text`.
        """
        chat = self._unended(chat)
        before = self.text(chat[:-1], place, asks=True, tools=tools)
        after = self.text(chat, place, asks=False, tools=tools)
        text = str(self._as_text(chat[-1])["content"] or "")
        stem, tag, gap = self._opened(before)
        more = set(chat[-1]) - {"role", "content", "tool_calls"}  # such as thoughts by themselves
        tags = tags_of(self.tokenizer.chat_template)
        if after.startswith(before):
            answer = self._closed(after[len(before) :], chat[-1])
            counts = [(tag + answer).count(tags[0]), answer.count(tags[1])]
            is_once = counts == [max(1, text.count(tags[0])), text.count(tags[1])]
            if not tag or more or tags[1] not in text or is_once:
                return before, answer
        elif stem != before and after.startswith(stem) and (more or not tag or tags[1] not in text):
            self.num_unopened += 1
            return stem, self._closed(after[len(stem) :], chat[-1])
        elif not tag or more or tags[1] not in text:
            return before, None
        whole = [*chat[:-1], chat[-1] | {"content": SAID}]
        head, _, rest = self.text(whole, place, asks=False, tools=tools).rpartition(SAID)
        if not head.startswith(stem):
            return before, None
        if text.lstrip().startswith(tag):
            text = text.lstrip().removeprefix(tag).removeprefix(gap)
        return before, text + self._closed(rest, chat[-1])

    def answered(self, chat: Sequence[Turn], place: str, tools: Tools = ()) -> tuple[str, str]:
        """As `reply`, but never None: raises `ValueError` instead, and also if the template does
        not write all of the chat.
        """
        before, answer = self.reply(chat, place, tools)
        self.check_whole(chat, place, tools)
        require(
            answer is not None,
            f"{place}: the chat template writes the prompt in another way once it has been"
            " answered; use a template that does not",
        )
        return before, str(answer)

    def _closed(self, text: str, turn: Turn) -> str:
        """What the template writes of the model's `turn`, up to the last token that ends it. Where
        this token begins the next turn, it is added.
        """
        known = (self.ends.turn, self.ends.call, self.ends.chat)
        stops = [text.rfind(end) + len(end) for end in known if end and end in text]
        if stops or not self.ends.turn:
            return text[: max(stops, default=len(text))]
        return text + (self.ends.call_closing if turn.get("tool_calls") else self.ends.closing)

    def inside(self, text: str) -> str:
        """A conversation that ends with the model's turn, ended as where further turns follow."""
        if not self.ends.chat or not text.endswith(self.ends.chat):
            return text
        return text.removesuffix(self.ends.chat) + self.ends.closing

    def _opened(self, before: str) -> tuple[str, str, str]:
        """Split `before` at an opening tag of thoughts at its end: (text before the tag, tag, white
        space behind it). The tag is empty if there is none, or it is closed around empty thoughts.
        """
        opening, closing = tags_of(self.tokenizer.chat_template)
        stem, tag, gap = before.rpartition(opening)
        if gap.strip() == closing and tag:
            return stem, "", ""
        return (before, "", "") if gap.strip() else (stem, tag, gap)

    def check_whole(self, chat: Sequence[Turn], place: str, tools: Tools = ()) -> None:
        """Raise `ValueError`, which begins with `place` (the row), if the rendered text does not
        depend on the tools or on some value in a turn.

        The template may leave out `name` and `tool_call_id` of tool results that stand in the order
        of the calls.
        """
        fix = "remove it from the data, or use a chat template that writes it"
        if tools and () not in self._written:
            require(
                self.text_or_none(chat, tools) != self.text_or_none(chat, ()),
                f"{place}: the chat template does not write the tools of the row; set"
                f" {self.setting}.tools_column to '' to leave them out, or use a chat template that"
                " writes them",
            )
            self._written.add(())
        for number, turn in enumerate(chat):
            shape = _shape(turn)
            if shape in self._written:
                continue
            lost = [key for key in shape[1:] if not self._writes(key, chat, number, tools)]
            if turn["role"] == "tool" and "tool_call_id" in lost:
                _check_results_in_order(chat, number, place)
            whole = not lost
            if turn["role"] == "tool":
                lost = [key for key in lost if key not in ("name", "tool_call_id")]
            require(
                not lost,
                f"{place}: the chat template does not write '{', '.join(lost)}' of turn {number}"
                f" (from 0), of role {turn['role']!r}; {fix}",
            )
            if whole:
                self._written.add(shape)

    def _writes(self, key: str, chat: Sequence[Turn], number: int, tools: Tools) -> bool:
        """Whether the text of the chat, or of its turns up to `number`, depends on that turn's
        `key`. An error of the template counts as a text.
        """
        changed = [*chat]
        changed[number] = _changed(chat[number], key)
        return any(
            self.text_or_none(chat[:end], tools) != self.text_or_none(changed[:end], tools)
            for end in (number + 1, len(chat))
        )

    def text_or_none(self, chat: Sequence[Turn], tools: Tools = ()) -> str | None:
        """Render a whole chat; None if the template refuses it."""
        try:
            return self.text(chat, "", asks=False, tools=tools)
        except ValueError:
            return None


def _parts(content: str | None) -> list[dict[str, str]]:
    """A content as a list of parts, as templates of models with images read it."""
    return [{"type": "text", "text": content or ""}]


def _forms(chat: Sequence[Turn]) -> list[list[Turn]]:
    """Forms of one chat, one of which a template reads. Some templates add contents as texts, and
    fail at null beside calls or write "None"; some add arguments of calls as texts, and fail at an
    object.
    """
    forms = [list(chat)]
    if any(map(_is_null, chat)):
        forms.append([turn | {"content": turn.get("content") or ""} for turn in chat])
    if any(turn.get("tool_calls") for turn in chat):
        forms += [[_with_text_arguments(turn) for turn in form] for form in forms]
    return forms


def _is_null(turn: Turn) -> bool:
    return turn.get("content", "") is None


def _with_text_arguments(turn: Turn) -> Turn:
    calls: list[Any] = []
    for call in turn.get("tool_calls") or ():
        inner = call.get("function", call)
        text = json.dumps(inner.get("arguments"), ensure_ascii=False)
        function = inner if isinstance(inner.get("arguments"), str) else inner | {"arguments": text}
        calls.append(call | {"function": function} if "function" in call else function)
    return turn | {"tool_calls": calls} if calls else turn


def _shape(turn: Turn) -> tuple[str, ...]:
    """The role of a turn, then its keys with a value, sorted; 0 and False are values."""
    empty = (None, "", [], {})
    return (turn["role"], *sorted(key for key in turn if key != "role" and turn[key] not in empty))


def _changed(turn: Turn, key: str) -> Turn:
    """`turn` with another value of `key`: a longer text, a shorter list, True for 0, or none."""
    value = turn[key]
    if value in (0, False):  # which a template may read as if there were none
        return turn | {key: True}
    if isinstance(value, str):
        return turn | {key: value + OTHER}
    if isinstance(value, list) and len(value) > 1:
        return turn | {key: value[:-1]}
    return {name: item for name, item in turn.items() if name != key}


def _check_results_in_order(chat: Sequence[Turn], number: int, place: str) -> None:
    """Raise `ValueError` if the call of the result in turn `number` has another position among the
    calls.
    """
    first = number
    while first > 0 and chat[first - 1]["role"] == "tool":
        first -= 1
    calls = (chat[first - 1].get("tool_calls") or []) if first else []
    known = [call.get("id") for call in calls if isinstance(call, dict)]
    asked = chat[number]["tool_call_id"]
    at = known.index(asked) if asked in known else number - first
    require(
        at == number - first,
        f"{place}: turn {number} (from 0) is the result of call {asked!r}, which is call {at} (from"
        " 0) of its turn, but the chat template tells results apart by their order alone; put the"
        " results in the order of the calls",
    )

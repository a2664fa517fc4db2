"""A call of an agent on its way through the gateway, whatever the form of its request was."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from megarl.data.chat_template import Turn
from megarl.settings.rollout import MOST_STOPS
from megarl.system.files import canonical_json

Kind = Literal["invalid_request_error", "authentication_error", "not_found_error", "api_error"]


class ApiError(Exception):
    """Raised for a call that cannot be answered. It becomes a response of the API's own form, with
    HTTP status `status`, the message, and `code`, a word for programs.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str = "", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def kind(self) -> Kind:
        """The `type` of the error in the API."""
        kinds: dict[int, Kind] = {401: "authentication_error", 404: "not_found_error"}
        return kinds.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of the model to a call: `text` beside the tool calls, `calls` in OpenAI's format,
    why it ended, the number of sampled tokens, and the stop text that ended it, or "".
    """

    text: str
    calls: list[dict[str, Any]]
    finish: Literal["stop", "length", "tool_calls"]
    tokens: int
    stop: str = ""

    @property
    def message(self) -> Turn:
        """The answer as a message of a chat."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.text or (None if self.calls else ""), **calls}


@dataclass(eq=False)
class AgentCall:
    """A call of an agent: the conversation that it sends and how many answers it asks for. The HTTP
    server waits for `ended`, which the session of the rollout sets.
    """

    chat: list[Turn]
    """Messages, as `conversations.plain` returns them."""
    tools: list[dict[str, Any]]
    """In OpenAI's format; empty if the model is not to call any."""
    max_tokens: int = 0
    """Most tokens of each answer; 0: no limit but that of the conversation."""
    count: int = 1
    """Answers asked for."""
    calls_once: bool = False
    """Whether the agent reads the first tool call of an answer only."""
    stop: tuple[str, ...] = ()
    """Texts before which an answer ends; the model has written them, and the agent does not read
    them."""
    prompt_tokens: int = 0
    """Tokens of the conversation before the answer; set once it was written for the model."""
    sends_back: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """The model's tool call as the agent will send it back, where its API cannot hold the same."""
    choices: list[Choice] = field(default_factory=list)
    """The answers so far."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all answers are there, or `error` is."""
    error: ApiError | None = None
    connection: Any = None
    """The client's connection that the answer goes to; None once the client has left."""
    read_at: float = 0.0
    """When the whole answer was written to its connection, in seconds of a monotonic clock; 0: no
    client has read it."""

    digest: bytes = b""
    """As `same` returns it."""

    def same(self) -> bytes:
        """Digest that is equal for calls which ask the same."""
        limits = [self.max_tokens, self.count, self.calls_once, self.stop]
        text = canonical_json([self.chat, self.tools, limits])
        return blake2b(text.encode(), digest_size=16).digest()

    def returned(self, choice: Choice) -> Turn:
        """The answer as the agent will send it back."""
        calls = [self.sends_back(call) for call in choice.calls]
        return dict(choice.message) | ({"tool_calls": calls} if calls else {})

    def add(self, choice: Choice) -> None:
        """Note one answer; after the last, the call is answered."""
        self.choices.append(choice)
        if len(self.choices) == self.count:
            self.ended.set()

    def fail(self, error: ApiError) -> None:
        """End the call with an error, if it is not answered."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop texts that a request asks for by `stop`. Raises `ApiError` for those that cannot
    be.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(stops) or len(stops) > MOST_STOPS:
        raise ApiError(
            f"`stop` has {len(stops)} texts, {stops.count('')} of them empty; send at most"
            f" {MOST_STOPS}, none of them empty",
            param="stop",
        )
    return stops


def call_id() -> str:
    """A new id of a tool call: nine letters and digits, as the templates of Mistral's models
    require.
    """
    return re.sub(r"\W|_", "a", secrets.token_urlsafe(9))[:9]

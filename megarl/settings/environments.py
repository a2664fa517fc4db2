"""The section `environment` of a recipe: what scores rollouts, and how scores become rewards."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from megarl.settings.addresses import SECRET, VARIABLE, check_address, check_variable, is_remote
from megarl.settings.agents import AgentConfig
from megarl.settings.code import CodeConfig
from megarl.settings.limits import MOST_TOKENS
from megarl.settings.recipe_paths import CodeText
from megarl.settings.schema import Config, Excludes, Needs, Of, Range, replace, require, section
from megarl.settings.tools import ToolsConfig
from megarl.settings.verifiers import WEIGHT, NamedVerifierConfig

NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""A name in `environment.mixture`, which becomes part of the names of metrics."""


class OverlongConfig(Config):
    """DAPO's soft length penalty (arXiv:2503.14476): 0 up to `limit - buffer` response tokens, then
    falling linearly to -1 at `limit`.
    """

    limit_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Response tokens at which the penalty reaches -1; 0: no penalty."""
    buffer_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Tokens before the limit over which it falls."""

    def check(self) -> None:
        require(
            self.limit_tokens == 0 or 0 < self.buffer_tokens <= self.limit_tokens,
            f"environment.overlong.buffer_tokens is {self.buffer_tokens}; set it between 1 and"
            f" limit_tokens ({self.limit_tokens}), or limit_tokens to 0 to turn the penalty off",
        )


class RemoteConfig(Config):
    """How responses travel to the reward servers that `environment.verifier` or
    `environment.rewards` name.
    """

    token_variable: str = ""
    """Environment variable with the bearer token of all servers; empty: no token."""
    batch_size: Annotated[int, Range(1, 4096)] = 32
    """Most responses in one request."""
    linger_ms: Annotated[float, Range(0.0, 10_000.0)] = 5.0
    """Milliseconds that a response waits for others of its request."""
    connections: Annotated[int, Range(1, 1024)] = 8
    """Requests to one server at the same time."""
    attempt_limit_s: Annotated[float | None, Range(0.01, 86400.0)] = None
    """Seconds after which a request is sent again. null: half of `environment.time_limit_s`."""
    attempts: Annotated[int, Range(1, 1000)] = 8
    """Times that a response is sent (again after a connection error, a time-out, or status 429 or
    5xx) before it counts as a failure."""
    backoff_s: Annotated[float, Range(0.0, 3600.0)] = 0.2
    """Seconds before the second attempt, doubled before each further one, less a random part of up
    to half."""
    longest_backoff_s: Annotated[float, Range(0.0, 3600.0)] = 2.0
    """Longest pause in seconds between two attempts."""
    breaker_failures: Annotated[int, Range(1, 10**6)] = 10
    """Failed requests in a row after which the server gets nothing for `breaker_pause_s`, then one
    request as a probe. Waiting responses use up their time limit, not their attempts."""
    breaker_pause_s: Annotated[float, Range(0.01, 3600.0)] = 1.0
    """Seconds between two probes of a failed server."""

    def check(self) -> None:
        check_variable(self.token_variable, "environment.remote.token_variable")


class RewardServerConfig(Config):
    """The HTTP server of `megarl serve-reward`, which scores the responses of training runs."""

    host: Annotated[str, Needs("set it to 127.0.0.1 or 0.0.0.0")] = "127.0.0.1"
    """Address to listen on; `0.0.0.0`: all networks. Any but a loopback address requires a
    token."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port to listen on; 0: a free one, named in the first line of output."""
    token_variable: str = "MEGARL_REWARD_TOKEN"  # noqa: S105 - a name
    """Environment variable with the bearer token. If it is set, every request but `GET /health`
    needs the token."""
    queue_samples: Annotated[int, Range(1, 10**7)] = 4096
    """Responses that may wait; a request beyond is answered with 429."""
    max_request_mib: Annotated[int, Range(1, 4096)] = 16
    """Largest request in MiB; a larger one is answered with 413."""
    connections: Annotated[int, Range(1, 65536)] = 256
    """Most connections; a request beyond is answered with 503."""
    read_limit_s: Annotated[float, Range(0.1, 3600.0)] = 30.0
    """Seconds within which a request's body must arrive, else 408."""
    drain_s: Annotated[float, Range(0.0, 60.0)] = 10.0
    """Seconds after SIGTERM in which begun requests are answered."""

    def check(self) -> None:
        check_variable(self.token_variable, "server.token_variable")


NO_SESSIONS: dict[str, Any] = {
    "session": "",
    "tools": ToolsConfig(),
    "agent": AgentConfig(),
    "max_turns": 0,
    "threads": 1,
}
"""{setting of `EnvironmentConfig`: value} without sessions."""
SECTIONS = ("regex", "json_schema", "math", "numeric", "choice", "format", "length", "code")
"""Verifiers whose settings are a section of the same name."""
MARKED = ("exact_match", "numeric", "choice", "reasoning_gym")
"""Verifiers that read `answer_after`."""
OWN_TOOLS = "but a session class brings its own tools"
TURNS = Of(
    "has_sessions",
    why="but a verifier has one turn",
    fix="set environment.session, environment.tools or environment.agent",
)
MAPPING = Excludes("rewards", "which adds up rewards as they are")


class EnvironmentConfig(NamedVerifierConfig):
    """How responses become rewards: verifier, session or tools, rewards, and limits of the worker
    processes.
    """

    verifier: Annotated[CodeText, Needs("set 'exact_match', 'math' or 'file.py:function'")] = (
        "exact_match"
    )
    """`exact_match`, `math` (boxed or final expression, compared by value), `numeric`, `choice`,
    `regex`, `json_schema`, `format`, `length`, `code` (docs/reference_rewards.md), `reasoning_gym`
    (the scorer of the prompts' data set), `path/to/file.py:function` (docs/rewards.md),
    `http://host:port/v1/score` (a reward server), or `none` where `reward_models` alone give the
    reward."""
    rewards: Annotated[
        dict[CodeText, float], WEIGHT, Excludes("verifier", "which may be one of them")
    ] = {}
    """Reward functions with their weights, instead of `verifier`, such as `{math: 1.0,
    "style.py:brevity": 0.2}`; also reward servers. The reward is the weighted sum; the first
    function says what is correct."""
    mixture: Annotated[
        dict[str, NamedVerifierConfig], Excludes("rewards"), Excludes("verifier")
    ] = {}
    """{name: verifier} of a mixture of data, instead of `verifier`; each prompt names its own
    (`prompts.sources`, `prompts.environment_column`)."""
    remote: Annotated[
        RemoteConfig,
        Of("asks_servers", why="but no verifier is a server (http://host:port/v1/score)", fix=""),
    ] = section(RemoteConfig)
    session: Annotated[CodeText, Excludes("tools.are_used", OWN_TOOLS)] = ""
    """`path/to/file.py:Class` of a multi-turn environment (docs/environments.md), which scores its
    rollouts itself or leaves that to `verifier` or `rewards`; or `gymnasium`, `textarena` or
    `openenv`, for prompts of the `prompts.source` of that name."""
    max_turns: Annotated[int, Range(0, 100_000), TURNS] = 0
    """With a session or tools: most turns of the model; a rollout that needs more is cut off and
    wrong. 0: no limit but `rollout.max_new_tokens`."""
    control_tokens: Annotated[bool, TURNS] = False
    """With a session or tools: a control token such as `<|im_end|>`, spelled in text that the model
    has not written, is that token; otherwise it is ordinary text."""
    threads: Annotated[int, Range(1, 1024), TURNS] = 1
    """With a session or tools: plain (not `async`) functions that a worker process runs at a time.
    Above 1 only for functions that may run beside one another."""
    concurrency: Annotated[int, Range(1, 4096)] = 32
    """`async` reward functions that a worker process has under way at a time, each with its own
    `time_limit_s`."""
    tools: Annotated[
        ToolsConfig, Of("tools.are_used", why="but neither functions nor servers", fix="set one")
    ] = section(ToolsConfig)
    """Tools that the model may call; its last response is scored by `verifier` or `rewards`."""
    agent: Annotated[
        AgentConfig,
        Excludes("session"),
        Excludes("tools.are_used", "but an agent brings its own tools"),
        Of("agent.is_used", why="but neither a command nor a function", fix="set one"),
    ] = section(AgentConfig)
    """A program or function that calls the model as an OpenAI-compatible server; `verifier` or
    `rewards` score its answer."""
    thinking: tuple[str, ...] | None = ()
    """Tags around what the model thinks, such as `[<think>, </think>]`: built-in verifiers read
    what follows the last closing tag, and nothing if the thinking does not end. Empty: the chat
    template's, else `<think>` and `</think>`. null: responses are read whole."""
    correct: Annotated[float, Range(-1e6, 1e6), MAPPING] = 1.0
    """Reward of a correct answer."""
    wrong: Annotated[float, Range(-1e6, 1e6), MAPPING] = 0.0
    """Reward of a wrong answer."""
    unscored: Annotated[float | None, Range(-1e9, 1e9)] = None
    """Reward of a rollout without a score: cut off (`require_stop`), or failed with `on_failure:
    wrong`. null: that of a wrong answer."""
    on_failure: Literal["leave_out", "wrong"] = "leave_out"
    """What becomes of a rollout whose verifier, session or agent failed: `leave_out`, it counts
    nowhere and is replaced once; `wrong`, it has the reward `unscored`. A function that uses up its
    time limit on a response makes it wrong, not failed."""
    require_stop: bool = True
    """A response that was cut off at the token limit is wrong."""
    overlong: OverlongConfig = section(OverlongConfig)
    num_workers: Annotated[int, Range(1, 1024)] = 1
    """Processes that decode responses and run verifier or sessions."""
    time_limit_s: Annotated[float, Range(0.01, 86400.0)] = 10.0
    """Seconds for a verifier call or session step, or for all attempts at a reward server. A sample
    beyond it failed, or is wrong if a function computed on it (`on_failure`)."""
    load_limit_s: Annotated[float, Range(0.1, 86400.0)] = 60.0
    """Seconds for loading your file in the check before a run; importing torch takes 10 on a busy
    machine."""
    memory_limit_mib: Annotated[int | None, Range(64, 2**24)] = None
    """Memory of a worker process in MiB (Linux). null: 512 for a built-in verifier, no limit for
    your file."""
    isolate: bool = True
    """Isolate your file's process, or tools (Linux with Landlock): it cannot read variables and
    memory of other processes nor signal them, and has no environment variables with the words
    TOKEN, KEY, SECRET, PASSWORD or CREDENTIALS. Set it to false for programs that change the user,
    such as sudo or rootless Podman."""
    pass_variables: tuple[str, ...] = ()
    """Environment variables that isolated processes and MCP servers get all the same, such as
    `[OPENAI_API_KEY]`. Their values are written nowhere."""
    start_limit_s: Annotated[float, Range(0.01, 86400.0)] = 60.0
    """Seconds for a session's start; beyond it the sample failed."""
    max_failure_share: Annotated[float, Range(0.0, 1.0)] = 0.5
    """Share of failed responses (error, time-out, no number) of a step or evaluation at which the
    run ends; 1: only if all fail. A tenth is a warning."""

    def check(self) -> None:
        require(
            not self.tools.are_used or self.time_limit_s > self.tools.time_limit_s,
            f"environment.time_limit_s is {self.time_limit_s:g}, within which a turn's calls of"
            f" {self.tools.time_limit_s:g} s (environment.tools.time_limit_s) may not be made;"
            " raise it",
        )
        require(
            not self.rewards or any(self.rewards.values()) or self.overlong.limit_tokens > 0,
            f"environment.rewards weighs {', '.join(self.rewards)} with 0, so that all rewards are"
            " equal and nothing can be learned; set a weight other than 0",
        )
        require(
            all(map(VARIABLE.fullmatch, self.pass_variables)),
            "environment.pass_variables holds what is no name of an environment variable in capital"
            " letters; set it to names, such as [OPENAI_API_KEY], never to a key itself",
        )
        require(
            not self.remote.token_variable or self.remote.token_variable not in self.pass_variables,
            f"environment.pass_variables names {self.remote.token_variable}, which is kept from all"
            " verifiers (environment.remote.token_variable); use two variables, or leave one out",
        )
        for name in self._remote_names():
            check_address(name, f"environment.{'rewards' if self.rewards else 'verifier'}")
        require(
            not self.thinking or (len(set(self.thinking)) == 2 and all(self.thinking)),
            f"environment.thinking is {list(self.thinking or ())}; set an opening and a closing tag"
            " that differ, such as [<think>, </think>], or null",
        )

        self._check_settings()

    def _check_settings(self) -> None:
        """Raise `ValueError` for settings of an unused verifier, or missing ones of a used one."""
        names, length = self.names_used, self.length
        instead = f" ({', '.join(filter(None, names))} is)" if names else " (a session scores)"
        if self.mixture:
            instead = " outside of environment.mixture (settings belong to its entries)"
        for name in SECTIONS:
            require(
                name in names or self.is_default(name),
                f"environment.{name} has settings, but the verifier '{name}' is not used"
                f"{instead}; leave them out, or use the verifier '{name}'",
            )
        require(
            "regex" not in names or self.regex.pattern or self.regex.answer_is_pattern,
            "environment.regex.pattern is empty; set a regular expression with one group around the"
            " answer, or environment.regex.answer_is_pattern",
        )
        require(
            "json_schema" not in names or self.json_schema.schema or self.json_schema.schema_column,
            "environment.json_schema.schema and environment.json_schema.schema_column are empty;"
            " set one of the two",
        )
        if "length" not in names:
            return
        targeted = length.kind.startswith("l1")
        require(
            length.longest > 0 or targeted,
            "environment.length.longest is 0; set the length at which the reward of length stops to"
            " change",
        )
        require(
            length.target or length.target_column or not targeted,
            f"environment.length.kind is '{length.kind}', but length.target and"
            " length.target_column are not set; set one of the two",
        )
        require(
            length.kind == "linear" or length.verifier not in ("", "none", "length", "format"),
            f"environment.length.kind is '{length.kind}', which needs to know whether a response is"
            f" correct, but length.verifier is '{length.verifier}'; set a verifier that compares"
            " answers, such as math",
        )

    def _remote_names(self) -> list[str]:
        return [name for name in self.rewards or (self.verifier,) if is_remote(name)]

    @property
    def asks_servers(self) -> bool:
        """Whether any verifier or reward function is a reward server."""
        return any(environment._remote_names() for environment in self.named_parts.values())

    @property
    def names_used(self) -> list[str]:
        """All verifiers and reward functions that score responses; empty with `mixture`, whose
        entries have their own.
        """
        if self.mixture:
            return []
        names = list(self.rewards) or [self.verifier]
        return [*names, self.length.verifier] if "length" in names else names

    @property
    def reads_marker(self) -> bool:
        """Whether a verifier that reads `answer_after` is used; False with `mixture`."""
        return bool(set(MARKED) & set(self.names_used))

    @property
    def compares_answers(self) -> list[str]:
        """The used built-in verifiers that compare with a reference answer."""
        needs_none = {"none", "format", "length", "code"} | (
            set() if self.json_schema.value else {"json_schema"}
        )
        return [name for name in self.names_used if ":" not in name and name not in needs_none]

    @property
    def named_parts(self) -> dict[str, Self]:
        """{name in `mixture`: a copy with that entry's verifier, without mixture and sessions};
        without a mixture {"": this configuration}. Raises `ValueError` for an entry whose settings
        do not fit.
        """
        if not self.mixture:
            return {"": self}
        environments: dict[str, Self] = {}
        for name, entry in self.mixture.items():
            require(
                NAME.fullmatch(name) is not None,
                f"environment.mixture has a name {name!r:.80}; use letters, digits, _ and - in at"
                " most 40 characters",
            )
            asks = any(map(is_remote, entry.rewards or (entry.verifier,)))
            own = dict(entry) | {"remote": self.remote if asks else RemoteConfig()}
            try:
                environments[name] = replace(self, mixture={}, **NO_SESSIONS, **own)
            except ValueError as error:
                raise ValueError(f"environment.mixture.{name}: {error}") from None
        return environments

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The part of `environ`, such as `os.environ`, that worker processes may have: with
        `isolate` no secrets but those that the recipe names. Raises `ValueError` if one of these is
        missing.
        """
        named = dict.fromkeys(self.pass_variables, "pass_variables")
        for server, name in self.tools.server_tokens.items():
            named[name] = f"tools.server_tokens.{server}"
        for name, setting in named.items():
            require(
                name in environ,
                f"environment.{setting} names {name}, but that environment variable is not"
                " set; export it before the run, and before Ray if that was started by hand",
            )
        return {
            name: value
            for name, value in environ.items()
            if not self.isolate or name in named or not SECRET.search(name)
        }

    @property
    def programs(self) -> dict[str, CodeConfig]:
        """{name in `mixture`, or "": settings of the verifier `code`} where it is used."""
        parts = self.named_parts.items()
        return {name: scorer.code for name, scorer in parts if "code" in scorer.names_used}

    @property
    def has_sessions(self) -> bool:
        """Whether rollouts have several turns, by `session`, `tools` or `agent`."""
        return bool(self.session) or self.tools.are_used or self.agent.is_used

    @property
    def may_score_itself(self) -> bool:
        """Whether rollouts may end with a score that no verifier has given."""
        return bool(self.session) or self.agent.is_judge

    @property
    def needs_template(self) -> bool:
        """Whether worker processes write chats by the tokenizer's chat template."""
        return self.tools.are_used or self.agent.is_used

    def hiding(self, places: Iterable[str]) -> Self:
        """A copy in which `agent.hidden` has the paths `places` too, all absolute; without a
        program as agent this object.
        """
        if not self.agent.command:
            return self
        hidden = tuple(map(os.path.abspath, (*self.agent.hidden, *places)))
        return replace(self, agent=replace(self.agent, hidden=hidden))

    def within(self, longest: int, together: int) -> Self:
        """A copy with the agent's token limits filled in: `context_tokens` at most `longest`,
        `rollout_tokens` by default the larger of `longest` and `together`. Without an agent this
        object.
        """
        if not self.agent.is_used:
            return self
        limits = {
            "context_tokens": min(self.agent.context_tokens or longest, longest),
            "rollout_tokens": self.agent.rollout_tokens or max(longest, together),
        }
        return replace(self, agent=replace(self.agent, **limits))

    @property
    def needs_verifier(self) -> bool:
        """Whether a verifier must be loaded; not if a session class or agent alone gives scores. If
        these return an `Answer`, `exact_match` scores it.
        """
        named = self.verifier != "exact_match" or bool(self.rewards or self.mixture)
        return not self.may_score_itself or named

    def without_sessions(self) -> Self:
        """A copy without sessions, for the verifiers of their final answers."""
        return replace(self, **NO_SESSIONS)

    @property
    def maps_no_scores(self) -> bool:
        """Whether the score is the reward as it is; otherwise 0 to 1 is mapped to `wrong` to
        `correct`.
        """
        return (self.correct, self.wrong) == (1.0, 0.0)

"""The section `environment` of a recipe: which verifier or session scores rollouts, its limits on
time and memory, and how its score becomes a reward.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from megarl.settings.addresses import (
    SECRET,
    VARIABLE,
    check_address,
    check_variable,
    is_remote,
)
from megarl.settings.agents import AgentConfig
from megarl.settings.code import CodeConfig
from megarl.settings.limits import MOST_TOKENS
from megarl.settings.recipe_paths import CodeText
from megarl.settings.schema import Config, Excludes, Needs, Of, Range, replace, require, section
from megarl.settings.tools import ToolsConfig
from megarl.settings.verifiers import (
    WEIGHT,
    ChoiceConfig,
    FormatConfig,
    JsonSchemaConfig,
    LengthConfig,
    MathConfig,
    NamedVerifierConfig,
    NumericConfig,
    RegexConfig,
)

NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""Pattern of a name in `environment.mixture`; it becomes part of the names of metrics."""


class OverlongConfig(Config):
    """DAPO's soft length penalty (arXiv:2503.14476): 0 up to `limit - buffer` response tokens, then
    falling linearly to -1 at `limit`.
    """

    limit_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Response length in tokens at which the penalty reaches -1; 0 turns it off."""
    buffer_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Number of tokens before the limit over which the penalty falls from 0 to -1."""

    def check(self) -> None:
        require(
            self.limit_tokens == 0 or 0 < self.buffer_tokens <= self.limit_tokens,
            f"environment.overlong.buffer_tokens is {self.buffer_tokens}; set it between 1 and"
            f" limit_tokens ({self.limit_tokens}), or limit_tokens to 0 to turn the penalty off",
        )


class RemoteConfig(Config):
    """How a run sends responses by HTTP to reward servers, which score them: batches, connections,
    attempts and a circuit breaker. The servers' addresses are values of `environment.verifier` or
    `environment.rewards`.
    """

    token_variable: str = ""
    """Name of the environment variable that holds the bearer token for the servers; empty: none is
    sent. All servers of a recipe get the same token."""
    batch_size: Annotated[int, Range(1, 4096)] = 32
    """Most responses in one request."""
    linger_ms: Annotated[float, Range(0.0, 10_000.0)] = 5.0
    """Milliseconds that a response waits for others to fill its request."""
    connections: Annotated[int, Range(1, 1024)] = 8
    """Requests to one server at the same time."""
    attempt_limit_s: Annotated[float | None, Range(0.01, 86400.0)] = None
    """Seconds after which an unanswered request is given up and sent again. None: half of
    `environment.time_limit_s`."""
    attempts: Annotated[int, Range(1, 1000)] = 8
    """Times that a response is sent before it counts as a failure: after a connection error, a
    time-out, or status 429 or 5xx. Other errors are not tried again."""
    backoff_s: Annotated[float, Range(0.0, 3600.0)] = 0.2
    """Pause in seconds before the second attempt. It doubles with each further attempt; each pause
    is shortened by a random part of up to half of it."""
    longest_backoff_s: Annotated[float, Range(0.0, 3600.0)] = 2.0
    """Longest pause in seconds between two attempts."""
    breaker_failures: Annotated[int, Range(1, 10**6)] = 10
    """After so many failed requests in a row (connection error, time-out, 429, 5xx) the circuit
    breaker opens: nothing is sent to the server for `breaker_pause_s`, then one request as a
    probe, whose success closes it. Responses that wait meanwhile use up their time limit, not
    their attempts."""
    breaker_pause_s: Annotated[float, Range(0.01, 3600.0)] = 1.0
    """Seconds between two probes of a server whose circuit breaker is open."""

    def check(self) -> None:
        check_variable(self.token_variable, "environment.remote.token_variable")


class RewardServerConfig(Config):
    """The HTTP server of `megarl serve-reward`, which scores the responses that training runs send:
    where it listens, and how many requests it accepts.
    """

    host: Annotated[str, Needs("set it to 127.0.0.1 or 0.0.0.0")] = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for every network of the machine. On any but a loopback
    address a token is required."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port to listen on; 0 takes a free one, which the first line that the server prints names."""
    token_variable: str = "MEGARL_REWARD_TOKEN"  # noqa: S105 - a name
    """Name of the environment variable that holds the bearer token. If the variable is set, every
    request but `GET /health` needs the token."""
    queue_samples: Annotated[int, Range(1, 10**7)] = 4096
    """Responses that may wait for the verifier or the reward model; a request that would exceed
    this is answered with 429."""
    max_request_mib: Annotated[int, Range(1, 4096)] = 16
    """Largest request in MiB; a larger one is answered with 413."""
    connections: Annotated[int, Range(1, 65536)] = 256
    """Connections at the same time; a request beyond is answered with 503."""
    read_limit_s: Annotated[float, Range(0.1, 3600.0)] = 30.0
    """Seconds within which a request's body must arrive; otherwise it is answered with 408."""
    drain_s: Annotated[float, Range(0.0, 60.0)] = 10.0
    """Seconds after SIGTERM within which requests under way are still answered."""

    def check(self) -> None:
        check_variable(self.token_variable, "server.token_variable")


NO_SESSIONS: dict[str, Any] = {
    "session": "",
    "tools": ToolsConfig(),
    "agent": AgentConfig(),
    "max_turns": 0,
    "threads": 1,
}
"""{setting of `EnvironmentConfig`: value} of an environment without sessions."""
SECTIONS = ("regex", "json_schema", "math", "numeric", "choice", "format", "length", "code")
"""Names of verifiers whose settings are a section of the same name."""
MARKED = ("exact_match", "numeric", "choice", "reasoning_gym")
"""Verifiers that read `answer_after`."""
OWN_TOOLS = "but a session class brings its own tools"
TURNS = Of(
    "has_sessions",
    why="but a verifier has one turn",
    fix="set environment.session, environment.tools or environment.agent",
)
MAPPING = Excludes("rewards", "which adds up rewards as they are")


class EnvironmentConfig(Config):
    """How the responses of a run become rewards: the verifier that scores them, or the session
    class or tools of a multi-turn environment, the rewards, and the limits of the worker processes
    on time and memory.
    """

    verifier: Annotated[CodeText, Needs("set 'exact_match', 'math' or 'file.py:function'")] = (
        "exact_match"
    )
    """`exact_match`, `math` (boxed or final expression, compared by value), `numeric`,
    `choice`, `regex`, `json_schema`, `format`, `length`, `code` (docs/reference_rewards.md),
    `reasoning_gym` (the scorer of the prompts' own data set),
    `path/to/file.py:function` for a user's function (docs/rewards.md),
    `http://host:port/v1/score` for a reward server, or `none` where `reward_models` alone give the
    reward."""
    rewards: Annotated[
        dict[CodeText, float], WEIGHT, Excludes("verifier", "which may be one of them")
    ] = {}
    """Several reward functions with their weights, used instead of `verifier`; for example
    `{math: 1.0, "style.py:brevity": 0.2}`, also addresses of reward servers. The reward is the
    weighted sum; the first function says what counts as correct."""
    mixture: Annotated[
        dict[str, NamedVerifierConfig], Excludes("rewards"), Excludes("verifier")
    ] = {}
    """{name: verifier} of a mixture of data, used instead of `verifier`: each prompt names the
    verifier that scores its responses (`prompts.sources`, `prompts.environment_column`)."""
    remote: Annotated[
        RemoteConfig,
        Of("asks_servers", why="but no verifier is a server (http://host:port/v1/score)", fix=""),
    ] = section(RemoteConfig)
    """How responses travel to reward servers."""
    session: Annotated[CodeText, Excludes("tools.are_used", OWN_TOOLS)] = ""
    """`path/to/file.py:Class` for a multi-turn environment (docs/environments.md); it scores its
    rollouts itself, or leaves that to `verifier` or `rewards`. `gymnasium`, `textarena` or
    `openenv`: the environment of a prompt that `prompts.source` of that name has made."""
    max_turns: Annotated[int, Range(0, 100_000), TURNS] = 0
    """With a session or tools: most turns of the model in a rollout; a rollout that would need more
    is cut off and counts as wrong. 0: no limit but `rollout.max_new_tokens`."""
    control_tokens: Annotated[bool, TURNS] = False
    """With a session or tools: text of others (results of tools, an agent's messages, observations
    of the role user) that spells a control token of the tokenizer, such as `<|im_end|>`, is that
    token; otherwise it is ordinary text."""
    threads: Annotated[int, Range(1, 1024), TURNS] = 1
    """With a session or tools: calls of plain (not `async`) functions that each worker process runs
    at a time. More than 1 only for functions that may run beside one another."""
    concurrency: Annotated[int, Range(1, 4096)] = 32
    """Calls of `async` reward functions that each worker process has under way at the same time,
    each with its own `time_limit_s`. A process calls one plain function at a time."""
    tools: Annotated[
        ToolsConfig, Of("tools.are_used", why="but neither functions nor servers", fix="set one")
    ] = section(ToolsConfig)
    """Tools that the model may call; its last response, without a call, is scored by `verifier` or
    `rewards`."""
    agent: Annotated[
        AgentConfig,
        Excludes("session"),
        Excludes("tools.are_used", "but an agent brings its own tools"),
        Of("agent.is_used", why="but neither a command nor a function", fix="set one"),
    ] = section(AgentConfig)
    """A program or function that calls the model as an OpenAI-compatible server; its answer is
    scored by `verifier` or `rewards`."""
    code: CodeConfig = section(CodeConfig)
    """How the verifier `code` runs programs."""
    answer_after: str = ""
    """`exact_match`, `numeric`, `choice` and `reasoning_gym` read only the text after the last
    occurrence of this marker in the response; if empty, the whole response."""
    thinking: tuple[str, ...] | None = ()
    """Opening and closing tag of what the model thinks before it answers, such as `[<think>,
    </think>]`: the built-in verifiers read only what follows the last closing tag, and nothing if
    the thinking does not end. Empty: the tags that the model's chat template names, otherwise
    `<think>` and `</think>`. null: responses are read whole."""
    regex: RegexConfig = section(RegexConfig)
    json_schema: JsonSchemaConfig = section(JsonSchemaConfig)
    math: MathConfig = section(MathConfig)
    numeric: NumericConfig = section(NumericConfig)
    choice: ChoiceConfig = section(ChoiceConfig)
    format: FormatConfig = section(FormatConfig)
    length: LengthConfig = section(LengthConfig)
    correct: Annotated[float, Range(-1e6, 1e6), MAPPING] = 1.0
    """Reward of a correct answer."""
    wrong: Annotated[float, Range(-1e6, 1e6), MAPPING] = 0.0
    """Reward of a wrong answer."""
    unscored: Annotated[float | None, Range(-1e9, 1e9)] = None
    """Reward of a rollout without a score: cut off at the token limit (`require_stop`), or, with
    `on_failure: wrong`, its verifier failed. None: the reward of a wrong answer."""
    on_failure: Literal["leave_out", "wrong"] = "leave_out"
    """What becomes of a rollout whose verifier, session or agent failed: `leave_out`, it is not
    trained on and counts in no mean, and the group gets another rollout in its place, once;
    `wrong`, it has the reward `unscored`. A function that computes on a response until its time
    limit gives no failure but a wrong answer."""
    require_stop: bool = True
    """Treat a response that was cut off at the token limit as wrong."""
    overlong: OverlongConfig = section(OverlongConfig)
    """Length penalty added to the reward."""
    num_workers: Annotated[int, Range(1, 1024)] = 1
    """Processes that decode responses and run the verifier or the sessions."""
    time_limit_s: Annotated[float, Range(0.01, 86400.0)] = 10.0
    """Time limit of a verifier call or session step, in seconds; of a reward server for all
    attempts at a response together. Beyond it the sample is a failure, or wrong if the function
    has computed on it (`on_failure`); the run goes on."""
    load_limit_s: Annotated[float, Range(0.1, 86400.0)] = 60.0
    """Time limit in seconds for loading the verifier's or session's file in the check before a run.
    Importing torch takes 10 s on a busy machine."""
    memory_limit_mib: Annotated[int | None, Range(64, 2**24)] = None
    """Memory of a worker process in MiB (Linux); a verifier that asks for more fails. None: 512 for
    a built-in verifier, no limit for a user's file."""
    isolate: bool = True
    """Whether the process of a file of yours, or of tools, is kept from reading the environment
    variables and memory of other processes, and from signals to them (Linux with Landlock), and has
    no environment variables with TOKEN, KEY, SECRET, PASSWORD or CREDENTIALS as a word of their
    names. Set it to false if your code starts programs that change the user, such as sudo or
    rootless Podman."""
    pass_variables: tuple[str, ...] = ()
    """Names of environment variables that isolated processes and MCP servers have all the same,
    such as `[OPENAI_API_KEY]`. Their values are written nowhere."""
    start_limit_s: Annotated[float, Range(0.01, 86400.0)] = 60.0
    """Time limit of a session's start, in seconds; beyond it the sample counts as a failure."""
    max_failure_share: Annotated[float, Range(0.0, 1.0)] = 0.5
    """The run ends if the verifier or session fails (error, time-out, no number) for at least this
    fraction of the responses of a step or an evaluation; 1 ends it only if all fail. A tenth of
    failures is a warning."""

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
        """Raise `ValueError` for settings of a verifier that is not used, and for a verifier
        without the settings that it needs.
        """
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
        """Whether any verifier or reward function of the recipe, those in `mixture` included, is a
        reward server, given by its HTTP address.
        """
        return any(part._remote_names() for part in self.named_parts.values())

    @property
    def names_used(self) -> list[str]:
        """Names of all verifiers and reward functions that score responses, `length.verifier`
        included, which the verifier `length` asks. Empty if `mixture` is set, whose entries have
        verifiers of their own.
        """
        if self.mixture:
            return []
        names = list(self.rewards) or [self.verifier]
        return [*names, self.length.verifier] if "length" in names else names

    @property
    def reads_marker(self) -> bool:
        """Whether a verifier of `MARKED`, such as `exact_match`, is used. These read the setting
        `answer_after`: a marker, only the text after which is the answer. False if `mixture` is
        set.
        """
        return bool(set(MARKED) & set(self.names_used))

    @property
    def compares_answers(self) -> list[str]:
        """Names of the built-in verifiers that are used and compare the response with the prompt's
        reference answer, so that the data must have answers.
        """
        needs_none = {"none", "format", "length", "code"} | (
            set() if self.json_schema.value else {"json_schema"}
        )
        return [name for name in self.names_used if ":" not in name and name not in needs_none]

    @property
    def named_parts(self) -> dict[str, Self]:
        """The configuration of each verifier of a mixture of data: {name in the table `mixture`: a
        copy of this configuration with that entry's verifier, without mixture, session class and
        tools}. Without a mixture {"": this configuration}. Raises `ValueError` that names the entry
        whose settings do not fit.
        """
        if not self.mixture:
            return {"": self}
        found: dict[str, Self] = {}
        for name, entry in self.mixture.items():
            require(
                NAME.fullmatch(name) is not None,
                f"environment.mixture has a name {name!r:.80}; use letters, digits, _ and - in at"
                " most 40 characters",
            )
            asks = any(map(is_remote, entry.rewards or (entry.verifier,)))
            own = dict(entry) | {"remote": self.remote if asks else RemoteConfig()}
            try:
                found[name] = replace(self, mixture={}, **NO_SESSIONS, **own)
            except ValueError as error:
                raise ValueError(f"environment.mixture.{name}: {error}") from None
        return found

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment variables {name: value} that a worker process for verifiers, sessions or
        tools may have, out of `environ`, such as `os.environ`. With `isolate`, variables whose
        names look like secrets (TOKEN, KEY, ...) are left out unless the recipe names them. Raises
        `ValueError` if a variable that the recipe names is not in `environ`.
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
        """The settings of the verifier `code`, which runs programs that the model wrote against
        tests, wherever the recipe uses it: {name in `mixture`, or "" without a mixture: settings}.
        Empty if nothing uses `code`.
        """
        parts = self.named_parts.items()
        return {name: part.code for name, part in parts if "code" in part.names_used}

    @property
    def has_sessions(self) -> bool:
        """Whether each rollout has several turns, in which an object, its session, replies to the
        model: true if the recipe sets `session` (a class), `tools` or `agent`.
        """
        return bool(self.session) or self.tools.are_used or self.agent.is_used

    @property
    def may_score_itself(self) -> bool:
        """Whether the rollouts may end with a score that no verifier has given: those of a session
        class, an agent's function, or a program that scores itself.
        """
        return bool(self.session) or self.agent.is_judge

    @property
    def needs_template(self) -> bool:
        """Whether worker processes write chats by the tokenizer's chat template: with tools and
        agents.
        """
        return self.tools.are_used or self.agent.is_used

    def hiding(self, places: Iterable[str]) -> Self:
        """A copy in which `places`, paths of files and folders, are added to `agent.hidden` and all
        its paths are absolute; this object itself if no program is the agent.
        """
        if not self.agent.command:
            return self
        hidden = tuple(map(os.path.abspath, (*self.agent.hidden, *places)))
        return replace(self, agent=replace(self.agent, hidden=hidden))

    def within(self, longest: int, together: int) -> Self:
        """A copy whose agent has its limits of tokens filled in; this object itself if the recipe
        has no agent. `agent.context_tokens` becomes `longest` if it is 0 or larger.
        `agent.rollout_tokens`, if it is 0, becomes the larger of `longest` and `together`.
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
        """Whether a verifier must be loaded before the run. False only if the recipe has a session
        class or an agent and sets no verifier: these may return scores themselves. If they return
        an `Answer` instead of a score, `exact_match` scores the answer.
        """
        named = self.verifier != "exact_match" or bool(self.rewards or self.mixture)
        return not self.may_score_itself or named

    def without_sessions(self) -> Self:
        """A copy of the configuration without session class and tools, for verifiers that score the
        final answers of sessions.
        """
        return replace(self, **NO_SESSIONS)

    @property
    def maps_no_scores(self) -> bool:
        """Whether the verifier's score is the reward as it is: `correct` and `wrong` have their
        defaults 1 and 0. Otherwise a score from 0 to 1 is mapped linearly to the range from `wrong`
        to `correct`.
        """
        return (self.correct, self.wrong) == (1.0, 0.0)

"""Verifiers and reward functions: how good a response is.

    EnvironmentConfig --load_verifier--> (prompt, response) -> the score, or an awaitable of it

A built-in verifier returns 1.0 for a right response and 0.0 for a wrong one. To add one, write a
function in `megarl/apps/verifiers` that makes it from the configuration, and name it in
`VERIFIERS`. A user's (docs/rewards.md) may be async, may raise and may hang.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.environments.response_text import TAGS, after_last, answer_part, without_thousands
from megarl.environments.scores import BadScore, Score, add_up, read_score
from megarl.environments.signatures import RewardFunction, recognised
from megarl.environments.user_code import Sources, own_function, split_name
from megarl.settings.addresses import is_remote
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import require
from megarl.system import lookup
from megarl.types import Prompt

Verifier = Callable[[Prompt, str], Any]
"""(prompt, response text) -> a number, a dict with `reward`, a `Score`, or an awaitable of one."""


def exact_match(config: EnvironmentConfig) -> Verifier:
    """Make the verifier `exact_match`: 1.0 if the text after the last `config.answer_after` equals
    the reference answer, but for surrounding white space and thousands separators, else 0.0.
    """
    marker = config.answer_after

    async def verify(prompt: Prompt, response: str) -> float:
        answer = after_last(marker, response)
        if answer is None:
            return 0.0
        return float(without_thousands(answer) == without_thousands(prompt.answer))

    return verify


def no_verifier(config: EnvironmentConfig) -> Verifier:
    """Make the verifier `none`: always 0.0, where reward models alone score."""

    async def verify(prompt: Prompt, response: str) -> float:
        return 0.0

    return verify


VERIFIERS = {
    "exact_match": "megarl.environments.verifiers:exact_match",
    "math": "megarl.apps.verifiers.mathematics:math",
    "code": "megarl.apps.verifiers.code.code_verifier:code",
    "numeric": "megarl.apps.verifiers.numeric:numeric",
    "choice": "megarl.apps.verifiers.matching:choice",
    "regex": "megarl.apps.verifiers.matching:regex",
    "json_schema": "megarl.apps.verifiers.json_schema:json_schema",
    "format": "megarl.apps.verifiers.matching:format",
    "length": "megarl.apps.verifiers.length:length_reward",
    "reasoning_gym": "megarl.apps.adapters.reasoning:verifier",
    "none": "megarl.environments.verifiers:no_verifier",
}
"""{name of a built-in verifier: "module:function" that makes it from the configuration}"""
OTHERS = f"one of {', '.join(VERIFIERS)}, or to "
OTHER_SESSIONS = f"one of {', '.join(lookup.SESSIONS)}, or to "
"""What a setting may be besides a user's function, or session class, for messages."""


def import_built_in(config: EnvironmentConfig) -> None:
    """Import the recipe's built-in verifiers before files of the user's, which may hide a library,
    are on `sys.path`.
    """
    others = {entry.length.verifier for entry in config.named_parts.values()}
    for name in {*named(config), *others} & VERIFIERS.keys():
        lookup.load(VERIFIERS[name])


def built_in(name: str, config: EnvironmentConfig) -> Callable[[Prompt, str], Awaitable[Any]]:
    """Make a built-in verifier. It does not read thinking, but `length` does, and `format` if
    `format.tags` has the tag of thinking.
    """
    verify: Callable[[Prompt, str], Awaitable[Any]] = lookup.load(VERIFIERS[name])(config)
    tags = {f"<{tag}>" for tag in config.format.tags}
    if name == "length" or (name == "format" and (config.thinking or TAGS)[0] in tags):
        return verify

    def verify_answer(prompt: Prompt, response: str) -> Awaitable[Any]:
        return verify(prompt, answer_part(response, config.thinking, prompt.text))

    return verify_answer


def named(config: EnvironmentConfig) -> dict[str, float]:
    """{verifier or reward function as the recipe writes it: weight}; with a mixture, of all
    entries.
    """
    if config.mixture:
        return {
            name: weight
            for entry in config.named_parts.values()
            for name, weight in named(entry).items()
        }
    return dict(config.rewards) or {config.verifier: 1.0}


def local(config: EnvironmentConfig) -> dict[str, float]:
    """As `named`, without the reward servers."""
    return {name: weight for name, weight in named(config).items() if not is_remote(name)}


def setting_of(config: EnvironmentConfig) -> str:
    """The recipe's key of the code which scores, such as "environment.rewards"."""
    if config.session:
        return "environment.session"
    if config.tools.are_used:
        return "environment.tools"
    if config.agent.is_used:
        return "environment.agent"
    if config.mixture:
        return "environment.mixture"
    return "environment.rewards" if config.rewards else "environment.verifier"


def own_files(config: EnvironmentConfig) -> list[Path]:
    """Paths, as the recipe has them, of the user's files. Raises `ValueError` if one is missing or
    a name is unknown.
    """
    setting = setting_of(config)
    if config.session in lookup.SESSIONS:
        return []
    if config.session:
        return [split_name(config.session, setting, OTHER_SESSIONS)[0]]
    if config.tools.are_used:
        functions = config.tools.functions
        return list(
            dict.fromkeys(split_name(name, f"{setting}.functions")[0] for name in functions)
        )
    if config.agent.is_used:
        name = config.agent.function
        if not name or name in lookup.AGENTS:
            return []
        return [split_name(name, f"{setting}.function")[0]]
    paths = [split_name(name, where, OTHERS)[0] for where, name in _own_functions(config)]
    return list(dict.fromkeys(paths))


def _own_functions(config: EnvironmentConfig) -> Iterator[tuple[str, str]]:
    """Yield (the recipe's key, a user's reward function that it names)."""
    for part_name, entry in config.named_parts.items():
        where = f"environment.mixture.{part_name}: " if part_name else ""
        for name in local(entry):
            if name not in VERIFIERS:
                yield f"{where}{setting_of(entry)}", name


def load_functions(
    config: EnvironmentConfig, sources: Sources | None = None
) -> dict[str, RewardFunction]:
    """{`path/to/file.py:function`: the user's reward function in a common form}. `sources`: used in
    place of the disk. Raises `ValueError` if a file or function cannot be loaded.
    """
    return {
        name: recognised(own_function(name, where, OTHERS, sources), name, where)
        for where, name in _own_functions(config)
    }


def load_verifier(
    config: EnvironmentConfig, functions: Mapping[str, RewardFunction] | None = None
) -> Verifier:
    """Make the function that scores responses in a worker process: the recipe's verifier, the
    weighted sum of its reward functions, or of a mixture the one that the prompt names. Reward
    servers are left out; if only servers score, it returns 0. `functions`: of `load_functions`;
    None: load them. Raises `ValueError` as it does.
    """
    functions = load_functions(config) if functions is None else functions
    if config.mixture:
        return _by_name(config, functions)
    weights = local(config)
    loaded = {name: _load_one(name, config, functions) for name in weights}
    if not loaded:
        return no_verifier(config)
    if not config.rewards:
        return loaded[config.verifier]
    short = short_names(list(named(config)))
    # A plain function may start an event loop of its own, so it is called outside of any.
    plain = [name for name in loaded if name in functions and not functions[name].is_async]

    def verify(prompt: Prompt, response: str) -> Awaitable[Score]:
        results: dict[str, Any] = {}
        for name in plain:
            with _naming(short[name]):
                results[name] = loaded[name](prompt, response)
        return total(prompt, response, results)

    async def total(prompt: Prompt, response: str, results: dict[str, Any]) -> Score:
        """The weighted sum of all functions' scores. `results`: of the plain functions, by name."""
        parts = []
        for name, weight in weights.items():
            with _naming(short[name]):
                result = results[name] if name in results else loaded[name](prompt, response)
                score = read_score(await result if inspect.isawaitable(result) else result)
                parts.append((short[name], weight, score))
        return add_up(parts)

    return verify


def _by_name(config: EnvironmentConfig, functions: Mapping[str, RewardFunction]) -> Verifier:
    verifiers: dict[str, Verifier] = {}
    for name, entry in config.named_parts.items():
        try:
            verifiers[name] = load_verifier(entry, functions)
        except ValueError as error:
            raise ValueError(f"environment.mixture.{name}: {error}") from error
    return lambda prompt, response: verifiers[named_part(prompt, config)](prompt, response)


def named_part(prompt: Prompt, config: EnvironmentConfig) -> str:
    """The key of `environment.mixture` that `prompt` names. Raises `ValueError` if there is
    none.
    """
    require(
        prompt.environment in config.mixture,
        f"row {prompt.index} of the data names the verifier '{prompt.environment:.80}', which is"
        f" not in environment.mixture ({', '.join(config.mixture)})",
    )
    return prompt.environment


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """A context in which every exception's message begins with `name`. `BadScore` stays one; others
    become a `RuntimeError`.
    """
    try:
        yield
    except BadScore as error:
        raise BadScore(error.failure, f"{name}: {error}") from None
    except BaseException as error:
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error


def _load_one(
    name: str, config: EnvironmentConfig, functions: Mapping[str, RewardFunction]
) -> Verifier:
    if name in VERIFIERS:
        return built_in(name, config)
    function, is_alone = functions[name].call, len(local(config)) == 1

    def verify(prompt: Prompt, response: str) -> Any:
        if not is_alone:  # what a function does to the row is not for the others to see
            prompt = copy.deepcopy(prompt)
        return function(prompt, str(response))  # a plain text, not `response_text.Counted`

    return verify


def short_names(names: Sequence[str]) -> dict[str, str]:
    """{reward function as the recipe writes it: a short name for metrics}, no two alike: its name,
    with as much of the path as tells equal names apart; of a server the host, if need be with port
    and path.
    """
    short = {name: name for name in names if ":" not in name}
    for parts in range(max((len(Path(name).parts) for name in names), default=0) + 1):
        longer = {name: _with_parts(name, parts) for name in names if name not in short}
        counts = Counter([*longer.values(), *short.values()])
        short |= {name: candidate for name, candidate in longer.items() if counts[candidate] == 1}
    return {name: short.get(name, name) for name in names}


def _with_parts(name: str, count: int) -> str:
    """A name with `count` parts of the path: with 1, "a/b/file.py:check" gives "file.check", and
    "http://host:80/score" gives "host/80".
    """
    if is_remote(name):
        address = urlsplit(name)
        port = address.port or (443 if address.scheme == "https" else 80)
        return "/".join([address.hostname or "", f"{port}", *name.split("/")[3:]][: count + 1])
    file, _, function = name.rpartition(":")
    parts = Path(file).with_suffix("").parts
    return ".".join(["/".join(parts[-count:]), function]) if count else function


def load_session(config: EnvironmentConfig, sources: Sources | None = None) -> Callable[[], Any]:
    """Import the class that `config.session` names. `sources`: used in place of the disk. Raises
    `ValueError` if it cannot be loaded, or has no method `start` or `step`.
    """
    setting = "environment.session"
    if config.session in lookup.SESSIONS:
        return lookup.load(lookup.SESSIONS[config.session])()
    session = own_function(config.session, setting, OTHER_SESSIONS, sources)
    missing = [name for name in ("start", "step") if not callable(getattr(session, name, None))]
    require(
        not missing,
        f"{setting}: {config.session} has no method {' and no method '.join(missing)}; see"
        " megarl.environments.session",
    )
    return session

"""Verifiers and reward functions: they say how good a response is.

    EnvironmentConfig --load_verifier--> (prompt, response) -> the score, or an awaitable of it

A built-in verifier returns 1.0 for a right response and 0.0 for a wrong one. To add one, write a
function that makes it from the configuration, in `megarl/apps/verifiers`, and name it in
`VERIFIERS`. To use one of your own, write `environment.verifier: path/to/file.py:function`, or
several with weights in `environment.rewards`; docs/rewards.md says what it receives and returns. A
function of your own may be async, may raise and may hang: worker processes call it under a time
limit.
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
from megarl.environments.user_code import Sources, load_by_path, own_function, split_name
from megarl.settings.addresses import is_remote
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import require
from megarl.system import lookup
from megarl.types import Prompt

Verifier = Callable[[Prompt, str], Any]
"""A function (prompt, response text) -> a number, a dict with `reward`, a `Score`, or an awaitable
of one of these. It may raise and may be slow."""


def exact_match(config: EnvironmentConfig) -> Verifier:
    """Make the built-in verifier `exact_match`: (prompt, response) -> 1.0 if the text after the
    last `config.answer_after` marker equals the reference answer `prompt.answer`, else 0.0. If the
    marker is empty, the whole response is compared. Surrounding whitespace is ignored, and so are
    the thousands separators of a number: `1,234` equals `1234`.
    """
    marker = config.answer_after

    async def verify(prompt: Prompt, response: str) -> float:
        said = after_last(marker, response)
        if said is None:
            return 0.0
        return float(without_thousands(said) == without_thousands(prompt.answer))

    return verify


def no_verifier(config: EnvironmentConfig) -> Verifier:
    """Make the built-in verifier `none`: (prompt, response) -> 0.0 for every response, for runs
    whose rewards come from reward models alone.
    """

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
"""{name of a built-in verifier: "module:function" that makes it, (configuration) -> `Verifier`}"""
OTHERS = f"one of {', '.join(VERIFIERS)}, or to "
OTHER_SESSIONS = f"one of {', '.join(lookup.SESSIONS)}, or to "
"""What a setting may be besides a user's function, or session class, for messages."""


def import_built_in(config: EnvironmentConfig) -> None:
    """Import the modules of the built-in verifiers that the recipe uses. A worker process calls
    this before it adds the folders of the user's files to `sys.path`: a user's file with the name
    of a library could otherwise be imported in the library's place.
    """
    others = {part.length.verifier for part in config.named_parts.values()}
    for name in {*named(config), *others} & VERIFIERS.keys():
        lookup.load(VERIFIERS[name])


def built_in(name: str, config: EnvironmentConfig) -> Callable[[Prompt, str], Awaitable[Any]]:
    """Make the built-in verifier called `name` ("math", ...): a function (prompt, response text) ->
    awaitable of the score, from 0 (wrong) to 1 (right) but for `length`. It reads only what follows
    the thinking of a response; but `length` reads the thinking too, and so does `format` if
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
    """The verifiers and reward functions of the recipe, {name as the recipe writes it: weight}:
    `config.rewards`, or `config.verifier` with weight 1. With `config.mixture`, those of all
    entries together; of a function that several entries use, the last entry's weight.
    """
    if config.mixture:
        return {
            name: weight
            for part in config.named_parts.values()
            for name, weight in named(part).items()
        }
    return dict(config.rewards) or {config.verifier: 1.0}


def local(config: EnvironmentConfig) -> dict[str, float]:
    """The verifiers and reward functions of the recipe, {name as the recipe writes it: weight},
    that run in worker processes of this run: all but those at the addresses of reward servers.
    """
    return {name: weight for name, weight in named(config).items() if not is_remote(name)}


def setting_of(config: EnvironmentConfig) -> str:
    """The dotted key of the recipe that names the code which scores responses, such as
    "environment.rewards"; for error messages.
    """
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
    """Paths, as the recipe has them, of the user's files with verifiers, reward functions, the
    session class or tools; empty if everything is built in. Raises `ValueError` if a file is
    missing or a name is unknown.
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
    found = [split_name(name, where, OTHERS)[0] for where, name in _own_functions(config)]
    return list(dict.fromkeys(found))


def _own_functions(config: EnvironmentConfig) -> Iterator[tuple[str, str]]:
    """(the recipe's key, a user's reward function that it names) of each such function."""
    for part_name, part in config.named_parts.items():
        where = f"environment.mixture.{part_name}: " if part_name else ""
        for name in local(part):
            if name not in VERIFIERS:
                yield f"{where}{setting_of(part)}", name


def load_functions(
    config: EnvironmentConfig, sources: Sources | None = None
) -> dict[str, RewardFunction]:
    """Import the user's reward functions that the recipe names. Returns
    {`path/to/file.py:function`: the function in a common form, called with (prompt, response)},
    without built-in verifiers and reward servers. `sources`: {absolute path: content} of files to
    be run from there instead of from the disk. Raises `ValueError` if a file or function cannot be
    loaded.
    """
    return {
        name: recognised(own_function(name, where, OTHERS, sources), name, where)
        for where, name in _own_functions(config)
    }


def may_overlap(config: EnvironmentConfig, functions: Mapping[str, RewardFunction]) -> bool:
    """Whether one worker process may run several calls of the verifier at the same time. True if
    the recipe has reward functions of the user's (`functions` by name), all of them are `async`,
    and it does not use the verifier `code`, which blocks.
    """
    are_async = all(function.is_async for function in functions.values())
    return bool(functions) and are_async and not config.programs


def load_verifier(
    config: EnvironmentConfig, functions: Mapping[str, RewardFunction] | None = None
) -> Verifier:
    """Make the function that scores responses in a worker process, (prompt, response) -> the score,
    or an awaitable of it: the recipe's verifier, the weighted sum of its reward functions, or with
    a mixture the verifier that the prompt names. Reward servers are left out, since the run's own
    process asks them; if only servers score, every score is 0. `functions`: what `load_functions`
    has returned; None to load the user's functions now. Raises `ValueError` if a file or function
    cannot be loaded.
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
    shown = short_names(list(named(config)))
    # A plain function may start an event loop of its own, so it is called outside of any.
    plain = [name for name in loaded if name in functions and not functions[name].is_async]

    def verify(prompt: Prompt, response: str) -> Awaitable[Score]:
        made: dict[str, Any] = {}
        for name in plain:
            with _naming(shown[name]):
                made[name] = loaded[name](prompt, response)
        return total(prompt, response, made)

    async def total(prompt: Prompt, response: str, made: dict[str, Any]) -> Score:
        parts = []
        for name, weight in weights.items():
            with _naming(shown[name]):
                answer = made[name] if name in made else loaded[name](prompt, response)
                score = read_score(await answer if inspect.isawaitable(answer) else answer)
                parts.append((shown[name], weight, score))
        return add_up(parts)

    return verify


def _by_name(config: EnvironmentConfig, functions: Mapping[str, RewardFunction]) -> Verifier:
    """A verifier that scores each response with the named verifier of its prompt."""
    verifiers: dict[str, Verifier] = {}
    for name, part in config.named_parts.items():
        try:
            verifiers[name] = load_verifier(part, functions)
        except ValueError as error:
            raise ValueError(f"environment.mixture.{name}: {error}") from error
    return lambda prompt, response: verifiers[named_part(prompt, config)](prompt, response)


def named_part(prompt: Prompt, config: EnvironmentConfig) -> str:
    """The name of the verifier that scores responses to `prompt`: a key of `environment.mixture`,
    the table of verifiers for a mixture of data. Raises `ValueError` if the prompt names a verifier
    that is not in the table.
    """
    require(
        prompt.environment in config.mixture,
        f"row {prompt.index} of the data names the verifier '{prompt.environment:.80}', which is"
        f" not in environment.mixture ({', '.join(config.mixture)})",
    )
    return prompt.environment


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """A context in which the message of every exception begins with `name`: `BadScore` stays
    `BadScore`, with its kind of failure; every other exception becomes a `RuntimeError`.
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
    """The verifier or reward function `name`."""
    if name in VERIFIERS:
        return built_in(name, config)
    found, is_alone = functions[name].call, len(local(config)) == 1

    def verify(prompt: Prompt, response: str) -> Any:
        if not is_alone:  # what a function does to the row is not for the others to see
            prompt = copy.deepcopy(prompt)
        return found(prompt, str(response))  # a plain text, not `response_text.Counted`

    return verify


def short_names(names: Sequence[str]) -> dict[str, str]:
    """{reward function as the recipe writes it: a short name for metrics}, no two alike. The short
    name is the function's name without its file; where two functions have the same name, with the
    file's name before it, and with as many of the file's folders as tell the two apart. The short
    name of a reward server is its host, followed by port and path only where these are needed to
    tell servers apart.
    """
    short = {name: name for name in names if ":" not in name}
    for parts in range(max((len(Path(name).parts) for name in names), default=0) + 1):
        longer = {name: _with_parts(name, parts) for name in names if name not in short}
        counts = Counter([*longer.values(), *short.values()])
        short |= {name: one for name, one in longer.items() if counts[one] == 1}
    return {name: short.get(name, name) for name in names}


def _with_parts(name: str, count: int) -> str:
    """A name for metrics with `count` parts of the path. A function in a file: with count 1,
    "a/b/file.py:check" gives "file.check". An address: host, then `count` of port and path; with
    count 1, "http://host:80/score" gives "host/80".
    """
    if is_remote(name):
        address = urlsplit(name)
        port = address.port or (443 if address.scheme == "https" else 80)
        return "/".join([address.hostname or "", f"{port}", *name.split("/")[3:]][: count + 1])
    file, _, function = name.rpartition(":")
    parts = Path(file).with_suffix("").parts
    return ".".join(["/".join(parts[-count:]), function]) if count else function


def load_session(config: EnvironmentConfig, sources: Sources | None = None) -> Callable[[], Any]:
    """Import the class that `config.session` names, a built-in name or `path/to/file.py:Class`;
    each rollout gets an instance, made without arguments. `sources`: {absolute path: content} of
    files to be run from there instead of from the disk. Raises `ValueError` if the file or class
    cannot be loaded, or a method `start` or `step` is missing.
    """
    setting = "environment.session"
    if config.session in lookup.SESSIONS:
        return lookup.load(lookup.SESSIONS[config.session])()
    place = split_name(config.session, setting, OTHER_SESSIONS)
    made = load_by_path(*place, setting, "class", inspect.isclass, sources)
    missing = [name for name in ("start", "step") if not callable(getattr(made, name, None))]
    require(
        not missing,
        f"{setting}: {config.session} has no method {' and no method '.join(missing)}; see"
        " megarl.environments.session",
    )
    return made

"""Verifiers and reward functions: how good is a response?

    EnvironmentConfig --load_verifier--> (prompt, response) -> awaitable of the score

A verifier of the house returns 1.0 for a right response and 0.0 for a wrong one. To add one, write
a function that makes it from the configuration and name it in `VERIFIERS`. To use one of your own,
write `environment.verifier: path/to/file.py:function`, or several with weights in
`environment.rewards`; docs/rewards.md says what it receives and returns. It may be async, may raise
and may hang: `megarl.environments.pool` bounds it.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.environments.config import EnvironmentConfig, is_remote
from megarl.environments.mathematics import math
from megarl.environments.scores import BadScore, Score, add_up, read_score
from megarl.environments.user_code import Sources, check_two_parameters, load, split
from megarl.schema import require
from megarl.types import Prompt

Verifier = Callable[[Prompt, str], Awaitable[Any]]
"""A function (prompt, response text) -> number, dict or `Score` (`megarl.environments.scores`). It
may raise and may be slow."""

THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
"""A number with a comma before each group of three digits."""


def exact_match(config: EnvironmentConfig) -> Verifier:
    """A verifier that returns 1.0 if the text after the last `answer_after` marker equals the
    reference answer, else 0.0. If the marker is empty, the whole response is compared. Surrounding
    whitespace is ignored, and so are the thousands separators of a number: `1,234` equals `1234`.
    """
    marker = config.answer_after

    async def verify(prompt: Prompt, response: str) -> float:
        if marker:
            _, found, response = response.rpartition(marker)
            if not found:
                return 0.0
        return float(_without_thousands(response) == _without_thousands(prompt.answer))

    return verify


def _without_thousands(text: str) -> str:
    """`text` without surrounding whitespace and, if it is one number, without its commas."""
    text = text.strip()
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def no_verifier(config: EnvironmentConfig) -> Verifier:
    """A verifier that returns 0.0 for every response, for runs whose rewards are of models."""

    async def verify(prompt: Prompt, response: str) -> float:
        return 0.0

    return verify


VERIFIERS: dict[str, Callable[[EnvironmentConfig], Verifier]] = {
    "exact_match": exact_match,
    "math": math,
    "none": no_verifier,
}


def named(config: EnvironmentConfig) -> dict[str, float]:
    """{name of each verifier or reward function: its weight}; empty for a session."""
    if config.session:
        return {}
    return dict(config.rewards) or {config.verifier: 1.0}


def local(config: EnvironmentConfig) -> dict[str, float]:
    """Those of `named` that run in worker processes, not on a reward server."""
    return {name: weight for name, weight in named(config).items() if not is_remote(name)}


def setting_of(config: EnvironmentConfig) -> str:
    """The setting that names the code which scores responses, for error messages."""
    if config.session:
        return "environment.session"
    return "environment.rewards" if config.rewards else "environment.verifier"


def own_files(config: EnvironmentConfig) -> list[Path]:
    """Paths of the user's files; empty if every verifier is built in. Raises `ValueError` if a file
    is missing or a name is unknown.
    """
    setting = setting_of(config)
    if config.session:
        return [split(config.session, setting)[0]]
    others = f"one of {', '.join(VERIFIERS)}, or to "
    return [split(name, setting, others)[0] for name in local(config) if name not in VERIFIERS]


def load_verifier(config: EnvironmentConfig, sources: Sources | None = None) -> Verifier:
    """Load the configured verifier, or the weighted sum of the configured reward functions. Those
    of reward servers are left out; if there are no others, every score is 0. Raises `ValueError` if
    a file or function cannot be loaded.

    `sources`: content of files to be loaded from there instead of from disk.
    """
    setting, weights = setting_of(config), local(config)
    loaded = {name: _load_one(name, config, setting, sources) for name in weights}
    if not loaded:
        return no_verifier(config)
    if not config.rewards:
        return loaded[config.verifier]
    shown = short_names(list(named(config)))

    def verify(prompt: Prompt, response: str) -> Awaitable[Score]:
        made: list[Any] = []
        try:
            for name, function in loaded.items():
                with _naming(shown[name]):
                    made.append(function(prompt, response))
        except BaseException:
            _close(made)
            raise
        return total(made)

    async def total(made: list[Any]) -> Score:
        parts = []
        try:
            for (name, weight), answer in zip(weights.items(), made, strict=True):
                with _naming(shown[name]):
                    parts.append((shown[name], weight, read_score(await answer)))
        finally:
            _close(made)
        return add_up(parts)

    return verify


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raise what is raised in the block with `name` before its words."""
    try:
        yield
    except BadScore as error:
        raise BadScore(error.failure, f"{name}: {error}") from None
    except BaseException as error:
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error


def _close(made: Sequence[Any]) -> None:
    """Close the coroutines of `made`, so that Python does not warn of those nobody awaited."""
    for one in made:
        if inspect.iscoroutine(one):
            one.close()


def _load_one(
    name: str, config: EnvironmentConfig, setting: str, sources: Sources | None
) -> Verifier:
    """The verifier or reward function `name`. A user's plain function runs when it is called, and
    an `async` one when the result is awaited: the first may start an event loop of its own.
    """
    if name in VERIFIERS:
        return VERIFIERS[name](config)
    path, attribute = split(name, setting, f"one of {', '.join(VERIFIERS)}, or to ")
    found = load(path, attribute, setting, "function", inspect.isfunction, sources)
    check_two_parameters(found, name, setting)

    def verify(prompt: Prompt, response: str) -> Awaitable[Any]:
        score: Any = found(prompt, response)
        return score if inspect.isawaitable(score) else _ready(score)

    return verify


async def _ready(score: Any) -> Any:
    return score


def short_names(names: Sequence[str]) -> dict[str, str]:
    """{name of a reward function: how metrics call it}, no two alike: the function without its
    file; where two functions are called alike, with the file's name, and with as many of its
    folders as tell the two apart. A reward server is called by its host, by host and port, or with
    its path too.
    """
    short = {name: name for name in names if ":" not in name}
    for parts in range(max((len(Path(name).parts) for name in names), default=0) + 1):
        longer = {name: _with_parts(name, parts) for name in names if name not in short}
        counts = Counter([*longer.values(), *short.values()])
        short |= {name: one for name, one in longer.items() if counts[one] == 1}
    return {name: short.get(name, name) for name in names}


def _with_parts(name: str, count: int) -> str:
    """The function of `path/to/file.py:function`, after the last `count` parts of its path; the
    host of an address, followed by `count` further parts of it.
    """
    if is_remote(name):
        address = urlsplit(name)
        port = address.port or (443 if address.scheme == "https" else 80)
        return "/".join([address.hostname or "", f"{port}", *name.split("/")[3:]][: count + 1])
    file, _, function = name.rpartition(":")
    parts = Path(file).with_suffix("").parts
    return ".".join(["/".join(parts[-count:]), function]) if count else function


def load_session(config: EnvironmentConfig, sources: Sources | None = None) -> Callable[[], Any]:
    """Load the class `environment.session`, which is instantiated for each rollout (see
    `megarl.environments.session.Session`). Raises `ValueError` if the file or class cannot be
    loaded, or a method is missing. `sources`: see `load_verifier`.
    """
    setting = "environment.session"
    made = load(*split(config.session, setting), setting, "class", inspect.isclass, sources)
    missing = [name for name in ("start", "step") if not callable(getattr(made, name, None))]
    require(
        not missing,
        f"{setting}: {config.session} has no method {' and no method '.join(missing)}; see"
        " megarl.environments.session",
    )
    return made

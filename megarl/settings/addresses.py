"""Addresses of reward servers and MCP servers, and the bearer tokens for them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from megarl.settings.schema import require

SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS?)(_|$)", re.IGNORECASE)
"""Environment variables that an isolated verifier's process does not have."""
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def is_remote(name: str) -> bool:
    """Whether a verifier, reward function or tool server is an address: begins with http:// or
    https://.
    """
    return name.lower().startswith(("http://", "https://"))


def check_address(
    name: str,
    setting: str,
    path: str = "/v1/score",
    variable: str = "environment.remote.token_variable",
) -> None:
    """Raise `ValueError` unless `name` is an address such as `http://host:8000/v1/score`, without
    user, query or fragment, which may hold a secret that the message must not repeat. It names
    `setting`, an address that ends with `path`, and `variable`, the recipe's key for the token.
    """
    try:
        parts = urlsplit(name)
        host, user, _ = parts.hostname, parts.username, parts.port
    except ValueError as error:
        raise ValueError(
            f"{setting} is no address ({error}); set it to http://host:port{path}"
        ) from None
    require(
        user is None and "@" not in parts.netloc and not parts.query and not parts.fragment,
        f"{setting} holds a user, a query or a fragment, in which a secret could stand; set it to"
        f" http://host:port/path and {variable} to the variable that holds the token",
    )
    require(
        bool(host) and not re.search(r"[\s\x00-\x1f]", name),
        f"{setting} is '{name}', which names no host; set it to http://host:port{path}",
    )


def check_variable(name: str, setting: str) -> None:
    """Raise `ValueError` unless `name` is empty or an environment variable for a secret, such as
    REWARD_TOKEN, which verifiers do not get. The message names `setting` and does not repeat
    `name`, which may be a token set by mistake.
    """
    require(
        not name or bool(VARIABLE.fullmatch(name) and SECRET.search(name)),
        f"{setting} is not the name of a variable for a secret; set it to the name, in capital"
        " letters, of an environment variable with TOKEN, KEY, SECRET or PASSWORD as a word, such"
        " as REWARD_TOKEN (such variables are kept from verifiers), never to the token itself",
    )


@dataclass(frozen=True)
class Token:
    """The bearer token of requests to servers, which `repr` and logs do not show."""

    value: str = field(repr=False)


def read_token(variable: str, setting: str) -> Token | None:
    """The token in the environment variable that `setting` names; None for "". Raises `ValueError`
    if it is not set or empty, or holds spaces, line breaks or characters beyond ASCII.
    """
    if not variable:
        return None
    value = os.environ.get(variable, "")
    if not value:
        raise ValueError(
            f"{setting} is {variable}, but that environment variable is not set, or empty; export"
            " it with the server's token"
        )
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(
            f"the environment variable {variable} ({setting}) holds a space, a line break or a"
            " character beyond ASCII, which no bearer token has; export it anew"
        )
    return Token(value)

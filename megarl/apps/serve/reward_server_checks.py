"""Checks of `megarl serve-reward` before it starts."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.checks.folder_checks import check_writable
from megarl.checks.verifier_trial import check_verifier
from megarl.environments.addresses import Token, read_token
from megarl.environments.config import RewardServerConfig
from megarl.environments.verifiers import named
from megarl.parallel import launcher
from megarl.schema import require
from megarl.serve_config import ServeRewardConfig

if TYPE_CHECKING:
    from megarl.apps.serve.served_models import ServedModel


@dataclass(frozen=True)
class ServeInputs:
    """What the checks of `megarl serve-reward` have loaded."""

    what: str
    """What is served."""
    token: Token | None
    """The token that requests need."""
    model: ServedModel | None = None
    """The reward model or judge; None for verifiers."""

    def __str__(self) -> str:
        return f"{self.what}, {'with' if self.token else 'without'} a token"


def check_serve_reward(config: ServeRewardConfig, ranks: int | None = None) -> ServeInputs:
    """Run all checks of `megarl serve-reward`, which runs as one process. Raises `ValueError` if
    one fails.
    """
    if ranks is None:
        launcher.refuse_wrong()
    size = launcher.num_ranks() if ranks is None else ranks
    require(size == 1, f"megarl serve-reward runs as one process, but was started as {size} ranks")
    token = server_token(config.server)
    check_writable(config.folder, setting="folder")
    if path := config.reward_model.model.path:
        # Torch and transformers, which a server of verifiers does without.
        from megarl.apps.serve.served_models import check_served_reward_model

        backend = config.reward_model.backend
        served = check_served_reward_model(config.reward_model)
        return ServeInputs(f"reward model {path} by {backend}", token, served)
    if path := config.judge.model.path:
        from megarl.apps.serve.served_models import check_judge

        return ServeInputs(f"judge {path}", token, check_judge(config.judge))
    check_verifier(config.environment)
    return ServeInputs(", ".join(named(config.environment)), token)


MIN_TOKEN, MIN_DIFFERENT = 20, 6
"""Characters of a token on a network, and how many of them differ. 20 random hexadecimal digits
have fewer different ones with a probability of 3e-7."""


def server_token(server: RewardServerConfig) -> Token | None:
    """The token that requests to the server need; None if they need none, which is allowed only on
    a loopback address. Raises `ValueError` elsewhere, and for a token there that could be guessed.
    """
    name, is_local = server.token_variable, is_loopback(server.host)
    reached = f"server.host is {server.host}, which other machines may reach, but"
    make = f"export {name or 'MEGARL_REWARD_TOKEN'}=$(openssl rand -hex 32)"
    if name and name in os.environ:
        token = read_token(name, "server.token_variable")
        assert token is not None
        require(
            is_local or (len(token.value) >= MIN_TOKEN and len({*token.value}) >= MIN_DIFFERENT),
            f"{reached} the token in {name} could be guessed: it needs {MIN_TOKEN} characters,"
            f" {MIN_DIFFERENT} of them different; {make}, or set server.host to 127.0.0.1",
        )
        return token
    require(
        is_local,
        f"{reached} there is no token; {make}"
        + ("" if name else " and set server.token_variable to its name")
        + ", or set server.host to 127.0.0.1",
    )
    return None


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a server on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Colocated engines start after the roles on their GPUs are built and have lent their memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.run import build
from megarl.settings.config import RunConfig, read

RECIPE = Path(__file__).resolve().parents[2] / "launch/recipes/quickstart.yaml"


class Started(Exception):
    """Raised where the engines would start."""


@pytest.mark.parametrize(
    ("placement", "before"),
    [
        ("disaggregated", []),
        ("colocated", ["policy", "checkpoint", "offload policy", "offload critic"]),
    ],
)
def test_what_has_happened_when_the_engines_start(
    placement: str, before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("--rollout.placement", placement, "--rollout.max_staleness", "0")
    config = read(RunConfig, RECIPE, overrides)
    happened: list[str] = []

    def role(name: str) -> Any:
        return SimpleNamespace(
            engine=SimpleNamespace(offload=lambda: happened.append(f"offload {name}"))
        )

    def make_policy(*given: Any, **named: Any) -> Any:
        happened.append("policy")
        return role("policy")

    def start(*given: Any, **named: Any) -> Any:
        raise Started

    context: Any = SimpleNamespace(
        mesh=SimpleNamespace(is_member=True, ranks=(0,)),
        stack=ExitStack(),
        device=SimpleNamespace(type="cuda"),
        role=make_policy,
        resume=lambda checkpoints: happened.append("checkpoint"),
        observe=lambda first_step: None,
        checkpoints=lambda *given, **named: None,
        folder=Path(),
    )
    learner = SimpleNamespace(guard=SimpleNamespace())
    critics = [  # one elsewhere
        SimpleNamespace(role=role("critic"), section="critic"),
        SimpleNamespace(role=None),
    ]
    replaced: dict[str, Any] = {
        "broadcast_object": lambda value, axis: value,
        "all_ranks": lambda **named: SimpleNamespace(size=1),
        "make_learner": lambda *given: learner,
        "make_roles": lambda *given: (None, critics, None),
        "make_teacher": lambda *given: None,
        "start_generation": start,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(build, name, value)
    inputs: Any = SimpleNamespace(held_out=None, roles={})
    with pytest.raises(Started):
        build.build(context, config, inputs)
    assert happened == before

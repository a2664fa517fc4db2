"""Examples of docs/howto, taken from their pages and held to what these say of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.block_pairs import LAYOUTS, compare
from support.documented import block
from support.environments import opened
from support.ranks import run_ranks
from support.rollouts import segment
from support.simulated import simulate
from support.tiny import write_model, write_tokenizer
from support.training_cases import differences, run_cases

from megarl.data.tokenizer import load_tokenizer
from megarl.environments.codec import Codec
from megarl.environments.scoring import Environment
from megarl.environments.user_code import function_of
from megarl.kernels.attention_plan import BLOCKS
from megarl.kernels.block import Positions
from megarl.kernels.block_reference import reference_attention
from megarl.kernels.logprobs import BACKENDS, linear_logprobs
from megarl.kernels.sequence_attention import TRANSPORTS, AttentionPlan, sequence_attention
from megarl.parallel.sequence import cut
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt, Verdict


def example(head: str) -> dict[str, Any]:
    """What the code block with this head defines."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block(head), head, "exec", dont_inherit=True), names)
    return names


@pytest.fixture
def registries() -> Iterator[None]:
    """As they were, after an example has added to them."""
    with patch.dict(TRANSPORTS), patch.dict(BACKENDS), patch.dict(BLOCKS):
        yield


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("window", [None, 3, 12])
@pytest.mark.parametrize("how", ["zigzag", "contiguous", "zigzag_document"])
def test_the_transport_gives_float64_attention(how: str, window: int | None) -> None:
    example("python transport")
    starts, size, scale = torch.tensor([0, 9, 10, 31, 40]), 4, 0.3
    indices = cut(starts, size, how)
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(40, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    wholes = [x.clone().requires_grad_() for x in (q, k, v)]
    places = Positions.of(torch.arange(40), starts)
    expected = reference_attention(*wholes, places.views(window)[0], scale)
    expected.backward(upstream)

    def one_rank(exchange: Any) -> list[torch.Tensor]:
        inner, outer = exchange.split(1)
        plan = AttentionPlan.of(indices, starts, torch.device("cpu")).within(window)
        mine = [x[indices[exchange.rank]].clone().requires_grad_() for x in (q, k, v)]
        out = sequence_attention(*mine, plan, inner, outer, scale, "direct")
        out.backward(upstream[indices[exchange.rank]])
        return [out.detach(), *(x.grad for x in mine)]

    for rank, found in enumerate(simulate(size, one_rank)):
        for mine, whole in zip(found, [expected, *(x.grad for x in wholes)], strict=True):
            assert torch.allclose(mine, whole[indices[rank]], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("registries")
def test_the_backend_agrees_with_ours() -> None:
    example("python backend")
    torch.manual_seed(0)
    targets, weights = torch.randint(0, 50, (20,)), torch.randn(2, 20)
    found = {}
    for name in ("chunked", "whole"):
        torch.manual_seed(1)
        hidden, weight = (torch.randn(rows, 16, requires_grad=True) for rows in (20, 50))
        logp, entropy = linear_logprobs(hidden, weight, targets, 0.7, backend=name)
        (weights[0] * logp + weights[1] * entropy).sum().backward()
        found[name] = [logp, entropy, hidden.grad, weight.grad]
    for ours, theirs in zip(*found.values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_block_gives_float64_attention(layout: str, dtype: torch.dtype) -> None:
    made = example("python own_attention")["MyBlock"]()
    for rank, cap in itertools.product((0, 1), (None, 0.8)):
        compare(LAYOUTS[layout], rank, (4, 2), 16, dtype, made, torch.device("cpu"), cap=cap)


def train_with(model: str, block: str, ranks: int) -> tuple[dict[str, float], int]:
    """Differences of training with this block from training with the usual one, and its calls."""
    usual = {"model": model, "stage": 0, "training": {"share_prefix": "off"}}
    settings: list[Any] = [{}, {"sequence": {"block": block}}]
    found = run_cases([usual | {"layout": (1, ranks, 1)} | more for more in settings])
    made: Any = function_of(block, {}, "training.sequence.block")
    return differences(*found), made.calls


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_by_its_path_trains(tmp_path: Path, ranks: int) -> None:
    """It computes all attention, also of plain documents on one rank."""
    counted = """
class Counted(MyBlock):
    calls = 0

    def backward(self, *arguments):
        Counted.calls += 1
        super().backward(*arguments)
"""
    (tmp_path / "mine.py").write_text(block("python own_attention") + counted)
    model = str(write_model(tmp_path / "model"))
    for found, calls in run_ranks(
        ranks, __file__, "train_with", model, f"{tmp_path}/mine.py:Counted", ranks
    ):
        assert calls > 0 and max(found.values()) < 1e-3, found


def test_the_axis_is_one_of_a_grid() -> None:
    names = example("python axis")
    layout = names["ReplicaLayout"](data=2, replica=2, tensor=2)
    grid = torch.arange(8).view(2, 2, 1, 2)
    assert layout.size == 8 and str(layout) == "data 2 x replica 2 x sequence 1 x tensor 2"
    for place in itertools.product(range(2), range(2), range(1), range(2)):
        rank = int(grid[place])
        assert layout.coordinates(rank) == dict(zip(layout.AXES, place, strict=True))
        assert layout.rank(**layout.coordinates(rank)) == rank
    assert layout.groups("replica") == [(0, 2), (1, 3), (4, 6), (5, 7)]


def on_ranks() -> list[tuple[str, int, float]]:
    """Sums over the axes of a mesh with replicas; runs on two ranks."""
    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.collectives import all_reduce

    names = example("python axis")
    mesh_module.initialise(timeout_s=30)
    with names["ReplicaMesh"](names["ReplicaLayout"](replica=2), timeout_s=30) as mesh:
        mine, found = torch.tensor([float(mesh.rank + 1)]), []
        for name in mesh.USES:
            axis = getattr(mesh, name)
            found.append((name, axis.size, all_reduce(mine.clone(), axis).item()))
    mesh_module.finalise()
    return found


def test_the_axis_communicates() -> None:
    for rank, found in enumerate(run_ranks(2, __file__, "on_ranks")):
        sizes = {name: (size, total) for name, size, total in found}
        assert sizes["replica"] == sizes["gradient"] == sizes["world"] == (2, 3.0)
        assert sizes["data"] == sizes["tensor"] == sizes["sequence"] == (1, rank + 1.0)


async def test_the_session_plays(tmp_path: Path) -> None:
    """In its worker process, with the reward of each way a game may end."""
    (tmp_path / "game.py").write_text(block("python session"))
    write_tokenizer(tmp_path / "tokenizer")
    codec = Codec.of(load_tokenizer(str(tmp_path / "tokenizer")))
    config = EnvironmentConfig(session=f"{tmp_path}/game.py:GuessTheNumber", num_workers=2)
    games = {"5": 1.0, "3 8 5": 0.6, "3 8 4 7 6": 0.0, "three": 0.0}

    async def play(environment: Environment, key: str) -> tuple[list[str], float]:
        prompt = Prompt(0, "", [], "5")
        assert await environment.begin(key, prompt) is None
        replies = []
        for guess in key.split():
            said = segment(codec.encode(guess))
            reply = await environment.step(key, prompt, said, num_tokens=1)
            if isinstance(reply, Verdict):
                return replies, reply.reward
            replies.append(codec.decode(reply.arrays.token_ids))
        raise AssertionError("the game has no end")

    async with opened(config, codec) as environment:
        found = await asyncio.gather(*(play(environment, game) for game in games))
    for (_, reward), expected in zip(found, games.values(), strict=True):
        assert reward == pytest.approx(expected)
    assert [len(replies) for replies, _ in found] == [0, 2, 4, 0]

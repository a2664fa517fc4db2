"""Log-probs of a vocabulary cut over two gloo ranks, against float64 autograd of the plain formula
on the whole of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

WORDS, WIDTH, TOKENS = 61, 12, 23
CASES = {
    "even": {"cut": 31},
    "uneven": {"cut": 50, "temperature": 0.6},
    "empty": {"cut": 0},
    "masked": {"cut": 20, "masked": True},
    "far": {"cut": 30, "offset": 1e4},
    "no_tokens": {"cut": 40, "tokens": 0},
    "bfloat16": {"cut": 25, "dtype": torch.bfloat16, "temperature": 1.3},
    "float64": {"cut": 25, "dtype": torch.float64},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.1}


def inputs(case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """hidden, weight (its last column meets a 1), targets, upstream; multiples of 1/8, so that far
    logits are exact.
    """
    draw = torch.Generator().manual_seed(3)
    tokens = case.get("tokens", TOKENS)
    hidden, weight = (
        (torch.randn(rows, WIDTH, dtype=torch.float64, generator=draw) * 8).round() / 8
        for rows in (tokens, WORDS)
    )
    hidden[:, -1] = 1
    weight[:, -1] = case.get("offset", 0.0)
    if case.get("masked"):
        weight[
            : WORDS // 2, -1
        ] = -torch.inf  # the whole of the first shard, and some of the second
    return (
        hidden,
        weight,
        torch.arange(tokens) % WORDS,
        torch.randn(2, tokens, dtype=torch.float64, generator=draw),
    )


def evaluate(
    function: Any, case: dict[str, Any], dtype: torch.dtype, rows: slice = slice(None)
) -> list[torch.Tensor]:
    """Outputs and gradients; of hidden's without the last column, where 0 meets -inf and 1e4."""
    hidden, weight, targets, upstream = inputs(case)
    h, w = hidden.to(dtype).requires_grad_(), weight[rows].to(dtype).requires_grad_()
    outputs = function(h, w, targets, case.get("temperature", 1.0))
    grads = torch.autograd.grad(outputs, (h, w), list(upstream.to(outputs[0].dtype)))
    return [*(output.detach() for output in outputs), grads[0][:, :-1], grads[1]]


def on_rank() -> dict[str, list[torch.Tensor]]:
    """Every case on this rank, eight tokens a chunk."""
    from functools import partial

    from megarl.kernels import logprobs
    from megarl.parallel.collectives import all_reduce, all_reduce_max
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh, finalise, initialise

    initialise(timeout_s=60)
    found = {}
    with ProcessMesh(Layout(tensor=2), timeout_s=60) as mesh:
        axis = mesh.tensor
        for name, case in CASES.items():
            edges, dtype = (0, case["cut"], WORDS), case.get("dtype", torch.float32)
            largest = max(case["cut"], WORDS - case["cut"])
            logprobs.CHUNK_BYTES["cpu"] = 8 * largest * dtype.itemsize
            shard = logprobs.VocabularyShard(
                edges[axis.rank],
                largest,
                partial(all_reduce_max, axis=axis),
                partial(all_reduce, axis=axis),
            )
            rows = slice(edges[axis.rank], edges[axis.rank + 1])
            found[name] = evaluate(
                partial(logprobs.linear_logprobs, shard=shard), case, dtype, rows
            )
    finalise()
    return found


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, list[torch.Tensor]]]:
    from support.ranks import run_ranks

    return run_ranks(2, __file__, "on_rank", timeout_s=120)


def dense(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, ...]:
    log_p = torch.log_softmax(hidden @ weight.T / temperature, dim=1)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * finite).sum(1)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_the_whole(
    of_ranks: list[dict[str, list[torch.Tensor]]], name: str
) -> None:
    case = CASES[name]
    wanted = evaluate(dense, case, torch.float64)
    weight = torch.cat([found[name][3] for found in of_ranks])
    for found in of_ranks:
        for what, a, b in zip(
            ("log-prob", "entropy", "hidden", "weight"),
            (*found[name][:3], weight),
            wanted,
            strict=True,
        ):
            assert a.shape == b.shape, what
            finite = b.isfinite()
            assert torch.equal(a[~finite].double(), b[~finite]), what
            difference = (a.double() - b)[finite].abs() / b[finite].abs().clamp_min(1)
            assert (
                not difference.numel()
                or difference.max() < TOLERANCE[case.get("dtype", torch.float32)]
            ), what
    for mine, other in zip(of_ranks[0][name][:3], of_ranks[1][name][:3], strict=True):
        assert torch.equal(mine, other)

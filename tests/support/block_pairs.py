"""The attention of one rank of two, block by block as a ring would compute it, for every way to cut a
packed sequence in two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.kernels.block import Positions
from megarl.kernels.block_reference import ReferenceBlock

# Largest error over largest value. p and its gradient are rounded to the input's type before they
# are multiplied again.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

TOTAL = 150
STARTS = torch.tensor([0, 53, 54, TOTAL])
ROW = torch.arange(TOTAL)
# Each layout: what two ranks hold of the row.
LAYOUTS = {
    "contiguous": (ROW[:83], ROW[83:]),
    "zigzag": (torch.cat([ROW[:37], ROW[111:]]), ROW[37:111]),
    "striped": (ROW[::2].contiguous(), ROW[1::2].contiguous()),
    "scattered": torch.randperm(TOTAL, generator=torch.Generator().manual_seed(3)).split([61, 89]),
}


# Enough for tiles of 128 that are seen whole, in part, and not at all.
LONG = (torch.cat([torch.arange(150), torch.arange(450, 600)]), torch.arange(150, 450))


def attention(
    block,
    tensors: list[torch.Tensor],
    places: list[Positions],
    rank: int,
    scale: float,
    upstream: torch.Tensor,
    cap: float | None = None,
):
    """out, lse and the gradients of q, k and v of `rank`'s queries over both ranks' keys, block by
    block as a ring would.
    """
    q, *rest = tensors
    kv = list(zip(rest[:2], rest[2:], strict=True))
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(q.shape, dtype=kind, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=kind, device=q.device)
    grads = [
        torch.full(x.shape, 0.5, dtype=kind, device=x.device) for x in (q, *rest)
    ]  # they are added to
    work = [block.prepare(places[rank], keys, q.device) for keys in places]
    order = [i for i in (1 - rank, rank) if work[i] is not None]
    for i in order:
        block.forward(q, *kv[i], work[i], scale, out, lse, cap)
    for i in order:
        block.backward(
            *(upstream, q, *kv[i], out, lse, work[i], scale),
            *(grads[0], grads[1 + i], grads[3 + i], cap),
        )
    return [out, lse, *(grad - 0.5 for grad in grads)]


def among_others(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`x` [L, H, D] on the device as q, k and v are in a packed tensor: between its rows is what
    must not be read.
    """
    room = torch.full((len(x), x[0].numel() + 16), torch.nan, dtype=x.dtype, device=device)[
        :, : x[0].numel()
    ]
    return room.copy_(x.flatten(1)).view(x.shape)


def compare(
    parts: Sequence[torch.Tensor],
    rank: int,
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    block,
    device: torch.device,
    starts: torch.Tensor = STARTS,
    cap: float | None = None,
) -> None:
    """Assert that `block` on `device` computes what the reference block does in float64."""
    scale = width**-0.5 * 1.5
    draw = torch.Generator().manual_seed(width)
    places = [Positions.of(index, starts) for index in parts]
    shapes = [(len(parts[rank]), heads[0]), *[(len(index), heads[1]) for index in (*parts, *parts)]]
    tensors = [torch.randn(*shape, width, generator=draw).to(dtype) for shape in shapes]
    upstream = torch.randn(tensors[0].shape, generator=draw).to(dtype)
    wanted = attention(
        *(ReferenceBlock(), [x.double() for x in tensors], places, rank, scale),
        *(upstream.double(), cap),
    )
    found = attention(
        *(block, [among_others(x, device) for x in tensors], places, rank, scale),
        *(upstream.to(device), cap),
    )
    for name, a, b in zip(("out", "lse", "q", "k0", "k1", "v0", "v1"), found, wanted, strict=True):
        a, seen = a.cpu().double(), b > -torch.inf
        assert torch.equal(a > -torch.inf, seen), name
        error = (a - b)[seen].abs().max() / b[seen].abs().max().clamp_min(1.0)
        assert error < TOLERANCE[dtype], f"{name}: {error}"

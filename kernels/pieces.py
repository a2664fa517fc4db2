"""Block attention through a ready-made kernel that knows no mask but the causal one, cut into
pieces that need none.

With queries and keys in order of their position, a query sees a prefix of its document's keys, and
later queries see no fewer: a staircase. It falls apart into rectangles (everything visible) and
causal triangles, neither of which needs a mask; that is all there is in contiguous, zigzag and
striped cuts. What is left, uneven stairs of an irregular cut, goes in small tiles with a mask.
Small pieces of like shape (rows of many short documents) are computed together, padded.

What computes a piece is an `Operator`: torch's flash kernel for CPU (`block_cpu.py`), flash and
cuDNN (`block_cuda.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megarl.kernels.block import Places

TILE = 64
"""Queries of a masked tile; a regular stretch of more than this is cut out as rectangle or
triangle.
"""
TILE_KEYS = 512
"""Keys of a masked tile, at most."""
SMALL = 128 * 128
"""Score entries of a piece up to which it is computed together with others: the cost of a call is
that of about these.
"""
TOGETHER = 2**20
"""Score entries of pieces computed together, at most: bounds the masks and the copies."""
GRID = 1.25
"""Sides of pieces computed together differ by at most about this factor: bounds the padding."""


@dataclass(frozen=True)
class Span:
    """Queries [q0, q1) and keys [k0, k1), both in order of position; `kind` is full, causal
    (square) or stairs.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.q1 - self.q0, self.k1 - self.k0


@dataclass(frozen=True)
class Piece:
    """One call of the kernel: a span, or several padded to one shape."""

    queries: slice | torch.Tensor
    """Rows of q, or [B, n] int64: padded by repeating the last row."""
    keys: slice | torch.Tensor
    """Rows of k and v, or [B, m] int64."""
    causal: bool
    mask: torch.Tensor | None
    """[B, 1, n or 1, m] float32: 0, or -inf where a key is hidden. Every query sees some key."""
    real: torch.Tensor | None = None
    """Flat positions of the queries that are not padding; None where all are real."""

    def to(self, device: torch.device) -> Piece:
        """With its tensors on `device`."""
        parts = (self.queries, self.keys, self.mask, self.real)
        queries, keys, mask, real = (
            x.to(device) if isinstance(x, torch.Tensor) else x for x in parts
        )
        return replace(self, queries=queries, keys=keys, mask=mask, real=real)


@dataclass(frozen=True)
class Work:
    """The pieces of one pair of blocks, no query twice among pieces of one kind."""

    query_order: torch.Tensor | None
    """[Lq] int64: queries by position; None where they are in order already."""
    key_order: torch.Tensor | None
    pieces: list[Piece]


class Operator(Protocol):
    """What computes one piece: q [B, Hq, n, D], k and v [B, Hkv, m, D], Hkv divides Hq, last
    dimension contiguous.

    `causal` comes only with n = m: whether the kernel aligns its mask top left or bottom right is
    all one. `mask` is a piece's.
    """

    widens: bool
    """Inputs are converted to the dtype of the sums before; otherwise all keep that of q, and
    partial results may.
    """

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [B, Hq, n, D], natural log-sum-exp of the scaled scores [B, Hq, n] in the dtype of
        the sums).
        """
        ...

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v in their shapes. `out` and `lse` are those over all keys; `lse`
        may be a strided view.
        """
        ...


def _order(index: torch.Tensor) -> torch.Tensor | None:
    return None if bool((index[1:] > index[:-1]).all()) else index.argsort()


def _stretches(first: list[int], upto: list[int], rows: list[int]) -> Iterator[tuple[int, int]]:
    """Cut `rows` (queries that see something) into [a, b) of one document: long where stairs are
    even, tiles elsewhere.
    """
    steps = [
        u1 - u0 if f1 == f0 else -1
        for f0, f1, u0, u1 in zip(first, first[1:], upto, upto[1:], strict=False)
    ]
    runs: list[
        tuple[int, int, int]
    ] = []  # (begin, end) of steps that are equal, and what they are equal to
    for position, step in enumerate(steps):
        if runs and runs[-1][2] == step:
            runs[-1] = (runs[-1][0], position + 1, step)
        else:
            runs.append((position, position + 1, step))
    start = 0  # the first query not given out

    def tiles(end: int) -> Iterator[tuple[int, int]]:
        nonlocal start
        while start < end:
            stop = start + 1
            while (
                stop < end
                and steps[stop - 1] >= 0
                and stop - start < TILE
                and upto[stop] - upto[start] <= TILE_KEYS
            ):
                stop += 1
            yield start, stop
            start = stop

    for begin, end, step in runs:
        if step in (0, 1) and end - begin >= TILE:
            yield from tiles(begin)
            yield start, end + 1
            start = end + 1
    yield from tiles(len(rows))


def _spans(
    queries: torch.Tensor, starts: torch.Tensor, keys: torch.Tensor
) -> tuple[list[Span], torch.Tensor]:
    """The staircase in spans, and per query the end of the keys it sees; all positions ascend."""
    all_upto = torch.searchsorted(keys, queries, right=True)
    all_first = torch.searchsorted(keys, starts)
    seen = (all_upto > all_first).nonzero()[:, 0]
    rows, first, upto = seen.tolist(), all_first[seen].tolist(), all_upto[seen].tolist()
    spans = []
    for a, b in _stretches(first, upto, rows):
        # Of a document only its first queries see nothing, so what a stretch holds is consecutive
        # in q as well.
        q0, q1, begin, low, high = rows[a], rows[b - 1] + 1, first[a], upto[a], upto[b - 1]
        if high == low:
            spans.append(Span(q0, q1, begin, low, "full"))
        elif high - low == b - a - 1 and all(upto[i + 1] - upto[i] == 1 for i in range(a, b - 1)):
            spans.append(Span(q0, q1, low - 1, high, "causal"))
            if low - 1 > begin:
                spans.append(Span(q0, q1, begin, low - 1, "full"))
        elif (
            low - begin <= TILE
        ):  # a narrow rectangle costs less inside the tile than as a call of its own
            spans.append(Span(q0, q1, begin, high, "stairs"))
        else:
            spans.append(Span(q0, q1, begin, low, "full"))
            above = next(
                i for i in range(a, b) if upto[i] > low
            )  # the queries before see none of the tile
            spans.append(Span(rows[above], q1, low, high, "stairs"))
    return spans, all_upto


def _mask(span: Span, upto: torch.Tensor) -> torch.Tensor:
    """[n, m] float32: -inf beyond what each query sees."""
    hidden = torch.arange(span.k0, span.k1)[None] >= upto[span.q0 : span.q1, None]
    return torch.zeros(span.shape).masked_fill_(hidden, -torch.inf)


def _alone(span: Span, upto: torch.Tensor) -> Piece:
    mask = _mask(span, upto)[None, None] if span.kind == "stairs" else None
    return Piece(slice(span.q0, span.q1), slice(span.k0, span.k1), span.kind == "causal", mask)


def _together(spans: list[Span], upto: torch.Tensor) -> Piece:
    """Spans of one kind as one batch; in a causal one the padded keys lie behind every real
    query.
    """
    n, m = max(span.shape[0] for span in spans), max(span.shape[1] for span in spans)
    q_first, q_last = (
        torch.tensor([span.q0 for span in spans])[:, None],
        torch.tensor([span.q1 - 1 for span in spans])[:, None],
    )
    k_first, k_last = (
        torch.tensor([span.k0 for span in spans])[:, None],
        torch.tensor([span.k1 - 1 for span in spans])[:, None],
    )
    q_wanted, k_wanted = q_first + torch.arange(n), k_first + torch.arange(m)
    queries, keys = q_wanted.minimum(q_last), k_wanted.minimum(k_last)
    is_real = q_wanted <= q_last
    mask = None
    if spans[0].kind == "stairs":
        limit = upto[queries].minimum(k_last + 1)
        mask = torch.zeros(len(spans), n, m).masked_fill_(
            k_wanted[:, None] >= limit[:, :, None], -torch.inf
        )[:, None]
    elif spans[0].kind == "full" and bool((k_wanted > k_last).any()):
        mask = torch.zeros(len(spans), m).masked_fill_(k_wanted > k_last, -torch.inf)[:, None, None]
    real = None if bool(is_real.all()) else is_real.flatten().nonzero()[:, 0]
    return Piece(queries, keys, spans[0].kind == "causal", mask, real)


def _pieces(spans: list[Span], upto: torch.Tensor) -> list[Piece]:
    groups: dict[tuple[str, int, int], list[Span]] = {}
    pieces = []
    for span in spans:
        n, m = span.shape
        if n * m > SMALL:
            pieces.append(_alone(span, upto))
        else:
            key = (span.kind, math.ceil(math.log(n, GRID)), math.ceil(math.log(m, GRID)))
            groups.setdefault(key, []).append(span)
    for group in groups.values():
        area = max(span.shape[0] for span in group) * max(span.shape[1] for span in group)
        most = max(1, TOGETHER // area)
        for start in range(0, len(group), most):
            some = group[start : start + most]
            pieces.append(_alone(some[0], upto) if len(some) == 1 else _together(some, upto))
    return pieces


def _heads(x: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Rows of x [L, H, D] as the kernel wants them: [B, H, n, D]."""
    if isinstance(rows, slice):
        return x[rows].transpose(0, 1)[None]
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:]).transpose(1, 2)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[B, H, n, D] to [B * n, H, D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> None:
    """Sum `more` [n, H, D] and its lse [H, n] into `out` and `lse`, in place; rows of `lse` may be
    -inf.
    """
    if lse.device.type == "cpu" and bool(
        (lse == -torch.inf).all()
    ):  # a GPU would have to be waited for
        out.copy_(more)
        lse.copy_(more_lse)
        return
    total = torch.logaddexp(lse, more_lse)
    # Never -inf minus -inf: queries that see nothing are in no piece, so `more_lse` is finite.
    out.lerp_(more, (more_lse - total).exp_().T[:, :, None])
    lse.copy_(total)


def _add(total: torch.Tensor, rows: slice | torch.Tensor, grad: torch.Tensor) -> None:
    """Add [B, H, n, D] to the rows of `total` [L, H, D]."""
    if isinstance(rows, slice):
        total[rows] += grad[0].transpose(0, 1)
    else:
        total.index_add_(0, rows.flatten(), _flat(grad).to(total.dtype))


class PieceBlock:
    """`Block` by pieces, through `operator`."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def prepare(self, queries: Places, keys: Places, device: torch.device) -> Work | None:
        query_order, key_order = _order(queries.index), _order(keys.index)
        index, starts = queries.index, queries.doc_start
        if query_order is not None:
            index, starts = index[query_order], starts[query_order]
        in_order = keys.index if key_order is None else keys.index[key_order]
        spans, upto = _spans(index.contiguous(), starts.contiguous(), in_order.contiguous())
        if not spans:
            return None
        query_order, key_order = (
            None if order is None else order.to(device) for order in (query_order, key_order)
        )
        return Work(query_order, key_order, [piece.to(device) for piece in _pieces(spans, upto)])

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Work,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        if self.operator.widens:
            q, k, v = (x.to(out.dtype) for x in (q, k, v))
        whole_out, whole_lse = out, lse
        if work.query_order is not None:
            q, out = q.index_select(0, work.query_order), out.index_select(0, work.query_order)
            lse = lse.index_select(1, work.query_order)
        if work.key_order is not None:
            k, v = k.index_select(0, work.key_order), v.index_select(0, work.key_order)
        for piece in work.pieces:
            piece_q, piece_k, piece_v = (
                _heads(q, piece.queries),
                _heads(k, piece.keys),
                _heads(v, piece.keys),
            )
            more, more_lse = self.operator.forward(
                piece_q, piece_k, piece_v, piece.causal, piece.mask, scale
            )
            more = more.to(out.dtype)
            if isinstance(piece.queries, slice):
                _merge(
                    out[piece.queries], lse[:, piece.queries], more[0].transpose(0, 1), more_lse[0]
                )
                continue
            rows, more, more_lse = (
                piece.queries.flatten(),
                _flat(more),
                more_lse.transpose(0, 1).flatten(1),
            )
            if piece.real is not None:
                rows, more, more_lse = rows[piece.real], more[piece.real], more_lse[:, piece.real]
            sum_out, sum_lse = out.index_select(0, rows), lse.index_select(1, rows)
            _merge(sum_out, sum_lse, more, more_lse)
            out.index_copy_(0, rows, sum_out)
            lse.index_copy_(1, rows, sum_lse)
        if work.query_order is not None:
            whole_out.index_copy_(0, work.query_order, out)
            whole_lse.index_copy_(1, work.query_order, lse)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: Work,
        scale: float,
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
    ) -> None:
        kind = grad_q.dtype if self.operator.widens else q.dtype
        grad_out, q, k, v, out = (x.to(kind) for x in (grad_out, q, k, v, out))
        whole_q, whole_k, whole_v = grad_q, grad_k, grad_v
        if work.query_order is not None:
            grad_out, q, out = (x.index_select(0, work.query_order) for x in (grad_out, q, out))
            lse = lse.index_select(1, work.query_order)
            grad_q = torch.zeros_like(q, dtype=whole_q.dtype)
        if work.key_order is not None:
            k, v = k.index_select(0, work.key_order), v.index_select(0, work.key_order)
            grad_k, grad_v = (torch.zeros_like(x, dtype=whole_k.dtype) for x in (k, v))
        for piece in work.pieces:
            rows, upstream = piece.queries, _heads(grad_out, piece.queries)
            if isinstance(rows, slice):
                piece_lse = lse[:, rows][None]
            else:
                piece_lse = (
                    lse.index_select(1, rows.flatten()).unflatten(1, rows.shape).transpose(0, 1)
                )
                if piece.real is not None:  # a repeated query must not count twice
                    real = torch.zeros(rows.numel(), dtype=q.dtype, device=q.device).index_fill_(
                        0, piece.real, 1.0
                    )
                    upstream = upstream * real.view(rows.shape)[:, None, :, None]
            piece_q, piece_k, piece_v = (
                _heads(q, piece.queries),
                _heads(k, piece.keys),
                _heads(v, piece.keys),
            )
            piece_out = _heads(out, piece.queries)
            gradients = self.operator.backward(
                upstream,
                piece_q,
                piece_k,
                piece_v,
                piece_out,
                piece_lse,
                piece.causal,
                piece.mask,
                scale,
            )
            _add(grad_q, piece.queries, gradients[0])
            _add(grad_k, piece.keys, gradients[1])
            _add(grad_v, piece.keys, gradients[2])
        if work.query_order is not None:
            whole_q.index_add_(0, work.query_order, grad_q)
        if work.key_order is not None:
            whole_k.index_add_(0, work.key_order, grad_k)
            whole_v.index_add_(0, work.key_order, grad_v)

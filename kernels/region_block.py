"""Block attention through a ready-made attention kernel, one call for each region of queries and
keys that needs no mask or a small one (`mask_regions.py`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from megarl.kernels.block import Positions
from megarl.kernels.mask_regions import KernelCalls, mask_regions_of, pieces_of


class Operator(Protocol):
    """A ready-made attention kernel for q [B, Hq, n, D], k and v [B, Hkv, m, D], last dimension
    contiguous.

    Query i sees keys 0 to i with `causal`, which is only used with n = m, so the alignment of the
    kernel's mask does not matter. `mask` [B, 1, n or 1, m] float32 is added to the scores (0 or
    -inf), or None.
    """

    upcasts: bool
    """Whether inputs are first converted to the dtype of the sums (float32 or float64)."""
    masks_are_cheap: bool
    """Whether a call with a mask takes about as long as one without: a fifth more on a CPU. Tiles
    of a sliding window are then split into fewer calls.
    """

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
        cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output [B, Hq, n, D], log-sum-exp of the scaled scores [B, Hq, n] in the dtype of the
        sums). `ValueError` where the kernel has no soft cap.
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
        cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v. `out` and `lse` are over all keys of the queries, also those of
        other calls; `lse` may be a strided view.
        """
        ...


def _order(positions: Positions) -> torch.Tensor | None:
    """The permutation [L] that sorts tokens by `index`, or None if they are sorted. Queries that
    see no key must come first; of those with the same last key, the one with the larger first key
    does.
    """
    first = positions.first
    index = torch.where(first > positions.index, -1, positions.index)
    later, same = index[1:] > index[:-1], index[1:] == index[:-1]
    if bool((later | (same & (first[1:] <= first[:-1]))).all()):
        return None
    by_first = first.argsort(descending=True, stable=True)
    return by_first[index[by_first].argsort(stable=True)]


def _heads(x: torch.Tensor, rows: slice | tuple[slice, ...] | torch.Tensor) -> torch.Tensor:
    """Rows of x [L, H, D] as [B, H, n, D]."""
    if isinstance(rows, slice):
        return x[rows].transpose(0, 1)[None]
    if isinstance(rows, tuple):
        return torch.cat([x[span] for span in rows]).transpose(0, 1)[None]
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:]).transpose(1, 2)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[B, H, n, D] as [B * n, H, D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> None:
    """Merge `more` and `more_lse` over further keys into `out` [n, H, D] and `lse` [H, n], in
    place. Entries of `lse` may be -inf, those of `more_lse` may not.
    """
    # On a GPU the check would synchronise.
    if lse.device.type == "cpu" and bool((lse == -torch.inf).all()):
        out.copy_(more)
        lse.copy_(more_lse)
        return
    total = torch.logaddexp(lse, more_lse)
    # `more_lse` is finite, because queries that see nothing are in no piece.
    out.lerp_(more, (more_lse - total).exp_().T[:, :, None])
    lse.copy_(total)


def _add(
    total: torch.Tensor, rows: slice | tuple[slice, ...] | torch.Tensor, grad: torch.Tensor
) -> None:
    """Add grad [B, H, n, D] to these rows of `total` [L, H, D], in place."""
    if isinstance(rows, slice):
        total[rows] += grad[0].transpose(0, 1)
    elif isinstance(rows, tuple):
        parts = grad[0].transpose(0, 1).split([span.stop - span.start for span in rows])
        for span, more in zip(rows, parts, strict=True):
            total[span] += more
    else:
        total.index_add_(0, rows.flatten(), _flat(grad).to(total.dtype))


class RegionBlock:
    """`Block` by one call of `operator` for each region or batch of small regions."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def prepare(
        self, queries: Positions, keys: Positions, device: torch.device
    ) -> KernelCalls | None:
        query_order, key_order = _order(queries), _order(keys)
        index, starts = queries.index, queries.first
        if query_order is not None:
            index, starts = index[query_order], starts[query_order]
        in_order = keys.index if key_order is None else keys.index[key_order]
        spans, limits = mask_regions_of(
            index.contiguous(),
            starts.contiguous(),
            in_order.contiguous(),
            masks_are_cheap=self.operator.masks_are_cheap,
        )
        if not spans:
            return None
        orders = (None if order is None else order.to(device) for order in (query_order, key_order))
        return KernelCalls(*orders, [piece.to(device) for piece in pieces_of(spans, limits)])

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: KernelCalls,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
        cap: float | None = None,
    ) -> None:
        if self.operator.upcasts:
            q, k, v = (x.to(out.dtype) for x in (q, k, v))
        full_out, full_lse = out, lse
        if work.query_order is not None:
            q, out = q.index_select(0, work.query_order), out.index_select(0, work.query_order)
            lse = lse.index_select(1, work.query_order)
        if work.key_order is not None:
            k, v = k.index_select(0, work.key_order), v.index_select(0, work.key_order)
        for piece in work.pieces:
            more, more_lse = self.operator.forward(
                *(_heads(q, piece.queries), _heads(k, piece.keys), _heads(v, piece.keys)),
                *(piece.causal, piece.mask, scale, cap),
            )
            more = more.to(out.dtype)
            if isinstance(piece.queries, slice):
                _merge(
                    out[piece.queries], lse[:, piece.queries], more[0].transpose(0, 1), more_lse[0]
                )
                continue
            rows, more = piece.queries.flatten(), _flat(more)
            more_lse = more_lse.transpose(0, 1).flatten(1)
            if piece.real is not None:
                rows, more, more_lse = rows[piece.real], more[piece.real], more_lse[:, piece.real]
            sum_out, sum_lse = out.index_select(0, rows), lse.index_select(1, rows)
            _merge(sum_out, sum_lse, more, more_lse)
            out.index_copy_(0, rows, sum_out)
            lse.index_copy_(1, rows, sum_lse)
        if work.query_order is not None:
            full_out.index_copy_(0, work.query_order, out)
            full_lse.index_copy_(1, work.query_order, lse)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: KernelCalls,
        scale: float,
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
        cap: float | None = None,
    ) -> None:
        dtype = grad_q.dtype if self.operator.upcasts else q.dtype
        grad_out, q, k, v, out = (x.to(dtype) for x in (grad_out, q, k, v, out))
        full_q, full_k, full_v = grad_q, grad_k, grad_v
        if work.query_order is not None:
            grad_out, q, out = (x.index_select(0, work.query_order) for x in (grad_out, q, out))
            lse = lse.index_select(1, work.query_order)
            grad_q = torch.zeros_like(q, dtype=full_q.dtype)
        if work.key_order is not None:
            k, v = k.index_select(0, work.key_order), v.index_select(0, work.key_order)
            grad_k, grad_v = (torch.zeros_like(x, dtype=full_k.dtype) for x in (k, v))
        for piece in work.pieces:
            rows, upstream = piece.queries, _heads(grad_out, piece.queries)
            if isinstance(rows, slice):
                piece_lse = lse[:, rows][None]
            else:
                piece_lse = (
                    lse.index_select(1, rows.flatten()).unflatten(1, rows.shape).transpose(0, 1)
                )
                if piece.real is not None:  # padding must not add to gradients
                    real = torch.zeros(rows.numel(), dtype=q.dtype, device=q.device).index_fill_(
                        0, piece.real, 1.0
                    )
                    upstream = upstream * real.view(rows.shape)[:, None, :, None]
            gradients = self.operator.backward(
                *(upstream, _heads(q, rows), _heads(k, piece.keys), _heads(v, piece.keys)),
                *(_heads(out, rows), piece_lse, piece.causal, piece.mask, scale, cap),
            )
            _add(grad_q, rows, gradients[0])
            _add(grad_k, piece.keys, gradients[1])
            _add(grad_v, piece.keys, gradients[2])
        if work.query_order is not None:
            full_q.index_add_(0, work.query_order, grad_q)
        if work.key_order is not None:
            full_k.index_add_(0, work.key_order, grad_k)
            full_v.index_add_(0, work.key_order, grad_v)

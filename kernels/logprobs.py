"""Log-prob and entropy of chosen tokens straight from hidden states: logits exist one chunk at a time.

    hidden [T, H], weight [V, H], targets [T]  ->  log-probs [T], entropies [T]   (float32, or float64 from float64)

With z = hidden weight^T / temperature, p = softmax(z), H = -sum p log p:
    forward   log p[y] = z[y] - logsumexp(z)
    backward  dz = g_logp (1[y] - p) - g_H p (log p + H)
Backward makes each chunk's logits again instead of keeping them.
"""

from __future__ import annotations

import torch

from megarl.kernels.linear import product

CHUNK_BYTES = 64 * 2**20
"""Size of one chunk of float32 logits: large enough for full matrix-product speed, small beside any model."""


def _chunk_rows(vocabulary: int) -> int:
    return max(1, CHUNK_BYTES // (4 * vocabulary))


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        num_tokens = hidden.shape[0]
        logprobs = torch.empty(num_tokens, dtype=_accumulator(hidden.dtype), device=hidden.device)
        entropy = torch.empty_like(logprobs)
        step = _chunk_rows(weight.shape[0])
        for start in range(0, num_tokens, step):
            piece = slice(start, min(start + step, num_tokens))
            log_p = _log_softmax(hidden[piece], weight, temperature)
            logprobs[piece] = log_p.gather(1, targets[piece, None])[:, 0]
            # A token of probability 0 adds nothing, where exp(-inf) * -inf would add NaN.
            entropy[piece] = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(1)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[override]
        hidden, weight, targets, entropy = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # float32 sums over chunks: bfloat16 would lose the later ones.
        grad_weight = torch.zeros_like(weight, dtype=_accumulator(weight.dtype)) if needs_weight else None
        step = _chunk_rows(weight.shape[0])
        for start in range(0, hidden.shape[0], step):
            piece = slice(start, min(start + step, hidden.shape[0]))
            log_p = _log_softmax(hidden[piece], weight, ctx.temperature)
            p = log_p.exp()
            inner = log_p.clamp_min(torch.finfo(log_p.dtype).min).add_(entropy[piece, None]).mul_(grad_entropy[piece, None])
            grad = p.mul_(inner.add_(grad_logprobs[piece, None])).neg_()
            grad.scatter_add_(1, targets[piece, None], grad_logprobs[piece, None].to(grad.dtype))
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[piece] = product(grad, weight.T)
            if grad_weight is not None:
                grad_weight += product(grad.T, hidden[piece].T)
        return grad_hidden, grad_weight.to(weight.dtype) if grad_weight is not None else None, None, None


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = product(hidden, weight).to(_accumulator(hidden.dtype))
    if temperature != 1.0:
        logits.div_(temperature)
    return torch.log_softmax(logits, dim=1)


def linear_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of `targets` and entropy, both [T] float32 (float64 from float64), under softmax(hidden weight^T / temperature).

    `hidden` [T, H] and `weight` [V, H] of one dtype; `targets` [T] int64. Differentiable in both, in both outputs.
    """
    if hidden.shape[0] != targets.shape[0] or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not fit"
        )
    return _LinearLogProbs.apply(hidden, weight, targets, temperature)  # type: ignore[return-value]

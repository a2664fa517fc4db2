"""Divergence of a student's token distribution from a teacher's, from the hidden states of both.

    hidden [T, H], weight [V, H]; teacher_hidden [T, G], teacher_weight [V, G]  ->  divergence [T]

With p = softmax(hidden weight^T / temperature) of the student and q of the teacher:

    forward_kl       sum_j q_j (log q_j - log p_j)                         KL(q || p)
    reverse_kl       sum_j p_j (log p_j - log q_j)                         KL(p || q)
    jensen_shannon   beta KL(q || m) + (1 - beta) KL(p || m)               m = beta q + (1 - beta) p

GKD, arXiv:2306.13649, eq. 1 and 2, has these with P for the teacher and Q for the student; MiniLLM,
arXiv:2306.08543, minimises reverse KL.

`top_k` = k above 0 keeps the tokens S whose teacher logit is at least the k-th largest, and puts
the rest into one bucket with p_rest and q_rest, so that a student pays for all that it puts outside
of S. The result is at most that of the whole vocabulary.

With g_j the derivative by p_j, the same for all tokens in the bucket, and logits z:

    dz_j = p_j (g_j - sum_i p_i g_i)

Logits exist for one chunk of tokens at a time, and backward recomputes them. Over a split
vocabulary forward reduces five times a chunk, and three times more with `top_k`, backward once in
all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from megarl.kernels.linear import accumulator, gradient_product
from megarl.kernels.logprobs import (
    VocabularyShard,
    add_outer,
    chunk_logits,
    row_statistics,
    token_chunks,
)
from megarl.kernels.logprobs_torch import row_blocks

LOWEST_LOG = -1e4
"""Lower bound of log p and log q: 0 times -inf would be NaN."""
BLOCK_BYTES = {"cpu": 2**20, "cuda": 64 * 2**20}
"""Of logits processed at once: on CPU they stay in cache."""


@dataclass(frozen=True)
class Divergence:
    """Settings of `linear_divergence`."""

    kind: str = "reverse_kl"
    """A name in `KINDS`."""
    beta: float = 0.5
    """Of `jensen_shannon`: weight of the teacher in the mixture, above 0 and below 1."""
    top_k: int = 0
    """The teacher's likeliest tokens that are compared one by one; 0: all tokens."""
    temperature: float = 1.0
    """Divisor of the logits of both models, above 0."""


Terms = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]


def _forward_kl(log_p: torch.Tensor, p_of: torch.Tensor, q_of: torch.Tensor, beta: float) -> Terms:
    difference = q_of - p_of
    # p / p_of is at most 1, whereas q_of / p_of may overflow.
    return None, difference, -(log_p + difference).exp()


def _reverse_kl(log_p: torch.Tensor, p_of: torch.Tensor, q_of: torch.Tensor, beta: float) -> Terms:
    difference = p_of - q_of
    return difference, None, log_p.exp() * difference


def _jensen_shannon(
    log_p: torch.Tensor, p_of: torch.Tensor, q_of: torch.Tensor, beta: float
) -> Terms:
    student = -_log_mixed(q_of, p_of, beta) * (1 - beta)
    return student, -_log_mixed(p_of, q_of, 1 - beta) * beta, log_p.exp() * student


def _log_mixed(other: torch.Tensor, own: torch.Tensor, share: float) -> torch.Tensor:
    """log(share x e^other + (1 - share) e^own) - own, for log-probs [R, V] of two distributions.
    Also accurate where both are nearly equal, so that the result is near 0.
    """
    difference = other - own
    excess = share * torch.expm1(difference.clamp(max=20.0))  # bounded: e^89 overflows float32
    own_term = torch.full_like(difference, math.log1p(-share))
    log_ratio = torch.logaddexp(difference + math.log(share), own_term)
    return torch.where(excess.abs() < 0.5, excess.log1p(), log_ratio)


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Terms]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jensen_shannon": _jensen_shannon,
}
"""{name: function of (the student's log p [R, V], log of the student's and of the teacher's
probability of each token's bucket [R, V], beta)}. The divergence is sum_j p_j a_j + q_j b_j, and
g_j its derivative by p_j, up to a constant; None stands for 0.
"""


@dataclass
class _Rows:
    """Statistics of a chunk over the whole vocabulary, [C] each."""

    m: torch.Tensor
    """Largest logit of the student."""
    log_s: torch.Tensor
    """log sum e^(z - m)."""
    teacher_m: torch.Tensor
    teacher_log_s: torch.Tensor
    threshold: torch.Tensor
    """k-th largest logit of the teacher; -inf without `top_k`."""
    rest: torch.Tensor
    """log p_rest, with `top_k`."""
    teacher_rest: torch.Tensor
    """log q_rest."""


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    row_bytes = accumulator(logits.dtype).itemsize * logits.shape[1]
    return row_blocks(len(logits), row_bytes, BLOCK_BYTES["cuda" if logits.is_cuda else "cpu"])


def _log_softmax(
    logits: torch.Tensor, m: torch.Tensor, log_s: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-probs of logits [R, V], at least `LOWEST_LOG`."""
    z = logits.to(accumulator(logits.dtype)) / temperature
    return z.sub_(m[:, None]).sub_(log_s[:, None]).clamp_min_(LOWEST_LOG)


def _threshold(teacher: torch.Tensor, top_k: int, shard: VocabularyShard | None) -> torch.Tensor:
    """[C] k-th largest of the teacher's logits, over all vocabulary ranks."""
    dtype, local = accumulator(teacher.dtype), min(top_k, teacher.shape[1])
    largest = teacher.topk(local, dim=1).values.to(dtype) if local else teacher[:, :0].to(dtype)
    if shard is None:
        return largest[:, -1]
    # Each rank fills its own part of a sum, which so becomes a gather.
    every = largest.new_zeros(shard.size, len(teacher), top_k)
    every[shard.rank] = -torch.inf
    every[shard.rank, :, :local] = largest
    return shard.reduce_sum(every).transpose(0, 1).flatten(1).topk(top_k, dim=1).values[:, -1]


def _log_rest(
    student: torch.Tensor,
    teacher: torch.Tensor,
    rows: _Rows,
    temperature: float,
    shard: VocabularyShard | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p_rest and log q_rest, [C] each, at least `LOWEST_LOG`."""
    sums = torch.zeros(2, len(student), dtype=rows.m.dtype, device=student.device)
    models = (student, rows.m, rows.log_s), (teacher, rows.teacher_m, rows.teacher_log_s)
    # Relative to the likeliest token outside of S: probabilities of e^-200 must not vanish.
    largest = torch.full_like(sums, LOWEST_LOG)

    def outside(number: int, block: slice) -> torch.Tensor:
        logits, m, log_s = models[number]
        log_p = _log_softmax(logits[block], m[block], log_s[block], temperature)
        return log_p.where(teacher[block] < rows.threshold[block, None], -torch.inf)

    for block in _blocks(student) if student.shape[1] else ():
        for number in range(2):
            largest[number, block] = outside(number, block).amax(1).clamp_min_(LOWEST_LOG)
    if shard:
        shard.reduce_max(largest)
    for block in _blocks(student):
        for number in range(2):
            relative = outside(number, block) - largest[number, block, None]
            sums[number, block] = relative.exp_().sum(1)
    if shard:
        shard.reduce_sum(sums)
    logs = (largest + sums.log()).clamp_(LOWEST_LOG, 0.0)
    return logs[0], logs[1]


def _terms(
    student: torch.Tensor, teacher: torch.Tensor, rows: _Rows, block: slice, how: Divergence
) -> tuple[torch.Tensor, torch.Tensor, Terms]:
    """(log p [R, V], log q [R, V], what `KINDS` returns) of a block."""
    log_p = _log_softmax(student[block], rows.m[block], rows.log_s[block], how.temperature)
    log_q = _log_softmax(
        teacher[block], rows.teacher_m[block], rows.teacher_log_s[block], how.temperature
    )
    p_of, q_of = log_p, log_q
    if how.top_k:
        inside = teacher[block] >= rows.threshold[block, None]
        p_of = log_p.where(inside, rows.rest[block, None])
        q_of = log_q.where(inside, rows.teacher_rest[block, None])
    return log_p, log_q, KINDS[how.kind](log_p, p_of, q_of, how.beta)


def _divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    rows: _Rows,
    how: Divergence,
    shard: VocabularyShard | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(divergence, sum_i p_i g_i) of a chunk, [C] each."""
    sums = torch.zeros(2, len(student), dtype=rows.m.dtype, device=student.device)
    for block in _blocks(student):
        log_p, log_q, (a, b, p_times_g) = _terms(student, teacher, rows, block, how)
        if a is not None:
            sums[0, block] += (log_p.exp() * a).sum(1)
        if b is not None:
            sums[0, block] += (log_q.exp() * b).sum(1)
        sums[1, block] = p_times_g.sum(1)
    if shard:
        shard.reduce_sum(sums)
    return sums[0], sums[1]


def _gradient_(
    student: torch.Tensor,
    teacher: torch.Tensor,
    rows: _Rows,
    mean: torch.Tensor,
    upstream: torch.Tensor,
    how: Divergence,
) -> None:
    """Replace the student's logits [C, V] by p_j (g_j - mean) upstream / temperature; mean = sum_i
    p_i g_i.
    """
    scale = upstream.to(mean.dtype) / how.temperature
    for block in _blocks(student):
        log_p, _, (_, _, p_times_g) = _terms(student, teacher, rows, block, how)
        grad = p_times_g - log_p.exp_().mul_(mean[block, None])
        student[block] = grad.mul_(scale[block, None])


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, targets, how, shard):
        dtype, num_tokens = accumulator(hidden.dtype), len(hidden)
        saved = torch.empty(7, num_tokens, dtype=dtype, device=hidden.device)
        divergence, mean, entropy, logprobs, teacher_logprobs = torch.empty(
            5, num_tokens, dtype=dtype, device=hidden.device
        )
        chunks, buffer = token_chunks(hidden, weight, shard)
        teacher_buffer = torch.empty_like(buffer)
        for chunk in chunks:
            student = _whole_chunk(hidden[chunk], weight, buffer)
            teacher = _whole_chunk(teacher_hidden[chunk], teacher_weight, teacher_buffer)
            m, s, t, z_y = row_statistics(student, targets[chunk], how.temperature, shard)
            teacher_m, teacher_s, _, u_y = row_statistics(
                teacher, targets[chunk], how.temperature, shard
            )
            log_s, teacher_log_s = s.log(), teacher_s.log()
            entropy[chunk], logprobs[chunk] = log_s - t / s, z_y - log_s
            teacher_logprobs[chunk] = u_y - teacher_log_s
            nothing = torch.full_like(m, -torch.inf)
            rows = _Rows(m, log_s, teacher_m, teacher_log_s, nothing, nothing, nothing)
            if how.top_k:
                rows.threshold = _threshold(teacher, how.top_k, shard)
                rows.rest, rows.teacher_rest = _log_rest(
                    student, teacher, rows, how.temperature, shard
                )
            divergence[chunk], mean[chunk] = _divergence(student, teacher, rows, how, shard)
            saved[:, chunk] = torch.stack(tuple(vars(rows).values()))
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, saved, mean.clone())
        ctx.how, ctx.shard = how, shard
        # Copies: a view would keep the other statistics alive.
        results = [x.clone() for x in (divergence, entropy, logprobs, teacher_logprobs)]
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        hidden, weight, teacher_hidden, teacher_weight, saved, mean = ctx.saved_tensors
        shard, needs_hidden, needs_weight = ctx.shard, *ctx.needs_input_grad[:2]
        dtype = accumulator(hidden.dtype)
        # float32 sums over chunks and ranks: bfloat16 would lose the later ones.
        grad_hidden = (
            torch.zeros_like(hidden, dtype=dtype if shard else None) if needs_hidden else None
        )
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        chunks, buffer = token_chunks(hidden, weight, shard)
        teacher_buffer = torch.empty_like(buffer)
        for chunk in chunks if len(weight) else []:
            student = chunk_logits(hidden[chunk], weight, buffer)
            teacher = chunk_logits(teacher_hidden[chunk], teacher_weight, teacher_buffer)
            rows = _Rows(*saved[:, chunk])
            _gradient_(student, teacher, rows, mean[chunk], upstream[chunk], ctx.how)
            if grad_hidden is not None:
                grad_hidden[chunk] = gradient_product(student, weight.T)
            if grad_weight is not None:
                add_outer(grad_weight, student, hidden[chunk])
        if shard and grad_hidden is not None and grad_hidden.numel():
            shard.reduce_sum(grad_hidden)
        pairs = (grad_hidden, hidden.dtype), (grad_weight, weight.dtype)
        grads = (grad.to(dtype) if grad is not None else None for grad, dtype in pairs)
        return (*grads, None, None, None, None, None)


def _whole_chunk(hidden: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return chunk_logits(hidden, weight, buffer) if len(weight) else buffer[: len(hidden)]


@dataclass(frozen=True)
class TokenDivergence:
    """[T] each, in nats, float32 or float64. All but `divergence` are without gradient and over the
    whole vocabulary.
    """

    divergence: torch.Tensor
    entropy: torch.Tensor
    """Of the student."""
    logprobs: torch.Tensor
    """The student's, of the target."""
    teacher_logprobs: torch.Tensor


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    targets: torch.Tensor,
    how: Divergence,
    shard: VocabularyShard | None = None,
) -> TokenDivergence:
    """Divergence at each of T tokens, for distillation, with gradients for the student.

    Args:
        hidden: [T, H] of the student.
        weight: [V, H] output head of the student, same dtype; with `shard` this rank's rows.
        teacher_hidden: [T, G] of the teacher, same dtype.
        teacher_weight: [V, G] output head of the teacher, same dtype and rows.
        targets: [T] int64 token ids whose log-probs are returned; see `linear_logprobs`.
        how: kind of divergence, beta, top-k and temperature.
        shard: as in `linear_logprobs`.
    """
    tensors = (hidden, weight, teacher_hidden, teacher_weight)
    assert len(hidden) == len(teacher_hidden) == len(targets) and len(weight) == len(teacher_weight)
    assert len({x.dtype for x in tensors}) == 1 and 0 < how.beta < 1 and how.temperature > 0
    assert how.top_k <= (len(weight) if shard is None else shard.rows * shard.size)
    return TokenDivergence(
        *_LinearDivergence.apply(
            hidden, weight, teacher_hidden, teacher_weight, targets, how, shard
        )
    )

"""One measurement of tools/bench/logprobs.py, in a process of its own: memory or time of one
system's step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WARM_UP_TOKENS = 128
KNOWN_BYTES = 256 * 2**20
METHOD_AGREES = 0.02
TIMES = ("forward_s", "step_s", "cpu_s")


def _eager(linear: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def eager(hidden: Any, weight: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        # No name holds the logits: they may go as soon as autograd lets them.
        log_p = torch.log_softmax(
            linear(hidden, weight), dim=-1, dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)

    return eager


def _eager_torch() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    import torch

    return _eager(torch.nn.functional.linear)


def _eager_onednn() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from megarl.kernels.linear import linear

    return _eager(linear)


def _fused(backend: str = "chunked") -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from megarl.kernels.logprobs import linear_logprobs

    return lambda hidden, weight, targets: linear_logprobs(hidden, weight, targets, backend=backend)


EAGER, ONEDNN, FUSED, LIGER = "eager", "eager oneDNN", "fused", "liger"
SYSTEMS: dict[str, Callable[[], Callable[..., tuple[torch.Tensor, torch.Tensor]]]] = {
    EAGER: _eager_torch,
    ONEDNN: _eager_onednn,
    FUSED: _fused,
    LIGER: lambda: _fused("liger"),
}


def peak_of(body: Callable[[], Any]) -> tuple[int, Any]:
    """The most resident bytes while `body` ran beyond those before, and what it returned."""
    from peak_memory import reset_resident_peak, resident

    if not reset_resident_peak():
        raise RuntimeError(
            "this system does not permit a process to reset its VmHWM (/proc/self/clear_refs)"
        )
    before = resident()
    result = body()
    return resident("VmHWM") - before, result


def check_method() -> None:
    """Two tensors at a time of three, one after the other: the peak is known."""
    import torch

    def body() -> None:
        numel = KNOWN_BYTES // 4
        first, second = torch.ones(numel), torch.ones(numel)
        del first
        third = torch.ones(numel)
        assert second is not third

    for _ in range(2):  # the second time shows that the first left nothing
        found, _ = peak_of(body)
        if abs(found / (2 * KNOWN_BYTES) - 1) > METHOD_AGREES:
            raise RuntimeError(
                f"the memory measurement is wrong here: {found:,} bytes found where"
                f" {2 * KNOWN_BYTES:,} were used"
            )


class Step:
    """Inputs, and a step of one system with them."""

    def __init__(self, given: dict[str, Any]) -> None:
        import torch

        self.function, self.cuda = SYSTEMS[given["system"]](), given["device"] == "cuda"
        tokens, words, width = (given[name] for name in ("tokens", "vocabulary", "hidden"))
        torch.manual_seed(0)
        settings = {"dtype": getattr(torch, given["dtype"]), "device": given["device"]}
        self.hidden = torch.randn(tokens, width, **settings).requires_grad_()
        self.weight = (
            torch.randn(words, width, **settings).mul_(2 / math.sqrt(width)).requires_grad_()
        )
        self.targets = torch.randint(0, words, (tokens,), device=given["device"])
        self.upstream = torch.randn(2, tokens, device=given["device"])

    def synchronize(self) -> None:
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def __call__(self, tokens: int | None = None) -> tuple[dict[str, float], list[Any]]:
        """Seconds, and log-probs, entropies and both gradients."""
        import torch

        piece = slice(0, tokens)
        self.synchronize()
        started_at, used = time.perf_counter(), time.process_time()
        outputs = self.function(self.hidden[piece], self.weight, self.targets[piece])
        self.synchronize()
        middle = time.perf_counter()
        grads = torch.autograd.grad(
            outputs,
            (self.hidden, self.weight),
            [x[piece].to(outputs[0].dtype) for x in self.upstream],
        )
        self.synchronize()
        seconds = {
            "forward_s": middle - started_at,
            "step_s": time.perf_counter() - started_at,
            "cpu_s": time.process_time() - used,
        }
        return seconds, [*outputs, *grads]


def work(given: dict[str, Any]) -> dict[str, Any]:
    """Memory or time of one system, in a fresh process."""
    import torch

    torch.set_num_threads(given["threads"])
    result: dict[str, Any] = {}
    if given["measure"] == "memory" and given["device"] == "cpu":
        check_method()
    step = Step(given)
    step(min(WARM_UP_TOKENS, given["tokens"]))
    try:
        if given["measure"] == "memory":
            outputs, peak = measure_memory(step)
            result |= {"peak_bytes": peak} | (
                {"room_bytes": room_bytes(step)} if given["system"] == FUSED else {}
            )
            result["digest"] = [float(x.detach().double().norm()) for x in outputs]
        else:
            repeats = [step()[0] for _ in range(given["repeats"])]
            result |= {
                name: statistics.median(seconds[name] for seconds in repeats) for name in TIMES
            }
    except torch.cuda.OutOfMemoryError:
        result["does_not_fit"] = True
    return result


def measure_memory(step: Step) -> tuple[list[Any], int]:
    """What a step returns, and its peak in bytes beyond inputs and gradients."""
    import torch

    if step.cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = step()[1]
        peak = torch.cuda.max_memory_allocated() - before
    else:
        peak, (_, outputs) = peak_of(step)
    return outputs, peak - sum(grad.nbytes for grad in outputs[2:])


def room_bytes(step: Step) -> int:
    """Bytes of the logits buffer of megarl's fused log-prob kernel for this step's inputs: the
    logits of its largest chunk of tokens.
    """
    from megarl.kernels import logprobs

    return logprobs.token_chunks(step.hidden, step.weight, None)[1].nbytes

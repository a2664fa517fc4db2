"""One version of the weights, from the trainer's ranks to every engine, with proof that it arrived.

policy.weights() on all ranks -> rank 0's carrier -> engines; then digests are compared and a fixed text is scored
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import ProcessMesh
from megarl.publish import shared_memory
from megarl.publish.config import PublishConfig
from megarl.types import Sample

CARRIERS: dict[str, Callable[[torch.dtype], Any]] = {"shared_memory": shared_memory.Sender}
"""Name -> sending end. The receiving end is in the same file."""

BACKENDS = {"shared_memory": shared_memory.NAME}
"""Name -> vLLM weight-transfer backend that the receiving end registers."""

WORKER_EXTENSIONS = {"shared_memory": "megarl.publish.shared_memory.EngineEnd"}
"""Name -> class that vLLM's workers load, and with it the receiving end."""

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest log-prob difference of a probe by engine dtype: rounding, not an error.

On random words a trained model amplifies rounding: in float32 transformers' own differs from its float64 by up to 1.1e-4 on the
quick start's models (docs/results.md), the trainer from it by 2e-6, and another machine's kernels by as much as float64.
That the weights arrived is what digests prove, to the bit; the probe finds engines that compute with them in another way.
"""

PROBE_TOKENS = 48


class SendsWeights(Protocol):
    """What publishing asks of the policy."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def logprobs(self, samples: Sequence[Sample]) -> torch.Tensor: ...


class Engines(Protocol):
    """What publishing asks of the engines, from rank 0: each call reaches all of them and answers within `timeout_s`."""

    def update(self, manifest: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]: ...

    def score(self, token_ids: list[int], *, timeout_s: float) -> list[list[float]]: ...


class Publisher:
    """The trainer's end on every rank; `engines` on rank 0 only."""

    def __init__(
        self,
        config: PublishConfig,
        *,
        policy: SendsWeights,
        engines: Engines | None,
        mesh: ProcessMesh,
        dtype: str,
        precision: str,
        vocabulary: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        """`dtype` is the engines', `precision` the trainer's; the probe stays below the engines' limit of `max_tokens`."""
        self._tolerance = config.probe_tolerance or max(TOLERANCES[dtype], TOLERANCES[precision])
        self.config, self.policy, self.engines, self.mesh, self.dtype = config, policy, engines, mesh, dtype
        self._sender = CARRIERS[config.carrier](shared_memory.DTYPES[dtype]) if mesh.world.rank == 0 else None
        self._sizes: dict[str, torch.Size] | None = None
        draw = torch.Generator().manual_seed(seed)
        length = min(PROBE_TOKENS, max_tokens - 1)
        tokens = torch.randint(0, vocabulary, (length,), generator=draw).tolist()
        self._probe = Sample(0, tokens, [False] + [True] * (length - 1), [0.0] * length)

    def publish(self, version: int) -> dict[str, float]:
        """Bring version `version` to every engine; all ranks call it. Returns metrics.

        Raises `RuntimeError`, on every rank, where an engine does not answer in time, holds other bytes than were sent,
        or scores the probe differently.
        """
        begun = time.monotonic()
        failure, found = "", {}
        if self._sizes is None:
            self._sizes = {name: tensor.shape for name, tensor in self.policy.weights()}
        if self._sender is not None:
            try:
                found = self._send(self._sender.write(self.policy.weights(), version, self._sizes))
            except Exception as error:  # told to every rank below, so that none waits for rank 0
                failure = f"publishing version {version} failed: {error}"
        else:
            for _ in self.policy.weights():
                pass
        every = self.config.probe_every
        if every and version % every == 0:
            mine = self.policy.logprobs([self._probe]).float().tolist()
            if self._sender is not None and not failure:
                try:
                    found["probe/max_abs"] = self._compare(mine, version)
                except Exception as error:
                    failure = f"the probe of version {version} failed: {error}"
        failure = broadcast_object(failure, self.mesh.world)
        if failure:
            raise RuntimeError(failure)
        return broadcast_object({"time/publish_s": time.monotonic() - begun, **found}, self.mesh.world)

    def _send(self, manifest: dict[str, Any]) -> dict[str, float]:
        """Have every engine load the manifest and compare what it holds."""
        assert self.engines is not None
        for number, answer in enumerate(self.engines.update(manifest, timeout_s=self.config.timeout_s)):
            for rank, held in enumerate(answer["held"]):
                if held != {"version": manifest["version"], "digest": manifest["digest"]}:
                    raise RuntimeError(
                        f"engine {number}, rank {rank} holds version {held['version']} with digest {held['digest']}, but "
                        f"version {manifest['version']} with digest {manifest['digest']} was sent"
                    )
        return {"publish/bytes": float(manifest["size"])}

    def _compare(self, mine: list[float], version: int) -> float:
        """Largest difference of the probe's log-probs between trainer and engines; raises where it is too large."""
        assert self.engines is not None
        worst = 0.0
        for number, theirs in enumerate(self.engines.score(self._probe.token_ids, timeout_s=self.config.timeout_s)):
            gaps = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
            gap = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
            worst = max(worst, gap)
            if gap > self._tolerance:
                raise RuntimeError(
                    f"engine {number} scores the probe text differently from the trainer at version {version}: log-probs "
                    f"differ by up to {gap:.2e}, more than {self._tolerance:.0e}; the weights it computes with are not those "
                    "published (raise publish.probe_tolerance only if you know why)"
                )
        return worst

    def close(self) -> None:
        """Release the carrier."""
        if self._sender is not None:
            self._sender.close()

"""An inference engine that is not vLLM: the model of transformers, in the actor's process, a token at
a time. It is the example of docs/howto/own_engine.md, and cheap for tests that are not about vLLM.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import torch
import transformers

from megarl.engines.interface import Pulse
from megarl.parallel.reshard.boxes import ZEROS
from megarl.settings.rollout import EngineConfig
from megarl.types import Segment, TokenArrays
from megarl.weights.bucket_receiver import BucketReceiver, InitInfo


class TransformersEngine:
    """See `megarl.engines.interface.InferenceEngine`."""

    def __init__(
        self, *, model: str, config: EngineConfig, stop_token_ids: list[int], **others: Any
    ) -> None:
        self.hf = transformers.AutoConfig.from_pretrained(model)
        self.model: Any = transformers.AutoModelForCausalLM.from_config(
            self.hf, dtype=getattr(torch, config.dtype)
        )
        self.ends, self.version = set(stop_token_ids), -1
        self.steps = self.open = 0

    async def start(self) -> None: ...

    @torch.no_grad()
    def law(self, token_ids: list[int], temperature: float) -> torch.Tensor:
        """[T, V] log-probs of what follows each token."""
        logits = self.model(torch.tensor([token_ids])).logits[0].float()
        return (logits / temperature).log_softmax(-1)

    async def generate(
        self, prompt_ids: list[int], *, seed: int, max_tokens: int, temperature: float
    ) -> Segment:
        draw = torch.Generator().manual_seed(seed)
        made, logprobs, versions = [], [], []
        self.open += 1
        while len(made) < max_tokens and not (made and made[-1] in self.ends):
            last = self.law(prompt_ids + made, temperature or 1.0)[-1]
            chosen = (
                torch.multinomial(last.exp(), 1, generator=draw) if temperature else last.argmax()
            )
            made.append(int(chosen))
            logprobs.append(float(last[made[-1]]))
            versions.append(self.version)
            self.steps += 1
            await asyncio.sleep(0)  # other requests, and new weights
        self.open -= 1
        spans = [(version, len(list(same))) for version, same in itertools.groupby(versions)]
        return Segment(
            kind="model",
            num_tokens=len(made),
            arrays=TokenArrays(np.array(made, np.int32), np.array(logprobs, np.float32)),
            versions=spans,
            finish="stop" if made[-1] in self.ends else "length",
        )

    async def score(self, token_ids: list[int], adapted: bool = True) -> list[float]:
        law = self.law(token_ids, 1.0)[:-1]
        return law.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()

    async def connect(self, info: dict[str, Any]) -> None:
        self.weights = BucketReceiver(InitInfo(**info), rank=0)

    async def update(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        in_thread = asyncio.get_running_loop().run_in_executor
        whole = await in_thread(None, self._receive, timeout_s)
        # An engine parameter has several tensors of the checkpoint, one behind the other.
        for piece in self.weights.route.owned.pieces:
            if piece.tensor != ZEROS:
                mine = self.model.get_parameter(piece.tensor).data
                mine.copy_(piece.view(whole[piece.buffer]).reshape(mine.shape))
        status = self.weights.status(version) | {"problem": ""}
        self.version = version
        return [status]

    def _receive(self, timeout_s: float) -> dict[str, torch.Tensor]:
        """{parameter of an engine: flat tensor}"""
        route = self.weights.route
        whole = {name: torch.empty(n, dtype=route.dtype) for name, n in route.owned.sizes.items()}
        for bucket, buffers in self.weights.buckets(timeout_s):
            for name, flat in buffers.items():
                whole[name][bucket.starts[name] :][: len(flat)] = flat
            self.weights.digest(bucket, buffers)
        return whole

    async def load_adapter(self, version: int, files: dict[str, bytes]) -> dict[str, Any]:
        raise RuntimeError("this engine has no adapters; set training.lora.publish to merged")

    async def pulse(self) -> Pulse:
        return Pulse(self.steps, self.steps, 0, 0, self.open, is_paused=False, is_dead=False)

    async def paused_s(self, last_s: float) -> float:
        return 0.0

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def stop(self) -> None: ...

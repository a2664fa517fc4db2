"""The engine `vllm`: vLLM's AsyncLLM, with weights through its weight-transfer interface."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from megarl.engines.interface import Pauses, Pulse
from megarl.engines.vllm_arguments import engine_arguments, is_on_cpu, tokenizer_arguments
from megarl.engines.vllm_core import VllmProcess, vllm_imports
from megarl.settings.rollout import PLAIN, EngineConfig, Sampling
from megarl.types import Segment, TokenArrays, expert_dtype, unreported_experts
from megarl.weights.weight_receipts import receipt_of_adapter

BACKEND = "megarl"
"""Name of megarl's weight transfer in vLLM."""

ADAPTER = "policy"
"""Name of the LoRA adapters in vLLM."""

UNPUBLISHED = -1
"""Version of weights that were not published, or that vLLM does not name."""

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM 0.32 can keep room; adapters may have lower ones."""

WORKER_EXTENSION = "megarl.weights.receiver.WeightSyncWorker"
"""Importing its module registers `BACKEND`."""

RECORDING_EXTENSION = "megarl.engines.expert_record.RecordingWorker"
"""The same, which also records experts."""


class Engine(VllmProcess):
    """One vLLM engine (`InferenceEngine`). Errors of vLLM are raised unchanged."""

    reports_experts = True

    def __init__(
        self,
        *,
        number: int,
        model: str,
        config: EngineConfig,
        max_tokens: int,
        stop_token_ids: list[int],
        trust_remote_code: bool,
        seed: int,
        environment: dict[str, str],
        load: bool = False,
        sleeps: bool = False,
        sampling: Sampling = PLAIN,
        tokenizer: str = "",
        adapter_rank: int = 0,
        records_experts: bool = False,
    ) -> None:
        """`max_tokens`: longest sequence, prompt included. `environment`: variables to set before
        vLLM is imported. `load`: read weights from disk; else they are random until version 0.
        `sleeps`: can free its GPU memory. `sampling`: where a request does not say. `tokenizer`:
        needed for stop texts. `adapter_rank`: of LoRA adapters to come; 0 for none.
        `records_experts`: segments have `TokenArrays.experts`.
        """
        os.environ.update(environment)  # before vLLM is imported: it reads them once
        self.number, self.config, self.stop_token_ids = number, config, stop_token_ids
        self.version, self.sampling = UNPUBLISHED, sampling
        self._adapts = bool(adapter_rank)
        self._numbers, self._asleep = itertools.count(1), False
        self._open = 0
        """Requests that are not yet answered."""
        self._pauses = Pauses()
        """A failed update leaves generation paused until one succeeds."""
        self._steps, self._tokens = 0, 0
        self._preemptions = 0
        self._prompt_tokens, self._cached_tokens = 0, 0
        self._lora: Any = None
        """vLLM's request for the published adapters."""
        self._on_cpu, self._tokenizer = is_on_cpu(environment), tokenizer
        self._arguments: dict[str, Any] = engine_arguments(
            config,
            model=model,
            max_tokens=max_tokens,
            trust_remote_code=trust_remote_code,
            seed=seed,
            on_cpu=self._on_cpu,
        ) | {
            "generation_config": "vllm",
            "load_format": "auto" if load else "dummy",
            # Log-probs of the law that was sampled from: temperature applied. The default would be
            # raw.
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER_EXTENSION,
            "enable_sleep_mode": sleeps,
        }
        self._records_experts = records_experts
        if records_experts:
            self._arguments |= {"worker_extension_cls": RECORDING_EXTENSION}
            self._arguments |= {"enable_return_routed_experts": not self._on_cpu}
        if adapter_rank:
            rank = min(rank for rank in VLLM_RANKS if rank >= adapter_rank)
            self._arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}

    async def start(self) -> None:
        """Blocks the event loop."""
        with vllm_imports(on_cpu=self._on_cpu):
            from vllm import AsyncEngineArgs, SamplingParams
            from vllm.config import WeightTransferConfig
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.engine.core_client import EngineCoreClient

        self._sampling, self._final = SamplingParams, RequestOutputKind.FINAL_ONLY
        transfer = WeightTransferConfig(backend=BACKEND)
        trusted = self._arguments["trust_remote_code"]
        make: Any = EngineCoreClient.make_async_mp_client

        def make_core(**settings: Any) -> Any:
            return make(**settings | {"log_stats": True})

        # The core alone keeps statistics: it then says which requests it pushes out of the cache.
        with (
            tokenizer_arguments(self._tokenizer, trust_remote_code=trusted) as text,
            patch.object(EngineCoreClient, "make_async_mp_client", make_core),
        ):
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**self._arguments | text, weight_transfer_config=transfer)
            )
        self._count_steps()
        if self._records_experts:
            answers = await self._llm.collective_rpc("megarl_expert_layers")
            self._expert_layers, self._num_experts = answers[0]
            if self._on_cpu:
                await self._llm.collective_rpc("megarl_record_experts")

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Segment:
        """`max_tokens` includes a final end-of-sequence token or stop text. `stop`: further texts,
        which may be special tokens.
        """
        chosen = sampling or self.sampling
        truncation: dict[str, Any] = chosen.truncation if temperature > 0 else {}
        request = self._sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(chosen.stop or stop),
            stop=[*chosen.stop, *stop],
            skip_special_tokens=not stop,
            include_stop_str_in_output=True,
            stop_token_ids=self.stop_token_ids,
            output_kind=self._final,
            **truncation,
        )
        # The salt keeps a prefix cached under old weights from serving a request under new ones.
        prompt = {"prompt_token_ids": prompt_ids, "cache_salt": f"v{self.version}"}
        final = await self._run(prompt, request, "sample")
        self._prompt_tokens += len(prompt_ids)
        self._cached_tokens += final.num_cached_tokens or 0
        output = final.outputs[0]
        spans = [
            # vLLM's name for weights that were never published is no number.
            (int(span.version) if span.version.isdecimal() else UNPUBLISHED, span.end - span.start)
            for span in output.weight_versions or ()
        ]
        if not spans or (self._adapts and self._lora is None):
            spans = [(UNPUBLISHED, len(output.token_ids))]
        return Segment(
            kind="model",
            num_tokens=len(output.token_ids),
            arrays=TokenArrays(
                token_ids=np.asarray(output.token_ids, dtype=np.int32),
                logprobs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
                experts=await self._experts(final) if self._records_experts else None,
            ),
            versions=spans,
            finish="stop" if output.finish_reason == "stop" else "length",
        )

    async def _experts(self, request_output: Any) -> np.ndarray:
        """[T, layers, K]: experts that each MoE layer chose for prompt and output tokens. The last
        token was never an input: `unreported_experts`.
        """
        output, dtype = request_output.outputs[0], expert_dtype(self._num_experts)
        count = len(request_output.prompt_token_ids) + len(output.token_ids)
        if self._on_cpu:
            arguments = (request_output.request_id, count - 1)
            answers = await self._llm.collective_rpc("megarl_take_experts", args=arguments)
            shape, content = answers[0]
            recorded = np.frombuffer(content, dtype).reshape(shape)
        else:
            recorded = output.routed_experts[: count - 1, self._expert_layers].astype(dtype)
        experts = np.full((count, *recorded.shape[1:]), unreported_experts(dtype), dtype)
        experts[: len(recorded)] = recorded
        return experts

    async def score(self, token_ids: list[int], adapted: bool = True) -> list[float]:
        sampling = self._sampling(
            max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False
        )
        prompt = {"prompt_token_ids": token_ids, "cache_salt": f"v{self.version}"}
        final = await self._run(prompt, sampling, "score", adapted=adapted)
        assert final.prompt_logprobs is not None
        entries: Any = final.prompt_logprobs[1:]
        return [entry[token].logprob for token, entry in zip(token_ids[1:], entries, strict=True)]

    async def pulse(self) -> Pulse:
        return Pulse(
            steps=self._steps,
            tokens=self._tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            requests=self._open,
            is_paused=self._pauses.is_paused,
            is_dead=self.is_lost,
            preemptions=self._preemptions,
        )

    async def paused_s(self, last_s: float) -> float:
        return self._pauses.within(last_s)

    def _count_steps(self) -> None:
        """Wrap vLLM's `get_output_async` to count steps, tokens and preemptions. vLLM's own stat
        loggers would update Prometheus metrics for every token too.
        """
        from vllm.v1.engine import EngineCoreEventType

        preempted = EngineCoreEventType.PREEMPTED
        core: Any = self._llm.engine_core
        next_output = core.get_output_async

        async def counted() -> Any:
            outputs = await next_output()
            self._steps += 1
            self._tokens += sum(len(output.new_token_ids) for output in outputs.outputs)
            for event in (event for output in outputs.outputs for event in output.events or ()):
                # A pause for new weights preempts every running request; only a full cache counts.
                is_cache_full = event.type == preempted and not self._pauses.had(event.timestamp)
                self._preemptions += is_cache_full
            return outputs

        core.get_output_async = counted

    async def connect(self, info: dict[str, Any]) -> None:
        """Raises `RuntimeError` if a rank cannot receive weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        self._refuse_problem(await self._llm.collective_rpc("megarl_weight_status"))

    async def update(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        """Generation pauses, then open requests continue with a recomputed cache. Raises
        `RuntimeError` if a rank failed; generation then stays paused until an update succeeds.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._pauses.begin()
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.start_weight_update()
        await self._llm.update_weights(
            WeightTransferUpdateRequest({"version": version, "timeout_s": timeout_s})
        )
        owned = await self._llm.collective_rpc("megarl_weight_status")
        is_whole = not any(rank["problem"] for rank in owned)
        await self._llm.finish_weight_update(weight_version=str(version) if is_whole else None)
        self._refuse_problem(owned)
        self.version = version
        if self._asleep:
            await self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        await self._llm.resume_generation()
        self._pauses.end()
        return owned

    async def load_adapter(self, version: int, files: dict[str, bytes]) -> dict[str, Any]:
        """Replaces earlier adapters. Raises `RuntimeError` if vLLM does not list these."""
        from vllm.lora.request import LoRARequest

        self._pauses.begin()
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        with tempfile.TemporaryDirectory(prefix="megarl_adapter_") as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            await self._llm.add_lora(LoRARequest(ADAPTER, 1, folder, load_inplace=True))
            self._lora = LoRARequest(ADAPTER, 1, folder)  # of later requests: it is loaded
        if self._lora.lora_int_id not in await self._llm.list_loras():
            raise RuntimeError(f"vLLM has dropped the adapters of version {version}")
        await self._llm.update_weight_version(str(version))
        self.version = version
        await self._llm.resume_generation()
        self._pauses.end()
        return {"version": version, "receipt": receipt_of_adapter(files)}

    def _refuse_problem(self, owned: list[dict[str, Any]]) -> None:
        """Raise `RuntimeError` if a rank reports a problem: vLLM does not expect one rank to
        raise.
        """
        for rank, answer in enumerate(owned):
            if answer["problem"]:
                raise RuntimeError(
                    f"rank {rank}: {answer['problem']}" if len(owned) > 1 else answer["problem"]
                )

    async def sleep(self) -> None:
        """On the CPU only generation pauses."""
        self._pauses.begin()
        await self._llm.sleep(level=2, mode="keep")
        self._asleep = True

    async def wake(self) -> None:
        """The next `update` fills the weights and allocates the key-value cache."""
        await self._llm.wake_up(tags=["weights"])

    async def _run(
        self, prompt: dict[str, Any], sampling: Any, kind: str, *, adapted: bool = True
    ) -> Any:
        """The last output of vLLM for a request."""
        final = None
        self._open += 1
        try:
            async for final in self._llm.generate(
                prompt,  # pyright: ignore[reportArgumentType]
                sampling,
                f"{kind}-{next(self._numbers)}",
                lora_request=self._lora if adapted else None,
            ):
                pass
        finally:
            self._open -= 1
        assert final is not None
        return final

"""A reward model in vLLM: a sequence classifier with one label, run as a pooling model in a process
of its own. Token ids in, one score out: the classifier's logit at the last token.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from megarl.quick_imports import quick_imports
from megarl.rollout.config import EngineConfig
from megarl.rollout.engine_arguments import engine_arguments, is_on_cpu
from megarl.rollout.engine_core import fork_core, import_core_ahead, spawn_core


class PoolingEngine:
    """One vLLM engine that scores. All methods must run in one event loop, where they may run
    concurrently; vLLM batches the requests that are under way.
    """

    def __init__(
        self,
        *,
        model: str,
        config: EngineConfig,
        max_tokens: int,
        trust_remote_code: bool,
        environment: dict[str, str],
    ) -> None:
        """`max_tokens`: length of the longest text. `environment`: environment variables of vLLM,
        as `megarl.cluster.process_env.engine_environment` makes them.
        """
        os.environ.update(environment)  # before vLLM is imported: it reads them once
        self._on_cpu, self._requests = is_on_cpu(environment), 0
        self._arguments = engine_arguments(
            config,
            model=model,
            tokenizer="",
            max_tokens=max_tokens,
            trust_remote_code=trust_remote_code,
            seed=0,
            on_cpu=self._on_cpu,
        )

    async def start(self) -> float:
        """Start vLLM, which reads the weights; returns the seconds that it took. Errors of vLLM
        are raised unchanged.
        """
        started_at = time.monotonic()
        if self._on_cpu:
            import_core_ahead()
        with quick_imports():
            from vllm import AsyncEngineArgs, PoolingParams
            from vllm.config import PoolerConfig
            from vllm.v1.engine.async_llm import AsyncLLM

        fork_core() if self._on_cpu else spawn_core()
        # A reward is the logit itself: vLLM would put a sigmoid over the score of a single label.
        self._pooling = PoolingParams(task="classify", use_activation=False)
        pooler = PoolerConfig(task="classify", seq_pooling_type="LAST", use_activation=False)
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                **self._arguments, runner="pooling", convert="classify", pooler_config=pooler
            )
        )
        return time.monotonic() - started_at

    async def score(self, token_ids: list[int]) -> float:
        """The score of a text, which may be no finite number."""
        self._requests += 1
        final: Any = None
        async for final in self._llm.encode(
            {"prompt_token_ids": token_ids},
            self._pooling.clone(),
            f"score-{self._requests}",
        ):
            pass
        (value,) = final.outputs.data.float().tolist()
        return value

    @property
    def is_lost(self) -> bool:
        """Whether vLLM's process has died, so that no request will be answered any more."""
        return self._llm.errored

    async def stop(self) -> None:
        """Shut down vLLM's processes."""
        llm = getattr(self, "_llm", None)
        if llm is not None:
            await asyncio.get_running_loop().run_in_executor(None, llm.shutdown)

"""What a reward server may have behind it: one async context manager for each kind, which starts
it, yields a `Backend` (an async function from prompt and response to a score) and ends it.

    verifier_backend   worker processes        torch_backend   a reward model in a thread
    engine_backend     a reward model in vLLM  judge_backend   a language model in vLLM
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from megarl import console
from megarl.apps.serve.reward_server import Backend
from megarl.environments.batch_queue import BatchQueue
from megarl.environments.config import EnvironmentConfig, RewardServerConfig
from megarl.environments.judging import Judge
from megarl.environments.scores import BadScore, Outcome
from megarl.environments.scoring import client_token
from megarl.errors import EngineLost, UserError
from megarl.rollout.config import EngineConfig
from megarl.rollout.engine_arguments import engine_arguments, is_on_cpu
from megarl.rollout.engine_core import VllmProcess, vllm_imports
from megarl.serve_config import JudgeConfig, ServedModelConfig
from megarl.signals import past_interrupts
from megarl.trainer.config import TrainingConfig
from megarl.types import Prompt

if TYPE_CHECKING:
    from megarl.apps.serve.served_models import ServedJudge, ServedRewardModel
    from megarl.rollout.engine import Engine

END_WITHIN_S = 5.0
"""Seconds that the processes of an engine have to end before they are killed."""


class PoolingEngine(VllmProcess):
    """A reward model in vLLM: a sequence classifier with one label, run as a pooling model in a
    process of its own. All methods must run in one event loop, where they may run concurrently;
    vLLM batches the requests that are under way.
    """

    def __init__(
        self, served: ServedModelConfig, max_tokens: int, environment: dict[str, str]
    ) -> None:
        """Only sets environment variables and arguments; `start` starts vLLM. `max_tokens`: number
        of tokens of the longest text. `environment`: variables that vLLM reads, as
        `vllm_environment` returns them; this process gets them too.
        """
        os.environ.update(environment)  # before vLLM is imported: it reads them once
        self._on_cpu, self._requests = is_on_cpu(environment), 0
        self._arguments = engine_arguments(
            served.engine,
            model=served.model.path,
            max_tokens=max_tokens,
            trust_remote_code=served.model.trust_remote_code,
            seed=0,
            on_cpu=self._on_cpu,
        )

    async def start(self) -> None:
        """Start the process of vLLM, which reads the reward model's weights, and wait until it is
        ready to score. Errors of vLLM are raised unchanged.
        """
        with vllm_imports(on_cpu=self._on_cpu):
            from vllm import AsyncEngineArgs, PoolingParams
            from vllm.config import PoolerConfig
            from vllm.v1.engine.async_llm import AsyncLLM

        # A reward is the logit itself: vLLM would put a sigmoid over the score of a single label.
        self._pooling = PoolingParams(task="classify", use_activation=False)
        pooler = PoolerConfig(task="classify", seq_pooling_type="LAST", use_activation=False)
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                **self._arguments, runner="pooling", convert="classify", pooler_config=pooler
            )
        )

    async def score(self, token_ids: list[int]) -> float:
        """Wait for the score of a text, given as token ids: the classifier's logit at its last
        token, which may be NaN or infinite. Errors of vLLM are raised unchanged.
        """
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


@asynccontextmanager
async def verifier_backend(config: EnvironmentConfig) -> AsyncIterator[Backend]:
    """Context manager: start the recipe's verifier or reward functions for a reward server, in
    `config.num_workers` worker processes, and end them with the block. Yields the async function
    (prompt, response) that scores (`score`), and how many calls of it may run at once (`lanes`).
    """
    judge = Judge(config, None, client_token(config))

    async def score(prompt: Prompt, response: str) -> Outcome:
        call = asyncio.ensure_future(judge.judge(prompt, response))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait({call})  # a worker goes on with it, and is not free before
            raise

    try:
        with console.phase("verifier"):
            await judge.pool.start()
        # A call that asks another server waits without a process.
        lanes = config.num_workers
        if judge.clients:
            lanes *= config.remote.batch_size
        yield Backend(score, lanes)
    finally:
        await judge.close()


@asynccontextmanager
async def torch_backend(
    model: ServedRewardModel, settings: RewardServerConfig
) -> AsyncIterator[Backend]:
    """Context manager: load the recipe's reward model for a reward server with torch, in one thread
    that runs it in batches of up to `settings.batch_size` texts, and release it with the block.
    Yields the async function (prompt, response) that scores (`score`), and how many calls of it may
    run at once (`lanes`).
    """
    # Torch and transformers, which a server of verifiers does without.
    from megarl.apps.tune.text_scores import TextScorer

    served = model.config
    training = TrainingConfig(
        precision=served.precision, micro_batch_tokens=served.micro_batch_tokens
    )
    queue: BatchQueue[list[int], float] = BatchQueue()
    thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
    loop = asyncio.get_running_loop()

    def load() -> TextScorer:
        return TextScorer(
            served.model, training, tokenizer=model.tokenizer, template=served.template, seed=0
        )

    async def values(texts: list[list[int]]) -> list[float | Exception]:
        """The score of each text, given as token ids, or the exception of a text that could not be
        scored: the error of one text costs no other its score.
        """
        try:
            return [*await loop.run_in_executor(thread, scorer.token_scores, texts)]
        except Exception as error:
            if len(texts) == 1:
                return [error]
            return [value for text in texts for value in await values([text])]

    async def work() -> None:
        while True:
            batch = await queue.take(settings.batch_size, settings.linger_ms / 1e3)
            found = await values([one.item for one in batch])
            for one, value in zip(batch, found, strict=True):
                one.fail(value) if isinstance(value, Exception) else one.answer(value)

    async def score(prompt: Prompt, response: str) -> Outcome:
        return _finite(await queue.put(model.ids(prompt, response)).result)

    with console.phase(f"reward model {served.model.path}"):
        scorer = await loop.run_in_executor(thread, load)
    worker = asyncio.create_task(work())
    try:
        yield Backend(score, lanes=2 * settings.batch_size)  # one batch waits for the other
    finally:
        worker.cancel()
        await loop.run_in_executor(thread, scorer.close)
        thread.shutdown()


def engine_backend(
    model: ServedRewardModel, settings: RewardServerConfig
) -> AbstractAsyncContextManager[Backend]:
    """Context manager: run the recipe's reward model for a reward server in a vLLM engine, which
    batches by itself, and end the engine with the block. Yields the async function (prompt,
    response) that scores (`score`), and how many calls of it may run at once (`lanes`). Raises
    `UserError` on entry if vLLM does not start.
    """
    served = model.config
    engine = PoolingEngine(served, model.max_tokens, vllm_environment(served.engine))

    async def score(prompt: Prompt, response: str) -> Outcome:
        return _finite(await engine.score(model.ids(prompt, response)))

    what, lanes = f"reward_model {served.model.path}", served.engine.max_num_sequences
    return _running(engine, score, lanes, served.time_limit_s, what)


def judge_backend(judge: JudgeConfig, served: ServedJudge) -> AbstractAsyncContextManager[Backend]:
    """Context manager: run the recipe's judge, a language model that writes verdicts on responses,
    for a reward server in a vLLM engine, and end the engine with the block. Yields the async
    function (prompt, response) that scores (`score`), and how many calls of it may run at once
    (`lanes`). Raises `UserError` on entry if vLLM does not start.
    """
    # vLLM, which the other backends do without.
    from megarl.apps.serve.judge import judged
    from megarl.rollout.engine import Engine

    engine = Engine(
        number=0,
        model=judge.model.path,
        config=judge.engine,
        max_tokens=served.max_tokens,
        stop_token_ids=served.stop_token_ids,
        trust_remote_code=judge.model.trust_remote_code,
        seed=judge.seed,
        environment=vllm_environment(judge.engine),
        load=True,
    )
    score = functools.partial(judged, judge, served, engine.generate)
    lanes = max(1, judge.engine.max_num_sequences // judge.samples)
    return _running(engine, score, lanes, judge.time_limit_s, f"judge {judge.model.path}")


def _finite(score: float) -> Outcome:
    """The outcome of what a reward model has computed. Raises `BadScore`."""
    if not math.isfinite(score):
        raise BadScore("nan", f"the reward model scored {score}")
    return Outcome(score)


def vllm_environment(engine: EngineConfig) -> dict[str, str]:
    """Environment variables, {name: value}, for the vLLM process of an engine with the settings
    `engine`: number of threads, device, size of the KV cache, and `engine.start_timeout_s` as
    vLLM's deadline of its start.
    """
    from megarl.cluster.process_env import engine_environment
    from megarl.parallel.mesh import local_device
    from megarl.trainer.threads import shared

    return engine_environment(
        on_cpu=local_device().type == "cpu",
        num_threads=engine.num_threads or shared(1),
        kv_cache_gib=engine.kv_cache_gib,
    ) | {"VLLM_ENGINE_READY_TIMEOUT_S": f"{max(1, round(engine.start_timeout_s))}"}


@asynccontextmanager
async def _running(
    engine: Engine | PoolingEngine,
    score: Callable[[Prompt, str], Awaitable[Outcome]],
    lanes: int,
    limit_s: float,
    what: str,
) -> AsyncIterator[Backend]:
    """A backend of `engine`, which runs until the end of the block. `limit_s`: seconds of one call
    of `score`. `what`: section of the recipe and model. Raises `UserError` if vLLM does not start
    it. No process of the engine is left behind.
    """
    section, named = what.split(" ", 1)[0], what.replace("_", " ", 1)

    async def within_limit(prompt: Prompt, response: str) -> Outcome:
        try:
            async with asyncio.timeout(limit_s):
                return await score(prompt, response)
        except TimeoutError:
            said = f"no score within {section}.time_limit_s = {limit_s:g} s"
            raise BadScore("timeout", said) from None
        except Exception as error:
            if not engine.is_lost:
                raise
            said = f"vLLM's process has died ({type(error).__name__}: {error}); see run.log"
            raise EngineLost(said) from error

    try:
        with console.phase(named), uninterrupted():
            try:
                with past_interrupts():
                    await engine.start()
            except Exception as error:
                raise UserError(
                    f"vLLM does not start {named} ({type(error).__name__}: {error}); see run.log"
                ) from error
        yield Backend(within_limit, lanes)
    finally:
        try:
            await engine.stop()
        finally:
            _end_children()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Context manager: block SIGINT and SIGHUP, which a terminal sends to all processes of a
    command, for this thread and the processes that it starts in the block. vLLM's processes then
    live until the server has answered its open requests.
    """
    resource_tracker.ensure_running()  # its start unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_children() -> None:
    """Wait `END_WITHIN_S` seconds for the child processes, all vLLM's; kill those that are left."""
    import psutil

    found: list[Any] = psutil.Process().children(recursive=True)
    for process in psutil.wait_procs(found, timeout=END_WITHIN_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

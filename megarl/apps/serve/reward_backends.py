"""What a reward server may have behind it: one function for each kind, which starts it, yields a
`Backend` and ends it.

    verifier_backend   worker processes        torch_backend   a reward model in a thread
    engine_backend     a reward model in vLLM  judge_backend   a language model in vLLM
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from megarl import console
from megarl.apps.serve.reward_server import Backend
from megarl.environments.judging import Judge
from megarl.environments.scores import Outcome
from megarl.environments.scoring import client_token
from megarl.environments.wire import Sample
from megarl.errors import EngineLost, UserError
from megarl.rollout.config import EngineConfig
from megarl.serve_config import ServeRewardConfig
from megarl.signals import past_interrupts
from megarl.trainer.config import TrainingConfig

if TYPE_CHECKING:
    from megarl.apps.serve.pooling_engine import PoolingEngine
    from megarl.apps.serve.served_models import ServedModel
    from megarl.rollout.engine import Engine

END_WITHIN_S = 5.0
"""Seconds that the processes of an engine have to end before they are killed."""


@asynccontextmanager
async def verifier_backend(config: ServeRewardConfig) -> AsyncIterator[Backend]:
    """A backend of the recipe's verifier or reward functions, in their worker processes."""
    judge = Judge(config.environment, None, client_token(config.environment))

    async def score(samples: Sequence[Sample]) -> list[Outcome]:
        return [await judge.judge(prompt, response) for prompt, response in samples]

    try:
        with console.phase("verifier"):
            await judge.pool.start()
        # A call that asks another server waits without a process.
        lanes = config.environment.num_workers
        if judge.clients:
            lanes *= config.environment.remote.batch_size
        yield Backend(score, lanes=lanes, most=1)
    finally:
        await judge.close()


@asynccontextmanager
async def torch_backend(config: ServeRewardConfig, model: ServedModel) -> AsyncIterator[Backend]:
    """A backend of the recipe's reward model, which one thread loads and runs."""
    # Torch and transformers, which a server of verifiers does without.
    from megarl.apps.tune.text_scores import TextScorer
    from megarl.chat_template import end_of_turn
    from megarl.data.tokens import scored_tokens

    served, loop = config.reward_model, asyncio.get_running_loop()
    end = end_of_turn(model.tokenizer, served.template)
    training = TrainingConfig(
        precision=served.precision, micro_batch_tokens=served.micro_batch_tokens
    )
    thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
    with console.phase(f"reward model {served.model.path}"):
        scorer = await loop.run_in_executor(
            thread,
            lambda: TextScorer(
                served.model,
                training,
                tokenizer=model.tokenizer,
                template=served.template,
                seed=0,
            ),
        )

    def scores(samples: Sequence[Sample]) -> list[Outcome]:
        try:
            return together(samples)
        except Exception as error:
            if len(samples) == 1:
                return [Outcome(failure="error", detail=f"{type(error).__name__}: {error}")]
            # One text that cannot be read costs its own sample only.
            return [one for sample in samples for one in scores([sample])]

    def together(samples: Sequence[Sample]) -> list[Outcome]:
        prompts, replies = [prompt.text for prompt, _ in samples], [reply for _, reply in samples]
        texts = scored_tokens(model.tokenizer, prompts, replies, served.template, end)
        found = [too_long(ids, model.max_tokens, "reward_model") for ids in texts]
        short = [ids for ids, failed in zip(texts, found, strict=True) if failed is None]
        values = iter(scorer.token_scores(short))
        return [outcome_of(next(values)) if failed is None else failed for failed in found]

    async def score(samples: Sequence[Sample]) -> list[Outcome]:
        return await loop.run_in_executor(thread, scores, samples)

    settings = config.server
    try:
        yield Backend(score, 1, settings.batch_size, settings.linger_ms / 1e3)
    finally:
        await loop.run_in_executor(thread, scorer.close)
        thread.shutdown()


@asynccontextmanager
async def engine_backend(config: ServeRewardConfig, model: ServedModel) -> AsyncIterator[Backend]:
    """A backend of the recipe's reward model in a vLLM engine, which batches by itself."""
    # vLLM, which the other backends do without.
    from megarl.apps.serve.pooling_engine import PoolingEngine
    from megarl.chat_template import end_of_turn
    from megarl.data.tokens import scored_tokens

    served = config.reward_model
    end = end_of_turn(model.tokenizer, served.template)
    engine = PoolingEngine(
        model=served.model.path,
        config=served.engine,
        max_tokens=model.max_tokens,
        trust_remote_code=served.model.trust_remote_code,
        environment=vllm_environment(served.engine, on_cpu=model.on_cpu),
    )

    async def score(samples: Sequence[Sample]) -> list[Outcome]:
        ((prompt, response),) = samples
        (ids,) = scored_tokens(model.tokenizer, [prompt.text], [response], served.template, end)
        if failed := too_long(ids, model.max_tokens, "reward_model"):
            return [failed]
        try:
            async with asyncio.timeout(served.time_limit_s):
                return [outcome_of(await engine.score(ids))]
        except TimeoutError:
            return [late(served.time_limit_s, "reward_model")]
        except Exception as error:
            raise lost_or(error, engine) from error

    async with running(engine, f"reward model {served.model.path}"):
        yield Backend(score, lanes=served.engine.max_num_sequences, most=1, drops=True)


@asynccontextmanager
async def judge_backend(config: ServeRewardConfig, served: ServedModel) -> AsyncIterator[Backend]:
    """A backend of the recipe's judge, a language model in a vLLM engine."""
    # vLLM, which the other backends do without.
    from megarl.apps.serve.judge import EngineJudge
    from megarl.apps.serve.served_models import ServedJudge
    from megarl.rollout.engine import Engine

    judge = config.judge
    assert isinstance(served, ServedJudge)
    engine = Engine(
        number=0,
        model=judge.model.path,
        config=judge.engine,
        max_tokens=served.max_tokens,
        stop_token_ids=served.stop_token_ids,
        trust_remote_code=judge.model.trust_remote_code,
        seed=judge.seed,
        environment=vllm_environment(judge.engine, on_cpu=served.on_cpu),
        load=True,
    )
    asked = EngineJudge(
        judge,
        engine.generate,
        tokenizer=served.tokenizer,
        prompt=served.prompt,
        reader=served.reader,
        max_tokens=served.max_tokens,
    )

    async def score(samples: Sequence[Sample]) -> list[Outcome]:
        ((prompt, response),) = samples
        try:
            async with asyncio.timeout(judge.time_limit_s):
                return [await asked.judge(prompt, response)]
        except TimeoutError:
            return [late(judge.time_limit_s, "judge")]
        except Exception as error:
            raise lost_or(error, engine) from error

    lanes = max(1, judge.engine.max_num_sequences // judge.samples)
    async with running(engine, f"judge {judge.model.path}"):
        yield Backend(score, lanes=lanes, most=1, drops=True)


def outcome_of(score: float) -> Outcome:
    """The outcome of what a reward model has computed."""
    if math.isfinite(score):
        return Outcome(score)
    return Outcome(failure="nan", detail=f"the reward model scored {score}")


def too_long(ids: Sequence[int], most: int, section: str) -> Outcome | None:
    """The failure of a text of more than `most` tokens; None for any other."""
    if len(ids) <= most:
        return None
    said = f"prompt and response have {len(ids):,} tokens, more than {section}.max_tokens {most:,}"
    return Outcome(failure="error", detail=said)


def late(limit_s: float, section: str) -> Outcome:
    """The failure of a sample without a score in time."""
    said = f"no score within {section}.time_limit_s = {limit_s:g} s"
    return Outcome(failure="timeout", detail=said)


def vllm_environment(engine: EngineConfig, *, on_cpu: bool) -> dict[str, str]:
    """Environment variables of an engine whose start has no other deadline than vLLM's own."""
    from megarl.cluster.process_env import engine_environment
    from megarl.trainer.threads import shared

    return engine_environment(
        on_cpu=on_cpu,
        num_threads=engine.num_threads or shared(1),
        kv_cache_gib=engine.kv_cache_gib,
    ) | {"VLLM_ENGINE_READY_TIMEOUT_S": f"{max(1, round(engine.start_timeout_s))}"}


def lost_or(error: Exception, engine: Engine | PoolingEngine) -> Exception:
    """`error`, or `EngineLost` if it is because the engine's process has died."""
    if isinstance(error, ExceptionGroup):  # of several verdicts that were under way
        error = error.exceptions[0]
    if not engine.is_lost:
        return error
    return EngineLost(f"vLLM's process has died ({type(error).__name__}: {error}); see run.log")


@asynccontextmanager
async def running(engine: Engine | PoolingEngine, what: str) -> AsyncIterator[None]:
    """Until the end of the block, `engine` runs. Raises `UserError` if vLLM does not start it. No
    process of the engine is left behind.
    """
    try:
        with console.phase(what), uninterrupted():
            try:
                with past_interrupts():
                    await engine.start()
            except Exception as error:
                raise UserError(
                    f"vLLM does not start {what} ({type(error).__name__}: {error}); see run.log"
                ) from error
        yield
    finally:
        try:
            await engine.stop()
        finally:
            _end_children()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Context manager: SIGINT and SIGHUP, which a terminal sends to all processes of a command, are
    blocked in processes that are started in its block. vLLM's processes then live until the server
    has answered its open requests.
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

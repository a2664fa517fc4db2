"""`megarl serve-reward`: verifiers, reward functions or a reward model as an HTTP server, which
runs until SIGTERM or Ctrl-C and then answers what is under way.

    requests --RewardServer--> queue --Backend--> Judge (worker processes) or TextScorer
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn

from megarl import console
from megarl.checks.reward_server import ServeInputs
from megarl.environments.config import RewardServerConfig
from megarl.environments.judging import Judge
from megarl.environments.pool import Outcome
from megarl.environments.reward_server import Backend, RewardServer
from megarl.environments.scoring import client_token
from megarl.environments.wire import ROUTE, Sample
from megarl.errors import UserError
from megarl.serve_config import ServeRewardConfig
from megarl.trainer.config import TrainingConfig

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open."""


def main(config: ServeRewardConfig, inputs: ServeInputs) -> int:
    """Serve until a signal; the command line's handler then ends the process with its code."""
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    release = console.hold(folder)
    try:
        console.open_log(folder)
        with listening(config.server) as listener:
            asyncio.run(serve(config, inputs, listener))
    finally:
        release()
    return 0


def listening(server: RewardServerConfig) -> socket.socket:
    """A socket that listens at the server's address. Raises `UserError` if it cannot."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        return socket.create_server((server.host, server.port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"server.host {server.host} port {server.port} cannot be used ({error.strerror}); set"
            " server.port to a free one (0 finds one), or server.host to an address of this machine"
        ) from None


async def serve(config: ServeRewardConfig, inputs: ServeInputs, listener: socket.socket) -> None:
    """Serve on `listener` until a signal has stopped uvicorn, which then raises it once more."""
    settings = config.server
    made = model_backend(config) if config.reward_model.model.path else judge_backend(config)
    async with made as backend:
        server = RewardServer(backend, settings, inputs.token)
        server.start()
        web = Uvicorn(
            server,
            uvicorn.Config(
                server.app,
                loop="asyncio",
                ws="none",
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                limit_concurrency=settings.connections,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(settings.drain_s),
            ),
        )
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        needs = "with the token" if inputs.token is not None else "without a token"
        console.say(f"serving {inputs.what} at http://{shown}:{port}{ROUTE}, {needs}")
        try:
            await web.serve(sockets=[listener])
        finally:
            await server.close()


class Uvicorn(uvicorn.Server):
    """A uvicorn server that has its reward server refuse new requests once it is to stop."""

    def __init__(self, server: RewardServer, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._server = server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is under way, for as long as the configuration allows, and end."""
        self._server.stopping = True
        await super().shutdown(sockets)


@asynccontextmanager
async def judge_backend(config: ServeRewardConfig) -> AsyncIterator[Backend]:
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
async def model_backend(config: ServeRewardConfig) -> AsyncIterator[Backend]:
    """A backend of the recipe's reward model, which one thread loads and runs."""
    # Torch and transformers, which a server of verifiers does without.
    from megarl.data.tokenizer import load_tokenizer
    from megarl.loops.text_scores import Text, TextScorer

    served, loop = config.reward_model, asyncio.get_running_loop()
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
                tokenizer=load_tokenizer(
                    served.model.tokenizer or served.model.path,
                    trust_remote_code=served.model.trust_remote_code,
                ),
                template=served.template,
                seed=0,
            ),
        )

    def scores(samples: Sequence[Sample]) -> list[Outcome]:
        texts = [Text(prompt.text, response) for prompt, response in samples]
        return [
            Outcome(score)
            if math.isfinite(score)
            else Outcome(failure="nan", detail=f"the reward model scored {score}")
            for score in scorer.scores(texts)
        ]

    async def score(samples: Sequence[Sample]) -> list[Outcome]:
        return await loop.run_in_executor(thread, scores, samples)

    settings = config.server
    try:
        yield Backend(score, 1, settings.batch_size, settings.linger_ms / 1e3)
    finally:
        await loop.run_in_executor(thread, scorer.close)
        thread.shutdown()

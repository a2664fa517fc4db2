"""TRL's runs in tools/bench/tune.py, in TRL's environment, where megarl is not installed:
python tune_trl.py SETTINGS.json writes SETTINGS.result: the times and tokens of each step.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from e2e_task import LEARNING_RATE, SEED

BLOCK_TOKENS = 2048
"""Tokens of a row of TRL's packing."""
ROWS_AT_ONCE = 8
"""Padded pairs of one forward pass of TRL's DPO."""


def common(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Settings that both trainers share, with everything off that only costs time."""
    return {
        "output_dir": str(folder),
        "max_steps": settings["steps"],
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "seed": SEED,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }


def trainer_of(settings: dict[str, Any], model: Any, tokenizer: Any, folder: Path) -> Any:
    """DPOTrainer or SFTTrainer on the task's data."""
    import trl
    from datasets import load_dataset

    task, kind, each = Path(settings["task"]), settings["kind"], settings["processes"]
    rows = settings["rows"] // each
    data = load_dataset("json", data_files=str(task / f"{kind}.jsonl"), split="train")
    if kind == "preference":
        args = trl.DPOConfig(
            **common(settings, folder),
            beta=0.1,
            max_length=4096,
            per_device_train_batch_size=min(ROWS_AT_ONCE, rows),
            gradient_accumulation_steps=max(1, rows // ROWS_AT_ONCE),
            precompute_ref_log_probs=True,
        )
        return trl.DPOTrainer(
            model=model, args=args, train_dataset=data, processing_class=tokenizer
        )
    blocks = max(1, round(settings["tokens"] / BLOCK_TOKENS / each))
    args = trl.SFTConfig(
        **common(settings, folder),
        packing=True,
        max_length=BLOCK_TOKENS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=blocks,
    )
    return trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)


def main() -> None:
    """One rank of a run of TRL."""
    path = Path(sys.argv[1])
    settings = json.loads(path.read_text())

    import torch

    torch.set_num_threads(settings["threads"])

    import transformers

    task = Path(settings["task"])
    model = transformers.AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(task / "model")
    tokenizer.padding_side = "right"
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = trainer_of(settings, model, tokenizer, path.parent / "trl")
    steps: list[dict[str, float]] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started_at = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append({"step_s": time.monotonic() - self.started_at})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "num_tokens" in logs and steps:
                steps[-1]["tokens_so_far"] = logs["num_tokens"]

    trainer.add_callback(Clock())
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        trained = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        change = max(float((one.detach() - before[name]).abs().max()) for name, one in trained)
        versions = {name: importlib.metadata.version(name) for name in ("trl", "torch")}
        found = {"steps": steps, "weight_change": change, "versions": versions}
        path.with_suffix(".result").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

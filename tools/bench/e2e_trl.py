"""TRL's runs in tools/bench/e2e.py: its environment, its settings, and the times of its steps.

Runs as a script in TRL's environment, where megarl is not installed: python e2e_trl.py SETTINGS
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from e2e_processes import child_environment, launcher, run
from e2e_task import (
    BATCH,
    LEARNING_RATE,
    MAX_PROMPT_TOKENS,
    MICRO_BATCH_TOKENS,
    SAMPLES,
    SEED,
    Measured,
    Setting,
)

TRL_PINS = (
    "trl==1.16.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "tokenizers==0.23.3",
)
TORCH_PIN = "torch==2.13.0"
INSTALL_WITHIN_S = 1800.0


def make_trl_environment(folder: Path) -> str:
    """The interpreter of an environment with TRL, made where it is missing."""
    stamp = (
        folder / f".bench-{hashlib.sha256(repr((TORCH_PIN, TRL_PINS)).encode()).hexdigest()[:12]}"
    )
    python = str(folder / "bin" / "python")
    if stamp.exists():
        return python
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise ValueError(
            f"--trl-env {folder} holds something that is not a virtual environment; name another"
            " folder"
        )
    print(f"making TRL's environment in {folder}", file=sys.stderr, flush=True)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    with tempfile.TemporaryDirectory(prefix="e2e-") as work:
        log = Path(work) / "log"
        run(
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            environment,
            log,
            INSTALL_WITHIN_S,
        )
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        for wanted in ((TORCH_PIN,), (TORCH_PIN, *TRL_PINS)):  # torch first: see tools/bench/e2e.py
            run([*pip, *wanted], environment, log, INSTALL_WITHIN_S)
    stamp.touch()
    return python


def trl_arguments(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """GRPOConfig: megarl's recipe in TRL's words, and everything off that only costs time."""
    share = BATCH // settings["processes"]
    rows = 2 ** ((MICRO_BATCH_TOKENS // (MAX_PROMPT_TOKENS + settings["limit"])).bit_length() - 1)
    rows = max(1, min(share, rows))
    return {
        "output_dir": folder,
        "max_steps": settings["steps"],
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": share // rows,
        "steps_per_generation": share // rows,
        "num_generations": SAMPLES,
        "max_completion_length": settings["limit"],
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "loss_type": "dapo",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "seed": SEED,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "log_completions": False,
    }


def run_trl(
    python: str, work: Path, setting: Setting, *, steps: int, limit: int, deadline_s: float
) -> tuple[Measured, Any]:
    """One run of TRL -> (steady steps, versions)."""
    given = {"task": str(work / "task"), "steps": 1 + steps, "limit": limit, **asdict(setting)}
    path = work / "trl.json"
    path.write_text(json.dumps(given))
    command = [*launcher(python, setting.processes), str(Path(__file__).resolve()), str(path)]
    try:
        others, cpu_s = run(
            command, child_environment(work, setting.threads), work / "log", deadline_s
        )
        found = json.loads(path.with_suffix(".result").read_text())
    finally:
        path.with_suffix(".result").unlink(missing_ok=True)
        shutil.rmtree(work / "trl", ignore_errors=True)
    if [step["samples"] for step in found["steps"]] != [BATCH] * (1 + steps):
        raise RuntimeError(f"TRL did not train {1 + steps} steps of {BATCH} samples: {found}")
    kept = found["steps"][1:]
    measured = Measured(
        step_s=[step["step_s"] for step in kept],
        tokens=sum(step["mean_length"] * BATCH for step in kept),
        truncated_share=statistics.fmean(step["clipped_ratio"] for step in kept),
        weight_change=found["weight_change"],
        others=others,
        cpu_s=cpu_s,
    )
    return measured, found["versions"]


class Clock:
    """The steps of a run of TRL, measured by its reward function and a `TrainerCallback`."""

    def __init__(self, processes: int, score: Any) -> None:
        self.processes, self.score = processes, score
        self.steps: list[dict[str, float]] = []
        self.num_rewarded = 0

    def rewards(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """TRL's reward function."""
        self.num_rewarded += len(completions)
        return [
            self.score(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def callback(self) -> Any:
        """The TRL trainer's callback that fills `steps`."""
        import transformers

        clock = self

        class Callback(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.started_at, self.rewarded = time.monotonic(), clock.num_rewarded

            def on_step_end(self, *_: Any, **__: Any) -> None:
                seconds = time.monotonic() - self.started_at
                samples = (clock.num_rewarded - self.rewarded) * clock.processes
                clock.steps.append({"step_s": seconds, "samples": samples})

            def on_log(
                self,
                args: Any,
                state: Any,
                control: Any,
                logs: dict[str, float] | None = None,
                **_: Any,
            ) -> None:
                if logs and "completions/mean_length" in logs:
                    clock.steps[-1] |= {
                        name: logs[f"completions/{name}"]
                        for name in ("mean_length", "clipped_ratio")
                    }

        return Callback()


def worker(path: Path) -> None:
    """One rank of a run of TRL, inside its environment: settings in `path`, results beside it."""
    settings = json.loads(path.read_text())
    task = Path(settings["task"])
    sys.path.insert(0, str(task))

    import torch

    torch.set_num_threads(settings["threads"])

    import transformers
    import trl
    from datasets import load_dataset
    from reward import score  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    clock = Clock(settings["processes"], score)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(task / "model")
    prompts = load_dataset(
        "json", data_files=str(task / "prompts.jsonl"), split="train"
    ).select_columns(["prompt"])
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=clock.rewards,
        args=trl.GRPOConfig(**trl_arguments(settings, str(path.parent / "trl"))),
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[clock.callback()],
    )
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        trained = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        change = max(
            float((parameter.detach() - before[name]).abs().max()) for name, parameter in trained
        )
        packages = ("trl", "torch", "transformers", "accelerate")
        versions = {name: importlib.metadata.version(name) for name in packages}
        path.with_suffix(".result").write_text(
            json.dumps({"steps": clock.steps, "weight_change": change, "versions": versions})
        )


if __name__ == "__main__":
    worker(Path(sys.argv[1]))

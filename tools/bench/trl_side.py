"""TRL's side of the comparisons: a run of one of its trainers, timed step by step.

Runs as a script in TRL's environment, where megarl is not installed: `python trl_side.py FILE.json`
does what against_trl.py has written into the file, and writes FILE.result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import e2e_task

LOGGED = ("completions/mean_length", "reward", "num_tokens")
"""Numbers of TRL's log that are kept for each step."""
ALWAYS = {
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
}
"""Settings of all trainers: everything off that only costs time."""


def main(path: Path) -> None:
    """One rank of a run with the settings in `path`."""
    given = json.loads(path.read_text())
    import torch

    torch.set_num_threads(given["threads"])
    import transformers
    import trl
    from datasets import Dataset

    steps, rewarded = list[dict[str, float]](), list[int]()

    class Clock(transformers.TrainerCallback):
        """Times the steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started_at = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            samples = sum(rewarded) * given["processes"]
            steps.append({"step_s": time.monotonic() - self.started_at, "samples": samples})
            rewarded.clear()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if steps and logs:
                steps[-1] |= {name: logs[name] for name in LOGGED if name in logs}

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        """The task's reward, which counts what it has judged on this rank."""
        rewarded.append(len(completions))
        return getattr(e2e_task, given["reward"])(completions, **columns)

    is_chat, kind = given.get("is_chat", False), given["trainer"]
    loader = transformers.AutoTokenizer if is_chat else transformers.PreTrainedTokenizerFast
    tokenizer = loader.from_pretrained(given["model"])
    if kind != "GRPO":
        tokenizer.padding_side = "right"
    model = transformers.AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    before = {}
    if not is_chat:
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
    # Of a file, whose cache all ranks share: TRL looks there for what rank 0 has computed.
    rows = Dataset.from_json(given["rows"])
    if is_chat:
        rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(**ALWAYS | given["arguments"]),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[Clock()],
        **({"reward_funcs": reward} if kind == "GRPO" else {}),
    )
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        found: dict[str, Any] = {"steps": steps}
        trained = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
        changes = [
            float((trained[name].detach() - old).abs().max()) for name, old in before.items()
        ]
        found["weight_change"] = max(changes, default=None)
        path.with_suffix(".result").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

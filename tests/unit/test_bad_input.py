"""Bad input gets one clear error that says what to set, before anything heavy starts.

Each case goes through the real command line and checks the exit code, the message, and that no run
folder was started. What needs a running engine or a second rank is in tests/system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import ROOT, python, write_recipe
from support.tiny import write_model

from megarl import cli
from megarl.checkpoints import lease
from megarl.errors import UserError

PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]
GOOD = json.dumps(PROMPTS[0])
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

CASES = r"""
rollout.groups_a_step: 3 -> rollout.groups_a_step: unknown key | groups_per_step
rollout.engines_per_relay: 4 -> rollout.engines_per_relay: unknown key; it is now needless, as no run has relays
publish.timeout_s: 4.0 -> publish: unknown key; it is now weight_sync
words: --training.mini_batches 1
    -> training.mini_batches: unknown key; it is now training.num_mini_batches
reference.zero_stage: 3 -> reference has settings | algorithm.kl.coefficient
algorithm.kl.coefficient: 0.1, reference.model.path: x, reference.lora: base
    -> reference.lora is 'base' beside reference.model.path, a model without adapters
algorithm.kl.coefficient: 0.1, reference: {ranks: [1], layout: {tensor: 2, data: 1}}, ranks: 2
    -> reference.layout is | = 2 ranks | reference has 1
algorithm.kl.coefficient: 0.1, reference.ranks: [5], ranks: 2
    -> reference.ranks is [5] | this run has 2 ranks
algorithm.kl.coefficient: 0.1, reference.ranks: [2, 1], ranks: 3
    -> reference.ranks is [2, 1] | ascending order: [1, 2]
algorithm.kl.coefficient: 0.1, reference.ranks: [0], ranks: 2
    -> reference.ranks is [0] | rank 0 is the policy's
critics: {second: {}} -> critics has settings | algorithm.advantage is 'grpo'
algorithm.gae.gamma: 0.9 -> algorithm.gae has settings | algorithm.advantage is 'grpo'
algorithm.preset: ppo, critic.ranks: [0], ranks: 2 -> critic.ranks is [0] | rank 0 is the policy's
algorithm: {preset: ppo, kl: {coefficient: 0.1}}, reference.ranks: [1], critic.ranks: [1], ranks: 2
    -> reference.ranks is [1] | critic.ranks [1] | share none
algorithm.preset: ppo, critic.warmup_steps: 9, steps: 3 -> critic.warmup_steps is 9 | steps 3
algorithm.preset: ppo, critic.optimizer.learning_rate: 0 -> critic.optimizer.learning_rate is 0
algorithm: {preset: ppo, loss: gspo}
    -> algorithm.preset is 'ppo' | algorithm.loss ppo_clip | algorithm.loss is gspo
training.epochs_per_step: 2, demonstrations.source: data.jsonl, task: sft
    -> training.epochs_per_step is 2, which has no meaning
algorithm.kl.coefficient: 0.1, reference.model.from_scratch: true
    -> reference.model has settings, but no path | set reference.model.path
algorithm.kl.coefficient: 0.1, reference.zero_stage: 0, training: {precision: bfloat16,
    zero_stage: 2}
    -> reference.zero_stage is 0 | bfloat16
reward_models.judge.wait: 1 -> reward_models.judge.wait: unknown key; did you mean 'weight'
reward_models.judge.weight: 2.0 -> reward_models.judge.model.path is empty
reward_models.judge.model.path: MODEL
    -> rollout.dynamic_sampling.enabled is true | before reward_models
reward_models: {judge: {model: {path: x}, ranks: [1]}, other: {model: {path: x}, ranks: [1]}},
    rollout.dynamic_sampling.enabled: false
    -> reward_models.judge.ranks | reward_models.other.ranks | share none
environment.verifier: none -> environment.verifier is 'none' | reward_models
/recipe.yaml: null -> does not exist | .yaml
training.layout.data: 3 -> data 3 | this run has 1 | training.layout.data to 1
training.layout: {tensor: 2, sequence: 2}, ranks: 2
    -> sequence 2 x tensor 2 | does not divide 2 ranks | multiple of 4
training: {layout: {sequence: 2}, sequence: {ulysses: 4}}, ranks: 2
    -> training.sequence.ulysses is 4 | training.layout.sequence = 2
training: {layout: {sequence: 2}, sequence: {ulysses: 2, transport: ring}}, ranks: 2
    -> nothing is left for | lower ulysses
training.sequence.cut: zigzag -> training.layout.sequence is 1 | leave them out
training: {layout: {sequence: 4}, sequence: {ulysses: 4}}, ranks: 4
    -> training.sequence.ulysses is 4 | num_attention_heads | divisor of 2
training.layout.tensor: 2, ranks: 2,
    /model/config.json: {model_type: opt, architectures: [OPTForCausalLM]}
    -> opt has no tp_plan | training.layout.tensor to 1
training: {share_prefix: 'on', micro_batch_tokens: 64}, prompts.max_prompt_tokens: 64,
    /data.jsonl: '{"prompt": "<1+ * 31>1=", "answer": "32"}'
    -> share_prefix is 'on' | 64 tokens | sequence of 64 | raise training.micro_batch
training.logprobs: liger -> 'liger' | needs a GPU | set it to 'chunked'
training.elementwise: triton
    -> training.elementwise is 'triton' | needs a GPU | set it to 'model'
training.grouped: grouped -> training.grouped is 'grouped' | needs a GPU and compute capability
    | precision 'bfloat16' or 'float16' | set it to 'auto'
training.grouped: triton -> training.grouped is 'triton' | needs a GPU | set it to 'auto'
training.attention: flash_attn -> training.attention is 'flash_attn' | set it to 'torch'
    | a GPU and training.precision 'bfloat16' or 'float16' and a package flash-attn
training.attention: cudnn -> training.attention is 'cudnn' | set it to 'torch'
    | a GPU and training.precision 'bfloat16' or 'float16'
training: {layout: {sequence: 2}, sequence: {block: cudnn}}, ranks: 2
    -> training.sequence.block is 'cudnn' | set the block to 'auto'
    | needs a GPU and training.precision 'bfloat16' or 'float16'
training: {layout: {sequence: 2}, sequence: {block: flash}}, ranks: 2
    -> training.sequence.block is 'flash' | set the block to 'auto'
    | needs a GPU and training.precision 'bfloat16' or 'float16'
training.sequence.block: abacus -> training.sequence.block is 'abacus' | flash, | file.py:Class
training.sequence.block: mine.py:Mine -> training.sequence.block is 'mine.py:Mine' | no file
training.sequence.block: FOLDER/mine.py:Mine, /mine.py: 'class Other: pass'
    -> training.sequence.block: | mine.py has no class 'Mine'; set one of: Other
training.sequence.block: FOLDER/mine.py:Mine, /mine.py: 'class Mine: pass'
    -> training.sequence.block | no prepare and no forward and no backward | from RegionBlock
training: {layout: {tensor: 2}, tensor_backend: autotp}, ranks: 2
    -> num_key_value_heads is 1 | AutoTP | training.tensor_backend to plan
training: {offload_gradients: micro_batch, zero_stage: 1}
    -> training.offload_gradients | training.offload_optimizer is False | leave it out
model.from_scratch: true, command: rollout -> model.from_scratch is true | trained model
/model/config.json: {model_type: gemma, architectures: [GemmaForCausalLM], head_dim: 32}
    -> k_proj.bias | is not in a model of its config.json | fetch both again
/model/config.json: {model_type: cohere2, architectures: [Cohere2ForCausalLM], head_dim: 32}
    -> cohere2 | sliding windows that are a token longer in vLLM | set model.path to another
/model/config.json: {layer_types: [sliding_attention, full_attention]}
    -> qwen2 | a sliding window in some layers | set model.path to another
rollout: {placement: colocated, num_engines: 2}
    -> 2 engine(s) | 2 engine ranks | policy has 1 ranks | set rollout.num_engines
rollout: {placement: colocated, max_staleness: 1}, algorithm.old_logprobs: engine
    -> 'colocated' | rollout.max_staleness is 1 | set it to 0
weight_sync.transport: cuda_ipc -> weight_sync.transport is 'cuda_ipc' | 'shared_memory'
weight_sync.folder: FOLDER/weights -> weight_sync.folder: unknown key | point_to_point on several
weight_sync.transport: disk -> weight_sync.transport | 'disk' | 'point_to_point'
training.layout.data: 2, ranks: 2, LOCAL_WORLD_SIZE: 1
    -> weight_sync.transport is 'shared_memory' | one host, but this run has 2 | 'point_to_point'
rollout.group_size: 1 -> group_size is 1
model.path: nowhere/model -> model.path | nowhere/model
without: model.norm.weight -> has no tensor model.norm.weight (64,)
model.tokenizer: nowhere.model -> nowhere.model does not exist
/model/config.json: {vocab_size: 16} -> vocab | 16
/model/tokenizer_config.json: {eos_token: null} -> eos
/model/tokenizer_config.json: {pad_token: null} -> pad
/model/config.json: {use_sliding_window: true, sliding_window: 0,
    layer_types: [sliding_attention, sliding_attention]} -> sliding_window is 0
/model/config.json: {layer_types: [chunked_attention, chunked_attention]}
    -> chunked_attention | does not support
/model/config.json: {quantization_config: {quant_method: mxfp4}}
    -> qwen2 has quantised weights | set model.path to a copy in bfloat16
training.experts.z_coefficient: 0.1
    -> training.experts balances experts, but model type qwen2 has no experts | leave it out
training.optimizer.kind: apex -> training.optimizer.kind is 'apex' | set it to 'torch'
rollout.max_new_tokens: 253 -> longest prompt of the data has 5 tokens
    | max_position_embeddings of model.path is 256
/run/metrics.jsonl: "{}\n" -> already holds a run | resume
/run: "" -> is a file
rollout.engine.kv_cache_gib: 100000 -> kv_cache_gib | memory
rollout.max_new_tokens: 30000000, /model/config.json: {max_position_embeddings: 1000000000}
    -> kv_cache_gib is 1 | one request
environment.verifier: exact -> exact_match | math
MINE, /mine.py: "1 / 0\ndef score(p, r): ...\n" -> mine.py | ZeroDivisionError
MINE, /mine.py: "import functools as f\n@f.cache\ndef score(p, r): ...\n"
    -> mine.py:score is wrapped by functools.cache | take the decorator off
MINE, /mine.py: "import functools as f\n@f.lru_cache(9)\nasync def score(p, r): ...\n"
    -> mine.py:score is wrapped by functools.cache
MINE, /mine.py: "def score(prompt, response): return prompt.gold\n"
    -> mine.py:score' failed for 20 of 20 rows | first for row | no attribute 'gold'
MINE, environment.time_limit_s: 2.5, /mine.py: "import time\ndef score(p, r): time.sleep(60)\n"
    -> mine.py:score' failed for 1 of 1 rows | no verdict within environment.time_limit_s
environment.session: FOLDER/mine.py:Game,
    /mine.py: "from megarl.environments.session import Observation as O\nclass Game:\n
    def start(self, prompt): return O('')\n def step(self, text, token_ids): return self.deck\n"
    -> environment.session | mine.py:Game' failed for | AttributeError | 'deck'
environment.verifier: math, /data.jsonl: '{"prompt": "1+1=", "answer": "x \\frac{ of a walk"}'
    -> 'math' failed for | is not mathematics | set environment.verifier
environment: {correct: 0.5, wrong: 0.5}
    -> environment.correct and environment.wrong are both 0.5 | nothing can be learned
rollout.max_staleness: 1
    -> rollout.max_staleness is 1 | kind to 'tis' or 'icepop' | allow_uncorrected to true
environment.overlong: {limit_tokens: 64, buffer_tokens: 8} -> overlong.limit_tokens is 64
resume: true, /run/checkpoints/step_000001/x: "" -> resume
algorithm.kl: {coefficient: 0.1, estimator: k1} -> k1 | k2
algorithm.aggregation: constant -> constant_tokens
ranks: 2, LOCAL_WORLD_SIZE: 0 -> LOCAL_WORLD_SIZE is '0' | number from 1
ranks: 2, RANK: 2 -> RANK is '2' | from 0 to 1 | torchrun
WORLD_SIZE: 2 -> WORLD_SIZE is 2 | RANK and MASTER_ADDR and MASTER_PORT are not set
/model/config.json: {num_attention_heads: 0}
    -> num_attention_heads is 0 | config.json of model.path
/model/config.json: {head_dim: 21, hidden_size: 64} -> head_dim`=21 | correct its config.json
/model/config.json: {rms_norm_eps: .nan} -> rms_norm_eps is nan
/model/config.json: {hidden_size: '64'}
    -> model.path | hidden_size | expected int | correct its config.json
/model/config.json: {rope_parameters: {rope_type: yarn}} -> model.path | factor
/model/config.json: {dtype: 0} -> dtype is 0 | config.json of model.path
/model/tokenizer_config.json: {link: /nowhere}
    -> tokenizer_config.json is a link to /nowhere | remove the link
/model/config.json: {dtype: float33, torch_dtype: float33} -> model.path | float33
/model/generation_config.json: '[]' -> generation_config.json of model.path | remove the file
/model/tokenizer_config.json: {chat_template: [{name: default, template: x},
    {name: a/b, template: x}]}
    -> the tokenizer of model.path | can be read but not saved | Invalid chat template name
/model/generation_config.json: '{"eos_token_id": 10000}'
    -> eos_token_id 10000 | tokens are 0 to 39
folder: FOLDER/loop/run, /loop: {link: FOLDER/loop}
    -> folder is | symbolic link | set folder to another
folder: /proc/run -> folder is /proc/run | nothing can be written
folder: FOLDER/<x * 300> -> folder holds a name of 300 bytes
/data.jsonl: [GOOD, '{"prompt": "1+1=", "answer": NaN}'] -> line 2 | (column 'answer') is nan
/data.jsonl: [GOOD, '{"prompt": "1+1=", "answer": <9 * 5000>}'] -> line 2 | digits
observe.wandb_project: mine -> observe.wandb_project | pip install wandb
observe.mlflow_experiment: mine -> observe.mlflow_experiment | pip install mlflow
observe.trackio_project: mine -> observe.trackio_project | pip install trackio
evaluation.prompts.source: nowhere.jsonl -> evaluation.prompts.source nowhere.jsonl
MINE, environment.load_limit_s: 1.0, /mine.py: "while True: pass\ndef score(p, r): ...\n"
    -> mine.py:score | did not load within 1 s | environment.load_limit_s
MINE, /mine.py: "import os\nos._exit(3)\ndef score(p, r): ...\n" -> mine.py:score | ended with exit code 3 at start
model.path: mein modèl
    -> model.path 'mein modèl' cannot be loaded: there is no such folder here, and no hub
model.tokenizer: Tokenizer (neu) -> tokenizer folder Tokenizer (neu) does not exist
"""
"""A row: changes of a good recipe and its folder, as YAML -> parts of the message, the fix among
them. A key that begins with / is a file of the folder: its text or rows, null for none, or changes
of its JSON. Keys in capitals are variables of the environment; `words` go to the command line.
"""
ROWS = re.sub(r"\n +", " ", CASES.strip()).splitlines()


def spoil(path: Path, change: Any) -> None:
    """Change a file as a row of the table says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(change, dict) and "link" not in change:
        change = json.dumps(json.loads(path.read_text()) | change)
    elif isinstance(change, list):
        change = "\n".join(GOOD if row == "GOOD" else row for row in change) + "\n"
    if isinstance(change, str):
        path.write_text(change)
        return
    path.unlink(missing_ok=True)
    if change:
        path.symlink_to(change["link"])


def remove_tensor(folder: Path, name: str) -> None:
    """Take a tensor out of the model's weights."""
    from safetensors.torch import load_file, save_file

    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("good"))


def prepare(
    folder: Path, model: Path, row: str = "", patch: pytest.MonkeyPatch | None = None
) -> list[str]:
    """The files of a row's changes, and the command line that meets them."""
    text = row.replace("MINE", "environment.verifier: FOLDER/mine.py:score")
    text = text.replace("FOLDER", str(folder))
    text = re.sub(r"<(\S+) \* (\d+)>", lambda found: found[1] * int(found[2]), text)
    changes = yaml.safe_load("{" + text + "}")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    shutil.copytree(model, folder / "model")
    command, words = changes.pop("command", "run"), changes.pop("words", "").split()
    if ranks := changes.pop("ranks", None):
        changes = RANKS | {"WORLD_SIZE": ranks} | changes
    if name := changes.pop("without", None):
        remove_tensor(folder, name)
    tree: dict[str, Any] = {"folder": str(folder / "run"), "steps": 2}
    tree["model"] = {"path": str(folder / "model")}
    if changes.pop("task", "rl") == "sft":
        tree["demonstrations"] = {}
    else:
        tree["prompts"] = {"source": str(folder / "data.jsonl"), "max_prompt_tokens": 8}
        tree["rollout"] = {"groups_per_step": 4, "group_size": 2, "max_new_tokens": 8}
    files = {key: value for key, value in changes.items() if key.startswith("/")}
    for key, value in changes.items():
        if key.isupper():
            assert patch is not None
            patch.setenv(key, str(value))
        elif key not in files:
            *parents, last = key.split(".")
            place = tree
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = place.get(last, {}) | value if isinstance(value, dict) else value
    path = Path(write_recipe(folder / "recipe.yaml", tree))
    for key, value in files.items():
        spoil(folder / key[1:], value)
    return [command, str(path), *words]


def check(says: str, code: object, out: str, err: str) -> None:
    assert code == 2, err
    assert "Traceback" not in err, err
    for part in says.split(" | "):
        assert part.lower() in err.lower(), (part, err)
    assert out == ""


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.partition(" -> ")[2].replace(" ", "-")) for row in ROWS]
)
def test_one_clear_error(
    row: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    changes, _, says = row.partition(" -> ")
    if "WORLD_SIZE" not in changes:
        monkeypatch.setenv("RANK", "0")  # in which `megarl run` starts no ranks
    arguments = prepare(tmp_path, model, changes, monkeypatch)
    was_there = (tmp_path / "run").is_dir()
    # The guard would outlive the test, and end this process at a signal that another test sends.
    monkeypatch.setattr(cli.signals, "guard", lambda within_s: None)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    said = capfd.readouterr()
    check(says, ended.value.code, said.out, said.err)
    assert (tmp_path / "run").is_dir() == was_there, "something was started before the checks"


def test_the_same_from_the_python(model: Path, tmp_path: Path) -> None:
    done = python("-m", "megarl", *prepare(tmp_path, model, "prompts.answer_column: gold"))
    check("no column 'gold'", done.returncode, done.stdout, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "run").is_dir()


def test_paths_that_may_not_be_entered_are_one_line(model: Path, tmp_path: Path) -> None:
    """Of a source, a model, a tokenizer, a verifier and a recipe; for root too, whose right to
    enter every folder is given up."""
    _, path, *_ = prepare(tmp_path, model)
    closed = tmp_path / "closed"
    (closed / "model").mkdir(parents=True)
    settings = {"prompts.source": "/deep/a.jsonl", "model.path": "", "model.tokenizer": "/model"}
    settings["environment.verifier"] = "/mine.py:score"
    calls = [[path, f"--{key}={closed}{end}"] for key, end in settings.items()]
    calls += [[path, f"--prompts.source={closed}"], [f"{closed}/recipe.yaml"]]
    code = """
import json, sys
from megarl import cli
for words in json.loads(sys.argv[1]):
    try:
        cli.plan(["run", *words, "--check"]).run()
    except BaseException as error:
        print(type(error).__name__, error)
"""
    rights = "-dac_override,-dac_read_search"
    as_others = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
    command = [*(as_others if os.geteuid() == 0 else []), sys.executable, "-c", code]
    closed.chmod(0)
    told = subprocess.run([*command, json.dumps(calls)], capture_output=True, text=True, cwd=ROOT)
    closed.chmod(0o700)
    found = [line for line in told.stdout.splitlines() if str(closed) in line]
    assert len(found) == len(calls), told.stdout + told.stderr
    for line in found:
        assert line.startswith("UserError ") and "Permission denied; " in line, line


WITHOUT_TORCH = r"""
prompts.source: nowhere.jsonl -> prompts.source nowhere.jsonl does not exist
evaluation.prompts: {source: FOLDER/data.jsonl, prompt_column: question} -> prompt_column to one of
prompts.answer_column: gold -> no column 'gold' | set prompts.answer_column to one of: prompt
task: sft -> no column 'response' | set demonstrations.response_column to one of
model.path: FOLDER/modle -> there is no such folder here | did you mean FOLDER/model?
algorithm.kl.coefficient: 0.1, reference.model.path: runs/x y -> reference.model.path 'runs/x y'
model.path: tests/units -> model.path 'tests/units' | 'tests' is a folder | did you mean tests/unit?
environment.verifier: 'nowhere.py:score' -> environment.verifier | there is no file nowhere.py
environment.rewards: {'FOLDER/mine.py:score': 1.0}, /mine.py: "def other(p, r): ...\n"
    -> environment.rewards: | has no function 'score'; set one of: other
environment.session: FOLDER/mine.py:Game, /mine.py: "class Play: ...\n" -> has no class 'Game' | Play
algorithm.loss: FOLDER/mine.py:loss, /mine.py: "def loss(:\n" -> algorithm.loss: | SyntaxError
words: --ranks 2, folder: FOLDER/../held -> held belongs to a run that is still going
words: --ranks 2 --resume true -> resume is true, but FOLDER/run/checkpoints has no checkpoint
words: --cpu --resume true -> resume is true, but FOLDER/run/checkpoints has no checkpoint
words: --ranks 2, prompts.answer_column: gold -> no column 'gold'
words: --ranks 3, training.layout.tensor: 2 -> tensor 2, which does not divide 3 ranks
words: --ranks 9, training.layout.data: 9 -> a mini-batch has 8 samples for 9 data ranks
words: --ranks 3, training.layout.tensor: 3 -> training.layout.tensor is 3 | num_attention_heads = 2
words: --ranks 2, training.layout.tensor: 2, /model/config.json: {num_key_value_heads: 3}
    -> training.layout.tensor is 2 and the model's num_key_value_heads 3
task: sft, training.layout.tensor: 4, words: --ranks 4 -> num_attention_heads = 2
rollout.engine.tensor: 4 -> rollout.engine.tensor is 4 | num_attention_heads = 2
rollout.max_new_tokens: 256 -> rollout.max_new_tokens is 256 | max_position_embeddings of model.path
/model/config.json: null -> there is no file FOLDER/model/config.json
/model/config.json: "{" -> FOLDER/model/config.json: JSONDecodeError | fetch the model again
/model/config.json: "[]" -> no JSON object
/model/model.safetensors: null -> no .safetensors | from_scratch
model.tokenizer: FOLDER -> holds no tokenizer
"""
"""Rows as those of `CASES`."""


def test_files_are_looked_at_before_torch_is_imported(model: Path, tmp_path: Path) -> None:
    rows = re.sub(r"\n +", " ", WITHOUT_TORCH.strip()).splitlines()
    calls = []
    for number, row in enumerate(rows):
        folder = tmp_path / str(number)
        folder.mkdir()
        calls.append(prepare(folder, model, row.partition(" -> ")[0]))
        if row.startswith("task: sft"):
            calls[-1].append(f"--demonstrations.source={folder}/data.jsonl")
    code = """
import json, sys
sys.modules["torch"] = sys.modules["transformers"] = None
from megarl import cli
for name, *words in json.loads(sys.argv[1]):
    try:
        cli.plan([name, *words]).run()
    except BaseException as error:
        print(type(error).__name__, error)
"""
    owner = lease.take(tmp_path / "held", patience_s=0.0)
    done = python("-c", code, json.dumps(calls), cwd=ROOT)
    owner.release()
    lines = done.stdout.splitlines()
    assert len(lines) == len(rows), done.stdout + done.stderr
    for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
        says = row.partition(" -> ")[2].replace("FOLDER", str(tmp_path / str(number)))
        check(says, 2, "", line)
        assert line.startswith("UserError "), line


@pytest.mark.parametrize("row", [
    "training.layout.tensor: 3 -> training.layout.tensor is 3 | num_attention_heads = 2",
    "rollout.engine.tensor: 4 -> rollout.engine.tensor is 4 | num_attention_heads = 2",
    "algorithm.kl.coefficient: 0.1, reference.zero_stage: 0, training: {precision: bfloat16,"
    " zero_stage: 2} -> reference.zero_stage is 0 | bfloat16",
])  # fmt: skip
def test_a_dry_run_refuses_what_a_start_would(
    row: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    name, *words = prepare(tmp_path, model, row.partition(" -> ")[0])
    with pytest.raises(UserError) as refusal:
        cli.plan([name, *words, "--cpu", "--dry-run"])
    check(row.partition(" -> ")[2], 2, "", str(refusal.value))


def test_checks_load_nothing_heavy(model: Path, tmp_path: Path) -> None:
    """A recipe is judged without DeepSpeed, Ray or vLLM."""
    name, *words = [*prepare(tmp_path, model), "--check"]
    code = f"import sys\nfrom megarl import cli\nassert cli.plan({[name, *words]!r}).run() == 0\n"
    code += "print([name for name in ('deepspeed', 'ray', 'vllm') if name in sys.modules])"
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_python_without_docstrings_is_refused() -> None:
    done = python("-OO", "-m", "megarl", "run", "recipe.yaml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "megarl: error: PYTHONOPTIMIZE=2" in done.stderr


def test_a_layout_is_checked_without_its_ranks(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = "training.layout.tensor: 2, words: --check --ranks 8"
    name, *words = prepare(tmp_path, model, changes)
    assert cli.plan([name, *words]).run() == 0
    assert "checked: data 4 x sequence 1 x tensor 2" in capfd.readouterr().err


def test_a_tokenizer_that_loses_characters_is_warned_about(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = """/data.jsonl: ['{"prompt": "12-5=", "answer": "7"}', GOOD, GOOD, GOOD]"""
    name, *words = prepare(tmp_path, model, changes)
    assert cli.plan([name, *words, "--check"]).run() == 0
    said = capfd.readouterr().err
    assert "megarl: warning: the tokenizer changes 25% of the prompts" in said
    assert "'12-5=' becomes '12<unk>5='" in said


def test_a_model_of_an_unreachable_hub_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    name, *words = prepare(tmp_path, model, "model.path: nobody/nothing")
    with pytest.raises(UserError) as caught:
        cli.plan([name, *words]).run()
    said = str(caught.value)
    assert "'nobody/nothing' is not on this machine and the Hugging Face hub did not answer" in said
    assert len(said) < 1000 and "\n" not in said


def test_evaluating_needs_no_table(model: Path, tmp_path: Path) -> None:
    """An engine that reads the model by itself is sent no weights: any family will do."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = (
        "evaluation.prompts: {source: FOLDER/data.jsonl, max_prompt_tokens: 8},"
        "/model/config.json: {model_type: gemma, head_dim: 32}"
    )
    _, *words = [*prepare(tmp_path, model, changes), "--check"]
    config = AutoConfig.from_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    assert cli.plan(["eval", *words]).run() == 0
    remove_tensor(tmp_path, "model.norm.weight")
    with pytest.raises(cli.UserError, match=r"no tensor model.norm.weight"):
        cli.plan(["eval", *words]).run()


def test_port_taken() -> None:
    """A launcher's port that somebody else holds: an error within the deadline, not a hang."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code = "from megarl.parallel import mesh; mesh.initialise(timeout_s=5)"
        done = python("-c", code, env=os.environ | RANKS | {"WORLD_SIZE": "1", "MASTER_PORT": port})
    assert done.returncode != 0
    assert f"port {port}" in done.stderr and "MASTER_PORT" in done.stderr

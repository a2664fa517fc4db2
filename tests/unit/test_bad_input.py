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


def config_change(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


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
        ["rollout.samples_per_group is now rollout.group_size"], {"rollout.samples_per_group": 4}
    ),
    "renamed section": Case(["publish is now weight_sync"], {"publish.timeout_s": 4.0}),
    "renamed flag": Case(
        ["training.mini_batches is now training.num_mini_batches"],
        arguments=["--training.mini_batches", "1"],
    ),
    "renamed key without a value": Case(["publish is now weight_sync"], {"publish": None}),
    "a reference that nothing uses": Case(
        ["reference has settings", "algorithm.kl.coefficient"], {"reference.zero_stage": 3}
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
    "a reference's settings without its path": Case(
        ["reference.model has settings but no path"],
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
    "misspelt flag": Case(["learning_rate"], arguments=["--training.optimizer.learning_rat", "1"]),
    "wrong type": Case(["steps: input should be a valid integer", "'many'"], {"steps": "many"}),
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
    "Liger without a GPU": Case(
        ["'liger'", "needs a GPU", "set it to 'chunked'"], {"training.logprobs": "liger"}
    ),
    "attention block without its GPU": Case(
        [
            "training.sequence.block is 'flash'",
            "needs a GPU and training.precision 'bfloat16'",
            "set the block to 'auto'",
        ],
        {"training.layout.sequence": 2, "training.sequence.block": "flash"},
        environment=RANKS,
    ),
    "attention block unknown": Case(
        ["training.sequence.block", "'cudnn'"], {"training.sequence.block": "abacus"}
    ),
    "AutoTP has too few key heads": Case(
        ["num_key_value_heads is 1", "AutoTP", "training.tensor_backend to plan"],
        {"training.layout.tensor": 2, "training.tensor_backend": "autotp"},
        environment=RANKS,
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
        ["2 engine(s)", "2 engine ranks", "1 trainer ranks", "set rollout.num_engines"],
        {"rollout.placement": "colocated", "rollout.num_engines": 2},
    ),
    "colocated engines cannot run ahead": Case(
        ["'colocated'", "rollout.max_staleness is 1", "set it to 0"],
        {"rollout.placement": "colocated", "rollout.max_staleness": 1},
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
    "attention sinks": Case(
        ["gpt_oss", "attention sinks"], prepare=config_change(model_type="gpt_oss")
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
    "tokenizer not found": Case(
        ["tokenizer folder", "does not exist"], {"model.tokenizer": "./nowhere"}
    ),
    "SentencePiece file not found": Case(
        ["nowhere.model does not exist"], {"model.tokenizer": "nowhere.model"}
    ),
    "vocabularies at odds": Case(["vocab", "16"], prepare=config_change(vocab_size=16)),
    "no end-of-sequence token": Case(["eos"], prepare=tokenizer_change(eos_token=None)),
    "no padding token": Case(["pad"], prepare=tokenizer_change(pad_token=None)),
    "attention we do not have": Case(
        ["sliding", "does not support"],
        prepare=config_change(
            use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2
        ),
    ),
    "optimizer for GPUs only": Case(
        ["training.optimizer.kind is 'apex'", "set it to 'torch'"],
        {"training.optimizer.kind": "apex"},
    ),
    "longer than the model": Case(
        ["max_position_embeddings is 256"], {"rollout.max_new_tokens": 400}
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


def test_evaluating_needs_no_table(model: Path, tmp_path: Path) -> None:
    """An engine that reads the model by itself is sent no weights: any family will do."""
    case = Case(
        [],
        {
            "evaluation.prompts.source": "{folder}/data.jsonl",
            "evaluation.prompts.max_prompt_tokens": 8,
        },
        prepare=config_change(model_type="gemma", head_dim=32),
    )
    _, recipe_path, *rest = prepare(tmp_path, model, case)
    assert cli.dispatch("eval", [recipe_path, *rest, "--check"]) == 0


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

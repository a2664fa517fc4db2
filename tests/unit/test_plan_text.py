"""The plan of a run's placement, from config.json alone: ranks, GPUs, parameters and memory."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import cli
from megarl.apps.launch import run_words
from megarl.apps.launch.plan_text import spans
from megarl.engines.plan import check_placement
from megarl.errors import UserError
from megarl.parallel.layout import Layout
from megarl.parallel.tensor import Shard
from megarl.settings.config import RunConfig, read
from megarl.settings.training import LoraConfig, TrainingConfig
from megarl.trainer.memory import SizedParameter, role_memory

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
LLAMA_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 80,
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
CLUSTER = ("--nodes", "12", "--gpus-per-node", "8")
HEAD, BLOCKS = 128256 * 8192, 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
NORMS = (2 * 80 + 1) * 8192
WHOLE = 2 * HEAD + BLOCKS + NORMS


@pytest.fixture(autouse=True)
def _no_gpus_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "RAY_ADDRESS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_words, "_has_gpus", lambda: True)


def run(*words: str) -> int:
    """`megarl run WORDS` on a machine with GPUs; returns the exit code."""
    return cli.plan(["run", *words]).run()


def write_recipe(folder: Path, **changes: Any) -> str:
    """launch/recipes/ppo_70b_apart.yaml with models that are folders with a config.json each, and
    `changes` by dotted key.
    """
    tree = yaml.safe_load((ROOT / "launch/recipes/ppo_70b_apart.yaml").read_text())
    for name, kind in (("model", "LlamaForCausalLM"), ("judge", "LlamaForSequenceClassification")):
        (folder / name).mkdir(exist_ok=True)
        settings = json.dumps(LLAMA_70B | {"architectures": [kind]})
        (folder / name / "config.json").write_text(settings)
    tree["model"]["path"] = str(folder / "model")
    tree["reward_models"]["judge"]["model"]["path"] = str(folder / "judge")
    for key, value in changes.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "recipe.yaml")


Picture = Callable[..., str]


@pytest.fixture
def picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Picture:
    """What a dry run of the recipe with `changes` prints."""

    def show(*options: str, **changes: Any) -> str:
        assert run(write_recipe(tmp_path, **changes), "--dry-run", *options) == 0
        return capsys.readouterr().out

    return show


def rows_of(shown: str) -> dict[str, dict[str, Any]]:
    """{role or engine: its entry} of a plan, `free` and `fullest`."""
    return yaml.safe_load(shown)["placement"]


def numbers(text: str) -> list[int]:
    """The numbers of "0-3,7"."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def gpus_of(cell: dict[int, str]) -> list[tuple[int, int]]:
    """(node, GPU) of {node: GPUs}."""
    return [(node, gpu) for node, gpus in cell.items() for gpu in numbers(gpus)]


def expect(row: dict[str, Any], weights: float, gradients: float, optimizer: float) -> None:
    """Bytes a GPU, within 1 %."""
    sizes = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    sizes |= {"total": sum(sizes.values())}
    for name, size in row["memory"].items():
        assert name == "host" or size == pytest.approx(sizes[name] / GIB, rel=0.01, abs=0.006)


def test_four_models_of_70b_apart(picture: Picture) -> None:
    shown = picture(*CLUSTER)
    rows = rows_of(shown)
    roles = ["policy", "reference", "critic", "reward_models.judge"]
    assert list(rows) == [*roles, "engine 0", "engine 1", "free", "fullest"]

    # Every rank once, and no GPU twice.
    ranks = {name: numbers(rows[name]["ranks"]) for name in roles}
    assert sorted(rank for found in ranks.values() for rank in found) == list(range(80))
    gpus = {name: gpus_of(rows[name]["gpus"]) for name in [*roles, "engine 0", "engine 1"]}
    assert all(len(gpus[name]) == len(ranks[name]) for name in roles)
    assert all(len({node for node, _ in gpus[f"engine {n}"]}) == 1 for n in range(2))
    uses = Counter(gpu for found in gpus.values() for gpu in found)
    assert set(uses.values()) == {1}
    assert rows["fullest"] == rows["policy"]["memory"]["total"]
    assert set(uses) == {(node, gpu) for node in range(12) for gpu in range(8)}
    assert rows["free"] == {}

    assert rows["policy"]["layout"] == "4x1x8 Z3" and rows["engine 0"]["layout"] == "tensor 8"
    # 70.55 B with the output head; a critic and a reward model have a score of one row instead.
    assert WHOLE == 70_553_706_496
    assert rows["policy"]["parameters"] == rows["reference"]["parameters"] == WHOLE
    scored = WHOLE - HEAD + 8192
    assert rows["critic"]["parameters"] == rows["reward_models.judge"]["parameters"] == scored

    # ZeRO 3 over data 4 divides everything; norms are whole on every tensor rank.
    policy = ((WHOLE - NORMS) / 8 + NORMS) / 4
    critic = ((WHOLE - HEAD - NORMS) / 8 + NORMS + 8192) / 4
    expect(rows["policy"], 2 * policy, 4 * policy, 12 * policy)
    expect(rows["critic"], 2 * critic, 4 * critic, 12 * critic)
    expect(rows["reference"], 2 * WHOLE / 8, 0, 0)
    expect(rows["reward_models.judge"], 2 * (WHOLE - HEAD) / 8, 0, 0)
    expect(rows["engine 1"], 2 * WHOLE / 8, 0, 0)


def ray_of(shown: str) -> dict[int, int]:
    """{node: GPUs that Ray deals out there} of the printed commands that start Ray."""
    parts = re.split(r"^  # node (\d+)$", shown, flags=re.MULTILINE)[1:]
    found = {}
    for node, lines in zip(parts[::2], parts[1::2], strict=True):
        if start := re.findall(r"ray.scripts.scripts start --num-gpus=(\d+)", lines):
            (found[int(node)],) = map(int, start)
    return found


@pytest.mark.parametrize("port", [None, 17479])
def test_ray_accepts_the_printed_commands(picture: Picture, port: int | None) -> None:
    """Ray's own parser reads each line, and Ray's own check finds no port that is used twice."""
    from ray._private.parameter import RayParams
    from ray.scripts.scripts import start

    options = ["--port", str(port)] if port else []
    shown = picture(*CLUSTER, *options)
    lines = re.findall(r"ray.scripts.scripts start (.*)", shown)
    assert len(lines) == 6
    for line in lines:
        read = start.make_context("start", shlex.split(line)).params
        assert read["disable_usage_stats"]
        if read["head"]:
            assert read["port"] == (port or 6379) and read["include_dashboard"] is False
        else:
            # Ray refuses these two without --head.
            assert read["port"] is None and read["include_dashboard"] is None
        names = ("min_worker_port", "max_worker_port", "dashboard_port")
        RayParams(
            gcs_server_port=read["port"],
            ray_client_server_port=10001,
            dashboard_agent_listen_port=read["dashboard_agent_listen_port"],
            **{name: read[name] for name in names},
        ).update_pre_selected_port()


@pytest.mark.parametrize(("stage", "precision", "per_parameter"), [
    (0, "float32", (4, 4, 8)),
    (1, "float32", (4, 4, 12 / 4)),
    (1, "bfloat16", (2, 4, 12 / 4)),
    (2, "bfloat16", (2, 4 / 4, 12 / 4)),
    (3, "bfloat16", (2 / 4, 4 / 4, 12 / 4)),
])  # fmt: skip
def test_memory_by_zero_stage(
    picture: Picture, stage: int, precision: str, per_parameter: tuple[float, float, float]
) -> None:
    changes = {"training.zero_stage": stage, "training.precision": precision}
    mine = (WHOLE - NORMS) / 8 + NORMS
    row = rows_of(picture(*CLUSTER, **changes, **{"critic.zero_stage": 1}))["policy"]
    weights, gradients, optimizer = (mine * each for each in per_parameter)
    expect(row, weights, gradients, optimizer)


def test_adapters_and_offload(picture: Picture, tmp_path: Path) -> None:
    """Of LoRA only the adapters have gradients; the reference on the policy's ranks is the policy
    without them. With offload, optimizer states are in the host's memory.
    """
    lora = {"rank": 256, "targets": ["q_proj", "o_proj"]}
    changes: dict[str, Any] = {"training.lora": lora, "reference": {}, "training.zero_stage": 2}
    changes |= {"training.offload_optimizer": True, "critic.ranks": list(range(32, 64))}
    changes |= {"reward_models.judge.ranks": list(range(64, 72))}
    shown = picture(*CLUSTER, **changes)
    rows = rows_of(shown)
    # q_proj is cut by rows, o_proj by columns: the other matrix of the adapter is whole.
    adapters = 80 * 2 * (256 * 8192 + 256 * 8192 / 8)
    weights, sums = 2 * ((WHOLE - NORMS) / 8 + NORMS + adapters), 4 * adapters / 4
    expect(rows["policy"], weights, sums, 0)
    assert rows["reference"]["ranks"] == "0-31" and rows["reference"]["memory"]["total"] == 0
    assert "the policy without its adapters" in rows["reference"]["model"]
    # Pinned beside the moments: gradients, master weights, weights in bfloat16, and room for the
    # largest matrix.
    sizes = (4 * adapters / 4, 4 * adapters / 4, 2 * adapters / 4, 2 * 256 * 8192)
    pinned = sum(2 ** math.ceil(math.log2(size)) for size in sizes)
    expected = (8 * adapters / 4 + pinned) / GIB
    assert rows["policy"]["memory"]["host"] == pytest.approx(expected, abs=0.06)
    assert rows["free"] == {11: "0-7"}


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_adapters_of_a_layer_that_stays_whole(tensor: int) -> None:
    """The router of experts is whole on every tensor-parallel rank, and so is its adapter."""
    router = SizedParameter("model.layers.0.mlp.gate.weight", (8, 64))
    shard = None if tensor == 1 else Shard.even(0, 32, tensor)
    query = SizedParameter("model.layers.0.self_attn.q_proj.weight", (32, 64), shard)
    training = TrainingConfig(precision="float32", zero_stage=0, lora=LoraConfig(rank=4))
    for table, frozen, adapter in (
        ([router], 8 * 64, 4 * 64 + 8 * 4),
        ([query], 32 * 64 // tensor, 4 * 64 + 32 * 4 // tensor),
    ):
        found = role_memory(table, Layout(1, 1, tensor), training, trains=True)
        assert found.weights == 4 * (frozen + adapter)
        assert found.gradients == 4 * adapter and found.optimizer == 8 * adapter


def test_shared_gpus_are_added_up(picture: Picture) -> None:
    """Colocated engines share with the policy, and the reference does, but not the critic, whose
    ranks are between those of the policy.
    """
    changes: dict[str, Any] = {"reference": {}, "critic.ranks": list(range(8, 40))}
    changes |= {"reward_models.judge.ranks": list(range(64, 72)), "rollout.num_engines": 4}
    changes |= {"rollout.placement": "colocated", "rollout.max_staleness": 0}
    changes |= {"weight_sync.transport": "point_to_point"}
    shown = picture(*CLUSTER, **changes)
    rows = rows_of(shown)
    four = dict.fromkeys((0, 5, 6, 7), "0-7")
    assert rows["policy"]["gpus"] == rows["reference"]["gpus"] == four
    assert rows["policy"]["ranks"] == "0-7,40-63"
    assert [rows[f"engine {n}"]["gpus"] for n in (0, 3)] == [{0: "0-7"}, {7: "0-7"}]
    assert rows["critic"]["gpus"] == dict.fromkeys(range(1, 5), "0-7")
    assert rows["free"] == dict.fromkeys(range(9, 12), "0-7")
    total = sum(rows[name]["memory"]["total"] for name in ("policy", "reference", "engine 3"))
    assert rows["fullest"] == pytest.approx(total, abs=0.02)
    assert rows["policy"]["gpu_memory_utilization"].startswith("at most 0.")
    assert "warning" not in rows
    # Ray on the nodes of the policy and its engines, without GPUs: engines follow the ranks.
    assert ray_of(shown) == {0: 0, 5: 0, 6: 0, 7: 0}


def test_models_of_more_than_80_gb_are_named(picture: Picture) -> None:
    """Here of the policy and the reference on its GPUs, without the engine that takes turns."""
    changes: dict[str, Any] = {"reference": {}, "critic.ranks": list(range(8, 40))}
    changes |= {"reward_models.judge.ranks": list(range(40, 48)), "training.layout.data": 1}
    changes |= {"rollout.placement": "colocated", "rollout.max_staleness": 0}
    changes |= {"rollout.num_engines": 1, "weight_sync.transport": "point_to_point"}
    rows = rows_of(picture(*CLUSTER, **changes))
    total = rows["policy"]["memory"]["total"] + rows["reference"]["memory"]["total"]
    assert total > 80 and rows["warning"].startswith(f"{total:.2f} GiB on a GPU, more than 80 GB")


def test_ranks_beside_engines_on_every_node(picture: Picture) -> None:
    """12 ranks and two engines of 2 on two nodes: six ranks and an engine on each."""
    four = {"tensor": 4}
    changes: dict[str, Any] = {"training.layout": {"data": 1, **four}, "critic.layout": four}
    changes |= {"critic.ranks": [4, 5, 6, 7], "reference": {}, "rollout.engine.tensor": 2}
    changes |= {"reward_models.judge.ranks": [8, 9, 10, 11], "reward_models.judge.layout": four}
    shown = picture("--nodes", "2", "--gpus-per-node", "8", **changes)
    rows = rows_of(shown)
    assert [rows[f"engine {n}"]["gpus"] for n in range(2)] == [{0: "6-7"}, {1: "6-7"}]
    assert rows["critic"]["gpus"] == {0: "4-5", 1: "0-1"}
    assert rows["free"] == {}


def test_without_config_json_memory_is_unknown(picture: Picture) -> None:
    shown = picture(*CLUSTER, **{"model.path": "nobody/has-this-model"})
    row = rows_of(shown)["policy"]
    assert row["memory"] == "? the config.json of nobody/has-this-model is not on this machine"
    assert rows_of(shown)["reward_models.judge"]["parameters"] == WHOLE - HEAD + 8192


@pytest.mark.parametrize(("changes", "options", "says"), [
    ({"reference.ranks": list(range(60, 68))}, CLUSTER,
     "two roles with ranks of their own share none; set others"),
    ({"reference.ranks": list(range(64, 71)), "reward_models.judge.ranks": [71]}, CLUSTER,
     "reference.layout"),
    ({}, ("--nodes", "11", *CLUSTER[2:]), "need 96 GPUs, but --nodes 11 x .* are 88"),
    ({"rollout.engine.tensor": 16}, ("--nodes", "20", *CLUSTER[2:]), "an engine is on one node"),
    ({}, ("--ranks", "88", *CLUSTER), "= 32 ranks, but this run has 40"),
    ({"weight_sync.transport": "shared_memory"}, CLUSTER, "set it to 'point_to_point'"),
    ({}, ("--nodes", "12"), "--nodes needs --gpus-per-node"),
    ({}, ("--cpu", *CLUSTER), "--gpus-per-node and --cpu exclude each other"),
    ({}, CLUSTER, "all nodes of a Slurm allocation; add --dry-run"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], options: tuple[str, ...], says: str
) -> None:
    dry_run = [] if "add --dry-run" in says else ["--dry-run"]
    with pytest.raises(UserError, match=says):
        run(write_recipe(tmp_path, **changes), *dry_run, *options)


def test_gpus_may_be_named_by_uuid(picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"training.layout": {"data": 2}, "critic": {"ranks": [2, 4]}}
    changes |= {"reference": {}, "reward_models": {}, "rollout.engine.tensor": 1}
    changes |= {"reference.ranks": [1, 3]}
    uuids = [f"GPU-{n}a2b3c4d-1111-2222-3333-444455556666" for n in range(8)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(uuids))
    rows = rows_of(picture(**changes))
    assert rows["policy"]["ranks"] == "0,5"
    assert rows["policy"]["gpus"] == {0: "GPU-0a2b3c4d,GPU-5a2b3c4d"}


def test_colocated_engines_are_as_many_as_ranks(tmp_path: Path) -> None:
    """Under every ZeRO stage, also without: the optimizer's memory is lent all the same."""
    changes: dict[str, Any] = {"rollout.placement": "colocated", "rollout.max_staleness": 0}
    changes |= {"rollout.num_engines": 4, "training.precision": "float32"}
    changes |= {"training.zero_stage": 0, "critic.zero_stage": 0, "critic.ranks": []}
    changes |= {"weight_sync.transport": "shared_memory"}
    beside = read(RunConfig, write_recipe(tmp_path, **changes))
    check_placement(beside, 32, 1, shares_gpus=True, started=False)
    with pytest.raises(ValueError, match="but the policy has 64 ranks to share with"):
        check_placement(beside, 64, 1, shares_gpus=True, started=False)


@pytest.mark.parametrize(("given", "shown"), [
    ([0, 1, 2, 3, 7], "0-3,7"), ([7, 6, 5], "7,6,5"), ([], ""), (["GPU-a", "1", "2"], "GPU-a,1-2"),
])  # fmt: skip
def test_numbers_in_short(given: list[int | str], shown: str) -> None:
    assert spans(given) == shown

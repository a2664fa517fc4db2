"""tools/reshard.py: round trips bit by bit, dry runs of large models by arithmetic, and each bad
input refused with a fix.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]

from support.tiny import write_model

from megarl.checkpoints.export import Output
from megarl.checkpoints.manifest import seal
from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import scatter

reshard, reshard_files = map(importlib.import_module, ("reshard", "reshard_files"))

KINDS = ("qwen3", "llama")
LAYOUTS = (
    "data 2 tensor 2 zero 3",
    "data 3 sequence 2 zero 3",
    "tensor 4",
    "data 2 sequence 1 tensor 2 zero 1",
    "data 1",
)


Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command prints as JSON."""

    def call(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()  # transformers imports DeepSpeed, which talks, once a test makes a model
        assert reshard.main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command says when it refuses; it must leave nothing behind."""

    def call(*arguments: object) -> str:
        capsys.readouterr()
        beside = Path(str(arguments[1])).parent
        before = set(beside.iterdir())
        assert reshard.main([*map(str, arguments)]) == 1
        said = capsys.readouterr()
        assert not said.out and said.err.count("\n") == 1 and set(beside.iterdir()) == before
        return said.err

    return call


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of a Hugging Face folder's."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)
        ), name


def model_of(
    folder: Path, kind: str = "qwen2", *, tied: bool = False, dtype: torch.dtype = torch.float32
) -> Path:
    """Four heads, two key heads, an odd vocabulary: word shards of unlike sizes, key heads cut and
    shared.
    """
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 41}
    made = write_model(folder, kind=kind, tied=tied, biases=True, **sizes)
    if dtype != torch.float32:
        cast = {name: tensor.to(dtype) for name, tensor in tensors(made).items()}
        save_file(cast, made / "model.safetensors", metadata={"format": "pt"})
    return made


def in_two_files(folder: Path) -> None:
    """The same checkpoint with an index."""
    whole = tensors(folder)
    (folder / "model.safetensors").unlink()
    where = {}
    for number in (0, 1):
        part = dict(list(sorted(whole.items()))[number::2])
        save_file(part, folder / f"part{number}.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(part, f"part{number}.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(index)


# -------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_are_bitwise(kind: str, tmp_path: Path, run: Run) -> None:
    """Split, then from layout to layout and back to whole: the tensors, bit by bit, and a model
    that transformers loads.
    """
    import transformers

    dtype = torch.bfloat16 if kind == "llama" else torch.float32
    source = model_of(tmp_path / "model", kind, tied=kind == "qwen3", dtype=dtype)
    order, back = random.Random(kind).sample(LAYOUTS, 4), tmp_path / "back"
    run("split", source, tmp_path / "0", "--layout", order[0])
    for number, layout in enumerate(order[1:], 1):
        folders = tmp_path / f"{number - 1}", tmp_path / f"{number}"
        run("convert", *folders, "--layout", layout)
    found = run("join", tmp_path / "3", back)
    assert found["files"] == ["model.safetensors"] and found["left_out"] == []
    assert_same(tensors(back), tensors(source))
    names = {path.name for path in source.iterdir()} | {"digests.json"}
    assert {path.name for path in back.iterdir()} == names
    assert (back / "config.json").read_text() == (source / "config.json").read_text()

    load = transformers.AutoModelForCausalLM.from_pretrained
    one, other = load(source), load(back)
    assert_same(one.state_dict(), other.state_dict())
    words = torch.arange(2, 12)[None]
    assert torch.equal(one(words).logits, other(words).logits)
    load = transformers.AutoTokenizer.from_pretrained
    assert load(back)("12+3=")["input_ids"] == load(source)("12+3=")["input_ids"]


def random_layouts(count: int) -> list[str]:
    draw = random.Random(7)
    return [
        f"data {draw.randint(1, 5)} sequence {draw.randint(1, 3)} tensor {draw.choice((1, 2, 4))}"
        f" zero {draw.randint(0, 3)}"
        for _ in range(count)
    ]


@pytest.mark.parametrize("layout", random_layouts(2))
def test_ranks_hold_what_the_layout_says(layout: str, tmp_path: Path, run: Run) -> None:
    """Each rank's file against the definition: its piece of every whole tensor, flat."""
    source = model_of(tmp_path / "model")
    run("split", source, tmp_path / "out", "--layout", layout)
    degrees, whole = reshard.parse_degrees(layout), tensors(source)
    described = reshard_files.read_description(tmp_path / "out")
    assert described.degrees == degrees.layout and described.zero_stage == degrees.zero_stage
    assert len(set(described.files)) == (
        degrees.layout.size if degrees.zero_stage == 3 else degrees.layout.tensor
    )
    owned = reshard.load_model(source).owned(degrees)
    for file, one in zip(described.files, owned, strict=True):
        assert_same(load_file(tmp_path / "out" / file), scatter(one, whole))
    run("join", tmp_path / "out", tmp_path / "back")
    assert_same(tensors(tmp_path / "back"), whole)


def test_several_files_and_an_index(tmp_path: Path, run: Run) -> None:
    source = model_of(tmp_path / "model")
    whole = tensors(source)
    in_two_files(source)
    run("split", source, tmp_path / "out", "--layout", "tensor 2 data 2 zero 3")
    found = run("join", tmp_path / "out", tmp_path / "back", "--file-gb", "0.00005")
    assert len(found["files"]) > 2
    for name in found["files"]:
        owned = load_file(tmp_path / "back" / name)
        assert len(owned) == 1 or sum(tensor.nbytes for tensor in owned.values()) <= 50_000
    assert_same(tensors(tmp_path / "back"), whole)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


def test_dtypes_stay_where_they_differ(tmp_path: Path, run: Run) -> None:
    source = model_of(tmp_path / "model")
    mixed = {n: t.to(torch.bfloat16) if t.dim() > 1 else t for n, t in tensors(source).items()}
    mixed["model.norm.weight"] = mixed["model.norm.weight"].to(torch.float16)
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    found = run("split", source, tmp_path / "out", "--layout", "data 3 zero 3")
    assert found["dtypes"] == ["bfloat16", "float16", "float32"]
    run("join", tmp_path / "out", tmp_path / "back")
    assert_same(tensors(tmp_path / "back"), mixed)


def test_a_tied_head_is_left_out(tmp_path: Path, run: Run, refused: Run) -> None:
    """If it is the embedding again; a buffer of old Llama checkpoints, too."""
    source = model_of(tmp_path / "model", "llama", tied=True)
    whole = tensors(source)
    more = {"lm_head.weight": whole["model.embed_tokens.weight"].clone()}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(whole | more, source / "model.safetensors")
    found = run("split", source, tmp_path / "out", "--layout", "tensor 2")
    assert set(found["left_out"]) == set(more)
    run("join", tmp_path / "out", tmp_path / "back")
    assert_same(tensors(tmp_path / "back"), whole)
    more["lm_head.weight"][3, 3] += 1
    save_file(whole | more, source / "model.safetensors")
    assert "tie_word_embeddings" in refused(
        "split", source, tmp_path / "no", "--layout", "tensor 2"
    )


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tool as users start it, which prints nothing but JSON; a table; a misspelt command."""
    source, out = model_of(tmp_path / "model"), tmp_path / "out"
    assert reshard.main(["split", str(source), str(out), "--layout", "data 2 tensor 2 zero 3"]) == 0
    assert "rank_00003.safetensors" in capsys.readouterr().out
    tool = [sys.executable, str(ROOT / "tools" / "reshard.py"), "join", "out", "back", "--json"]
    done = subprocess.run(tool, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["parameters"] > 0, done.stderr
    assert_same(tensors(tmp_path / "back"), tensors(source))
    with pytest.raises(SystemExit):
        reshard.main(["plann"])
    assert "there is no command 'plann'; did you mean 'plan'?" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- dry runs

LARGE: dict[str, tuple[int, str]] = {
    "14B": (14_768_307_200, "model_type: qwen3, num_hidden_layers: 40, hidden_size: 5120,"
     " num_attention_heads: 40, num_key_value_heads: 8, head_dim: 128, intermediate_size: 17408,"
     " vocab_size: 151936, tie_word_embeddings: false"),
    "70B": (70_553_706_496, "model_type: llama, num_hidden_layers: 80, hidden_size: 8192,"
     " num_attention_heads: 64, num_key_value_heads: 8, intermediate_size: 28672,"
     " vocab_size: 128256, tie_word_embeddings: false"),
    "30B-A3B": (30_532_122_624, "model_type: qwen3_moe, num_hidden_layers: 48, hidden_size: 2048,"
     " num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128, num_experts: 128,"
     " moe_intermediate_size: 768, intermediate_size: 6144, vocab_size: 151936,"
     " tie_word_embeddings: false"),
}  # fmt: skip
"""Parameters as their model cards count them, and config.json."""


def config_of(folder: Path, name: str) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(yaml.safe_load("{" + LARGE[name][1] + "}")))
    return path


@pytest.mark.parametrize(("name", "source", "engines", "tensor"), [
    ("14B", "data 2 sequence 2 tensor 2", 4, 8),
    ("70B", "data 2 tensor 8 zero 3", 1, 8),
])  # fmt: skip
def test_a_dry_run_of_a_large_model(
    name: str, source: str, engines: int, tensor: int, tmp_path: Path, run: Run
) -> None:
    to = ["--engines", engines, "--engine-tensor", tensor, "--link-gb-s", 50]
    found = run("plan", config_of(tmp_path, name), "--source", source, *to)
    parameters = LARGE[name][0]
    assert found["model"]["parameters"] == parameters
    cover = found["coverage"]
    assert cover["wanted_elements"] == cover["written_elements"] >= engines * parameters
    assert found["moved_bytes"] == found["minimum_bytes"] == 2 * cover["written_elements"]
    assert found["target"]["bytes"] == 2 * (cover["written_elements"] + cover["padding_elements"])
    # Norms, and key heads that are fewer than ranks, are all that more than one rank of an engine
    # has.
    assert cover["written_elements"] < engines * parameters * 1.02
    degrees = reshard.parse_degrees(source)
    replicas = degrees.layout.size // degrees.layout.tensor
    copies = 1 if degrees.zero_stage == 3 else replicas
    assert math.isclose(found["source"]["bytes"], 2 * parameters * copies, rel_tol=0.01)
    ranks = engines * tensor
    assert found["target"]["ranks"] == ranks and found["naive_bytes"] > ranks * 2 * parameters
    assert found["most_received_bytes"] == 2 * cover["written_elements"] // ranks
    busiest = max(found["most_sent_bytes"], found["most_received_bytes"])
    assert found["predicted_s"] == busiest / 50e9
    assert found["most_sent_bytes"] >= found["moved_bytes"] / found["source"]["ranks"]
    buckets = found["buckets"]
    least = found["target"]["largest_rank_bytes"] / buckets["largest_bytes"]
    assert buckets["rank_buckets"] >= least


def test_a_dry_run_between_training_layouts(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path, layout = config_of(tmp_path, "14B"), "data 4 zero 3"
    target = "data 2 tensor 4 zero 3"
    found = run("plan", path, "--source", "data 4 tensor 2 zero 3", "--target", target)
    assert found["target"]["ranks"] == 8
    assert found["moved_bytes"] == found["minimum_bytes"] == found["target"]["bytes"]
    same = run("plan", path, "--source", layout, "--target", layout, "--colocated")
    assert same["moved_bytes"] == same["predicted_s"] == 0
    assert same["local_copies"] == same["copies"]
    to_engines = ["--source", "data 2", "--engines", "1", "--engine-tensor", "2"]
    assert reshard.main(["plan", str(path), *to_engines]) == 0
    assert "14,768,307,200 parameters" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- bad input


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_config(folder: Path, **changes: object) -> None:
    change_json(folder / "config.json", **changes)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    found = tensors(folder)
    change(found)
    save_file(found, folder / "model.safetensors")


def repeat_a_tensor(folder: Path) -> None:
    in_two_files(folder)
    first, other = load_file(folder / "part0.safetensors"), load_file(folder / "part1.safetensors")
    name = next(iter(first))
    save_file(other | {name: first[name]}, folder / "part1.safetensors")


def truncate(path: Path, off: int = 100) -> None:
    os.truncate(path, path.stat().st_size - off)


NORM = "model.layers.1.input_layernorm.weight"
BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config.json": (lambda f: (f / "config.json").unlink(), ["config.json", "name a model's"]),
    "config.json of something else": (lambda f: (f / "config.json").write_text("[]"),
     ["model_type", "name one"]),
    "unknown family": (lambda f: change_config(f, model_type="gpt2"), ["transformer.wte.weight", "not of one model"]),
    "a missing tensor": (lambda f: change_tensors(f, lambda t: t.pop(NORM)),
     [NORM, "no tensor", "fetch both"]),
    "a config.json that contradicts itself": (lambda f: change_config(f, num_hidden_layers=3),
     ["layer_types", "fetch it"]),
    "a name twice": (repeat_a_tensor, ["part0.safetensors and in", "part1.safetensors", "remove"]),
    "an index and a whole file": (lambda f: (f / "model.safetensors.index.json").write_text("{}"),
     ["both", "remove the one"]),
    "an index that is wrong": (lambda f: (in_two_files(f), move_in_index(f)),
     ["but it is not", "fetch both"]),
}  # fmt: skip
"""Weights that cannot be read or lack a tensor are in test_loading.py, whose reader it is."""


def move_in_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "part1.safetensors"
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_what_is_no_checkpoint_is_refused(case: str, tmp_path: Path, refused: Run) -> None:
    spoil, says = BAD_FOLDERS[case]
    folder = model_of(tmp_path / "model")
    spoil(folder)
    said = refused("split", folder, tmp_path / "out", "--layout", "data 2 zero 3")
    assert all(word in said for word in says), said


def seal_again(folder: Path) -> None:
    (folder / "digests.json").unlink()
    seal(folder)


def change_layout(folder: Path, **changes: object) -> None:
    change_json(folder / "layout.json", **changes)
    seal_again(folder)


BAD_SHARDS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a changed byte": (lambda f: flip(f / "rank_00002.safetensors"),
     ["rank_00002.safetensors is damaged"]),
    "a missing shard": (lambda f: (f / "rank_00000.safetensors").unlink(),
     ["missing or foreign", "rank_00000.safetensors"]),
    "no layout": (lambda f: (f / "layout.json").unlink(), ["no sharded checkpoint", "name one"]),
    "layout.json cut off": (lambda f: truncate(f / "layout.json"), ["layout.json cannot be read"]),
    "of a later format": (lambda f: change_layout(f, format=2), ["format 1"]),
    "nonsense": (lambda f: change_layout(f, layout={"data": 0}), ["does not describe ranks"]),
    "another layout": (lambda f: change_layout(f, layout={"data": 1, "sequence": 4, "tensor": 1}),
     ["rank_00000", "layout.json"]),
    "another stage": (lambda f: change_layout(f, zero_stage=0), ["other files"]),
    "another fingerprint": (lambda f: change_layout(f, fingerprint="0"), ["names and shapes"]),
    "a shard of another": (lambda f: (shutil.copy(f / "rank_00000.safetensors",
     f / "rank_00001.safetensors"), seal_again(f)),
     ["rank_00001.safetensors does not hold", "fetch"]),
}  # fmt: skip


def flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_a_damaged_sharded_checkpoint_is_refused(
    case: str, tmp_path: Path, run: Run, refused: Run
) -> None:
    spoil, says = BAD_SHARDS[case]
    folder = tmp_path / "sharded"
    run("split", model_of(tmp_path / "model"), folder, "--layout", "data 2 tensor 2 zero 3")
    spoil(folder)
    for command in (["join"], ["convert", "--layout", "data 2"]):
        said = refused(command[0], folder, tmp_path / "out", *command[1:])
        assert all(word in said for word in says), said


def test_layouts_that_do_not_fit_are_refused(tmp_path: Path, run: Run, refused: Run) -> None:
    folder, out = model_of(tmp_path / "model"), tmp_path / "out"
    run("split", folder, tmp_path / "sharded", "--layout", "tensor 2")
    for command in (["split", folder, out, "--layout", "tensor 3"],
                    ["convert", tmp_path / "sharded", out, "--layout", "tensor 8"]):  # fmt: skip
        assert "num_attention_heads = 4" in refused(*command)
    path = config_of(tmp_path, "14B")
    for layouts, said in (
        ("--source|tensor 16|--engines|1", "tensor is 16"),
        ("--source|data 2|--engines|1|--engine-tensor|16", "tensor is 16"),
        ("--source|data 2|--target|tensor 7", "tensor is 7"),
    ):
        assert said in refused("plan", path, *layouts.split("|"))
    moe = config_of(tmp_path, "30B-A3B")
    source = "data 3 expert 3"
    assert "does not divide the 128" in refused("plan", moe, "--source", source, "--engines", "1")


NO_LAYOUTS = ("", "data", "data two", "data 2 tensor", "width 2", "zero 4", "data 0")


@pytest.mark.parametrize("words", [*NO_LAYOUTS, "data 2 data 2", "data 2 tensor -1"])
def test_layouts_that_are_none_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reshard.main(["split", "a", "b", "--layout", words])
    assert "--layout" in capsys.readouterr().err


def test_what_is_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Run
) -> None:
    folder, out = model_of(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    assert "is there already" in refused("split", folder, out, "--layout", "data 2")
    (tmp_path / ".writing_new").mkdir()
    assert "another process writes" in refused(
        "split", folder, tmp_path / "new", "--layout", "data 2"
    )
    (tmp_path / "file").write_text("")
    for out, code in ((tmp_path / "file" / "there", 1), (tmp_path / "not" / "there", 0)):
        assert reshard.main(["split", str(folder), str(out), "--layout", "data 2"]) == code
        assert ("within one that is yours" in capsys.readouterr().err) == code


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Run) -> None:
    """Before, where it can be known; and where it fills up in the middle."""
    folder, out = model_of(tmp_path / "model"), tmp_path / "out"
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        said = refused("split", folder, out, "--layout", "data 2 zero 3")
    assert "are needed" in said and "0.000 GB free" in said and "another disk" in said

    real, number = reshard_files.write_safetensors, errno.ENOSPC

    def fails(output: Output, *rest: Any) -> int:
        if output.path.name == "rank_00001.safetensors":
            raise OSError(number, os.strerror(number), str(output.path))
        return real(output, *rest)

    monkeypatch.setattr(reshard_files, "write_safetensors", fails)
    said = refused("split", folder, out, "--layout", "data 2 zero 3")
    assert "No space left" in said and "free some space" in said
    number = errno.EROFS
    said = refused("split", folder, out, "--layout", "data 2 zero 3")
    assert "Read-only file system" in said
    assert "correct that, or name a folder on another disk" in said


def test_one_buffer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated is a buffer of the output, never more than one tensor, and one after the
    other.
    """
    source = reshard.open_hugging_face(model_of(tmp_path / "model"))
    (tmp_path / "out").mkdir()
    made: list[int] = []
    real = torch.empty

    def counted(size: int, **settings: Any) -> torch.Tensor:
        buffer = real(size, **settings)
        if buffer.device.type != "meta":  # where a model is only described
            made.append(size)
        return buffer

    degrees = reshard.Degrees(Layout(data=2, tensor=2), 3)
    with monkeypatch.context() as patch:
        patch.setattr(reshard_files.torch, "empty", counted)
        reshard.write_sharded(source, degrees, tmp_path / "out")
    sizes = {name: math.prod(shape) for name, shape in source.model.shapes.items()}
    assert len(made) == 4 * len(sizes) and max(made) <= max(sizes.values())

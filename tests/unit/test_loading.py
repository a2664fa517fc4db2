"""Loading on one rank against `from_pretrained`, and checkpoints that do not fit their config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import write_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.api import Result
from megarl.checkpoints.export import write_configs_and_tokenizer
from megarl.checkpoints.listing import newest_first
from megarl.checkpoints.manifest import damage, digest_files, seal, write_manifest
from megarl.checkpoints.progress import (
    Progress,
    choose,
    read_progress,
    write_progress,
)
from megarl.errors import UserError
from megarl.settings.config import PreferenceConfig
from megarl.settings.data import PreferencesConfig
from megarl.settings.schema import replace
from megarl.settings.training import LoraConfig, ModelConfig, TrainingConfig
from megarl.trainer.heads import use_score_head
from megarl.trainer.loading import check_weights, empty_model, generation_config, load_model
from megarl.trainer.plan import check_export, plan_model, stop_tokens
from megarl.trainer.role_placement import reference_adapter
from megarl.trainer.weights import RandomWeights

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load(folder: Path, **settings: Any) -> torch.nn.Module:
    return load_model(ModelConfig(path=str(folder), **settings), dtype=torch.bfloat16, seed=3)


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Parameters and buffers, bit by bit and in dtype."""
    for kind in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(one, kind)()), dict(getattr(other, kind)())
        assert mine.keys() == theirs.keys() and mine
        for name, tensor in mine.items():
            assert tensor.dtype == theirs[name].dtype, name
            assert torch.equal(tensor, theirs[name]), name


ROPE = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("tied", [False, True])
def test_loading_is_what_from_pretrained_does(tmp_path: Path, tied: bool, rope: str) -> None:
    """Stored in float32, read in bfloat16; buffers stay in float32."""
    write_model(tmp_path, kind="llama", tied=tied, biases=True, rope_parameters=ROPE[rope])
    mine = load(tmp_path)
    assert_same(mine, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    head, embedding = mine.get_output_embeddings(), mine.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    assert mine.config.dtype == torch.bfloat16


def test_names_of_a_base_model_and_of_either_tied_weight(tmp_path: Path) -> None:
    write_model(tmp_path, tied=True)
    whole, tensors = load(tmp_path), load_file(tmp_path / FILE)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / FILE)
    assert_same(load(tmp_path), whole)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / FILE)
    assert_same(load(tmp_path), whole)
    # Both are there: they must be equal. A recomputed buffer of old checkpoints is passed over.
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)
    save_file(tensors, tmp_path / FILE)
    assert_same(load(tmp_path), whole)
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"lm_head.weight that differs from model.embed_tokens"):
        load(tmp_path)


def change(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Edit the tensors of a checkpoint in one file."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        edit(tensors)
        save_file(tensors, folder / FILE)

    return apply


def with_index(edit: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    """The checkpoint in two files, with an index that is edited."""

    def apply(folder: Path) -> None:
        tensors, where = load_file(folder / FILE), {}
        for number in (0, 1):
            part = {name: tensors[name] for name in sorted(tensors)[number::2]}
            save_file(part, folder / f"part{number}.safetensors")
            where |= dict.fromkeys(part, f"part{number}.safetensors")
        (folder / FILE).unlink()
        edit(where)
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))

    return apply


def truncate(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-100])


def rename_all(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"policy.{name}"] = tensors.pop(name)


def index_of(text: str) -> Callable[[Path], None]:
    """The checkpoint in two files, with an index that says `text`."""

    def apply(folder: Path) -> None:
        with_index(lambda where: None)(folder)
        (folder / INDEX).write_text(text)

    return apply


NORM = "model.norm.weight"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (change(lambda t: t.pop(NORM)), "no tensor model.norm.weight"),
    "renamed": (
        change(rename_all),
        r"no tensor model.embed_tokens.weight .*\(and 26 more\).* has policy.lm_head.weight",
    ),
    "empty": (change(lambda t: t.clear()), r"no tensor model.embed_tokens.weight .*26 more"),
    "no head": (change(lambda t: t.pop("lm_head.weight")), r"no tensor lm_head.weight \(40, 64\)"),
    "unexpected": (
        change(lambda t: t.update(extra=torch.zeros(3))),
        "extra in .* is not in a.*fetch both",
    ),
    "shape": (change(lambda t: t.update({NORM: torch.zeros(3)})), r"model.norm.weight in .*\(3,\)"),
    "dtype": (change(lambda t: t.update({NORM: torch.zeros(64).int()})), "of dtype I32"),
    "truncated": (truncate, "truncated.*fetch it again"),
    "garbage": (lambda folder: (folder / FILE).write_bytes(bytes(5000)), "not safetensors"),
    "index of numbers": (index_of('{"weight_map": {"a": 3}}'), "index.json cannot be read"),
    "index nested": (index_of("[" * 100_000), "index.json cannot be read"),
    "index is a list": (index_of("[]"), "index.json cannot be read"),
    "index names a missing file": (
        with_index(lambda where: where.update({NORM: "part7.safetensors"})),
        "names part7.safetensors",
    ),
    "index names a missing tensor": (
        with_index(lambda where: where.update(extra="part0.safetensors")),
        "says that extra is in part0",
    ),
    "no weights": (lambda folder: (folder / FILE).unlink(), "model.from_scratch"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path, case: str) -> None:
    write_model(tmp_path)
    check_weights(ModelConfig(path=str(tmp_path)))
    edit, said = BROKEN[case]
    edit(tmp_path)
    with pytest.raises(ValueError, match=said):
        check_weights(ModelConfig(path=str(tmp_path)))
    check_weights(ModelConfig(path=str(tmp_path), from_scratch=True))


def test_random_weights_depend_on_the_seed_and_the_name_alone(tmp_path: Path) -> None:
    write_model(tmp_path, tied=True)
    config = ModelConfig(path=str(tmp_path), from_scratch=True)
    one = load_model(config, dtype=torch.float32, seed=3)
    other = load_model(config, dtype=torch.float32, seed=4)
    again = RandomWeights(empty_model(config), 3)
    state = torch.random.get_rng_state()
    for name, parameter in reversed(list(one.named_parameters())):
        assert torch.equal(again.flat(name), parameter.detach().view(-1)), name
    assert torch.equal(state, torch.random.get_rng_state())
    values, different = dict(one.named_parameters()), dict(other.named_parameters())
    up, gate = (values[f"model.layers.1.mlp.{kind}_proj.weight"] for kind in ("up", "gate"))
    assert not torch.equal(up, gate)
    assert not torch.equal(up, different["model.layers.1.mlp.up_proj.weight"])
    # What the model's own initialisation says: normal of initializer_range, ones, zeros.
    assert abs(up.std().item() - 0.15) < 0.01 and abs(up.mean().item()) < 0.01
    assert (values[NORM] == 1).all() and (values["model.layers.0.self_attn.q_proj.bias"] == 0).all()
    assert (values["model.embed_tokens.weight"][0] == 0).all()  # the padding token


def test_an_uninitialised_parameter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path)
    model = empty_model(ModelConfig(path=str(tmp_path)))
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ValueError, match=r"how model.norm.weight is initialised"):
        RandomWeights(model, 0).flat("model.norm.weight")


PROGRESS = Progress(3, 12, 0, "data 1", "m", "d")


def sealed(folder: Path, progress: Progress = PROGRESS) -> Path:
    folder.mkdir(parents=True)
    write_progress(folder, progress)
    seal(folder)
    return folder


def chosen(folder: Path, **more: str) -> Path | None:
    return choose(folder, layout="data 1", model="m", seed=0, data="d", **more)


def test_run_json_of_other_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A newer format is refused; unknown fields are passed over with one line."""
    folder = sealed(tmp_path / "step_000003")
    assert read_progress(folder) == PROGRESS
    found = json.loads((folder / "run.json").read_text())
    assert found["format"] == 3
    (folder / "run.json").write_text(json.dumps(found | {"colour": "red", "size": 3}))
    assert read_progress(folder) == PROGRESS
    assert capsys.readouterr().err.count("passing over colour, size\n") == 1
    (folder / "run.json").write_text(json.dumps(found | {"format": 4}))
    with pytest.raises(UserError, match="of format 4, and this version of megarl reads format 3"):
        read_progress(folder)
    (folder / "digests.json").unlink()
    seal(folder)
    with pytest.raises(UserError, match="format 4"):
        chosen(tmp_path)
    (folder / "run.json").write_text(json.dumps(found | {"format": 2}))
    with pytest.raises(ValueError, match=r"format 2.*resume with the version that wrote it"):
        read_progress(folder)
    del found["seed"]
    (folder / "run.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="lacks seed"):
        read_progress(folder)


def test_a_newer_checkpoint_is_not_passed_over_for_an_older_one(tmp_path: Path) -> None:
    """Whether its digests are of this version or not."""
    older, newer = sealed(tmp_path / "step_000003"), sealed(tmp_path / "step_000004")
    found = json.loads((newer / "run.json").read_text())
    whole = json.dumps(found | {"format": 4, "what_is_new": 1})
    (newer / "run.json").write_text(whole)
    assert chosen(tmp_path) == older  # damaged: its digest differs
    (newer / "digests.json").unlink()
    seal(newer)
    said = r"step_000004/run.json is of format 4.*or a newer one"
    with pytest.raises(UserError, match=said):
        chosen(tmp_path)
    (newer / "digests.json").write_text(json.dumps({"algorithm": "blake4", "files": {}}))
    with pytest.raises(UserError, match=said):
        chosen(tmp_path)
    (newer / "run.json").write_text(json.dumps(found))
    assert chosen(tmp_path) == older  # of an older version, or damaged
    for content in ("{", "[]", json.dumps(found | {"format": "x"})):
        (newer / "run.json").write_text(content)
        assert chosen(tmp_path) == older
    for content in ("{", '{"algorithm": "xxh3_128"}', '{"algorithm": "xxh3_128", "files": [1]}'):
        (newer / "digests.json").write_text(content)
        assert chosen(tmp_path) == older


def test_a_run_goes_on_with_the_reference_that_it_began_with(tmp_path: Path) -> None:
    """An adapter in place of the one that the run started from would be another reference."""
    folder = sealed(tmp_path / "step_000003", replace(PROGRESS, reference="a"))
    assert chosen(tmp_path, reference="a") == folder
    assert chosen(tmp_path) == folder, "another reference by choice"
    for other in ("b", ""):
        with pytest.raises(
            ValueError, match=r"adapter is another one, its file has changed, or reference\.lora"
        ):
            chosen(tmp_path, reference=other)
    shutil.rmtree(folder)
    assert sealed(folder) == chosen(tmp_path, reference="") == chosen(tmp_path)
    with pytest.raises(ValueError, match=r"no adapter; set reference\.lora to base"):
        chosen(tmp_path, reference="a")


def test_a_reference_without_adapter_is_no_other_reference() -> None:
    """ "" is compared with what a checkpoint holds, None with nothing."""
    lora = LoraConfig(rank=2, alpha=4.0, adapter="a")
    config = PreferenceConfig(
        folder="f",
        model=ModelConfig(path="m"),
        preferences=PreferencesConfig(source="p"),
        training=TrainingConfig(lora=lora),
    )
    assert reference_adapter(config) == "a"
    base = replace(config.reference, lora="base")
    assert reference_adapter(replace(config, reference=base)) == ""
    other = replace(config.reference, model=ModelConfig(path="m"))
    assert reference_adapter(replace(config, reference=other)) is None
    simpo = replace(config, loss=replace(config.loss, method="simpo"))
    assert reference_adapter(simpo) is None


def test_checkpoints_have_the_order_of_their_steps(tmp_path: Path) -> None:
    """From step 1,000,000 on their names have a digit more."""
    steps = (999_998, 999_999, 1_000_000)
    folders = [sealed(tmp_path / "checkpoints" / f"step_{step:06d}") for step in steps]
    place = folders[0].parent
    assert newest_first(place) == folders[::-1]
    assert chosen(place) == folders[-1]
    assert Result(tmp_path, {}).model == folders[-1] / "model"


def test_damage_is_found(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "one")
    assert damage(folder) == ""
    (folder / "run.json").write_text((folder / "run.json").read_text().replace("12", "13"))
    assert "run.json is damaged" in damage(folder)
    shutil.rmtree(folder)
    sealed(folder)
    (folder / "foreign").touch()
    assert "foreign" in damage(folder)
    (folder / "digests.json").write_text(json.dumps({"run.json": "0"}))
    assert "another version of megarl" in damage(folder)


def test_a_manifest_has_only_files_that_were_reported(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    digests = digest_files(tmp_path, [tmp_path / "one"])
    with pytest.raises(OSError, match="two"):
        write_manifest(tmp_path, digests)
    assert not (tmp_path / "digests.json").exists()
    write_manifest(tmp_path, digests | digest_files(tmp_path, [tmp_path / "two"]))
    assert damage(tmp_path) == ""


@pytest.mark.parametrize("content", [
    '{"do_sample": false, "temperature": 0.6}',
    '{"eos_token_id": 1, "our_own": {"x": [1, 2]},   "top_k": "many"}\n\n',
    '{"num_beams": 1, "length_penalty": 0.5, "early_stopping": true}',
])  # fmt: skip
def test_a_generation_config_is_carried_over_as_it_is(tmp_path: Path, content: str) -> None:
    config = ModelConfig(path=str(write_model(tmp_path)))
    file, out = tmp_path / "generation_config.json", tmp_path / "out"
    file.write_text(content)
    tokenizer, hf = plan_model(config)
    stop_tokens(tokenizer, config, hf)
    check_export(config, tokenizer, hf)
    model, kept = empty_model(config), generation_config(config)
    file.unlink()
    write_configs_and_tokenizer(out, model, tokenizer, kept)
    assert (out / "generation_config.json").read_text() == content
    again = tmp_path / "again"
    write_configs_and_tokenizer(again, model, tokenizer, generation_config(config))
    derived = json.loads((again / "generation_config.json").read_text())
    assert derived["eos_token_id"] == 1, "without a file, what the config says"
    use_score_head(model)
    write_configs_and_tokenizer(tmp_path / "judge", model, tokenizer, kept)
    assert not (tmp_path / "judge" / "generation_config.json").exists()

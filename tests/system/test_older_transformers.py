"""Exports read by transformers 4.57, in an environment of its own that TRANSFORMERS_4_PYTHON names,
and by the installed version: the trainer's logits, the tokenizer's ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.tiny import write_model

from megarl.checkpoints.export import write_configs_and_tokenizer
from megarl.data.tokenizer import load_tokenizer
from megarl.settings.training import ModelConfig
from megarl.trainer.loading import load_model

OLDER = os.environ.get("TRANSFORMERS_4_PYTHON", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.skipif(not OLDER, reason="TRANSFORMERS_4_PYTHON names no Python with it"),
]
TEXT = "12 + 30 = 42, abc #7"
ORIGINAL = {"original_max_position_embeddings": 64}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LAYERS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": dict(kind="qwen2", rope_theta=1e6, tied=True),
    "qwen3": dict(kind="qwen3", rope_theta=1e6, head_dim=32),
    "llama 3": dict(kind="llama", rope_theta=5e5,
     rope_scaling={"rope_type": "llama3", "factor": 8.0} | ORIGINAL | BANDS),
    "llama": dict(kind="llama", rope_theta=1e5, tied=True),
    "gemma 3": dict(kind="gemma3_text", rope_theta=1e6, rope_local_base_freq=1e3, head_dim=32,
     sliding_window=32, layer_types=LAYERS, query_pre_attn_scalar=32),
    "mistral": dict(kind="mistral", rope_theta=1e6, head_dim=32),
    "phi 3": dict(kind="phi3", rope_theta=1e5),
    "yarn": dict(kind="qwen2", rope_theta=1e6,
     rope_scaling={"rope_type": "yarn", "factor": 4.0} | ORIGINAL),
    "stablelm": dict(kind="stablelm", rope_theta=1e5, partial_rotary_factor=0.5),
}  # fmt: skip
"""{family: a small model whose positions are not those of the defaults}"""
READ = """
import json, sys, torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
# Version 5 splits every tokenizer beside a Qwen2 as Qwen's own, unless it is told the class.
is_older = transformers.__version__ < "5"
load_tokenizer = (AutoTokenizer if is_older else PreTrainedTokenizerFast).from_pretrained
for folder, text in json.loads(sys.argv[1]):
    kept = torch.load(folder + "/expected.pt")
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(kept["ids"]).logits
    gap = (logits - kept["logits"]).abs().max().item()
    print(json.dumps([folder, gap, load_tokenizer(folder)(text).input_ids]))
"""


def export(source: Path, out: Path) -> None:
    """What a checkpoint has of the model in `source`, and the trainer's logits."""
    config = ModelConfig(path=str(source))
    model: Any = load_model(config, dtype=torch.float32, seed=0).eval()
    model.set_attn_implementation("eager")  # the trainer's own takes packed tokens
    write_configs_and_tokenizer(out, model, load_tokenizer(str(source)))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(3, 30, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits
    torch.save({"ids": ids, "logits": logits}, out / "expected.pt")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    for name, settings in FAMILIES.items():
        export(write_model(folder / "source" / name, **settings), folder / "out" / name)
    return folder


@pytest.mark.parametrize("program", [OLDER, sys.executable], ids=["transformers 4", "installed"])
def test_exports_are_read_as_they_were_trained(program: str, exports: Path) -> None:
    folders = [[str(exports / "out" / name), TEXT] for name in FAMILIES]
    # The environment of this one would bring its packages along.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [program, "-c", READ, json.dumps(folders)], env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    for line in found.stdout.splitlines():
        folder, gap, ids = json.loads(line)
        assert gap < 1e-5, (folder, gap)
        assert ids == load_tokenizer(folder)(TEXT).input_ids, folder
    assert len(found.stdout.splitlines()) == len(FAMILIES)

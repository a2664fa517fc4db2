"""A real vLLM engine scores real text with the published weights of a pretrained model as
transformers does.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.engine_side import BOUND, gap, opened
from support.fork_server import PYTHON
from support.real import LORA, by_transformers, documents, merge, real_folder
from support.tiny import random_adapter

from megarl.checkpoints.adapter_files import PREFIX, TENSORS
from megarl.settings.rollout import EngineConfig


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_an_engine_scores_real_text_as_transformers_does(name: str) -> None:
    """Gemma's text is longer than its windows. The engine begins with other weights.

    vLLM takes torch's log-softmax in float32. Over Gemma's 262,144 words, on a processor without
    AVX-512, that alone is up to 1.3e-4 away from float64.
    """
    folder = real_folder(name)
    texts = documents(folder)
    wanted = by_transformers(folder, texts, torch.float32)
    # The probe is random words, whose log-probs of -20 to -30 float32 rounds more.
    with opened(folder, EngineConfig(), max_tokens=720, probe_tolerance=1e-3) as side:
        (found,) = side.engines.score(texts[-1], timeout_s=120)
        side.publish()
        for text, right in zip(texts, wanted, strict=True):
            (published,) = side.engines.score(text, timeout_s=120)
            assert gap(published, right) < BOUND
        assert gap(found, published) > 0.1, "an engine that no weights reach would pass"


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.slow
def test_an_engine_computes_with_adapters_as_plain_torch(tmp_path: Path) -> None:
    """Published alone, they make the engine's log-probs those of W + (alpha / rank) B A."""
    folder = real_folder("smollm2")
    text = documents(folder)[0]
    adapter = tmp_path / "adapter"
    random_adapter(adapter, str(folder), LORA, size=0.03)
    files = {path.name: path.read_bytes() for path in adapter.iterdir()}
    with opened(folder, EngineConfig(), adapter_rank=LORA.rank) as side:
        side.engines.load_adapter(0, files, timeout_s=60).result(timeout_s=60)
        (adapted,) = side.engines.score(text, timeout_s=120)
        (base,) = side.engines.score(text, timeout_s=120, adapted=False)
        assert gap(base, side.logprobs(text)) < BOUND
        stored = load_file(adapter / TENSORS)
        weights = dict(side.model.named_parameters())
        merge(weights, {name.removeprefix(PREFIX): one for name, one in stored.items()})
        assert gap(adapted, side.logprobs(text)) < BOUND
        assert gap(adapted, base) > 0.3, "an engine without adapters would pass"


@pytest.mark.real
@pytest.mark.slow
def test_one_can_talk_to_a_run(tmp_path: Path) -> None:
    """The second question needs the first; of a run folder the newest checkpoint answers."""
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    newest = tmp_path / "checkpoints" / "step_000010" / "model"
    newest.symlink_to(real_folder("smollm2"))
    done = subprocess.run(
        [
            *["megarl", "chat", "--temperature", "0", "--max-tokens", "24", "--system"],
            "Be brief.",
            tmp_path,
        ],
        input="What is the capital of France?\n\nAnd what is the capital of Italy?\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "Paris" in first and "Rome" in second
    assert done.stderr.startswith("loading ") and done.stderr.count("\n") == 1

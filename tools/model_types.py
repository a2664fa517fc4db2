"""Which model types of transformers train: a small random model of each goes through the checks, is
loaded, and its log-probs and gradients are compared with transformers' own.

    python tools/model_types.py [--write] [TYPE ...]

Without types: all causal language models of transformers. `--write` makes the table of
docs/reference_models.md.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

from megarl.checkpoints.store import open_whole
from megarl.parallel import mesh
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.settings.training import ModelConfig, TrainingConfig
from megarl.trainer.attention import prove_attention, refuse_unsupported
from megarl.trainer.loading import check_weights, empty_model, load_model, without_dropout
from megarl.trainer.model import RoleModel
from megarl.trainer.model_config import load_model_config
from megarl.trainer.packing import pack_shared
from megarl.trainer.sharding import refuse_tensor, shard_model
from megarl.types import Samples
from megarl.weights.published import exported_names, fused_tensors, published

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference_models.md"
MOST_WEIGHTS = 5_000_000
"""A type whose smallest model has more parts than these sizes say, such as one for images."""
TOLERANCE = 2e-5
SIZES: dict[str, Any] = dict(
    vocab_size=70, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, is_decoder=True, layer_types=["full_attention"] * 2, n_embd=64, n_layer=2,
    n_head=4, n_positions=64, n_inner=48, d_model=64, n_heads=4, n_layers=2, num_layers=2,
    num_heads=4, attention_types=[[["global", "local"], 1]], ffn_dim=48, decoder_layers=2,
    decoder_attention_heads=4, decoder_ffn_dim=48, encoder_layers=2, embedding_size=64, emb_dim=64,
    dim_model=64, dim_ff=48, rotary_dim=8, word_embed_proj_dim=64, global_head_dim=16,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, topk_group=1, kv_lora_rank=16,
    q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, mamba_d_state=8,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=70, num_kv_shared_layers=0,
)  # fmt: skip


def small(kind: str) -> Any:
    """The smallest configuration of a type that its class accepts."""
    made = CONFIG_MAPPING[kind]
    try:
        known = {*vars(made()), *made.attribute_map}
    except Exception:  # some have no default
        known = set(SIZES)
    unsaid = ("layer_types", "head_dim", "num_key_value_heads")
    for count in range(len(unsaid) + 1):
        sizes = {k: value for k, value in SIZES.items() if k in known - set(unsaid[:count])}
        try:
            return without_dropout(made(**sizes))
        except Exception as error:
            problem = error
    raise problem


def save(kind: str, folder: Path) -> None:
    """Write a small random model of a type as transformers saves it. Raises what its classes do."""
    config = small(kind)
    with torch.device("meta"):
        size = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size:,} weights")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def check(folder: Path) -> ModelConfig:
    """The checks of a model before a run; raises `ValueError`."""
    config = ModelConfig(path=str(folder))
    refuse_unsupported(load_model_config(config))
    prove_attention(empty_model(config))
    check_weights(config)
    return config


def difference(config: ModelConfig, ranks: ProcessMesh) -> float:
    """The largest difference to transformers over the log-probs of two packed documents, and over
    each gradient by its size; each document alone there.
    """
    texts = [list(range(3, 12)), list(range(30, 44))]
    theirs: Any = AutoModelForCausalLM.from_pretrained(config.path, attn_implementation="eager")
    theirs, without = theirs.float().train(), without_dropout(theirs.config)
    assert without is theirs.config
    wanted = []
    for text in texts:
        ids = torch.tensor([text])
        logits = theirs(input_ids=ids, use_cache=False).logits[0, :-1]
        wanted.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    torch.cat(wanted).sum().backward()
    ours = RoleModel(load_model(config, dtype=torch.float32, seed=0), ranks, TrainingConfig())
    samples = Samples.concatenate([Samples.one(n, text) for n, text in enumerate(texts)])
    logprobs, _ = ours(pack_shared(samples, torch.device("cpu"), ranks.sequence), 1.0)
    logprobs.sum().backward()
    worst = float((logprobs - torch.cat(wanted)).abs().max())
    grads = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    largest = max(float(grad.norm()) for grad in grads.values())
    for name, one in ours.model.named_parameters():
        if name in grads:
            assert one.grad is not None, f"{name} has no gradient"
            off, size = float((one.grad - grads[name]).norm()), float(grads[name].norm())
            worst = max(worst, off / max(size, 1e-3 * largest))
    return worst


def cut(config: ModelConfig) -> str:
    """Whether two tensor-parallel ranks can have the model: "yes" or "no"."""
    model = empty_model(config)
    try:
        refuse_tensor(model.config, 2)
        shard_model(model, Axis("tensor", 2, 0, (0, 1), None))
    except ValueError:
        return "no"
    return "yes"


def engine(kind: str, architecture: str) -> str:
    """Whether weights of a type reach vLLM: "yes" or "no"."""
    from vllm.model_executor.models.registry import ModelRegistry

    has = architecture in ModelRegistry.get_supported_archs() and kind != "cohere2"
    return "yes" if has else "no"


def row(kind: str, ranks: ProcessMesh) -> tuple[str, ...]:
    """What becomes of a type: (architecture, tensor, export) or (why it is refused). Raises where
    what passes the checks does not train as transformers does.
    """
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        try:
            save(kind, folder)
        except Exception as error:
            return (f"not tried: {type(error).__name__}",)
        try:
            config = check(folder)
        except ValueError as error:
            said = str(error).replace(path, "FOLDER")
            assert "\n" not in said and "another model" in said, said
            return (said,)
        off = difference(config, ranks)
        assert off < TOLERANCE, f"{kind} differs from transformers by {off:.2g}"
        model = load_model(config, dtype=torch.float32, seed=0)
        stored, names = set(open_whole(folder).shapes), exported_names(model)
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        ours = {names.get(name, name) for name in published(shapes, fused_tensors(model))}
        buffers = {name for name in load_file(folder / "model.safetensors") if name not in ours}
        export = "yes" if ours <= stored and buffers <= set(model.state_dict()) else "other names"
        return type(model).__name__, cut(config), export


def reason(kind: str, said: str) -> str:
    """The message `said` without what is of one type, folder or exception."""
    said = re.sub(r"with \w+Router(, \w+Router)*", "with another router", said)
    said = re.sub(rf"(of )?'?FOLDER'? ?|(model )?type {re.escape(kind)} ", "", said)
    said = re.sub(r"^(of )?model\.path ", "", said).partition(", which training")[0]
    return re.sub(r" \(\w+Error: .*\)|(?<=not tried): \w+", "", said.partition("; ")[0])


def table(rows: dict[str, tuple[str, ...]]) -> str:
    """The page's table of `rows`, as Markdown."""
    trains: dict[tuple[str, ...], list[str]] = {}
    why: dict[str, list[str]] = {}
    for kind, one in rows.items():
        if len(one) > 1:
            name, tensor, export = one
            trains.setdefault((tensor, engine(kind, name), export), []).append(kind)
        else:
            why.setdefault(reason(kind, one[0]), []).append(kind)
    lines = ["| types | tensor | engine | export |", "|---|---|---|---|"]
    lines += [f"| {', '.join(kinds)} | {' | '.join(cells)} |" for cells, kinds in trains.items()]
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| {', '.join(kinds)} | {said} |" for said, kinds in why.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    wanted = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    mesh.initialise()
    rows = {}
    with ProcessMesh(Layout()) as ranks:
        for kind in wanted.types or sorted(TYPES):
            try:
                rows[kind] = row(kind, ranks)
            except Exception as error:
                rows[kind] = (f"FAILED {type(error).__name__}: {error}"[:300],)
            print(kind, *rows[kind], sep=" | ", flush=True)
    if wanted.write:
        head = PAGE.read_text().partition("| types |")[0]
        PAGE.write_text(head + table(rows))


if __name__ == "__main__":
    main()

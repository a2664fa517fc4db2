"""Model families against transformers itself: its eager attention, a document at a time, against
ours under layouts.

log-probs of every token, and the gradient of every parameter, of a weighted sum of them

And prompts that are computed once for their responses against prompts that are repeated, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.policy import over_meshes
from support.ranks import run_ranks
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megarl.parallel import collectives
from megarl.parallel.collectives import all_reduce
from megarl.settings.training import SequenceConfig, TrainingConfig
from megarl.trainer.attention import ATTENTION
from megarl.trainer.loading import without_dropout
from megarl.trainer.model import RoleModel
from megarl.trainer.norms import _formula
from megarl.trainer.packing import pack, pack_shared
from megarl.types import Samples

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0}
              | {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
    "mistral": {},
    "mistral, window": {"sliding_window": 5},
    "qwen2, windows": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
              | {"layer_types": ["full_attention", "sliding_attention"]},
    "gemma3_text, windows": {"sliding_window": 6, "query_pre_attn_scalar": 5}
              | {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo3, windows": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma": {},
    "gemma2, soft caps": {"query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}
              | {"sliding_window": 6},
    "gpt_oss, sinks": {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 2}
              | {"layer_types": ["sliding_attention", "full_attention"]},
    "granite_swa, sinks": {"sliding_window": 6, "logits_scaling": 3.0, "attention_multiplier": 0.3}
              | {"layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 5.0},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": False},
    "phi3, window": {"sliding_window": 6, "partial_rotary_factor": 0.5},
    "smollm3, without rope": {"no_rope_layers": [1, 0]},
    "olmo": {},
    "olmo2": {},
    "starcoder2": {},
    "ernie4_5": {},
    "gpt_neox": {},
}  # fmt: skip
"""{family, what is special: changes to a small configuration}: whatever could be left out of a
forward pass of ours.
"""

LAYOUTS = [(1, 1, 4), (1, 2, 2)]
WITHOUT_TENSOR = [(1, 4, 1), (2, 2, 1)]
NOT_CUT = ("olmo2", "olmo3, windows", "gpt_oss, sinks", "phi3, window")
"""Families that tensor parallelism refuses, by the part that it cannot cut."""
TEMPERATURE = 0.8


def configuration(kind: str) -> Any:
    """Two layers, four heads, two key heads, 40 words of which 0 is padding."""
    sizes = dict(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, sliding_window=None,
    )  # fmt: skip
    made = CONFIG_MAPPING[kind.partition(",")[0]]
    known = {name: value for name, value in sizes.items() if hasattr(made(), name)}
    return without_dropout(made(**known | FAMILIES[kind]))


def build(config: Any, attention: str) -> Any:
    """The same weights every time, vectors too."""
    torch.manual_seed(7)  # some models draw their vectors, such as sinks
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    draw = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = 0.2 * torch.randn(parameter.shape, generator=draw)
        parameter.data = parameter.data + noise if parameter.dim() == 1 else noise
    return model.train()


def documents() -> list[list[int]]:
    """Uneven, one of them with the padding word in it."""
    draw = torch.Generator().manual_seed(3)
    made = [torch.randint(1, 40, (length,), generator=draw).tolist() for length in (9, 14, 3, 21)]
    made[1][4] = made[1][7] = 0
    return made


def weight(position: Any, length: Any) -> Any:
    """Of a token's log-prob in the sum: different for every token of a document."""
    return 0.5 + position / length


def by_transformers(config: Any) -> tuple[Any, dict[str, Any]]:
    model, total, found = build(config, "eager"), 0.0, []
    for document in documents():
        ids = torch.tensor(document)[None]
        logits = model(input_ids=ids, use_cache=False).logits[0] / TEMPERATURE
        logp = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        total = total + (logp * weight(torch.arange(len(logp)), len(logp))).sum()
        found.append(logp.detach())
    total.backward()
    return torch.cat(found), {name: parameter.grad for name, parameter in model.named_parameters()}


def by_us(config: Any, mesh: Any) -> tuple[Any, dict[str, Any]]:
    policy = RoleModel(build(config, ATTENTION), mesh, TrainingConfig())
    samples = Samples.concatenate([Samples.one(n, ids) for n, ids in enumerate(documents())])
    micro = pack_shared(samples, torch.device("cpu"), mesh.sequence)
    logp, entropy = policy(micro, TEMPERATURE)
    every = torch.tensor([len(document) - 1 for document in documents()])
    weights = weight(micro.position_ids[micro.mask], every[micro.sample_ids[micro.mask]])
    ((logp * weights).sum() + 0.0 * entropy.sum()).backward()
    whole = torch.zeros(2, sum(map(len, documents())))
    place = micro.indices[mesh.sequence.rank][micro.mask] if micro.indices else micro.mask
    whole[0, place], whole[1, place] = logp.detach(), 1.0
    all_reduce(whole, mesh.sequence)
    grads = {}
    for name, parameter in policy.model.named_parameters():
        grad = all_reduce(parameter.grad.clone(), mesh.sequence)
        shard = policy.shards.get(name)
        grads[name] = shard.gather(grad, mesh) if shard else grad
    return whole[0][whole[1] > 0], grads


def compare(parity: int) -> dict[str, tuple[float, float, str]]:
    """{family and layout: largest difference of log-probs, largest relative one of a gradient,
    whose}. On every rank; one of the two layouts of each family.
    """
    found = {}
    theirs = {kind: by_transformers(configuration(kind)) for kind in FAMILIES}
    for place, (layout, mesh, _) in enumerate(over_meshes(LAYOUTS + WITHOUT_TENSOR)):
        for number, (kind, (logp, grads)) in enumerate(theirs.items()):
            if (kind in NOT_CUT) != (layout in WITHOUT_TENSOR) or (number + place) % 2 != parity:
                continue
            scale = max(float(grad.norm()) for grad in grads.values())
            mine, others = by_us(configuration(kind), mesh)
            assert grads.keys() == others.keys()
            # A parameter whose gradient is nothing but rounding is held to a thousandth of the
            # largest.
            off = {
                n: float((grads[n] - others[n]).norm()) / max(float(grads[n].norm()), 1e-3 * scale)
                for n in grads
            }
            worst = max(off, key=off.__getitem__)
            found[f"{kind} {layout}"] = (float((logp - mine).abs().max()), off[worst], worst)
    return found


@pytest.mark.parametrize("parity", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_families_are_what_transformers_says(parity: int) -> None:
    for rank, found in enumerate(run_ranks(4, __file__, "compare", parity, timeout_s=300)):
        assert len(found) == len(FAMILIES)
        wrong = {name: off for name, off in found.items() if max(off[:2]) > 2e-5}
        assert not wrong, (rank, wrong)


def count_sums() -> dict[bool, int]:
    """All-reduces of one backward pass over two layers on two tensor ranks, without and with
    recomputed activations.
    """
    found, calls, real = {}, [], collectives.dist.all_reduce
    for _, mesh, device in over_meshes([(1, 1, 2)]):
        for recomputed in (False, True):
            policy = RoleModel(build(configuration("qwen2"), ATTENTION), mesh, TrainingConfig())
            if recomputed:
                policy.model.gradient_checkpointing_enable({"use_reentrant": False})
            micro = pack(Samples.one(0, documents()[0]), device)
            logp, _ = policy.train()(micro, TEMPERATURE)
            calls.clear()
            collectives.dist.all_reduce = lambda *a, **k: (calls.append(1), real(*a, **k))[1]
            logp.sum().backward()
            collectives.dist.all_reduce = real
            found[recomputed] = len(calls)
    return found


def test_layers_of_one_input_share_one_sum_of_gradients() -> None:
    """Attention and feed-forward of two layers, and the head: five. Recomputing adds the outputs
    that are needed again.
    """
    for found in run_ranks(2, __file__, "count_sums"):
        assert found == {False: 5, True: 5 + 2}, found


STEPS = 3
"""Steps of AdamW, with clipping, after which prompts computed once are compared with repeated ones."""
TRAINED = [kind for kind in FAMILIES if not kind.startswith("gpt_oss")]
"""All but a mixture of experts, which training refuses."""

ROTATES_IN_FLOAT32 = ("cohere", "ernie4_5")
"""Families whose code turns queries and keys to float32 for the rotary embedding."""


def exact_norms(model: Any) -> None:
    """RMSNorm in the dtype of its input: transformers computes it in float32."""

    def norm(layer: Any, eps: float, offset: float, x: Any) -> Any:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + layer.weight)

    for layer in model.modules():
        if type(layer).__name__.endswith("RMSNorm"):
            eps, offset = _formula(layer)
            layer.forward = lambda x, one=layer, e=eps, o=offset: norm(one, e, o, x)
        elif type(layer).__name__.endswith("LayerNorm") and hasattr(layer, "normalized_shape"):
            layer.forward = lambda x, one=layer: torch.nn.functional.layer_norm(
                x, one.normalized_shape, getattr(one, "weight", None), getattr(one, "bias", None)
            )


def groups() -> Any:
    """Three prompts of 24 tokens, three responses each, of which the responses are trained on."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for _ in range(3):
        prompt = torch.randint(1, 40, (24,), generator=draw).tolist()
        for length in (4, 9, 13):
            ids = prompt + torch.randint(1, 40, (length,), generator=draw).tolist()
            made.append(Samples.one(len(made), ids, mask=np.arange(len(ids)) >= 24))
    return Samples.concatenate(made)


def trained(kind: str, mesh: Any, share: Any) -> tuple[Any, int]:
    """(log-probs [M] in the order of the samples after the steps, tokens of the packed row)."""
    model = build(configuration(kind), ATTENTION).double()
    exact_norms(model)
    training = TrainingConfig(sequence=SequenceConfig(block="reference"), attention="reference")
    policy = RoleModel(model, mesh, training).train()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    micro = pack(groups(), torch.device("cpu"), share=share)
    order = micro.places[micro.mask].argsort()
    for _ in range(STEPS):
        logp = policy(micro, TEMPERATURE)[0]
        weight = 0.5 + torch.arange(len(logp), dtype=torch.float64) / len(logp)
        adam.zero_grad()
        (-(logp[order] * weight).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
    with torch.no_grad():
        return policy(micro, TEMPERATURE)[0][order], len(micro.token_ids)


def compare_sharing() -> dict[str, float]:
    """{family: largest difference of a log-prob}."""
    found = {}
    for _, mesh, _ in over_meshes([(1, 1, 1)]):
        for kind in TRAINED:
            shared, fewer = trained(kind, mesh, "on")
            repeated, tokens = trained(kind, mesh, "off")
            assert fewer < tokens and len(shared) == 3 * (4 + 9 + 13)
            found[kind] = float((shared - repeated).abs().max())
    return found


def test_sharing_changes_nothing_but_rounding() -> None:
    (found,) = run_ranks(1, __file__, "compare_sharing", timeout_s=300)
    bounds = {kind: 1e-6 if kind in ROTATES_IN_FLOAT32 else 1e-11 for kind in found}
    assert {kind: off for kind, off in found.items() if off > bounds[kind]} == {}

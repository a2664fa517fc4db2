"""Mixtures of experts at their edges: against transformers itself on one rank in float64, and
alike in every layout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import training_cases
from support.mixtures import prefer, write_mixture
from support.policy import on_mesh
from support.ranks import run_ranks
from support.training_cases import assert_equal
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megarl.settings.training import ExpertsConfig, LoraConfig, ModelConfig, TrainingConfig
from megarl.trainer.attention import ATTENTION
from megarl.trainer.experts import EXPERTS
from megarl.trainer.loading import load_model_config, without_dropout
from megarl.trainer.model import RoleModel
from megarl.trainer.packing import pack, padding
from megarl.types import MicroBatch, Samples

BALANCE, Z = 0.7, 0.3
PROMPT = 9
ALONE: dict[str, dict[str, Any]] = {
    "softmax": dict(kind="qwen3_moe"),
    "shares of softmax": dict(kind="qwen3_moe", norm_topk_prob=True),
    "top 1": dict(kind="qwen3_moe", num_experts_per_tok=1),
    "top 8": dict(kind="olmoe", num_experts=16, num_experts_per_tok=8),
    "all experts": dict(kind="mixtral", num_experts_per_tok=8),
    "softmax of chosen": dict(kind="gpt_oss"),
    "all tokens to one expert": dict(kind="gpt_oss", num_experts_per_tok=1, favourite=3),
    "groups and a shared expert": dict(kind="glm4_moe"),
    "groups with bias": dict(kind="glm4_moe", favourite=5),
}
"""Families and what is special, as `write_mixture` takes it. `favourite`: the expert that the
routers' bias prefers.
"""


def build(folder: str, attention: str, favourite: int | None = None) -> Any:
    config = without_dropout(load_model_config(ModelConfig(path=folder)))
    ours = {"experts_implementation": EXPERTS if attention == ATTENTION else "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float64, attn_implementation=attention, **ours
    )
    prefer(model, favourite)
    return model.double().train()


def routers_of(model: Any) -> list[Any]:
    return [one for one in model.modules() if type(one).__name__.lower().endswith("router")]


def documents(seed: int = 3) -> list[list[int]]:
    """Uneven; three with a common prefix; one of one token."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, 40, (count,), generator=draw).tolist()

    prompt = tokens(PROMPT)
    return [tokens(14), *(prompt + tokens(count) for count in (2, 5, 3)), tokens(1), tokens(21)]


def by_transformers(folder: str, favourite: int | None) -> tuple[Any, ...]:
    """(log-probs, gradients, balance loss, z loss)"""
    model, total, logprobs = build(folder, "eager", favourite), 0.0, []
    logits, chosen = list[list[torch.Tensor]](), list[list[torch.Tensor]]()
    for router in routers_of(model):
        logits.append([])
        chosen.append([])
        router.register_forward_hook(lambda _, __, out, to=logits[-1]: to.append(out[0]))
        router.register_forward_hook(lambda _, __, out, to=chosen[-1]: to.append(out[2]))
    for document in documents():
        ids = torch.tensor(document)[None]
        out = model(input_ids=ids, use_cache=False).logits[0]
        logp = out[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        total = total + (logp * torch.arange(len(logp)))[PROMPT - 1 :].sum()
        logprobs.append(logp.detach()[PROMPT - 1 :])
    layers = [torch.cat(parts) for parts in logits]
    top_k, count = routers_of(model)[0].top_k, layers[0].shape[1]
    if hasattr(routers_of(model)[0], "e_score_correction_bias"):
        parts = []
        for layer, choices in zip(layers, chosen, strict=True):
            scores, index = layer.double().sigmoid(), torch.cat(choices)
            shares = torch.nn.functional.one_hot(index, count).sum(1).double().mean(0)
            parts.append(count * shares @ (scores / scores.sum(-1, keepdim=True)).mean(0))
    else:
        parts = [load_balancing_loss_func((layer,), count, top_k) for layer in layers]
    balance: Any = sum(parts) / len(layers)
    z = sum(layer.logsumexp(-1).square().mean() for layer in layers) / len(layers)
    (total + BALANCE * balance + Z * z).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return torch.cat(logprobs), grads, float(balance.detach()), float(z.detach())


def passes(
    policy: RoleModel, micro_batches: list[MicroBatch]
) -> tuple[torch.Tensor, dict[str, Any], dict[str, float]]:
    """(log-probs, gradients, metrics) of the loss of `by_transformers`."""
    load, axis, logprobs = policy.routers.load, policy.mesh.gradient, []
    load.begin(micro_batches, axis)
    if load.needs_counts:
        for micro in micro_batches:
            with torch.no_grad(), load.of(micro):
                policy(micro)
        load.count(axis)
    for micro in micro_batches:
        with load.of(micro):
            logp, entropy = policy(micro)
            factors = micro.position_ids[micro.mask]
            loss = (logp * factors).sum() + load.take_losses()
            (loss + 0.0 * entropy.sum()).backward()
        logprobs.append(logp.detach())
    load.finish(axis)
    grads = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    return torch.cat(logprobs), grads, load.take_metrics()


def packed(share: Any, *, size: int = 3) -> list[MicroBatch]:
    """The documents in two micro-batches; the second one with padding."""
    samples = [
        Samples.one(n, ids, mask=[place >= PROMPT for place in range(len(ids))])
        for n, ids in enumerate(documents())
    ]
    parts = samples[:size], [*samples[size:], padding(5)]
    return [pack(Samples.concatenate(part), torch.device("cpu"), share=share) for part in parts]


def alone(folders: dict[str, str]) -> dict[str, Any]:
    found = {}
    with on_mesh() as (mesh, _):
        for name, folder in folders.items():
            favourite = ALONE[name].get("favourite")
            theirs = by_transformers(folder, favourite)
            training = TrainingConfig(
                experts=ExpertsConfig(balance_coefficient=BALANCE, z_coefficient=Z)
            )
            for variant in ("", "checkpointing", "shared"):
                policy = RoleModel(build(folder, ATTENTION, favourite), mesh, training).train()
                if variant == "checkpointing":
                    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
                micro_batches = packed("on" if variant == "shared" else "off")
                assert bool(micro_batches[0].parents) == (variant == "shared")
                logprobs, grads, metrics = passes(policy, micro_batches)
                worst = {"logprobs": float((logprobs - theirs[0]).abs().max())}
                for parameter, grad in theirs[1].items():
                    if grad is None:
                        assert grads[parameter] is None
                        continue
                    scale = grad.norm().clamp_min(1e-3)
                    worst[parameter] = float((grads[parameter] - grad).norm() / scale)
                worst["balance"] = metrics["experts/balance_loss"] / theirs[2] - 1
                worst["z"] = metrics["experts/z_loss"] / theirs[3] - 1
                found[f"{name}, {variant}"] = worst, metrics
    return found


def test_one_rank_computes_what_transformers_does(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folders = {
        name: write_mixture(
            tmp_path_factory.mktemp("model"),
            **{key: value for key, value in case.items() if key != "favourite"},
        )
        for name, case in ALONE.items()
    }
    (found,) = run_ranks(1, __file__, "alone", folders)
    for case, (worst, metrics) in found.items():
        print(case, max(worst.values()), metrics)
        assert max(map(abs, worst.values())) < 1e-5, (case, worst)
        if "one expert" in case:
            assert metrics["experts/largest_share"] == 8 and metrics["experts/unused"] == 14


EVEN = ExpertsConfig(balance_coefficient=0.05, z_coefficient=0.01)
EDGES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[tuple[int, ...], int]]]] = {
    "nine experts": (
        dict(kind="qwen3_moe", num_experts=9),
        {},
        [((3, 1, 1, 3), 1), ((1, 3, 1, 3), 3), ((3, 1, 1, 3), 0)],
    ),
    "six experts, top 1": (
        dict(kind="mixtral", num_local_experts=6, num_experts_per_tok=1),
        {},
        [((3, 1, 1, 3), 3), ((1, 3, 1, 3), 2), ((1, 1, 2, 1), 0)],
    ),
    "ranks without tokens": (
        dict(kind="gpt_oss", num_experts_per_tok=1, favourite=3),
        {"training": {"experts": EVEN}},
        [((2, 1, 1, 2), 3), ((2, 1, 1, 2), 0), ((2, 2, 1, 4), 1)],
    ),
    "top 8": (
        dict(kind="olmoe", num_experts=16, num_experts_per_tok=8),
        {"num_mini_batches": 2},
        [((2, 1, 1, 2), 2)],
    ),
    "even": (
        dict(kind="qwen3_moe"),
        {"training": {"experts": EVEN}, "num_mini_batches": 2},
        [((2, 1, 1, 2), 2), ((1, 2, 1, 1), 3), ((1, 2, 2, 2), 1), ((3, 1, 1, 1), 0)],
    ),
    "even, recomputed": (
        dict(kind="mixtral"),
        {"training": {"experts": EVEN, "gradient_checkpointing": True}},
        [((2, 1, 1, 2), 3), ((1, 1, 2, 1), 0), ((1, 2, 1, 2), 1)],
    ),
    "even, shared prefixes": (
        dict(kind="glm4_moe"),
        {"training": {"experts": EVEN, "share_prefix": "on"}, "prompts": (5, 20)},
        [((2, 1, 1, 2), 1), ((1, 2, 1, 2), 3)],
    ),
    "even, trees": (
        dict(kind="qwen3_moe"),
        {"training": {"experts": EVEN}, "trees": "once"},
        [((2, 1, 1, 2), 3), ((1, 2, 1, 2), 0)],
    ),
    "bias": (
        dict(kind="glm4_moe"),
        {"training": {"experts": ExpertsConfig(bias_rate=0.02)}, "num_mini_batches": 2},
        [((2, 1, 1, 2), 3), ((1, 1, 2, 1), 0), ((2, 1, 2, 2), 2)],
    ),
    "short rows": (
        dict(kind="olmoe"),
        {"tokens": 2, "prompts": (1, 1)},
        [((1, 2, 1, 2), 0), ((1, 4, 1, 4), 3), ((2, 2, 1, 4), 1)],
    ),
    "adapters": (
        dict(kind="qwen3_moe"),
        {"training": {"lora": LoraConfig(rank=4)}},
        [((2, 1, 1, 2), stage) for stage in range(4)] + [((1, 2, 2, 2), 1)],
    ),
    "optimizer on the host": (
        dict(kind="qwen3_moe"),
        {"training": {"offload_optimizer": True}},
        [((2, 1, 1, 2), stage) for stage in (1, 2, 3)],
    ),
}
"""{name: (model as `write_mixture` takes it, settings of the case, its layouts and ZeRO stages)}"""


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders = {}
    for name, (model, _, _) in EDGES.items():
        sizes = {key: value for key, value in model.items() if key != "favourite"}
        folders[name] = write_mixture(tmp_path_factory.mktemp("edge"), **sizes)
        if "favourite" in model:
            made = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
            prefer(made, model["favourite"])
            made.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def oracles(edges: dict[str, str]) -> dict[str, Any]:
    """Each case on one rank; trees there as sequences."""
    cases = []
    for name, (_, settings, _) in EDGES.items():
        training = {**settings.get("training", {}), "offload_optimizer": False}
        training |= {"share_prefix": "off"} if "share_prefix" in training else {}
        case = {**settings, "training": training, "layout": (1, 1, 1), "stage": 0}
        case |= {"trees": "repeated"} if "trees" in settings else {}
        cases.append({**case, "model": edges[name]})
    found = run_ranks(1, training_cases.__file__, "run_cases", cases, timeout_s=600)[0]
    return dict(zip(EDGES, found, strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_layouts_agree_at_the_edges(
    edges: dict[str, str], oracles: dict[str, Any], size: int
) -> None:
    expected, cases = [], []
    for name, (_, settings, layouts) in EDGES.items():
        for layout, stage in layouts:
            if layout[0] * layout[1] * layout[2] == size:
                cases.append({**settings, "layout": layout, "stage": stage, "model": edges[name]})
                expected.append(oracles[name])
    found = run_ranks(size, training_cases.__file__, "run_cases", cases, timeout_s=900)
    assert_equal(expected, cases, found)

"""Mixtures of experts at their edges: against transformers itself on one rank in float64, and
alike in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from support import training_cases
from support.mixtures import prefer, write_mixture
from support.policy import joined, make_checkpoints, make_role, on_mesh, whole_weights
from support.ranks import run_ranks
from support.training_cases import assert_equal
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.settings.training import ExpertsConfig, LoraConfig, ModelConfig, TrainingConfig
from megarl.trainer.attention import ATTENTION
from megarl.trainer.expert_balance import ExpertLoad
from megarl.trainer.experts import EXPERTS, refuse_balance
from megarl.trainer.finite import StepGuard
from megarl.trainer.loading import empty_model, load_model_config, without_dropout
from megarl.trainer.lora import chosen_layers
from megarl.trainer.model import RoleModel
from megarl.trainer.packing import pack, padding
from megarl.trainer.step import StepMetrics, optimizer_step
from megarl.types import MicroBatch, Samples
from megarl.weights.published import kept_buffers

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


def test_mixtures_that_training_does_not_know_are_refused(tmp_path: Path) -> None:
    noisy = write_mixture(tmp_path / "noise", "mixtral", router_jitter_noise=0.1)
    assert empty_model(ModelConfig(path=noisy)).config.router_jitter_noise == 0.0
    limited = write_mixture(tmp_path / "limited", "mixtral", expert_capacity=4)
    with pytest.raises(ValueError, match=r"expert_capacity in config.json .* remove it"):
        empty_model(ModelConfig(path=limited))
    qwen = empty_model(ModelConfig(path=write_mixture(tmp_path / "qwen")))
    refuse_balance(qwen, TrainingConfig(experts=ExpertsConfig(z_coefficient=0.1)))
    with pytest.raises(ValueError, match=r"bias_rate is 0.1, but the routers of .* set it to 0"):
        refuse_balance(qwen, TrainingConfig(experts=ExpertsConfig(bias_rate=0.1)))
    lora = {
        "lora": LoraConfig(rank=4, targets=("q_proj",)),
        "experts": ExpertsConfig(bias_rate=0.1),
    }
    glm = empty_model(ModelConfig(path=write_mixture(tmp_path / "glm", "glm4_moe")))
    with pytest.raises(ValueError, match=r"bias_rate is 0.1, but with training.lora"):
        refuse_balance(glm, TrainingConfig(**lora))
    for target in ("gate", "gate_up_proj", "down_proj"):
        with pytest.raises(ValueError, match=rf"names {target}, .* get no adapters"):
            chosen_layers(qwen, LoraConfig(rank=4, targets=("q_proj", target)))


EVEN = ExpertsConfig(balance_coefficient=0.05, z_coefficient=0.01)
EDGES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[tuple[int, ...], int]]]] = {
    "nine experts": (dict(kind="qwen3_moe", num_experts=9), {},
     [((3, 1, 1, 3), 1), ((1, 3, 1, 3), 3), ((3, 1, 1, 3), 0)]),
    "six experts, top 1": (dict(kind="mixtral", num_local_experts=6, num_experts_per_tok=1), {},
     [((3, 1, 1, 3), 3), ((1, 3, 1, 3), 2), ((1, 1, 2, 1), 0)]),
    "ranks without tokens": (dict(kind="gpt_oss", num_experts_per_tok=1, favourite=3),
     {"training": {"experts": EVEN}}, [((2, 1, 1, 2), 3), ((2, 1, 1, 2), 0), ((2, 2, 1, 4), 1)]),
    "top 8": (dict(kind="olmoe", num_experts=16, num_experts_per_tok=8), {"num_mini_batches": 2},
     [((2, 1, 1, 2), 2)]),
    "even": (dict(kind="qwen3_moe"), {"training": {"experts": EVEN}, "num_mini_batches": 2},
     [((2, 1, 1, 2), 2), ((1, 2, 1, 1), 3), ((1, 2, 2, 2), 1), ((3, 1, 1, 1), 0)]),
    "even, recomputed": (dict(kind="mixtral"),
     {"training": {"experts": EVEN, "gradient_checkpointing": True}},
     [((2, 1, 1, 2), 3), ((1, 1, 2, 1), 0), ((1, 2, 1, 2), 1)]),
    "even, shared prefixes": (dict(kind="glm4_moe"),
     {"training": {"experts": EVEN, "share_prefix": "on"}, "prompts": (5, 20)},
     [((2, 1, 1, 2), 1), ((1, 2, 1, 2), 3)]),
    "even, trees": (dict(kind="qwen3_moe"), {"training": {"experts": EVEN}, "trees": "once"},
     [((2, 1, 1, 2), 3), ((1, 2, 1, 2), 0)]),
    "bias": (dict(kind="glm4_moe"),
     {"training": {"experts": ExpertsConfig(bias_rate=0.02)}, "num_mini_batches": 2},
     [((2, 1, 1, 2), 3), ((1, 1, 2, 1), 0), ((2, 1, 2, 2), 2)]),
    "short rows": (dict(kind="olmoe"), {"tokens": 2, "prompts": (1, 1)},
     [((1, 2, 1, 2), 0), ((1, 4, 1, 4), 3), ((2, 2, 1, 4), 1)]),
    "adapters": (dict(kind="qwen3_moe"), {"training": {"lora": LoraConfig(rank=4)}},
     [((2, 1, 1, 2), stage) for stage in range(4)] + [((1, 2, 2, 2), 1)]),
    "optimizer on the host": (dict(kind="qwen3_moe"), {"training": {"offload_optimizer": True}},
     [((2, 1, 1, 2), stage) for stage in (1, 2, 3)]),
}  # fmt: skip
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


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
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


STATE = str(Path(__file__).with_name("test_zero_state.py"))
ONE = ((1, 1, 1), 0)
MOVES = [
    (ONE, ((2, 1, 1, 2), 1)),
    (((2, 1, 1, 2), 3), ONE),
    (((2, 1, 1, 2), 0), ((2, 1, 1, 1), 2)),
    (((2, 1, 1, 2), 2), ((4, 1, 1, 4), 3)),
    (((4, 1, 1, 4), 1), ((2, 1, 1, 2), 3)),
    (((1, 2, 2, 2), 3), ((2, 1, 1, 1), 0)),
    (((2, 2, 1, 2), 2), ((2, 1, 1, 2), 0)),
]
"""Layout and ZeRO stage of a checkpoint, and of the run that resumes it."""


def in_turn(cases: list[dict[str, Any]]) -> list[Any]:
    """What rank 0 finds in each case of `test_zero_state.train`."""
    sizes = [int(np.prod(case["where"][0][:3])) for case in cases]
    found: dict[int, Any] = {}
    for size in sorted(set(sizes)):
        mine = [number for number, other in enumerate(sizes) if other == size]
        answers = run_ranks(size, STATE, "train", [cases[number] for number in mine])[0]
        found |= dict(zip(mine, answers, strict=True))
    return [found[number] for number in range(len(cases))]


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_experts_and_biases_resume_under_another_layout(tmp_path: Path) -> None:
    model = write_mixture(tmp_path / "model", "glm4_moe", n_routed_experts=8)

    def case(where: Any, save: str, load: str = "") -> dict[str, Any]:
        training = {"experts": ExpertsConfig(bias_rate=0.05, balance_coefficient=0.01)}
        where = (*where, "float32", False)
        return {"model": model, "where": where, "load": load, "save": save, "training": training}

    sources = list(dict.fromkeys([ONE, *(source for source, _ in MOVES)]))
    folders = {where: tmp_path / f"source{number}" for number, where in enumerate(sources)}
    straight = in_turn([case(where, str(folders[where])) for where in sources])
    cases = [
        case(target, str(tmp_path / f"again{number}"), str(folders[source] / "step_000002"))
        for number, (source, target) in enumerate(MOVES)
    ]
    found = in_turn(cases)
    first = load_file(folders[ONE] / "step_000002" / "model" / "model.safetensors")
    biases = [name for name in first if name.endswith("e_score_correction_bias")]
    assert biases and all(first[name].abs().max() > 0.05 for name in biases)
    for folder in [*folders.values(), *(Path(one["save"]) for one in cases)]:
        saved = load_file(folder / "step_000002" / "model" / "model.safetensors")
        assert saved.keys() == first.keys()
        for name in saved:
            assert (saved[name] - first[name]).norm() <= 1e-5 * first[name].norm(), (folder, name)
    for reports, weights, steps in [*straight[1:], *found]:
        assert steps == straight[0][2]
        for mine, theirs in zip(reports, straight[0][0][-len(reports) :], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        for name, other in straight[0][1].items():
            assert (weights[name] - other).norm() < 1e-5 * other.norm(), name


def trained_heads(folder: str, cases: list[tuple[Any, int, Any]]) -> list[Any]:
    """Per (layout, ZeRO stage, head): gradient norms and weights of three steps."""
    found = []
    with joined() as device:
        for layout, stage, head in cases:
            with ProcessMesh(Layout(*layout), timeout_s=60) as mesh:
                role = make_role(folder, mesh, device, steps=3, head=head, zero_stage=stage)
                samples = [Samples.one(n, ids) for n, ids in enumerate(documents())]
                mine = samples[mesh.data.rank :: mesh.data.size]
                micro_batches = role.pack(Samples.concatenate(mine), [[*range(len(mine))]])

                def loss(micro: MicroBatch, role: Any = role) -> torch.Tensor:
                    out = role.engine(micro, 1.0)
                    if role.head == "scalar":
                        return (out[0] - 0.1 * out[1]).square().sum()
                    return (out - 0.05 * micro.position_ids[micro.mask]).square().sum() / 50

                guard, norms = StepGuard(role, allowed=0), []
                for _ in range(3):
                    taken = optimizer_step(
                        role, micro_batches, loss, guard, StepMetrics(device, ())
                    )
                    assert taken is not None
                    norms.append(taken[0])
                load = role.engine.module.routers.load
                found.append((norms, whole_weights(role.engine), load.take_metrics()))
                role.destroy()
    return found


def test_critics_and_reward_models_of_mixtures(tmp_path: Path) -> None:
    folder, heads = write_mixture(tmp_path, "olmoe"), ("value", "scalar")
    oracle = run_ranks(1, __file__, "trained_heads", folder, [(*ONE, head) for head in heads])[0]
    cases = [
        (layout, stage, head)
        for head in heads
        for layout, stage in [((2, 1, 1, 2), 3), ((1, 2, 1, 2), 1), ((2, 1, 1, 2), 0)]
    ]
    for results in run_ranks(2, __file__, "trained_heads", folder, cases):
        for (layout, _, head), (norms, weights, metrics) in zip(cases, results, strict=True):
            expected = oracle[heads.index(head)]
            assert norms == pytest.approx(expected[0], rel=1e-5), (layout, head)
            assert metrics == pytest.approx(expected[2], rel=1e-5)
            for name, other in expected[1].items():
                assert (weights[name] - other).norm() <= 1e-5 * other.norm(), (layout, name)


@contextmanager
def counted(rank: int, size: int) -> Iterator[tuple[list[int], list[int], set[torch.dtype]]]:
    """Lists of bytes of rows that leave this rank in each all-to-all; of (token, expert) pairs
    with an expert elsewhere in each layer; and dtypes of routers' logits.
    """
    bytes_sent, pairs, dtypes = list[int](), list[int](), set[torch.dtype]()
    exchange, add = dist.all_to_all_single, ExpertLoad.add

    def exchanged(out: Any, rows: Any, received: Any = None, sent: Any = None, **more: Any) -> Any:
        if sent is not None:
            own = sent[rank] * rows[0].numel() if len(rows) else 0
            bytes_sent.append((rows.numel() - own) * rows.element_size())
        return exchange(out, rows, received, sent, **more)

    def added(load: Any, layer: int, logits: torch.Tensor, index: torch.Tensor) -> None:
        here = index // (logits.shape[1] // size) == rank
        pairs.append(int((~here).sum()))
        dtypes.add(logits.dtype)
        add(load, layer, logits, index)

    with (
        patch("torch.distributed.all_to_all_single", exchanged),
        patch.object(ExpertLoad, "add", added),
    ):
        yield bytes_sent, pairs, dtypes


def traffic(folder: str, precision: Any) -> tuple[list[int], list[int], list[Any]]:
    with on_mesh(2, 1, 1, 2) as (mesh, device):
        stage = 1 if precision == "float32" else 3
        role = make_role(folder, mesh, device, steps=1, zero_stage=stage, precision=precision)
        kept = kept_buffers(role.engine.module.model)
        for buffer in kept.values():
            buffer.copy_(torch.linspace(-0.01, 0.013, len(buffer)))
        samples = [Samples.one(n, ids) for n, ids in enumerate(documents(mesh.rank))]
        micro_batches = role.pack(Samples.concatenate(samples), [[*range(len(samples))]])
        with counted(mesh.rank, 2) as (bytes_sent, pairs, dtypes):
            taken = optimizer_step(
                *(role, micro_batches, lambda micro: role.engine(micro, 1.0)[0].sum()),
                *(StepGuard(role, allowed=0), StepMetrics(device, ())),
            )
        assert taken is not None
        checkpoints = make_checkpoints(Path(folder) / "saved", role.engine, folder, mesh)
        path = checkpoints.save(step=1, next_ordinal=0)
        checkpoints.finish()
        saved = load_file(path / "model" / "model.safetensors")
        assert all(torch.equal(saved[name], buffer) for name, buffer in kept.items())
        buffers = {value.dtype for value in kept.values()}
        role.destroy()
    return bytes_sent, pairs, [*dtypes, *buffers]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_each_pair_travels_once_each_way(tmp_path: Path, precision: str) -> None:
    """And routers compute in float32 in 16 bit, in which their biases are saved too."""
    folder = write_mixture(tmp_path, "glm4_moe")
    size = 4 if precision == "float32" else 2
    results = run_ranks(2, __file__, "traffic", folder, precision)
    arrive = [results[1][1], results[0][1]]
    for (sent, leave, dtypes), come in zip(results, arrive, strict=True):
        assert dtypes == [torch.float32, torch.float32]
        row = 64 * size
        ways = [way for a, b in zip(leave, come, strict=True) for way in (a * row, b * row)]
        # Out and back in the forward pass; gradients the other way round in the backward pass.
        assert sent[: len(ways)] == ways and sum(sent) == 2 * sum(ways)

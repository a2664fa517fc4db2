"""A pretrained model learns as plain torch says: one optimizer step of every objective, whole or by
adapters, in float32; and what is saved of it is what was trained.

The plain side is transformers' model, losses written out here, and `torch.optim.AdamW`.
"""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.policy import make_role, on_mesh
from support.ranks import run_ranks
from support.real import LORA, SCALE, TURNS, merge, real_folder
from support.rollouts import dealt
from support.tiny import random_adapter
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.apps.tune.pairs import pair_batch
from megarl.apps.tune.preference import PreferenceStep
from megarl.apps.tune.sft import sft_step, to_sample
from megarl.checkpoints.export import WeightExport, write_configs_and_tokenizer
from megarl.checkpoints.rank_files import RankFiles
from megarl.data.tokenizer import load_tokenizer
from megarl.parallel import mesh as mesh_module
from megarl.parallel.reshard.owned import training_owned
from megarl.settings.objectives import AlgorithmConfig, GaeConfig, KLConfig, PreferenceLossConfig
from megarl.settings.training import LoraConfig, OptimizerConfig, TrainingConfig
from megarl.trainer.critic import Critic
from megarl.trainer.finite import StepGuard
from megarl.trainer.lora import is_adapter
from megarl.trainer.policy import PolicyGradient
from megarl.trainer.step import optimizer_step
from megarl.trainer.step_advantages import step_advantages
from megarl.trainer.transfer import BatchTransfer
from megarl.types import (
    Demonstration,
    Group,
    Preference,
    Prompt,
    Rollout,
    Samples,
    Segment,
    TokenArrays,
    Verdict,
)

OPTIMIZER: dict[str, Any] = dict(learning_rate=1e-4, eps=1e-5, weight_decay=0.1, clip_norm=0.5)
"""With torch's usual eps of 1e-8 the first step is the sign of each gradient, so that one that is
only rounding moves its weight as far as any other. Here eps is about as large as a clipped gradient
of 135 million weights: a change follows its gradient smoothly, and clipping shows."""
pytestmark = [pytest.mark.nightly, pytest.mark.real, pytest.mark.slow]
BOUND = 1e-4
"""Largest difference of a log-prob, in float32."""
CASES = ("sft", "dpo", "grpo", "ppo", "critic", "lora")
REPLIES = ("The capital of France is Paris.", "It is Lyon, I think.")
REWARDS, REFERENCE, BETA, KL = (1.0, 0.25), (-9.0, -17.0), 0.1, 0.05
LOW, HIGH, VALUE_CLIP, GAMMA, LAM, VALUE_LAM = 0.2, 0.28, 0.2, 0.99, 0.9, 0.8


class Plain:
    """A published model in transformers, and a step of torch from its weights."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.published = load_file(folder / "model.safetensors")

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    @torch.no_grad()
    def reset(self) -> None:
        for name, weight in self.weights().items():
            weight.copy_(self.published[name])

    def logprobs(self, samples: list[tuple[list[int], list[int]]]) -> list[Tensor]:
        """[R] of the tokens of each reply."""
        found = []
        for prompt, reply in samples:
            logits = self.model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(reply)[:, None])[:, 0])
        return found

    def values(self, samples: list[tuple[list[int], list[int]]], score: Tensor) -> list[Tensor]:
        """[R] values of the states before the tokens of each reply."""
        found = []
        for prompt, reply in samples:
            states = self.model.model(torch.tensor([prompt + reply])).last_hidden_state[0]
            found.append((states[len(prompt) - 1 : -1] @ score.T)[:, 0])
        return found


def adamw(weights: dict[str, Tensor]) -> float:
    """A step from the gradients that `weights` have; returns their norm before clipping."""
    settings = dict(OPTIMIZER)
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), settings.pop("clip_norm"))
    rate = settings.pop("learning_rate")
    torch.optim.AdamW(weights.values(), lr=rate, foreach=False, **settings).step()
    for weight in weights.values():
        weight.grad = None
    return float(norm)


def estimate(values: list[Tensor], lam: float) -> list[Tensor]:
    """GAE, with the whole reward at the last token."""
    found = []
    for one, reward in zip(values, REWARDS, strict=True):
        advantage, following, made = 0.0, 0.0, []
        for number in reversed(range(len(one))):
            own = reward if number == len(one) - 1 else 0.0
            delta = own + GAMMA * following - float(one[number])
            advantage, following = delta + GAMMA * lam * advantage, float(one[number])
            made.insert(0, advantage)
        found.append(torch.tensor(made))
    return found


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    bounded = ratio.clamp(1 - LOW, 1 + HIGH)
    assert (ratio != bounded).any() and (ratio == bounded).any()
    return -torch.minimum(ratio * advantages, bounded * advantages)


def by_formula(name: str, logprobs: list[Tensor], given: Any) -> tuple[Tensor, Tensor]:
    """(the loss as it is reported, the loss that is differentiated)."""
    every = torch.cat(logprobs)
    if name in ("sft", "lora"):
        return (loss := -every.mean()), loss
    if name == "dpo":
        good, bad = (own.sum() - of for own, of in zip(logprobs, REFERENCE, strict=True))
        return (loss := -torch.nn.functional.logsigmoid(BETA * (good - bad))), loss
    if name == "grpo":  # two rewards are one standard deviation from their mean
        advantages = torch.cat([torch.full_like(logprobs[0], 1), torch.full_like(logprobs[1], -1)])
        loss = clipped(every, torch.cat(given.old), advantages).mean()
        gap = torch.cat(given.reference) - every
        return loss, loss + KL * (gap.exp() - 1 - gap).mean()
    raw = torch.cat(estimate(given.values, LAM))
    advantages = (raw - raw.mean()) / raw.std(correction=0)
    return (loss := clipped(every, torch.cat(given.old), advantages).mean()), loss


def value_loss(values: list[Tensor], given: Any) -> Tensor:
    """PPO's, with values of before that are further away than its clip."""
    old, now = torch.cat(given.old_values), torch.cat(values)
    returns = torch.cat(estimate(given.values, VALUE_LAM)) + torch.cat(given.values)
    near = old + (now - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    assert (near != now).any() and torch.isclose(near, now).any()
    return 0.5 * torch.maximum((now - returns).square(), (near - returns).square()).mean()


def given_by(plain: Plain, samples: Any) -> Any:
    """What a step is given besides its samples: old and reference log-probs near the policy's,
    values, a score head, and the values that it had before.
    """
    draw = torch.Generator().manual_seed(2)

    def near(parts: list[Tensor], width: float) -> list[Tensor]:
        return [one + width * (torch.rand(len(one), generator=draw) - 0.5) for one in parts]

    score = 0.05 * torch.randn(1, plain.model.config.hidden_size, generator=draw)
    with torch.no_grad():
        policy, critic = plain.logprobs(samples), plain.values(samples, score)
    return SimpleNamespace(
        old=near(policy, 1.0),
        reference=near(policy, 1.0),
        values=near([torch.zeros_like(one) for one in policy], 1.0),
        score=score,
        old_values=near(critic, 2 * VALUE_CLIP + 0.4),
        policy=policy,
    )


# --------------------------------------------------------------------------- megarl's side


def groups(samples: Any, given: Any) -> Any:
    """Both replies as one group of rollouts, which the engine sampled with `given.old`."""
    rollouts = []
    for number, ((_, reply), old) in enumerate(zip(samples, given.old, strict=True)):
        arrays = TokenArrays(torch.tensor(reply, dtype=torch.int32).numpy(), old.numpy())
        segment = Segment("model", len(reply), arrays, [(0, len(reply))], "stop")
        verdict = Verdict(reward=REWARDS[number], correct=False)
        rollouts.append(Rollout(number, number, [segment], verdict, 0))
    return [Group(0, Prompt(0, "", samples[0][0], ""), rollouts)]


def learn(name: str, role: Any, samples: Any, given: Any, mesh: Any) -> tuple[float, float]:
    """Take one step; returns (loss, gradient norm)."""
    guard = StepGuard(role, allowed=0)
    if name in ("sft", "lora"):
        found = sft_step(role, sample_rows(samples), 0, guard).metrics
        return found["loss"], found["grad_norm"]
    if name == "dpo":
        pair = Preference(0, samples[0][0], (samples[0][1], samples[1][1]))
        reference = torch.tensor([REFERENCE], dtype=torch.float64).numpy()
        work = PreferenceStep(role, pair_batch([pair], reference), PreferenceLossConfig(beta=BETA))
        taken = optimizer_step(
            role, work.micro_batches, lambda one: work.loss(one, guard), guard, work.metrics
        )
        assert taken is not None
        return work.reduced()["loss"], taken[0]
    batch = dealt(groups(samples, given), micro_batch_tokens=200).share(0)

    def column(parts: list[Tensor]) -> list[Tensor]:
        """[mini-batch][T] with numbers for the tokens of replies."""
        found = torch.zeros(len(batch.samples[0].token_ids))
        found[torch.from_numpy(batch.samples[0].mask)] = torch.cat(parts)
        return [found]

    packed = role.pack_step(batch)
    estimator = GaeConfig(gamma=GAMMA, lam=LAM, value_lam=VALUE_LAM)
    gae: dict[str, Any] = {"advantage": "gae", "gae": estimator}
    chosen: dict[str, Any] = {"kl": KLConfig(coefficient=KL)} if name == "grpo" else gae
    algorithm = AlgorithmConfig(old_logprobs="engine", clip_low=LOW, clip_high=HIGH, **chosen)
    columns = {"reference_logprobs": column(given.reference), "values": column(given.values)}
    if name == "critic":
        where: dict[str, Any] = dict(data=mesh.data, device=role.device)
        made = step_advantages(batch, columns, algorithm, kl_coefficient=0.0, **where)
        before = column(given.old_values)[0]
        return learn_values(role, mesh, batch, packed, made["returns"], before)
    learner = PolicyGradient(role, algorithm, temperature=1.0)
    del columns["values" if name == "grpo" else "reference_logprobs"]
    found = learner.train(batch, packed, learner.prepare(batch, packed, columns)).metrics
    return found["loss"], found["grad_norm"]


def learn_values(
    role: Any, mesh: Any, batch: Any, packed: Any, returns: list[Tensor], before: Tensor
) -> tuple[float, float]:
    """One step of a critic. `before`: the values at the start of the step, of which this is not
    the first update.
    """
    transfer = BatchTransfer(
        role,
        policy=mesh,
        mesh=mesh,
        everyone=mesh_module.all_ranks(timeout_s=60),
        device=role.device,
        micro_batch_tokens=200,
    )
    critic = Critic(transfer, value_clip=VALUE_CLIP)
    critic.values(batch, packed)
    critic.scorer.column[0].copy_(before)
    critic.start(returns)
    critic.learn(0)
    found = critic.finish(0)
    return found["critic/loss"], found["critic/grad_norm"]


# ------------------------------------------------------------------------------ both sides


def texts(folder: str) -> list[tuple[list[int], list[int]]]:
    """(prompt, reply) of two replies to one question, in the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = {"system": "Be brief.", "user": TURNS[0][0]}
    chat = [{"role": role, "content": text} for role, text in said.items()]
    made = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    ends = [tokenizer(f"{reply}<|im_end|>").input_ids for reply in REPLIES]
    return [(made["input_ids"], reply) for reply in ends]


def on_rank(folder: str, place: str) -> dict[str, Any]:
    """{case: both sides' losses and gradient norms, and how far their weights are apart}."""
    with on_mesh(1) as (mesh, _):
        plain, samples = Plain(Path(folder)), texts(folder)
        given = given_by(plain, samples)
        return {
            name: compare(name, folder, Path(place), plain, samples, given, mesh) for name in CASES
        }


def compare(
    name: str, folder: str, place: Path, plain: Plain, samples: Any, given: Any, mesh: Any
) -> dict[str, Any]:
    lora = LoraConfig()
    if name == "lora":
        lora = random_adapter(place / "adapter", folder, LORA, size=0.03)
    # Plain torch first: its gradients and optimizer state are gone when megarl's are made.
    start, wanted, theirs, theirs_before = plain_step(name, plain, samples, given, lora)
    kind: dict[str, Any] = {"name": "critic", "head": "value"} if name == "critic" else {}
    training = TrainingConfig(lora=lora, optimizer=OptimizerConfig(**OPTIMIZER))
    role = make_role(folder, mesh, torch.device("cpu"), steps=1, seed=0, training=training, **kind)
    found: dict[str, Any] = {}
    rows = sample_rows(samples)
    if name == "critic":
        role.engine.module.model.get_parameter("score.weight").data.copy_(given.score)
    else:
        found["logprobs"] = gap(role.logprobs(rows), theirs_before)
    if name == "lora":
        with role.adapters_off():
            found["base"] = gap(role.logprobs(rows), torch.cat(given.policy))
        found["effect"] = gap(theirs_before, torch.cat(given.policy))
    ours = learn(name, role, samples, given, mesh)
    away = change = largest = 0.0
    for key, weight in role.engine.weights():
        if key in wanted:
            error = weight - wanted[key].detach()
            away += float(error.norm(dtype=torch.float64)) ** 2
            change += float((wanted[key].detach() - start[key]).norm(dtype=torch.float64)) ** 2
            largest = max(largest, float(error.abs().max()))
    found |= {"loss": (ours[0], theirs[0]), "norm": (ours[1], theirs[1])}
    found["change"] = (away / change) ** 0.5
    found["largest"] = largest / OPTIMIZER["learning_rate"]
    if name in ("sft", "lora"):
        found["saved"] = saved(role, mesh, place / name, samples)
    else:
        role.destroy()
    plain.reset()
    del role
    gc.collect()  # DeepSpeed's engine is part of a cycle: 2 GB
    return found


def plain_step(
    name: str, plain: Plain, samples: Any, given: Any, lora: LoraConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[float, float], Tensor]:
    """({name: weight before}, {name: weight after}, (loss, gradient norm), log-probs before)."""
    weights, start = plain.weights(), plain.published
    adapter: dict[str, Tensor] = {}
    if name == "critic":
        score = given.score.clone().requires_grad_()
        weights, start = weights | {"score.weight": score}, start | {"score.weight": given.score}
        reported = loss = value_loss(plain.values(samples, score), given)
        logprobs: list[Tensor] = []
    else:
        if name == "lora":
            stored = load_file(Path(lora.adapter) / "adapter_model.safetensors")
            start = {key.removeprefix("base_model.model."): one for key, one in stored.items()}
            adapter = {key: one.clone().requires_grad_() for key, one in start.items()}
            merge(weights, start)
        logprobs = plain.logprobs(samples)
        reported, loss = by_formula(name, logprobs, given)
    loss.backward()
    if adapter:
        pull_back(weights, adapter)
        weights = adapter
    norm = adamw(weights)
    before = torch.cat([one.detach() for one in logprobs] or [torch.zeros(0)])
    return start, weights, (float(reported.detach()), norm), before


def pull_back(weights: dict[str, Tensor], adapter: dict[str, Tensor]) -> None:
    """The gradients of A and B from those of W + (alpha / rank) B A, by the chain rule."""
    for key, a in adapter.items():
        if ".lora_A." in key:
            b = adapter[key.replace("lora_A", "lora_B")]
            slope = weights[key.replace("lora_A.", "")].grad
            assert slope is not None
            a.grad, b.grad = SCALE * b.detach().T @ slope, SCALE * slope @ a.detach().T
    for weight in weights.values():
        weight.grad = None


def sample_rows(samples: Any) -> Any:
    rows = [to_sample(n, Demonstration(n, *sample)) for n, sample in enumerate(samples)]
    return Samples.concatenate(rows)


def saved(role: Any, mesh: Any, folder: Path, samples: Any) -> dict[str, Any]:
    """Write a role as a checkpoint does, end it, and read it again."""
    rows, model = sample_rows(samples), role.engine.module.model
    now = role.logprobs(rows)
    owned = training_owned(role.shapes, role.shards, mesh.layout, role.zero_stage)
    files, target = RankFiles(folder), folder / "model"
    target.mkdir(parents=True)
    export = WeightExport(owned, role.shapes, next(model.parameters()).dtype)
    export.write(target, role.owned(), mesh.world, files)
    files.finish()
    write_configs_and_tokenizer(target, model, load_tokenizer(model.name_or_path))
    stored = load_file(target / "model.safetensors")
    trained = {n: tensor.clone() for n, tensor in role.engine.weights() if not is_adapter(n)}
    merge(trained, role.engine.whole_adapters())
    found: dict[str, Any] = {
        "dtypes": {str(tensor.dtype) for tensor in stored.values()},
        "names": stored.keys() == trained.keys(),
        "weights": max(float((stored[n] - tensor).abs().max()) for n, tensor in trained.items()),
    }
    role.destroy()
    del role, model, trained, stored
    gc.collect()
    again = make_role(target, mesh, torch.device("cpu"), name="reference", seed=0)
    found["megarl"] = gap(again.logprobs(rows), now)
    again.destroy()
    del again
    with torch.no_grad():
        found["transformers"] = gap(torch.cat(Plain(target).logprobs(samples)), now)
    return found


def gap(one: Tensor, other: Tensor) -> float:
    """Largest difference."""
    assert one.shape == other.shape
    return float((one - other).abs().max())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("place")
    folder = str(real_folder("smollm2"))
    return run_ranks(1, __file__, "on_rank", folder, str(place), timeout_s=400)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_plain_torch(found: dict[str, Any], name: str) -> None:
    """Sums in another order leave 3e-5 between log-probs after 30 layers, and as much of gradients.
    A weight whose gradient is about `eps` or less shows an error of it by up to 1 / eps.
    """
    one = found[name]
    assert one.get("logprobs", 0.0) < BOUND
    assert one["loss"][0] == pytest.approx(one["loss"][1], rel=0, abs=BOUND)
    assert one["norm"][0] == pytest.approx(one["norm"][1], rel=BOUND, abs=0)
    assert one["norm"][1] > 2 * OPTIMIZER["clip_norm"], "nothing is clipped"
    assert one["change"] < 3e-4 and one["largest"] < 0.1


def test_an_adapter_is_plain_torchs(found: dict[str, Any]) -> None:
    """Its log-probs are compared by `test_a_step_is_that_of_plain_torch`; here those without it."""
    assert found["lora"]["base"] < BOUND and found["lora"]["effect"] > 0.3


@pytest.mark.parametrize("name", ["sft", "lora"])
def test_what_is_saved_is_what_was_trained(found: dict[str, Any], name: str) -> None:
    """To the last bit, with adapters merged; the same for megarl, and for transformers."""
    one = found[name]["saved"]
    assert one["dtypes"] == {"torch.float32"} and one["names"]
    assert one["weights"] == 0
    assert one["megarl"] < BOUND and one["transformers"] < BOUND
    assert one["megarl"] == 0 or name == "lora"  # W x + B A x against (W + B A) x

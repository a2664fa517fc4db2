"""Optimizers: every kind computes AdamW's update, and what cannot work is refused with the fix."""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path

import pytest
import torch

from megarl.checkpoints.progress import written_under
from megarl.parallel.layout import Layout
from megarl.settings.training import OptimizerConfig, TrainingConfig
from megarl.trainer.optimizers import OPTIMIZERS, refuse_optimizer

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def training(kind: str, **changes: object) -> TrainingConfig:
    return TrainingConfig(optimizer=OptimizerConfig(kind=kind), zero_stage=1, **changes)  # type: ignore[arg-type]


def formula(weight: torch.Tensor, gradients: list[torch.Tensor], config: OptimizerConfig) -> None:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2) in float64, in place."""
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        first = config.beta1 * first + (1 - config.beta1) * gradient
        second = config.beta2 * second + (1 - config.beta2) * gradient**2
        mean, variance = first / (1 - config.beta1**step), second / (1 - config.beta2**step)
        weight -= config.learning_rate * (
            mean / (variance.sqrt() + config.eps) + config.weight_decay * weight
        )


@pytest.mark.parametrize(
    "kind",
    ["torch", pytest.param("deepspeed_cpu", marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_steps_are_those_of_the_formula(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # DeepSpeed looks for ninja on the path, where a launcher puts this environment's programs.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    torch.manual_seed(0)
    config = OptimizerConfig(kind=kind, learning_rate=1e-2, beta2=0.99, weight_decay=0.1)  # type: ignore[arg-type]
    start = torch.randn(37, dtype=torch.float64)
    gradients = [torch.randn(37, dtype=torch.float64) for _ in range(6)]
    wanted = start.clone()
    formula(wanted, gradients, config)
    parameter = torch.nn.Parameter(start.float())
    optimizer = OPTIMIZERS[kind]([parameter], config)
    for gradient in gradients:
        parameter.grad = gradient.float()
        optimizer.step()
    torch.testing.assert_close(parameter.detach().double(), wanted, rtol=1e-6, atol=1e-6)


def test_the_choice_names_every_optimizer() -> None:
    kinds = typing.get_type_hints(OptimizerConfig)["kind"]
    assert typing.get_args(kinds) == tuple(OPTIMIZERS)


def test_apex_gets_the_settings_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = lambda parameters, **settings: asked.update(settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    refuse_optimizer(training("apex"), GPU)
    config = OptimizerConfig(
        kind="apex", learning_rate=0.1, beta1=0.2, beta2=0.3, eps=0.4, weight_decay=0.5
    )
    OPTIMIZERS["apex"]([], config)
    assert asked == {
        "lr": 0.1,
        "betas": (0.2, 0.3),
        "eps": 0.4,
        "weight_decay": 0.5,
        "adam_w_mode": True,
    }


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_optimizer(training("torch"), CPU)
    refuse_optimizer(training("deepspeed_cpu"), CPU)
    refuse_optimizer(training("deepspeed_cpu", offload_optimizer=True), GPU)
    with pytest.raises(ValueError, match="needs the optimizer state on a GPU; set it to 'torch'"):
        refuse_optimizer(training("apex"), CPU)
    with pytest.raises(ValueError, match="needs the optimizer state on a GPU"):
        refuse_optimizer(training("apex", offload_optimizer=True), GPU)
    with pytest.raises(ValueError, match=r"host memory; set training\.offload_optimizer to true"):
        refuse_optimizer(training("deepspeed_cpu"), GPU)
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(
        ValueError, match=r"does not import .*install it from https://github.com/NV"
    ):
        refuse_optimizer(training("apex"), GPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="needs the C\\+\\+ compiler no-such-compiler; install"):
        refuse_optimizer(training("deepspeed_cpu"), CPU)


def test_another_optimizer_does_not_resume_a_checkpoint() -> None:
    """The optimizers' states differ in form, so that a checkpoint belongs to one of them."""
    names = {written_under(Layout(data=2), training(kind)) for kind in OPTIMIZERS}
    assert len(names) == len(OPTIMIZERS)


def test_runs_of_other_layouts_can_resume() -> None:
    from megarl.checkpoints.progress import can_resume

    layouts = [Layout(data=2), Layout(data=2, tensor=2), Layout(data=4, expert=2)]
    names = [written_under(layout, TrainingConfig(zero_stage=2)) for layout in layouts]
    assert all(can_resume(one, other) for one in names for other in names)
    assert not can_resume(
        names[0], written_under(layouts[0], TrainingConfig(precision="bfloat16", zero_stage=2))
    )

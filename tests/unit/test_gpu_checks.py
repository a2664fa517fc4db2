"""A recipe that asks for what the GPU does not have is refused before anything starts, and where
the driver and torch disagree on GPUs, a run stops with the reason and does not take the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.apps.doctor import doctor
from megarl.apps.doctor.doctor import ProgramOutcome
from megarl.engines.plan import check_placement
from megarl.errors import UserError
from megarl.parallel import devices, mesh
from megarl.settings.config import RunConfig, read
from megarl.trainer.precision import (
    automatic_precision,
    check_gpus,
    check_precision,
    refuse_different,
    slow_precision_warning,
)

RECIPE = Path(__file__).resolve().parents[2] / "launch/recipes/quickstart.yaml"
TRAINING = ("--training.precision", "bfloat16", "--training.zero_stage", "2")
ENGINE = ("--rollout.engine.dtype", "bfloat16")


def check(patch: pytest.MonkeyPatch, name: str, capability: int, *overrides: str) -> None:
    """Check the quick start's recipe with `overrides` on a machine with one GPU of that name."""
    patch.setattr(torch.cuda, "get_device_name", lambda index: name)
    patch.setattr(torch.cuda, "get_device_capability", lambda index: (capability, 0))
    config = read(RunConfig, RECIPE, overrides)
    check_precision(config.training, torch.device("cuda"))
    check_gpus(config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (TRAINING, "training.precision is 'bfloat16', which Tesla V100 does not compute in; set"),
        (ENGINE, "rollout.engine.dtype is 'bfloat16', which Tesla V100 does not compute in; set"),
        (("--training.precision", "bfloat16x2"), "'bfloat16' on GPUs"),
    ],
)
def test_bfloat16_needs_a_gpu_that_has_it(
    overrides: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "bfloat16x2" not in overrides:  # which is for processors
        check(monkeypatch, "NVIDIA A100", 8, *overrides)
    check(monkeypatch, "Tesla V100", 7)
    with pytest.raises(ValueError) as refused:
        check(monkeypatch, "Tesla V100", 7, *overrides)
    assert said in str(refused.value)


def test_a_slice_is_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    check(monkeypatch, cut, 8)
    with pytest.raises(ValueError, match=r"rollout\.engine\.tensor 2; start one rank"):
        check(monkeypatch, cut, 8, "--rollout.engine.tensor", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="the run has 2 ranks here"):
        check(monkeypatch, cut, 8)


@pytest.mark.parametrize(
    ("capability", "zero_stage", "chosen"),
    [(9, 1, "bfloat16"), (9, 0, "float32"), (7, 1, "float16"), (7, 0, "float32")],
)
def test_automatic_precision_is_one_that_the_gpu_has(
    capability: int, zero_stage: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (capability, 0))
    assert automatic_precision(zero_stage, torch.device("cuda"))[0] == chosen
    if capability == 9:  # what a plan counts
        words = ("--training.precision", "auto", "--training.zero_stage", str(zero_stage))
        assert read(RunConfig, RECIPE, words).training.dtype == chosen


@pytest.mark.parametrize("has_amx", [True, False])
def test_automatic_precision_of_a_processor(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr("megarl.trainer.precision.ONEDNN", print)
    chosen, why = automatic_precision(0, torch.device("cpu"))
    assert chosen == ("bfloat16x2" if has_amx else "float32") and "AMX" in why
    assert bool(slow_precision_warning("bfloat16x2")) != has_amx


def test_ranks_on_unlike_machines_do_not_choose_apart() -> None:
    refuse_different(["bfloat16"] * 4)
    with pytest.raises(
        UserError, match=r"auto is bfloat16x2 on rank 2, float32 on rank 0, because"
    ):
        refuse_different(["float32", "float32", "bfloat16x2", "float32"])


ROWS = "NVIDIA H100 80GB HBM3, {driver}, {mig}\n" * 2
Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Smi]:
    """A function that puts an nvidia-smi on PATH, which lists two GPUs."""

    def put(driver: str = "580.65.06", mig: str = "Disabled") -> None:
        rows = ROWS.format(driver=driver, mig=mig)
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("MEGARL_DEVICE", raising=False)
        devices.why_unseen.cache_clear()

    yield put
    devices.why_unseen.cache_clear()


@pytest.mark.parametrize(("cuda", "driver", "mig", "said"), [
    (None, "580.65.06", "[N/A]", ["2 GPUs", "built for CPUs", "MEGARL_DEVICE=cuda bash"]),
    ("13.0", "570.133", "[N/A]", ["driver is 570.133", "CUDA 13.0, which needs driver 580"]),
    ("12.8", "470.82", "[N/A]", ["driver is 470.82", "driver 525 or newer; update"]),
    ("13.0", "580.65.06", "Disabled", ["torch for CUDA 13.0 sees none", "torch.cuda.init()"]),
    ("13.0", "580.65.06", "Enabled", ["MIG is on", "nvidia-smi -L"]),
])  # fmt: skip
def test_no_run_takes_the_cpu_beside_gpus(
    cuda: str, driver: str, mig: str, said: list[str], smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(driver, mig)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError) as refused:
        mesh.local_device()
    assert [part for part in said if part not in str(refused.value)] == []
    # The doctor says the same.
    told = ProgramOutcome(0, json.dumps([cuda, []]), "")
    monkeypatch.setattr(doctor, "ask_python", lambda program: told)
    (finding,) = doctor.check_accelerators()
    assert finding.status == "FAIL"
    assert finding.fix


@pytest.mark.parametrize(
    "wish", [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, {"MEGARL_DEVICE": "cpu"}]
)
def test_the_cpu_can_be_wished_for(
    wish: dict[str, str], smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi("470.82")
    for name, value in wish.items():
        monkeypatch.setenv(name, value)
    assert mesh.local_device().type == "cpu"


def test_a_driver_that_does_not_answer_is_no_wish_for_the_cpu(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update, until the machine is booted again. A login node has no GPU, and may fail."""
    smi()
    program = tmp_path / "nvidia-smi"
    program.write_text(  # that knows no MIG, and lists its GPUs all the same
        "#!/bin/sh\ncase $1 in *mig*)"
        """ echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2 ;; esac\n"""
        "echo Tesla V100-SXM2-32GB, 440.33.01\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        with pytest.raises(UserError, match=r"1 GPU \(Tesla V100.*driver is 440\.33\.01"):
            mesh.local_device()
    devices.why_unseen.cache_clear()
    said = "Failed to initialize NVML: Driver/library version mismatch"
    program.write_text(f"#!/bin/sh\necho '{said}'; exit 18\n")
    monkeypatch.setattr(devices, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
    assert mesh.local_device().type == "cpu"
    (tmp_path / "nvidia0").touch()
    devices.why_unseen.cache_clear()
    with pytest.raises(UserError, match=rf"nvidia0\), but nvidia-smi fails \({said}\); reboot"):
        mesh.local_device()


@pytest.mark.parametrize("launcher_says", [{}, {"RANK": "1", "LOCAL_RANK": "1"}])
def test_a_rank_has_its_gpu_before_nccl_begins_and_communicators_are_made_late(
    launcher_says: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `device_id` torch would make them all at once, by splits in which every rank must join:
    groups that one rank makes alone would hang.
    """
    said: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **settings: said.append((backend, settings))
    )
    for name in ("RANK", mesh.STORE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name, value in (launcher_says and launcher_says | {"MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    device = mesh.initialise(timeout_s=60)
    assert device == torch.device("cuda", int(launcher_says.get("LOCAL_RANK", 0)))
    assert said[0] == device and said[1][0] == "nccl" and "device_id" not in said[1][1]


@pytest.mark.parametrize(
    ("variable", "value", "is_refused"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:512, expandable_segments:True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
    ],
)
def test_cuda_ipc_refuses_memory_that_another_process_may_not_open(
    variable: str, value: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    words = ("--rollout.placement", "colocated", "--rollout.max_staleness", "0")
    for transport in ("cuda_ipc", "shared_memory"):
        config = read(RunConfig, RECIPE, (*words, "--weight_sync.transport", transport))
        if is_refused and transport == "cuda_ipc":
            with pytest.raises(ValueError, match=rf"{variable} has expandable_segments:True.*set"):
                check_placement(config, 1, 1, shares_gpus=True)
        else:
            check_placement(config, 1, 1, shares_gpus=True)


@pytest.mark.parametrize(("names", "said"), [
    (["NVIDIA H100"], "torch sees 1 (CUDA_VISIBLE_DEVICES is '4'); start as many ranks"),
    (["NVIDIA A100 MIG 1g.5gb"], "a process sees one slice, so that a run has one rank"),
])  # fmt: skip
def test_fewer_gpus_than_ranks(
    names: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert mesh.local_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError) as refused:
        mesh.local_device()
    assert said in str(refused.value)


def test_no_python_header_is_told(
    tmp_path: Path, smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert next(doctor.check_headers()).status == "ok"
    paths = {"include": str(tmp_path)}
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: paths)
    assert next(doctor.check_headers()).status == "warn"
    smi()
    (finding,) = doctor.check_headers()
    assert (finding.status, "-dev (Debian)" in finding.fix) == ("FAIL", True)


def test_a_gpu_without_bfloat16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [["Tesla V100", 30, 32, False], ["NVIDIA A100", 80, 80, True]]
    told = ProgramOutcome(0, json.dumps(["12.8", gpus]), "")
    monkeypatch.setattr(doctor, "ask_python", lambda program: told)
    assert [finding.status for finding in doctor.check_accelerators()] == ["warn", "ok"]


def test_the_driver_list_is_read_without_torch() -> None:
    """`megarl doctor` must run where torch does not import."""
    program = "import sys, megarl.apps.doctor.doctor; sys.exit('torch' in sys.modules)"
    subprocess.run(["python", "-c", program], check=True, env=os.environ, timeout=60)

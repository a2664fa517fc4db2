"""What launch/env.sh refuses before it installs anything on a machine with GPUs, and the pinned
packages that it installs there.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
LOCKS = {
    version: LAUNCH / f"requirements-cuda-py{version}.txt" for version in ("3.11", "3.12", "3.13")
}


def start(
    folder: Path,
    *,
    driver: str = "580.65.06",
    smi: str = "",
    python: str = sys.executable,
    **variables: str,
) -> str:
    """What a copy of the script says on a machine with a GPU, with pip and venv taken away. `smi`:
    the script that stands for nvidia-smi, if another one than usual.
    """
    shutil.copytree(LAUNCH, folder / "launch", dirs_exist_ok=True)
    (folder / "setup.py").touch()
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    usual = f'#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA H100" || echo {driver}\n'
    (programs / "nvidia-smi").write_text(smi or usual)
    (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHON": python, "HOME": str(folder)} | variables
    script = ["bash", str(folder / "launch/env.sh")]
    told = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert told.returncode == 2, told.stderr
    assert not (folder / ".venv").exists()
    return told.stderr


def interpreter(folder: Path, body: str) -> str:
    """A Python that answers with `body`, a shell script of the words in `$*` and standard input."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\ninput=; [ "$1" = - ] && input=$(cat)\n{body}\n')
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("version", "said"),
    [(12080, "the driver is 535"), (13000, "has no Python.h, with which Triton builds")],
)
def test_an_old_driver_with_the_library_of_a_new_one_will_do(
    version: int, said: str, tmp_path: Path
) -> None:
    """CUDA's compatibility package is a newer libcuda.so.1; what is refused next is Python."""
    source = f"int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    answer = (
        f'case "$*$input" in *get_python_version*) echo {sysconfig.get_python_version()} ;;'
        f' *cuDriver*) echo "$input" | {sys.executable} - ;; *Python.h*) exit 1 ;; esac'
    )
    python = interpreter(tmp_path, answer)
    library = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert said in start(tmp_path, driver="535.129.03", python=python, **library)


LISTS_SLOWLY = """#!/bin/sh
if [ "$1" != -L ]; then echo 570.124.06; exit; fi
for number in 0 1 2 3; do echo "GPU $number: NVIDIA H100"; sleep 0.1; done
"""
"""Lists GPUs one by one: whoever ends the pipe at the first one kills it."""


def test_a_machine_whose_gpus_are_listed_one_by_one_has_gpus(tmp_path: Path) -> None:
    said = start(tmp_path, smi=LISTS_SLOWLY)
    assert "the driver is 570.124.06" in said
    assert "driver 580 or newer; update the driver, or set MEGARL_DEVICE=cpu" in said
    script = ["bash", str(LAUNCH.parent / "tests" / "run_gpu.sh"), "--python", "no-such-python"]
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    told = subprocess.run(
        script, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 2 and "there is no Python no-such-python" in told.stderr


def test_a_driver_that_does_not_answer_is_no_wish_for_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    broken = (
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n"
    )
    said = start(tmp_path, smi=broken, MEGARL_GPU_FILES=f"{tmp_path}/nvidia[0-9]*")
    assert "nvidia0), but nvidia-smi fails (Failed to initialize NVML" in said
    assert "or set MEGARL_DEVICE=cpu" in said


def test_a_python_without_pins_is_refused(tmp_path: Path) -> None:
    said = start(tmp_path, python=interpreter(tmp_path, "echo 3.14"))
    assert "no launch/requirements-cuda-py3.14.txt" in said
    assert "set PYTHON to one of Python 3.11,Python 3.12,Python 3.13, or make it" in said


@pytest.mark.parametrize(("variables", "said"), [
    ({"MEGARL_FLASH_ATTN": "yes"}, "MEGARL_FLASH_ATTN is 'yes'; set it to 4 or 2"),
    ({"MEGARL_FLASH_ATTN": "4", "MEGARL_DEVICE": "cpu"},
     "MEGARL_FLASH_ATTN is '4', which needs MEGARL_DEVICE=cuda"),
])  # fmt: skip
def test_flash_attention_is_asked_for_by_its_number(
    variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    assert said in start(tmp_path, **variables)


@pytest.mark.parametrize(("asked", "installed"), [
    ("", []),
    ("4", ["install -c pins flash-attn-4>=4.0.0b36"]),
    ("2", ["run_pip --no-build-isolation flash-attn==2.8.3.post2"]),
])  # fmt: skip
def test_flash_attention_is_installed_only_where_it_is_asked_for(
    asked: str, installed: list[str], tmp_path: Path
) -> None:
    """The lines of the script between DeepSpeed and the imports, with a compiler for CUDA there."""
    script = (LAUNCH / "env.sh").read_text()
    lines = script[script.index("\ntrap - EXIT\n") : script.index('phase "imports of a trainer"')]
    stand_ins = "".join(
        f'{name}() {{ echo "{name} $*" >>"$told"; }}\n' for name in ("install", "run_pip", "nvcc")
    )
    given = {"told": str(tmp_path / "told"), "venv": str(tmp_path), "log": str(tmp_path / "log")}
    given |= {"device": "cuda", "flash": asked, "pins": "pins", "root": str(LAUNCH.parent)}
    command = f"phase() {{ :; }}\n{stand_ins}{lines}"
    subprocess.run(["bash", "-euc", command], env=os.environ | given, check=True, timeout=30)
    told = tmp_path / "told"
    # The output of `run_pip` goes to the log; what it was called with is in the file.
    assert (told.read_text().splitlines() if told.exists() else []) == installed
    assert (tmp_path / f".flash-attn-{asked}").exists() == bool(asked)


def test_a_library_of_vllms_cpu_build_is_asked_for_first(tmp_path: Path) -> None:
    answer = 'case "$*" in *libnuma.so.1*) exit 1 ;; esac'
    said = start(tmp_path, python=interpreter(tmp_path, answer), MEGARL_DEVICE="cpu")
    assert "no libnuma.so.1" in said and "install libnuma1 (Debian)" in said


def build_deepspeed(folder: Path, device: str, run_pip: str, then: str) -> int:
    """Exit code of the script's lines that start the build of DeepSpeed, and of what comes `then`,
    with `run_pip` in the place of pip and a Python that notes in `folder`/python what it is given.
    """
    script = (LAUNCH / "env.sh").read_text()
    begin, end = script.index("\ndeepspeed_log="), script.index('\nphase "all others"')
    python = interpreter(folder, f'echo "$*$input" >{folder}/called')
    given = {"venv": str(folder), "device": device, "python": python, "deepspeed": "deepspeed"}
    command = f"phase() {{ :; }}\nrun_pip() {{ {run_pip}; }}\n{script[begin:end]}\n{then}"
    run = subprocess.run(["bash", "-euc", command], env=os.environ | given, timeout=60)
    return run.returncode


@pytest.mark.parametrize(("device", "operators"), [("cuda", False), ("cpu", True)])
def test_ranks_on_gpus_need_no_operator_of_the_cpu(
    device: str, operators: bool, tmp_path: Path
) -> None:
    assert build_deepspeed(tmp_path, device, ":", 'wait "$building"') == 0
    assert (tmp_path / "called").exists() == operators


def test_compilers_end_with_the_script(tmp_path: Path) -> None:
    child = tmp_path / "child"
    compiles = f'sh -c "echo \\$\\$ >{child}; exec sleep 300"; :'
    until = f"until [ -s {child} ]; do sleep 0.05; done; exit 7"
    assert build_deepspeed(tmp_path, "cuda", compiles, until) == 7
    compiler, deadline = Path(f"/proc/{child.read_text().strip()}"), time.monotonic() + 20
    while compiler.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    is_left = compiler.exists()
    if is_left:
        os.kill(int(compiler.name), signal.SIGKILL)
    assert not is_left


def torch_wheel(folder: Path, version: str, cuda: str | None) -> None:
    """Put a wheel of torch that knows nothing but its version into a folder."""
    about = f"torch-{version}.dist-info"
    files = {
        "torch/version.py": f"cuda, __version__ = {cuda!r}, {version!r}",
        "torch/__init__.py": "from .version import __version__",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


@pytest.mark.parametrize(("build", "cuda", "said"), [
    ("+cpu", None, "torch 2.13.0+cpu is built for CUDA None, not 13.0; it came from UV_"),
    ("", "13.0", "pip install setuptools==78.1.1 wheel"),
])  # fmt: skip
def test_a_torch_for_another_cuda_is_refused_before_all_else_is_installed(
    build: str, cuda: str | None, said: str, tmp_path: Path
) -> None:
    """A folder of wheels has this torch and nothing else: what comes after torch is missing."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    torch_wheel(wheels, f"2.13.0{build}", cuda)
    shutil.copytree(LAUNCH, tmp_path / "launch")
    (tmp_path / "setup.py").touch()
    sources = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    told = subprocess.run(
        ["bash", str(tmp_path / "launch/env.sh")],
        env=os.environ | sources | {"PYTHON": sys.executable, "MEGARL_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == (1 if cuda else 2) and said in told.stderr, told.stderr
    assert cuda or (f"UV_FIND_LINKS={wheels}" in told.stderr and "remove .venv" in told.stderr)


@pytest.mark.parametrize("version", LOCKS)
def test_the_locks_pin_what_is_asked_for(version: str) -> None:
    """Every package once, by name and version alone, and all that the recipe files ask for."""
    lines = [line for line in LOCKS[version].read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in lines), lines
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines) > 200
    for name in ("requirements-cuda.txt", "requirements-dev.txt"):
        for line in (LAUNCH / name).read_text().splitlines():
            asked = re.fullmatch(r"(?:# (?:torch|vllm): )?([a-z0-9-]+)==([0-9a-z.]+)", line)
            if asked:
                assert pinned[asked[1]] == asked[2]
    # Others of cuda-python are no meta-packages, but overwrite files of cuda-bindings.
    assert pinned["cuda-python"] == pinned["cuda-bindings"]
    # The driver that env.sh asks for is that of this CUDA.
    assert pinned["nvidia-cuda-runtime"].startswith("13.")
    assert "# driver: 580" in (LAUNCH / "requirements-cuda.txt").read_text().splitlines()

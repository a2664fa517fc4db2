"""Runs a function of a test file on several gloo ranks, each a process of its own, with a deadline
that ends them all.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megarl.parallel.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PATHS = [ROOT, *(ROOT / name for name in ("tests", "tools"))]
"""Where test files find what they import; the same as `pythonpath` in pyproject.toml."""

_BODY = """
import importlib.util, pickle, sys
spec = importlib.util.spec_from_file_location("under_test", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["under_test"] = module
spec.loader.exec_module(module)
with open(sys.argv[3], "rb") as file:
    arguments = pickle.load(file)
result = getattr(module, sys.argv[2])(*arguments)
with open(sys.argv[4], "wb") as file:
    pickle.dump(result, file)
"""


def run_ranks(
    num_ranks: int, file: str, function: str, *arguments: Any, timeout_s: float = 240.0
) -> list[Any]:
    """What `function(*arguments)` of `file` returns on each of `num_ranks` ranks; raises with their
    output on failure.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "arguments"
        given.write_bytes(pickle.dumps(arguments))
        port, ranks, outputs = str(free_port()), [], []
        for rank in range(num_ranks):
            environment = {
                **os.environ,
                # With another ninja than that of sys.executable, DeepSpeed compiles again.
                "PATH": os.pathsep.join(
                    [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
                ),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
            }
            output = open(Path(folder) / f"output-{rank}", "w+")  # noqa: SIM115 - closed below
            command = [
                sys.executable,
                "-c",
                _BODY,
                file,
                function,
                str(given),
                str(Path(folder) / f"result-{rank}"),
            ]
            ranks.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
                )
            )
            outputs.append(output)
        deadline = time.monotonic() + timeout_s
        try:
            while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
                if any(process.poll() not in (None, 0) for process in ranks):
                    break
                time.sleep(0.05)
        finally:
            for process in ranks:
                if process.poll() is None and (
                    time.monotonic() >= deadline or any(p.poll() not in (None, 0) for p in ranks)
                ):
                    process.kill()
                process.wait()
        failures = []
        for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
            output.seek(0)
            said = output.read()
            output.close()
            if process.returncode != 0:
                failures.append(f"rank {rank} ended with {process.returncode}:\n{said[-3000:]}")
        if failures:  # all of them: where one rank fails, the others lose their connections
            raise AssertionError(f"{len(failures)} of {num_ranks} ranks\n" + "\n".join(failures))
        return [
            pickle.loads((Path(folder) / f"result-{rank}").read_bytes())
            for rank in range(num_ranks)
        ]

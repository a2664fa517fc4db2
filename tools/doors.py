"""What another user of the machine can do to a run: reads, writes and connects as `nobody`.

    sudo python tools/doors.py RECIPE.yaml

Starts `megarl train RECIPE.yaml` and tries, while it starts and again after its first step, all
that it has: files, folders and sockets in the run's temporary folder, in the run folder and in
/dev/shm, `/proc` of each process, and each port on which a process listens. Prints what succeeded.
Exit code 1 if something did that docs/runs.md ("Other users of the machine") does not list. Needs
root, to become nobody and to know what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import stat
import sys
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist
import yaml
from chaos_run import Run

from megarl.private_folder import MARK

NOBODY = 65534
START_S, ANSWER_S = 300.0, 3.0
SECRET_FILES = ("environ", "maps", "mem", "fd", "cwd", "root")
"""What `/proc` shows of a process, and what only its user may see."""
LISTED = ("reads RUN", "reads a page of", "uses torch's store at")
"""Beginnings of what may succeed."""


def attempts(paths: list[str], pids: list[int], ports: list[int], tokens: set[str]) -> list[str]:
    """What this process can do to a run. Files are opened and not changed; what is made is removed.
    `tokens`: secrets that no command line may show.
    """
    done: list[str] = []

    def attempt(what: str, act: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            if act() is not False:
                done.append(what)

    for path in paths:
        attempt(f"reads {path}", lambda path=path: os.close(os.open(path, os.O_RDONLY)))
        attempt(f"writes {path}", lambda path=path: os.close(os.open(path, os.O_WRONLY)))
        attempt(f"makes and removes in {path}", lambda path=path: _make(path))
        attempt(f"links in {path}", lambda path=path: _link(path))
        attempt(f"connects to {path}", lambda path=path: _connect(path))
    for pid in pids:
        for name in SECRET_FILES:
            attempt(f"reads /proc/{pid}/{name}", lambda pid=pid, name=name: _look(pid, name))
        attempt(
            f"reads a token in /proc/{pid}/cmdline",
            lambda pid=pid: any(
                one.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for one in tokens
            ),
        )
        attempt(f"signals {pid}", lambda pid=pid: os.kill(pid, 0))
    for port in ports:
        for page in ("", "metrics"):
            url = f"http://127.0.0.1:{port}/{page}"
            attempt(f"reads a page of {url}", lambda url=url: _page(url))
        attempt(f"uses torch's store at {port}", lambda port=port: _store(port))
    return done


def _make(path: str) -> None:
    place = Path(path) / "doors"
    place.mkdir()
    place.rmdir()


def _link(path: str) -> None:
    place = Path(path) / "doors"
    place.symlink_to("/etc/passwd")
    place.unlink()


def _connect(path: str) -> bool:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
    return True


def _look(pid: int, name: str) -> None:
    path = f"/proc/{pid}/{name}"
    if name in ("fd",):
        os.listdir(path)
    elif name in ("cwd", "root"):
        os.readlink(path)
    else:
        with Path(path).open("rb") as file:
            file.read(1)


def _page(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:  # noqa: S310 - a port of the run
        return answer.status == 200


def _store(port: int) -> bool:
    """In a process of its own: torch waits without end for a server that is none of its."""
    child = os.fork()
    if not child:
        signal.alarm(math.ceil(ANSWER_S))
        with contextlib.suppress(Exception):
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=ANSWER_S)
            )
            store.num_keys()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def as_nobody(*found: object) -> list[str]:
    """What `attempts` returns in a process of the user nobody."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with os.fdopen(write, "w") as out:
                json.dump(attempts(*found), out)  # pyright: ignore[reportArgumentType]
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def below(folder: Path) -> Iterator[str]:
    """A folder and all in it."""
    yield str(folder)
    for place, folders, files in os.walk(folder):
        yield from (os.path.join(place, name) for name in (*folders, *files))


def look(run: Run, before: set[str]) -> list[str]:
    """What succeeds now that is not listed; prints all."""
    processes = run.below()
    places, tokens, ports = {run.folder}, set[str](), set[int]()
    for one in processes:
        with contextlib.suppress(psutil.Error):
            settings = one.environ()
            places |= {Path(settings[MARK])} if Path(settings.get(MARK, "-")).is_dir() else set()
            tokens |= {settings["RAY_AUTH_TOKEN"]} if "RAY_AUTH_TOKEN" in settings else set()
            ports |= {c.laddr.port for c in one.net_connections("tcp") if c.status == "LISTEN"}
    paths = [path for place in places for path in below(place)]
    paths += sorted(set(map(str, Path("/dev/shm").iterdir())) - before)
    done = as_nobody(paths, [one.pid for one in processes], sorted(ports), tokens)
    own = f"reads {run.folder}"
    done = [one.replace(own, "reads RUN", 1) if one.startswith(own) else one for one in done]
    wrong = [one for one in done if not one.startswith(LISTED)]
    counts = len(paths), len(processes), len(ports)
    print(f"{counts[0]} files, {counts[1]} processes, {counts[2]} ports: {len(done)} succeeded")
    print(*(one for one in done if not one.startswith("reads RUN")), sep="\n", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path)
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root, to become the user nobody")
    folder = Path(yaml.safe_load(args.recipe.read_text())["folder"])
    before = {str(path) for path in Path("/dev/shm").iterdir()}
    command = [sys.executable, "-m", "megarl", "train", str(args.recipe)]
    run, wrong = Run(command, folder, Path(f"{folder}_doors.log")), list[str]()
    run.start()
    try:
        while run.code is None and not any(one.name() == "raylet" for one in run.below()):
            run.wait_for_phase("start", 1.0)
        wrong += look(run, before)
        if not run.wait_for_steps(1, START_S) or run.code is not None:
            print(f"the run made no step (exit code {run.code}); see {run.log}")
            return 1
        wrong += look(run, before)
    finally:
        run.end()
    result = {"not listed": wrong}
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

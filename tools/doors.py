"""What another user of the machine can do to a run: reads, writes and connects as `nobody`.

    sudo python tools/doors.py RECIPE.yaml --ranks 2

Starts `megarl run RECIPE.yaml` and tries, each second while it starts and again after its first
step, all that it has: files, folders and sockets in the run's temporary folder, in the run folder
and in /dev/shm, `/proc` of each process, each socket without a file, and each port on which a
process listens. Prints what succeeded. Exit code 1 if something did that
docs/reference_run_folder.md ("Other users of the machine") does not list. Needs root, to become
nobody and to know what there is.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import math
import os
import signal
import socket
import stat
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import grpc
import psutil
import torch.distributed as dist
import yaml
from chaos_run import Run, megarl
from common import command_line

from megarl.system.private_folder import MARK

OPTIONS = {"recipe": (Path, "of the run"), "--ranks": (1, "trainer ranks")}
NOBODY = 65534
START_S, ANSWER_S, POLL_S = 600.0, 2.0, 1.0
KINDS = ("files and sockets", "processes", "ports")
SECRET_FILES = ("environ", "maps", "mem", "fd", "cwd", "root")
"""What `/proc` shows of a process, and what only its user may see."""
LISTED = "reads RUN"
"""Beginning of what may succeed: the run folder is as open as the user's `umask` makes it."""
RAY_CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVKeys",
    "NodeManagerService/GetNodeStats",
    "CoreWorkerService/GetCoreWorkerStats",
    "ReporterService/GetTraceback",
)
"""Methods of Ray's servers that take an empty request."""
ZMQ = b"\xff\0\0\0\0\0\0\0\1\x7f"
"""Beginning of what a server of ZeroMQ says to whoever connects; the length in it varies."""


def attempts(
    paths: list[str], pids: list[int], addresses: list[tuple[str, int]], tokens: set[str]
) -> list[str]:
    """What this process can do to a run. Files are opened and not changed; what is made or moved is
    removed or moved back. `paths`: also names of sockets without a file, after a zero byte.
    `tokens`: secrets that no command line may show.
    """
    done: list[str] = []

    def attempt(what: str, act: Callable[..., object], *given: object) -> None:
        with contextlib.suppress(Exception):
            if act(*given) is not False:
                done.append(what)

    def shows_token(pid: int) -> bool:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(one.encode() in line for one in tokens)

    def try_port(port: int) -> None:
        for page in ("", "metrics"):
            attempt(f"reads page {port}/{page}", _page, f"http://127.0.0.1:{port}/{page}")
        for call in RAY_CALLS:
            attempt(f"asks Ray at {port} for {call}", _ask_ray, port, call)
        attempt(f"meets ZeroMQ at {port}", _greet, port)

    for path, (what, act) in itertools.product(paths, ON_PATHS.items()):
        attempt(what.format(path), act, path)
    for pid in pids:
        for name in SECRET_FILES:
            attempt(f"reads /proc/{pid}/{name}", _look, f"/proc/{pid}/{name}")
        attempt(f"reads a token in /proc/{pid}/cmdline", shows_token, pid)
        attempt(f"signals {pid}", os.kill, pid, 0)
    found = [one for _, one in addresses]
    hosts = ((ipaddress.ip_address(host.removeprefix("::ffff:")), port) for host, port in addresses)
    done += [f"reaches {port} from other hosts" for host, port in hosts if not host.is_loopback]
    done += [f"uses torch's store at {port}" for port in _stores(found)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        list(pool.map(try_port, found))
    return done


def _in_turn(act: Callable[[str], object], undo: Callable[[str], object]) -> Callable[[str], None]:
    """Do something with "doors" in a folder, and undo it."""

    def both(path: str) -> None:
        act(f"{path}/doors")
        undo(f"{path}/doors")

    return both


def _move(path: str) -> None:
    os.rename(path, f"{path}.doors")
    os.rename(f"{path}.doors", path)


def _connect(path: str) -> bool:
    if path[0] != "\0" and not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
    return True


ON_PATHS: dict[str, Callable[[str], object]] = {
    "reads {}": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "writes {}": lambda path: os.close(os.open(path, os.O_WRONLY)),
    "makes and removes in {}": _in_turn(os.mkdir, os.rmdir),
    "links in {}": _in_turn(partial(os.symlink, "/etc/passwd"), os.unlink),
    "moves {}": _move,
    "connects to {!r}": _connect,
}


def _look(path: str) -> None:
    """Read a file, folder or link of /proc."""
    if path.endswith(("/cwd", "/root")):
        os.readlink(path)
    elif path.endswith("/fd"):
        os.listdir(path)
    else:
        with Path(path).open("rb") as file:
            file.read(1)


def _page(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:  # noqa: S310 - a port of the run
        return answer.status == 200


def _ask_ray(port: int, call: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        channel.unary_unary(f"/ray.rpc.{call}")(b"", timeout=ANSWER_S)


def _greet(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), ANSWER_S) as channel:
        channel.settimeout(ANSWER_S / 10)
        return channel.recv(1) == ZMQ[:1] and channel.recv(9)[-1:] == ZMQ[-1:]


def _stores(ports: list[int]) -> list[int]:
    """Those of the ports at which torch's store answers. In processes of their own: torch waits
    without end for a server that is none of its.
    """
    children: dict[int, int] = {}
    for port in ports:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(math.ceil(ANSWER_S))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's words about other servers
            with contextlib.suppress(Exception):
                store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                    "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=ANSWER_S)
                )
                store.num_keys()
                os._exit(0)
            os._exit(1)
        children[port] = child
    return [port for port, child in children.items() if os.waitpid(child, 0)[1] == 0]


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def look(
    processes: list[psutil.Process], folder: Path, before: set[str], tried: set[object]
) -> list[str]:
    """What succeeds now that is not listed; prints all. `folder`: the run folder. `before`: what
    was in /dev/shm before the run. `tried`: what an earlier look has tried, and this one does not.
    """
    places, tokens = {folder}, set[str]()
    paths, addresses = set[str](), set[tuple[str, int]]()
    for one in processes:
        with contextlib.suppress(psutil.Error):
            settings = one.environ()
            places |= {Path(settings[MARK])} if Path(settings.get(MARK, "-")).is_dir() else set()
            tokens |= {settings["RAY_AUTH_TOKEN"]} if "RAY_AUTH_TOKEN" in settings else set()
            for socket_ in one.net_connections("all"):
                if socket_.family == socket.AF_UNIX:
                    name = str(socket_.laddr)
                    paths |= {"\0" + name[1:] if name[:1] == "@" else name} - {""}
                elif socket_.status == "LISTEN":
                    addresses |= {tuple(socket_.laddr)}
    paths |= set(map(str, places))
    for place, folders, files in itertools.chain(*map(os.walk, places)):
        paths |= {os.path.join(place, name) for name in (*folders, *files)}
    paths |= set(map(str, Path("/dev/shm").iterdir())) - before
    new = [sorted(some - tried) for some in (paths, {one.pid for one in processes}, addresses)]
    for some in new:
        tried |= set(some)
    with ProcessPoolExecutor(1, get_context("fork"), become_nobody) as pool:
        done = pool.submit(attempts, *new, tokens).result()
    own = f"reads {folder}"
    done = [one.replace(own, "reads RUN", 1) if one.startswith(own) else one for one in done]
    wrong = [one for one in done if not one.startswith(LISTED)]
    counts = ", ".join(f"{len(some)} {what}" for some, what in zip(new, KINDS, strict=True))
    print(f"{counts}: {len(done)} succeeded", *wrong, sep="\n", flush=True)
    return wrong


def main() -> int:
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root, to become the user nobody")
    folder = Path(yaml.safe_load(args.recipe.read_text())["folder"])
    before = {str(path) for path in Path("/dev/shm").iterdir()}
    command = megarl("run", args.recipe, *(["--ranks", args.ranks] if args.ranks > 1 else []))
    run, wrong = Run(command, folder, Path(f"{folder}_doors.log")), list[str]()
    run.start()
    try:
        tried, deadline = set[object](), time.monotonic() + START_S
        while run.code is None and not run.place[0] and time.monotonic() < deadline:
            wrong += look(run.below(), folder, before, tried)
            time.sleep(POLL_S)
        if run.code is not None or not run.place[0]:
            print(f"the run made no step (exit code {run.code}); see {run.log}")
            return 1
        wrong += look(run.below(), folder, before, set())
    finally:
        run.end()
    print(json.dumps({"not listed": sorted(set(wrong))}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

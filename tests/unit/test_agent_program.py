"""The process of an agent: what it gets, what it may reach, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import functools
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import ROOT, until, write_recipe

from megarl.apps.gateway.agent_program import (
    FOLDER,
    NETWORK_SINCE,
    check_command,
    run_agent_program,
)
from megarl.environments.isolation import has_filters, landlock_version
from megarl.environments.session import Answer
from megarl.settings.config import RunConfig, read
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.rl import with_hidden
from megarl.types import Prompt

PROMPT = Prompt(3, "1+2", [], "3", {"answer": "3", "topic": "sums"})


def run(tmp_path: Path, program: str, *words: str, port: str = "none", **more: Any) -> Any:
    """What an agent answers whose program is the text `program`."""
    script = tmp_path / "agent.py"
    script.write_text(textwrap.dedent(program))
    command = check_command(["python", str(script), *words], network="open", isolate=port != "none")
    settings: dict[str, Any] = {"columns": ["topic"], "variables": {}} | more
    return asyncio.run(run_agent_program(command, PROMPT, port=port, **settings))


def test_what_an_agent_gets_and_gives(tmp_path: Path) -> None:
    told = """
        import json, os, sys
        row = json.load(open(os.environ["MEGARL_PROMPT"]))
        print("noise")
        print(json.dumps([sys.argv[1:], row, os.listdir("."), os.environ["KEY"], os.getcwd()]))
    """
    said = run(tmp_path, told, "sum {prompt}", variables={"KEY": "k"})
    assert isinstance(said, Answer)
    noise, last = said.text.splitlines()
    words, row, files, key, folder = json.loads(last)
    assert (noise, words, key, files) == ("noise", ["sum 1+2"], "k", [])
    assert row == {"prompt": "1+2", "topic": "sums"}  # and not the answer
    assert not Path(folder).exists()

    scored = """
        import os
        open(os.environ["MEGARL_RESULT"], "w").write('{"reward": 0.5, "steps": 2}')
    """
    assert run(tmp_path, scored) == {"reward": 0.5, "steps": 2}
    assert len(run(tmp_path, "print('x' * 3_000_000, end='')").text) == 2**20
    big = (
        "try: open('big', 'w').truncate(2**30 + 1)\nexcept OSError as error: print(error.strerror)"
    )
    assert run(tmp_path, big).text == "File too large"


def test_agents_that_fail(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 1: KeyError: 'of its own'"):
        run(tmp_path, "raise KeyError('of its own')")
    with pytest.raises(RuntimeError, match="signal SIGKILL"):
        run(tmp_path, "import os; os.kill(os.getpid(), 9)")
    pipe = "import os; os.mkfifo(os.environ['MEGARL_RESULT'])"
    with pytest.raises(RuntimeError, match="it is no file"):
        run(tmp_path, pipe)
    link = "import os; os.symlink('/dev/zero', os.environ['MEGARL_RESULT'])"
    with pytest.raises(RuntimeError, match="MEGARL_RESULT is no JSON"):
        run(tmp_path, link)
    assert (
        run(tmp_path, "import os; print('MEGARL_RESULT' in os.environ)", scores=False).text
        == "False"
    )
    finds = "import os; open(os.path.dirname(os.environ['MEGARL_PROMPT']) + '/result.json', 'w')"
    assert run(tmp_path, f"{finds}.write('1'); print('3')", scores=False).text == "3"
    broken = "import os; open(os.environ['MEGARL_RESULT'], 'w').write('{')"
    with pytest.raises(RuntimeError, match="MEGARL_RESULT is no JSON"):
        run(tmp_path, broken)


FLEES = """
import ctypes, os, sys, time
libc, way = ctypes.CDLL(None), sys.argv[1]
if way == "session":  # and no environment
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execve(sys.executable, [sys.executable, __file__, "stays", sys.argv[2]], {})
elif way == "clone":  # CLONE_PARENT
    if libc.syscall(56 if os.uname().machine == "x86_64" else 220, 0x8011, 0, 0, 0, 0) == 0:
        way = "stays"
elif way == "fork" and not os.fork():
    way = "stays"
if way == "stays":
    for number in range(3):
        os.close(number)
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists(sys.argv[2]) or not open(sys.argv[2]).read():
    time.sleep(0.01)
print("said", flush=True)
time.sleep(600 if len(sys.argv) > 3 else 0)
"""


@pytest.mark.parametrize(("how", "way"), [
    ("ends", "fork"), ("ends", "session"), ("cut off", "clone"), ("cut off", "session"),
    ("killed", "clone"), ("killed", "session"),
])  # fmt: skip
def test_nothing_is_left(way: str, how: str, tmp_path: Path) -> None:
    """Of an agent that ends before what it has started, of one that is cut off, and of one whose
    worker process is killed.
    """
    script, ids = tmp_path / "agent.py", tmp_path / "ids"
    script.write_text(FLEES)
    words = [sys.executable, str(script), way, str(ids)]
    if how == "killed":
        worker = f"""
import asyncio
from megarl.apps.gateway.agent_program import run_agent_program
from megarl.types import Prompt
asyncio.run(run_agent_program({[*words, "waits"]!r}, Prompt(0, "", [], "", {{}}), [], {{}}, "none"))
"""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        with subprocess.Popen([sys.executable, "-c", worker], env=environment) as process:
            until(lambda: ids.exists() and ids.read_text())
            process.kill()
    elif how == "ends":
        assert run(tmp_path, FLEES, way, str(ids)).text == "said"
    else:

        async def cut_off() -> None:
            running = asyncio.ensure_future(
                run_agent_program([*words, "waits"], PROMPT, [], {}, "none")
            )
            while not (ids.exists() and ids.read_text()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            running.cancel()
            await asyncio.wait([running])

        asyncio.run(cut_off())
    until(lambda: not is_running(int(ids.read_text())))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


has_rules = pytest.mark.skipif(
    landlock_version() < NETWORK_SINCE or not has_filters(),
    reason="the kernel has no Landlock rules of networks, or no seccomp",
)
TRIES = """
        import asyncio, ctypes, json, multiprocessing, os, shutil, socket, subprocess, sys
        from socket import *

        found = {}

        def attempt(name, act):
            try:
                found[name] = act()
            except OSError as error:
                found[name] = "refused" if error.errno in (1, 2, 13, 18, 30) else repr(error)
"""


@has_rules
def test_an_agent_reaches_the_gateway_only(tmp_path: Path) -> None:
    """By no kind of socket another server, nor the memory and environment of the process that has
    started it.
    """
    ours, other = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    paths = [str(tmp_path / "socket"), "\0" + str(tmp_path)]
    unix = [socket.socket(socket.AF_UNIX) for _ in paths]
    for one, path in zip(unix, paths, strict=True):
        one.bind(path)
        one.listen()
    gateway, port = (one.getsockname()[1] for one in (ours, other))
    tries = f"""{TRIES}
        there, fast = ("127.0.0.1", {port}), 0x20000000

        def connect(family, kind, protocol, where):
            socket(family, kind, protocol).connect(where)

        def ring():  # io_uring makes sockets, too
            if libc.syscall(425, 4, ctypes.create_string_buffer(120)) < 0:
                raise OSError(ctypes.get_errno(), "")

        libc = ctypes.CDLL(None, use_errno=True)
        attempt("tcp", lambda: connect(AF_INET, SOCK_STREAM, 0, there))
        attempt("ip6", lambda: connect(AF_INET6, SOCK_STREAM, 0, ("::1", {port})))
        attempt("multipath", lambda: connect(AF_INET, SOCK_STREAM, 262, there))
        attempt("sctp", lambda: connect(AF_INET, SOCK_STREAM, 132, there))
        attempt("udp", lambda: connect(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0, there))
        attempt("raw", lambda: socket(AF_INET, SOCK_RAW, 1))
        attempt("netlink", lambda: socket(AF_NETLINK, SOCK_RAW, 0))
        attempt("machine", lambda: socket(AF_VSOCK, SOCK_STREAM))
        attempt("unix", lambda: connect(AF_UNIX, SOCK_STREAM, 0, {paths[0]!r}))
        attempt("abstract", lambda: connect(AF_UNIX, SOCK_STREAM, 0, {paths[1]!r}))
        attempt("datagrams", lambda: socketpair(AF_UNIX, SOCK_DGRAM))
        attempt("fast", lambda: socket().sendto(b"a", fast, there))
        attempt("fast message", lambda: socket().sendmsg([b"a"], [], fast, there))
        attempt("server", lambda: socket().listen())
        attempt("ring", ring)
        for name in ("environ", "mem"):
            path = "/proc/{os.getpid()}/" + name
            attempt(name, lambda: open(path, "rb").read(1) and None)
        print(json.dumps([connect(AF_INET, SOCK_STREAM, 0, ("localhost", {gateway})), found], default=str))
    """
    with ours, other, unix[0], unix[1]:
        reached, found = json.loads(run(tmp_path, tries, port=str(gateway)).text)
        assert reached is None
        assert len(found) == 17
        assert {name: how for name, how in found.items() if how != "refused"} == {}
        found = json.loads(run(tmp_path, tries, port="0").text)[1]
        assert [found[one] for one in ("tcp", "udp", "unix", "server")] == [None] * 4


@has_rules
def test_an_agent_changes_its_own_files_only(tmp_path: Path) -> None:
    """Not those of another rollout, which it cannot read either, nor those of the run; it reads no
    file that is hidden.
    """
    answers, inner = tmp_path / "answers.jsonl", tmp_path / "whole" / "inner"
    inner.mkdir(parents=True)
    beside = tmp_path / "answers.jsonl.md"
    for file in (answers, inner / "answers", tmp_path / "whole" / "other", beside):
        file.write_text("4")
    (tmp_path / "link").symlink_to(inner)
    hidden = [str(answers), str(tmp_path / "whole"), str(tmp_path / "link" / "answers")]
    hidden += [f"/nowhere/{number:0100}" for number in range(2000)]  # too long for one word
    other, run_file = Path(tempfile.mkdtemp(prefix=FOLDER)), tmp_path / "checkpoint"
    for file in (other / "prompt.json", run_file):
        file.write_text("before")
    tries = f"""{TRIES}
        other, run, new = {str(other)!r}, {str(run_file)!r}, {str(tmp_path / "new")!r}
        assert open({str(beside)!r}).read() == "4"
        attempt("answers", lambda: open({str(answers)!r}).read())
        attempt("answers by another name", lambda: os.link({str(answers)!r}, "mine"))
        attempt("inner", lambda: open({str(inner / "answers")!r}).read())
        attempt("beside inner", lambda: open({str(tmp_path / "whole" / "other")!r}).read())
        attempt("read other", lambda: open(other + "/prompt.json").read())
        attempt("link other", lambda: os.link(other + "/prompt.json", "mine"))
        attempt("move other", lambda: os.rename(other + "/prompt.json", "mine"))
        attempt("score other", lambda: open(other + "/result.json", "w"))
        attempt("folder", lambda: os.mkdir(other + "/folder"))
        attempt("write", lambda: open(run, "r+"))
        attempt("cut off", lambda: os.truncate(run, 0))
        attempt("remove", lambda: os.remove(run))
        attempt("new", lambda: open(new, "w"))
        attempt("kernel", lambda: open("/proc/sys/kernel/core_pattern", "r+"))
        attempt("disk", lambda: os.mknod("disk", 0o60600, os.makedev(254, 0)))
        for name in {[one.name for one in Path("/dev").iterdir() if one.is_block_device()][:1]}:
            attempt("device", lambda: open("/dev/" + name, "rb"))
        print(json.dumps([open(run).read(), found]))
    """
    try:
        read, found = json.loads(run(tmp_path, tries, port="1", hidden=hidden).text)
        assert read == "before"
        assert len(found) >= 15
        assert {name: how for name, how in found.items() if how != "refused"} == {}
        assert (other / "prompt.json").read_text() == run_file.read_text() == "before"
        assert [one.name for one in other.iterdir()] == ["prompt.json"]
    finally:
        shutil.rmtree(other)


@has_rules
@pytest.mark.parametrize("port", ["0", "1"])
def test_an_agent_reaches_its_own_processes_only(port: str, tmp_path: Path) -> None:
    """Neither others' limits and priorities, nor what outlives processes, which the next rollout
    would find; nor the names in hidden folders.
    """
    hidden = tmp_path / "hidden" / "answers"
    hidden.mkdir(parents=True)
    (hidden / "is_42").touch()
    tries = f"""{TRIES}
        import resource
        libc, victim = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])

        def call(*values):
            if libc.syscall(*values) < 0:
                raise OSError(ctypes.get_errno(), "")

        arm = os.uname().machine == "aarch64"
        limit = (100, 100)
        attempt("limit", lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, limit))
        attempt("cores", lambda: os.sched_setaffinity(victim, {{0}}))
        attempt("policy", lambda: os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)))
        attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, victim, 19))
        attempt("user", lambda: os.setpriority(os.PRIO_USER, 0, 19))
        attempt("input and output", lambda: call(30 if arm else 251, 1, victim, 3 << 13))
        attempt("key", lambda: call(217 if arm else 248, b"user", b"megarl", b"x", 1, -4))
        attempt("keys", lambda: call(219 if arm else 250, 0, -4, 0))
        if {port} == 1:
            for name, numbers in {{
                "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "shmctl": (31, 195),
            }}.items():
                attempt(name, lambda: call(numbers[arm], 0, 1, 0o1600))
            attempt("mq_open", lambda: call(180 if arm else 240, b"megarl", 0o102, 0o600, 0))
            attempt("names", lambda: os.listdir({str(hidden)!r}))
            attempt("names above", lambda: os.listdir({str(hidden.parent)!r}))
            attempt("times", lambda: os.utime(__file__))
            attempt("permissions", lambda: os.chmod(__file__, 0o600))
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        os.nice(1)
        print(json.dumps(found))
    """
    with subprocess.Popen(["sleep", "60"]) as victim:
        try:
            hides = [str(hidden.parent), str(hidden)]
            said = run(tmp_path, tries, str(victim.pid), port=port, hidden=hides)
            assert os.getpriority(os.PRIO_PROCESS, victim.pid) == 0
        finally:
            victim.kill()
    found = json.loads(said.text)
    names = {"names": "refused", "names above": []} if port == "1" else {}
    assert found == dict.fromkeys(found, "refused") | names and len(found) >= 8


@has_rules
def test_what_an_agent_can_still_do(tmp_path: Path) -> None:
    """Files and processes of its own, curl and Node.js; not memory and terminals that are shared
    with others.
    """
    tries = f"""{TRIES}
        import tempfile

        async def shout():
            process = await asyncio.create_subprocess_shell("echo a | sort", stdout=-1)
            return (await process.communicate())[0].decode()

        def files():
            with tempfile.NamedTemporaryFile("w", delete=False) as file:
                file.write("a")
            os.rename(file.name, "b")
            os.symlink("b", "c")
            os.mkdir("d")
            os.mkfifo("d/e")
            return open("c").read()

        def out(*words):
            done = subprocess.run(words, capture_output=True, text=True)
            return done.stdout + done.stderr

        if __name__ == "__main__":
            attempt("files", files)
            attempt("asyncio", lambda: asyncio.run(shout()))
            attempt("memory", lambda: open("/dev/shm/" + str(os.getpid()), "w"))
            attempt("terminal", lambda: len(os.openpty()))
            attempt("devices", lambda: out("sh", "-c", "echo a > /dev/null; echo b > /dev/stdout"))
            url = "http://localhost:" + sys.argv[1]
            if shutil.which("curl"):
                attempt("curl", lambda: out("curl", "-sS", url))
            if shutil.which("node"):
                fetch = "fetch(process.argv[1]).then(r => r.text()).then(t => console.log(t))"
                attempt("node", lambda: out("node", "-e", fetch, url).strip())
            print(json.dumps(found))
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = str(server.server_address[1])
        found = json.loads(run(tmp_path, tries, port, port=port).text)
        server.shutdown()
    wanted = {"files": "a", "asyncio": "a\n"} | dict.fromkeys(("memory", "terminal"), "refused")
    wanted |= {"devices": "b\n"} | {name: "hello" for name in ("curl", "node") if name in found}
    assert found == wanted


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("verifier", ["exact_match", "numeric"])
def test_a_program_scores_itself_only_where_the_recipe_says_so(verifier: str) -> None:
    for scores in (False, True):
        agent: Any = {"command": ["python"], "scores_itself": scores}
        config = EnvironmentConfig(agent=agent, verifier=verifier)
        assert config.may_score_itself == scores
        assert config.needs_verifier == (not scores or verifier == "numeric")


def test_what_is_hidden_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "data/b.jsonl", "data/tool.py", "more.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    tree = {
        "folder": "run", "steps": 1, "model": {"path": "model"},
        "prompts": {"source": "data/*"},
        "evaluation": {"prompts": {"source": "a.jsonl"}, "sources": ["more.jsonl"]},
        "environment": {"agent": {"command": ["python"], "hidden": ["secret"]}},
    }  # fmt: skip
    config = read(RunConfig, write_recipe(tmp_path / "recipe.yaml", tree), [])
    found = with_hidden(config).agent.hidden
    assert found[0] == str(tmp_path / "secret") and found[1] == str(tmp_path / "run")
    assert found[2].endswith("/datasets--*") and found[3].endswith("datasets")
    data = {str(tmp_path / name) for name in ("a.jsonl", "data/b.jsonl", "more.jsonl")}
    assert set(found[4:]) == data
    tree["environment"] = {"agent": {"function": "own.py:run"}}
    config = read(RunConfig, write_recipe(tmp_path / "recipe.yaml", tree), [])
    assert with_hidden(config) == config.environment


def test_words_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files are absolute; a module is none, nor is a long program."""
    monkeypatch.chdir(tmp_path)
    for name in ("agent.py", "agent"):
        Path(name).touch()
    words = ["python", "-m", "agent", "agent.py", "-c", "a=1;" * 99 + "b.c"]
    made = check_command(words, network="open", isolate=True)
    assert made == [sys.executable, "-m", "agent", str(tmp_path / "agent.py"), *words[4:]]


def test_commands_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="begins with 'no_such_agent', and there is no such"):
        check_command(["no_such_agent"], network="open", isolate=True)
    with pytest.raises(ValueError, match=r"names none\.py, but there is no such file"):
        check_command(["python", "none.py"], network="open", isolate=True)
    known = {"landlock_version": NETWORK_SINCE, "has_filters": True}
    for name, lacking in {"landlock_version": NETWORK_SINCE - 1, "has_filters": False}.items():
        for function, found in (known | {name: lacking}).items():
            where = f"megarl.apps.gateway.agent_program.{function}"
            monkeypatch.setattr(where, functools.partial(int, found))
        with pytest.raises(ValueError, match=r"set environment\.agent\.network to 'open'"):
            check_command(["python"], network="gateway", isolate=True)
        check_command(["python"], network="gateway", isolate=False)

"""Programs that attack: each ends within its limits, the host is unharmed, nothing is left running.

Most attacks are also run without the sandbox, where that is safe, to show that they are attacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from support.commands import ROOT, python, started, until

from megarl.apps.verifiers.code import sandbox_child
from megarl.apps.verifiers.code.sandbox import FOLDER, Sandbox
from megarl.settings.code import CodeConfig
from megarl.settings.schema import replace

SETTINGS = CodeConfig(time_limit_s=7.0, memory_mib=128, processes=8, file_mib=4, output_kib=64)
IS_ROOT = os.geteuid() == 0
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")
LIMITS = CodeConfig(sandbox="rlimits", time_limit_s=1.0, processes=8)
if IS_ROOT:
    LIMITS = replace(LIMITS, interpreter=(str(SYSTEM_PYTHON), "-I", "-S"))
NEEDS_PYTHON = pytest.mark.skipif(
    IS_ROOT and not SYSTEM_PYTHON, reason="root needs a Python that all may run"
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with closing(Sandbox(SETTINGS)) as made:
        yield made


@pytest.fixture(scope="module")
def hurried() -> Iterator[Sandbox]:
    """With a time limit of a second, for programs that never end."""
    with closing(Sandbox(replace(SETTINGS, time_limit_s=1.0))) as made:
        yield made


@pytest.fixture(scope="module")
def unprotected() -> Iterator[Sandbox]:
    """The same machinery with `sandbox: none`."""
    with closing(Sandbox(CodeConfig(sandbox="none", time_limit_s=5.0))) as made:
        yield made


def run(sandbox: Sandbox, program: str, text: str = "") -> tuple[str, str]:
    """(status, output) of a program with the input `text`."""
    [result] = sandbox.run("stdin", program, [text], total_s=8.0)
    return result["status"], result.get("output", "")


def inhabitants(sandbox: Sandbox) -> list[psutil.Process]:
    """Processes below the sandbox's server, whose overseer the verifier has started."""
    assert sandbox._process is not None
    (server,) = psutil.Process(sandbox._process.pid).children()
    return server.children(recursive=True)


@pytest.fixture(autouse=True)
def nothing_is_left(sandbox: Sandbox) -> Iterator[None]:
    yield
    assert not inhabitants(sandbox)
    assert run(sandbox, "print(input())", "alive") == ("ok", "alive\n")


def test_a_program_reads_its_input_and_writes_its_output(sandbox: Sandbox) -> None:
    assert run(sandbox, "print(sum(map(int, input().split())))", "3 4\n") == ("ok", "7\n")
    assert run(sandbox, "print(1); exit()") == ("ok", "1\n")
    assert run(sandbox, "print(1); exit(3)")[0] == "failed"
    assert run(sandbox, "1 / 0")[0] == "failed"
    big = "x" * 30_000
    assert run(sandbox, "print(input()[::-1])", big) == ("ok", big + "\n")


def test_what_a_program_may_still_do(sandbox: Sandbox) -> None:
    """Processes, signals between them, threads, temporary files and event loops work."""
    program = """
import asyncio, multiprocessing, os, tempfile, threading, time
async def later(): return 5
with tempfile.NamedTemporaryFile() as file: file.write(b"x")
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
process = multiprocessing.Process(target=time.sleep, args=(20,)); process.start()
process.terminate(); process.join(); print(process.exitcode)
print(asyncio.run(later()), sorted(os.environ), os.environ["HOME"] == os.getcwd())
"""
    assert run(sandbox, program) == (
        "ok",
        "thread\n-15\n5 ['HOME', 'LANG', 'PATH', 'TMPDIR'] True\n",
    )


def test_a_fork_bomb(hurried: Sandbox) -> None:
    assert run(hurried, BOMB) == ("ok", "stopped\n")
    program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(hurried, program)[0] == "time" and not inhabitants(hurried)


def test_an_endless_loop(hurried: Sandbox) -> None:
    for program in ("while True: pass", "import time\ntime.sleep(100)"):
        began = time.monotonic()
        assert run(hurried, program)[0] == "time"
        assert time.monotonic() - began < 60


MEMORY = {
    "at once": "x = bytearray(10 << 30)",
    "bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "shared": "import mmap\nx = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 4096): x[i] = 1",
    "by children": """
import os, time
for _ in range(6):
    if not os.fork():
        x = bytearray(b"1" * (60 << 20))
        time.sleep(5)
time.sleep(5)
""",
    "of no process": """
import os
f = os.memfd_create("x")
for _ in range(300): os.write(f, bytes(1 << 20))
""",
}


@pytest.mark.parametrize("how", MEMORY)
def test_memory(sandbox: Sandbox, how: str) -> None:
    status, _ = run(sandbox, MEMORY[how])
    assert status == "memory" if how == "by children" else status in ("failed", "memory")


def test_endless_output(sandbox: Sandbox) -> None:
    program = "import os\nfor _ in range(10 << 10): os.write(1, bytes(1 << 20))"
    [result] = sandbox.run("stdin", program, [""], total_s=8.0)
    assert result == {"status": "output"}


def test_writing_outside_of_the_folder(
    sandbox: Sandbox, unprotected: Sandbox, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    places = ["/x", "/etc/passwd", "/usr/x", f"{sys.base_prefix}/x", "/proc/x", "/dev/x"]
    program = f"""
import os, sys
done = []
for place in {[*places, str(tmp_path / "x"), sys.executable]}:
    for way in (lambda: open(place, "a").close(), lambda: os.mkdir(place + "_"), lambda: os.chmod(place, 0o777)):
        try: way(); done.append(place)
        except OSError: pass
print(done)
"""
    assert run(sandbox, program) == ("ok", "[]\n")
    assert not list(tmp_path.iterdir())
    harmful = f"open({str(tmp_path / 'y')!r}, 'w').close()"
    assert run(sandbox, harmful)[0] == "failed" and not list(tmp_path.iterdir())
    assert run(unprotected, harmful)[0] == "ok" and list(tmp_path.iterdir())


def test_reading_what_is_the_hosts(sandbox: Sandbox, unprotected: Sandbox, tmp_path: Path) -> None:
    """Environments of other processes, files of the host through every /proc path."""
    (tmp_path / "secret").write_text("1")
    tmp_path.chmod(0o755)
    own = [entry for entry in Path("/proc/self/environ").read_bytes().split(b"\0") if entry]
    marker = max(own, key=len)
    program = f"""
import os
found = []
for process in [*os.listdir("/proc"), {os.getpid()!r}, os.getppid()]:
    try:
        if {marker!r} in open(f"/proc/{{process}}/environ", "rb").read(): found.append("environ")
    except OSError: pass
    for place in ("root", "cwd"):
        try: open(f"/proc/{{process}}/{{place}}{tmp_path}/secret"); found.append(place)
        except OSError: pass
os.symlink({str(tmp_path)!r}, "link")
for place in ({str(tmp_path)!r}, "link", "/usr/../" + {str(tmp_path)!r}):
    try: open(place + "/secret"); found.append(place)
    except OSError: pass
    try: os.listdir(place); found.append(place)
    except OSError: pass
    try: os.link(place + "/secret", "hard"); found.append(place)
    except OSError: pass
print(len(found))
"""
    assert run(sandbox, program.replace('*os.listdir("/proc")', "1")) == ("ok", "0\n")
    status, output = run(unprotected, program)
    assert status == "ok" and int(output) >= 4


def test_homes_are_hidden(sandbox: Sandbox) -> None:
    """Only folders that the interpreter needs can be listed."""
    program = """
import os
for place in ("/", "/home", "/root", "/tmp", "/proc", "/dev/shm", ".."):
    try: print(os.listdir(place))
    except OSError: pass
print(len(os.listdir("/usr")) > 0)
"""
    assert run(sandbox, program) == ("ok", "True\n")


def test_kernel_settings(sandbox: Sandbox) -> None:
    program = """
done = []
for place in ("sys/kernel/hostname", "sys/vm/drop_caches", "sysrq-trigger", "1/oom_score_adj", "sys/kernel/core_pattern"):
    try: open("/proc/" + place, "r+b"); done.append(place)
    except OSError: pass
print(done)
"""
    assert run(sandbox, program) == ("ok", "[]\n")


def test_sockets(sandbox: Sandbox, unprotected: Sandbox) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.chmod(folder, 0o755)
        heard = [stack.enter_context(socket.socket(family)) for family in (2, 1, 1)]
        heard[0].bind(("127.0.0.1", 0))
        heard[1].bind(f"{folder}/s")
        heard[2].bind(f"\0megarl{os.getpid()}")
        os.chmod(f"{folder}/s", 0o777)
        for one in heard:
            one.listen()
        program = f"""
import socket
done = 0
for family, address in ((2, {heard[0].getsockname()!r}), (1, "{folder}/s"), (1, "\\0megarl{os.getpid()}")):
    try:
        with socket.socket(family) as one: one.connect(address)
        done += 1
    except OSError: pass
print(done)
"""
        assert run(sandbox, program) == ("ok", "0\n")
        assert run(unprotected, program) == ("ok", "3\n")


def test_killing_others(sandbox: Sandbox, unprotected: Sandbox) -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        program = f"""
import os, signal
for process in ({victim.pid}, {os.getpid()}, os.getppid(), 1, 0, -1):
    if process in (0, -1): signal.signal(9 + 6, signal.SIG_IGN)
    try: os.kill(process, 15 if process < 1 else 9)
    except OSError: pass
print("done")
"""
        assert run(sandbox, program) == ("ok", "done\n")
        assert victim.poll() is None
        assert run(unprotected, f"import os\nos.kill({victim.pid}, 9)") == ("ok", "")
        assert victim.wait(5) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()


CALLS = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if not child:
    time.sleep(20)
    os._exit(0)
buffer = ctypes.create_string_buffer(64)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
calls = {
    "ptrace": lambda: libc.ptrace(16, child, 0, 0),
    "process_vm_readv": lambda: libc.process_vm_readv(child, vector, 1, vector, 1, 0),
    "clone": lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0),
    "unshare": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"none", b"/usr", b"tmpfs", 0, None),
    "remount": lambda: libc.mount(None, b"/", None, 32, None),
    "umount2": lambda: libc.umount2(b"/proc", 2),
    "chroot": lambda: libc.chroot(b"/usr"),
    "setns": lambda: libc.setns(0, 0),
    "socketpair": lambda: libc.socketpair(1, 2, 0, buffer),
    "shmget": lambda: libc.shmget(0, 100, 0o1600),
    "keyctl": lambda: libc.syscall(250, 0, -3, 1),
    "bpf": lambda: libc.syscall(321, 0, buffer, 0),
    "setuid": lambda: libc.setuid(0),
    "sethostname": lambda: libc.sethostname(b"x", 1),
}
for name, call in calls.items():
    ctypes.set_errno(0)
    result = call()
    if name == "clone" and result == 0: os._exit(0)
    if result != -1: print(name)
os.kill(child, 9)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls of x86_64")
def test_system_calls(sandbox: Sandbox, unprotected: Sandbox) -> None:
    assert run(sandbox, CALLS) == ("ok", "")
    # Those that would change the machine are left out.
    safe = CALLS.replace('"umount2"', '#"').replace('"remount"', '#"').replace('"mount"', '#"')
    safe = safe.replace('"chroot"', '#"').replace('"sethostname"', '#"').replace('"setuid"', '#"')
    _, output = run(unprotected, safe)
    of_root = {"unshare", "clone"} if IS_ROOT else set()
    assert {"ptrace", "process_vm_readv", "keyctl", *of_root} <= set(output.split())


BOMB = """
import os, time
try:
    for _ in range(500):
        if not os.fork(): time.sleep(9)
except OSError: print('stopped')
"""
DAEMON = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        for number in range(3): os.close(number)
        time.sleep(30)
        os._exit(0)
    os._exit(0)
os.wait()
print("left")
"""


def test_a_daemon_is_not_left_behind(sandbox: Sandbox, unprotected: Sandbox) -> None:
    assert run(sandbox, DAEMON) == ("ok", "left\n")
    assert not inhabitants(sandbox)
    marked = f"{DAEMON}\n# {os.getpid()}-{time.time_ns()}"
    assert python("-c", marked).stdout == "left\n"
    processes = psutil.process_iter(["cmdline"])
    left = [one for one in processes if marked in (one.info["cmdline"] or [])]
    assert left  # an attack it is
    for one in left:
        one.kill()
    # `rlimits` and `none` adopt what is left and kill it
    began = {one.pid for one in psutil.Process().children(recursive=True)}
    assert run(unprotected, DAEMON) == ("ok", "left\n")
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= began


def test_filling_the_folder(sandbox: Sandbox) -> None:
    program = """
for number in range(10**5):
    with open(f"f{number}", "wb", buffering=0) as file:
        for _ in range(16): file.write(bytes(1 << 16))
"""
    assert run(sandbox, program)[0] == "memory"
    for names in ("open(f'f{i}', 'w').close()", "os.makedirs(f'{i % 9}/{i}')"):
        assert run(sandbox, f"import os\nfor i in range(10**6): {names}")[0] == "memory"
    big = "with open('f', 'wb') as file:\n    file.truncate(5 << 20)\nprint('made')"
    assert run(sandbox, big)[1] == ""
    assert run(sandbox, "import os\nprint(os.listdir('.'))") == ("ok", "['program']\n")


def test_opening_many_files(sandbox: Sandbox) -> None:
    program = """
import os
held = []
try:
    while True: held.append(os.open("/dev/null", 0))
except OSError as error: print(error.errno, len(held))
"""
    status, output = run(sandbox, program)
    number, count = map(int, output.split())
    assert (status, number) == ("ok", 24) and count < 200  # EMFILE


def test_tests_share_nothing(sandbox: Sandbox) -> None:
    program = """
import os
print(sorted(os.listdir(".")))
open("left", "w").close()
os.fork() or __import__("time").sleep(5)
"""
    results = sandbox.run("stdin", program, ["", ""], total_s=8.0)
    assert [one["output"] for one in results] == ["['program']\n"] * 2


def test_a_server_that_is_killed_is_replaced(sandbox: Sandbox) -> None:
    with closing(Sandbox(SETTINGS)) as made:
        assert made._process is not None
        made._process.terminate()
        with pytest.raises(RuntimeError, match="server process does not answer"):
            run(made, "print(1)")
        assert run(made, "print(1)") == ("ok", "1\n")


def test_nothing_outlives_the_verifiers_process() -> None:
    """A process with a sandbox in which a program runs is killed by force."""
    script = """
import sys
from megarl.settings.code import CodeConfig
from megarl.apps.verifiers.code.sandbox import Sandbox
sandbox = Sandbox(CodeConfig(time_limit_s=60.0))
print(sandbox._process.pid, flush=True)
sandbox.run("stdin", "import os, time\\nos.fork() or os.setsid()\\nos.fork()\\ntime.sleep(50)", [""], total_s=60.0)
"""
    with started(script) as (_, said):
        server = psutil.Process(int(said))
        # Below the overseer: the server, four of the program.
        until(lambda: len(server.children(recursive=True)) >= 5)
        inside = [server, *server.children(recursive=True)]
    _, alive = psutil.wait_procs(inside, timeout=10)
    assert not alive


def test_without_landlock_auto_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = {"sandbox": "auto", "folder": "/nowhere"}
    monkeypatch.setattr(sandbox_child, "landlock_version", lambda: 2)
    refused = sandbox_child.Programs(setup).refusal()
    assert "no Landlock of version 3" in refused
    assert "set environment.code.sandbox to rlimits or none" in refused


def test_before_linux_6_12_no_signal_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to a process of the program's own: Landlock could not tell it from others."""
    script = """
import contextlib, os, signal
from megarl.apps.verifiers.code.sandbox_child import CALLS, SIGNALS
from megarl.environments import isolation
isolation.SCOPES_SINCE = 99
assert isolation.enter_own_domain(folder="/tmp", visible=["/usr"])
isolation.filter_calls(alone=True, more=CALLS | SIGNALS)
for send in (os.kill, signal.pthread_kill):
    try: send(os.getppid(), 0); print("sent")
    except OSError: print("refused")
"""
    done = python("-c", script)
    assert done.stdout.startswith("refused\n") and "sent" not in done.stdout, done.stderr


ROOT_ONLY = pytest.mark.skipif(
    not (IS_ROOT and SYSTEM_PYTHON), reason="needs root and a Python that all may run"
)


def without(capability: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python of root that has not this capability, such as root in a container."""
    as_less = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]
    command = [*as_less, sys.executable, "-c", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@ROOT_ONLY
@pytest.mark.parametrize("capability", ["chown", "setuid", "kill"])
def test_root_that_may_not_start_programs_is_one_line(capability: str) -> None:
    script = """
from megarl.apps.verifiers.code.sandbox import Sandbox
from megarl.settings.code import CodeConfig
try: Sandbox(CodeConfig())
except ValueError as error: print(error)
"""
    done = without(capability, script)
    assert "Traceback" not in done.stderr and done.stdout.count("\n") == 1, done.stderr
    assert f"lacks the capabilities ['{capability.upper()}']" in done.stdout


@ROOT_ONLY
def test_a_program_of_root_reaches_its_home_below_a_closed_folder(tmp_path: Path) -> None:
    """As the run's folder is, without the capability to read all, which Docker does not give."""
    script = """
import sys, tempfile
from megarl.apps.verifiers.code.sandbox import Sandbox
from megarl.settings.code import CodeConfig
tempfile.tempdir = sys.argv[1]
made = Sandbox(CodeConfig(interpreter=(sys.argv[2], "-I", "-S")))
program = "import os, tempfile\\nfile = tempfile.NamedTemporaryFile()\\n"
program += "print(sorted(os.listdir(os.environ['HOME'])) == ['program', os.path.basename(file.name)])"
print(made.run("stdin", program, [""], total_s=8.0))
made.close()
"""
    tmp_path.chmod(0o700)
    done = without("dac_read_search", script, str(tmp_path), str(SYSTEM_PYTHON))
    assert done.stdout == "[{'status': 'ok', 'output': 'True\\n'}]\n", done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@NEEDS_PYTHON
def test_limits_alone(tmp_path: Path) -> None:
    """`sandbox: rlimits` bounds memory, time and processes; it hides no file."""
    settings = replace(LIMITS, memory_mib=128)
    if IS_ROOT:
        hidden = tmp_path / "hidden"
        hidden.write_text("")
        hidden.chmod(0o700)
        with pytest.raises(ValueError, match="who may not run"):
            Sandbox(replace(settings, interpreter=(str(hidden),)))
    with closing(Sandbox(settings)) as made:
        assert run(made, "print(input())", "x") == ("ok", "x\n")
        assert run(made, MEMORY["at once"])[0] == "failed"
        assert run(made, "while True: pass")[0] == "time"
        assert run(made, BOMB) == ("ok", "stopped\n")
        assert run(made, DAEMON) == ("ok", "left\n")
        assert not inhabitants(made)


FLEES = """
import os, time
print("left", flush=True)
end = time.time() + 25
if os.fork(): os._exit(0)
for _ in range(3):
    try: os.fork()
    except OSError: pass
while time.time() < end:
    try:
        if os.fork(): os._exit(0)
    except OSError: pass
"""


@NEEDS_PYTHON
def test_processes_that_fork_and_end_all_the_time_are_caught(tmp_path: Path) -> None:
    """None is running when the verdict comes, and no folder is left."""
    before = set(Path(tempfile.gettempdir()).glob(f"{FOLDER}*"))
    with closing(Sandbox(LIMITS)) as made:
        for _ in range(3):
            assert run(made, FLEES) == ("ok", "left\n")
            assert not inhabitants(made)
    assert not set(Path(tempfile.gettempdir()).glob(f"{FOLDER}*")) - before


def test_a_sandbox_whose_server_is_killed_leaves_no_program() -> None:
    """The overseer above it kills what the program has started."""
    made = Sandbox(replace(SETTINGS, time_limit_s=8.0))
    seen: list[psutil.Process] = []

    def kill() -> None:
        until(lambda: len(inhabitants(made)) >= 4)
        seen[:] = inhabitants(made)
        seen[0].parent().kill()  # type: ignore[union-attr]

    killer = threading.Thread(target=kill)
    with closing(made):
        assert run(made, "print(input())", "x") == ("ok", "x\n")
        killer.start()
        with pytest.raises(RuntimeError, match="does not answer"):
            run(made, "import os, time\nos.fork(); os.fork(); time.sleep(25)")
        killer.join(20)
        assert len(seen) >= 4 and not any(one.is_running() for one in seen)


@ROOT_ONLY
def test_an_ordinary_user_is_protected_in_the_same_way(tmp_path: Path) -> None:
    """Without root the programs have the user's own id, and no other."""
    own = tempfile.NamedTemporaryFile(dir="/tmp")  # noqa: SIM115 - closed with this test
    os.chown(own.name, 1000, 1000)
    programs = {
        "right": "print(input())",
        "bomb": BOMB,
        "kill": f"import os\nfor p in ({os.getpid()}, os.getppid(), 1, -1):\n    try: os.kill(p, 0 if p != 1 else 9)\n    except OSError: print(p > 1)",
        "home": "import os\nos.listdir('/')",
        "memory": "x = bytearray(10 << 30)",
        "first": "open('/proc/1/mem', 'rb').read(1)",
        "write": f"open({str(tmp_path)!r} + '/x', 'w')",
        "daemon": DAEMON,
        "mode": f"import os\nos.chmod({own.name!r}, 0)",
        "times": f"import os\nos.utime({own.name!r}, (1, 1))",
    }  # fmt: skip
    settings = CodeConfig(time_limit_s=2.0, memory_mib=128, processes=8)
    script = f"""
import json, os, types
from megarl.apps.verifiers.code.sandbox import Sandbox
assert os.getuid() == 1000
made = Sandbox(types.SimpleNamespace(**{settings.model_dump()!r}))  # this Python has no pydantic
found = {{}}
for name, program in {programs!r}.items():
    [result] = made.run("stdin", program, ["x"], total_s=8.0)
    found[name] = [result["status"], result.get("output", "")]
print(json.dumps(found))
"""
    tmp_path.chmod(0o777)
    done = subprocess.run(
        [str(SYSTEM_PYTHON), "-c", script],
        capture_output=True, text=True, user=1000, group=1000, extra_groups=[], cwd="/",
        env={"PYTHONPATH": str(ROOT)}, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["right"] == ["ok", "x\n"]
    assert found["bomb"] == ["ok", "stopped\n"]
    assert found["daemon"] == ["ok", "left\n"]
    assert found["kill"][0] == "ok"
    attacks = ("home", "memory", "first", "write", "mode", "times")
    assert {found[name][0] for name in attacks} == {"failed"}
    assert os.stat(own.name).st_mode & 0o777 == 0o600 and os.stat(own.name).st_mtime > 1
    assert not list(tmp_path.iterdir())

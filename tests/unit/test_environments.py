"""Verifiers, their pool, and rewards: a verifier may raise, hang, die or babble, and costs its own
sample only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import python, started
from support.environments import PROMPT, ask, opened, run, together

from megarl.apps.verifiers.notation import plain_number
from megarl.environments.isolation import MOVES_SINCE, SCOPES_SINCE, landlock_version
from megarl.environments.scoring import Environment, overlong_penalty
from megarl.environments.trial import check_verifier
from megarl.environments.verifiers import VERIFIERS
from megarl.settings.environments import EnvironmentConfig, OverlongConfig, RemoteConfig
from megarl.settings.verifiers import (
    ChoiceConfig,
    FormatConfig,
    JsonSchemaConfig,
    LengthConfig,
    RegexConfig,
)
from megarl.types import Prompt, Verdict

OWN = """
import asyncio, math, os, re, subprocess, sys, time
from pathlib import Path

LIMIT = 3
SLEEP = ["sh", "-c", "echo $$; exec sleep 1000"]
STARTED = {
    "child": dict(args=SLEEP),
    "session": dict(args=SLEEP, start_new_session=True),
    "orphan": dict(args=["sh", "-c", "setsid sleep 1000 & echo $!"]),
    "bare": dict(args=SLEEP, start_new_session=True, env={}),
}

def judge(prompt, response):
    if response == "raise": raise RuntimeError("no \\u00fcse \\ud800")
    if response == "loop":
        while True: pass
    # inside C, the interpreter never gets a word in
    if response == "regex": re.match(r"(a+)+$", "a" * 60 + "b")
    if response == "sleep": time.sleep(1000)
    if response == "die": os.kill(os.getpid(), 11)
    if response == "exit": sys.exit(3)
    if response in STARTED:
        started = subprocess.Popen(stdout=subprocess.PIPE, **STARTED[response])
        Path(prompt.fields["file"]).write_text(started.stdout.readline().decode())
        time.sleep(1000)
    if response == "babble":
        print("x" * 100_000); sys.stdin.read(); os.write(1, b"y" * 1000)
    if response in ("nan", "inf"): return float(response)
    if response == "none": return None
    if response == "text": return "1.0"
    if response == "three": return 3.0
    if response == "half": return 0.5
    if response == "pid": Path(prompt.fields["file"]).write_text(str(os.getpid()))
    if response == "wait": time.sleep(0.2)
    return response.endswith(prompt.answer)

async def judge_later(prompt, response):
    await asyncio.sleep(0.01)
    return judge(prompt, response)

def neighbour(prompt, response):
    import beside
    return beside.VALUE

def _hidden(prompt, response): return 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("VALUE = 1.0\n")
    return str(tmp_path / "own.py")


def score(
    environment: Environment, text: str, prompt: Prompt = PROMPT, **changes: Any
) -> Awaitable[Verdict]:
    return environment.score(prompt, text, **{"num_tokens": 5, "truncated": False, **changes})


def writes_to(folder: Path) -> Prompt:
    """A prompt at which the verifier of one's own writes a process's number into folder/pid."""
    return replace(PROMPT, fields={"file": str(folder / "pid")})


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Did process `pid` end? A zombie that waits for its reaper has."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


# Verifiers


@pytest.mark.parametrize(
    ("marker", "response", "right"),
    [
        ("", "7", True), ("", " 7\n", True), ("", "#7", False), ("", "", False),
        ("#", "3+4+0=07#7", True), ("#", "1#2#7", True), ("#", "7", False), ("#", "#7#", False),
        ("#", "#7#8", False), ("#", "#07", False), ("", "77", False),
    ],
)  # fmt: skip
def test_exact_match(marker: str, response: str, right: bool) -> None:
    assert ask(EnvironmentConfig(answer_after=marker), "7", response) == float(right)
    assert ask(EnvironmentConfig(answer_after=marker), " 7 ", response) == float(right)


@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["{}", "{:,}", "${:,}", "$ {}", "{}.", "{:,}.00", "{} dollars", "\\${:,}"]),
)
def test_a_plain_number_is_read_in_any_dress(value: int, dress: str) -> None:
    assert plain_number(dress.format(value)) == value


NEEDED: dict[str, dict[str, Any]] = {
    "regex": {"regex": RegexConfig(pattern="[0-9]+")},
    "json_schema": {"json_schema": JsonSchemaConfig(schema='{"type": "array"}', value="0")},
    "choice": {"choice": ChoiceConfig(labels="78")},
    "format": {"format": FormatConfig(tags=("b",), alone=True)},
    "length": {"length": LengthConfig(unit="characters", shortest=1, longest=2)},
}
"""{verifier: settings that it needs, or that make it judge the responses below}"""
RESPONSES = {"json_schema": ("[7]", "[8]"), "format": ("<b></b>", "<b>"), "length": ("7", "77")}


@pytest.mark.parametrize("name", sorted(VERIFIERS.keys() - {"none", "code", "reasoning_gym"}))
def test_every_verifier_of_the_house_runs_in_an_environment(name: str) -> None:
    config = EnvironmentConfig(verifier=name, wrong=-1.0, **NEEDED.get(name, {}))
    right, wrong = together(config, *RESPONSES.get(name, ("7", "8")))
    assert right == Verdict(reward=1.0, correct=True)
    assert wrong == Verdict(reward=-1.0, correct=False)


def test_without_a_verifier_every_response_is_wrong() -> None:
    for verdict in together(EnvironmentConfig(verifier="none"), "7", "8"):
        assert verdict == Verdict(reward=0.0, correct=False)


def test_verifiers_of_ones_own(own: str) -> None:
    for function in ("judge", "judge_later"):
        config = EnvironmentConfig(verifier=f"{own}:{function}", correct=2.0, wrong=-1.0)
        found = [(one.reward, one.correct) for one in together(config, "half", "=7", "=8")]
        assert found == [(0.5, False), (2.0, True), (-1.0, False)]
    assert together(EnvironmentConfig(verifier=f"{own}:neighbour"), "x")[0].correct


BAD = {
    "mathz": "is 'mathz'; set it to one of exact_match, math, .*none, or to path/to/file.py:function",
    "none.py:judge": "there is no file none.py",
    "{own}:nothing": "has no function 'nothing'; set one of: judge, judge_later, neighbour",
    "{own}:LIMIT": "'LIMIT' of .* is int, not a function; set one of: judge",
    "{folder}/broken.py:judge": (
        r"broken\.py does not import: ModuleNotFoundError \(broken.py, line 1\): No module named 'nowhere'; mend the file"
    ),
    "{folder}/exits.py:judge": r"exits\.py does not import: SystemExit \(exits.py, line 2\): need config; mend the file",
    "{folder}/dies.py:judge": "its process ended with exit code 3 at start",
}


@pytest.mark.parametrize("name", BAD)
def test_a_verifier_that_cannot_be_loaded_stops_the_run(
    name: str, own: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import nowhere\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit('need config')\n")
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    full = name.format(own=own, folder=tmp_path)
    with pytest.raises(ValueError, match=BAD[name]):
        run(EnvironmentConfig(verifier=full), Environment.start)


# The pool


def test_a_failure_costs_its_own_sample_only(own: str) -> None:
    bad = {
        "raise": ("error", "RuntimeError (own.py, line 15): no \u00fcse \ud800"),
        "loop": ("response_limit", "no verdict within environment.time_limit_s = 0.5 s"),
        "regex": ("response_limit", "no verdict"),
        "sleep": ("timeout", "no verdict"),
        "die": ("error", "the verifier's process ended by signal SIGSEGV"),
        "exit": ("error", "SystemExit (own.py, line 22): 3"),
        "nan": ("nan", "returned nan, not a finite number"),
        "inf": ("nan", "returned inf, not a finite number"),
        "none": ("", ""),
        "text": ("nan", "returned '1.0', not a finite number"),
        "three": (
            "error",
            "returned 3, but environment.correct and environment.wrong map scores from 0 (wrong) to 1",
        ),
    }
    good = [f"{n}=7" for n in range(30)]
    texts = [text for pair in zip(good, [*bad, *[""] * 19], strict=True) for text in pair if text]
    config = EnvironmentConfig(verifier=f"{own}:judge", num_workers=2, time_limit_s=0.5, wrong=-1.0)
    for text, verdict in zip(texts, together(config, *texts), strict=True):
        if text in bad:
            failure, detail = bad[text]
            found = (verdict.reward, verdict.correct, verdict.failure)
            assert found == (-1.0, False, failure), text
            assert verdict.left_out == (failure != "response_limit"), text
            assert detail in verdict.detail
        else:
            assert verdict == Verdict(reward=1.0, correct=True), text


def test_a_verifier_may_print_and_read(own: str, capfd: pytest.CaptureFixture[str]) -> None:
    babble, after = together(EnvironmentConfig(verifier=f"{own}:judge"), "babble", "=7")
    assert babble == Verdict(reward=0.0, correct=False)
    assert after.correct
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("y") == 1000


def test_large_responses_pass(own: str) -> None:
    assert together(EnvironmentConfig(verifier=f"{own}:judge"), "x" * 5_000_000 + "7")[0].correct


def test_time_waiting_for_a_worker_is_not_counted(own: str) -> None:
    config = EnvironmentConfig(verifier=f"{own}:judge", time_limit_s=0.8)
    assert [verdict.failure for verdict in together(config, *["wait"] * 10)] == [""] * 10


@pytest.mark.parametrize("what", ["child", "session", "orphan", "bare"])
def test_what_a_killed_verifier_started_is_killed_too(what: str, own: str, tmp_path: Path) -> None:
    config = EnvironmentConfig(verifier=f"{own}:judge", time_limit_s=0.5)
    (verdict,) = together(config, what, prompt=writes_to(tmp_path))
    assert verdict.failure == "timeout"
    assert gone(int((tmp_path / "pid").read_text()))


async def test_a_worker_killed_between_verdicts_is_replaced(own: str, tmp_path: Path) -> None:
    async with opened(EnvironmentConfig(verifier=f"{own}:judge")) as environment:
        await score(environment, "pid", writes_to(tmp_path))
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        first, second = [await score(environment, "=7"), await score(environment, "=7")]
    assert first.correct, "nothing had been judged yet, so the request is given to the replacement"
    assert second.correct
    assert "by signal SIGKILL between two calls, and is replaced" in first.warning
    assert not second.warning


async def test_closing_ends_workers_and_requests_in_flight(own: str, tmp_path: Path) -> None:
    environment = Environment(EnvironmentConfig(verifier=f"{own}:judge", time_limit_s=1000.0))
    await score(environment, "pid", writes_to(tmp_path))
    waiting = [asyncio.ensure_future(score(environment, "sleep")) for _ in range(3)]
    await asyncio.sleep(0.2)
    await environment.close()
    with pytest.raises(RuntimeError):
        await score(environment, "=7")
    in_flight, *queued = await asyncio.gather(*waiting, return_exceptions=True)
    assert in_flight.failure == "error"
    assert [type(outcome) for outcome in queued] == [RuntimeError] * 2
    assert gone(int((tmp_path / "pid").read_text()))


ORPHANED = """
import asyncio, sys
from megarl.settings.environments import EnvironmentConfig
from megarl.environments.scoring import Environment
from megarl.types import Prompt

async def main():
    environment = Environment(EnvironmentConfig(verifier=sys.argv[1], time_limit_s=1000.0))
    prompt = Prompt(0, "", [], "7", {"file": sys.argv[2]})
    await environment.score(prompt, "pid", 1, False)
    print("ready", flush=True)
    await environment.score(prompt, "loop", 1, False)

asyncio.run(main())
"""
"""A process with a worker that hangs; the worker's number is in the file."""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's death"
)
def test_workers_die_with_a_parent_killed_by_force(own: str, tmp_path: Path) -> None:
    with started(ORPHANED, f"{own}:judge", str(tmp_path / "pid")) as (_, said):
        assert said == "ready"
        worker = int((tmp_path / "pid").read_text())
        assert not gone(worker, within_s=0.3)
    assert gone(worker)


@pytest.mark.parametrize("verifier", ["exact_match", "math"])
async def test_verdicts_share_a_process(monkeypatch: pytest.MonkeyPatch, verifier: str) -> None:
    processes: list[Any] = []
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: processes.append(a) or start(*a, **k))
    async with opened(EnvironmentConfig(verifier=verifier, answer_after="####")) as environment:
        await environment.start()
        made = await asyncio.gather(*[score(environment, f"#### {n}") for n in range(256)])
        assert sum(verdict.correct for verdict in made) == 1
    assert len(processes) == 1


def test_starting_loads_no_torch(own: str) -> None:
    Path(own).write_text(
        "import sys\ndef judge(prompt, response): return 'torch' not in sys.modules\n"
    )
    assert together(EnvironmentConfig(verifier=f"{own}:judge"), "x")[0].correct


# Rewards


def test_overlong_penalty_is_dapo_equation_13() -> None:
    config = OverlongConfig(limit_tokens=48, buffer_tokens=12)
    penalties = {0: 0.0, 36: 0.0, 39: -0.25, 42: -0.5, 47: -11 / 12, 48: -1.0, 60: -1.0}
    found = {count: overlong_penalty(config, count) for count in penalties}
    assert found == pytest.approx(penalties, abs=1e-12)
    assert overlong_penalty(OverlongConfig(), 60) == 0.0


@pytest.mark.parametrize(
    ("text", "num_tokens", "truncated", "expected"),
    [
        ("7", 5, False, Verdict(reward=1.0, correct=True)),
        ("8", 5, False, Verdict(reward=-1.0, correct=False)),
        ("7", 42, False, Verdict(reward=0.5, correct=True, penalty=-0.5)),
        ("8", 48, False, Verdict(reward=-2.0, correct=False, penalty=-1.0)),
        ("7", 48, True, Verdict(reward=-2.0, correct=False, penalty=-1.0, judged=False)),
    ],
)
def test_rewards(text: str, num_tokens: int, truncated: bool, expected: Verdict) -> None:
    config = EnvironmentConfig(
        wrong=-1.0, overlong=OverlongConfig(limit_tokens=48, buffer_tokens=12)
    )
    assert run(config, lambda made: made.score(PROMPT, text, num_tokens, truncated)) == expected


def test_a_truncated_response_asks_no_verifier(own: str) -> None:
    strict = EnvironmentConfig(verifier=f"{own}:judge")
    assert run(strict, lambda made: score(made, "raise", truncated=True)) == Verdict(
        reward=0.0, correct=False, judged=False
    )
    lenient = EnvironmentConfig(verifier=f"{own}:judge", require_stop=False)
    assert run(lenient, lambda made: score(made, "=7", truncated=True)).correct
    assert run(lenient, lambda made: score(made, "raise", truncated=True)).failure == "error"


SECRETS = ("RAY_AUTH_TOKEN", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, ()),
        ({"pass_variables": ("HF_TOKEN", "WANDB_API_KEY")}, ("HF_TOKEN", "WANDB_API_KEY")),
        ({"isolate": False}, SECRETS),
    ],
)
def test_which_secrets_a_verifier_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], seen: Sequence[str]
) -> None:
    """Its words end up in transcripts, and the cluster's token would let it run anything; a judge
    behind an interface needs its key.
    """
    for name in SECRETS:
        monkeypatch.setenv(name, f"hush-{name}")
    file = tmp_path / "spy.py"
    file.write_text(
        "import os\ndef spy(prompt, response):\n"
        "    raise RuntimeError(repr({n: v for n, v in os.environ.items() if n in prompt.fields}))\n"
    )
    prompt = replace(PROMPT, fields=dict.fromkeys([*SECRETS, "PATH"]))
    config = EnvironmentConfig(verifier=f"{file}:spy", **settings)
    (found,) = together(config, "anything", prompt=prompt)
    assert found.failure == "error" and "PATH" in found.detail
    assert {name for name in SECRETS if f"hush-{name}" in found.detail} == set(seen)


def test_a_variable_to_pass_that_is_not_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text("def score(prompt, response):\n    return 1.0\n")
    verifier = f"{tmp_path}/one.py:score"
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"pass_variables names JUDGE_API_KEY, but .* not set"):
        check_verifier(EnvironmentConfig(verifier=verifier, pass_variables=("JUDGE_API_KEY",)))
    for key in ("sk-hush", "hf_hush", ""):
        with pytest.raises(
            ValueError, match=r"environment.pass_variables holds what is no"
        ) as told:
            EnvironmentConfig(verifier=verifier, pass_variables=("HF_TOKEN", key))
        assert "hush" not in str(told.value)
    remote = RemoteConfig(token_variable="REWARD_TOKEN")  # noqa: S106
    with pytest.raises(ValueError, match="names REWARD_TOKEN, which is kept from all verifiers"):
        EnvironmentConfig(verifier="http://host/", remote=remote, pass_variables=("REWARD_TOKEN",))


SPY = """import os, subprocess
def spy(prompt, response):
    kept = []
    for name, act in {
        "environ": lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(),
        "memory": lambda: open(f"/proc/{os.getppid()}/mem", "rb").close(),
        "files": lambda: os.readlink(f"/proc/{os.getppid()}/fd/0"),
        "own": lambda: open("/proc/self/environ", "rb").read(),
        "child": lambda: subprocess.run(
            ["cat", f"/proc/{os.getppid()}/environ"], check=True, capture_output=True
        ),
        "signal": lambda: os.kill(os.getppid(), 0),
    }.items():
        try:
            act()
        except (OSError, subprocess.CalledProcessError):
            kept.append(name)
    raise RuntimeError(f"kept: {kept}")
"""


@pytest.mark.skipif(landlock_version() < SCOPES_SINCE, reason="needs Landlock of Linux 6.12")
@pytest.mark.parametrize("isolate", [True, False])
def test_a_verifier_cannot_look_into_other_processes(tmp_path: Path, isolate: bool) -> None:
    """Secrets of the run are in the environment variables of the processes beside it."""
    file = tmp_path / "spy.py"
    file.write_text(SPY)
    (found,) = together(EnvironmentConfig(verifier=f"{file}:spy", isolate=isolate), "anything")
    kept = ["environ", "memory", "files", "child", "signal"] if isolate else []
    assert f"kept: {kept}" in found.detail


@pytest.mark.skipif(landlock_version() < MOVES_SINCE, reason="needs Landlock of Linux 5.19")
def test_an_isolated_process_can_use_the_sandbox(tmp_path: Path) -> None:
    """A mixture of a user's verifier and `code`: a domain inside a domain."""
    program = """
from megarl.settings.code import CodeConfig
from megarl.environments.isolation import enter_own_domain
from megarl.apps.verifiers.code.sandbox import Sandbox
assert enter_own_domain()
sandbox = Sandbox(CodeConfig())
print(sandbox.run("stdin", "print(6 * 7)", [""], total_s=10.0)[0]["output"])
sandbox.close()
"""
    done = python("-c", program)
    assert "42\n" in done.stdout, done.stderr + done.stdout


@pytest.mark.skipif(landlock_version() < MOVES_SINCE, reason="needs Landlock of Linux 5.19")
def test_an_older_kernel_keeps_processes_apart_and_lets_files_move(tmp_path: Path) -> None:
    """Before Linux 6.12 a domain restricts files, and must still allow what code does with them."""
    program = f"""
import os
from megarl.environments import isolation
isolation.SCOPES_SINCE = 99
assert isolation.enter_own_domain()
for name in ("a", "b"):
    os.makedirs({str(tmp_path)!r} + "/" + name)
os.chdir({str(tmp_path)!r})
open("a/file", "w").close()
os.replace("a/file", "b/file")
os.link("b/file", "a/file")
try:
    open(f"/proc/{{os.getppid()}}/environ", "rb").read()
except PermissionError:
    print("kept")
"""
    done = python("-c", program)
    assert done.stdout == "kept\n", done.stderr

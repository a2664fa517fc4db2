"""Agents on the real engine, one fault after the other: what fails is counted and named, and what
was sampled is trained, as a replay confirms.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.agents import is_exact, recipe_of, repeatable, replays_bit_by_bit
from support.commands import finish, records, start, write_recipe

CUTS = ("at once", "asked", "half", "half a stream")
"""Where the first connection of an agent is cut: before its request, in the model's turn, in the
response, and in a streamed one."""

AGENT = """
import json, os, socket, subprocess, sys, threading, time
from pathlib import Path
from openai import OpenAI

PLACE = Path({place!r})
CUTS = {cuts!r}

def claims(name):
    try:
        os.close(os.open(PLACE / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def wait_for(name):
    while not (PLACE / name).exists():
        time.sleep(0.05)

def hung_is_over():
    # Not earlier: the worker that is killed may be the one above the agent that hangs.
    hung = PLACE / "hung_pid"
    return hung.exists() and not Path("/proc", hung.read_text()).exists()

def end(*sockets):
    for one in sockets:
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def pass_on(source, sink, most=2**30):
    try:
        while most and (data := source.recv(min(most, 2**16))):
            sink.sendall(data)
            most -= len(data)
    except OSError:
        pass
    end(source, sink)

def serve(listener, port, cut):
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        if cut == "at once":
            end(client, server)
        threading.Thread(target=pass_on, args=(client, server), daemon=True).start()
        if cut == "asked":
            threading.Timer(0.1, end, [client, server]).start()
        most = 180 if cut.startswith("half") else 2**30  # the head has fewer bytes
        threading.Thread(target=pass_on, args=(server, client, most), daemon=True).start()
        cut = ""

def proxy(port, cut):
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, port, cut), daemon=True).start()
    return listener.getsockname()[1]

def leaves():
    for apart in (False, True):
        words = [sys.executable, "-c", "import time; time.sleep(600)"]
        one = subprocess.Popen(words, start_new_session=apart)
        (PLACE / f"child{{one.pid}}").touch()
    (PLACE / f"child{{os.getpid()}}").touch()

number = next(n for n in range(999) if claims(f"agent{{n}}"))
cut = (*CUTS, "", "")[number % (len(CUTS) + 2)]
port = proxy(int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0]), cut)
client = OpenAI(base_url=f"http://127.0.0.1:{{port}}/v1")
chat = [{{"role": "user", "content": sys.argv[1]}}]

def ask(streams=False):
    made = client.chat.completions.create(
        model="policy", messages=chat, max_tokens=9, stream=streams)
    if not streams:
        return made.choices[0].message.content
    deltas = [chunk.choices[0] for chunk in made]
    assert deltas[-1].finish_reason, "the stream has an end"
    return "".join(one.delta.content or "" for one in deltas)

try:
    said = ask(cut == "half a stream")
except Exception:
    if cut != "half a stream":
        raise
    (PLACE / "streams_again").touch()
    said = ask(True)
chat += [{{"role": "assistant", "content": said}}, {{"role": "user", "content": "4"}}]
if cut:
    ask()
elif claims("killed"):
    leaves()
    os.kill(os.getpid(), 9)
elif claims("hung"):
    leaves()
    (PLACE / "hung_pid").write_text(str(os.getpid()))
    time.sleep(600)
elif claims("engine"):
    wait_for("stopped")
    (PLACE / "calling").touch()
    ask(True)
    (PLACE / "answered").touch()
elif (PLACE / "answered").exists() and hung_is_over() and claims("worker"):
    leaves()
    (PLACE / "me").write_text(str(os.getpid()))
    os.rename(PLACE / "me", PLACE / "worker_of")
    ask()
    time.sleep(600)
else:
    del chat[:2]  # another conversation
    ask()
score = {{"reward": number % 3 / 2, "cut": CUTS.index(cut) + 1 if cut else 0}}
Path(os.environ["MEGARL_RESULT"]).write_text(json.dumps(score))
"""

HARM = """
import os, sys, threading, time
from pathlib import Path
import psutil
from support.fork_server import below

PLACE = Path(os.environ["PLACE"])

def wait_for(name):
    while not (PLACE / name).exists():
        time.sleep(0.05)

def is_engine(process):
    try:
        return "".join(process.cmdline()[:1]).startswith("ray::Engine")
    except psutil.Error:  # an agent that has ended
        return False

def core():
    # vLLM's core has no title of its own; it is the largest process below the actor.
    while True:
        try:
            engine, *_ = filter(is_engine, below(psutil.Process()))
            return max(engine.children(recursive=True), key=lambda one: one.memory_info().rss)
        except psutil.Error:
            time.sleep(0.05)

def lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

def harm():
    wait_for("engine")
    victim = core()
    victim.suspend()
    (PLACE / "stopped").touch()
    wait_for("calling")
    time.sleep(1.0)  # the call is at the engine
    victim.kill()
    wait_for("worker_of")
    # Between the worker and an agent is the process that ends what the agent has started.
    worker = psutil.Process(int((PLACE / "worker_of").read_text())).parent().parent()
    agents = worker.children(recursive=True)
    worker.kill()
    end = time.monotonic() + 10
    while left := [one for one in agents if lives(one)]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    (PLACE / "left").write_text(f"{len(left)} of {len(agents)}")

threading.Thread(target=harm, daemon=True).start()
from megarl.cli import main
sys.exit(main())
"""
"""Stops the engine before an agent's call and kills it in the call; then kills the worker process
above an agent."""

STEPS = 5


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_goes_on_after_faults_of_its_agents(tmp_path: Path) -> None:
    """Agents are killed, hang and lose connections, the engine and the process with the gateway
    die. The run is asynchronous, and its replay reaches the same bits.
    """
    place, program = tmp_path / "place", tmp_path / "program.py"
    place.mkdir()
    program.write_text(AGENT.format(place=str(place), cuts=CUTS))
    agent = {
        "command": ["python", str(program), "{prompt}"],
        "network": "open",
        "scores_itself": True,
    }
    tree = recipe_of(tmp_path, agent | {"time_limit_s": 30.0})
    repeatable(tree, STEPS)
    tree["rollout"] |= {"groups_per_step": 2, "num_engines": 2}  # a run without any would end
    tree["environment"]["on_failure"] = "wrong"  # so that no rollout is made beside these
    command = [sys.executable, "-c", HARM, "run", write_recipe(tmp_path / "recipe.yaml", tree)]
    done = finish(*start(command, PLACE=str(place)), timeout_s=400)
    assert done.code == 0 and done.survivors == [], done.err[-3000:]
    left, of = (place / "left").read_text().split(" of ")
    assert int(left) == 0 and int(of) >= 3, "an agent with two children"
    children = [one for one in place.glob("child*") if Path(f"/proc/{one.name[5:]}/exe").exists()]
    assert children == [] and len(list(place.glob("child*"))) == 9

    steps = records(tmp_path / "run" / "metrics.jsonl")
    groups = records(tmp_path / "run" / "transcripts.jsonl")
    rollouts = [one for group in groups for one in group["rollouts"]]
    assert len(rollouts) == STEPS * 6 and steps[-1]["engines/replaced"] == 1
    assert re.search("engine . has lost one of vLLM's processes; it is replaced", done.err)
    told = [(one["failure"], one["detail"]) for one in rollouts if one["failure"]]
    killed = [one for one in told if one[1] == "RuntimeError: the agent ended with signal SIGKILL"]
    late = [one for one in told if re.search(r"longer than .*time_limit_s = 30 s", one[1])]
    assert (len(killed), len(late), len(told)) == (1, 1, 2), told
    # Those of the worker process that was killed were made again.
    assert "worker process ended by signal SIGKILL, and is replaced; the rollouts" in done.err
    assert sum(step["verifier/timeouts"] for step in steps) == 1
    assert sum(step["verifier/errors"] for step in steps) == 1

    whole = [one for one in rollouts if not one["failure"]]
    calls = {cut: set[float]() for cut in ("", *CUTS)}
    for one in whole:
        calls[("", *CUTS)[int(one["metrics"]["cut"])]].add(one["metrics"]["calls"])
    assert calls.pop("asked") <= {2.0, 3.0}, "the model may have answered by then, or not begun"
    # A stream that the proxy's kernel has taken whole looks as if the agent had read it.
    assert calls.pop("half a stream") <= {2.0, 3.0}
    # An answer that was lost on its way is given again.
    assert calls == {"": {2.0}, "at once": {2.0}, "half": {2.0}}
    assert (place / "streams_again").exists()
    is_exact(tmp_path / "run", groups=2 * STEPS)
    replays_bit_by_bit(tmp_path / "run", STEPS)

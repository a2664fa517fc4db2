"""A real Slurm cluster on this machine: slurmctld, munged and slurmd daemons of the distribution's
packages, in namespaces of their own.

Every node is a process namespace with a host name, a network interface with an IP address, and a
/dev/shm of its own. A node therefore cannot see another node's processes, and dies as a whole when
its first process is killed. All nodes share the disk, the cores and the memory of this machine.
Nothing is installed or left behind: everything is below one process, with which the kernel ends it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from support.commands import dies_with_us, until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "nsenter", "ip")
ROOT = Path(__file__).resolve().parents[2]
CONTROLLER = "control"
NETWORK = "10.213.7."
"""The first three numbers of the addresses inside the namespaces, which no other process sees."""
READY_WITHIN_S = 30.0
IDLE = "while :; do sleep 3600 & wait $!; done"
"""A shell command for the first process of a process namespace: a shell also reaps orphans."""
CONFIG = """\
ClusterName=megarl
SlurmctldHost={controller}({network}1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=300
KillWait=30
MinJobAge=600
SchedulerParameters=sched_interval=1,batch_sched_delay=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
{nodes}
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing() -> str:
    """Why this machine cannot run the cluster; empty if it can."""
    absent = [name for name in PROGRAMS if find(name) is None]
    if absent:
        return (
            f"Slurm is not installed ({', '.join(absent)} not found): as root, apt-get install"
            " slurmctld slurmd munge slurm-client iproute2"
        )
    if os.geteuid() != 0:
        return "the nodes of a Slurm cluster need namespaces, which only root may create"
    script = "hostname x && ip link add va type veth peer name vb"
    tried = subprocess.run(
        [*unshare(), "sh", "-c", script], capture_output=True, text=True, timeout=60
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def find(program: str) -> str | None:
    """The path of a program, also where root's folders are not on PATH."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass
class Cluster:
    """A controller and nodes named node0, node1, ...; see the module. Call `close` at the end."""

    folder: Path
    num_nodes: int
    root: subprocess.Popen[bytes]
    """Ends everything as it ends."""
    inits: dict[str, int] = field(default_factory=dict)
    """Process id of the first process of each namespace, by host name."""
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @staticmethod
    def start(folder: Path, num_nodes: int) -> Cluster:
        """Start a cluster with its files in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        names = [f"node{number}" for number in range(num_nodes)]
        for name in ("state", *(f"spool-{name}" for name in names)):
            (folder / name).mkdir()
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={NETWORK}{number + 10} CPUs=8 RealMemory=8000 Gres=gpu:8"
            for number, name in enumerate(names)
        )
        config = CONFIG.format(controller=CONTROLLER, network=NETWORK, folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(config)
        # Slurm counts files as GPUs, and puts their numbers into CUDA_VISIBLE_DEVICES.
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/nvidia[0-7]\n")
        for number in range(8):
            (folder / f"nvidia{number}").touch()
        hosts = ["127.0.0.1 localhost", f"{NETWORK}1 {CONTROLLER}"]
        hosts += [f"{NETWORK}{number + 10} {name}" for number, name in enumerate(names)]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        script = (
            f"hostname {CONTROLLER} && mount --bind {folder}/hosts /etc/hosts && ip link set lo up"
            " && ip link add bridge type bridge && ip link set bridge up"
            f" && ip address add {NETWORK}1/24 dev bridge && touch {folder}/up && {IDLE}"
        )
        root = subprocess.Popen(
            [*dies_with_us(), *unshare(), "sh", "-c", script], stdin=subprocess.DEVNULL
        )
        cluster = Cluster(folder, num_nodes, root)
        try:
            until((folder / "up").exists, READY_WITHIN_S)
            cluster.inits[CONTROLLER] = only_child(root.pid)
            cluster._daemons()
            for name in names:
                cluster.start_node(name)
            until(lambda: cluster.states() == dict.fromkeys(names, "idle"), READY_WITHIN_S)
        except BaseException:
            cluster.close()
            raise
        return cluster

    def _daemons(self) -> None:
        folder = self.folder
        files = {f"{kind}-file": f"munge.{kind}" for kind in ("key", "pid", "log", "seed")}
        files |= {"socket": "munge.socket"}
        munge = ["munged", "--foreground", "--force", "--num-threads=2"]
        munge += [f"--{option}={folder}/{file}" for option, file in files.items()]
        self._daemon(CONTROLLER, munge, "munged.out")
        until((folder / "munge.socket").exists, READY_WITHIN_S)
        self._daemon(CONTROLLER, ["slurmctld", "-D"], "ctld.out")

    def _daemon(self, host: str, words: Sequence[str], log: str) -> None:
        with (self.folder / log).open("ab") as out:
            entered = [*self.enter(host), find(words[0]) or words[0], *words[1:]]
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            process = subprocess.Popen(
                entered, env=self.environment, **streams, start_new_session=True
            )
        self.daemons.append(process)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of everything that runs in the cluster."""
        return os.environ | {"SLURM_CONF": f"{self.folder}/slurm.conf"}

    def enter(self, host: str) -> list[str]:
        """The words before a command that runs it on a host of the cluster."""
        return ["nsenter", "--all", f"--target={self.inits[host]}", "env", f"--chdir={ROOT}"]

    def start_node(self, name: str) -> None:
        """Start a node that is not up: its namespaces, and slurmd there."""
        number = int(name.removeprefix("node"))
        up = self.folder / f"{name}.up"
        up.unlink(missing_ok=True)
        script = (
            f"hostname {name} && mount --bind {self.folder}/hosts /etc/hosts"
            " && mount -t tmpfs tmpfs /dev/shm && ip link set lo up"
            f" && until ip link show eth0; do sleep 0.02; done && ip link set eth0 up"
            f" && ip address add {NETWORK}{number + 10}/24 dev eth0 && touch {up} && {IDLE}"
        )
        inside = [*self.enter(CONTROLLER), *unshare(), "sh", "-c", script]
        with (self.folder / f"{name}.out").open("ab") as out:
            started = subprocess.Popen(inside, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.daemons.append(started)
        # nsenter forks into the process namespace, and unshare into a new one.
        self.inits[name] = only_child(only_child(started.pid))
        link = f"ip link add {name} type veth peer name eth0 netns"
        found = [*self.enter(CONTROLLER), "sh", "-c", f"pgrep -f '^sh -c hostname {name} '"]
        inner = int(subprocess.check_output(found, text=True, timeout=20).split()[0])
        plug = f"{link} {inner} && ip link set {name} master bridge up"
        subprocess.run([*self.enter(CONTROLLER), "sh", "-c", plug], check=True, timeout=20)
        until(up.exists, READY_WITHIN_S)
        self._daemon(name, ["slurmd", "-D", "-N", name], f"{name}.out")

    def kill_node(self, name: str) -> None:
        """End a node at once with all its processes, as if its power had failed."""
        os.kill(self.inits.pop(name), signal.SIGKILL)

    def run(
        self, *words: str, host: str = CONTROLLER, timeout_s: float = 60, **variables: str
    ) -> str:
        """Standard output of a command on a host of the cluster."""
        done = subprocess.run(
            [*self.enter(host), *words],
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def states(self) -> dict[str, str]:
        """State of each node, as sinfo names it; empty while slurmctld does not answer."""
        try:
            found = self.run("sinfo", "--noheader", "--Node", "--partition=normal", "-o", "%N %t")
        except AssertionError:
            return {}
        return dict(line.split() for line in found.splitlines())

    def job(self, number: int) -> dict[str, str]:
        """What scontrol tells of a job."""
        told = self.run("scontrol", "--oneliner", "show", "job", str(number)).split()
        return dict(pair.split("=", 1) for pair in told if "=" in pair)

    def processes(self, name: str) -> list[str]:
        """Command lines of a node's processes, slurmd and the first one left out."""
        space = os.readlink(f"/proc/{self.inits[name]}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    words = process.cmdline()
                    found += [" ".join(words)] if process.status() != psutil.STATUS_ZOMBIE else []
        ours = re.compile(rf"sleep 3600|sh -c hostname {name} |\S*slurmd -D ")
        return [line for line in found if line and not ours.match(line)]

    def close(self) -> None:
        """End everything."""
        if CONTROLLER in self.inits:
            os.kill(self.inits[CONTROLLER], signal.SIGKILL)
        self.root.kill()
        self.root.wait(30)
        for process in self.daemons:
            process.wait(30)


def unshare() -> list[str]:
    """The words before a command that run it as the first process of new namespaces."""
    namespaces = ["--uts", "--net", "--pid", "--ipc", "--mount"]
    return ["unshare", *namespaces, "--fork", "--mount-proc", "--kill-child"]


def only_child(parent: int) -> int:
    """The process id of a process's only child, once there is one."""
    below = psutil.Process(parent)
    until(lambda: len(below.children()) == 1, READY_WITHIN_S)
    return below.children()[0].pid

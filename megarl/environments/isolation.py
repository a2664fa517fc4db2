"""Keeps a process that runs code which is not trusted from looking into the other processes of its
user.

Linux lets a process read the environment variables, memory and open files of every process of the
same user, through /proc and ptrace. A Landlock domain (landlock(7)) ends that: from inside, only
processes of the same domain can be looked into, and, from Linux 6.12 on, only these can get
signals. The domain needs no privileges, holds for root too, and passes on to every child process.

A domain can also keep a process from files and TCP ports, and a seccomp(2) filter from the networks
that Landlock does not know.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import stat
import struct
import sys
from collections.abc import Iterator, Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on every architecture."""
ASK_VERSION = 1
SET_NO_NEW_PRIVILEGES, DROP_BOUNDING, SET_SECCOMP, WITH_FILTER = 38, 24, 22, 2
LOOKING = (21, 38)
"""CAP_SYS_ADMIN and CAP_PERFMON, with either of which newer kernels (6.18, not 6.1) let a process
read the environment variables of any other, Landlock or not."""
OVER_MACHINE = tuple(range(9, 64))
"""All capabilities but those over files and users: over networks, devices, modules, ..."""
CAPABILITY_VERSION = 0x20080522
MAKE_BLOCK_DEVICES, MOVE = 1 << 11, 1 << 13
"""Rights to make block device files, and to move or link a file into another folder. A domain must
restrict a right, here the first; it then denies the second too, unless a rule grants it."""
MOVES_SINCE = 2
"""First version of Landlock in which a rule can grant `MOVE` (Linux 5.19)."""
READ = 1 << 0 | 1 << 2
"""Rights to read files, and to run them."""
WRITE = 1 << 1 | 1 << 14
"""Rights to write files, and to cut them off."""
CHANGE = WRITE | 0b11_1111_1111 << 4
"""Rights to write, make, rename and remove files of every kind."""
MAKE_DEVICES = 1 << 6 | MAKE_BLOCK_DEVICES
WRITABLE = dict.fromkeys(
    ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/random", "/dev/urandom"), WRITE
)
"""{path: rights} of what programs write to outside of their own folder. Not /dev/shm, where Ray and
vLLM keep memory of the run, nor other terminals."""
PATH_RULE = 1
CONNECT, PORT_RULE = 1 << 1, 2
"""Right to connect by TCP, which a rule grants for one port (Linux 6.7)."""
SCOPE_SIGNALS = 1 << 1
"""Signals go to processes of the domain only."""
SCOPES_SINCE = 6
"""First version of Landlock that can restrict signals (Linux 6.12). A domain that restricts them
leaves files alone, so that mounts stay possible in a namespace of the process's own."""

NEWNS, NEWUSER = 0x00020000, 0x10000000
RDONLY, NOSUID, NODEV = 1, 2, 4
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000
"""Flags of clone(2) and mount(2), and the number of mount_setattr(2)."""
INET, INET6, UNIX = 2, 10, 1
STREAM, SEQPACKET, KIND = 1, 5, 0xF
TCP, ANY, FAST_OPEN = 6, 0xFFFFFFFF, 0x20000000
Rules = dict[str, tuple[int, int, Sequence[tuple[int, int, Sequence[int]]]]]
"""{system call: (its number on x86_64, on aarch64, conditions)}. A condition is (number of an
argument, mask, values that it may have under the mask)."""
OWN: Sequence[tuple[int, int, Sequence[int]]] = [(0, ANY, (0,))]
NEVER: Sequence[tuple[int, int, Sequence[int]]] = [(0, ANY, ())]
OF_OTHERS: Rules = {
    # Limits and turns of the calling process; another could be ended by them.
    "prlimit64": (302, 261, OWN),
    "sched_setaffinity": (203, 122, OWN),
    "sched_setparam": (142, 118, OWN),
    "sched_setscheduler": (144, 119, OWN),
    "sched_setattr": (314, 274, OWN),
    "setpriority": (141, 140, [(0, ANY, (0, 1)), (1, ANY, (0,))]),
    "ioprio_set": (251, 30, [(0, ANY, (1, 2)), (1, ANY, (0,))]),
    "process_vm_readv": (310, 270, NEVER),
    "process_vm_writev": (311, 271, NEVER),
    "pidfd_getfd": (438, 438, NEVER),
    "kcmp": (312, 272, NEVER),
    # The keys of a user are those of all its processes.
    "add_key": (248, 217, NEVER),
    "request_key": (249, 218, NEVER),
    "keyctl": (250, 219, NEVER),
}
SHARED: Rules = {
    # Memory, queues and semaphores that outlive the processes that made them.
    "shmget": (29, 194, NEVER),
    "shmat": (30, 196, NEVER),
    "shmctl": (31, 195, NEVER),
    "msgget": (68, 186, NEVER),
    "msgsnd": (69, 189, NEVER),
    "msgrcv": (70, 188, NEVER),
    "msgctl": (71, 187, NEVER),
    "semget": (64, 190, NEVER),
    "semop": (65, 193, NEVER),
    "semctl": (66, 191, NEVER),
    "semtimedop": (220, 192, NEVER),
    "mq_open": (240, 180, NEVER),
    "mq_unlink": (241, 181, NEVER),
}
SOCKETS: Rules = {
    "socket": (41, 198, [(0, ANY, (INET, INET6)), (1, KIND, (STREAM,)), (2, ANY, (0, TCP))]),
    # Datagrams could be sent to other addresses than to the other end.
    "socketpair": (53, 199, [(0, ANY, (UNIX,)), (1, KIND, (STREAM, SEQPACKET))]),
    "listen": (50, 201, NEVER),
    # With this flag they connect, of which Landlock is not told.
    "sendto": (44, 206, [(3, FAST_OPEN, (0,))]),
    "sendmsg": (46, 211, [(2, FAST_OPEN, (0,))]),
    "sendmmsg": (307, 269, [(3, FAST_OPEN, (0,))]),
    "io_uring_setup": (425, 425, NEVER),  # does all of this past a filter
}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""{machine: seccomp's number of its architecture}"""
Instruction = tuple[int, int, int, int]
"""Of BPF: (code, instructions to skip if true, if false, operand)."""
LOAD, EQUAL, AT_LEAST, GIVE = 0x20, 0x15, 0x35, 0x06
"""Codes of BPF: load a word of what is known of a system call, compare, end with a result."""
REFUSE, ALLOW, KILL = 0x00050000, 0x7FFF0000, 0x80000000
"""Results of a seccomp filter; to the first an error number is added."""


libc = ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *values: int | str | bytes) -> int:
    """Call the function `name` of the C library with `values`: integers as unsigned longs, texts
    encoded. Returns its result. Raises `OSError` if that is -1.
    """
    given = [
        ctypes.c_ulong(value) if isinstance(value, int) else os.fsencode(value) for value in values
    ]
    found: int = getattr(libc, name)(*given)
    if found == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return found


def landlock_version() -> int:
    """Version of Landlock's interface (ABI) in this kernel, from 1; 0 if there is none: before
    Linux 5.13, if Landlock is off, or on another system.
    """
    if sys.platform != "linux":
        return 0
    return max(0, libc.syscall(CREATE_RULESET, None, 0, ASK_VERSION))


def has_filters() -> bool:
    """Whether `filter_calls` works here: on Linux with seccomp, on x86_64 and aarch64."""
    if sys.platform != "linux" or os.uname().machine not in AUDIT:
        return False
    libc.prctl(SET_SECCOMP, WITH_FILTER, 0, 0, 0)  # at address 0 is no filter
    return ctypes.get_errno() == errno.EFAULT


def enter_own_domain(
    *, mounts: bool, connects: int = 0, folder: str = "", hidden: Sequence[str] = ()
) -> bool:
    """Put this thread, and all threads and processes that it starts from now on, into a Landlock
    domain of their own, for good. From inside, memory, environment variables and open files of
    processes outside cannot be read, nor, from Linux 6.12 on, signals be sent to these. Returns
    True if that was done, False if the kernel cannot, which changes nothing. Raises `OSError` if
    the kernel refuses.

    `mounts`: whether the process will make mounts in namespaces, as the sandbox of the verifier
    `code` does; before Linux 6.12 no domain allows that, and False is returned. In the domain,
    programs that change the user when they start (sudo, newuidmap) no longer do so. Without
    `mounts`, root also loses CAP_SYS_ADMIN and CAP_PERFMON. `connects`: the only TCP port to which
    connections can be made from inside, from Linux 6.7 on; 0 for any.

    `folder`: absolute path of the only folder in which files can be written, made, renamed and
    removed, beside the devices in `WRITABLE`; "" for no rules of files. Elsewhere their permissions
    and times can still be changed. Needs Linux 6.2 or newer, excludes `mounts`, and of root's
    capabilities leaves those over files and users. `hidden`: comes with `folder`; absolute paths
    without links of the files and folders that cannot be read, where "/a/b*" stands for all paths
    that begin with /a/b. `folder` can be, and files that are later put beside them cannot.
    """
    version = landlock_version()
    has_scopes = version >= SCOPES_SINCE
    if version < MOVES_SINCE or (mounts and not has_scopes):
        return False
    network = CONNECT if connects else 0
    files = READ | CHANGE if folder else 0 if has_scopes else MAKE_BLOCK_DEVICES | MOVE
    fields = [files, network, SCOPE_SIGNALS] if has_scopes else [files]
    if network and not has_scopes:
        fields.append(network)
    rules = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = call_libc("syscall", CREATE_RULESET, rules, len(rules), 0)
    if folder:
        # Python too, where it lies beside others in a folder that cannot be listed.
        pythons = _pythons()
        above = {place for place in pythons if any(one.startswith(f"{place}/") for one in hidden)}
        for path in [*_all_but(hidden), *(pythons - above)]:
            with contextlib.suppress(OSError):  # it has been removed, or is a link
                _grant(ruleset, path, READ)
        for path, rights in WRITABLE.items():
            if not any(one.startswith(f"{path}/") for one in hidden):
                with contextlib.suppress(OSError):
                    _grant(ruleset, os.path.realpath(path), rights)
        _grant(ruleset, folder, READ | CHANGE & ~MAKE_DEVICES)
    elif not has_scopes:
        _grant(ruleset, "/", MOVE)
    if network:
        rule = struct.pack("=QQ", CONNECT, connects)
        call_libc("syscall", ADD_RULE, ruleset, PORT_RULE, rule, 0)
    call_libc("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call_libc("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    if not mounts:
        _drop(OVER_MACHINE if folder else LOOKING)
    return True


def cover(hidden: Sequence[str], folder: str) -> bool:
    """Lay an empty folder over each folder of `hidden`, since Landlock cannot keep a program from
    listing a folder in another that it may list, and make all but `folder` read-only, so that
    permissions and times stay. Only this process and those that it starts see it, from user and
    mount namespaces of their own. `hidden`, `folder`: as for `enter_own_domain`, which comes later.
    Returns False if the kernel refuses that, as in some containers; then names can be listed.
    """
    user, group = os.geteuid(), os.getegid()
    ids = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    paths = [path for one in hidden for path in (glob.glob(one) if one.endswith("*") else [one])]
    kept = tuple(f"{one}/" for one in (folder, *_pythons()))
    covered = [path for path in paths if not f"{path}/".startswith(kept[0])]
    covered = [path for path in covered if not any(one.startswith(f"{path}/") for one in kept[1:])]
    try:
        call_libc("unshare", NEWUSER | NEWNS)
        for name, text in ids.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        call_libc("mount", "none", "/", "", RECURSIVE | PRIVATE, 0)
        own = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        for path in covered:
            if os.path.isdir(path) and not os.path.islink(path):  # nor gone with one above it
                call_libc("mount", "none", path, "tmpfs", NOSUID | NODEV, "size=64k,mode=0755")
        os.makedirs(folder, exist_ok=True)
        set_mount("/", RDONLY, below=True)
        call_libc("mount", f"/proc/self/fd/{own}", folder, "", BIND, 0)
        set_mount(folder, 0, clear=RDONLY)
        os.close(own)
    except OSError:
        return False
    return True


def _pythons() -> set[str]:
    return {os.path.realpath(one) for one in (sys.prefix, sys.base_prefix)}


def set_mount(path: str, flags: int, *, clear: int = 0, below: bool = False) -> None:
    """Set and clear flags of the mount at `path` and, with `below`, of all mounts below it. Raises
    `OSError`; Linux before 5.12 cannot do it.
    """
    change = struct.pack("QQQQ", flags, clear, 0, 0)
    recursive = AT_RECURSIVE if below else 0
    call_libc("syscall", MOUNT_SETATTR, -100, path, recursive, change, len(change))


def _grant(ruleset: int, path: str, rights: int) -> None:
    """Add to a ruleset of Landlock that what lies at `path` and below has `rights`; a file only
    those of a file, a symbolic link and a block device none. Raises `OSError`.
    """
    opened = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mode = os.fstat(opened).st_mode
        if stat.S_ISLNK(mode) or stat.S_ISBLK(mode):
            return
        rule = struct.pack("=Qi", rights if stat.S_ISDIR(mode) else rights & (READ | WRITE), opened)
        call_libc("syscall", ADD_RULE, ruleset, PATH_RULE, rule, 0)
    finally:
        os.close(opened)


def _all_but(hidden: Sequence[str]) -> Iterator[str]:
    """Iterate over paths that hold all files but `hidden` (see `enter_own_domain`), /dev/shm and
    /dev/pts; not over what appears later in /, /dev or a folder above a hidden one.
    """
    whole = {one for one in hidden if not one.endswith("*")}
    begin = tuple(one[:-1] for one in hidden if one.endswith("*"))
    on_the_way, whole = {"/", "/dev"}, whole | {"/dev/shm", "/dev/pts"}
    for one in hidden:
        above, upwards = set[str](), one
        while len(upwards := os.path.dirname(upwards)) > 1:
            above.add(upwards)
        if not above & whole:  # or all of it is hidden already
            on_the_way |= above
    for folder in on_the_way:
        with contextlib.suppress(OSError):  # some can be passed and not listed, or are missing
            for path in (one.path for one in os.scandir(folder)):
                if not (path in on_the_way or path in whole or path.startswith(begin)):
                    yield path


def filter_calls(*, alone: bool) -> None:
    """Have the kernel refuse this process, and all that it starts from now on, with EACCES: to
    change limits and priorities of other processes, and the user's keys. `alone`: also System V and
    POSIX memory, queues and semaphores, and every socket but those of TCP: no datagrams, no Unix
    sockets but pairs, no servers. Raises `OSError`, and `KeyError` on a machine that is neither
    x86_64 nor aarch64. `enter_own_domain` comes first.
    """
    machine, code = os.uname().machine, list[Instruction]()
    load, equal, mask, give, refuse = LOAD, EQUAL, 0x54, GIVE, REFUSE | errno.EACCES
    for *numbers, conditions in (OF_OTHERS | (SHARED | SOCKETS if alone else {})).values():
        body = []
        for argument, bits, values in conditions:
            body += [(load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits)]
            # One that is equal goes past the others, and past the refusal.
            body += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
            body.append((give, 0, 0, refuse))
        body.append((give, 0, 0, ALLOW))
        number = numbers[0 if machine == "x86_64" else 1]
        code += [(equal, 0, len(body), number), *body]
    install_filter([*code, (give, 0, 0, ALLOW)], x32=errno.EACCES)


def install_filter(code: Sequence[Instruction], *, x32: int) -> None:
    """Install a seccomp filter in this process, and so in all that it starts. `code`: instructions
    of BPF, of which the first finds the number of the system call loaded. Calls with the numbers of
    32-bit programs kill the process, those of the x32 interface of x86_64 fail with the error
    number `x32`. Raises `OSError`, and `KeyError` on a machine that is neither x86_64 nor aarch64.
    """
    machine = os.uname().machine
    head = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT[machine]), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == "x86_64":
        head += [(AT_LEAST, 0, 1, 0x40000000), (GIVE, 0, 0, REFUSE | x32)]
    packed = b"".join(struct.pack("HBBI", *one) for one in [*head, *code])
    buffer = ctypes.create_string_buffer(packed)
    program = struct.pack("HxxxxxxQ", len(head) + len(code), ctypes.addressof(buffer))
    held = ctypes.create_string_buffer(program)
    call_libc("prctl", SET_SECCOMP, WITH_FILTER, ctypes.addressof(held), 0, 0)


def _drop(capabilities: Sequence[int]) -> None:
    """Give up `capabilities` for good, as far as this process has them."""
    for number in capabilities:
        # Refused without CAP_SETPCAP: then there is nothing to regain either.
        libc.prctl(DROP_BOUNDING, number, 0, 0, 0)
    head = struct.pack("Ii", CAPABILITY_VERSION, 0)
    found = ctypes.create_string_buffer(24)
    call_libc("capget", head, ctypes.addressof(found))
    # Effective, permitted and inheritable, first their low 32 bits, then their high ones.
    words = list(struct.unpack("6I", found.raw))
    for number in capabilities:
        for part in range(3):
            words[number // 32 * 3 + part] &= ~(1 << number % 32)
    call_libc("capset", head, struct.pack("6I", *words))

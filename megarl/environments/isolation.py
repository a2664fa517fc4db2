"""Keeps a process that runs untrusted code from looking into other processes of its user.

Linux lets a process read environment, memory and open files of every process of its user; from
inside a Landlock domain (landlock(7)), only of processes of the domain, to which alone, from Linux
6.12 on, signals go. It needs no privileges, holds for root too, and passes on to children. A domain
can also keep a process from files and TCP ports, a seccomp(2) filter from other networks.
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
KEEP_CAPABILITIES, AMBIENT, RAISE = 8, 47, 2
READ_ANY = 2
"""CAP_DAC_READ_SEARCH: to read files and folders of every user."""
LOOKING = (21, 38)
"""CAP_SYS_ADMIN and CAP_PERFMON: with either, newer kernels (6.18, not 6.1) let a process read any
environment, Landlock or not."""
OVER_MACHINE = tuple(range(9, 64))
CAPABILITY_HEAD = struct.pack("Ii", 0x20080522, 0)
MAKE_BLOCK_DEVICES, MOVE = 1 << 11, 1 << 13
"""Rights to make block device files, and to move or link a file into another folder. A domain must
restrict a right, here the first, and then denies the second unless granted."""
MOVES_SINCE = 2
"""Version of Landlock in which a rule can grant `MOVE` (Linux 5.19)."""
READ, LIST = 1 << 0 | 1 << 2, 1 << 3
WRITE = 1 << 1 | 1 << 14
CHANGE = WRITE | 0b11_1111_1111 << 4
"""Write, make, rename and remove files of every kind."""
MAKE_DEVICES = 1 << 6 | MAKE_BLOCK_DEVICES
WRITABLE = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/random", "/dev/urandom")
"""Files outside of a program's own folder that it may read and write. Not /dev/shm, where Ray and
vLLM keep memory, nor other terminals."""
PATH_RULE = 1
CONNECT, PORT_RULE = 1 << 1, 2
"""Right to connect by TCP, granted for one port (Linux 6.7)."""
SCOPE_SIGNALS = 1 << 1
"""Signals go to processes of the domain only."""
SCOPES_SINCE = 6
"""Can restrict signals (Linux 6.12)."""

NEWNS, NEWUSER = 0x00020000, 0x10000000
RDONLY, NOSUID, NODEV = 1, 2, 4
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000
"""Flags of clone(2) and mount(2), and the number of mount_setattr(2)."""
INET, INET6, UNIX = 2, 10, 1
STREAM, SEQPACKET, KIND = 1, 5, 0xF
TCP, ANY, FAST_OPEN = 6, 0xFFFFFFFF, 0x20000000
Rules = dict[str, tuple[int, int, Sequence[tuple[int, int, Sequence[int]]]]]
"""{system call: (number on x86_64, on aarch64, conditions)}; a condition: (number of an argument,
mask, values that it may have under the mask)."""
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
"""Codes of BPF: load a word of the call's data, compare, end with a result."""
REFUSE, ALLOW, KILL = 0x00050000, 0x7FFF0000, 0x80000000
"""Results of a filter; to the first an error number is added."""


libc = ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *values: int | str | bytes) -> int:
    """Result of a C function; raises `OSError` if it is -1."""
    arguments = [
        ctypes.c_ulong(value) if isinstance(value, int) else os.fsencode(value) for value in values
    ]
    result: int = getattr(libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def landlock_version() -> int:
    """Version of Landlock's interface (ABI); 0 if there is none, as before Linux 5.13."""
    return max(0, libc.syscall(CREATE_RULESET, None, 0, ASK_VERSION))


def has_filters() -> bool:
    """Whether `filter_calls` works here."""
    if os.uname().machine not in AUDIT:
        return False
    libc.prctl(SET_SECCOMP, WITH_FILTER, 0, 0, 0)  # at address 0 is no filter
    return ctypes.get_errno() == errno.EFAULT


def enter_own_domain(
    *,
    connects: int = 0,
    folder: str = "",
    hidden: Sequence[str] = (),
    visible: Sequence[str] | None = None,
) -> bool:
    """Put this thread, and all that it starts from now on, into a Landlock domain for good. Returns
    False if the kernel cannot, which changes nothing; raises `OSError` if it refuses. Programs that
    change the user when they start (sudo, newuidmap) no longer do so, mounts fail, and root loses
    CAP_SYS_ADMIN and CAP_PERFMON.

    `connects`: the only TCP port to connect to, from Linux 6.7 on; 0: any.

    `folder`: absolute path of the only folder in which files can be written, made, renamed and
    removed, beside `WRITABLE`; "": no rules of files. Permissions and times elsewhere can still be
    changed. Needs Linux 6.2, and leaves root only capabilities over files and users. Either of
    these says what can be read besides. `hidden`: absolute paths without links that cannot be read;
    "/a/b*" stands for all that begin with /a/b. Files put beside the hidden ones later cannot.
    `visible`: the only files and folders that can be read or listed.
    """
    version = landlock_version()
    has_scopes = version >= SCOPES_SINCE
    if version < MOVES_SINCE:
        return False
    network = CONNECT if connects else 0
    reads = READ if visible is None else READ | LIST
    files = reads | CHANGE if folder else 0 if has_scopes else MAKE_BLOCK_DEVICES | MOVE
    fields = [files, network, SCOPE_SIGNALS] if has_scopes else [files]
    if network and not has_scopes:
        fields.append(network)
    rules = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = call_libc("syscall", CREATE_RULESET, rules, len(rules), 0)
    if folder:
        # Python too, where it lies beside others in a folder that cannot be listed.
        pythons = _pythons()
        above = {path for path in pythons if any(entry.startswith(f"{path}/") for entry in hidden)}
        readable = [*_all_but(hidden), *(pythons - above)] if visible is None else visible
        for path in [*readable, *WRITABLE]:
            rights = READ | WRITE if path in WRITABLE else reads
            if not any(entry.startswith(f"{path}/") for entry in hidden):
                with contextlib.suppress(OSError):  # it has been removed, or is a link
                    _grant(ruleset, path, rights)
        _grant(ruleset, folder, reads | CHANGE & ~MAKE_DEVICES)
    elif not has_scopes:
        _grant(ruleset, "/", MOVE)
    if network:
        rule = struct.pack("=QQ", CONNECT, connects)
        call_libc("syscall", ADD_RULE, ruleset, PORT_RULE, rule, 0)
    call_libc("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call_libc("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    _drop(OVER_MACHINE if folder else LOOKING)
    return True


def cover(hidden: Sequence[str], folder: str) -> bool:
    """Lay an empty folder over each folder of `hidden`, which Landlock lets a program list, and
    make all but `folder` read-only, for this process and its children, before `enter_own_domain`.
    Returns False if the kernel refuses new namespaces, as in some containers.
    """
    user, group = os.geteuid(), os.getegid()
    ids = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    paths = [path for p in hidden for path in (glob.glob(p) if p.endswith("*") else [p])]
    kept = tuple(f"{path}/" for path in (folder, *_pythons()))
    covered = [path for path in paths if not f"{path}/".startswith(kept[0])]
    covered = [path for path in covered if not any(top.startswith(f"{path}/") for top in kept[1:])]
    try:
        call_libc("unshare", NEWUSER | NEWNS)
        for name, text in ids.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        call_libc("mount", "none", "/", "", RECURSIVE | PRIVATE, 0)
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        for path in covered:
            if os.path.isdir(path) and not os.path.islink(path):  # nor gone with one above it
                call_libc("mount", "none", path, "tmpfs", NOSUID | NODEV, "size=64k,mode=0755")
        os.makedirs(folder, exist_ok=True)
        set_mount("/", RDONLY, below=True)
        call_libc("mount", f"/proc/self/fd/{descriptor}", folder, "", BIND, 0)
        set_mount(folder, 0, clear=RDONLY)
        os.close(descriptor)
    except OSError:
        return False
    return True


def _pythons() -> set[str]:
    return {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}


def set_mount(path: str, flags: int, *, clear: int = 0, below: bool = False) -> None:
    """Set and clear flags of the mount at `path` and, with `below`, of those below it. Raises
    `OSError`, always before Linux 5.12.
    """
    change = struct.pack("QQQQ", flags, clear, 0, 0)
    recursive = AT_RECURSIVE if below else 0
    call_libc("syscall", MOUNT_SETATTR, -100, path, recursive, change, len(change))


def _grant(ruleset: int, path: str, rights: int) -> None:
    """Give what lies at `path` and below `rights`, a file only those of a file, links and block
    devices none. Raises `OSError`.
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
    """Yield paths that hold all files but `hidden`, /dev/shm, /dev/pts, and later ones beside
    these.
    """
    whole = {entry for entry in hidden if not entry.endswith("*")}
    begin = tuple(entry[:-1] for entry in hidden if entry.endswith("*"))
    on_the_way, whole = {"/", "/dev"}, whole | {"/dev/shm", "/dev/pts"}
    for path in hidden:
        above, upwards = set[str](), path
        while len(upwards := os.path.dirname(upwards)) > 1:
            above.add(upwards)
        if not above & whole:  # or all of it is hidden already
            on_the_way |= above
    for folder in on_the_way:
        with contextlib.suppress(OSError):  # some can be passed and not listed, or are missing
            for path in (item.path for item in os.scandir(folder)):
                if not (path in on_the_way or path in whole or path.startswith(begin)):
                    yield path


def filter_calls(*, alone: bool, more: Rules | None = None) -> None:
    """Have the kernel refuse, with EACCES, that this process and its children change limits and
    priorities of others, or the user's keys. `alone`: also System V and POSIX memory, queues and
    semaphores, and sockets but TCP clients and Unix pairs. `more`: further rules. Raises `OSError`,
    and `KeyError` but on x86_64 and aarch64. Comes after `enter_own_domain`.
    """
    rules = OF_OTHERS | (SHARED | SOCKETS if alone else {}) | (more or {})
    machine, code = os.uname().machine, list[Instruction]()
    load, equal, mask, give, refuse = LOAD, EQUAL, 0x54, GIVE, REFUSE | errno.EACCES
    for name, (*numbers, conditions) in rules.items():
        body = []
        for argument, bits, values in conditions:
            body += [(load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits)]
            # One that is equal goes past the others, and past the refusal.
            body += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
            # The filter cannot read what clone3 points to; the C library then falls back to clone.
            body.append((give, 0, 0, REFUSE | errno.ENOSYS if name == "clone3" else refuse))
        body.append((give, 0, 0, ALLOW))
        number = numbers[0 if machine == "x86_64" else 1]
        code += [(equal, 0, len(body), number), *body]
    install_filter([*code, (give, 0, 0, ALLOW)], x32=errno.EACCES)


def install_filter(code: Sequence[Instruction], *, x32: int) -> None:
    """Install a seccomp filter: `code`, BPF that finds the number of the system call loaded. Calls
    of 32-bit programs kill the process, those of the x32 interface fail with error `x32`. Raises as
    `filter_calls`.
    """
    machine = os.uname().machine
    head = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT[machine]), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == "x86_64":
        head += [(AT_LEAST, 0, 1, 0x40000000), (GIVE, 0, 0, REFUSE | x32)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in [*head, *code])
    buffer = ctypes.create_string_buffer(packed)
    program = struct.pack("HxxxxxxQ", len(head) + len(code), ctypes.addressof(buffer))
    held = ctypes.create_string_buffer(program)
    call_libc("prctl", SET_SECCOMP, WITH_FILTER, ctypes.addressof(held), 0, 0)


def own_capabilities() -> list[int]:
    """Effective, permitted and inheritable, first their low 32 bits, then their high ones."""
    sets = ctypes.create_string_buffer(24)
    call_libc("capget", CAPABILITY_HEAD, ctypes.addressof(sets))
    return list(struct.unpack("6I", sets.raw))


def _drop(capabilities: Sequence[int]) -> None:
    """Give up `capabilities` for good, as far as this process has them."""
    for number in capabilities:
        # Refused without CAP_SETPCAP: then there is nothing to regain either.
        libc.prctl(DROP_BOUNDING, number, 0, 0, 0)
    words = own_capabilities()
    for number in capabilities:
        for group in range(3):
            words[number // 32 * 3 + group] &= ~(1 << number % 32)
    call_libc("capset", CAPABILITY_HEAD, struct.pack("6I", *words))


def become_user(user: int, *, reads_any: bool) -> None:
    """Give this process of root the user and group `user`, and no capability but, with `reads_any`
    and where it has that, `READ_ANY`, which also the programs that it starts have. Raises
    `OSError`.
    """
    call_libc("prctl", KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kept = own_capabilities()[1] & 1 << READ_ANY if reads_any else 0
    call_libc("capset", CAPABILITY_HEAD, struct.pack("6I", kept, kept, kept, 0, 0, 0))
    if kept:
        call_libc("prctl", AMBIENT, RAISE, READ_ANY, 0, 0)

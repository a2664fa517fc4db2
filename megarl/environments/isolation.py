"""Keeps a process that runs code which is not trusted from looking into the other processes of its
user.

Linux lets a process read the environment variables, memory and open files of every process of the
same user, through /proc and ptrace. A Landlock domain (landlock(7)) ends that: from inside, only
processes of the same domain can be looked into, and, from Linux 6.12 on, only these can get
signals. The domain needs no privileges, holds for root too, and passes on to every child process.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on every architecture."""
ASK_VERSION = 1
SET_NO_NEW_PRIVILEGES, DROP_BOUNDING = 38, 24
LOOKING = (21, 38)
"""CAP_SYS_ADMIN and CAP_PERFMON, with either of which newer kernels (6.18, not 6.1) let a process
read the environment variables of any other, Landlock or not."""
CAPABILITY_VERSION = 0x20080522
MAKE_BLOCK_DEVICES, MOVE = 1 << 11, 1 << 13
"""Rights to make block device files, and to rename or link a file into another folder. A domain has
to restrict something: the former. It then denies the latter too, unless a rule grants it."""
MOVES_SINCE = 2
"""First version of Landlock in which a rule can grant `MOVE` (Linux 5.19)."""
CONNECT, PORT_RULE = 1 << 1, 2
"""Right to connect by TCP, which a rule grants for one port (Linux 6.7)."""
SCOPE_SIGNALS = 1 << 1
"""Signals go to processes of the domain only."""
SCOPES_SINCE = 6
"""First version of Landlock that can restrict signals (Linux 6.12). A domain that restricts them
leaves files alone, so that mounts stay possible in a namespace of the process's own."""


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


def enter_own_domain(*, mounts: bool, connects: int = 0) -> bool:
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
    """
    version = landlock_version()
    has_scopes = version >= SCOPES_SINCE
    if version < MOVES_SINCE or (mounts and not has_scopes):
        return False
    network = CONNECT if connects else 0
    fields = [0, network, SCOPE_SIGNALS] if has_scopes else [MAKE_BLOCK_DEVICES | MOVE]
    if network and not has_scopes:
        fields.append(network)
    rules = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = call_libc("syscall", CREATE_RULESET, rules, len(rules), 0)
    if not has_scopes:
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        beneath, rule = 1, struct.pack("=Qi", MOVE, root)  # LANDLOCK_RULE_PATH_BENEATH
        call_libc("syscall", ADD_RULE, ruleset, beneath, rule, 0)
        os.close(root)
    if network:
        rule = struct.pack("=QQ", CONNECT, connects)
        call_libc("syscall", ADD_RULE, ruleset, PORT_RULE, rule, 0)
    call_libc("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call_libc("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    if not mounts:
        _drop_looking()
    return True


def _drop_looking() -> None:
    """Give up the capabilities `LOOKING` for good, as far as this process has them."""
    for number in LOOKING:  # refused without CAP_SETPCAP: then there is nothing to regain either
        libc.prctl(DROP_BOUNDING, number, 0, 0, 0)
    head = struct.pack("Ii", CAPABILITY_VERSION, 0)
    found = ctypes.create_string_buffer(24)
    call_libc("capget", head, ctypes.addressof(found))
    # Effective, permitted and inheritable, first their low 32 bits, then their high ones.
    words = list(struct.unpack("6I", found.raw))
    for number in LOOKING:
        for part in range(3):
            words[number // 32 * 3 + part] &= ~(1 << number % 32)
    call_libc("capset", head, struct.pack("6I", *words))

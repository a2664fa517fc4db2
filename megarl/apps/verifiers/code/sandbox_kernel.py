"""What a sandbox asks of the Linux kernel: namespaces, mounts, capabilities, seccomp and limits.

Runs in processes that import only the standard library. Sources: namespaces(7), user_namespaces(7),
pivot_root(2), mount_setattr(2), capabilities(7), seccomp(2).
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Sequence

from megarl.environments.isolation import (
    ALLOW,
    BIND,
    EQUAL,
    GIVE,
    LOAD,
    NEVER,
    NEWNS,
    NEWUSER,
    NODEV,
    NOSUID,
    OF_OTHERS,
    PRIVATE,
    RDONLY,
    RECURSIVE,
    REFUSE,
    SHARED,
    Instruction,
    call_libc,
    install_filter,
    set_mount,
)

NEWUTS, NEWIPC, NEWPID, NEWNET = 0x04000000, 0x08000000, 0x20000000, 0x40000000
ANY_NAMESPACE = 0x7E020000
"""All flags of clone(2) that make a namespace."""
NOEXEC, DETACH = 8, 2
FOLDER = "/box"
"""The folder of the sandbox in which programs may write."""
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

SET_DEATH_SIGNAL, SET_DUMPABLE = 1, 4
SET_SUBREAPER, SET_NO_NEW_PRIVILEGES = 36, 38

NOBODY = 65534
"""User id on the host of the programs of a sandbox that root has started."""
INSIDE = 1000
"""User id, in the sandbox, of that same user."""

DENIED: dict[str, tuple[int | None, ...]] = {
    **{name: call[:2] for name, call in (OF_OTHERS | SHARED).items() if call[2] == NEVER},
    # name: (number on x86_64, number on aarch64); None: not on that machine
    "ptrace": (101, 117),
    "socket": (41, 198),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # what only a capability over the whole machine allows, which programs have not
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "iopl": (172, None),
    "ioperm": (173, None),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "modify_ldt": (154, None),
    # memory that counts for no process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}
"""{system call: (its number on x86_64, on aarch64)} of calls that fail with EPERM in a program of a
sandbox."""
CLONE, CLONE3 = (56, 220), 435
EPERM, ENOSYS = 1, 38


def prctl(option: int, value: int = 0, more: int = 0) -> None:
    """Call prctl(2) for this process. `option`: number of the operation in Linux, such as 38 for
    PR_SET_NO_NEW_PRIVS. `value`, `more`: its two arguments. Raises `OSError`.
    """
    call_libc("prctl", option, value, more, 0, 0)


def tie_to_parent() -> None:
    """Have the kernel kill this process (SIGKILL) when its parent ends. Raises `OSError`."""
    prctl(SET_DEATH_SIGNAL, 9)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2): mount `source` at the path `target`. `kind`: type of the file system, "" for a
    bind mount. `flags`: bits of mount(2). `options`: text for the file system, such as "size=1m".
    Raises `OSError`.
    """
    call_libc("mount", source, target, kind, flags, options)


def make_read_only(path: str, *, below: bool = True) -> None:
    """Make a mount, and with `below` all mounts below it, read-only, without devices and
    set-user-id programs. Raises `OSError`; Linux before 5.12 cannot do it.
    """
    set_mount(path, RDONLY | NOSUID | NODEV, below=below)


def clear_capabilities() -> None:
    """Give up all capabilities of this process. Raises `OSError`."""
    call_libc("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def deny_system_calls() -> None:
    """Install a seccomp filter in this process, and so in those that it starts, under which system
    calls that a tested program does not need, such as ptrace, mount and socket, and clone(2) into a
    new namespace fail with EPERM. Raises `OSError`, and `KeyError` on a machine that is neither
    x86_64 nor aarch64.
    """
    column, any_bit, rules = 0 if platform.machine() == "x86_64" else 1, 0x45, list[Instruction]()
    for numbers in DENIED.values():
        if numbers[column] is not None:
            rules += [(EQUAL, 0, 1, numbers[column]), (GIVE, 0, 0, REFUSE | EPERM)]
    # The filter cannot read what clone3 points to; the C library then falls back to clone.
    rules += [(EQUAL, 0, 1, CLONE3), (GIVE, 0, 0, REFUSE | ENOSYS)]
    rules += [
        (EQUAL, 0, 3, CLONE[column]),
        (LOAD, 0, 0, 16),  # its flags
        (any_bit, 0, 1, ANY_NAMESPACE),
        (GIVE, 0, 0, REFUSE | EPERM),
        (GIVE, 0, 0, ALLOW),
    ]
    install_filter(rules, x32=ENOSYS)


def new_user(is_root: bool) -> None:
    """Move this process, which must have one thread, to new user, mount, network, IPC and UTS
    namespaces, in which it has all capabilities. `is_root`: whether root calls it; then two users
    and groups exist in the namespace: 0 as 0, and the host's 65534 (nobody) as 1000. Otherwise only
    this process's own user and group exist there, as 1000. Raises `OSError`.
    """
    process, more = os.getpid(), f"\n{INSIDE} {NOBODY} 1"
    ids = [("uid_map", os.geteuid()), ("gid_map", os.getegid())]
    texts = {name: f"0 {own} 1{more}" if is_root else f"{INSIDE} {own} 1" for name, own in ids}
    read, write = os.pipe()
    helper = os.fork()
    if not helper:  # only a process outside may map two users
        try:
            os.close(write)
            os.read(read, 1)
            for name, text in (texts if is_root else {"setgroups": "deny", **texts}).items():
                with open(f"/proc/{process}/{name}", "w") as file:
                    file.write(text)
            os._exit(0)
        finally:
            os._exit(1)
    try:
        call_libc("unshare", NEWUSER | NEWNS | NEWNET | NEWIPC | NEWUTS)
    finally:
        os.close(write)
        refused = os.waitpid(helper, 0)[1]
    if refused:
        raise OSError(EPERM, "mapping users is not permitted")


def build_root(visible: Sequence[str]) -> None:
    """Give this process, in a mount namespace of its own, a root folder in memory that holds only
    the absolute paths `visible`, read-only, the folders `/box` (empty) and `/proc`, and the devices
    null, zero, random and urandom. `/tmp` is a link to `/box`, unless a path in `visible` lies in
    `/tmp`. Raises `OSError`.
    """
    mount("none", "/", "", RECURSIVE | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "size=1m,mode=0755")
    os.mkdir("/tmp/.old")
    os.chdir("/tmp")
    call_libc("syscall", PIVOT_ROOT[platform.machine()], ".", "./.old")
    os.chdir("/")
    for path in visible:
        _show(path)
    for folder in (FOLDER, "/proc", "/dev"):
        os.makedirs(folder, exist_ok=True)
    if not os.path.lexists("/tmp"):
        os.symlink(FOLDER, "/tmp")
    # Another /proc can be mounted only where a whole one is; programs never see this one.
    mount("/.old/proc", "/proc", "", BIND | RECURSIVE)
    make_read_only("/proc")
    for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        open(device, "w").close()
        mount(f"/.old{device}", device, "", BIND)
    os.symlink("/proc/self/fd", "/dev/fd")
    os.symlink(FOLDER, "/dev/shm")  # where semaphores of multiprocessing are kept
    call_libc("umount2", "/.old", DETACH)
    os.rmdir("/.old")
    make_read_only("/", below=False)


def _show(path: str) -> None:
    """Show `path` of the old root at its place in the new one. A symbolic link, also one on the
    way, is shown as such, and so is what it leads to.
    """
    target, old, rest = "", "", path.strip("/").split("/")
    while rest:
        target, rest = f"{target}/{rest[0]}", rest[1:]
        old = "/.old" + target
        if os.path.islink(old):
            if not os.path.lexists(target):
                os.symlink(os.readlink(old), target)
            leads = os.path.join(os.path.dirname(target), os.readlink(old), *rest)
            _show(os.path.normpath(leads))
            return
        if not os.path.lexists(target):
            if os.path.isdir(old):
                os.mkdir(target)
            elif os.path.exists(old):
                open(target, "w").close()
    if os.path.exists(old) and not os.path.samefile(old, target):  # not in a folder that is shown
        mount(old, target, "", BIND | RECURSIVE)
        make_read_only(target)

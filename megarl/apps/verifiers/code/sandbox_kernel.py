"""What a sandbox asks of the Linux kernel: namespaces, mounts, capabilities, seccomp and limits.

Runs in processes that import only the standard library. Sources: namespaces(7), user_namespaces(7),
pivot_root(2), mount_setattr(2), capabilities(7), seccomp(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Sequence

libc = ctypes.CDLL(None, use_errno=True)

NEWNS, NEWUTS, NEWIPC = 0x00020000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
ANY_NAMESPACE = 0x7E020000
"""All flags of clone(2) that make a namespace."""
RDONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
DETACH = 2
FOLDER = "/box"
"""The folder in which programs may write."""
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
AT_RECURSIVE = 0x8000

SET_DEATH_SIGNAL, SET_DUMPABLE, DROP_BOUNDING = 1, 4, 24
SET_SUBREAPER, SET_NO_NEW_PRIVILEGES, SET_SECCOMP, AMBIENT = 36, 38, 22, 47
LAST_CAPABILITY = 63

NOBODY = 65534
"""User id on the host of the programs of a sandbox that root has started."""
INSIDE = 1000
"""The same user's id as the programs see it."""

DENIED = {
    # name: (number on x86_64, number on aarch64); None: not on that machine
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
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
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
    "acct": (163, 89),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    # memory that counts for no process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
"""System calls that end with EPERM in a program of a sandbox."""
CLONE, CLONE3 = (56, 220), 435
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS = 1, 38


def check(result: int, what: str) -> None:
    """Raise `OSError`, naming `what`, if a call of the C library returned -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, *values: int) -> None:
    """Call prctl(2). Raises `OSError`."""
    filled = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    check(libc.prctl(option, *filled), f"prctl {option}")


def tie_to_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends. `parent`: its id; a parent that has
    ended before ends this process at once.
    """
    prctl(SET_DEATH_SIGNAL, 9)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def unshare(flags: int) -> None:
    """Move this process to new namespaces. Raises `OSError`."""
    check(libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2). Raises `OSError`."""
    found = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    check(found, f"mount {kind or source} at {target}")


def unmount(target: str) -> None:
    """Detach a mount from the tree. Raises `OSError`."""
    check(libc.umount2(target.encode(), DETACH), f"umount {target}")


def make_read_only(path: str, *, below: bool = True) -> None:
    """Make a mount, and with `below` all mounts below it, read-only, without devices and
    set-user-id programs. Raises `OSError`; Linux before 5.12 cannot do it.
    """
    wanted = struct.pack("QQQQ", RDONLY | NOSUID | NODEV, 0, 0, 0)
    flags = AT_RECURSIVE if below else 0
    found = libc.syscall(MOUNT_SETATTR, -100, path.encode(), flags, wanted, len(wanted))
    check(found, "mount_setattr")


def pivot_root(new: str, old: str) -> None:
    """Make the mount at `new` the root and put the present root at `old`. Raises `OSError`."""
    check(libc.syscall(PIVOT_ROOT[platform.machine()], new.encode(), old.encode()), "pivot_root")


def drop_capabilities() -> None:
    """Give up all capabilities, for good: they do not come back through a set-user-id program."""
    prctl(SET_NO_NEW_PRIVILEGES, 1)
    prctl(AMBIENT, 4)
    for number in range(LAST_CAPABILITY + 1):  # those that the kernel does not know are refused
        libc.prctl(DROP_BOUNDING, number, 0, 0, 0)


def clear_capabilities() -> None:
    """Empty the sets of capabilities of this process. Raises `OSError`."""
    head, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    check(libc.capset(head, none), "capset")


def deny_system_calls() -> bool:
    """Install a seccomp filter under which the calls of `DENIED`, and clone(2) into a namespace,
    fail with EPERM. Returns False on a machine whose numbers of system calls are not known here.
    """
    machine = platform.machine()
    if machine not in AUDIT:
        return False
    column = 0 if machine == "x86_64" else 1
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    errno, allow, kill = 0x00050000, 0x7FFF0000, 0x80000000
    rules = [
        (load, 0, 0, 4),  # architecture: the numbers of 32-bit calls are others
        (equal, 1, 0, AUDIT[machine]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # number of the call
    ]
    if machine == "x86_64":
        rules += [(at_least, 0, 1, 0x40000000), (give, 0, 0, errno | ENOSYS)]  # x32
    for numbers in DENIED.values():
        if numbers[column] is not None:
            rules += [(equal, 0, 1, numbers[column]), (give, 0, 0, errno | EPERM)]
    # The filter cannot read what clone3 points to; the C library then falls back to clone.
    rules += [(equal, 0, 1, CLONE3), (give, 0, 0, errno | ENOSYS)]
    rules += [
        (equal, 0, 3, CLONE[column]),
        (load, 0, 0, 16),  # its flags
        (any_bit, 0, 1, ANY_NAMESPACE),
        (give, 0, 0, errno | EPERM),
        (give, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code))
    held = ctypes.create_string_buffer(program)
    prctl(SET_SECCOMP, 2, ctypes.addressof(held))
    return True


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, or keep the present one if that is lower."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def new_user(helper_writes: bool) -> None:
    """Move this process, which must have one thread, to new user, mount, network, IPC and UTS
    namespaces, in which it has all capabilities. `helper_writes`: it is root's, so that a process
    outside maps two users, root and `NOBODY` as `INSIDE`; otherwise its own user is `INSIDE`.
    Raises `OSError`.
    """
    flags = NEWUSER | NEWNS | NEWNET | NEWIPC | NEWUTS
    user, group, process = os.geteuid(), os.getegid(), os.getpid()
    if not helper_writes:
        unshare(flags)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE} {user} 1")
        _write("/proc/self/gid_map", f"{INSIDE} {group} 1")
        return
    read, write = os.pipe()
    helper = os.fork()
    if not helper:
        os.close(write)
        os.read(read, 1)
        try:
            _write(f"/proc/{process}/uid_map", f"0 {user} 1\n{INSIDE} {NOBODY} 1")
            _write(f"/proc/{process}/gid_map", f"0 {group} 1\n{INSIDE} {NOBODY} 1")
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    os.close(read)
    try:
        unshare(flags)
    finally:
        os.close(write)
        status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if status:
        raise OSError(status, f"mapping users: {os.strerror(status)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(visible: Sequence[str]) -> None:
    """Give this process, in a mount namespace of its own, a root folder in memory that holds only
    the paths `visible`, read-only, the empty folders `FOLDER` and `/proc`, and four devices. `/tmp`
    is `FOLDER`, unless something in it is to be visible. Raises `OSError`.
    """
    mount("none", "/", "", RECURSIVE | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "size=1m,mode=0755")
    os.mkdir("/tmp/.old")
    os.chdir("/tmp")
    pivot_root(".", "./.old")
    os.chdir("/")
    shown = "/.old"
    for path in sorted(visible, key=lambda path: path + "/"):  # a folder before what it holds
        if not path.startswith(shown + "/"):
            shown = path if _show(path) else shown
    for folder in (FOLDER, "/proc", "/dev"):
        os.makedirs(folder, exist_ok=True)
    if not os.path.lexists("/tmp"):
        os.symlink(FOLDER, "/tmp")
    # Another /proc can be mounted only where a whole one is; programs never see this one.
    mount("/.old/proc", "/proc", "", BIND | RECURSIVE)
    make_read_only("/proc")
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    for device in devices:
        open(device, "w").close()
        mount(f"/.old{device}", device, "", BIND)
    os.symlink("/proc/self/fd", "/dev/fd")
    os.symlink(FOLDER, "/dev/shm")  # where semaphores of multiprocessing are kept
    unmount("/.old")
    os.rmdir("/.old")
    make_read_only("/", below=False)


def _show(path: str) -> bool:
    """Show `path` of the old root at its place in the new one. A symbolic link, also one on the
    way, is not followed but shown as such. Returns whether a file or folder is shown.
    """
    parts = path.strip("/").split("/")
    for depth in range(1, len(parts) + 1):
        place = "/" + "/".join(parts[:depth])
        old = "/.old" + place
        if os.path.islink(old):
            if not os.path.lexists(place):
                os.symlink(os.readlink(old), place)
            return False
        if depth < len(parts):
            if not os.path.isdir(place):
                os.mkdir(place)
            continue
        if not os.path.exists(old):
            return False
        if os.path.isdir(old):
            os.makedirs(place, exist_ok=True)
        elif not os.path.lexists(place):
            open(place, "w").close()
        mount(old, place, "", BIND | RECURSIVE)
        make_read_only(place)
    return True

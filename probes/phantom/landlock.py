"""Where namespaces are not to be had (a container, Ubuntu's AppArmor): a program that can write in one folder alone.

Two doors of the kernel's that any process may close behind itself, with all that it will start:

    Landlock   nothing is opened for writing, made, renamed, linked or deleted but below the folders given; devices are
               not opened for writing, so no GPU answers; nobody outside is traced, nor (Linux 6.12) sent a signal
    seccomp    what Landlock leaves open: modes, owners, times and attributes of files are set without effect, and what
               could truncate or write around it (truncate, openat2, io_uring, another machine's system calls) fails

Standard library alone, as all of the keeper.

Not stopped: sockets, those of daemons included; the network is cut off in Python alone (`boot`).

Source: the kernel's Documentation/userspace-api/landlock.rst and seccomp_filter.rst; the numbers: its
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

from probes.phantom.overlays import call, libc

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove a folder, a file; make any of seven kinds
_SCOPES_ABI, _SCOPES = 6, 3
"""Abstract sockets and signals."""
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_X86, _ARM = 0xC000_003E, 0xC000_00B7
_MACHINES = {"x86_64": _X86, "aarch64": _ARM}
_WITHOUT_EFFECT = {
    _X86: (90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452, 463, 466),
    _ARM: (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452, 463, 466),
}
"""chmod, chown, utime, setxattr, removexattr in all their forms."""
_TRUNCATES = {_X86: 76, _ARM: 45}
_REFUSED = (425, 437)
"""io_uring_setup, openat2."""
_OPENS = {_X86: ((2, 1), (257, 2)), _ARM: ((56, 2),)}
"""open, openat, and which argument of each holds the flags."""
_IOCTL, _SETFLAGS, _SETXFLAGS = {_X86: 16, _ARM: 29}, 0x4008_6602, 0x401C_5820
"""FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR, which is what chattr does."""
_O_ACCMODE, _O_TRUNC = 3, 0o1000
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06


def version() -> int:
    """Landlock's, at least 1.

    Raises:
        OSError: it is not to be had.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {platform.machine()}")
    return _call(_CREATE, None, ctypes.c_size_t(0), 1)


def restrict(folders: Sequence[str], devices: Sequence[str]) -> None:
    """From here on this process, and all that it starts, write in `folders` alone, and to `devices`.

    Raises:
        OSError: this kernel, or this container, does not allow it.
    """
    abi = version()
    changes = _CHANGES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    scopes = _SCOPES if abi >= _SCOPES_ABI else 0
    rules = struct.pack("=QQQ", changes, 0, scopes) if scopes else struct.pack("=Q", changes)
    ruleset = _call(_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    for path, allowed in (*((folder, changes) for folder in folders), *((device, _WRITE_FILE) for device in devices)):
        opened = os.open(path, os.O_PATH)
        _call(_ADD, ruleset, 1, struct.pack("=Qi", allowed, opened), 0)
        os.close(opened)
    call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    _call(_RESTRICT, ruleset, 0)
    os.close(ruleset)
    program = b"".join(
        struct.pack("=HBBI", *instruction) for instruction in _filter(_MACHINES[platform.machine()], abi)
    )
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    call("prctl", _SET_SECCOMP, _FILTER, header, 0, 0)


def _filter(machine: int, abi: int) -> list[tuple[int, int, int, int]]:
    """The program of seccomp, as (code, steps if true, steps if false, value)."""
    refused = _REFUSED if abi >= 3 else (*_REFUSED, _TRUNCATES[machine])
    refuse, ignore = (_RETURN, 0, 0, _ERRNO | 13), (_RETURN, 0, 0, _ERRNO)
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), refuse, (_LOAD, 0, 0, 0)]
    if machine == _X86:
        steps += [(_AT_LEAST, 0, 1, 0x4000_0000), refuse]  # the x32 forms
    for numbers, answer in ((_WITHOUT_EFFECT[machine], ignore), (refused, refuse)):
        for number in numbers:
            steps += [(_EQUAL, 0, 1, number), answer]
    steps += [(_EQUAL, 0, 5, _IOCTL[machine]), (_LOAD, 0, 0, 24)]
    steps += [(_EQUAL, 1, 0, _SETFLAGS), (_EQUAL, 0, 1, _SETXFLAGS), refuse, (_RETURN, 0, 0, _ALLOW)]
    for number, argument in _OPENS[machine]:  # opened to read and truncated: older Landlocks see no writing in it
        flags = [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, _O_TRUNC | _O_ACCMODE), (_EQUAL, 0, 1, _O_TRUNC)]
        steps += [(_EQUAL, 0, 5, number), *flags, refuse, (_RETURN, 0, 0, _ALLOW)]
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


def _call(number: int, *arguments: object) -> int:
    return_value: int = libc.syscall(number, *arguments)
    if return_value < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return return_value

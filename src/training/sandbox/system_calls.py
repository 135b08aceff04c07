"""The filter of system calls that a program in the sandbox has, as the kernel reads one.

It closes what limits and namespaces leave open: memory that belongs to no process (anonymous
files, System V's segments and queues, keys), new user namespaces, in which everybody may mount file
systems without a size, and parts of the kernel that programs have no use for.
"""

from __future__ import annotations

import errno
import platform
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "add_key": 248,
        "bpf": 321,
        "io_uring_setup": 425,
        "keyctl": 250,
        "memfd_create": 319,
        "memfd_secret": 447,
        "msgget": 68,
        "perf_event_open": 298,
        "request_key": 249,
        "setns": 308,
        "shmget": 29,
        "unshare": 272,
        "userfaultfd": 323,
    },
    "aarch64": {
        "add_key": 217,
        "bpf": 280,
        "io_uring_setup": 425,
        "keyctl": 219,
        "memfd_create": 279,
        "memfd_secret": 447,
        "msgget": 186,
        "perf_event_open": 241,
        "request_key": 218,
        "setns": 268,
        "shmget": 194,
        "unshare": 97,
        "userfaultfd": 282,
    },
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_NEW_USER = 0x10000000
_FOREIGN = 0x40000000
"""Numbers from here on are of x86's other calling convention, which would pass by all others."""

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Where the kernel's record of a call has them, in bytes."""
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def has_filter(machine: str = platform.machine()) -> bool:
    """Whether there is a filter for this kind of processor."""
    return machine in _ARCHITECTURES


def build_filter(machine: str = platform.machine()) -> bytes:
    """The filter, as classic BPF: an instruction is (code, skip if true, skip if false, value)."""
    refuse = _instruction(_RETURN, value=_ERROR | errno.EPERM)
    allow = _instruction(_RETURN, value=_ALLOW)
    parts = [
        _instruction(_LOAD, value=_ARCHITECTURE),
        _instruction(_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _instruction(_RETURN, value=_KILL),
        _instruction(_LOAD, value=_NUMBER),
        _instruction(_IF_AT_LEAST, 0, 1, _FOREIGN),
        refuse,
        # C libraries then make threads by clone, whose flags can be read here.
        _instruction(_IF_EQUAL, 0, 1, _CLONE3),
        _instruction(_RETURN, value=_ERROR | errno.ENOSYS),
    ]
    for number in _NUMBERS[machine].values():
        parts += [_instruction(_IF_EQUAL, 0, 1, number), refuse]
    parts += [
        _instruction(_IF_EQUAL, 0, 3, _CLONE[machine]),
        _instruction(_LOAD, value=_FIRST_ARGUMENT),
        _instruction(_IF_ANY_BIT, 0, 1, _NEW_USER),
        refuse,
        allow,
    ]
    return b"".join(parts)


def _instruction(code: int, if_true: int = 0, if_false: int = 0, value: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)

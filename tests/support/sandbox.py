"""Run a program in a sandbox that refuses some system calls: ``python -m tests.support.sandbox NUMBER... -- PROGRAM``.

A seccomp filter, as containers use it: the calls fail with EPERM, for the program and its children. x86-64 only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Final

MEMFD_CREATE: Final = 319  # <asm/unistd_64.h>
PROCESS_VM_READV: Final = 310
PIDFD_OPEN: Final = 434
IS_POSSIBLE: Final = platform.machine() == "x86_64"

_PR_SET_NO_NEW_PRIVS: Final = 38  # <linux/prctl.h>
_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2  # <linux/seccomp.h>
_RET_ALLOW: Final = 0x7FFF0000
_RET_EPERM: Final = 0x00050000 | 1
_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS: of `struct seccomp_data`, whose first word is the call's number
_JUMP_EQUAL: Final = 0x15
_RETURN: Final = 0x06


def refuse(numbers: list[int]) -> None:
    """Refuse these system calls to this process from now on."""
    program = struct.pack("HBBI", _LOAD, 0, 0, 0)
    for place, number in enumerate(numbers):
        program += struct.pack("HBBI", _JUMP_EQUAL, len(numbers) - place, 0, number)
    program += struct.pack("HBBI", _RETURN, 0, 0, _RET_ALLOW)
    program += struct.pack("HBBI", _RETURN, 0, 0, _RET_EPERM)
    kept = ctypes.create_string_buffer(program)
    head = struct.pack("HP", len(program) // 8, ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) or libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.create_string_buffer(head), zero, zero
    ):
        raise OSError(ctypes.get_errno(), "no seccomp filter")


def main() -> None:
    """Refuse, then become the program."""
    split = sys.argv.index("--")
    refuse([int(number) for number in sys.argv[1:split]])
    os.execv(sys.argv[split + 1], sys.argv[split + 1 :])


if __name__ == "__main__":
    main()

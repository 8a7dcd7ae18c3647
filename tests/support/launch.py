"""Runs a command under limits that a test wants: refused system calls, resource limits, another user.

    python launch.py [--refuse CALL=ERRNO]... [--limit NAME=VALUE]... [--user UID] -- COMMAND ARGS...

A refused call answers ERRNO without reaching the kernel's code, as under a container's seccomp profile. Nothing but
the standard library is used, and nothing outlives the command: a filter, unlike a sysctl, is the command's own.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Mapping

# The io_uring calls have one number on every architecture.
CALLS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}
SECCOMP_SET_MODE_FILTER, FLAG_ALL_THREADS = 1, 1
LOAD_WORD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
OFFSET_NR, OFFSET_ARCH = 0, 4  # in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_calls(refused: Mapping[str, int], *, all_threads: bool = False) -> None:
    """From now on, in this thread and what it starts, each call answers its errno. Cannot be undone.

    ``all_threads``: in those that run already, too.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOTSUP, f"no seccomp filter is written for {machine}")

    def statement(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    program = [
        statement(LOAD_WORD, OFFSET_ARCH),
        statement(JUMP_EQUAL, ARCHITECTURES[machine], 1, 0),
        statement(RETURN, ALLOW),
        statement(LOAD_WORD, OFFSET_NR),
    ]
    for call, code in refused.items():
        program += [statement(JUMP_EQUAL, CALLS[call], 0, 1), statement(RETURN, REFUSE | code)]
    program.append(statement(RETURN, ALLOW))

    libc = ctypes.CDLL(None, use_errno=True)
    packed = b"".join(program)
    filter_ = _Program(len(program), packed)
    # An ordinary user may only install a filter after giving up set-uid programs.
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or (
        libc.syscall(SECCOMP_CALL[machine], SECCOMP_SET_MODE_FILTER, FLAG_ALL_THREADS, ctypes.byref(filter_))
        if all_threads
        else libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0)
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")


def set_limit(name: str, value: int) -> None:
    """``name`` as in resource.RLIMIT_*, in lower case: "memlock", "nofile", "fsize"."""
    which: int = getattr(resource, f"RLIMIT_{name.upper()}")
    resource.setrlimit(which, (value, value))


def become(uid: int) -> None:
    """The user ``uid`` with no other group and no capability. Only root can."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _pair(word: str) -> tuple[str, str]:
    name, found, value = word.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=VALUE")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--refuse", type=_pair, action="append", default=[], metavar="CALL=ERRNO")
    parser.add_argument("--limit", type=_pair, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--user", type=int, metavar="UID")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    for name, value in options.limit:
        set_limit(name, int(value))
    if options.user is not None:
        become(options.user)
    if options.refuse:
        refuse_calls({call: getattr(errno, code) for call, code in options.refuse})
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    sys.exit(main())

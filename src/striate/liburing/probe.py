"""What the running kernel offers through io_uring, and what limits this process. Facts only: nothing is decided here.

Every function asks the kernel anew: limits, sysctls and seccomp filters change under a running process.
"""

from __future__ import annotations

import enum
import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from ._liburing import ffi, lib
from .ring import Ring, _call_error

# Numbers of the kernel's interface, which only ever grows. Written out because
# the header that liburing was built with may be older than the kernel.
_OP_NAMES = (
    "nop", "readv", "writev", "fsync", "read_fixed", "write_fixed", "poll_add", "poll_remove", "sync_file_range",
    "sendmsg", "recvmsg", "timeout", "timeout_remove", "accept", "async_cancel", "link_timeout", "connect",
    "fallocate", "openat", "close", "files_update", "statx", "read", "write", "fadvise", "madvise", "send", "recv",
    "openat2", "epoll_ctl", "splice", "provide_buffers", "remove_buffers", "tee", "shutdown", "renameat", "unlinkat",
    "mkdirat", "symlinkat", "linkat", "msg_ring", "fsetxattr", "setxattr", "fgetxattr", "getxattr", "socket",
    "uring_cmd", "send_zc", "sendmsg_zc", "read_multishot", "waitid", "futex_wait", "futex_wake", "futex_waitv",
    "fixed_fd_install", "ftruncate", "bind", "listen", "recv_zc", "epoll_wait", "readv_fixed", "writev_fixed", "pipe",
)  # fmt: skip


class Features(enum.IntFlag):
    """IORING_FEAT_* of a ring; the comment is the kernel that brought it. Bits without a name are kept."""

    SINGLE_MMAP = 1 << 0  # 5.4
    NODROP = 1 << 1  # 5.5
    SUBMIT_STABLE = 1 << 2  # 5.5
    RW_CUR_POS = 1 << 3  # 5.6
    CUR_PERSONALITY = 1 << 4  # 5.6
    FAST_POLL = 1 << 5  # 5.7
    POLL_32BITS = 1 << 6  # 5.9
    SQPOLL_NONFIXED = 1 << 7  # 5.11
    EXT_ARG = 1 << 8  # 5.11
    NATIVE_WORKERS = 1 << 9  # 5.12
    RSRC_TAGS = 1 << 10  # 5.13
    CQE_SKIP = 1 << 11  # 5.17
    LINKED_FILE = 1 << 12  # 5.18
    REG_REG_RING = 1 << 13  # 6.3
    RECVSEND_BUNDLE = 1 << 14  # 6.10
    MIN_TIMEOUT = 1 << 15  # 6.12
    RW_ATTR = 1 << 16  # 6.14
    NO_IOWAIT = 1 << 17  # 6.15


@dataclass(frozen=True)
class OpProbe:
    """``ops``: names of the operations that the kernel accepts ("read", "fsync", ...; "op63" for one unknown here)."""

    ops: frozenset[str]
    op_last: int  # highest number that the kernel knows

    def supports(self, op: str) -> bool:
        """Raises ValueError for a name that no kernel known here has: a typing mistake must not read as "no"."""
        if op not in _OP_NAMES and op not in self.ops:
            raise ValueError(f"no such operation: {op!r}")
        return op in self.ops


@dataclass(frozen=True)
class Limits:
    """What this process may ask for. None: no limit (memlock), or not told by this kernel (the others)."""

    kernel_release: str
    io_uring_disabled: int | None  # sysctl: 0 free, 1 for CAP_SYS_ADMIN and io_uring_group only, 2 for nobody
    memlock_soft_bytes: int | None  # registered buffers of an ordinary user count against it
    memlock_hard_bytes: int | None
    entries_max: int | None  # submission slots of one ring
    completions_max: int | None


def probe() -> OpProbe:
    """Which operations the kernel accepts. OSError when no ring can be made, or before Linux 5.6, which cannot tell."""
    with Ring(2) as ring:
        found = lib.io_uring_get_probe_ring(ring._ring)
        if found == ffi.NULL:
            raise _call_error("io_uring_get_probe_ring", errno.EOPNOTSUPP)
        try:
            last = int(found.last_op)
            ops = frozenset(
                _OP_NAMES[op] if op < len(_OP_NAMES) else f"op{op}"
                for op in range(last + 1)
                if lib.io_uring_opcode_supported(found, op)
            )
        finally:
            lib.io_uring_free_probe(found)
    return OpProbe(ops=ops, op_last=last)


def features() -> Features:
    """The features that the kernel gives a plain ring. OSError when no ring can be made."""
    with Ring(2) as ring:
        return Features(ring.features)


def limits() -> Limits:
    """Never raises: a figure that cannot be had is None."""
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value
        for value in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    entries_max, completions_max = _ring_size_max()
    return Limits(
        kernel_release=os.uname().release,
        io_uring_disabled=_sysctl_disabled(),
        memlock_soft_bytes=soft,
        memlock_hard_bytes=hard,
        entries_max=entries_max,
        completions_max=completions_max,
    )


def available() -> tuple[bool, str]:
    """Whether a ring can be made and completes an operation here, and a sentence that says why not ("" if it can)."""
    try:
        with Ring(2) as ring:
            ring.queue_nop(user_data=1)
            ring.submit()
            # A nop completes within the submission: what is not there after a second never comes.
            result = ring.wait(timeout_s=1.0).result
        return (
            (True, "")
            if result == 0
            else (False, f"a nop came back with {errno.errorcode.get(-result, result)}")
        )
    except OSError as error:
        return False, _why_not(error)


def liburing_version() -> tuple[int, int] | None:
    """Major and minor number of the liburing built in; None before 2.4, which does not tell."""
    version = (lib.liburing_version_major(), lib.liburing_version_minor())
    return None if version == (0, 0) else version


def _why_not(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    said = f"{error.strerror or error} ({name})"
    disabled = _sysctl_disabled()
    if error.errno == errno.EPERM and disabled == 2:
        return f"{said}: switched off for everybody by the sysctl kernel.io_uring_disabled=2"
    if error.errno == errno.EPERM and disabled == 1:
        return f"{said}: kernel.io_uring_disabled=1 leaves it to CAP_SYS_ADMIN and kernel.io_uring_group"
    if error.errno in (errno.EPERM, errno.EACCES):
        return (
            f"{said}: refused by a seccomp filter or a security module; container runtimes do so by default"
        )
    if error.errno == errno.ENOSYS:
        return f"{said}: this kernel, or the sandbox around this process, has no io_uring"
    if error.errno == errno.ENOMEM:
        return f"{said}: no memory, or RLIMIT_MEMLOCK too low (ulimit -l), which rings count against before Linux 5.12"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{said}: no descriptor left for the ring (ulimit -n)"
    return said


def _sysctl_disabled() -> int | None:
    try:
        return int(Path("/proc/sys/kernel/io_uring_disabled").read_text())
    except (OSError, ValueError):
        return None  # before Linux 6.6, or no /proc


def _ring_size_max() -> tuple[int | None, int | None]:
    """The kernel tells only by cutting down what is too much. The ring lives for a moment (some 3 MiB)."""
    ring = ffi.new("struct io_uring *")
    params = ffi.new("struct io_uring_params *", {"flags": lib.IORING_SETUP_CLAMP})
    if lib.io_uring_queue_init_params(2**31, ring, params) < 0:
        return None, None
    lib.io_uring_queue_exit(ring)
    return int(params.sq_entries), int(params.cq_entries)

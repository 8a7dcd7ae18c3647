"""Which engine moves the bytes, and what happens when the one asked for cannot.

``"auto"`` takes io_uring where the kernel and the container allow it, else the
posix engine, and says so once. ``"uring"`` and ``"posix"`` take that one or
raise. An ``_engine.Io`` (tests: one with faults) is taken as it is.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from striate import _engine
from striate.drives import memlock_limit_bytes
from striate.errors import EngineFallback, EngineUnavailable
from striate.notices import warn

__all__ = ["DriveUse", "Engine", "EngineChoice"]

EngineChoice = Literal["auto", "uring", "posix"] | _engine.Io

_URING_REASONS = {
    errno.EPERM: "a sysctl (kernel.io_uring_disabled) or a seccomp profile (Docker's default is one) forbids it",
    errno.ENOSYS: "the kernel or the sandbox does not have it",
    errno.EACCES: "a security module forbids it",
    errno.EOPNOTSUPP: "the kernel does not support what is needed of it",
    errno.ENOMEM: "not enough memory may be locked",
    errno.EMFILE: "the process has too many files open (ulimit -n)",
    errno.ENFILE: "the system has too many files open",
    errno.EINVAL: "the kernel refuses its parameters",
}

# What other rings, files or memory of this process may have caused, and what may be otherwise at the next save.
_PASSING = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN}

# Once for each reason and process: a training loop saves for weeks.
_told: set[str] = set()
_telling = threading.Lock()


def _tell(reason: str, message: str) -> None:
    with _telling:
        if reason in _told:
            return
        _told.add(reason)
    warn(message, EngineFallback)


def _tell_memlock() -> None:
    # One for rings and registered buffers: which of them meets the limit first
    # depends on how many saves run at once.
    _tell(
        "memlock",
        f"little memory may be locked ({_memlock()}): io_uring goes without registered buffers, at slightly more "
        "CPU, and where not even its rings fit, the posix engine is used. Raise the limit (ulimit -l) to silence this.",
    )


def _memlock() -> str:
    limit = memlock_limit_bytes()
    return f"RLIMIT_MEMLOCK is {'unlimited' if limit is None else f'{limit} bytes'}"


def _why(code: int) -> str:
    name = "EOPNOTSUPP" if code == errno.EOPNOTSUPP else errno.errorcode.get(code, str(code))
    limit = f", {_memlock()}" if code == errno.ENOMEM else ""
    return f"{_URING_REASONS.get(code, os.strerror(code))} ({name}{limit})"


_setup_errors: dict[int, int] = {}  # by process: a child may be in another sandbox


def _setup_error() -> int:
    """The errno that io_uring answers here, 0 if it works."""
    pid = os.getpid()
    error = _setup_errors.get(pid)
    if error is None:
        error = _engine.probe().setup_error
        if error not in _PASSING:
            _setup_errors[pid] = error
    return error


@dataclass(frozen=True)
class DriveUse:
    """How one drive was used by a save or a load. Sizes in bytes, times in seconds.

    ``drive``: its path; of a checkpoint in one file, that of the file.
    ``busy_s``: while at least one transfer was on its way. The drive that is busy nearly all of ``elapsed_s`` is the
    one that the others wait for.
    ``flight_s``: what all its transfers took, added up; by ``transfers``, how long one takes.
    ``errors``: transfers that failed, those that were tried again with success too.
    """

    drive: str
    bytes: int = 0
    transfers: int = 0
    busy_s: float = 0.0
    flight_s: float = 0.0
    errors: int = 0

    @property
    def mib_per_s(self) -> float:
        """MiB/s while it was busy."""
        return self.bytes / self.busy_s / 2**20 if self.busy_s else 0.0

    def and_of(self, more: _engine.FileStats) -> DriveUse:
        """This and what one more run of the engine did."""
        return DriveUse(
            self.drive,
            self.bytes + more.bytes,
            self.transfers + more.transfers,
            self.busy_s + more.busy_s,
            self.flight_s + more.flight_s,
            self.errors + more.errors,
        )


class Engine:
    """An engine for one call of striate.

    ``stats`` gathers the runs, oldest first; ``uses`` what the runs that moved a checkpoint's data did on each drive.
    ``workers``: threads at most, ``io_depth``: blocks (or groups) in flight for each; 0: as fits the machine and files.
    """

    def __init__(self, choice: EngineChoice = "auto", *, workers: int = 0, io_depth: int = 0) -> None:
        self.workers, self.io_depth = workers, io_depth
        self.may_fall_back = choice == "auto"
        self.stats: list[_engine.Stats] = []
        self.uses: dict[str, DriveUse] = {}
        if isinstance(choice, _engine.Io):
            self.io = choice
            return
        if choice not in ("auto", "uring", "posix"):
            raise ValueError(f'engine is "auto", "uring" or "posix", not {choice!r}')
        if choice == "posix":
            self.io = _engine.Io("posix")
            return
        refused = _setup_error()
        if refused and choice == "uring":
            raise EngineUnavailable(
                f"io_uring was asked for and cannot be used: {_why(refused)}. Nothing was touched. "
                'Allow it, or pass engine="posix" or engine="auto".'
            )
        if refused:
            self._fall_back(refused)
        else:
            self.io = _engine.Io("uring")

    def _fall_back(self, refused: int) -> None:
        if refused == errno.ENOMEM and memlock_limit_bytes() is not None:
            _tell_memlock()
        else:
            _tell(
                f"uring {refused}",
                f"io_uring cannot be used: {_why(refused)}. The posix engine is used instead: as safe, "
                'and for large transfers about as fast. Pass engine="posix" to silence this.',
            )
        self.io = _engine.Io("posix")

    def run(
        self,
        direction: Literal["write", "read"],
        files: Sequence[_engine.File],
        jobs: NDArray[np.void],
        extents: NDArray[np.void],
        *,
        drives: Sequence[str] = (),
        **options: Any,
    ) -> NDArray[np.void]:
        """One run of the engine, with the options of _engine.Io.run; the result table.

        drives: of each file its drive's path, for ``uses``; none for what is no data of a checkpoint.
        Falls back to posix if the ring itself fails and "auto" was asked.

        Raises _engine.RunError, which the caller words: only it knows the paths.
        """
        options = {"workers_max": self.workers, "depth": self.io_depth, **options}
        try:
            results, stats = self.io.run(direction, files, jobs, extents, **options)
        except _engine.RunError as e:
            if e.code != _engine.ERING:
                raise
            if not self.may_fall_back:
                raise EngineUnavailable(
                    f"io_uring failed in use: {_why(-e.detail)}. Nothing was committed. "
                    'Allow it, or pass engine="posix" or engine="auto".'
                ) from None
            # Jobs carry absolute offsets: doing them all again is the same work, not more.
            self._fall_back(-e.detail)
            results, stats = self.io.run(direction, files, jobs, extents, **options)
        self.stats.append(stats)
        for drive, use in zip(drives, stats.files, strict=False):
            self.uses[drive] = self.uses.get(drive, DriveUse(drive)).and_of(use)
        if stats.register_error == errno.ENOMEM and memlock_limit_bytes() is not None:
            _tell_memlock()
        elif stats.register_error:
            _tell(
                f"register {stats.register_error}",
                f"buffers could not be registered with io_uring: {os.strerror(stats.register_error)} "
                f"({errno.errorcode.get(stats.register_error)}). It works without, at slightly more CPU.",
            )
        return results

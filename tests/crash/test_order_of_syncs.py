"""The system calls of a save, as the kernel saw them: their order, and that there is no door beside the engine's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crash import jobs
from crash.checkpoints import NAME, save

STALE = ".striate-" + "5a" * 16

# System calls under which nothing on a drive changes. Whatever else touches
# the directory must be an operation that the engine recorded.
HARMLESS = {
    *("close", "read", "pread64", "preadv", "preadv2", "lseek", "getdents64", "fcntl", "dup", "dup2", "dup3"),
    *("stat", "lstat", "fstat", "newfstatat", "statx", "statfs", "fstatfs", "readlink", "readlinkat"),
    *("access", "faccessat", "faccessat2", "getxattr", "lgetxattr", "fgetxattr", "poll", "epoll_ctl"),
}
OPERATIONS = {
    "openat": "open",
    "flock": "lock",
    "fchmod": "chmod",
    "fchown": "chown",
    "fallocate": "allocate",
    "ftruncate": "truncate",
    "pwritev": "write",
    "pwrite64": "write",
    "fsync": "sync",
    "renameat": "rename",
    "unlinkat": "unlink",
}


@dataclass(frozen=True)
class Call:
    """A system call that touched the directory. ``begun`` and ``ended`` are its lines in the log."""

    name: str
    arguments: str
    begun: int
    ended: int

    def operation(self, directory: str) -> str:
        """The engine's word for it, or the call's own name where the engine has none."""
        if self.name == "fsync" and f"<{directory}>" in self.arguments:
            return "sync_directory"
        return OPERATIONS.get(self.name, f"system call {self.name}({self.arguments})")

    def changes(self) -> bool:
        if self.name in ("open", "openat", "openat2"):
            return re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC", self.arguments) is not None
        return self.name not in HARMLESS


def parse(log: str) -> Iterator[Call]:
    """The calls of an strace log with -f -y, in the order of their beginning."""
    begun: dict[str, tuple[str, str, int]] = {}
    calls = []
    for number, line in enumerate(log.splitlines()):
        if resumed := re.match(r"(\d+) +<\.\.\. (\w+) resumed>", line):
            name, arguments, start = begun.pop(resumed[1])
            assert name == resumed[2]
            calls.append(Call(name, arguments, start, number))
        elif called := re.match(r"(\d+) +(\w+)\((.*)", line):
            if line.endswith("<unfinished ...>"):
                begun[called[1]] = called[2], called[3], number
            else:
                calls.append(Call(called[2], called[3], number, number))
    return iter(sorted(calls, key=lambda call: call.begun))


def system_calls(processes: Any, tmp_path: Path, engine_name: str) -> tuple[list[Call], list[Any]]:
    """Every system call of one save, and what the engine recorded of it."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    log = tmp_path / "log"
    folder = tmp_path / "folder"
    path = folder / NAME
    folder.mkdir()
    save(1, path)
    # Something to sweep, a mode and an owner to keep: so that every operation of a save occurs.
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    (folder / STALE).write_bytes(b"left by a saver that died")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=jobs.traced_save, args=(theirs, str(path), engine_name))
    process.start()
    try:
        pid = ours.recv()
        tracer = subprocess.Popen(
            ["strace", "-f", "-y", "-s", "0", "-o", log, "-p", str(pid)], stderr=subprocess.PIPE, text=True
        )
        assert tracer.stderr is not None
        greeting = tracer.stderr.readline()
        if "attached" not in greeting:
            tracer.wait()
            pytest.skip(f"strace cannot attach here: {greeting.strip()}")
        ours.send("go")
        assert ours.poll(120)
        recorded = ours.recv()
        ours.send("end")
        process.join(60)
        tracer.communicate(timeout=60)
    finally:
        process.kill()
        process.join()
    return list(parse(log.read_text())), recorded


def test_data_is_synced_before_the_rename_and_the_rename_before_the_directory(
    tmp_path: Path, engine_name: str, processes: Any
) -> None:
    calls, _ = system_calls(processes, tmp_path, engine_name)
    folder = str(tmp_path / "folder")
    ours = [call for call in calls if folder in call.arguments and call.changes()]

    def only(operation: str) -> Call:
        (found,) = [call for call in ours if call.operation(folder) == operation]
        return found

    if engine_name == "posix":
        writes = [call for call in ours if call.operation(folder) == "write"]
    else:
        writes = [call for call in calls if call.name == "io_uring_enter"]
    assert len(writes) >= 2
    length, sync, rename, directory = map(only, ("truncate", "sync", "rename", "sync_directory"))
    assert f'"{NAME}"' in rename.arguments
    assert ".striate-" in sync.arguments
    assert max(call.ended for call in writes) < length.begun
    assert length.ended < sync.begun
    assert sync.ended < rename.begun
    assert rename.ended < directory.begun


def test_nothing_changes_a_drive_but_what_the_engine_recorded(
    tmp_path: Path, engine_name: str, processes: Any
) -> None:
    calls, recorded = system_calls(processes, tmp_path, engine_name)
    folder = str(tmp_path / "folder")
    seen = [call.operation(folder) for call in calls if folder in call.arguments and call.changes()]
    changing = [
        op
        for op, _, _, offset, _ in recorded
        if op not in ("read", "close")
        and not (op == "open" and not offset & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    ]
    if engine_name == "posix":
        assert Counter(seen) == Counter(changing)
    # The ring's writes are no system calls of their own.
    assert [op for op in seen if op != "write"] == [op for op in changing if op != "write"]
    assert "unlink" in seen
    assert "chmod" in seen


def test_the_log_is_read_right() -> None:
    """A call that another thread's line interrupts ends where it is resumed; an unknown call is a change."""
    log = (
        '7  openat(3</d>, ".striate-00", O_RDWR|O_CREAT|O_EXCL, 0666) = 4</d/.striate-00>\n'
        "7  pwritev(4</d/.striate-00>, [{iov_base=..., iov_len=4096}], 1, 0 <unfinished ...>\n"
        "8  fsync(4</d/.striate-00>) = 0\n"
        "7  <... pwritev resumed>) = 4096\n"
        "8  fsync(3</d>) = 0\n"
        '8  linkat(3</d>, "a", 3</d>, "b", 0) = 0\n'
    )
    calls = list(parse(log))
    assert [call.operation("/d") for call in calls][:4] == ["open", "write", "sync", "sync_directory"]
    assert calls[1].ended > calls[2].begun
    assert calls[4].changes()
    assert "linkat" in calls[4].operation("/d")

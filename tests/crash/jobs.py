"""What runs in other processes, to be killed, interrupted or limited there. Each function is a whole job.

A job reports through a pipe; what it sends before its end says how far it got.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from crash.checkpoints import beside, descriptors, save, state, version_at

import striate
from striate._engine import Fault, Io
from support.sandbox import NOBODY
from support.sanitizer import UNDER_ASAN

Pipe = Connection


def save_when_told(pipe: Pipe, path: str, engine: str, version: int, data_bytes: int) -> None:
    """Builds its state, says so, and saves once. The parent kills it somewhere on the way."""
    made = state(version, data_bytes=data_bytes)
    pipe.send("ready")
    pipe.recv()
    striate.save(made, path, engine=engine, chunk_bytes=4096)  # type: ignore[arg-type]
    pipe.send("saved")
    pipe.recv()


def interrupted_save(pipe: Pipe, path: str, engine: str, data_bytes: int, after_s: float) -> None:
    """SIGINT, as Ctrl-C sends it, ``after_s`` into a save; then another save in the same process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    made = state(2, data_bytes=data_bytes)
    before = descriptors()
    threads = threading.active_count(), len(os.listdir("/proc/self/task"))
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after_s, interrupt)
    outcome = "saved"
    timer.start()
    try:
        striate.save(made, path, engine=engine, chunk_bytes=4096)  # type: ignore[arg-type]
        timer.join()
    except KeyboardInterrupt:
        outcome = "interrupted"
    ended = time.monotonic()
    timer.join()
    report: dict[str, Any] = {
        "outcome": outcome,
        "after_s": ended - sent[0],
        "beside": beside(path),
        "descriptors": descriptors() == before,
        "threads": (threading.active_count(), len(os.listdir("/proc/self/task"))) == threads,
        "found": version_at(path, data_bytes=data_bytes),
    }
    save(3, path, engine=engine, data_bytes=data_bytes)
    report["next"] = version_at(path, data_bytes=data_bytes), beside(path)
    pipe.send(report)


def save_under_a_timer(pipe: Pipe, path: str, engine: str, data_bytes: int) -> None:
    """Signals every millisecond during a save and a load."""
    seen = 0

    def handler(*_: object) -> None:
        nonlocal seen
        seen += 1

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    save(2, path, engine=engine, data_bytes=data_bytes)
    found = version_at(path, data_bytes=data_bytes)
    loaded = striate.load(path, engine=engine)  # type: ignore[arg-type]
    signal.setitimer(signal.ITIMER_REAL, 0)
    pipe.send((found, loaded["version"], seen))


def save_with_a_file_size_limit(pipe: Pipe, path: str, engine: str, data_bytes: int, limit: int) -> None:
    """RLIMIT_FSIZE is below what the save needs."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save(2, path, engine=engine, data_bytes=data_bytes)
        report: Any = "saved"
    except striate.DriveError as e:
        report = e.errno, e.filename, str(e), beside(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = version_at(path, data_bytes=data_bytes)
    save(3, path, engine=engine, data_bytes=data_bytes)
    pipe.send((report, found, version_at(path, data_bytes=data_bytes)))


def save_in_step(barrier: Barrier, path: str, engine: str, versions: list[int], data_bytes: int) -> None:
    """One save a round, begun at the same time as the others of that round."""
    for version in versions:
        made = state(version, data_bytes=data_bytes)
        barrier.wait(60)
        striate.save(made, path, engine=engine, chunk_bytes=4096)  # type: ignore[arg-type]
        barrier.wait(60)


def many_pairs(pipe: Pipe, path: str, engine: str, pairs: int, files_max: int) -> None:
    """Saves and loads under a low limit of open files; reports what the process holds early on and at the end."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, hard))
    early = None
    for n in range(pairs):
        save(n, path, engine=engine)
        assert version_at(path) == n
        if n % 3 == 0:
            striate.load(path, engine=engine)  # type: ignore[arg-type]
        if n == pairs // 10:
            early = held()
    pipe.send((early, held()))


def held() -> dict[str, int]:
    """What a process holds that could leak. Bytes of locked memory, else counts."""
    gc.collect()
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    return {
        "instrumented": UNDER_ASAN,
        "descriptors": len(descriptors()),
        "maps": len(lines),
        "threads": len(os.listdir("/proc/self/task")),
        "locked": int(fields["VmLck"].split()[0]) + int(fields["VmPin"].split()[0]),
        "resident_mib": int(fields["VmRSS"].split()[0]) >> 10,
    }


def rotate(pipe: Pipe, directory: str, engine: str, rounds: int, keep: int) -> None:
    """Save, load, rotate; every tenth save fails on the drive's side, each time elsewhere."""
    early, failed = None, 0
    standing: list[str] = []
    failing = ("open", "lock", "allocate", "write", "truncate", "sync", "rename")
    for n in range(rounds):
        path = os.path.join(directory, f"step-{n}")
        if n % 10 == 5:
            io = Io(engine, faults=[Fault(failing[failed % len(failing)], count=0)])  # type: ignore[arg-type]
            try:
                save(n, path, engine=io)
            except striate.DriveError:
                failed += 1
        else:
            save(n, path, engine=engine)
            standing.append(path)
            assert version_at(path) == n
        for old in standing[:-keep]:
            os.unlink(old)
        del standing[:-keep]
        if n == rounds // 10:
            early = held()
    pipe.send((early, held(), failed, sorted(os.listdir(directory)), standing))


class Loads(torch.utils.data.Dataset[int]):
    """A data set that loads a checkpoint for each item, as one of stored samples does."""

    def __init__(self, path: str, engine: str, length: int) -> None:
        self.path = path
        self.engine = engine
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        version: int = striate.load(self.path, engine=self.engine)["version"]  # type: ignore[arg-type]
        return version + 0 * index


def load_in_workers(pipe: Pipe, path: str, engine: str) -> None:
    """Rings and threads have existed here when the workers are forked; the parent saves on meanwhile."""
    for version in range(3):
        save(version, path, engine=engine)
    other = path + ".other"
    loader = torch.utils.data.DataLoader(
        Loads(path, engine, 24), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    found = []
    for batch in loader:
        found += batch.tolist()
        save(9, other, engine=engine)
    pipe.send((found, version_at(other)))


def fork_in_the_middle_of_a_save(pipe: Pipe, path: str, engine: str, data_bytes: int) -> None:
    """Children are forked while another thread saves, and end in each way that a child can."""
    made = state(2, data_bytes=data_bytes)
    failures: list[str] = []

    def work() -> None:
        try:
            striate.save(made, path, engine=engine, chunk_bytes=4096)  # type: ignore[arg-type]
        except BaseException as e:
            failures.append(repr(e))

    saver = threading.Thread(target=work)
    saver.start()
    while saver.is_alive() and not beside(path):
        time.sleep(0)
    statuses = []
    in_the_middle = bool(beside(path))
    for way in ("_exit", "collect", "sys.exit"):
        child = os.fork()
        if child == 0:
            try:
                if way == "collect":
                    gc.collect()
                if way == "sys.exit":
                    sys.exit(0)
                os._exit(0)
            except SystemExit:
                os._exit(0)
        statuses.append(os.waitpid(child, 0)[1])
    saver.join()
    pipe.send((statuses, in_the_middle, failures, version_at(path, data_bytes=data_bytes), beside(path)))


def fork_inside_a_callback(pipe: Pipe, path: str, engine: str, data_bytes: int) -> None:
    """The progress callback forks, and its child unwinds through the save's own frames."""
    made = state(2, data_bytes=data_bytes)
    statuses: list[int] = []
    there: list[bool] = []
    parent = os.getpid()

    def progress(done: int, total: int) -> None:
        if statuses or os.getpid() != parent:
            return
        child = os.fork()
        if child == 0:
            raise SystemExit
        statuses.append(os.waitpid(child, 0)[1])
        there.append(bool(beside(path)))

    try:
        striate.save(made, path, engine=engine, chunk_bytes=4096, progress=progress)  # type: ignore[arg-type]
    except SystemExit:
        os._exit(0)
    pipe.send((statuses, all(there), [], version_at(path, data_bytes=data_bytes), beside(path)))


def leave_a_child_alive(pipe: Pipe, path: str, engine: str, data_bytes: int) -> None:
    """Forks in the middle of a save and waits to be killed; the child lives on."""
    made = state(1, data_bytes=data_bytes)

    def progress(done: int, total: int) -> None:
        child = os.fork()
        if child:
            pipe.send(child)
        time.sleep(60)
        os._exit(1)

    striate.save(made, path, engine=engine, chunk_bytes=4096, progress=progress)  # type: ignore[arg-type]


def traced_save(pipe: Pipe, path: str, engine: str) -> None:
    """Saves once when told, and sends what the engine recorded."""
    io = Io(engine, trace=True)  # type: ignore[arg-type]
    made = state(2)
    pipe.send(os.getpid())
    pipe.recv()
    striate.save(made, path, engine=io, chunk_bytes=4096)
    pipe.send([(entry.op, entry.name, entry.to, entry.offset, entry.length) for entry in io.traces()])
    pipe.recv()


def save_from_a_truncated_file(
    pipe: Pipe, path: str, engine: str, source: str, frozen: bool, while_saving: bool
) -> None:
    """The tensor maps a file that is cut to half: before the save, or again and again while it runs."""
    mapped = torch.from_file(source, shared=True, size=os.path.getsize(source), dtype=torch.uint8)
    size = os.path.getsize(source)
    stop = threading.Event()

    def cut_and_grow() -> None:
        while not stop.is_set():
            os.truncate(source, size // 2)
            os.truncate(source, size)

    cutter = threading.Thread(target=cut_and_grow)
    if while_saving:
        cutter.start()
    else:
        os.truncate(source, size // 2)
    outcomes: list[Any] = []
    for _ in range(10 if while_saving else 1):
        try:
            striate.save({"mapped": mapped}, path, engine=engine, chunk_bytes=65536, frozen=frozen)  # type: ignore[arg-type]
            outcomes.append("saved")
        except striate.DriveError as e:
            outcomes.append((e.errno, e.filename, str(e), beside(path)))
    stop.set()
    if while_saving:
        cutter.join()
    pipe.send((outcomes, striate.verify(path).ok))


def save_as_nobody(pipe: Pipe, path: str, group: int | None = None) -> None:
    """An ordinary user's save over another's file. ``group``: a further one of that user's."""
    # Whatever is loaded at first use must be: the user may not read where it lies.
    save(0, path + ".warm")
    os.unlink(path + ".warm")
    if os.geteuid() == 0:
        os.setgroups([] if group is None else [group])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        save(2, path)
        pipe.send((0, "saved"))
    except PermissionError as e:
        pipe.send((e.errno, str(e)))


def interrupted_at_random(pipe: Pipe, path: str, engine: str, rounds: int, data_bytes: int) -> None:
    """Ctrl-C at a random moment of many saves in one process.

    Descriptors are not compared: Python raises between the return of an open and the assignment of its result, too.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    standing, interrupted, took_s = 0, 0, 0.0
    save(0, path, data_bytes=data_bytes)
    for n in range(1, rounds + 1):
        made = state(n, data_bytes=data_bytes)
        timer = threading.Timer(random.uniform(0, took_s), os.kill, (os.getpid(), signal.SIGINT))
        begun = time.monotonic()
        try:
            try:
                if n > 3:
                    timer.start()
                striate.save(made, path, engine=engine, chunk_bytes=4096)  # type: ignore[arg-type]
                took_s = time.monotonic() - begun
            finally:
                if n > 3:
                    timer.join()  # the interrupt comes here if the save was quicker
        except KeyboardInterrupt:
            interrupted += 1
        found = version_at(path, data_bytes=data_bytes)
        assert found in (standing, n)
        assert beside(path) == []
        standing = found
    pipe.send(interrupted)

"""One measurement: run one action in a forked child and report its time, CPU seconds and peak extra memory.

The child is a fork of a single-threaded benchmark: torch's thread pools must not have been used before (see
`single_threaded_torch`), because a fork has only the calling thread.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

KILL_GRACE_S = 10.0


class MeasurementFailed(Exception):
    """The child died or its action raised; the message carries the child's own words."""


@dataclass(frozen=True)
class Timing:
    """What a contender measured itself (fio does), in place of what the child would measure around it."""

    elapsed_s: float
    cpu_s: float | None


@dataclass(frozen=True)
class Sample:
    elapsed_s: float
    cpu_s: float | None  # user + system of the process and all its threads
    extra_bytes: int | None  # peak RSS during the action less the RSS before it; None: not known


def single_threaded_torch() -> None:
    """Keep torch's intra-op pool from starting here. OpenMP's pool does not survive a fork: a child would hang."""
    torch.set_num_threads(1)


def measure(
    action: Callable[[], Timing | None],
    *,
    warm_up: Callable[[], None] | None = None,
    enter: Callable[[], None] | None = None,
    prepare: Callable[[], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Sample:
    """Fork, then in the child: `prepare`, `warm_up`, `enter` (join a cgroup), `action`, which alone is timed, `check`.

    Memory counts from after `prepare` (what the action works on) and before the warm-up, so what lazily imported code
    or a buffer kept for later take is not hidden.
    Raises MeasurementFailed when one of them raises; KeyboardInterrupt ends the child first.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(writer, action, warm_up, enter, prepare, check)
    os.close(writer)
    try:
        with open(reader, "rb") as answers:
            answer = answers.read()
        _, status = os.waitpid(child, 0)
    except BaseException:
        _end(child)
        raise
    if status or not answer:
        code = os.waitstatus_to_exitcode(status)
        raise MeasurementFailed(answer.decode(errors="replace") or f"the child ended with status {code}")
    return Sample(**json.loads(answer))


def _child(
    writer: int,
    action: Callable[[], Timing | None],
    warm_up: Callable[[], None] | None,
    enter: Callable[[], None] | None,
    prepare: Callable[[], None] | None,
    check: Callable[[], None] | None,
) -> None:
    # SIGTERM as an exception, so that a running fio is ended by subprocess.run on the way out.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    status = 1
    try:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        if prepare is not None:
            prepare()
        # Memory that the parent freed and malloc kept would be used again, and be missing from what the action took.
        _give_back_free_memory()
        rss_bytes = reset_peak()
        if warm_up is not None:
            warm_up()
        if enter is not None:
            enter()
        cpu_start = _cpu_s()
        start_ns = time.perf_counter_ns()
        timing = action()
        elapsed_s = (time.perf_counter_ns() - start_ns) / 1e9
        cpu_s: float | None = _cpu_s() - cpu_start
        peak_bytes = _status_bytes("VmHWM")
        extra_bytes = None if rss_bytes is None or peak_bytes is None else max(0, peak_bytes - rss_bytes)
        if timing is not None:
            elapsed_s, cpu_s, extra_bytes = timing.elapsed_s, timing.cpu_s, None
        if check is not None:
            check()
        answer = json.dumps(asdict(Sample(elapsed_s, cpu_s, extra_bytes))).encode()
        status = 0
    except BaseException:
        answer = traceback.format_exc().encode()
    with contextlib.suppress(BaseException):
        with open(writer, "wb") as answers:
            answers.write(answer)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _exit_on_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _end(child: int) -> None:
    """End the child: politely, then for good."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + KILL_GRACE_S
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return
            time.sleep(0.02)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def reset_peak() -> int | None:
    """Set this process's peak RSS back to its RSS and return that, in bytes; None where the kernel does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _give_back_free_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it
        trim(0)


def _status_bytes(field: str) -> int | None:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind the benchmark as Ctrl-C does, so that its files and mounts go away."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt

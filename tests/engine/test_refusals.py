"""What a kernel, a container or a limit may refuse: the run goes on with less, or says clearly what failed."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from support.sandbox import REFUSABLE, run_python
from support.tables import Kind

# Saves and reads back 30 blocks with the engine named first, and prints what happened.
ROUND_TRIP = """
    import os, sys
    from pathlib import Path
    import numpy as np
    from striate._engine import Io, RunError
    from support.contents import cycling
    from support.tables import BLOCK, Kind, digests, found_digests, memory, open_descriptors, opened, tables, threads

    kind, folder = sys.argv[1], Path(sys.argv[2])
    block = int(sys.argv[3]) if len(sys.argv) > 3 else BLOCK
    if len(sys.argv) > 4:  # only now: the interpreter may lie where another user cannot look
        os.setgroups([])
        os.setresgid(*3 * [int(sys.argv[4])])
        os.setresuid(*3 * [int(sys.argv[4])])
    data = memory(30 * block, misalign=64)
    data[:] = np.frombuffer(cycling(len(data)), np.uint8)
    before = open_descriptors(), threads()
    io = Io(kind)
    try:
        with opened(io, folder) as file:
            jobs, extents = tables(data, block_bytes=block)
            results, stats = io.run("write", [file], jobs, extents, workers_max=4)
            assert found_digests(results) == digests(data, jobs)
            target = memory(len(data), misalign=64)
            jobs, extents = tables(target, block_bytes=block)
            jobs["digest"] = results["digest"]
            io.run("read", [file], jobs, extents, workers_max=4)
            assert np.array_equal(target, data)
        print("done", stats.registered_workers, stats.register_error, stats.rings_refused, stats.workers_count)
    except RunError as error:
        print("failed", error.code, error.detail, error.stats.rings_refused, error.stats.workers_count)
    assert (open_descriptors(), threads()) == before
"""

# In front of whatever this process was told, so that a child runs the same build.
TESTS = {
    "PYTHONPATH": os.pathsep.join([os.fspath(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
}
ERING = -10004


def outcome(printed: str) -> list[str]:
    return printed.split()


@pytest.mark.needs_io_uring
@pytest.mark.parametrize("refusal", REFUSABLE)
def test_a_refused_ring_is_an_error_that_carries_the_kernels_answer(refusal: str, tmp_path: Path) -> None:
    done = run_python(ROUND_TRIP, "uring", tmp_path, refuse={"io_uring_setup": refusal}, env=TESTS)
    wanted = -getattr(errno, refusal)
    assert outcome(done.stdout) == ["failed", str(ERING), str(wanted), "4", "0"]


@pytest.mark.needs_io_uring
@pytest.mark.parametrize("refusal", REFUSABLE)
def test_refused_registration_goes_on_without_and_says_so(refusal: str, tmp_path: Path) -> None:
    done = run_python(ROUND_TRIP, "uring", tmp_path, refuse={"io_uring_register": refusal}, env=TESTS)
    assert outcome(done.stdout) == ["done", "0", str(getattr(errno, refusal)), "0", "4"]


@pytest.mark.needs_io_uring
@pytest.mark.parametrize("refusal", ["EPERM", "ENOSYS", "EINVAL", "EACCES"])
def test_a_ring_that_may_not_be_entered_is_an_error_and_not_a_hang(refusal: str, tmp_path: Path) -> None:
    done = run_python(
        ROUND_TRIP, "uring", tmp_path, refuse={"io_uring_enter": refusal}, env=TESTS, timeout_s=60
    )
    assert outcome(done.stdout)[:3] == ["failed", str(ERING), str(-getattr(errno, refusal))]


@pytest.mark.needs_io_uring
def test_a_kernel_that_stays_short_of_memory_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    done = run_python(
        ROUND_TRIP, "uring", tmp_path, refuse={"io_uring_enter": "EAGAIN"}, env=TESTS, timeout_s=60
    )
    assert outcome(done.stdout)[:3] == ["failed", str(ERING), str(-errno.EAGAIN)]


MIDWAY = """
    import errno, sys
    from pathlib import Path
    import numpy as np
    from support import launch
    from striate._engine import JOB_CHECKSUM, JOB_STABLE, Fault, Io, RunError
    from support.contents import cycling
    from support.tables import BLOCK, digests, memory, open_descriptors, opened, tables, threads

    direction, folder = sys.argv[1], Path(sys.argv[2])
    data = memory(1000 * BLOCK)
    data[:] = np.frombuffer(cycling(len(data)), np.uint8)
    jobs, extents = tables(data, flags=JOB_CHECKSUM | JOB_STABLE)
    jobs["digest"] = np.frombuffer(b"".join(digests(data, jobs)), np.uint8).reshape(-1, 16)
    before = open_descriptors(), threads()
    refused = False

    def refuse(done):
        global refused
        if not refused:
            launch.refuse_calls({"io_uring_enter": errno.EPERM}, all_threads=True)
            refused = True

    with opened(Io("posix"), folder) as file:
        Io("posix").run("write", [file], jobs, extents)
        io = Io("uring", faults=[Fault("any", "short", count=0, value=4096)])  # slow
        try:
            io.run(direction, [file], jobs, extents, progress=refuse)
            print("no error")
        except RunError as error:
            print(error.code, error.detail, 0 < error.stats.bytes < len(data))
        # What was in flight has landed: nothing moves any more.
        assert all(trace.result != 0 for trace in io.traces() if trace.op == direction)
        data[:] = 0
        assert not data.any()
    assert (open_descriptors(), threads()) == before
"""


@pytest.mark.needs_io_uring
@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_ring_that_stops_working_midway_is_drained_and_then_an_error(
    direction: str, tmp_path: Path
) -> None:
    done = run_python(MIDWAY, direction, tmp_path, env=TESTS, timeout_s=60)
    assert outcome(done.stdout) == [str(ERING), str(-errno.EPERM), "True"]


def test_the_posix_engine_needs_none_of_it(tmp_path: Path) -> None:
    refuse = dict.fromkeys(("io_uring_setup", "io_uring_enter", "io_uring_register"), "EPERM")
    done = run_python(ROUND_TRIP, "posix", tmp_path, refuse=refuse, env=TESTS)
    assert outcome(done.stdout) == ["done", "0", "0", "0", "4"]


@pytest.mark.needs_io_uring
@pytest.mark.parametrize("memlock_kib", [0, 64, 8192])
def test_an_ordinary_user_with_little_lockable_memory_goes_without_registration(memlock_kib: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    # Locked memory is counted for each user: one that nobody else is.
    user = 100_000 + os.getpid()
    # Not below pytest's folder: each session of root's takes that away from everybody else.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        folder = Path(path)
        os.chown(folder, user, -1)

        def attempt(kind: Kind) -> list[str]:
            return outcome(
                run_python(
                    ROUND_TRIP,
                    kind,
                    folder,
                    str(1 << 20),
                    str(user),
                    limits={"memlock": memlock_kib << 10},
                    env=TESTS,
                ).stdout
            )

        words = attempt("uring")
        if memlock_kib == 0 and words[0] == "failed":
            # From Linux 6.14 on the rings themselves count as locked memory. An error that names it, and the posix
            # engine remains.
            assert words == ["failed", str(ERING), str(-errno.ENOMEM), "4", "0"]
            assert attempt("posix")[0] == "done"
            return
    assert words[0] == "done"
    # 4 workers x 4 slots x 1 MiB: no worker can register all of it in less than 4 MiB.
    if memlock_kib < 4096:
        assert words[1:3] == ["0", str(errno.ENOMEM)]
    else:
        assert int(words[1]) <= 2


@pytest.mark.needs_io_uring
def test_too_few_descriptors_for_every_ring_means_fewer_workers(tmp_path: Path) -> None:
    code = """
        import os, resource, sys
        fds = []
        source = SOURCE
        spare = len(os.listdir("/proc/self/fd")) + 5
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, spare))
        while True:
            try:
                fds.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        left = int(sys.argv.pop())
        for fd in fds[len(fds) - left :] if left else []:
            os.close(fd)
        exec(source)
    """
    # What the snippet itself opens (modules, the folder) is loaded before; the file takes one, listing takes one.
    source = "import textwrap\n" + f"exec(textwrap.dedent({ROUND_TRIP!r}))"
    preload = "from striate._engine import Io\nimport numpy, support.contents, support.tables, textwrap\n"
    whole = preload + "\n".join(line[8:] for line in code.splitlines()).replace("SOURCE", repr(source))
    # A worker that starts late, on a busy machine, may find the other one's ring closed already.
    for _ in range(10):
        done = run_python(whole, "uring", tmp_path, "65536", "3", env=TESTS)
        words = outcome(done.stdout)
        assert words[0] == "done"
        if int(words[3]) > 0:
            break
    assert int(words[3]) > 0
    assert int(words[3]) + int(words[4]) == 4
    done = run_python(whole, "uring", tmp_path, "65536", "1", env=TESTS, check=False)
    words = outcome(done.stdout)
    assert (
        words[:4] == ["failed", str(ERING), str(-errno.EMFILE), "4"] or "Too many open files" in done.stderr
    )


CAREFUL = """
    import mmap, os, sys
    from pathlib import Path
    import numpy as np
    from support import launch
    from striate._engine import JOB_CAREFUL, JOB_CHECKSUM, JOB_STABLE, Io, RunError
    from support.contents import cycling
    from support.tables import BLOCK, Kind, digests, found_digests, open_descriptors, opened, tables

    kind, folder, refusal = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if refusal != "none":
        launch.CALLS["process_vm_readv"] = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
        launch.refuse_calls({"process_vm_readv": int(refusal)})
    source = folder / "source"
    source.write_bytes(cycling(20 * BLOCK + 99))
    with source.open("r+b") as f:
        pages = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
    data = np.frombuffer(pages, np.uint8)
    io = Io(kind)
    before = open_descriptors()
    with opened(io, folder) as file:
        jobs, extents = tables(data, flags=JOB_CHECKSUM | JOB_STABLE | JOB_CAREFUL, cuts=(5, 70_000, 70_001))
        results, stats = io.run("write", [file], jobs, extents)
        assert found_digests(results) == digests(data, jobs)
        assert stats.zero_copy_bytes == 0
        os.truncate(source, 10 * BLOCK)
        try:
            io.run("write", [file], jobs, extents)
            print("no error")
        except RunError as error:
            print(error.code, error.job >= 10)
        assert (folder / "file").stat().st_size >= 10 * BLOCK
    assert open_descriptors() == before
"""


@pytest.mark.parametrize("refusal", ["none", str(errno.EPERM), str(errno.ENOSYS)])
@pytest.mark.parametrize("kind", ["uring", "posix"])
def test_a_mapped_source_that_was_truncated_is_an_error_and_not_a_dead_process(
    kind: str, refusal: str, tmp_path: Path
) -> None:
    done = run_python(CAREFUL, kind, tmp_path, refusal, env=TESTS)
    assert outcome(done.stdout) == [str(-errno.EFAULT), "True"]

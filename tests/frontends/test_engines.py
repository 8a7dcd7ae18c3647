"""io_uring refused in every way, limits on locked memory, timers and Ctrl-C (shared cases 10, 11 and 12).

Each runs in a process of its own, forked from one that has imported torch but never made a ring: a seccomp filter and
a lowered limit cannot be undone.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import striate
from support.sandbox import LAUNCH, NOBODY, REFUSABLE, run_python

# Runs BODY, which fills the dict `seen`, in a forked child for each row of CASES.
FORKS = """
import errno, json, os, resource, sys, threading, traceback, warnings
sys.path.insert(0, sys.argv[2])
import launch, torch, striate
import striate.torch_api

folder = sys.argv[1]
state = {"w": torch.arange(3 << 20, dtype=torch.float32), "b": torch.ones(1000), "n": 5}
torch.arange(10).sum()

def equal(loaded):
    return (
        list(loaded) == list(state)
        and all(torch.equal(loaded[k], state[k]) if k != "n" else loaded[k] == 5 for k in state)
    )

answers = {}
for case in json.loads(sys.argv[3]):
    into, out_of = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(into)
        seen = {}
        try:
            path = os.path.join(folder, "-".join(case))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                BODY
            seen["told"] = [[w.category.__name__, str(w.message), os.path.basename(w.filename)] for w in told]
        except BaseException:
            seen["failed"] = traceback.format_exc()
        with os.fdopen(out_of, "w") as f:
            json.dump(seen, f)
        os._exit(0)
    os.close(out_of)
    with os.fdopen(into) as f:
        answers["-".join(case)] = json.loads(f.read() or '{"failed": "the child died"}')
    os.waitpid(pid, 0)
print(json.dumps(answers))
"""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def in_forks(body: str, cases: list[list[str]], folder: Path) -> dict[str, dict[str, Any]]:
    indented = textwrap.indent(textwrap.dedent(body).strip(), " " * 16).strip()
    done = run_python(
        FORKS.replace("BODY", indented),
        folder,
        str(LAUNCH.parent),
        json.dumps(cases),
        env=ONE_THREAD,
        timeout_s=240,
    )
    answers: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that anybody may enter: tmp_path lies below one that only its owner may."""
    folder = Path(tempfile.mkdtemp(prefix="striate-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


# ---- io_uring refused ------------------------------------------------------

REFUSED = [["io_uring_setup", name] for name in REFUSABLE]
REFUSED += [
    [call, name] for call in ("io_uring_register", "io_uring_enter") for name in ("EPERM", "EACCES", "ENOSYS")
]
REFUSED += [["io_uring_register", "ENOMEM"], ["io_uring_enter", "EINVAL"]]


@pytest.fixture(scope="module")
def refused(open_folder: Path) -> dict[str, dict[str, Any]]:
    return in_forks(
        """
        launch.refuse_calls({case[0]: getattr(errno, case[1])})
        for n in range(3):
            result = striate.save(state, path)
            seen.setdefault("engines", []).append(result.stats.engine)
            seen.setdefault("equal", []).append(equal(striate.load(path)))
        seen["verified"] = bool(striate.verify(path))
        before = os.stat(path).st_mtime_ns
        try:
            seen["forced"] = striate.save(state, path, engine="uring").stats.engine
        except BaseException as e:
            seen["forced"] = [type(e).__name__, str(e)]
            seen["intact"] = before == os.stat(path).st_mtime_ns and equal(striate.load(path, engine="posix"))
        seen["left"] = [name for name in os.listdir(folder) if name.startswith(".striate")]
        """,
        REFUSED,
        open_folder,
    )


@pytest.mark.needs_io_uring
@pytest.mark.parametrize("case", REFUSED, ids="-".join)
def test_refused_io_uring_is_told_once_and_the_checkpoint_is_whole(
    refused: dict[str, dict[str, Any]], case: list[str]
) -> None:
    seen = refused["-".join(case)]
    assert "failed" not in seen, seen["failed"]
    assert seen["equal"] == [True] * 3 and seen["verified"] and seen["left"] == []
    told = [row for row in seen["told"] if row[0] == "EngineFallback"]
    assert len(told) == len(seen["told"]) <= 1
    if case[0] == "io_uring_register":
        # Buffers that cannot be registered are used as they are.
        assert seen["engines"] == ["uring"] * 3 and seen["forced"] == "uring"
    else:
        assert seen["engines"] == ["posix"] * 3
        ((_, message, filename),) = told
        assert "posix" in message and filename == "<string>"  # the caller's own line
        assert case[1] in message or (case[1] == "ENOMEM" and "RLIMIT_MEMLOCK" in message)
        name, message = seen["forced"]
        assert name == "EngineUnavailable" and case[1] in message and 'engine="posix"' in message
        assert seen["intact"]


# ---- limits on locked memory -----------------------------------------------

LIMITS = [["0"], ["64"], ["8192"]]


@pytest.fixture(scope="module")
def limited(open_folder: Path) -> dict[str, dict[str, Any]]:
    return in_forks(
        f"""
        launch.set_limit("memlock", int(case[0]) << 10)
        if os.geteuid() == 0:
            launch.become({NOBODY})
        results = {{}}
        def run(n):
            try:
                mine = f"{{path}}-{{n}}"
                for _ in range(2):
                    stats = striate.save(state, mine).stats
                    results.setdefault(n, []).append([stats.engine, stats.register_error, equal(striate.load(mine))])
            except BaseException:
                results[n] = traceback.format_exc()
        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        seen["results"] = [results[n] for n in range(4)]
        seen["left"] = [name for name in os.listdir(folder) if name.startswith(".striate")]
        """,
        LIMITS,
        open_folder,
    )


@pytest.mark.needs_io_uring
@pytest.mark.parametrize("case", LIMITS, ids="-".join)
def test_ordinary_user_with_little_lockable_memory_saves_four_at_once(
    limited: dict[str, dict[str, Any]], case: list[str]
) -> None:
    seen = limited["-".join(case)]
    assert "failed" not in seen, seen["failed"]
    for rows in seen["results"]:
        assert isinstance(rows, list), rows
        assert [equal for _, _, equal in rows] == [True, True]
    assert seen["left"] == []
    told = [row for row in seen["told"] if row[0] == "EngineFallback"]
    assert len(told) == len(seen["told"]) <= 1
    # Since Linux 6.14 the rings themselves count: then there is room for none, and posix is used.
    stinted = [row for rows in seen["results"] for row in rows if row[0] == "posix" or row[1]]
    assert stinted or case[0] == "8192"
    assert len(told) == bool(stinted)
    for _, message, _ in told:
        assert f"RLIMIT_MEMLOCK is {int(case[0]) << 10} bytes" in message


# ---- signals ---------------------------------------------------------------

TIMERS = """
import json, os, signal, sys, threading, time
import torch, striate

path, engine = sys.argv[1:]
state = {"w": torch.arange(64 << 20, dtype=torch.float32)}  # 256 MiB
rang = 0
def ring(number, frame):
    global rang
    rang += 1
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
striate.save(state, path, engine=engine)
while_saving = rang
loaded = striate.load(path, engine=engine)
while_loading = rang - while_saving
signal.setitimer(signal.ITIMER_REAL, 0)
assert torch.equal(loaded["w"], state["w"])
uuid = striate.info(path).uuid

def interrupt(done, total):
    if done >= total // 4:
        os.kill(os.getpid(), signal.SIGINT)
interrupted = []
for way in (
    lambda: striate.save({"w": state["w"] + 1}, path, engine=engine, progress=interrupt),
    lambda: striate.load(path, engine=engine, progress=interrupt),
    lambda: striate.verify(path, engine=engine, progress=interrupt),
):
    try:
        way()
        interrupted.append("went through")
    except KeyboardInterrupt:
        interrupted.append("KeyboardInterrupt")
intact = striate.info(path).uuid == uuid and bool(striate.verify(path))
left = os.listdir(os.path.dirname(path))
threads = threading.active_count()
striate.save({"w": torch.ones(5)}, path, engine=engine)
after = striate.load(path, engine=engine)["w"].sum().item()
signal.signal(signal.SIGINT, signal.SIG_IGN)
striate.save(state, path, engine=engine, progress=interrupt)  # ignored is ignored
print(json.dumps([while_saving, while_loading, interrupted, intact, left, threads, after]))
"""


def test_timers_have_no_effect_and_ctrl_c_ends_with_the_old_checkpoint_intact(
    target: Path, engine: str
) -> None:
    done = run_python(TIMERS, target, engine, timeout_s=200)
    while_saving, while_loading, interrupted, intact, left, threads, after = json.loads(done.stdout)
    # Python's handler runs between looks at the signals, ten a second.
    assert while_saving > 0 and while_loading > 0
    # A load may end before its first report; what must not be is a hang or another error.
    assert interrupted[0] == "KeyboardInterrupt" and set(interrupted) <= {"KeyboardInterrupt", "went through"}
    assert intact and left == [target.name] and threads == 1 and after == 5


def test_unknown_engine_is_refused_before_anything_is_touched(target: Path) -> None:
    for call in (
        lambda: striate.save({"a": 1}, target, engine="aio"),  # type: ignore[arg-type]
        lambda: striate.load(target, engine="aio"),  # type: ignore[arg-type]
        lambda: striate.verify(target, engine="aio"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match='"auto", "uring" or "posix"'):
            call()
    assert os.listdir(target.parent) == []

"""A wrong job table is a ValueError that says which job, before any thread starts or byte moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from striate._engine import EXTENT_DTYPE, JOB_DTYPE, Fault, File, Io
from support.tables import BLOCK, Table, memory, opened, tables

Change = Callable[[Table, Table], None]


def setting(table: str, field: str, value: int, row: int = 2) -> Change:
    def change(jobs: Table, extents: Table) -> None:
        (jobs if table == "jobs" else extents)[field][row] = value

    return change


WRONG: dict[str, tuple[Change, str]] = {
    "offset between pages": (setting("jobs", "offset", 2 * BLOCK + 512), "multiple of 4096"),
    "offset beyond the largest file": (setting("jobs", "offset", 2**63), "largest file offset"),
    "length wraps": (setting("jobs", "length", 2**64 - 1), "largest file offset"),
    "no bytes": (setting("jobs", "length", 0), "no bytes"),
    "longer than its extents": (setting("jobs", "length", BLOCK + 1), "shorter"),
    "shorter than its extents": (setting("jobs", "length", BLOCK - 1), "longer"),
    "file out of range": (setting("jobs", "file", 1), "file that is not there"),
    "extents out of range": (setting("jobs", "extent_first", 4), "extents that are not there"),
    "extents far out of range": (setting("jobs", "extent_first", 2**64 - 1), "extents that are not there"),
    "too many extents": (setting("jobs", "extents_count", 2**32 - 1), "extents that are not there"),
    "no extents": (setting("jobs", "extents_count", 0), "shorter"),
    "unknown flag": (setting("jobs", "flags", 8), "flag"),
    "an extent without end": (setting("extents", "length", 2**64 - 1), "longer"),
    "an address that wraps": (setting("extents", "addr", 2**64 - 5), "address space"),
    "no address to write from": (setting("extents", "addr", 0), "no address"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_job_is_named_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    change, words = WRONG[name]
    data = memory(4 * BLOCK)
    jobs, extents = tables(data)
    change(jobs, extents)
    io = Io("posix", trace=True)
    with opened(io, tmp_path) as file, pytest.raises(ValueError, match=rf"{words}.*\(job 2\)"):
        io.run("write", [file], jobs, extents)
    assert "write" not in [trace.op for trace in io.traces()]
    assert (tmp_path / "file").stat().st_size == 0


def test_a_table_of_another_shape_is_refused(tmp_path: Path) -> None:
    data = memory(4 * BLOCK)
    jobs, extents = tables(data)
    io = Io("posix")
    with opened(io, tmp_path) as file:
        for wrong in (
            np.zeros(4, EXTENT_DTYPE),
            jobs.view(np.uint8),
            jobs[::2],
            jobs.reshape(2, 2),
            list(jobs),
            None,
            np.frombuffer(b"x" + jobs.tobytes(), JOB_DTYPE, offset=1),
        ):
            with pytest.raises(ValueError, match="jobs must"):
                io.run("write", [file], wrong, extents)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="extents must"):
            io.run("write", [file], jobs, extents[::-1])
        with pytest.raises(ValueError, match="direction"):
            io.run("sideways", [file], jobs, extents)  # type: ignore[arg-type]


def test_a_file_that_cannot_be_one_is_refused() -> None:
    data = memory(BLOCK)
    jobs, extents = tables(data)
    for file, words in (
        (File(-1), "not open"),
        (File(0, mem_align=3), "power of two"),
        (File(0, offset_align=12), "power of two"),
    ):
        with pytest.raises(ValueError, match=words):
            Io("posix").run("write", [file], jobs, extents)


def test_unknown_engines_and_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="kind"):
        Io("aio")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="operation"):
        Io("posix", faults=[Fault("fly")])
    with pytest.raises(ValueError, match="kind of fault"):
        Io("posix", faults=[Fault("write", "late")])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="255 bytes"):
        Io("posix", faults=[Fault("write", drive=bytes(256))])
    with pytest.raises(ValueError, match="negative"):
        Io("posix", faults=[Fault("write", nth=-1)])
    with pytest.raises(ValueError, match="null byte"):
        Io("posix").unlink(0, b"a\0b")

"""What is written is what is read back, byte for byte, whatever the size, the memory and the file system."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from striate import _engine
from striate._engine import ALIGN, JOB_CHECKSUM, JOB_STABLE, File, Io
from support.contents import cycling
from support.loop_drives import LoopDrive
from support.tables import BLOCK, KINDS, Bytes, Kind, digests, found_digests, memory, opened, tables

SIZES = [
    1,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    7 * BLOCK - 1,
    7 * BLOCK,
    7 * BLOCK + 1,
]
ALIGNMENTS = [*range(65), 127, 511, 512, 513, 1024, 4095]


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def filled(length: int, *, misalign: int = 0, start: int = 0) -> Bytes:
    data = memory(length, misalign=misalign)
    data[:] = np.frombuffer(cycling(length, start=start), np.uint8)
    return data


def write(
    io: Io, file: File, data: Bytes, *, cuts: tuple[int, ...] = (), flags: int = JOB_CHECKSUM
) -> _engine.Stats:
    """Writes all of data and holds what comes back against an independent checksum."""
    jobs, extents = tables(data, cuts=cuts, flags=flags)
    results, stats = io.run("write", [file], jobs, extents)
    assert not results["code"].any()
    assert found_digests(results) == digests(data, jobs)
    assert stats.bytes == len(data)
    return stats


def read(io: Io, file: File, data: Bytes, wanted: Bytes, *, cuts: tuple[int, ...] = ()) -> _engine.Stats:
    jobs, extents = tables(data, cuts=cuts)
    jobs["digest"] = np.frombuffer(b"".join(digests(wanted, jobs)), np.uint8).reshape(-1, 16)
    results, stats = io.run("read", [file], jobs, extents)
    assert not results["code"].any()
    assert found_digests(results) == [job.tobytes() for job in jobs["digest"]]
    assert np.array_equal(data, wanted)
    assert stats.bytes == len(data)
    return stats


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_edge_of_size_comes_back_and_is_padded_with_zeros(
    kind: Kind, direct: bool, stable: bool, folder: Path
) -> None:
    io = Io(kind)
    for size in SIZES:
        data = filled(size)
        with opened(io, folder, direct=direct) as file:
            write(io, file, data, flags=JOB_CHECKSUM | (JOB_STABLE if stable else 0))
            padded = (folder / "file").read_bytes()
            assert len(padded) == -(-size // ALIGN) * ALIGN
            assert padded[:size] == data.tobytes()
            assert not any(padded[size:])
            io.truncate(file.fd, size)
            read(io, file, memory(size), data)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_zeros_and_not_what_the_slot_held_before(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    data = filled(2 * BLOCK + 100, misalign=64)
    data[:] |= 1
    jobs, extents = tables(data)
    with opened(io, tmp_path) as file:
        io.run("write", [file], jobs, extents, workers_max=1, depth=1)
    assert (tmp_path / "file").read_bytes() == data.tobytes() + bytes(ALIGN - 100)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_any_alignment_is_a_source_and_a_target(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    size = 3 * BLOCK + 4096 + 100
    with opened(io, tmp_path) as file:
        for misalign in ALIGNMENTS:
            data = filled(size, misalign=misalign, start=misalign)
            write(io, file, data, flags=JOB_CHECKSUM | JOB_STABLE)
            io.truncate(file.fd, size)
            read(io, file, memory(size, misalign=misalign), data)


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_into_extents_is_the_same_bytes(
    kind: Kind, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    size = data.draw(st.integers(1, 5 * BLOCK))
    place = st.integers(0, size)
    around = st.builds(lambda n, by: min(size, n // 512 * 512 + by), place, st.sampled_from([0, 0, 0, 1, 64]))
    writes = tuple(data.draw(st.lists(place | around, max_size=80)))
    reads = tuple(data.draw(st.lists(place | around, max_size=80)))
    io = Io(kind)
    source = filled(size, misalign=data.draw(st.sampled_from([0, 1, 64, 512])))
    target = memory(size, misalign=data.draw(st.sampled_from([0, 1, 64, 512])))
    stable = data.draw(st.booleans())
    with opened(io, tmp_path_factory.getbasetemp(), direct=data.draw(st.booleans())) as file:
        write(io, file, source, cuts=writes, flags=JOB_CHECKSUM | (JOB_STABLE if stable else 0))
        read(io, file, target, source, cuts=reads)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_without_an_address_are_checked_and_dropped(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    data = filled(4 * BLOCK)
    with opened(io, tmp_path) as file:
        write(io, file, data)
        target = memory(len(data))
        target[:] = 255
        jobs, extents = tables(target, cuts=(100, BLOCK + 5000, 2 * BLOCK + 1))
        jobs["digest"] = np.frombuffer(b"".join(digests(data, jobs)), np.uint8).reshape(-1, 16)
        extents["addr"][[0, 2, 5]] = 0
        dropped = np.zeros(len(data), bool)
        ends = np.cumsum(extents["length"]).astype(int)
        for index in (0, 2, 5):
            dropped[ends[index] - int(extents["length"][index]) : ends[index]] = True
        io.run("read", [file], jobs, extents)
        assert np.array_equal(target, np.where(dropped, 255, data))

        page = memory(ALIGN)
        page[:] = data[:ALIGN]
        page[50] ^= 1  # inside the first hole
        os.pwrite(file.fd, page.data, 0)
        with pytest.raises(_engine.RunError) as caught:
            io.run("read", [file], jobs, extents)
        assert (caught.value.code, caught.value.job) == (_engine.ECORRUPT, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_fits_and_cannot_change_goes_to_the_drive_uncopied(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    size = 8 * BLOCK + 100
    data = filled(size)
    with opened(io, tmp_path) as file:
        stable = JOB_CHECKSUM | JOB_STABLE
        # The tail needs its padding, so it alone passes through a slot.
        assert write(io, file, data, flags=stable).zero_copy_bytes == 8 * BLOCK
        assert write(io, file, data).zero_copy_bytes == 0
        sixteen = tuple(range(0, BLOCK, 4096))
        assert write(io, file, data, flags=stable, cuts=sixteen).zero_copy_bytes == 8 * BLOCK
        seventeen = (*sixteen, 512) if file.offset_align <= 512 and file.offset_align else sixteen
        expected = 8 * BLOCK if seventeen is sixteen else 7 * BLOCK
        assert write(io, file, data, flags=stable, cuts=seventeen).zero_copy_bytes == expected
        if file.mem_align > 1:
            shifted = filled(size, misalign=1)
            assert write(io, file, shifted, flags=stable).zero_copy_bytes == 0
        io.truncate(file.fd, size)
        assert read(io, file, memory(size), data).zero_copy_bytes == 8 * BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_changes_under_the_write_still_leaves_bytes_that_match_their_checksum(
    kind: Kind, tmp_path: Path
) -> None:
    io = Io(kind)
    data = filled(64 * BLOCK)
    done = threading.Event()

    def train() -> None:
        step = 0
        while not done.is_set():
            step += 1
            data[:] = step % 251

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with opened(io, tmp_path) as file:
            for _ in range(10):
                jobs, extents = tables(data)
                results, _ = io.run("write", [file], jobs, extents)
                stored = np.fromfile(tmp_path / "file", np.uint8)
                assert found_digests(results) == digests(stored, jobs)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_one_run_reaches_many_files_each_with_its_own_alignment(
    kind: Kind, tmp_path: Path, make_loop_drives: Callable[..., list[LoopDrive]]
) -> None:
    coarse = make_loop_drives(1, size_bytes=64 << 20, sector_bytes=4096)[0].path
    io = Io(kind)
    data = filled(6 * BLOCK + 512 + 7, misalign=512)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
        opened(io, tmp_path) as fine,
        opened(io, coarse) as coarse_file,
        opened(io, Path(shm), direct=False) as buffered,
    ):
        files = [fine, coarse_file, buffered]
        # 1 KiB pieces suit 512-byte sectors and not 4096-byte ones.
        tablets = [
            tables(data, flags=JOB_CHECKSUM | JOB_STABLE, file=index, cuts=(1024, BLOCK + 2048))
            for index in range(3)
        ]
        for index in (1, 2):
            tablets[index][0]["extent_first"] += np.uint64(index * len(tablets[0][1]))
        jobs = np.concatenate([tablet[0] for tablet in tablets])
        extents = np.concatenate([tablet[1] for tablet in tablets])
        results, stats = io.run("write", files, jobs, extents)
        assert found_digests(results) == 3 * digests(data, tablets[0][0])
        assert stats.buffered_files == 0
        jobs["digest"] = results["digest"]
        for folder in (tmp_path, coarse, Path(shm)):
            assert (folder / "file").read_bytes()[: len(data)] == data.tobytes()
        target = memory(3 * len(data), misalign=64)
        for index in range(3):
            part = target[index * len(data) : (index + 1) * len(data)]
            jobs_part, extents_part = tables(part, file=index)
            jobs_part["digest"] = results["digest"][: len(jobs_part)]  # the same blocks in every file
            io.run("read", files, jobs_part, extents_part)
            assert np.array_equal(part, data)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_never_pass_the_budget(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    data = filled(100 * BLOCK, misalign=64)
    jobs, extents = tables(data)
    with opened(io, tmp_path) as file:
        for slots in (1, 2, 3, 7, 1000):
            results, stats = io.run(
                "write", [file], jobs, extents, workers_max=3, depth=4, budget_bytes=slots * BLOCK
            )
            assert 0 < stats.slot_bytes <= slots * BLOCK
            assert found_digests(results) == digests(data, jobs)
        with pytest.raises(OSError, match="allocate memory"):
            io.run("write", [file], jobs, extents, budget_bytes=BLOCK - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_nothing_is_done_at_once(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    jobs, extents = tables(memory(1))
    told: list[int] = []
    with opened(io, tmp_path) as file:
        results, stats = io.run("write", [file], jobs[:0], extents[:0], progress=told.append)
    assert (len(results), stats.bytes, stats.workers_count, told) == (0, 0, 0, [0])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_without_a_checksum_are_moved_and_not_judged(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    data = filled(3 * BLOCK + 1)
    with opened(io, tmp_path) as file:
        for flags in (0, JOB_STABLE):
            jobs, extents = tables(data, flags=flags)
            results, _ = io.run("write", [file], jobs, extents)
            assert not results["digest"].any()
        target = memory(len(data))
        jobs, extents = tables(target, flags=0)
        jobs["digest"] = 255
        io.run("read", [file], jobs, extents)
        assert np.array_equal(target, data)


@pytest.mark.parametrize("kind", KINDS)
def test_progress_rises_to_the_whole(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    data = filled(64 * BLOCK)
    told: list[int] = []
    jobs, extents = tables(data)
    with opened(io, tmp_path) as file:
        _, stats = io.run("write", [file], jobs, extents, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == stats.bytes == len(data)
    assert stats.engine == kind
    assert stats.transfers >= 64
    assert stats.work_s > 0
    assert stats.elapsed_s > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_million_small_extents_are_one_run(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    size = 1_000_000 * 24
    data = filled(size)
    block_bytes = 4 << 20
    jobs, extents = tables(data, block_bytes=block_bytes, cuts=range(0, size, 24))
    assert len(extents) >= 1_000_000
    with opened(io, tmp_path) as file:
        results, _ = io.run("write", [file], jobs, extents)
    assert found_digests(results) == digests(data, jobs)
    stored = np.fromfile(tmp_path / "file", np.uint8)[:size]
    assert np.array_equal(stored, data)


def test_the_checksum_is_xxh3_128_for_every_length_near_its_own_edges() -> None:
    data = cycling(300_000)
    edges = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 1025, 65535, 65536, 65537, 300_000)
    for length in edges:
        for seed in (0, 1, 2**64 - 1):
            assert _engine.checksum(data[:length], seed) == xxhash.xxh3_128_digest(data[:length], seed)

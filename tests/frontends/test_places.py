"""Every size and alignment on every kind of file system (shared cases 14, 15 and 16).

tmpfs, overlayfs and FUSE take any alignment and hide every mistake: ext4 and drives with 4096-byte sectors do not.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import striate
from striate._engine import Fault, Io
from support.contents import cycling
from support.loop_drives import LoopDrive
from support.same import same

CHUNK = 1 << 16
SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK + 1]


def tensor_of(length: int, start: int = 0) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(cycling(length, start=start)), dtype=torch.uint8)
        if length
        else torch.empty(0, dtype=torch.uint8)
    )


def odd_tensor(length: int, start: int = 0) -> torch.Tensor:
    """Bytes at an odd address that are the whole of their storage."""
    tensor = torch.frombuffer(bytearray(b"!" + cycling(length, start=start)), dtype=torch.uint8, offset=1)
    assert tensor.data_ptr() % 2 == 1 and tensor.untyped_storage().data_ptr() == tensor.data_ptr()
    return tensor


def file_system_of(path: Path) -> str:
    return subprocess.run(
        ["stat", "--file-system", "--format=%T", path], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def shm() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to write to")
    folder = Path(tempfile.mkdtemp(prefix="striate-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def check(folder: Path, state: dict[str, torch.Tensor], engine: Any) -> None:
    path = folder / "checkpoint"
    result = striate.save(state, path, engine=engine, chunk_bytes=CHUNK)
    assert path.stat().st_size == result.file_bytes
    assert result.data_bytes == sum(tensor.nbytes for tensor in state.values())
    same(striate.load(path, engine=engine), state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    same(striate.load_into(into, path, engine=engine), state)
    assert striate.verify(path, engine=engine)
    assert os.listdir(folder) == ["checkpoint"]


# ---- sizes -----------------------------------------------------------------


@pytest.mark.parametrize("length", SIZES)
def test_size_alone(target: Path, engine: Any, length: int) -> None:
    check(target.parent, {"t": tensor_of(length)}, engine)


def test_sizes_together_and_each_pair(target: Path, engine: Any) -> None:
    together = {str(length): tensor_of(length, start=n) for n, length in enumerate(SIZES)}
    check(target.parent, together, engine)
    for one, other in zip(SIZES, SIZES[5:] + SIZES[:5], strict=True):
        check(target.parent, {"one": tensor_of(one), "other": tensor_of(other, start=7)}, engine)


def test_the_tests_run_on_a_file_system_that_minds_alignment(target: Path) -> None:
    kind = file_system_of(target.parent)
    if kind in ("tmpfs", "overlayfs", "btrfs", "fuseblk"):
        pytest.skip(
            f"the temporary folder is on {kind}: point TMPDIR at ext4 or xfs for these tests to prove much"
        )
    assert kind in ("ext2/ext3", "xfs"), kind
    result = striate.save({"t": tensor_of(CHUNK + 1)}, target)
    assert result.stats is not None and result.stats.buffered_files == 0


def test_sizes_on_tmpfs(shm: Path, engine: Any) -> None:
    assert file_system_of(shm) == "tmpfs"
    check(shm, {str(length): tensor_of(length, start=n) for n, length in enumerate(SIZES)}, engine)


# ---- alignment of memory ---------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_source_at_an_odd_address(target: Path, engine: Any, frozen: bool) -> None:
    for length in (1, 4097, 3 * CHUNK + 1):
        state = {"odd": odd_tensor(length), "even": tensor_of(length, start=3)}
        striate.save(state, target, engine=engine, chunk_bytes=CHUNK, frozen=frozen)
        same(striate.load(target, engine=engine), state)


def test_target_at_an_odd_address_and_not_one_byte_beside_it(target: Path, engine: Any) -> None:
    for length in (1, 511, 4096, 4097, 3 * CHUNK + 1):
        wanted = tensor_of(length)
        striate.save({"t": wanted}, target, engine=engine, chunk_bytes=CHUNK)
        memory = torch.full((length + 9,), 0xEE, dtype=torch.uint8)
        into = {"t": memory[1 : 1 + length]}
        assert into["t"].data_ptr() % 2 == 1
        striate.load_into(into, target, engine=engine)
        assert torch.equal(memory[1 : 1 + length], wanted)
        assert memory[0] == 0xEE and (memory[1 + length :] == 0xEE).all()


def test_frozen_sources_at_every_offset_within_a_page(target: Path, engine: Any) -> None:
    """Zero copy where the drive takes the address, a slot where not: the bytes are the same."""
    memory = torch.frombuffer(bytearray(cycling(4 * CHUNK)), dtype=torch.uint8)
    for offset in (0, 1, 4, 16, 64, 511, 512, 513, 1024, 4095):
        base = memory[offset : offset + 2 * CHUNK]
        state = {"t": torch.frombuffer(base.numpy(), dtype=torch.uint8)}
        striate.save(state, target, engine=engine, chunk_bytes=CHUNK, frozen=True)
        same(striate.load(target, engine=engine), state)


def test_source_that_maps_a_file(target: Path, engine: Any) -> None:
    source = target.with_name("source")
    source.write_bytes(cycling(5 * CHUNK + 3))
    mapped = torch.from_file(str(source), shared=False, size=5 * CHUNK + 3, dtype=torch.uint8)
    state = {"mapped": mapped}
    for frozen in (False, True):
        striate.save(state, target, engine=engine, chunk_bytes=CHUNK, frozen=frozen)
        same(striate.load(target, engine=engine), state)


def test_mapped_source_that_was_cut_short_is_an_error_and_no_crash(target: Path, engine: Any) -> None:
    source = target.with_name("source")
    source.write_bytes(cycling(5 * CHUNK))
    mapped = torch.from_file(str(source), shared=True, size=5 * CHUNK, dtype=torch.uint8)
    striate.save({"earlier": torch.ones(3)}, target, engine=engine)
    os.truncate(source, CHUNK)
    for frozen in (False, True):
        with pytest.raises(striate.DriveError) as caught:
            striate.save({"mapped": mapped}, target, engine=engine, chunk_bytes=CHUNK, frozen=frozen)
        assert caught.value.errno == errno.EFAULT and "mapped file" in str(caught.value)
        same(striate.load(target, engine=engine), {"earlier": torch.ones(3)})
    os.truncate(source, 5 * CHUNK)


# ---- O_DIRECT refused ------------------------------------------------------


@pytest.mark.parametrize("kind", ["uring", "posix"])
@pytest.mark.parametrize("answer", [errno.EINVAL, errno.EOPNOTSUPP], ids=["EINVAL", "EOPNOTSUPP"])
def test_file_system_that_refuses_direct_io_is_used_buffered(target: Path, kind: Any, answer: int) -> None:
    state = {str(length): tensor_of(length, start=n) for n, length in enumerate(SIZES)}

    def refusing() -> Io:
        return Io(kind, faults=[Fault("open", nth=0, count=1, value=answer)])

    io = refusing()
    striate.save(state, target, engine=io, chunk_bytes=CHUNK)
    first, second = (t for t in io.traces() if t.op == "open")
    assert first.offset & os.O_DIRECT and first.result == -answer
    assert not second.offset & os.O_DIRECT and second.result >= 0
    same(striate.load(target, engine=refusing()), state)
    assert striate.verify(target, engine=refusing())
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("kind", ["uring", "posix"])
def test_direct_io_that_is_refused_only_in_use_goes_on_buffered(target: Path, kind: Any) -> None:
    """Some network and FUSE file systems take the flag and then answer EINVAL to the transfers."""
    state = {"t": tensor_of(5 * CHUNK + 1)}
    striate.save(state, target, engine=kind, chunk_bytes=CHUNK)
    for op in ("write", "read"):
        io = Io(kind, faults=[Fault(op, nth=0, count=1, value=errno.EINVAL)])
        if op == "write":
            striate.save(state, target, engine=io, chunk_bytes=CHUNK)
        else:
            same(striate.load(target, engine=io), state)
    same(striate.load(target), state)


# ---- other file systems ----------------------------------------------------


def test_overlay(make_loop_drives: Callable[..., list[LoopDrive]], engine: Any) -> None:
    # The drive is only for its mount namespace, which takes the overlay with it.
    (drive,) = make_loop_drives(1, size_bytes=64 << 20)
    for name in ("lower", "upper", "work", "merged"):
        (drive.path / name).mkdir()
    options = ",".join(f"{name}dir={drive.path / name}" for name in ("lower", "upper", "work"))
    merged = drive.path / "merged"
    below = drive.path / "lower" / "below"
    striate.save({"old": torch.ones(3)}, below)
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"overlayfs cannot be mounted here: {done.stderr.strip()}")
    try:
        same(striate.load(merged / "below"), {"old": torch.ones(3)})
        (merged / "folder").mkdir()
        check(
            merged / "folder",
            {str(n): tensor_of(length, start=n) for n, length in enumerate(SIZES)},
            engine,
        )
        # A file of the lower layer is replaced in the upper one, and only there.
        striate.save({"new": torch.ones(3)}, merged / "below")
        same(striate.load(merged / "below"), {"new": torch.ones(3)})
        same(striate.load(below), {"old": torch.ones(3)})
    finally:
        subprocess.run(["umount", str(merged)], check=True)


def test_sizes_on_xfs(make_loop_drives: Callable[..., list[LoopDrive]], engine: Any) -> None:
    (drive,) = make_loop_drives(1, size_bytes=320 << 20, file_system="xfs")
    state = {str(length): tensor_of(length, start=n) for n, length in enumerate(SIZES)}
    state["odd"] = odd_tensor(CHUNK + 1)
    check(drive.path, state, engine)


def test_checkpoint_moves_between_drives_of_different_sectors(
    tmp_path: Path, make_loop_drives: Callable[..., list[LoopDrive]], engine: Any
) -> None:
    (tmp_path / "a").mkdir()
    (large,) = make_loop_drives(1, size_bytes=64 << 20, sector_bytes=4096)
    (large.path / "here").mkdir()
    state = {str(length): tensor_of(length, start=n) for n, length in enumerate(SIZES)}
    state["odd"] = odd_tensor(CHUNK + 1)
    check(large.path / "here", state, engine)
    there = large.path / "here" / "checkpoint"
    shutil.copy(there, tmp_path / "a" / "copy")
    same(striate.load(tmp_path / "a" / "copy", engine=engine), state)
    striate.save(state, tmp_path / "a" / "small", engine=engine, chunk_bytes=CHUNK)
    shutil.copy(tmp_path / "a" / "small", there)
    same(striate.load(there, engine=engine), state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    same(striate.load_into(into, there, engine=engine), state)
    assert striate.load_tensors(there, ["4097"], engine=engine)["4097"].numel() == 4097
    os.unlink(there)

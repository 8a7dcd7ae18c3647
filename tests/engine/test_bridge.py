"""The small parts of the bridge, and that its typed face tells the truth."""

from __future__ import annotations

import ast
import copy
import dataclasses
import gc
import mmap
import os
import pickle
import weakref
from pathlib import Path

import numpy as np
import pytest
import xxhash

import striate
from striate import _engine
from support.contents import cycling
from support.tables import memory

STUB = Path(striate.__file__).with_name("_engine.pyi")


def test_the_stub_tells_the_truth_about_the_module() -> None:
    tree = ast.parse(STUB.read_text())
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert hasattr(_engine, node.target.id)
        elif isinstance(node, ast.FunctionDef):
            assert callable(getattr(_engine, node.name))
        elif isinstance(node, ast.ClassDef):
            real = getattr(_engine, node.name)
            fields = [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
            if dataclasses.is_dataclass(real):
                assert [field.name for field in dataclasses.fields(real)] == fields
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            public = {name for name in vars(real) if not name.startswith("_")}
            assert methods - {"__init__"} <= public | {"__init__"}
            if node.name == "Io":
                assert methods - {"__init__"} == public


def test_checksum_takes_any_contiguous_buffer_and_no_other() -> None:
    data = cycling(100_001)
    wanted = xxhash.xxh3_128_digest(data, 99)
    matrix = np.frombuffer(data[:100_000], np.int16).reshape(100, 500)
    for buffer in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert _engine.checksum(buffer, 99) == wanted
    assert _engine.checksum(matrix, 99) == xxhash.xxh3_128_digest(data[:100_000], 99)
    assert _engine.checksum_level() in ("baseline", "avx2", "avx512")
    with pytest.raises((BufferError, ValueError)):
        _engine.checksum(matrix.T, 99)
    with pytest.raises(TypeError):
        _engine.checksum("text", 99)
    with pytest.raises(OverflowError):
        _engine.checksum(data, -1)


def test_block_seeds_are_xxh3_of_uuid_and_index() -> None:
    uuid = bytes(range(16))
    first = 2**40 - 2
    seeds = _engine.block_seeds(uuid, first, 5)
    assert seeds.dtype == np.uint64
    assert seeds.tolist() == [
        xxhash.xxh3_64_intdigest(uuid + (first + index).to_bytes(8, "little")) for index in range(5)
    ]
    assert len(_engine.block_seeds(uuid, 0, 0)) == 0
    with pytest.raises(ValueError, match="16 bytes"):
        _engine.block_seeds(uuid[:15], 0, 1)
    with pytest.raises(ValueError, match="negative"):
        _engine.block_seeds(uuid, 0, -1)


def test_a_memory_view_is_writable_and_keeps_its_owner_alive() -> None:
    class Owner:
        def __init__(self) -> None:
            self.data = memory(100, misalign=7)

    owner = Owner()
    alive = weakref.ref(owner)
    view = _engine.memory_view(int(owner.data.ctypes.data), 100, owner)
    data = owner.data
    del owner
    gc.collect()
    assert alive() is not None
    view[10:13] = b"abc"
    assert data[10:13].tobytes() == b"abc"
    assert (len(view), view.readonly, view.format) == (100, False, "B")
    del view
    gc.collect()
    assert alive() is None
    assert len(_engine.memory_view(0, 0, None)) == 0
    with pytest.raises(ValueError, match="memory"):
        _engine.memory_view(0, 1, None)
    with pytest.raises(ValueError, match="memory"):
        _engine.memory_view(4096, -1, None)


def test_advice_on_huge_pages_takes_any_range_and_leaves_the_bytes_alone() -> None:
    pages = mmap.mmap(-1, 8 << 20)
    data = np.frombuffer(pages, np.uint8)
    data[:] = 7
    start = int(data.ctypes.data)
    for address, length in (
        (start, 8 << 20),
        (start + 1, (8 << 20) - 2),
        (start, 10),
        (0, 0),
        (2**64 - 1, 2**63),
    ):
        _engine.advise_huge_pages(address, length)
    assert (data == 7).all()


def test_direct_alignment_is_what_o_direct_obeys(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        told = _engine.direct_alignment(fd)
        if told is None:
            pytest.skip("this kernel or file system does not report alignments (statx, Linux 6.1)")
        mem_align, offset_align = told
        assert mem_align > 0
        assert os.preadv(fd, [memory(offset_align, misalign=mem_align).data], offset_align) == offset_align
        if offset_align > 1:
            with pytest.raises(OSError, match="Invalid argument"):
                os.preadv(fd, [memory(4096).data], offset_align // 2)
        if mem_align > 4:
            # Across a page: recent kernels take one short segment at any address.
            with pytest.raises(OSError, match="Invalid argument"):
                os.preadv(fd, [memory(4096, misalign=mem_align // 2).data], 0)
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _engine.direct_alignment(fd)


@pytest.mark.needs_io_uring
def test_probe_finds_the_ring_that_the_session_says_is_there() -> None:
    probe = _engine.probe()
    assert probe.setup_error == 0
    assert probe.features & 1  # IORING_FEAT_SINGLE_MMAP, Linux 5.4


def test_errors_of_a_run_survive_pickling_and_say_where() -> None:
    stats = _engine.Stats(
        "uring",
        1,
        2,
        3,
        4,
        5.0,
        6.0,
        7.0,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        (_engine.FileStats(1, 2, 3.0, 4.0, 5),),
    )
    error = _engine.RunError(_engine.ERING, -12, 3, 1, 4096, stats)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert vars(again) == vars(error)
        assert str(again) == str(error)
    assert "io_uring" in str(error)
    assert "Cannot allocate memory" in str(error)
    assert "offset 4096" in str(error)


def test_the_engine_is_named() -> None:
    assert _engine.Io("posix").name == "posix"
    assert _engine.Io("uring").name == "uring"
    assert _engine.Io("uring", trace=True).name == "fault(uring)"
    assert _engine.Io("posix").traces() == []

"""One bit flipped, anywhere: every reader notices, and says where and which tensors (shared case 20)."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged.museum import CHUNK, Specimen, readers, refusal, rescue_refuses, sealed, zeros_like

import striate
from striate import rescue
from support.same import same


@contextmanager
def flipped(path: Path, whole: Specimen, offset: int) -> Iterator[None]:
    """Within the block, one bit of the file is another: which one of the eight goes with the offset."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.pwrite(descriptor, bytes([whole.raw[offset] ^ 1 << offset % 8]), offset)
        yield
        os.pwrite(descriptor, whole.raw[offset : offset + 1], offset)
    finally:
        os.close(descriptor)


def header_offsets(whole: Specimen) -> Iterator[int]:
    """Every byte of the text, and the padding, which is all alike, in steps."""
    yield from range(whole.text_bytes)
    yield from range(whole.text_bytes, whole.header_bytes, 61)


def test_the_museum_piece_is_whole_before_it_is_broken(broken: Path, whole: Specimen) -> None:
    broken.write_bytes(whole.raw)
    same(striate.load(broken), whole.state)
    into = striate.load_into(zeros_like(whole.state), broken)
    # Two views of one tensor are two tensors in the target.
    assert torch.equal(into["a"] if whole.kind == "flat" else into["model"]["a"], torch.arange(1500.0))
    assert striate.verify(broken)
    assert rescue.read(broken).chunk_bytes == CHUNK


def test_every_byte_of_the_header_is_noticed_by_every_reader(broken: Path, whole: Specimen) -> None:
    broken.write_bytes(whole.raw)
    for offset in header_offsets(whole):
        with flipped(broken, whole, offset):
            for call in (
                lambda: striate.load(broken, engine="posix"),
                lambda: striate.info(broken),
                lambda: striate.verify(broken, engine="posix").raise_if_damaged(),
            ):
                error = refusal(call)
                assert isinstance(error, (striate.CorruptCheckpoint, striate.FormatError)), offset
                assert str(broken) in str(error), offset
                if isinstance(error, striate.CorruptCheckpoint):
                    assert error.region == "header" and error.path == str(broken), offset
                else:
                    assert offset < 9, f"the header is damaged, not foreign, at {offset}: {error}"
            rescue_refuses(broken)
    same(striate.load(broken), whole.state)


def test_flipped_header_read_without_verification_is_read_or_refused_and_never_crashes(
    broken: Path, whole: Specimen
) -> None:
    broken.write_bytes(whole.raw)
    read = 0
    for offset in header_offsets(whole):
        with flipped(broken, whole, offset):
            try:
                loaded = striate.load(broken, engine="posix", verify=False)
            except striate.StriateError:
                continue
            read += 1
            assert isinstance(loaded, dict)
    # A flipped digit of a digest or of the uuid leaves a header that can be read.
    assert read > 100


def test_every_reader_refuses_the_same_headers(broken: Path, whole: Specimen) -> None:
    broken.write_bytes(whole.raw)
    for offset in [*range(0, whole.text_bytes, 97), whole.header_bytes - 1]:
        with flipped(broken, whole, offset):
            for name, call in readers(broken, whole.state).items():
                assert refusal(call), name


def offsets_of_data(whole: Specimen) -> Iterator[int]:
    yield from range(whole.header_bytes, len(whole.raw), 41)
    for edge in range(whole.header_bytes, len(whole.raw) + 1, CHUNK):
        yield from (offset for offset in (edge - 1, edge) if whole.header_bytes <= offset < len(whole.raw))
    yield len(whole.raw) - 1


def owners(whole: Specimen, path: Path, chunk: int) -> set[str]:
    """Names whose bytes lie in a chunk, from what ``info`` says of the whole file."""
    found = striate.info(path)
    start = whole.header_bytes + chunk * CHUNK
    names = {
        t.name for t in found.tensors if t.nbytes and t.offset < start + CHUNK and t.offset + t.nbytes > start
    }
    return names | {other for other, kept in found.ties.items() if kept in names}


@pytest.mark.parametrize("engine", ["uring", "posix"])
def test_every_part_of_the_data_is_noticed_and_named(broken: Path, whole: Specimen, engine: Any) -> None:
    broken.write_bytes(whole.raw)
    names_of = [owners(whole, broken, n) for n in range(-(-(len(whole.raw) - whole.header_bytes) // CHUNK))]
    for offset in offsets_of_data(whole):
        chunk = (offset - whole.header_bytes) // CHUNK
        start = whole.header_bytes + chunk * CHUNK
        with flipped(broken, whole, offset):
            (damage,) = striate.verify(broken, engine=engine).damages
            assert (damage.region, damage.chunk, damage.offset) == ("data", chunk, start)
            assert damage.length == min(CHUNK, len(whole.raw) - start) and damage.wanted != damage.found
            graph_too = {"__striate__.graph"} & set(damage.tensors)
            assert set(damage.tensors) == names_of[chunk] | graph_too
            error = refusal(lambda: striate.load(broken, engine=engine))
            assert isinstance(error, striate.CorruptCheckpoint), offset
            assert (error.chunk, error.offset, error.path) == (chunk, start, str(broken))
            assert set(error.tensors) == set(damage.tensors)
            assert str(start) in str(error) and str(broken) in str(error)
            said = rescue_refuses(broken)
            if isinstance(said, rescue.Damaged):
                assert [(d.chunk, d.offset) for d in said.damage] == [(chunk, start)]
    same(striate.load(broken), whole.state)


def test_every_reader_notices_the_same_data(broken: Path, whole: Specimen) -> None:
    broken.write_bytes(whole.raw)
    for offset in range(whole.header_bytes, len(whole.raw), 997):
        with flipped(broken, whole, offset):
            for name, call in readers(broken, whole.state).items():
                error = refusal(call)
                assert isinstance(error, striate.CorruptCheckpoint), name
                assert error.chunk == (offset - whole.header_bytes) // CHUNK, name


def test_data_read_without_verification_comes_as_it_is(broken: Path, flat: Specimen) -> None:
    broken.write_bytes(flat.raw)
    place = {t.name: t.offset for t in striate.info(broken).tensors}
    with flipped(broken, flat, place["a"] + 2):
        loaded = striate.load(broken, verify=False)
    changed = loaded.pop("a") != flat.state["a"]
    assert changed.nonzero().tolist() == [[0]]
    same(loaded, {name: tensor for name, tensor in flat.state.items() if name != "a"})


# ---- chunks that are whole, and in the wrong place ---------------------------


@pytest.fixture
def alike(shelf: Path) -> Path:
    """Four chunks, two pairs of which have the same bytes."""
    path = shelf / "alike"
    pages = [
        torch.full((1024,), 1.0),
        torch.full((1024,), 1.0),
        torch.full((1024,), 2.0),
        torch.full((1024,), 2.0),
    ]
    striate.save(dict(zip("abcd", pages, strict=True)), path, chunk_bytes=CHUNK)
    return path


def pages_of(path: Path) -> tuple[bytes, list[bytes]]:
    raw = path.read_bytes()
    at = 8 + int.from_bytes(raw[:8], "little")
    return raw[:at], [raw[n : n + CHUNK] for n in range(at, len(raw), CHUNK)]


def test_two_chunks_swapped_are_noticed(alike: Path) -> None:
    header, pages = pages_of(alike)
    alike.write_bytes(header + b"".join([pages[2], pages[1], pages[0], pages[3]]))
    assert [d.chunk for d in striate.verify(alike).damages] == [0, 2]
    assert refusal(lambda: striate.load(alike))
    # Two that are equal may change places: not one byte is another.
    alike.write_bytes(header + b"".join([pages[1], pages[0], pages[3], pages[2]]))
    assert striate.verify(alike)


def test_digests_are_of_a_place_so_that_swapping_them_with_their_chunks_is_noticed(alike: Path) -> None:
    """Even a header that was put together anew: what is bound to place 0 does not fit place 1."""
    header, pages = pages_of(alike)
    parsed = json.loads(header[8:])
    digests = base64.b64decode(parsed["__metadata__"]["striate.chunks"])
    order = [2, 1, 0, 3]
    moved = b"".join(digests[16 * n : 16 * n + 16] for n in order)
    parsed["__metadata__"]["striate.chunks"] = base64.b64encode(moved).decode()
    alike.write_bytes(sealed(parsed, b"".join(pages[n] for n in order)))
    assert [d.chunk for d in striate.verify(alike).damages] == [0, 2]
    equal = [digests[16 * n : 16 * n + 16] for n in range(4)]
    assert len(set(equal)) == 4, "equal bytes at two places have two digests"


def test_chunk_of_an_older_generation_put_back_is_noticed(shelf: Path) -> None:
    path = shelf / "generations"
    first = {"a": torch.arange(3000.0), "b": torch.ones(2000)}
    striate.save(first, path, chunk_bytes=CHUNK)
    _, old = pages_of(path)
    striate.save({"a": torch.arange(3000.0) + 1, "b": torch.ones(2000)}, path, chunk_bytes=CHUNK)
    header, new = pages_of(path)
    path.write_bytes(header + b"".join([new[0], old[1], *new[2:]]))
    (damage,) = striate.verify(path).damages
    assert damage.chunk == 1 and set(damage.tensors) == {"a", "b"}
    assert refusal(lambda: striate.load(path))


def test_header_of_one_generation_over_the_data_of_another_is_noticed_even_where_the_bytes_are_equal(
    shelf: Path,
) -> None:
    path = shelf / "header"
    state = {"a": torch.arange(3000.0)}
    striate.save(state, path, chunk_bytes=CHUNK)
    old, _ = pages_of(path)
    striate.save({"a": torch.arange(3000.0) + 1}, path, chunk_bytes=CHUNK)
    _, data = pages_of(path)
    path.write_bytes(old + b"".join(data))
    assert [d.chunk for d in striate.verify(path).damages] == [0, 1, 2]
    assert isinstance(refusal(lambda: striate.load(path)), striate.CorruptCheckpoint)

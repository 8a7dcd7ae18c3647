"""Files that are too short or too long, at every kind of place."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from damaged.museum import CHUNK, Specimen, readers, refusal, rescue_refuses

import striate
from support.same import same


def lengths(whole: Specimen) -> list[int]:
    edges = [0, 1, 7, 8, 9, whole.text_bytes, whole.header_bytes]
    edges += range(whole.header_bytes, len(whole.raw), CHUNK)
    near = {edge + n for edge in edges for n in (-1, 0, 1)} | set(range(0, len(whole.raw), 331))
    return sorted(length for length in near | {len(whole.raw) - 1} if 0 <= length < len(whole.raw))


@pytest.mark.parametrize("engine", ["uring", "posix"])
def test_truncated_file_is_refused_at_every_length(broken: Path, whole: Specimen, engine: Any) -> None:
    for length in lengths(whole):
        broken.write_bytes(whole.raw[:length])
        for name, call in readers(broken, whole.state, engine).items():
            error = refusal(call)
            if name != "load from a stream":
                assert str(broken) in str(error), (length, name)
            if length >= whole.header_bytes and name != "load from a stream":
                assert isinstance(error, striate.CorruptCheckpoint), (length, name)
                assert "cut short" in str(error) and f"{len(whole.raw):,}" in str(error)
        refusal(lambda: striate.load(broken, engine=engine, verify=False))
        assert refusal(lambda: striate.info(broken))
        rescue_refuses(broken)


def test_empty_file_is_called_empty(broken: Path) -> None:
    broken.touch()
    error = refusal(lambda: striate.load(broken))
    assert isinstance(error, striate.FormatError) and "empty" in str(error)


def test_file_of_zeros_is_called_an_unfinished_save(broken: Path, whole: Specimen) -> None:
    """As a preallocated file is after a power cut, or one whose header was never written."""
    for raw in (bytes(len(whole.raw)), bytes(whole.header_bytes) + whole.raw[whole.header_bytes :]):
        broken.write_bytes(raw)
        for call in readers(broken, whole.state).values():
            assert "did not finish" in str(refusal(call))


@pytest.mark.parametrize("more", [1, 511, 4096, 1 << 20])
@pytest.mark.parametrize("engine", ["uring", "posix"])
def test_appended_bytes_are_noticed(broken: Path, whole: Specimen, engine: Any, more: int) -> None:
    broken.write_bytes(whole.raw + b"\xaa" * more)
    for name, call in readers(broken, whole.state, engine).items():
        if name != "load from a stream":
            error = refusal(call)
            assert isinstance(error, striate.CorruptCheckpoint)
            assert "too long" in str(error) and error.offset == len(whole.raw)
    # In a stream other things may follow.
    stream = io.BytesIO(broken.read_bytes())
    same(striate.load(stream), whole.state)
    assert stream.tell() == len(whole.raw)


def test_two_checkpoints_one_after_the_other_are_no_file(broken: Path, whole: Specimen) -> None:
    broken.write_bytes(whole.raw * 2)
    assert "too long" in str(refusal(lambda: striate.load(broken)))


def test_middle_that_went_missing_is_noticed(broken: Path, whole: Specimen) -> None:
    raw = whole.raw
    broken.write_bytes(raw[: whole.header_bytes] + raw[whole.header_bytes + CHUNK :])
    for call in readers(broken, whole.state).values():
        assert refusal(call)
    broken.write_bytes(raw[: whole.header_bytes] + raw[whole.header_bytes + CHUNK :] + bytes(CHUNK))
    for call in readers(broken, whole.state).values():
        assert isinstance(refusal(call), striate.CorruptCheckpoint)


def test_hole_in_the_file_is_noticed(broken: Path, whole: Specimen) -> None:
    """A block that was never written reads as zeros."""
    for at in range(whole.header_bytes, len(whole.raw), CHUNK):
        stop = min(at + CHUNK, len(whole.raw))
        broken.write_bytes(whole.raw[:at] + bytes(stop - at) + whole.raw[stop:])
        (damage,) = striate.verify(broken).damages
        assert damage.offset == at
        assert isinstance(refusal(lambda: striate.load(broken)), striate.CorruptCheckpoint)

"""Tensors whose memory is a file: the very one that is replaced, one that is deleted, one that shrinks."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from crash import jobs
from crash.checkpoints import NAME, require_alone, save, state, version_at, version_of
from crash.processes import run_job

import striate
from support.same import same


def test_what_was_loaded_stays_when_its_file_is_replaced_and_deleted(
    tmp_path: Path, engine_name: str
) -> None:
    path = tmp_path / NAME
    save(1, path)
    loaded = striate.load(path, engine=engine_name)  # type: ignore[arg-type]
    save(2, path, engine=engine_name)
    assert version_of(loaded) == 1
    path.unlink()
    assert version_of(loaded) == 1


def test_a_checkpoint_that_torch_maps_can_be_replaced_and_deleted(tmp_path: Path, engine_name: str) -> None:
    path = tmp_path / "step.pt"
    wanted = state(1)
    torch.save(wanted, path)
    mapped = torch.load(path, mmap=True)
    striate.save(mapped, path, engine=engine_name, chunk_bytes=4096)  # type: ignore[arg-type]
    assert same(mapped, wanted)
    assert version_at(path) == 1
    striate.save(state(2), path, engine=engine_name, chunk_bytes=4096)  # type: ignore[arg-type]
    path.unlink()
    assert same(mapped, wanted)
    # The mapping is all that is left of the first file.
    striate.save(mapped, path, engine=engine_name, chunk_bytes=4096)  # type: ignore[arg-type]
    assert version_at(path) == 1


def test_a_checkpoint_is_saved_over_the_one_it_was_loaded_from(tmp_path: Path, engine_name: str) -> None:
    path = tmp_path / NAME
    save(1, path)
    for _ in range(3):
        striate.save(striate.load(path), path, engine=engine_name, chunk_bytes=4096)  # type: ignore[arg-type]
        assert version_at(path) == 1
    require_alone(path)


@pytest.mark.parametrize("frozen", [False, True], ids=["staged", "frozen"])
def test_a_mapped_source_that_was_cut_short_is_a_clear_error_and_no_sigbus(
    tmp_path: Path, engine_name: str, processes: Any, frozen: bool
) -> None:
    path, source = tmp_path / NAME, tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 8192)
    striate.save({"mapped": torch.zeros(3)}, path)
    outcomes, whole = run_job(
        processes, jobs.save_from_a_truncated_file, str(path), engine_name, str(source), frozen, False
    )
    ((code, filename, message, left),) = outcomes
    assert code == errno.EFAULT
    assert filename == str(path)
    assert "truncated" in message
    assert f"the earlier {NAME} is intact" in message
    assert left == ["source"]
    assert whole
    assert same(striate.load(path), {"mapped": torch.zeros(3)})


@pytest.mark.parametrize("frozen", [False, True], ids=["staged", "frozen"])
def test_a_mapped_source_that_shrinks_and_grows_while_it_is_saved_is_no_sigbus(
    tmp_path: Path, engine_name: str, processes: Any, frozen: bool
) -> None:
    path, source = tmp_path / NAME, tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 8192)
    striate.save({"mapped": torch.zeros(3)}, path)
    outcomes, whole = run_job(
        processes, jobs.save_from_a_truncated_file, str(path), engine_name, str(source), frozen, True
    )
    assert len(outcomes) == 10
    assert all(outcome == "saved" or outcome[0] == errno.EFAULT for outcome in outcomes)
    if not frozen:
        # A promise that nothing changes was not kept: only then may the sum be of other bytes.
        assert whole

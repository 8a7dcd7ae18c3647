"""Contenders meet the same terms: the same bytes, durable saves, loads that are looked at."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import workspace as workspace_module
from harness.contenders import (
    Contender,
    distributed_checkpoint,
    ours,
    ours_into,
    safetensors_file,
    torch_save,
)
from harness.duel import duel
from harness.sample import MeasurementFailed
from harness.state import assert_equal, bytes_of, specs_of, transformer
from harness.workspace import SPARE_BYTES, NoRoom, check_room, file_system, workspace

MIB = 1 << 20
PEERS = [torch_save(), safetensors_file(), distributed_checkpoint(1), distributed_checkpoint(4)]


def named(contender: Contender) -> str:
    return contender.name


@pytest.mark.parametrize("size", [MIB, 16 * MIB, 100 * MIB])
def test_the_state_is_as_large_as_asked_for_and_not_much_larger(size: int) -> None:
    state = transformer(size)
    assert size <= bytes_of(state) < 1.2 * size
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_no_two_pages_of_the_state_are_alike_so_a_misplaced_one_shows() -> None:
    pages = [
        page.tobytes()
        for tensor in transformer(8 * MIB).values()
        for page in tensor.reshape(-1)
        .view(torch.uint8)
        .numpy()[: tensor.nbytes // 4096 * 4096]
        .reshape(-1, 4096)
    ]
    assert len(set(pages)) == len(pages) > 1000


@pytest.mark.parametrize("contender", [ours("uring"), ours("posix"), ours_into(), *PEERS], ids=named)
def test_every_contender_loads_what_it_saved(contender: Contender, drive: Path) -> None:
    state = transformer(MIB)
    path = drive / f"checkpoint{contender.suffix}"
    contender.save(state, path)
    loaded = contender.load(path, specs_of(state))
    assert isinstance(loaded, dict)
    assert_equal(loaded, state)


@pytest.mark.parametrize("contender", PEERS, ids=named)
def test_a_peers_save_has_synced_each_file_and_the_directory_when_it_returns(
    contender: Contender, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    path = drive / f"checkpoint{contender.suffix}"
    contender.save(transformer(MIB), path)
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    assert {*files, drive} <= synced


def test_a_difference_in_one_bit_a_dtype_a_shape_or_a_name_is_seen() -> None:
    state = transformer(MIB)
    name = "model.norm.weight"

    def changed() -> dict[str, torch.Tensor]:
        return {key: tensor.clone() for key, tensor in state.items()}

    assert_equal(changed(), state)
    flipped = changed()
    flipped[name].view(torch.int16)[-1] ^= 1
    with pytest.raises(AssertionError, match=r"model\.norm\.weight: bytes differ"):
        assert_equal(flipped, state)
    with pytest.raises(AssertionError, match="float16"):
        assert_equal(changed() | {name: state[name].view(torch.float16)}, state)
    with pytest.raises(AssertionError, match="saved"):
        assert_equal(changed() | {name: state[name][None]}, state)
    with pytest.raises(AssertionError, match="names differ"):
        assert_equal(changed() | {"one more": state[name]}, state)


def test_a_contender_that_loads_something_else_fails_the_run_and_leaves_nothing(drive: Path) -> None:
    honest = torch_save()

    def load(path: Path, specs: object) -> dict[str, torch.Tensor]:
        loaded = honest.load(path, {})
        assert isinstance(loaded, dict)
        loaded["model.norm.weight"][3] += 1
        return loaded

    cheat = replace(honest, name="cheat", load=load)
    with pytest.raises(MeasurementFailed, match="bytes differ from what was saved"):
        duel([cheat], transformer(MIB), drive, rounds=1, tiny=transformer(MIB // 4))
    assert list(drive.iterdir()) == []


def test_each_round_starts_with_another_contender(drive: Path) -> None:
    told: list[str] = []
    chosen = [ours("uring"), torch_save(), safetensors_file()]
    duel(chosen, transformer(MIB // 4), drive, rounds=3, tiny=transformer(MIB // 4), tell=told.append)
    order = [line.split(": ")[1] for line in told]
    assert [order[0], order[3], order[6]] == [one.name for one in chosen]
    assert all(sorted(order[i : i + 3]) == sorted(one.name for one in chosen) for i in (0, 3, 6))


def test_a_run_without_room_is_refused_before_anything_is_written(drive: Path) -> None:
    facts = os.statvfs(drive)
    free = facts.f_bavail * facts.f_frsize
    with pytest.raises(NoRoom, match="Nothing was written"), workspace(drive, free):
        pass
    assert list(drive.iterdir()) == []
    with pytest.raises(NoRoom):
        check_room(drive, max(0, free - SPARE_BYTES) + 64 * MIB)


def test_a_leftover_of_a_killed_run_goes_and_a_living_neighbour_stays(drive: Path) -> None:
    leftover = drive / f"{workspace_module.PREFIX}killed"
    leftover.mkdir()
    (leftover / "checkpoint.pt").write_bytes(b"half")
    with workspace(drive, 0) as neighbour:
        (neighbour / "checkpoint.pt").write_bytes(b"whole")
        with workspace(drive, 0):
            assert not leftover.exists()
            assert (neighbour / "checkpoint.pt").read_bytes() == b"whole"
    assert list(drive.iterdir()) == []


def test_the_file_system_of_a_path_is_the_innermost_mount() -> None:
    assert file_system(Path("/proc/self"))[0] == "proc"

"""Members that are damaged, swapped, old or foreign."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drives.volumes import CHUNK_BYTES, NAME, SHAPE_IDS, SHAPES, flip, require_version, state, volume

import striate

REDUNDANT = [shape for shape in SHAPES if shape[3]]
REDUNDANT_IDS = [name for shape, name in zip(SHAPES, SHAPE_IDS, strict=True) if shape[3]]


@pytest.mark.parametrize(("layout", "count", "options", "losable"), REDUNDANT, ids=REDUNDANT_IDS)
def test_a_flipped_bit_anywhere_is_noticed_made_up_for_and_repaired(
    folders: Callable[[int], list[Path]],
    quiet: list[Any],
    layout: str,
    count: int,
    options: dict[str, int],
    losable: int,
) -> None:
    drives = folders(count)
    used = volume(drives, layout, options)
    used.save(state(1), NAME)
    for number, drive in enumerate(drives):
        member = drive / NAME
        whole = member.read_bytes()
        # Superblock, first and last block, manifest.
        for offset in (0, 20, 200, 4090, 4096, 4096 + CHUNK_BYTES, len(whole) - 1):
            flip(member, offset)
            require_version(used.load(NAME), 1)
            report = used.verify(NAME)
            assert not report and report.recoverable
            assert [health.number for health in report.members if not health.ok] == [number]
            repaired = used.repair(NAME)
            assert [done.drives for done in repaired] == [(str(drive),)], offset
            assert member.read_bytes() == whole, "a repaired member is the one that was written"
            assert used.verify(NAME).ok


def test_a_manifest_is_needed_once_and_blocks_are_blocks(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    used = volume(drives, "stripe", {})
    used.save(state(1), NAME)
    for damaged in (0, 1):
        flip(drives[damaged] / NAME, -1)
        require_version(used.load(NAME), 1)
        assert "its manifest" in str(quiet[-1].message)
        report = used.verify(NAME)
        assert not report and report.recoverable
        assert [damage.region for damage in report.damages] == ["manifest"] * (damaged + 1)
    flip(drives[2] / NAME, -1)
    with pytest.raises(striate.DataLost, match="no member has a whole manifest"):
        used.load(NAME)
    flip(drives[2] / NAME, -1)
    used.repair()
    assert used.verify(NAME).ok


def test_damage_beyond_the_layout_names_what_is_gone_and_gives_the_rest(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    used = volume(drives, "stripe", {})
    used.save(state(1), NAME)
    flip(drives[1] / NAME, 4096 + 10)
    with pytest.raises(striate.DataLost, match=str(drives[1])) as caught:
        used.load(NAME)
    assert caught.value.tensors == ("model.weights",)
    assert not isinstance(caught.value, striate.MissingMember)
    report = used.verify(NAME)
    assert report.lost == ("model.weights",) and not report.recoverable
    rest = used.load(NAME, partial=True)
    assert "model.weights" in str(quiet[-1].message)
    assert (
        rest["model"]["weights"].is_meta
        and rest["model"]["weights"].shape == state(1)["model"]["weights"].shape
    )
    assert rest["step"] == 1 and rest["model"]["halves"].equal(state(1)["model"]["halves"])
    with pytest.raises(striate.DataLost):
        used.repair(NAME)
    assert (drives[1] / NAME).exists()


def test_two_losses_in_different_groups_cost_only_their_own_recovery(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    used.save(state(1), NAME)
    flip(drives[0] / NAME, 4096 + 10)
    flip(drives[1] / NAME, 4096 + 3 * CHUNK_BYTES + 10)
    require_version(used.load(NAME), 1)
    assert "1 block(s)" in str(quiet[0].message)
    flip(drives[2] / NAME, 4096 + 10)
    with pytest.raises(striate.DataLost):
        used.load(NAME)


def test_members_swapped_between_drives_are_still_members(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(2)
    used = volume(drives, "stripe", {})
    used.save(state(1), NAME)
    first, second = (drives[0] / NAME).read_bytes(), (drives[1] / NAME).read_bytes()
    (drives[0] / NAME).write_bytes(second)
    (drives[1] / NAME).write_bytes(first)
    require_version(used.load(NAME), 1)


def test_a_member_of_an_older_generation_is_not_taken_for_one_of_this(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    used.save(state(1), NAME)
    old = (drives[0] / NAME).read_bytes()
    used.save(state(2), NAME)
    (drives[0] / NAME).write_bytes(old)
    require_version(used.load(NAME), 2)
    assert str(drives[0]) in str(quiet[0].message)
    used.repair()
    assert used.verify(NAME).ok
    # An older generation that is more nearly whole is not taken for the newest: no silent way back.
    (drives[0] / NAME).write_bytes(old)
    (drives[1] / NAME).unlink()
    with pytest.raises(striate.MissingMember, match="earlier generation"):
        used.load(NAME)


def test_blocks_that_were_swapped_or_are_of_an_older_generation_are_noticed(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    used.save(state(1), NAME)
    old = (drives[0] / NAME).read_bytes()
    used.save(state(2), NAME)
    whole = (drives[0] / NAME).read_bytes()
    first, second = slice(4096, 4096 + CHUNK_BYTES), slice(4096 + CHUNK_BYTES, 4096 + 2 * CHUNK_BYTES)
    swapped, stale = bytearray(whole), bytearray(whole)
    swapped[first], swapped[second] = whole[second], whole[first]
    stale[first] = old[first]
    for content, bad in ((swapped, 2), (stale, 1)):
        (drives[0] / NAME).write_bytes(content)
        require_version(used.load(NAME), 2)
        report = used.verify(NAME)
        assert len(report.damages) == bad and report.recoverable
        used.repair()
        assert (drives[0] / NAME).read_bytes() == whole


def test_a_truncated_member_is_a_lost_one(folders: Callable[[int], list[Path]], quiet: list[Any]) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    used.save(state(1), NAME)
    for length in (0, 7, 100, 4096, 5000, (drives[1] / NAME).stat().st_size - 1):
        os.truncate(drives[1] / NAME, length)
        require_version(used.load(NAME), 1)
        used.repair()
        assert used.verify(NAME).ok


def test_all_superblocks_damaged_is_said_so(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(2)
    used = volume(drives, "mirror", {})
    used.save(state(1), NAME)
    for drive in drives:
        flip(drive / NAME, 100)
    with pytest.raises(striate.CorruptCheckpoint, match="superblock"):
        used.load(NAME)
    used.save(state(2), NAME)
    require_version(used.load(NAME), 2)


@pytest.mark.parametrize(
    "hostile", [b"/etc/passwd", b"../outside", b"a/../../b", b"", b".striate-x", b"a//b", b"a\0b"]
)
def test_hostile_names_are_refused_by_hand_and_in_superblocks(
    folders: Callable[[int], list[Path]], tmp_path: Path, hostile: bytes
) -> None:
    from striate import superblock
    from striate.groups import Shape

    drives = folders(2)
    used = volume(drives, "stripe", {})
    with pytest.raises(ValueError, match="cannot be a name"):
        used.save(state(1), hostile)
    used.save(state(1), NAME)
    block = superblock.Superblock(
        uuid=bytes(16),
        sequence=1,
        volume=bytes(16),
        drive=bytes(16),
        member=0,
        members=1,
        shape=Shape(1, 0),
        chunk_bytes=4096,
        manifest_offset=4096,
        manifest_bytes=1,
        manifest_digest=bytes(16),
        whole=frozenset({0}),
        name=hostile,
    )
    raw = superblock.encode(block)
    with pytest.raises(striate.CorruptCheckpoint):
        superblock.decode(raw, path="member")
    (drives[0] / (".striate-" + "0" * 32)).write_bytes(raw)
    before = sorted(os.listdir(tmp_path))
    used.save(state(2), NAME)
    assert sorted(os.listdir(tmp_path)) == before
    require_version(used.load(NAME), 2)


def test_a_link_in_the_place_of_a_directory_leads_nowhere(
    folders: Callable[[int], list[Path]], tmp_path: Path
) -> None:
    drives = folders(2)
    outside = tmp_path / "outside"
    outside.mkdir()
    for drive in drives:
        (drive / "run").symlink_to(outside)
    with pytest.raises(striate.DriveError):
        volume(drives, "stripe", {}).save(state(1), "run/step")
    assert os.listdir(outside) == []


def test_copied_to_other_paths_it_is_found_by_naming_them(
    folders: Callable[[int], list[Path]], tmp_path: Path
) -> None:
    drives = folders(2)
    volume(drives, "stripe", {}).save(state(1), NAME)
    copies = [tmp_path / "machine" / drive.name for drive in drives]
    for drive, copy in zip(drives, copies, strict=True):
        shutil.copytree(drive, copy)
    shutil.rmtree(drives[0])
    shutil.rmtree(drives[1])
    require_version(striate.load(copies[0] / NAME, drives=copies), 1)

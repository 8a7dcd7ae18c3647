"""What stays on drives for a reason is left alone: only what nobody can need is swept."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from drives.conftest import left_on
from drives.volumes import NAME, flip, require_version, state, volume

import striate
from striate import superblock
from striate._engine import Fault, Io


def temporary_on(drive: Path) -> Path:
    (found,) = (drive / file for file in left_on(drive) if file.startswith(".striate-"))
    return found


def pending(drives: list[Path]) -> None:
    """A generation that is committed on the first drive; on the second its rename is still to come."""
    volume(drives, "mirror", {}).save(state(1), NAME)
    io = Io("posix", faults=[Fault("rename", count=0, drive=os.fsencode(drives[1]))])
    volume(drives, "mirror", {}, engine=io).save(state(2), NAME)
    assert temporary_on(drives[1]).exists()


def test_a_pending_member_is_kept_while_the_one_that_committed_it_cannot_be_read(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(2)
    pending(drives)
    flip(drives[0] / NAME, 40)  # of its superblock
    volume(drives, "mirror", {}).save(state(3), "another")
    block = superblock.decode(temporary_on(drives[1]).read_bytes()[:4096], path="temporary")
    assert block.name == NAME.encode()
    flip(drives[0] / NAME, 40)
    volume(drives, "mirror", {}).save(state(3), "another")
    assert left_on(drives[1]) == {NAME, "another"}
    require_version(volume(drives, "mirror", {}).load(NAME), 2)


def test_a_temporary_of_a_newer_version_is_left_to_newer_programs(
    folders: Callable[[int], list[Path]],
) -> None:
    drives = folders(2)
    volume(drives, "mirror", {}).save(state(1), NAME)
    block = bytearray((drives[0] / NAME).read_bytes()[:4096])
    block[8] = 2
    block[4080:] = xxhash.xxh3_128_digest(bytes(block[:4080]))
    newer = drives[0] / (".striate-" + "7" * 32)
    newer.write_bytes(block)
    volume(drives, "mirror", {}).save(state(2), NAME)
    assert newer.read_bytes() == block


def test_an_old_tombstone_does_not_take_a_damaged_member_of_a_later_save(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    used.save(state(1), NAME)
    away = drives[2].with_suffix(".away")
    drives[2].rename(away)
    used.delete(NAME)  # the tombstones stay for the drive that is away
    used.save(state(2), NAME)
    flip(drives[0] / NAME, 40)
    damaged = (drives[0] / NAME).read_bytes()
    used.save(state(3), "another")
    assert (drives[0] / NAME).read_bytes() == damaged
    away.rename(drives[2])
    used.save(state(3), "another")
    flip(drives[0] / NAME, 40)
    require_version(used.load(NAME), 2)


def test_a_superblock_that_disagrees_with_the_others_is_no_member(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    used.save(state(1), NAME)
    member = bytearray((drives[2] / NAME).read_bytes())
    block = superblock.decode(bytes(member[:4096]), path="member")
    for strange in (
        dataclasses.replace(block, member=200, members=255),
        dataclasses.replace(block, manifest_digest=bytes(16)),
        dataclasses.replace(block, chunk_bytes=8192),
    ):
        member[:4096] = superblock.encode(strange)
        (drives[2] / NAME).write_bytes(member)
        quiet.clear()
        require_version(used.load(NAME), 1)
        assert len(quiet) == 1
        assert used.verify(NAME).recoverable
    used.repair()
    assert used.verify(NAME).ok


def test_saves_go_on_while_a_repair_copies_and_what_they_replaced_is_not_put_back(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    volume(drives, "parity", {}).save(state(1), NAME)
    (drives[0] / NAME).unlink()
    # The copy of the new member waits in its last sync, as on a slow drive.
    slow = Io("posix", faults=[Fault("sync", "hang", value=1500, drive=os.fsencode(drives[0]))])
    repaired: list[Any] = []
    repairer = threading.Thread(
        target=lambda: repaired.append(volume(drives, "parity", {}, engine=slow).repair(NAME))
    )
    repairer.start()
    while not any(file.startswith(".striate-") and len(file) == 41 for file in os.listdir(drives[0])):
        assert repairer.is_alive()
    volume(drives, "parity", {}).save(state(2), NAME)
    assert repairer.is_alive(), "the save did not wait for the repair"
    repairer.join()
    assert repaired == [[]]
    require_version(volume(drives, "parity", {}).load(NAME), 2)
    assert volume(drives, "parity", {}).verify(NAME).ok
    volume(drives, "parity", {}).save(state(3), NAME)
    assert left_on(drives[0]) == {NAME}


@pytest.mark.parametrize("losses", [1, 2])
def test_load_into_overwrites_nothing_when_it_is_known_that_something_is_lost(
    folders: Callable[[int], list[Path]], quiet: list[Any], losses: int
) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    used.save(state(1), NAME)
    for drive in drives[:losses]:
        (drive / NAME).unlink()
    for verify_first in (False, True):
        into = state(2)
        if losses == 1:
            require_version(used.load_into(into, NAME, verify_first=verify_first), 1)
            continue
        with pytest.raises(striate.DataLost):
            used.load_into(into, NAME, verify_first=verify_first)
        require_version(into, 2)
        with pytest.raises(striate.DataLost):
            striate.load_into(into, drives[2] / NAME, verify_first=verify_first)
        require_version(into, 2)

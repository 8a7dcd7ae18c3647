"""The transaction over many drives: whatever fails, and whenever power goes, one whole generation is there."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drives.conftest import left_on
from drives.volumes import NAME, flip, require_version, state, version_of, volume

import striate
from striate._engine import Fault, Io

OLD, NEW, NEXT = 1, 2, 3
LAYOUTS: list[tuple[str, int, dict[str, int]]] = [("stripe", 2, {}), ("mirror", 2, {}), ("parity", 3, {})]
LAYOUT_IDS = [layout for layout, _, _ in LAYOUTS]


def save(
    version: int, drives: list[Path], layout: str, options: dict[str, int], **more: Any
) -> striate.SaveResult:
    return volume(drives, layout, options, **more).save(state(version), NAME)


def version_on(drives: list[Path], layout: str, options: dict[str, int]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", striate.VolumeWarning)
        return version_of(volume(drives, layout, options).load(NAME))


def require_clean(drives: list[Path]) -> None:
    for drive in drives:
        assert left_on(drive) == {NAME}, "a finished save leaves nothing beside its member"


def operations(drives: list[Path], layout: str, options: dict[str, int]) -> list[str]:
    io = Io("posix", trace=True)
    save(OLD, drives, layout, options, engine=io)
    return [trace.op for trace in io.traces()]


@pytest.mark.parametrize(("layout", "count", "options"), LAYOUTS, ids=LAYOUT_IDS)
def test_power_that_goes_before_any_operation_leaves_the_old_or_the_new(
    folders: Callable[[int], list[Path]], layout: str, count: int, options: dict[str, int]
) -> None:
    drives = folders(count)
    save(OLD, drives, layout, options)
    total = len(operations(drives, layout, options))
    assert total > 40
    seen = set()
    for nth in range(total):
        save(OLD, drives, layout, options)
        io = Io("posix", faults=[Fault("any", "cut", nth)])
        raised = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", striate.VolumeWarning)
            try:
                save(NEW, drives, layout, options, engine=io)
                raised = False
            except striate.StriateError as e:
                if "is intact" in str(e):
                    assert version_on(drives, layout, options) == OLD, f"operation {nth}"
        found = version_on(drives, layout, options)
        assert found in (OLD, NEW), f"operation {nth}"
        seen.add((found, raised))
        # The next save finds the way, whatever was left.
        save(NEXT, drives, layout, options)
        require_version(volume(drives, layout, options).load(NAME), NEXT)
        require_clean(drives)
    assert (OLD, True) in seen and (NEW, False) in seen


@pytest.mark.parametrize(("layout", "count", "options"), LAYOUTS, ids=LAYOUT_IDS)
def test_any_operation_that_fails_on_one_drive_loses_nothing(
    folders: Callable[[int], list[Path]], layout: str, count: int, options: dict[str, int]
) -> None:
    drives = folders(count)
    victim = os.fsencode(drives[1])
    save(OLD, drives, layout, options)
    io = Io("posix", trace=True)
    save(OLD, drives, layout, options, engine=io)
    for op in (
        "open",
        "lock",
        "allocate",
        "truncate",
        "write",
        "read",
        "sync",
        "sync_directory",
        "rename",
        "unlink",
    ):
        for nth in range(8):
            save(OLD, drives, layout, options)
            faulty = Io("posix", faults=[Fault(op, nth=nth, drive=victim)])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", striate.VolumeWarning)
                try:
                    result = save(NEW, drives, layout, options, engine=faulty)
                except striate.DriveError as e:
                    refusal = str(e)
                    assert str(drives[1]) in refusal and layout == "stripe", (op, nth, refusal)
                    assert version_on(drives, layout, options) == OLD, (op, nth)
                else:
                    assert version_on(drives, layout, options) == NEW, (op, nth)
                    told = [str(w.message) for w in caught]
                    if result.degraded:
                        assert layout != "stripe" and any(str(drives[1]) in text for text in told)
            save(NEXT, drives, layout, options)
            require_version(volume(drives, layout, options).load(NAME), NEXT)
            require_clean(drives)


@pytest.mark.parametrize("op", ["write", "sync", "allocate"])
def test_a_drive_that_fails_costs_a_mirror_its_redundancy_and_repair_brings_it_back(
    folders: Callable[[int], list[Path]], quiet: list[Any], op: str
) -> None:
    drives = folders(2)
    save(OLD, drives, "mirror", {})
    faulty = Io("posix", faults=[Fault(op, count=0, drive=os.fsencode(drives[0]))])
    result = save(NEW, drives, "mirror", {}, engine=faulty)
    assert result.degraded and [bool(member.trouble) for member in result.members] == [True, False]
    assert str(drives[0]) in str(quiet[0].message) and "repair" in str(quiet[0].message)
    used = volume(drives, "mirror", {})
    require_version(used.load(NAME), NEW)
    assert [done.drives for done in used.repair()] == [(str(drives[0]),)]
    assert used.verify(NAME).ok
    require_clean(drives)
    with pytest.raises(striate.DriveMedia, match=str(drives[0])):
        save(NEXT, drives, "mirror", {}, engine=faulty, on_drive_failure="raise")
    require_version(used.load(NAME), NEW)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_drive_always_raises(folders: Callable[[int], list[Path]], code: int) -> None:
    drives = folders(3)
    save(OLD, drives, "parity", {"parity": 1})
    for op in ("allocate", "write", "sync"):
        faulty = Io("posix", faults=[Fault(op, count=0, value=code, drive=os.fsencode(drives[2]))])
        with pytest.raises(striate.DriveFull, match="intact"):
            save(NEW, drives, "parity", {"parity": 1}, engine=faulty)
        assert version_on(drives, "parity", {}) == OLD
        require_clean(drives)


@pytest.mark.parametrize("op", ["write", "sync", "rename"])
def test_a_drive_that_hangs_is_given_up_in_time(
    folders: Callable[[int], list[Path]], quiet: list[Any], op: str, engine_name: str
) -> None:
    drives = folders(2)
    save(OLD, drives, "mirror", {})
    faults = [Fault(op, "hang", count=0, value=4000, drive=os.fsencode(drives[1]))]
    hanging = Io(engine_name, faults=faults)  # type: ignore[arg-type]
    begun = time.monotonic()
    save(NEW, drives, "mirror", {}, engine=hanging, hang_timeout_s=0.3)
    assert time.monotonic() - begun < 3
    assert any(word in str(w.message) for w in quiet for word in ("did not answer", "no answer", "pending"))
    require_version(volume(drives, "mirror", {}).load(NAME), NEW)
    # Nothing of this process touches it again.
    assert "not touched again" in str(volume(drives, "mirror", {}).info(NAME).members[1].trouble)


def test_a_stripe_over_a_drive_that_hangs_raises_and_names_it(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(2)
    save(OLD, drives, "stripe", {})
    hanging = Io("posix", faults=[Fault("write", "hang", count=0, value=4000, drive=os.fsencode(drives[1]))])
    with pytest.raises(striate.DriveHung, match=str(drives[1])):
        save(NEW, drives, "stripe", {}, engine=hanging, hang_timeout_s=0.3)


def test_reading_from_a_drive_that_hangs_goes_on_without_it(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    save(OLD, drives, "parity", {})
    hanging = Io(
        "posix", faults=[Fault("read", "hang", nth=6, count=0, value=4000, drive=os.fsencode(drives[1]))]
    )
    require_version(volume(drives, "parity", {}, engine=hanging, hang_timeout_s=0.3).load(NAME), OLD)
    assert str(drives[1]) in str(quiet[0].message)


def test_an_empty_directory_in_the_place_of_a_drive_is_not_written_to(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    for layout in ("stripe", "parity"):
        for drive in drives:
            drive.mkdir(exist_ok=True)
        save(OLD, drives, layout, {})
        mounted = drives[1].with_suffix(".mounted")
        drives[1].rename(mounted)
        drives[1].mkdir()
        quiet.clear()
        if layout == "stripe":
            with pytest.raises(striate.DriveError, match="no label"):
                save(NEW, drives, layout, {})
        else:
            assert save(NEW, drives, layout, {}).degraded
            assert any("no label" in str(w.message) or "missing" in str(w.message) for w in quiet)
            require_version(volume(drives, layout, {}).load(NAME), NEW)
        assert os.listdir(drives[1]) == [], "nothing is written to the bare mount point"
        if layout == "parity":
            volume(drives, "parity", {}).repair()
        assert os.listdir(drives[1]) == []
        drives[1].rmdir()
        mounted.rename(drives[1])
        save(NEXT, drives, layout, {})
        require_version(volume(drives, layout, {}).load(NAME), NEXT)


def test_a_replacement_takes_the_place_of_a_drive_when_told(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    save(OLD, drives, "parity", {})
    used.save(state(NEW), "other")
    drives[1].rename(drives[1].with_suffix(".dead"))
    drives[1].mkdir()
    repaired = used.repair(replace=drives[1])
    assert sorted(done.name for done in repaired) == ["other", NAME]
    assert used.verify(NAME).ok and used.verify("other").ok
    quiet.clear()
    require_version(used.load(NAME), OLD)
    save(NEXT, drives, "parity", {})
    assert not quiet
    assert used.repair(replace=drives[1]) == []


def test_an_interrupted_repair_loses_nothing(folders: Callable[[int], list[Path]], quiet: list[Any]) -> None:
    drives = folders(3)
    save(OLD, drives, "parity", {})
    whole = (drives[0] / NAME).read_bytes()
    io = Io("posix", trace=True)
    (drives[0] / NAME).unlink()
    volume(drives, "parity", {}, engine=io).repair()
    for nth in range(0, len(io.traces()), 2):
        (drives[0] / NAME).unlink()
        cut = Io("posix", faults=[Fault("any", "cut", nth)])
        with contextlib.suppress(striate.StriateError):
            volume(drives, "parity", {}, engine=cut).repair()
        require_version(volume(drives, "parity", {}).load(NAME), OLD)
        volume(drives, "parity", {}).repair()
        assert (drives[0] / NAME).read_bytes() == whole
        require_clean(drives)


def test_a_rename_that_fails_is_pending_and_the_next_save_or_repair_finishes_it(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(2)
    save(OLD, drives, "stripe", {})
    save(
        NEW, drives, "stripe", {}, engine=Io("posix", faults=[Fault("rename", drive=os.fsencode(drives[1]))])
    )
    assert not quiet, "one that fails once is finished by the save itself"
    require_clean(drives)
    io = Io("posix", faults=[Fault("rename", count=0, drive=os.fsencode(drives[1]))])
    save(NEW, drives, "stripe", {}, engine=io)
    assert "pending" in str(quiet[0].message)
    assert len(left_on(drives[1])) == 2
    require_version(volume(drives, "stripe", {}).load(NAME), NEW)
    # A plain save on that drive leaves it alone.
    striate.save(state(NEXT), drives[1] / "plain.safetensors")
    require_version(volume(drives, "stripe", {}).load(NAME), NEW)
    (drives[1] / "plain.safetensors").unlink()
    volume(drives, "stripe", {}).repair()
    require_clean(drives)
    require_version(volume(drives, "stripe", {}).load(NAME), NEW)


def test_what_was_deleted_does_not_come_back_with_a_drive(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(2)
    used = volume(drives, "mirror", {})
    save(OLD, drives, "mirror", {})
    drives[1].rename(drives[1].with_suffix(".away"))
    assert used.delete(NAME) == 1
    drives[1].with_suffix(".away").rename(drives[1])
    with pytest.raises(FileNotFoundError):
        used.load(NAME)
    assert used.list() == []
    used.save(state(NEW), "other")
    assert not (drives[1] / NAME).exists()
    assert left_on(drives[0]) == left_on(drives[1]) == {"other"}
    used.save(state(NEXT), NAME)
    require_version(used.load(NAME), NEXT)
    with pytest.raises(FileNotFoundError):
        used.delete("never")


def test_drives_of_another_volume_are_refused(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(4)
    save(OLD, drives[:2], "stripe", {})
    save(OLD, drives[2:], "stripe", {})
    with pytest.raises(striate.VolumeMismatch, match="different volumes"):
        save(NEW, [drives[0], drives[2]], "stripe", {})
    with pytest.raises(striate.VolumeMismatch, match="same directory"):
        save(NEW, [drives[0], drives[0]], "stripe", {})
    with pytest.raises(striate.DriveError):
        save(NEW, drives[:1], "stripe", {})
    with pytest.raises(striate.StriateError, match="several drives"):
        striate.save(state(NEW), drives[0] / NAME)
    assert version_on(drives[:2], "stripe", {}) == OLD
    with pytest.raises(striate.VolumeMismatch):
        volume(drives[:2], "parity", {})
    with pytest.raises(striate.VolumeMismatch):
        volume(drives[:2], "mirror", {"copies": 3})


def test_a_foreign_member_is_replaced_only_when_told(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(3)
    save(OLD, drives[:2], "stripe", {})
    member = (drives[0] / NAME).read_bytes()
    (drives[2] / NAME).write_bytes(member)
    with pytest.raises(striate.VolumeMismatch, match="overwrite_foreign"):
        save(NEW, drives[2:], "stripe", {})
    assert (drives[2] / NAME).read_bytes() == member
    volume(drives[2:], "stripe", {}).save(state(NEW), NAME, overwrite_foreign=True)
    assert version_on(drives[2:], "stripe", {}) == NEW


def test_a_volume_does_not_begin_or_grow_without_a_drive_that_was_given(
    folders: Callable[[int], list[Path]],
) -> None:
    drives = folders(3)
    absent = drives[2].with_name("absent")
    for layout in ("stripe", "mirror", "parity"):
        with pytest.raises(striate.DriveError, match="part of a new volume") as caught:
            save(OLD, [*drives[:2], absent], layout, {})
        assert caught.value.drive == str(absent)
    assert [os.listdir(drive) for drive in drives] == [[".striate.lock"], [".striate.lock"], []]
    save(OLD, drives[:2], "stripe", {})
    with pytest.raises(striate.DriveError, match="become a part of the volume"):
        save(NEW, [*drives[:2], absent], "stripe", {})
    assert version_on(drives[:2], "stripe", {}) == OLD


def test_a_torn_label_is_told_with_its_remedy_which_works(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    save(OLD, drives, "parity", {})
    flip(drives[1] / ".striate-label", 100)
    assert save(NEW, drives, "parity", {}).degraded
    assert "remove the label" in str(quiet[0].message)
    (drives[1] / ".striate-label").unlink()
    used = volume(drives, "parity", {})
    used.repair(replace=drives[1])
    assert used.verify(NAME).ok
    require_version(used.load(NAME), NEW)


def test_names_that_are_listed_are_names_that_load_and_delete_take(
    folders: Callable[[int], list[Path]],
) -> None:
    used = volume(folders(2), "mirror", {})
    names = [b"odd\xff", "line\nbreak", "a b", "\u2603/x"]
    for version, name in enumerate(names, 1):
        used.save(state(version), name)
    listed = [entry.name for entry in used.list()]
    assert sorted(map(os.fsencode, listed)) == sorted(map(os.fsencode, names))
    for name in listed:
        version_of(used.load(name))
        used.delete(name)
    assert used.list() == []


def test_an_interrupt_in_the_middle_of_the_data_leaves_the_old_generation(
    folders: Callable[[int], list[Path]],
) -> None:
    drives = folders(3)
    save(OLD, drives, "parity", {})
    used = volume(drives, "parity", {}, max_bandwidth=100_000)
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        used.save(state(NEW, data_bytes=1 << 20), NAME)
    assert version_on(drives, "parity", {}) == OLD
    require_clean(drives)
    save(NEXT, drives, "parity", {})


def test_few_descriptors_are_an_error_and_nothing_lost(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(4)
    save(OLD, drives, "stripe", {})
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        failures = 0
        used = len(os.listdir("/proc/self/fd"))
        for more in range(1, 24):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, 4096))
            try:
                save(NEW, drives, "stripe", {}, engine="auto")
            except striate.StriateError:
                failures += 1
            except OSError:
                os._exit(2)  # every error is to be told as ours
        os._exit(0 if 0 < failures < 23 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert version_on(drives, "stripe", {}) == NEW
    save(NEXT, drives, "stripe", {})
    require_clean(drives)


def test_a_drive_that_is_added_is_adopted(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(3)
    save(OLD, drives[:2], "stripe", {})
    save(NEW, drives, "stripe", {})
    assert all((drive / NAME).exists() for drive in drives)
    require_version(volume(drives, "stripe", {}).load(NAME), NEW)


def test_a_first_save_that_died_between_two_labels_needs_nobodys_help(
    folders: Callable[[int], list[Path]],
) -> None:
    drives = folders(3)
    io = Io("posix", trace=True)
    save(OLD, drives, "stripe", {}, engine=io)
    labelled = [
        n for n, trace in enumerate(io.traces()) if trace.op == "rename" and trace.to == b".striate-label"
    ]
    assert len(labelled) == 5, "one for each, and again for those that came first"
    for nth in labelled:
        for drive in drives:
            for file in drive.iterdir():
                file.unlink()
        with pytest.raises(striate.StriateError):
            save(OLD, drives, "stripe", {}, engine=Io("posix", faults=[Fault("any", "cut", nth)]))
        save(NEW, drives, "stripe", {})
        require_version(volume(drives, "stripe", {}).load(NAME), NEW)


def test_a_generation_can_be_asked_for(folders: Callable[[int], list[Path]], quiet: list[Any]) -> None:
    drives = folders(2)
    first = save(OLD, drives, "mirror", {})
    drives[1].rename(drives[1].with_suffix(".away"))
    save(NEW, drives, "mirror", {})
    drives[1].with_suffix(".away").rename(drives[1])
    used = volume(drives, "mirror", {})
    require_version(used.load(NAME), NEW)
    require_version(used.load(NAME, generation=first.uuid), OLD)
    require_version(used.load(NAME, generation=first.sequence), OLD)
    with pytest.raises(striate.FormatError, match="no generation"):
        used.load(NAME, generation="00")


@pytest.mark.parametrize(("layout", "count", "options"), LAYOUTS, ids=LAYOUT_IDS)
def test_a_save_and_a_load_tell_what_each_drive_did(
    folders: Callable[[int], list[Path]], layout: str, count: int, options: dict[str, int]
) -> None:
    drives = folders(count)
    used = volume(drives, layout, options)
    result = used.save(state(NEW), NAME)
    told: list[striate.LoadResult] = []
    used.load(NAME, on_loaded=told.append)
    used.load_into(state(OLD), NAME, on_loaded=told.append)
    striate.load(drives[0] / NAME, on_loaded=told.append)
    assert [use.drive for use in result.drives] == [str(drive) for drive in drives]
    # Blocks are written in multiples of 4096 bytes, all copies and check blocks with them.
    data_bytes = result.data_bytes * {"stripe": 1.0, "mirror": 2.0, "parity": 1.5}[layout]
    assert data_bytes <= sum(use.bytes for use in result.drives) <= data_bytes + 3 * 4096
    assert all(use.transfers and use.busy_s > 0 and not use.errors for use in result.drives)
    for load in told:
        assert (load.uuid, load.data_bytes) == (result.uuid, result.data_bytes)
        assert {use.drive for use in load.drives} == {str(drive) for drive in drives}
        assert load.data_bytes <= sum(use.bytes for use in load.drives) <= load.data_bytes + 6 * 4096
        assert 0 < max(use.busy_s for use in load.drives) <= load.elapsed_s


# ---- processes -----------------------------------------------------------------


def _save_many(
    drives: list[Path], layout: str, options: dict[str, int], version: int, times: int, engine: Any = "posix"
) -> None:
    for _ in range(times):
        save(version, drives, layout, options, engine=engine)


@pytest.mark.parametrize(("layout", "count", "options"), LAYOUTS, ids=LAYOUT_IDS)
def test_savers_of_one_name_leave_one_whole_generation(
    folders: Callable[[int], list[Path]], layout: str, count: int, options: dict[str, int]
) -> None:
    drives = folders(count)
    pids = []
    for version in (1, 2):
        pid = os.fork()
        if pid == 0:
            try:
                warnings.simplefilter("ignore")
                # Renames that take their time, one drive longer than the others: without the locks the two savers'
                # renames would mix.
                late = os.fsencode(drives[version - 1])
                faults = [
                    Fault("rename", "hang", count=0, value=5),
                    Fault("rename", "hang", count=0, value=15, drive=late),
                ]
                _save_many(drives, layout, options, version, 20, Io("posix", faults=faults))
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert version_on(drives, layout, options) in (1, 2)
    uuids = {striate.info(drive / NAME).uuid for drive in drives}
    assert len(uuids) == 1
    require_clean(drives)


@pytest.mark.parametrize(("layout", "count", "options"), LAYOUTS, ids=LAYOUT_IDS)
def test_a_saver_killed_at_any_moment_leaves_a_whole_generation(
    folders: Callable[[int], list[Path]], layout: str, count: int, options: dict[str, int]
) -> None:
    drives = folders(3)
    known = 1
    save(known, drives, layout, options)
    for moment in range(70):
        pid = os.fork()
        if pid == 0:
            warnings.simplefilter("ignore")
            for version in range(known + 1, known + 100):
                save(version, drives, layout, options, engine="posix")
            os._exit(0)
        time.sleep(0.0014 * moment + 0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = version_on(drives, layout, options)
        assert known <= found < known + 100
        known = found
    assert known >= 10
    save(9, drives, layout, options)
    assert version_on(drives, layout, options) == 9
    require_clean(drives)


@pytest.mark.parametrize(("layout", "count", "options"), LAYOUTS, ids=LAYOUT_IDS)
def test_a_reader_beside_a_saver_always_finds_a_whole_generation(
    folders: Callable[[int], list[Path]], layout: str, count: int, options: dict[str, int]
) -> None:
    drives = folders(count)
    save(1, drives, layout, options)
    saver = os.fork()
    if saver == 0:
        warnings.simplefilter("ignore")
        slow = Io("posix", faults=[Fault("rename", "hang", count=0, value=3)])
        _save_many(drives, layout, options, 2, 25, slow)
        os._exit(0)
    loads = 0
    while os.waitpid(saver, os.WNOHANG)[0] == 0:
        # Any warning is an error here: nothing is damaged, nothing is missing.
        assert version_of(volume(drives, layout, options).load(NAME)) in (1, 2)
        assert version_of(striate.load(drives[-1] / NAME)) in (1, 2)
        loads += 2
    assert loads > 10
    assert version_on(drives, layout, options) == 2


@pytest.mark.parametrize(("layout", "count", "options"), LAYOUTS, ids=LAYOUT_IDS)
def test_a_file_size_limit_in_the_middle_leaves_the_old_generation(
    folders: Callable[[int], list[Path]], layout: str, count: int, options: dict[str, int]
) -> None:
    drives = folders(count)
    save(OLD, drives, layout, options)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            save(NEW, drives, layout, options)
            os.write(writing, b"saved")
        except striate.DriveAccess as e:
            os.write(writing, f"{e.errno} {e}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading, "rb") as told:
        answer = told.read().decode()
    assert answer.startswith(f"{errno.EFBIG} ") and "intact" in answer
    assert version_on(drives, layout, options) == OLD
    require_clean(drives)


@pytest.mark.parametrize("layout", ["stripe", "parity"])
def test_a_mapped_tensor_that_is_cut_short_is_no_drives_fault(
    folders: Callable[[int], list[Path]], tmp_path: Path, layout: str
) -> None:
    drives = folders(3)
    save(OLD, drives, layout, {})
    mapped = tmp_path / "mapped"
    mapped.write_bytes(bytes(1 << 20))
    tensor = torch.from_file(str(mapped), shared=True, size=1 << 20, dtype=torch.uint8)
    os.truncate(mapped, 4096)
    with pytest.raises(striate.DriveError, match="truncated") as caught:
        volume(drives, layout, {}).save({"t": tensor}, NAME)
    assert caught.value.errno == errno.EFAULT and "intact" in str(caught.value)
    assert version_on(drives, layout, {}) == OLD
    require_clean(drives)


def test_groups_that_no_memory_was_meant_for_are_refused_at_once(
    folders: Callable[[int], list[Path]],
) -> None:
    drives = folders(6)
    with pytest.raises(ValueError, match="smaller chunks"):
        volume(drives, "parity", {}, chunk_bytes=64 << 20)
    volume(drives[:3], "stripe", {}, chunk_bytes=64 << 20)


def test_threads_saving_and_loading_over_the_same_drives_get_along(
    folders: Callable[[int], list[Path]],
) -> None:
    drives = folders(3)
    save(1, drives, "parity", {})
    errors: list[BaseException] = []

    def work(version: int) -> None:
        try:
            used = volume(drives, "parity", {})
            for _ in range(8):
                used.save(state(version), f"own{version}")
                require_version(used.load(f"own{version}"), version)
                used.save(state(version), NAME)
                assert version_of(used.load(NAME)) in (1, 2, 3, 4)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(version,)) for version in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert left_on(drives[0]) == {NAME, "own2", "own3", "own4"}


def test_saves_fail_and_succeed_for_long_and_leave_descriptors_and_threads_flat(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(3)
    save(OLD, drives, "parity", {})
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for turn in range(40):
        broken = Io("posix", faults=[Fault("write", nth=3, count=0)]) if turn % 5 == 0 else "posix"
        try:
            save(turn % 3 + 1, drives, "parity", {}, engine=broken)
        except striate.StriateError:
            assert turn % 5 == 0
        volume(drives, "parity", {}).load(NAME)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before

"""Where a checkpoint is written: modes and owners as open() would give, links followed, names kept."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash import jobs
from crash.checkpoints import NAME, beside, require_alone, save, version_at
from crash.processes import run_job

import striate
from support.sandbox import NOBODY


@pytest.fixture(params=[0o022, 0o027, 0o002, 0o077], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    earlier = os.umask(request.param)
    yield request.param
    os.umask(earlier)


def facts(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


def test_a_new_file_gets_the_mode_and_owner_that_open_gives(tmp_path: Path, umask: int) -> None:
    with open(tmp_path / "by open", "wb"):
        pass
    save(1, tmp_path / NAME)
    assert facts(tmp_path / NAME) == facts(tmp_path / "by open")


def test_overwriting_keeps_the_mode(tmp_path: Path, umask: int) -> None:
    path = tmp_path / NAME
    for mode in (0o664, 0o600, 0o666, 0o755):
        save(1, path)
        path.chmod(mode)
        before = facts(path)
        save(2, path)
        assert facts(path) == before
        assert version_at(path) == 2


def test_a_setgid_directory_gives_its_group(tmp_path: Path, umask: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a directory to another group needs root")
    os.chown(tmp_path, -1, NOBODY)
    tmp_path.chmod(0o2775)
    with open(tmp_path / "by open", "wb"):
        pass
    save(1, tmp_path / NAME)
    assert facts(tmp_path / NAME) == facts(tmp_path / "by open")
    assert facts(tmp_path / NAME)[2] == NOBODY


def test_overwriting_as_root_keeps_the_owner(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving files away needs root")
    path = tmp_path / NAME
    save(1, path)
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o640)
    save(2, path)
    assert facts(path) == (0o640, NOBODY, NOBODY)


def test_a_file_without_write_permission_is_not_replaced(memory_dir: Path, processes: Any) -> None:
    """rename would do it; open() for writing, and so torch.save, would not."""
    path = memory_dir / NAME
    save(1, path)
    path.chmod(0o444)
    memory_dir.chmod(0o777)
    code, message = run_job(processes, jobs.save_as_nobody, str(path))
    assert code == errno.EACCES
    assert f"the earlier {NAME} is intact" in message.lower()
    assert version_at(path) == 1
    require_alone(path)


def test_members_of_a_group_overwrite_each_others_checkpoints(memory_dir: Path, processes: Any) -> None:
    """The owner cannot be kept, the group can: or the next one of them could not go on with it."""
    if os.geteuid() != 0:
        pytest.skip("another user and another group need root")
    path = memory_dir / NAME
    group = 54321
    save(1, path)
    path.chmod(0o664)
    os.chown(path, 12345, group)
    memory_dir.chmod(0o777)
    assert run_job(processes, jobs.save_as_nobody, str(path), group) == (0, "saved")
    assert facts(path) == (0o664, NOBODY, group)
    assert version_at(path) == 2


def test_other_names_of_the_file_keep_the_old_checkpoint(tmp_path: Path) -> None:
    path, other = tmp_path / NAME, tmp_path / "other"
    save(1, path)
    os.link(path, other)
    save(2, path)
    assert version_at(path) == 2
    assert version_at(other) == 1


# ---- links -------------------------------------------------------------------


def test_a_link_to_a_file_on_another_file_system_stays_and_its_target_gets_the_data(
    tmp_path: Path, memory_dir: Path
) -> None:
    target, link = memory_dir / NAME, tmp_path / "link"
    if os.stat(tmp_path).st_dev == os.stat(memory_dir).st_dev:
        pytest.skip("there is one file system only")
    save(1, target)
    link.symlink_to(target)
    for version in (2, 3):
        save(version, link)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert version_at(link) == version_at(target) == version
    require_alone(target)
    assert beside(link) == []


def test_a_dangling_link_stays_and_its_target_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(Path("folder") / NAME)
    save(1, link)
    assert os.readlink(link) == f"folder/{NAME}"
    assert version_at(folder / NAME) == 1
    require_alone(folder / NAME)


def test_a_chain_of_relative_links_through_folders_is_followed(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / "first").symlink_to("../two/second")
    (two / "second").symlink_to("third")
    (tmp_path / "door").symlink_to("one")
    save(1, tmp_path / "door" / "first")
    assert version_at(two / "third") == 1
    assert sorted(path.name for path in two.iterdir()) == ["second", "third"]


def test_a_loop_of_links_is_eloop_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for act in (lambda path: save(1, path), striate.load):
        with pytest.raises(striate.DriveAccess) as caught:
            act(tmp_path / "one")
        assert caught.value.errno == errno.ELOOP
        assert caught.value.filename == str(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_dangling_link_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("missing/file")
    with pytest.raises(FileNotFoundError, match="missing"):
        save(1, tmp_path / "link")
    assert os.listdir(tmp_path) == ["link"]


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    with pytest.raises(IsADirectoryError):
        save(1, tmp_path / "link")
    assert os.listdir(tmp_path / "folder") == []


def test_a_name_of_255_bytes_is_saved_and_one_of_256_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / ("n" * 255)
    save(1, path)
    save(2, path)
    assert version_at(path) == 2
    require_alone(path)
    with pytest.raises(striate.DriveAccess, match="255") as caught:
        save(3, tmp_path / ("n" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG
    require_alone(path)


def test_files_of_others_that_look_like_temporaries_stay(tmp_path: Path) -> None:
    """Only what has the exact form of our names, is a regular file and is not locked is swept."""
    others = [".striate-notes", ".striate-" + "5a" * 15, ".striate-" + "5a" * 17, "striate-" + "5a" * 16]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / (".striate-" + "6b" * 16)).mkdir()
    (tmp_path / (".striate-" + "7c" * 16)).symlink_to(others[0])
    os.mkfifo(tmp_path / (".striate-" + "8d" * 16))
    before = sorted(os.listdir(tmp_path))
    save(1, tmp_path / NAME)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, NAME])

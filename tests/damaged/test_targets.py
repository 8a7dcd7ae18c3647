"""Places that cannot be saved to: refused before anything is written, and whatever stood there stands there still."""

from __future__ import annotations

import errno
import json
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
from striate._engine import Io
from support.loop_drives import LoopDrive
from support.same import same
from support.sandbox import LAUNCH, run_python

STATE = {"w": torch.arange(5000.0)}


@pytest.fixture(params=["uring", "posix"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


def refused(path: Any, engine: Any, code: int, standard: type[OSError]) -> striate.DriveError:
    """The error of a save to a place that cannot be saved to, which must not have changed anything."""
    io = Io(engine, trace=True)
    with pytest.raises(standard) as caught:
        striate.save(STATE, path, engine=io)
    error = caught.value
    assert isinstance(error, striate.DriveAccess) and error.errno == code
    assert os.fsdecode(path) in str(error) and errno.errorcode[code] in str(error)
    assert "Nothing was written" in str(error) and len(str(error).split(". ")) >= 3, f"no advice: {error}"
    assert error.filename == os.fsdecode(path)
    changes = [t for t in io.traces() if t.op not in ("open", "close", "read") and t.result >= 0]
    assert changes == []
    return error


def test_missing_parent_is_file_not_found_before_the_object_is_even_pickled(
    tmp_path: Path, engine: Any
) -> None:
    path = tmp_path / "missing" / "below" / "checkpoint"
    error = refused(path, engine, errno.ENOENT, FileNotFoundError)
    assert str(path.parent) in str(error) and "create it" in str(error)
    assert os.listdir(tmp_path) == []

    class NeverPickled:
        def __reduce__(self) -> Any:
            raise AssertionError("pickled for nothing")

    with pytest.raises(FileNotFoundError):
        striate.save(NeverPickled(), path, engine=engine)
    with pytest.raises((FileNotFoundError, RuntimeError)):
        torch.save(STATE, path)


def test_parent_that_is_a_file(tmp_path: Path, engine: Any) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    refused(tmp_path / "file" / "checkpoint", engine, errno.ENOTDIR, NotADirectoryError)
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_target_that_is_a_directory(tmp_path: Path, engine: Any) -> None:
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", engine, errno.EISDIR, IsADirectoryError)
    refused(f"{tmp_path}/folder/", engine, errno.EISDIR, IsADirectoryError)
    (tmp_path / "link").symlink_to("folder")
    refused(tmp_path / "link", engine, errno.EISDIR, IsADirectoryError)
    assert os.listdir(tmp_path / "folder") == []


def test_path_that_ends_in_a_slash_or_is_empty(tmp_path: Path, engine: Any) -> None:
    for path in (f"{tmp_path}/new/", f"{tmp_path}/.", f"{tmp_path}/.."):
        with pytest.raises(OSError) as caught:
            striate.save(STATE, path, engine=engine)
        assert isinstance(caught.value, striate.DriveError)
    with pytest.raises(OSError) as caught:
        striate.save(STATE, "", engine=engine)
    assert isinstance(caught.value, striate.DriveError)
    assert os.listdir(tmp_path) == []


# ---- as an ordinary user -----------------------------------------------------

AS_USER = """
import errno, json, os, sys
sys.path.insert(0, sys.argv[2])
import launch, torch, striate
folder, answers = sys.argv[1], {}
state = {"w": torch.arange(5000.0)}
for way in (striate.load, striate.info, striate.verify):  # imported while there is permission to
    way(f"{folder}/warm")
if os.geteuid() == 0:
    launch.become(65534)
def attempt(name, path):
    try:
        striate.save(state, path)
        answers[name] = "saved"
    except OSError as e:
        answers[name] = [type(e).__name__, isinstance(e, PermissionError), isinstance(e, striate.DriveAccess),
                         e.errno, str(e), e.filename]
attempt("read-only folder", f"{folder}/readonly/new")
attempt("file in a read-only folder", f"{folder}/readonly/old")
attempt("read-only file", f"{folder}/open/readonly")
attempt("folder that may not be entered", f"{folder}/closed/new")
attempt("another's file in a sticky folder", f"{folder}/sticky/other")
for name, path in (("closed", f"{folder}/closed/old"), ("secret", f"{folder}/open/secret")):
    for way in (striate.load, striate.info, striate.verify):
        try:
            way(path)
            answers[f"{name} {way.__name__}"] = "read"
        except OSError as e:
            answers[f"{name} {way.__name__}"] = [type(e).__name__, isinstance(e, PermissionError), e.errno, str(e)]
print(json.dumps(answers))
"""


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A folder that an ordinary user may enter, which below tmp_path it may not."""
    folder = Path(tempfile.mkdtemp(prefix="striate-"))
    folder.chmod(0o755)
    yield folder
    subprocess.run(["chmod", "-R", "u+rwX", folder], check=True)
    shutil.rmtree(folder)


def test_ordinary_user_without_permission(anybodys: Path) -> None:
    for name, mode in (("readonly", 0o555), ("open", 0o777), ("closed", 0o000), ("sticky", 0o1777)):
        (anybodys / name).mkdir()
        for old in ("old", "readonly", "secret", "other"):
            striate.save({"old": torch.ones(3)}, anybodys / name / old)
        (anybodys / name / "readonly").chmod(0o444)
        (anybodys / name / "secret").chmod(0o000)
        (anybodys / name).chmod(mode)
    striate.save(STATE, anybodys / "warm")
    answers = json.loads(run_python(AS_USER, anybodys, str(LAUNCH.parent)).stdout)
    root = os.geteuid() == 0
    if not root:  # its own file it may replace
        assert answers.pop("another's file in a sticky folder") == "saved"
    for name, answer in answers.items():
        assert isinstance(answer, list), (name, answer)
        if name.startswith(("closed", "secret")):
            _, permission, code, message = answer
            assert permission and code == errno.EACCES and str(anybodys) in message, answer
            continue
        kind, permission, access, code, message, filename = answer
        assert kind == "DriveAccess" and permission and access, answer
        assert code in (errno.EACCES, errno.EPERM) and filename in message and str(anybodys) in message
        assert "Nothing was" in message and "mode" in message, message
    for name in ("readonly", "open", "closed", "sticky"):
        (anybodys / name).chmod(0o755)
        assert sorted(os.listdir(anybodys / name)) == ["old", "other", "readonly", "secret"]
        for old in ("old", "readonly", "other"):
            if root or (name, old) != ("sticky", "other"):
                same(striate.load(anybodys / name / old), {"old": torch.ones(3)})


# ---- file systems that refuse -------------------------------------------------


def test_read_only_file_system(make_loop_drives: Callable[..., list[LoopDrive]], engine: Any) -> None:
    (drive,) = make_loop_drives(1, size_bytes=64 << 20)
    striate.save(STATE, drive.path / "old")
    subprocess.run(["mount", "-o", "remount,ro", drive.path], check=True)
    try:
        for name in ("old", "new"):
            with pytest.raises(striate.DriveAccess) as caught:
                striate.save(STATE, drive.path / name, engine=engine)
            assert caught.value.errno == errno.EROFS and "read-only" in str(caught.value)
        same(striate.load(drive.path / "old", engine=engine), STATE)
        assert striate.verify(drive.path / "old", engine=engine)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", drive.path], check=True)


def test_immutable_file_is_refused_and_intact(
    make_loop_drives: Callable[..., list[LoopDrive]], engine: Any
) -> None:
    (drive,) = make_loop_drives(1, size_bytes=64 << 20)
    path = drive.path / "old"
    striate.save({"old": torch.ones(3)}, path)
    if subprocess.run(["chattr", "+i", path], check=False, capture_output=True).returncode:
        pytest.skip("chattr +i does not work here")
    try:
        with pytest.raises(PermissionError) as caught:
            striate.save(STATE, path, engine=engine)
        assert isinstance(caught.value, striate.DriveAccess) and "lsattr" in str(caught.value)
    finally:
        subprocess.run(["chattr", "-i", path], check=True)
    same(striate.load(path), {"old": torch.ones(3)})
    assert sorted(set(os.listdir(drive.path)) - {"lost+found"}) == ["old"]


def test_full_drive_is_found_before_the_first_byte(
    make_loop_drives: Callable[..., list[LoopDrive]], engine: Any
) -> None:
    (drive,) = make_loop_drives(1, size_bytes=64 << 20)
    striate.save({"old": torch.ones(3)}, drive.path / "c")
    io = Io(engine, trace=True)
    with pytest.raises(striate.DriveFull) as caught:
        striate.save({"w": torch.zeros(32 << 20)}, drive.path / "c", engine=io)
    error = caught.value
    assert error.errno == errno.ENOSPC and error.needed is not None and error.free is not None
    assert error.needed > 128 << 20 > error.free
    assert str(drive.path) in str(error) and f"{error.needed:,}" in str(error) and "intact" in str(error)
    assert not [t for t in io.traces() if t.op == "write"]
    same(striate.load(drive.path / "c"), {"old": torch.ones(3)})
    assert sorted(set(os.listdir(drive.path)) - {"lost+found"}) == ["c"]

"""The independent reader on members: the same image, from any that are left."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from drives.volumes import CHUNK_BYTES, NAME, SHAPE_IDS, SHAPES, flip, require_version, state, volume

import striate
from striate import rescue
from support.same import same

RICH: dict[str, Any] = {
    "state": state(1),
    "view": torch.arange(3000.0).reshape(30, 100).t(),
    "raw": torch.arange(10).to(torch.complex128),
    "tied": torch.ones(700),
}
RICH["again"] = RICH["tied"]


def members(drives: list[Path]) -> list[str]:
    return [os.fspath(drive / NAME) for drive in drives]


@pytest.mark.parametrize(("layout", "count", "options", "losable"), SHAPES, ids=SHAPE_IDS)
def test_any_members_that_are_enough_give_the_very_image(
    folders: Callable[[int], list[Path]],
    tmp_path: Path,
    layout: str,
    count: int,
    options: dict[str, int],
    losable: int,
) -> None:
    drives = folders(count)
    volume(drives, layout, options).save(RICH, NAME)
    images = set()
    for losses in range(losable + 1):
        for lost in itertools.combinations(range(count), losses):
            left = [path for n, path in enumerate(members(drives)) if n not in lost]
            out = tmp_path / "out.safetensors"
            assert rescue.main([*left, "-o", str(out), "--force"]) == 0
            images.add(out.read_bytes())
    assert len(images) == 1
    assert same(striate.load(out), RICH)
    assert striate.verify(out).ok
    described = striate.info(out)
    assert described.uuid == striate.info(drives[0] / NAME).uuid
    assert torch.equal(safetensors.torch.load_file(out)["tied"], RICH["tied"])
    if losable + 1 < count:
        left = members(drives)[losable + 1 :]
        assert rescue.main([*left, "-o", str(tmp_path / "none"), "--force"]) in (3, 4)
        assert not (tmp_path / "none").exists()


def test_the_image_is_that_of_a_plain_save(folders: Callable[[int], list[Path]], tmp_path: Path) -> None:
    drives = folders(3)
    volume(drives, "parity", {}).save(RICH, NAME)
    out, plain = tmp_path / "out.safetensors", tmp_path / "plain.safetensors"
    rescue.main([*members(drives), "-o", str(out)])
    striate.save(RICH, plain, chunk_bytes=CHUNK_BYTES)
    ours, theirs = striate.info(out), striate.info(plain)
    assert (ours.tensors, ours.ties, ours.graph_bytes) == (theirs.tensors, theirs.ties, theirs.graph_bytes)
    assert out.stat().st_size == plain.stat().st_size


def test_damaged_blocks_superblocks_and_manifests_are_made_up_for(
    folders: Callable[[int], list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drives = folders(4)
    volume(drives, "parity", {"parity": 2}).save(state(1), NAME)
    for drive, offset in ((drives[0], 4096 + 7), (drives[1], 30), (drives[2], -1)):
        flip(drive / NAME, offset)
    out = tmp_path / "out.safetensors"
    assert rescue.main([*members(drives), "-o", str(out)]) == 0
    said = capsys.readouterr().err
    assert "superblock is damaged" in said and "manifest is damaged" in said
    require_version(striate.load(out), 1)
    assert rescue.read(*members(drives)).sequence == striate.info(out).sequence


def test_older_generations_are_left_out_and_named(
    folders: Callable[[int], list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    used.save(state(1), NAME)
    old = (drives[0] / NAME).read_bytes()
    used.save(state(2), NAME)
    (drives[0] / NAME).write_bytes(old)
    out = tmp_path / "out.safetensors"
    assert rescue.main([*members(drives), "-o", str(out)]) == 0
    assert "older generation" in capsys.readouterr().err
    require_version(striate.load(out), 2)

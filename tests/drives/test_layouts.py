"""Every layout, every set of losses: bytes equal exactly when no more is gone than the layout makes up for."""

from __future__ import annotations

import io
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drives.volumes import CHUNK_BYTES, NAME, SHAPE_IDS, SHAPES, require_version, state, volume
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import striate
from support.same import same


@pytest.mark.parametrize(("layout", "count", "options", "losable"), SHAPES, ids=SHAPE_IDS)
def test_what_is_lost_comes_back_exactly_up_to_what_the_layout_makes_up_for(
    folders: Callable[[int], list[Path]],
    quiet: list[Any],
    layout: str,
    count: int,
    options: dict[str, int],
    losable: int,
    engine_name: str,
) -> None:
    drives = folders(count)
    used = volume(drives, layout, options, engine=engine_name)
    used.save(state(1), NAME)
    for losses in range(min(count, losable + 2)):
        for lost in itertools.combinations(range(count), losses):
            for number in lost:
                drives[number].rename(drives[number].with_suffix(".away"))
            quiet.clear()
            if losses <= losable:
                require_version(used.load(NAME), 1)
                assert bool(quiet) == bool(losses)
                for number in lost:
                    assert str(drives[number]) in str(quiet[0].message)
            else:
                with pytest.raises(striate.MissingMember, match=str(drives[lost[0]])) as caught:
                    used.load(NAME)
                assert "model.weights" in caught.value.tensors
            for number in lost:
                drives[number].with_suffix(".away").rename(drives[number])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_over_any_number_of_drives_restores_any_losses_it_allows(
    tmp_path: Path, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 6))
    layout = data.draw(st.sampled_from(["stripe"] + ["mirror"] * (count > 1) + ["parity"] * (count > 2)))
    options: dict[str, Any] = {}
    losable = 0
    if layout == "mirror":
        options["copies"] = data.draw(st.integers(2, count))
        losable = options["copies"] - 1
    if layout == "parity":
        losable = options["parity"] = data.draw(st.integers(1, count - 2))
    length = data.draw(st.integers(0, 3 * count * CHUNK_BYTES))
    saved = {"t": torch.arange(length, dtype=torch.int64).to(torch.uint8), "n": 1}
    drives = [tmp_path / f"d{number}" for number in range(count)]
    for drive in drives:
        shutil.rmtree(drive, ignore_errors=True)
        drive.mkdir()
    used = volume(drives, layout, options)
    used.save(saved, NAME)
    lost = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=losable))
    for number in lost:
        shutil.rmtree(drives[number])
    if lost:
        with pytest.warns(striate.VolumeWarning, match="repair"):
            loaded = used.load(NAME)
    else:
        loaded = used.load(NAME)
    assert same(loaded, saved)


@pytest.mark.parametrize(("layout", "count", "options", "losable"), SHAPES, ids=SHAPE_IDS)
def test_any_member_alone_leads_to_the_others(
    folders: Callable[[int], list[Path]], layout: str, count: int, options: dict[str, int], losable: int
) -> None:
    drives = folders(count)
    used = volume(drives, layout, options)
    used.save(state(1), "run/step")
    for drive in drives:
        require_version(striate.load(drive / "run/step"), 1)
        assert striate.verify(drive / "run/step").ok
        assert striate.load_tensors(drive / "run/step", ["step"])["step"] == 1
    into = state(2)
    striate.load_into(into, drives[0] / "run/step")
    require_version(into, 1)
    require_version(used.load_into(state(2), "run/step"), 1)
    assert [entry.name for entry in used.list()] == ["run/step"]
    described = used.info("run/step")
    assert described.kind == "member" and len(described.members) == count
    assert (described.data_blocks, described.check_blocks)[1] == losable


def test_moved_drives_are_found_by_label_and_named_ones_by_path(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(3)
    volume(drives, "parity", {}).save(state(1), NAME)
    moved = [drive.with_name(f"elsewhere{drive.name}") for drive in drives]
    for old, new in zip(drives, moved, strict=True):
        old.rename(new)
    require_version(volume(moved[::-1], "parity", {}).load(NAME), 1)
    require_version(striate.load(moved[1] / NAME, drives=moved), 1)
    with pytest.raises(striate.MissingMember):
        striate.load(moved[1] / NAME)
    volume(moved[::-1], "parity", {}).save(state(2), NAME)
    require_version(volume(moved, "parity", {}).load(NAME), 2)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_sizes_around_every_boundary_come_back_with_their_bytes(
    folders: Callable[[int], list[Path]], count: int
) -> None:
    drives = folders(count)
    sizes = [
        0,
        1,
        511,
        512,
        513,
        4095,
        4096,
        4097,
        CHUNK_BYTES * count - 1,
        CHUNK_BYTES * count,
        CHUNK_BYTES * count + 1,
    ]
    for layout in ["stripe"] + ["mirror"] * (count > 1) + ["parity"] * (count > 2):
        used = volume(drives, layout, {})
        for saved in [{"t": torch.full((n,), 7, dtype=torch.uint8)} for n in sizes] + [
            {f"t{n}": torch.full((n,), n % 251, dtype=torch.uint8) for n in sizes}
        ]:
            used.save(saved, NAME)
            assert same(used.load(NAME), saved)


def test_save_with_a_volume_is_the_volumes_save(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(3)
    used = volume(drives, "parity", {})
    result = striate.save(state(1), "run/step", volume=used)
    assert len(result.members) == 3 and not result.degraded and result.stats is not None
    assert result.stats.engine == "posix", "the volume's own"
    assert sum(file.bytes for file in result.stats.files) > result.data_bytes
    require_version(used.load("run/step"), 1)
    with pytest.raises(TypeError, match="name in the volume"):
        striate.save(state(1), io.BytesIO(), volume=used)


def test_a_volume_is_read_from_a_file(
    folders: Callable[[int], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders(3)
    config = tmp_path / "volume.toml"
    config.write_text('drives = ["drive0", "drive1", "drive2"]\nlayout = "parity"\nchunk_bytes = 4096\n')
    used = striate.Volume.from_file(config)
    used.save(state(1), NAME)
    monkeypatch.setenv("STRIATE_VOLUME", str(config))
    require_version(striate.Volume.default().load(NAME), 1)
    monkeypatch.delenv("STRIATE_VOLUME")
    with pytest.raises(striate.VolumeMismatch, match="STRIATE_VOLUME"):
        striate.Volume.default()
    for text, words in {
        "drives = [": "no TOML",
        "layout = 1": "drives is missing",
        'drives = ["a"]\nlayout = "raid"': "layout is",
        'drives = ["a"]\ncolour = 1': "unknown setting colour",
        'drives = ["a"]\nlayout = "parity"': "at least 3 drives",
        'drives = ["a"]\nchunk_bytes = 5': "chunk_bytes",
    }.items():
        config.write_text(text)
        with pytest.raises(ValueError, match=words) as caught:
            striate.Volume.from_file(config)
        assert str(config) in str(caught.value)


def test_weights_give_a_small_drive_less(folders: Callable[[int], list[Path]]) -> None:
    drives = folders(3)
    used = volume(drives, "stripe", {}, weights=[1, 1, 0.5])
    used.save(state(1, data_bytes=100 * CHUNK_BYTES), NAME)
    small, large = (drives[2] / NAME).stat().st_size, (drives[0] / NAME).stat().st_size
    assert 0.4 * large < small < 0.6 * large
    with pytest.raises(ValueError, match="weights can only be equal"):
        volume(drives, "parity", {}, weights=[1, 1, 2]).save(state(1), NAME)

"""bench: it measures real drives, says what skews it, tells a volume that works, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Cli, require_narrow

import striate
from striate.cli import bench_run
from support.loop_drives import LoopDrive

Make = Callable[..., list[LoopDrive]]

pytestmark = pytest.mark.filterwarnings("ignore::striate.errors.VolumeWarning")

SMALL = ("--size", "16MiB", "--rounds", "1", "--no-tune")


def left_on(drives: list[LoopDrive]) -> list[str]:
    return [name for drive in drives for name in os.listdir(drive.path) if name != "lost+found"]


def test_a_run_over_three_drives_tells_every_layout_and_a_volume_that_works(
    cli: Cli, make_loop_drives: Make, tmp_path: Path
) -> None:
    drives = make_loop_drives(3, size_bytes=128 << 20)
    paths = [drive.path for drive in drives]
    toml, plot = tmp_path / "volume.toml", tmp_path / "plot.svg"
    ran = cli("bench", *paths, *SMALL, "--peers", "--toml", toml, "--plot", plot)
    assert ran.code == 0, ran.err
    for text in (
        "stripe 1",
        "stripe 2",
        "stripe 3",
        "mirror 2 of 3",
        "parity 2+1",
        "all together",
        "torch.save",
        "DCP",
    ):
        assert text in ran.out, text
    require_narrow(ran.out)
    assert "cache" in ran.err  # 16 MiB are few
    assert left_on(drives) == []
    assert plot.read_text().startswith("<?xml")
    volume = striate.Volume.from_file(toml)
    assert volume.layout == "parity" and [os.fspath(d) for d in volume.drives] == [str(p) for p in paths]
    state = {"t": torch.arange(1000)}
    volume.save(state, "step")
    assert volume.load("step")["t"].equal(state["t"])


def test_json_is_what_plan_takes_and_tuning_changes_one_thing_at_a_time(
    cli: Cli, make_loop_drives: Make, tmp_path: Path
) -> None:
    drives = make_loop_drives(2, size_bytes=96 << 20)
    ran = cli(
        "bench", *(d.path for d in drives), "--size", "16MiB", "--rounds", "1", "--layout", "stripe", "--json"
    )
    assert ran.code == 0
    found = ran.json
    assert [d["path"] for d in found["drives"]] == [str(d.path) for d in drives]
    assert all(d["write_mib_per_s"] > 0 and d["read_mib_per_s"] > 0 for d in found["drives"])
    assert found["best"]["layout"] == "stripe" and found["best"]["save_mib_per_s"] > 0
    usual, *others = [entry["setting"] for entry in found["tuning"]]
    assert all(sum(other[key] != usual[key] for key in usual) == 1 for other in others) and len(others) >= 6
    assert set(found["timeline"]) == {str(d.path) for d in drives}
    assert {"chunk_bytes", "layout"} <= set(found["best"]) and "layout = " in found["volume_toml"]
    (tmp_path / "bench.json").write_text(ran.out)
    planned = cli("plan", "--size", "1GB", "--bench", tmp_path / "bench.json", "--json")
    assert planned.code in (0, 1) and planned.json["save_s"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_interrupted_leaves_nothing_behind(make_loop_drives: Make, number: signal.Signals) -> None:
    drives = make_loop_drives(2, size_bytes=128 << 20)
    command = [sys.executable, "-m", "striate", "bench", *(str(d.path) for d in drives), "--size", "16MiB"]
    process = subprocess.Popen(
        [*command, "--rounds", "50"],
        env={**os.environ, "PYTHONPATH": str(Path(striate.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(left_on(drives)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(left_on(drives)) == 2
    time.sleep(0.3)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode not in (0, -number) and "Traceback" not in told
    assert left_on(drives) == []


def test_what_a_killed_run_left_is_removed_by_the_next_and_what_lives_is_not(
    cli: Cli, make_loop_drives: Make
) -> None:
    drives = make_loop_drives(1, size_bytes=128 << 20)
    dead = drives[0].path / ".striate-bench-dead"
    dead.mkdir()
    (dead / "ceiling").write_bytes(b"x" * 5000)
    with bench_run.places_on([str(drives[0].path)]) as alive:
        assert not dead.exists()
        assert cli("bench", drives[0].path, *SMALL).code == 0
        assert [str(drives[0].path / name) for name in left_on(drives)] == alive
    assert left_on(drives) == []


def test_an_error_of_a_drive_ends_it_in_a_sentence_and_nothing_is_left(
    cli: Cli, make_loop_drives: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives = make_loop_drives(1, size_bytes=128 << 20)
    # The room is gone between the look at it and the writing.
    monkeypatch.setattr("striate.cli.bench.free_of", lambda path: 1 << 40)
    ran = cli("bench", drives[0].path, "--size", "256MiB", "--rounds", "1", "--no-tune")
    assert ran.code == 1 and "space" in ran.err.lower()
    assert left_on(drives) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "DRIVE"),
        (("nowhere",), 1, "does not exist"),
        (("file",), 1, "no directory"),
        (("d", "d"), 2, "given twice"),
        (("d", "--size", "much"), 2, "no size"),
        (("d", "--size", "1KiB"), 2, "too little"),
        (("d", "--size", "900TiB"), 1, "free"),
        (("d", "--rounds", "0"), 2, "rounds"),
        (("d", "--layout", "mirror", "--size", "16MiB"), 2, "not possible"),
        (("d", "--layout", "raid", "--size", "16MiB"), 2, "not possible"),
        (("d", "--plot", "x.gif", "--size", "16MiB"), 2, ".svg"),
        (("d", "--toml", "nowhere/x.toml", "--size", "16MiB"), 1, "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_ends_in_a_sentence(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    ran = cli("bench", *words)
    assert ran.code == code and said in " ".join(ran.err.replace("│", " ").split()), ran.err
    assert os.listdir(tmp_path / "d") == []


def test_the_settings_are_parameters_of_a_volume() -> None:
    for drives in (1, 2, 3, 4, 8):
        for layout in bench_run.layouts_for(drives):
            for setting in bench_run.variants_of(layout, 2):
                paths = [f"/nowhere/{n}" for n in range(drives)]
                volume: Any = setting.volume(paths)
                assert volume.layout == setting.layout


def test_the_data_a_setting_holds() -> None:
    assert bench_run.Setting("stripe").data_drives(4) == 4
    assert bench_run.Setting("mirror", copies=2).data_drives(4) == 2
    assert bench_run.Setting("mirror", copies=2).data_drives(3) == 1.5
    assert bench_run.Setting("mirror", copies=2).payload_bytes(3, 20 << 20) == 28 << 20
    assert bench_run.Setting("parity", parity=2).data_drives(8) == 6
    assert bench_run.scaling_counts(1) == [1]
    assert bench_run.scaling_counts(6) == [1, 2, 4, 6]
    assert bench_run.scaling_counts(8) == [1, 2, 4, 8]

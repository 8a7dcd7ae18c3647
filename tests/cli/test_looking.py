"""ls, inspect, verify, repair, diff: what they say of checkpoints that are whole, damaged and gone."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Cli, require_narrow, training_state
from safetensors.torch import save_file

import striate
from striate.cli import app
from striate.cli.output import CODES_HELP
from support.same import same

pytestmark = pytest.mark.filterwarnings("ignore::striate.errors.VolumeWarning")


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.fixture
def plain(tmp_path: Path, state: Any) -> Path:
    striate.save(state, tmp_path / "step", chunk_bytes=4096)
    return tmp_path / "step"


@pytest.fixture
def volume(folders: list[Path], state: Any) -> striate.Volume:
    made = striate.Volume(folders, "parity", chunk_bytes=4096)
    made.save(state, "run/step")
    return made


@pytest.fixture
def toml(tmp_path: Path, folders: list[Path]) -> Path:
    path = tmp_path / "volume.toml"
    path.write_text('drives = ["drive0", "drive1", "drive2"]\nlayout = "parity"\n')
    return path


# ---- inspect -----------------------------------------------------------------


def test_inspect_shows_tensors_object_and_ties_without_running_anything(cli: Cli, plain: Path) -> None:
    ran = cli("inspect", plain, "--depth", 9)
    assert ran.code == 0 and not ran.err
    for text in ("weight  F32 60x60  14.1 KiB", "halves  BF16 7  14 B", "model.b.weight = model.a.weight"):
        assert text in ran.out, text
    assert "collections.OrderedDict" in ran.out and "each with a checksum" in ran.out
    require_narrow(ran.out)
    found = cli("inspect", plain, "--json").json
    info = striate.info(plain)
    assert found["uuid"] == info.uuid and len(found["tensors"]) == len(info.tensors)
    assert found["object"]["kind"] == "dict" and found["object"]["values"]["int"] >= 1
    flat = cli("inspect", plain, "--flat").out
    assert all(entry.name in flat.replace("\n", "") or len(entry.name) > 30 for entry in info.tensors)


def test_inspect_runs_no_pickle(cli: Cli, tmp_path: Path) -> None:
    class Fires:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "fired",))

    striate.save({"t": torch.ones(3), "x": Fires()}, tmp_path / "hostile")
    ran = cli("inspect", tmp_path / "hostile")
    assert ran.code == 0 and "pathlib" in ran.out
    assert not (tmp_path / "fired").exists()


def test_inspect_of_a_member_tells_each_drives_share(
    cli: Cli, volume: striate.Volume, folders: list[Path]
) -> None:
    found = cli("inspect", folders[1] / "run/step", "--json").json
    assert (found["data_blocks"], found["check_blocks"]) == (2, 1)
    by_name = {entry["name"]: entry["nbytes"] for entry in found["tensors"]}
    for name, share in found["shares"].items():
        assert set(share) <= set(map(str, folders)) and sum(share.values()) == by_name[name]
    assert set(found["shares"]) == {name for name, nbytes in by_name.items() if nbytes}
    text = cli("inspect", folders[1] / "run/step").out
    assert "2+1" in text and str(folders[2]) in "".join(text.split())


def test_inspect_reads_safetensors_of_others(cli: Cli, tmp_path: Path) -> None:
    save_file({"a.b": torch.ones(3, 4)}, tmp_path / "m.safetensors")
    ran = cli("inspect", tmp_path / "m.safetensors")
    assert ran.code == 0 and "no checksums" in ran.out and "b  F32 3x4" in ran.out


# ---- verify ------------------------------------------------------------------


def test_verify_says_whole_damaged_and_lost_with_its_exit_code(
    cli: Cli, plain: Path, volume: striate.Volume, folders: list[Path]
) -> None:
    ran = cli("verify", plain, folders[0] / "run/step")
    assert ran.code == 0 and ran.out.count(": whole (") == 2
    info = striate.info(plain)
    entry = next(t for t in info.tensors if t.name == "base" or t.nbytes > 4096)
    flip(plain, entry.offset + 5)
    ran = cli("verify", plain)
    assert ran.code == 4 and "LOST" in ran.out and "data" in ran.out and "rescue" in ran.out
    require_narrow(ran.out)

    flip(folders[2] / "run/step", 8192 + 7)
    ran = cli("verify", folders[0] / "run/step")
    assert ran.code == 3 and "recoverable" in ran.out and "striate repair" in ran.out
    assert str(folders[2]) in ran.out and str(folders[1]) not in ran.out.replace(str(folders[1] / "run"), "")
    found = cli("verify", folders[0] / "run/step", "--json")
    assert found.code == 3 and found.json["exit_code"] == 3
    assert [m["ok"] if "ok" in m else not m["damages"] for m in found.json["checkpoints"][0]["members"]] == [
        True,
        True,
        False,
    ]
    (folders[0] / "run/step").unlink()
    (folders[1] / "run/step").unlink()
    ran = cli("verify", folders[2] / "run/step")
    assert ran.code == 4 and "LOST" in ran.out
    # One that is lost hides nothing of another.
    assert cli("verify", folders[2] / "run/step", plain, "--json").json["checkpoints"]


def test_a_name_is_looked_for_in_the_volume(
    cli: Cli, volume: striate.Volume, toml: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("verify", "run/step", "--volume", toml).code == 0
    drives = [word for folder in folders for word in ("--drive", folder)]
    assert cli("verify", "run/step", *drives).code == 0
    assert cli("inspect", "run/step", *drives).code == 0
    ran = cli("verify", "run/step")
    assert ran.code == 1 and "no volume is given" in ran.err
    monkeypatch.setenv("STRIATE_VOLUME", str(toml))
    assert cli("verify", "run/step").code == 0
    listed = cli("ls", "--json").json
    assert [entry["name"] for entry in listed] == ["run/step"] and listed[0]["kind"] == "3 of 3 members"


# ---- repair ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["member", "name", "all"])
def test_repair_restores_what_is_missing(
    cli: Cli, volume: striate.Volume, folders: list[Path], toml: Path, state: Any, how: str
) -> None:
    (folders[0] / "run/step").unlink()
    words: dict[str, tuple[object, ...]] = {
        "member": (folders[1] / "run/step",),
        "name": ("run/step", "--volume", toml),
        "all": ("--volume", toml),
    }
    ran = cli("repair", *words[how])
    assert ran.code == 0 and f"run/step: restored on {folders[0]}" in ran.out
    assert volume.verify("run/step").ok
    same(volume.load("run/step"), state)
    ran = cli("repair", *words[how], "--json")
    assert ran.code == 0 and ran.json == []
    assert "Nothing to repair" in cli("repair", *words[how]).out


def test_repair_puts_a_new_drive_in_place_of_one_that_is_gone(
    cli: Cli, volume: striate.Volume, folders: list[Path], toml: Path
) -> None:
    subprocess.run(["rm", "-r", str(folders[1])], check=True)
    folders[1].mkdir()
    ran = cli("repair", "--volume", toml, "--replace", folders[1])
    assert ran.code == 0 and str(folders[1]) in ran.out
    assert volume.verify("run/step").ok


def test_repair_of_what_is_lost_says_so(
    cli: Cli, volume: striate.Volume, folders: list[Path], toml: Path
) -> None:
    for folder in folders[:2]:
        (folder / "run/step").unlink()
    ran = cli("repair", "--volume", toml)
    assert ran.code == 4 and "striate:" in ran.err
    assert (folders[2] / "run/step").exists()


# ---- diff --------------------------------------------------------------------


def test_diff_names_what_differs_and_by_how_much(cli: Cli, tmp_path: Path) -> None:
    a = {"same": torch.ones(1000), "w": torch.zeros(10), "shape": torch.ones(3), "gone": torch.ones(2)}
    b = {"same": torch.ones(1000), "w": torch.zeros(10), "shape": torch.ones(4), "new": torch.ones(2)}
    b["w"][3] = 0.5
    b["w"][4] = -0.25
    striate.save(a, tmp_path / "a")
    save_file(b, tmp_path / "b.safetensors")
    ran = cli("diff", tmp_path / "a", tmp_path / "b.safetensors")
    assert ran.code == 1
    require_narrow(ran.out)
    found = cli("diff", tmp_path / "a", tmp_path / "b.safetensors", "--json").json
    by_name = {entry["name"]: entry for entry in found["differing"]}
    assert set(by_name) == {"w", "shape"} and found["same"] == 1
    assert by_name["w"]["values_differing"] == 2 and by_name["w"]["max_abs"] == 0.5
    assert by_name["w"]["mean_abs"] == 0.075 and by_name["w"]["max_relative"] == 1.0
    assert by_name["shape"]["max_abs"] is None
    assert (found["only_a"], found["only_b"], found["equal"]) == (["gone"], ["new"], False)


def test_diff_of_equals_and_of_not_numbers(cli: Cli, tmp_path: Path, folders: list[Path]) -> None:
    odd = {
        "view": torch.arange(10)[::2],
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "b": torch.tensor([True]),
        "c": torch.tensor([1 + 2j]),
        "e": torch.empty(0),
        "bf": torch.ones(5, dtype=torch.bfloat16),
    }
    striate.save(odd, tmp_path / "a", chunk_bytes=4096)
    volume = striate.Volume(folders, "mirror", chunk_bytes=8192)
    volume.save(odd, "b")
    ran = cli("diff", tmp_path / "a", folders[0] / "b")
    assert (ran.code, ran.out) == (0, "equal: 6 tensors, value by value\n")
    other = {**odd, "nan": torch.tensor([1.0, -float("inf"), 0.0]), "c": torch.tensor([1 - 2j])}
    other["view"] = torch.arange(1, 11)[::2]
    striate.save(other, tmp_path / "c")
    found = cli("diff", tmp_path / "a", tmp_path / "c", "--json").json
    by_name = {entry["name"]: entry for entry in found["differing"]}
    assert by_name["nan"]["values_differing"] == 2 and by_name["nan"]["max_abs"] == float("inf")
    # What cannot be read alone is compared byte by byte.
    assert len(by_name) == 3 and by_name.keys() - {"nan"} == {
        n for n in by_name if n.startswith("__striate__.")
    }


def test_diff_sees_the_object_around_the_tensors(cli: Cli, tmp_path: Path) -> None:
    for step in (1, 2):
        striate.save({"t": torch.ones(3), "step": step}, tmp_path / f"s{step}")
    ran = cli("diff", tmp_path / "s1", tmp_path / "s2")
    assert ran.code == 1 and "object around the tensors differs" in ran.out


# ---- ls ----------------------------------------------------------------------


def test_ls_tells_what_the_files_of_a_directory_are(
    cli: Cli, tmp_path: Path, plain: Path, state: Any
) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "t.pt")
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "torn").write_bytes(plain.read_bytes()[:9000])
    ran = cli("ls", tmp_path, "--json")
    kinds = {entry["name"]: entry["kind"] for entry in ran.json}
    assert kinds["step"] == "striate" and kinds["m.safetensors"] == "safetensors" and kinds["t.pt"] == "torch"
    assert "notes.txt" not in kinds
    torn = next(entry for entry in ran.json if entry["name"] == "torn")
    assert "cut short" in torn["trouble"] or "damaged" in torn["trouble"]
    require_narrow(cli("ls", tmp_path).out)


def test_ls_says_when_members_are_missing(
    cli: Cli, volume: striate.Volume, folders: list[Path], toml: Path
) -> None:
    (folders[0] / "run/step").unlink()
    ran = cli("ls", "--volume", toml)
    assert "2 of 3 members" in ran.out and "repair" in ran.out
    assert "2 of 3 members" in cli("ls", folders[1] / "run").out


# ---- what is wrong with what was asked --------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("inspect", "nowhere"), 1, "does not exist"),
        (("verify", "nowhere"), 1, "does not exist"),
        (("inspect", "."), 1, "is a directory"),
        (("inspect", "notes"), 1, "notes"),
        (("verify", "notes"), 1, "notes"),
        (("inspect", "empty"), 1, "empty"),
        (("inspect", "t.pt"), 1, "torch.save"),
        (("verify", "t.pt"), 1, "t.pt"),
        (("repair", "t.pt"), 1, "no member"),
        (("repair", "step"), 1, "no member"),
        (("repair",), 1, "no volume"),
        (("repair", "step2", "--volume", "nowhere.toml"), 1, "nowhere.toml"),
        (("ls", "nowhere"), 1, "nowhere"),
        (("ls", "--volume", "notes"), 1, "notes"),
        (("diff", "step", "nowhere"), 1, "nowhere"),
        (("diff", "step"), 2, "B"),
        (("inspect", "step", "--depth", "0"), 2, "depth"),
        (("inspect", "step", "--depth", "x"), 2, "depth"),
        (("frobnicate",), 2, "frobnicate"),
        (("verify", "../x", "--volume", "v.toml"), 1, ".."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_ends_in_a_sentence_and_the_right_exit_code(
    cli: Cli,
    tmp_path: Path,
    plain: Path,
    folders: list[Path],
    state: Any,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    (tmp_path / "notes").write_text("not a checkpoint, whatever it is called\n" * 9)
    (tmp_path / "empty").touch()
    (tmp_path / "v.toml").write_text('drives = ["drive0"]\n')
    torch.save(state, tmp_path / "t.pt")
    monkeypatch.chdir(tmp_path)
    ran = cli(*words)
    assert ran.code == code and said in ran.err
    if code == 1:
        assert ran.err.startswith("striate: ") and not ran.out
        as_json = cli(*words, "--json")
        assert as_json.code == 1 and said in as_json.json["error"] and as_json.json["exit_code"] == 1


def test_the_program_is_there_and_says_its_version_and_help() -> None:
    for words in (["--version"], ["--help"], ["verify", "--help"], ["ls", "-h"]):
        done = subprocess.run(
            [sys.executable, "-m", "striate", *words], capture_output=True, text=True, check=True
        )
        assert ("striate" in done.stdout) and not done.stderr
    assert "Exit status: 0 fine" in done.stdout
    done = subprocess.run([sys.executable, "-m", "striate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "inspect" in done.stdout + done.stderr


def test_every_command_is_in_the_document_and_tells_its_exit_codes() -> None:
    document = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text()
    for name in app.COMMANDS:
        if name != "import":
            assert f"\n## {name}\n" in document and f"$ striate {name} " in document, name
        command = importlib.import_module(f"striate.cli.{app.COMMANDS[name]}")
        assert CODES_HELP in (getattr(command, app.COMMANDS[name]).__doc__ or "")


def test_reading_only_the_beginning_of_the_output_is_no_error(plain: Path) -> None:
    command = f"{sys.executable} -m striate inspect {plain} --flat | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_seeds_make_other_states() -> None:
    assert not torch.equal(training_state(1)["base"], training_state(2)["base"])

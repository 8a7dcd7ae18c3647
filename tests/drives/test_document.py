"""docs/drives.md, run for real: its Python and its shell, in order, on loop devices instead of /nvme0 to /nvme2."""

from __future__ import annotations

import re
import subprocess
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drives.volumes import require_version, state

import striate
from support.loop_drives import LoopDrive

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/drives.md"
BLOCK = re.compile(r"^( *)```(python|sh|toml)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def test_every_command_of_the_document_does_what_it_says(
    make_loop_drives: Callable[..., list[LoopDrive]], tmp_path: Path, capsys: Any
) -> None:
    drives = make_loop_drives(4, size_bytes=64 << 20)
    for drive in drives[:3]:
        (drive.path / "run").mkdir()
    subprocess.run(["umount", str(drives[3].path)], check=True)
    places = {f"/nvme{n}": str(drive.path) for n, drive in enumerate(drives[:3])}
    places["/dev/nvme3n1"] = drives[3].device
    places['"volume.toml"'] = repr(str(tmp_path / "volume.toml"))
    names: dict[str, Any] = {"state": state(1)}
    kinds = []
    for _, kind, block in BLOCK.findall(DOCUMENT.read_text()):
        text = textwrap.dedent(block)
        for name, place in places.items():
            text = re.sub(re.escape(name) + r"(?![0-9])", lambda _, place=place: place, text)
        kinds.append(kind)
        if kind == "toml":
            (tmp_path / "volume.toml").write_text(text)
        elif kind == "sh":
            subprocess.run(["sh", "-e", "-c", text], check=True)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", striate.VolumeWarning)
                exec(text, names)
    assert kinds.count("python") >= 9 and kinds.count("sh") == 2
    require_version(names["state"], 1)
    assert [entry.name for entry in names["volume"].list()] == ["step-200"]
    assert "step-100" in capsys.readouterr().out
    # Make mounts as the fixture left them, for it to undo.
    subprocess.run(["umount", str(drives[1].path)], check=True)
    subprocess.run(["mount", drives[1].device, str(drives[1].path)], check=True)
    subprocess.run(["mount", drives[3].device, str(drives[3].path)], check=True)

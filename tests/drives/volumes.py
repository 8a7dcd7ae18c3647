"""Volumes in little, and the states that the tests put into them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import striate
from support.contents import cycling
from support.same import differences

CHUNK_BYTES = 4096
NAME = "step"

# (layout, drives, options, drives that may be lost)
SHAPES: list[tuple[str, int, dict[str, int], int]] = [
    ("stripe", 1, {}, 0),
    ("stripe", 3, {}, 0),
    ("mirror", 2, {}, 1),
    ("mirror", 3, {"copies": 3}, 2),
    ("parity", 3, {}, 1),
    ("parity", 4, {"parity": 2}, 2),
    ("parity", 6, {"parity": 3}, 3),
]
SHAPE_IDS = [f"{layout} over {count}, {lost} to lose" for layout, count, _, lost in SHAPES]


def state(version: int, *, data_bytes: int = 10 * CHUNK_BYTES + 123) -> dict[str, Any]:
    """No two versions have a chunk in common; the last chunk is short, and so is the last group of most shapes."""
    weights = torch.frombuffer(bytearray(cycling(data_bytes, start=37 * version)), dtype=torch.uint8)
    halves = torch.frombuffer(bytearray(cycling(3000, start=37 * version + 11)), dtype=torch.bfloat16)
    return {
        "version": version,
        "model": {"weights": weights, "halves": halves},
        "step": torch.tensor(version),
    }


def volume(folders: Sequence[Path], layout: str, options: dict[str, int], **more: Any) -> striate.Volume:
    settings: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "engine": "posix", **options, **more}
    return striate.Volume([os.fspath(f) for f in folders], layout, **settings)  # type: ignore[arg-type]


def require_version(loaded: Any, version: int) -> None:
    apart = list(differences(loaded, state(version)))
    assert not apart, f"not version {version}: {'; '.join(apart)}"


def version_of(loaded: Any) -> int:
    version = loaded["version"]
    assert isinstance(version, int)
    require_version(loaded, version)
    return version


def flip(path: Path, offset: int) -> None:
    """One bit of a file; from its end for a negative offset."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)

"""Checkpoints that know their version, and the one question asked of every crash: which of them stands there, whole?"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import striate
from support.contents import cycling
from support.same import differences

NAME = "step.striate"
CHUNK_BYTES = 4096

PathLike = str | os.PathLike[str]


def state(version: int, *, data_bytes: int = 3 * CHUNK_BYTES) -> dict[str, Any]:
    """A training state in little. No two versions have a chunk in common, and its end lies off every boundary."""
    weights_bytes = data_bytes // 4 * 4 - 1100
    weights = torch.frombuffer(bytearray(cycling(weights_bytes, start=37 * version)), dtype=torch.float32)
    bias = torch.frombuffer(bytearray(cycling(1024, start=37 * version + 11)), dtype=torch.bfloat16)
    return {
        "version": version,
        "model": {"weights": weights, "bias": bias},
        "step": torch.tensor(version, dtype=torch.int32),
    }


def save(
    version: int, path: PathLike, *, engine: Any = "posix", data_bytes: int = 3 * CHUNK_BYTES
) -> striate.SaveResult:
    return striate.save(state(version, data_bytes=data_bytes), path, engine=engine, chunk_bytes=CHUNK_BYTES)


def version_at(path: PathLike, *, data_bytes: int = 3 * CHUNK_BYTES) -> int:
    """The version whose checkpoint stands at a path. Raises what load raises, AssertionError if it is of no version."""
    return version_of(striate.load(path, engine="posix"), data_bytes=data_bytes)


def version_of(loaded: Any, *, data_bytes: int = 3 * CHUNK_BYTES) -> int:
    version = loaded["version"]
    assert isinstance(version, int)
    apart = list(differences(loaded, state(version, data_bytes=data_bytes)))
    assert not apart, f"a mixture that claims to be version {version}: {'; '.join(apart)}"
    return version


def beside(path: PathLike) -> list[str]:
    """What else is in the directory of a file."""
    target = Path(path)
    return sorted(set(os.listdir(target.parent)) - {target.name})


def require_alone(path: PathLike) -> None:
    assert beside(path) == [], "a finished save leaves nothing beside its file"


def descriptors() -> dict[int, str]:
    """Open descriptors of this process and what they are, to be compared before and after."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listed them
    return found


def describe(values: Iterable[object]) -> str:
    return "\n".join(str(value) for value in values)

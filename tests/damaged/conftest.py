"""Where the museum stands: in memory, for its files are rewritten thousands of times."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from damaged.museum import KINDS, Specimen, specimen


@pytest.fixture(scope="module")
def shelf() -> Iterator[Path]:
    """A folder on tmpfs where there is one, else on the disk: alignment is not what is tested here."""
    folder = Path(
        tempfile.mkdtemp(prefix="striate-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    )
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, shelf: Path) -> Specimen:
    return specimen(request.param, shelf)


@pytest.fixture(scope="module")
def flat(shelf: Path) -> Specimen:
    return specimen("flat", shelf)


@pytest.fixture(scope="module")
def nested(shelf: Path) -> Specimen:
    return specimen("nested", shelf)


@pytest.fixture
def broken(shelf: Path) -> Iterator[Path]:
    """Where the broken one goes."""
    path = shelf / "broken"
    yield path
    path.unlink(missing_ok=True)

"""What the tests of volumes share: folders that stand for drives, and what is to be warned of."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import striate

# Of the device that all folders of a test lie on.
DEVICES = ".*(are on one device|a rotating disk)"


@pytest.fixture(params=["uring", "posix"])
def engine_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[int], list[Path]]:
    """Makes so many empty folders, one for each drive."""

    def make(count: int) -> list[Path]:
        made = [tmp_path / f"drive{number}" for number in range(count)]
        for folder in made:
            folder.mkdir()
        return made

    return make


@pytest.fixture(autouse=True)
def one_device_is_no_news() -> Iterator[None]:
    """All folders of a test lie on one device, of which a volume rightly warns; any other warning is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", striate.VolumeWarning)
        warnings.filterwarnings("ignore", message=DEVICES, category=striate.VolumeWarning)
        yield


@pytest.fixture
def quiet() -> Iterator[list[Any]]:
    """Warnings of volumes recorded instead of raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", striate.VolumeWarning)
        warnings.filterwarnings("ignore", message=DEVICES, category=striate.VolumeWarning)
        yield caught


def left_on(folder: Path) -> set[str]:
    """What stands on a drive but its label and its lock."""
    return set(os.listdir(folder)) - {".striate-label", ".striate.lock"}

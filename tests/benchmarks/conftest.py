"""The benchmarks and examples are scripts in folders of their own: import from them, and run them as a person does."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
for folder in ("benchmarks", "examples"):
    sys.path.insert(0, str(REPOSITORY / folder))

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def drive() -> Iterator[Path]:
    """A directory on the drive that holds the repository: pytest's own may lie in RAM, which is never cold."""
    (REPOSITORY / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="test-benchmarks-", dir=REPOSITORY / "build") as directory:
        yield Path(directory)


@pytest.fixture
def run_script() -> Run:
    def run(name: str, *options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(REPOSITORY / name), *map(str, options)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)

    return run

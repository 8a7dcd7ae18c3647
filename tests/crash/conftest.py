"""What the crash tests share: the engines to try, a directory whose syncs are free, processes to kill."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["uring", "posix"])
def engine_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory in memory, for tests that are about names, counts and moments and not about the drive."""
    shm = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="striate-test-", dir=shm if shm.is_dir() else None))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def processes() -> Any:
    """Makes processes that have torch and striate loaded and no threads yet: forked from a server that never saves."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "striate", "striate.torch_api", "crash.jobs"])
    return context

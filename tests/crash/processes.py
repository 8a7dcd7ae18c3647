"""Runs one job of jobs.py in a process of its own and brings back what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def run_job(processes: Any, job: Callable[..., None], *arguments: object, timeout_s: float = 120) -> Any:
    """Runs a job to its end and returns what it sent."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=job, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(timeout_s), f"{job.__name__} hangs"
        try:
            report = ours.recv()
        except EOFError:
            process.join(10)
            pytest.fail(f"{job.__name__} ended with status {process.exitcode} and sent nothing")
        process.join(timeout_s)
        assert process.exitcode == 0
        return report
    finally:
        process.kill()
        process.join()

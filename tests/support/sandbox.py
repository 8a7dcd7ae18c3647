"""Runs a snippet of Python in a process of its own: as an ordinary user, under limits, with system calls refused."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

LAUNCH = Path(__file__).with_name("launch.py")
NOBODY = 65534
REFUSABLE = ("EPERM", "ENOSYS", "EOPNOTSUPP", "EACCES", "ENOMEM", "EINVAL")


def run_python(
    code: str,
    *arguments: str | Path,
    refuse: Mapping[str, str] | None = None,
    limits: Mapping[str, int] | None = None,
    user: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` (dedented; ``sys.argv[1:]`` are ``arguments``) and return what it printed.

    ``refuse`` maps a call ("io_uring_setup") to an errno ("EPERM"), ``limits`` an RLIMIT name ("memlock") to its
    value. ``user`` needs root. A status other than 0 is an AssertionError that shows the output, unless ``check`` is
    false.
    """
    command = [sys.executable, os.fspath(LAUNCH)]
    for call, name in (refuse or {}).items():
        command += ["--refuse", f"{call}={name}"]
    for limit, value in (limits or {}).items():
        command += ["--limit", f"{limit}={value}"]
    if user is not None:
        command += ["--user", str(user)]
    command += ["--", sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done

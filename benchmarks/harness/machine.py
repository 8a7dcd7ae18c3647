"""Facts of the machine that figures depend on."""

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.workspace import file_system


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores_count: int
    memory_bytes: int
    kernel: str
    file_system: str
    device: str
    load_average: float  # over the last minute, before the run: above 0 somebody else works here too
    versions: dict[str, str]

    def __str__(self) -> str:
        return (
            f"{self.cores_count} cores ({self.cpu}), {self.memory_bytes / 2**30:.0f} GiB RAM, Linux {self.kernel}, "
            f"{self.file_system} on {self.device}, load average {self.load_average:.1f}; "
            + ", ".join(f"{name} {number}" for name, number in self.versions.items())
        )


def machine(directory: Path) -> Machine:
    kind, source = file_system(directory)
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return Machine(
        cpu=cpu[1] if cpu else platform.machine(),
        cores_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=platform.release(),
        file_system=kind,
        device=Path(source).name,
        load_average=os.getloadavg()[0],
        versions={"Python": platform.python_version()}
        | {name: _version(name) for name in ("striate", "torch", "safetensors")},
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"

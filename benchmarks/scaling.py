"""Does striate keep up with several drives? Every layout over 1 to 8 throttled drives, beside fio on the same drives.

The drives are ext4 on RAM-backed loop devices, each capped in bytes/s by the block cgroup, so that the drives and not
this machine are the limit. All saves are durable; loads and fio use O_DIRECT, so nothing comes from the page cache.
Rounds alternate over all contenders. CPU seconds are taken on the same drives without their caps, where the machine is
the limit: user and system time of the process for 1 GiB, beside a plain save to one of the drives. Needs root and some
12 GiB of memory.

    python benchmarks/scaling.py [--rounds 5] [--rate-mb 100] [--seconds 2] [--json FILE] [--plot FILE]
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import striate
from harness.arguments import positive
from harness.ratios import paired_ratio
from harness.throttle import CannotThrottle, throttled_drives

DRIVES_MAX = 8
MIB = 1 << 20
# What a save costs at any size, such as the memory of the slots, is little of this.
CPU_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    """One thing to measure. ``ideal_drives``: how many drives' bandwidth the payload could move at."""

    name: str
    layout: str
    drives: int
    options: tuple[tuple[str, int], ...]
    data_drives: int  # a save's payload spreads over so many
    load_drives: int  # and a load's

    @property
    def checks(self) -> int:
        return dict(self.options).get("parity", self.drives - 1 if self.layout == "mirror" else 0)


CASES = (
    Case("stripe 1", "stripe", 1, (), 1, 1),
    Case("stripe 2", "stripe", 2, (), 2, 2),
    Case("stripe 4", "stripe", 4, (), 4, 4),
    Case("stripe 8", "stripe", 8, (), 8, 8),
    Case("mirror 2", "mirror", 2, (), 1, 2),
    Case("parity 3+1", "parity", 4, (("parity", 1),), 3, 4),
    Case("parity 6+2", "parity", 8, (("parity", 2),), 6, 8),
)


def payload(case: Case, drive_bytes: int) -> dict[str, torch.Tensor]:
    """Weights of 32 MiB each; bytes that no drive or copy could shorten."""
    total = case.data_drives * drive_bytes
    generator = torch.Generator().manual_seed(case.drives)
    count = max(1, total // (32 * MIB))
    return {
        f"layer{n}": torch.randint(-128, 127, (total // count,), dtype=torch.int8, generator=generator)
        for n in range(count)
    }


def timed(do: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def fio(paths: Sequence[Path], direction: str, drive_bytes: int) -> float:
    """Seconds that fio's slowest job takes: a job for each drive, all at once, depth 8, 4 MiB."""
    command = ["fio", "--output-format=json", "--ioengine=io_uring", "--direct=1", "--bs=4M", "--iodepth=8"]
    command += ["--fallocate=native", "--end_fsync=1", f"--rw={direction}", f"--size={drive_bytes}"]
    for path in paths:
        command += [f"--name={path.name}", f"--filename={path / 'ceiling'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    jobs = json.loads(done.stdout)["jobs"]
    return max(float(job[direction]["runtime"]) for job in jobs) / 1e3


def run_rounds(drives: Sequence[Path], rounds: int, drive_bytes: int) -> dict[str, list[float]]:
    """Payload bytes/s by "name operation"."""
    warnings.simplefilter("ignore")
    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        for count in sorted({case.drives for case in CASES}):
            for direction in ("write", "read"):
                seconds = fio(drives[:count], direction, drive_bytes)
                samples.setdefault(f"fio {count} {direction}", []).append(count * drive_bytes / seconds)
            for path in drives[:count]:
                (path / "ceiling").unlink()
        for case in CASES:
            run_case(case, drives, drive_bytes, samples)
    return samples


def run_case(case: Case, drives: Sequence[Path], drive_bytes: int, samples: dict[str, list[float]]) -> None:
    places = [drive / case.name.replace(" ", "-") for drive in drives[: case.drives]]
    for place in places:
        place.mkdir(exist_ok=True)
    volume = striate.Volume(places, case.layout, **dict(case.options))  # type: ignore[arg-type]
    state = payload(case, drive_bytes)
    total = sum(tensor.nbytes for tensor in state.values())
    # Memory that is in use already, as that of a model is: new pages cost more than the load.
    into = {name: torch.full_like(tensor, 1) for name, tensor in state.items()}
    samples.setdefault(f"{case.name} save", []).append(total / timed(lambda: volume.save(state, "step")))
    samples.setdefault(f"{case.name} load", []).append(total / timed(lambda: volume.load_into(into, "step")))
    assert all(torch.equal(into[name], state[name]) for name in state)
    if case.checks and case.layout == "parity":
        os.rename(places[0], f"{places[0]}.gone")
        degraded = total / timed(lambda: volume.load_into(into, "step"))
        samples.setdefault(f"{case.name} degraded load", []).append(degraded)
        os.rename(f"{places[0]}.gone", places[0])
        assert all(torch.equal(into[name], state[name]) for name in state)
    volume.delete("step")


def cpu_rounds(drives: Sequence[Path], rounds: int) -> dict[str, list[float]]:
    """CPU seconds for each GiB of payload, by "name operation"; "plain" is a save to one file on one drive."""
    warnings.simplefilter("ignore")
    samples: dict[str, list[float]] = {}
    state = payload(CASES[0], CPU_BYTES)
    # Memory that is in use already, as that of a model is: new pages cost more than the load.
    into = {name: torch.full_like(tensor, 1) for name, tensor in state.items()}
    gib = sum(tensor.nbytes for tensor in state.values()) / 2**30
    for _ in range(rounds):
        plain = drives[0] / "plain.safetensors"
        samples.setdefault("plain save", []).append(cpu_of(lambda: striate.save(state, plain)) / gib)  # noqa: B023
        samples.setdefault("plain load", []).append(cpu_of(lambda: striate.load_into(into, plain)) / gib)  # noqa: B023
        plain.unlink()
        for case in CASES:
            places = [drive / case.name.replace(" ", "-") for drive in drives[: case.drives]]
            for place in places:
                place.mkdir(exist_ok=True)
            volume = striate.Volume(places, case.layout, **dict(case.options))  # type: ignore[arg-type]
            save = cpu_of(lambda: volume.save(state, "step"))  # noqa: B023
            load = cpu_of(lambda: volume.load_into(into, "step"))  # noqa: B023
            samples.setdefault(f"{case.name} save", []).append(save / gib)
            samples.setdefault(f"{case.name} load", []).append(load / gib)
            volume.delete("step")
    return samples


def cpu_of(do: Callable[[], Any]) -> float:
    begun = time.process_time()
    do()
    return time.process_time() - begun


def measured(
    rounds: int, rate_bytes_s: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """All samples, bandwidth and CPU, taken by a child: first without the caps, then under them."""
    drive_bytes = int(rate_bytes_s * seconds) // (4 * MIB) * 4 * MIB
    # Check blocks and copies lie on further drives; a member never passes the bytes of its drive by much.
    size_bytes = max(2 * drive_bytes, CPU_BYTES + 64 * MIB)
    with throttled_drives(DRIVES_MAX, size_bytes, rate_bytes_s) as drives:
        receiving, sending = multiprocessing.Pipe(duplex=False)

        def child() -> None:
            paths = [drive.path for drive in drives]
            cpu = cpu_rounds(paths, rounds)
            drives[0].enter()
            sending.send((run_rounds(paths, rounds, drive_bytes), cpu))

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        sending.close()
        try:
            found: tuple[dict[str, list[float]], dict[str, list[float]]] = receiving.recv()
        except EOFError:
            sys.exit("the measuring process failed: see above")
        finally:
            process.join()
        return found


def rows(samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Each result with its ratio to the drives' sum, by one drive in the same round, and to fio on the same drives."""
    found = []
    for case in CASES:
        for operation in ("save", "load", "degraded load"):
            speeds = samples.get(f"{case.name} {operation}")
            if speeds is None:
                continue
            one = samples[f"stripe 1 {operation.split()[-1]}"]
            ideal = case.data_drives if operation != "load" else case.load_drives
            if case.layout == "parity":
                ideal = case.data_drives
            ceiling = samples[f"fio {case.drives} {'write' if operation == 'save' else 'read'}"]
            share = ideal / case.drives
            found.append(
                {
                    "case": case.name,
                    "operation": operation,
                    "mib_per_s": statistics.median(speeds) / MIB,
                    "ideal_drives": ideal,
                    "of_ideal": paired_ratio(speeds, [ideal * value for value in one]),
                    "of_fio": paired_ratio(speeds, [share * value for value in ceiling]),
                }
            )
    return found


def plot(found: Sequence[dict[str, Any]], rate_bytes_s: int, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, operation in zip(axes, ("save", "load"), strict=True):
        drives = [1, 2, 4, 8]
        axis.plot(drives, [n * rate_bytes_s / MIB for n in drives], "--", color="gray", label="all drives")
        if operation == "save":
            points = sorted((c.drives, c.data_drives) for c in CASES if c.layout == "parity")
            shares = [(n, data * rate_bytes_s / MIB) for n, data in points]
            axis.plot(*zip(*shares, strict=True), ":", color="gray", label="data drives of parity")
        for layout, marker in (("stripe", "o"), ("mirror", "s"), ("parity", "^")):
            points = [
                (next(c.drives for c in CASES if c.name == row["case"]), row["mib_per_s"])
                for row in found
                if row["case"].startswith(layout) and row["operation"] == operation
            ]
            axis.plot(*zip(*points, strict=True), marker=marker, label=layout)
        axis.set(title=operation, xlabel="drives", xticks=drives, ylim=(0, None))
        axis.legend()
    axes[0].set_ylabel("payload, MiB/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--rate-mb", type=positive, default=100, help="cap of each drive, MB/s")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long one drive takes for its share")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rate_bytes_s = options.rate_mb * 1_000_000
    try:
        samples, cpu = measured(options.rounds, rate_bytes_s, options.seconds)
    except CannotThrottle as e:
        sys.exit(f"cannot make throttled drives: {e}")
    found = rows(samples)
    print(f"{options.rounds} alternating rounds, each drive capped at {options.rate_mb} MB/s; medians")
    print(f"{'case':<12} {'operation':<14} {'MiB/s':>7}  {'of N x one drive':<20} of fio's share")
    for row in found:
        print(
            f"{row['case']:<12} {row['operation']:<14} {row['mib_per_s']:>7.0f}  "
            f"{row['of_ideal']!s:<20} {row['of_fio']!s}"
        )
    print("\nwithout the caps, CPU seconds a GiB of payload; medians")
    for name in ("plain", *(case.name for case in CASES)):
        save, load = (statistics.median(cpu[f"{name} {operation}"]) for operation in ("save", "load"))
        print(f"{name:<12} save {save:.2f}  load {load:.2f}")
    if options.json:
        content = [{**row, "of_ideal": vars(row["of_ideal"]), "of_fio": vars(row["of_fio"])} for row in found]
        options.json.write_text(
            json.dumps({"rows": content, "samples": samples, "cpu": cpu}, indent=1) + "\n"
        )
    if options.plot:
        plot(found, rate_bytes_s, options.plot)


if __name__ == "__main__":
    main()

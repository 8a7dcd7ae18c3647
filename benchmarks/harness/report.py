"""How results are shown: tables that fit 80 columns, and JSON with every single sample."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness.machine import Machine
from harness.ratios import Ratio, paired_ratio
from harness.sample import Sample

WIDTH = 80
Samples = Mapping[str, Sequence[Sample]]


def console() -> Console:
    """80 columns wherever nobody looks (a pipe, a log), else the terminal's own width."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def tell(text: str) -> None:
    """Progress, on standard error. No live display: its thread and a fork do not go together."""
    print(
        f"\r\033[K{text}" if sys.stderr.isatty() else text,
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
    )
    sys.stderr.flush()


def tell_no_more() -> None:
    """Wipe the last line of progress from a terminal."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def elapsed(samples: Sequence[Sample]) -> list[float]:
    return [sample.elapsed_s for sample in samples]


def best_of_each_round(samples: Samples, names: Sequence[str]) -> list[float]:
    """Seconds of the fastest of `names` in each round: harsher than any one of them, and the more so with noise."""
    return [min(times) for times in zip(*(elapsed(samples[name]) for name in names), strict=True)]


def fastest(samples: Samples, names: Sequence[str]) -> str:
    """The one with the shortest median."""
    return min(names, key=lambda name: statistics.median(elapsed(samples[name])))


def ratios(samples: Samples, ours: str) -> dict[str, Ratio]:
    """How many times as fast `ours` is as each other one: above 1 is faster."""
    mine = elapsed(samples[ours])
    return {name: paired_ratio(elapsed(theirs), mine) for name, theirs in samples.items() if name != ours}


def throughput_table(title: str, samples: Samples, payload_bytes: int, ours: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("MiB/s", justify="right", no_wrap=True)
    table.add_column("min-max", justify="right", no_wrap=True)
    table.add_column("CPU\ns/GiB", justify="right", no_wrap=True)
    table.add_column("extra\nMiB", justify="right", no_wrap=True)
    table.add_column(f"{ours} is\nx as fast [95 %]", justify="right", no_wrap=True)
    against = ratios(samples, ours)
    for name, found in samples.items():
        speeds = [payload_bytes / 2**20 / seconds for seconds in elapsed(found)]
        table.add_row(
            name,
            f"{statistics.median(speeds):.0f}",
            f"{min(speeds):.0f}-{max(speeds):.0f}",
            shown(median_of(found, "cpu_s"), 2**30 / payload_bytes, 2),
            shown(median_of(found, "extra_bytes"), 2**-20, 0),
            str(against[name]) if name in against else "",
            style="bold" if name == ours else None,
        )
    return table


def seconds_table(title: str, samples: Samples, ours: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in ("", "seconds", "min-max", "CPU s", "extra\nMiB", f"{ours} is\nx as fast [95 %]"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    against = ratios(samples, ours)
    for name, found in samples.items():
        times = elapsed(found)
        table.add_row(
            name,
            f"{statistics.median(times):.2f}",
            f"{min(times):.2f}-{max(times):.2f}",
            shown(median_of(found, "cpu_s"), 1, 2),
            shown(median_of(found, "extra_bytes"), 2**-20, 0),
            str(against[name]) if name in against else "",
            style="bold" if name == ours else None,
        )
    return table


def median_of(samples: Sequence[Sample], field: str) -> float | None:
    values = [value for sample in samples if (value := getattr(sample, field)) is not None]
    return statistics.median(values) if values else None


def shown(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def summary(samples: Samples, ours: str) -> dict[str, Any]:
    """For JSON: every sample, medians, and ours against each."""
    against = ratios(samples, ours)
    return {
        name: {
            "samples": [asdict(sample) for sample in found],
            "elapsed_s_median": statistics.median(elapsed(found)),
            "cpu_s_median": median_of(found, "cpu_s"),
            "extra_bytes_median": median_of(found, "extra_bytes"),
            "ours_times_as_fast": asdict(against[name]) if name in against else None,
        }
        for name, found in samples.items()
    }


def write_json(path: Path, machine: Machine, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": asdict(machine), **content}, indent=1, default=asdict) + "\n")

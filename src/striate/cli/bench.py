"""``striate bench``: measures a node's drives, finds the best setting, and prints it as a volume."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from striate.cli.bench_run import (
    Measured,
    Setting,
    free_of,
    layouts_for,
    measure,
    places_on,
    planned_bytes,
)
from striate.cli.bench_skews import skews
from striate.cli.output import Failure, JsonOption, bytes_text, emit, error_console, say, table, with_codes
from striate.drives import display

__all__ = ["bench"]

MIB = 1 << 20
_SIZE_DEFAULT = "1GiB"
# A drive keeps so much free beside what is measured: a full file system is slow, and somebody else writes too.
_MARGIN = 0.05
_MEMORY_SHARE = 0.5
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip
_SUFFIXES = (".png", ".svg", ".html")


def bench(
    drives: Annotated[
        list[str],
        typer.Argument(
            metavar="DRIVE", help="A directory on each drive, to which you may write.", show_default=False
        ),
    ],
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"What to write to each drive at a time, such as 8GiB. (default: asks, or {_SIZE_DEFAULT})",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Alternating rounds; medians count.")] = 3,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="What to tune and to print as a volume: stripe, mirror or parity[=N]. (default: the safest that is "
            "not a mirror of more than two)",
        ),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune/--no-tune", help="Try chunk sizes, depths, worker counts and engines too.")
    ] = True,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also torch.save, safetensors and DCP, on the first drive.")
    ] = False,
    toml: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best setting there, as a volume.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .svg or .html (needs matplotlib).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measures drives alone and together, then saves and loads with each layout, and finds the best setting.

    Writes only into new directories on the drives, which are gone in the end, also after Ctrl-C; what is loaded is
    compared with what was saved. Saves are synced and loads cold. Nothing else should use the drives meanwhile.
    """
    _check_outputs(toml, plot)
    _check_drives(drives)
    setting = _setting(layout, len(drives))
    size_bytes = _size(size, drives, as_json=as_json)
    warnings = skews(drives, size_bytes)
    for warning in warnings:
        error_console().print(f"warning: {warning}", soft_wrap=True)
    cpus = len(os.sched_getaffinity(0))
    with (
        _terminated_as_interrupted(),
        places_on(drives) as places,
        _bar(planned_bytes(len(drives), size_bytes, rounds, peers=peers, tune=tune, cpus=cpus)) as step,
    ):
        measured = measure(
            drives, places, size_bytes, rounds, layout=setting, tune=tune, peers=peers, cpus=cpus, step=step
        )
    described = volume_toml(measured.best.setting, drives)
    if toml is not None:
        toml.write_text(described)
    if plot is not None:
        import_module("striate.cli.bench_plot").plot(measured, plot)
    emit(
        as_json,
        _json(measured, warnings, described),
        lambda console: _draw(console, measured, described, plot),
    )


bench.__doc__ = with_codes(bench.__doc__)


# ---- what is asked for ---------------------------------------------------------


def _check_outputs(toml: Path | None, plot: Path | None) -> None:
    for path in (toml, plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise Failure(f"{path}: its directory does not exist.")
    if plot is None:
        return
    if plot.suffix not in _SUFFIXES:
        raise typer.BadParameter(f"{plot} ends in none of {', '.join(_SUFFIXES)}.", param_hint="--plot")
    try:
        import_module("matplotlib")
    except ImportError:
        raise Failure("--plot needs matplotlib: pip install 'striate[plot]'.") from None


def _check_drives(drives: Sequence[str]) -> None:
    for drive in drives:
        if not os.path.exists(drive):
            raise Failure(f"{display(drive)} does not exist: give a directory on each drive.")
        if not os.path.isdir(drive):
            raise Failure(f"{display(drive)} is no directory: give a directory on each drive.")
        if not os.access(drive, os.W_OK | os.X_OK):
            raise Failure(
                f"{display(drive)} cannot be written to: give a directory of your own, or change its owner."
            )
        if os.statvfs(drive).f_flag & os.ST_RDONLY:
            raise Failure(f"{display(drive)} is mounted read-only: remount it.")
    seen: set[tuple[int, int]] = set()
    for drive in drives:
        found = os.stat(drive)
        if (found.st_dev, found.st_ino) in seen:
            raise typer.BadParameter(f"{display(drive)} is given twice.", param_hint="DRIVE")
        seen.add((found.st_dev, found.st_ino))


def _setting(layout: str | None, drives: int) -> Setting:
    possible = layouts_for(drives)
    if layout is None:
        return next((s for s in possible if s.layout == "parity" and s.parity == 1), possible[-1])
    kind, _, count = layout.partition("=")
    for setting in possible:
        if setting.layout == kind and (not count or str(setting.parity) == count):
            return setting
    names = [s.layout if s.layout != "parity" else f"parity={s.parity}" for s in possible]
    raise typer.BadParameter(f"{layout} is not possible here: {', '.join(names)} are.", param_hint="--layout")


def _parsed_size(text: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise typer.BadParameter(
            f"{text!r} is no size: give one such as 512MiB or 8GiB.", param_hint="--size"
        )
    found = int(float(match[1]) * _UNITS[match[2].lower()])
    found -= found % (4 * MIB)
    if found < 16 * MIB:
        raise typer.BadParameter(
            f"{text} is too little to measure anything: give 16MiB or more.", param_hint="--size"
        )
    return found


def _size(given: str | None, drives: Sequence[str], *, as_json: bool) -> int:
    """Bytes for each drive: as asked for, as far as drives and memory allow. Raises Failure where they do not."""
    # One member at a time, and the file of the ceiling never beside it; headers and labels are small.
    room = min(free_of(drive) - int(_MARGIN * _total_of(drive)) for drive in drives)
    memory = int(_MEMORY_SHARE * _available_memory()) // (2 * len(drives))
    most = min(room, memory) // (4 * MIB) * (4 * MIB)
    if given is None:
        suggested = bytes_text(min(_parsed_size(_SIZE_DEFAULT), max(most, 0)))
        if sys.stdin.isatty() and not as_json:
            given = typer.prompt(
                f"How much to write to each of {len(drives)} drive(s)", default=suggested, err=True
            )
        else:
            given = suggested if most >= 16 * MIB else _SIZE_DEFAULT
    size_bytes = _parsed_size(given)
    if size_bytes > room:
        tight = min(drives, key=lambda drive: free_of(drive) - int(_MARGIN * _total_of(drive)))
        raise Failure(
            f"{display(tight)}: {bytes_text(size_bytes)} are wanted, {bytes_text(free_of(tight))} are free, and "
            f"{_MARGIN:.0%} of the file system stay free: give a smaller --size, or make room."
        )
    if size_bytes > memory:
        both = 2 * len(drives)  # what is saved, and what is loaded into
        raise Failure(
            f"{bytes_text(size_bytes)} for each of {len(drives)} drive(s) take {bytes_text(both * size_bytes)} of "
            f"memory, and half of what is available is {bytes_text(both * memory)}: give a smaller --size."
        )
    return size_bytes


def _total_of(path: str) -> int:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def _available_memory() -> int:
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: cleaned up."""

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _bar(total_bytes: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=error_console(), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total_bytes)
        begun = 0

        def step(doing: str, moves_bytes: int) -> None:
            nonlocal begun
            bar.update(task, description=doing, completed=begun)
            begun += moves_bytes

        yield step


# ---- what comes out ------------------------------------------------------------


def volume_toml(setting: Setting, drives: Sequence[str]) -> str:
    """A volume as Volume.from_file reads it."""
    paths = ", ".join(json.dumps(os.path.abspath(drive), ensure_ascii=False) for drive in drives)
    lines = [f"drives = [{paths}]", f'layout = "{setting.layout}"']
    for name in ("copies", "parity", "workers", "io_depth"):
        value = getattr(setting, name)
        if value is not None:
            lines.append(f"{name} = {value}")
    lines.append(f"chunk_bytes = {setting.chunk_bytes}")
    if setting.engine != "auto":
        lines.append(f'engine = "{setting.engine}"')
    return "\n".join(lines) + "\n"


def _json(measured: Measured, warnings: Sequence[str], described: str) -> dict[str, Any]:
    best = measured.best
    return {
        **dataclasses.asdict(measured),
        "best": {
            **{name: value for name, value in dataclasses.asdict(best).items() if name != "setting"},
            **dataclasses.asdict(best.setting),
        },
        "volume_toml": described,
        "warnings": list(warnings),
    }


def _draw(console: Console, measured: Measured, described: str, plot: Path | None) -> None:
    drives = table(
        "drive", "write MiB/s", "read MiB/s", right=(1, 2), title="raw: O_DIRECT, 4 MiB, 8 in flight"
    )
    for ceiling in [*measured.drives, *([measured.together] if len(measured.drives) > 1 else [])]:
        drives.add_row(ceiling.path, f"{ceiling.write_mib_per_s:.0f}", f"{ceiling.read_mib_per_s:.0f}")
    console.print(drives)
    console.print()
    rows = [r for r in measured.scaling if r.drives < len(measured.drives)] + measured.layouts
    lines = table(
        "layout", "save MiB/s", "of raw", "load MiB/s", "of raw", "CPU s/GiB", right=(1, 2, 3, 4, 5),
        title=f"striate: {bytes_text(measured.size_bytes)} a drive, medians of {measured.rounds} rounds",
    )  # fmt: skip
    for r in rows:
        lines.add_row(
            r.label, f"{r.save_mib_per_s:.0f}", f"{r.save_of_ceiling:.2f}", f"{r.load_mib_per_s:.0f}",
            f"{r.load_of_ceiling:.2f}", f"{r.save_cpu_s_per_gib:.2f} {r.load_cpu_s_per_gib:.2f}",
        )  # fmt: skip
    console.print(lines)
    if measured.tuning:
        console.print()
        tuned = table(
            "setting", "save MiB/s", "load MiB/s", right=(1, 2), title=f"tuning {measured.tuning[0].label}"
        )
        for r in measured.tuning:
            name = _difference(r.setting, measured.tuning[0].setting) or "as striate chooses"
            tuned.add_row(
                f"{name}{' (best)' if r is measured.best else ''}",
                f"{r.save_mib_per_s:.0f}",
                f"{r.load_mib_per_s:.0f}",
            )
        console.print(tuned)
    if measured.peers:
        console.print()
        others = table("peers, one drive", "save MiB/s", "load MiB/s", right=(1, 2))
        for peer in measured.peers:
            others.add_row(peer.name, f"{peer.save_mib_per_s:.0f}", f"{peer.load_mib_per_s:.0f}")
        console.print(others)
    console.print(f"\nthe best {measured.best.label}, as a volume (striate.Volume.from_file):\n")
    console.print(described, soft_wrap=True, end="")
    if plot is not None:
        console.print()
        say(console, f"plot: {plot}")


def _difference(setting: Setting, usual: Setting) -> str:
    parts = []
    for name, value in dataclasses.asdict(setting).items():
        if value != getattr(usual, name):
            parts.append(f"chunks of {bytes_text(value)}" if name == "chunk_bytes" else f"{name} {value}")
    return ", ".join(parts)

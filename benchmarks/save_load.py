#!/usr/bin/env python3
"""Save and load on one drive: striate, its peers and the drive's own ceiling, on the same bytes, alternating.

Every save is durable when its clock stops (file and directory synced, for every contender), every load is cold (out
of the page cache) and compared byte for byte with what was saved. Each measurement runs in a child process of its own.

  save_load.py                         2 GiB on the drive that holds the repository
  save_load.py --throttle 500          the same on an ext4 drive in RAM, capped at 500 MB/s (root)
  save_load.py --smoke                 16 MiB, one round: does it still run?

Exit status: 0 measured, 1 a contender failed or loaded something else than it saved, 2 wrong usage or no room.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from harness import report
from harness.arguments import positive, size_argument
from harness.ceiling import ceilings
from harness.contenders import (
    Contender,
    distributed_checkpoint,
    new_memory,
    ours,
    ours_into,
    safetensors_file,
    torch_save,
)
from harness.duel import Results, duel
from harness.machine import machine
from harness.ratios import paired_ratio
from harness.sample import MeasurementFailed, single_threaded_torch, terminate_as_interrupt
from harness.state import bytes_of, transformer
from harness.throttle import CannotThrottle, throttled_drive
from harness.workspace import RAM_FILE_SYSTEMS, NoRoom, check_room, file_system, workspace

REPOSITORY = Path(__file__).resolve().parent.parent
TINY_BYTES = 1 << 20
SMOKE_BYTES = 16 << 20
# A save that keeps the old checkpoint needs both; headers, and DCP's own records.
ROOM_FACTOR = 1.05
ROOM_EXTRA_BYTES = 64 << 20


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=size_argument, default=2 << 30, help="bytes of the state (default 2G)")
    parser.add_argument("--rounds", type=positive, default=9, help="rounds of all contenders (default 9)")
    parser.add_argument("--dir", type=Path, default=REPOSITORY / "build" / "bench", help="where to work")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only contenders whose name holds this"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts and every sample there")
    parser.add_argument(
        "--throttle", type=positive, metavar="MB/S", help="on a drive capped at this (10^6 bytes/s)"
    )
    parser.add_argument(
        "--backing", choices=("ram", "disk"), default="ram", help="what the capped drive lies on"
    )
    parser.add_argument("--smoke", action="store_true", help="16 MiB, one round")
    given = parser.parse_args(argv)
    if given.smoke:
        given.size, given.rounds = SMOKE_BYTES, 1
    return given


def contenders(only: Sequence[str] | None) -> list[Contender]:
    everyone = [
        ours("uring"),
        ours("posix"),
        ours_into(),
        torch_save(),
        safetensors_file(),
        distributed_checkpoint(1),
        distributed_checkpoint(4),
        *ceilings(),
        new_memory(),
    ]
    return [one for one in everyone if not only or any(part in one.name for part in only)]


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    screen = report.console()
    chosen = contenders(given.only)
    if not any(one.role == "ours" for one in chosen):
        screen.print("nothing of striate's is left to compare with: --only must keep one of its engines")
        return 2
    single_threaded_torch()
    room_bytes = int(given.size * ROOM_FACTOR) + ROOM_EXTRA_BYTES
    try:
        with terminate_as_interrupt(), contextlib.ExitStack() as stack:
            enter: Callable[[], None] | None = None
            saves: Callable[[Contender], bool] = lambda _: True  # noqa: E731
            notes: list[str] = []
            if given.throttle is None:
                directory = stack.enter_context(workspace(given.dir, room_bytes))
                if file_system(directory)[0] in RAM_FILE_SYSTEMS:
                    notes.append(f"{given.dir} is in RAM: these figures say nothing about a drive.")
            else:
                on_disk = None
                if given.backing == "disk":
                    on_disk = stack.enter_context(workspace(given.dir, 2 * room_bytes))
                drive = stack.enter_context(
                    throttled_drive(room_bytes, given.throttle * 10**6, on_disk=on_disk)
                )
                check_room(drive.path, given.size, spare_bytes=0)
                directory, enter = drive.path, drive.enter
                notes.append(
                    f"The drive: ext4 on a loop device in {drive.backing}, capped at {given.throttle} MB/s."
                )
                if not drive.charges_writeback:
                    saves = lambda one: one.direct_writes  # noqa: E731
                    left = ", ".join(one.name for one in chosen if not one.direct_writes)
                    notes.append(
                        f"Saves through the page cache are left out ({left}): blkio (cgroup v1) does not hold "
                        "write-back to the cap. The save ceiling here is that of direct writers."
                    )
            state = transformer(given.size)
            facts = machine(directory)
            screen.print(str(facts))
            if not any(one.name == "fio" for one in chosen) and not given.only:
                notes.append("fio is not installed: the ceiling is that of the raw ring and of buffered I/O.")
            results = duel(
                chosen,
                state,
                directory,
                rounds=given.rounds,
                tiny=transformer(TINY_BYTES),
                enter=enter,
                saves=saves,
                tell=report.tell,
            )
            report.tell_no_more()
            show(screen, results, chosen, given.rounds, notes)
            if given.json:
                report.write_json(given.json, facts, content(results, chosen, given, notes))
    except (NoRoom, CannotThrottle) as refusal:
        screen.print(str(refusal))
        return 2
    except MeasurementFailed as failure:
        screen.print(str(failure), markup=False)
        return 1
    except KeyboardInterrupt:
        report.tell_no_more()
        screen.print("interrupted: nothing is left behind")
        return 130
    assert bytes_of(state) == results.payload_bytes
    return 0


def show(
    screen: Console, results: Results, chosen: Sequence[Contender], rounds: int, notes: Sequence[str]
) -> None:
    ours_name = next(one.name for one in chosen if one.role == "ours")
    size = results.payload_bytes
    screen.print(
        f"{size / 2**30:.2f} GiB, {rounds} rounds, medians. Durable saves; loads cold by {results.cold_by}"
        + (
            f", at most {results.warm_share_max:.0%} still cached"
            if results.warm_share_max is not None
            else ""
        )
        + ". CPU: the process and its threads, without the kernel's own write-back threads. Extra: peak RSS above the "
        "RSS before (a load's holds the tensors; mapped files count)."
    )
    for note in notes:
        screen.print(note)
    for title, samples in (("save", results.saves), ("load", results.loads)):
        screen.print()
        screen.print(report.throughput_table(f"{title}, {size / 2**30:.2f} GiB", samples, size, ours_name))
        for line in ceiling_lines(samples, chosen):
            screen.print(line)


def ceiling_lines(samples: report.Samples, chosen: Sequence[Contender]) -> list[str]:
    lines = []
    for engine, ratio in ceiling_ratios(samples, chosen).items():
        lines.append(
            f"{engine}: {ratio['of_fastest']} of the ceiling ({ratio['fastest']}, the fastest by median); "
            f"{ratio['of_best_of_each_round']} of the best of each round."
        )
    return lines


def ceiling_ratios(samples: report.Samples, chosen: Sequence[Contender]) -> dict[str, dict[str, object]]:
    """Each of our engines against the fastest ceiling by median, and, harsher, against the best one of each round."""
    names = [one.name for one in chosen if one.role == "ceiling" and one.name in samples]
    if not names:
        return {}
    fastest = report.fastest(samples, names)
    best = report.best_of_each_round(samples, names)
    return {
        one.name: {
            "fastest": fastest,
            "of_fastest": paired_ratio(report.elapsed(samples[fastest]), report.elapsed(samples[one.name])),
            "of_best_of_each_round": paired_ratio(best, report.elapsed(samples[one.name])),
        }
        for one in chosen
        if one.role == "ours" and one.name in samples
    }


def content(
    results: Results, chosen: Sequence[Contender], given: argparse.Namespace, notes: Sequence[str]
) -> dict[str, object]:
    ours_name = next(one.name for one in chosen if one.role == "ours")
    return {
        "benchmark": "save_load",
        "payload_bytes": results.payload_bytes,
        "rounds": given.rounds,
        "throttle_mb_s": given.throttle,
        "durable": True,
        "cold_by": results.cold_by,
        "warm_share_max": results.warm_share_max,
        "notes": list(notes),
        "ours": ours_name,
        "save": report.summary(results.saves, ours_name),
        "load": report.summary(results.loads, ours_name),
        "save_of_ceiling": ceiling_ratios(results.saves, chosen),
        "load_of_ceiling": ceiling_ratios(results.loads, chosen),
    }


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Very many very small tensors: what the format and the object graph cost, not the drive.

Two shapes of 100,000 tensors: a flat dict of 1 KiB tensors, and a nested training state as Adam keeps it (a model,
two moments and a 0-dim step for each parameter, under int keys). Saves are durable, loads cold, everything loaded is
compared with what was saved. Each measurement runs in a child process that builds its own state first.

  many_small.py                        100,000 tensors, 9 rounds
  many_small.py --count 1000000        a million; --rounds 1 --only striate keeps it short
  many_small.py --smoke                400 tensors, one round: does it still run?

Exit status: 0 measured, 1 a contender failed or loaded something else than it saved, 2 wrong usage or no room.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch

import striate
from harness import report
from harness.arguments import positive
from harness.cold import evict
from harness.machine import machine
from harness.sample import MeasurementFailed, Sample, measure, single_threaded_torch, terminate_as_interrupt
from harness.workspace import NoRoom, remove, sync_file_and_directory, workspace

REPOSITORY = Path(__file__).resolve().parent.parent
TENSOR_VALUES = 256  # float32: 1 KiB
SMOKE_COUNT = 400
# torch.save's container spends most of a KiB on each tensor of one.
ROOM_BYTES_PER_TENSOR = 3072

Shape = Literal["flat", "nested"]


@dataclass(frozen=True)
class Contender:
    name: str
    save: Callable[[Any, Path], None]
    load: Callable[[Path], Any]
    suffix: str
    shapes: tuple[Shape, ...] = ("flat", "nested")
    keeps_order: bool = True


def striate_save(state: Any, path: Path) -> None:
    striate.save(state, path)


def torch_save(state: Any, path: Path) -> None:
    torch.save(state, path)
    sync_file_and_directory(path)


def safetensors_save(state: Any, path: Path) -> None:
    safetensors.torch.save_file(state, path)
    sync_file_and_directory(path)


CONTENDERS = (
    Contender("striate", striate_save, striate.load, ".safetensors"),
    Contender("torch", torch_save, lambda path: torch.load(path, weights_only=True), ".pt"),
    Contender(
        "safetensors",
        safetensors_save,
        safetensors.torch.load_file,
        ".safetensors",
        ("flat",),
        keeps_order=False,
    ),
)


def flat(count: int) -> dict[str, torch.Tensor]:
    """`count` float32 tensors of 1 KiB, each with a storage of its own and values of its own."""
    return {f"layers.{index // 8}.block.{index % 8}.weight": _tensor(index) for index in range(count)}


def nested(count: int) -> dict[str, Any]:
    """About `count` tensors: for each parameter a weight and Adam's two moments of 1 KiB, and its step (one float)."""
    parameters = max(1, count // 4)
    moments = {
        index: {
            "step": torch.tensor(float(index)),
            "exp_avg": _tensor(4 * index + 1),
            "exp_avg_sq": _tensor(4 * index + 2),
        }
        for index in range(parameters)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(range(parameters))}
    return {
        "model": {
            f"layers.{index // 8}.{index % 8}.weight": _tensor(4 * index) for index in range(parameters)
        },
        "optimizer": {"state": moments, "param_groups": [group]},
        "step": 1000,
    }


def _tensor(index: int) -> torch.Tensor:
    return torch.from_numpy(np.full(TENSOR_VALUES, index, dtype=np.float32)).clone()


BUILDERS: dict[Shape, Callable[[int], Any]] = {"flat": flat, "nested": nested}


def assert_same(found: Any, wanted: Any, place: str = "state", *, ordered: bool = True) -> None:
    """Raise AssertionError unless types, keys, their order (if `ordered`), and every tensor are equal."""
    if isinstance(wanted, torch.Tensor):
        if found.dtype != wanted.dtype or not torch.equal(found, wanted):
            raise AssertionError(f"{place}: not the tensor that was saved")
    elif isinstance(wanted, dict):
        if type(found) is not dict or (list(found) != list(wanted) if ordered else set(found) != set(wanted)):
            raise AssertionError(f"{place}: other keys, or in another order")
        for key, value in wanted.items():
            assert_same(found[key], value, f"{place}.{key}")
    elif type(found) is not type(wanted) or found != wanted:
        if not (isinstance(wanted, list | tuple) and len(found) == len(wanted)):
            raise AssertionError(f"{place}: {found!r}, saved {wanted!r}")
        for index, value in enumerate(wanted):
            assert_same(found[index], value, f"{place}.{index}")


def run_save(contender: Contender, build: Callable[[int], Any], count: int, path: Path, tiny: Path) -> Sample:
    # Built in the child: on an inherited state a fork's copy-on-write would charge the save for each reference count
    # that it touches.
    built: list[Any] = []
    return measure(
        lambda: contender.save(built[0], path),
        prepare=lambda: built.append(build(count)),
        warm_up=lambda: _exercise(contender, build, tiny),
    )


def run_load(contender: Contender, build: Callable[[int], Any], count: int, path: Path, tiny: Path) -> Sample:
    loaded: list[Any] = []
    return measure(
        lambda: loaded.append(contender.load(path)),
        warm_up=lambda: _exercise(contender, build, tiny),
        check=lambda: assert_same(loaded[0], build(count), ordered=contender.keeps_order),
    )


def _exercise(contender: Contender, build: Callable[[int], Any], tiny: Path) -> None:
    try:
        contender.save(build(4), tiny)
        contender.load(tiny)
    finally:
        remove(tiny)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=positive, default=100_000, help="tensors (default 100000)")
    parser.add_argument("--rounds", type=positive, default=9, help="rounds of all contenders (default 9)")
    parser.add_argument("--shape", choices=tuple(BUILDERS), help="only this one (default: both)")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only contenders whose name holds this"
    )
    parser.add_argument("--dir", type=Path, default=REPOSITORY / "build" / "bench", help="where to work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts and every sample there")
    parser.add_argument("--smoke", action="store_true", help=f"{SMOKE_COUNT} tensors, one round")
    given = parser.parse_args(argv)
    if given.smoke:
        given.count, given.rounds = SMOKE_COUNT, 1
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    screen = report.console()
    chosen = [one for one in CONTENDERS if not given.only or any(part in one.name for part in given.only)]
    if "striate" not in {one.name for one in chosen}:
        screen.print("striate is not left to compare with: --only must keep it")
        return 2
    single_threaded_torch()
    content: dict[str, Any] = {"benchmark": "many_small", "count": given.count, "rounds": given.rounds}
    try:
        with (
            terminate_as_interrupt(),
            workspace(given.dir, given.count * ROOM_BYTES_PER_TENSOR) as directory,
        ):
            facts = machine(directory)
            screen.print(str(facts))
            for shape in [given.shape] if given.shape else list(BUILDERS):
                saves, loads, cold_by = rounds(
                    [one for one in chosen if shape in one.shapes],
                    shape,
                    given.count,
                    given.rounds,
                    directory,
                )
                report.tell_no_more()
                heading = f"{shape}, {given.count:,} tensors, {given.rounds} rounds"
                screen.print(report.seconds_table(f"save, {heading} (durable)", saves, "striate"))
                screen.print(report.seconds_table(f"load, {heading} (cold by {cold_by})", loads, "striate"))
                content[shape] = {
                    "save": report.summary(saves, "striate"),
                    "load": report.summary(loads, "striate"),
                    "cold_by": cold_by,
                }
            if given.json:
                report.write_json(given.json, facts, content)
    except NoRoom as refusal:
        screen.print(str(refusal))
        return 2
    except MeasurementFailed as failure:
        screen.print(str(failure), markup=False)
        return 1
    except KeyboardInterrupt:
        report.tell_no_more()
        screen.print("interrupted: nothing is left behind")
        return 130
    return 0


def rounds(
    chosen: Sequence[Contender],
    shape: Shape,
    count: int,
    rounds_count: int,
    directory: Path,
) -> tuple[dict[str, list[Sample]], dict[str, list[Sample]], str]:
    """Samples of saves and of loads by contender, each round in another order, and how the files were made cold."""
    saves: dict[str, list[Sample]] = {one.name: [] for one in chosen}
    loads: dict[str, list[Sample]] = {one.name: [] for one in chosen}
    cold_by = ""
    build = BUILDERS[shape]
    for index in range(rounds_count):
        shift = index % len(chosen)
        for one in [*chosen[shift:], *chosen[:shift]]:
            report.tell(f"{shape}, round {index + 1}/{rounds_count}: {one.name}")
            path, tiny = directory / f"checkpoint{one.suffix}", directory / f"warm-up{one.suffix}"
            try:
                saves[one.name].append(run_save(one, build, count, path, tiny))
                cold_by, _ = evict(path)
                loads[one.name].append(run_load(one, build, count, path, tiny))
            finally:
                remove(path)
    return saves, loads, cold_by


if __name__ == "__main__":
    sys.exit(main())

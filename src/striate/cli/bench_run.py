"""What ``striate bench`` measures: raw ceilings, saves and loads, peers, in alternating rounds on the same drives."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import mmap
import os
import shutil
import statistics
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load_state
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_state

from striate.errors import StriateError
from striate.liburing import Ring
from striate.liburing import available as ring_available
from striate.volume import Volume

__all__ = [
    "Ceiling",
    "Measured",
    "Peer",
    "Point",
    "Result",
    "Setting",
    "Step",
    "free_of",
    "layouts_for",
    "measure",
    "places_on",
    "variants_of",
]

MIB = 1 << 20
BLOCK_BYTES = 4 * MIB
DEPTH = 8
_PREFIX = ".striate-bench-"
_LAYER_BYTES = 32 * MIB
_SAMPLES = 24
_SAMPLE_MIN_S = 0.2

LayoutName = Literal["stripe", "mirror", "parity"]


@dataclass(frozen=True)
class Setting:
    """One way to lay a checkpoint out. ``workers``, ``io_depth``: None as striate chooses. Sizes in bytes."""

    layout: LayoutName
    parity: int | None = None
    copies: int | None = None
    chunk_bytes: int = 4 * MIB
    engine: str = "auto"
    workers: int | None = None
    io_depth: int | None = None

    def data_drives(self, drives: int) -> float:
        """How many drives' worth of data a save of so many drives' worth of writing holds."""
        if self.layout == "parity":
            return drives - (self.parity or 1)
        return drives / (self.copies or 2) if self.layout == "mirror" else drives

    def payload_bytes(self, drives: int, size_bytes: int) -> int:
        """What a save holds that writes size_bytes to each drive; a multiple of 4 MiB."""
        return int(self.data_drives(drives) * size_bytes) // BLOCK_BYTES * BLOCK_BYTES

    def label(self, drives: int) -> str:
        """``parity 3+1``, ``mirror 2 of 4``."""
        if self.layout == "parity":
            return f"parity {drives - (self.parity or 1)}+{self.parity or 1}"
        return f"mirror {self.copies or 2} of {drives}" if self.layout == "mirror" else f"stripe {drives}"

    def volume(self, places: Sequence[str]) -> Volume:
        return Volume(
            places,
            self.layout,
            copies=self.copies,
            parity=self.parity,
            chunk_bytes=self.chunk_bytes,
            workers=self.workers,
            io_depth=self.io_depth,
            engine=self.engine,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Ceiling:
    """What drives do with no checkpoint around it, MiB/s: O_DIRECT, 4 MiB, 8 in flight; writes with their fsync."""

    path: str
    write_mib_per_s: float
    read_mib_per_s: float


@dataclass(frozen=True)
class Point:
    """One drive's speed at one moment: seconds from the start, MiB/s."""

    at_s: float
    mib_per_s: float


@dataclass(frozen=True)
class Result:
    """Medians over the rounds. Speeds are of the payload, in MiB/s; ``cpu``: process seconds for each GiB of payload.

    ``of_ceiling``: speed by what the drives used do together, for this layout's share of data.
    """

    label: str
    setting: Setting
    drives: int
    payload_bytes: int
    save_mib_per_s: float
    load_mib_per_s: float
    save_of_ceiling: float
    load_of_ceiling: float
    save_cpu_s_per_gib: float
    load_cpu_s_per_gib: float


@dataclass(frozen=True)
class Peer:
    """Another program on the first of the drives, MiB/s: saves synced, loads cold."""

    name: str
    save_mib_per_s: float
    load_mib_per_s: float


@dataclass(frozen=True)
class Measured:
    """Everything that was measured. ``together``: all drives at once, the sum of them."""

    size_bytes: int
    rounds: int
    drives: list[Ceiling]
    together: Ceiling
    scaling: list[Result]
    layouts: list[Result]
    tuning: list[Result]
    best: Result
    peers: list[Peer]
    timeline: dict[str, list[Point]] = field(default_factory=dict)


Step = Callable[[str, int], None]
"""Told before each step what it is, and the bytes that it moves."""


# ---- what to measure ---------------------------------------------------------


def layouts_for(drives: int) -> list[Setting]:
    """Every layout that so many drives allow."""
    found = [Setting("stripe")]
    if drives >= 2:
        found.append(Setting("mirror", copies=2))
    found += [Setting("parity", parity=checks) for checks in (1, 2) if drives >= checks + 2]
    return found


def variants_of(setting: Setting, cpus: int) -> list[Setting]:
    """The setting and its neighbours, one thing changed in each."""
    changed = [replace(setting, chunk_bytes=size * MIB) for size in (1, 16)]
    changed.append(replace(setting, engine="posix"))
    changed += [replace(setting, io_depth=depth) for depth in (2, 8)]
    changed += [replace(setting, workers=count) for count in sorted({1, 2 * cpus})]
    return [setting, *changed]


# ---- places ----------------------------------------------------------------


@contextlib.contextmanager
def places_on(drives: Sequence[str]) -> Iterator[list[str]]:
    """A new directory on each drive, gone at the end whatever happens. Those that a killed run left are removed too."""
    made: list[tuple[str, int]] = []
    try:
        for drive in drives:
            _sweep(drive)
            place = os.path.join(drive, f"{_PREFIX}{uuid.uuid4().hex}")
            os.mkdir(place, 0o700)
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            made.append((place, descriptor))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield [place for place, _ in made]
    finally:
        for place, descriptor in made:
            shutil.rmtree(place, ignore_errors=True)
            os.close(descriptor)


def _sweep(drive: str) -> None:
    for entry in os.scandir(drive):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except BlockingIOError:
            pass  # another run's, alive
        finally:
            os.close(descriptor)


def free_of(path: str) -> int:
    """Bytes that this user may still write there."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


# ---- ceilings ----------------------------------------------------------------


def _raw(
    place: str,
    direction: Literal["read", "write"],
    size_bytes: int,
    ready: Callable[[], object] = lambda: None,
) -> float:
    """Seconds for one file of one drive: for a write from the first byte to the end of its fsync.

    ready: is called when all is prepared and the clock is about to start.
    """
    path = os.path.join(place, "ceiling")
    flags = os.O_RDONLY if direction == "read" else os.O_WRONLY | os.O_CREAT
    try:
        descriptor = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:  # a file system without O_DIRECT
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    offsets = range(0, size_bytes, BLOCK_BYTES)
    try:
        # Not closed by hand: after Ctrl-C the ring may still have it.
        slots = mmap.mmap(-1, DEPTH * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        slots[:] = os.urandom(4096) * (len(slots) // 4096)
        if direction == "write":
            with contextlib.suppress(OSError):
                os.posix_fallocate(descriptor, 0, size_bytes)
        ready()
        begun = time.perf_counter()
        _move(descriptor, direction, slots, offsets)
        if direction == "write":
            os.fsync(descriptor)
        return time.perf_counter() - begun
    finally:
        os.close(descriptor)


def _move(descriptor: int, direction: Literal["read", "write"], slots: mmap.mmap, offsets: range) -> None:
    if ring_available()[0]:
        with Ring(DEPTH) as ring:
            ring.run_transfers(descriptor, direction, slots, offsets, block_bytes=BLOCK_BYTES, depth=DEPTH)
        return
    view = memoryview(slots)
    todo = iter(offsets)
    lock = threading.Lock()
    failures: list[OSError] = []

    def work(slot: int) -> None:
        mine = view[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]
        while not failures:
            with lock:
                offset = next(todo, None)
            if offset is None:
                return
            try:
                move = os.preadv if direction == "read" else os.pwritev
                if move(descriptor, [mine], offset) != BLOCK_BYTES:
                    raise OSError(5, f"{direction} at offset {offset} moved less than it should")
            except OSError as e:
                failures.append(e)

    _at_once([lambda slot=slot: work(slot) for slot in range(DEPTH)])  # type: ignore[misc]
    if failures:
        raise failures[0]


def _at_once(actions: Sequence[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as e:
            failures.append(e)

    # Daemons: Ctrl-C need not wait for what they are in the middle of.
    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A barrier that another one's failure broke is no failure of its own.
    for failure in sorted(failures, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise failure


def _raw_together(places: Sequence[str], direction: Literal["read", "write"], size_bytes: int) -> float:
    """Seconds of the slowest, all of them started at once."""
    start = threading.Barrier(len(places))
    took: list[float] = []

    def work(place: str) -> None:
        try:
            took.append(_raw(place, direction, size_bytes, start.wait))
        except BaseException:
            start.abort()
            raise

    _at_once([lambda place=place: work(place) for place in places])  # type: ignore[misc]
    return max(took)


# ---- saves and loads -----------------------------------------------------------


@dataclass
class _Samples:
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    save_cpu_s: list[float] = field(default_factory=list)
    load_cpu_s: list[float] = field(default_factory=list)


class _Payload:
    """Weights that no drive could shorten, and memory in use to load them into; any number of bytes of them."""

    def __init__(self, most_bytes: int) -> None:
        generator = torch.Generator().manual_seed(7)
        count = -(-most_bytes // _LAYER_BYTES)
        self._layers = [
            torch.empty(_LAYER_BYTES // 8, dtype=torch.int64).random_(generator=generator)
            for _ in range(count)
        ]
        self._into = [torch.full_like(layer, 1) for layer in self._layers]

    def state(self, nbytes: int) -> dict[str, torch.Tensor]:
        return self._cut(self._layers, nbytes)

    def into(self, nbytes: int) -> dict[str, torch.Tensor]:
        return self._cut(self._into, nbytes)

    @staticmethod
    def _cut(layers: Sequence[torch.Tensor], nbytes: int) -> dict[str, torch.Tensor]:
        whole, rest = divmod(nbytes, _LAYER_BYTES)
        found = {f"layer{n}": layers[n] for n in range(whole)}
        if rest:
            # A storage of its own: a view would be saved with all of what it is a view of.
            found[f"layer{whole}"] = layers[whole][: rest // 8].clone()
        return found


def _timed(action: Callable[[], Any]) -> tuple[float, float]:
    cpu = time.process_time()
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun, time.process_time() - cpu


class _Bench:
    def __init__(self, places: Sequence[str], size_bytes: int, rounds: int, step: Step) -> None:
        self.places = list(places)
        self.size_bytes = size_bytes
        self.rounds = rounds
        self.step = step
        step("making data", 0)
        self.payload = _Payload(len(places) * size_bytes)

    def ceilings(
        self, alone: dict[str, list[tuple[float, float]]], together: list[tuple[float, float]]
    ) -> None:
        for place in self.places:
            self.step("the ceiling of each drive", 2 * self.size_bytes)
            alone.setdefault(place, []).append(
                (_raw(place, "write", self.size_bytes), _raw(place, "read", self.size_bytes))
            )
        self.step("the ceiling of all together", 2 * self.size_bytes * len(self.places))
        together.append(
            (
                _raw_together(self.places, "write", self.size_bytes),
                _raw_together(self.places, "read", self.size_bytes),
            )
        )
        for place in self.places:
            os.unlink(os.path.join(place, "ceiling"))

    def run(self, setting: Setting, drives: int, samples: _Samples) -> None:
        """One save and one load, checked."""
        nbytes = setting.payload_bytes(drives, self.size_bytes)
        places = [os.path.join(place, f"volume-{uuid.uuid4().hex[:8]}") for place in self.places[:drives]]
        for place in places:
            os.mkdir(place)
        state, into = self.payload.state(nbytes), self.payload.into(nbytes)
        for tensor in into.values():
            tensor.fill_(1)
        try:
            volume = setting.volume(places)
            self.step(f"{setting.label(drives)}", 2 * nbytes)
            elapsed, cpu = _timed(lambda: volume.save(state, "bench"))
            samples.save_s.append(elapsed)
            samples.save_cpu_s.append(cpu)
            elapsed, cpu = _timed(lambda: volume.load_into(into, "bench"))
            samples.load_s.append(elapsed)
            samples.load_cpu_s.append(cpu)
            if not all(torch.equal(into[name], tensor) for name, tensor in state.items()):
                raise StriateError(
                    f"{setting.label(drives)}: what was loaded is not what was saved, though every checksum fitted. "
                    "Please report this; until then do not trust these drives."
                )
        finally:
            for place in places:
                shutil.rmtree(place, ignore_errors=True)

    def timeline(self, setting: Setting, expected_s: float) -> dict[str, list[Point]]:
        """How fast each drive wrote during one save, of which about expected_s seconds are expected."""
        every_s = max(expected_s / _SAMPLES, _SAMPLE_MIN_S)
        devices = {place: _device_stat(place) for place in self.places}
        found: dict[str, list[Point]] = {place: [] for place, stat in devices.items() if stat is not None}
        stop = threading.Event()
        begun = time.perf_counter()

        def sample() -> None:
            last = {place: (_sectors(devices[place]), begun) for place in found}
            while not stop.wait(every_s):
                now = time.perf_counter()
                for place, (sectors, then) in list(last.items()):
                    moved = _sectors(devices[place])
                    rate = (moved - sectors) * 512 / MIB / (now - then)
                    found[place].append(Point(round((now + then) / 2 - begun, 3), round(rate, 1)))
                    last[place] = (moved, now)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            samples = _Samples()
            self.run(setting, len(self.places), samples)
        finally:
            stop.set()
            thread.join()
        # The load that follows is no part of it.
        return {
            place: [point for point in points if point.at_s < samples.save_s[0] + every_s]
            for place, points in found.items()
        }


def _device_stat(place: str) -> str | None:
    device = os.stat(place).st_dev
    path = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat"
    return path if os.path.exists(path) else None


def _sectors(path: str | None) -> int:
    """Sectors of 512 bytes written (Documentation/block/stat.rst, field 7)."""
    assert path is not None
    with open(path) as stat:
        return int(stat.read().split()[6])


# ---- peers -------------------------------------------------------------------


def _sync_tree(path: Path) -> None:
    for entry in [*path.rglob("*"), path] if path.is_dir() else [path, path.parent]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _forget(path: Path) -> None:
    """Out of the page cache with it."""
    for entry in path.rglob("*") if path.is_dir() else [path]:
        if entry.is_file():
            descriptor = os.open(entry, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _peers() -> dict[str, tuple[Callable[[Any, Path], Any], Callable[[Any, Path], Any]]]:
    """By name: save, and load into memory."""

    def dcp_save(state: Any, path: Path) -> None:
        writer = FileSystemWriter(path, thread_count=4, sync_files=True)
        dcp_save_state(state, storage_writer=writer, no_dist=True)

    def dcp_load(into: Any, path: Path) -> None:
        dcp_load_state(into, storage_reader=FileSystemReader(path), no_dist=True)

    found: dict[str, tuple[Callable[[Any, Path], Any], Callable[[Any, Path], Any]]] = {
        "torch.save": (torch.save, lambda _, path: torch.load(path)),
        "DCP, 4 threads": (dcp_save, dcp_load),
    }
    if importlib.util.find_spec("safetensors") is not None:
        safetensors = importlib.import_module("safetensors.torch")
        found["safetensors"] = (
            safetensors.save_file,
            # It maps the file: without a copy nothing would have been read.
            lambda _, path: {name: t.clone() for name, t in safetensors.load_file(path).items()},
        )
    return found


def _measure_peers(bench: _Bench) -> list[Peer]:
    nbytes = bench.size_bytes
    state, into = bench.payload.state(nbytes), bench.payload.into(nbytes)
    samples: dict[str, list[tuple[float, float]]] = {}
    for _ in range(bench.rounds):
        for name, (save, load) in _peers().items():
            bench.step(name, 2 * nbytes)
            path = Path(bench.places[0]) / "peer"

            def durable(save: Any = save, path: Path = path) -> None:
                save(state, path)
                _sync_tree(path)

            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    saved, _ = _timed(durable)
                    _forget(path)
                    loaded, _ = _timed(lambda load=load, path=path: load(into, path))  # type: ignore[misc]
                samples.setdefault(name, []).append((saved, loaded))
            finally:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return [
        Peer(
            name,
            nbytes / MIB / statistics.median(saved for saved, _ in times),
            nbytes / MIB / statistics.median(loaded for _, loaded in times),
        )
        for name, times in samples.items()
    ]


# ---- all of it -----------------------------------------------------------------


def scaling_counts(drives: int) -> list[int]:
    """1, 2, 4 ... and all of them."""
    counts = [1]
    while counts[-1] * 2 < drives:
        counts.append(counts[-1] * 2)
    return sorted({*counts, drives})


def planned_bytes(drives: int, size_bytes: int, rounds: int, *, peers: bool, tune: bool, cpus: int) -> int:
    """What all steps move together, for the bar."""
    each = 4 * drives * size_bytes
    each += sum(2 * count * size_bytes for count in scaling_counts(drives))
    each += sum(2 * s.payload_bytes(drives, size_bytes) for s in layouts_for(drives) if s.layout != "stripe")
    if tune:
        each += 2 * drives * size_bytes * len(variants_of(layouts_for(drives)[-1], cpus))
    if peers:
        each += 2 * size_bytes * len(_peers())
    return each * rounds + 2 * drives * size_bytes


def measure(
    drives: Sequence[str],
    places: Sequence[str],
    size_bytes: int,
    rounds: int,
    *,
    layout: Setting,
    tune: bool,
    peers: bool,
    cpus: int,
    step: Step,
) -> Measured:
    """Measures all of it in the places, which lie on the drives. size_bytes: on each drive, a multiple of 4 MiB.

    Raises DriveError and OSError of a drive; StriateError if what was loaded is not what was saved.
    """
    warnings.simplefilter("ignore")
    bench = _Bench(places, size_bytes, rounds, step)
    count = len(places)
    alone: dict[str, list[tuple[float, float]]] = {}
    together: list[tuple[float, float]] = []
    scaling = {n: _Samples() for n in scaling_counts(count)}
    others = {setting: _Samples() for setting in layouts_for(count) if setting.layout != "stripe"}
    for _ in range(rounds):
        bench.ceilings(alone, together)
        for n, samples in scaling.items():
            bench.run(Setting("stripe"), n, samples)
        for setting, samples in others.items():
            bench.run(setting, count, samples)
    tuned = {setting: _Samples() for setting in (variants_of(layout, cpus) if tune else [])}
    for _ in range(rounds):
        for setting, samples in tuned.items():
            bench.run(setting, count, samples)
    ceilings = [
        _ceiling(drive, alone[place], size_bytes) for drive, place in zip(drives, places, strict=True)
    ]
    all_of_them = _ceiling("all together", together, size_bytes * count)

    def result(setting: Setting, n: int, samples: _Samples) -> Result:
        return _result(setting, n, samples, size_bytes, ceilings, all_of_them)

    by_drives = [result(Setting("stripe"), n, samples) for n, samples in scaling.items()]
    layouts = [by_drives[-1], *(result(setting, count, samples) for setting, samples in others.items())]
    tuning = [result(setting, count, samples) for setting, samples in tuned.items()]
    best = _best(tuning) if tuning else next(r for r in layouts if r.setting == layout)
    timeline = bench.timeline(best.setting, best.payload_bytes / MIB / best.save_mib_per_s)
    return Measured(
        size_bytes,
        rounds,
        ceilings,
        all_of_them,
        by_drives,
        layouts,
        tuning,
        best,
        _measure_peers(bench) if peers else [],
        {drive: timeline[place] for drive, place in zip(drives, places, strict=True) if place in timeline},
    )


def _ceiling(path: str, times: Sequence[tuple[float, float]], nbytes: int) -> Ceiling:
    write, read = (nbytes / MIB / statistics.median(column) for column in zip(*times, strict=True))
    return Ceiling(path, write, read)


def _result(
    setting: Setting,
    drives: int,
    samples: _Samples,
    size_bytes: int,
    alone: Sequence[Ceiling],
    together: Ceiling,
) -> Result:
    payload = setting.payload_bytes(drives, size_bytes)
    gib = payload / 2**30
    save = payload / MIB / statistics.median(samples.save_s)
    load = payload / MIB / statistics.median(samples.load_s)
    all_used = drives == len(alone)
    write = together.write_mib_per_s if all_used else sum(c.write_mib_per_s for c in alone[:drives])
    read = together.read_mib_per_s if all_used else sum(c.read_mib_per_s for c in alone[:drives])
    return Result(
        setting.label(drives),
        setting,
        drives,
        payload,
        save,
        load,
        # All drives write copies and check blocks too, and a load reads data alone, from all of them.
        save / (write * setting.data_drives(drives) / drives),
        load / read,
        statistics.median(samples.save_cpu_s) / gib,
        statistics.median(samples.load_cpu_s) / gib,
    )


# Less than this is noise, and what striate chooses by itself stays.
_WORTH_IT = 1.03


def _best(results: Sequence[Result]) -> Result:
    """The first, unless another one saves faster by more than noise and does not load slower."""
    usual = results[0]
    better = [
        r
        for r in results[1:]
        if r.save_mib_per_s > usual.save_mib_per_s * _WORTH_IT
        and r.load_mib_per_s * _WORTH_IT > usual.load_mib_per_s
    ]
    return max(better, key=lambda r: r.save_mib_per_s, default=usual)

"""A volume: an ordered set of drives and a layout, configured once, used for every checkpoint of a run."""

from __future__ import annotations

import builtins
import contextlib
import math
import os
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from striate import graph, manifest, torch_api
from striate.drive_set import DriveSet, locked, open_drives, take_place, warn_of_devices
from striate.drives import display
from striate.engines import Engine, EngineChoice
from striate.errors import DriveError, StriateError, VolumeMismatch, VolumeWarning, drive_error
from striate.generations import names_on, scan
from striate.groups import Shape
from striate.leftovers import delete, finish_others
from striate.member_set import MemberSet
from striate.merge import Merge
from striate.notices import warn
from striate.opening import open_generation
from striate.progress import ProgressChoice, shown
from striate.repair import Repaired, VolumeReport, repair_generation, verify_set
from striate.superblock import DRIVES_MAX, check_name
from striate.torch_api import CheckpointInfo, LoadOptions, OnLoaded, SaveResult
from striate.transaction import Layout, write_members

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["CheckpointEntry", "Volume"]

Name = str | bytes | os.PathLike[Any]

_ENVIRONMENT = "STRIATE_VOLUME"
_HANG_TIMEOUT_S = 300.0
_TUNING_MAX = 1024
_GROUP_BYTES_MAX = 256 << 20  # the budget of a save's slots; a group is encoded whole


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint of a volume, as list() finds it: its newest generation. ``created_s``: seconds since 1970.

    ``name`` is what load takes; a name that is no UTF-8 has its odd bytes as lone surrogates, as of os.fsdecode.

    ``members_found`` of ``members_count`` are there; fewer than all means repair, or a drive to mount.
    """

    name: str
    uuid: str
    sequence: int
    created_s: float
    members_found: int
    members_count: int


class Volume:
    """Drives that are used together, one directory each.

    layout: "stripe" (no redundancy), "mirror" (``copies`` of every block, 2 unless told), "parity" (``parity`` check
        blocks, 1 unless told, for the data blocks on the other drives: any ``parity`` drives may be lost).
    weights: how much each drive takes, for drives of different size or speed; None: all alike. With parity over all
        drives every drive takes part in every group, and there is nothing to weigh.
    chunk_bytes: a power of two from 4096 to 64 MiB; default 4 MiB.
    on_drive_failure: "degrade" goes on with the drives that are left, as far as the layout allows, and warns;
        "raise" raises. A stripe always raises, and so does a full drive.
    hang_timeout_s: a drive that does not answer for so long (300 s unless told) is given up; None waits for ever,
        and allows to read straight into the memory of tensors.
    max_bandwidth, max_drive_bandwidth: bytes/s of all drives together, and of each, that a save may use; None: all.
    workers, io_depth: threads at most, and blocks (with parity: groups) in flight for each; None: as fits the machine
        and the drives. ``striate bench`` finds out whether others do better.
    idle_priority: saves do their I/O in the idle class (ioprio_set(2)), behind a data loader that reads from the same
        drives; the schedulers bfq and mq-deadline heed it, "none" does not.

    Drives are opened for each call: mounting one again needs nothing here. The first save labels them. Raises
    ValueError for options that make no sense, VolumeMismatch when the layout needs more drives.
    """

    def __init__(
        self,
        drives: Sequence[str | bytes | os.PathLike[Any]],
        layout: Literal["stripe", "mirror", "parity"] = "stripe",
        *,
        copies: int | None = None,
        parity: int | None = None,
        weights: Sequence[float] | None = None,
        chunk_bytes: int = manifest.CHUNK_BYTES_DEFAULT,
        on_drive_failure: Literal["degrade", "raise"] = "degrade",
        hang_timeout_s: float | None = _HANG_TIMEOUT_S,
        max_bandwidth: int | None = None,
        max_drive_bandwidth: int | None = None,
        idle_priority: bool = False,
        workers: int | None = None,
        io_depth: int | None = None,
        engine: EngineChoice = "auto",
    ) -> None:
        if isinstance(drives, (str, bytes)) or not drives:
            raise ValueError(f"drives is a list of directories, one of each drive, not {drives!r}")
        if len(drives) > DRIVES_MAX:
            raise ValueError(f"a volume has at most {DRIVES_MAX} drives, not {len(drives)}")
        torch_api.check_chunk_bytes(chunk_bytes)
        if on_drive_failure not in ("degrade", "raise"):
            raise ValueError(f'on_drive_failure is "degrade" or "raise", not {on_drive_failure!r}')
        for what, value in (
            ("hang_timeout_s", hang_timeout_s),
            ("max_bandwidth", max_bandwidth),
            ("max_drive_bandwidth", max_drive_bandwidth),
        ):
            if value is not None and not _is_positive(value):
                raise ValueError(f"{what} is a positive number or None, not {value!r}")
        for what, count in (("copies", copies), ("parity", parity)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
                raise ValueError(f"{what} is a whole number, not {count!r}")
        for what, count in (("workers", workers), ("io_depth", io_depth)):
            if count is not None and (type(count) is not int or not 1 <= count <= _TUNING_MAX):
                raise ValueError(f"{what} is a whole number from 1 to {_TUNING_MAX}, or None, not {count!r}")
        if weights is not None and (len(weights) != len(drives) or not all(map(_is_positive, weights))):
            raise ValueError(
                f"weights are {len(drives)} positive numbers, one for each drive, not {weights!r}"
            )
        shape = _shape(layout, len(drives), copies, parity)
        if shape.data > 1 and shape.width * chunk_bytes > _GROUP_BYTES_MAX:
            raise ValueError(
                f"a group of {shape.width} blocks of {chunk_bytes:,} bytes takes {shape.width * chunk_bytes:,} bytes "
                f"of memory, and {_GROUP_BYTES_MAX:,} are allowed: use smaller chunks"
            )
        self.drives = tuple(os.fspath(drive) for drive in drives)
        self.layout = layout
        self.engine = engine
        self._tuning = {"workers": workers or 0, "io_depth": io_depth or 0}
        self._layout = Layout(
            shape=shape,
            chunk_bytes=chunk_bytes,
            weights=None if weights is None else tuple(float(w) for w in weights),
            on_drive_failure=on_drive_failure,
            hang_timeout_s=hang_timeout_s or 0.0,
            max_bandwidth=int(max_bandwidth or 0),
            drive_max_bandwidth=int(max_drive_bandwidth or 0),
            idle_priority=idle_priority,
        )

    def __repr__(self) -> str:
        shape = self._layout.shape
        drives = ", ".join(display(drive) for drive in self.drives)
        return f"Volume([{drives}], {self.layout!r}, groups of {shape.data}+{shape.checks})"

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Volume:
        """A volume as a TOML file describes it: the parameters of Volume by name, ``drives`` relative to the file.

        Raises OSError if it cannot be read, ValueError (with the file's name) for what is wrong in it.
        """
        shown_path = display(os.fspath(path))
        try:
            with open(path, "rb") as opened:
                settings = tomllib.load(opened)
        except tomllib.TOMLDecodeError as e:
            raise ValueError(f"{shown_path} is no TOML file: {e}") from None
        drives = settings.pop("drives", None)
        if not isinstance(drives, list) or not all(isinstance(drive, str) for drive in drives):
            raise ValueError(
                f'{shown_path}: drives is missing, or no list of strings: drives = ["/nvme0", "/nvme1"]'
            )
        unknown = sorted(set(settings) - _SETTINGS)
        if unknown:
            raise ValueError(
                f"{shown_path}: unknown setting {', '.join(unknown)}; there are {', '.join(sorted(_SETTINGS))}"
            )
        base = os.path.dirname(os.path.abspath(path))
        try:
            return cls([os.path.join(base, drive) for drive in drives], **settings)
        except (TypeError, ValueError) as e:
            raise ValueError(f"{shown_path}: {e}") from None

    @classmethod
    def default(cls) -> Volume:
        """The volume of the TOML file that the environment variable STRIATE_VOLUME names."""
        path = os.environ.get(_ENVIRONMENT)
        if not path:
            raise VolumeMismatch(f"no volume is configured: set {_ENVIRONMENT} to the path of a TOML file.")
        return cls.from_file(path)

    # ---- saving ----------------------------------------------------------

    def save(
        self,
        obj: object,
        name: Name,
        *,
        pickle_module: Any = pickle,
        pickle_protocol: int = 2,
        engine: EngineChoice | None = None,
        frozen: bool = False,
        overwrite_foreign: bool = False,
        progress: ProgressChoice = False,
    ) -> SaveResult:
        """Saves whatever torch.save takes, over the drives. When this returns, it is whole, durable and committed.

        name: relative, with ``/`` for directories, which are made. frozen, progress: as with striate.save.
        overwrite_foreign: also replace a member of a checkpoint of another volume, which then loses it.

        Raises DriveError (DriveFull, DriveHung, ...) and VolumeMismatch, with the earlier checkpoint whole and
        nothing left beside it. A save that lost no more drives than the layout makes up for warns (VolumeWarning), and
        says so in ``members`` of the result.
        """
        begun = time.monotonic()
        raw = check_name(name)
        chosen = self._engine(engine)
        held = graph.dumps(obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
        with open_drives(self.drives, chosen) as drives:
            warn_of_devices(drives)
            total = sum(entry.nbytes for entry in held.storages)
            with shown(progress, f"saving {display(raw)}", total) as report:
                written = write_members(
                    held,
                    raw,
                    drives,
                    self._layout,
                    chosen,
                    stable=frozen,
                    overwrite_foreign=overwrite_foreign,
                    progress=report,
                )
        return SaveResult(
            path=display(raw),
            uuid=written.generation.uuid.hex(),
            sequence=written.generation.sequence,
            file_bytes=sum(member.file_bytes for member in written.members),
            data_bytes=written.table.data_bytes,
            tensors_count=written.tensors_count,
            opaque_count=written.opaque_count,
            elapsed_s=time.monotonic() - begun,
            stats=written.stats,
            members=written.members,
            drives=tuple(chosen.uses.values()),
        )

    def delete(self, name: Name) -> int:
        """Deletes a checkpoint on all drives; the number of members removed.

        It does not come back with a drive that is missing now. Raises FileNotFoundError if there is none.
        """
        chosen = self._engine(None)
        with open_drives(self.drives, chosen) as drives:
            return delete(drives, check_name(name), chosen)

    # ---- loading ---------------------------------------------------------

    def load(
        self,
        name: Name,
        map_location: Any = None,
        pickle_module: Any = None,
        *,
        weights_only: bool = True,
        verify: bool = True,
        partial: bool = False,
        generation: str | int | None = None,
        engine: EngineChoice | None = None,
        progress: ProgressChoice = False,
        on_loaded: OnLoaded | None = None,
        **pickle_load_args: Any,
    ) -> Any:
        """Loads the newest generation of a checkpoint; parameters as striate.load's.

        What is missing or damaged is recovered where the layout allows, with a warning. Raises FileNotFoundError
        if there is no such checkpoint, DataLost (MissingMember) if too much is gone.
        """
        begun = time.monotonic()
        options = LoadOptions(
            map_location, pickle_module, weights_only, None, verify, pickle_load_args, partial
        )
        with self._opened(name, engine, generation) as source:
            loaded = torch_api.load_from(source, options, progress)
            torch_api.tell(on_loaded, source, begun)
        return loaded

    def load_into(
        self,
        state: Any,
        name: Name,
        *,
        strict: bool = True,
        allow_narrowing: bool = False,
        weights_only: bool = True,
        verify: bool = True,
        verify_first: bool = False,
        engine: EngineChoice | None = None,
        progress: ProgressChoice = False,
        on_loaded: OnLoaded | None = None,
        **pickle_load_args: Any,
    ) -> Any:
        """Loads straight into existing tensors; parameters as striate.load_into's."""
        begun = time.monotonic()
        torch_api.check_targets(state)
        options = LoadOptions("cpu", None, weights_only, None, verify, pickle_load_args)
        merge = Merge(state, strict=strict, allow_narrowing=allow_narrowing)
        if verify_first:
            self.verify(name).raise_if_damaged()
        with self._opened(name, engine, None) as source:
            filled = torch_api.load_into_from(merge, source, options, progress)
            torch_api.tell(on_loaded, source, begun)
        return filled

    def load_tensors(
        self,
        name: Name,
        names: Iterable[str],
        map_location: Any = None,
        *,
        verify: bool = True,
        engine: EngineChoice | None = None,
    ) -> dict[str, Any]:
        """Some tensors by their dotted names, reading only their chunks; as striate.load_tensors."""
        if isinstance(names, (str, bytes)):
            raise TypeError(f"names is a list of names, not one: [{names!r}]")
        with self._opened(name, engine, None) as source:
            return torch_api.tensors_from(source, list(names), map_location, verify)

    # ---- looking ---------------------------------------------------------

    def info(self, name: Name) -> CheckpointInfo:
        """What a checkpoint holds, and which members are there; no tensor is read."""
        with self._opened(name, "posix", None) as source:
            return torch_api.info_of(source)

    def verify(self, name: Name, *, progress: ProgressChoice = False) -> VolumeReport:
        """Reads every block, check blocks too, and reports member by member. Damage is reported, not raised."""
        with self._opened(name, None, None) as source:
            total = int(source.manifest.blocks.length.sum())
            with shown(progress, f"verifying {source.name}", total) as report:
                return verify_set(source, progress=report)

    def list(self) -> builtins.list[CheckpointEntry]:
        """All checkpoints of the volume by name, each with its newest committed generation."""
        chosen = self._engine("posix")
        entries = []
        with open_drives(self.drives, chosen) as drives:
            for name in names_on(drives, chosen):
                committed = scan(drives, name, chosen).committed
                if committed:
                    newest = committed[0]
                    entries.append(
                        CheckpointEntry(
                            os.fsdecode(name),
                            newest.uuid.hex(),
                            newest.sequence,
                            newest.sequence / 1e9,
                            len(newest.members),
                            newest.superblock.members,
                        )
                    )
        return entries

    # ---- repairing -------------------------------------------------------

    def repair(
        self,
        name: Name | None = None,
        *,
        replace: str | bytes | os.PathLike[Any] | None = None,
        progress: ProgressChoice = False,
    ) -> builtins.list[Repaired]:
        """Makes checkpoints whole again: all of them, or one. Restores missing and damaged members on their drives.

        replace: an empty directory, one of the volume's paths, that takes the place of a drive that is gone for good.
        A checkpoint that cannot be restored is left as it is, and raised at the end (DataLost) when the others are
        done. Can be interrupted and run again.
        """
        chosen = self._engine(None)
        done: builtins.list[Repaired] = []
        failures: builtins.list[StriateError] = []
        with open_drives(self.drives, chosen) as drives:
            if replace is not None:
                self._replace(drives, os.path.abspath(os.fsencode(replace)), chosen)
            with locked(drives, chosen):
                finish_others(drives, chosen)
            for raw in names_on(drives, chosen) if name is None else [check_name(name)]:
                try:
                    done.append(self._repair_one(drives, raw, chosen, progress))
                except StriateError as e:
                    failures.append(e)
            with locked(drives, chosen):
                finish_others(drives, chosen)
            troubles = drives.troubles()
        if troubles:
            warn(f"repair did without: {'; '.join(troubles)}.", VolumeWarning)
        if failures:
            raise failures[0]
        return [result for result in done if result.drives]

    def _replace(self, drives: DriveSet, directory: bytes, engine: Engine) -> None:
        drive = next((d for d in drives.drives if d.directory == directory), None)
        if drive is None:
            raise VolumeMismatch(
                f"{display(directory)} is not one of the volume's paths: put it in the place of the drive that is "
                "gone, then repair."
            )
        if drive.usable and drive.label is not None:
            return  # done before: an interrupted repair is run again with the same words
        if drive not in drives.bare:
            raise VolumeMismatch(
                f"{drive.path} cannot replace a drive: {drive.trouble or 'no drive is missing'}."
            )
        with locked(drives, engine):
            try:
                take_place(drives, drive, engine)
            except DriveError:
                raise
            except OSError as e:
                raise drive_error(
                    e.errno or 5, "write of the label", path=drive.path, drive=drive.path
                ) from None

    def _repair_one(
        self, drives: DriveSet, name: bytes, engine: Engine, progress: ProgressChoice
    ) -> Repaired:
        with open_generation(
            open_drives(self.drives, engine), name, engine, hang_timeout_s=self._layout.hang_timeout_s
        ) as opened:
            total = int(opened.manifest.blocks.length.sum())
            with shown(progress, f"repairing {display(name)}", total) as report:
                return repair_generation(opened, drives, engine, progress=report)

    # ---- helpers ---------------------------------------------------------

    def _engine(self, choice: EngineChoice | None) -> Engine:
        return Engine(self.engine if choice is None else choice, **self._tuning)

    @contextlib.contextmanager
    def _opened(
        self, name: Name, engine: EngineChoice | None, generation: str | int | None
    ) -> Iterator[MemberSet]:
        chosen = self._engine(engine)
        raw = check_name(name)
        with (
            open_generation(
                open_drives(self.drives, chosen),
                raw,
                chosen,
                generation=generation,
                hang_timeout_s=self._layout.hang_timeout_s,
            ) as source,
            torch_api.about(source.path),
        ):
            yield source


_SETTINGS = {
    "layout",
    "copies",
    "parity",
    "weights",
    "chunk_bytes",
    "on_drive_failure",
    "hang_timeout_s",
    "max_bandwidth",
    "max_drive_bandwidth",
    "idle_priority",
    "workers",
    "io_depth",
    "engine",
}


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _shape(layout: str, drives_count: int, copies: int | None, parity: int | None) -> Shape:
    if layout not in ("stripe", "mirror", "parity"):
        raise ValueError(f'layout is "stripe", "mirror" or "parity", not {layout!r}')
    if copies is not None and layout != "mirror":
        raise ValueError(f'copies= is of layout="mirror", not of {layout!r}')
    if parity is not None and layout != "parity":
        raise ValueError(f'parity= is of layout="parity", not of {layout!r}')
    if layout == "stripe":
        return Shape(1, 0)
    if layout == "mirror":
        count = 2 if copies is None else copies
        if count < 2:
            raise ValueError(f"a mirror has at least 2 copies, not {count!r}")
        if count > drives_count:
            raise VolumeMismatch(f"{count} copies need {count} drives, and {drives_count} are given.")
        return Shape(1, count - 1)
    checks = 1 if parity is None else parity
    if checks < 1:
        raise ValueError(f"parity is at least 1, not {checks!r}")
    if drives_count < checks + 2:
        raise VolumeMismatch(
            f"parity={checks} needs at least {checks + 2} drives, and {drives_count} are given (with "
            f"{checks + 1} a mirror does the same)."
        )
    return Shape(drives_count - checks, checks)

"""The transaction over the drives of a volume.

A generation is committed when any member bears its final name; before that,
every member it lists is durable, directory entries included. In order:

0. lock the drives; finish what others committed, sweep what they left;
1. temporaries, space, data, sync, without the volume's locks: who survived is now known;
2. lock again; manifest and superblock with the list of members; sync; a failure here makes a shorter list;
3. rename each, sync the directories. From the first rename on the save is committed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from striate import _engine, extents, groups, image, manifest
from striate.drive_set import Drive, DriveSet, each, give_up, locked, read_labels, write_labels
from striate.drives import Place, display, free_bytes
from striate.engines import Engine
from striate.errors import (
    DriveError,
    DriveFull,
    StriateError,
    VolumeMismatch,
    VolumeWarning,
    drive_error,
)
from striate.generations import look_at, scan
from striate.graph import Graph
from striate.leftovers import finish_others
from striate.member import fill_tables
from striate.member_writer import (
    make_parents,
    rename_into_place,
    sync_name,
    write_manifest,
    write_superblock,
)
from striate.notices import warn
from striate.placement import Blocks, place
from striate.plain import Generation, Temporary, addresses_of, memory_of, over_files, padded
from striate.superblock import SUPERBLOCK_BYTES, Superblock

__all__ = ["Layout", "MemberReport", "Written", "write_members"]

Progress = Callable[[int], None]

_NEVER_DEGRADES = (errno.ENOSPC, errno.EDQUOT)  # one full drive must not cost redundancy for ever


@dataclass(frozen=True)
class Layout:
    """How a save spreads its blocks, and what it does when a drive fails. Bandwidths in bytes/s, 0 for no limit."""

    shape: groups.Shape
    chunk_bytes: int
    weights: tuple[float, ...] | None = None
    on_drive_failure: Literal["degrade", "raise"] = "degrade"
    hang_timeout_s: float = 0.0
    max_bandwidth: int = 0
    drive_max_bandwidth: int = 0
    idle_priority: bool = False

    @property
    def engine_options(self) -> dict[str, Any]:
        return {
            "hang_timeout_s": self.hang_timeout_s,
            "max_bandwidth": self.max_bandwidth,
            "file_max_bandwidth": self.drive_max_bandwidth,
            "idle_priority": self.idle_priority,
        }


@dataclass(frozen=True)
class MemberReport:
    """One drive's part in a save. ``trouble``: why it holds no whole member, "" if it does."""

    drive: str
    file_bytes: int
    trouble: str = ""


@dataclass(frozen=True)
class Written:
    """What a save wrote."""

    generation: Generation
    table: image.Table
    tensors_count: int
    opaque_count: int
    members: tuple[MemberReport, ...]
    stats: _engine.Stats | None


@dataclass(eq=False)
class _Member:
    """One member to be. ``drive`` None: the drive is missing."""

    number: int
    uuid: bytes
    drive: Drive | None
    path: str
    temporary: Temporary | None = None
    trouble: str = ""
    hung: bool = False

    @property
    def alive(self) -> bool:
        return not self.trouble


@dataclass(eq=False)
class _Source:
    """The checkpoint laid out: where each block goes, and the memory that it is made of."""

    table: image.Table
    pieces: image.Pieces
    careful: NDArray[np.bool_]
    blocks: Blocks
    draft: extents.Draft
    uuid: bytes
    chunk_bytes: int
    stable: bool
    keep: list[object] = field(default_factory=list)
    digests: tuple[bytes, bytes] = (b"", b"")  # of the data and of the check blocks, once they are written

    def file_bytes(self, number: int) -> int:
        return self.manifest_offset(number) + self.draft.length

    def manifest_offset(self, number: int) -> int:
        return max(SUPERBLOCK_BYTES, int(self.blocks.member_bytes[number]))


# ---- save ------------------------------------------------------------------


def write_members(
    graph: Graph,
    name: bytes,
    drives: DriveSet,
    layout: Layout,
    engine: Engine,
    *,
    stable: bool = False,
    overwrite_foreign: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Writes one generation to the drives: durable and committed when this returns.

    Raises DriveError, VolumeMismatch or StriateError with the earlier generation whole and nothing left beside it.
    With a layout that has check blocks a drive that is missing or fails is done without and warned of, up to as many
    as there are check blocks in a group.
    """
    with locked(drives, engine):
        read_labels(drives, engine)
        _refuse_strangers(drives, name)
        write_labels(drives, engine)
        _refuse_foreign(drives, name, engine, overwrite_foreign)
        finish_others(drives, engine)
        earlier = _earlier(drives, name)
        attempt = _Attempt(drives, name, layout, engine, earlier)
        attempt.make_parents()
    try:
        source = _lay_out(graph, attempt.members, layout, stable)
        attempt.create(source)
        stats = attempt.write_data(source, progress)
        with locked(drives, engine):
            _refuse_foreign(drives, name, engine, overwrite_foreign)
            generation = Generation(
                source.uuid, Generation.next(scan(drives, name, engine).largest_sequence).sequence
            )
            attempt.commit(source, generation)
            attempt.close()
            finish_others(drives, engine)
            attempt.look_at_pending()
    finally:
        attempt.close()
    attempt.tell()
    named = sum(entry.named for entry in graph.storages)
    return Written(
        generation=generation,
        table=source.table,
        tensors_count=len(graph.storages),
        opaque_count=len(graph.storages) - named,
        members=tuple(
            MemberReport(m.path, source.file_bytes(m.number) if m.alive else 0, m.trouble)
            for m in attempt.members
        ),
        stats=stats,
    )


def _lay_out(graph: Graph, members: Sequence[_Member], layout: Layout, stable: bool) -> _Source:
    uuid = Generation.next(0).uuid
    packed = None if graph.pickle is None else manifest.pack_graph(graph.pickle)[0]
    table = image.lay_out(graph.storages)
    keep = memory_of(graph)
    pieces = image.gather(table, addresses_of(graph, keep), layout.chunk_bytes)
    blocks = place(pieces.job_length, layout.shape, len(members), weights=layout.weights)
    draft = extents.encode(
        table,
        uuid=uuid,
        chunk_bytes=layout.chunk_bytes,
        ties=graph.ties,
        graph=packed,
        graph_bytes=None if graph.pickle is None else len(graph.pickle),
        blocks=blocks,
        drives=[(m.uuid, m.drive.directory if m.drive else os.fsencode(m.path)) for m in members],
    )
    return _Source(table, pieces, over_files(pieces), blocks, draft, uuid, layout.chunk_bytes, stable, keep)


def _earlier(drives: DriveSet, name: bytes) -> str:
    for drive in drives.usable:
        with contextlib.suppress(OSError):
            os.stat(name, dir_fd=drive.dirfd, follow_symlinks=False)
            return f"Nothing was committed; the earlier {display(name)} is intact."
    return "Nothing was committed."


def _refuse_strangers(drives: DriveSet, name: bytes) -> None:
    """A volume begins, and grows, with all the drives given: one that is not there would silently not be in it."""
    for drive in drives.strangers:
        what = "become a part of the volume" if drives.expected else "be a part of a new volume"
        raise drive_error(
            (drive.error.errno if drive.error else None) or errno.ENODEV,
            "save",
            path=display(name),
            drive=drive.path,
            state="Nothing was written.",
            advice=f"The drive cannot {what} as it is: mount it, or leave it out. It said: {drive.trouble}",
        )


def _refuse_foreign(drives: DriveSet, name: bytes, engine: Engine, allowed: bool) -> None:
    """A generation that reaches beyond these drives must not lose a member to this save."""
    for drive in drives.usable:
        try:
            found = look_at(drive, name, engine)
        except (StriateError, OSError):
            continue  # damaged: replacing it is the way to have a whole one again
        if found is None or found.volume == drives.volume or allowed:
            continue
        raise VolumeMismatch(
            f"save refused: {drive.path}/{display(name)} belongs to a checkpoint of another volume "
            f"({found.volume.hex()[:8]}, {found.members} members), which would lose a member. Nothing was written. "
            "Save under another name, delete it with that volume, or pass overwrite_foreign=True."
        )


class _Attempt:
    """One save under way. Owns its temporaries until commit or close."""

    def __init__(self, drives: DriveSet, name: bytes, layout: Layout, engine: Engine, earlier: str) -> None:
        self.drives = drives
        self.name = name
        self.layout = layout
        self.engine = engine
        self.earlier = earlier
        self.committing = False
        self.notes: list[str] = []
        self.uuid = b""
        self.pending: list[_Member] = []
        self.members = [
            _Member(number, slot.uuid, slot.drive, slot.path, trouble=slot.trouble)
            for number, slot in enumerate(drives.slots())
        ]
        self._check_members()

    def _check_members(self) -> None:
        shape, count = self.layout.shape, len(self.members)
        if not self.drives.usable:
            self._refuse(None)
        if shape.width > count:
            raise VolumeMismatch(
                f"save refused: groups of {shape.data} data and {shape.checks} check blocks need {shape.width} drives, "
                f"and the volume has {count}. Nothing was written. Add drives, or ask for less."
            )
        missing = [member for member in self.members if member.drive is None]
        if len(missing) > self._losses_allowed:
            self._refuse(missing[0])

    def _refuse(self, missing: _Member | None) -> None:
        troubles = self.drives.troubles()
        error = next((drive.error for drive in self.drives.drives if drive.error is not None), None)
        code = error.errno if error is not None and error.errno else errno.ENODEV
        shape = self.layout.shape
        kind = "A stripe" if not shape.checks else f"A layout with {shape.checks} check block(s) a group"
        if shape.checks and self.layout.on_drive_failure == "raise":
            kind = 'With on_drive_failure="raise" the volume'
        raise drive_error(
            code,
            "save",
            path=display(self.name),
            drive=missing.path if missing else self.drives.drives[0].path,
            state=f"{self.earlier} {'; '.join(troubles)}.",
            advice=(
                f"{kind} cannot be saved to without {'it' if len(troubles) == 1 else 'them'}: mount the drive, "
                "replace it (repair(replace=...)), or save elsewhere."
            ),
        )

    @property
    def _losses_allowed(self) -> int:
        return self.layout.shape.checks if self.layout.on_drive_failure == "degrade" else 0

    @property
    def alive(self) -> list[_Member]:
        return [member for member in self.members if member.alive]

    def _on_each(self, doing: str, do: Callable[[_Member], None]) -> None:
        """Does a step for all members that are alive, at once; one that fails is lost, or ends the save."""
        for outcome in each(self.alive, do, self.layout.hang_timeout_s or None):
            member = outcome.item
            assert member.drive is not None
            if outcome.hung:
                self._hung(member, doing)
            elif outcome.error is not None:
                self.lose(member, self._worded(member, doing, outcome.error))

    def _worded(self, member: _Member, doing: str, error: Exception) -> DriveError:
        if isinstance(error, DriveError):
            return error
        assert isinstance(error, OSError)
        return drive_error(
            error.errno or errno.EIO,
            doing,
            path=f"{member.path}/{display(self.name)}",
            drive=member.path,
            state=self.earlier,
        )

    def _hung(self, member: _Member, doing: str) -> None:
        assert member.drive is not None
        member.hung = True
        if member.temporary is not None:
            # Closing and removing would wait for the drive, too.
            member.temporary.fd, member.temporary.name = -1, b""
        self.lose(member, give_up(member.drive, doing, self.layout.hang_timeout_s))

    def lose(self, member: _Member, error: DriveError) -> None:
        """Goes on without a member, or raises why that cannot be."""
        member.trouble = str(error).replace(f" {self.earlier}", "")
        if member.drive is not None:
            member.drive.fail(error)
        if member.temporary is not None and not member.hung:
            member.temporary.abort()
        losses = len(self.members) - len(self.alive)
        if losses > self._losses_allowed or error.errno in _NEVER_DEGRADES:
            raise error

    # ---- steps -----------------------------------------------------------

    def make_parents(self) -> None:
        """Directories that a name with slashes stands in."""

        def make(member: _Member) -> None:
            assert member.drive is not None
            make_parents(member.drive, self.name, self.engine)

        self._on_each("mkdir", make)

    def create(self, source: _Source) -> None:
        existing = self._existing()

        def make(member: _Member) -> None:
            assert member.drive is not None
            location = Place(member.drive.directory, self.name, existing)
            temporary = Temporary(self.engine, member.drive.dirfd, location, self.earlier)
            member.temporary = temporary
            temporary.create(source.uuid)
            temporary.take_mode()
            temporary.allocate(padded(source.file_bytes(member.number)))

        self._on_each("create", make)

    def _existing(self) -> os.stat_result | None:
        """What stands under the name on the first drive that has something: modes are the same on all."""
        for member in self.alive:
            assert member.drive is not None
            try:
                found = os.stat(self.name, dir_fd=member.drive.dirfd, follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(found.st_mode):
                raise drive_error(
                    errno.EISDIR,
                    "save",
                    path=f"{member.path}/{display(self.name)}",
                    state="Nothing was written.",
                )
            return found if stat.S_ISREG(found.st_mode) else None
        return None

    def write_data(self, source: _Source, progress: Progress | None) -> _engine.Stats | None:
        stats = None
        if len(source.pieces.first):
            results = None
            while results is None:
                results = self._run_data(source, progress)
            rows, checks = data_rows(source.blocks)
            source.digests = (results["digest"][rows].tobytes(), results["digest"][checks].tobytes())
            stats = self.engine.stats[-1]

        def sync(member: _Member) -> None:
            assert member.temporary is not None
            with member.temporary.step("sync"):
                self.engine.io.sync(member.temporary.fd)

        self._on_each("sync", sync)
        return stats

    def _files(self) -> list[_engine.File]:
        return [
            m.temporary.file() if m.alive and m.temporary is not None else _engine.File(-1)
            for m in self.members
        ]

    def _run_data(self, source: _Source, progress: Progress | None) -> NDArray[np.void] | None:
        """The run that writes all blocks. None: a drive hung, and all is to be done again without it."""
        jobs, extents_table, group_table, matrix = write_tables(source)
        try:
            results = self.engine.run(
                "write",
                self._files(),
                jobs,
                extents_table,
                drives=[member.path for member in self.members],
                groups=group_table,
                matrix=matrix,
                keep_going=self._losses_allowed > 0,
                progress=progress,
                **self.layout.engine_options,
            )
        except _engine.RunError as e:
            if e.code == _engine.EHUNG:
                self._hung(self.members[e.file], "write")
                return None
            # A drive that the save may not lose, or memory that could not be read: no drive is at fault then.
            raise self._write_error(self.members[e.file], e.code, e.offset) from None
        for member in self.alive:
            mine = (jobs["file"] == member.number) & (results["code"] != 0)
            failed = mine & (results["code"] != _engine.ESKIPPED)
            if failed.any():
                at = int(np.flatnonzero(failed)[0])
                code, offset = int(results["code"][at]), int(jobs["offset"][at])
                self.lose(member, self._write_error(member, code, offset))
        return results

    def _write_error(self, member: _Member, code: int, offset: int) -> DriveError:
        if not -4096 < code < 0:
            raise StriateError(
                f"write failed: {member.path}/{display(self.name)}, offset {offset}: engine code {code}. "
                f"{self.earlier} Please report this."
            )
        error = drive_error(
            -code,
            "write",
            path=f"{member.path}/{display(self.name)}",
            drive=member.path,
            offset=offset,
            state=self.earlier,
        )
        if isinstance(error, DriveFull) and member.drive is not None:
            error.free = free_bytes(member.drive.dirfd)
        return error

    def commit(self, source: _Source, generation: Generation) -> None:
        """Steps 3 and 4; the locks are held. Returns when the generation is committed and its names are synced."""
        self.uuid = generation.uuid
        raw = source.draft.finish(*source.digests)
        self._seal(source, generation, raw)
        self.committing = True
        self._rename_all()

    def _seal(self, source: _Source, generation: Generation, raw: bytes) -> None:
        digest = extents.manifest_digest(raw, source.uuid)
        listed: list[_Member] = []
        while listed != self.alive:
            listed = self.alive

            def seal(member: _Member, listed: list[_Member] = listed) -> None:
                assert member.temporary is not None
                write_manifest(member.temporary, raw, source.manifest_offset(member.number), self.engine)
                block = self._superblock(source, generation, member, digest, listed)
                write_superblock(member.temporary, block, self.engine)

            # One that fails here is on the list of the others, who get a shorter one before any rename.
            self._on_each("write", seal)

    def _superblock(
        self,
        source: _Source,
        generation: Generation,
        member: _Member,
        digest: bytes,
        listed: Sequence[_Member],
    ) -> Superblock:
        return Superblock(
            uuid=generation.uuid,
            sequence=generation.sequence,
            volume=self.drives.volume,
            drive=member.uuid,
            member=member.number,
            members=len(self.members),
            shape=self.layout.shape,
            chunk_bytes=source.chunk_bytes,
            manifest_offset=source.manifest_offset(member.number),
            manifest_bytes=source.draft.length,
            manifest_digest=digest,
            whole=frozenset(m.number for m in listed),
            name=self.name,
        )

    def _rename_all(self) -> None:
        renamed: list[_Member] = []

        def rename(member: _Member) -> None:
            assert member.drive is not None and member.temporary is not None
            rename_into_place(member.drive, member.temporary.name, self.name, self.engine)
            renamed.append(member)
            member.temporary.name = b""

        outcomes = each(self.alive, rename, self.layout.hang_timeout_s or None)
        failures: list[tuple[_Member, DriveError]] = []
        for outcome in outcomes:
            member = outcome.item
            assert member.drive is not None and member.temporary is not None
            if outcome.hung:
                member.hung = True
                member.temporary.fd, member.temporary.name = -1, b""
                failures.append((member, give_up(member.drive, "rename", self.layout.hang_timeout_s)))
            elif outcome.error is not None:
                failures.append((member, self._worded(member, "rename", outcome.error)))
        if not renamed and failures:
            self.committing = any(member.hung for member, _ in failures)
            raise failures[0][1]
        for member, error in failures:
            assert member.temporary is not None
            member.temporary.name = b""  # it stays, a member like any other
            self.pending.append(member)
            self.notes.append(
                f"drive {member.path}: the rename to {display(self.name)} is pending ({error.strerror}): the next "
                "save, or repair, finishes it"
            )
        self._sync_names(renamed)

    def _sync_names(self, renamed: Sequence[_Member]) -> None:
        def sync(member: _Member) -> None:
            assert member.drive is not None
            sync_name(member.drive, self.name, self.engine)

        for outcome in each(renamed, sync, self.layout.hang_timeout_s or None):
            if outcome.hung or outcome.error is not None:
                member = outcome.item
                assert member.drive is not None
                if outcome.hung:
                    member.hung = True
                    give_up(member.drive, "sync of the directory", self.layout.hang_timeout_s)
                self.notes.append(
                    f"drive {member.path}: the sync of the directory failed "
                    f"({outcome.error or 'no answer'}): the new name may not survive a power cut there"
                )

    def close(self) -> None:
        """Removes what was begun and not committed. Can be called again."""
        for member in self.members:
            if member.temporary is None or member.hung:
                continue
            if self.committing:
                member.temporary.close()
            else:
                member.temporary.abort()

    def look_at_pending(self) -> None:
        """A rename that failed once may have been finished since: then there is nothing to tell of it."""
        for member in self.pending:
            assert member.drive is not None
            if member.hung or not member.drive.usable:
                continue
            with contextlib.suppress(StriateError, OSError):
                there = look_at(member.drive, self.name, self.engine)
                if there is not None and there.uuid == self.uuid:
                    about = f"drive {member.path}: the rename"
                    self.notes = [note for note in self.notes if not note.startswith(about)]

    def tell(self) -> None:
        """One warning for a save that is committed but not as it should be."""
        lost = [f"drive {m.path}: {m.trouble}" for m in self.members if not m.alive]
        if lost:
            self.notes.insert(
                0,
                f"{len(lost)} of {len(self.members)} members were not written: {'; '.join(lost)}. It can be loaded, "
                f"and {'has no redundancy left' if len(lost) == self.layout.shape.checks else 'has less redundancy'} "
                f"until repair({display(self.name)!r})",
            )
        if self.notes:
            warn(f"{display(self.name)} was saved, but degraded: {'. '.join(self.notes)}.", VolumeWarning)


# ---- tables ----------------------------------------------------------------


def data_rows(blocks: Blocks) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows in the job table of the data blocks and of the check blocks: group by group, data before checks."""
    shape, groups_count = blocks.shape, len(blocks.groups)
    count = len(blocks.offset) - groups_count * shape.checks
    chunk = np.arange(count)
    data = chunk + chunk // shape.data * shape.checks
    ends = np.minimum((np.arange(groups_count) + 1) * shape.data, count)
    first = ends + np.arange(groups_count) * shape.checks
    checks = (first[:, None] + np.arange(shape.checks)).reshape(-1)
    return data, checks.astype(np.int64)


def write_tables(
    source: _Source,
) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.void] | None, bytes]:
    """Jobs, extents, groups and the matrix of a save; the file of a job is the number of its member."""
    blocks, shape = source.blocks, source.blocks.shape
    data, checks = data_rows(blocks)
    plain_jobs, table = fill_tables(source.pieces, source.uuid, data_offset=0)
    jobs = np.zeros(len(blocks.offset), _engine.JOB_DTYPE)
    jobs[data] = plain_jobs
    order = np.concatenate([data, checks])
    jobs["offset"][order], jobs["length"][order] = blocks.offset, blocks.length
    jobs["file"][order] = blocks.member
    jobs["flags"] = _engine.JOB_CHECKSUM | (_engine.JOB_STABLE if source.stable else 0)
    jobs["flags"][data] |= np.where(source.careful, _engine.JOB_CAREFUL, 0).astype(np.uint32)
    if not shape.checks:
        return jobs, table, None, b""
    if shape.is_copies:
        jobs["seed"][checks] = np.repeat(jobs["seed"][data], shape.checks)
    else:
        jobs["seed"][checks] = _engine.block_seeds(source.uuid, extents.CHECK_INDEX_FIRST, len(checks))
    matrix = groups.matrix(shape)
    last = int(blocks.groups[-1])
    group_table = np.zeros(len(blocks.groups), _engine.GROUP_DTYPE)
    group_table["job_first"] = data[:: shape.data]
    group_table["inputs_count"] = blocks.groups
    group_table["outputs_count"] = shape.checks
    if last != shape.data:
        group_table["matrix_first"][-1] = matrix.size
    return jobs, table, group_table, matrix.tobytes() + matrix[:, :last].tobytes()

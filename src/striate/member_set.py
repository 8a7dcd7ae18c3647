"""The members of one generation, opened together for reading.

Reads blocks from wherever they are whole: from their own place, from a copy, or
computed from the rest of their group. What is wrong on the way costs the
recovery of that block only, and is told once, drive by drive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from striate import _engine, groups, image
from striate.drive_set import Drive, DriveSet, give_up, open_beneath
from striate.drives import display
from striate.engines import Engine
from striate.errors import (
    CorruptCheckpoint,
    DataLost,
    FormatError,
    MissingMember,
    StriateError,
    VolumeWarning,
    drive_error,
)
from striate.extents import CHECK_INDEX_FIRST, MemberManifest, decode
from striate.generations import Found, Generation
from striate.member import READ_INTO_ADVICE, engine_file
from striate.notices import warn
from striate.superblock import SUPERBLOCK_BYTES, Superblock
from striate.superblock import decode as decode_superblock

__all__ = ["MemberMoved", "MemberSet", "OpenMember", "Trouble", "open_member"]

Progress = Callable[[int], None]

_NAMES_MOST = 4
_BUDGET_BYTES = 256 << 20  # of the engine's slots, when nothing else is said


@dataclass
class Trouble:
    """What is wrong with one member: ``missing`` says why it is not there at all, else its manifest or blocks failed.

    ``absent``: it was not found, and may be on a drive that is not here.
    """

    drive: str
    missing: str = ""
    absent: bool = False
    manifest: str = ""
    blocks: int = 0
    first: str = ""

    def __str__(self) -> str:
        if self.missing:
            return self.missing
        blocks = f"{self.blocks} block(s) could not be used, the first {self.first}" if self.blocks else ""
        return "; ".join(part for part in (self.manifest, blocks) if part)


@dataclass(eq=False)
class OpenMember:
    """One open member. Owns its descriptor."""

    found: Found
    fd: int
    file: _engine.File


@dataclass(eq=False)
class _Tables:
    """Job, group and copy tables under construction, in rows of Python."""

    rows: list[int] = field(default_factory=list)  # block row of each job
    wants: list[int] = field(default_factory=list)  # which of the wanted blocks it fills, -1: none
    outputs: list[bool] = field(default_factory=list)
    groups: list[tuple[int, int, int, int]] = field(default_factory=list)
    matrix: bytearray = field(default_factory=bytearray)
    known: dict[bytes, int] = field(default_factory=dict)

    def matrix_at(self, coefficients: NDArray[np.uint8]) -> int:
        raw = coefficients.tobytes()
        if raw not in self.known:
            self.known[raw] = len(self.matrix)
            self.matrix += raw
        return self.known[raw]


class MemberSet:
    """An open generation; a context manager. ``manifest`` is what any whole member says."""

    def __init__(
        self,
        path: str,
        generation: Generation,
        drives: DriveSet,
        engine: Engine,
        *,
        hang_timeout_s: float = 0.0,
    ) -> None:
        self.path = path
        self.generation = generation
        self.drives = drives
        self.engine = engine
        self.hang_timeout_s = hang_timeout_s
        self.members: dict[int, OpenMember] = {}
        self.troubles: dict[int, Trouble] = {}
        self._manifest: MemberManifest | None = None
        self.manifest_raw = b""
        self._like: Superblock | None = None
        self._bad: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._told = False
        self._unreadable: dict[Drive, str] = {}

    @property
    def manifest(self) -> MemberManifest:
        assert self._manifest is not None
        return self._manifest

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def file_bytes(self) -> int:
        """All members found, together."""
        return sum(os.fstat(member.fd).st_size for member in self.members.values())

    def __enter__(self) -> MemberSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.close_members()
        self.drives.close()

    def close_members(self) -> None:
        for member in self.members.values():
            # A drive that hangs makes close wait, too: its descriptor stays.
            if member.found.drive.usable:
                with contextlib.suppress(OSError):
                    self.engine.io.close(member.fd)
        self.members.clear()

    # ---- opening ---------------------------------------------------------

    def open(self, notes: dict[Drive, str]) -> None:
        """Opens every member found and reads the manifest of the first that is whole.

        ``notes``: drives whose member could not be told. Raises DataLost if no manifest is whole, MemberMoved when a
        save replaced a member since it was found.
        """
        self._unreadable = notes
        for number, found in sorted(self.generation.members.items()):
            try:
                self.members[number] = open_member(found, self.engine)
            except MemberMoved:
                raise
            except StriateError as e:
                self.troubles[number] = Trouble(found.drive.path, missing=str(e))
        for number, member in list(self.members.items()):
            try:
                raw = self._manifest_bytes(member)
                if self._manifest is None:
                    self._manifest = decode(raw, member.found.superblock, path=member.found.path)
                    self.manifest_raw = raw
                    self._like = member.found.superblock
            except StriateError as e:
                # Its blocks may be whole, and another member's manifest says where they are.
                self.troubles[number] = Trouble(member.found.drive.path, manifest=str(e))
        if self._manifest is None:
            reasons = [f"{t.drive}: {t}" for t in self.troubles.values()]
            raise DataLost(
                f"{self.path} cannot be read: no member has a whole manifest. {'; '.join(reasons)}. Load an earlier "
                "checkpoint.",
                path=self.path,
                drives=reasons,
            )
        self._drop_strangers()
        blocks = self._manifest.blocks
        self._bad = np.zeros(len(blocks.offset), np.bool_)
        self._note_missing(notes)

    def _drop_strangers(self) -> None:
        """A superblock that tells of another manifest is none of this generation, whatever uuid it bears."""
        like = self.superblock
        for number, member in list(self.members.items()):
            if _facts(member.found.superblock) != _facts(like):
                self._drop(number, "its superblock disagrees with the other members'")

    @property
    def superblock(self) -> Superblock:
        """That of the member whose manifest was taken, which all others are like."""
        assert self._like is not None
        return self._like

    def _manifest_bytes(self, member: OpenMember) -> bytes:
        block = member.found.superblock
        try:
            raw = self.engine.io.read(member.fd, block.manifest_bytes, block.manifest_offset)
        except EOFError:
            raise CorruptCheckpoint(
                f"{member.found.path} is cut short: its manifest should end at byte "
                f"{block.manifest_offset + block.manifest_bytes:,}.",
                path=member.found.path,
                region="manifest",
            ) from None
        except OSError as e:
            raise drive_error(
                e.errno or errno.EIO,
                "read of the manifest",
                path=member.found.path,
                drive=member.found.drive.path,
                offset=block.manifest_offset,
            ) from None
        # The digest alone tells a whole manifest; they are all the same, and one is decoded.
        seed = int(_engine.block_seeds(block.uuid, (1 << 64) - 1, 1)[0])
        if _engine.checksum(raw, seed) != block.manifest_digest:
            raise CorruptCheckpoint(
                f"{member.found.path} is damaged: its manifest, at offset {block.manifest_offset}, is not what was "
                "written.",
                path=member.found.path,
                region="manifest",
                drive=member.found.drive.path,
                offset=block.manifest_offset,
            )
        return raw

    def _note_missing(self, notes: dict[Drive, str]) -> None:
        by_uuid = {drive.uuid: drive for drive in self.drives.drives if drive.uuid}
        by_path = {drive.directory: drive for drive in self.drives.drives}
        for number, (uuid, path) in enumerate(self.manifest.drives):
            if number in self.members or number in self.troubles:
                continue
            drive = by_uuid.get(uuid) or by_path.get(path)
            reason = ""
            if drive is not None:
                reason = notes.get(drive, "") or drive.trouble
            self.troubles[number] = Trouble(
                drive.path if drive else display(path),
                missing=reason or "its member was not found",
                absent=drive is None or not drive.usable or not reason,
            )

    def _drop(self, number: int, reason: str) -> None:
        member = self.members.pop(number)
        self.troubles[number] = Trouble(member.found.drive.path, missing=reason)
        if member.found.drive.usable:
            with contextlib.suppress(OSError):
                self.engine.io.close(member.fd)

    # ---- reading ---------------------------------------------------------

    def gather(
        self, addresses: NDArray[np.uint64], *, chunks: NDArray[np.int64] | None = None
    ) -> image.Pieces:
        """The pieces of the data, for read_chunks. Address 0: checked and dropped."""
        return image.gather(self.manifest.table, addresses, self.manifest.chunk_bytes, chunks=chunks)

    def chunks_of(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return image.chunks_of(self.manifest.table, indices, self.manifest.chunk_bytes)

    def read_chunks(
        self,
        pieces: image.Pieces,
        *,
        verify: bool,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> NDArray[np.int64]:
        """Reads chunks into the memory that the pieces name; those that are lost, which only ``keep_going`` returns.

        Raises DataLost (MissingMember when members are missing) with the tensors that are gone.
        """
        lost = self.read_blocks(pieces.chunk, pieces, verify=verify, keep_going=keep_going, progress=progress)
        if len(lost) and not keep_going:
            raise self.data_lost(lost)
        self.tell(whole=not len(lost))
        return lost

    def read_blocks(
        self,
        rows: NDArray[np.int64],
        pieces: image.Pieces,
        *,
        verify: bool,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> NDArray[np.int64]:
        """Reads blocks by their rows in the manifest into the memory that the pieces name; the rows that are lost.

        Without ``keep_going`` nothing more is read, and no memory overwritten, once one is known to be lost.
        """
        pending = np.arange(len(rows))
        lost: list[int] = []
        hopeless: set[int] = set()
        done_bytes = 0
        while len(pending):
            tables, gone = self._plan(rows, pending, hopeless)
            lost.extend(gone)
            if not tables.rows or (lost and not keep_going):
                break
            base = done_bytes
            report = None if progress is None else lambda done, base=base: progress(base + done)
            failed = self._run(tables, pieces, verify, report, hopeless)
            if failed is None:  # a drive hung: all that was pending is read again without it
                continue
            left = np.array(sorted(failed), np.int64)
            done_bytes += int(pieces.job_length[pending].sum() - pieces.job_length[left].sum())
            pending = left
        return np.array(sorted(lost), np.int64)

    def read_in_place(
        self, rows: NDArray[np.int64], *, progress: Progress | None = None
    ) -> list[tuple[int, str, str | None, str | None]]:
        """Reads blocks from their own places and keeps nothing: (row, reason, digest wanted, found) of each bad one."""
        lengths = self.manifest.blocks.length[rows].astype(np.int64)
        nothing = image.Pieces(
            first=np.arange(len(rows), dtype=np.uint64),
            count=np.ones(len(rows), np.uint32),
            offset=np.zeros(len(rows), np.int64),
            job_length=lengths,
            chunk=rows,
            addr=np.zeros(len(rows), np.uint64),
            length=lengths.astype(np.uint64),
        )
        tables = _Tables(rows=rows.tolist(), wants=list(range(len(rows))), outputs=[False] * len(rows))
        ran = None
        while ran is None:
            kept = [
                at
                for at, row in enumerate(tables.rows)
                if int(self.manifest.blocks.member[row]) in self.members
            ]
            if not kept:
                return []
            tables.rows, tables.wants = [tables.rows[at] for at in kept], [tables.wants[at] for at in kept]
            tables.outputs = [False] * len(kept)
            ran = self._results(tables, nothing, True, progress, copies=False)
        self._look(tables, *ran, set())
        _, results, _ = ran
        found: list[tuple[int, str, str | None, str | None]] = []
        for at in np.flatnonzero(results["code"]).tolist():
            row, code = tables.rows[at], int(results["code"][at])
            wanted = seen = None
            if code == _engine.ECORRUPT:
                wanted = self.manifest.all_digests[16 * row : 16 * row + 16].hex()
                seen = results["digest"][at].tobytes().hex()
            found.append((row, reason_of(code), wanted, seen))
        return found

    def unrecoverable(self) -> NDArray[np.int64]:
        """Rows of the data blocks that can neither be read nor recovered, as far as is known by now."""
        blocks = self.manifest.blocks
        here = np.zeros(len(self.manifest.drives), np.bool_)
        here[list(self.members)] = True
        available = here[blocks.member] & ~self._bad
        count, checks = len(self.manifest.digests) // 16, blocks.shape.checks
        if not count:
            return np.zeros(0, np.int64)
        whole = np.add.reduceat(available[:count].astype(np.int64), np.arange(0, count, blocks.shape.data))
        if checks:
            whole += available[count:].reshape(-1, checks).sum(axis=1)
        needed = blocks.groups.astype(np.int64)
        return np.flatnonzero(~available[:count] & np.repeat(whole < needed, needed))

    def _available(self, row: int) -> bool:
        return int(self.manifest.blocks.member[row]) in self.members and not self._bad[row]

    def _plan(
        self, rows: NDArray[np.int64], pending: NDArray[np.int64], hopeless: set[int]
    ) -> tuple[_Tables, list[int]]:
        """Which blocks to read for those that are wanted, and the rows that cannot be had any more."""
        blocks = self.manifest.blocks
        here = np.zeros(len(self.manifest.drives), np.bool_)
        here[list(self.members)] = True
        tables = _Tables()
        lost: list[int] = []
        wanted_rows = rows[pending]
        available = here[blocks.member[wanted_rows]] & ~self._bad[wanted_rows]
        if blocks.shape.is_copies or available.all():
            usable = available
            if blocks.shape.is_copies:
                usable = np.array([bool(self._copies(int(row))) for row in wanted_rows], np.bool_)
            tables.rows = wanted_rows[usable].tolist()
            tables.wants = pending[usable].tolist()
            tables.outputs = [False] * len(tables.rows)
            return tables, wanted_rows[~usable].tolist()
        return self._plan_groups(tables, lost, wanted_rows, pending, hopeless)

    def _copies(self, row: int) -> list[int]:
        """The rows that hold the same bytes and can be read, its own first if it is one of them."""
        blocks, count = self.manifest.blocks, len(self.manifest.digests) // 16
        group = row if row < count else (row - count) // blocks.shape.checks
        same = [group, *range(count + group * blocks.shape.checks, count + (group + 1) * blocks.shape.checks)]
        same.sort(key=lambda other: other != row)
        return [other for other in same if self._available(other)]

    def _plan_groups(
        self,
        tables: _Tables,
        lost: list[int],
        wanted_rows: NDArray[np.int64],
        pending: NDArray[np.int64],
        hopeless: set[int],
    ) -> tuple[_Tables, list[int]]:
        by_group: dict[int, dict[int, int]] = {}
        for row, want in zip(wanted_rows.tolist(), pending.tolist(), strict=True):
            by_group.setdefault(self._group_of(row), {})[row] = want
        for group, wants in by_group.items():
            inputs, outputs = self._recovery_of(group, wants, hopeless, lost)
            for row, want in wants.items():
                if row not in inputs and row not in outputs and self._available(row):
                    tables.groups.append((len(tables.rows), 0, 1, 0))
                    tables.rows.append(row)
                    tables.wants.append(want)
                    tables.outputs.append(False)
            if not outputs:
                continue
            coefficients = groups.recovery(
                self.manifest.blocks.shape,
                [self._number_in_group(row) for row in inputs],
                [self._number_in_group(row) for row in outputs],
                int(self.manifest.blocks.groups[group]),
            )
            at = tables.matrix_at(coefficients)
            tables.groups.append((len(tables.rows), at, len(inputs), len(outputs)))
            for row in (*inputs, *outputs):
                tables.rows.append(row)
                tables.wants.append(wants.get(row, -1))
            tables.outputs += [False] * len(inputs) + [True] * len(outputs)
        return tables, lost

    def _recovery_of(
        self, group: int, wants: dict[int, int], hopeless: set[int], lost: list[int]
    ) -> tuple[list[int], list[int]]:
        """Rows to read and rows to compute for what is wanted of a group; none if nothing must be computed."""
        absent = [row for row in wants if not self._available(row)]
        if not absent:
            return [], []
        present = [row for row in self._rows_of(group) if self._available(row)]
        needed = int(self.manifest.blocks.groups[group])
        if len(present) < needed:
            lost.extend(absent)
            return [], []
        lost.extend(row for row in absent if row in hopeless)
        return present[:needed], [row for row in absent if row not in hopeless]

    def _group_of(self, row: int) -> int:
        shape, count = self.manifest.blocks.shape, len(self.manifest.digests) // 16
        return row // shape.data if row < count else (row - count) // shape.checks

    def _rows_of(self, group: int) -> list[int]:
        shape, count = self.manifest.blocks.shape, len(self.manifest.digests) // 16
        first = group * shape.data
        data = range(first, first + int(self.manifest.blocks.groups[group]))
        return [*data, *range(count + group * shape.checks, count + (group + 1) * shape.checks)]

    def _number_in_group(self, row: int) -> int:
        shape, count = self.manifest.blocks.shape, len(self.manifest.digests) // 16
        return row % shape.data if row < count else shape.data + (row - count) % shape.checks

    def _run(
        self,
        tables: _Tables,
        pieces: image.Pieces,
        verify: bool,
        progress: Progress | None,
        hopeless: set[int],
    ) -> set[int] | None:
        """One run of the engine; which of the wanted blocks it did not give. None: a drive hung, and is dropped."""
        ran = self._results(tables, pieces, verify, progress)
        return None if ran is None else self._look(tables, *ran, hopeless)

    def _results(
        self,
        tables: _Tables,
        pieces: image.Pieces,
        verify: bool,
        progress: Progress | None,
        *,
        copies: bool = True,
    ) -> tuple[NDArray[np.int64], NDArray[np.void], list[list[int]]] | None:
        numbers = sorted(self.members)
        file_of = np.full(len(self.manifest.drives), -1, np.int64)
        file_of[numbers] = np.arange(len(numbers))
        rows = np.array(tables.rows, np.int64)
        jobs, extents = self._jobs(tables, rows, pieces, file_of, verify)
        places = [[row] for row in tables.rows]
        copy_table = None
        if copies and self.manifest.blocks.shape.is_copies:
            copy_table, places = self._copy_table(jobs, rows, file_of)
        group_table = None
        if tables.groups:
            group_table = np.array(tables.groups, _engine.GROUP_DTYPE)
        try:
            results = self.engine.run(
                "read",
                [self.members[number].file for number in numbers],
                jobs,
                extents,
                drives=[self.members[number].found.drive.path for number in numbers],
                groups=group_table,
                matrix=bytes(tables.matrix),
                copies=copy_table,
                keep_going=True,
                progress=progress,
                hang_timeout_s=self.hang_timeout_s,
                budget_bytes=self._budget_bytes(tables),
            )
        except _engine.RunError as e:
            if e.code != _engine.EHUNG:
                raise StriateError(
                    f"read failed: {self.path}: engine code {e.code}. Please report this."
                ) from e
            member = self.members.pop(numbers[e.file])
            error = give_up(member.found.drive, "read", self.hang_timeout_s)
            self.troubles[numbers[e.file]] = Trouble(member.found.drive.path, missing=str(error), absent=True)
            return None
        return rows, results, places

    def _budget_bytes(self, tables: _Tables) -> int:
        """0, the engine's own budget, unless one group needs more: what was written must be read."""
        widest = max((inputs + outputs for _, _, inputs, outputs in tables.groups), default=1)
        needed = widest * self.manifest.chunk_bytes
        return needed if needed > _BUDGET_BYTES else 0

    def _jobs(
        self,
        tables: _Tables,
        rows: NDArray[np.int64],
        pieces: image.Pieces,
        file_of: NDArray[np.int64],
        verify: bool,
    ) -> tuple[NDArray[np.void], NDArray[np.void]]:
        held = self.manifest
        blocks = held.blocks
        jobs = np.zeros(len(rows), _engine.JOB_DTYPE)
        jobs["offset"] = blocks.offset[rows]
        jobs["length"] = blocks.length[rows]
        jobs["file"] = np.maximum(file_of[blocks.member[rows]], 0)
        jobs["offset"][np.array(tables.outputs, np.bool_)] = 0
        if verify:
            jobs["flags"] = _engine.JOB_CHECKSUM
            jobs["seed"] = self._seeds()[rows]
            jobs["digest"] = np.frombuffer(held.all_digests, np.uint8).reshape(-1, 16)[rows]
        wants = np.array(tables.wants, np.int64)
        dropped = np.flatnonzero(wants < 0)
        extents = np.zeros(len(pieces.addr) + len(dropped), _engine.EXTENT_DTYPE)
        extents["addr"][: len(pieces.addr)] = pieces.addr
        extents["length"][: len(pieces.addr)] = pieces.length
        extents["length"][len(pieces.addr) :] = jobs["length"][dropped]
        jobs["extent_first"] = pieces.first[np.maximum(wants, 0)]
        jobs["extents_count"] = pieces.count[np.maximum(wants, 0)]
        jobs["extent_first"][dropped] = len(pieces.addr) + np.arange(len(dropped))
        jobs["extents_count"][dropped] = 1
        return jobs, extents

    def _seeds(self) -> NDArray[np.uint64]:
        held = self.manifest
        count = len(held.digests) // 16
        checks = len(held.blocks.offset) - count
        data = _engine.block_seeds(held.uuid, 0, count)
        if held.blocks.shape.is_copies:
            return np.concatenate([data, np.repeat(data, held.blocks.shape.checks)])
        return np.concatenate([data, _engine.block_seeds(held.uuid, CHECK_INDEX_FIRST, checks)])

    def _copy_table(
        self, jobs: NDArray[np.void], rows: NDArray[np.int64], file_of: NDArray[np.int64]
    ) -> tuple[NDArray[np.void], list[list[int]]]:
        """For mirrors: the further places of each block; and the rows of all its places, in the engine's order."""
        blocks = self.manifest.blocks
        places = [self._copies(row) for row in rows.tolist()]
        first = np.array([same[0] for same in places], np.int64)
        jobs["offset"], jobs["file"] = blocks.offset[first], file_of[blocks.member[first]]
        counts = np.array([len(same) - 1 for same in places], np.int64)
        others = np.array([row for same in places for row in same[1:]], np.int64)
        copies = np.zeros(len(others), _engine.COPY_DTYPE)
        copies["offset"] = blocks.offset[others]
        copies["file"] = file_of[blocks.member[others]]
        jobs["copies_first"] = np.cumsum(counts) - counts
        jobs["copies_count"] = counts
        return copies, places

    def _look(
        self,
        tables: _Tables,
        rows: NDArray[np.int64],
        results: NDArray[np.void],
        places: list[list[int]],
        hopeless: set[int],
    ) -> set[int]:
        failed: set[int] = set()
        for at in np.flatnonzero((results["code"] != 0) | (results["failed_copies"] != 0)).tolist():
            code, row = int(results["code"][at]), int(rows[at])
            if code and tables.wants[at] >= 0:
                failed.add(tables.wants[at])
            if code in (_engine.EINPUT, _engine.ESKIPPED):
                continue
            if code == -errno.EFAULT:
                # The memory's fault: no copy and no recovery would help.
                raise drive_error(errno.EFAULT, "read", path=self.path, state="", advice=READ_INTO_ADVICE)
            if tables.outputs[at]:
                # Its inputs were what was written, and it is not: nothing else is left to compute it from.
                hopeless.add(row)
                continue
            bits = int(results["failed_copies"][at]) or 1
            first = int(results["failed_code"][at]) or code
            for number, place in enumerate(places[at]):
                if bits >> number & 1:
                    self._blame(place, first)
        return failed

    def _blame(self, row: int, code: int) -> None:
        blocks = self.manifest.blocks
        number, offset = int(blocks.member[row]), int(blocks.offset[row])
        self._bad[row] = True
        if number not in self.members:
            return
        trouble = self.troubles.setdefault(number, Trouble(self.members[number].found.drive.path))
        reason = reason_of(code)
        if not trouble.blocks:
            trouble.first = f"at offset {offset} ({reason})"
        trouble.blocks += 1

    # ---- telling ---------------------------------------------------------

    def tell(self, *, whole: bool) -> None:
        """One warning for everything that had to be made up for so far; ``whole``: it could be."""
        if self._told or not self.troubles:
            return
        self._told = True
        count = f"{len(self.troubles)} of its {len(self.manifest.drives)} members are not whole"
        wrong = "; ".join(self._wrong())
        advice = f"Run repair({display(self.generation.name)!r}) on the volume before more is lost."
        if whole:
            text = f"{self.path} was read without harm, but {count}: {wrong}. {advice}"
        else:
            text = f"{self.path} could not be read whole: {count}: {wrong}."
        warn(text + self._newer(), VolumeWarning)

    def _newer(self) -> str:
        if not self.drives.missing and not self._unreadable:
            return ""
        return " A newer generation could be on a drive that is missing, or in a member that cannot be read."

    def _wrong(self) -> list[str]:
        return [f"drive {trouble.drive}: {trouble}" for _, trouble in sorted(self.troubles.items())]

    def data_lost(self, rows: Iterable[int]) -> DataLost:
        """The error for blocks that cannot be had any more."""
        names = self.tensors_in(rows)
        shown = ", ".join(names[:_NAMES_MOST]) or "no tensor"
        more = f" and {len(names) - _NAMES_MOST} more" if len(names) > _NAMES_MOST else ""
        missing = [t for t in self.troubles.values() if t.absent]
        shape = self.manifest.blocks.shape
        advice = "Mount or name the drives that are missing, or load" if missing else "Load"
        kind = MissingMember if missing else DataLost
        return kind(
            f"{self.path} cannot be read whole: {'; '.join(self._wrong()) or 'a block could not be recovered'}. Its "
            f"layout makes up for {shape.checks} loss(es) in a group. Gone: {shown}{more}. Nothing was loaded. "
            f"{advice} an earlier generation, or the rest with partial=True.{self._newer()}",
            path=self.path,
            tensors=names,
            drives=self._wrong(),
        )

    def tensors_in(self, rows: Iterable[int]) -> list[str]:
        held = self.manifest
        count = len(held.digests) // 16
        names: dict[str, None] = {}
        for row in rows:
            if row < count:
                start = row * held.chunk_bytes
                stop = min(start + held.chunk_bytes, held.table.data_bytes)
                names.update(dict.fromkeys(image.names_in(held.table, start, stop)))
        names.update((other, None) for other, kept in held.ties.items() if kept in names)
        return list(names)


def reason_of(code: int) -> str:
    """An engine's code in words."""
    if code == _engine.ECORRUPT:
        return "checksum"
    if code == _engine.ETRUNCATED:
        return "the file is cut short"
    if -4096 < code < 0:
        return f"{os.strerror(-code)} ({errno.errorcode.get(-code, code)})"
    return f"engine code {code}"


class MemberMoved(Exception):
    """A member is not where, or not what, it was found to be: a save has replaced it meanwhile."""


def _facts(block: Superblock) -> tuple[object, ...]:
    return block.uuid, block.members, block.shape, block.chunk_bytes, block.manifest_digest


def open_member(found: Found, engine: Engine) -> OpenMember:
    """Opens a member, and makes sure that it is the one found. Raises DriveError, FormatError, MemberMoved."""
    flags = os.O_RDONLY | os.O_NOCTTY
    try:
        try:
            fd, direct = open_beneath(found.drive.dirfd, found.file, flags | os.O_DIRECT, engine), True
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fd, direct = open_beneath(found.drive.dirfd, found.file, flags, engine), False
    except FileNotFoundError:
        raise MemberMoved from None
    except OSError as e:
        raise drive_error(e.errno or errno.EIO, "open", path=found.path, drive=found.drive.path) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FormatError(f"{found.path} is not a regular file.")
        if not _is_still(found, fd, engine):
            raise MemberMoved
        return OpenMember(found, fd, engine_file(fd, direct))
    except BaseException:
        with contextlib.suppress(OSError):
            engine.io.close(fd)
        raise


def _is_still(found: Found, fd: int, engine: Engine) -> bool:
    try:
        block = decode_superblock(engine.io.read(fd, SUPERBLOCK_BYTES, 0), path=found.path)
    except EOFError:
        return False
    except OSError as e:
        raise drive_error(
            e.errno or errno.EIO, "read", path=found.path, drive=found.drive.path, offset=0
        ) from None
    return block == found.superblock

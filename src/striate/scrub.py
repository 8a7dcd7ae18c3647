"""Verify: load without keeping anything. Reads every chunk of a checkpoint and says which are damaged."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

import numpy as np

from striate import _engine
from striate.drives import display
from striate.engines import Engine
from striate.errors import CorruptCheckpoint, FormatError
from striate.member import Member, gather, open_member, read_chunks, tensors_in_chunk
from striate.progress import ProgressChoice, shown

__all__ = ["Damage", "VerifyReport", "verify_member"]


@dataclass(frozen=True)
class Damage:
    """One damaged region. ``offset`` and ``length`` in bytes of the file; ``wanted``/``found`` are hexadecimal."""

    region: str  # "header" or "data"; on several drives also "check" and "manifest"
    chunk: int | None
    offset: int
    length: int
    tensors: tuple[str, ...]
    reason: str  # "checksum", or what the drive answered
    wanted: str | None = None
    found: str | None = None


@dataclass(frozen=True)
class VerifyReport:
    """What verify saw. ``ok`` is true only if every byte was read and every checksum fitted."""

    path: str
    uuid: str
    sequence: int
    file_bytes: int
    chunks_count: int
    damages: tuple[Damage, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.damages

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_damaged(self) -> None:
        """Raises CorruptCheckpoint for the first damage, if there is one."""
        if not self.damages:
            return
        first = self.damages[0]
        tensors = sorted({name for damage in self.damages for name in damage.tensors})
        raise CorruptCheckpoint(
            f"{self.path} is damaged in {len(self.damages)} place(s), first at offset {first.offset} "
            f"({first.reason}); tensors concerned: {', '.join(tensors[:8]) or 'none'}"
            f"{f' and {len(tensors) - 8} more' if len(tensors) > 8 else ''}. "
            "Load an earlier checkpoint or restore this file from a copy.",
            path=self.path,
            region=first.region,
            chunk=first.chunk,
            tensors=tensors,
            drive=os.path.dirname(self.path),
            offset=first.offset,
            wanted=first.wanted,
            found=first.found,
        )


def verify_member(path: str | bytes, engine: Engine, *, progress: ProgressChoice = False) -> VerifyReport:
    """Reads the whole of a plain file. Damage is reported, not raised.

    Raises DriveError if it cannot be opened, FormatError if it is no checkpoint of striate's (then there is
    nothing to check it against) or its header is past reading.
    """
    shown_path = display(path)
    try:
        member = open_member(path, engine, verify=True)
    except CorruptCheckpoint as e:
        size = os.stat(path).st_size
        damage = Damage(e.region, None, e.offset, 0, e.tensors, str(e), e.wanted, e.found)
        return VerifyReport(shown_path, "", 0, size, 0, (damage,))
    with member:
        held = member.manifest
        if held.foreign:
            raise FormatError(
                f"{shown_path} is safetensors, but not striate's: it holds no checksums to verify. "
                "Load it and save it with striate to have them."
            )
        nothing = np.zeros(len(held.table.names) + (held.table.graph is not None), np.uint64)
        pieces = gather(member, nothing)
        with shown(progress, f"verifying {member.name}", held.table.data_bytes) as report:
            results = read_chunks(member, pieces, verify=True, keep_going=True, progress=report)
        damages = [
            _damage(member, int(pieces.chunk[row]), int(pieces.job_length[row]), results[row])
            for row in np.flatnonzero(results["code"])
        ]
        return VerifyReport(
            shown_path, held.uuid.hex(), held.sequence, member.file_bytes, len(pieces.first), tuple(damages)
        )


def _damage(member: Member, chunk: int, length: int, result: np.void) -> Damage:
    held = member.manifest
    code = int(result["code"])
    names = tuple(tensors_in_chunk(held, chunk))
    offset = held.data_offset + chunk * held.chunk_bytes
    if code == _engine.ECORRUPT:
        wanted = held.digests[16 * chunk : 16 * chunk + 16].hex()
        return Damage(
            "data", chunk, offset, length, names, "checksum", wanted, result["digest"].tobytes().hex()
        )
    if code == _engine.ETRUNCATED:
        return Damage("data", chunk, offset, length, names, "the file is cut short")
    reason = f"{os.strerror(-code)} ({errno.errorcode.get(-code, code)})"
    return Damage("data", chunk, offset, length, names, reason)

"""A file that appears under its name whole and durable, or not at all: for exports, which other programs read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import BinaryIO

from striate.drives import display
from striate.errors import DriveError, StriateError, drive_error

__all__ = ["OutputFile"]


class OutputFile:
    """A context manager around a temporary beside ``path``; ``commit`` publishes it, anything else removes it.

    Raises StriateError if the name is taken (unless ``overwrite``) or is one of ``inputs``; DriveError.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, overwrite: bool, inputs: Sequence[str | os.PathLike[str]] = ()
    ) -> None:
        self.path = os.fspath(path)
        shown = display(self.path)
        if os.path.isdir(self.path):
            raise StriateError(f"{shown} is a directory: give the name of a file.")
        if os.path.exists(self.path):
            for given in inputs:
                if os.path.exists(given) and os.path.samefile(given, self.path):
                    raise StriateError(
                        f"{shown} is what is read from, and is never written to: give another name."
                    )
        if os.path.lexists(self.path) and not overwrite:
            raise StriateError(f"{shown} exists: give another name, or --force to replace it.")
        directory, name = os.path.split(os.path.abspath(self.path))
        self._directory = directory
        self._temporary = os.path.join(directory, f".{name[:200]}.{secrets.token_hex(6)}.tmp")
        self._file: BinaryIO | None = None

    def __enter__(self) -> OutputFile:
        try:
            self._file = open(self._temporary, "x+b")
        except OSError as e:
            raise self._error(e, "open") from None
        return self

    @property
    def file(self) -> BinaryIO:
        assert self._file is not None
        return self._file

    def write(self, data: bytes | memoryview) -> None:
        try:
            self.file.write(data)
        except OSError as e:
            raise self._error(e, "write") from None

    def reserve(self, length: int) -> None:
        """Finds a full drive before the first byte is written, where the file system can tell."""
        free = os.statvfs(self._directory)
        if length > free.f_bavail * free.f_frsize:
            raise drive_error(
                28, "export", path=self.path, drive=self._directory, needed=length,
                free=free.f_bavail * free.f_frsize, state="Nothing was written.",
                advice=f"{length:,} bytes are needed and {free.f_bavail * free.f_frsize:,} are free.",
            )  # fmt: skip

    def commit(self) -> None:
        """Synced, renamed, synced."""
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            os.replace(self._temporary, self.path)
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as e:
            raise self._error(e, "write") from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if os.path.lexists(self._temporary):
            os.unlink(self._temporary)

    def _error(self, e: OSError, doing: str) -> DriveError:
        state = "Nothing was left behind" + (
            ", and what was there is intact." if os.path.exists(self.path) else "."
        )
        return drive_error(e.errno or 5, doing, path=self.path, drive=self._directory, state=state)

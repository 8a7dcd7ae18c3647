"""A progress bar for long saves and loads (rich). The only module that imports rich."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["ProgressChoice", "shown"]

ProgressChoice = bool | Callable[[int, int], None]


@contextlib.contextmanager
def shown(choice: ProgressChoice, doing: str, total_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """What the engine calls with the bytes done so far.

    ``choice``: False for nothing, True for a bar on the terminal, or a callable that gets (bytes done, bytes in all)
    about every 100 ms and once at the end. An exception from it cancels the save or load.
    """
    if not choice:
        yield None
        return
    if callable(choice):
        report = choice
        told_bytes = -1

        def tell(done_bytes: int) -> None:
            nonlocal told_bytes
            told_bytes = done_bytes
            report(done_bytes, total_bytes)

        yield tell
        if told_bytes != total_bytes:  # nothing to move, or less than the whole file
            tell(total_bytes)
        return
    columns = (
        TextColumn("{task.description}", markup=False),  # names may look like [markup]
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(doing, total=total_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)
        bar.update(task, completed=total_bytes)

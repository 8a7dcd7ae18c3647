"""An object taken through its graph and back, with no file: what a save and a load do, minus the bytes' journey."""

from __future__ import annotations

import io
from typing import Any

import torch

from striate import graph

__all__ = ["copied_storages", "through_graph", "through_torch"]


def copied_storages(held: graph.Graph, restore: graph.Restore) -> list[torch.UntypedStorage]:
    """The storages as a load has them before the graph is rebuilt: new ones, filled, on their devices."""
    storages = []
    for entry in held.storages:
        storage = restore.allocate(entry.nbytes, entry.location)
        if restore.reads_data and entry.nbytes:
            storage.copy_(entry.source)
        storages.append(restore.apply(storage, entry.location))
    return storages


def through_graph(
    obj: object, *, map_location: Any = None, weights_only: bool = True, **dump_args: Any
) -> Any:
    """``loads(dumps(obj))``, the graph scanned and the storages copied in between."""
    held = graph.dumps(obj, **dump_args)
    if held.pickle is not None:
        graph.scan(held.pickle, weights_only=weights_only)
    restore = graph.Restore(map_location)
    restore.check({entry.location for entry in held.storages})
    return graph.loads(
        held.pickle,
        [f"__striate__.t.{n}" if entry.name is None else entry.name for n, entry in enumerate(held.storages)],
        [entry.plain for entry in held.storages],
        copied_storages(held, restore),
        weights_only=weights_only,
        map_location=map_location,
    )


def through_torch(
    obj: object, *, map_location: Any = None, weights_only: bool = True, **save_args: Any
) -> Any:
    """``torch.load(torch.save(obj))`` of the installed torch."""
    file = io.BytesIO()
    torch.save(obj, file, **save_args)
    file.seek(0)
    return torch.load(file, map_location=map_location, weights_only=weights_only)

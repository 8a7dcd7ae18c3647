"""Who saves and who loads: striate with each engine, and its peers, each made durable by the same rule.

Durable means that the file (each file) and the directory that names it are synced before the clock stops. striate does
that by itself, peers are followed by fsync calls; only striate also replaces an older file atomically.
"""

import inspect
import mmap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import striate
from harness.sample import Timing
from harness.state import Spec, State, specs_of
from harness.workspace import sync_file_and_directory

Engine = Literal["auto", "uring", "posix"]
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Contender:
    """`save` writes the state durably under a path; `load` reads it back.

    `load` returns what it loaded, to be compared with what was saved; or None or a Timing where there is nothing to
    compare. `prepare_load` runs in the child before memory and time count.
    """

    name: str
    role: Literal["ours", "peer", "ceiling", "floor"]
    save: Callable[[State, Path], Timing | None]
    load: Callable[[Path, Mapping[str, Spec]], State | Timing | None]
    direct_writes: bool  # bypass the page cache, and so are held by a throttled drive's cap
    suffix: str = ".safetensors"
    saves: bool = True  # False: its save is another contender's, and is not recorded
    prepare_load: Callable[[Mapping[str, Spec]], None] | None = None


def ours(engine: Engine) -> Contender:
    def save(state: State, path: Path) -> None:
        striate.save(state, path, engine=engine)

    def load(path: Path, _specs: Mapping[str, Spec]) -> State:
        loaded: State = striate.load(path, engine=engine)
        return loaded

    return Contender(f"striate ({engine})", "ours", save, load, direct_writes=True)


def ours_into() -> Contender:
    """load_into tensors that exist, as a resumed training run has them: no new memory."""
    target: State = {}

    def save(state: State, path: Path) -> None:
        striate.save(state, path, engine="uring")

    def prepare(specs: Mapping[str, Spec]) -> None:
        target.update(_zeros(specs))

    def load(path: Path, specs: Mapping[str, Spec]) -> State:
        # The warm-up loads a small state of its own.
        into = target if specs_of(target) == specs else _zeros(specs)
        striate.load_into(into, path, engine="uring")
        return into

    return Contender(
        "striate load_into", "ours", save, load, direct_writes=True, saves=False, prepare_load=prepare
    )


def _zeros(specs: Mapping[str, Spec]) -> State:
    return {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}


def new_memory() -> Contender:
    """No checkpoint at all: touch as much new memory as a load returns, in huge pages. What any load pays besides.

    Usually next to nothing. On a virtual machine whose hypervisor takes free memory back, each new page is a fault in
    the host as well, and this can be more than all the rest of a load.
    """

    def save(_state: State, path: Path) -> None:
        path.touch()

    def load(_path: Path, specs: Mapping[str, Spec]) -> None:
        length = sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())
        # Private: Python's default is shared memory, which gets no huge pages.
        with mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            pages = np.frombuffer(memory, dtype=np.uint8)
            pages[::PAGE_BYTES] = 1
            # mmap refuses to close under a view of it.
            del pages

    return Contender("(new memory)", "floor", save, load, direct_writes=True, saves=False, suffix=".none")


def torch_save() -> Contender:
    def save(state: State, path: Path) -> None:
        torch.save(state, path)
        sync_file_and_directory(path)

    def load(path: Path, _specs: Mapping[str, Spec]) -> State:
        loaded: State = torch.load(path, weights_only=True)
        return loaded

    return Contender("torch.save", "peer", save, load, direct_writes=False, suffix=".pt")


def safetensors_file() -> Contender:
    def save(state: State, path: Path) -> None:
        safetensors.torch.save_file(state, path)
        sync_file_and_directory(path)

    def load(path: Path, _specs: Mapping[str, Spec]) -> State:
        # On a CPU this only maps the file: nothing has been read yet.
        loaded: State = safetensors.torch.load_file(path)
        touch_pages(loaded)
        return loaded

    return Contender("safetensors", "peer", save, load, direct_writes=False)


def touch_pages(state: State) -> None:
    """Fault every page in, one byte each: the least that makes mapped tensors as usable as tensors that were read."""
    for tensor in state.values():
        raw = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        if len(raw):
            raw[::PAGE_BYTES].sum()
            raw[-1:].sum()


# Later versions of torch are told that this process is alone; 2.6 finds it out.
_ALONE: dict[str, Any] = (
    {"no_dist": True} if "no_dist" in inspect.signature(state_dict_saver.save).parameters else {}
)


def distributed_checkpoint(threads_count: int) -> Contender:
    """torch.distributed.checkpoint in one process, with one file per writer thread (its default)."""

    def save(state: State, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = FileSystemWriter(path, thread_count=threads_count, sync_files=True)
            state_dict_saver.save(dict(state), storage_writer=writer, **_ALONE)
        sync_file_and_directory(path)

    def load(path: Path, specs: Mapping[str, Spec]) -> State:
        # It loads in place only, so the targets are part of the work, as they are for the others.
        target: State = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_loader.load(target, storage_reader=FileSystemReader(path), **_ALONE)
        return target

    name = f"DCP ({threads_count} thread{'s' if threads_count > 1 else ''})"
    return Contender(name, "peer", save, load, direct_writes=False, suffix=".dcp")

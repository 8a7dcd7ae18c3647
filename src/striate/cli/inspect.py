"""``striate inspect``: what is in a checkpoint, without reading its tensors or running its pickle."""

from __future__ import annotations

import pickletools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from striate import torch_api
from striate.cli.output import JsonOption, bytes_text, emit, say, table, with_codes
from striate.cli.targets import CheckpointArgument, DriveOption, VolumeOption, opened
from striate.engines import Engine
from striate.errors import FormatError
from striate.member_set import MemberSet
from striate.torch_api import CheckpointInfo, TensorInfo

__all__ = ["inspect"]


@dataclass(frozen=True)
class ObjectSummary:
    """What the pickle around the tensors is made of, read opcode by opcode. ``names``: the classes it calls."""

    kind: str
    containers: dict[str, int]
    values: dict[str, int]
    names: tuple[str, ...]


@dataclass
class _Node:
    """A level of the dotted names: what lies below it, and how much."""

    tensor: TensorInfo | None = None
    count: int = 0
    nbytes: int = 0
    children: dict[str, _Node] = field(default_factory=dict)


def inspect(
    checkpoint: CheckpointArgument,
    volume: VolumeOption = None,
    drive: DriveOption = None,
    depth: Annotated[int, typer.Option(min=1, help="Levels of names to show; deeper ones are added up.")] = 3,
    flat: Annotated[bool, typer.Option("--flat", help="Every tensor on a line of its own, no tree.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Shows what a checkpoint holds: its tensors, its object, its drives. Reads neither tensors nor objects."""
    with opened(checkpoint, volume, drive, engine=Engine("posix")) as source:
        info = torch_api.info_of(source)
        summary = summarize(torch_api.graph_of(source, True)) if not source.manifest.foreign else None
        shares = _shares(source) if isinstance(source, MemberSet) else {}
    found = {**asdict(info), "object": summary, "shares": shares}

    def render(console: Console) -> None:
        _facts(console, info, summary)
        console.print()
        if flat:
            _list(console, info, shares)
        else:
            console.print(_tree(info, depth))

    emit(as_json, found, render)


inspect.__doc__ = with_codes(inspect.__doc__)


# ---- what is around the tensors ----------------------------------------------

_CONTAINERS = {"EMPTY_DICT": "dict", "DICT": "dict", "EMPTY_LIST": "list", "LIST": "list", "EMPTY_TUPLE": "tuple",
               "TUPLE": "tuple", "TUPLE1": "tuple", "TUPLE2": "tuple", "TUPLE3": "tuple", "EMPTY_SET": "set",
               "FROZENSET": "frozenset"}  # fmt: skip
_VALUES = {"INT": "int", "BININT": "int", "BININT1": "int", "BININT2": "int", "LONG": "int", "LONG1": "int",
           "LONG4": "int", "FLOAT": "float", "BINFLOAT": "float", "NONE": "None", "NEWTRUE": "bool", "NEWFALSE": "bool",
           "BINUNICODE": "str", "SHORT_BINUNICODE": "str", "BINUNICODE8": "str", "UNICODE": "str",
           "BINBYTES": "bytes", "SHORT_BINBYTES": "bytes", "BINBYTES8": "bytes", "BYTEARRAY8": "bytes"}  # fmt: skip


def summarize(pickled: bytes | None) -> ObjectSummary:
    """What a graph is made of. Nothing is built and nothing called. Raises FormatError for what is no pickle."""
    if pickled is None:
        return ObjectSummary("a flat dict of tensors", {}, {}, ())
    containers: dict[str, int] = {}
    values: dict[str, int] = {}
    names: list[str] = []
    strings: list[str] = []
    first = ""
    try:
        for op, argument, _ in pickletools.genops(pickled):
            if op.name in _CONTAINERS:
                kind = _CONTAINERS[op.name]
                first = first or kind
                containers[kind] = containers.get(kind, 0) + 1
            elif op.name in _VALUES:
                kind = _VALUES[op.name]
                values[kind] = values.get(kind, 0) + 1
                if kind == "str":
                    strings = [*strings[-1:], str(argument)]
            elif op.name == "GLOBAL":
                names.append(str(argument).replace(" ", "."))
                first = first or names[-1]
            elif op.name == "STACK_GLOBAL" and len(strings) == 2:
                names.append(".".join(strings))
                first = first or names[-1]
            elif op.name == "BINPERSID":
                containers["tensor"] = containers.get("tensor", 0) + 1
    except ValueError as e:
        raise FormatError(f"the object graph is no pickle: {e}") from None
    return ObjectSummary(first or "a value", containers, values, tuple(dict.fromkeys(names)))


def _shares(source: MemberSet) -> dict[str, dict[str, int]]:
    """Bytes of each tensor on each drive, data blocks alone: name -> drive -> bytes."""
    held = source.manifest
    table = held.table
    drives = [m.drive for m in torch_api.members_of(source)]
    found: dict[str, dict[str, int]] = {}
    for n, name in enumerate(table.names):
        start, stop = int(table.offsets[n]), int(table.offsets[n] + table.lengths[n])
        if start == stop:
            continue
        chunks = np.arange(start // held.chunk_bytes, (stop - 1) // held.chunk_bytes + 1)
        begins = np.maximum(chunks * held.chunk_bytes, start)
        ends = np.minimum((chunks + 1) * held.chunk_bytes, stop)
        on = np.bincount(held.blocks.member[chunks], weights=ends - begins, minlength=len(drives))
        found[name] = {drive: int(count) for drive, count in zip(drives, on.tolist(), strict=True) if count}
    return found


# ---- text ------------------------------------------------------------------


def _facts(console: Console, info: CheckpointInfo, summary: ObjectSummary | None) -> None:
    kinds = {
        "striate": "a checkpoint of striate",
        "member": "a checkpoint of striate on several drives",
        "safetensors": "a safetensors file (no checksums)",
    }
    facts = table("", "")
    facts.show_header = False

    def row(name: str, value: str) -> None:
        facts.add_row(name, value)

    row("path", info.path)
    row("kind", f"{kinds[info.kind]}{f', format {info.version}' if info.version else ''}")
    if info.sequence:
        saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.created_s))
        row("generation", f"{info.uuid}, saved {saved}")
    row("size", f"{bytes_text(info.file_bytes)}, of it data {bytes_text(info.data_bytes)}")
    if info.kind != "safetensors":
        row("chunks", f"{info.chunks_count:,} of {bytes_text(info.chunk_bytes)}, each with a checksum")
    row("tensors", _tensors_text(info))
    if summary is not None:
        row("object", _summary_text(summary))
        if summary.names:
            row("classes", ", ".join(summary.names[:12]) + (" ..." if len(summary.names) > 12 else ""))
    if info.ties:
        few = [f"{other} = {kept}" for other, kept in list(info.ties.items())[:3]]
        row("ties", ", ".join(few) + (f" and {len(info.ties) - 3} more" if len(info.ties) > 3 else ""))
    console.print(facts)
    if info.members:
        console.print()
        groups = f"{info.data_blocks}+{info.check_blocks}"
        console.print(f"groups of {groups} blocks (data + check)")
        for member in info.members:
            say(
                console,
                f"{member.drive}: {member.trouble or f'a member of {bytes_text(member.file_bytes)}'}",
                indent="  ",
            )


def _tensors_text(info: CheckpointInfo) -> str:
    by_dtype: dict[str, tuple[int, int]] = {}
    for tensor in info.tensors:
        count, nbytes = by_dtype.get(tensor.dtype, (0, 0))
        by_dtype[tensor.dtype] = (count + 1, nbytes + tensor.nbytes)
    kinds = ", ".join(
        f"{dtype} {count:,} ({bytes_text(nbytes)})" for dtype, (count, nbytes) in by_dtype.items()
    )
    other = f"; {info.opaque_count:,} that other tools cannot read" if info.opaque_count else ""
    return f"{len(info.tensors):,}: {kinds}{other}" if info.tensors else "none"


def _summary_text(summary: ObjectSummary) -> str:
    parts = [f"{count:,} {kind}" for kind, count in {**summary.containers, **summary.values}.items()]
    return summary.kind if not parts else f"{summary.kind}; in all {', '.join(parts)}"


def _list(console: Console, info: CheckpointInfo, shares: dict[str, dict[str, int]]) -> None:
    columns = ("tensor", "dtype", "shape", "size", *(("drives",) if shares else ()))
    lines = table(*columns, right=(3,))
    for tensor in info.tensors:
        share = "/".join(
            f"{100 * count / tensor.nbytes:.0f}" for count in shares.get(tensor.name, {}).values()
        )
        extra = (f"{share} %" if share else "",) if shares else ()
        lines.add_row(tensor.name, tensor.dtype, _shape(tensor), bytes_text(tensor.nbytes), *extra)
    console.print(lines)


def _shape(tensor: TensorInfo) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _tree(info: CheckpointInfo, depth: int) -> Tree:
    root = _Node()
    for tensor in info.tensors:
        here = root
        for part in tensor.name.split("."):
            here.count += 1
            here.nbytes += tensor.nbytes
            here = here.children.setdefault(part, _Node())
        here.tensor = tensor
        here.count += 1
        here.nbytes += tensor.nbytes
    tree = Tree(Text(f"{root.count:,} tensors, {bytes_text(root.nbytes)}"))
    _grow(tree, root, depth)
    return tree


def _grow(tree: Tree, node: _Node, depth: int) -> None:
    for name, child in node.children.items():
        for label in _labels(name, child):
            below = tree.add(Text(label))
        if child.children and depth > 1:
            _grow(below, child, depth - 1)


def _labels(name: str, node: _Node) -> Iterator[str]:
    if node.tensor is not None:
        yield f"{name}  {node.tensor.dtype} {_shape(node.tensor)}  {bytes_text(node.tensor.nbytes)}"
    if node.children:
        below = node.count - (node.tensor is not None)
        nbytes = node.nbytes - (node.tensor.nbytes if node.tensor is not None else 0)
        yield f"{name}.  {below:,} tensor{'s' * (below != 1)}, {bytes_text(nbytes)}"

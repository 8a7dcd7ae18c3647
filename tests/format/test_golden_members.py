"""The golden member files: they hold the code's writer, its reader and the rescue reader to the document."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from format.make_golden import FILES, UUID, Golden, Storage, Tensor, build, pickled, stored
from format.make_golden_members import (
    GENERATIONS,
    GOLDEN_MEMBERS,
    HEAD,
    ROWS,
    VOLUME,
    Generation,
    Members,
    describe,
    drive_uuid,
    file_name,
)
from format.test_golden import layout_of
from hypothesis import given
from hypothesis import strategies as st

import striate
from striate import extents, rescue, superblock
from striate.errors import CorruptCheckpoint
from striate.extents import MemberManifest
from striate.groups import Shape
from striate.image import Table, gather
from striate.placement import place

NAMES = sorted(GENERATIONS)
DAMAGED = "the manifest is damaged"

# A graph, ties, raw storages with and without a tensor, two locations, a scalar, an empty one; five chunks, so that
# the last of three groups is short.
RICH = Golden(
    [
        Storage("a", "F32", (512,)),
        Storage("b", "U8", (8192,), location="cuda:0"),
        Storage("gone", "U8", (0, 5)),
        Storage(None, None, nbytes=5000),
        Storage(None, "I16", (4, 250), nbytes=2000),
        Storage("scalar", "F64"),
        Storage("__striate__.t.6", "I8", (77,)),
    ],
    graph={"a": Tensor(0), "tied": Tensor(0), "b": Tensor(1), (1,): [Tensor(n) for n in (2, 4, 5, 6)]},
    ties={"tied": "a", "striate.tied": "b", "format": "scalar"},
)
PARITY = Generation(RICH, 2, 2, 6, b"step-1")
# In a plain file tied names stand beside keys that are spoken for, and these two are left out.
RICH_PLAIN = build(dataclasses.replace(RICH, ties={"tied": "a"}))
_DESCRIBED = describe(PARITY)


def rich() -> Members:
    return _DESCRIBED.copy()


def paths(name: str) -> list[Path]:
    return [GOLDEN_MEMBERS / file_name(name, n) for n in range(GENERATIONS[name].members)]


def write(directory: Path, contents: list[bytes]) -> list[Path]:
    directory.mkdir(exist_ok=True)
    found = [directory / f"member.{n}" for n in range(len(contents))]
    for path, content in zip(found, contents, strict=True):
        path.write_bytes(content)
    return found


def run(*arguments: object) -> int:
    return rescue.main([str(argument) for argument in arguments])


def decoded(content: bytes, path: str = "p") -> MemberManifest:
    facts = superblock.decode(content[:4096], path=path)
    raw = content[facts.manifest_offset : facts.manifest_offset + facts.manifest_bytes]
    return extents.decode(raw, facts, path=path)


def test_every_golden_member_is_described_and_is_what_its_script_makes() -> None:
    assert sorted(GOLDEN_MEMBERS.iterdir()) == sorted(path for name in NAMES for path in paths(name))
    for name in NAMES:
        assert describe(GENERATIONS[name]).pack() == [path.read_bytes() for path in paths(name)]


@pytest.mark.parametrize("name", NAMES)
def test_the_code_places_and_encodes_the_same_bytes(name: str) -> None:
    generation = GENERATIONS[name]
    golden, shape = generation.golden, Shape(generation.k, generation.m)
    contents = [path.read_bytes() for path in paths(name)]
    table = layout_of(golden)
    addresses = np.zeros(len(table), np.uint64)
    pieces = gather(table, addresses, golden.chunk_bytes)
    blocks = place(pieces.job_length, shape, generation.members)
    flat = golden.graph is None
    drives = tuple((drive_uuid(n), b"/drive/%d" % n) for n in range(generation.members))
    draft = extents.encode(
        table,
        uuid=UUID,
        chunk_bytes=golden.chunk_bytes,
        ties=golden.ties,
        graph=None if flat else stored(golden.graph),
        graph_bytes=None if flat else len(pickled(golden.graph)),
        blocks=blocks,
        drives=drives,
    )
    facts = [superblock.decode(content[:4096], path="p") for content in contents]
    found = extents.decode(contents[0][facts[0].manifest_offset :], facts[0], path="p")
    raw = draft.finish(found.digests, found.check_digests)
    assert draft.length == len(raw)
    for number, content in enumerate(contents):
        assert content[facts[number].manifest_offset :] == raw
        assert facts[number].manifest_offset == blocks.member_bytes[number]
        made = superblock.Superblock(
            uuid=UUID,
            sequence=golden.sequence,
            volume=VOLUME,
            drive=drive_uuid(number),
            member=number,
            members=generation.members,
            shape=shape,
            chunk_bytes=golden.chunk_bytes,
            manifest_offset=int(blocks.member_bytes[number]),
            manifest_bytes=len(raw),
            manifest_digest=extents.manifest_digest(raw, UUID),
            whole=frozenset(range(generation.members)),
            name=generation.name,
        )
        assert superblock.encode(made) == content[:4096]
        assert facts[number] == made


@pytest.mark.parametrize("name", [*NAMES, "rich"])
def test_the_code_reads_what_was_meant(name: str) -> None:
    generation = GENERATIONS.get(name, PARITY)
    golden = generation.golden
    table = layout_of(golden)
    described = describe(generation)
    for content in described.pack():
        found = decoded(content)
        assert (found.uuid, found.sequence, found.chunk_bytes) == (UUID, golden.sequence, golden.chunk_bytes)
        assert (found.foreign, found.graph_entry, found.data_offset) == (False, False, 0)
        assert found.ties == golden.ties
        assert found.table.names == table.names
        assert found.table.dtypes == table.dtypes
        assert found.table.shapes == table.shapes
        assert found.table.plains() == table.plains()
        assert found.table.locations_list() == [s.location for s in golden.storages]
        np.testing.assert_array_equal(found.table.offsets, table.offsets)
        assert found.graph == (None if golden.graph is None else stored(golden.graph))
        assert found.graph_bytes == (None if golden.graph is None else len(pickled(golden.graph)))
        rows = described.manifest.rows["blocks"]
        assert found.all_digests == b"".join(row[5] for row in rows)
        assert found.blocks.offset.tolist() == [row[0] for row in rows]
        assert found.blocks.member.tolist() == [row[2] for row in rows]
        assert found.drives == tuple((drive_uuid(n), b"/drive/%d" % n) for n in range(generation.members))


@pytest.mark.parametrize("name", NAMES)
def test_rescue_gives_the_plain_golden_file_from_any_members_that_are_enough(
    name: str, tmp_path: Path
) -> None:
    generation = GENERATIONS[name]
    out = tmp_path / "out"
    for count in range(generation.members + 1):
        for left in itertools.combinations(paths(name), count):
            # Of a checkpoint without a single byte of data, any member is enough.
            enough = count >= (1 if name == "empty.stripe" else generation.members - generation.m) and count
            if not count:
                continue
            code = run(*left, "-o", out, "--force")
            assert code == (0 if enough else code) and (enough or code in (3, 4)), (left, code)
            assert out.exists() == bool(enough)
            if enough:
                assert out.read_bytes() == build(generation.golden)
                out.unlink()


def test_striate_loads_the_golden_members(tmp_path: Path) -> None:
    drives = [tmp_path / str(n) for n in range(3)]
    for n, path in enumerate(paths("flat.parity")):
        (drives[n] / "runs").mkdir(parents=True)
        shutil.copy(path, drives[n] / "runs/step-7")
    plain = tmp_path / "flat.safetensors"
    plain.write_bytes(build(FILES["flat"]))
    wanted, found = striate.load(plain), striate.load(drives[0] / "runs/step-7", drives=drives)
    assert list(found) == list(wanted)
    assert all(bits(found[key]) == bits(wanted[key]) for key in wanted)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def scattered(seed: int) -> Members:
    """Blocks in any order and with gaps, as no writer of ours places them: a reader trusts the manifest."""
    chooser = random.Random(seed)
    described = rich()
    rows, k, m = described.manifest.rows["blocks"], PARITY.k, PARITY.m
    chunks = described.manifest.head["chunks"]
    groups = [[*range(g * k, min(g * k + k, chunks)), *range(chunks + g * m, chunks + g * m + m)]
              for g in range(described.manifest.head["groups"])]  # fmt: skip
    where = [(0, 0)] * len(rows)
    for group in groups:
        for row, member in zip(group, chooser.sample(range(PARITY.members), len(group)), strict=True):
            where[row] = (member, 0)
    for member in range(PARITY.members):
        mine = [row for row in range(len(rows)) if where[row][0] == member]
        slots = chooser.sample(range(1, 20), len(mine))
        for row, slot in zip(mine, slots, strict=True):
            where[row] = (member, 4096 * slot)
    return describe(PARITY, where)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_in_any_order_and_with_gaps_are_found(seed: int, tmp_path: Path) -> None:
    described = scattered(seed)
    every = write(tmp_path / "m", described.pack())
    out = tmp_path / "out"
    for lost in itertools.combinations(every, PARITY.m):
        left = [path for path in every if path not in lost]
        random.Random(seed).shuffle(left)
        assert run(*left, "-o", out, "--force") == 0
        assert out.read_bytes() == RICH_PLAIN


def test_a_check_block_that_is_wrong_hides_behind_no_recovery(tmp_path: Path) -> None:
    described = describe(Generation(FILES["flat"], 2, 1, 3))
    chunks = described.manifest.head["chunks"]
    # Its digest fits, and it is no sum of the data: the chunk that it would give does not fit its own.
    wrong = bytes(len(described.blocks[chunks]))
    described.blocks[chunks] = wrong
    seed = xxhash.xxh3_64_intdigest(UUID + (1 << 63).to_bytes(8, "little"))
    described.manifest.rows["blocks"][chunks][5] = xxhash.xxh3_128_digest(wrong, seed=seed)
    every = write(tmp_path / "m", described.pack())
    first = described.manifest.rows["blocks"][0][2]
    left = [path for n, path in enumerate(every) if n != first]
    assert run(*left, "-o", tmp_path / "out") == 3
    assert not (tmp_path / "out").exists()
    assert run(*every, "-o", tmp_path / "out") == 0


def test_each_damaged_block_is_recovered_alone_and_too_many_name_the_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = rich()
    contents = described.pack()
    rows = described.manifest.rows["blocks"]
    chunks = described.manifest.head["chunks"]
    out = tmp_path / "out"

    def hurt(damaged: list[int]) -> list[Path]:
        changed = [bytearray(content) for content in contents]
        for row in damaged:
            changed[rows[row][2]][rows[row][0] + rows[row][1] - 1] ^= 0x20
        return write(tmp_path / "m", [bytes(content) for content in changed])

    # Two blocks of every group, all on different members: more members are hurt than could be lost whole.
    for damaged in (
        [n for n in range(chunks) if n % 2 == 0] + [chunks + g * 2 for g in range(3)],
        list(range(chunks)),
        list(range(chunks, len(rows))),
    ):
        assert run(*hurt(damaged), "-o", out, "--force") == 0
        assert out.read_bytes() == RICH_PLAIN
        out.unlink()

    capsys.readouterr()
    files = hurt([0, 1, chunks])
    assert run(*files, "-o", out) == 3
    said = capsys.readouterr().err
    assert "chunk 0" in said and "chunk 1" in said and "chunk 2" not in said
    assert "the block is damaged" in said and "too little is left of its group" in said
    assert not out.exists()
    with pytest.raises(rescue.Damaged) as caught:
        rescue.read(*files)
    lost = {name for damage in caught.value.damage for name in damage.tensors}
    # The two first chunks hold what stands first in the image: the whole of b.
    assert lost == {"b", "striate.tied"}
    assert f"{len(lost) - 1} tensors" not in said and "b, striate.tied" in said
    assert run(*files, "-o", out, "--partial") == 3
    assert set(rescue_names(out)) == {
        "a",
        "gone",
        "__striate__.s.3",
        "__striate__.s.4",
        "scalar",
        "__striate__.t.6",
    }


def rescue_names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        return list(opened.keys())


def test_one_whole_manifest_and_superblocks_enough_are_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = rich().pack()
    out = tmp_path / "out"

    def flipped(content: bytes, at: int) -> bytes:
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    # All manifests but one are damaged, which costs no block.
    hurt = [flipped(content, -3) for content in contents[:-1]] + contents[-1:]
    assert run(*write(tmp_path / "m", hurt), "-o", out) == 0
    assert out.read_bytes() == RICH_PLAIN
    out.unlink()
    assert capsys.readouterr().err.count("manifest is damaged") == len(contents) - 1
    # A member without a superblock is lost, and two may be.
    hurt = [flipped(content, 33) for content in contents[:2]] + contents[2:]
    assert run(*write(tmp_path / "m", hurt), "-o", out) == 0
    out.unlink()
    capsys.readouterr()
    hurt = [flipped(content, -3) for content in contents]
    assert run(*write(tmp_path / "m", hurt), "-o", out) == 4
    assert "no member of the newest generation has a whole manifest" in capsys.readouterr().err
    hurt = [flipped(content, 33) for content in contents]
    assert run(*write(tmp_path / "m", hurt), "-o", out) == 4
    assert "no member has a whole superblock" in capsys.readouterr().err
    # Cut short: what is left of the blocks still counts, the manifest is taken from another.
    hurt = [content[:-1] for content in contents[:-1]] + contents[-1:]
    assert run(*write(tmp_path / "m", hurt), "-o", out) == 0
    out.unlink()
    hurt = (
        [content[:4096] for content in contents[:2]]
        + [content[:100] for content in contents[2:3]]
        + contents[3:]
    )
    assert run(*write(tmp_path / "m", hurt), "-o", out) == 3
    assert not out.exists()


def test_a_copy_of_a_member_helps_where_the_member_is_damaged(tmp_path: Path) -> None:
    described = describe(Generation(FILES["flat"], 1, 0, 2))
    contents = described.pack()
    changed = bytearray(contents[0])
    changed[4096] ^= 1
    every = write(tmp_path / "m", [bytes(changed), contents[1], contents[0]])
    assert run(*every[:2], "-o", tmp_path / "out") == 3
    assert run(*every, "-o", tmp_path / "out") == 0
    assert (tmp_path / "out").read_bytes() == build(FILES["flat"])


def test_absent_members_are_named_with_the_place_they_were_written_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(paths("flat.parity")[0], paths("flat.parity")[2])
    assert (
        "member 1 of 3 is not among the files; it was written as /drive/1/runs/step-7"
        in capsys.readouterr().err
    )


def test_of_several_generations_the_newest_is_taken_and_the_others_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer, other = rich(), rich()
    for facts in newer.superblocks:
        facts["sequence"] = 9
    for facts in other.superblocks:
        facts["uuid"] = b"\xaa" * 16
    other.manifest.head["uuid"] = b"\xaa" * 16
    files = write(tmp_path / "old", other.pack()) + write(tmp_path / "new", newer.pack())
    assert run(*files, "-o", tmp_path / "out") == 0
    assert (tmp_path / "out").read_bytes()[8:].find(b'"striate.sequence":"00000000000000000009"') > 0
    assert capsys.readouterr().err.count("older generation") == PARITY.members


def test_a_member_of_a_newer_form_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = rich()
    described.superblocks[2]["version"] = 2
    assert run(*write(tmp_path / "m", described.pack())) == 1
    said = capsys.readouterr().err
    assert "member.2 has version 2 of the member form" in said and "damaged" not in said


def test_a_superblock_that_disagrees_with_the_manifest_costs_its_member_only(tmp_path: Path) -> None:
    for field, value in (("k", 1), ("m", 1), ("members", 5), ("chunk_bytes", 8192)):
        described = rich()
        described.superblocks[0][field] = value
        if field == "members":
            described.superblocks[0]["whole"] = bytes(32)
        out = tmp_path / f"out.{field}"
        assert run(*write(tmp_path / "m", described.pack()), "-o", out) == 0
        assert out.read_bytes() == RICH_PLAIN


def test_a_graph_too_large_for_a_writers_header_is_still_put_into_one(tmp_path: Path) -> None:
    noise = (
        random.Random(1).randbytes(9 << 20).decode("latin-1")
    )  # 13 MiB in UTF-8, more than 16 MiB in base64
    golden = Golden([Storage("t", "U8", (5000,))], graph={"noise": noise, "t": Tensor(0)})
    out = tmp_path / "out.safetensors"
    assert run(*write(tmp_path / "m", describe(Generation(golden, 2, 1, 3)).pack()[1:]), "-o", out) == 0
    assert out.read_bytes() == build(golden)
    assert striate.load(out)["noise"] == noise


def test_an_image_whose_header_no_plain_file_can_have_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue, "HEADER_BYTES_MAX", 4000)
    assert run(*paths("flat.parity"), "-o", tmp_path / "out") == 4
    assert "too many tensors for one safetensors file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- hostile manifests: both readers refuse the same, and nothing but by the rules ------------------------------

NASTY = (
    0, 1, 2, 3, 5, 17, 250, 4095, 4096, 4097, 12288, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 63,
    (1 << 64) - 4096, (1 << 64) - 1,
)  # fmt: skip
LIMITS = {"B": 1 << 8, "I": 1 << 32, "Q": 1 << 64}


def places(table: Table) -> tuple[list[int], list[int]]:
    return table.offsets.tolist(), table.lengths.tolist()


def verdicts(described: Members, number: int = 0) -> tuple[object, object]:
    """What our reader and the rescue reader find in a member: comparable facts, or None where they refuse."""
    raw = described.manifest.pack()
    content = described.pack()[number]
    facts = superblock.decode(content[:4096], path="p")
    ours: object = None
    try:
        found = extents.decode(raw, facts, path="p")
    except CorruptCheckpoint as e:
        refusal = e
    else:
        refusal = None
        table = found.table
        ours = (
            list(zip(table.names, table.dtypes, table.shapes, *places(table), strict=True)),
            table.locations_list(),
            {n: (plain.dtype, plain.shape) for n, plain in table.tensors.items()},
            found.ties,
            found.digests,
            found.graph_bytes,
            table.data_bytes,
        )
    if refusal is not None:
        assert (refusal.region, refusal.path, refusal.offset) == ("manifest", "p", facts.manifest_offset)
        assert DAMAGED in str(refusal)
    theirs: object = None
    try:
        header, blocks = rescue._member_manifest(raw, rescue._superblock("p", io.BytesIO(content)))
    except rescue.RescueError:
        pass
    else:
        theirs = (
            [(e.name, e.dtype, e.shape, e.begin, e.end - e.begin) for e in header.entries],
            header.locations,
            header.plains,
            header.ties,
            header.digests,
            header.graph_bytes,
            header.data_bytes,
        )
        assert ours is None or len(blocks) == len(found.blocks.offset)
    return ours, theirs


def cells() -> list[tuple[str, int, int, str]]:
    """Every number of every table: (table, row, column, form)."""
    manifest = rich().manifest
    found = [("head", 0, n, form) for n, form in enumerate(HEAD.values()) if form in LIMITS]
    for table, forms in ROWS.items():
        for row in range(len(manifest.rows[table])):
            found += [(table, row, column, form) for column, form in enumerate(forms) if form in LIMITS]
    return found


def change(described: Members, cell: tuple[str, int, int, str], value: int) -> bool:
    """Sets a number; False where it has that value already."""
    table, row, column, form = cell
    value %= LIMITS[form]
    if table == "head":
        name = list(HEAD)[column]
        was, described.manifest.head[name] = described.manifest.head[name], value
    else:
        was, described.manifest.rows[table][row][column] = described.manifest.rows[table][row][column], value
    return bool(was != value)


# Numbers that may be another without breaking a rule: the graph's length, another dtype as wide, another size beside a
# zero, another place that is free.
FREE = {
    ("head", 3), ("storages", 4), ("tensors", 2), ("dimensions", 0), ("blocks", 0), ("blocks", 2),
}  # fmt: skip


def test_every_number_of_a_manifest_under_every_nasty_value_is_refused_by_both_readers_or_by_none() -> None:
    original = rich()
    taken, tried, refused = set(), 0, 0
    for cell in cells():
        was = (
            original.manifest.head[list(HEAD)[cell[2]]]
            if cell[0] == "head"
            else original.manifest.rows[cell[0]][cell[1]][cell[2]]
        )
        for value in (*NASTY, was - 1, was + 1):
            described = original.copy()
            if not change(described, cell, value):
                continue
            ours, theirs = verdicts(described)
            assert ours == theirs, (cell, value)
            tried += 1
            refused += ours is None
            if ours is not None:
                taken.add((cell[0], cell[2]))
    assert taken <= FREE, "numbers that may have another value"
    assert tried > 2500 and refused > 0.9 * tried


@given(data=st.data())
def test_any_few_changes_of_a_manifest_are_judged_alike(data: st.DataObject) -> None:
    described = rich()
    for _ in range(data.draw(st.integers(1, 4))):
        cell = data.draw(st.sampled_from(CELLS))
        change(described, cell, data.draw(st.sampled_from(NASTY) | st.integers(0, (1 << 64) - 1)))
    ours, theirs = verdicts(described)
    assert ours == theirs


CELLS = cells()


@given(data=st.data())
def test_any_bytes_of_a_manifest_are_judged_alike(data: st.DataObject) -> None:
    described = rich()
    raw = bytearray(described.manifest.pack())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    described.manifest = Packed(bytes(raw))  # type: ignore[assignment]
    if raw:
        ours, theirs = verdicts(described)
        assert ours == theirs


class Packed:
    """A manifest that is bytes already."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def pack(self) -> bytes:
        return self.raw

    rows = rich().manifest.rows


def with_names(*names: tuple[int, str | bytes]) -> Callable[[Members], None]:
    """Gives storages other names; the strings stay in order."""

    def edit(described: Members) -> None:
        manifest = described.manifest
        at = sum(row[1] for row in manifest.rows["drives"]) + sum(
            row[1] for row in manifest.rows["locations"]
        )
        texts = []
        for row in manifest.rows["storages"]:
            texts.append(manifest.strings[at : at + row[2]])
            at += row[2]
        begin = at - sum(map(len, texts))
        for n, name in names:
            texts[n] = name.encode() if isinstance(name, str) else name
            manifest.rows["storages"][n][2] = len(texts[n])
        manifest.strings = manifest.strings[:begin] + b"".join(texts) + manifest.strings[at:]
        manifest.head["strings_length"] = len(manifest.strings)

    return edit


def row(table: str, number: int, **values: Any) -> Callable[[Members], None]:
    columns = {"offset": 0, "length": 1, "member": 2, "index": 0, "dtype": -2, "named": 5, "kind": 4}

    def edit(described: Members) -> None:
        for name, value in values.items():
            described.manifest.rows[table][number][columns[name]] = value

    return edit


def in_turn(*edits: Callable[[Members], None]) -> Callable[[Members], None]:
    def edit(described: Members) -> None:
        for each in edits:
            each(described)

    return edit


def without_graph(described: Members) -> None:
    described.manifest.graph = b""
    described.manifest.head |= {"graph_bytes": 0, "graph_length": 0}


def long_path(described: Members) -> None:
    manifest = described.manifest
    manifest.rows["drives"][0][1] += 4096
    manifest.strings = b"x" * 4096 + manifest.strings
    manifest.head["strings_length"] = len(manifest.strings)


def empty_run(described: Members) -> None:
    described.manifest.rows["locations"].insert(1, [0, 0])
    described.manifest.head["locations"] += 1


def uncovered_byte(described: Members) -> None:
    """A byte more of data in a last chunk that is as much longer, and so are its group's check blocks."""
    manifest = described.manifest
    manifest.head["data_bytes"] += 1
    chunks = manifest.head["chunks"]
    for n in (chunks - 1, *range(len(manifest.rows["blocks"]) - PARITY.m, len(manifest.rows["blocks"]))):
        manifest.rows["blocks"][n][1] += 1


def one_string_more(described: Members) -> None:
    described.manifest.strings += b"x"
    described.manifest.head["strings_length"] += 1


def swap_rows(table: str, a: int, b: int, column: int) -> Callable[[Members], None]:
    def edit(described: Members) -> None:
        rows = described.manifest.rows[table]
        rows[a][column], rows[b][column] = rows[b][column], rows[a][column]

    return edit


RULES: dict[str, tuple[Callable[[Members], None], str]] = {
    "magic": (lambda d: d.manifest.head.update(magic=b"STRIATE\0"), "does not begin"),
    "uuid": (lambda d: d.manifest.head.update(uuid=bytes(16)), "another generation"),
    "a name twice": (with_names((2, "a")), "one name"),
    "a name that is no UTF-8": (with_names((2, b"\xff")), "utf-8"),
    "a surrogate in a name": (with_names((2, b"\xed\xa0\x80")), "utf-8"),
    "the name of the metadata": (with_names((2, "__metadata__")), "__metadata__"),
    "the name of the graph": (with_names((2, "__striate__.graph")), "not its own"),
    "the index of another": (with_names((2, "__striate__.t.1")), "not its own"),
    "a named storage called raw": (with_names((2, "__striate__.s.2")), "not its own"),
    "a raw storage with a name": (with_names((3, "raw")), "raw storage 3"),
    "a tie to a raw storage": (with_names((0, "x")), "tied name"),
    "two names for one tie": (with_names((0, "tied")), "tied name"),
    "raw called named": (row("storages", 3, named=1), "not its own"),
    "named called raw": (row("storages", 1, named=0), "raw storage 1"),
    "a raw storage of another dtype": (row("storages", 3, kind=2), "raw storage 3"),
    "an overlap of storages": (row("storages", 0, offset=0), "gaps, or overlap"),
    "two storages in each other's place": (swap_rows("storages", 0, 1, 0), "gaps, or overlap"),
    "ties and no graph": (without_graph, "without a graph"),
    "a tensor of a named storage": (row("tensors", 0, index=1), "not of a raw storage"),
    "a tensor of another length": (row("tensors", 0, index=3), "not as long"),
    "two blocks of a group in one member": (swap_rows("blocks", 1, 4, 2), "in one member"),
    "a block over the superblock": (row("blocks", 0, offset=0), "superblock"),
    "two blocks in one place": (row("blocks", 0, offset=8192), "overlap"),
    "a block over the manifest": (row("blocks", 0, offset=4096 * 50), "overlaps the manifest"),
    "a block that ends past 2^63": (row("blocks", 0, offset=1 << 63), "too far"),
    "bytes after the end": (lambda d: setattr(d.manifest, "graph", d.manifest.graph + b"\0"), "end where it should"),
    "a path too long": (long_path, "path is too long"),
    "a location of no storage": (empty_run, "location has no storage"),
    "data that no storage covers": (uncovered_byte, "do not cover the data"),
    "a string more": (one_string_more, "strings do not end"),
    "no graph bytes": (lambda d: d.manifest.head.update(graph_bytes=0), "length of its graph"),
    "a graph too long": (lambda d: d.manifest.head.update(graph_bytes=(1 << 30) + 1), "length of its graph"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_manifest_that_breaks_a_rule_is_refused_by_it_though_its_digest_fits(rule: str) -> None:
    edit, message = RULES[rule]
    described = rich()
    edit(described)
    assert verdicts(described) == (None, None)
    raw = described.manifest.pack()
    facts = superblock.decode(described.pack()[0][:4096], path="p")
    with pytest.raises(CorruptCheckpoint, match=message):
        extents.decode(raw, facts, path="p")


def test_lengths_that_wrap_around_to_the_right_end_are_refused() -> None:
    described = describe(Generation(Golden([Storage(name, "U8", (20,)) for name in "abc"]), 1, 1, 2))
    half = (1 << 63) - 1
    for n, (offset, length) in enumerate([(0, half), (half, half), (2 * half, 62)]):
        described.manifest.rows["storages"][n][:2] = [offset, length]
        described.manifest.rows["dimensions"][n][0] = length
    assert (2 * half + 62) % (1 << 64) == described.manifest.head["data_bytes"]
    assert verdicts(described) == (None, None)


def test_a_manifest_whose_digest_does_not_fit_is_refused() -> None:
    described = rich()
    content = described.pack()[0]
    facts = superblock.decode(content[:4096], path="p")
    raw = bytearray(described.manifest.pack())
    for at in range(len(raw)):
        raw[at] ^= 1
        with pytest.raises(CorruptCheckpoint, match="checksum"):
            extents.decode(bytes(raw), facts, path="p")
        raw[at] ^= 1
    assert extents.decode(bytes(raw), facts, path="p").uuid == UUID


def test_claimed_counts_allocate_nothing() -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        for name in HEAD:
            if HEAD[name] not in LIMITS:
                continue
            for value in (1 << 28, (1 << 31) + 5, (1 << 40) + 5, (1 << 64) - 1):
                described = rich()
                described.manifest.head[name] = value % LIMITS[HEAD[name]]
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                assert (verdicts(described)[0] is None) == (name != "graph_bytes" or value > 1 << 30)
                assert tracemalloc.get_traced_memory()[1] - before < 8 << 20, (name, value)
    finally:
        tracemalloc.stop()


def test_hostile_names_in_a_superblock_are_refused_by_both_readers() -> None:
    for name in (
        b"/etc/passwd",
        b"../x",
        b"a/../b",
        b"a//b",
        b"",
        b".",
        b"a/.striate-label",
        b"a\0b",
        b"x" * 256,
    ):
        described = rich()
        described.superblocks[0] |= {"name": name, "name_length": len(name)}
        block = described.pack()[0]
        with pytest.raises(CorruptCheckpoint, match="superblock"):
            superblock.decode(block[:4096], path="p")
        with pytest.raises(rescue.RescueError):
            rescue._superblock("p", io.BytesIO(block))


@given(data=st.data())
def test_any_numbers_of_a_superblock_are_judged_alike(data: st.DataObject) -> None:
    described = rich()
    block = bytearray(described.pack()[0][:4080])
    for _ in range(data.draw(st.integers(1, 3))):
        at, form = data.draw(
            st.sampled_from([(8, "I"), (12, "I"), (72, "I"), (76, "I"), (80, "I"), (84, "I"), (88, "Q"), (96, "Q"),
                             (104, "Q"), (128, "Q"), (152, "Q"), (160, "H"), (162, "B"), (168, "B"), (1185, "B")])
        )  # fmt: skip
        limit = {"H": 1 << 16, **LIMITS}[form]
        value = data.draw(st.sampled_from(NASTY) | st.integers(0, (1 << 64) - 1)) % limit
        struct.pack_into("<" + form, block, at, value)
    sealed = bytes(block) + xxhash.xxh3_128_digest(bytes(block))
    try:
        ours: object = superblock.decode(sealed, path="p")
    except (CorruptCheckpoint, striate.UnsupportedFormat) as e:
        ours = type(e)
    try:
        theirs: object = rescue._superblock("p", io.BytesIO(sealed))
    except rescue._Newer:
        theirs = striate.UnsupportedFormat
    except rescue.RescueError:
        theirs = CorruptCheckpoint
    if isinstance(ours, superblock.Superblock):
        assert isinstance(theirs, rescue._Member)
        assert theirs.shape == (ours.members, ours.shape.data, ours.shape.checks, ours.chunk_bytes)
        assert (theirs.number, theirs.name) == (ours.member, ours.name)
        assert (theirs.manifest_offset, theirs.manifest_bytes) == (ours.manifest_offset, ours.manifest_bytes)
    else:
        assert ours is theirs

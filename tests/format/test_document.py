"""docs/format.md against the code: its tables, its numbers, its example."""

from __future__ import annotations

import ast
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from format.make_golden import FILES, GOLDEN, build, hexdump
from format.make_golden_members import DTYPES as MEMBER_DTYPES
from format.make_golden_members import GOLDEN_MEMBERS, HEAD, ROWS, SUPERBLOCK

from striate import extents, manifest, rescue, superblock
from striate.graph import DTYPES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/format.md").read_text()


def table_under(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without the row of titles."""
    section = re.split(rf"^#+ {re.escape(heading)}$", DOCUMENT, flags=re.MULTILINE)[1]
    rows = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert rows is not None
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[0].splitlines()]
    return cells[2:]


def test_the_numbers_are_those_of_the_code() -> None:
    rows = table_under("Numbers")
    assert len(rows) >= 10
    for name, value, _ in rows:
        constant = name.strip("`")
        assert getattr(manifest, constant) == int(value), constant
        # The rescue reader writes nothing that these two would bound, and picks no chunk size.
        if constant not in ("HEADER_BYTES_WRITE_MAX", "CHUNK_BYTES_DEFAULT", "GRAPH_TEXT_MAX"):
            assert getattr(rescue, constant) == int(value), constant


def test_the_numbers_of_member_files_are_those_of_the_code() -> None:
    rows = table_under("Numbers of member files")
    assert len(rows) == 6
    for name, value, _ in rows:
        constant = name.strip("`")
        assert getattr(superblock, constant) == int(value), constant
        if constant != "DRIVES_MAX":  # the rescue reader knows no volumes
            assert getattr(rescue, constant) == int(value), constant


def test_the_rows_of_a_members_manifest_have_the_sizes_documented() -> None:
    section = re.split(r"^#+ Manifest of a member$", DOCUMENT, flags=re.MULTILINE)[1]
    sizes = dict(re.findall(r"^\| (\w+) \| \S.* x (\d+) \|", section, flags=re.MULTILINE))
    for part, dtype in {
        "drives": extents.DRIVE,
        "locations": extents.LOCATION,
        "storages": extents.STORAGE,
        "tensors": extents.TENSOR,
        "ties": extents.TIE,
        "blocks": extents.BLOCK,
    }.items():
        assert int(sizes[part]) == dtype.itemsize, part


def test_the_dtypes_are_those_of_the_code() -> None:
    documented = {name.strip("`"): int(size) for name, size, _ in table_under("Dtypes")}
    assert documented == manifest.DTYPE_BYTES == rescue.DTYPE_BYTES
    for code, dtype in DTYPES.items():
        assert documented[code] == dtype.itemsize, code


def test_the_keys_are_those_that_the_code_writes_in_their_order() -> None:
    documented = [key.strip("`") for key, _ in table_under("Metadata") if key.startswith("`")]
    written = set()
    for golden in FILES.values():
        content = build(golden)
        keys = list(manifest.decode(content[: header_bytes(content)], file_bytes=None).metadata)
        keys = [key for key in keys if key not in golden.ties]
        assert keys == [key for key in documented if key in keys]
        written.update(keys)
    assert written == set(documented)
    always = [key for key in documented if all(key.encode() in build(golden) for golden in FILES.values())]
    assert sum(key.startswith("striate.") for key in always) == 7, '"there are at least seven"'


def header_bytes(content: bytes) -> int:
    return manifest.header_length(content[:8], file_bytes=None)


def test_the_numbers_in_the_prose_are_those_of_the_tables() -> None:
    for value in (manifest.HEADER_BYTES_MAX, manifest.HEADER_BYTES_WRITE_MAX, manifest.GRAPH_TEXT_MAX):
        assert len(re.findall(rf"\b{value}\b", DOCUMENT)) >= 2, value
    assert f"to {manifest.GRAPH_BYTES_MAX} |" in DOCUMENT
    assert f"a power of two, {manifest.CHUNK_BYTES_MIN} to {manifest.CHUNK_BYTES_MAX} |" in DOCUMENT
    assert (
        f"these {len(manifest._CHECKSUM_KEY)} bytes:\n\n```\n{manifest._CHECKSUM_KEY.decode()}\n```"
        in DOCUMENT
    )
    assert f", version {manifest.VERSION}\n" in DOCUMENT.splitlines(keepends=True)[0]
    assert [int(version) for version, _ in table_under("Versions")][-1] == manifest.VERSION


def test_the_example_is_the_file_that_it_names() -> None:
    shown = re.search(r"<!-- example.*?-->\n```\n(.*?)\n```\n", DOCUMENT, flags=re.DOTALL)
    assert shown is not None
    content = (GOLDEN / "example.safetensors").read_bytes()
    assert shown[1] == hexdump(content)
    assert f"8 + N is {header_bytes(content)};" in DOCUMENT


def test_the_example_of_a_member_is_the_file_that_it_names() -> None:
    shown = re.search(
        r"`tests/format/golden_members/([^`]*)`[^#]*<!-- example of a member.*?-->\n```\n(.*?)\n```\n",
        DOCUMENT,
        flags=re.DOTALL,
    )
    assert shown is not None
    content = (GOLDEN_MEMBERS / shown[1]).read_bytes()
    assert shown[2] == hexdump(content)
    facts = superblock.decode(content[:4096], path="")
    assert (facts.manifest_offset, facts.name) == (0x2000, b"step-1")
    assert content[0x1000:0x1016] == (GOLDEN / "example.safetensors").read_bytes()[0x1000:]


# The forms of struct, by the type and the size that the document gives.
FORMS = {("u8", 1): "B", ("u16", 2): "H", ("u32", 4): "I", ("u64", 8): "Q"}


def fields_after(line: str) -> list[tuple[int, int, str]]:
    """Offset, size and form of each field in the table that follows a line of the document."""
    rows = re.search(re.escape(f"\n{line}\n\n") + r"((?:\|.*\n)+)", DOCUMENT)
    assert rows is not None, line
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1].splitlines()[2:]]
    return [
        (int(offset), int(size), FORMS.get((kind, int(size)), f"{size}s"))
        for offset, size, kind, *_ in cells
        if size.isdigit()
    ]


@pytest.mark.parametrize(
    ("line", "forms", "dtype"),
    [
        ("### Superblock", tuple(SUPERBLOCK.values()), None),
        ("Head:", tuple(HEAD.values()), extents.HEAD),
        ("A drive:", ROWS["drives"], extents.DRIVE),
        ("A location:", ROWS["locations"], extents.LOCATION),
        ("A storage:", ROWS["storages"], extents.STORAGE),
        ("A tensor:", ROWS["tensors"], extents.TENSOR),
        ("A tie:", ROWS["ties"], extents.TIE),
        ("A block:", ROWS["blocks"], extents.BLOCK),
    ],
)
def test_each_table_of_a_member_has_the_fields_documented(
    line: str, forms: tuple[str, ...], dtype: np.dtype[np.void] | None
) -> None:
    fields = fields_after(line)
    assert tuple(form for _, _, form in fields[: len(forms)]) == forms
    at = 0
    for offset, size, _ in fields:
        assert offset == at
        at += size
    if dtype is None:
        assert [size for _, size, _ in fields[len(forms) :]] == [2894, 16], "reserved bytes, and the digest"
        assert at == superblock.SUPERBLOCK_BYTES
        return
    assert (len(fields), at) == (len(forms), dtype.itemsize)
    assert dtype.fields is not None
    found = [dtype.fields[name] for name in dtype.names or ()]
    assert [(place[1], place[0].itemsize) for place in found] == [
        (offset, size) for offset, size, _ in fields
    ]
    numbers = ["u" if form in FORMS.values() else "bytes" for form in forms]
    assert [place[0].kind.replace("V", "bytes").replace("S", "bytes") for place in found] == numbers


def test_the_codes_of_dtypes_are_their_rows_in_the_table() -> None:
    documented = tuple(name.strip("`") for name, _, _ in table_under("Dtypes"))
    assert documented == tuple(manifest.DTYPE_BYTES) == rescue.DTYPES == MEMBER_DTYPES


def test_label_and_tombstone_have_the_fields_documented() -> None:
    drive, other = bytes(range(16)), bytes(range(16, 32))
    label = superblock.encode_label(superblock.Label(b"v" * 16, drive, 5, (other, drive)))
    tombstone = superblock.encode_tombstone(superblock.Tombstone(b"a/b", other, 6))
    for block, line, values in (
        (label, "`.striate-label` names the drive:", [b"STRLABL\0", 1, 2, b"v" * 16, drive, 5]),
        (
            tombstone,
            "`.striate-gone-<n>`, n being 32 hex digits, the XXH3-128 of the name with seed 0, says that "
            "generations of that name were deleted:",
            [b"STRGONE\0", 1, 3, b"a/b".ljust(1024, b"\0"), other, 6],
        ),
    ):
        fields = fields_after(line)
        for (offset, _, form), value in zip(fields, values, strict=True):
            assert struct.unpack_from(f"<{form}", block, offset)[0] == value, (line, offset)
        assert block[4080:] == xxhash.xxh3_128_digest(block[:4080])
    assert label[56:88] == other + drive and not any(label[88:4080])
    assert not any(tombstone[1064:4080])


def test_the_hexdump_is_that_of_the_tool() -> None:
    import shutil
    import subprocess

    if shutil.which("hexdump") is None:
        pytest.skip("hexdump (bsdextrautils) is not installed")
    for path in sorted([*GOLDEN.iterdir(), *GOLDEN_MEMBERS.iterdir()]):
        made = subprocess.run(["hexdump", "-C", path], capture_output=True, text=True, check=True).stdout
        assert made == hexdump(path.read_bytes()) + "\n"


def test_the_rescue_reader_stands_alone() -> None:
    imported = set()
    for node in ast.walk(ast.parse(Path(rescue.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").split(".")[0])
    import sys

    assert imported - set(sys.stdlib_module_names) == {"xxhash"}

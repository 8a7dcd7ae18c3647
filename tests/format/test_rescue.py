"""The rescue command: whole, damaged in each region, several copies, and what it must never do to files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from format import make_golden
from format.make_golden import FILES, GOLDEN, Golden, Storage, Tensor, build, data_of, length_of
from safetensors import safe_open

from striate import rescue

FLAT = FILES["flat"]
SCRIPT = Path(rescue.__file__)

# Six chunks and a bit; "c" lies in the last two, "a" in the first.
WIDE = Golden(
    [
        Storage("a", "F32", (512,)),
        Storage("b", "U8", (8192,)),
        Storage("gone", "U8", (0,)),
        Storage(None, None, nbytes=12288),
        Storage("c", "U8", (4001,)),
    ],
    graph={"a": Tensor(0), "tied": Tensor(0), "b": Tensor(1), "gone": Tensor(2), "c": Tensor(4)},
    ties={"tied": "a"},
)


def run(*arguments: object) -> int:
    return rescue.main([str(argument) for argument in arguments])


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    path = tmp_path / "wide.safetensors"
    path.write_bytes(build(WIDE))
    return path


def header_bytes(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def damaged(path: Path, at: int, name: str = "damaged.safetensors") -> Path:
    """A copy with one bit flipped at an offset of the data (negative: of the header)."""
    content = bytearray(path.read_bytes())
    content[header_bytes(content) + at] ^= 1
    copy = path.with_name(name)
    copy.write_bytes(content)
    return copy


def left_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_whole_checkpoint_is_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert run(GOLDEN / f"{name}.safetensors", "-o", out) == 0
    assert out.read_bytes() == (GOLDEN / f"{name}.safetensors").read_bytes()
    assert left_in(tmp_path) == {"out.safetensors"}
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~umask


def test_it_runs_as_a_single_file_with_xxhash_alone(tmp_path: Path, wide: Path) -> None:
    alone = tmp_path / "alone"
    (alone / "modules").mkdir(parents=True)
    shutil.copy(SCRIPT, alone / "rescue.py")
    shutil.copytree(Path(xxhash.__file__).parent, alone / "modules" / "xxhash")
    out = tmp_path / "out.safetensors"
    # -S and -E: no site-packages, so neither torch nor numpy nor striate can be found.
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", "import sys, runpy; sys.path.append(sys.argv.pop(1)); "
         "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
         alone / "modules", alone / "rescue.py", wide, "-o", out],
        capture_output=True, text=True, check=False, cwd=alone,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == wide.read_bytes()


def test_it_runs_as_a_module(tmp_path: Path, wide: Path) -> None:
    out = tmp_path / "out.safetensors"
    command = [sys.executable, "-m", "striate.rescue", wide, "-o", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "5 tensors" in done.stderr
    assert out.read_bytes() == wide.read_bytes()


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "exit codes:" in shown
    assert all(f"  {code}  " in shown for code in range(5))
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 2


def test_without_output_it_only_checks(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(wide) == 0
    assert run(damaged(wide, 0)) == 3
    assert "chunk 0" in capsys.readouterr().err
    assert left_in(tmp_path) == {"wide.safetensors", "damaged.safetensors"}


def test_every_byte_of_the_data_is_verified(wide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = wide.read_bytes()
    start = header_bytes(content)
    for at in [*range(0, len(content) - start, 997), len(content) - start - 1]:
        bad = damaged(wide, at)
        assert run(bad) == 3
        shown = capsys.readouterr().err
        chunk = at // 4096
        assert f"chunk {chunk}, offset {start + chunk * 4096}, " in shown
        with pytest.raises(rescue.Damaged) as caught:
            rescue.read(bad)
        assert [d.chunk for d in caught.value.damage] == [chunk]


def test_damage_names_the_tensors_that_lie_in_it(wide: Path) -> None:
    # Data: "gone" (empty), the raw storage and b (4096 divides both; table order), a, c.
    in_data = {0: ["b"], 2: ["__striate__.s.3"], 5: ["a", "c", "tied"], 6: ["c"]}
    for chunk, names in in_data.items():
        with pytest.raises(rescue.Damaged) as caught:
            rescue.read(damaged(wide, chunk * 4096))
        assert sorted(caught.value.damage[0].tensors) == sorted(names)


def test_damage_writes_nothing_unless_asked_to(wide: Path, tmp_path: Path) -> None:
    bad = damaged(wide, 3 * 4096)
    before = left_in(tmp_path)
    assert run(bad, "-o", tmp_path / "out.safetensors") == 3
    assert left_in(tmp_path) == before


def test_partial_writes_the_tensors_that_are_whole(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert run(damaged(wide, 6 * 4096), "-o", out, "--partial") == 3
    with safe_open(out, "pt") as opened:
        assert sorted(opened.keys()) == sorted(["a", "b", "gone", "__striate__.s.3"])
        assert opened.metadata() == {"format": "pt", "tied": "a"}
        for n in (0, 1, 3):
            storage = WIDE.storages[n]
            tensor = opened.get_tensor(storage.name or f"__striate__.s.{n}")
            assert tensor.view(-1).numpy().tobytes() == data_of(n, length_of(storage))
        assert opened.get_slice("a").get_dtype() == "F32"
    assert run(damaged(wide, 5 * 4096), "-o", out, "--partial", "--force") == 3
    with safe_open(out, "pt") as opened:
        assert sorted(opened.keys()) == sorted(["b", "gone", "__striate__.s.3"])
        assert opened.metadata() == {"format": "pt"}, "the name tied to a lost tensor is lost too"
    with pytest.raises(rescue.RescueError):
        rescue.read(out)  # it is plain safetensors now, and says so


def test_one_damaged_chunk_is_taken_from_a_copy(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = damaged(wide, 0, "first.safetensors")
    second = damaged(damaged(wide, 2 * 4096, "x"), -1, "second.safetensors")  # header, too
    out = tmp_path / "out.safetensors"
    assert run(second, first, "-o", out) == 0
    assert out.read_bytes() == wide.read_bytes()
    assert "header" in capsys.readouterr().err
    assert rescue.read(first, second).tensors["a"].data == data_of(0, 2048)
    assert run(first, first) == 3


def test_a_chunk_of_another_place_or_generation_does_not_fit(wide: Path) -> None:
    content = wide.read_bytes()
    start = header_bytes(content)
    swapped = bytearray(content)
    swapped[start : start + 4096] = content[start + 8192 : start + 12288]
    swapped[start + 8192 : start + 12288] = content[start : start + 4096]
    path = wide.with_name("swapped.safetensors")
    path.write_bytes(swapped)
    with pytest.raises(rescue.Damaged) as caught:
        rescue.read(path)
    assert [d.chunk for d in caught.value.damage] == [0, 2]


def test_a_file_that_is_cut_short_loses_what_is_not_there(wide: Path, tmp_path: Path) -> None:
    content = wide.read_bytes()
    short = tmp_path / "short.safetensors"
    short.write_bytes(content[: header_bytes(content) + 5 * 4096 + 100])
    with pytest.raises(rescue.Damaged) as caught:
        rescue.read(short)
    assert [(d.chunk, d.reason) for d in caught.value.damage] == [
        (5, "the file ends before"),
        (6, "the file ends before"),
    ]
    out = tmp_path / "out.safetensors"
    assert run(short, "-o", out, "--partial") == 3
    with safe_open(out, "pt") as opened:
        assert "b" in opened.keys()  # noqa: SIM118 - not a mapping
    assert run(short, wide, "-o", out, "--force") == 0
    assert out.read_bytes() == content


def test_bytes_after_the_end_are_left_out_and_told(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.safetensors"
    long.write_bytes(wide.read_bytes() + b"more")
    out = tmp_path / "out.safetensors"
    assert run(long, "-o", out) == 0
    assert "bytes after the end" in capsys.readouterr().err
    assert out.read_bytes() == wide.read_bytes()


def test_every_flipped_bit_of_a_header_is_noticed(tmp_path: Path) -> None:
    content = (GOLDEN / "example.safetensors").read_bytes()
    path = tmp_path / "flipped.safetensors"
    for at in [*range(1024), *range(1024, header_bytes(content), 101)]:
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(rescue.RescueError) as caught:
            rescue.read(path)
        assert not isinstance(caught.value, rescue._NotOurs), f"byte {at} made it a foreign file"


def test_a_damaged_header_gives_nothing_but_with_partial_what_the_digests_prove(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = wide.read_bytes()
    bad = damaged(wide, content.index(b'"striate.checksum":"') + 20 - header_bytes(content))
    out = tmp_path / "out.safetensors"
    assert run(bad, "-o", out) == 4
    assert not out.exists()
    assert run(bad, "-o", out, "--partial") == 3
    assert "the header is damaged" in capsys.readouterr().err
    with safe_open(out, "pt") as opened:
        assert sorted(opened.keys()) == ["__striate__.s.3", "a", "b", "c", "gone"]
    assert out.read_bytes() != wide.read_bytes()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np
    from safetensors.numpy import save

    foreign = save({"a": np.zeros(4)})
    for content, code in [
        (b"", 4),
        (b"PK\x03\x04" + bytes(5000), 4),
        (bytes(8192), 4),
        (b"STRIATE\0" + bytes(5000), 4),
        (foreign, 1),
    ]:
        path = tmp_path / "x"
        path.write_bytes(content)
        assert run(path, "-o", tmp_path / "out") == code
        assert str(path) in capsys.readouterr().err
    newer = (
        (GOLDEN / "flat.safetensors").read_bytes().replace(b'"striate.version":"1"', b'"striate.version":"2"')
    )
    at = newer.index(b'"striate.checksum":"') + 20
    header = newer[:at] + b"0" * 32 + newer[at + 32 : header_bytes(newer)]
    path.write_bytes(newer[:at] + xxhash.xxh3_128_hexdigest(header).encode() + newer[at + 32 :])
    assert run(path) == 1
    assert "take a newer one" in capsys.readouterr().err
    assert run(tmp_path / "missing") == 1
    assert run(tmp_path) == 1
    assert left_in(tmp_path) == {"x"}


def test_an_existing_output_is_kept_unless_forced(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    assert run(wide, "-o", out) == 1
    assert out.read_bytes() == b"mine"
    assert run(damaged(wide, 0), "-o", out, "--force") == 3
    assert out.read_bytes() == b"mine", "a rescue that wrote nothing replaces nothing"
    assert run(wide, "-o", out, "--force") == 0
    assert out.read_bytes() == wide.read_bytes()


def test_an_input_is_never_overwritten(wide: Path, tmp_path: Path) -> None:
    content = wide.read_bytes()
    link, hard = tmp_path / "link", tmp_path / "hard"
    link.symlink_to(wide)
    hard.hardlink_to(wide)
    for out in (wide, link, hard):
        assert run(wide, "-o", out, "--force", "--partial") == 1
    assert run(GOLDEN / "flat.safetensors", wide, "-o", wide, "--force") == 1
    assert wide.read_bytes() == content
    assert left_in(tmp_path) == {"wide.safetensors", "link", "hard"}


def test_a_failed_write_leaves_nothing(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(wide, "-o", tmp_path / "no" / "out") == 1
    assert run(wide, "-o", tmp_path) == 1
    command = f"ulimit -f 4; trap '' XFSZ; exec {sys.executable} {SCRIPT} {wide} -o {tmp_path}/out"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert left_in(tmp_path) == {"wide.safetensors"}


def test_a_failed_sync_is_a_failure(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(rescue.os, "fsync", fail)
    assert run(wide, "-o", tmp_path / "out") == 1
    assert left_in(tmp_path) == {"wide.safetensors"}


def test_a_read_error_is_damage_of_its_chunk_alone(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rescue._read_at
    bad = header_bytes(wide.read_bytes()) + 4096

    def failing(file: object, offset: int, length: int) -> bytes:
        if offset <= bad < offset + length and offset:
            raise OSError(5, "Input/output error")
        return real(file, offset, length)  # type: ignore[arg-type]

    monkeypatch.setattr(rescue, "_read_at", failing)
    with pytest.raises(rescue.Damaged) as caught:
        rescue.read(wide)
    assert [(d.chunk, d.reason) for d in caught.value.damage] == [(1, "read error: Input/output error")]


def test_names_from_the_file_cannot_move_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(build(Golden([Storage("\x1b[2J\u202e", "U8", (8,))])))
    assert run(damaged(path, 0)) == 4
    shown = capsys.readouterr().err
    assert "\\x1b[2J\\u202e" in shown
    assert "\x1b" not in shown


def test_memory_is_bounded_by_the_chunk(tmp_path: Path) -> None:
    import tracemalloc

    path, out = tmp_path / "x.safetensors", tmp_path / "out.safetensors"
    path.write_bytes(build(Golden([Storage("a", "U8", (6 << 20,)), Storage("b", "U8", ((6 << 20) + 1,))])))
    bad = damaged(path, 0)
    tracemalloc.start()
    assert run(path, "-o", out) == 0
    assert run(bad, "-o", out, "--force", "--partial") == 3
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert out.stat().st_size > 6 << 20
    assert peak < 3 << 20


def test_copies_of_different_checkpoints_are_told_apart(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_golden, "UUID", bytes(range(16, 32)))
    other = tmp_path / "other"
    other.write_bytes(build(FLAT))
    assert run(wide, other, "-o", tmp_path / "out") == 1
    assert "another checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""File systems and callers that are out of the ordinary, and still must not lose or leak anything."""

from __future__ import annotations

import errno
import io
import os
import stat
import threading

import pytest
import torch
from safetensors.torch import save_file

import striate
from striate import _engine


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_takes_a_save(tmp_path, code):
    path = tmp_path / "a"
    engine = _engine.Io("posix", faults=[_engine.Fault("lock", count=0, value=code)])
    striate.save({"w": torch.arange(9.0)}, path, engine=engine)
    assert torch.equal(striate.load(path)["w"], torch.arange(9.0))
    assert os.listdir(tmp_path) == ["a"]


def test_a_private_file_is_never_open_to_others_while_it_is_replaced(tmp_path):
    path = tmp_path / "a"
    striate.save({"w": torch.zeros(3)}, path)
    path.chmod(0o600)
    engine = _engine.Io("posix", trace=True)
    before = os.umask(0)
    try:
        striate.save({"w": torch.ones(3)}, path, engine=engine)
        made = [t for t in engine.traces() if t.op == "open" and t.name and t.name.startswith(b".striate-")]
        # Refused before it had any byte, the save leaves what the file was made with.
        stopped = _engine.Io(
            "posix", faults=[_engine.Fault("chmod", count=0), _engine.Fault("unlink", count=0)]
        )
        path.chmod(0o640)
        with pytest.raises(striate.DriveError):
            striate.save({"w": torch.ones(3)}, path, engine=stopped)
    finally:
        os.umask(before)
    assert made
    [left] = [name for name in os.listdir(tmp_path) if name != "a"]
    assert stat.S_IMODE((tmp_path / left).stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("shape", ["/proc/self/fd/{}", "/dev/fd/{}"])
def test_a_descriptors_own_path_is_written_through_and_never_replaced(shape):
    fd = os.memfd_create("checkpoint")
    try:
        path = shape.format(fd)
        striate.save({"w": torch.arange(5.0)}, path)
        assert os.fstat(fd).st_size > 4096
        assert torch.equal(striate.load(path)["w"], torch.arange(5.0))
        assert not os.path.exists("/memfd:checkpoint (deleted)")
    finally:
        os.close(fd)


def test_tensors_that_change_while_a_pipe_takes_them_are_noticed_by_the_save():
    tensor = torch.zeros(3 << 20)  # three chunks, of which the later ones change
    reader, writer = os.pipe()

    def change_after_the_header():
        with os.fdopen(reader, "rb") as source:
            source.read(4096)
            tensor.fill_(1)
            while source.read(1 << 16):
                pass

    thread = threading.Thread(target=change_after_the_header)
    thread.start()
    with (
        os.fdopen(writer, "wb", buffering=0) as sink,
        pytest.raises(striate.StriateError, match="changed while they were written"),
    ):
        striate.save({"w": tensor}, sink)
    thread.join()


def test_a_foreign_tensor_named_mustard_is_no_tar(tmp_path):
    path = tmp_path / "a.safetensors"
    for pad in range(200, 257):
        save_file({"x" * 8: torch.ones(1)}, path, metadata={"k": "." * pad + "mustard"})
        if path.read_bytes()[257:262] == b"ustar":
            break
    assert path.read_bytes()[257:262] == b"ustar"
    assert torch.equal(striate.load(path)["x" * 8], torch.ones(1))


def test_a_stream_that_claims_more_than_there_is_memory_is_an_error_of_ours():
    size = 1 << 46
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    with pytest.raises(striate.NotEnoughMemory, match="no memory"):
        striate.load(io.BytesIO(len(header).to_bytes(8, "little") + header + bytes(64)))


def test_a_file_opened_for_text_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "a"
    striate.save({"w": torch.ones(1)}, path)
    with open(path, encoding="latin-1") as f, pytest.raises(TypeError, match="mode 'rb'"):
        striate.load(f)


def test_control_characters_of_a_path_do_not_reach_the_terminal(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        striate.load(os.fsencode(tmp_path) + b"/\xff\n\x1b[31m.st")
    assert str(caught.value).isprintable()
    assert r"\xff\n\x1b[31m.st" in str(caught.value)


def test_overlapping_targets_are_filled_one_after_the_other(tmp_path):
    path = tmp_path / "a"
    striate.save({"a": torch.full((2048,), 1.0), "b": torch.full((2048,), 2.0), "c": torch.ones(8)}, path)
    flat = torch.zeros(3072)
    target = {"a": flat[:2048], "b": flat[1024:], "c": torch.zeros(8)}
    striate.load_into(target, path)
    assert torch.equal(target["c"], torch.ones(8))
    assert set(flat.tolist()) == {1.0, 2.0}

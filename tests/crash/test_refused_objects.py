"""What cannot be pickled fails before the drive is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crash.checkpoints import NAME, require_alone, save, version_at

import striate
from striate._engine import Io


class RaisesHalfWay(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("half-way")


class RaisesInState:
    def __init__(self) -> None:
        self.tensor = torch.ones(1000)

    def __getstate__(self) -> Any:
        raise KeyError("half-way")


@pytest.mark.parametrize(
    "obj",
    [
        {"weights": torch.ones(5000), "function": lambda: None},
        {"weights": torch.ones(5000), "last": torch.ones(3).as_subclass(RaisesHalfWay)},
        [torch.ones(5000), RaisesInState()],
    ],
    ids=["a lambda", "a subclass of tensor that raises", "a state that raises"],
)
def test_an_object_that_cannot_be_pickled_leaves_the_old_checkpoint_untouched(
    tmp_path: Path, obj: Any
) -> None:
    path = tmp_path / NAME
    save(1, path)
    before = path.stat()
    io = Io("posix", trace=True)
    with pytest.raises(Exception, match=r"lambda|half-way|pickle"):
        striate.save(obj, path, engine=io)
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert version_at(path) == 1
    require_alone(path)
    changing = {"open", "write", "allocate", "truncate", "rename", "unlink", "sync"} - {"open"}
    assert not [entry for entry in io.traces() if entry.op in changing]

"""A million tiny tensors, once: bounded in time and memory.

Nothing may grow with the square of the count, nor cost kilobytes a tensor. A folder of its own, because half a minute
of CPU is enough in one run of the suite, and too much under a sanitizer.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import striate

COUNT = 1_000_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(600)
def test_million_tiny_tensors(tmp_path: Path) -> None:
    target = tmp_path / "million"
    state = {str(n): torch.full((1,), float(n)) for n in range(COUNT)}
    before_bytes, before_s = resident_bytes(), time.process_time()
    result = striate.save(state, target)
    saved_s = time.process_time()
    assert result.tensors_count == COUNT
    loaded = striate.load(target)
    loaded_s = time.process_time()
    assert list(loaded) == list(state)
    assert torch.equal(torch.cat(list(loaded.values())), torch.arange(COUNT, dtype=torch.float32))
    # CPU seconds, for the machine may be busy: 10 and 15 here. A quadratic step would take hours.
    assert saved_s - before_s < 60 and loaded_s - saved_s < 60, (saved_s - before_s, loaded_s - saved_s)
    # About 1 kB a tensor, most of it torch's own objects.
    assert resident_bytes() - before_bytes < 3 << 30
    state.clear()
    loaded.clear()
    one = striate.load_tensors(target, ["999999"])
    assert one["999999"].item() == 999999.0

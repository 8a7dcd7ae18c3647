"""Whether AddressSanitizer is in this process, and what cannot be tested in it."""

from __future__ import annotations

from pathlib import Path

import pytest

UNDER_ASAN = "libasan" in Path("/proc/self/maps").read_text()

# glibc holds its allocator's locks over a fork; the sanitizer's allocator, of GCC 12 at least, does not: a child that
# was forked while another thread allocated waits for ever at its own first allocation.
forks_beside_threads = pytest.mark.skipif(
    UNDER_ASAN,
    reason="the sanitizer's allocator is not safe in a child that is forked beside running threads",
)

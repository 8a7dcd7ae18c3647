"""What all tests share: where they may write, which engines there are, how long a property may take."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import hypothesis
import pytest

from support.loop_drives import CannotMakeDrives, LoopDrive, loop_drives

# Two cores that others use too: a deadline would measure the neighbours. The same examples each time: whether a change
# is good must not depend on luck. HYPOTHESIS_PROFILE=search looks for new ones.
hypothesis.settings.register_profile("striate", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "striate"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--io-uring-refused",
        action="store_true",
        help="io_uring must be refused to this run: tests of the uring engine itself are left out, the rest must pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that. Here and there Ctrl-C
    # is what a test is about.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "needs_io_uring: tests io_uring itself; left out under --io-uring-refused only"
    )
    if config.getoption("--io-uring-refused"):
        # The whole run exists to see the fallback: the warning is right, once or often.
        config.addinivalue_line("filterwarnings", "ignore::striate.errors.EngineFallback")


def pytest_sessionstart(session: pytest.Session) -> None:
    """A run that says it goes without io_uring must go without; any other must have it. No silent half."""
    from striate.liburing import available

    refused = bool(session.config.getoption("--io-uring-refused"))
    usable, why_not = available()
    if refused and usable:
        pytest.exit("--io-uring-refused was given, and io_uring works here", returncode=2)
    if not refused and not usable:
        pytest.exit(
            f"io_uring does not work here: {why_not}.\nHalf of the tests are about it. Allow it, or run the rest "
            "with --io-uring-refused",
            returncode=2,
        )


def _is_about_io_uring(item: pytest.Item) -> bool:
    if item.get_closest_marker("needs_io_uring"):
        return True
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return any(isinstance(value, str) and value == "uring" for value in parameters.values())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--io-uring-refused"):
        return
    about = [item for item in items if _is_about_io_uring(item)]
    if about:
        config.hook.pytest_deselected(items=about)
        items[:] = [item for item in items if item not in set(about)]


@pytest.fixture
def make_loop_drives(tmp_path: Path) -> Iterator[Callable[..., list[LoopDrive]]]:
    """``loop_drives`` with the test's own folder and life. Skips where drives cannot be made, saying why."""
    if os.geteuid() != 0:
        pytest.skip("loop devices and mounts need root")
    with ExitStack() as stack:

        def make(count: int, **options: object) -> list[LoopDrive]:
            made: AbstractContextManager[list[LoopDrive]]
            made = loop_drives(tmp_path, count, **options)  # type: ignore[arg-type]
            try:
                return stack.enter_context(made)
            except CannotMakeDrives as error:
                pytest.skip(str(error))

        yield make

"""Fixtures: MindSpore's own files, unpacked once a session (and once a worker of pytest-xdist); URLs; and a summary."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import helpers
import pytest
from commands import case  # noqa: F401 -- a fixture of several test files
from compared import sides  # noqa: F401 -- likewise
from faulty import faults  # noqa: F401 -- likewise
from faulty_proxy import proxy  # noqa: F401 -- likewise
from forked import forked  # noqa: F401 -- likewise
from hypothesis import HealthCheck, settings
from remotes import asked, bucket, root, server, several_groups  # noqa: F401 -- likewise; they have one server
from samples import PROFILE, SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

collect_ignore = ["docs_site.py"]  # it belongs to mkdocs, which the extra `docs` brings

# Deterministic and without deadlines by default, so that a run says the same on a slow machine and a fast
# one; HYPOTHESIS_PROFILE=thorough tries all examples, of which the default tries some, and =search looks for new ones.
_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("default", derandomize=True, max_examples=100 // SHARE, database=None, **_COMMON)
settings.register_profile("thorough", derandomize=True, max_examples=100, database=None, **_COMMON)
settings.register_profile("search", max_examples=2000, print_blob=True, **_COMMON)
settings.load_profile(PROFILE)


@pytest.fixture(scope="session")
def mindspore_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of `tests/data/README.md`: `cases`, `real`, `strategies` and so on. Read only."""
    return helpers.unpack(tmp_path_factory.mktemp("mindspore"))


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Let no test wait until the disk has what it writes, which takes longer the busier it is.

    Processes that tests start do wait, and tests of failures patch what is here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        patch.setattr(os, "fdatasync", lambda _fd: None, raising=False)
        yield


if "COLUMNS" not in os.environ:
    os.unsetenv("COLUMNS")  # readline, which pytest imports, sets it for the commands that tests start

_COLUMNS = ("faults", "not finished", "resumed", "told to add an option")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what came of the faults, by kind. Here, since the controller of pytest-xdist loads no conftest below."""
    rows = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "faults"
    ]
    if not rows:
        return
    terminalreporter.section("faults on purpose")
    terminalreporter.write_line(f"{'kind':36}" + "".join(f"{column:>24}" for column in _COLUMNS))
    for kind, *numbers in [*rows, ("in all", *(sum(column) for column in list(zip(*rows, strict=True))[1:]))]:
        terminalreporter.write_line(f"{kind:36}" + "".join(f"{number:>24}" for number in numbers))


@pytest.fixture(autouse=True)
def _no_lock_is_left() -> Iterator[None]:
    """Locks at URLs are refreshed by a thread; whoever takes one gives it up."""
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "reshard-lock"]
    for thread in left:
        thread.join(timeout=1)  # one that was asked to end
    assert not any(thread.is_alive() for thread in left)

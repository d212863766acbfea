"""Fixtures: MindSpore's own files, unpacked once a session (and once a worker of pytest-xdist); and URLs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import helpers
import pytest
from hypothesis import HealthCheck, settings
from remotes import asked, bucket, root, server  # noqa: F401 -- fixtures of several test files, with one server

if TYPE_CHECKING:
    from pathlib import Path

# Deterministic and without deadlines by default, so that a run tells the same on a slow machine and a fast
# one; HYPOTHESIS_PROFILE=search looks for new examples.
_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("default", derandomize=True, max_examples=100, database=None, **_COMMON)
settings.register_profile("search", max_examples=2000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def mindspore_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of `tests/data/README.md`: `cases`, `real`, `strategies` and so on. Read only."""
    return helpers.unpack(tmp_path_factory.mktemp("mindspore"))

"""Sizes as people write them, in Python as on the command line."""

from __future__ import annotations

import pytest
from refusals import refused

from reshard.errors import UsageError
from reshard.sizes import parse_size, size_of


@pytest.mark.parametrize(("text", "nbytes"), [("1GB", 10**9), ("512MiB", 1 << 29), (" 1.5 kb ", 1500), ("0", 0)])
def test_a_size_has_a_unit(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "12", "1 XB", "-1GB", "GB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with refused(UsageError, "bad-size", "memory"):
        size_of(text, "memory")

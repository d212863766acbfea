"""A local store of few open files, and what it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reshard.core.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store() -> Iterator[LocalStore]:
    one = LocalStore(most_open=4)
    yield one
    one.close()
    assert not one.files.handles  # nobody uses a file any more


def read(store: LocalStore, path: Path, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    store.read_into(str(path), offset, memoryview(buffer))
    return bytes(buffer)

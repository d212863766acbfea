"""Tensors of every kind, and what comes of files that are loaded under MindSpore's names."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from refusals import check

from reshard.errors import ReshardError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]

KEY = b"0123456789ABCDEF"
MODES = ["AES-GCM", "AES-CBC", "SM4-CBC"]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(3)


def tensors() -> dict[str, Array]:
    """One tensor of every kind that both formats have, a scalar and one without elements among them."""
    found: dict[str, Array] = {
        f"layer.{name}": RNG.integers(0, 2, (3, 5)).astype(name)
        if name == "bool"
        else RNG.integers(0, 100, (2, 3)).astype(name)
        for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    }
    for name in ("float16", "float32", "float64"):
        found[f"layer.{name}"] = RNG.standard_normal((4, 3)).astype(name)
    found["bf"] = RNG.standard_normal((7,)).astype(BFLOAT16)
    found["step"] = np.array(7, np.int64)
    found["rate"] = np.array(0.25, np.float32)
    return found


def assert_same(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    """Names, dtypes, shapes and bits are equal."""
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        if isinstance(value, str):
            assert loaded[name] == value
        else:
            array = loaded[name].asnumpy()
            assert (array.dtype, array.shape, array.tobytes()) == (value.dtype, value.shape, value.tobytes()), name
            assert loaded[name].name == name


def ms_arrays(loaded: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, str) else value.asnumpy() for name, value in loaded.items()}


@contextmanager
def refused_as_mindspore(kind: type[Exception], code: str, place: str) -> Iterator[None]:
    """Expect the kind of error that MindSpore raises, whose text names a place; without a code, none of `reshard`'s."""
    with pytest.raises(kind, match=re.escape(place)) as caught:
        yield
    if code:
        check(caught.value, code)
    else:
        assert not isinstance(caught.value, ReshardError), repr(caught.value)


@contextmanager
def wrong_key(path: str | Path, mode: str) -> Iterator[pytest.ExceptionInfo[SourceError]]:
    """Expect a file, or one of a directory, to be refused for its key, or for what that key makes of it.

    A wrong key passes the padding of a CBC block once in 256 times.
    """
    with pytest.raises(SourceError, match=re.escape(str(path))) as caught:
        yield caught
    if mode == "AES-GCM" or "wrong-key" in caught.value.codes:
        check(caught.value, "wrong-key")
    else:
        check(caught.value, "not-a-checkpoint", mode)


@pytest.fixture(autouse=True)
def warnings_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "reshard.mindspore")

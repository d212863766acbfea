"""The table of dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from refusals import refused

from reshard.dtypes import BY_MINDSPORE, BY_NAME, BY_SAFETENSORS, INT4, STR, DType, by_name
from reshard.errors import SourceError, UsageError

ARRAYS = [dtype for dtype in BY_NAME.values() if dtype is not STR]


def test_a_dtype_has_one_name_in_each_format() -> None:
    bfloat16 = BY_NAME["bfloat16"]
    assert bfloat16 is BY_MINDSPORE["BFloat16"] is BY_SAFETENSORS["BF16"]
    assert str(bfloat16) == "bfloat16"
    assert bfloat16.numpy() == ml_dtypes.bfloat16
    assert bfloat16.carrier() == np.uint16


def test_int4_is_a_byte_that_safetensors_calls_int8() -> None:
    assert INT4.safetensors == BY_NAME["int8"].safetensors == "I8"
    assert BY_SAFETENSORS["I8"] is BY_NAME["int8"]
    assert INT4.numpy() == np.int8  # all eight bits survive
    assert BY_MINDSPORE["Int4"] is INT4


def test_text_is_not_a_array_in_safetensors() -> None:
    assert STR.safetensors is None
    assert STR.numpy().itemsize == STR.itemsize == 4


def test_an_unknown_name_is_refused_as_the_caller_says() -> None:
    for error in (UsageError, SourceError):
        with refused(error, "unknown-dtype", "'float7'"):
            by_name("float7", error)


@pytest.mark.parametrize("dtype", ARRAYS, ids=str)
def test_bits_and_numbers_have_one_width(dtype: DType) -> None:
    assert dtype.numpy().itemsize == dtype.carrier().itemsize == dtype.itemsize
    assert dtype.carrier().kind == "u"
    assert dtype is INT4 or dtype.bits or dtype.numpy().name == dtype.name


@pytest.mark.parametrize("dtype", ARRAYS, ids=str)
def test_bits_survive_the_way_through_the_carrier(dtype: DType) -> None:
    every = np.arange(256, dtype=np.uint8).repeat(dtype.itemsize)
    if dtype.name == "bool":
        every = every[:2]
    there = every.view(dtype.carrier()).view(dtype.numpy())
    np.testing.assert_array_equal(there.view(np.uint8), every)


def test_names_are_not_shared() -> None:
    assert len(BY_NAME) == len({dtype.name for dtype in BY_NAME.values()})
    named = [dtype.mindspore for dtype in BY_NAME.values() if dtype.mindspore]
    assert len(named) == len(BY_MINDSPORE) == 15
    assert len(BY_SAFETENSORS) == sum(dtype.safetensors is not None for dtype in BY_NAME.values()) - 1

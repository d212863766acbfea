"""Pickles that are written again of what was read: Python reads the same values, and what is shared stays shared."""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from reshard.errors import SourceError
from reshard.kits.torch import pickles
from reshard.kits.torch.pickles import unpickled
from reshard.kits.torch.pickling import pickled
from reshard.kits.torch.tensors import PickleBytes

if TYPE_CHECKING:
    from pathlib import Path


class Created:
    """An object that is created without a call of its class, which would fail."""

    def __init__(self, *, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Created) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


ATOMS = (
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text() | st.binary()
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
    | st.tuples(inner) | st.tuples(inner, inner, inner, inner) | st.builds(deque, st.lists(inner))
    | st.builds(OrderedDict, st.dictionaries(st.text(), inner))
    | st.builds(Created, value=inner) | st.sets(st.integers() | st.text()) | st.frozensets(st.integers()),
    max_leaves=30,
)  # fmt: skip


def loads(content: bytes) -> Any:
    return pickle.loads(content)  # noqa: S301 -- made here


def read(content: bytes) -> Any:
    return unpickled(PickleBytes("x", content), "a value", outside=True, keeps=True)


@given(VALUES, st.integers(2, 5))
def test_values_stay_as_they_are(value: Any, protocol: int) -> None:
    """Whether the reader follows instructions at once or one by one."""
    content = pickle.dumps(value, protocol)
    again = pickled(read(content))
    assert loads(again) == value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickles, "_RUN", re.compile(pickles._PLAIN + b"*+", re.DOTALL))
        assert pickled(read(content)) == again


def instructions(content: bytes) -> list[tuple[str, object]]:
    """The instructions of a pickle of protocol 2, with each text where it is used, whether or not it is shared."""
    result: list[tuple[str, object]] = []
    numbered: dict[int, tuple[str, object]] = {}
    others = 0
    for opcode, argument, _ in pickletools.genops(content):
        if "PUT" in opcode.name:
            is_text = result[-1][0] == "BINUNICODE"
            others += not is_text
            numbered[argument] = result[-1] if is_text else ("again", others)
        else:
            result.append(numbered[argument] if "GET" in opcode.name else (opcode.name, argument))
    return result


def test_all_pickles_of_deepspeed_have_the_same_instructions_again(mindspore_data: Path) -> None:
    count = 0
    for path in sorted((mindspore_data / "deepspeed").rglob("*.pt")):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
            assert instructions(pickled(read(content))) == instructions(content), path
            count += 1
    assert count > 1000


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_is_shared_stays_shared(protocol: int) -> None:
    shared = [1, "a long enough text"]
    value = {"a": shared, "b": (shared, shared), "c": [*shared], "d": Created(value=[])}
    value["self"] = value
    found = loads(pickled(read(pickle.dumps(value, protocol))))
    assert found["a"] is found["b"][0] is found["b"][1]
    assert found["c"] == found["a"]
    assert found["c"] is not found["a"]
    assert found["d"].value == []
    assert found["self"] is found


def test_long_values_and_many_entries() -> None:
    value = {"many": {str(number): None for number in range(2500)}, "list": list(range(2500)), "long": b"x" * 999_999}
    assert loads(pickled(read(pickle.dumps(value, 4)))) == value


def test_equal_texts_are_written_once_whoever_made_them() -> None:
    """So a plan that is made again has the same bytes."""
    name = "name of a tensor"
    assert pickled([name, "".join(list(name))]) == pickled([name, name])


def test_what_is_nested_too_deeply_is_refused() -> None:
    with refused(SourceError, "too-large"):
        pickled(read(b"\x80\x02" + b"]" * 100_001 + b"a" * 100_000 + b"."))

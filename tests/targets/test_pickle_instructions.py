"""Pickles as programs: what is written again has the same instructions, whoever wrote it."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from reshard.errors import SourceError
from reshard.formats.deepspeed.writer import instructions
from reshard.formats.deepspeed.writer.instructions import (
    GraphNode,
    dict_of,
    list_of,
    parsed,
    references,
    text,
    text_of,
    tuple_of,
    value_of,
    written,
)
from reshard.kits.torch.pickles import unpickled
from reshard.kits.torch.tensors import PickleBytes

if TYPE_CHECKING:
    from pathlib import Path

ATOMS = (
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text() | st.binary()
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
    | st.tuples(inner) | st.tuples(inner, inner, inner, inner)
    | st.builds(OrderedDict, st.dictionaries(st.text(), inner))
    | st.sets(st.integers() | st.text()) | st.frozensets(st.integers()) | st.builds(bytearray, st.binary()),
    max_leaves=30,
)  # fmt: skip


def loads(content: bytes) -> Any:
    return pickle.loads(content)  # noqa: S301 -- made here


def again(content: bytes) -> bytes:
    """The pickle that is written of a pickle that `kits.torch.pickles` accepts."""
    unpickled(PickleBytes("x", content), "a value", outside=True)
    return written(*parsed(content))


@given(VALUES, st.integers(2, 5))
def test_values_stay_as_they_are(value: Any, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    found = again(content)
    assert loads(found) == value
    if protocol == 2:
        assert found == content
    assert again(found) == found


def test_all_pickles_of_deepspeed_are_the_same_bytes_again(mindspore_data: Path) -> None:
    count = 0
    for path in sorted((mindspore_data / "deepspeed").rglob("*.pt")):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
            assert again(content) == content, path
            count += 1
    assert count > 1000


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_is_shared_stays_shared(protocol: int) -> None:
    shared = [1, "a long enough text"]
    found = loads(again(pickle.dumps({"a": shared, "b": (shared, shared), "c": [*shared]}, protocol)))
    assert found["a"] is found["b"][0] is found["b"][1]
    assert found["c"] == found["a"]
    assert found["c"] is not found["a"]


def test_many_entries() -> None:
    value = {"many": {str(number): number for number in range(2500)}, "list": list(range(2500))}
    assert again(pickle.dumps(value, 2)) == pickle.dumps(value, 2)
    root, protocol = parsed(pickle.dumps(value, 2))
    assert isinstance(root, GraphNode)
    many = root.entries["many"]
    assert isinstance(many, GraphNode)
    changed = root.with_entries({"many": many.with_entries({"7": None, "8": text("eight"), "new": value_of((1, 2))})})
    expected = {key: item for key, item in value["many"].items() if key != "7"} | {"8": "eight", "new": (1, 2)}
    assert loads(written(changed, protocol)) == {**value, "many": expected}
    assert [text_of(key) for key, _ in many.pairs] == list(value["many"])  # as it was


def test_deep_values_need_no_recursion() -> None:
    found, _ = parsed(b"\x80\x02" + b"]" * 100_001 + b"a" * 100_000 + b".")
    assert written(found, 2).count(b"a" * 100_000) == 1


def test_objects_that_contain_themselves_are_refused() -> None:
    value: list[Any] = [1]
    value.append({"self": value})
    with refused(SourceError, "bad-pickle"):
        again(pickle.dumps(value, 2))
    with refused(SourceError, "bad-pickle"):  # a constant cannot change
        parsed(b"\x80\x02K\x01N\x62.")


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_MOST_OBJECTS", [[] for _ in range(99)]), ("_MOST_INSTRUCTIONS", [1] * 99)):
        with monkeypatch.context() as patch:
            parsed(pickle.dumps(value, 2))
            patch.setattr(instructions, name, 99)
            with refused(SourceError, "too-large"):
                parsed(pickle.dumps(value, 2))


def test_values_are_made() -> None:
    made = dict_of([(text("a"), list_of([value_of(1), value_of(2.5)])), (value_of(0), tuple_of([text("x")] * 5))])
    assert loads(written(made, 2)) == {"a": [1, 2.5], 0: ("x",) * 5}
    assert loads(written(tuple_of([]), 2)) == ()
    assert text_of(value_of("é\n")) == "é\n"
    assert text_of(value_of(("é",))) is None
    assert list(references(made)) == []

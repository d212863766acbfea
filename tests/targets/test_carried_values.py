"""Pickled values that are carried: what is written again is the same, whoever wrote it."""

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
from reshard.formats.deepspeed import carried
from reshard.formats.deepspeed.carried import parsed, value_of, written
from reshard.kits.torch.pickles import unpickled
from reshard.kits.torch.tensors import PickleBytes

if TYPE_CHECKING:
    from pathlib import Path

ATOMS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    ATOMS | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
    | st.tuples(inner) | st.tuples(inner, inner, inner, inner)
    | st.builds(OrderedDict, st.dictionaries(st.text(), inner))
    | st.sets(st.integers() | st.text()) | st.frozensets(st.integers()) | st.builds(bytearray, st.binary()),
    max_leaves=30,
)  # fmt: skip


class Config(dict[str, Any]):
    """A dict of another class, which has attributes, too."""


class Names(list[str]):
    """A list of another class."""


def loads(content: bytes) -> Any:
    return pickle.loads(content)  # noqa: S301 -- made here


def again(content: bytes) -> bytes:
    """The pickle that is written of a pickle that `kits.torch.pickles` accepts."""
    unpickled(PickleBytes("x", content), "a value", outside=True)
    return written(parsed(content))


@given(VALUES)
def test_values_stay_as_they_are(value: Any) -> None:
    content = pickle.dumps(value, 2)
    assert again(content) == content


def test_all_pickles_of_deepspeed_are_the_same_bytes_again(mindspore_data: Path) -> None:
    count = 0
    for path in sorted((mindspore_data / "deepspeed").rglob("*.pt")):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
            assert again(content) == content, path
            count += 1
    assert count > 1000


def test_objects_of_other_classes() -> None:
    config, names = Config(a=1, b=[2]), Names(["x", "y"])
    config.own = names  # type: ignore[attr-defined]
    names.owner = config  # type: ignore[attr-defined]
    found = loads(again(pickle.dumps(config, 2)))
    assert (type(found), found, found.own) == (Config, config, names)
    assert found.own.owner is found


def test_what_is_shared_stays_shared() -> None:
    shared: list[Any] = [1, "a long enough text"]
    shared.append(shared)
    found = loads(again(pickle.dumps({"a": shared, "b": (shared, shared), "c": [*shared]}, 2)))
    assert found["a"] is found["b"][0] is found["b"][1] is found["a"][2]
    assert found["c"] is not found["a"]


def test_many_entries_are_changed() -> None:
    value = {"many": {str(number): number for number in range(2500)}, "list": list(range(2500)), 0: "number"}
    root = parsed(pickle.dumps(value, 2))
    many = root.entries["many"]
    more = {**many.entries, "8": "eight", "new": value_of((1, 2))}
    del more["7"]
    changed = root.with_entries(root.entries | {"many": many.with_entries(more)})
    assert loads(written(changed)) == {**value, "many": more}
    assert written(root) == pickle.dumps(value, 2)  # as it was


REFUSED = {
    "bad-pickle": (
        pickle.dumps({1, 2}, 4), pickle.dumps(b"bytes", 3), pickle.dumps(bytearray(3), 5), b"\x80\x02K\x01N\x62.",
        b"\x80\x02(X\x07\x00\x00\x00storageK\x01X\x01\x00\x00\x000K\x01K\x01K\x01tQ.", b"\x80\x02K\x01Q.",
    ),
    "too-large": (b"\x80\x02" + b"]" * 100_001 + b"a" * 100_000 + b".", pickle.dumps([1] * 99, 2)),
}  # fmt: skip


@pytest.mark.parametrize(("code", "content"), [(code, each) for code, every in REFUSED.items() for each in every])
def test_what_is_refused(code: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(content) < 1000 and code == "too-large":
        monkeypatch.setattr(carried, "_MOST_BYTES", 99)
    with refused(SourceError, code):
        written(parsed(content))

"""A JSON object of objects is read member by member, in pieces of any length, as the whole would be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.checkpoint2 import members as members_module
from reshard.formats.checkpoint2.members import members

if TYPE_CHECKING:
    from pathlib import Path

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    content=st.dictionaries(st.text(), st.dictionaries(st.text(), values) | values),
    piece=st.integers(1, 9),
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
)
def test_as_read_whole(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, object], piece: int, indent: int | None,
    ascii_only: bool,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("json") / "a.json"
    text = json.dumps(content, indent=indent, ensure_ascii=ascii_only)
    try:
        path.write_text(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return
    expected = []
    for key, inner in content.items():
        expected += (
            [(key, name, value) for name, value in inner.items()] if isinstance(inner, dict) else [(key, "", inner)]
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members_module, "_PIECE", piece)
        assert list(members(str(path))) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the end"),
        ("[]", "expected '{'"),
        ('{"a": {"b": 1}', "expected '[,}]'|the end"),
        ('{"a": {"b": 1} {', "expected ','"),
        ('{"a": {"b" 1}}', "expected ':'"),
        ('{"a": {"b": 1}, "a": {}}', "is there twice"),
        ('{"a": {"b": 1, "b": 2}}', "is there twice"),
        ('{"a": {"b": {"c": 1, "c": 2}}}', "is there twice"),
        ('{"a": {"b": 01}}', "expected ','"),
        ('{"a": {"b": nul}}', "not JSON"),
        ('{"a": {1: 2}}', "expected text"),
        ('{"a": {}} x', "something follows"),
        ('{"a": {"b": ' + "[" * 100_000 + "}}", "nested too deeply|not JSON"),
        ('{"a": {"b": ' + "1" * 5000 + "}}", "limit"),
    ],
)
def test_what_is_not_such(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        list(members(str(path)))


def test_a_value_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "_PIECE", 8)
    monkeypatch.setattr(members_module, "_LONGEST", 64)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"a": {"b": [1] * 99}}))
    with pytest.raises(ValueError, match=" 64 "):
        list(members(str(path)))

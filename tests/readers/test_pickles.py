"""Pickles as data: nothing is imported or called, and what is too much is refused at once.

`targets/test_written_pickles.py` reads all that Python's pickler writes, and writes it again.
"""

from __future__ import annotations

import pickle
import time
import tracemalloc
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from refusals import refused

from reshard.core.model.entries import RangeReader
from reshard.errors import SourceError
from reshard.kits.torch import pickles
from reshard.kits.torch.pickles import Name, Pairs, PickledObject, unpickled

if TYPE_CHECKING:
    from pathlib import Path

HEAD = b"\x80\x04"


def read(path: Path, content: bytes, *, outside: bool = False) -> Any:
    path.write_bytes(content)
    return unpickled(RangeReader(str(path), window=0), "a small one", outside=outside)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "p"


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_are_records_of_what_would_make_them(path: Path, protocol: int) -> None:
    found = read(path, pickle.dumps([1 + 2j, PurePosixPath("a/b"), OrderedDict(x=1), {3}], protocol))
    number, place, ordered, some = found
    assert (number.name, number.arguments) == ("complex", (1.0, 2.0))
    assert (place.name, "/".join(place.arguments)) == ("PurePosixPath", "a/b")  # in one text from Python 3.14 on
    assert (ordered.name, ordered.arguments, list(ordered.items.items())) == ("OrderedDict", (), [("x", 1)])
    assert (some.name, some.arguments) == ("set", ([3],))


class Slotted:
    __slots__ = ("a", "b")


def test_states_are_found_by_name(path: Path) -> None:
    value = Slotted()
    value.a, value.b = 1, [2]
    found = read(path, pickle.dumps(value))
    assert (found.field("a"), found.field("b"), found.field("c")) == (1, [2], None)


def test_a_pickle_of_many_pieces(path: Path) -> None:
    value = [f"{number:060d}" for number in range(50_000)]
    assert read(path, pickle.dumps(value, 4)) == value


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_long_texts_are_passed_over(path: Path, protocol: int) -> None:
    """A tokenizer or a program's settings next to weights: a text that long names nothing."""
    longest = pickles._LONGEST
    value = {"a": "x" * longest, "b": "é" * longest, "c": b"y" * 40_000_000, "d": [1.5, b"z" * (longest + 1), "w"]}
    found = dict(read(path, pickle.dumps(value, protocol)).items())
    assert found["a"] == value["a"]
    assert [one.name for one in (found["b"], found["c"])] == ["131.1 kB of text or bytes", "40.0 MB of text or bytes"]
    assert found["d"][::2] == [1.5, "w"]
    assert found["d"][1].name == "65.5 kB of text or bytes"


def test_nothing_is_called(path: Path, tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, (f"open({str(tmp_path / 'made')!r}, 'w')",)

    found = read(path, pickle.dumps(Bad()))
    assert found.made_by == Name("builtins", "exec")
    missing = read(path, HEAD + b"cno_such_module\nx\n)R.")
    assert missing.made_by == Name("no_such_module", "x")
    assert not (tmp_path / "made").exists()


def test_things_outside(path: Path) -> None:
    content = HEAD + b"K\x07Q."
    assert read(path, content, outside=True).arguments == 7
    with refused(SourceError, "bad-pickle"):
        read(path, content)


REFUSED = {
    "nothing": b"",
    "not a pickle": b"version: 1",
    "text in front of a pickle": b"N\x80\x04.",
    "protocol 0": b"(dp0\n.",
    "protocol 6": b"\x80\x06N.",
    "cut off": HEAD + b"X\x10\x00\x00\x00abc",
    "cut off in a frame": HEAD + b"\x95\xff\xff\xff\xff\xff\xff\xff\xff",
    "no end": HEAD + b"N",
    "something behind its end": HEAD + b"N.N.",
    "two values": HEAD + b"NN.",
    "a mark that is not taken": HEAD + b"(N.",
    "a mark that is not there": HEAD + b"t.",
    "a value that is not there": HEAD + b"\x86.",
    "a value in front of a mark": HEAD + b"N(\x85t.",
    "a text that is not UTF-8": HEAD + b"\x8c\x01\xff.",
    "a text of 4 GB": HEAD + b"X\xff\xff\xff\xff.",
    "bytes of 16 EB": HEAD + b"\x8e" + b"\xff" * 8 + b".",
    "an integer of 2 GB": HEAD + b"\x8b\xff\xff\xff\x7f.",
    "an integer of 255 bytes": HEAD + b"\x8a\xff" + b"\xff" * 255 + b".",
    "a name of numbers": HEAD + b"K\x01K\x02\x93.",
    "a name without an end": HEAD + b"c" + b"a" * 100_000,
    "a call of a value": HEAD + b"K\x01)R.",
    "arguments that are none": HEAD + b"ca\nb\nK\x01R.",
    "a state of a number": HEAD + b"K\x01}b.",
    "two states": HEAD + b"ca\nb\n)R}b}b.",
    "items of a number": HEAD + b"K\x01K\x02a.",
    "items of a tuple": HEAD + b")K\x02a.",
    "pairs of a list": HEAD + b"]K\x01K\x02s.",
    "a key without a value": HEAD + b"}(Nu.",
    "an item of a dict": HEAD + b"}Na.",
    "a state of a name": HEAD + b"ca\nb\n}b.",
    "a call with keywords": HEAD + b"ca\nb\n)}\x92.",
    "a place that is not there": HEAD + b"h\x00.",
    "a place of 4 billion": HEAD + b"]r\xff\xff\xff\xff.",
    "an extension": HEAD + b"\x82\x01.",
    "a persistent id in text": HEAD + b"P1\n.",
    "an instance of protocol 0": HEAD + b"(ia\nb\n.",
    "a buffer from outside": b"\x80\x05\x97.",
    "an integer in text": HEAD + b"I" + b"9" * 100_000 + b"\n.",
    "a copy of the top": HEAD + b"N2.",
    "marks": HEAD + b"(" * 10_000_000,
    "lists in lists": HEAD + b"]" * 10_000_000 + b"a" * 9_999_999 + b".",
    "values in a row": HEAD + b"N" * 10_000_000,
    "a memo of nothing": HEAD + b"N" + b"\x94" * 10_000_000,
    "a memo of one thing": HEAD + b"]" + b"\x94" * 10_000_000,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_ones_are_refused_at_once(path: Path, name: str) -> None:
    path.write_bytes(REFUSED[name])
    assert_refused(path)


@pytest.mark.parametrize("begin", [b"", HEAD + b"\x8d" + (1 << 30).to_bytes(8, "little")])
def test_a_gigabyte_of_zeros(path: Path, begin: bytes) -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(1 << 30)
    assert_refused(path)


def assert_refused(path: Path) -> None:
    """In a second (here two, as memory is traced), within 100 MB."""
    tracemalloc.start()
    began = time.process_time()
    try:
        with refused(SourceError, "bad-pickle", path):
            unpickled(RangeReader(str(path), window=0), "a small one")
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 2


def test_what_doubles_again_and_again_takes_no_more(path: Path) -> None:
    """Each list has the one before twice: 2**60 of the first, if anything ever walked through it."""
    steps = b"".join(b"](h" + bytes([place]) + b"h" + bytes([place]) + b"e\x94" for place in range(60))
    began = time.process_time()
    found = read(path, HEAD + b"(]\x94" + steps + b"t.")
    assert len(found) == 61
    assert found[-1][0] is found[-1][1] is found[-2]
    tuples = b"".join(b"h" + bytes([place]) + b"h" + bytes([place]) + b"\x86\x94" for place in range(60))
    found = read(path, HEAD + b"(K\x01\x85\x94" + tuples + b"t}h\x3cNs\x86.")
    ((key, _),) = found[1].items()  # as a key, to be hashed if anything were
    assert key is found[0][-1]
    assert time.process_time() - began < 1


class Thing:
    def __init__(self, state: dict[Any, Any]) -> None:
        self.__dict__.update(state)


def test_objects_and_pushes_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_PIECE", 1 << 10)
    for value in ([Thing({"a": 1}) for _ in range(1000)], [1] * 4000, "x" * 64_000):
        with monkeypatch.context() as patch:
            patch.setattr(pickles, "_MOST_OBJECTS", 900)
            with refused(SourceError, "bad-pickle"):
                read(path, pickle.dumps(value))
        read(path, pickle.dumps(value))


def test_instances_allow_more_values(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and bytes are compared with instances of classes, and these with bytes."""
    monkeypatch.setattr(pickles, "_PIECE", 1 << 10)
    monkeypatch.setattr(pickles, "_FREE_OBJECTS", 1 << 8)
    monkeypatch.setattr(pickles, "_FREE_INSTANCES", 1 << 7)
    things = [Thing({"name": f"name {number}", "shape": (number, 2), "more": [number, {}]}) for number in range(300)]
    for value in ([[] for _ in range(300)], [1] * 1100, ["x" * 100 + str(number) for number in range(200)]):
        with refused(SourceError, "bad-pickle"):
            read(path, pickle.dumps([value, "x" * 2000]))
        assert read(path, pickle.dumps([things, value, "x" * 2000]))[1] == value
    with refused(SourceError, "bad-pickle"):
        read(path, HEAD + b"(ca\nb\n\x94](" + b"h\0)\x81" * 2000 + b"et.")


def test_objects_in_objects(path: Path) -> None:
    """However deep they are, nothing follows them."""
    begin = HEAD + b"ca\nb\n\x94)\x81\x94}\x94("
    content = begin + b"N" + b"h\0)\x81\x94}\x94(N" * 20_000 + b"N" + b"ub" * 20_001 + b"."
    found = read(path, content)
    assert found.field("x") is None
    assert found.state[1].state[1].name == "b"
    del found


def test_sets_in_sets(path: Path) -> None:
    """However deep they are, items that are added to the outermost are its own."""
    found = read(path, HEAD + b"cbuiltins\nset\n\x94" + b"h\0" * 2999 + b"]" + b"\x85R" * 3000 + b"(K\1K\2e.")
    assert (found.name, found.items) == ("set", [1, 2])


@pytest.mark.parametrize(
    "begin", [b"\x85", b"K\x07\x86", b"ub", b"(ub", b"}(ub", b"N}(ub", b"ca\nb\n(}(ub", b"ca\nb\n()\x81"]
)
def test_phrases_without_what_they_need(path: Path, begin: bytes) -> None:
    with refused(SourceError, "bad-pickle", path):
        read(path, HEAD + begin + b"\x94\x85\x94R\x94.")


def test_attributes_that_all_objects_share_are_not_looked_through_again_and_again(path: Path) -> None:
    shared = Thing({f"{number:06d}": 1 for number in range(100_000)} | {"last": 1})
    found = read(path, pickle.dumps(shared))
    began = time.process_time()
    assert [found.field("last") for _ in range(10_000)] == [None] * 10_000
    assert time.process_time() - began < 1


def test_a_large_state_that_many_objects_share_is_not_copied(path: Path) -> None:
    state = b"}\x94(" + b"K\0" * 400_000 + b"u"
    began = time.process_time()
    values = read(path, HEAD + b"(ca\nb\n\x94" + state + b"h\0)Rh\1b" * 30_000 + b"t.")
    assert values[-1].state is values[1]
    assert time.process_time() - began < 1


def test_attributes_in_slots_and_a_dict() -> None:
    record = PickledObject(None, None)
    record.state = (Pairs(["b", 2]), Pairs(["a", 1]))
    assert record.fields("a", "b") == [1, 2]
    assert record.fields("b", "a", "c") == [2, 1, None]

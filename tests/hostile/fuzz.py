"""Fuzzing of what reads headers and strategies: real files, changed by Hypothesis, for so many seconds.

    python tests/hostile/fuzz.py safetensors|ckpt|protobuf|json SECONDS

Whatever the bytes are: a `ReshardError` and no other, in a second, within a limit of memory. What is accepted is valid,
and other readers of the format see the same in it; what they accept and we refuse is refused for a reason that is
listed here. Prints what was run as JSON.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import tarfile
import tempfile
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helpers
import safetensors
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as some
from makers import varint

from reshard.errors import ReshardError, UsageError
from reshard.kits.files import index_file
from reshard.strategy.files import read_strategy, write_strategy
from reshard.strategy.proto import message_class
from reshard.view.words import strategy_data, strategy_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.core.model.entries import FileIndex

SECONDS = 1.0  # for one file
HEADROOM = 250_000_000
LARGEST = 8192

STRICTER = re.compile(
    "stands twice"  # the library takes the last; a reader that takes the first sees other bytes
    "|a name of .* at most 4096 bytes"
    "|expected rows of whole bytes"
    "|which no array can have"
    "|has half of a surrogate pair"
    "|is both a tensor and a text entry"
    r"|__metadata__\['reshard.str'\] is not"
    "|is of no known checkpoint format"
)
"""Why a safetensors file is refused here that the library accepts."""


class Memory:
    """A store of one file in memory."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def size(self, _path: str) -> int:
        return len(self.content)

    def read_into(self, _path: str, offset: int, buffer: memoryview) -> None:
        assert offset + len(buffer) <= len(self.content)
        buffer[:] = self.content[offset : offset + len(buffer)]


def check_safetensors(content: bytes) -> bool:
    """Hold our index of a safetensors file against the library's; return whether it was accepted."""
    try:
        theirs = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        theirs = None
    try:
        index = index_file("a", store=Memory(content))
    except ReshardError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert theirs is None or STRICTER.search(refused), f"the library accepts it; here {refused}"
        return False
    if index.format == "safetensors":
        check_entries(index, content)
        # A tensor that cannot be read is listed with the reason, where the library refuses the file; -0 is 0 here.
        if theirs is None and (index.unreadable or b"-0" in content):
            return True
        assert theirs is not None, "the library refuses it"
        found = {name: (entry.shape, held(entry.runs, content)) for name, entry in index.entries.items()}
        texts = {name for name, entry in index.entries.items() if entry.text is not None}
        assert {name: found[name] for name in found.keys() - texts} == {
            name: (tuple(item["shape"]), bytes(item["data"])) for name, item in theirs
        }
    return True


def check_ckpt(content: bytes) -> bool:
    """Hold our index of a `.ckpt` file against protobuf's reading of it; return whether it was accepted."""
    try:
        index = index_file("a", store=Memory(content))
    except ReshardError:
        return False
    if index.format != "ckpt":
        return True
    check_entries(index, content)
    if index.unreadable:  # what is in a map parameter is not looked at
        return True
    message: Any = message_class("Checkpoint")()
    message.ParseFromString(content[:-17] if index.crc is not None else content)
    theirs: dict[str, bytes] = {}
    for value in message.value:
        theirs[value.tag] = theirs.get(value.tag, b"") + value.tensor.tensor_content
    assert {name: held(entry.runs, content) for name, entry in index.entries.items()} == theirs
    return True


def check_entries(index: FileIndex, content: bytes) -> None:
    """The contents of tensors lie in the file and do not overlap."""
    end = 0
    for offset, nbytes in sorted(run for entry in index.entries.values() for run in entry.runs if run[1]):
        assert end <= offset, "overlap"
        end = offset + nbytes
    assert end <= len(content), "outside"


def held(runs: tuple[tuple[int, int], ...], content: bytes) -> bytes:
    return b"".join(content[offset : offset + nbytes] for offset, nbytes in runs)


@cache
def place() -> Path:
    """A directory in memory, where there is one."""
    shared = Path("/dev/shm")  # noqa: S108 -- below it, a directory of our own
    return Path(tempfile.mkdtemp(prefix="reshard-fuzz-", dir=shared if shared.is_dir() else None))


def check_strategy(content: bytes) -> bool:
    """What a strategy file says is shown, and is the same after writing it in either format."""
    path = place() / "a"
    path.write_bytes(content)
    try:
        strategy = read_strategy(path)
    except ReshardError:
        return False
    strategy_text(strategy, "a")
    json.dumps(strategy_data(strategy))
    for name in ("b.ckpt", "b.json"):
        try:
            write_strategy(strategy, place() / name)
        except UsageError:
            continue  # what one format can say and the other cannot
        again = read_strategy(place() / name)
        assert list(again.tensors) == list(strategy.tensors) or strategy.merged
        assert again.ranks == strategy.ranks
    return True


CHECKS: dict[str, Callable[[bytes], bool]] = {
    "safetensors": check_safetensors,
    "ckpt": check_ckpt,
    "protobuf": check_strategy,
    "json": check_strategy,
}


@cache
def bases(kind: str) -> tuple[bytes, ...]:
    """Small real files of a kind: the first of each size in `tests/data`."""
    found: dict[int, bytes] = {}
    for folder in ("cases", "strategies", "deduplicated"):
        with tarfile.open(helpers.DATA / f"{folder}.tar.xz", "r:xz") as tar:
            for member in tar:
                if kind == kind_of(member.name) and 0 < member.size <= LARGEST and member.size not in found:
                    file = tar.extractfile(member)
                    assert file is not None
                    found[member.size] = file.read()
    assert found, kind
    return tuple(found[size] for size in sorted(found)[:40])


def kind_of(name: str) -> str:
    """Say what a file of the test data is, by its name."""
    strategy = "strateg" in name
    if name.endswith(("meta.json", "map.json")):
        return ""
    return {".ckpt": "protobuf" if strategy else "ckpt", ".safetensors": "safetensors", ".json": "json" * strategy}.get(
        Path(name).suffix, ""
    )


PIECES = (
    [varint(value) for value in (0, 1, 127, 128, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)]
    + [b"\xff" * 11, b"\x80" * 10, b"\x0a", b"\x12", b"\x1a", b"\x08\x00", b"\x1a\x00", b"\x0a\x00", b"\x0b", b"\x0c"]
    + [value.to_bytes(8, "little") for value in (0, 1, 2, 8, 100_000_000, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1)]
    + [b"-1", b"0", b"1e9", b"-0", b"0.0", b"NaN", b"Infinity", b"9" * 30, b"9223372036854775807", b"9" * 5000, b"true"]
    + rb'null {} [] "" [[ {{{ {"a": , " \ \u0000 \ud800 "dtype":"F64", "__metadata__":{}, "__metadata__":null,'.split()
    + [b"\xed\xa0\x80", b"F4", b"I8", b"crc_num", b"\xff", b" ", b"\n"]
)
"""What is put in: numbers at the edges, in each way of writing them, and the grammar of the formats."""


def changed(base: bytes, others: tuple[bytes, ...], edits: list[tuple[str, int, int, int]]) -> bytes:
    """Return a file with some changes, each at a place and of a length that are taken modulo what there is."""
    content = bytearray(base)
    for kind, place, length, which in edits:
        at = place % (len(content) + 1)
        stop = min(at + length, len(content))
        if kind == "flip" and content:
            content[at % len(content)] ^= 1 << which % 8
        elif kind == "set" and content:
            content[at % len(content)] = which % 256
        elif kind == "cut":
            del content[at:]
        elif kind == "remove":
            del content[at:stop]
        elif kind == "repeat":
            content[at:at] = content[at:stop] * (1 + which % 3)
        elif kind == "put":
            content[at:at] = PIECES[which % len(PIECES)]
        elif kind == "replace":
            content[at:stop] = PIECES[which % len(PIECES)]
        elif kind == "number":
            content = replace_number(content, place, PIECES[which % len(PIECES)])
        elif kind == "splice":
            other = others[which % len(others)]
            start = place % (len(other) + 1)
            content[at:stop] = other[start : start + length]
        elif kind == "length":  # keeps a safetensors header as long as it says
            content[:8] = (int.from_bytes(content[:8], "little") + which % 9 - 4).to_bytes(9, "little", signed=True)[:8]
    return bytes(content)


def replace_number(content: bytearray, place: int, piece: bytes) -> bytearray:
    """Put something in place of a number written in digits, and have the length of a safetensors header follow."""
    found = list(re.finditer(rb"[0-9]+", content))
    if not found:
        return content
    match = found[place % len(found)]
    if content[8:9] == b"{" and match.start() > 8:
        length = int.from_bytes(content[:8], "little") + len(piece) - len(match[0])
        content = bytearray(max(length, 0).to_bytes(8, "little")) + content[8:]
    return content[: match.start()] + piece + content[match.end() :]


KINDS = ["flip", "set", "cut", "remove", "repeat", "put", "replace", "number", "number", "splice", "length"]
EDITS = some.lists(
    some.tuples(some.sampled_from(KINDS), some.integers(0, LARGEST), some.integers(1, 64), some.integers(0, 255)),
    min_size=1,
    max_size=6,
)


def fuzz(kind: str, seconds: float, examples: int = 2000) -> dict[str, object]:
    """Change files of a kind and check what becomes of them, in rounds of other seeds; return what was done.

    The first seed is RESHARD_FUZZ_SEED, or the date; a failure names its own, and the bytes.
    """
    first = int(os.environ.get("RESHARD_FUZZ_SEED") or f"{datetime.now(UTC):%Y%m%d}") * 1000
    counts = {"executions": 0, "accepted": 0, "refused": 0}
    files, check = bases(kind), CHECKS[kind]
    began = time.monotonic()
    number = 0
    while not number or time.monotonic() - began < seconds:

        @seed(first + number)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(some.sampled_from(files), EDITS)
        def one_round(base: bytes, edits: list[tuple[str, int, int, int]]) -> None:
            if time.monotonic() - began > seconds:
                return
            content = changed(base, files, edits)
            with_limits = check_in_time(check, content)
            counts["executions"] += 1
            counts["accepted" if with_limits else "refused"] += 1

        try:
            one_round()
        except BaseException as error:
            error.add_note(f"the seed: {first + number}")
            raise
        number += 1
    return {"kind": kind, "seed": first, **counts, "seconds": round(time.monotonic() - began, 1)}


def check_in_time(check: Callable[[bytes], bool], content: bytes) -> bool:
    """Check one file, within the time that one may take; a failure names its bytes."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return check(content)
    except BaseException as error:
        error.add_note(f"the file: {content!r}")
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def too_long(_signum: int, _frame: object) -> None:
    raise TimeoutError(f"not read in {SECONDS} seconds")


def limit_memory() -> None:
    """Take no more address space than there is now, and some."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, resource.RLIM_INFINITY))


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, too_long)
    bases(sys.argv[1])
    limit_memory()
    print(json.dumps(fuzz(sys.argv[1], float(sys.argv[2]))))

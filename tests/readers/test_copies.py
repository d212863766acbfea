"""Copies of targets: the layout in the ledger is known of them, and not of files that were changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from checkpoints import assert_equal, numbers, write_ranks
from commands import call, done
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import reshard
from reshard import Cipher, Layout, Strategy
from reshard.core.records import made
from reshard.core.verify.verify import verify
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = numbers({"w": (48, 16), "b": (24,), "c": (12, 8), "norm": (6,), "scale": (), "empty": (0, 4)})
ALSO = {"step": np.array(7, np.int64), "note": "größe"}
ROWS = Strategy.of({"w": Layout.of([4], [0, -1]), "b": Layout.of([4], [0]), "c": Layout.of([4], [0, -1])})
TARGET = Strategy.of({
    "w": Layout.of([2, 2], [-1, 0]), "b": Layout.of([2, 2], [1]), "c": Layout.of([2, 2], [1, 0]),
    "norm": Layout.of([2, 2], [-1]),
})  # fmt: skip
PIPELINE = Strategy.of({
    "w": {0: Layout.of([2], [-1, 0])}, "b": {1: Layout.of([2], [0])}, "c": {1: Layout.of([2], [-1, 0])},
    "norm": {1: Layout.of([2], [-1])},
})  # fmt: skip
KEY = Cipher("AES-GCM", bytes(range(16)))

WRITTEN: dict[str, tuple[Strategy, dict[str, Any]]] = {
    "ckpt": (TARGET, {"to": "ckpt"}),
    "safetensors": (TARGET, {"to": "safetensors"}),
    "each replica once": (TARGET, {"to": "safetensors", "remove_redundancy": True}),
    "cast": (TARGET, {"to": "ckpt", "selection": reshard.Selection(cast={"float32": "bfloat16"})}),
    "stages": (PIPELINE, {"to": "safetensors"}),
    "one stage": (PIPELINE, {"to": "ckpt", "target_stage": 1}),
    "one rank": (TARGET, {"to": "ckpt", "ranks": [2]}),
}


def opened_source(root: Path) -> reshard.Checkpoint:
    tensors = {name: value for name, value in FULL.items() if name in ROWS.tensors}
    others = {name: value for name, value in FULL.items() if name not in ROWS.tensors}
    return reshard.open(write_ranks(root / "src", tensors, ROWS, "ckpt", {**others, **ALSO}), strategy=ROWS)


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return opened_source(tmp_path)


@pytest.fixture
def out(source: reshard.Checkpoint, tmp_path: Path) -> Path:
    reshard.plan(source, TARGET, to="safetensors").run(tmp_path / "out")
    return tmp_path / "out"


def touch(root: Path) -> Path:
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (1, 1))
    return root


def cp(root: Path) -> Path:
    subprocess.run(["cp", "-r", root, f"{root}.copy"], check=True)
    return Path(f"{root}.copy")


def cp_with_times(root: Path) -> Path:
    return Path(shutil.copytree(root, f"{root}.copy"))


def to_memory(root: Path) -> str:
    """As `aws s3 cp --recursive` does, with what is hidden."""
    url = f"memory://copies{abs(hash(root))}/there"
    fs = fsspec.filesystem("memory")
    for path in root.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{url}/{path.relative_to(root)}", path.read_bytes())
    return url


def and_back(root: Path) -> Path:
    fs, path = fsspec.core.url_to_fs(to_memory(root))
    fs.get(path, f"{root}.copy", recursive=True)
    return Path(f"{root}.copy")


WAYS: dict[str, Callable[[Path], Path | str]] = {
    "touch": touch, "cp -r": cp, "cp -a": cp_with_times, "to a URL": to_memory, "from a URL": and_back,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("how", WRITTEN.values(), ids=list(WRITTEN))
def test_a_copy_has_the_layout(
    source: reshard.Checkpoint, tmp_path: Path, way: Callable[[Path], Path], how: tuple[Strategy, dict[str, Any]]
) -> None:
    target, options = how
    reshard.plan(source, target, **options).run(tmp_path / "out")
    cipher = options.get("cipher")
    before = reshard.open(tmp_path / "out", cipher=cipher)
    copy = way(tmp_path / "out")
    opened = reshard.open(copy, cipher=cipher)
    assert opened.strategy == before.strategy
    assert opened.strategy is not None
    assert opened.strategy.tensors
    assert {name: one.spec for name, one in opened.tensors.items()} == {
        name: one.spec for name, one in before.tensors.items()
    }
    assert opened.warnings == before.warnings
    verified = verify(copy, cipher=cipher)
    assert (verified.equal, verified.against) == (True, str(tmp_path / "src"))
    if not options.keys() & {"ranks", "target_stage", "selection"}:
        assert_equal(reshard.Checkpoint(opened._record.without(["step", "note"])), FULL)


def test_commands_know_the_layout_of_a_copy(out: Path, tmp_path: Path) -> None:
    copy = cp(out)
    shown = done("inspect", copy)
    assert "[48, 16]" in shown.stdout
    assert "warning" not in shown.stderr
    done("strategy", "make", "--like", copy, "-o", tmp_path / "strategy.ckpt")
    assert reshard.read_strategy(tmp_path / "strategy.ckpt").tensors.keys() == TARGET.tensors.keys()
    done("convert", "--to=mindspore", copy, tmp_path / "whole")
    assert_equal(reshard.Checkpoint(reshard.open(tmp_path / "whole")._record.without(["step", "note"])), FULL)
    done("verify", copy)


def test_what_is_as_noted_is_not_looked_at_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*_: object) -> int:
        raise SourceError("a range was read")

    monkeypatch.setattr(made, "crc_of_range", looked)
    assert reshard.open(out).strategy == TARGET
    with refused(SourceError, "bad-source", "a range was read"):
        reshard.open(touch(out))


def test_at_urls(source: reshard.Checkpoint, out: Path, root: str) -> None:
    """From here to there, and from there to there; where it was changed, the file is named."""
    reshard.plan(source, TARGET, to="ckpt").run(f"{root}/out")
    fs, there = fsspec.core.url_to_fs(root)
    fs.put(f"{out}/", f"{there}/uploaded/", recursive=True)
    for name in fs.find(f"{there}/out"):
        fs.pipe_file(name.replace("/out/", "/copied/", 1), fs.cat_file(name))
    for copy in ("uploaded", "copied"):
        opened = reshard.open(f"{root}/{copy}")
        assert opened.strategy == TARGET
        assert_equal(reshard.Checkpoint(opened._record.without(["step", "note"])), FULL)
        assert verify(f"{root}/{copy}").equal
    changed = f"{there}/copied/rank_2/checkpoint_2.ckpt"
    content = fs.cat_file(changed)
    at = next(file for file in opened._record.files if "rank_2" in file.path).index.entries["c"].runs[0][0]
    fs.pipe_file(changed, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with refused(SourceError, "no-layout", "rank_2/checkpoint_2.ckpt"):
        reshard.open(f"{root}/copied")
    assert not verify(f"{root}/copied").equal


def files(root: Path) -> list[Path]:
    return sorted(root.glob("rank_*/*"))


def refusal(copy: Path, file: Path) -> str:
    """What is said of a copy whose layout is not known, because of this file; every command says which."""
    with pytest.raises(SourceError) as raised:
        reshard.open(copy)
    for arguments in (
        ("convert", "--to=mindspore", copy, f"{copy}.whole"),
        ("strategy", "make", "--like", copy, "-o", f"{copy}.ckpt"),
    ):
        result = call(*arguments)
        assert result.exit_code == 4
        assert str(file) in result.stderr
        assert not Path(str(arguments[-1])).exists()
    shown = call("inspect", copy)
    assert shown.exit_code == 4 or str(file) in shown.stderr
    assert str(file) in str(raised.value)
    return str(raised.value)


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), rank=st.integers(0, 3))
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_a_changed_bit_anywhere(
    tmp_path_factory: pytest.TempPathFactory, format: str, place: float, bit: int, rank: int
) -> None:
    """Opening may miss one in contents, and reads the same layout then; verify finds it."""
    root = written(tmp_path_factory, format)
    file = files(root)[rank]
    before = file.read_bytes()
    content = bytearray(before)
    offset = int(place * len(content))
    content[offset] ^= 1 << bit
    file.write_bytes(content)
    try:
        with suppress(SourceError):
            assert reshard.open(root).strategy == TARGET
        tensors = offset >= 8 + int.from_bytes(before[:8], "little") or format == "ckpt"
        assert call("verify", root).exit_code in ((3, 4) if tensors else (0, 3, 4))
    finally:
        file.write_bytes(before)


_WRITTEN: dict[str, Path] = {}


def written(factory: pytest.TempPathFactory, format: str) -> Path:
    """A copy of a target, made once."""
    if format not in _WRITTEN:
        root = factory.mktemp("copies")
        reshard.plan(opened_source(root), TARGET, to=format).run(root / "out")
        _WRITTEN[format] = cp(root / "out")
    return _WRITTEN[format]


def test_a_file_of_another_run(out: Path, tmp_path: Path) -> None:
    """Of the next step, say: of as many bytes, with the same header."""
    other = {name: value + 1 for name, value in FULL.items()}
    others = {name: value for name, value in other.items() if name not in ROWS.tensors}
    cut = {name: value for name, value in other.items() if name in ROWS.tensors}
    source = reshard.open(write_ranks(tmp_path / "src2", cut, ROWS, "ckpt", {**others, **ALSO}), strategy=ROWS)
    reshard.plan(source, TARGET, to="safetensors").run(tmp_path / "out2")
    for rank in range(4):
        copy = cp(out)
        file = files(copy)[rank]
        shutil.copy(files(tmp_path / "out2")[rank], file)
        assert file.stat().st_size == files(out)[rank].stat().st_size
        assert "has other contents than were written" in refusal(copy, file)
        assert call("verify", copy).exit_code == 3
        shutil.rmtree(copy)


@pytest.mark.parametrize(("file", "other"), [(0, 2), (3, 1)])
def test_a_file_of_another_rank_among_files_as_they_were(out: Path, file: int, other: int) -> None:
    """What only this file has is looked at, also where no other file was touched."""
    shutil.copyfile(files(out)[other], files(out)[file])
    with refused(SourceError, "no-layout", files(out)[file]):
        reshard.open(out)
    assert call("verify", out).exit_code == 3


def test_a_missing_file(out: Path) -> None:
    copy = cp(out)
    files(copy)[3].unlink()
    said = refusal(copy, files(out.parent / copy.name)[0].parent.parent / "rank_3" / "checkpoint_3.safetensors")
    assert "is missing" in said
    assert reshard.open(copy, partial=True).strategy == TARGET
    assert call("verify", copy).exit_code == 4


def test_one_rank_that_is_left_is_not_taken_for_the_whole(out: Path, tmp_path: Path) -> None:
    copy = cp(out)
    for file in files(copy)[1:]:
        file.unlink()
    assert call("inspect", copy).exit_code == 0
    assert call("convert", "--to=mindspore", copy, tmp_path / "whole").exit_code == 4
    assert not (tmp_path / "whole").exists()
    assert call("convert", "--to=mindspore", copy, tmp_path / "whole", "--layout", "*=whole").exit_code == 0


@pytest.mark.parametrize("more", [b"", b"x"])
def test_another_size(out: Path, more: bytes) -> None:
    """As of a pointer of git lfs, or of a copy that was interrupted."""
    copy = cp(out)
    file = files(copy)[1]
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" + more)
    with refused(SourceError, "not-a-checkpoint", file):
        reshard.open(copy)


@pytest.mark.parametrize("options", [{"target_cipher": KEY}, {}], ids=["encrypted", "no fsync"])
def test_what_has_no_checksums_is_known_by_its_time_alone(
    source: reshard.Checkpoint, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Ranks exchanged by `mv` would go unnoticed."""
    cipher = options.get("target_cipher")
    reshard.plan(source, TARGET, to="ckpt", **options).run(tmp_path / "out", fsync=bool(cipher))
    assert reshard.open(tmp_path / "out", cipher=cipher).strategy == TARGET
    with refused(SourceError, "no-layout", "checksums"):
        reshard.open(cp(tmp_path / "out"), cipher=cipher)
    assert verify(tmp_path / "out.copy", cipher=cipher).against == str(tmp_path / "src")


def without_headers(root: Path) -> Path:
    """A target as an older version wrote it."""
    for log in (root / ".reshard").glob("*.jsonl"):
        lines = [line for line in log.read_text().splitlines() if line]
        assert any('"header"' in line for line in lines)
        log.write_text("".join(f"{drop_header(line)}\n" for line in lines))
    return root


def drop_header(line: str) -> str:
    said = json.loads(line)
    said.pop("header", None)
    return json.dumps(said)


def test_an_older_ledger_is_about_files_with_their_times(out: Path) -> None:
    assert reshard.open(without_headers(out)).strategy == TARGET
    said = refusal(touch(out), files(out)[0])
    assert "older version" in said
    done("verify", out)


@pytest.mark.parametrize("header", ["0" * 32, "x", 3, None, ["0"]])
def test_a_ledger_that_lies_about_a_header(out: Path, header: object) -> None:
    for log in (out / ".reshard").glob("*.jsonl"):
        lines = [json.loads(line) for line in log.read_text().splitlines() if line]
        log.write_text(
            "".join(json.dumps({**line, "header": header} if "header" in line else line) + "\n" for line in lines)
        )
    with refused(SourceError, "no-layout", out):
        reshard.open(touch(out))


@pytest.mark.parametrize("length", [1 << 10, 8 << 20])
def test_few_bytes_of_a_copy_are_read(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each file at most two ranges, one that tells it apart if there is one; of many files short ones."""
    ranges = {
        f"rank_{rank}": [(0, 100, 7), (100, length, rank), (100 + length, 2 * length, 1000 + rank), (10**9, 50, 9)]
        for rank in range(2048)
    }
    samples = made._samples(ranges, ranges)
    assert samples.keys() == ranges.keys()
    for path, some in samples.items():
        assert 1 <= len(some) <= 2
        assert set(some) <= set(ranges[path])
        if length < made._SHORTEST_LIMIT:
            assert (100, length, int(path[5:])) in some
    assert sum(nbytes for some in samples.values() for _, nbytes, _ in some) <= 256 << 20
    monkeypatch.setattr(made, "_SHORTEST_LIMIT", 1)
    assert all(made._samples({"a": [(0, 1 << 30, 1)], "b": []}, ["a"])["a"])

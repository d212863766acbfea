"""Files of a plan that are read and never written: the bytes are those of a run, whatever the plan does."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

import adapters
import numpy as np
import pytest
from refusals import refused
from remotes import put
from stopped_runs import FULL, SOURCE, TARGET, small_tasks, source

import reshard
from reshard.core.plan import budget
from reshard.core.run import reading
from reshard.errors import SourceError, TargetError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.api.plans import Plan

    Planned = Callable[[reshard.Checkpoint, Path, pytest.FixtureRequest], Plan]

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find

RULES = """
reshard-rules: 1
sides: [one, other]
rules:
  - one: w
    other: {transpose: turned}
  - one: [b, e]
    other: {concat: both}
  - one: c
    other: c2
"""


def of_ranks(source: reshard.Checkpoint, *_: Any) -> Plan:
    return reshard.plan(source, TARGET, to="ckpt")


def of_one_rank(source: reshard.Checkpoint, *_: Any) -> Plan:
    return reshard.plan(source, TARGET, ranks=[1], remove_redundancy=True, to="safetensors")


def renamed(source: reshard.Checkpoint, *_: Any) -> Plan:
    return reshard.plan(source, to="hf", include=["w", "c"], name_map={"w": "model.w"}, cast={"float32": "bfloat16"})


def by_rules(source: reshard.Checkpoint, tmp_path: Path, _: Any) -> Plan:
    (tmp_path / "rules.yaml").write_text(RULES)
    more = source.assign({"e": np.arange(24, dtype=np.float32)})
    return reshard.plan(more, to="dcp", rules=tmp_path / "rules.yaml")


def averaged(source: reshard.Checkpoint, *_: Any) -> Plan:
    return reshard.plan(reshard.average([source, source.scale("w", factor=3.0)], [0.5, 0.5]), to="hf")


def with_an_adapter(_: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Plan:
    del tmp_path
    return reshard.plan(request.getfixturevalue("base"), to="hf", lora=request.getfixturevalue("lora"))


def dequantized(_: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Plan:
    del tmp_path
    path = request.getfixturevalue("mindspore_data") / "quantized" / "fp8_v3" / "checkpoint"
    return reshard.plan(reshard.open(path).dequantize("bfloat16"), to="safetensors")


def in_shards(source: reshard.Checkpoint, *_: Any) -> Plan:
    return reshard.plan(source, to="zarr", chunk_size=100)


def linked(source: reshard.Checkpoint, tmp_path: Path, _: Any) -> Plan:
    reshard.plan(source, to="dcp").run(tmp_path / "first")
    return reshard.plan(reshard.open(tmp_path / "first"), to="dcp", link=True, name_map={"w": "x"})


def from_s3(source: reshard.Checkpoint, tmp_path: Path, request: pytest.FixtureRequest) -> Plan:
    del source
    url = put(tmp_path / "src", f"{request.getfixturevalue('bucket')}/src")
    return reshard.plan(reshard.open(url, strategy=SOURCE), TARGET, to="safetensors")


base, lora = adapters.base, adapters.lora  # fixtures, too
PLANS = [
    of_ranks, of_one_rank, renamed, by_rules, averaged, with_an_adapter, dequantized, in_shards, linked, from_s3,
]  # fmt: skip


@pytest.mark.parametrize("make", PLANS)
def test_every_range_is_as_a_run_writes_it(
    make: Planned, source: reshard.Checkpoint, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    plan = make(source, tmp_path, request)
    plan.run(tmp_path / "out", ledger=False)
    rng = np.random.default_rng(0)
    assert plan.files
    for name, size in plan.files.items():
        content = (tmp_path / "out" / name).read_bytes()
        assert len(content) == size
        assert plan.read(name) == content
        for start in rng.integers(0, size + 1, 60 if len(plan.files) < 20 else 4):
            for nbytes in (1, 7, 300):
                assert plan.read(name, int(start), nbytes) == content[start : start + nbytes]


def test_a_long_range_is_read_by_several_threads(source: reshard.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = reshard.plan(source, to="hf")
    (name,) = (name for name in plan.files if name.endswith(".safetensors"))
    whole = plan.read(name)
    monkeypatch.setattr(reading, "PART_BYTES", 100)
    begun: set[int] = set()
    move = reading.move_pieces
    monkeypatch.setattr(reading, "move_pieces", lambda *a, **k: (begun.add(threading.get_ident()), move(*a, **k)))
    assert plan.read(name) == whole
    assert len(begun) > 1


def test_several_threads_may_read_at_once(source: reshard.Checkpoint) -> None:
    plan = reshard.plan(source, TARGET, to="ckpt")
    contents = {name: plan.read(name) for name in plan.files}
    found: list[bool] = []

    def read(name: str) -> None:
        found.extend(
            plan.read(name, at, 50) == contents[name][at : at + 50] for at in range(0, len(contents[name]), 37)
        )

    threads = [threading.Thread(target=read, args=(name,)) for name in [*contents] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found
    assert all(found)


def test_few_rows_are_read_for_a_short_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the tensor, nor the bands before them."""
    monkeypatch.setattr(budget, "BAND_BYTES", 1 << 20)
    array = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    reshard.write({"w": array}, tmp_path / "src", to="hf")
    plan = reshard.plan(reshard.open(tmp_path / "src"), to="zarr")
    name = max(plan.files, key=lambda each: plan.files[each])
    moved: list[int] = []
    move = reading.move_pieces

    def noted(*arguments: Any, **options: Any) -> Any:
        result = move(*arguments, **options)
        moved.append(result.bytes_read)
        return result

    monkeypatch.setattr(reading, "move_pieces", noted)
    assert plan.read(name, 4096 * 500, 8) == array[500, :2].tobytes()
    assert sum(moved) <= 4096


def test_a_file_seeks_and_ends(source: reshard.Checkpoint) -> None:
    plan = reshard.plan(source, to="hf")
    name = "model.safetensors.index.json"
    content = plan.read(name)
    with plan.open(name) as file:
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        assert file.seek(-5, 2) == len(content) - 5
        assert file.read() == content[-5:]
        assert file.read(1) == b""
        assert file.seek(0) == 0
        assert file.readline() == content.partition(b"\n")[0] + (b"\n" if b"\n" in content else b"")
        with pytest.raises(ValueError, match="-1"):
            file.seek(-1)
    assert plan.read(name, len(content) + 10, 5) == b""


def test_other_libraries_open_the_files(source: reshard.Checkpoint) -> None:
    """zarr-python a store that does not exist, and safetensors the bytes of a file."""
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(reshard.plan(source, to="zarr").filesystem().get_mapper(), mode="r")
    assert {name: np.array_equal(array[...], FULL[name]) for name, array in group.arrays()} == dict.fromkeys(FULL, True)
    from safetensors.numpy import load

    plan = reshard.plan(source, to="hf")
    found = load(plan.read("model-00001-of-00001.safetensors"))
    assert {name: np.array_equal(found[name], FULL[name]) for name in FULL} == dict.fromkeys(FULL, True)


def test_a_file_system_only_reads(source: reshard.Checkpoint) -> None:
    files = reshard.plan(source, TARGET, to="safetensors").filesystem()
    assert files.ls("", detail=False) == ["rank_0", "rank_1"]
    assert files.isdir("rank_0")
    assert files.info("/rank_0/checkpoint_0.safetensors")["type"] == "file"
    assert pickle.loads(pickle.dumps(files)).find("") == files.find("")  # noqa: S301
    with pytest.raises(FileNotFoundError):
        files.cat_file("rank_0/../../etc/passwd")
    with pytest.raises(FileNotFoundError):
        files.ls("rank_2")
    with pytest.raises(OSError, match="read"):
        files.open("rank_0/checkpoint_0.safetensors", "wb")


def test_what_cannot_be_read_is_refused(source: reshard.Checkpoint) -> None:
    cipher = reshard.Cipher("AES-GCM", b"0123456789ABCDEF")
    for plan in (
        reshard.plan(source, to="zarr", compression="zstd"), reshard.plan(source, to="ckpt", target_cipher=cipher),
    ):  # fmt: skip
        with refused(UsageError, "needs-run"):
            _ = plan.files
    plan = reshard.plan(source, to="hf")
    with refused(UsageError, "not-found", "model-00001-of-00002.safetensors"):
        plan.read("model-00001-of-00002.safetensors")
    with pytest.raises(KeyError):
        plan.open("../secret")
    for numbers in ((-1, 5), (0, -1)):
        with refused(UsageError, "out-of-range"):
            plan.read("model.safetensors.index.json", *numbers)


def test_a_source_that_changes_is_noticed(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """Before the first byte, by its time; later if it is cut short."""
    plan, again = reshard.plan(source, to="hf"), reshard.plan(source, to="safetensors")
    name = next(name for name in plan.files if name.endswith(".safetensors"))
    file = next((tmp_path / "src").rglob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-40])
    with pytest.raises((SourceError, TargetError)):
        plan.read(name)
    with refused(TargetError, "source-changed", file.name):
        _ = again.files


def test_a_source_that_changes_between_two_reads_is_noticed(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """Of as many bytes: what is read afterwards is not of the files that were opened."""
    plan = reshard.plan(source, to="hf")
    name = next(name for name in plan.files if name.endswith(".safetensors"))
    assert len(plan.read(name)) == plan.files[name]
    files = [*(tmp_path / "src").rglob("*.safetensors")]
    for file in files:
        file.write_bytes(file.read_bytes()[:-8] + b"\xff" * 8)
    with plan.open(name) as opened, refused(TargetError, "source-changed", "src"):
        opened.read()
    for file in files:
        file.unlink()
    with refused(TargetError, "source-gone"):
        plan.read(name)

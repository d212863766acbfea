"""Distributed checkpoints of PyTorch as a target: their bytes, by zipfile, pickle and files that PyTorch wrote."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import numbers, write_file
from commands import done
from refusals import failed, refused
from written_dcp import assert_whole, every_dtype, read, unpickled

import reshard
from reshard import Layout, Strategy
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError, UsageError
from reshard.kits.torch.saved_tensors import saved_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.kits.torch.saved_tensors import Saved

FULL = numbers({"layer.w": (16, 8), "layer.b": (8,), "norm": (16,)}) | {
    "step": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "count": np.arange(7),
    "one/odd name.é": np.ones((3, 1, 2), ml_dtypes.bfloat16),
}
MESH = {"dp": 2, "tp": 4}
RULES: dict[str, Any] = {"layer.w": ["tp", "dp"], "layer.b": ["tp"], "norm": None}


def source(tmp_path: Path, full: dict[str, Any] | None = None) -> reshard.Checkpoint:
    return reshard.open(write_file(tmp_path / "src.safetensors", full or FULL))


def strategy() -> Strategy:
    return Strategy.from_rules({name: array.shape for name, array in FULL.items()}, MESH, RULES)


def filled(item: Saved, data: bytes = b"") -> bytes:
    """A zip with its tensor's bytes."""
    content = bytearray(b"\xa5" * item.nbytes)
    crc = zlib.crc32(data).to_bytes(4, "little")
    contents = [(begin, data) for begin, _ in item.data]
    for offset, piece in [*item.literals, *contents, *((place, crc) for sums in item.crcs for place in sums.places)]:
        content[offset : offset + len(piece)] = piece
    return bytes(content)


def test_an_item_is_what_torch_saves_but_for_its_number(mindspore_data: Path) -> None:
    """All but `.data/serialization_id`, a hash of PyTorch's, which stands last."""
    compared = 0
    for tensor in read(mindspore_data / "directories" / "dcp_files").tensors.values():
        for offsets, sizes in tensor.chunks:
            item = saved_tensor(BY_NAME[tensor.dtype.removeprefix("torch.")], sizes)
            real = tensor.items[offsets]
            ((begin, nbytes),) = item.data
            made = filled(item, real[begin : begin + nbytes])
            with zipfile.ZipFile(io.BytesIO(real)) as archive:
                end = archive.getinfo("archive/.data/serialization_id").header_offset
            assert made[:end] == real[:end]
            with zipfile.ZipFile(io.BytesIO(made)) as archive:
                assert archive.testzip() is None
            compared += 1
    assert compared == 8


@pytest.mark.parametrize("shape", [(1 << 30,), ((1 << 30) - 1,), (3, 1 << 29)])
def test_a_tensor_of_4_gib_has_zip64_records(shape: tuple[int, ...], tmp_path: Path) -> None:
    item = saved_tensor(BY_NAME["float32"], shape)
    with (tmp_path / "item").open("wb") as file:  # sparse
        for offset, piece in item.literals:
            file.seek(offset)
            file.write(piece)
    with zipfile.ZipFile(tmp_path / "item") as archive:
        records = {info.filename: info for info in archive.infolist()}
        assert records["archive/data/0"].file_size == item.data[0][1] == 4 * np.prod(shape)
        with archive.open("archive/data/0") as data:
            assert data.read(10) == bytes(10)
        assert archive.read("archive/version") == b"3\n"
    assert (tmp_path / "item").stat().st_size == item.nbytes


def test_whole_tensors_with_texts(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.ckpt", {**FULL, "lr": "cosine", "none": ""}, "ckpt")
    reshard.plan(reshard.open(file), to="dcp").run(tmp_path / "out")
    found = assert_whole(tmp_path / "out", FULL)
    assert found.objects == {"lr": "cosine", "none": ""}
    assert set(found.ranges) == {"__0_0.distcp"}
    assert found.planner_data == {name: (name,) for name in (*FULL, "lr", "none")}
    assert (found.state["version"], found.state["storage_meta"]) == ("1.0.0", None)
    assert str(tmp_path).encode() not in (tmp_path / "out" / ".metadata").read_bytes()


def test_every_dtype_of_torch(tmp_path: Path) -> None:
    checkpoint, full = every_dtype(tmp_path)
    reshard.plan(checkpoint, to="dcp").run(tmp_path / "out")
    assert_whole(tmp_path / "out", full)


def test_a_dtype_that_torch_has_not_is_refused(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.ckpt", {"w": np.zeros(3, ml_dtypes.int4)}, "ckpt")
    with refused(UsageError, "unsupported-dtype", "'w'", "int4"):
        reshard.plan(reshard.open(file), to="dcp")


def test_blocks_of_a_mesh_each_once(tmp_path: Path) -> None:
    reshard.plan(source(tmp_path), strategy(), to="dcp").run(tmp_path / "out")
    found = assert_whole(tmp_path / "out", FULL)
    assert len(found.tensors["layer.w"].chunks) == 8
    assert found.tensors["layer.w"].chunks[:2] == [((0, 0), (4, 4)), ((0, 4), (4, 4))]
    assert len(found.tensors["layer.b"].chunks) == 4
    assert len(found.tensors["norm"].chunks) == 1
    assert set(found.ranges) == {f"__{rank}_0.distcp" for rank in range(8)}


def test_replicas_are_spread_over_the_ranks(tmp_path: Path) -> None:
    full = numbers({f"w{number}": (8, 4) for number in range(8)})
    whole = Strategy.of({name: Layout.of([4], [-1, -1]) for name in full})
    reshard.plan(source(tmp_path, full), whole, to="dcp").run(tmp_path / "out")
    found = assert_whole(tmp_path / "out", full)
    assert {path: len(ranges) for path, ranges in found.ranges.items()} == {
        f"__{rank}_0.distcp": 2 for rank in range(4)
    }


def test_of_stages_that_cut_a_tensor_otherwise_the_first_counts(tmp_path: Path) -> None:
    """Blocks of a DCP may not overlap: such a tensor was written, and nobody could read it."""
    full = numbers({"w": (4, 4), "b": (3,)})
    cut = {0: Layout.of([2], [0, -1]), 1: Layout.of([2], [-1, 0])}
    target = Strategy.of({"w": cut, "b": {1: Layout.of([2], [-1])}})
    reshard.plan(source(tmp_path, full), target, to="dcp").run(tmp_path / "dcp")
    assert_whole(tmp_path / "dcp", full)
    assert reshard.verify(tmp_path / "dcp")


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    uneven = Strategy.of({"layer.b": Layout.of([3], [0])})
    with refused(SourceError, "not-divisible", "'layer.b'", "dimension 0 of size 8"):
        reshard.plan(source(tmp_path), uneven, to="dcp")


@pytest.mark.parametrize(
    "options",
    [{"ranks": [0]}, {"remove_redundancy": True}, {"target_stage": 0}],
    ids=lambda options: next(iter(options)),
)
def test_what_a_dcp_has_not(options: dict[str, Any], tmp_path: Path) -> None:
    with refused(UsageError, "needs-all-ranks"):
        reshard.plan(source(tmp_path), strategy(), to="dcp", **options)


def test_files_of_some_size(tmp_path: Path) -> None:
    done("convert", source(tmp_path).root, tmp_path / "out", "--to", "dcp", "--max-shard-size", "300B")
    assert len(assert_whole(tmp_path / "out", FULL).ranges) == 3


def test_names_are_pickled_once(tmp_path: Path) -> None:
    """Of 300 blocks the metadata have some 100 bytes each."""
    full = numbers({"a long name of a tensor": (300, 1)})
    rows = Strategy.of({name: Layout.of([300], [0, -1]) for name in full})
    plan = reshard.plan(source(tmp_path, full), rows, to="dcp")
    (metadata,) = [file for file in plan._record.files if file.publish != "file"]
    content = metadata.layout.literals[0][1]
    assert len(content) < 300 * 140
    assert len(dict(unpickled(content)[1])["storage_data"]) == 300


RULES_FILE = """
mesh: {dp: 2, tp: 4}
rules:
  "*.rows": [shard(0), replicate]
  "*.both": [shard(0), shard(1)]
  "*.fsdp_of_tp": ["strided_shard(0, split_factor=4)", shard(0)]
  "*.flat": [Shard(0), Shard(0)]
"""


def chunks(extent: int, count: int) -> list[tuple[int, int]]:
    """Begins and ends of what `torch.chunk` gives, and of what it leaves out."""
    size = -(-extent // count)
    return [(min(size * number, extent), min(size * (number + 1), extent)) for number in range(count)]


def test_a_mesh_and_placements(tmp_path: Path) -> None:
    full = numbers({"a.rows": (5, 3), "a.both": (3, 8), "a.fsdp_of_tp": (18, 2), "a.flat": (10,), "a.whole": (3,)})
    root = source(tmp_path, full).root
    (tmp_path / "rules.yaml").write_text(RULES_FILE)
    make = ["strategy", "make", tmp_path / "rules.yaml", "--like", root, "-o"]
    done(*make, tmp_path / "strategy.ckpt")
    done("convert", root, tmp_path / "out", "--target-strategy", tmp_path / "strategy.ckpt", "--to", "dcp")
    boxes = {name: sorted(tensor.chunks) for name, tensor in assert_whole(tmp_path / "out", full).tensors.items()}
    assert boxes["a.rows"] == [((0, 0), (3, 3)), ((3, 0), (2, 3))]
    assert boxes["a.both"] == sorted(
        ((begin, 2 * column), (end - begin, 2)) for begin, end in chunks(3, 2) for column in range(4)
    )
    for tensor, outer, inner in (("a.fsdp_of_tp", 4, 2), ("a.flat", 2, 4)):
        extent, *others = full[tensor].shape
        nested = [
            (start + begin, end - begin)
            for start, stop in chunks(extent, outer)
            for begin, end in chunks(stop - start, inner)
            if end > begin
        ]
        assert boxes[tensor] == sorted(((begin, *[0] * len(others)), (size, *others)) for begin, size in nested)
    assert boxes["a.whole"] == [((0,), (3,))]
    failed(2, "not-in-json", *make, tmp_path / "strategy.json", places=("'a.flat'", "dimension 0"))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (["shard(0)"], ("wrong-count", "1 placements", "(dp, tp)")),
        (["partial(sum)", "replicate"], ("bad-placement", "[0]", "'partial(sum)'")),
        (["shard(0)", "tp"], ("bad-placement", "[1]", "'tp'")),
        (["shard(2)", "replicate"], ("out-of-range", "dimension 2")),
        (["replicate", "shard(1)"], ("not-divisible", "dimension 1 of size 6", "4 ways")),
        (["strided_shard(0, split_factor=2)", "shard(0)"], ("bad-split-factor", "split_factor 2")),
    ],
)
def test_placements_that_do_not_fit(rule: list[str], message: tuple[str, ...]) -> None:
    with refused(UsageError, *message, "$.rules['w']"):
        Strategy.from_rules({"w": (8, 6)}, MESH, {"w": rule})


def test_an_axis_may_be_called_as_a_placement_is() -> None:
    mesh = {"replicate": 2, "shard": 2}
    made = Strategy.from_rules({"w": (8, 6), "v": (8, 6)}, mesh, {"w": ["replicate"], "v": ["replicate", "shard(0)"]})
    assert [str(made.tensors[name][0].layout) for name in "wv"] == ["[2, 2] map [1, -1]", "[2, 2] map [0, -1]"]


def test_items_cost_a_write_of_their_own_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to that of the contents: the end of an item is written with the head of the next one."""
    written: list[int] = []
    pwrite = os.pwrite

    def counted(fd: int, content: bytes, offset: int) -> int:
        written.append(len(content))
        return pwrite(fd, content, offset)

    one = source(tmp_path, numbers({f"w{number}": (number, 3) for number in range(1, 101)}))
    plan = reshard.plan(one, to="dcp")
    monkeypatch.setattr(os, "pwrite", counted)
    plan.run(tmp_path / "out", ledger=False)
    assert len(written) == 100 + 101 + 1  # contents, heads and ends, metadata
    assert max(written) < 64 << 10

"""PyTorch's and Megatron's distributed checkpoints as a source: real files give the whole tensors, or say why not."""

from __future__ import annotations

import itertools
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal, numbers, plan_with, write_file
from commands import call, done
from dcp_files import item, write_torch
from refusals import refused

import reshard
from reshard import Layout, Strategy
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError, UsageError
from reshard.formats.checkpoint2.options import Checkpoint2
from reshard.formats.dcp import reader as dcp
from reshard.formats.dcp.metadata import Item
from reshard.formats.dcp.names import DCP
from reshard.formats.dcp.writer import ListedTensor, metadata
from reshard.kits.torch.saved_tensors import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcp_files import Box

CASES = [
    "files", "fsdp2_bf16", "fsdp2_tp2d", "hsdp", "mcore_flat", "mcore_layers_apart", "mcore_moe_ep2", "moe", "pp_tp",
    "rank_local",
]  # fmt: skip
"""Recorded ones that are not among those of `conformance`."""

FULL = numbers({"w": (6, 4), "b": (5,), "s": ()})
WHOLE: Box = (0, 0), (6, 4)


@pytest.fixture
def case(mindspore_data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a case, to be spoilt; returns its directory."""
    return lambda name: shutil.copytree(mindspore_data / "dcp" / name / "checkpoint", tmp_path / name)


def full_of(root: Path) -> dict[str, Any]:
    return {name.replace("\\", "/"): value for name, value in np.load(root / "full.npz").items()}


@pytest.mark.parametrize("name", CASES)
def test_real_ones_are_their_whole_tensors(mindspore_data: Path, name: str) -> None:
    root = mindspore_data / "dcp" / name
    full, source = full_of(root), reshard.open(root / "checkpoint")
    assert_equal(source, full)
    assert not source.unreadable
    assert len(source.warnings) == (name == "rank_local")
    assert reshard.verify(root / "checkpoint").tensors == len(full)


def test_a_run_of_megatron(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "mcore_tp2_pp2"
    for step in (5, 10):
        shutil.copytree(root / "checkpoint", tmp_path / f"iter_{step:07d}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    found = reshard.open(tmp_path)
    assert found.root.endswith("iter_0000010")
    assert Checkpoint2().of(found._record).step == 10
    assert reshard.open(tmp_path, step=5).root.endswith("iter_0000005")


# --- what is wrong is said ---


def test_files_that_are_cut_off_gone_or_stale(case: Callable[[str], Path]) -> None:
    root = case("fsdp2_bf16")
    path = root / "__1_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with refused(SourceError, "truncated", "__1_0.distcp", len(content) - 1, len(content)):
        reshard.open(root)
    path.write_bytes(content)
    shutil.copy(path, root / "__9_0.distcp")
    newer, stale = reshard.open(root).warnings
    assert newer.startswith("__1_0.distcp")
    assert "__9_0.distcp" in stale
    path.unlink()
    with refused(SourceError, "missing-file", "__1_0.distcp", ".metadata"):
        reshard.open(root)
    (root / ".metadata").unlink()
    with refused(SourceError, "unfinished", ".metadata"):
        reshard.open(root)


def test_files_that_were_replaced_since(tmp_path: Path) -> None:
    """By others of the same names, which is seen though the process has the old ones open."""
    both = [("b", ((0,), (5,)), item(FULL["b"])), ("w", WHOLE, item(FULL["w"]))]
    assert_equal(reshard.open(write_torch(tmp_path / "src", FULL, {0: both})), {"b": FULL["b"], "w": FULL["w"]})
    write_torch(tmp_path / "new", FULL, {0: both[::-1]})
    for path in (tmp_path / "new").iterdir():
        path.replace(tmp_path / "src" / path.name)
    assert_equal(reshard.open(tmp_path / "src"), {"b": FULL["b"], "w": FULL["w"]})


def test_one_metadata_file_a_rank(case: Callable[[str], Path]) -> None:
    root = case("rank_local")
    (root / "__9_0.distcp").write_bytes(b"")
    assert any("__9_0.distcp" in warning for warning in reshard.open(root).warnings)
    (root / "__1.metadata").unlink()
    with refused(SourceError, "missing-ranks", "rank 1", "4"):
        reshard.open(root)
    (root / "__3.metadata").unlink()
    (root / "__2.metadata").unlink()
    with refused(SourceError, "no-tensors", " elements"):
        reshard.open(root)


@pytest.mark.parametrize("other", ["0.metadata", ".rank0_metadata", "7.metadata", ".metadata"])
def test_metadata_of_two_saves(case: Callable[[str], Path], other: str) -> None:
    root = case("rank_local")
    shutil.copy(root / "__1.metadata", root / other)
    first, second = sorted([other, "__0.metadata"])
    with refused(SourceError, "several-checkpoints", first, second):
        reshard.open(root)


def test_a_place_of_many_boxes_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = item(FULL["w"][:1])
    parts = [(Item((row, 0), "__0_0.distcp", 0, len(content)), (1, 4)) for row in range(6)]
    other = Item((0,), "__0_0.distcp", len(content), len(item(FULL["b"]))), (5,)
    names = {name: torch_dtype(name, BY_NAME["float32"]) for name in "wb"}
    listed = [ListedTensor("w", names["w"], (6, 4), parts, None), ListedTensor("b", names["b"], (5,), [other], None)]
    (tmp_path / ".metadata").write_bytes(metadata(listed, {}))
    (tmp_path / "__0_0.distcp").write_bytes(content + item(FULL["b"]))
    asked: list[int] = []
    read = dcp.read_items
    monkeypatch.setattr(dcp, "read_items", lambda spans: asked.append(len(spans)) or read(spans))
    found = reshard.open(tmp_path)
    assert asked == [2]
    assert_equal(found, {"b": FULL["b"]})
    assert set(found.unreadable) == {"w"}


@pytest.mark.parametrize("other", [".rank3.metadata", "5_metadata", "__00.metadata"])
def test_names_that_no_metadata_have(case: Callable[[str], Path], other: str) -> None:
    root = case("rank_local")
    before = reshard.open(root)
    (root / other).write_bytes(b"x")
    assert reshard.open(root)._record.extras.described_by == before._record.extras.described_by


GOOD: dict[str, dict[str, Any]] = {
    "a Parameter": {"wrapped": "_rebuild_parameter"},
    "a subclass": {"wrapped": "_rebuild_from_type_v2"},
    "aligned to 4096": {"align": 4096},
    "aligned to 65536": {"align": 65536},
    "transposed": {"strides": (1, 6), "storage": np.ascontiguousarray(FULL["w"].T).reshape(-1)},
    "a part of its storage": {"first": 3, "storage": np.concatenate([FULL["b"][:3], FULL["w"].reshape(-1)])},
}
ODD: dict[str, dict[str, Any]] = {
    "big-endian": {"order": "big"},
    "beyond its storage": {"first": 1},
    "another record": {"key": "1"},
    "of other strides": {"strides": (4,)},
    "negated": {"more": ({"neg": True},)},
    "too many arguments": {"more": (1, 2, 3)},
}


@pytest.mark.parametrize("name", GOOD | ODD)
def test_items_of_any_kind(tmp_path: Path, name: str) -> None:
    ok = ("b", ((0,), (5,)), item(FULL["b"]))
    w = item(FULL["w"], **(GOOD | ODD)[name])
    write_torch(tmp_path, FULL, {0: [ok, ("w", WHOLE, w), ("s", ((), ()), item(FULL["s"]))]})
    found = reshard.open(tmp_path)
    assert set(found.unreadable) == ({"w"} if name in ODD else set())
    assert_equal(found, FULL, but=() if name in GOOD else ("w",))


def test_several_chunks_of_a_name_in_a_file_and_replicas(tmp_path: Path) -> None:
    """As Megatron's gate and up are."""
    w = FULL["w"]
    top, low = (((0, 0), (3, 4)), item(w[:3])), (((3, 0), (3, 4)), item(w[3:]))
    root = write_torch(tmp_path / "src", FULL, {0: [("w", *top), ("w", *low)], 1: [("w", *low)]})
    found = reshard.open(root)
    assert_equal(found, {"w": w})
    assert [len(shard.replicas) for shard in found.tensors["w"].shards] == [1, 2]
    reshard.plan(found).run(tmp_path / "whole")
    assert_equal(reshard.open(tmp_path / "whole"), {"w": w})
    content = (root / "__1_0.distcp").read_bytes()
    (root / "__1_0.distcp").write_bytes(content.replace(w[3:].tobytes(), (w[3:] + 1).tobytes()))
    with refused(SourceError, "replicas-differ", "'w'", "[3:6, 0:4]", "rank 0 and rank 1"):
        reshard.open(root)


def test_items_that_the_metadata_contradict(tmp_path: Path) -> None:
    w, ok = FULL["w"], ("b", ((0,), (5,)), item(FULL["b"]))
    for box, made in (
        (WHOLE, item(w[:3])),
        (WHOLE, item(w.astype(np.float64))),
        (((0, 0), (3, 4)), item(w[:3])),
        (((1, 0), (6, 4)), item(w)),
        (WHOLE, write_file(tmp_path / "x.safetensors", {"w": w}).read_bytes()),
        (WHOLE, item(w)[:40]),
    ):
        found = reshard.open(write_torch(tmp_path / "src", FULL, {0: [ok, ("w", box, made)]}))
        assert set(found) == {"b"}
        with refused(SourceError, "unreadable-tensor", "'w'"):
            reshard.plan(found)


BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_float32.bucket_idx_0.exp_avg"


def test_buckets_of_megatrons_optimizer(tmp_path: Path) -> None:
    """They are read, verified, left out by name, and carried to another DCP; no other target can have them."""
    items = [("w", WHOLE, item(FULL["w"])), (BUCKET, ((0,), (5,)), item(FULL["b"]))]
    root = write_torch(tmp_path / "src", FULL | {BUCKET: FULL["b"]}, {0: items}, planner_data=None)
    found = reshard.open(root)
    assert_equal(found, {"w": FULL["w"], BUCKET: FULL["b"]})
    assert BUCKET in done("inspect", root).stdout
    assert "Bound" in found._repr_html_()
    assert reshard.verify(root).tensors == 2
    rows = Strategy.of({"w": Layout.of([2], [0, -1])})
    for target in (None, rows):
        with refused(SourceError, "unreadable-tensor", BUCKET):
            reshard.plan(found, target, to="safetensors")
    for option in ("--drop", "--exclude"):
        out = tmp_path / option
        done("convert", root, out, "--to", "hf", option, "optimizer.*")
        assert_equal(reshard.open(out), {"w": FULL["w"]})
        assert reshard.verify(out).equal
        shutil.rmtree(out / ".reshard")  # which says what was left out
        done("verify", out, "--against", root, option, "optimizer.*")
    assert call("verify", out, "--against", root).exit_code == 3
    for name, target in (("whole", None), ("rows", rows)):
        reshard.plan(found, target, to="dcp").run(tmp_path / name, fsync=False)
        assert_equal(reshard.open(tmp_path / name), {"w": FULL["w"], BUCKET: FULL["b"]})
        assert reshard.verify(tmp_path / name, against=root).equal
        assert reshard.open(tmp_path / name)._record.extras.bound


def test_buckets_are_carried_as_they_are(tmp_path: Path) -> None:
    """Whatever dtype the weights get; under another name they are of no use, which is said, of links too."""
    items = [("w", WHOLE, item(FULL["w"])), (BUCKET, ((0,), (5,)), item(FULL["b"]))]
    root = write_torch(tmp_path / "src", FULL | {BUCKET: FULL["b"]}, {0: items}, planner_data=None)
    cast = ["--cast", "float32=float64"]
    done("convert", root, tmp_path / "cast", "--to", "dcp", *cast)
    assert_equal(reshard.open(tmp_path / "cast"), {"w": FULL["w"].astype(np.float64), BUCKET: FULL["b"]})
    done("verify", tmp_path / "cast")
    done("verify", tmp_path / "cast", "--against", root, *cast)
    result = call("verify", root, "--against", root, *cast)
    assert result.exit_code == 3
    assert "w" in [line.split(":")[0].split()[-1] for line in result.stdout.splitlines()], result.stdout
    idle = reshard.Selection(exclude=("w",), cast={"float32": "float64"})
    with refused(UsageError, "no-effect", "float32"):
        reshard.plan(reshard.open(root), to="dcp", selection=idle)
    renamed = reshard.Selection(name_map={BUCKET: "x"})
    for files in (DCP(), DCP(link=True)):
        plan = plan_with(reshard.open(root), files=files, selection=renamed)
        said = f"{BUCKET}: has another name in the target, by which no training looks for it"
        assert said in plan.warnings


PARTS = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)
"""Of two parts along each of the first two dimensions: [2, 3, 5], 30 elements, which four ranks cut anywhere."""


def flat(root: Path, *, cuts: tuple[int, ...] = (0, 7, 8, 22, 30), shape: Any = (4, 6, 5)) -> Path:
    stored, items, rank = np.zeros((2, 2, 1, 30), np.float32), {}, 0
    for at in np.ndindex(2, 2):
        part = PARTS[2 * at[0] : 2 * at[0] + 2, 3 * at[1] : 3 * at[1] + 3].reshape(-1)
        for begin, end in itertools.pairwise(cuts):
            made = item(part[begin:end].reshape(1, 1, 1, end - begin))
            items[rank] = [("w", ((*at, 0, begin), (1, 1, 1, end - begin)), made)]
            rank += 1
    items[0].append(("b", ((0,), (5,)), item(FULL["b"])))
    known = {"w": {"nd_reformulated_orig_global_shape": shape}, "b": {}}
    return write_torch(root, {"w": stored, "b": FULL["b"]}, items, mcore_data=known)


def test_states_that_megatron_kept_flattened(tmp_path: Path) -> None:
    full = {"w": PARTS, "b": FULL["b"]}
    source = reshard.open(flat(tmp_path / "src"))
    assert_equal(source, full)
    rows = Strategy.of({"w": Layout.of([2], [-1, 0, -1]), "b": Layout.of([2], [-1])})
    reshard.plan(source, rows).run(tmp_path / "rows", fsync=False)
    assert_equal(reshard.open(tmp_path / "rows", strategy=rows), full)
    assert reshard.verify(tmp_path / "rows").equal


@pytest.mark.parametrize(
    "options", [{"cuts": (0, 7, 22, 29)}, {"shape": (4, 6, 6)}, {"shape": (3, 6, 5)}, {"shape": (24, 5)}]
)
def test_flattened_states_that_cannot_be(tmp_path: Path, options: dict[str, Any]) -> None:
    found = reshard.open(flat(tmp_path, **options))
    assert set(found) == {"b"}
    with refused(SourceError, "unreadable-tensor", "'w'"):
        reshard.plan(found)


@pytest.mark.parametrize("encoding", [["a"] * 9, [["x"]], "zstd", 7])
def test_encodings_that_cannot_be(tmp_path: Path, encoding: Any) -> None:
    items = {0: [("w", WHOLE, item(FULL["w"]))]}
    with refused(SourceError, "no-tensors", "'w'"):
        reshard.open(write_torch(tmp_path, FULL, items, transform_descriptors=encoding))


def test_many_items_alike_in_files_near_and_far(tmp_path: Path) -> None:
    """Of items that are alike but for their bytes, one head is looked at; near ones are read together."""
    tensors = {f"w{number}": np.arange(12 + number % 3, dtype=np.float32) + number for number in range(60)}
    large = {f"v{number}": np.arange(30_000, dtype=np.int64) + number for number in range(3)}
    items = {
        0: [(name, ((0,), array.shape), item(array)) for name, array in (tensors | large).items()],
        1: [(name, ((0,), array.shape), item(array)) for name, array in large.items()],
    }
    found = reshard.open(write_torch(tmp_path, tensors | large, items))
    assert_equal(found, tensors | large)
    cut = items[0][59][2]
    assert cut.count(b"PK") > 3
    content = (tmp_path / "__0_0.distcp").read_bytes()
    begin = content.index(cut)
    (tmp_path / "__0_0.distcp").write_bytes(content[:begin] + cut.replace(b"PK", b"PX") + content[begin + len(cut) :])
    assert "not a zip archive" in reshard.open(tmp_path).unreadable["w59"]


@pytest.mark.slow
def test_a_hundred_thousand_items_open_in_seconds(tmp_path: Path) -> None:
    array = np.zeros((1, 4), np.float32)
    tensors = {f"layers.{number}.weight": np.zeros((256, 4), np.float32) for number in range(400)}
    made = item(array)
    write_torch(tmp_path, tensors, {rank: [(n, ((rank, 0), (1, 4)), made) for n in tensors] for rank in range(256)})
    began = time.process_time()
    found = reshard.open(tmp_path)
    took = time.process_time() - began
    assert sum(len(tensor.sharding.blocks) for tensor in found.tensors.values()) == 102_400
    assert took < 40, f"{took:.1f} s; 4 to 6 s where the machine does nothing else"

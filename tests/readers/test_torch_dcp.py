"""PyTorch's and Megatron's distributed checkpoints as a source: real files give the whole tensors, or say why not."""

from __future__ import annotations

import itertools
import shutil
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import numbers, write_file
from commands import done
from dcp_files import item, write_torch

import reshard
from reshard import HuggingFaceSet, Layout, Strategy
from reshard.errors import SourceError
from reshard.storage.remote import filesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from dcp_files import Box

REFUSED = {"zstd", "verl_like"}
CASES = sorted(
    {path.split("/")[1] for path in helpers.packed_files("dcp")} - REFUSED - {"hf_consolidated", "hf_sharded"}
)

FULL = numbers({"w": (6, 4), "b": (5,), "s": ()})
WHOLE: Box = (0, 0), (6, 4)


@pytest.fixture
def case(mindspore_data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a case, to be spoilt; returns its directory."""
    return lambda name: shutil.copytree(mindspore_data / "dcp" / name / "checkpoint", tmp_path / name)


def full_of(root: Path) -> dict[str, Any]:
    return {name.replace("\\", "/"): value for name, value in np.load(root / "full.npz").items()}


def assert_equal(checkpoint: reshard.Checkpoint, full: Mapping[str, Any]) -> None:
    assert set(checkpoint) == set(full)
    for name in checkpoint:
        found = checkpoint[name].compute()
        assert (found.shape, found.tobytes()) == (full[name].shape, full[name].tobytes()), name


@pytest.mark.parametrize("name", CASES)
def test_real_ones_are_their_whole_tensors(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    """As lazy arrays, as a Hugging Face set, on another mesh and back."""
    root = mindspore_data / "dcp" / name
    full, source = full_of(root), reshard.open(root / "checkpoint")
    assert_equal(source, full)
    assert not source.unreadable
    assert list(source.warnings) == (
        ["common.pt, which has Megatron's arguments and step, is not read"] if name.startswith("mcore") else []
    )
    reshard.plan(source, files=HuggingFaceSet(), format="safetensors").run(tmp_path / "hf", fsync=False)
    assert_equal(reshard.open(tmp_path / "hf"), full)
    rows = Strategy.of({
        key: Layout.of([2, 2], [-1 if value.shape[0] % 2 else 1, *[-1] * (value.ndim - 1)])
        for key, value in full.items() if value.ndim
    })  # fmt: skip
    reshard.plan(source, rows, format="safetensors").run(tmp_path / "rows", fsync=False)
    assert_equal(reshard.open(tmp_path / "rows", strategy=rows), full)
    assert reshard.verify(tmp_path / "hf").equal
    assert reshard.verify(tmp_path / "rows").equal
    assert reshard.verify(root / "checkpoint").tensors == len(full)


@pytest.mark.parametrize("name", ["fsdp2_uneven", "kinds"])
def test_zarr_and_saved_plans(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    root = mindspore_data / "dcp" / name
    full, source = full_of(root), reshard.open(root / "checkpoint")
    source.to_zarr(tmp_path / "zarr", fsync=False)
    assert_equal(reshard.open(tmp_path / "zarr"), full)
    reshard.plan(source).save(tmp_path / "plan.json")
    reshard.read_plan(tmp_path / "plan.json").run(tmp_path / "whole")
    assert_equal(reshard.open(tmp_path / "whole"), full)
    for target in ("zarr", "whole"):
        assert reshard.verify(tmp_path / target).equal


def test_weights_as_bfloat16_for_hugging_face(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "fsdp2_uneven" / "checkpoint"
    done(
        "unify", root, tmp_path / "hf", "--style", "huggingface", "--include", "model.*", "--cast", "float32=bfloat16"
    )  # fmt: skip
    found = reshard.open(tmp_path / "hf")
    assert found
    assert {tensor.spec.dtype.name for tensor in found.tensors.values()} == {"bfloat16", "int64"}
    assert all(name.startswith("model.") for name in found)
    done("unify", root, tmp_path / "weights", "--weights-only")
    assert set(reshard.open(tmp_path / "weights")) == set(found)


def test_at_a_url(mindspore_data: Path) -> None:
    root = mindspore_data / "dcp" / "hsdp"
    fs, place = filesystem("memory://torch")
    for path in (root / "checkpoint").iterdir():
        fs.pipe(f"{place}/{path.name}", path.read_bytes())
    assert_equal(reshard.open("memory://torch"), full_of(root))


def test_a_run_of_megatron(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "mcore_tp2_pp2"
    for step in (5, 10):
        shutil.copytree(root / "checkpoint", tmp_path / f"iter_{step:07d}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    found = reshard.open(tmp_path)
    assert found.root.endswith("iter_0000010")
    assert reshard.Checkpoint2().of(found).step == 10
    assert_equal(found, full_of(root))
    assert reshard.open(tmp_path, iteration=5).root.endswith("iter_0000005")
    assert "iteration 10" in done("inspect", tmp_path).stdout


def test_objects_are_listed(mindspore_data: Path) -> None:
    found = reshard.open(mindspore_data / "dcp" / "kinds" / "checkpoint")
    assert "objects.bytes" in found.objects
    assert "objects.rng" in found  # which is a tensor
    assert len(found.objects) == 12
    shown = done("inspect", mindspore_data / "dcp" / "mcore_tp2_pp2" / "checkpoint").stdout
    assert "not a tensor: decoder.layers.mlp.linear_fc{1-2}._extra_state/shard_{0-3}_4: a pickled object" in shown


def test_what_is_not_read_says_so(mindspore_data: Path) -> None:
    root = mindspore_data / "dcp"
    for name, said in (
        ("zstd", r"holds no tensor that can be read: 'w' is encoded \('stream.zstd/1'\), which is not read"),
        ("verl_like", "has no checkpoint"),
    ):
        with pytest.raises(SourceError, match=said):
            reshard.open(root / name / "checkpoint")


# --- what is wrong is said ---


def test_files_that_are_cut_off_gone_or_stale(case: Callable[[str], Path]) -> None:
    root = case("fsdp2_bf16")
    path = root / "__1_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(
        SourceError, match=rf"__1_0.distcp: has {len(content) - 1} bytes; its items end at {len(content)}"
    ):
        reshard.open(root)
    path.write_bytes(content)
    shutil.copy(path, root / "__9_0.distcp")
    assert reshard.open(root).warnings == (".metadata does not name __9_0.distcp, which is not read",)
    path.unlink()
    with pytest.raises(SourceError, match="__1_0.distcp: is not there, and .metadata names it"):
        reshard.open(root)
    (root / ".metadata").unlink()
    with pytest.raises(SourceError, match=r"has no \.metadata, which comes last"):
        reshard.open(root)


def test_a_file_of_another_save(case: Callable[[str], Path]) -> None:
    """Of the same length, with other items in it."""
    root = case("fsdp2_bf16")
    path = root / "__1_0.distcp"
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(SourceError, match="is not a tensor that torch.save stored"):
        reshard.open(root)


def test_one_metadata_file_a_rank(case: Callable[[str], Path]) -> None:
    root = case("rank_local")
    (root / "__1.metadata").unlink()
    with pytest.raises(SourceError, match="has no metadata of rank 1, and some of rank 3"):
        reshard.open(root)
    (root / "__3.metadata").unlink()
    (root / "__2.metadata").unlink()
    with pytest.raises(SourceError, match=r"holds no tensor that can be read: .* of \d+ elements"):
        reshard.open(root)


ODD: dict[str, tuple[dict[str, Any], Any]] = {
    "a Parameter": ({"wrapped": "_rebuild_parameter"}, None),
    "a subclass": ({"wrapped": "_rebuild_from_type_v2"}, None),
    "aligned to 4096": ({"align": 4096}, None),
    "aligned to 65536": ({"align": 65536}, None),
    "transposed": ({"strides": (1, 6), "storage": np.ascontiguousarray(FULL["w"].T).reshape(-1)}, None),
    "a part of its storage": ({"first": 3, "storage": np.concatenate([FULL["b"][:3], FULL["w"].reshape(-1)])}, None),
    "big-endian": ({"order": "big"}, "has its bytes in the order"),
    "beyond its storage": ({"first": 1}, "goes beyond its storage"),
    "another record": ({"key": "1"}, "is in the record b'data/0' of its item, which has b'data/1' first"),
    "of other strides": ({"strides": (4,)}, "the strides"),
    "negated": ({"more": ({"neg": True},)}, "is conjugated or negated"),
    "too many arguments": ({"more": (1, 2, 3)}, "is kept as '_rebuild_tensor_v2', which is not read"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_items_of_any_kind(tmp_path: Path, name: str) -> None:
    options, said = ODD[name]
    ok = ("b", ((0,), (5,)), item(FULL["b"]))
    write_torch(tmp_path, FULL, {0: [ok, ("w", WHOLE, item(FULL["w"], **options)), ("s", ((), ()), item(FULL["s"]))]})
    found = reshard.open(tmp_path)
    if said is None:
        assert_equal(found, FULL)
    else:
        assert said in found.unreadable["w"]
        assert_equal(found, {"b": FULL["b"], "s": FULL["s"]})


def test_a_tensor_that_is_transposed_in_too_many_pieces(tmp_path: Path) -> None:
    large = np.arange(300 * 300, dtype=np.float32).reshape(300, 300)
    turned = item(large, strides=(1, 300), storage=np.ascontiguousarray(large.T).reshape(-1))
    root = write_torch(tmp_path, {"w": large, **FULL} | {"w": large}, {
        0: [("w", ((0, 0), (300, 300)), turned), ("b", ((0,), (5,)), item(FULL["b"]))],
    })  # fmt: skip
    said = reshard.open(root).unreadable["w"]
    assert said == "is transposed in its file, in 90,000 pieces (strides [1, 300]); at most 65,536 are read"


def test_several_chunks_of_a_name_in_a_file_and_replicas(tmp_path: Path) -> None:
    """As Megatron's gate and up are."""
    w = FULL["w"]
    top, low = (((0, 0), (3, 4)), item(w[:3])), (((3, 0), (3, 4)), item(w[3:]))
    root = write_torch(tmp_path, FULL, {0: [("w", *top), ("w", *low)], 1: [("w", *low)]})
    found = reshard.open(root)
    assert_equal(found, {"w": w})
    assert [len(shard.replicas) for shard in found.tensors["w"].shards] == [1, 2]
    reshard.plan(found).run(tmp_path / "whole")
    assert_equal(reshard.open(tmp_path / "whole"), {"w": w})
    content = (root / "__1_0.distcp").read_bytes()
    (root / "__1_0.distcp").write_bytes(content.replace(w[3:].tobytes(), (w[3:] + 1).tobytes()))
    with pytest.raises(
        SourceError, match=r"block \[3:6, 0:4\] differs between rank 0 and rank 1, which .metadata says"
    ):
        reshard.open(root)


def test_items_that_the_metadata_contradict(tmp_path: Path) -> None:
    w, ok = FULL["w"], ("b", ((0,), (5,)), item(FULL["b"]))
    for box, made, said in (
        (WHOLE, item(w[:3]), r"is of shape \[3, 4\] at \[0, 0\] in __0_0.distcp; expected \[6, 4\] there"),
        (WHOLE, item(w.astype(np.float64)), "is float32 and float64, as .metadata and files say"),
        (((0, 0), (3, 4)), item(w[:3]), r"its blocks have 12 of 24 elements"),
        (((1, 0), (6, 4)), item(w), r"its block \[1:7, 0:4\] is not within that"),
        (
            WHOLE,
            write_file(tmp_path / "x.safetensors", {"w": w}).read_bytes(),
            "is not a tensor that torch.save stored",
        ),
        (WHOLE, item(w)[:40], "is not a tensor that torch.save stored"),
    ):
        found = reshard.open(write_torch(tmp_path / "src", FULL, {0: [ok, ("w", box, made)]}))
        assert set(found) == {"b"}
        with pytest.raises(SourceError, match=said):
            reshard.plan(found)


def test_buckets_of_megatrons_optimizer(tmp_path: Path) -> None:
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_float32.bucket_idx_0.exp_avg"
    items = [("w", WHOLE, item(FULL["w"])), (bucket, ((0,), (5,)), item(FULL["b"]))]
    found = reshard.open(write_torch(tmp_path, FULL | {bucket: FULL["b"]}, {0: items}))
    assert "it can only be resumed with the same layout" in found.unreadable[bucket]
    assert_equal(found, {"w": FULL["w"]})


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
    ("options", "said"),
    [
        ({"cuts": (0, 7, 22, 29)}, "its blocks have 116 of 120 elements"),
        ({"shape": (4, 6, 6)}, r"has parts of \[2, 3, 6\] in 30 elements"),
        ({"shape": (3, 6, 5)}, r"is a grid of \[2, 2, 1\] parts of \[3, 6, 5\], which these do not divide"),
        ({"shape": (24, 5)}, "which these do not divide"),
    ],
)
def test_flattened_states_that_cannot_be(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    found = reshard.open(flat(tmp_path, **options))
    assert set(found) == {"b"}
    with pytest.raises(SourceError, match=said):
        reshard.plan(found)


def test_encodings_that_cannot_be(tmp_path: Path) -> None:
    items = {0: [("w", WHOLE, item(FULL["w"]))]}
    for encoding, said in ((["a"] * 9, "'a', 'a', 'a'"), ([["x"]], r"\['x'\]"), ("zstd", r"\?"), (7, r"\?")):
        with pytest.raises(SourceError, match=rf"'w' is encoded \(({said})\), which is not read"):
            reshard.open(write_torch(tmp_path, FULL, items, transform_descriptors=encoding))


def test_encoded_items_among_others(tmp_path: Path) -> None:
    items = {0: [("w", WHOLE, item(FULL["w"]))]}
    root = write_torch(tmp_path, FULL, items, transform_descriptors=["stream.zstd/1"])
    with pytest.raises(SourceError, match=r"'w' is encoded \('stream.zstd/1'\), which is not read"):
        reshard.open(root)

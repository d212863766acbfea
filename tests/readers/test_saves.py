"""One torch.save of DTensors a rank, and of whole tensors in one file: real files, each generation, refusals."""

from __future__ import annotations

import re
import shutil
import struct
import time
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers
from commands import done
from fsspec.core import url_to_fs
from refusals import failed, refused
from saves_files import Made, Storage, dtensor, mesh, shard, tensor, write_rank, write_save

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FULL = numbers({"w": (6, 4), "b": (5,)})


def assert_equal(checkpoint: reshard.Checkpoint, full: Mapping[str, Any]) -> None:
    assert set(checkpoint) == set(full)
    for name in checkpoint:
        found = checkpoint[name].compute()
        assert (found.shape, found.tobytes()) == (full[name].shape, full[name].tobytes()), name


@pytest.fixture
def case(mindspore_data: Path, tmp_path: Path) -> Path:
    return shutil.copytree(mindspore_data / "dcp" / "verl_like", tmp_path / "verl")


def test_a_real_one_is_its_whole_tensors(case: Path, tmp_path: Path) -> None:
    """As lazy arrays, by commands, on other ranks, in zarr and by a saved plan."""
    root, full = case / "checkpoint", dict(np.load(case / "full.npz"))
    source = reshard.open(root)
    assert_equal(source, full)
    assert not source.warnings
    assert not source.unreadable
    assert not source._record.extras.objects
    assert "4 torch.save files, 4 ranks (0-3)" in done("inspect", root).stdout
    done("convert", root, tmp_path / "hf", "--to", "hf")
    assert_equal(reshard.open(tmp_path / "hf"), full)
    columns = Strategy.of(
        {name: Layout.of([2], [0, *[-1] * (full[name].ndim - 1)]) for name in full if full[name].ndim}
    )
    reshard.plan(source, columns, to="safetensors").run(tmp_path / "rows", fsync=False)
    assert_equal(reshard.open(tmp_path / "rows", strategy=columns), full)
    source.to_zarr(tmp_path / "zarr", fsync=False)
    reshard.plan(source).save(tmp_path / "plan.json")
    reshard.read_plan(tmp_path / "plan.json").run(tmp_path / "whole")
    for target in ("hf", "rows", "zarr", "whole"):
        assert reshard.verify(tmp_path / target).equal
    assert reshard.verify(root).tensors == len(full)


def test_at_a_url(case: Path) -> None:
    fs, place = url_to_fs("memory://verl")
    for path in (case / "checkpoint").iterdir():
        fs.pipe(f"{place}/{path.name}", path.read_bytes())
    assert_equal(reshard.open("memory://verl"), dict(np.load(case / "full.npz")))
    with refused(SourceError, "one-of-several", "model_world_size_4_rank_1.pt"):
        reshard.open("memory://verl/model_world_size_4_rank_1.pt")


# --- layouts ---


def parts(count: int, made: Callable[[int], Any], root: Path) -> reshard.Checkpoint:
    """A checkpoint of which every rank has a tensor `w`."""
    for rank in range(count):
        write_rank(root, rank, count, {"w": made(rank)})
    return reshard.open(root)


@pytest.mark.parametrize("generation", ["2.4", "2.10", "2.13"])
def test_meshes_of_each_generation(tmp_path: Path, generation: str) -> None:
    w = FULL["w"]

    def made(rank: int) -> Made:
        block = w[3 * (rank % 2) : 3 * (rank % 2) + 3, 2 * (rank // 2) : 2 * (rank // 2) + 2]
        over = mesh((2, 2), rank, generation=generation)
        return dtensor(tensor(block), (6, 4), [shard(1), shard(0)], over)

    assert_equal(parts(4, made, tmp_path), {"w": w})


def test_ranks_in_another_order_and_meshes_of_some(tmp_path: Path) -> None:
    """Ranks 3 and 1 have one copy, ranks 2 and 0 the other: each pair has a mesh of its own."""
    w = FULL["w"]

    def made(rank: int) -> Made:
        pair = (3, 1) if rank % 2 else (2, 0)
        at = pair.index(rank)
        return dtensor(tensor(w[3 * at : 3 * at + 3]), (6, 4), [shard(0)], mesh((2,), rank, ranks=pair))

    found = parts(4, made, tmp_path)
    assert_equal(found, {"w": w})
    assert [len(shard.replicas) for shard in found.tensors["w"].shards] == [2, 2]


def test_strided_pieces_and_memory_of_any_order(tmp_path: Path) -> None:
    """A rank has rows 0, 2, 4 or 1, 3, 5, in the middle of a storage, column by column."""
    w = FULL["w"]

    def made(rank: int) -> Made:
        local = w[rank::2]
        storage = Storage(np.concatenate([w[0], np.ascontiguousarray(local.T).reshape(-1), w[1]]))
        turned = tensor(local, storage=storage, first=4, strides=(1, 3))
        return dtensor(turned, (6, 4), [shard(0, 3)], mesh((2,), rank))

    found = parts(2, made, tmp_path)
    assert_equal(found, {"w": w})
    assert len(found.tensors["w"].shards) == 6


def test_kinds_of_files_and_what_is_nested(tmp_path: Path) -> None:
    w, own = FULL["w"], [np.full(3, rank, np.uint8) for rank in range(2)]
    shared = Storage(np.arange(24, dtype=np.float32))
    for rank in range(2):
        over = mesh((2,), rank)
        half = dtensor(tensor(w[3 * rank : 3 * rank + 3]), (6, 4), [shard(0)], over)
        tied = tensor(w, storage=shared)
        write_rank(tmp_path / "src", rank, 2, {"w": half, "a": tied, "c": tied, "n": [tensor(FULL["b"]), {"x": 1}]})
        states = {0: {"step": tensor(np.float32(3)), "exp_avg": half}}
        write_rank(tmp_path / "src", rank, 2, {"state": states, "param_groups": [{"lr": 0.1, "params": [0]}]}, "optim")
        write_rank(tmp_path / "src", rank, 2, {"rng": {"cpu": tensor(own[rank])}}, "extra_state")
        write_rank(tmp_path / "src", rank, 2, {}, "nothing")
    found = reshard.open(tmp_path / "src")
    a = np.arange(24, dtype=np.float32).reshape(6, 4)
    full = {"w": w, "a": a, "c": a, "n.0": FULL["b"], "optim.state.0.step": np.float32(3), "optim.state.0.exp_avg": w}
    assert_equal(found, {**full, "extra_state.rng.cpu": own[0]})
    assert {name: one.problem for name, one in found._record.extras.objects.items()} == {
        "n.1.x": "a pickled int, which is not read",
        "optim.param_groups.0.lr": "a pickled float, which is not read",
        "optim.param_groups.0.params": "a pickled list, which is not read",
    }
    assert [line for line in found.warnings if "differs between the ranks" in line]
    done(
        "convert",
        "--to=mindspore",
        tmp_path / "src",
        tmp_path / "weights",
        "--weights-only",
        "--exclude",
        "extra_state.*",
    )
    assert set(reshard.open(tmp_path / "weights")) == {"w", "a", "c", "n.0"}


def test_tensors_under_any_keys_and_at_any_places(tmp_path: Path) -> None:
    """They have the names that PyTorch's distributed checkpoints give them."""
    b = tensor(FULL["b"])
    state = {
        "d": {(0, 1): b, (): b, ("x", None): b}, "n": {None: b, "q": b}, "f": {0.5: b, True: b, -2: b},
        "l": [*[None] * 70, b], "t": ([[b]],), "k": [*range(70), {"x": 7}],
    }  # fmt: skip
    found = reshard.open(write_save(tmp_path / "s.pt", state))
    keys = ["d.(0, 1)", "d.()", "d.('x', None)", "n.None", "n.q", "f.0.5", "f.True", "f.-2"]
    assert_equal(found, dict.fromkeys([*keys, "l.70", "t.0.0.0"], FULL["b"]))
    assert not found.unreadable
    assert found._record.extras.objects["k"].problem == "a pickled list, which is not read"


def attribute(**state: object) -> Made:
    return Made("Namespace", state=state, module="argparse")


def cyclic() -> list[object]:
    around: list[object] = [tensor(FULL["b"])]
    inner = attribute(a=[around])
    around.append(inner)
    return [inner, around]


HOLDERS: dict[str, object] = {
    "an object": attribute(a=tensor(FULL["b"])),
    "an object of a program": Made("Model", 1, [{"x": tensor(FULL["b"])}], module="mine"),
    "a key": {attribute(): tensor(FULL["b"])},
    "a long key": {tuple(range(17)): tensor(FULL["b"])},
    "a tensor for a key": {tensor(FULL["b"]): 1},
    "a storage": Storage(FULL["b"]),
    "a tensor of another kind": Made("rebuilt", Storage(FULL["b"]), module="mine"),
    "attributes of a dict": Made("OrderedDict", state={"more": tensor(FULL["b"])}, module="collections"),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_holds_a_tensor_is_left_out_by_name_alone(tmp_path: Path, name: str) -> None:
    path = write_save(tmp_path / "s.pt", {"w": tensor(FULL["w"]), "x": HOLDERS[name], "o": attribute(a=1)})
    found = reshard.open(path)
    assert set(found) == {"w"}
    assert set(found._record.extras.objects) == {"o"}
    assert re.fullmatch("is a pickled .* with tensors in it, which is not read", found.unreadable["x"])
    failed(4, "unreadable-tensor", "convert", "--to=mindspore", path, tmp_path / "u", places=("--drop 'x'",))
    done("convert", "--to=mindspore", path, tmp_path / "u", "--drop", "x")


def test_what_holds_itself_and_a_tensor(tmp_path: Path) -> None:
    found = reshard.open(write_save(tmp_path / "s.pt", {"w": tensor(FULL["w"]), "x": cyclic()}))
    assert set(found) == {"w", "x.1.0"}
    assert set(found.unreadable) == {"x.0", "x.1.1"}


def test_an_object_that_holds_a_tensor_in_one_file_alone(tmp_path: Path) -> None:
    for rank in range(2):
        inner = tensor(FULL["b"]) if rank else 1
        write_rank(tmp_path, rank, 2, {"w": tensor(FULL["w"]), "x": attribute(a=inner)})
    found = reshard.open(tmp_path)
    assert set(found.unreadable) == {"x"}
    assert not found._record.extras.objects


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_one_file_of_whole_tensors(tmp_path: Path, name: str) -> None:
    turned = tensor(FULL["w"], storage=Storage(np.ascontiguousarray(FULL["w"].T).reshape(-1)), strides=(1, 6))
    path = write_save(tmp_path / name, {"w": turned, "b": Made("_rebuild_parameter", tensor(FULL["b"]), True, {})})
    source = reshard.open(path)
    assert_equal(source, FULL)
    reshard.plan(source, to="hf").run(tmp_path / "hf", fsync=False)
    assert_equal(reshard.open(tmp_path / "hf"), FULL)
    done("verify", path, "--against", tmp_path / "hf")


def test_a_record_that_begins_behind_four_gigabytes(tmp_path: Path) -> None:
    """Of a file with holes, whose directory has numbers of 64 bits."""
    from reshard.kits.torch.archive import ending
    from reshard.kits.torch.saved_tensors import _record, _size

    small = write_save(tmp_path / "small.pt", {"large": tensor(np.zeros(2, np.float32)), "b": tensor(FULL["b"])})
    with zipfile.ZipFile(small) as archive:
        pickled = archive.read("small/data.pkl")
    parts: list[Any] = []
    directory: list[Any] = []
    for name, content in (("data.pkl", pickled), ("data/0", 5 << 30), ("data/1", FULL["b"].tobytes())):
        record, entry = _record(name, content, _size(parts))
        parts += record
        directory += entry
    with (tmp_path / "large.pt").open("wb") as file:
        for part in [*parts, *directory, ending(3, _size(parts), _size(directory))]:
            if isinstance(part, int):
                file.seek(part, 1)
            else:
                file.write(bytes(4) if part is None else part)
    assert_equal(reshard.open(tmp_path / "large.pt"), {"large": np.zeros(2, np.float32), "b": FULL["b"]})


# --- what is wrong is said ---


def test_files_that_are_not_there_or_of_other_ranks(case: Path) -> None:
    root = case / "checkpoint"
    name = "model_world_size_4_rank_{}.pt"
    shutil.copy(root / name.format(1), root / "model_world_size_2_rank_1.pt")
    with refused(SourceError, "several-checkpoints", root, "2, 4 ranks"):
        reshard.open(root)
    (root / "model_world_size_2_rank_1.pt").rename(root / "model_world_size_4_rank_7.pt")
    with refused(SourceError, "no-such-rank", "model_world_size_4_rank_7.pt"):
        reshard.open(root)
    (root / name.format(7)).rename(root / name.format(3))  # that of rank 1 under the name of another
    with refused(SourceError, "unreadable-tensor", "'emb.weight'", "rank 3"):
        reshard.plan(reshard.open(root))
    (root / name.format(3)).unlink()
    with refused(SourceError, "missing-ranks", "model_world_size_4_rank_*.pt", "rank 3, of 4"):
        reshard.open(root)
    with refused(SourceError, "one-of-several", name.format(0)):
        reshard.open(root / name.format(0))
    (root / name.format(1)).rename(root / "model_world_size_900000000_rank_1.pt")
    (root / name.format(0)).unlink()
    (root / name.format(2)).unlink()
    with refused(SourceError, "missing-ranks", "ranks 0,2-64 and more, of 900000000"):
        reshard.open(root)


def cut(rank: int, **spec: Any) -> Made:
    placements, of = spec.pop("placements", (shard(0),)), spec.pop("mesh", mesh((2,), rank))
    return dtensor(tensor(FULL["w"][3 * rank : 3 * rank + 3]), (6, 4), placements, of, **spec)


def with_shape(rank: int, shape: tuple[int, ...]) -> Made:
    return dtensor(tensor(FULL["w"][3 * rank : 3 * rank + 3]), shape, [shard(0)], mesh((2,), rank))


def over(rank: int, **state: Any) -> Made:
    return cut(rank, mesh=Made("DeviceMesh", state=state))


AXIS = Made("_FlatLayout", state={"shape": (2,), "stride": (1,)})
HUGE = Made("_FlatLayout", state={"shape": (1 << 40,), "stride": (1,)})
ODD: dict[str, tuple[Callable[[int], Any], str]] = {
    "a sum": (lambda r: cut(r, placements=(Made("Partial", state={"reduce_op": "sum"}),)), "each rank has a part of a"),
    "an unknown placement": (lambda r: cut(r, placements=(Made("os.system"),)), "placement 'os.system'"),
    "a dimension that is not there": (lambda r: cut(r, placements=(shard(2),)), "shards dimension 2 of a tensor"),
    "no number": (lambda r: cut(r, placements=(shard("x"),)), "expected whole numbers"),  # type: ignore[arg-type]
    "too few placements": (lambda r: cut(r, placements=()), "placements on a mesh of [2]"),
    "no placements": (lambda r: cut(r, placements=7), "has 7 for placements on a mesh of [2]"),
    "a split factor of 0": (lambda r: cut(r, placements=(shard(0, 0),)), "has the split_factor 0"),
    "another order": (
        lambda r: cut(r, shard_order=(Made("ShardOrderEntry", 0, (1, 0)),)), "is cut by the mesh axes [1, 0]",
    ),
    "another shape": (lambda r: with_shape(r, (8, 4)), "[4, 4] of [8, 4]"),
    "a shape that cannot be": (lambda r: with_shape(r, (1 << 62, 1 << 62)), "impossible shape"),
    "pieces without end": (
        lambda r: dtensor(tensor(FULL["w"]), (1 << 50, 4), [shard(0, 1 << 49)], mesh((2,), r)), "at most 256 are read",
    ),
    "no mesh": (lambda r: cut(r, mesh=None), "has no mesh"),
    "a mesh of nothing": (over, "expected whole numbers"),
    "a huge mesh": (
        lambda r: over(r, _layout=Made("_MeshLayout", state={"axes": (HUGE,)}), _flatten_rank_map=(0, 1)),
        "a mesh of more ranks than the 2",
    ),
    "a mesh of other ranks": (
        lambda r: over(r, _layout=Made("_MeshLayout", state={"axes": (AXIS,)}), _flatten_rank_map=(6, 7)),
        "a mesh of ranks 6-7, but is in the file of rank 0",
    ),
    "ranks twice": (
        lambda r: over(r, _layout=Made("_MeshLayout", state={"axes": (AXIS,)}), _flatten_rank_map=(r, r)), "some twice",
    ),
    "no spec": (lambda r: cut(r, mesh=None, placements=None), "has no mesh"),
    "another class": (
        lambda _: Made("_rebuild_from_type_v2", Made("x"), None, (), {}), "'_rebuild_from_type_v2'",
    ),
    "sharded by the class of before": (lambda _: Made("ShardedTensor"), "'ShardedTensor'"),
    "sparse": (lambda _: Made("_rebuild_sparse_tensor"), "'_rebuild_sparse_tensor'"),
    "one rank's alone": (lambda r: cut(r) if r else tensor(FULL["w"]), "in the files of ranks 0-1"),
    "of other shapes": (lambda r: tensor(FULL["w"][r:]), "[6, 4], [5, 4]"),
    "of other values": (lambda r: tensor(FULL["w"] + r), "differs between the ranks"),
    "of other dtypes": (lambda r: tensor(FULL["w"].astype([np.float32, np.int64][r])), "is float32, int64 in"),
    "beyond its storage": (lambda _: tensor(FULL["w"], first=1), "beyond its storage"),
    "a storage that is too short": (
        lambda _: tensor(FULL["w"], storage=Storage(FULL["w"][:1].reshape(-1), 24)), "is shorter than the tensor",
    ),
    "an object elsewhere": (lambda r: tensor(FULL["w"]) if r else 7, "is a tensor in some files, and none in others"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_tensor_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """It is refused by name, and the others are read."""
    made, said = ODD[name]
    for rank in range(2):
        write_rank(tmp_path, rank, 2, {"w": made(rank), "b": tensor(FULL["b"])})
    found = reshard.open(tmp_path)
    assert set(found) == {"b"}
    assert said in found.unreadable["w"]


def broken(path: Path, at: bytes, change: Callable[[bytearray, int], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content, content.rfind(at))
    path.write_bytes(content)


def put(offset: int, form: str, *values: int) -> Callable[[bytearray, int], None]:
    return lambda content, at: struct.pack_into(form, content, at + offset, *values)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "nothing"),
    "of before PyTorch 1.6": (
        lambda path: path.write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + bytes(100)),
        "a version",
    ),
    "something else": (lambda path: path.write_bytes(b"GIF89a" * 9), "47 49 46"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "zip directory"),
    "compressed": (
        lambda path: write_save(path, {"w": tensor(FULL["w"])}, method=zipfile.ZIP_DEFLATED),
        "'data.pkl' compressed",
    ),
    "without a pickle": (lambda path: broken(path, b"/data.pkl", put(1, "4s", b"toto")), " no record 'data.pkl'"),  # type: ignore[arg-type]
    "a directory of other names": (
        lambda path: broken(path, b"/data/0", put(6, "1s", b"1")), " no record 'data/0'"),  # type: ignore[arg-type]
    "a directory of other places": (
        lambda path: broken(path, b"PK\1\2", put(42, "<I", 7)), "at a place that cannot be",
    ),
    "a header of another length": (
        lambda path: broken(path, b"PK\3\4", put(28, "<H", 7)), "where its directory says it is",
    ),
    "a record twice": (
        lambda path: broken(
            write_save(path, {name: tensor(FULL[name]) for name in FULL}), b"/data/1", put(6, "1s", b"0")  # type: ignore[arg-type]
        ),
        "'data/0' twice",
    ),
    "a record outside": (lambda path: broken(path, b"PK\1\2", put(20, "<II", 9999, 9999)), "at a place that cannot be"),
    "a directory outside": (lambda path: broken(path, b"PK\5\6", put(16, "<I", 1 << 30)), "goes beyond its end"),
    "more records than there are": (lambda path: broken(path, b"PK\5\6", put(10, "<H", 99)), " 99 records"),
    "fewer bytes": (lambda path: broken(path, b"PK\5\6", put(8, "<HHI", 2, 2, 138)), "or does not reach it"),
    "big-endian": (
        lambda path: write_save(path, {"w": tensor(FULL["w"])}, records={"byteorder": b"big"}), "b'big'",
    ),
    "a tensor": (lambda path: write_save(path, tensor(FULL["w"])), "a tensor"),
    "a number": (lambda path: write_save(path, 7), " 7"),
    "two of a name": (
        lambda path: write_save(path, {"a.b": tensor(FULL["w"]), "a": {"b": tensor(FULL["w"])}}), "'a.b'",
    ),
    "nothing in it": (lambda path: write_save(path, {"a": 7}), "w.pt"),
}  # fmt: skip


CODES = {
    "cut off": "truncated",
    "of before PyTorch 1.6": "bad-pickle",
    "big-endian": "unsupported-byte-order",
    "a tensor": "not-a-state-dict",
    "a number": "not-a-state-dict",
    "two of a name": "bad-name",
    "nothing in it": "no-tensors",
}
"""The others are `corrupt`."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    spoil, said = FILES[name]
    path = write_save(tmp_path / "w.pt", {"w": tensor(FULL["w"])})
    spoil(path)
    with refused(SourceError, CODES.get(name, "corrupt"), path, said):
        reshard.open(path)


def bomb() -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(30):
        inner = {"a": inner, "b": inner} if inner else {"a": 1, "b": 2}
    return inner


def test_what_is_shared_again_and_again_is_refused_soon(tmp_path: Path) -> None:
    path = write_save(tmp_path / "w.pt", bomb())
    began = time.process_time()
    with refused(SourceError, "too-large", path):
        reshard.open(path)
    assert time.process_time() - began < 3


def test_a_million_records_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    end = struct.pack("<4s28xQQQ", b"PK\6\6", 1_000_000, 46_000_000, 4)
    end += struct.pack("<4s4xQ4x4s18x", b"PK\6\7", 46_000_004, b"PK\5\6")
    path.write_bytes(b"PK\3\4" + bytes(46_000_000) + end)
    began = time.process_time()
    with refused(SourceError, "corrupt", path, "1,000,000 records"):
        reshard.open(path)
    assert time.process_time() - began < 1

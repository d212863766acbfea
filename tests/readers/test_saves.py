"""One torch.save of DTensors a rank, and of whole tensors in one file: real files, each generation, refusals."""

from __future__ import annotations

import shutil
import struct
import time
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers
from commands import done
from refusals import failed, refused
from saves_files import Made, Storage, dtensor, mesh, shard, tensor, write_rank, write_save

import reshard
from reshard.errors import SourceError
from reshard.kits.torch.saved_tensors import saved_storages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FULL = numbers({"w": (6, 4), "b": (5,)})


def assert_equal(checkpoint: reshard.Checkpoint, full: Mapping[str, Any]) -> None:
    assert set(checkpoint) == set(full)
    for name in checkpoint:
        found = checkpoint[name].compute()
        assert (found.shape, found.tobytes()) == (full[name].shape, full[name].tobytes()), name


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
    assert set(found._record.extras.objects) == {"n.1.x", "optim.param_groups.0.lr", "optim.param_groups.0.params"}
    assert found.tensors["extra_state.rng.cpu"].varies
    options = ("--to=mindspore", "--weights-only", "--exclude", "extra_state.*")
    done("convert", *options, tmp_path / "src", tmp_path / "weights")
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
    assert "k" in found._record.extras.objects


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
    assert set(found.unreadable) == {"x"}
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
    small = write_save(tmp_path / "small.pt", {"large": tensor(np.zeros(2, np.float32)), "b": tensor(FULL["b"])})
    with zipfile.ZipFile(small) as archive:
        saved = saved_storages(archive.read("small/data.pkl"), {"0": 5 << 30, "1": FULL["b"].tobytes()})
    with (tmp_path / "large.pt").open("wb") as file:
        for offset, literal in saved.literals:
            file.seek(offset)
            file.write(literal)
        file.truncate(saved.nbytes)
    assert_equal(reshard.open(tmp_path / "large.pt"), {"large": np.zeros(2, np.float32), "b": FULL["b"]})


# --- what is wrong is said ---


@pytest.mark.parametrize(
    ("of_files", "code", "place"),
    [
        ({(0, 2), (1, 2), (1, 4)}, "several-checkpoints", ""),
        ({(0, 2), (1, 2), (7, 2)}, "no-such-rank", "model_world_size_2_rank_7.pt"),
        ({(0, 2)}, "missing-ranks", "model_world_size_2_rank_*.pt"),
        ({(1, 900_000_000)}, "missing-ranks", "model_world_size_900000000_rank_*.pt"),
    ],
)
def test_files_that_are_not_there_or_of_other_ranks(
    tmp_path: Path, of_files: set[tuple[int, int]], code: str, place: str
) -> None:
    for rank, count in of_files:
        path = write_rank(tmp_path, rank, count, {"w": tensor(FULL["w"])})
    with refused(SourceError, code, tmp_path, place):
        reshard.open(tmp_path)
    with refused(SourceError, "one-of-several", path):
        reshard.open(path)


def test_a_file_of_another_rank_under_this_name(mindspore_data: Path, tmp_path: Path) -> None:
    root = shutil.copytree(mindspore_data / "dcp" / "verl_like" / "checkpoint", tmp_path / "verl")
    shutil.copy(root / "model_world_size_4_rank_1.pt", root / "model_world_size_4_rank_3.pt")
    with refused(SourceError, "unreadable-tensor", "'emb.weight'", "rank 3"):
        reshard.plan(reshard.open(root))


def cut(rank: int, **spec: Any) -> Made:
    placements, of = spec.pop("placements", (shard(0),)), spec.pop("mesh", mesh((2,), rank))
    return dtensor(tensor(FULL["w"][3 * rank : 3 * rank + 3]), (6, 4), placements, of, **spec)


def with_shape(rank: int, shape: tuple[int, ...]) -> Made:
    return dtensor(tensor(FULL["w"][3 * rank : 3 * rank + 3]), shape, [shard(0)], mesh((2,), rank))


def over(rank: int, **state: Any) -> Made:
    return cut(rank, mesh=Made("DeviceMesh", state=state))


PAIR = Made("_MeshLayout", state={"axes": (Made("_FlatLayout", state={"shape": (2,), "stride": (1,)}),)})
HUGE = Made("_FlatLayout", state={"shape": (1 << 40,), "stride": (1,)})
ODD: dict[str, Callable[[int], Any]] = {
    "a sum": lambda r: cut(r, placements=(Made("Partial", state={"reduce_op": "sum"}),)),
    "an unknown placement": lambda r: cut(r, placements=(Made("os.system"),)),
    "a dimension that is not there": lambda r: cut(r, placements=(shard(2),)),
    "no number": lambda r: cut(r, placements=(shard("x"),)),  # type: ignore[arg-type]
    "too few placements": lambda r: cut(r, placements=()),
    "no placements": lambda r: cut(r, placements=7),
    "a split factor of 0": lambda r: cut(r, placements=(shard(0, 0),)),
    "another order": lambda r: cut(r, shard_order=(Made("ShardOrderEntry", 0, (1, 0)),)),
    "another shape": lambda r: with_shape(r, (8, 4)),
    "a shape that cannot be": lambda r: with_shape(r, (1 << 62, 1 << 62)),
    "pieces without end": lambda r: dtensor(tensor(FULL["w"]), (1 << 50, 4), [shard(0, 1 << 49)], mesh((2,), r)),
    "no mesh": lambda r: cut(r, mesh=None),
    "a mesh of nothing": over,
    "a huge mesh": lambda r: over(r, _layout=Made("_MeshLayout", state={"axes": (HUGE,)}), _flatten_rank_map=(0, 1)),
    "a mesh of other ranks": lambda r: over(r, _layout=PAIR, _flatten_rank_map=(6, 7)),
    "ranks twice": lambda r: over(r, _layout=PAIR, _flatten_rank_map=(r, r)),
    "no spec": lambda r: cut(r, mesh=None, placements=None),
    "another class": lambda _: Made("_rebuild_from_type_v2", Made("x"), None, (), {}),
    "sharded by the class of before": lambda _: Made("ShardedTensor"),
    "sparse": lambda _: Made("_rebuild_sparse_tensor"),
    "one rank's alone": lambda r: cut(r) if r else tensor(FULL["w"]),
    "of other shapes": lambda r: tensor(FULL["w"][r:]),
    "of other values": lambda r: tensor(FULL["w"] + r),
    "of other dtypes": lambda r: tensor(FULL["w"].astype([np.float32, np.int64][r])),
    "beyond its storage": lambda _: tensor(FULL["w"], first=1),
    "a storage that is too short": lambda _: tensor(FULL["w"], storage=Storage(FULL["w"][:1].reshape(-1), 24)),
    "an object elsewhere": lambda r: tensor(FULL["w"]) if r else 7,
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_tensor_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """It is refused by name, and the others are read."""
    for rank in range(2):
        write_rank(tmp_path, rank, 2, {"w": ODD[name](rank), "b": tensor(FULL["b"])})
    found = reshard.open(tmp_path)
    assert set(found) == {"b"}
    assert set(found.unreadable) == {"w"}


def broken(path: Path, mark: bytes, offset: int, other: bytes) -> None:
    """Write other bytes at an offset from the last place of a mark."""
    content = bytearray(path.read_bytes())
    at = content.rfind(mark) + offset
    content[at : at + len(other)] = other
    path.write_bytes(content)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "corrupt"),
    "of before PyTorch 1.6": (
        lambda path: path.write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + bytes(100)), "bad-pickle",
    ),
    "something else": (lambda path: path.write_bytes(b"GIF89a" * 9), "corrupt"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "truncated"),
    "compressed": (lambda path: write_save(path, {"w": tensor(FULL["w"])}, method=zipfile.ZIP_DEFLATED), "corrupt"),
    "without a pickle": (lambda path: broken(path, b"/data.pkl", 1, b"toto"), "corrupt"),
    "a directory of other names": (lambda path: broken(path, b"/data/0", 6, b"1"), "corrupt"),
    "a directory of other places": (lambda path: broken(path, b"PK\1\2", 42, struct.pack("<I", 7)), "corrupt"),
    "a header of another length": (lambda path: broken(path, b"PK\3\4", 28, struct.pack("<H", 7)), "corrupt"),
    "a record twice": (
        lambda path: broken(
            write_save(path, {name: tensor(FULL[name]) for name in FULL}), b"/data/1", 6, b"0"
        ), "corrupt",
    ),
    "a record outside": (lambda path: broken(path, b"PK\1\2", 20, struct.pack("<II", 9999, 9999)), "corrupt"),
    "a directory outside": (lambda path: broken(path, b"PK\5\6", 16, struct.pack("<I", 1 << 30)), "corrupt"),
    "more records than there are": (lambda path: broken(path, b"PK\5\6", 10, struct.pack("<H", 99)), "corrupt"),
    "fewer bytes": (lambda path: broken(path, b"PK\5\6", 8, struct.pack("<HHI", 2, 2, 138)), "corrupt"),
    "big-endian": (
        lambda path: write_save(path, {"w": tensor(FULL["w"])}, records={"byteorder": b"big"}),
        "unsupported-byte-order",
    ),
    "a tensor": (lambda path: write_save(path, tensor(FULL["w"])), "not-a-state-dict"),
    "a number": (lambda path: write_save(path, 7), "not-a-state-dict"),
    "two of a name": (
        lambda path: write_save(path, {"a.b": tensor(FULL["w"]), "a": {"b": tensor(FULL["w"])}}), "bad-name",
    ),
    "nothing in it": (lambda path: write_save(path, {"a": 7}), "no-tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    spoil, code = FILES[name]
    path = write_save(tmp_path / "w.pt", {"w": tensor(FULL["w"])})
    spoil(path)
    with refused(SourceError, code, path):
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
    with refused(SourceError, "corrupt", path):
        reshard.open(path)
    assert time.process_time() - began < 1

"""Lazy arrays: the right values, and only the bytes asked for."""

from __future__ import annotations

import pickle
import time
from itertools import count, pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any
from unittest import mock

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_file
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from samples import examples

import reshard
from reshard.core.layout import strided
from reshard.core.layout.block import Block
from reshard.core.model.checkpoint import Checkpoint, Shard, SourceFile, Tensor, TensorSpec
from reshard.core.model.entries import Entry, Extent, FileIndex
from reshard.core.model.stored import StoredTensor
from reshard.core.plan.plan import RankBlock
from reshard.dtypes import BY_NAME, STR
from reshard.errors import SourceError
from reshard.view.arrays import sub_array, tensor_array
from reshard.view.ranks import RankArrays, planned_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from faulty import Faults

    from reshard.core.layout.block import Shape

NUMBERS = count()


def grid(shape: Shape, cuts: Sequence[Sequence[int]]) -> list[Block]:
    """The blocks of a tensor cut at these places along each dimension."""
    edges = [[0, *inner, extent] for extent, inner in zip(shape, cuts, strict=True)]
    return [
        Block(tuple(a for a, _ in spans), tuple(b for _, b in spans))
        for spans in product(*(list(pairwise(of_dim)) for of_dim in edges))
    ]


def tensor_of(lazy: da.Array) -> StoredTensor:
    """The tensor in files that the chunks of an array are read from."""
    chunks = [task.args[0].value for task in dict(lazy.dask).values()]
    pieces = dict.fromkeys(piece for chunk in chunks for piece in chunk.pieces)
    return StoredTensor(chunks[0].name, chunks[0].kind, chunks[0].shape, tuple(pieces))


def numbered(shape: Shape, dtype: str = "float32") -> np.ndarray[Any, Any]:
    """An array of small numbers, which every dtype holds exactly."""
    kind = BY_NAME[dtype].numpy()
    return (np.arange(prod(shape)).reshape(shape) % 7 + 1).astype(kind)


def stored(
    root: Path,
    values: np.ndarray[Any, Any],
    blocks: Iterable[Block],
    dtype: str,
    *,
    cuts: Sequence[int] = (),
) -> Checkpoint:
    """A checkpoint of one tensor `w`, one file a block; the bytes of each are cut into runs, the last first."""
    files, shards = [], []
    for number, block in enumerate(blocks):
        contents = values[block.within(Block.whole(values.shape))].tobytes()
        places = sorted({min(cut, len(contents)) for cut in (0, len(contents), *cuts)})
        laid, runs = b"#", []
        for begin, end in reversed(list(pairwise(places))):
            runs.insert(0, (len(laid), end - begin))
            laid += contents[begin:end] + b"#"
        path = root / f"{next(NUMBERS)}.bin"
        path.write_bytes(laid)
        index = FileIndex("ckpt", {"w": Entry(BY_NAME[dtype], block.shape, tuple(runs))})
        files.append(SourceFile(str(path), len(laid), path.stat().st_mtime_ns, index))
        shards.append(Shard(block, (Extent(number, tuple(runs)),)))
    spec = TensorSpec("w", BY_NAME[dtype], values.shape)
    return Checkpoint(str(root), {"w": Tensor.of(spec, shards)}, tuple(files), tuple(range(len(files))))


@pytest.fixture
def reads(faults: Faults) -> list[int]:
    """The sizes of all reads, in bytes."""
    sizes: list[int] = []
    faults.every(lambda call: sizes.append(call.nbytes), "read_into")
    return sizes


def test_shards_that_are_no_grid_are_cut_at_every_edge(tmp_path: Path) -> None:
    values = numbered((6, 4))
    blocks = [Block((0, 0), (2, 4)), Block((2, 0), (6, 1)), Block((2, 1), (6, 4))]
    lazy = tensor_array(stored(tmp_path, values, blocks, "float32"), "w")
    assert lazy.chunks == ((2, 4), (1, 3))
    assert np.array_equal(lazy.compute(), values)


def test_a_task_has_the_pieces_of_its_own_chunk(tmp_path: Path) -> None:
    """So that the graph grows with the ranks, not with their square."""
    values = numbered((60, 4))
    lazy = tensor_array(stored(tmp_path, values, grid((60, 4), [list(range(1, 60)), []]), "float32"), "w")
    tasks = dict(lazy.dask)
    assert set(tasks) == {(lazy.name, number, 0) for number in range(60)}
    assert [len(task.args[0].value.pieces) for task in tasks.values()] == [1] * 60
    assert max(len(pickle.dumps(task)) for task in tasks.values()) < 2000
    assert np.array_equal(lazy.compute(), values)


def test_large_shards_are_cut_along_their_rows(tmp_path: Path) -> None:
    values = numbered((100, 8))  # 32 bytes a row
    checkpoint = stored(tmp_path, values, grid((100, 8), [[90], []]), "float32")
    assert tensor_array(checkpoint, "w").chunks == ((90, 10), (8,))
    with dask.config.set({"array.chunk-size": "1 kB"}):
        lazy = tensor_array(checkpoint, "w")
        assert lazy.chunks == ((30, 30, 30, 10), (8,))
        assert np.array_equal(lazy.compute(), values)
    with dask.config.set({"array.chunk-size": "16 B"}):
        assert tensor_array(checkpoint, "w").chunksize == (1, 4)
    wide = Shard(Block.whole((3, 10 << 20)), (Extent(0, ()),))
    zeros = Tensor.of(TensorSpec("w", BY_NAME["bfloat16"], (3, 10 << 20)), [wide])
    large = tensor_array(Checkpoint(checkpoint.root, {"w": zeros}, checkpoint.files, checkpoint.ranks), "w")
    assert large.chunks == ((1, 1, 1), (*[3495254], *[3495253] * 2))  # 8 MiB are the most


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (-1, ((6,), (8,))), (4, ((4, 2), (4, 4))), ((2, -1), ((2, 2, 2), (8,))), ({0: 5}, ((5, 1), (8,))),
        ("auto", ((6,), (8,))), (((1, 5), (8,)), ((1, 5), (8,))), ("32 B", None),
    ],
)  # fmt: skip
def test_chunks_are_cut_at_the_reads(tmp_path: Path, reads: list[int], chunks: Any, expected: Any) -> None:
    values = numbered((6, 8))
    checkpoint = stored(tmp_path, values, grid((6, 8), [[3], [5]]), "float32")
    lazy = tensor_array(checkpoint, "w", chunks=chunks)
    assert type(lazy) is da.Array
    assert expected is None or lazy.chunks == expected
    assert len(lazy.dask) == lazy.npartitions
    assert expected is not None or prod(lazy.chunksize) * 4 <= 32
    assert np.array_equal(lazy.compute(), values)
    reads.clear()
    assert np.array_equal(lazy.blocks[0, 0].compute(), values[: lazy.chunks[0][0], : lazy.chunks[1][0]])
    assert sum(reads) < values.nbytes or lazy.npartitions == 1


def test_chunks_of_all_tensors_are_given_when_opening(tmp_path: Path) -> None:
    values = numbered((6, 8))
    reshard.write({"w": values, "b": values[0], "step": np.int32(3)}, tmp_path / "set", to="hf")
    source = reshard.open(tmp_path / "set", chunks="64 B")
    for tensors in (source, source.sel("*"), source.scale("w", factor=2), source.rank(0), reshard.plan(source).rank(0)):
        assert tensors["w"].nbytes // tensors["w"].npartitions <= 64
        assert tensors["step"].compute() == 3
    assert source.array("w", chunks=-1).npartitions == 1
    assigned = source.assign(w=da.from_array(values, chunks=3))
    assert assigned.array("w", chunks=2).numblocks == (3, 4)
    with refused(reshard.UsageError, "bad-chunks", "'w'", "'many'"):
        source.array("w", chunks="many")
    with refused(reshard.UsageError, "bad-chunks", "'b'"):
        reshard.open(tmp_path / "set", chunks=(2, 2))["b"]


def test_a_dict_of_chunks_has_dimensions(tmp_path: Path) -> None:
    values = numbered((6, 8))
    reshard.write(
        {"w": values}, tmp_path / "set", target_strategy=reshard.Strategy.of({"w": reshard.Layout.of([2], [0, -1])})
    )
    source = reshard.open(tmp_path / "set")
    assert source.array("w", chunks={-1: 3}).chunks == ((6,), (3, 3, 2))
    for chunks in ({"dim_8": 3}, 0, (0, -1), {0: 0}):
        with refused(reshard.UsageError, "bad-chunks", "'w'"):
            source.array("w", chunks=chunks)
    opened = reshard.open(tmp_path / "set", chunks={})  # as for xarray.open_zarr
    assert opened["w"].chunks == source.array("w", chunks={}).chunks == source["w"].chunks == ((3, 3), (8,))
    assigned = source.assign(w=da.from_array(values, chunks=(2, 4)))
    assert assigned.array("w", chunks={}).numblocks == (3, 2)


def test_a_slice_reads_only_its_bytes(tmp_path: Path, reads: list[int]) -> None:
    lazy = tensor_array(stored(tmp_path, numbered((64, 8)), grid((64, 8), [[32], []]), "float32"), "w")
    for index, expected in [
        (slice(4), [4 * 8 * 4]),
        ((7, 3), [4]),
        (slice(30, 34), [64, 64]),
        ((slice(5, 6), slice(2, 5)), [12]),
        ((slice(5, 7), slice(2, 5)), [32 + 12]),  # the gap between two rows is read through
        (slice(0, 0), []),
    ]:
        reads.clear()
        lazy[index].compute(scheduler="sync")
        assert reads == expected


def test_long_gaps_are_skipped(tmp_path: Path, reads: list[int]) -> None:
    values = numbered((3, 40_000))
    lazy = tensor_array(stored(tmp_path, values, grid(values.shape, [[], []]), "float32"), "w")
    assert np.array_equal(lazy[:, 5:7].compute(), values[:, 5:7])
    assert reads == [8, 8, 8]
    reads.clear()
    assert np.array_equal(lazy[::2].compute(), values[::2])
    assert reads == [160_000, 160_000]
    reads.clear()
    lazy.compute()
    assert reads == [480_000]


def test_lists_are_taken_from_what_the_slices_read(tmp_path: Path, reads: list[int]) -> None:
    values = numbered((4, 6, 8), "int8")
    lazy = tensor_array(stored(tmp_path, values, grid((4, 6, 8), [[], [], []]), "int8"), "w")
    beneath = tensor_of(lazy)
    for index in [(slice(1, 2), [0, 5], slice(None)), (1, slice(2), [True, False] * 4), ([0, 2], slice(3, 4), [1, 7])]:
        assert np.array_equal(beneath[index], values[index])
        assert np.array_equal(lazy[1:, [2, 0]][0].compute(), values[1:, [2, 0]][0])
    assert max(reads) < values.nbytes


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Shape, list[list[int]], tuple[Any, ...]]:
    """A shape, where it is cut, and an index into it."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    cuts = [sorted(draw(st.sets(st.integers(1, extent - 1)))) if extent > 1 else [] for extent in shape]
    index: list[Any] = []
    for extent in shape[: draw(st.integers(0, len(shape)))]:
        bounds = st.none() | st.integers(-extent, extent + 1)  # dask clips a start before the first wrongly
        steps = st.sampled_from([None, 1, 2, 3, -1, -2])
        one = st.integers(-extent, extent - 1) if extent else st.nothing()
        index.append(draw(st.builds(slice, bounds, bounds, steps) | one))
    if draw(st.booleans()):
        index.insert(draw(st.integers(0, len(index))), ...)
        missing = len(shape) - len(index) + 1  # what stands after the ellipsis must fit the last dimensions
        index = index if not missing else [*index[: index.index(...)], ...]
    return shape, cuts, tuple(index)


@settings(max_examples=examples(150))
@given(
    tensor=tensors(),
    dtype=st.sampled_from(["bool", "int8", "bfloat16", "float32", "complex64"]),
    runs=st.lists(st.integers(0, 40), max_size=3),
    gap=st.sampled_from([0, 3, 1 << 16]),
    scratch=st.sampled_from([1, 24, 1 << 23]),
)
def test_any_index_gives_what_numpy_gives(
    tmp_path_factory: pytest.TempPathFactory,
    tensor: tuple[Shape, list[list[int]], tuple[Any, ...]],
    dtype: str,
    runs: list[int],
    gap: int,
    scratch: int,
) -> None:
    shape, cuts, index = tensor
    values = numbered(shape, dtype)
    checkpoint = stored(tmp_path_factory.getbasetemp(), values, grid(shape, cuts), dtype, cuts=runs)
    lazy = tensor_array(checkpoint, "w")
    beneath = tensor_of(lazy)
    with mock.patch.multiple(strided, GAP=gap, SCRATCH=scratch):
        found = beneath[index]  # one read over all shards
        chunked = lazy[index].compute(scheduler="sync")  # one read a chunk
    for each in (found, chunked):
        assert each.dtype == values.dtype
        assert each.shape == values[index].shape
        assert each.tobytes() == values[index].tobytes()


OTHERS = {"str", "uint16"}  # uint16 stands for bfloat16 in `write_file`


@pytest.mark.parametrize("dtype", [name for name, each in BY_NAME.items() if name not in OTHERS and not each.bits])
def test_every_dtype_comes_back_from_a_file(tmp_path: Path, dtype: str) -> None:
    kind = BY_NAME[dtype].numpy()
    codes = np.arange(5 * kind.itemsize, dtype=np.uint8)
    values = (codes % 2 if dtype == "bool" else codes).view(kind)
    source = reshard.open(write_file(tmp_path / "a.safetensors", {"w": values, "s": values[1]}))
    for name, expected in {"w": values, "s": values[1]}.items():
        found = source[name].compute()
        assert (source[name].dtype, found.dtype, found.shape) == (kind, kind, expected.shape)
        assert found.tobytes() == expected.tobytes()


def test_the_lazy_object_keeps_its_dtype_through_a_pickle(tmp_path: Path) -> None:
    values = np.array([-128, 127], np.int8)
    lazy = pickle.loads(pickle.dumps(tensor_array(stored(tmp_path, values, grid((2,), [[]]), "int4"), "w")))  # noqa: S301
    assert lazy.compute().tolist() == [-128, 127]


def test_a_text_entry_is_a_0d_array(tmp_path: Path) -> None:
    spec = TensorSpec("note", STR, (0,))
    whole = Block.whole((0,))
    tensor = Tensor.of(spec, [Shard(whole, (Extent(0, ()),))], listed=False, text="step µ")
    checkpoint = Checkpoint(str(tmp_path), {"note": tensor}, (), ())
    assert tensor_array(checkpoint, "note").compute().item() == "step µ"
    assert sub_array(checkpoint, "note", whole).compute() == "step µ"


def test_rank_arrays_are_the_blocks_of_a_rank(tmp_path: Path, reads: list[int]) -> None:
    values = numbered((6, 4), "bfloat16")
    checkpoint = stored(tmp_path, values, grid((6, 4), [[3], []]), "bfloat16")
    block = RankBlock("w", Block((2, 1), (5, 3)), checkpoint.tensors["w"].spec.dtype)
    rank = RankArrays(f"target rank 7 of {tmp_path}", {"new.w": planned_part(checkpoint, block)})
    assert list(rank) == ["new.w"]
    assert "w" not in rank
    with pytest.raises(KeyError):
        rank["w"]
    for shown in (repr(rank), str(rank), rank._repr_html_()):
        assert f"target rank 7 of {tmp_path}" in shown
    assert np.array_equal(rank["new.w"].compute(), values[2:5, 1:3])
    assert sum(reads) == 4 + (8 + 4)  # a row of one shard; two rows of the other, and the gap between them


def test_names_tell_what_is_read(tmp_path: Path) -> None:
    values = numbered((4,), "int8")
    one = stored(tmp_path, values, grid((4,), [[]]), "int8")
    assert tensor_array(one, "w").name == tensor_array(one, "w").name
    names = {tensor_array(one, "w").name}
    for dtype in ["int4", "uint8", "float8_e4m3fn", "float8_e5m2"]:
        other = TensorSpec("w", BY_NAME[dtype], (4,))
        checkpoint = Checkpoint(one.root, {"w": one.tensors["w"]._replace(spec=other)}, one.files, one.ranks)
        names.add(tensor_array(checkpoint, "w").name)
    names.add(tensor_array(stored(tmp_path, values, grid((4,), [[]]), "int8"), "w").name)  # another file
    (file,) = one.files
    later = SourceFile(file.path, file.nbytes, file.mtime_ns + 1, file.index)
    names.add(tensor_array(Checkpoint(one.root, one.tensors, (later,), one.ranks), "w").name)
    assert len(names) == 7


def test_casts_to_two_float8_kinds_do_not_share_a_name() -> None:
    ones = da.ones(4, dtype="float32")
    kinds = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4]
    assert len({ones.astype(kind).name for kind in kinds}) == 4
    assert len({ones.astype("uint8").view(kind).name for kind in kinds[:3]}) == 3


def test_bytes_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    values = numbered((4, 4))
    whole = stored(tmp_path, values, grid((4, 4), [[2], []]), "float32")
    half = Tensor.of(whole.tensors["w"].spec, whole.tensors["w"].shards[:1])
    lazy = tensor_array(Checkpoint(whole.root, {"w": half}, whole.files, whole.ranks), "w")
    assert np.array_equal(lazy[:2].compute(), values[:2])
    with refused(SourceError, "missing-blocks", "'w'", "8 of", "8 items"):
        lazy.compute()
    first, second = whole.tensors["w"].shards
    short = Tensor.of(half.spec, [first._replace(replicas=(Extent(0, ((1, 28),)),)), second])
    with refused(SourceError, "truncated", "block [0", "4]", "4 bytes"):
        tensor_array(Checkpoint(whole.root, {"w": short}, whole.files, whole.ranks), "w").compute()


@pytest.mark.slow
def test_thousands_of_ranks_take_seconds(tmp_path: Path) -> None:
    def seconds(checkpoint: Checkpoint) -> float:
        start = time.perf_counter()
        tensor_array(checkpoint, "w").compute()
        return time.perf_counter() - start

    checkpoints = {}
    for ranks in (256, 2048):
        values = numbered((ranks, 16))
        checkpoints[ranks] = stored(tmp_path, values, grid(values.shape, [list(range(1, ranks)), []]), "float32")
    rounds = [[seconds(checkpoint) for checkpoint in checkpoints.values()] for _ in range(7)]
    few, many = map(min, zip(*rounds, strict=True))
    assert many < 3
    assert many < 14 * few

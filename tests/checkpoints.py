"""Makes small checkpoints for tests, and reads back what a conversion wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask
import helpers
import numpy as np

import reshard
from reshard.api.choices import selection_of, target_of
from reshard.api.options import SelectionKeywords, taken
from reshard.api.plans import Plan
from reshard.core.model.entries import Content
from reshard.core.plan.make import plan as make_plan
from reshard.dtypes import BY_NAME
from reshard.kits.files import by_name
from reshard.sizes import size_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from reshard.core.layout.block import Block
    from reshard.core.model.entries import FileLayout, Runs
    from reshard.strategy.strategy import Strategy

Array = np.ndarray[Any, np.dtype[Any]]


def dtype_name(array: Array) -> str:
    """uint16 stands for bfloat16, as in the recorded cases."""
    return "bfloat16" if array.dtype == np.uint16 else array.dtype.name


def write_file(path: Path, tensors: Mapping[str, Array | str], format: str = "safetensors", **metadata: str) -> Path:
    """Write one checkpoint file, whole, through the format's own layout."""
    contents = [
        Content(name, BY_NAME["str"], (), value)
        if isinstance(value, str)
        else Content(name, BY_NAME[dtype_name(value)], value.shape)
        for name, value in tensors.items()
    ]
    layout = by_name(format).lay_out(contents, {"format": "ms", **metadata})
    arrays = {n: np.ascontiguousarray(value).tobytes() for n, value in tensors.items() if not isinstance(value, str)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(build(layout, arrays))
    return path


def build(layout: FileLayout, contents: Mapping[str, bytes]) -> bytes:
    """Put a laid-out file together; every byte must be given exactly once."""
    file, written = bytearray(layout.size), np.zeros(layout.size, np.uint8)

    def put(offset: int, piece: bytes) -> None:
        assert offset + len(piece) <= layout.size
        file[offset : offset + len(piece)] = piece
        written[offset : offset + len(piece)] += 1

    for offset, literal in layout.literals:
        put(offset, literal)
    for name, runs in places(layout).items():
        place = 0
        for offset, nbytes in runs:
            put(offset, contents[name][place : place + nbytes])
            place += nbytes
        assert place == len(contents[name])
    assert (written == 1).all()
    return bytes(file)


def assert_equal(checkpoint: reshard.Checkpoint, full: Mapping[str, Any], *, but: tuple[str, ...] = ()) -> None:
    """Hold a checkpoint's tensors against whole ones, bit for bit; some of these it does not have."""
    assert set(checkpoint) == set(full) - set(but)
    for name, found in zip(checkpoint, dask.compute(*map(checkpoint.__getitem__, checkpoint)), strict=True):
        assert (found.shape, found.tobytes()) == (full[name].shape, full[name].tobytes()), name


def blocks(full: Mapping[str, Array], strategy: Strategy, rank: int) -> dict[str, Array]:
    """What a rank of a strategy holds, by plain slicing with an oracle of its own."""
    stage, local = divmod(rank, strategy.devices)
    found = {}
    for name, places in strategy.tensors.items():
        for placed in places:
            if placed.stage == stage and name in full:
                layout = placed.layout
                side = {
                    "dev_matrix": layout.dev_matrix,
                    "tensor_map": [list(axes) or -1 for axes in layout.tensor_map],
                    "opt_weight_shard_size": layout.opt_weight_shard_size,
                }
                found[name] = full[name][helpers.slices(side, full[name].shape, local)]
    return found


def blocks_of(shapes: Mapping[str, tuple[int, ...]], strategy: Strategy, rank: int) -> dict[str, Block]:
    """What part of each tensor a rank of a strategy holds."""
    stage, local = divmod(rank, strategy.devices)
    return {
        name: placed.layout.grid(shapes[name]).by_rank()[local]
        for name, places in strategy.tensors.items()
        for placed in places
        if placed.stage == stage
    }


def write_ranks(
    root: Path,
    full: Mapping[str, Array],
    strategy: Strategy,
    format: str = "safetensors",
    also: Mapping[str, Array | str] | None = None,
    name: str = "checkpoint_{rank}",
) -> Path:
    """Write the rank directories of a checkpoint; every rank gets `also` too."""
    extension = by_name(format).EXTENSION
    for rank in strategy.ranks:
        path = root / f"rank_{rank}" / (name.format(rank=rank) + extension)
        write_file(path, {**blocks(full, strategy, rank), **(also or {})}, format)
    return root


def numbers(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, Array]:
    """Whole tensors in which every element of a model is another number."""
    found = {}
    first = 1
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        found[name] = np.arange(first, first + count).astype(dtype).reshape(shape)
        first += count
    return found


def assert_rank_files(
    root: Path, full: Mapping[str, Array], strategy: Strategy | None, *, prefix: str = "checkpoint_"
) -> None:
    """Every target rank's file holds exactly its slices of the whole tensors, bit for bit."""
    for rank in strategy.ranks if strategy else range(1):
        (path,) = (root / f"rank_{rank}").iterdir()
        assert path.stem == f"{prefix}{rank}"
        found = helpers.read_rank_file(path)
        expected = blocks(full, strategy, rank) if strategy else full
        assert set(found) == set(expected)
        for name, block in expected.items():
            assert found[name] == (dtype_name(block), block.shape, np.ascontiguousarray(block).tobytes()), (rank, name)


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and ".reshard" not in path.parts]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def strategy_of(case: Path, side: dict) -> reshard.Strategy | None:
    return reshard.read_strategy(case / side["strategy_file"]) if side["strategy_file"] else None


def places(layout: FileLayout) -> dict[str, Runs]:
    """Return where the tensors of a file go, by name."""
    return {content.name: content.runs for content in layout.contents if content.text is None}


def plan_with(source: reshard.Checkpoint, target: Any = None, *, files: Any, format: Any = None, **options: Any) -> Any:
    """A plan with options of a format as an object, or with another way to lay out files of ranks."""
    selection = selection_of(**taken(options, SelectionKeywords))
    record, memory = source._record, size_of(options.pop("memory", None), "memory")
    layout, stage = target_of(target, record, selection), options.pop("target_stage", None)
    return Plan(
        make_plan(
            record, layout, format=format, files=files, selection=selection, memory=memory, stage=stage, **options
        )
    )

"""The checkpoints of `reshard.demo`. Each function writes one into an empty folder."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import time
from importlib.resources import files
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.api.writing import write
from reshard.core.layout.layout import Layout
from reshard.strategy.files import write_strategy
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]

_ROWS, _COLUMNS, _WHOLE = (0, -1), (-1, 0), (-1,)
"""Tensor maps: the device axis that cuts each dimension, or -1."""


class _Weight(NamedTuple):
    """A weight of a transformer.

    Attributes:
        shape: its shape.
        cut: how tensor parallelism cuts it.
        depth: its layer as a share of all layers, which gives its stage of a pipeline.
    """

    shape: tuple[int, ...]
    cut: tuple[int, ...]
    depth: float


def _transformer(layers: int, hidden: int, inner: int, keys: int, vocabulary: int) -> dict[str, _Weight]:
    """Return the weights of a transformer by name, as Llama has them.

    Args:
        layers: the number of layers.
        hidden: the width of the model.
        inner: the width of its feed-forward layers.
        keys: the width of keys and values.
        vocabulary: the number of tokens.
    """
    block = {
        "attention.wq": ((hidden, hidden), _ROWS),
        "attention.wk": ((keys, hidden), _ROWS),
        "attention.wv": ((keys, hidden), _ROWS),
        "attention.wo": ((hidden, hidden), _COLUMNS),
        "feed_forward.w1": ((inner, hidden), _ROWS),
        "feed_forward.w3": ((inner, hidden), _ROWS),
        "feed_forward.w2": ((hidden, inner), _COLUMNS),
        "attention_norm": ((hidden,), _WHOLE),
        "ffn_norm": ((hidden,), _WHOLE),
    }
    last = 1 - 1 / layers
    return {
        "tok_embeddings.weight": _Weight((vocabulary, hidden), _ROWS, 0),
        **{
            f"layers.{layer}.{name}.weight": _Weight(shape, cut, layer / layers)
            for layer in range(layers)
            for name, (shape, cut) in block.items()
        },
        "norm.weight": _Weight((hidden,), _WHOLE, last),
        "output.weight": _Weight((vocabulary, hidden), _ROWS, last),
    }


# --- MindSpore ----------------------------------------------------------------------------------------------------


def unpack_mindspore(folder: Path) -> None:
    """Unpack the files that MindSpore wrote."""
    packed = files(__package__).joinpath("demo.tar.gz").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def write_large(folder: Path) -> None:
    """Write a model of 537 MB over 8 ranks, a block at a time."""
    shape, names = (2048, 8192), [f"layers.{layer}.weight" for layer in range(8)]
    block = np.random.default_rng(0).standard_normal((shape[0] // 8, shape[1]), np.float32)
    header = dict.fromkeys(names, ("F32", block.shape))
    for rank in range(8):
        path = folder / "src_checkpoints" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"
        _write_safetensors(path, header, (block + (8 * layer + rank) for layer in range(8)))
    write_strategy(Strategy.of(dict.fromkeys(names, Layout.of([8], _ROWS))), folder / "src_strategy.ckpt")
    write_strategy(Strategy.of(dict.fromkeys(names, Layout.of([4], _COLUMNS))), folder / "dst_strategy.ckpt")


def seventy_billion(folder: Path) -> None:
    """Write a checkpoint of 70 billion parameters and Adam's moments, with holes instead of numbers.

    It has 512 ranks: 8 stages of a pipeline, each of 8 data parallel times 8 tensor parallel ranks. Moments are cut
    once more, over the data parallel ranks.
    """
    weights = _transformer(layers=80, hidden=8192, inner=28672, keys=1024, vocabulary=128256)
    moments = {f"{moment}.{name}": weight for moment in ("adam_m", "adam_v") for name, weight in weights.items()}

    def strategy(data: int, tensor: int, stages: int) -> Strategy:
        def layout(weight: _Weight, optimizer: int) -> dict[int, Layout]:
            return {int(weight.depth * stages): Layout.of([data, tensor], weight.cut, optimizer)}

        return Strategy.of(
            {name: layout(weight, 0) for name, weight in weights.items()}
            | {name: layout(weight, -1 if len(weight.shape) > 1 else 0) for name, weight in moments.items()}
        )

    before = strategy(8, 8, 8)
    for stage in before.stages:
        header = {}
        for name in before.names_of(stage):
            dtype, weight = ("BF16", weights[name]) if name in weights else ("F32", moments[name])
            header[name] = (dtype, before.grid(name, weight.shape, stage=stage).blocks[0].shape)
        for rank in range(stage * before.devices, (stage + 1) * before.devices):
            _write_safetensors(folder / "src_checkpoints" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors", header)
    write_strategy(before, folder / "src_strategy.ckpt")
    write_strategy(strategy(4, 8, 2), folder / "dst_strategy.ckpt")


def _write_safetensors(
    path: Path, header: Mapping[str, tuple[str, tuple[int, ...]]], contents: Iterable[Array] | None = None
) -> None:
    """Write a safetensors file of tensors with these dtypes and shapes; a hole without contents."""
    sizes = {"BF16": 2, "F32": 4}
    entries, end = {}, 0
    for name, (dtype, shape) in header.items():
        begin, end = end, end + prod(shape) * sizes[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in contents or ():
            file.write(array.data)
        file.truncate(8 + len(text) + end)


# --- PyTorch and others -------------------------------------------------------------------------------------------


def torchtitan(folder: Path) -> None:
    """Write a distributed checkpoint with Adam's states, fully sharded by 4, tensor parallel by 2."""
    layout_of = {
        _ROWS: Layout.of([4, 2], [(0, 1), -1]),
        _COLUMNS: Layout.of([4, 2], [1, 0]),
        _WHOLE: Layout.of([4, 2], [-1]),
    }
    random = np.random.default_rng(0)
    arrays, layouts = dict[str, Array](), dict[str, Layout]()
    for name, weight in _transformer(layers=2, hidden=192, inner=512, keys=48, vocabulary=1000).items():
        state = f"optimizer.state.{name}"
        array = random.standard_normal(weight.shape, np.float32)
        tensors = {name: array, f"{state}.exp_avg": array * np.float32(0.1), f"{state}.exp_avg_sq": array**2}
        arrays |= tensors | {f"{state}.step": np.array(1000, np.float32)}
        layouts |= dict.fromkeys(tensors, layout_of[weight.cut]) | {f"{state}.step": Layout.of([4, 2], [])}
    write(arrays, folder / "step-1000", target_strategy=Strategy.of(layouts), to="dcp")
    shutil.rmtree(folder / "step-1000" / ".reshard")  # torchtitan leaves none
    write(arrays, folder / "model.safetensors")


def training(folder: Path) -> None:
    """Write the folders that the guides' commands name: steps in three formats, a run, and a run that crashed."""
    _write_steps(folder)
    _write_runs(folder)


def _write_runs(folder: Path) -> None:
    """Write steps of a distributed checkpoint, and a run whose last step was interrupted."""
    shapes = {f"layers.{layer}.{part}.weight": (64, 32) for layer in range(2) for part in ("up", "down")}
    shapes |= {"embedding.weight": (96, 32), "norm.weight": (32, 1)}
    rows = Strategy.of(dict.fromkeys(shapes, Layout.of([4], _ROWS)))
    random = np.random.default_rng(8)
    for name in ("step-100", "step-200", "step-300", *(f"crashed/{step}" for step in _CRASHED)):
        step = {weight: random.standard_normal(shape, np.float32) for weight, shape in shapes.items()}
        write(step, folder / name, to="dcp", target_strategy=rows)
        shutil.rmtree(folder / name / ".reshard")  # PyTorch leaves none
    (folder / "crashed" / "step-400" / ".metadata").unlink()  # it is written last
    yesterday = time.time() - 86_400
    for path in (folder / "crashed" / "old").rglob("*"):
        os.utime(path, (yesterday, yesterday))


_CRASHED = ("old/step-100", "step-200", "step-300", "step-400")


def _write_steps(folder: Path) -> None:
    """Write three steps of a training in three formats; the second has a NaN."""
    shapes: dict[str, tuple[int, ...]]
    shapes = {f"layers.{layer}.{part}.weight": (512, 256) for layer in range(4) for part in ("up", "down")}
    shapes |= {"embedding.weight": (1000, 256), "norm.weight": (256,)}
    random = np.random.default_rng(7)

    def noise(scale: float) -> dict[str, Array]:
        return {name: random.standard_normal(shape, np.float32) * np.float32(scale) for name, shape in shapes.items()}

    model = noise(0.02)
    first, second, third = ({name: model[name] + change for name, change in noise(0.001).items()} for _ in range(3))
    second["layers.2.up.weight"][100, 7] = np.nan
    rows = Strategy.of({name: Layout.of([8], _ROWS[: len(shape)]) for name, shape in shapes.items()})
    write(first, folder / "step-1000", target_strategy=rows)
    write(second, folder / "step-2000", to="dcp")
    write(third, folder / "step-3000", to="hf")

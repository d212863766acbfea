"""Checkpoints of real size without their bytes: sparse files with real headers, for tests and benchmarks of scale."""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING

from reshard import Layout, Strategy, write_strategy
from reshard.core.model.entries import Content, FileLayout
from reshard.dtypes import BFLOAT16
from reshard.kits.files import by_name

if TYPE_CHECKING:
    from pathlib import Path

Shapes = dict[str, tuple[int, ...]]
Mesh = tuple[int, int, int]
"""Data parallel, tensor parallel, pipeline stages."""

_LAYER: Shapes = {
    "attention.wq.weight": (6144, 6144), "attention.wk.weight": (6144, 6144), "attention.wv.weight": (6144, 6144),
    "attention.wo.weight": (6144, 6144), "feed_forward.w1.weight": (18432, 6144),
    "feed_forward.w3.weight": (18432, 6144), "feed_forward.w2.weight": (6144, 18432),
    "attention_norm.weight": (6144,), "ffn_norm.weight": (6144,),
}  # fmt: skip
_BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")


def model(tensors: int) -> Shapes:
    """A transformer and its two Adam moments: so many tensors in all, 7 in 9 of them matrices."""
    found: Shapes = {}
    for layer in range(tensors):
        for name, shape in _LAYER.items():
            found |= {f"{state}model.layers.{layer}.{name}": shape for state in ("", "adam_m.", "adam_v.")}
        if len(found) >= tensors:
            break
    return dict(islice(found.items(), tensors))


def strategy(shapes: Shapes, data: int, tensor: int, stages: int) -> Strategy:
    """Tensor parallel within layers, the rest data parallel; optimizer states sharded over it; layers in stages."""
    last = max(_layer(name) for name in shapes) + 1
    columns, rows, whole = ([-1, 0], [0, -1], [-1])
    layouts = {}
    for name, shape in shapes.items():
        axes = whole if len(shape) == 1 else columns if name.endswith(_BY_COLUMNS) else rows
        optimizer = -1 if name.startswith("adam") and len(shape) == 2 else 0
        layouts[name] = {_layer(name) * stages // last: Layout.of([data, tensor], axes, optimizer)}
    return Strategy.of(layouts)


def _layer(name: str) -> int:
    return int(name.partition("layers.")[2].partition(".")[0])


def write_hollow(root: Path, shapes: Shapes, source: Strategy, format: str = "safetensors") -> int:
    """Write a file for every rank, holes where the contents would be; return how many bytes they seem to have."""
    total = 0
    for stage in source.stages:
        layout = _layout_of_stage(shapes, source, stage, format)
        for rank in range(stage * source.devices, (stage + 1) * source.devices):
            path = root / f"rank_{rank}" / f"checkpoint_{rank}{by_name(format).EXTENSION}"
            path.parent.mkdir(parents=True)
            with path.open("wb") as file:
                file.truncate(layout.size)
                for offset, literal in layout.literals:
                    os.pwrite(file.fileno(), literal, offset)
            total += layout.size
    return total


def prepare(root: Path, tensors: int, before: Mesh, after: Mesh, format: str = "safetensors") -> tuple[Path, ...]:
    """Write a checkpoint (`root/source`) and both strategies; return the three paths."""
    shapes = model(tensors)
    source, target = strategy(shapes, *before), strategy(shapes, *after)
    write_hollow(root / "source", shapes, source, format)
    write_strategy(source, root / "before.ckpt")
    write_strategy(target, root / "after.ckpt")
    return root / "source", root / "before.ckpt", root / "after.ckpt"


def _layout_of_stage(shapes: Shapes, source: Strategy, stage: int, format: str) -> FileLayout:
    """Lay out the one file that all ranks of a stage have: every block of a tensor has the same shape here."""
    contents = [
        Content(name, BFLOAT16, source.grid(name, shapes[name], stage=stage).blocks[0].shape)
        for name in source.names_of(stage)
    ]
    return by_name(format).lay_out(contents, {"format": "ms"})

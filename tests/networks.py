"""The networks that MindSpore compiled for `tests/data`: what was asked of it, and the layouts that came of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import helpers

from reshard.core.layout.layout import Layout, foldings
from reshard.strategy import operators
from reshard.strategy.files import read_strategy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reshard.strategy.operators import OperatorStrategy
    from reshard.strategy.strategy import Strategy

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """One compiled strategy file (or one rank's of a pipeline).

    Attributes:
        name: the file's path below `tests/data`, without its ending: what was compiled.
        path: the file.
        config: what was asked of MindSpore.
        strategy: what it wrote.
        shapes: the whole shapes of the parameters in the file.
    """

    name: str
    path: Path
    config: dict[str, Any]
    strategy: Strategy
    shapes: dict[str, Shape]

    @property
    def searched(self) -> bool:
        """MindSpore chose the strategies, by a search that it alone knows."""
        return self.config.get("mode") == "auto_parallel"

    @property
    def devices(self) -> int:
        return int(self.config["dev"]) // int(self.config.get("stages", 1))

    @property
    def options(self) -> dict[str, Any]:
        asked = self.config.get("opt_cfg", {})
        return {
            "optimizer_parallel": self.config.get("opt_par", False),
            "optimizer_weight_shard_size": asked.get("optimizer_weight_shard_size", -1),
            "parallel_optimizer_threshold": asked.get("parallel_optimizer_threshold", 64),
        }

    def layout(self, name: str) -> Layout:
        """What MindSpore compiled for a parameter, nested entries of JSON folded."""
        placed = self.strategy.tensors[name][0]
        if len(placed.layout.tensor_map) == len(self.shapes[name]):
            return placed.layout
        assert placed.shape is not None
        found = foldings(placed.layout, placed.shape, len(self.shapes[name]))
        return next(layout for layout, shape in found if shape == self.shapes[name])

    def operators(self) -> dict[str, OperatorStrategy | Layout]:
        """The operators' strategies that were asked for, by globs of the parameters in the file."""
        found: dict[str, OperatorStrategy | Layout] = {}
        for operator, strategies in self.config.get("shard", {}).items():
            for glob, kind, argument in _parameters(operator):
                if not any(fnmatchcase(name, glob) for name in self.shapes):
                    continue
                if "layout" in self.config:
                    found[glob] = _layout(*self.config["layout"], strategies[argument])
                else:
                    transposed = {"transpose_b": True} if kind == "matmul" and self.transposed else {}
                    cuts = tuple(map(tuple, strategies))
                    found[glob] = operators.OPERATORS[kind](cuts, **transposed)
        return found

    @property
    def transposed(self) -> bool:
        """Weights are (out, in), as in `nn.Dense`."""
        return self.config.get("net") == "transformer" or "up.matmul" in self.config.get("shard", {})

    def written_operators(self) -> dict[str, OperatorStrategy | Layout]:
        """The operators' strategies that the file itself lists, next to those that were asked for as layouts."""
        kinds = {"MatMul": "matmul", "BatchMatMul": "batch_matmul", "Add": "add", "Mul": "add", "Gather": "gather",
                 "LayerNorm": "layer_norm", "RmsNorm": "layer_norm", "Conv2D": "conv2d"}  # fmt: skip
        found = self.operators() if "layout" in self.config else {}
        for operator in self.strategy.operators:
            kind, _, name = operator.name.partition("_")
            if operator.strategy and name in self.shapes and kind != "Receive":  # of a pipeline; uses no parameter
                transposed = {"transpose_b": True} if kind == "MatMul" and self.transposed else {}
                found[name] = operators.OPERATORS[kinds[kind]](operator.strategy, **transposed)
                if kind == "LayerNorm":
                    found[name.removesuffix("gamma") + "beta"] = found[name]
        return found


def _parameters(operator: str) -> Iterator[tuple[str, str, int]]:
    """The parameters of an operator of our networks: glob, kind of operator, which input."""
    layer, _, kind = operator.rpartition(".")
    if kind == "matmul":
        yield f"*{layer}.weight", "matmul", 1
    elif layer and kind == "add":
        yield f"*{layer}.bias", "add", 1
    elif kind == "bmm":
        yield f"*{layer}.moe", "batch_matmul", 1
    elif kind == "ln":
        yield f"*{layer}.gamma", "layer_norm", 1
        yield f"*{layer}.beta", "layer_norm", 2
    elif kind == "gather":
        yield "*embedding_table", "gather", 0
    elif kind in {"conv1", "conv2"}:
        yield f"*{kind}_w", "conv2d", 1
    elif kind == "mul":
        yield "*conv3d_like", "add", 1
    else:
        assert kind in {"m1", "m2", "act"}, "an operator with a parameter"


def _layout(dev_matrix: list[int], axes: list[str], entries: list[str | list[str]]) -> Layout:
    """A `Layout(dev_matrix, axes)` of MindSpore with the entries of one input."""
    value = {"None": -1, **{axis: len(axes) - 1 - place for place, axis in enumerate(axes)}}
    nested = [entry if isinstance(entry, list) else [entry] for entry in entries]
    return Layout.of(dev_matrix, [[value[axis] for axis in entry] for entry in nested])


@lru_cache
def networks(data: Path) -> tuple[Network, ...]:
    """Every strategy file in `strategies` and `real` that names tensors."""
    index = json.loads((data / "strategies" / "index.json").read_text())
    found = []
    for name, entry in index.items():
        path = data / "strategies" / name
        if not path.exists():  # a pipeline's rank files are in a folder that names their format
            folder, _, file = name.partition("/")
            path = data / "strategies" / (folder + "_" + file.rpartition(".")[2]) / file
        if path.exists() and (strategy := _read(path)):
            shapes = {tensor: tuple(entry["params_after"][tensor][0]) for tensor in strategy.tensors}
            found.append(Network(name.rpartition(".")[0], path, entry["config"], strategy, shapes))
    for path in sorted((data / "real").glob("*/strategy_*.ckpt")):
        info = json.loads((path.parent / "info.json").read_text())
        strategy = read_strategy(path)
        config = {"dev": strategy.devices, "net": None, **info.get("config", _UNTOLD.get(path.parent.name, {}))}
        config["opt_cfg"] = {"parallel_optimizer_threshold": 0, **config.get("opt_cfg", {})}
        shapes = _shapes(path.parent, strategy)
        found.append(Network(f"real/{path.parent.name}", path, config, strategy, shapes))
    return tuple(found)


_PIPE = {"layer1.matmul": [[2, 1], [1, 2]], "layer3.matmul": [[2, 2], [2, 1]]}
_UNTOLD: dict[str, dict[str, Any]] = {
    "dp4_opt_momentum": {"opt_par": True},
    "tp4_adam": {
        "shard": {
            "layer1.matmul": [[1, 1], [1, 4]], "layer1.add": [[1, 4], [4]],
            "layer2.matmul": [[1, 4], [4, 1]], "layer2.add": [[1, 1], [1]],
            "layer3.matmul": [[1, 1], [1, 4]], "layer3.add": [[1, 4], [4]],
        }
    },
    "pipe8_opt": {"opt_par": True, "shard": _PIPE},
}  # fmt: skip
"""What the runs whose `info.json` does not tell were asked for: read off the operators in their files."""


def _read(path: Path) -> Strategy | None:
    """What a file says; None of the empty ones that a failed compilation leaves."""
    empty = b'"parallel_layout_item"' not in path.read_bytes() if path.suffix == ".json" else path.stat().st_size < 50
    return None if empty else read_strategy(path)


def _shapes(run: Path, strategy: Strategy) -> dict[str, Shape]:
    files = sorted(run.glob("ckpt/rank_0/*.ckpt"))
    if not files:  # strategy files only: the net of `mix8_optsize2`
        i, h, o = 16, 32, 8
        sizes = {"layer1.weight": (i, h), "layer2.weight": (h, h), "layer3.weight": (h, o),
                 "layer1.bias": (h,), "layer2.bias": (h,), "layer3.bias": (o,)}  # fmt: skip
        return {name: next(s for end, s in sizes.items() if name.endswith(end)) for name in strategy.tensors}
    stored = helpers.read_rank_file(files[0])
    return {name: places[0].layout.full_shape(stored[name][1]) for name, places in strategy.tensors.items()}

"""Makes strategy files for tests, by protobuf itself and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from reshard.strategy.proto import message_class

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.strategy.strategy import Strategy


def message() -> Any:
    """An empty strategy message, which tests fill by protobuf itself."""
    return message_class("mindspore.straspb.ParallelStrategyMap")(current_stage=2)


def add_layout(top: Any, name: str, matrix: list[int], *tensor_map: list[int], **fields: int) -> Any:
    item = top.parallel_layout_item.add(param_name=name)
    item.parallel_layouts.dev_matrix.add(dim=matrix)
    for dims in tensor_map:
        item.parallel_layouts.tensor_map.add(dim=dims)
    item.parallel_layouts.param_split_shape.add()
    item.parallel_layouts.indices_offset.add()
    for key, value in ({"field": 0, "opt_weight_shard_step": 0, "opt_weight_shard_size": 0} | fields).items():
        setattr(item.parallel_layouts, key, value)
    return item


def add_operator(top: Any, name: str, stage: int) -> Any:
    item = top.parallel_strategy_item.add(node_name=name)
    item.parallel_strategys.stage = stage
    item.parallel_strategys.parallel_strategy.add(dim=[2, 1])
    return item


def saved(path: Path, content: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    if hasattr(content, "SerializePartialToString"):
        content = content.SerializePartialToString()
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def json_item(**items: object) -> dict[str, object]:
    return {
        "dev_matrix": [2, 4], "tensor_map": [1, -1], "tensor_shape": [8, 8], "field": 0,
        "opt_weight_shard_step": 0, "opt_weight_shard_size": 0,
    } | items  # fmt: skip


def json_top(layouts: object, operators: object = None, **items: object) -> dict[str, object]:
    return {"current_stage": 2, "parallel_layout_item": layouts, "parallel_strategy_item": operators or {}} | items


def meaning(strategy: Strategy) -> tuple[object, ...]:
    """What a strategy says about tensors, without the operators that a file needs for its stage."""
    return strategy.tensors, strategy.stages, strategy.devices, strategy.merged

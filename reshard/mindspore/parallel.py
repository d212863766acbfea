"""MindSpore's `mindspore.parallel`, as far as checkpoints go: `ms.parallel.unified_safetensors` and so on."""

from reshard.mindspore.absent import missing
from reshard.mindspore.slices import merge_sliced_parameter
from reshard.mindspore.strategy import build_searched_strategy, merge_pipeline_strategys, restore_group_info_list
from reshard.mindspore.transform import (
    convert_checkpoint_by_rank,
    convert_checkpoints,
    load_segmented_checkpoints,
    rank_list_for_convert,
    rank_list_for_transform,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from reshard.mindspore.unified import load_distributed_checkpoint, unified_safetensors

__all__ = [
    "build_searched_strategy",
    "convert_checkpoint_by_rank",
    "convert_checkpoints",
    "load_distributed_checkpoint",
    "load_segmented_checkpoints",
    "merge_pipeline_strategys",
    "merge_sliced_parameter",
    "rank_list_for_convert",
    "rank_list_for_transform",
    "restore_group_info_list",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "unified_safetensors",
]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)

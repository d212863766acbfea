"""MindSpore's `mindspore.communication`, as far as a checkpoint script uses it; see `reshard.mindspore.launch`."""

from reshard.mindspore.launch import get_group_size, get_rank, init

__all__ = ["get_group_size", "get_rank", "init"]

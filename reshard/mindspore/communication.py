"""MindSpore's `mindspore.communication`, as far as a checkpoint script uses it; see `reshard.mindspore.launch`."""

from reshard.mindspore.absent import missing
from reshard.mindspore.launch import get_group_size, get_rank, init

__all__ = ["get_group_size", "get_rank", "init"]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)

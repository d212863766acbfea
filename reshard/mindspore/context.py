"""MindSpore's `mindspore.context`, as far as the set-up lines of a script go: they are accepted, and do nothing."""

from reshard.mindspore.absent import missing
from reshard.mindspore.launch import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    ParallelMode,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    set_context,
)

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "ParallelMode",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "set_context",
]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)

"""The set-up lines of a script, which have no effect here: the part of `mindspore.context` that scripts use."""

from __future__ import annotations

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "ParallelMode",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "set_context",
]

GRAPH_MODE = 0
PYNATIVE_MODE = 1


class ParallelMode:
    """Values of `parallel_mode` in a script's set-up lines.

    >>> ms.ParallelMode.SEMI_AUTO_PARALLEL
    'semi_auto_parallel'
    """

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


def set_context(*settings: object, **named: object) -> None:
    """Accept a set-up line of a script: nothing is compiled or run here, and layouts come from strategy files.

    >>> ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")
    >>> ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL)
    >>> ms.set_seed(1)
    """


set_auto_parallel_context = reset_auto_parallel_context = set_seed = set_context

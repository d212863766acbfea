"""Which process of how many this is, as its launcher says in the environment.

Nothing communicates here: a conversion whose processes each write their own target ranks needs to know who it is, no
more. `mpirun -n 4 python convert.py`, `srun -n 4 python convert.py` and MindSpore's own launchers all tell it.
"""

from __future__ import annotations

import os

from reshard.errors import UsageError

# Rank and number of processes, the more telling launcher first: under Slurm, mpirun's children inherit SLURM_PROCID 0.
_LAUNCHERS = (
    ("RANK_ID", "RANK_SIZE"),  # MindSpore's scripts and msrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
    ("RANK", "WORLD_SIZE"),  # torchrun
)

_WORLD = "hccl_world_group"

GRAPH_MODE = 0
PYNATIVE_MODE = 1
"""What a script's set-up lines give as `mode`."""


class ParallelMode:
    """What a script's set-up lines give as `parallel_mode`."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


def init(backend_name: str | None = None) -> None:
    """Do nothing, at the place where MindSpore connects the processes.

    Args:
        backend_name: `hccl`, `nccl` or `mccl`; accepted, there is no device to connect.
    """


def set_context(**settings: object) -> None:
    """Accept the set-up line of a script: nothing is compiled or run on a device here.

    Args:
        settings: `mode`, `device_target` and so on; ignored.
    """


def set_auto_parallel_context(**settings: object) -> None:
    """Accept the set-up line of a script: layouts come from strategy files, which this does not make.

    Args:
        settings: `parallel_mode`, `strategy_ckpt_config` and so on; ignored.
    """


def reset_auto_parallel_context() -> None:
    """Accept the set-up line of a script; there is nothing to reset."""


def set_seed(seed: int) -> None:
    """Accept the set-up line of a script: nothing here is random.

    Args:
        seed: ignored.
    """


def get_rank(group: str = _WORLD) -> int:  # noqa: ARG001 -- MindSpore's signature
    """Return the number of this process among those that the launcher started; 0 without a launcher.

    Args:
        group: accepted; there is one group, of all processes.

    Raises:
        UsageError: the environment variable is no number, or not below the number of processes.
    """
    return _rank_and_size()[0]


def get_group_size(group: str = _WORLD) -> int:  # noqa: ARG001 -- MindSpore's signature
    """Return how many processes the launcher started; 1 without a launcher, or where it does not say.

    Args:
        group: accepted; there is one group, of all processes.

    Raises:
        UsageError: the environment variable is no number, or not above this process's rank.
    """
    return _rank_and_size()[1]


def _rank_and_size() -> tuple[int, int]:
    """Return rank and size from one launcher: a rank of one and a size of another would not go together."""
    for needed in (0, 1):  # a launcher that gives the rank; failing that, one that gives at least the size
        for pair in _LAUNCHERS:
            if pair[needed] in os.environ:
                rank = _number(pair[0], 0)
                size = _number(pair[1], 1)
                if rank >= size and pair[1] in os.environ:
                    raise UsageError(f"{pair[0]} is {rank} and {pair[1]} is {size}; expected a rank below the size")
                return rank, size
    return 0, 1


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise UsageError(f"{variable} is {text!r} in the environment; expected a number, as a launcher sets it")
    return int(text)

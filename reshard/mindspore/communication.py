"""Rank and group size, as the launcher of a script set them: the part of `mindspore.communication` that scripts use.

Nothing communicates here: if the processes of a conversion each write their own target ranks, a process only needs its
rank. `mpirun -n 4 python convert.py`, `srun -n 4 python convert.py` and MindSpore's own launchers set it in the
environment.
"""

from __future__ import annotations

import os

from reshard.errors import UsageError

__all__ = ["get_group_size", "get_rank", "init"]

# Rank and number of processes, the more specific launcher first: under Slurm, mpirun's children have SLURM_PROCID 0.
LAUNCHERS = (
    ("RANK_ID", "RANK_SIZE"),  # MindSpore's scripts and msrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
    ("RANK", "WORLD_SIZE"),  # torchrun
)


def init(backend_name: str | None = None) -> None:
    """Accept the set-up line of a script; there is no device to connect.

    >>> ms.init()
    """


def get_rank(group: str = "hccl_world_group") -> int:  # noqa: ARG001 -- MindSpore's signature
    """Return the rank of this process, as the launcher set it; 0 without a launcher.

    Args:
        group: accepted; there is one group, of all processes.

    Raises:
        UsageError: the environment variable is not a number.

    >>> ms.get_rank()
    0
    """
    return _number(_launcher()[0], 0)


def get_group_size(group: str = "hccl_world_group") -> int:  # noqa: ARG001 -- MindSpore's signature
    """Return the number of processes, as the launcher set it; 1 without a launcher.

    Arguments and errors: as for `get_rank`.

    >>> ms.get_group_size()
    1
    """
    return _number(_launcher()[1], 1)


def _launcher() -> tuple[str, str]:
    """Return the variables of the launcher that set a rank; of two launchers they would not match."""
    return next((pair for pair in LAUNCHERS if pair[0] in os.environ), LAUNCHERS[0])


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise UsageError(
            f"{variable} is {text!r} in the environment; expected a number, as a launcher sets it", code="bad-number"
        )
    return int(text)

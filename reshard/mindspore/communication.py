"""Rank and group size, as the launcher of a script set them: the part of `mindspore.communication` that scripts use.

Nothing communicates here: processes that each write their own target ranks only need their rank, which `mpirun`, `srun`
and MindSpore's own launchers set in the environment.
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
    """Return the rank of this process, as the launcher set it; 0 without a launcher. There is one group.

    Raises:
        UsageError: the environment variable is not a number.

    >>> ms.get_rank()
    0
    """
    return _launched(0)


def get_group_size(group: str = "hccl_world_group") -> int:  # noqa: ARG001 -- MindSpore's signature
    """Return the number of processes, as the launcher set it; 1 without a launcher.

    >>> ms.get_group_size()
    1
    """
    return _launched(1)


def _launched(which: int) -> int:
    """Return the rank (0) or the number of processes (1) of the launcher that set a rank; without one 0 and 1."""
    variable = next((pair for pair in LAUNCHERS if pair[0] in os.environ), LAUNCHERS[0])[which]
    text = os.environ.get(variable, str(which))
    if not text.isdecimal():
        raise UsageError(f"{variable} is {text!r} in the environment; expected a number", code="bad-number")
    return int(text)

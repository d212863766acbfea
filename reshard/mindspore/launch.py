"""The other lines of a checkpoint script: rank and group size, set-up lines, names that only MindSpore has.

Nothing communicates here: if the processes of a conversion each write their own target ranks, a process only needs its
rank. `mpirun -n 4 python convert.py`, `srun -n 4 python convert.py` and MindSpore's own launchers set it in the
environment.

The error for a name of training says where to import it from. Python asks a module for a name in two ways. `ms.Model`
needs an AttributeError, so that `hasattr` works. `from reshard.mindspore import Model` replaces an AttributeError by
"cannot import name"; so it gets an ImportError at once, with the same message.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


# Rank and number of processes, the more specific launcher first: under Slurm, mpirun's children have SLURM_PROCID 0.
_LAUNCHERS = (
    ("RANK_ID", "RANK_SIZE"),  # MindSpore's scripts and msrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
    ("RANK", "WORLD_SIZE"),  # torchrun
)

GRAPH_MODE = 0
PYNATIVE_MODE = 1
"""Values of `mode` in a script's set-up lines."""


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


def init(backend_name: str | None = None) -> None:
    """Accept the set-up line of a script; there is no device to connect.

    >>> ms.init()
    """


def set_context(**settings: object) -> None:
    """Accept the set-up line of a script; nothing is compiled or run on a device here.

    >>> ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")
    """


def set_auto_parallel_context(**settings: object) -> None:
    """Accept the set-up line of a script; layouts come from strategy files, which this does not write.

    >>> ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL)
    """


def reset_auto_parallel_context() -> None:
    """Accept the set-up line of a script; there is nothing to reset.

    >>> ms.reset_auto_parallel_context()
    """


def set_seed(seed: int) -> None:
    """Accept the set-up line of a script; nothing here is random.

    >>> ms.set_seed(1)
    """


def get_rank(group: str = "hccl_world_group") -> int:  # noqa: ARG001 -- MindSpore's signature
    """Return the rank of this process, as the launcher set it; 0 without a launcher.

    Args:
        group: accepted; there is one group, of all processes.

    Raises:
        UsageError: the environment variable is not a number, or not below the number of processes.

    >>> ms.get_rank()
    0
    """
    return _rank_and_size()[0]


def get_group_size(group: str = "hccl_world_group") -> int:  # noqa: ARG001 -- MindSpore's signature
    """Return the number of processes, as the launcher set it; 1 if it is not set.

    Arguments and errors: as for `get_rank`.

    >>> ms.get_group_size()
    1
    """
    return _rank_and_size()[1]


def _rank_and_size() -> tuple[int, int]:
    """Return rank and size from one launcher: a rank of one and a size of another would not match."""
    for needed in (0, 1):  # prefer a launcher that sets the rank to one that sets only the size
        for pair in _LAUNCHERS:
            if pair[needed] in os.environ:
                rank, size = _number(pair[0], 0), _number(pair[1], 1)
                if rank >= size and pair[1] in os.environ:
                    raise UsageError(
                        f"{pair[0]} is {rank} and {pair[1]} is {size}; expected a rank below the size",
                        code="out-of-range",
                    )
                return rank, size
    return 0, 1


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise UsageError(
            f"{variable} is {text!r} in the environment; expected a number, as a launcher sets it", code="bad-number"
        )
    return int(text)


# Names that scripts around checkpoints use, and that only MindSpore has.
_OF_TRAINING = {
    "reshard.mindspore": """
COOTensor CSRTensor Callback CheckpointConfig DatasetHelper DynamicLossScaleManager FixedLossScaleManager Generator
JitConfig Layout LossMonitor Model ModelCheckpoint ParameterTuple Profiler RowTensor RunContext SummaryCollector
TimeMonitor amp async_ckpt_thread_status build_train_network common dataset dtype dtype_to_nptype export
from_numpy get_auto_parallel_context get_context grad jit load load_mindir load_obf_params_into_net mint nn
obfuscate_ckpt ops parameter_broadcast pytype_to_dtype save_mindir set_algo_parameters set_deterministic set_device
shard tensor train value_and_grad
""",
    "reshard.mindspore.communication": """
GlobalComm create_group destroy_group get_local_rank get_local_rank_size get_process_group_ranks management release
""",
    "reshard.mindspore.context": "get_auto_parallel_context get_context get_ps_context set_ps_context",
    "reshard.mindspore.parallel": "Layout auto_parallel parameter_broadcast set_algo_parameters shard",
}


def missing(module: str, name: str, here: Iterable[str]) -> AttributeError | ImportError:
    """Return the error for a name that a module lacks.

    Args:
        module: the module, `reshard.mindspore` or one in it.
        name: the name.
        here: the names that the module has.

    >>> missing("reshard.mindspore", "Model", [])
    AttributeError("reshard.mindspore has no 'Model': it belongs to training; import it from mindspore")
    >>> missing("reshard.mindspore", "load_chekpoint", ["load_checkpoint", "init"])
    AttributeError("reshard.mindspore has no 'load_chekpoint'; did you mean 'load_checkpoint'?")
    """
    message = f"{module} has no {name!r}"
    if name in _OF_TRAINING[module].split():
        message += f": it belongs to training; import it from {module.removeprefix('reshard.')}"
    elif near := get_close_matches(name, here, cutoff=0.75):
        message += f"; did you mean {' or '.join(map(repr, near))}?"
    asked_by = sys._getframe(2).f_code.co_name  # noqa: SLF001 -- nothing public tells; without it the text is Python's
    if asked_by == "_handle_fromlist" and find_spec(f"{module}.{name}") is None:
        return ImportError(message, name=module)
    return AttributeError(message)

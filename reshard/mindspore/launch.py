"""The other lines of a checkpoint script: rank and group size, set-up lines, names that only MindSpore has.

Nothing communicates here: if the processes of a conversion each write their own target ranks, a process only needs its
rank. `mpirun -n 4 python convert.py`, `srun -n 4 python convert.py` and MindSpore's own launchers set it in the
environment.

Names that belong to training are missing, and the error says where to import them from. Python asks a module for a name
in two ways. `ms.Model` needs an AttributeError, so that `hasattr` works. `from reshard.mindspore import Model` replaces
an AttributeError by "cannot import name"; so it gets an ImportError at once, with the same message.

Source of the names: `mindspore.__all__` and the public names of the module, MindSpore 2.10.
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

_WORLD = "hccl_world_group"

GRAPH_MODE = 0
PYNATIVE_MODE = 1
"""Values of `mode` in a script's set-up lines."""


class ParallelMode:
    """Values of `parallel_mode` in a script's set-up lines."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


def init(backend_name: str | None = None) -> None:
    """Accept the set-up line of a script; MindSpore connects the processes here.

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
    """Return the rank of this process, as the launcher set it; 0 without a launcher.

    Args:
        group: accepted; there is one group, of all processes.

    Raises:
        UsageError: the environment variable is not a number, or not below the number of processes.
    """
    return _rank_and_size()[0]


def get_group_size(group: str = _WORLD) -> int:  # noqa: ARG001 -- MindSpore's signature
    """Return the number of processes, as the launcher set it; 1 without a launcher, or if it does not set it.

    Args:
        group: accepted; there is one group, of all processes.

    Raises:
        UsageError: the environment variable is not a number, or not above this process's rank.
    """
    return _rank_and_size()[1]


def _rank_and_size() -> tuple[int, int]:
    """Return rank and size from one launcher: a rank of one and a size of another would not match."""
    for needed in (0, 1):  # a launcher that sets the rank; if there is none, one that sets the size
        for pair in _LAUNCHERS:
            if pair[needed] in os.environ:
                rank = _number(pair[0], 0)
                size = _number(pair[1], 1)
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


_OF_TRAINING = {
    "reshard.mindspore": """
Accuracy BackupAndRestore BleuScore COMPATIBLE COOTensor CSRTensor Callback CheckpointConfig Cifar100ToMR
Cifar10ToMR ConfusionMatrix ConfusionMatrixMetric ConvertModelUtils ConvertNetUtils CosineSimilarity CsvToMR
CustomPassType DatasetHelper DeviceCtx Dice DynamicLossScaleManager EarlyStopping EnvProfiler Event
ExitByRequest F1 FAILED Fbeta FileReader FileWriter FixedLossScaleManager FlopsUtilizationCollector Generator
HausdorffDistance History ImageNetToMR Int JitConfig LAX LambdaCallback Layout LearningRateScheduler Loss
LossMonitor LossScaleManager MAE MSE MeanSurfaceDistance MemPool Metric MindPage MnistToMR Model ModelCheckpoint
MsDispatchMode Node NodeType OcclusionSensitivity OnRequestExit ParameterTuple Perplexity PluggableAllocator
Precision Profiler QuantDtype ROC RSCPluginHandle Recall ReduceLROnPlateau RootMeanSquareDistance RowTensor
RunContext STRICT SUCCESS ScopedValue SparseTensor Stream StreamCtx StreamLimitCtx SummaryCollector
SummaryLandscape SummaryRecord Symbol SymbolTree TFRecordToMR TFTCommValue TensorType TimeMonitor
Top1CategoricalAccuracy Top5CategoricalAccuracy TopKCategoricalAccuracy TrainFaultTolerance Type UntypedStorage
ValueType amp async_ckpt_thread_status auc bool boost build_train_network byte cdouble cfloat clear_op_infer
clear_op_wrapper comm_exec_order_check common communication_stream complex128 connect_network_with_dataset
constexpr current_stream data_sink dataset default_generator default_stream device_context device_manager
dispatch_threads_num double dryrun dtype dtype_to_nptype dtype_to_pytype empty_cache enable_dynamic experimental
export export_split_mindir float float_ flops_collection from_dlpack from_numpy frombuffer get_algo_parameters
get_auto_parallel_context get_context get_current_device get_device_limit get_grad get_level get_log_config
get_metric_fn get_ps_context get_py_obj_dtype get_rng_state get_sdc_detect_result get_seed get_stream_limit grad
graph hal half hifloat8 initial_seed int int_ intc intp is_tensor jacfwd jacrev jit jit_class jvp
launch_blocking lazy_inline list_ load load_mindir load_obf_params_into_net log long manual_seed
max_memory_allocated max_memory_reserved memory_allocated memory_replay memory_reserved memory_stats
memory_summary mindio_preload mindrecord mint ms_memory_recycle mutable nn no_inline number numpy obfuscate_ckpt
onnx ops parameter_broadcast profiler pytype_to_dtype rearrange_inputs recompute register_custom_backend
register_custom_pass register_op_infer register_op_wrapper register_saved_tensors_hooks reset_algo_parameters
reset_max_memory_allocated reset_max_memory_reserved reset_peak_memory_stats reset_ps_context reset_stream_limit
rewrite run_check runtime runtime_execution_order_check safeguard save_mindir saved_tensors_hooks
sdc_detect_start sdc_detect_stop seed set_algo_parameters set_cpu_affinity set_cur_stream set_dec_mode
set_deterministic set_device set_device_limit set_dump set_enc_key set_enc_mode set_kernel_launch_capture
set_kernel_launch_group set_memory set_mindio_server_info set_op_strategy_config set_ps_context
set_recursion_limit set_rng_state set_stream_limit shard short single stress_detect string swap_tensors
sync_pipeline_shared_parameters synchronize tensor tensor_type to_dlpack tools train tuple_ type_none ubyte uint
uintc uintp use_mem_pool ushort utils value_and_grad vjp vmap
""",
    "reshard.mindspore.communication": """
GlobalComm HCCL_WORLD_COMM_GROUP MCCL_WORLD_COMM_GROUP NCCL_WORLD_COMM_GROUP comm_func create_group destroy_group
get_comm_name get_group_rank_from_world_rank get_local_rank get_local_rank_size get_process_group_ranks
get_world_rank_from_group_rank management release
""",
    "reshard.mindspore.context": """
COMPATIBLE LAX STRICT get_auto_parallel_context get_context get_ps_context reset_ps_context set_ps_context
""",
    "reshard.mindspore.parallel": """
Layout auto_parallel checkpoint_convert checkpoint_transform cluster distributed function get_algo_parameters nn
parameter_broadcast reset_algo_parameters set_algo_parameters set_op_strategy_config shard strategy
sync_pipeline_shared_parameters
""",
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

"""MindSpore's checkpoint functions under its own names: `import reshard.mindspore as ms`.

The functions take MindSpore 2.10's arguments with MindSpore's meaning; MindSpore itself is not needed. Some work where
MindSpore's fail or are silently wrong: docs/guides/mindspore-script.md has what is different. Arguments that only
make sense on a device are accepted and explained.

If MindSpore is installed, the functions take its own objects wherever they take ours: Tensors, Parameters, dicts and
lists of them, Cells, dtypes, layouts. They return ours, which MindSpore does not take: `load_param_into_net` loads them
into a Cell, and `mindspore.Tensor(p.asnumpy())` converts one (of Int4 with `dtype=mindspore.qint4x2`).

>>> import reshard.mindspore as ms
>>> ms.Parameter(ms.Tensor([[1.0, 2.0]]), "weight")
Parameter (name=weight, shape=(1, 2), dtype=Float32, requires_grad=True)
>>> ms.Tensor([1.0, 2.0], ms.bfloat16).dtype == ms.bfloat16
True

Arguments that several functions have:

* `src_strategy_file`, `dst_strategy_file`, `predict_strategy`, `train_strategy_filename`: a strategy file, a directory
  of the files of a pipeline's ranks, a `reshard.Strategy`, or a dict of layouts by name, as `build_searched_strategy`
  or MindSpore's `infer_predict_layout` return it. None stands for whole tensors.
* `process_num`, `processes_num`, `max_process_num`: the number of threads (MindSpore: processes).
* `dec_key`, `enc_key`: the key of an encrypted `.ckpt` file, with the `crypto` extra; `dec_mode`, `enc_mode`: its
  cipher, `AES-GCM`, `AES-CBC` or `SM4-CBC`.

Existing target files are replaced. Errors that several functions raise:

* TypeError: an argument of the wrong type. NotADirectoryError: a directory is none.
* ValueError (a `SourceError`, `StrategyError` or `UsageError`): a missing or corrupt file, files that contradict the
  strategy, a strategy that cannot be read or is of another model, an encrypted file without its key.
* TargetError: a target file would be one of the source files.
"""

from __future__ import annotations

from importlib import import_module

# The module of each public name. Modules are imported on first use, so that a script that only merges strategies does
# not wait for dask.
_HOMES = {
    "communication": ("get_group_size", "get_rank", "init"),
    "context": (
        "GRAPH_MODE", "PYNATIVE_MODE", "ParallelMode", "reset_auto_parallel_context", "set_auto_parallel_context",
        "set_context", "set_seed",
    ),
    "convert": ("ckpt_to_safetensors", "safetensors_to_ckpt"),
    "network": ("load_param_into_net",),
    "parameter": (
        "Parameter", "Tensor", "bfloat16", "bool_", "complex64", "float16", "float32", "float64", "float8_e4m3fn",
        "float8_e5m2", "int16", "int32", "int64", "int8", "qint4x2", "uint16", "uint32", "uint64", "uint8",
    ),
    "save_load": ("load_checkpoint", "load_checkpoint_async", "save_checkpoint"),
    "slices": ("merge_sliced_parameter",),
    "strategy": (
        "build_searched_strategy", "get_ckpt_path_with_strategy", "get_parameter_redundancy",
        "merge_pipeline_strategys", "remove_param_redundancy", "restore_group_info_list",
    ),
    "transform": (
        "convert_checkpoint_by_rank", "convert_checkpoints", "load_segmented_checkpoints", "rank_list_for_convert",
        "rank_list_for_transform", "transform_checkpoint_by_rank", "transform_checkpoints",
    ),
    "unified": ("load_distributed_checkpoint", "unified_safetensors"),
}  # fmt: skip

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("communication", "context", "parallel")  # MindSpore's own

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 -- one list of names, above


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(
            f"{__name__} has no {name!r}, only MindSpore's functions for checkpoints; import what belongs to training "
            "from mindspore"
        )
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})

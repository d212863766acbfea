"""`unified_safetensors` and `load_distributed_checkpoint`: write whole tensors into a few files, and slice them again.

Either kind of unified directory is read, MindSpore's or Hugging Face's, or one of a single file.

Source: MindSpore 2.10 `parallel/transform_safetensors.py`, `parallel/checkpoint_transform.py`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.model.entries import SizedTensor
from reshard.core.open import open as open_source
from reshard.core.plan.budget import THREADS
from reshard.core.plan.inputs import Selection
from reshard.errors import UsageError, names
from reshard.formats.ranks.options import RankFiles
from reshard.formats.sets.options import MindSporeSet, share_of
from reshard.kits.files import by_name
from reshard.mindspore.arguments import (
    carry_out,
    check_model,
    check_order,
    directory_of,
    number_of,
    open_ranks,
    planned,
    strategy_of,
    thread_count,
)
from reshard.mindspore.communication import get_rank
from reshard.mindspore.network import load_param_into_net, parameters_of
from reshard.mindspore.parameter import Parameter, dtype_of
from reshard.mindspore.save_load import cipher_of
from reshard.mindspore.strategy import path_of
from reshard.view.ranks import planned_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan
    from reshard.core.storage.cipher import Cipher
    from reshard.mindspore.arguments import PathLike, StrategyLike
    from reshard.strategy.strategy import Strategy

_log = logging.getLogger("reshard.mindspore")

PART_BYTES = 3 << 30
"""The most bytes of a part of a unified set, as in MindSpore: 3 GiB."""

_HYPER_PARAMETERS = "hyper_param"


def unified_safetensors(
    src_dir: PathLike,
    src_strategy_file: StrategyLike | None,
    dst_dir: PathLike,
    merge_with_redundancy: bool = True,  # noqa: ARG001 -- accepted, see below
    file_suffix: str | None = None,
    max_process_num: int = 64,
    choice_func: Callable[[str], bool | str] | None = None,
    split_dst_file: Sequence[int] = (),
) -> None:
    """Write a sharded checkpoint as whole tensors, in a few safetensors files and a map of them.

    Tensors that the strategy names go to `part<k>.safetensors`, which are as many as MindSpore's (the total size
    divided by 3 GiB, rounded up) and filled evenly; `accu_grads*` is left out, as in MindSpore. Other tensors go to
    `hyper_param.safetensors`. `param_name_map.json`, which is written last, says which part has a tensor.

    Args:
        src_dir: the directory of rank directories, of `.ckpt` files too.
        src_strategy_file: the source's strategy; None if every source rank holds whole tensors.
        dst_dir: the directory for the results; it is created.
        merge_with_redundancy: accepted. It tells MindSpore whether every replica is stored; here the files tell.
        file_suffix: read the files whose names end with this, if a rank has several.
        max_process_num: the most threads; at most four are used, as more would wait for the same disk.
        choice_func: called with every name of the strategy but `accu_grads*`: True keeps the tensor, False leaves it
            out, a string is its new name.
        split_dst_file: `(n, count)` for the n-th, from 1, of `count` processes that share the work: it writes its
            parts only, the first one also the map and `hyper_param`.

    Raises:
        TypeError: `choice_func` returns neither a bool nor a string.
        ValueError: a rank that is needed is missing, `choice_func` gives two tensors one name or keeps none.
        TargetError: `dst_dir` has files of another set, which readers that do not look at the map would take too.

    >>> from pathlib import Path
    >>> ms.ckpt_to_safetensors("src_checkpoints", "ranks")
    >>> ms.unified_safetensors("ranks", "src_strategy.ckpt", "whole")
    >>> sorted(path.name for path in Path("whole").iterdir())
    ['hyper_param.safetensors', 'param_name_map.json', 'part0.safetensors']
    """
    source_dir = directory_of("src_dir", src_dir)
    target_dir = directory_of("dst_dir", dst_dir, exists=False)
    threads = min(thread_count("max_process_num", max_process_num), THREADS)
    process, processes = split_dst_file or (1, 1)
    if not 1 <= process <= processes:
        raise UsageError(f"split_dst_file is {split_dst_file}; expected (number, count)", code="out-of-range")
    source = open_ranks(source_dir, strategy_of("src_strategy_file", src_strategy_file), stage=None, suffix=file_suffix)
    check_model(source, None)
    new_names = _chosen(source, choice_func)
    stored = [
        SizedTensor(new, 0 if tensor.text is not None else tensor.spec.nbytes, tensor.listed)
        for name, new in new_names.items()
        for tensor in [source.tensors[name]]
    ]
    files = share_of(MindSporeSet(PART_BYTES).shard_files(stored, ".safetensors"), process, processes)
    mine = {name: new for name, new in new_names.items() if files.has(new)}
    if not mine:
        return  # there are more processes than parts
    carry_out(planned(source, None, mine, format="safetensors", files=files), target_dir, threads)


def load_distributed_checkpoint(
    network: Any,
    checkpoint_filenames: Sequence[PathLike] | None = None,
    predict_strategy: StrategyLike | None = None,
    train_strategy_filename: StrategyLike | None = None,
    strict_load: bool = False,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    format: str = "ckpt",  # noqa: A002 -- MindSpore's signature
    unified_safetensors_dir: PathLike | None = None,
    dst_safetensors_dir: PathLike | None = None,
    rank_id: int | None = None,
    output_format: str = "safetensors",
    name_map: Mapping[str, str] | None = None,
    max_process_num: int = 64,
    return_param_dict: bool = False,
) -> bool | tuple[list[str], list[str]] | dict[str, Any]:
    """Slice the tensors of a unified directory or of other ranks for the ranks of a strategy.

    With a network, the slices of this process's rank (`get_rank`) are loaded into it; with `format="ckpt"` from the
    files of all ranks of `train_strategy_filename`, else from a unified directory. Without a network, files
    `rank_<r>/net.<output_format>` are written from a unified directory. Tensors of its parts that `predict_strategy`
    does not name are left out and logged; hyper-parameters are copied to every rank.

    Args:
        network: a network as for `load_param_into_net`, or None to write files.
        checkpoint_filenames: the files in rank order (format `ckpt`).
        predict_strategy: the strategy wanted; None for whole tensors.
        train_strategy_filename: the strategy of `checkpoint_filenames`; None for one file of whole tensors.
        strict_load: as for `load_param_into_net`.
        dec_key: the key of encrypted files (format `ckpt`).
        dec_mode: their cipher.
        format: the kind of source. The content of the files decides how they are read.
        unified_safetensors_dir: the unified directory (format `safetensors`).
        dst_safetensors_dir: the directory for the results.
        rank_id: write this rank only.
        output_format: the format of the files that are written.
        name_map: name in the network (and in `predict_strategy`) to name in the files; optimizer states follow.
        max_process_num: the most threads; at most four are used.
        return_param_dict: with a network, return the parameters by name, and load nothing.

    Returns:
        True; with a network and format `safetensors` the two lists of `load_param_into_net`; the parameters if
        `return_param_dict` is set.

    Raises:
        TypeError: no network with format `ckpt`, or no directory without one.
        ValueError: a file is missing, files in another order than the ranks in their paths, a rank that the strategy
            does not have.
        RuntimeError: a parameter does not fit the network.

    >>> ms.ckpt_to_safetensors("src_checkpoints", "ranks")
    >>> ms.unified_safetensors("ranks", "src_strategy.ckpt", "whole")
    >>> folders = {"unified_safetensors_dir": "whole", "dst_safetensors_dir": "dst"}
    >>> ms.load_distributed_checkpoint(None, predict_strategy="dst_strategy.ckpt", format="safetensors", **folders)
    True
    >>> len(ms.load_checkpoint("dst/rank_0/net.safetensors", format="safetensors"))
    15
    """
    by_name(format)
    by_name(output_format)
    threads = min(thread_count("max_process_num", max_process_num), THREADS)
    after = strategy_of("predict_strategy", predict_strategy)
    if format == "ckpt":
        if network is None:
            raise TypeError("network is None; format='ckpt' needs it (to write files: transform_checkpoints)")
        before = strategy_of("train_strategy_filename", train_strategy_filename)
        source = _opened_ranks(checkpoint_filenames, before, cipher_of(dec_key, dec_mode, format))
    else:
        source = _opened_set(directory_of("unified_safetensors_dir", unified_safetensors_dir))
    new_names = _renamed(source, name_map)
    check_model(source, after, new_names)
    if network is None:
        target_dir = directory_of("dst_safetensors_dir", dst_safetensors_dir, exists=False)
        number = "{rank}" if rank_id is None else number_of("rank_id", rank_id, 0)
        files = RankFiles(name=f"rank_{number}/net.{output_format}")
        carry_out(
            planned(source, after, new_names, rank=rank_id, format=output_format, files=files), target_dir, threads
        )
        return True
    loadable = new_names if return_param_dict else _loadable(new_names, network)
    rank = get_rank() if after else 0
    parameters = _parameters(planned(source, after, loadable, rank=rank), rank, threads)
    if return_param_dict:
        return parameters
    not_loaded, unused = load_param_into_net(network, parameters, strict_load)
    if format == "ckpt":
        return True
    return not_loaded, unused + [new for old, new in new_names.items() if old not in loadable]


def _chosen(source: Checkpoint, choice_func: Callable[[str], bool | str] | None) -> dict[str, str]:
    """Return the tensors of a unified set, with their new names."""
    new_names: dict[str, str] = {}
    for name, tensor in source.tensors.items():
        if source.strategy is not None and not tensor.listed:
            new_names[name] = name
        elif not name.startswith("accu_grads"):
            answer = True if choice_func is None else choice_func(name)
            if not isinstance(answer, bool | str):
                raise TypeError(f"choice_func({name!r}) is a {type(answer).__name__}; expected a bool or a new name")
            if answer is not False:
                new_names[name] = answer if isinstance(answer, str) else name
    return Selection(name_map=new_names).renamed(list(new_names))


def _renamed(source: Checkpoint, name_map: Mapping[str, str] | None) -> dict[str, str]:
    """Return the network's name of every tensor."""
    if len({*(name_map or {}).values()}) < len(name_map or {}):
        raise UsageError("name_map gives two names of the network to one of the files", code="duplicate-name")
    new_name_of = {old: new for new, old in (name_map or {}).items() if old in source.tensors}
    unknown = [old for old in (name_map or {}).values() if old not in source.tensors]
    if unknown:
        _log.warning("name_map: no file has %s", names(map(repr, unknown)))
    return Selection(name_map=new_name_of).renamed(list(source.tensors))


def _opened_set(directory: Path) -> Checkpoint:
    """Open whole tensors; ranks whose strategy does not name them get copies of hyper-parameters, and no others."""
    source = open_source(directory)
    tensors = {}
    for name, tensor in source.tensors.items():
        files = {Path(source.files[at.file].path).stem for at in tensor.sharding.replicas[0]}
        tensors[name] = tensor._replace(listed=files != {_HYPER_PARAMETERS})
    return replace(source, tensors=tensors)


def _loadable(new_names: Mapping[str, str], network: Any) -> dict[str, str]:
    """Return the tensors that a network may load: its names may be the ends of longer ones in the files."""
    parameters = set(parameters_of(network, "network"))
    unfilled = tuple(parameters.difference(new_names.values()))
    return {old: new for old, new in new_names.items() if new in parameters or (unfilled and new.endswith(unfilled))}


def _opened_ranks(filenames: object, before: Strategy | None, cipher: Cipher | None) -> Checkpoint:
    """Open the files of all ranks, listed in rank order."""
    if not isinstance(filenames, list | tuple):
        raise TypeError(f"checkpoint_filenames is a {type(filenames).__name__}; expected a list of files in rank order")
    first = before.ranks.start if before else 0
    files = {first + n: path_of(f"checkpoint_filenames[{n}]", file) for n, file in enumerate(filenames)}
    check_order("checkpoint_filenames", files)
    return open_source(files, strategy=before, stage="own", cipher=cipher)


def _parameters(result: Plan, rank: int, threads: int) -> dict[str, Any]:
    """Read a rank's Parameters and text entries into memory."""
    parameters: dict[str, Any] = dict(result.texts)
    arrays = planned_arrays(result, rank)
    for name, block in result.blocks(rank).items():
        array = np.asarray(arrays[name].compute(num_workers=threads))
        parameters[name] = Parameter.over(array.view(dtype_of(block.dtype)), name)
    return parameters

"""`unified_safetensors` and `load_distributed_checkpoint`: write whole tensors into a few files, and slice them again.

Differences from MindSpore 2.10, apart from the errors' texts:

* Whole tensors are written in streams, so a tensor may be larger than memory.
* `hyper_param` collects, from all source ranks, the tensors that no strategy names; MindSpore takes those of rank 0. It
  has no slices of tensors that `choice_func` or MindSpore's own rule (`accu_grads`) leaves out; MindSpore's has.
* Either kind of unified directory is read, MindSpore's or Hugging Face's, or one of a single file.

Source: MindSpore 2.10 `parallel/transform_safetensors.py`, `parallel/checkpoint_transform.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.model.entries import SizedTensor
from reshard.core.open import open as open_source
from reshard.core.plan.budget import THREADS
from reshard.core.plan.inputs import Selection
from reshard.core.plan.make import plan
from reshard.core.storage.cipher import Cipher
from reshard.core.storage.places import as_place
from reshard.errors import Faults, SourceError, StrategyError, UsageError, names
from reshard.formats.ranks.options import RankFiles
from reshard.formats.sets.options import MindSporeSet, share_of
from reshard.kits.indexes import read_index
from reshard.mindspore.arguments import (
    carry_out,
    check_all_stages,
    check_format,
    check_model,
    check_order,
    check_rank,
    check_target_stages,
    checked_format,
    mindspore_words,
    open_ranks,
    own_stage,
    path_of,
    present_ranks,
    strategy_of,
    target_directory,
    thread_count,
    warn_of,
    warn_of_others,
    whole_number,
)
from reshard.mindspore.launch import get_rank
from reshard.mindspore.network import load_param_into_net, parameters_of
from reshard.mindspore.parameter import Parameter, Tensor
from reshard.view.ranks import RankArrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan
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
    merge_with_redundancy: bool = True,
    file_suffix: str | None = None,
    max_process_num: int = 64,
    choice_func: Callable[[str], bool | str] | None = None,
    split_dst_file: Sequence[int] = (),
) -> None:
    """Write a sharded checkpoint as whole tensors, in a few safetensors files and a map of them.

    Tensors that the strategy names go to `part<k>.safetensors`, which are as many as MindSpore's (the total size
    divided by 3 GiB, rounded up) and filled evenly; `accu_grads*` is left out, as in MindSpore. Other tensors go to
    `hyper_param.safetensors`. `param_name_map.json`, which is written last, says which part has a tensor.

    Unlike MindSpore's it takes `.ckpt` files too.

    Args:
        src_dir: the directory of rank directories, of one format.
        src_strategy_file: the source's strategy, of a pipeline merged or a directory; None if every source rank holds
            whole tensors.
        dst_dir: the directory for the results; it is created.
        merge_with_redundancy: accepted. It tells MindSpore whether every replica is stored; here the files tell.
        file_suffix: read the files whose names end with this, if a rank has several.
        max_process_num: the most threads; at most four are used, as more would wait for the same disk.
        choice_func: called with every name of the strategy but `accu_grads*`: True keeps the tensor, False leaves it
            out, a string is its new name.
        split_dst_file: `(n, count)` for the n-th, from 1, of `count` processes that share the work: it writes its
            parts only, the first one also the map and `hyper_param`. The set is complete when all are done.

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
    source_dir = path_of("src_dir", src_dir)
    target_dir = target_directory("dst_dir", dst_dir)
    if not isinstance(merge_with_redundancy, bool):
        raise TypeError(f"merge_with_redundancy is a {type(merge_with_redundancy).__name__}; expected a bool")
    threads = min(thread_count("max_process_num", max_process_num), THREADS)
    process, processes = _share(split_dst_file)
    if not source_dir.is_dir():
        raise SourceError(
            f"src_dir {source_dir} is not a directory",
            code="not-a-directory",
            facts=["expected a directory of rank directories"],
        )
    before = strategy_of("src_strategy_file", src_strategy_file)
    checked_format(source_dir)
    opened = open_ranks(source_dir, before, None, suffix=file_suffix)
    check_model(opened, None)
    check_all_stages(source_dir, opened)
    new_names = _chosen(opened, choice_func)
    stored = [
        SizedTensor(new, 0 if tensor.text is not None else tensor.spec.nbytes, tensor.listed)
        for name, new in new_names.items()
        for tensor in [opened.tensors[name]]
    ]
    files = share_of(MindSporeSet(PART_BYTES).shard_files(stored, ".safetensors"), process, processes)
    mine = {name: new for name, new in new_names.items() if files.has(new)}
    if not mine:
        _log.info("%s: nothing is left to write for process %d of %d", target_dir, process, processes)
        return
    planned = plan(
        replace(opened, tensors={name: opened.tensors[name] for name in mine}),
        format="safetensors",
        files=files,
        selection=Selection(name_map=mine, drop="*", allow_missing="*"),
    )
    missing = tuple(name for name in (before.tensors if before else ()) if name not in opened.tensors)
    planned = replace(planned, missing=missing)
    carry_out(planned, target_dir, None, [src_strategy_file], threads=threads)


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

    With `format="safetensors"` the source is a unified directory:

    * without a network, files `rank_<r>/net.<output_format>` are written, for one rank or for all;
    * with a network, the slices of this process's rank (`get_rank`) are loaded into it.

    With `format="ckpt"` the source is the files of all ranks of `train_strategy_filename`, and a network is needed.

    Tensors of the parts that `predict_strategy` does not name are left out and logged; hyper-parameters are copied to
    every rank.

    Args:
        network: a network as for `load_param_into_net`, or None to write files.
        checkpoint_filenames: the files in rank order (format `ckpt`).
        predict_strategy: the strategy wanted; None for whole tensors.
        train_strategy_filename: the strategy of `checkpoint_filenames`. If it is None, MindSpore asks the network's
            context; here None means one file of whole tensors.
        strict_load: as for `load_param_into_net` (format `ckpt`).
        dec_key: the key of encrypted files (format `ckpt`).
        dec_mode: their cipher.
        format: the kind of source, as above. The content of the files decides how they are read.
        unified_safetensors_dir: the unified directory (format `safetensors`).
        dst_safetensors_dir: the directory for the results.
        rank_id: write this rank only.
        output_format: the format of the files that are written.
        name_map: name in the network (and in `predict_strategy`) to name in the files: the other way round than the map
            of `ckpt_to_safetensors`. All apply at once; optimizer states follow their weights.
        max_process_num: the most threads; at most four are used.
        return_param_dict: with a network, return the parameters by name, and load nothing.

    Returns:
        True; with a network and format `safetensors` the two lists of `load_param_into_net`; the parameters if
        `return_param_dict` is set.

    Raises:
        TypeError: no network with format `ckpt`.
        ValueError: arguments that exclude each other, another number of files than of the strategy's ranks, files in
            another order than the ranks in their paths, two names for one tensor, a name map without a name of the
            files, a rank that the strategy does not have.
        RuntimeError: a parameter does not fit the network.

    >>> ms.ckpt_to_safetensors("src_checkpoints", "ranks")
    >>> ms.unified_safetensors("ranks", "src_strategy.ckpt", "whole")
    >>> folders = {"unified_safetensors_dir": "whole", "dst_safetensors_dir": "dst"}
    >>> ms.load_distributed_checkpoint(None, predict_strategy="dst_strategy.ckpt", format="safetensors", **folders)
    True
    >>> len(ms.load_checkpoint("dst/rank_0/net.safetensors", format="safetensors"))
    15
    """
    check_format("format", format)
    check_format("output_format", output_format)
    threads = min(thread_count("max_process_num", max_process_num), THREADS)
    after = strategy_of("predict_strategy", predict_strategy)
    only_ckpt = {
        "checkpoint_filenames": checkpoint_filenames is not None,
        "train_strategy_filename": train_strategy_filename is not None,
        "strict_load": strict_load,
        "dec_key": dec_key is not None,
        "dec_mode": dec_mode != "AES-GCM",
    }
    if format == "ckpt":
        if network is None:
            raise TypeError("network is None; format='ckpt' needs it (to write files: transform_checkpoints)")
        cipher = None if dec_key is None else Cipher(dec_mode, dec_key)
        source = _opened_ranks(checkpoint_filenames, train_strategy_filename, cipher)
    elif any(only_ckpt.values()):
        raise UsageError(
            f"format='safetensors' does not take {names(n for n, is_set in only_ckpt.items() if is_set)}",
            code="option-of-another-format",
            hint="leave it out",
        )
    else:
        source = _opened_set(unified_safetensors_dir)
    new_names = _renamed(source, name_map)
    if after is not None:
        new_names = _without_unnamed(source, after, new_names)
    if network is None:
        if rank_id is not None:
            check_rank("rank_id", rank_id)
        files = RankFiles(name=f"rank_{'{rank}' if rank_id is None else rank_id}/net.{output_format}")
        # Whole tensors have one rank, of any number.
        ranks = None if rank_id is None or after is None else [rank_id]
        if dst_safetensors_dir is None:
            raise UsageError("dst_safetensors_dir is None; without a network the files go there", code="missing-option")
        target_dir = target_directory("dst_safetensors_dir", dst_safetensors_dir)
        if ranks is None:
            check_target_stages("predict_strategy", source, after)
        planned = _planned(source, after, new_names, format=output_format, files=files, ranks=ranks)
        carry_out(planned, target_dir, after, [predict_strategy], rank=rank_id, threads=threads)
        if after is not None:
            warn_of_others(target_dir, after.ranks)
        return True
    rank = get_rank() if after else 0
    loadable = new_names if return_param_dict else _loadable(new_names, network)
    planned = _planned(source, after, loadable, ranks=[rank])
    warn_of(planned, after, rank)
    parameters = _parameters(planned, rank, threads)
    if return_param_dict:
        return parameters
    not_loaded, unused = load_param_into_net(network, parameters, strict_load)
    if format == "ckpt":
        return True
    return not_loaded, unused + [new for old, new in new_names.items() if old not in loadable]


def _opened_set(unified_safetensors_dir: PathLike | None) -> Checkpoint:
    """Open a directory of whole tensors."""
    if unified_safetensors_dir is None:
        raise UsageError(
            "unified_safetensors_dir is None; it is the source with format='safetensors'", code="missing-option"
        )
    source_dir = path_of("unified_safetensors_dir", unified_safetensors_dir)
    if present_ranks(source_dir) - {0} and not read_index(as_place(source_dir)):
        raise SourceError(
            f"{source_dir} has rank directories and no whole tensors",
            code="needs-whole-tensors",
            hint="first use unified_safetensors",
        )
    return open_source(source_dir)


def _share(split_dst_file: object) -> tuple[int, int]:
    """Return the number of this process, and the count of processes."""
    if not isinstance(split_dst_file, tuple | list):
        raise TypeError(f"split_dst_file is a {type(split_dst_file).__name__}; expected (number, count)")
    if not split_dst_file:
        return 1, 1
    for number in split_dst_file:
        whole_number("a number of split_dst_file", number)
    if len(split_dst_file) != 2 or not 1 <= split_dst_file[0] <= split_dst_file[1]:
        raise UsageError(
            f"split_dst_file is {split_dst_file}; expected (number, count), numbers from 1 to count",
            code="out-of-range",
        )
    return split_dst_file[0], split_dst_file[1]


def _chosen(source: Checkpoint, choice_func: Callable[[str], bool | str] | None) -> dict[str, str]:
    """Return the tensors of a unified set, with their new names."""
    if choice_func is not None and not callable(choice_func):
        raise TypeError(f"choice_func is a {type(choice_func).__name__}; expected a function of a name")
    new_names: dict[str, str] = {}
    accumulated = []
    for name, tensor in source.tensors.items():
        if source.strategy is not None and not tensor.listed:
            new_names[name] = name
        elif name.startswith("accu_grads"):
            accumulated.append(name)
        else:
            answer = True if choice_func is None else choice_func(name)
            if not isinstance(answer, bool | str):
                raise TypeError(f"choice_func({name!r}) is a {type(answer).__name__}; expected a bool or a new name")
            if answer is not False:
                new_names[name] = answer if isinstance(answer, str) else name
    if accumulated:
        _log.info("%s: accumulated gradients are left out: %s", source.root, names(accumulated))
    if not new_names:
        raise UsageError(
            f"no tensor of {source.root} is left to write",
            code="no-tensors",
            facts=[f"accu_grads and choice_func leave out all {len(source.tensors)} tensors"],
        )
    return Selection(name_map=new_names).renamed(list(new_names))


def _renamed(source: Checkpoint, name_map: object) -> dict[str, str]:
    """Return the network's name of every tensor."""
    if name_map is None:
        return {name: name for name in source.tensors}
    if not isinstance(name_map, Mapping) or not all(isinstance(n, str) for item in name_map.items() for n in item):
        raise TypeError("name_map is not a dict of names in the network to names in the files")
    in_network: dict[str, list[str]] = {}
    for new, old in name_map.items():
        in_network.setdefault(old, []).append(new)
    faults = Faults("name_map")
    for old, new_names in in_network.items():
        if len(new_names) > 1:
            problem = f"is given to {names(new_names)}; expected one"
            faults.add(f"name {old!r} in the files", problem, code="duplicate-name")
    faults.raise_if_any(UsageError)
    unknown = [old for old in in_network if old not in source.tensors]
    if unknown and len(unknown) == len(in_network):
        raise UsageError(
            f"name_map: no file has {names(map(repr, unknown))}",
            code="no-match",
            facts=[
                "expected names in the network to names in the files",
                f"the files have {names(map(repr, source.tensors))}",
            ],
        )
    if unknown:
        _log.warning("name_map: no file has %s", names(map(repr, unknown)))
    new_name_of = {old: new_names[0] for old, new_names in in_network.items() if old in source.tensors}
    return Selection(name_map=new_name_of).renamed(list(source.tensors))


def _without_unnamed(source: Checkpoint, after: Strategy, new_names: Mapping[str, str]) -> dict[str, str]:
    """Drop the weights of a unified set that a strategy does not name; for other sources the plan does so."""
    chosen = {
        name: new
        for name, new in new_names.items()
        if source.strategy is not None or new in after.tensors or _is_hyper_parameter(source, name)
    }
    left_out = [new for old, new in new_names.items() if old not in chosen]
    if left_out:
        _log.warning("%s: left out, as predict_strategy does not name it: %s", source.root, names(left_out, most=20))
    if not any(new in after.tensors for new in new_names.values()):
        raise StrategyError(
            f"predict_strategy names no tensor of {source.root}",
            code="other-strategy",
            facts=[f"it has {names(after.tensors)}", f"the files have {names(new_names.values())}"],
            hint="use the strategy of this model",
        )
    return chosen


def _is_hyper_parameter(source: Checkpoint, name: str) -> bool:
    """Return whether a unified set stores a tensor as a hyper-parameter, to be copied and not sliced."""
    replicas = source.tensors[name].sharding.replicas[0]
    return all(Path(source.files[at.file].path).stem == _HYPER_PARAMETERS for at in replicas)


def _loadable(new_names: Mapping[str, str], network: Any) -> dict[str, str]:
    """Return the tensors that a network may load: its names may be the ends of longer ones in the files."""
    parameters = set(parameters_of(network, "network"))
    unfilled = tuple(parameters.difference(new_names.values()))
    return {old: new for old, new in new_names.items() if new in parameters or (unfilled and new.endswith(unfilled))}


def _planned(source: Checkpoint, after: Strategy | None, new_names: Mapping[str, str], **options: Any) -> Plan:
    """Plan tensors of a source under new names; ones that were left out on purpose are not missing."""
    if not new_names:
        raise SourceError(
            f"the network has no place for any tensor of {source.root}",
            code="different-model",
            facts=[f"it has {names(source.tensors)}"],
        )
    part = replace(source, tensors={name: source.tensors[name] for name in new_names})
    selection = Selection(name_map=new_names, drop=("*",), allow_missing=("*",))
    planned = plan(part, after, stage=own_stage(after), selection=selection, **options)
    return replace(planned, missing=tuple(name for name in planned.missing if name not in source.tensors))


def _opened_ranks(filenames: object, train_strategy: StrategyLike | None, cipher: Cipher | None) -> Checkpoint:
    """Open the files of all ranks, listed in rank order."""
    if not isinstance(filenames, list | tuple):
        raise TypeError(f"checkpoint_filenames is a {type(filenames).__name__}; expected a list of files in rank order")
    files = [path_of(f"checkpoint_filenames[{number}]", name) for number, name in enumerate(filenames)]
    faults = Faults("checkpoint_filenames")
    for number, file in enumerate(files):
        if not file.is_file() or not file.stat().st_size:
            faults.add(f"[{number}]", f"{file} does not exist, or is empty", code="not-found")
    faults.raise_if_any(SourceError)
    before = strategy_of("train_strategy_filename", train_strategy)
    ranks = before.ranks if before else range(1)
    if len(files) != len(ranks):
        raise UsageError(
            f"checkpoint_filenames has {len(files)} files; "
            + (f"the training strategy has {len(ranks)} ranks" if before else "several need train_strategy_filename"),
            code="wrong-count",
        )
    check_order("checkpoint_filenames", dict(enumerate(files)))
    with mindspore_words():
        return open_source(dict(zip(ranks, files, strict=True)), strategy=before, stage="own", cipher=cipher)


def _parameters(planned: Plan, rank: int, threads: int) -> dict[str, Any]:
    """Read a rank's Parameters and text entries into memory."""
    parameters: dict[str, Any] = dict(planned.texts)
    blocks = planned.blocks(rank)
    arrays = RankArrays(planned.source, rank, blocks, planned.texts)
    for name, block in blocks.items():
        array = np.asarray(arrays[name].compute(num_workers=threads), order="C")
        parameters[name] = Parameter.over(Tensor.of_kind(array, block.dtype), name)
    return parameters

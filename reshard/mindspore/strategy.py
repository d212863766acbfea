"""MindSpore's functions on strategy files: merge and read them, and list replicas by them.

JSON files work everywhere; the content decides the format, not the name.

Source: MindSpore 2.10 `parallel/checkpoint_transform.py`, `parallel/_parallel_serialization.py`, `train/_utils.py`,
`train/serialization.py`; the functions' pages at https://www.mindspore.cn/docs/en/r2.10.0/api_python.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from reshard.core.layout.layout import Layout
from reshard.core.layout.replicas import Group, by_turns, replica_groups
from reshard.core.storage.places import as_place
from reshard.core.storage.small import read_small, refuse_inputs
from reshard.errors import LayoutError, StrategyError, UsageError
from reshard.mindspore.communication import get_group_size, get_rank
from reshard.strategy.files import read_strategy, strategy_files, write_strategy
from reshard.strategy.proto import message_class
from reshard.strategy.proto.messages import layout_of_message, to_protobuf
from reshard.strategy.strategy import merged_names

PathLike = str | os.PathLike[str]

_RANK = re.compile(r"rank_\d+")


def merge_pipeline_strategys(src_strategy_dirs: PathLike, dst_strategy_file: PathLike) -> None:
    """Merge the strategy files of all stages of a pipeline into one file.

    Every stage from 0 on must be there, once or from several ranks that agree. The names get their stage,
    `<stage>-<name>`, even if there is only one. The file is JSON if its name ends with `.json`, else protobuf.

    Raises:
        ValueError: a stage is missing, or ranks disagree.

    >>> from pathlib import Path
    >>> Path("stages").mkdir()
    >>> file = Path("src_strategy.ckpt").rename("stages/src_strategy_0.ckpt")
    >>> ms.merge_pipeline_strategys("stages", "merged.ckpt")
    >>> len(ms.build_searched_strategy("merged.ckpt"))
    12
    """
    source = path_of("src_strategy_dirs", src_strategy_dirs)
    target = path_of("dst_strategy_file", dst_strategy_file)
    if not source.is_dir():
        raise NotADirectoryError(f"src_strategy_dirs {source} is not a directory; expected one of strategy files")
    refuse_inputs([target], strategy_files(as_place(source)), "one of the files that are merged")
    write_strategy(replace(read_strategy(source), merged=True, current_stage=1), target)


def build_searched_strategy(strategy_filename: PathLike | None) -> dict[str, Any] | None:
    """Read a strategy file: the layout of every parameter by its name, as MindSpore's protobuf message.

    Args:
        strategy_filename: the file, protobuf or JSON, or a directory of the files of a pipeline's ranks. The names of
            a merged file are `<stage>-<name>`. None gives None, as in MindSpore.

    Raises:
        ValueError: the file is missing, empty, not a strategy file, or names no parameter; a JSON file has a layout
            that may be nested, for which MindSpore's message has no place.

    >>> strategy = build_searched_strategy("src_strategy.ckpt")
    >>> layout = strategy["net.layer1.weight"]
    >>> list(layout.dev_matrix[0].dim), list(layout.tensor_map[0].dim), layout.opt_weight_shard_size
    ([2, 2, 2], [-1, 1], 0)
    """
    if strategy_filename is None:
        return None
    message: Any = message_class("mindspore.straspb.ParallelStrategyMap")()
    message.ParseFromString(to_protobuf(read_strategy(path_of("strategy_filename", strategy_filename))))
    return {item.param_name: item.parallel_layouts for item in message.parallel_layout_item}


def restore_group_info_list(group_info_file_name: PathLike) -> list[int]:
    """Return the ranks whose checkpoints equal those of the rank that saved a group info file.

    MindSpore writes such a file to the path in the environment variable GROUP_INFO_FILE.

    Raises:
        ValueError: the file is missing, or lists no ranks.

    >>> from pathlib import Path
    >>> count = Path("group_info.pb").write_bytes(bytes.fromhex("120408000804"))
    >>> ms.restore_group_info_list("group_info.pb")
    [0, 4]
    """
    from google.protobuf.message import DecodeError

    path = path_of("group_info_file_name", group_info_file_name)
    message: Any = message_class("mindspore.straspb.ParallelGroupMap")()
    try:
        message.ParseFromString(read_small(path, "group info file", 1 << 26, StrategyError))
    except (DecodeError, UnicodeDecodeError) as error:
        raise StrategyError(f"{path} is not a group info file: {error}", code="not-a-group-info-file") from None
    if not message.HasField("ckpt_restore_rank_list"):
        raise StrategyError(f"{path} has no ckpt_restore_rank_list", code="not-a-group-info-file")
    return list(message.ckpt_restore_rank_list.dim)


def get_parameter_redundancy(layout_obj: Any, initial_rank: int | None = None) -> dict[str, tuple[Group, ...]]:
    """Return, for each parameter, the groups of ranks that hold the same block of it.

    Args:
        layout_obj: a strategy file, protobuf or JSON, or a directory of the files of a pipeline's ranks; a dict by name
            of the values of `build_searched_strategy`, of `Layout`, or of MindSpore's `parameter_layout_dict`; or a
            network, whose `parameter_layout_dict` is read if it was compiled in parallel; every process has other
            parameters whole.
        initial_rank: the first rank of the stage. By default the first of this process's stage. For a merged file it is
            the first rank of stage 0, by default 0, and every stage has its own ranks.

    Returns:
        The groups of each parameter, sorted by its name; `<stage>-<name>` of a merged file.

    Raises:
        ValueError: a layout contradicts itself, or does not give the optimizer's pieces.

    >>> get_parameter_redundancy({"bias": Layout.of([2, 2], [-1]), "weight": Layout.of([2, 2], [-1, 0])})
    {'bias': ((0, 1, 2, 3),), 'weight': ((0, 2), (1, 3))}
    """
    if isinstance(layout_obj, str | os.PathLike):
        layout_obj = {name: placed.layout for name, placed in read_strategy(layout_obj).in_file_order()}
    elif hasattr(layout_obj, "parameters_and_names"):
        compiled = getattr(layout_obj, "parameter_layout_dict", None) or {}
        whole = Layout.of([get_group_size()], [-1])
        layout_obj = {p.name: compiled.get(p.name, whole) for _, p in layout_obj.parameters_and_names()}
    if not isinstance(layout_obj, Mapping):
        raise TypeError(f"layout_obj is {type(layout_obj).__name__}; expected a strategy file, layouts or a network")
    staged = merged_names(layout_obj)
    groups_by_name = {}
    for name in sorted(layout_obj):
        try:
            layout = any_layout(layout_obj[name])
            first_rank = get_rank() // layout.devices * layout.devices if initial_rank is None else initial_rank
            if name in staged:
                first_rank = (initial_rank or 0) + staged[name][0] * layout.devices
            groups_by_name[name] = replica_groups(layout, first_rank)
        except LayoutError as error:
            raise error.about(f"parameter {name!r}") from None
    return groups_by_name


def remove_param_redundancy(
    param_redundancy_dict: Mapping[str, tuple[Group, ...]], keep_redundancy: int = 1
) -> dict[int, set[str]]:
    """Assign each parameter's blocks to ranks so that each is stored once; replicas take turns.

    Args:
        param_redundancy_dict: the groups that `get_parameter_redundancy` returns.
        keep_redundancy: the number of replicas of each block to store.

    Returns:
        The parameters that each rank stores; a rank that stores none is left out.

    Raises:
        ValueError: `keep_redundancy` is below 0, for which MindSpore stores nothing.

    >>> remove_param_redundancy({"a": ((0, 1),), "b": ((0, 1),), "c": ((0,), (1,))}) == {0: {"a", "c"}, 1: {"b", "c"}}
    True
    """
    if keep_redundancy < 0:
        raise UsageError(
            f"keep_redundancy is {keep_redundancy}; expected the number of replicas to store", code="out-of-range"
        )
    stored: dict[int, set[str]] = defaultdict(set)
    groups = {name: [tuple(group) for group in ranks] for name, ranks in param_redundancy_dict.items()}
    for name, chosen in by_turns(groups, copies=keep_redundancy).items():
        for ranks in chosen:
            for rank in ranks:
                stored[rank].add(name)
    return dict(stored)


def get_ckpt_path_with_strategy(cur_ckpt_path: PathLike, cur_strategy_path: PathLike) -> str | None:
    """Find a checkpoint file for this process's rank: its own, or one of a rank with the same blocks.

    The numbers of other ranks replace `rank_<r>` in the path, ascending; a path without it is returned if it exists. A
    rank counts as equal if it has the same block of every parameter but `accu_grads*` and `inputs*`.

    Args:
        cur_ckpt_path: the file that this rank needs.
        cur_strategy_path: the strategy file of this rank, or a merged one.

    Returns:
        The path of a file, or None.

    >>> ms.get_ckpt_path_with_strategy("src_checkpoints/rank_0/checkpoint_0.ckpt", "src_strategy.ckpt")
    'src_checkpoints/rank_0/checkpoint_0.ckpt'
    """
    path = os.fspath(cur_ckpt_path)
    rank = get_rank()
    if re.search(rf"rank_{rank}(?!\d)", path) and Path(path).is_file():
        return path
    groups_by_name = get_parameter_redundancy(cur_strategy_path)
    staged = merged_names(groups_by_name)
    alike = [
        set(group)
        for name, groups in groups_by_name.items()
        if not staged.get(name, (0, name))[1].startswith(("accu_grads", "inputs"))
        for group in groups
        if rank in group
    ]
    replicas = [_RANK.sub(f"rank_{number}", path) for number in sorted(set.intersection(*alike) if alike else {rank})]
    return next((file for file in replicas if Path(file).is_file()), None)


def layout_of(value: Any) -> Layout:
    """Return the layout of a value of `build_searched_strategy`, here or MindSpore's, or the core's `Layout`."""
    if isinstance(value, Layout):
        return value
    try:
        return layout_of_message(value)
    except (AttributeError, TypeError) as error:
        raise StrategyError(f"a layout is {type(value).__name__} {value!r:.60}; {error}", code="wrong-type") from None


def any_layout(value: Any) -> Layout:
    """Return a layout from any form that `get_parameter_redundancy` takes.

    In a `parameter_layout_dict` it is (dev_matrix, tensor_map, slice shape, field, is uniform, optimizer group, full
    shape); the last ones may be left out.
    """
    if not isinstance(value, list | tuple):
        return layout_of(value)
    dev_matrix, tensor_map, slice_shape, _, _, group, full_shape = (*value, *((), 0, True, "", ())[len(value) - 2 :])[
        :7
    ]
    layout = Layout.of(dev_matrix, tensor_map)
    if not group:
        return layout
    pieces, rest = divmod(prod(full_shape), prod(slice_shape) * prod(layout.splits))
    if pieces < 2 or rest:
        raise LayoutError(
            f"its layout names the optimizer's group {group!r}; slice shape {slice_shape} and full shape {full_shape} "
            "do not give the number of its pieces",
            code="unknown-count",
        )
    return replace(layout, opt_weight_shard_size=pieces)


def path_of(argument: str, value: object) -> Path:
    """Return an argument that must be a path, and not empty, which would be the current directory."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{argument} is {value!r:.60} ({type(value).__name__}); expected a path")
    if not os.fspath(value):
        raise UsageError(f"{argument} is empty; expected a path", code="empty-value")
    return Path(value)

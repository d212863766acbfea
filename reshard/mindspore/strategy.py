"""MindSpore's functions on strategy files: merge and read them, and list replicas by them.

Differences from MindSpore 2.10, apart from the errors' texts:

* JSON files work everywhere, their nested layouts included; the content decides the format, not the name.
* `get_parameter_redundancy` reads every entry of a nested tensor map (MindSpore reads the first and takes different
  blocks for replicas), keeps the groups of tensors that the optimizer shards over fewer ranks than a stage has
  (MindSpore leaves some out, and with them the tensor), takes merged files and directories, and scalars.
* `get_ckpt_path_with_strategy` compares every parameter, and skips truncated files.

Source: MindSpore 2.10 `parallel/checkpoint_transform.py`, `parallel/_parallel_serialization.py`, `train/_utils.py`,
`train/serialization.py`; the functions' pages at https://www.mindspore.cn/docs/en/r2.10.0/api_python.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from reshard.core.layout.block import Shape, shape_text
from reshard.core.layout.layout import Layout
from reshard.core.layout.replicas import Group, by_turns, replica_groups
from reshard.core.storage.decryption import MAGICS
from reshard.core.storage.places import as_place
from reshard.core.storage.small import read_small, refuse_inputs
from reshard.errors import LayoutError, SourceError, StrategyError, UsageError
from reshard.kits.files import index_file
from reshard.mindspore.launch import get_group_size, get_rank
from reshard.strategy.files import read_strategy, strategy_files, write_strategy
from reshard.strategy.proto.messages import layout_of_message, tensor_map_parts
from reshard.strategy.strategy import MERGED_NAME, Placed, merged_names

PathLike = str | os.PathLike[str]

_RANK = re.compile(r"rank_\d+")


@dataclass(frozen=True, slots=True)
class Dims:
    """Integers of a layout, with the attribute of MindSpore's messages: `layout.dev_matrix[0].dim`."""

    dim: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParallelLayouts:
    """One tensor's layout, with the fields of MindSpore's protobuf message of this name.

    Attributes:
        dev_matrix: one element, the extents of the device axes.
        tensor_map: one element, or one a dimension if an entry names several axes.
        param_split_shape: one element, uneven sizes of dimension 0 a slice; empty if slices are equal.
        indices_offset: one element.
        field: rows interleaved as (field, device, rows); 0 if they are not.
        opt_weight_shard_step: stride of the ranks that share the block; 0 without optimizer sharding.
        opt_weight_shard_size: pieces that the optimizer cuts the block into; -1 for one a rank, 0 for none.
        tensor_shape: the whole shape if the file has it (JSON, in which nested entries are expanded). MindSpore's
            message has no such field, which is why it cannot read its own nested JSON.
    """

    dev_matrix: tuple[Dims, ...]
    tensor_map: tuple[Dims, ...]
    param_split_shape: tuple[Dims, ...]
    indices_offset: tuple[Dims, ...]
    field: int
    opt_weight_shard_step: int
    opt_weight_shard_size: int
    tensor_shape: Shape | None = None

    @classmethod
    def of(cls, placed: Placed) -> ParallelLayouts:
        """Return a layout of the core in the fields of MindSpore's message."""
        layout = placed.layout
        return cls(
            (Dims(layout.dev_matrix),),
            tuple(map(Dims, tensor_map_parts(layout))),
            (Dims(layout.param_split_shape),),
            (Dims(layout.indices_offset),),
            layout.field,
            layout.opt_weight_shard_step,
            layout.opt_weight_shard_size,
            placed.shape,
        )


def layout_of(value: Any) -> tuple[Layout, Shape | None]:
    """Convert a layout in MindSpore's terms to the core's, with the whole shape if known.

    Args:
        value: a value of `build_searched_strategy`, MindSpore's own message, or the core's `Layout`.

    Raises:
        ValueError: it is of another type, or contradicts itself.

    >>> from reshard.strategy.strategy import Placed
    >>> message = ParallelLayouts.of(Placed(0, Layout.of([2, 2], [(1, 0)])))
    >>> [part.dim for part in message.tensor_map], str(layout_of(message)[0])
    ([(1, 0), ()], '[2, 2] map [(1, 0)]')
    """
    if isinstance(value, Layout):
        return value, None
    try:
        layout = layout_of_message(value)
    except (AttributeError, TypeError) as error:
        raise StrategyError(
            f"a layout is {type(value).__name__} {value!r:.60}, which lacks what a value of "
            f"build_searched_strategy has ({error})",
            code="wrong-type",
        ) from None
    shape = getattr(value, "tensor_shape", None)
    return layout, None if shape is None else tuple(shape)


def merge_pipeline_strategys(src_strategy_dirs: PathLike, dst_strategy_file: PathLike) -> None:
    """Merge the strategy files of all stages of a pipeline into one file.

    Every stage from 0 on must be there, once or from several ranks that agree (MindSpore takes the first it finds).
    The names get their stage, `<stage>-<name>`, even if there is only one. The file is JSON if its name ends with
    `.json`, else protobuf (MindSpore writes the format of the sources under any name, and does not read it back).

    Args:
        src_strategy_dirs: the directory of strategy files, at least one of each stage.
        dst_strategy_file: the file to write; its directory is created.

    Raises:
        ValueError: a stage is missing, or ranks disagree.

    >>> from pathlib import Path
    >>> Path("stages").mkdir()
    >>> file = Path("src_strategy.ckpt").rename("stages/src_strategy_0.ckpt")
    >>> ms.merge_pipeline_strategys("stages", "merged.ckpt")
    >>> len(ms.build_searched_strategy("merged.ckpt"))
    12
    """
    source = Path(_path(src_strategy_dirs, "src_strategy_dirs"))
    target = _path(dst_strategy_file, "dst_strategy_file")
    if not source.is_dir():
        raise NotADirectoryError(f"src_strategy_dirs {source} is not a directory; expected one of strategy files")
    refuse_inputs([target], strategy_files(as_place(source)), "one of the files that are merged")
    write_strategy(replace(read_strategy(source), merged=True, current_stage=1), target)


def build_searched_strategy(strategy_filename: PathLike | None) -> dict[str, ParallelLayouts] | None:
    """Read a strategy file: the layout of every parameter by its name.

    Args:
        strategy_filename: the file, protobuf or JSON, or a directory of the files of a pipeline's ranks. The names of
            a merged file are `<stage>-<name>`. None gives None, as in MindSpore.

    Raises:
        ValueError: the file is missing, empty, not a strategy file, or names no parameter (MindSpore returns an empty
            dict then, and merges slices as if they had no layout).

    >>> import reshard, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     reshard.write_strategy(reshard.Strategy.of({"w": Layout.of([2, 4], [1, -1])}), folder + "/strategy.ckpt")
    ...     strategy = build_searched_strategy(folder + "/strategy.ckpt")
    >>> strategy["w"].dev_matrix[0].dim, strategy["w"].tensor_map[0].dim, strategy["w"].opt_weight_shard_size
    ((2, 4), (1, -1), 0)
    """
    if strategy_filename is None:
        return None
    strategy = read_strategy(_path(strategy_filename, "strategy_filename"))
    return {name: ParallelLayouts.of(placed) for name, placed in strategy.in_file_order()}


def restore_group_info_list(group_info_file_name: PathLike) -> list[int]:
    """Return the ranks whose checkpoints equal those of the rank that saved a group info file.

    MindSpore writes such a file to the path in the environment variable GROUP_INFO_FILE.

    Args:
        group_info_file_name: the file.

    Raises:
        ValueError: the file is missing, empty, or lists no ranks.

    >>> from pathlib import Path
    >>> count = Path("group_info.pb").write_bytes(bytes.fromhex("120408000804"))
    >>> ms.restore_group_info_list("group_info.pb")
    [0, 4]
    """
    from google.protobuf.message import DecodeError

    from reshard.strategy.proto import message_class

    path = Path(_path(group_info_file_name, "group_info_file_name"))
    content = read_small(path, "group info file", 1 << 26, StrategyError)
    if not content:
        raise StrategyError(
            f"{path} is empty", code="empty-file", facts=["expected a group info file; was saving it interrupted?"]
        )
    message: Any = message_class("mindspore.straspb.ParallelGroupMap")()
    try:
        message.ParseFromString(content)
    except (DecodeError, UnicodeDecodeError) as error:
        raise StrategyError(
            f"{path} is not a group info file", code="not-a-group-info-file", facts=[str(error)]
        ) from None
    if not message.HasField("ckpt_restore_rank_list"):
        raise StrategyError(
            f"{path} has no ckpt_restore_rank_list; it is truncated, or not a group info file",
            code="not-a-group-info-file",
        )
    return list(message.ckpt_restore_rank_list.dim)


def get_parameter_redundancy(layout_obj: Any, initial_rank: int | None = None) -> dict[str, tuple[Group, ...]]:
    """Return, for each parameter, the groups of ranks that hold the same block of it.

    Args:
        layout_obj: a strategy file, protobuf or JSON, or a directory of the files of a pipeline's ranks; a dict by name
            of the values of `build_searched_strategy`, of `Layout`, or of MindSpore's `parameter_layout_dict` (with
            slice shape and full shape of a parameter with an optimizer group, which give the number of pieces); or a
            network (anything with `parameters_and_names`), whose `parameter_layout_dict` is read if it was compiled in
            parallel; every process has other parameters whole (MindSpore takes all for whole).
        initial_rank: the first rank of the stage. By default the first of this process's stage. For a merged file it is
            the first rank of stage 0, by default 0, and every stage has its own ranks (MindSpore puts all stages on the
            same).

    Returns:
        The groups of each parameter, sorted by its name; `<stage>-<name>` of a merged file.

    Raises:
        ValueError: a layout contradicts itself, or does not give the optimizer's pieces.

    >>> get_parameter_redundancy({"bias": Layout.of([2, 2], [-1]), "weight": Layout.of([2, 2], [-1, 0])})
    {'bias': ((0, 1, 2, 3),), 'weight': ((0, 2), (1, 3))}
    """
    if isinstance(layout_obj, str | os.PathLike):
        layout_obj = build_searched_strategy(layout_obj)
    elif hasattr(layout_obj, "parameters_and_names"):
        everyone = (tuple(range(get_group_size())),)
        whole = dict.fromkeys((parameter.name for _, parameter in layout_obj.parameters_and_names()), everyone)
        compiled = getattr(layout_obj, "parameter_layout_dict", None) or {}
        groups = get_parameter_redundancy({name: compiled[name] for name in whole if name in compiled}, initial_rank)
        return dict(sorted((whole | groups).items()))
    if not isinstance(layout_obj, Mapping):
        raise TypeError(
            f"layout_obj is {type(layout_obj).__name__}; expected the name of a strategy file, a dict of layouts or a "
            "network"
        )
    staged = merged_names(layout_obj)
    groups_by_name = {}
    for name in sorted(layout_obj):
        try:
            layout = any_layout(layout_obj[name])
            if name in staged:
                first_rank = (initial_rank or 0) + staged[name][0] * layout.devices
            elif initial_rank is None:
                first_rank = get_rank() // layout.devices * layout.devices
            else:
                first_rank = initial_rank
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
    if not isinstance(param_redundancy_dict, Mapping):
        raise TypeError(
            f"param_redundancy_dict is a {type(param_redundancy_dict).__name__}; expected the dict that "
            "get_parameter_redundancy returns"
        )
    if not isinstance(keep_redundancy, int) or isinstance(keep_redundancy, bool):
        raise TypeError(f"keep_redundancy is a {type(keep_redundancy).__name__}; expected an int")
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

    The numbers of other ranks replace `rank_<r>` in the path, ascending; a path without it is returned itself if it
    exists. The rank is this process's (`get_rank`).

    MindSpore takes any file that exists, and `rank_12` for `rank_1`. Here a truncated file, as a failed node leaves it,
    is skipped with a warning; contents are not checked. A rank counts as equal only if it has the same block of every
    parameter but `accu_grads*` and `inputs*`, for any groups; MindSpore gives up if no group is within all others, and
    overlooks parameters whose groups it lost (`get_parameter_redundancy`).

    Args:
        cur_ckpt_path: the file that this rank needs.
        cur_strategy_path: the strategy file of this rank, or a merged one.

    Returns:
        The path of a file, or None.

    >>> ms.get_ckpt_path_with_strategy("src_checkpoints/rank_0/checkpoint_0.ckpt", "src_strategy.ckpt")
    'src_checkpoints/rank_0/checkpoint_0.ckpt'
    """
    path = _path(cur_ckpt_path, "cur_ckpt_path")
    rank = get_rank()
    names_rank = re.search(rf"rank_{rank}(?!\d)", path) is not None
    if names_rank and _is_complete(path):
        return path
    alike = None
    for name, groups in get_parameter_redundancy(cur_strategy_path).items():
        parameter = name.partition("-")[2] if MERGED_NAME.fullmatch(name) else name
        if parameter.startswith(("accu_grads", "inputs")):
            continue
        for group in groups:
            if rank in group:
                alike = set(group) if alike is None else alike & set(group)
    replicas = [_RANK.sub(f"rank_{number}", path) for number in sorted(alike or {rank})]
    return next((file for file in replicas if not (names_rank and file == path) and _is_complete(file)), None)


def any_layout(value: Any) -> Layout:
    """Return a layout from any form that `get_parameter_redundancy` takes."""
    if isinstance(value, Placed) or not isinstance(value, list | tuple):
        return layout_of(value)[0]
    if len(value) < 2:
        raise LayoutError(
            f"its layout is {value!r:.60}; expected (dev_matrix, tensor_map, slice_shape, …)", code="bad-value"
        )
    layout = Layout.of(value[0], value[1])
    group = value[5] if len(value) > 5 else ""
    if not group:
        return layout
    sizes = [prod(shape) for shape in (value[2], value[6] if len(value) > 6 else ())]
    pieces, rest = divmod(sizes[1], sizes[0] * prod(layout.splits)) if all(sizes) else (0, 0)
    if pieces < 2 or rest:
        raise LayoutError(
            f"its layout names the optimizer's group {group!r}; the number of its pieces is unknown from slice shape "
            f"{shape_text(value[2])}",
            code="unknown-count",
            hint="give the strategy file instead",
        )
    return replace(layout, opt_weight_shard_size=pieces)


def _is_complete(path: str) -> bool:
    """Return whether a checkpoint file exists and is complete by its header; warn if it is not complete."""
    if not Path(path).is_file():
        return False
    try:
        index_file(path)
    except SourceError as error:
        with Path(path).open("rb") as file:
            if int.from_bytes(file.read(4), "little") in MAGICS:
                return True  # encrypted: the contents cannot be read without the key
        reason = "; ".join([error.message, *error.facts])
        warnings.warn(f"passed over: {reason}", stacklevel=3)
        return False
    return True


def _path(value: object, argument: str) -> str:
    """Return the text of an argument that must be a path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{argument} is {type(value).__name__} {value!r:.60}; expected the path of a file")
    return os.fspath(value)

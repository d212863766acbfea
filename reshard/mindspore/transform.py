"""`transform_checkpoints` and related functions: transform a checkpoint from one sharding strategy to another.

Source: MindSpore 2.10 `parallel/checkpoint_transform.py`, `parallel/transform_safetensors.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.core.open import open as open_source
from reshard.errors import SourceError
from reshard.formats.ranks.options import RankFiles
from reshard.kits.files import by_name
from reshard.mindspore.arguments import (
    carry_out,
    check_model,
    check_order,
    directory_of,
    number_of,
    open_ranks,
    open_whole,
    planned,
    strategy_of,
    thread_count,
)
from reshard.mindspore.network import load_param_into_net
from reshard.mindspore.save_load import cipher_of, load_files, name_filter
from reshard.mindspore.strategy import path_of
from reshard.strategy.needed import needed_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.mindspore.arguments import PathLike, StrategyLike
    from reshard.mindspore.save_load import Prefixes
    from reshard.strategy.strategy import Strategy


_STATES = ("accu_grads", "adam_m", "adam_v")  # MindSpore ignores these when it compares the names of two strategies


def transform_checkpoints(
    src_checkpoints_dir: PathLike,
    dst_checkpoints_dir: PathLike,
    ckpt_prefix: str,
    src_strategy_file: StrategyLike | None = None,
    dst_strategy_file: StrategyLike | None = None,
    process_num: int = 1,
    output_format: str = "ckpt",
) -> None:
    """Transform a checkpoint from a source sharding strategy to a target sharding strategy.

    Target files are `rank_<r>/<ckpt_prefix><r>.<ext>`. If the source is one stage of a pipeline they are
    `rank_<r>/<ckpt_prefix><r>_part<stage>.<ext>`, for `load_segmented_checkpoints`. It is one stage if its strategy
    file says so (stage 1 and higher), if the directory has the ranks of further stages, or, for `.ckpt` files, if both
    strategies have one stage and the source's names (but for some states) are only some of the target's.

    Args:
        src_checkpoints_dir: the directory, with files such as `rank_0/a.ckpt` in it, or a unified set. Of several files
            in a rank directory, those of the newest step that every rank has are read.
        dst_checkpoints_dir: the directory for the results; it is created.
        ckpt_prefix: the beginning of the target files' names.
        src_strategy_file: the source's strategy; None if every source rank holds whole tensors.
        dst_strategy_file: the target's strategy; None for one rank of whole tensors.
        process_num: the number of threads, at most one a processor.
        output_format: `ckpt` or `safetensors`.

    Raises:
        ValueError: a missing rank that is needed, or, for the target of a whole model, a strategy of one stage of a
            pipeline.

    >>> ms.transform_checkpoints("src_checkpoints", "dst", "checkpoint_", "src_strategy.ckpt", "dst_strategy.ckpt")
    >>> len(ms.load_checkpoint("dst/rank_0/checkpoint_0.ckpt"))
    15
    """
    by_name(output_format)
    threads = thread_count("process_num", process_num)
    source_dir = directory_of("src_checkpoints_dir", src_checkpoints_dir)
    target_dir = directory_of("dst_checkpoints_dir", dst_checkpoints_dir, exists=False)
    before = strategy_of("src_strategy_file", src_strategy_file)
    after = strategy_of("dst_strategy_file", dst_strategy_file)
    source = open_ranks(source_dir, before)
    check_model(source, after)
    if before and after and source.file_format == "ckpt" and _is_sub_network(before, after):
        source = replace(source, opening=replace(source.opening, stage=before.stages.start))
    carry_out(planned(source, after, format=output_format, files=RankFiles(prefix=ckpt_prefix)), target_dir, threads)


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, PathLike],
    save_checkpoint_file_name: PathLike,
    src_strategy_file: StrategyLike | None = None,
    dst_strategy_file: StrategyLike | None = None,
) -> None:
    """Transform a checkpoint for one target rank, into a file of any name.

    Processes that write different files may share a directory, even the source's.

    Args:
        rank_id: the target rank.
        checkpoint_files_map: the files of the source ranks that are needed, by rank: see `rank_list_for_transform`. Of
            a de-duplicated source pass all files.
        save_checkpoint_file_name: the file to write, whose directory is created. Its name says the format: `.ckpt` or
            `.safetensors`.
        src_strategy_file: as for `transform_checkpoints`.
        dst_strategy_file: the target's strategy; None for whole tensors, for any rank.

    Raises:
        ValueError: the file name has another extension, the target has no such rank, the map lacks a source rank that
            is needed, or the path of a file names another rank than its key.

    >>> needed = ms.rank_list_for_transform(1, "src_strategy.ckpt", "dst_strategy.ckpt")
    >>> files = {rank: f"src_checkpoints/rank_{rank}/checkpoint_{rank}.ckpt" for rank in needed}
    >>> ms.transform_checkpoint_by_rank(1, files, "rank_1.ckpt", "src_strategy.ckpt", "dst_strategy.ckpt")
    >>> len(ms.load_checkpoint("rank_1.ckpt"))
    15
    """
    number_of("rank_id", rank_id, 0)
    target = path_of("save_checkpoint_file_name", save_checkpoint_file_name)
    extension = target.suffix.removeprefix(".")
    by_name(extension)
    files = {
        number_of("a key of checkpoint_files_map", rank, 0): path_of(f"checkpoint_files_map[{rank}]", file)
        for rank, file in dict(checkpoint_files_map).items()
    }
    check_order("checkpoint_files_map", files)
    before = strategy_of("src_strategy_file", src_strategy_file)
    after = strategy_of("dst_strategy_file", dst_strategy_file)
    if before is None:
        source = open_whole(files, several=len(files) > 1)
    else:
        source = open_source(files, strategy=before, stage="own", partial=True)
    check_model(source, after)
    result = planned(source, after, rank=rank_id, format=extension, files=RankFiles(name=target.name))
    carry_out(result, target.parent)


def rank_list_for_transform(
    rank_id: int, src_strategy_file: StrategyLike | None = None, dst_strategy_file: StrategyLike | None = None
) -> list[int]:
    """List the source ranks whose files `transform_checkpoint_by_rank` needs for one target rank.

    Files of these ranks have all tensors that both strategies name.

    The arguments are those of `transform_checkpoint_by_rank`.

    Returns:
        source ranks, descending; `[0]` without a source strategy.

    Raises:
        ValueError: the target has no such rank, or two layouts of a tensor contradict each other.

    >>> from reshard import Layout, Strategy
    >>> rows = Strategy.of({"w": Layout.of([4], [0, -1])})
    >>> rank_list_for_transform(0, rows, Strategy.of({"w": Layout.of([2], [0, -1])}))
    [1, 0]
    """
    number_of("rank_id", rank_id, 0)
    before = strategy_of("src_strategy_file", src_strategy_file)
    if before is None:
        return [0]
    after = strategy_of("dst_strategy_file", dst_strategy_file)
    return sorted(needed_ranks(before, after, rank_id), reverse=True)


convert_checkpoints = transform_checkpoints
convert_checkpoint_by_rank = transform_checkpoint_by_rank
rank_list_for_convert = rank_list_for_transform
"""MindSpore's newer names of the same functions."""


def load_segmented_checkpoints(
    ckpt_file_dir: PathLike,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: Prefixes = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: Prefixes = None,
    choice_func: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """Load all checkpoint files of a directory as one: the parts that sub-network conversion writes.

    `ckpt_file_dir` is the directory of one rank; the other arguments and the result are those of `load_checkpoint`.

    Raises:
        ValueError: nothing left to load, or files with different contents under one name.

    >>> from pathlib import Path
    >>> Path("parts").mkdir()
    >>> for name in ("a", "b"):
    ...     ms.save_checkpoint([{"name": name, "data": ms.Tensor([1.0])}], f"parts/{name}.ckpt")
    >>> sorted(ms.load_segmented_checkpoints("parts"))
    ['a', 'b']
    """
    directory = directory_of("ckpt_file_dir", ckpt_file_dir)
    files = [file for file in sorted(directory.iterdir()) if file.suffix in {".ckpt", ".safetensors"}]
    if not files:
        raise SourceError(f"{directory} has no .ckpt or .safetensors files", code="no-checkpoint")
    selects = name_filter(specify_prefix, filter_prefix, choice_func)
    cipher = cipher_of(dec_key, dec_mode, "ckpt")
    loaded = load_files([file for file in files if file.stat().st_size], cipher, selects)
    if net is not None:
        load_param_into_net(net, loaded, strict_load)
    return loaded


def _is_sub_network(before: Strategy, after: Strategy) -> bool:
    """Return whether the source is one stage of a pipeline by MindSpore's rule."""
    source, target = (
        {name for name in strategy.tensors if not name.startswith(_STATES)} for strategy in (before, after)
    )
    return len(before.stages) == len(after.stages) == 1 and source < target

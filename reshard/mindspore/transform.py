"""`transform_checkpoints` and related functions: transform a checkpoint from one sharding strategy to another.

Differences from MindSpore 2.10, apart from the errors' texts:

* Bytes are moved a few MB at a time (`reshard.plan`); no rank's file and no tensor is in memory as a whole.
* Every target rank gets its slices, whatever the layouts and the numbers of devices. A tensor that only the source
  strategy names is left out, and one that only the target strategy names is missing; the log `reshard.mindspore` warns
  of both. MindSpore copies the slice of some source rank.
* Replicas in the strategy may be missing, as long as one of each block exists.

Source: MindSpore 2.10 `parallel/checkpoint_transform.py`, `parallel/transform_safetensors.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from reshard.core.open import open as open_source
from reshard.core.plan.inputs import Selection
from reshard.core.plan.make import plan
from reshard.core.storage.local import local_store
from reshard.errors import Faults, SourceError, UsageError
from reshard.formats.ranks.options import RankFiles
from reshard.kits.files import index_file
from reshard.mindspore.arguments import (
    FORMATS,
    DirectoryError,
    carry_out,
    check_format,
    check_model,
    check_order,
    check_rank,
    check_target_stages,
    checked_format,
    mindspore_words,
    needed_text,
    open_ranks,
    open_whole,
    own_stage,
    path_of,
    strategy_of,
    target_directory,
    thread_count,
    warn_of_others,
)
from reshard.mindspore.network import load_param_into_net
from reshard.mindspore.save_load import cipher_of, name_filter, read_entries
from reshard.strategy.names import ranks_text
from reshard.strategy.needed import lacking_ranks, needed_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
    *,
    file_suffix: str | None = None,
) -> None:
    """Transform a checkpoint from a source sharding strategy to a target sharding strategy.

    Target files are `rank_<r>/<ckpt_prefix><r>.<ext>`. If the source is one stage of a pipeline they are
    `rank_<r>/<ckpt_prefix><r>_part<stage>.<ext>`, so that all stages can go to one target, one after the other, which
    `load_segmented_checkpoints` reads. The source is one stage if its strategy file says so (stage 1 and higher), if
    the directory has the ranks of further stages, or, by MindSpore's rule for `.ckpt` files, if both strategies have
    one stage and the source's names (but for accu_grads, adam_m and adam_v) are only some of the target's.

    Unlike MindSpore's it also writes safetensors from ckpt, takes a unified set or a single file as the source, and
    converts sub-networks of safetensors, to whole tensors and to pipelines too. De-duplicated sources are read like
    full ones.

    Args:
        src_checkpoints_dir: the directory, with files such as `rank_0/a.ckpt` in it, of one format. Of several files
            in a rank directory, those of the newest step that every rank has are read; an ambiguous choice is an error.
        dst_checkpoints_dir: the directory for the results; it is created.
        ckpt_prefix: the beginning of the target files' names.
        src_strategy_file: the source's strategy; None if every source rank holds whole tensors.
        dst_strategy_file: the target's strategy; None for one rank of whole tensors.
        process_num: the number of threads, at most one a processor. Each needs about 10 MB of memory.
        output_format: `ckpt` or `safetensors`.
        file_suffix: read the files whose names end with this, if a rank has several; not in MindSpore.

    Raises:
        ValueError: a missing rank that is needed, or, for the target of a whole model, a strategy of one stage of a
            pipeline.

    >>> ms.transform_checkpoints("src_checkpoints", "dst", "checkpoint_", "src_strategy.ckpt", "dst_strategy.ckpt")
    >>> len(ms.load_checkpoint("dst/rank_0/checkpoint_0.ckpt"))
    15
    """
    if not isinstance(ckpt_prefix, str):
        raise TypeError(f"ckpt_prefix is a {type(ckpt_prefix).__name__}; expected the beginning of a file name")
    check_format("output_format", output_format)
    threads = thread_count("process_num", process_num)
    source_dir = path_of("src_checkpoints_dir", src_checkpoints_dir)
    target_dir = target_directory("dst_checkpoints_dir", dst_checkpoints_dir)
    if not source_dir.exists():
        raise DirectoryError(
            f"src_checkpoints_dir {source_dir} does not exist",
            code="not-found",
            facts=["expected a directory of rank directories"],
        )
    before = strategy_of("src_strategy_file", src_strategy_file)
    after = strategy_of("dst_strategy_file", dst_strategy_file)
    stage: int | Literal["own"] = "own"
    if before and after and checked_format(source_dir) == "ckpt" and _is_sub_network(before, after):
        stage = before.stages.start
    source = open_ranks(source_dir, before, after, stage=stage, suffix=file_suffix)
    check_model(source, after)
    check_target_stages("dst_strategy_file", source, after)
    planned = plan(
        source,
        after,
        format=output_format,
        files=RankFiles(prefix=ckpt_prefix),
        stage=own_stage(after),
        selection=Selection(drop="*", allow_missing="*"),
        threads=threads,
    )
    carry_out(planned, target_dir, after, [src_strategy_file, dst_strategy_file], threads=threads)
    warn_of_others(target_dir, after.ranks if after else range(1))


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
            `.safetensors` (MindSpore writes `.ckpt` only).
        src_strategy_file: as for `transform_checkpoints`.
        dst_strategy_file: the target's strategy; None for whole tensors, for any rank.

    Raises:
        ValueError: the file name has another extension, the target has no such rank, the map lacks a source rank that
            is needed, or has one that the strategy does not have, or the path of a file names another rank than its
            key.

    >>> needed = ms.rank_list_for_transform(1, "src_strategy.ckpt", "dst_strategy.ckpt")
    >>> files = {rank: f"src_checkpoints/rank_{rank}/checkpoint_{rank}.ckpt" for rank in needed}
    >>> ms.transform_checkpoint_by_rank(1, files, "rank_1.ckpt", "src_strategy.ckpt", "dst_strategy.ckpt")
    >>> len(ms.load_checkpoint("rank_1.ckpt"))
    15
    """
    if not isinstance(checkpoint_files_map, Mapping):
        raise TypeError(
            f"checkpoint_files_map is a {type(checkpoint_files_map).__name__}; expected a dict of rank to file name"
        )
    check_rank("rank_id", rank_id)
    target = path_of("save_checkpoint_file_name", save_checkpoint_file_name)
    format = target.suffix.removeprefix(".")  # noqa: A001 -- the word of every such tool
    if format not in FORMATS:
        raise UsageError(
            f"save_checkpoint_file_name {target} does not end with .ckpt or .safetensors", code="wrong-extension"
        )
    files: dict[int, Path] = {}
    faults = Faults("checkpoint_files_map")
    for rank, file in checkpoint_files_map.items():
        check_rank("a key of checkpoint_files_map", rank)
        files[rank] = path_of(f"checkpoint_files_map[{rank}]", file)
        if not files[rank].is_file():
            faults.add(f"rank {rank}", f"{file} does not exist", code="not-found")
    faults.raise_if_any(SourceError)
    if not files:
        raise UsageError(
            "checkpoint_files_map is empty; expected the files of rank_list_for_transform's ranks", code="empty-value"
        )
    check_order("checkpoint_files_map", files)
    before = strategy_of("src_strategy_file", src_strategy_file)
    after = strategy_of("dst_strategy_file", dst_strategy_file)
    if before is not None:
        if unknown := sorted(set(files) - set(before.ranks)):
            raise UsageError(
                f"checkpoint_files_map has {ranks_text(unknown)}; src_strategy_file has ranks {before.ranks.start} to "
                f"{before.ranks.stop - 1}",
                code="no-such-rank",
                hint="give the strategy of all stages (merge_pipeline_strategys), or the files of those ranks",
            )
        for rank, needing in lacking_ranks(before, after, rank_id, files).items():
            faults.add(f"source rank {rank}", f"has no file; {needed_text(needing, [rank_id])}", code="missing-ranks")
        faults.raise_if_any(SourceError)
        with mindspore_words():
            source = open_source(files, strategy=before, stage="own", partial=True)
    else:
        source = open_whole(files)
    check_model(source, after)
    planned = plan(
        source,
        after,
        format=format,
        files=RankFiles(name=target.name),
        ranks=None if after is None else [rank_id],
        stage=own_stage(after),
        selection=Selection(drop="*", allow_missing="*"),
    )
    carry_out(planned, target.parent, after, [src_strategy_file, dst_strategy_file], rank=rank_id)


def rank_list_for_transform(
    rank_id: int, src_strategy_file: StrategyLike | None = None, dst_strategy_file: StrategyLike | None = None
) -> list[int]:
    """List the source ranks whose files `transform_checkpoint_by_rank` needs for one target rank.

    Files of these ranks have all tensors that both strategies name; MindSpore's list is often longer.

    Args:
        rank_id: the target rank.
        src_strategy_file: as for `transform_checkpoints`.
        dst_strategy_file: the target's strategy; None for whole tensors.

    Returns:
        source ranks, descending; `[0]` without a source strategy.

    Raises:
        ValueError: the target has no such rank, or two layouts of a tensor contradict each other.

    >>> from reshard import Layout, Strategy
    >>> rows = Strategy.of({"w": Layout.of([4], [0, -1])})
    >>> rank_list_for_transform(0, rows, Strategy.of({"w": Layout.of([2], [0, -1])}))
    [1, 0]
    """
    check_rank("rank_id", rank_id)
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

    Unlike MindSpore's it takes safetensors too, reads the parts in the order of their names, and loads them into the
    network together, so that the parameters of other parts are not reported as missing. A part may be an empty file.

    `ckpt_file_dir` is the directory of one rank; the other arguments and the result are those of `load_checkpoint`.

    Raises:
        ValueError: nothing left to load, or files with different contents under one name (MindSpore takes any of
            them).

    >>> from pathlib import Path
    >>> Path("parts").mkdir()
    >>> for name in ("a", "b"):
    ...     ms.save_checkpoint([{"name": name, "data": ms.Tensor([1.0])}], f"parts/{name}.ckpt")
    >>> sorted(ms.load_segmented_checkpoints("parts"))
    ['a', 'b']
    """
    directory = path_of("ckpt_file_dir", ckpt_file_dir)
    if not directory.is_dir():
        raise DirectoryError(f"ckpt_file_dir {directory} is not a directory", code="not-a-directory")
    parts = {format: sorted(directory.glob(f"*.{format}")) for format in FORMATS}  # noqa: A001 -- as above
    if all(parts.values()):
        raise SourceError(
            f"{directory} holds both .ckpt and .safetensors files", code="mixed-formats", hint="move one kind away"
        )
    files = parts["ckpt"] or parts["safetensors"]
    if not files:
        raise SourceError(
            f"{directory} holds no checkpoint file; expected files that end with .ckpt or .safetensors",
            code="no-checkpoint",
        )
    selects = name_filter(specify_prefix, filter_prefix, choice_func)
    cipher = cipher_of(dec_key, dec_mode, "ckpt", "dec")
    store = local_store() if cipher is None else cipher.store()
    loaded: dict[str, Any] = {}
    files_by_name: dict[str, Path] = {}
    for file in files:
        if not file.stat().st_size:
            continue
        path = os.fspath(file)
        part = read_entries(path, index_file(path, store=store), store, selects)
        for name in part:
            if name in loaded and not _are_same(loaded[name], part[name]):
                raise SourceError(
                    f"{name!r} in {path} differs from that in {files_by_name[name]}",
                    code="files-disagree",
                    facts=["expected parts of one checkpoint"],
                    hint="move away files of others, or choose with specify_prefix, filter_prefix or choice_func",
                )
        loaded |= part
        files_by_name |= dict.fromkeys(part, file)
    if not loaded:
        raise UsageError(
            f"nothing is left to load of the {len(files)} files of {directory}",
            code="no-tensors",
            hint="check filter_prefix, specify_prefix and choice_func",
        )
    if net is not None:
        load_param_into_net(net, loaded, strict_load)
    return loaded


def _are_same(first: Any, second: Any) -> bool:
    """Return whether two entries, text or parameters, are equal bit for bit."""
    if isinstance(first, str) or isinstance(second, str):
        return bool(type(first) is type(second) and first == second)
    return (first.kind, first.shape) == (second.kind, second.shape) and first.array.tobytes() == second.array.tobytes()


def _is_sub_network(before: Strategy, after: Strategy) -> bool:
    """Return whether the source is one stage of a pipeline by MindSpore's rule."""
    source, target = (
        {name for name in strategy.tensors if not name.startswith(_STATES)} for strategy in (before, after)
    )
    return len(before.stages) == len(after.stages) == 1 and source < target

"""`ckpt_to_safetensors` and `safetensors_to_ckpt`: write the same tensors in the other format, rank by rank.

Source: MindSpore 2.10 `train/serialization.py` (`_convert_checkpoint_file`, `_gather_all_tasks`).
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.core.model.checkpoint import Checkpoint
from reshard.core.model.facts import Opening
from reshard.core.plan.inputs import Selection
from reshard.core.plan.make import plan_files
from reshard.core.storage.places import as_place
from reshard.errors import SourceError, names
from reshard.kits.ckpt import MAP_PARAMETER, map_parameters
from reshard.kits.headers import indexed
from reshard.mindspore.arguments import carry_out, directory_of, thread_count
from reshard.mindspore.strategy import path_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.mindspore.arguments import PathLike

_log = logging.getLogger("reshard.mindspore")


def ckpt_to_safetensors(
    file_path: PathLike,
    save_path: PathLike | None = None,
    name_map: Mapping[str, str] | None = None,
    file_name_regex: str | None = None,
    processes_num: int = 1,
) -> None:
    """Convert `.ckpt` files to safetensors.

    Text entries are kept in the metadata, from which they are loaded. The CRC of a file is dropped, as by MindSpore.

    Args:
        file_path: a `.ckpt` file, or a directory whose `rank*` directories hold some.
        save_path: the directory for the results, or for their rank directories; by default that of the sources.
        name_map: old name to new name; all apply at once. (`load_distributed_checkpoint` has it the other way round.)
        file_name_regex: convert only files whose names contain a match.
        processes_num: the number of threads.

    Raises:
        ValueError: no file to convert, or the name map gives one name to two tensors.

    >>> ms.ckpt_to_safetensors("src_checkpoints", "converted")
    >>> len(ms.load_checkpoint("converted/rank_0/checkpoint_0.safetensors", format="safetensors"))
    15
    """
    _convert(file_path, save_path, name_map, file_name_regex, processes_num, "ckpt", "safetensors")


def safetensors_to_ckpt(
    file_path: PathLike,
    save_path: PathLike | None = None,
    name_map: Mapping[str, str] | None = None,
    file_name_regex: str | None = None,
    processes_num: int = 1,
) -> None:
    """Convert safetensors files to `.ckpt`, tensors in the order of their old names, as MindSpore does.

    Arguments and errors: as for `ckpt_to_safetensors`. A `.ckpt` file has no place for metadata.

    >>> ms.ckpt_to_safetensors("src_checkpoints", "converted")
    >>> ms.safetensors_to_ckpt("converted", "back")
    >>> len(ms.load_checkpoint("back/rank_0/checkpoint_0.ckpt"))
    15
    """
    _convert(file_path, save_path, name_map, file_name_regex, processes_num, "safetensors", "ckpt")


def _convert(
    file_path: PathLike,
    save_path: PathLike | None,
    name_map: Mapping[str, str] | None,
    file_name_regex: str | None,
    processes_num: int,
    old: str,
    new: str,
) -> None:
    source = path_of("file_path", file_path)
    threads = thread_count("processes_num", processes_num)
    below = source if source.is_dir() else source.parent
    found = sorted(source.glob(f"rank*/*.{old}")) if source.is_dir() else [source]
    paths = [path for path in found if re.search(file_name_regex or "", path.name) and path.suffix == f".{old}"]
    if not paths:
        raise SourceError(
            f"{source} has no file to convert",
            code="no-checkpoint",
            facts=[f"expected a .{old} file, or rank directories of such files"],
            hint="check file_name_regex" if found else "",
        )
    indexed_files, ranks = indexed(dict(enumerate([as_place(path)] for path in paths)), None)
    files, selections = [], []
    for file in indexed_files:
        for name in map_parameters(file.path, file.index):
            _log.warning("%s: %r %s; it is left out", file.path, name, MAP_PARAMETER)
        entries = file.index.entries if old == "ckpt" else dict(sorted(file.index.entries.items()))
        files.append(replace(file, index=file.index._replace(entries=entries)))
        new_names = {name: name_map.get(name, name) for name in entries} if name_map else {}
        selections.append(Selection(name_map=new_names, drop="*"))
    unused = set(name_map or {}).difference(*(file.index.entries for file in files))
    if unused:
        _log.warning("name_map: no file has %s", names(map(repr, sorted(unused))))
    result = plan_files(
        Checkpoint(str(source), {}, tuple(files), ranks, opening=Opening(by_file=True)),
        [str(path.relative_to(below).with_suffix(f".{new}")) for path in paths],
        new,
        selections=selections,
        threads=threads,
    )
    carry_out(result, below if save_path is None else directory_of("save_path", save_path, exists=False), threads)

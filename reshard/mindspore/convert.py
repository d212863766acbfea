"""`ckpt_to_safetensors` and `safetensors_to_ckpt`: write the same tensors in the other format, rank by rank.

A conversion is one run: files get their names when all are complete. Contents are copied a few MB at a time, so that a
file may be larger than memory; MindSpore loads each whole.

Source: MindSpore 2.10 `train/serialization.py` (`_convert_checkpoint_file`, `_gather_all_tasks`).
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.core.model.checkpoint import Checkpoint
from reshard.core.model.facts import Opening
from reshard.core.plan.inputs import Selection
from reshard.core.plan.make import plan_files
from reshard.core.run.run import run
from reshard.core.run.settings import RunOptions
from reshard.core.storage.cipher import Cipher
from reshard.core.storage.places import as_place
from reshard.errors import SourceError, UsageError, names
from reshard.kits.ckpt import MAP_PARAMETER, map_parameters
from reshard.kits.headers import indexed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.model.checkpoint import SourceFile

_log = logging.getLogger("reshard.mindspore")


def ckpt_to_safetensors(
    file_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str] | None = None,
    name_map: Mapping[str, str] | None = None,
    file_name_regex: str | None = None,
    processes_num: int = 1,
    *,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
) -> None:
    """Convert `.ckpt` files to safetensors.

    Unlike MindSpore's, it takes encrypted files with their key, and keeps text entries (in the metadata, from which
    `safetensors_to_ckpt` and `load_checkpoint` restore them). Like MindSpore's, it drops the CRC of a file.

    Args:
        file_path: a `.ckpt` file, or a directory whose `rank*` directories hold some.
        save_path: the directory for the results; by default they are written next to the sources. If the source is a
            directory, the rank directories are created below it.
        name_map: old name to new name; other tensors keep theirs. All apply at once, so two may be swapped. (The map of
            `load_distributed_checkpoint` goes from the network's name to the file's.)
        file_name_regex: convert only files whose names contain a match.
        processes_num: the number of threads.
        dec_key: the key of encrypted files; not in MindSpore.
        dec_mode: their cipher.

    Raises:
        ValueError: no file to convert, or the name map gives one name to two tensors.

    >>> ms.ckpt_to_safetensors("src_checkpoints", "converted")
    >>> len(ms.load_checkpoint("converted/rank_0/checkpoint_0.safetensors", format="safetensors"))
    15
    """
    cipher = None if dec_key is None else Cipher(dec_mode, dec_key)
    _convert(file_path, save_path, name_map, file_name_regex, processes_num, "safetensors", cipher)


def safetensors_to_ckpt(
    file_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str] | None = None,
    name_map: Mapping[str, str] | None = None,
    file_name_regex: str | None = None,
    processes_num: int = 1,
) -> None:
    """Convert safetensors files to `.ckpt`, tensors in the order of their old names, as MindSpore does.

    Arguments and errors: as for `ckpt_to_safetensors`. A `.ckpt` file has no place for metadata.

    Raises:
        ValueError: also if MindSpore lacks the dtype of a tensor.

    >>> ms.ckpt_to_safetensors("src_checkpoints", "converted")
    >>> ms.safetensors_to_ckpt("converted", "back")
    >>> len(ms.load_checkpoint("back/rank_0/checkpoint_0.ckpt"))
    15
    """
    _convert(file_path, save_path, name_map, file_name_regex, processes_num, "ckpt", None)


def _convert(
    file_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str] | None,
    name_map: Mapping[str, str] | None,
    file_name_regex: str | None,
    processes_num: int,
    format: str,  # noqa: A002 -- as above
    cipher: Cipher | None,
) -> None:
    source, extension = Path(file_path), {"safetensors": ".ckpt", "ckpt": ".safetensors"}[format]
    _check(source, save_path, name_map, processes_num)
    try:
        pattern = re.compile(file_name_regex or "")
    except re.error as error:
        raise UsageError(
            f"file_name_regex {file_name_regex!r} is not a regular expression", code="bad-pattern", facts=[str(error)]
        ) from None
    if source.is_dir():
        files_by_directory = _rank_files(source, Path(save_path or source), pattern, extension, f".{format}")
    else:
        if source.suffix != extension:
            raise UsageError(f"{source} does not end with {extension}", code="wrong-extension")
        if not pattern.search(os.fspath(file_path)):
            raise UsageError(
                f"the name of {source} does not match file_name_regex {file_name_regex!r}", code="no-match"
            )
        files_by_directory = {Path(save_path or source.parent): {f"{source.stem}.{format}": source}}
    tensors: set[str] = set()
    for directory, sources in files_by_directory.items():
        files, ranks = indexed(dict(enumerate([as_place(path)] for path in sources.values())), cipher)
        files = tuple(_in_order(file) for file in files)
        for file in files:
            tensors.update(file.index.entries)
            for name in map_parameters(file.path, file.index):
                _log.warning("%s: %r %s; it is left out", file.path, name, MAP_PARAMETER)
        planned = plan_files(
            Checkpoint(str(source), {}, files, ranks, coding=cipher, opening=Opening(by_file=True)),
            list(sources),
            format,
            selections=[_selection(file, name_map or {}) for file in files],
            threads=processes_num,
        )
        run(planned, directory, RunOptions(threads=processes_num, overwrite=True, ledger=False))
    unused = [old for old in name_map or {} if old not in tensors]
    if unused:
        _log.warning("name_map: no file has %s", names(map(repr, unused)))


def _in_order(file: SourceFile) -> SourceFile:
    """Order the tensors of a file as MindSpore does: those of safetensors by name."""
    if file.index.format == "ckpt":
        return file
    return replace(file, index=file.index._replace(entries=dict(sorted(file.index.entries.items()))))


def _selection(file: SourceFile, name_map: Mapping[str, str]) -> Selection:
    """Select everything in a file, under new names; optimizer states do not follow weights, so list all."""
    new_names = {old: name_map.get(old, old) for old in file.index.entries} if name_map else {}
    return Selection(name_map=new_names, drop=("*",))


def _check(source: Path, save_path: object, name_map: object, processes_num: object) -> None:
    if not source.exists():
        raise SourceError(
            f"{source} does not exist", code="not-found", facts=["expected a file or a directory of rank directories"]
        )
    if save_path is not None:
        if not isinstance(save_path, str | os.PathLike):
            raise UsageError(f"save_path is a {type(save_path).__name__}; expected a directory", code="wrong-type")
        path = Path(save_path)
        if path.is_file() or (path.suffix and not path.is_dir()):
            raise UsageError(
                f"save_path {path} is not a directory",
                code="not-a-directory",
                facts=["a directory whose name has a dot must exist already"],
            )
    if name_map is not None and not (
        isinstance(name_map, dict) and all(isinstance(name, str) for item in name_map.items() for name in item)
    ):
        raise UsageError("name_map is not a dict of old names to new names", code="bad-name-map")
    if not isinstance(processes_num, int) or processes_num < 1:
        raise UsageError(f"processes_num is {processes_num!r}; expected a number from 1 on", code="out-of-range")


def _rank_files(
    source: Path, target: Path, pattern: re.Pattern[str], old: str, new: str
) -> dict[Path, dict[str, Path]]:
    """Map the files to convert by target directory and by the target's path below it.

    A target rank directory may be a link to another place; its files are then below another directory.
    """
    ranks = sorted(path for path in source.iterdir() if path.name.startswith("rank") and path.is_dir())
    if not ranks:
        raise SourceError(
            f"{source} has no directories whose names begin with 'rank'",
            code="no-checkpoint",
            facts=["expected rank_0 and so on"],
        )
    files: dict[Path, dict[str, Path]] = {}
    for rank in ranks:
        directory = (target / rank.name).resolve()
        for path in sorted(rank.iterdir()):
            if path.suffix == old and pattern.search(path.name):
                files.setdefault(directory.parent, {})[f"{directory.name}/{path.stem}{new}"] = path
    if not files:
        raise SourceError(
            f"the {len(ranks)} rank directories of {source} have no file to convert",
            code="no-checkpoint",
            facts=[
                f"expected names that end with {old}" + (f" and contain {pattern.pattern!r}" if pattern.pattern else "")
            ],
        )
    return files

"""`ckpt_to_safetensors` and `safetensors_to_ckpt`: the same tensors in the other format, rank by rank.

Contents are copied a few MB at a time, so a file may be larger than memory; MindSpore loads each whole.

Source: MindSpore 2.10 `train/serialization.py` (`_convert_checkpoint_file`, `_gather_all_tasks`).
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import Faults, SourceError, UsageError, names
from reshard.formats import by_name
from reshard.formats.entries import Content
from reshard.mindspore.save_load import read_index, source_store
from reshard.mindspore.write import FileContents, write_file
from reshard.storage.cipher import Cipher
from reshard.storage.threads import results

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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

    Unlike MindSpore's, it takes encrypted files with their key, and keeps text entries (in the metadata, from where
    `safetensors_to_ckpt` and `load_checkpoint` take them back). As MindSpore's, it drops the CRC of a file.

    Args:
        file_path: a `.ckpt` file, or a directory whose `rank*` directories hold some.
        save_path: the directory for the results; by default they are put beside the sources. From a directory, the
            rank directories are made below it.
        name_map: old name to new name; those of other tensors stay. All apply at once, so two may be swapped. (That of
            `load_distributed_checkpoint` goes from the network's name to the file's.)
        file_name_regex: convert only files whose name it is found in.
        processes_num: how many files are converted at once: threads here, because copying releases the interpreter.
        dec_key: the key of encrypted files, with the `crypto` extra; not in MindSpore.
        dec_mode: `AES-GCM`, `AES-CBC` or `SM4-CBC`.

    Raises:
        ValueError: no such file or directory, nothing in it to convert, `save_path` is no directory, the name map gives
            one name to two tensors, a file is corrupt, encrypted, or not with this key.
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

    Arguments and errors are those of `ckpt_to_safetensors`. A `.ckpt` file has no place for metadata.

    Raises:
        ValueError: as `ckpt_to_safetensors`; and where a tensor is of a dtype that MindSpore does not have.
    """
    _convert(file_path, save_path, name_map, file_name_regex, processes_num, "ckpt", None)


def convert_file(
    source_path: str,
    target_path: str,
    format: str,  # noqa: A002 -- the word of every such tool
    *,
    name_map: Mapping[str, str] | None = None,
    cipher: Cipher | None = None,
) -> set[str]:
    """Write the tensors of one checkpoint file to another, in any format; return the names that are in the source.

    Args:
        source_path: the file to read, whose format is told by its content.
        target_path: the file to write.
        format: `ckpt` or `safetensors`.
        name_map: old name to new name.
        cipher: the key of the source, if it is encrypted.

    Raises:
        UsageError: the name map gives one name to two tensors, or a dtype does not exist in the format.
        SourceError: the source is corrupt, encrypted, or not with this key.
    """
    store = source_store(cipher)
    index = read_index(source_path, store)
    for name, reason in index.unreadable:
        _log.warning("%s: %r %s; it is left out", source_path, name, reason)
    old_names = {new: old for old, new in _renamed(index.entries, name_map or {}, source_path).items()}
    if index.format != "ckpt":
        old_names = dict(sorted(old_names.items(), key=lambda item: item[1]))
    entries = {new: index.entries[old] for new, old in old_names.items()}
    contents = [Content(name, entry.dtype, entry.shape, entry.text) for name, entry in entries.items()]
    layout = by_name(format).lay_out(contents, {"format": "ms", **dict(index.metadata)})
    write_file(target_path, layout, FileContents(source_path, entries, store))
    return set(index.entries)


def _renamed(old_names: Iterable[str], name_map: Mapping[str, str], path: str) -> dict[str, str]:
    """Return the new name of every tensor.

    Raises:
        UsageError: two tensors would have one name.
    """
    found: dict[str, list[str]] = {}
    for old in old_names:
        found.setdefault(name_map.get(old, old), []).append(old)
    faults = Faults(path)
    for new, olds in found.items():
        if len(olds) > 1:
            faults.add(f"name {new!r}", f"is that of {names(map(repr, olds))} after the name map; expected one")
    faults.raise_if_any(UsageError)
    return {olds[0]: new for new, olds in found.items()}


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
        raise UsageError(f"file_name_regex {file_name_regex!r} is no regular expression: {error}") from None
    if source.is_dir():
        pairs = _pairs(source, Path(save_path or source), pattern, extension, f".{format}")
    else:
        if source.suffix != extension:
            raise UsageError(f"{source}: does not end with {extension}")
        if not pattern.search(os.fspath(file_path)):
            raise UsageError(f"{source}: file_name_regex {file_name_regex!r} is not found in its name")
        pairs = [(source, Path(save_path or source.parent) / f"{source.stem}.{format}")]

    def convert(pair: tuple[Path, Path]) -> set[str]:
        return convert_file(str(pair[0]), str(pair[1]), format, name_map=name_map, cipher=cipher)

    found = set[str]().union(*results(convert, pairs, processes_num))
    unused = [old for old in name_map or {} if old not in found]
    if unused:
        _log.warning("name_map: no file has %s", names(map(repr, unused)))


def _check(source: Path, save_path: object, name_map: object, processes_num: object) -> None:
    if not source.exists():
        raise SourceError(f"{source}: does not exist; expected a file or a directory of rank directories")
    if save_path is not None:
        if not isinstance(save_path, str | os.PathLike):
            raise UsageError(f"save_path is a {type(save_path).__name__}; expected a directory")
        path = Path(save_path)
        if path.is_file() or (path.suffix and not path.is_dir()):
            raise UsageError(f"save_path {path} is no directory (one whose name has a dot must be there already)")
    if name_map is not None and not (
        isinstance(name_map, dict) and all(isinstance(name, str) for item in name_map.items() for name in item)
    ):
        raise UsageError("name_map is no dict of old names to new names")
    if not isinstance(processes_num, int) or processes_num < 1:
        raise UsageError(f"processes_num is {processes_num!r}; expected a number from 1 on")


def _pairs(source: Path, target: Path, pattern: re.Pattern[str], old: str, new: str) -> list[tuple[Path, Path]]:
    """Return the files of the rank directories that are to be converted, and what they become."""
    ranks = sorted(path for path in source.iterdir() if path.name.startswith("rank") and path.is_dir())
    if not ranks:
        raise SourceError(f"{source}: has no directories whose names begin with 'rank'; expected rank_0 and so on")
    pairs = [
        (path, target / rank.name / f"{path.stem}{new}")
        for rank in ranks
        for path in sorted(rank.iterdir())
        if path.suffix == old and pattern.search(path.name)
    ]
    if not pairs:
        raise SourceError(
            f"{source}: its {len(ranks)} rank directories have no file to convert; expected names that end with {old}"
            + (f" and contain {pattern.pattern!r}" if pattern.pattern else "")
        )
    return pairs

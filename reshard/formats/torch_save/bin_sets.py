"""Open sets of whole tensors in several files of `torch.save`, as Hugging Face's `pytorch_model-00001-of-00002.bin`.

The index names the file of each tensor, and is compared with the files. Without an index, all numbered files have to be
there.

Sources: transformers 4.57 `modeling_utils.py` (`save_pretrained` with `safe_serialization=False`).
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Literal

from reshard.core.storage.base import COPY_AGAIN
from reshard.errors import SourceError, names
from reshard.formats.torch_save.names import SAVED_SET
from reshard.formats.torch_save.saves import File, joined, read_files
from reshard.kits.indexes import SAVED_INDEX, check_members, read_index

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place

_MOVE = "move the files of one set to another directory"
_NUMBERED = re.compile(r"(?P<before>(?:.+[-_.])?)(?P<number>\d{5,9})-of-(?P<count>\d{5,9})(?P<after>\.\w+)", re.DOTALL)


def open_set(directory: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open a set.

    Args:
        directory: the directory.
        listing: the names of the files in it.
        contents: compare samples of replicas.

    Raises:
        SourceError: files are missing or of several sets, the index is not valid or disagrees with the files, or a file
            is not valid.
    """
    indexes = sorted(filter(SAVED_INDEX.fullmatch, listing))
    members = sorted(name for name in listing if SAVED_SET.files.fullmatch(name) and name not in indexes)
    index = read_index(directory, indexes)  # which refuses several
    weight_map: Mapping[str, str] = {}
    if index is None:
        _check_numbers(directory, members)
        locations = [directory / name for name in members]
    else:
        locations, weight_map = index
        if others := sorted({*members}.difference(location.name for location in locations)):
            raise SourceError(
                f"{directory} has {names(others, most=3)}, which {indexes[0]} does not name",
                code="several-checkpoints",
                hint=_MOVE,
            )
    files = read_files([File(location, 0, "") for location in locations], 1)
    by_file = {
        location.name: [*read.tensors, *read.refused, *read.objects]
        for location, read in zip(locations, files, strict=True)
    }
    check_members(directory, weight_map, by_file)
    return joined(directory, files, [0] * len(files), contents=contents)


def _check_numbers(directory: Place, members: Sequence[str]) -> None:
    """Refuse numbered files of several sets, or a set that lacks a file."""
    matches = [match for match in map(_NUMBERED.fullmatch, members) if match]
    families = {(match["before"], match["count"], match["after"]) for match in matches}
    numbers = sorted(int(match["number"]) for match in matches)
    if len(families) != 1 or len({*numbers}) < len(members):
        raise SourceError(
            f"{directory} has files of several sets, {names(members, most=3)}", code="several-checkpoints", hint=_MOVE
        )
    count = int(matches[0]["count"])
    if missing := list(islice((number for number in range(1, count + 1) if number not in {*numbers}), 64)):
        fault = f"{directory} has no file {names(missing)} of {count}, and no index"
        raise SourceError(fault, code="missing-shards", hint=COPY_AGAIN)
    if count < len(numbers):
        raise SourceError(f"{directory} has file {numbers[-1]} of {count}", code="several-checkpoints", hint=_MOVE)

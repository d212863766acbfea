"""Find the files of `torch.save` that are a checkpoint by themselves, by their contents."""

from __future__ import annotations

from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING

from reshard.errors import SourceError
from reshard.formats.directories import SAVE_EXTENSIONS, TRAINER_FILES
from reshard.formats.ranks.directories import EXTENSIONS, RANK_DIRECTORY
from reshard.kits.files import is_known, is_save

if TYPE_CHECKING:
    from collections.abc import Collection

    from reshard.core.storage.places import Place


def is_single_save(path: Place) -> bool:
    """Return whether a file is of `torch.save`: by its first bytes, or damaged, by its name."""
    if not path.is_file():
        return False
    return is_save(str(path)) or (path.suffix in SAVE_EXTENSIONS and not is_known(str(path)))


def lone_save(directory: Place, listing: Collection[str]) -> str | None:
    """Return the name of the file of `torch.save` in a directory without another checkpoint, or None."""
    names = [name for name in listing if PurePath(name).suffix in SAVE_EXTENSIONS | EXTENSIONS]
    weights = [name for name in names if not TRAINER_FILES.fullmatch(name)]
    if len(weights) != 1 or any(map(RANK_DIRECTORY.fullmatch, listing)):
        return None
    with suppress(SourceError, OSError):  # a directory of this name
        return weights[0] if is_save(str(directory / weights[0])) else None
    return None

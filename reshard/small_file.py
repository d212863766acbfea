"""Writing what is no checkpoint: strategy files, manifests and saved plans, each whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING

from reshard.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable


def refuse_existing(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raise `TargetError` where a file would be replaced that nobody has said may be, or what is there is no file."""
    _refuse_others(Path(path))
    if os.path.lexists(path) and not overwrite:
        raise TargetError(
            f"{path}: is there already; choose another name, or replace it with --overwrite (overwrite=True)"
        )


def write_whole(place: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a small file, which appears under its name only when it is complete.

    Args:
        place: its name.
        content: all of it, or piece after piece.

    Raises:
        TargetError: it cannot be written, or its name is that of a directory, a device or a pipe.
    """
    _refuse_others(place)
    beside = place.with_name(place.name + ".partial")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)  # what is there may be a link to elsewhere
        with beside.open("xb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())  # or the name may be there after a power failure, and nothing in the file
        beside.replace(place)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise TargetError(f"{place}: cannot be written: {error.strerror or error}") from None


def _refuse_others(place: Path) -> None:
    try:
        mode = place.stat().st_mode
    except OSError:  # it is not there, or writing tells why it cannot be
        return
    if S_ISDIR(mode):
        raise TargetError(f"{place}: is a directory; expected the name of a file")
    if not S_ISREG(mode):
        raise TargetError(f"{place}: is no regular file but a pipe or a device; choose another name")

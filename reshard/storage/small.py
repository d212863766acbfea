"""Writing what is no checkpoint: strategy files, manifests and saved plans, each whole or not at all.

Nothing is written over what is read for it, by whatever name; that is so of checkpoints too (`refuse_inputs`).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from posixpath import normpath
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING

from reshard.errors import Option, TargetError, Text
from reshard.storage.remote import RemotePath, as_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    AnyName = str | os.PathLike[str] | RemotePath

_SCHEMES = {"s3a": "s3", "gcs": "gs"}  # two names of one thing


def refuse_existing(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raise `TargetError` where a file would be replaced that nobody has said may be, or what is there is no file."""
    _refuse_others(Path(path))
    if os.path.lexists(path) and not overwrite:
        raise TargetError(
            Text(f"{path}: is there already; choose another name, or replace it with ", Option("overwrite"))
        )


def refuse_inputs(
    outputs: Iterable[AnyName],
    inputs: Iterable[AnyName],
    what: str = "read by this command",
    advice: str = "choose another",
) -> None:
    """Refuse to write what is read: by another spelling, through links, or under the name of an unfinished file.

    Args:
        outputs: what is to be written; each is made as `NAME.partial` first.
        inputs: what is read for it.
        what: what that is, for the message.
        advice: what to do next.

    Raises:
        TargetError: an output is an input.
    """
    read = {identity: path for path in inputs for identity in _identities(path)}
    for output in outputs if read else ():
        for name in (output, f"{output}.partial"):
            for path in (read[identity] for identity in _identities(name) if identity in read):
                first = "" if name is output else f"is written as {name} first, which "
                called = "" if os.path.abspath(str(path)) == os.path.abspath(str(name)) else f", {path}"
                raise TargetError(f"{output}: {first}is {what}{called}; {advice}")


def is_within(path: AnyName, directory: AnyName) -> bool:
    """Return whether a path is a directory or below it, by whatever spelling, and wherever links lead."""
    place, above = as_path(path), as_path(directory)
    if isinstance(place, RemotePath) or isinstance(above, RemotePath):
        return f"{_url_of(place)}/".startswith(f"{_url_of(above)}/")
    real = Path(os.path.realpath(place))
    known = _identities(above)
    return any(not known.isdisjoint(_identities(each)) for each in (real, *real.parents))


def _identities(path: AnyName) -> set[object]:
    """Return what is the same of all names of one file: where it is without links, and what the system calls it."""
    place = as_path(path)
    if isinstance(place, RemotePath):
        return {_url_of(place)}
    found: set[object] = {os.path.realpath(place)}
    with suppress(OSError, ValueError):  # it is not there, or no path at all
        status = place.stat()
        found.add((status.st_dev, status.st_ino))
    return found


def _url_of(place: Path | RemotePath) -> str:
    scheme, _, rest = str(place).rpartition("://")
    return f"{_SCHEMES.get(scheme, scheme)}:{normpath(rest.strip('/'))}"


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

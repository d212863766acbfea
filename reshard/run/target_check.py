"""What a target must not be: the source, a way out of its directory, a place for what would be taken for its own."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from reshard.errors import TargetError, names
from reshard.formats.directories import is_of_a_set
from reshard.formats.target_files import SomeFiles
from reshard.source.records import DIRECTORY
from reshard.storage.base import PARTIAL
from reshard.storage.places import RemotePath, as_place, can
from reshard.storage.remote import forget_listings
from reshard.storage.small import refuse_inputs

if TYPE_CHECKING:
    from reshard.plan.plan import Plan


def check_target(plan: Plan, root: str) -> None:
    """Refuse a target that no option of a run makes right; nothing is made or changed.

    Args:
        plan: what goes there.
        root: a URL, or a local path without links in it.

    Raises:
        TargetError: it is a file, has a directory where a file goes, a source file, or a link that leads out of it; or,
            where the files must be alone, others; or, where they are a unified set, files of another.
        SourceError: the target's storage cannot be reached.
    """
    below = root.rstrip("/") + "/"
    sources = {str(as_place(file.path).real()) for file in plan.source.files}
    if any(file.last for file in plan.files) and any(path.startswith(below) for path in sources):
        raise TargetError(
            f"{root}: holds the source; beside it, the index of a unified set would hide it; choose another"
        )
    written, read = [below + file.path for file in plan.files], [file.path for file in plan.source.files]
    refuse_inputs(written, read, "one of the source files", "choose another target directory")
    for file in plan.files:
        path = below + file.path
        resolved = str(as_place(path).real())
        if not resolved.startswith(below):
            raise TargetError(f"{path}: leads out of the target directory, to {resolved}; remove the link")
    if can(root).positioned:  # where there are directories
        _check_kinds(plan, root)
    if plan.alone:
        _check_alone(plan, root)
    elif any(file.last for file in plan.files):
        _check_one_set(plan, root)


def _check_kinds(plan: Plan, root: str) -> None:
    """Refuse a file where a directory has to be, and a directory where a file has to."""
    place = root
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    for directory in (place, *sorted({os.path.dirname(f"{root}/{file.path}") for file in plan.files})):
        if os.path.lexists(directory) and not os.path.isdir(directory):
            raise TargetError(f"{directory}: is not a directory; expected one for the target")
    for file in plan.files:
        if os.path.isdir(f"{root}/{file.path}"):
            raise TargetError(f"{root}/{file.path}: is a directory, and a file is to be there; move it away")


def _check_alone(plan: Plan, root: str) -> None:
    """Refuse a directory in which something else would be taken for a part of what is written."""
    planned = {file.path for file in plan.files}
    if not can(root).positioned:
        found = _files_at(root)
    else:
        found = [os.path.relpath(os.path.join(where, name), root) for where, _, some in os.walk(root) for name in some]
    other = [
        path for path in found if path.removesuffix(PARTIAL) not in planned and not path.startswith(f"{DIRECTORY}/")
    ]
    if other:
        raise TargetError(f"{root}: has {names(sorted(other), most=3)} beside; choose another directory, or remove it")


def _check_one_set(plan: Plan, root: str) -> None:
    """Refuse a directory in which something of another set would be taken for a part of this one: many readers glob.

    What is replaced may have more files, or others, than what replaces it. They are not removed here: nothing that a
    run does not write is ever removed, and a run that is stopped, whose set has no index, could not be resumed.
    """
    planned = {file.path for file in plan.files}
    if plan.request and isinstance(plan.request.files, SomeFiles):  # what other processes write
        planned.update(plan.request.files.every.paths)
    found: list[str] = []
    with suppress(OSError):  # it is not there yet, or may be written to and not be listed
        found = os.listdir(root) if can(root).positioned else _files_at(root)
    other = sorted(name for name in found if is_of_a_set(name) and name not in planned)
    if other:
        raise TargetError(f"{root}: has {names(other, most=3)} of another set; choose another directory, or remove it")


def _files_at(url: str) -> list[str]:
    """Return the paths of all files below a URL, as it is now."""
    forget_listings(url)
    return [str(path.relative_to(RemotePath(url))) for path in RemotePath(url).files()]

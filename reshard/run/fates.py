"""What to do with each target file: keep it, resume it, make it again, or refuse to.

It is decided from what a run wants, what the ledger knows and what is found there, and from nothing else; so dry runs,
runs and resumed runs decide alike. Files are *ours* where an earlier run made what has their names: with the size and
the time that it noted. What is not is somebody else's, and is replaced only when that is asked for.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from reshard.source.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.source.records import State


class Do(Enum):
    """What to do with a file."""

    KEEP = "keep"  # an earlier run finished it as this one would
    RESUME = "resume"  # a run of the same plan from the same sources began it; what still has its sums stays
    MAKE = "make"
    CHANGED = "changed"  # refuse: another plan made or began it, or other sources
    UNMANAGED = "unmanaged"  # refuse: no run is known to have made it


class Planned(NamedTuple):
    """What a run would make of a file: the digest of all that makes it, its size, whether it is a link, or an index.

    An index comes last, because what it is of is complete then.
    """

    digest: str
    size: int
    is_link: bool = False
    is_last: bool = False


class Seen(NamedTuple):
    """What is known of a file and found there.

    Attributes:
        record: of the ledger.
        state: of what has its name; None where nothing has.
        is_begun: there is an unfinished file.
    """

    record: Record = Record()
    state: State | None = None
    is_begun: bool = False


class Policy(NamedTuple):
    """What decides for all files.

    Attributes:
        sources: when anything of the source files last changed; empty where that is not known.
        early: files have their names before that is noted, as at URLs.
        overwrite: somebody else's files may be replaced.
        restart: what earlier runs left is of no use.
    """

    sources: str = ""
    early: bool = False
    overwrite: bool = False
    restart: bool = False


class Fate(NamedTuple):
    """What to do with a file.

    Attributes:
        do: that.
        ours: the state of the file that an earlier run made, of this plan or another.
        is_touched: the source files were changed, touched or copied since, though size and time are as they were.
    """

    do: Do
    ours: State | None = None
    is_touched: bool = False


def fates(wanted: Mapping[str, Planned], seen: Mapping[str, Seen], policy: Policy) -> dict[str, Fate]:
    """Return what to do with each file."""
    found = {file: fate(one, seen.get(file, Seen()), policy) for file, one in wanted.items()}
    if any(one.do is not Do.KEEP for one in found.values()):  # a set with an index is complete: that is withdrawn
        for file, one in found.items():
            if one.do is Do.KEEP and wanted[file].is_last:
                found[file] = one._replace(do=Do.MAKE)
    return found


def fate(wanted: Planned, seen: Seen, policy: Policy) -> Fate:
    """Return what to do with one file.

    >>> ours = Record("9f", 4, ready=(4, 1))
    >>> fate(Planned("9f", 4), Seen(ours, (4, 1)), Policy()).do, fate(Planned("9f", 4), Seen(ours, (4, 2)), Policy()).do
    (<Do.KEEP: 'keep'>, <Do.UNMANAGED: 'unmanaged'>)
    """
    record, state = seen.record, seen.state
    is_same = record.digest == wanted.digest != ""
    is_touched = is_same and "" not in {policy.sources, record.sources} and policy.sources != record.sources
    is_ours = state is not None and state in {record.ready, record.replaces}
    ours = state if is_ours else None
    if is_ours and is_same and state == record.ready and not (record.may_be_lost or policy.restart):
        return Fate(Do.KEEP, ours, is_touched)
    may_replace = is_ours or policy.overwrite or (is_same and is_unnoted(wanted, record, state, early=policy.early))
    if state is not None and not may_replace:
        return Fate(Do.UNMANAGED)
    if policy.restart or (policy.overwrite and not is_same) or is_touched:  # or a file might have blocks of two sources
        return Fate(Do.MAKE, ours)
    if is_same:
        return Fate(Do.RESUME, ours)
    if is_ours or (record.digest and seen.is_begun):
        return Fate(Do.CHANGED, ours)
    return Fate(Do.MAKE, ours)


def is_unnoted(wanted: Planned, record: Record, state: State | None, *, early: bool) -> bool:
    """Return whether a file may have got its name from a run that ended before it could note that."""
    if state is None or record.ready is not None:
        return False
    return wanted.is_link or (early and state != record.replaces and state[0] == record.size)


def of(fates: Mapping[str, Fate], *some: Do) -> list[str]:
    """Return the files with which something is to be done.

    >>> of({"a": Fate(Do.KEEP), "b": Fate(Do.MAKE)}, Do.MAKE)
    ['b']
    """
    return [file for file, one in fates.items() if one.do in some]

"""What is known of a target's files where that is at a URL: which are finished.

A file there has its final name as soon as it is complete, and an unfinished one is of no use to the next run. So a
target file has a record, one small JSON object below `.reshard` in the target, and that is written twice:

    {"reshard": 1, "digest": "9f…", "size": 4096}        before the first byte of the file: what makes it; "replaces":
                                                         the file that has the name till then
    {…, "ready": [4096, 1234], "wrote": [[128, 2048, 305419896], …]}    when it has its name: its size, and a number
                                                         for what the store says of its version (entity tag or time);
                                                         the ranges of contents with their CRC-32C

As in a local target, nothing in it is believed without a look: a file is finished if the store lists it with that size
and version. Stores have no locks: two runs that write the same files at the same time are not kept apart.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reshard.errors import TargetError
from reshard.run.journal import DIRECTORY, Journal, Record, noted, record_name, record_of
from reshard.run.store_journal import StoreJournal
from reshard.storage.places import RemotePath, is_url
from reshard.storage.remote import REQUESTS, forget_listings, remote_store
from reshard.storage.threads import results

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.run.journal import Range


class RemoteJournal:
    """The records of the files of one target at a URL; what `Journal` is to a local one.

    Args:
        root: the URL of the target.
    """

    early = True
    """Files have their names before all are complete."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._found: dict[str, tuple[int, int]] = {}
        self._records: dict[str, Record] = {}

    def path(self, file: str) -> str:
        """Return where the record of a target file is."""
        return f"{self.root}/{DIRECTORY}/{record_name(file)}.json"

    def lock(self, files: Sequence[str]) -> None:
        """See how the files are; there is nothing to lock with."""
        self.look(files)

    def unlock(self) -> None:
        """Do nothing; see `lock`."""

    def look(self, files: Sequence[str]) -> None:
        """See what the store has now of some files: one listing, then each one's state and record.

        Raises:
            SourceError: the store cannot be reached.
        """
        forget_listings(self.root)
        root = RemotePath(self.root)
        there = {file.url for file in root.files()}
        present = [file for file in files if f"{root}/{file}" in there]
        known = [file for file in files if self.path(file) in there]
        # Not as listed: some file systems say other things of a file there than where they are asked for it alone.
        found = results(lambda file: (root / file).status()[:2], present, REQUESTS)
        self._found = dict(zip(present, found, strict=True))
        self._records = dict(zip(known, results(self._brief, known, REQUESTS), strict=True))

    def read(self, file: str) -> Record:
        """Return what was known of a target file when `look` saw it."""
        return self._records.get(file, Record())

    def read_now(self, file: str) -> Record:
        """Return what is known of a target file; what is not sound is not known.

        Raises:
            SourceError: its record cannot be read.
        """
        content = remote_store().contents(self.path(file))
        return record_of([content] if content is not None else [])

    def _brief(self, file: str) -> Record:
        """Return a record without its ranges: those of thousands of files would take much memory.

        Where the store says nothing of versions, a file of the same size may be another: it is not taken for finished.
        """
        record = self.read_now(file)
        record.wrote = []
        if record.ready and not record.ready[1]:
            record.ready = None
        return record

    def found(self, file: str) -> tuple[int, int] | None:
        """Return size and version of what had a target file's final name when `look` saw it; None where nothing had."""
        return self._found.get(file)

    def begin(
        self,
        file: str,
        digest: str,
        size: int,
        *,
        wrote: Iterable[Range] = (),
        replaces: tuple[int, int] | None = None,
        sources: str = "",
    ) -> None:
        """Begin the record of a file anew, whatever was in its place; see `Journal.begin`.

        Raises:
            TargetError: it cannot be written.
        """
        assert not list(wrote), "nothing of an unfinished file is kept"  # noqa: S101
        (record,) = noted(Record(digest, size, replaces=replaces, sources=sources))
        remote_store().put(self.path(file), _content(record))

    def wrote(self, file: str, ranges: Iterable[Range]) -> None:
        """Do nothing: they are noted when the file is finished."""

    def ready(self, file: str, path: str, *, wrote: Iterable[Range] = (), sync: bool) -> None:  # noqa: ARG002
        """Note that a target file is complete: at `path`, which is its final name.

        Raises:
            SourceError, TargetError: the file is gone, or its record cannot be written.
        """
        begun = self.read_now(file)
        if not begun.digest:
            raise TargetError(
                f"{self.path(file)}: is gone since the run began; do other runs write the same files? start again"
            )
        (record,) = noted(Record(begun.digest, begun.size, sources=begun.sources))
        state = remote_store().status(path)[:2]
        remote_store().put(self.path(file), _content(record | {"ready": state, "wrote": list(wrote)}))

    def forget(self, file: str) -> None:
        """Remove the record of a file, if `look` saw one."""
        if self._records.pop(file, None) is not None:
            remote_store().discard(self.path(file))

    def verified(self, file: str, record: Record, size: int) -> list[Range]:  # noqa: ARG002
        """Return nothing: files are written from their first byte."""
        return []

    def is_begun(self, file: str) -> bool:  # noqa: ARG002
        """Return False: what is there of an unfinished file is nobody's."""
        return False

    def discard(self, file: str) -> None:
        """Remove what a run wrote of a file that it did not finish."""
        remote_store().discard_unfinished(f"{self.root}/{file}")

    def remove(self, file: str) -> None:
        """Remove a file that is finished, and its record."""
        remote_store().remove(f"{self.root}/{file}")
        self.forget(file)


def journal_at(root: str, *, alone: bool = False) -> Journal | RemoteJournal:
    """Return the journal of a target, by its path or URL; of a local one with nothing else in it, one for all files."""
    if is_url(root):
        return RemoteJournal(root)
    return StoreJournal(root) if alone else Journal(root)


def _content(record: dict[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()

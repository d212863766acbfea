"""What is known of the files of a zarr store that is being written: one journal for all of them.

They are many, are of use only together, and have no journal once they are complete; to make hundreds of small files and
to remove them again takes as long as to write gigabytes. The lines of `store.jsonl` are those that a file's journal
has, with the file's name in each:

    {"file": "w/c/0/0", "reshard": 1, "digest": "9f…", "size": 4096}
    {"file": "w/c/0/0", "ready": [4096, 1790000000000000000]}
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reshard.run.journal import DIRECTORY, UNSOUND, Journal, Record, lines_of, noted, taken, write_anew
from reshard.storage.local import write_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.run.journal import Range

_BYTES_A_FILE = 4096
"""How long the journal may be for each of its files, where they are many; three lines of 200 bytes are usual."""


class StoreJournal(Journal):
    """The journal of one store; see `Journal`. What it tells of files is what `look` saw, and what is begun since.

    Args:
        root: the target directory, a local path.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._records: dict[str, Record] = {}
        self._is_own = False

    def path(self, file: str = "") -> str:  # noqa: ARG002 -- as the others have it
        """Return where the journal is."""
        return f"{self.root}/{DIRECTORY}/store.jsonl"

    def lock(self, files: Sequence[str]) -> None:
        """Have target files to oneself, as `Journal.lock` says, and see how they are."""
        super().lock(files)
        self.look(files)

    def look(self, files: Sequence[str]) -> None:
        """See what is known of some files; lines that are not sound are passed by."""
        records = {file: Record() for file in files}
        with suppress(OSError):
            for text in lines_of(self.path(), _BYTES_A_FILE * len(files)):
                with suppress(*UNSOUND):
                    line = json.loads(text)
                    records[line["file"]] = taken(records[line["file"]], line)
        self._records = {file: record for file, record in records.items() if record.digest}

    def read(self, file: str) -> Record:
        """Return what is known of a target file."""
        return self._records.get(file, Record())

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
        """Begin with a file anew, whatever was known of it; see `Journal.begin`."""
        if not self._is_own:
            self._make_own()
        record = Record(digest, size, list(wrote), replaces=replaces, sources=sources)
        self._write(file, noted(record), os.O_APPEND)
        self._records[file] = record

    def ready(self, file: str, path: str, *, wrote: Iterable[Range] = (), sync: bool) -> None:
        """Note that a target file is complete; see `Journal.ready`."""
        if self._records and not self._is_own:  # tasks that name files have seen nothing, and the session's is its own
            self._make_own()
        super().ready(file, path, wrote=wrote, sync=sync)

    def forget(self, file: str) -> None:
        """Know nothing of a file any more; without any, there is no journal."""
        if self._records.pop(file, None) and not self._records:
            super().forget(file)

    def _make_own(self) -> None:
        """Write what is known into a file that is no other's (`cp -l`), and has no torn line at its end."""
        path = self.path()
        lines = [{"file": file, **line} for file, record in self._records.items() for line in noted(record)]
        if lines:
            write_anew(path, lines, sync=True)
        else:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise write_error(path, error, 0) from error
        self._is_own = True

    def _write(self, file: str, lines: Iterable[dict[str, Any]], flags: int, *, sync: bool = False) -> None:
        super()._write(file, ({"file": file, **line} for line in lines), flags, sync=sync)

"""A list of checkpoints as a table, as plain data, and as HTML."""

from __future__ import annotations

import time
from collections.abc import Sequence
from os.path import relpath
from typing import TYPE_CHECKING, Any, overload

from reshard.arguments import checked
from reshard.core.storage.places import is_url
from reshard.core.storage.urls.s3.options import use_options
from reshard.errors import bytes_text
from reshard.view.sections import Note, Table, lines, page
from reshard.view.text import fields_data, fitting_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.catalog import StoredCheckpoint
    from reshard.core.storage.places import AnyName
    from reshard.view.sections import Section

    Checkpoints = Sequence[StoredCheckpoint]
else:
    Checkpoints = Sequence

_HEADER = ("checkpoint", "step", "format", "ranks", "files", "bytes", "age", "state")
_FIELDS = (
    "path", "step", "format", "ranks", "files", "nbytes", "modified", "state", "reason", "newest", "last", "hint",
)  # fmt: skip
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


class Runs(Checkpoints):
    """The checkpoints below a directory, by directory and step; a table in a notebook and in `print`.

    >>> Runs("run", [])
    no checkpoint is below run
    """

    def __init__(self, root: str, records: Sequence[StoredCheckpoint]) -> None:
        self.root, self._records = root, tuple(records)

    @property
    def newest(self) -> StoredCheckpoint | None:
        """Return the newest complete checkpoint, or None."""
        return next((record for record in self._records if record.newest), None)

    @overload
    def __getitem__(self, number: int) -> StoredCheckpoint: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[StoredCheckpoint]: ...

    def __getitem__(self, number: int | slice) -> StoredCheckpoint | Sequence[StoredCheckpoint]:
        return self._records[number]

    def __len__(self) -> int:
        return len(self._records)

    def to_dataframe(self) -> Any:
        """Return the checkpoints as a `pandas.DataFrame`, a row for each, with the time of its last change.

        Raises:
            reshard.ReshardError: pandas is not installed.
        """
        from reshard.view.notebook.frames import runs_frame  # not on every start

        return runs_frame(self)

    def __repr__(self) -> str:
        return runs_text(self)

    def _repr_html_(self) -> str:
        return runs_html(self)


@checked
def runs(path: AnyName, *, storage_options: Mapping[str, Any] | None = None) -> Runs:
    """List the checkpoints below a directory, of any format, with their states by names and headers.

    Args:
        path: a directory, a local path or a URL.
        storage_options: as for `reshard.open`.

    Returns:
        their paths, steps, formats, sizes and states, and the `newest` complete one, or None.

    Raises:
        reshard.SourceError: the directory does not exist, or cannot be listed.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> for step in (100, 200):
    ...     report = reshard.plan(source, to="dcp", target_step=step).run("run")
    >>> runs = reshard.runs("run")
    >>> [(each.step, each.state) for each in runs]
    [('100', 'complete'), ('200', 'complete')]
    >>> runs.newest.path
    'run/iter_0000200'
    """
    from reshard.core.catalog import stored_checkpoints  # not on every start

    use_options(storage_options, path)
    return Runs(str(path), stored_checkpoints(path))


def age_text(seconds: float) -> str:
    """Write how long ago something was, in one unit.

    >>> [age_text(seconds) for seconds in (0.5, 59, 60, 7200, 200_000)]
    ['0 s', '59 s', '1 min', '2 h', '2 d']
    """
    name, unit = next((pair for pair in _UNITS if seconds >= pair[1]), _UNITS[-1])
    return f"{int(seconds // unit)} {name}"


def runs_text(runs: Runs, *, width: int | None = None) -> str:
    """Write a table of the checkpoints, why some are not complete, and which is the newest complete one."""
    if not runs:
        return f"no checkpoint is below {runs.root}"
    table, *rest = _sections(runs)
    below = [line for section in rest for line in lines(section)]
    return "\n".join([*lines(table, width, below=1), *fitting_lines(below[:-1], width), "", below[-1]])


def _sections(runs: Runs) -> list[Section]:
    """Return a table of the checkpoints, why some are not complete, and which is the newest."""
    rows = [_row(runs.root, record) for record in runs]
    why = ["; ".join(filter(None, (record.reason, record.hint))) for record in runs]
    newest = runs.newest
    return [
        *([Table("", _HEADER, rows, most=len(rows))] if rows else []),
        *(Note(f"{row[0]}: {reason}") for row, reason in zip(rows, why, strict=True) if reason),
        Note(f"newest complete: {newest.path}" if newest else "no checkpoint is complete"),
    ]


def _row(root: str, record: StoredCheckpoint) -> tuple[str, ...]:
    """Return the cells of a checkpoint."""
    path = record.path.removeprefix(f"{root}/") if is_url(root) else relpath(record.path, root)
    age = age_text(max(time.time() - record.modified, 0)) if record.modified else ""
    mark = ", newest" if record.newest else ", last" if record.last else ""
    ranks = "" if record.ranks is None else str(record.ranks)
    return (
        path,
        record.step,
        record.format,
        ranks,
        f"{record.files:,}",
        bytes_text(record.nbytes),
        age,
        f"{record.state}{mark}",
    )


def runs_data(runs: Sequence[StoredCheckpoint]) -> list[dict[str, object]]:
    """Return checkpoints as plain data."""
    return [fields_data(record, *_FIELDS) for record in runs]


def runs_html(runs: Runs) -> str:
    """Show the checkpoints below a directory as a table."""
    return page(("Checkpoints", runs.root), _sections(runs), runs_text(runs))

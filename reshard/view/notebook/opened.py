"""What any opened file of Python has, for `reshard.Checkpoint`: names, facts, `with`, completions, its picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from reshard.arguments import checked
from reshard.core.storage.local import local_store
from reshard.core.storage.places import is_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from dask.array import Array

    from reshard.core.model.checkpoint import Checkpoint as Record
    from reshard.core.model.checkpoint import Tensor
    from reshard.strategy.strategy import Strategy
    from reshard.view.pictures.hist import HistogramPicture
    from reshard.view.svg import Picture

    Arrays = Mapping[str, Array]
else:
    Arrays = Mapping


class OpenedArrays(Arrays):
    """The part of `reshard.Checkpoint` that shows it, and that any opened file of Python has."""

    __slots__ = ()
    _record: Record

    @property
    def root(self) -> str:
        """Return the directory or file that was opened."""
        return self._record.root

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors by name, with dtype and shape (`spec`) and blocks (`shards`)."""
        return self._record.tensors

    @property
    def format(self) -> str | None:
        """Return the format of the files; None if it is mixed."""
        return self._record.word

    @property
    def nbytes(self) -> int:
        """Return the size of all whole tensors in bytes; replicas count once."""
        return self._record.nbytes

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the rank of each file, ascending."""
        return self._record.ranks

    @property
    def strategy(self) -> Strategy | None:
        """Return the strategy; None if the source is whole or describes its own blocks."""
        return self._record.strategy

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings from opening it."""
        return self._record.warnings

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Return the names in the files that cannot be read, with the reasons."""
        return self._record.unreadable

    def close(self) -> None:
        """Close the local files that reads left open; later reads open them again.

        `with reshard.open(...) as source:` does it at the end. Nothing else is held: headers stay in memory, and
        connections to object stores are shared by all of the process.
        """
        for file in self._record.files:
            if not is_url(file.path):
                local_store().forget(file.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()

    @checked
    def picture(self, name: str, target: Strategy | None = None) -> Picture:
        """Draw which rank holds which block of a tensor, now and in a target strategy.

        Raises:
            reshard.UsageError: there is no such tensor; a `KeyError`, too.
            reshard.SourceError: it cannot be read.
            reshard.UsageError: the target strategy does not name it.
            reshard.SourceError: the target strategy does not fit its shape.
        """
        from reshard.view.html import picture

        self._record.require(name)
        return picture(self._record, name, target)

    @checked
    def hist(self, name: str, bins: int = 64) -> HistogramPicture:
        """Read a tensor, and draw its histogram: a picture in a notebook, bars of characters in a terminal.

        The result has `counts` and `edges`, as `numpy.histogram` returns them for the finite elements, and of complex
        numbers for the magnitudes. The tensor is read twice, in pieces of a few megabytes.

        Args:
            name: the tensor.
            bins: the number of bins, of equal width; at most 65,536.

        Raises:
            reshard.UsageError: there is no such tensor.
            reshard.SourceError: it cannot be read.
            reshard.UsageError: `bins` is below 1, or too large.
        """
        from reshard.view.pictures.hist import histogram_picture  # it brings numpy

        return histogram_picture(self._record, name, bins)

    def to_dataframe(self) -> Any:
        """Return the tensors as a `pandas.DataFrame`, a row for each; nothing is read.

        Columns: `name`; `dtype`; `shape`, a tuple; `nbytes` of the whole tensor; `kind`, as in `groups("kind")`; `cut`,
        in words; `blocks`, the number of blocks in the files.

        Raises:
            reshard.ReshardError: pandas is not installed.
        """
        from reshard.view.notebook.frames import checkpoint_frame  # not on every start

        return checkpoint_frame(self._record)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._record.tensors)

    def __repr__(self) -> str:
        return repr(self._record)

    def _repr_html_(self) -> str:
        from reshard.view.html import html

        return html(self._record)

    def __iter__(self) -> Iterator[str]:
        return iter(self._record.tensors)

    def __len__(self) -> int:
        return len(self._record.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._record.tensors

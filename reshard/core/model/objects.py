"""What a checkpoint has that is not a tensor: named ranges of bytes, such as pickled objects and sidecar files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.core.storage.places import any_store, in_batches
from reshard.errors import SourceError, bytes_text
from reshard.spelling import missing_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.facts import Object
    from reshard.core.storage.base import ReadStore, Want

LARGEST = 1 << 28
"""The most bytes of objects that are held at once."""

_MOST_SHOWN = 1 << 20  # bytes of objects that are read to be shown


def problems(objects: Mapping[str, Object]) -> dict[str, str]:
    """Return the reason for each object whose bytes cannot be read."""
    unreadable = {name: entry.problem for name, entry in objects.items() if entry.problem}
    large = {name: entry.nbytes for name, entry in objects.items() if entry.nbytes > LARGEST}
    return unreadable | {
        n: f"has {bytes_text(size)}; at most {bytes_text(LARGEST)} are taken" for n, size in large.items()
    }


def contents(objects: Mapping[str, Object]) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of objects, each with its name.

    Raises:
        SourceError: an object cannot be read. The message does not name it.
    """
    for problem in problems(objects).values():
        raise SourceError(problem, code="unreadable-object")

    def steps() -> Iterator[tuple[tuple[str, bytearray], ReadStore, list[Want]]]:
        for name, entry in objects.items():
            buffer = bytearray(entry.nbytes)
            yield (name, buffer), any_store(), [(entry.path, entry.begin, memoryview(buffer))]

    for name, buffer in in_batches(steps()):
        yield name, bytes(buffer)


class Objects:
    """The objects of a checkpoint, and the files beside its tensors; a format may know what they are.

    Attributes:
        checkpoint: the checkpoint.
        entries: where the bytes of each are, by name.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.entries: Mapping[str, Object] = {**checkpoint.extras.beside, **checkpoint.extras.objects}

    def facts(self) -> Mapping[str, int | str]:
        """Return facts about the training, by what they are called; none by default."""
        return {}

    def value(self, name: str, content: bytes) -> Any:  # noqa: ARG002 -- subclasses use it
        """Return an object as plain data, given its bytes; by default the bytes.

        Raises:
            SourceError: it is not valid. The message is a predicate.
        """
        return content

    def text(self, value: object) -> str:
        """Return a value as a short text."""
        return f"{value!r:.160}"

    def read(self, name: str) -> Any:
        """Return an object as plain data.

        Raises:
            MissingNameError: there is no such object.
            SourceError: it cannot be read, or is damaged.
        """
        if name not in self.entries:
            raise missing_name(name, self.entries, f"{self.checkpoint.root} has no object")
        try:
            ((_, content),) = contents({name: self.entries[name]})
            return self.value(name, content)
        except SourceError as error:
            raise SourceError(f"{self.checkpoint.root}: object {name!r} {error.message}", code=error.code) from None

    def shown(self) -> dict[str, str]:
        """Describe each object; if there are many, read only the first."""
        texts = {
            name: f"an object of {bytes_text(entry.nbytes)}, which was not looked at"
            for name, entry in self.entries.items()
        }
        texts |= (wrong := problems(self.entries))
        readable, room = {}, _MOST_SHOWN
        for name, entry in self.entries.items():
            if name not in wrong and entry.nbytes <= room:
                readable[name] = entry
                room -= entry.nbytes
        for name, content in contents(readable):
            try:
                texts[name] = self.text(self.value(name, content))
            except SourceError as error:
                texts[name] = error.message
        return texts

    def problems(self, names: Collection[str]) -> dict[str, str]:
        """Return the reason for each of the named objects that cannot be compared."""
        return problems({name: self.entries[name] for name in names})

    def compared(self, names: Collection[str]) -> Iterator[tuple[str, object]]:
        """Yield what two checkpoints compare of the named objects: by default their bytes."""
        yield from contents({name: self.entries[name] for name in names})

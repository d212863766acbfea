"""Read the items of PyTorch's distributed checkpoints: a tensor that `torch.save` wrote, from its first bytes.

An item is a zip archive of stored records. The first records are small: `data.pkl`, which describes the tensor, and
`byteorder`; then follow the bytes of the tensor, `data/0`. Sizes are in descriptors behind the records, so the records
are walked through from the first. The bytes of a tensor are aligned to 64 within the item, not within the file.

Sources: PyTorch 2.13 `torch/serialization.py`, `caffe2/serialize/inline_container.cc`, and files that it wrote
(`tests/data/dcp`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reshard.core.model.facts import DAMAGED
from reshard.core.storage.places import any_store, in_batches
from reshard.errors import SourceError
from reshard.kits.torch.archive import Damaged, first_records
from reshard.kits.torch.pickles import unpickled
from reshard.kits.torch.tensors import PickleBytes, rebuilt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.model.entries import Entry
    from reshard.core.storage.base import ReadStore, Want
    from reshard.kits.torch.tensors import Rebuilt

_HEAD = 2048  # has all that is needed of most items
_LONGEST_HEAD = 1 << 18
_MOST_KNOWN = 256
_EXPECTED = "a tensor that torch.save stored"

KnownHeads = dict[int, dict[bytes, "Rebuilt"]]
"""Tensors of other items, by the offset of their bytes in the item, and by all bytes before it; many are alike."""


class Span(NamedTuple):
    """The range of an item in a file."""

    path: str
    begin: int
    nbytes: int


def read_items(spans: Sequence[Span]) -> Iterator[Entry | str]:
    """Yield the entry of the tensor in each item, or the reason why it cannot be read.

    Raises:
        SourceError: a file ends before an item does.
    """
    known: KnownHeads = {}
    for span, head in read_heads(spans, _HEAD):
        entry = item(span, head, known)
        if entry is None:
            ((_, longer_head),) = read_heads([span], _LONGEST_HEAD)
            entry = item(span, longer_head, known)
        yield entry or "is not a tensor of torch.save: its head is too long"


def read_heads(spans: Sequence[Span], nbytes: int) -> Iterator[tuple[Span, bytes]]:
    """Yield the first bytes of each item; at URLs many are read at once."""

    def steps() -> Iterator[tuple[tuple[Span, bytearray], ReadStore, list[Want]]]:
        for span in spans:
            buffer = bytearray(min(span.nbytes, nbytes))
            yield (span, buffer), any_store(), [(span.path, span.begin, memoryview(buffer))]

    for span, buffer in in_batches(steps()):
        yield span, bytes(buffer)


def item(span: Span, head: bytes, known: KnownHeads) -> Entry | str | None:
    """Return the entry of the tensor in an item, or a reason why not; None if `head`, its first bytes, is too short."""
    try:
        for begin, heads in known.items():
            if (alike := heads.get(head[:begin])) is not None:
                return alike.entry(span.begin + begin, span.begin + span.nbytes)
        record = _tensor_record(head, is_whole=len(head) == span.nbytes)
        if record is None:
            return None
        begin, name, pickled = record
        tensor = rebuilt(unpickled(PickleBytes(span.path, pickled), _EXPECTED, outside=True))
        if name != tensor.record:
            raise SourceError(  # noqa: TRY301 -- returned as a reason
                f"has its tensor in record {_text(tensor.record)}, and begins with {_text(name)}", code="wrong-record"
            )
        if sum(map(len, known.values())) < _MOST_KNOWN:
            known.setdefault(begin, {})[head[:begin]] = tensor
        return tensor.entry(span.begin + begin, span.begin + span.nbytes)
    except SourceError as error:
        if any(code.startswith("unsupported-") for code in error.codes):
            return error.message
        file = span.path.rpartition("/")[2]
        return f"{DAMAGED}: the item at byte {span.begin:,} of {file} {error.message.removeprefix(f'{span.path} ')}"


def _tensor_record(head: bytes, *, is_whole: bool) -> tuple[int, bytes, bytes] | None:
    """Return the offset and name of a tensor's record, and its pickle; None if the head is too short.

    Raises:
        SourceError: the item is not a tensor that `torch.save` stored.
    """
    contents: dict[bytes, bytes | None] = {}
    try:
        for name, begin, content in first_records(head):
            if name.startswith(b"data/"):
                order = contents.get(b"byteorder") or b"little"
                if order.strip() != b"little":
                    raise SourceError(f"has the unsupported byte order {_text(order)}", code="unsupported-byte-order")
                return begin, name, contents.get(b"data.pkl") or b""
            contents[name] = content
    except Damaged as error:
        raise SourceError(f"is not one of torch.save: it {error}", code="not-torch-save") from None
    if is_whole:
        raise SourceError("is not one of torch.save: it has no bytes, or is truncated", code="truncated")
    return None


def _text(content: bytes) -> str:
    return repr(content.decode(errors="replace"))[:60]

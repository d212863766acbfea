"""The provenance of a target: its source files, strategies and selection.

Provenance is stored next to the logs below `.reshard`, in a file named after its digest, so that all runs with the same
source and target share one file: ranks or stages, one after the other. A finished zarr store may have no other files;
its ledger is next to the store: `NAME.reshard`.

Provenance is not trusted: paths of target files stay below the target, source files are only read, and all results are
compared with the files. The layout in it is used while the files are the ones that the run wrote, or copies of them
(`Made.change`).
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from shlex import quote
from typing import TYPE_CHECKING

from reshard.core.format import marked
from reshard.core.model.digests import contents_digest
from reshard.core.model.digests import digest as digest_of
from reshard.core.records.logs import DIRECTORY, Record, known, unreadable_ledger
from reshard.core.records.schema import is_inner_path, parse, read, to_json
from reshard.core.runs import is_iteration
from reshard.core.storage.crc import crc_of_range
from reshard.core.storage.places import any_store, as_place, workers_at
from reshard.core.storage.small import read_small
from reshard.core.storage.threads import map_ordered
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.core.model.checkpoint import SourceFile
    from reshard.core.records.logs import Range
    from reshard.core.records.provenance import Provenance
    from reshard.core.storage.places import AnyName, Place
    from reshard.strategy.strategy import Strategy

VERSION = 2

_LARGEST = 1 << 28

# Bytes read of touched files to see whether they are copies: in total, of a range, of a range of many files.
_SAMPLED, _LONGEST_SAMPLE, _SHORTEST_LIMIT = 64 << 20, 4 << 20, 64 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The provenance of files of a target.

    Attributes:
        target: the requested directory, store or file, a path or a URL.
        root: the directory of the files: the target, or its parent if the target is a file.
        ledger: the directory of its ledger.
        records: the records of the files without ranges, by path below the root.
        provenance: the provenance in the ledger; the selection has not been checked.
        strategy: the strategy of the target, or None.
    """

    target: str
    root: str
    ledger: str
    records: Mapping[str, Record]
    provenance: Provenance
    strategy: Strategy | None

    @property
    def ranks(self) -> dict[int, list[str]]:
        """Return the target files by rank, ascending."""
        files: dict[int, list[str]] = {}
        for file, record in sorted(self.records.items()):
            if record.rank is not None:
                files.setdefault(record.rank, []).append(f"{self.root}/{file}")
        return dict(sorted(files.items()))

    @property
    def own_strategy(self) -> Strategy | None:
        """Return the strategy of the target, or that of the stage of a pipeline that it is."""
        stage = self.provenance.target.stage
        return self.strategy.of_stage(stage) if self.strategy and stage is not None else self.strategy

    def is_as_noted(self) -> bool:
        """Return whether all files exist with the size and time in the ledger."""

        def is_unchanged(path: str) -> bool:
            with suppress(SourceError):
                return records[path].ready == any_store().status(path)[:2]
            return False

        records = {f"{self.root}/{file}": record for file, record in self.records.items()}
        return all(map_ordered(is_unchanged, [*records], workers_at(records)))

    def change(self, files: Sequence[SourceFile], *, partial: bool = False) -> str:
        """Return which file differs from the written one, and how; "" if none does.

        A file with the recorded size and time is the one that the run wrote. A file with another time, such as a copy,
        is the same if its size, its header and samples of its contents match the records.

        Args:
            files: the existing files of all ranks, with their headers.
            partial: files may be missing.

        Raises:
            SourceError: a file cannot be read.
        """
        by_path = {file.path: file for file in files}
        records = {f"{self.root}/{file}": record for file, record in self.records.items() if record.rank is not None}
        for path, file in by_path.items():
            if path not in records:
                return f"{path} is not in the ledger"
            size, _ = records[path].ready or (0, 0)
            if file.nbytes != size:
                return f"{path} has {file.nbytes} bytes, and {size} were written"
        missing = next((path for path in records if path not in by_path), None)
        if missing and not partial:
            return f"{missing} is missing"
        touched = [file for path, file in by_path.items() if file.status[:2] != records[path].ready]
        headers: dict[int, str] = {}
        for file in touched:
            digest, number = records[file.path].header, file.index.header_id
            if not digest:
                return f"{file.path} has another time, and an older version wrote the ledger, without header checksums"
            if number not in headers:
                headers[number] = contents_digest(file.index.entries.items())
            if headers[number] != digest:
                return f"the header of {file.path} is not the one that was written"
        filled = [file for file in touched if any(e.nbytes and e.text is None for e in file.index.entries.values())]
        return self._changed_contents({file.path: file.nbytes for file in filled}) if filled else ""

    def _changed_contents(self, sizes: Mapping[str, int]) -> str:
        """Return which file has other bytes than were written, by samples; "" if none has."""
        records = known(self.root, self.records, directory=self.ledger).records
        ranges = {f"{self.root}/{file}": record.ranges for file, record in records.items()}
        samples = _samples(ranges, sizes)
        for path in sizes:
            if not samples[path]:
                return (
                    f"{path} has another time, and the ledger has no checksums (encrypted, or written without syncing)"
                )

        def change(path: str) -> str:
            for begin, nbytes, crc in samples[path]:
                if begin + nbytes > sizes[path] or crc_of_range(any_store(), path, begin, nbytes) != crc:
                    return f"{path} has other contents than were written (bytes {begin} to {begin + nbytes})"
            return ""

        return next(filter(None, map_ordered(change, [*sizes], workers_at(sizes))), "")


def changed_text(root: AnyName, change: str) -> str:
    """Return the message for a target whose files differ from its ledger."""
    return (
        f"{root} was written by reshard, but {change}; so the layout in its ledger is not used (`reshard verify "
        f"{quote(str(root))}` compares it with its source)"
    )


def _samples(ranges: Mapping[str, Iterable[Range]], touched: Collection[str]) -> dict[str, list[Range]]:
    """Return up to two ranges of each touched file: a rare one, and a long one.

    The rare one is in few other files. It distinguishes files of different ranks, which have equal headers; untouched
    files are counted, too, because a touched file may be a copy of one. Both ranges are short if there are many files;
    if all ranges of a file are long, the shortest is used.
    """
    most = min(_LONGEST_SAMPLE, max(_SAMPLED // max(len(touched), 1), _SHORTEST_LIMIT))
    by_path = {path: list(dict.fromkeys(spans)) for path, spans in ranges.items()}
    counts = Counter(chain.from_iterable(by_path.values()))
    samples: dict[str, list[Range]] = {}
    for path in touched:
        file_ranges = by_path.get(path, [])
        short = [span for span in file_ranges if span[1] <= most] or sorted(file_ranges, key=_length)[:1]
        rarest = sorted(short, key=lambda span: (counts[span], span[1]))[:1]
        samples[path] = list(dict.fromkeys([*rarest, *sorted(short, key=_length)[-1:]]))
    return samples


def _length(sample: Range) -> int:
    return sample[1]


def made_of(target: Place, listing: Sequence[str] | None = None) -> Made | None:
    """Return the provenance of a target; None if no ledger has it.

    Args:
        target: a directory, a zarr store, an iteration of a run, or one file.
        listing: the names of its entries, if known; empty if it is a file.

    Raises:
        SourceError: the storage cannot be reached; its ledger exists, and cannot be read or is damaged.
    """
    listing = target.names() if listing is None else listing
    if not listing and target.is_file():
        return _newest(str(target.parent.absolute()), target.name)
    root = target.absolute()
    if is_iteration(root.name):
        return _newest(str(root.parent), below=f"{root.name}/")
    if marked(listing):
        return _newest(str(root), directory=f"{root}.reshard")
    return _newest(str(root)) if DIRECTORY in listing else None


def _newest(root: str, file: str | None = None, *, below: str = "", directory: str | None = None) -> Made | None:
    """Return the newest provenance of files below a directory, with all its files."""
    directory = directory or f"{root}/{DIRECTORY}"
    if as_place(directory).is_symlink():
        return None
    logs = known(root, None if file is None else [file], directory=directory, with_ranges=False)
    if logs.damaged:
        raise unreadable_ledger(f"{directory}/{logs.damaged[0]}.jsonl", "none of its lines is valid")
    records = logs.records
    ready = (record.made for path, record in reversed(records.items()) if record.ready and path.startswith(below))
    digest = next(ready, "")
    if not digest:
        return None
    files = {path: item for path, item in records.items() if item.made == digest and item.ready and is_inner_path(path)}
    path = f"{directory}/made-{digest}.json"
    try:
        content = read_small(as_place(path), "ledger", _LARGEST, SourceError)
        provenance = read_provenance(content, digest)
        strategies = [
            record.read() if record else None for record in (provenance.target.strategy, provenance.source.strategy)
        ]
    except (SourceError, ValueError, OSError) as error:
        raise unreadable_ledger(path, error.message if isinstance(error, SourceError) else error) from None
    target = f"{root}/{file or below}".rstrip("/")
    return Made(target, root, directory, files, provenance, strategies[0])


def provenance_file(provenance: Provenance) -> bytes:
    """Return the content of a provenance file."""
    return to_json({"reshard_made": VERSION, "provenance": provenance})


def read_provenance(content: bytes, digest: str) -> Provenance:
    """Return the provenance in a file; raise `ValueError` if it is invalid, of another version or digest."""
    from reshard.core.records.provenance import Provenance  # lazy import: not every source has a ledger

    if digest_of(content) != digest:
        raise ValueError("its contents are not those that its name has the digest of")

    parsed = parse(content)
    if not isinstance(parsed, dict) or parsed.get("reshard_made") != VERSION:
        raise ValueError(f"it is not provenance of version {VERSION}")
    result: Provenance = read(Provenance, parsed.get("provenance"), "$.provenance")
    return result

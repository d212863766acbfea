"""What a target is made from, as its ledger says it: the source's files and strategy, the target's, and the selection.

It lies next to the logs below `.reshard`, in a file that is called by its own digest, so that all runs that make the
same of the same have one: ranks or stages, one after the other. Of a finished zarr store, which may have nothing else
in it, the ledger is next to the store: `NAME.reshard`.

It is not believed: paths of target files stay below the target, those of source files are only read, and what comes of
it is compared with what is there. The layout in it is used while the files are those that the run wrote, or copies of
them (`Made.change`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from reshard.errors import SourceError
from reshard.formats.directories import is_iteration
from reshard.formats.zarr_files import is_store
from reshard.layout.layout import MOST_DEVICES, Layout
from reshard.source.headers import contents_digest
from reshard.source.records import DIRECTORY, Record, known
from reshard.source.records import digest as digest_of
from reshard.storage.crc import crc_of_range
from reshard.storage.places import any_store, as_place, of_each
from reshard.storage.small import read_small
from reshard.strategy.schema import ANY, COUNT, FLAG, LINE, NUMBER, TEXT, Maybe, check, is_inner_path, parse
from reshard.strategy.strategy import Placed, Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.source.checkpoint import Checkpoint, SourceFile
    from reshard.source.records import Range
    from reshard.storage.places import Place

VERSION = 1

_LARGEST = 1 << 28

# What is read of touched files, to see whether they are copies: of all, of a range, and of a range of many files.
_SAMPLED, _LONGEST_SAMPLE, _SHORTEST_LIMIT = 64 << 20, 4 << 20, 64 << 10

STRATEGY = {
    "stages": (COUNT, COUNT),
    "devices": COUNT,
    "merged": FLAG,
    # dev_matrix, tensor_map, opt_weight_shard_size and _step, param_split_shape, indices_offset, field
    "layouts": [([COUNT], [[COUNT]], NUMBER, NUMBER, [NUMBER], [NUMBER], NUMBER)],
    "places": [[(COUNT, COUNT, Maybe([COUNT]), FLAG)]],  # for each stage: its number, layout, shape, shape is expanded
    "tensors": {TEXT: COUNT},  # the number of the tensor's places
}

_SOURCE = {
    "root": LINE,
    "describes_itself": FLAG,
    "files": [(COUNT, LINE)],  # rank and path
    "strategy": Maybe(STRATEGY),
    "stage": Maybe(COUNT),
    "partial": FLAG,
    "varying": [TEXT],
    "elsewhere": [TEXT],
    "left_out": [TEXT],
    "encrypted": FLAG,
}
_MADE = {
    "reshard_made": COUNT,
    "by": TEXT,
    "source": _SOURCE,
    "target": {
        "strategy": Maybe(STRATEGY),
        "stage": Maybe(COUNT),
        "format": TEXT,
        "deduplicated": FLAG,
        "encrypted": FLAG,
        "index": Maybe(TEXT),  # a set and a rank of whole tensors are two makes
    },
    "selection": ANY,  # which others check
}


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """What some files of a target are made from.

    Attributes:
        target: the directory, store or file that was asked about, a path or a URL.
        root: the directory that the files are below: the target, or that of a target that is a file.
        ledger: the directory of its ledger.
        records: what is known of the files, by their paths below the root, but for the ranges that were written.
        content: what the ledger says; valid in itself, and no more.
    """

    target: str
    root: str
    ledger: str
    records: Mapping[str, Record]
    content: dict[str, Any]

    @property
    def strategy(self) -> Strategy | None:
        """The target's strategy."""
        return read_small_strategy(self.content["target"]["strategy"])

    @property
    def stage(self) -> int | None:
        """The stage of the target's pipeline that was asked for, where the strategy is that of one."""
        found: int | None = self.content["target"]["stage"]
        return found

    @property
    def ranks(self) -> dict[int, list[str]]:
        """The target files of each rank, ascending."""
        found: dict[int, list[str]] = {}
        for file, record in sorted(self.records.items()):
            if record.rank is not None:
                found.setdefault(record.rank, []).append(f"{self.root}/{file}")
        return dict(sorted(found.items()))

    def is_as_noted(self) -> bool:
        """Return whether the files are there with the sizes and the times that the ledger noted."""
        found = any_store().statuses([f"{self.root}/{file}" for file in self.records])
        return all(
            not isinstance(state, SourceError) and record.ready == state[:2]
            for record, state in zip(self.records.values(), found, strict=True)
        )

    def change(self, files: Sequence[SourceFile], *, partial: bool = False) -> str:
        """Return which file is not the one that the run wrote, and why; empty if they all are.

        A file with the noted size and time is the one that the run wrote. One with another time, such as a copy, is the
        same if its size, its header and some ranges of its contents are as noted.

        Args:
            files: the files of all ranks that are there, with their headers.
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
            noted, number = records[file.path].header, file.index.header
            if not noted:
                return f"{file.path} has another time, and an older version wrote the ledger, without header checksums"
            if number not in headers:
                headers[number] = contents_digest(file.index.entries.items())
            if headers[number] != noted:
                return f"the header of {file.path} is not the one that was written"
        filled = [
            file for file in touched if any(one.nbytes and one.text is None for one in file.index.entries.values())
        ]
        return self._changed_contents({file.path: file.nbytes for file in filled}) if filled else ""

    def _changed_contents(self, sizes: Mapping[str, int]) -> str:
        """Return which of some files has other bytes than were written, in a few ranges; empty if none has."""
        every = known(self.root, self.records, directory=self.ledger).records
        ranges = {f"{self.root}/{file}": every.get(one.link, one).ranges for file, one in every.items()}
        samples = _samples(ranges, sizes)
        for path in sizes:
            if not samples[path]:
                return (
                    f"{path} has another time, and the ledger has no checksums (encrypted, or written with --no-fsync)"
                )

        def change(path: str) -> str:
            for begin, nbytes, crc in samples[path]:
                if begin + nbytes > sizes[path] or crc_of_range(any_store(), path, begin, nbytes) != crc:
                    return f"{path} has other contents than were written (bytes {begin} to {begin + nbytes})"
            return ""

        return next(filter(None, of_each(change, [*sizes])), "")


def _samples(ranges: Mapping[str, Iterable[Range]], touched: Collection[str]) -> dict[str, list[Range]]:
    """Return up to two ranges of each touched file: one that few other files have, and a long one.

    The first tells the files of ranks apart, which have equal headers; files that were not touched count, because one
    may be a copy of them. Both are short where there are many files; if every range of a file is long, one is taken all
    the same.
    """
    most = min(_LONGEST_SAMPLE, max(_SAMPLED // max(len(touched), 1), _SHORTEST_LIMIT))
    by_path = {path: list(dict.fromkeys(some)) for path, some in ranges.items()}
    counts = Counter(chain.from_iterable(by_path.values()))
    samples: dict[str, list[Range]] = {}
    for path in touched:
        every = by_path.get(path, [])
        short = [one for one in every if one[1] <= most] or sorted(every, key=_length)[:1]
        rarest = sorted(short, key=lambda one: (counts[one], one[1]))[:1]
        samples[path] = list(dict.fromkeys([*rarest, *sorted(short, key=_length)[-1:]]))
    return samples


def _length(sample: Range) -> int:
    return sample[1]


def made_of(target: Place) -> Made | None:
    """Return what a target is made from; None where no ledger says it of the files that are there.

    Args:
        target: a directory, a zarr store, an iteration of a run, or one file.

    Raises:
        SourceError: the storage cannot be reached.
    """
    if target.is_file():
        return _newest(str(target.parent.absolute()), target.name)
    root = target.absolute()
    if is_iteration(root.name):
        return _newest(str(root.parent), below=f"{root.name}/")
    return _newest(str(root), directory=f"{root}.reshard") if is_store(target) else _newest(str(root))


def _newest(root: str, file: str | None = None, *, below: str = "", directory: str | None = None) -> Made | None:
    """Return the newest of what files, or those below a directory, are made from, with all that are made from that."""
    directory = directory or f"{root}/{DIRECTORY}"
    records = known(root, None if file is None else [file], directory=directory, with_ranges=False).records
    ready = (record.made for path, record in reversed(records.items()) if record.ready and path.startswith(below))
    digest = next(ready, "")
    some = {path: one for path, one in records.items() if one.made == digest and one.ready and is_inner_path(path)}
    try:
        if as_place(directory).is_symlink():
            return None
        text = read_small(as_place(f"{directory}/made-{digest}.json"), "ledger", _LARGEST, SourceError)
        if digest_of(text) != digest:  # another's, or changed since
            return None
        content = parse(text)
        check(content, _MADE)
        read_small_strategy(content["target"]["strategy"])
        read_small_strategy(content["source"]["strategy"])
    except (SourceError, ValueError, OSError):
        return None
    target = f"{root}/{file or below}".rstrip("/")
    return Made(target, root, directory, some, content) if content["reshard_made"] == VERSION else None


def source_data(source: Checkpoint) -> dict[str, Any]:
    """Return what a ledger says of a source."""
    alone = bool(source.extras.described_by)
    return {
        "root": str(as_place(source.root).absolute()),
        "describes_itself": alone,
        "files": [] if alone else [(r, file.path) for r, file in zip(source.ranks, source.files, strict=True)],
        "strategy": small_strategy(source.strategy),
        "stage": source.opening.stage,
        "partial": source.opening.partial,
        "varying": [name for name, tensor in source.tensors.items() if tensor.varies],
        "elsewhere": sorted(source.opening.elsewhere),
        "left_out": sorted(source.left_out),
        "encrypted": source.cipher is not None,
    }


def small_strategy(strategy: Strategy | None) -> dict[str, Any] | None:
    """Return a strategy without its operators, which move no bytes."""
    if strategy is None:
        return None
    layouts: dict[Layout, int] = {}
    places: dict[tuple[Any, ...], int] = {}
    tensors = {}
    for name, placed in strategy.tensors.items():
        key = tuple((p.stage, layouts.setdefault(p.layout, len(layouts)), p.shape, p.expanded) for p in placed)
        tensors[name] = places.setdefault(key, len(places))
    return {
        "stages": (strategy.stages.start, strategy.stages.stop),
        "devices": strategy.devices,
        "merged": strategy.merged,
        "layouts": [astuple(layout) for layout in layouts],
        "places": list(places),
        "tensors": tensors,
    }


def read_small_strategy(content: dict[str, Any] | None) -> Strategy | None:
    """Return the strategy that `small_strategy` wrote, or raise `ValueError` where it is not valid."""
    if content is None:
        return None
    first, stop = content["stages"]
    devices = content["devices"]
    if not first < stop or not devices or stop * devices > MOST_DEVICES:
        raise ValueError(f"a strategy of {devices} devices in stages {first} to {stop - 1} cannot be")
    layouts = [
        Layout(tuple(matrix), tuple(map(tuple, axes)), size, step, tuple(split), tuple(offset), field)
        for matrix, axes, size, step, split, offset, field in content["layouts"]
    ]
    if any(layout.devices != devices for layout in layouts):
        raise ValueError(f"a layout of a strategy is not for its {devices} devices")
    places = [
        tuple(
            _placed(stage, range(first, stop), layouts, layout, shape, expanded) for stage, layout, shape, expanded in p
        )
        for p in content["places"]
    ]
    if any(a.stage >= b.stage for placed in places for a, b in pairwise(placed)) or not all(places):
        raise ValueError("a tensor of a strategy is in no stage, or in stages that do not ascend")
    if any(number >= len(places) for number in content["tensors"].values()):
        raise ValueError("a tensor of a strategy has places that are not listed")
    tensors = {name: places[number] for name, number in content["tensors"].items()}
    return Strategy(tensors, range(first, stop), devices, merged=content["merged"])


def _placed(
    stage: int, stages: range, layouts: list[Layout], layout: int, shape: list[int] | None, expanded: bool
) -> Placed:
    if stage not in stages or layout >= len(layouts):
        raise ValueError(f"a tensor of a strategy is in stage {stage} with layout {layout}, which are not there")
    if expanded and (shape is None or len(shape) != len(layouts[layout].tensor_map)):
        raise ValueError("a tensor of a strategy is expanded to a shape that its layout does not fit")
    return Placed(stage, layouts[layout], None if shape is None else tuple(shape), expanded=expanded)

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
from dataclasses import astuple, dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from reshard.errors import SourceError
from reshard.formats.directories import is_iteration
from reshard.formats.zarr_files import is_store
from reshard.layout.grid import MOST_DEVICES
from reshard.layout.layout import Layout
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

# Bytes read of touched files to see whether they are copies: in total, of a range, of a range of many files.
_SAMPLED, _LONGEST_SAMPLE, _SHORTEST_LIMIT = 64 << 20, 4 << 20, 64 << 10

STRATEGY = {
    "stages": (COUNT, COUNT),
    "devices": COUNT,
    "merged": FLAG,
    # dev_matrix, tensor_map, opt_weight_shard_size and _step, param_split_shape, indices_offset, field
    "layouts": [([COUNT], [[COUNT]], NUMBER, NUMBER, [NUMBER], [NUMBER], NUMBER)],
    "places": [[(COUNT, COUNT, Maybe([COUNT]), FLAG)]],  # by stage: number, layout, shape, shape is expanded
    "tensors": {TEXT: COUNT},  # an index in places
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
        "index": Maybe(TEXT),  # a set and a rank of whole tensors differ
    },
    "selection": ANY,  # checked by other modules
}


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The provenance of files of a target.

    Attributes:
        target: the requested directory, store or file, a path or a URL.
        root: the directory of the files: the target, or its parent if the target is a file.
        ledger: the directory of its ledger.
        records: the records of the files without ranges, by path below the root.
        content: the content of the provenance file; only its schema has been checked.
    """

    target: str
    root: str
    ledger: str
    records: Mapping[str, Record]
    content: dict[str, Any]

    @property
    def strategy(self) -> Strategy | None:
        """Return the strategy of the target."""
        return read_small_strategy(self.content["target"]["strategy"])

    @property
    def stage(self) -> int | None:
        """Return the requested pipeline stage, if the strategy covers a single one."""
        stage: int | None = self.content["target"]["stage"]
        return stage

    @property
    def ranks(self) -> dict[int, list[str]]:
        """Return the target files by rank, ascending."""
        files: dict[int, list[str]] = {}
        for file, record in sorted(self.records.items()):
            if record.rank is not None:
                files.setdefault(record.rank, []).append(f"{self.root}/{file}")
        return dict(sorted(files.items()))

    def is_as_noted(self) -> bool:
        """Return whether all files exist with the size and time in the ledger."""
        statuses = any_store().statuses([f"{self.root}/{file}" for file in self.records])
        return all(
            not isinstance(state, SourceError) and record.ready == state[:2]
            for record, state in zip(self.records.values(), statuses, strict=True)
        )

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
            digest, number = records[file.path].header, file.index.header
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
        ranges = {f"{self.root}/{file}": records.get(record.link, record).ranges for file, record in records.items()}
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


def made_of(target: Place) -> Made | None:
    """Return the provenance of a target; None if no ledger has it.

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
    """Return the newest provenance of files below a directory, with all its files."""
    directory = directory or f"{root}/{DIRECTORY}"
    records = known(root, None if file is None else [file], directory=directory, with_ranges=False).records
    ready = (record.made for path, record in reversed(records.items()) if record.ready and path.startswith(below))
    digest = next(ready, "")
    files = {path: item for path, item in records.items() if item.made == digest and item.ready and is_inner_path(path)}
    try:
        if as_place(directory).is_symlink():
            return None
        text = read_small(as_place(f"{directory}/made-{digest}.json"), "ledger", _LARGEST, SourceError)
        if digest_of(text) != digest:  # foreign, or changed since
            return None
        content = parse(text)
        check(content, _MADE)
        read_small_strategy(content["target"]["strategy"])
        read_small_strategy(content["source"]["strategy"])
    except (SourceError, ValueError, OSError):
        return None
    target = f"{root}/{file or below}".rstrip("/")
    return Made(target, root, directory, files, content) if content["reshard_made"] == VERSION else None


def source_data(source: Checkpoint) -> dict[str, Any]:
    """Return the part of the provenance that describes a source."""
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
    """Return a strategy as JSON data, without its operators, which move no bytes."""
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
    """Return the strategy in JSON data; raise `ValueError` if it is invalid."""
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

"""Open whole state dicts that `torch.save` wrote: one file per rank, as verl and SkyRL keep them, or a single file.

Each rank saved a dict of its own: its part of each DTensor, with the layout (`dtensors`), and whole plain tensors,
which are replicas of each other. Dicts, and lists that contain dicts or tensors, are flattened to dotted names of keys
and indices, as in PyTorch's distributed checkpoints. Another value that contains a tensor counts as an unreadable
tensor, which can be dropped by name; a value without tensors is an object. If there are several kinds of files, the
tensors of `model_world_size_8_rank_3.pt` keep their names; those of others begin with the kind, such as
`optim.state.0.exp_avg`.

Sources: verl `utils/checkpoint/fsdp_checkpoint_manager.py` (01ee5e0), PyTorch 2.13 `torch/serialization.py` and
`distributed/checkpoint/_traverse.py`, and files that it wrote (`tests/data/dcp`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.errors import Faults, SourceError, names
from reshard.formats.directories import SAVES
from reshard.formats.entries import Entry, FileIndex, RangeReader
from reshard.layout.block import LONGEST_NAME, shape_text
from reshard.readers.dcp.archive import Archive, Archives, ZipPart
from reshard.readers.dcp.dtensors import Tensors, is_tensor
from reshard.readers.listed import BlockList, nothing_readable
from reshard.readers.pickles import Name, Pairs, PickledObject, shown, unpickled
from reshard.source.checkpoint import Checkpoint, Extras, Object, SourceFile, TensorSpec
from reshard.source.probe import compare_contents
from reshard.storage.places import workers_at
from reshard.storage.small import is_text
from reshard.storage.threads import map_ordered
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.readers.dcp.dtensors import DeviceMesh, Kept
    from reshard.source.checkpoint import Tensor
    from reshard.storage.places import Place

NAME = "torch.save"
_WHAT = "a state dict that torch.save stored"
_MODEL = "model"
_OWN = "extra_state"  # of each rank: random numbers
_DICTS = {"dict", "OrderedDict", "defaultdict"}
_DEEPEST = 32
_MOST_VALUES = 1 << 19
_MOST_LOOKED = 64  # items of a list, to see whether it has dicts
_MOST_KEY = 16  # items of a tuple that is a key
_MOST_TEXT = 1 << 25  # characters of all names of a file
_REMOTE_WINDOW = 1 << 22  # a pickle is read in many pieces; each would be a request


class _File(NamedTuple):
    """A file to read: its location, its rank, and the prefix of its names."""

    place: Place
    rank: int
    prefix: str


class _Read(NamedTuple):
    """The contents of a file: tensors with the offsets of their storages, refused tensors, and objects."""

    file: SourceFile
    tensors: Mapping[str, tuple[Kept, int]]
    refused: Mapping[str, str]
    objects: Mapping[str, str]


def open_saves(place: Place, there: Sequence[str], *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open the files of all ranks.

    Args:
        place: the directory.
        there: the names of the files in it.
        contents: compare samples of replicas.

    Raises:
        SourceError: a rank has no file, files disagree about the number of ranks, or a file is not valid.
    """
    matches = [match for match in map(SAVES.files.fullmatch, sorted(there)) if match]
    counts = sorted({int(match["count"]) for match in matches})
    if len(counts) > 1:
        raise SourceError(
            f"{place} has files of runs of {names(counts)} ranks",
            code="several-checkpoints",
            hint="move the files of one run to another directory",
        )
    faults = Faults(str(place))
    by_kind: dict[str, dict[int, str]] = {}
    for match in matches:
        by_kind.setdefault(match["kind"], {})[int(match["rank"])] = match[0]
    for kind, some in by_kind.items():
        missing = (rank for rank in range(counts[0]) if rank not in some)
        if first := list(islice(missing, 64)):
            what = f"{ranks_text(first)}{' and more' if len(first) == 64 else ''}, of {counts[0]}"
            faults.add(f"{kind}_world_size_{counts[0]}_rank_*.pt", f"has no file of {what}", code="missing-ranks")
        if max(some) >= counts[0]:
            faults.add(some[max(some)], f"is of a rank beyond the {counts[0]}", code="no-such-rank")
    faults.raise_if_any(SourceError)
    files = [
        _File(place / name, rank, "" if kind == _MODEL else f"{kind}.")
        for rank in range(counts[0])
        for kind, some in sorted(by_kind.items(), key=lambda item: (item[0] != _MODEL, item[0]))
        for name in [some[rank]]
    ]
    return _opened(place, files, counts[0], contents=contents)


def open_save(place: Place, *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open a file of a whole state dict; arguments and errors as for `open_saves`."""
    return _opened(place, [_File(place, 0, "")], 1, contents=contents)


def _opened(place: Place, files: Sequence[_File], count: int, *, contents: bool | Literal["blocks"]) -> Checkpoint:
    """Read the files of `count` ranks, and join their tensors."""
    numbered = {file.place: (number, file) for number, file in enumerate(files)}
    every = list(map_ordered(lambda one: _read(*numbered[one], count), list(numbered), workers_at(numbered)))
    ranks = tuple(file.rank for file in files)
    held: dict[str, list[tuple[int, Kept, int]]] = {}
    objects: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    for number, one in enumerate(every):
        for name, (kept, begin) in one.tensors.items():
            held.setdefault(name, []).append((number, kept, begin))
        for name, reason in one.refused.items():
            unreadable.setdefault(name, reason)
        objects.update(one.objects)
    unreadable |= dict.fromkeys(held.keys() & objects.keys(), "is a tensor in some files, and none in others")
    listed = BlockList()
    tensors: dict[str, Tensor] = {}
    for name, some in held.items():
        try:
            if name not in unreadable:
                tensors[name] = _tensor(name, some, ranks, listed)
        except SourceError as error:
            unreadable[name] = error.message
    if not tensors:
        raise SourceError(f"{place}: {nothing_readable(unreadable)}", code="no-tensors")
    unread = {name: Object(problem=kind) for name, kind in objects.items() if name not in {*held, *unreadable}}
    checkpoint = Checkpoint(
        str(place), tensors, tuple(one.file for one in every), ranks, unreadable=unreadable,
        extras=Extras(NAME, objects=unread),
    )  # fmt: skip
    ruled = {name: "copy" for name in tensors if name.startswith(f"{_OWN}.")}
    return compare_contents(checkpoint, ruled, contents=contents)


def _tensor(name: str, some: Sequence[tuple[int, Kept, int]], ranks: Sequence[int], listed: BlockList) -> Tensor:
    """Return a tensor; raise `SourceError` if its parts in the files do not fit together."""
    dtypes = {kept.local.dtype.name: kept.local.dtype for _, kept, _ in some}
    if len(dtypes) > 1:
        raise SourceError(f"is {names(sorted(dtypes))} in different files", code="mixed-dtypes")
    specs = {ranks[number]: kept.spec for number, kept, _ in some}
    first = next(iter(specs.values()))
    meshes: dict[DeviceMesh, set[int]] = {}
    for rank, spec in specs.items():
        if (spec and spec[:2]) != (first and first[:2]):
            raise SourceError(
                f"has different layouts in the files of ranks {min(specs)} and {rank}", code="ranks-disagree"
            )
        if spec:
            meshes.setdefault(spec.mesh, set()).add(rank)
    for mesh, those in meshes.items():
        if those != set(mesh.ranks):
            raise SourceError(
                f"has a mesh of {ranks_text(mesh.ranks)}, but only in the files of {ranks_text(those)}",
                code="ranks-disagree",
            )
    shapes = {kept.local.shape: ranks[number] for number, kept, _ in reversed(some)}
    if first is None and len(shapes) > 1:
        texts = [f"{shape_text(shape)} in rank {rank}" for shape, rank in sorted(shapes.items(), key=lambda i: i[1])]
        raise SourceError(
            f"has shape {names(texts, most=2)} but is no DTensor, so its layout is unknown", code="no-layout"
        )
    shape = first.shape if first else some[0][1].local.shape
    parts = [
        (block, local.extent(number, begin))
        for number, kept, begin in some
        for block, local in kept.parts(ranks[number])
    ]
    (dtype,) = dtypes.values()
    found = listed.tensor(TensorSpec(name, dtype, shape), parts)
    if isinstance(found, str):
        raise SourceError(found, code="missing-blocks")
    return found


def _read(number: int, file: _File, count: int) -> _Read:
    """Read a file of one of `count` ranks; entries refer to it by its number."""
    path = file.place.absolute()
    status = path.status()
    archive = Archive(RangeReader(str(path), window=_REMOTE_WINDOW if path.can.has_latency else 0))
    order = archive.content(b"byteorder").upto(0, 16) if b"byteorder" in archive.records else b"little"
    if order.strip() != b"little":
        raise SourceError(f"{path} has the unsupported byte order {order!r}", code="unsupported-byte-order")
    content = archive.content(b"data.pkl")
    made, holding = unpickled(content, _WHAT, outside=True), _Holding()
    try:
        values = _flattened(made, file.prefix, min(_MOST_VALUES, content.size), holding)
    except SourceError as error:
        raise SourceError(f"{path}: {error.message}; expected {_WHAT}", code=error.code) from None
    reader, refused = Tensors(file.rank, count), dict[str, str]()
    objects: dict[str, str] = {}
    kept: dict[str, Kept] = {}
    for name, value in values.items():
        if not is_tensor(value):
            if holding.tensor(value):
                refused[name] = f"is a pickled {_kind(value)} with tensors in it, which is not read"
            else:
                objects[name] = f"a pickled {_kind(value)}, which is not read"
            continue
        try:
            kept[name] = reader.kept(value)
        except SourceError as error:
            refused[name] = error.message
    records = archive.checked(dict.fromkeys(one.local.record for one in kept.values()))
    entries: dict[str, Entry] = {}
    for name, one in kept.items():
        record = records[one.local.record]
        try:
            entries[name] = one.local.entry(record.begin, record.begin + record.size)
        except SourceError as error:
            refused[name] = error.message
    sums = Archives((ZipPart("", 0, archive.reader.size),))
    index = FileIndex(NAME, entries, header_id=number, sums=sums)
    found = {name: (kept[name], records[kept[name].local.record].begin) for name in entries}
    return _Read(SourceFile(str(path), status.nbytes, status.mtime_ns, index, status.change), found, refused, objects)


def _kind(value: object) -> str:
    if isinstance(value, Name | PickledObject):
        return value.name if value.name.isidentifier() and len(value.name) < 64 else "object"
    return "dict" if isinstance(value, Pairs) else type(value).__name__


def _flattened(made: object, prefix: str, most: int, holding: _Holding) -> dict[str, object]:
    """Return the values of a state dict by dotted names: tensors, and other values that are not flattened.

    Args:
        made: the pickled value.
        prefix: the prefix of all names.
        most: the most values that there can be.
        holding: finds tensors in values.

    Raises:
        SourceError: it is not a dict, has an invalid name, or is too deep or large.
    """
    found: dict[str, object] = {}
    if _kind(made) in _DICTS and not _items(made) and not holding.tensor(made):
        return found
    if _inside(made, holding) is None:
        raise SourceError(f"holds {'a tensor' if is_tensor(made) else shown(made)}", code="not-a-state-dict")
    waiting: list[tuple[str, object, int]] = [(prefix, made, 0)]
    count = length = 0
    while waiting:
        name, value, depth = waiting.pop()
        inside = _inside(value, holding)
        if inside is None:
            name = name.removesuffix(".")
            if name in found or not is_text(name) or len(name.encode()) > LONGEST_NAME:
                raise SourceError(f"has {name!r:.60} twice, or it is not a valid name", code="bad-name")
            found[name] = value
            continue
        count += len(inside[1])
        if depth == _DEEPEST or count > most:
            raise SourceError("is nested too deeply, or has too many values", code="too-large")
        first = len(waiting)
        for key, one in zip(*inside, strict=True):
            waiting.append((f"{name}{key}.", one, depth + 1))
            length += len(waiting[-1][0])
            if length > _MOST_TEXT:
                raise SourceError(f"has names of more than {_MOST_TEXT:,} characters in all", code="too-large")
        waiting[first:] = reversed(waiting[first:])
    return found


def _inside(value: object, holding: _Holding) -> tuple[Sequence[object], Sequence[object]] | None:
    """Return keys and values of a dict, or of a list with tensors or dicts; None for other values."""
    if _kind(value) in _DICTS:
        items = _items(value)
        keys = items[::2]
        plain = 0 < len(items) <= 2 * _MOST_VALUES and not len(items) % 2 and all(map(_is_plain, keys))
        more = isinstance(value, PickledObject) and (holding.tensor(value.arguments) or holding.tensor(value.state))
        return (keys, items[1::2]) if plain and not more else None
    if isinstance(value, list | tuple) and len(value) <= _MOST_VALUES:
        has_dicts = any(isinstance(one, Pairs) for one in value[:_MOST_LOOKED])
        return (range(len(value)), value) if has_dicts or holding.tensor(value) else None
    return None


def _is_plain(key: object) -> bool:
    """Return whether a key of a dict is short, and text or numbers."""
    some = key if type(key) is tuple else (key,)
    return len(some) <= _MOST_KEY and all(
        one is None or type(one) in {int, float, bool} or (type(one) is str and len(one) <= LONGEST_NAME)
        for one in some
    )


def _items(value: object) -> Pairs:
    """Return the keys and values of a dict in turn."""
    found = value.items if isinstance(value, PickledObject) else value
    return found if isinstance(found, Pairs) else Pairs()


class _Holding:
    """Finds values that contain tensors, visiting shared values once."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}  # by the ids of values, which stay alive

    def tensor(self, value: object) -> bool:
        """Return whether a value is a tensor or a storage, or contains one at any depth."""
        if not isinstance(value, list | tuple | PickledObject):
            return False
        if id(value) not in self._known:
            self._look(value)
        return self._known[id(value)]

    def _look(self, value: object) -> None:
        """Visit all values in a value that are not known yet."""
        above: dict[int, list[int]] = {}
        has: list[int] = []
        waiting: list[Any] = [value]
        self._known[id(value)] = False
        while waiting:
            one = waiting.pop()
            number, parts = id(one), one
            if isinstance(one, PickledObject):
                if is_tensor(one) or one.made_by is None:  # a reference outside of the pickle is a storage
                    has.append(number)
                    continue
                parts = one.arguments, one.state, one.items
            for part in parts:
                if isinstance(part, list | tuple | PickledObject):
                    known = self._known.get(id(part))
                    if known:
                        has.append(number)
                        continue
                    above.setdefault(id(part), []).append(number)
                    if known is None:
                        self._known[id(part)] = False
                        waiting.append(part)
        while has:
            number = has.pop()
            self._known[number] = True
            has += above.pop(number, ())

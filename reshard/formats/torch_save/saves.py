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

from reshard.core.layout.block import LONGEST_NAME, shape_text
from reshard.core.model.checkpoint import Checkpoint, SourceFile, TensorSpec
from reshard.core.model.facts import Extras, Object
from reshard.core.model.probe import compare_contents
from reshard.core.model.table import Blocks, common_dtype, nothing_readable
from reshard.core.storage.base import COPY_AGAIN
from reshard.core.storage.places import workers_at
from reshard.core.storage.small import is_text
from reshard.core.storage.threads import map_ordered
from reshard.errors import Faults, SourceError, names
from reshard.formats.torch_save.names import SAVES
from reshard.kits.torch.dtensors import Tensors, is_tensor
from reshard.kits.torch.file import NAME, FileTensor, TorchFile
from reshard.kits.torch.pickles import Name, Pairs, PickledObject, describe
from reshard.kits.training.arguments import RANK_SIZES, stated_in
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.core.model.checkpoint import Tensor
    from reshard.core.model.entries import Entry
    from reshard.core.storage.places import Place
    from reshard.kits.torch.dtensors import DeviceMesh, RankTensor

EXPECTED = "a state dict that torch.save stored"
"""The content of a file, for messages."""

_MODEL = "model"
_RANK_STATE = "extra_state"  # per-rank RNG state
_DICTS = {"dict", "OrderedDict", "defaultdict"}
_DEEPEST = 32
_MOST_VALUES = 1 << 19
_MOST_SCANNED = 64  # items of a list, to see whether it has dicts
_MOST_KEY = 16  # items of a tuple that is a key
_MOST_TEXT = 1 << 25  # characters of all names of a file
_IS_DTENSOR = "is a DTensor, which is not a part of a tensor-parallel rank"


class File(NamedTuple):
    """A file to read: its location, its rank, and the prefix of its names."""

    location: Place
    rank: int
    prefix: str


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
        file: its record.
        tensors: the tensors by name, each with the offset of its storage in the file.
        refused: the names of values that have tensors and cannot be read, with the reason.
        objects: the names of values without tensors, described.
    """

    file: SourceFile
    tensors: Mapping[str, tuple[RankTensor, int]]
    refused: Mapping[str, str]
    objects: Mapping[str, str]

    def parts(self, number: int) -> tuple[dict[str, FileTensor], dict[str, str]]:
        """Return the tensors of one tensor-parallel part, and the names that are refused, with the reason.

        Args:
            number: the number of the file in the checkpoint.
        """
        parts = {
            name: FileTensor(tensor.local.dtype, tensor.local.shape, tensor.local.extent(number, begin))
            for name, (tensor, begin) in self.tensors.items()
            if tensor.spec is None
        }
        return parts, {**{name: _IS_DTENSOR for name in self.tensors if name not in parts}, **self.refused}


def open_saves(directory: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open the files of all ranks.

    Args:
        directory: the directory.
        listing: the names of the files in it.
        contents: compare samples of replicas.

    Raises:
        SourceError: a rank has no file, files disagree about the number of ranks, or a file is not valid.
    """
    matches = [match for match in map(SAVES.files.fullmatch, sorted(listing)) if match]
    counts = sorted({int(match["count"]) for match in matches})
    if len(counts) > 1:
        raise SourceError(
            f"{directory} has files of runs of {names(counts)} ranks",
            code="several-checkpoints",
            hint="move the files of one run to another directory",
        )
    faults = Faults(str(directory))
    by_kind: dict[str, dict[int, str]] = {}
    for match in matches:
        by_kind.setdefault(match["kind"], {})[int(match["rank"])] = match[0]
    for kind, names_by_rank in by_kind.items():
        missing = (rank for rank in range(counts[0]) if rank not in names_by_rank)
        if first := list(islice(missing, 64)):
            missing_ranks = f"{ranks_text(first)}{' and more' if len(first) == 64 else ''}, of {counts[0]}"
            fault = f"has no file of {missing_ranks}"
            faults.add(f"{kind}_world_size_{counts[0]}_rank_*.pt", fault, code="missing-ranks", hint=COPY_AGAIN)
        if max(names_by_rank) >= counts[0]:
            faults.add(names_by_rank[max(names_by_rank)], f"is of a rank beyond the {counts[0]}", code="no-such-rank")
    faults.raise_if_any(SourceError)
    files = [
        File(directory / name, rank, "" if kind == _MODEL else f"{kind}.")
        for rank in range(counts[0])
        for kind, names_by_rank in sorted(by_kind.items(), key=lambda item: (item[0] != _MODEL, item[0]))
        for name in [names_by_rank[rank]]
    ]
    return _opened(directory, files, counts[0], contents=contents)


def open_save(location: Place, *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open a file of a whole state dict; arguments and errors as for `open_saves`."""
    files = read_files([File(location, 0, "")], 1, check=_refuse_rank)
    return joined(location, files, [0], contents=contents)


def open_only(directory: Place, name: str, *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open the only file in a directory; arguments and errors as for `open_saves`."""
    files = read_files([File(directory / name, 0, "")], 1, check=_refuse_rank)
    return joined(directory, files, [0], contents=contents)


def _refuse_rank(saved: TorchFile) -> None:
    """Refuse a file of Megatron-LM whose arguments say that it is of one of several ranks."""
    values = saved.value.items() if isinstance(saved.value, Pairs) else ()
    stated = stated_in(next((value for key, value in values if key == "args"), None))
    if any(isinstance(size := stated.get(name), int) and size > 1 for name in RANK_SIZES):
        raise SourceError(
            f"{saved.path} is of one of several ranks, according to its args",
            code="one-of-several",
            hint="open the directory of all ranks",
        )


def _opened(location: Place, files: Sequence[File], count: int, *, contents: bool | Literal["blocks"]) -> Checkpoint:
    """Read the files of `count` ranks, and join their tensors."""
    return joined(location, read_files(files, count), [file.rank for file in files], contents=contents)


def read_files(
    files: Sequence[File], count: int, *, check: Callable[[TorchFile], object] | None = None
) -> list[Contents]:
    """Read files of `count` ranks; at URLs, several at once.

    Args:
        files: the files.
        count: the number of ranks.
        check: raises an error for a file that is not to be read.

    Raises:
        SourceError: a file is not valid.
    """
    numbered = {file.location: (number, file) for number, file in enumerate(files)}

    def read(location: Place) -> Contents:
        number, file = numbered[location]
        saved = TorchFile.read(location, EXPECTED)
        if check is not None:
            check(saved)
        return read_state_dict(saved, number, saved.value, file.prefix, Tensors(file.rank, count))

    return list(map_ordered(read, list(numbered), workers_at(numbered)))


def joined(
    location: Place, files: Sequence[Contents], ranks: Sequence[int], *, contents: bool | Literal["blocks"]
) -> Checkpoint:
    """Join the tensors of files.

    Args:
        location: the file, or the directory of the files.
        files: their contents.
        ranks: the rank of each.
        contents: compare samples of replicas.

    Raises:
        SourceError: no tensor can be read, or replicas differ.
    """
    tensors_by_name: dict[str, list[tuple[int, RankTensor, int]]] = {}
    objects: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    for number, read_file in enumerate(files):
        for name, (rank_tensor, begin) in read_file.tensors.items():
            tensors_by_name.setdefault(name, []).append((number, rank_tensor, begin))
        for name, reason in read_file.refused.items():
            unreadable.setdefault(name, reason)
        objects.update(read_file.objects)
    unreadable |= dict.fromkeys(
        tensors_by_name.keys() & objects.keys(), "is a tensor in some files, and none in others"
    )
    block_list = Blocks()
    tensors: dict[str, Tensor] = {}
    for name, rank_tensors in tensors_by_name.items():
        try:
            if name not in unreadable:
                tensors[name] = _tensor(name, rank_tensors, ranks, block_list)
        except SourceError as error:
            unreadable[name] = error.message
    if not tensors:
        raise SourceError(f"{location}: {nothing_readable(unreadable)}", code="no-tensors")
    unread = {
        name: Object(problem=kind) for name, kind in objects.items() if name not in {*tensors_by_name, *unreadable}
    }
    checkpoint = Checkpoint(
        str(location), tensors, tuple(read_file.file for read_file in files), tuple(ranks), unreadable=unreadable,
        extras=Extras(NAME, objects=unread),
    )  # fmt: skip
    ruled = {name: "copy" for name in tensors if name.startswith(f"{_RANK_STATE}.")}
    return compare_contents(checkpoint, ruled, contents=contents)


def _tensor(
    name: str, rank_tensors: Sequence[tuple[int, RankTensor, int]], ranks: Sequence[int], block_list: Blocks
) -> Tensor:
    """Return a tensor; raise `SourceError` if its parts in the files do not fit together."""
    dtype = common_dtype(rank_tensor.local.dtype for _, rank_tensor, _ in rank_tensors)
    specs = {ranks[number]: rank_tensor.spec for number, rank_tensor, _ in rank_tensors}
    first = next(iter(specs.values()))
    meshes: dict[DeviceMesh, set[int]] = {}
    for rank, spec in specs.items():
        if (spec and spec[:2]) != (first and first[:2]):
            raise SourceError(
                f"has different layouts in the files of ranks {min(specs)} and {rank}", code="ranks-disagree"
            )
        if spec:
            meshes.setdefault(spec.mesh, set()).add(rank)
    for mesh, file_ranks in meshes.items():
        if file_ranks != set(mesh.ranks):
            raise SourceError(
                f"has a mesh of {ranks_text(mesh.ranks)}, but only in the files of {ranks_text(file_ranks)}",
                code="ranks-disagree",
            )
    shapes = {rank_tensor.local.shape: ranks[number] for number, rank_tensor, _ in reversed(rank_tensors)}
    if first is None and len(shapes) > 1:
        texts = [f"{shape_text(shape)} in rank {rank}" for shape, rank in sorted(shapes.items(), key=lambda i: i[1])]
        raise SourceError(
            f"has shape {names(texts, most=2)} but is no DTensor, so its layout is unknown", code="no-layout"
        )
    shape = first.shape if first else rank_tensors[0][1].local.shape
    parts = [
        (block, local.extent(number, begin))
        for number, rank_tensor, begin in rank_tensors
        for block, local in rank_tensor.parts(ranks[number])
    ]
    return block_list.tensor(TensorSpec(name, dtype, shape), parts)


def read_state_dict(saved: TorchFile, number: int, state_dict: object, prefix: str, reader: Tensors) -> Contents:
    """Return the contents of a state dict in a file.

    Args:
        saved: the file.
        number: its number among the files of the checkpoint.
        state_dict: the value of the file, or a part of it.
        prefix: the prefix of all names.
        reader: reads the tensors of the file.

    Raises:
        SourceError: it is not a state dict, or a storage is missing.
    """
    finder = TensorFinder()
    try:
        values = _flattened(state_dict, prefix, min(_MOST_VALUES, saved.pickle.nbytes), finder)
    except SourceError as error:
        raise SourceError(f"{saved.path}: {error.message}; expected {EXPECTED}", code=error.code) from None
    refused = dict[str, str]()
    objects: dict[str, str] = {}
    rank_tensors: dict[str, RankTensor] = {}
    for name, value in values.items():
        if not is_tensor(value):
            if finder.has_tensor(value):
                refused[name] = f"is a pickled {kind_of(value)} with tensors in it, which is not read"
            else:
                objects[name] = f"a pickled {kind_of(value)}, which is not read"
            continue
        try:
            rank_tensors[name] = reader.read(value)
        except SourceError as error:
            refused[name] = error.message
    storages = saved.storages({rank_tensor.local.record for rank_tensor in rank_tensors.values()})
    entries: dict[str, Entry] = {}
    for name, rank_tensor in rank_tensors.items():
        local = rank_tensor.local
        try:
            entries[name] = FileTensor.of(local, number, storages[local.record]).entry
        except SourceError as error:
            refused[name] = error.message
    tensors = {name: (rank_tensors[name], storages[rank_tensors[name].local.record].begin) for name in entries}
    return Contents(saved.source_file(number, entries), tensors, refused, objects)


def kind_of(value: object) -> str:
    """Return the kind of a pickled value, for messages."""
    if isinstance(value, Name | PickledObject):
        return value.name if value.name.isidentifier() and len(value.name) < 64 else "object"
    return "dict" if isinstance(value, Pairs) else type(value).__name__


def _flattened(state_dict: object, prefix: str, most: int, finder: TensorFinder) -> dict[str, object]:
    """Return the values of a state dict by dotted names: tensors, and other values that are not flattened.

    Args:
        state_dict: the pickled value.
        prefix: the prefix of all names.
        most: the largest number of values.
        finder: finds tensors in values.

    Raises:
        SourceError: it is not a dict, has an invalid name, or is too deep or large.
    """
    flat: dict[str, object] = {}
    if kind_of(state_dict) in _DICTS and not _items(state_dict) and not finder.has_tensor(state_dict):
        return flat
    if _inside(state_dict, finder) is None:
        raise SourceError(
            f"holds {'a tensor' if is_tensor(state_dict) else describe(state_dict)}", code="not-a-state-dict"
        )
    waiting: list[tuple[str, object, int]] = [(prefix, state_dict, 0)]
    count = length = 0
    while waiting:
        name, value, depth = waiting.pop()
        inside = _inside(value, finder)
        if inside is None:
            name = name.removesuffix(".")
            if name in flat or not is_text(name) or len(name.encode()) > LONGEST_NAME:
                raise SourceError(f"has {name!r:.60} twice, or it is not a valid name", code="bad-name")
            flat[name] = value
            continue
        count += len(inside[1])
        if depth == _DEEPEST or count > most:
            raise SourceError("is nested too deeply, or has too many values", code="too-large")
        first = len(waiting)
        for key, item in zip(*inside, strict=True):
            waiting.append((f"{name}{key}.", item, depth + 1))
            length += len(waiting[-1][0])
            if length > _MOST_TEXT:
                raise SourceError(f"has names of more than {_MOST_TEXT:,} characters in all", code="too-large")
        waiting[first:] = reversed(waiting[first:])
    return flat


def _inside(value: object, finder: TensorFinder) -> tuple[Sequence[object], Sequence[object]] | None:
    """Return keys and values of a dict, or of a list with tensors or dicts; None for other values."""
    if kind_of(value) in _DICTS:
        items = _items(value)
        keys = items[::2]
        plain = 0 < len(items) <= 2 * _MOST_VALUES and not len(items) % 2 and all(map(_is_plain, keys))
        has_other_tensors = isinstance(value, PickledObject) and (
            finder.has_tensor(value.arguments) or finder.has_tensor(value.state)
        )
        return (keys, items[1::2]) if plain and not has_other_tensors else None
    if isinstance(value, list | tuple) and len(value) <= _MOST_VALUES:
        has_dicts = any(isinstance(item, Pairs) for item in value[:_MOST_SCANNED])
        return (range(len(value)), value) if has_dicts or finder.has_tensor(value) else None
    return None


def _is_plain(key: object) -> bool:
    """Return whether a key of a dict is short, and text or numbers."""
    parts = key if type(key) is tuple else (key,)
    return len(parts) <= _MOST_KEY and all(
        part is None or type(part) in {int, float, bool} or (type(part) is str and len(part) <= LONGEST_NAME)
        for part in parts
    )


def _items(value: object) -> Pairs:
    """Return the keys and values of a dict in turn."""
    items = value.items if isinstance(value, PickledObject) else value
    return items if isinstance(items, Pairs) else Pairs()


class TensorFinder:
    """Finds values that contain tensors, visiting shared values once."""

    def __init__(self) -> None:
        self._results: dict[int, bool] = {}  # by id; the values stay alive

    def has_tensor(self, value: object) -> bool:
        """Return whether a value is a tensor or a storage, or contains one at any depth."""
        if not isinstance(value, list | tuple | PickledObject):
            return False
        key = id(value)
        if key not in self._results:
            self._search(key, value)
        return self._results[key]

    def _search(self, key: int, value: object) -> None:
        """Visit a value, whose id is `key`, and all values in it that were not visited before."""
        above: dict[int, list[int]] = {}
        has: list[int] = []
        waiting: list[tuple[int, Any]] = [(key, value)]
        self._results[key] = False
        while waiting:
            number, container = waiting.pop()
            parts = container
            if isinstance(container, PickledObject):
                if is_tensor(container) or container.made_by is None:  # a reference outside of the pickle is a storage
                    has.append(number)
                    continue
                parts = container.arguments, container.state, container.items
            for part in parts:
                if isinstance(part, list | tuple | PickledObject):
                    part_key = id(part)
                    result = self._results.get(part_key)
                    if result:
                        has.append(number)
                        continue
                    above.setdefault(part_key, []).append(number)
                    if result is None:
                        self._results[part_key] = False
                        waiting.append((part_key, part))
        while has:
            number = has.pop()
            self._results[number] = True
            has += above.pop(number, ())

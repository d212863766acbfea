"""Open whole state dicts that `torch.save` wrote: one file per rank, as verl and SkyRL keep them, a set, or one file.

Each rank saved a dict of its own: its part of each DTensor, with the layout (`dtensors`), and whole plain tensors,
which are replicas of each other. Dicts, and lists that contain dicts or tensors, are flattened to dotted names of keys
and indices, as in PyTorch's distributed checkpoints. Another value that contains a tensor counts as an unreadable
tensor, which can be dropped by name; a value without tensors is an object. If there are several kinds of files, the
tensors of `model_world_size_8_rank_3.pt` keep their names; those of others begin with the kind, such as
`optim.state.0.exp_avg`.

A set has whole tensors in several files, as Hugging Face's `pytorch_model-00001-of-00002.bin`. Its index names the file
of each tensor, and is compared with the files. Without an index, all numbered files have to be there.

Sources: verl `utils/checkpoint/fsdp_checkpoint_manager.py` (01ee5e0), PyTorch 2.13 `torch/serialization.py` and
`distributed/checkpoint/_traverse.py`, and files that it wrote (`tests/data/dcp`); transformers 4.57 `modeling_utils.py`
(`save_pretrained` with `safe_serialization=False`).
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

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
from reshard.formats.torch_save.names import SAVED_SET, SAVES
from reshard.kits.indexes import SAVED_INDEX, check_members, read_index
from reshard.kits.torch.dtensors import Tensors, is_tensor
from reshard.kits.torch.file import NAME, FileTensor, TorchFile
from reshard.kits.torch.pickles import Name, Pairs, PickledObject, describe, parts_of
from reshard.kits.training.arguments import RANK_SIZES, stated_in
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.model.checkpoint import Tensor
    from reshard.core.model.entries import Entry
    from reshard.core.storage.places import Place
    from reshard.kits.torch.dtensors import RankTensor

EXPECTED = "a state dict that torch.save stored"
"""The content of a file, for messages."""

_MOVE = "move the files of one set to another directory"
_NUMBERED = re.compile(r"(?P<before>(?:.+[-_.])?)(?P<number>\d{5,9})-of-(?P<count>\d{5,9})(?P<after>\.\w+)", re.DOTALL)

_MODEL = "model"
_RANK_STATE = "extra_state"  # per-rank RNG state
_DICTS = {"dict", "OrderedDict", "defaultdict"}
_DEEPEST = 32
_MOST_SCANNED = 64  # items of a list, to see whether it has dicts
_MOST_KEY = 16  # items of a tuple that is a key
_MOST_TEXT = 1 << 25  # characters of all names of a file, and 64 for each value
_VALUE_COST = 64
_IS_DTENSOR = "is a DTensor, which is not a part of a tensor-parallel rank"


class File(NamedTuple):
    """A file to read: its location, its rank, and the prefix of its names."""

    location: Place
    rank: int = 0
    prefix: str = ""


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
    (count,) = counts
    faults = Faults(str(directory))
    by_kind: dict[str, dict[int, str]] = {}
    for match in matches:
        by_kind.setdefault(match["kind"], {})[int(match["rank"])] = match[0]
    for kind, names_by_rank in by_kind.items():
        if missing := list(islice((rank for rank in range(count) if rank not in names_by_rank), 64)):
            fault = f"has no file of {ranks_text(missing)}, of {count}"
            faults.add(f"{kind}_world_size_{count}_rank_*.pt", fault, code="missing-ranks", hint=COPY_AGAIN)
        if max(names_by_rank) >= count:
            faults.add(names_by_rank[max(names_by_rank)], f"is of a rank beyond the {count}", code="no-such-rank")
    faults.raise_if_any(SourceError)
    files = [
        File(directory / by_kind[kind][rank], rank, "" if kind == _MODEL else f"{kind}.")
        for rank in range(count)
        for kind in sorted(by_kind, key=lambda kind: (kind != _MODEL, kind))
    ]
    return _joined(directory, read_files(files, count), [file.rank for file in files], contents=contents)


def open_set(directory: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open the files of a set.

    Args:
        directory: the directory.
        listing: the names of the files in it.
        contents: compare samples of replicas.

    Raises:
        SourceError: files are missing or of several sets, the index is not valid or disagrees with the files, or a file
            is not valid.
    """
    indexes = sorted(filter(SAVED_INDEX.fullmatch, listing))
    members = sorted(name for name in listing if SAVED_SET.files.fullmatch(name) and name not in indexes)
    index = read_index(directory, indexes)  # which refuses several
    if index is None:
        _check_numbers(directory, members)
    locations, weight_map = index or ([directory / name for name in members], {})
    if others := sorted({*members}.difference(location.name for location in locations)):
        raise SourceError(
            f"{directory} has {names(others, most=3)}, which {indexes[0]} does not name",
            code="several-checkpoints",
            hint=_MOVE,
        )
    files = read_files([File(location) for location in locations], 1)
    by_file = {
        location.name: [*read.tensors, *read.refused, *read.objects]
        for location, read in zip(locations, files, strict=True)
    }
    check_members(directory, weight_map, by_file)
    return _joined(directory, files, [0] * len(files), contents=contents)


def _check_numbers(directory: Place, members: Sequence[str]) -> None:
    """Refuse numbered files of several sets, or a set that lacks a file."""
    matches = [match for match in map(_NUMBERED.fullmatch, members) if match]
    families = {(match["before"], int(match["count"]), match["after"]) for match in matches}
    numbers = {int(match["number"]) for match in matches}
    if len(families) != 1 or len(numbers) < len(members) or max(numbers) > int(matches[0]["count"]):
        raise SourceError(
            f"{directory} has files of several sets, {names(members, most=3)}", code="several-checkpoints", hint=_MOVE
        )
    count = int(matches[0]["count"])
    if missing := list(islice((number for number in range(1, count + 1) if number not in numbers), 64)):
        fault = f"{directory} has no file {names(missing)} of {count}, and no index"
        raise SourceError(fault, code="missing-shards", hint=COPY_AGAIN)


def open_save(location: Place, *, root: Place | None = None, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open a file of a whole state dict: of `root`, if it is the only one in that directory; see `open_saves`."""
    saved = TorchFile.read(location, EXPECTED)
    _refuse_rank(saved)
    file = read_state_dict(saved, 0, saved.value, "", Tensors(0, 1))
    return _joined(root or location, [file], [0], contents=contents)


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


def read_files(files: Sequence[File], count: int) -> list[Contents]:
    """Read files of `count` ranks, at URLs several at once; raise `SourceError` if one is not valid."""
    numbered = {file.location: (number, file) for number, file in enumerate(files)}

    def read(location: Place) -> Contents:
        number, file = numbered[location]
        saved = TorchFile.read(location, EXPECTED)
        return read_state_dict(saved, number, saved.value, file.prefix, Tensors(file.rank, count))

    return list(map_ordered(read, list(numbered), workers_at(numbered)))


def _joined(
    location: Place, files: Sequence[Contents], ranks: Sequence[int], *, contents: bool | Literal["blocks"]
) -> Checkpoint:
    """Join the tensors of files, of the given ranks; raise `SourceError` if none can be read, or replicas differ."""
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
    specs = {ranks[number]: rank_tensor.spec and rank_tensor.spec[:2] for number, rank_tensor, _ in rank_tensors}
    if len(set(specs.values())) > 1:
        raise SourceError(f"has different layouts in the files of {ranks_text(specs)}", code="ranks-disagree")
    first = rank_tensors[0][1].spec
    shapes = dict.fromkeys(rank_tensor.local.shape for _, rank_tensor, _ in rank_tensors)
    if first is None and len(shapes) > 1:
        texts = names([*map(shape_text, shapes)], most=2)
        raise SourceError(f"has the shapes {texts} but is no DTensor, so its layout is unknown", code="no-layout")
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
        values = _flattened(state_dict, prefix, finder)
    except SourceError as error:
        raise SourceError(f"{saved.path}: {error.message}; expected {EXPECTED}", code=error.code) from None
    refused: dict[str, str] = {}
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


def _flattened(state_dict: object, prefix: str, finder: TensorFinder) -> dict[str, object]:
    """Return the values of a state dict by dotted names: tensors, and other values that are not flattened.

    Args:
        state_dict: the pickled value.
        prefix: the prefix of all names.
        finder: finds tensors in values.

    Raises:
        SourceError: it is not a dict, has an invalid name, or is too deep or large.
    """
    is_empty = kind_of(state_dict) in _DICTS and not _pairs(state_dict)
    if is_empty and not finder.has_tensor(state_dict):
        return {}
    values = _Values(finder)
    values.add(prefix, state_dict)
    if len(values.by_name) == 1 and prefix.removesuffix(".") in values.by_name:
        raise SourceError(
            f"holds {'a tensor' if is_tensor(state_dict) else describe(state_dict)}", code="not-a-state-dict"
        )
    return values.by_name


class _Values:
    """The values of nested dicts and lists, by dotted names."""

    def __init__(self, finder: TensorFinder) -> None:
        self.by_name: dict[str, object] = {}
        self._finder, self._room = finder, _MOST_TEXT

    def add(self, prefix: str, value: object, depth: int = 0) -> None:
        """Add a value, or those in it; `prefix` is its name with a dot."""
        items = self._inside(value)
        if items is None:
            name = prefix.removesuffix(".")
            if name in self.by_name or not is_text(name) or len(name.encode()) > LONGEST_NAME:
                raise SourceError(f"has {name!r:.60} twice, or it is not a valid name", code="bad-name")
            self.by_name[name] = value
            return
        if depth == _DEEPEST:
            raise SourceError("is nested too deeply", code="too-large")
        for key, item in items:
            inner = f"{prefix}{key}."
            self._take(len(inner) + _VALUE_COST)
            self.add(inner, item, depth + 1)

    def _inside(self, value: object) -> Iterable[tuple[object, object]] | None:
        """Return the items of a dict, or of a list with tensors or dicts; None for another value."""
        has_tensor = self._finder.has_tensor
        if kind_of(value) in _DICTS:
            pairs = _pairs(value)
            self._take(len(pairs))
            has_others = isinstance(value, PickledObject) and has_tensor((value.arguments, value.state))
            return pairs.items() if pairs and all(map(_is_plain, pairs[::2])) and not has_others else None
        if isinstance(value, list | tuple):
            has_dicts = any(isinstance(item, Pairs) for item in value[:_MOST_SCANNED])
            return enumerate(value) if has_dicts or has_tensor(value) else None
        return None

    def _take(self, count: int) -> None:
        self._room -= count
        if self._room < 0:
            raise SourceError("has too many values, or too long names", code="too-large")


def _is_plain(key: object) -> bool:
    """Return whether a key of a dict is short, and text or numbers."""
    parts = key if type(key) is tuple else (key,)
    return len(parts) <= _MOST_KEY and all(
        part is None or type(part) in {int, float, bool} or (type(part) is str and len(part) <= LONGEST_NAME)
        for part in parts
    )


def _pairs(value: object) -> Pairs:
    """Return the keys and values of a dict in turn."""
    items = value.items if isinstance(value, PickledObject) else value
    return items if isinstance(items, Pairs) else Pairs()


class TensorFinder:
    """Finds values that contain tensors, visiting shared values once."""

    def __init__(self) -> None:
        self._results: dict[int, bool] = {}  # by id; the values stay alive

    def has_tensor(self, value: object) -> bool:
        """Return whether a value is a tensor or a storage, or contains one at any depth.

        Raises:
            SourceError: it is nested too deeply.
        """
        try:
            return self._has_tensor(value)
        except RecursionError:
            raise SourceError("is nested too deeply", code="too-large") from None

    def _has_tensor(self, value: object) -> bool:
        if is_tensor(value) or (isinstance(value, PickledObject) and value.made_by is None):
            return True
        if not isinstance(value, list | tuple | PickledObject):
            return False
        if id(value) not in self._results:
            self._results[id(value)] = False  # if it contains itself
            self._results[id(value)] = any(map(self._has_tensor, parts_of(value)))
        return self._results[id(value)]

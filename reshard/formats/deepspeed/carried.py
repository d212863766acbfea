"""What a Universal Checkpoint carries of its source: the model states and the optimizer, without weights and states.

Pickled values are read as objects that nothing made, and pickled again. Python's own unpickler and pickler do it, but
for instructions that would import, call or hash something: a dict becomes `Pairs`, and any other object a `Made`. The
pickler numbers objects by identity, so that shared ones stay shared. Ask `kits.torch.pickles` first: only what it
accepts may be read here.

A value may have tensors of its own, as those of a client's state. Their storages are carried as they are, with their
keys; those of weights are not, since weights are written anew.
"""

from __future__ import annotations

import io
import pickle
from copy import copy
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from reshard.core.model.entries import RangeReader
from reshard.core.model.objects import LARGEST
from reshard.core.storage.crc import crc32, crc32_fault
from reshard.errors import Option, SourceError, Text, bytes_text
from reshard.formats.deepspeed.files import EXPECTED
from reshard.kits.torch.archive import carries_sums
from reshard.kits.torch.file import PICKLE, TorchFile
from reshard.kits.torch.pickles import Name, Pairs
from reshard.kits.torch.pickling import Items, pickled
from reshard.kits.torch.saved_tensors import Saved, rebuilding, saved_storages

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import Place
    from reshard.dtypes import DType
    from reshard.kits.torch.file import Storage

_Pickler: Any = pickle._Pickler  # noqa: SLF001 -- Python's own without C, as the next
_Unpickler: Any = pickle._Unpickler  # noqa: SLF001

_MODULE, _FROZEN = "module", "frozen_param_fragments"
_OF_TORCH, _BASE, _GROUPS, _PARAMS = "optimizer_state_dict", "base_optimizer_state", "param_groups", "params"
_OF_RANK = {
    _OF_TORCH, _BASE, _GROUPS, "single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups",
    "param_slice_mappings",
}  # fmt: skip

_MOST_BYTES = 1 << 26  # of a pickle; 100,000 tensors have 20 MB
_BATCH = 1000  # items that are added at once, as in Python
_REFERENCE = 5  # items of a reference to a storage; the format before PyTorch 1.6 has one more, which may be None
_PROTOCOL_2 = b"\x80.(N\x88\x89KMJ\x8aGX)t\x85\x86\x87]aesuqrhjcQ"  # instructions that make only plain data
_DAMAGED = (pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError)


class Made:
    """A dict, or another object: a function or class with its arguments, then items, keys and values, and a state.

    Attributes:
        function: the function or class; None for a dict.
        is_new: `__new__` of the class is called, not the class.
    """

    __slots__ = ("arguments", "function", "is_new", "items", "pairs", "state")

    def __init__(self, function: object = None, arguments: object = None, *, is_new: bool = False) -> None:
        self.function, self.arguments, self.is_new = function, arguments, is_new
        self.items, self.pairs = list[object](), Pairs()
        self.state: object = None

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs[key] = value

    def extend(self, values: Sequence[object]) -> None:
        """Add items."""
        self.items.extend(values)

    @property
    def entries(self) -> dict[str, Any]:
        """Return the values whose keys are texts."""
        return {key: value for key, value in self.pairs.items() if isinstance(key, str)}

    def with_entries(self, entries: Mapping[str, object]) -> Made:
        """Return an object that is made alike, with these entries in place of all whose keys are texts."""
        rest, result = dict(entries), copy(self)
        result.pairs = Pairs()
        for key, value in self.pairs.items():
            if not isinstance(key, str):
                result[key] = value
            elif key in rest:
                result[key] = rest.pop(key)
        for key, value in rest.items():
            result[key] = value
        return result


class Reference(NamedTuple):
    """A reference to a storage: a word, the class of the storage, its key, its device, and its number of elements."""

    items: tuple[Any, ...]


def value_of(value: object) -> Any:
    """Return what is read of a pickled value; `kits.torch.pickling` says what it may be."""
    return parsed(pickled(value, 2))


def parsed(content: bytes) -> Any:
    """Return the value of a pickle that `kits.torch.pickles` accepted.

    Raises:
        SourceError: it is too large, or not of protocol 2, which PyTorch writes. The message does not name the file.
    """
    if len(content) > _MOST_BYTES:
        raise SourceError(f"has {bytes_text(len(content))} of values, too many to be carried", code="too-large")
    try:
        return _Reader(io.BytesIO(content)).load()
    except _DAMAGED as error:
        raise SourceError(f"has values that cannot be carried: {error!s:.100}", code="bad-pickle") from None


class _Reader(_Unpickler):  # type: ignore[misc]
    """Reads a pickle of protocol 2."""

    def find_class(self, module: str, name: str) -> Name:
        return Name(module, name)

    def persistent_load(self, items: Any) -> Reference:
        if items[_REFERENCE:] not in [(), (None,)] or items[0] != "storage" or not isinstance(items[2], str):
            raise ValueError("a reference to unsupported data")
        return Reference(items[:_REFERENCE])

    def _dict(self) -> None:
        self.append(Made())

    def _call(self, *, is_new: bool = False) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = Made(self.stack[-1], arguments, is_new=is_new)

    def _new(self) -> None:
        self._call(is_new=True)

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Made) or self.stack[-1].state is not None:
            raise TypeError("a second state of an object")
        self.stack[-1].state = state

    dispatch: ClassVar = {code: _Unpickler.dispatch[code] for code in _PROTOCOL_2} | {
        pickle.EMPTY_DICT[0]: _dict, pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _new, pickle.BUILD[0]: _build,
    }  # fmt: skip


def written(value: object, keys: dict[str, None] | None = None) -> bytes:
    """Return the pickle of a value, of protocol 2; add the keys of the storages to which it refers to `keys`.

    Raises:
        SourceError: it is nested too deeply.
    """
    content = io.BytesIO()
    writer = _Writer(content, 2)
    writer.keys = {} if keys is None else keys
    try:
        writer.dump(value)
    except RecursionError:
        raise SourceError("has values that are nested too deeply", code="too-large") from None
    return content.getvalue()


class _Writer(_Pickler):  # type: ignore[misc]
    """Writes a pickle, and adds keys of storages to `keys`."""

    keys: dict[str, None]

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, Reference):
            return None
        self.keys[value.items[2]] = None
        return value.items

    def _name(self, value: Name) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def _made(self, value: Made) -> None:
        if value.function is None:
            self.write(pickle.EMPTY_DICT)
        else:
            self.save(value.function)
            self.save(value.arguments)
            self.write(pickle.NEWOBJ if value.is_new else pickle.REDUCE)
        self.memoize(value)
        self._batches(value.items, 1, pickle.APPEND, pickle.APPENDS)
        self._batches(value.pairs, 2, pickle.SETITEM, pickle.SETITEMS)
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)

    def _batches(self, values: Sequence[object], width: int, adds_one: bytes, adds_all: bytes) -> None:
        for begin in range(0, len(values), width * _BATCH):
            batch = values[begin : begin + width * _BATCH]
            is_one = len(batch) == width
            self.write(b"" if is_one else pickle.MARK)
            for value in batch:
                self.save(value)
            self.write(adds_one if is_one else adds_all)

    dispatch: ClassVar = _Pickler.dispatch | {Name: _name, Made: _made}


class SavedValues(NamedTuple):
    """A dict that `torch.save` wrote: the file, and its value."""

    file: TorchFile
    root: Made

    @classmethod
    def read(cls, location: Place) -> SavedValues:
        """Read a file; raise `SourceError` if it is not valid."""
        file = TorchFile.read(location, EXPECTED)
        try:
            root = parsed(_read(file, PICKLE, file.pickle))
        except SourceError as error:
            raise error.about(file.path) from None
        if not isinstance(root, Made):
            raise SourceError(f"{file.path} has no dict; expected {EXPECTED}", code="not-a-state-dict")
        return cls(file, root)

    def storages(self, values: Mapping[str, object]) -> dict[str, bytes]:
        """Return the storages of values, by key; the names of values are for messages.

        Raises:
            SourceError: they have too many bytes, or a storage is not there or does not match its checksum.
        """
        keys: dict[str, dict[str, None]] = {name: {} for name in values}
        for name, value in values.items():
            written(value, keys[name])
        records = {key: b"data/" + key.encode() for of_value in keys.values() for key in of_value}
        places = self.file.storages([*records.values()])
        nbytes = sum(places[record].nbytes for record in records.values())
        if nbytes > LARGEST:
            sizes = {name: sum(places[records[key]].nbytes for key in keys[name]) for name in keys}
            largest = max(sizes, key=sizes.__getitem__)
            raise SourceError(
                f"{self.file.path}: tensors of {largest!r:.60} are too large", code="too-large",
                facts=[f"{bytes_text(nbytes)} would be carried; at most {bytes_text(LARGEST)} are"],
                hint=Text("to leave them out, give ", Option("exclude", largest)),
            )  # fmt: skip
        return {key: _read(self.file, record, places[record]) for key, record in records.items()}


def _read(file: TorchFile, name: bytes, place: Storage) -> bytes:
    """Return the contents of a record after comparing them with their checksum, if there is one."""
    content = RangeReader(file.path, window=place.nbytes).read(*place)
    records = {} if file.archive is None else file.archive.records
    if records and carries_sums(records.values()) and (fault := crc32_fault(crc32(content), records[name].crc)):
        raise SourceError(
            f"{file.path} is corrupt: {name.decode(errors='replace')!r:.60} {fault}", code="wrong-checksum"
        )
    return content


class CarriedModelStates:
    """The model states of a source, without the tensors of its module.

    All values but the tensors of the module are carried unchanged: counters, schedulers, the state of the client. There
    are two files. DeepSpeed looks for `mp_rank_00_model_states.pt` at ZeRO stages 1 and 2, and for
    `zero_pp_rank_0_mp_rank_00_model_states.pt` at stage 3. It takes no weights from either, but rounds the masters; so
    the second has parameters of shape (0,), as DeepSpeed itself writes them at stage 3.

    Frozen parameters are in the module. In the first file, `frozen_param_fragments` are the same tensors; the second
    has none, since they may be most of a model, and would be there twice.

    Attributes:
        version: the version of DeepSpeed.
        nbytes: the size of carried storages.
    """

    def __init__(self, saved: SavedValues, dropped: Container[str]) -> None:
        """Read all values of a file but the dropped ones; raise `SourceError` if they cannot be carried."""
        self._root = saved.root
        self._values = {name: value for name, value in saved.root.entries.items() if name not in dropped}
        self._module: Made = self._values[_MODULE]
        of_module = self._module.entries
        self._tensors = {name for name, value in of_module.items() if _is_tensor(value)}
        others = {name: value for name, value in of_module.items() if name not in self._tensors}
        carried = self._values | {_MODULE: self._module.with_entries(others), _FROZEN: None}
        self._storages = saved.storages(carried)
        self.nbytes = sum(map(len, self._storages.values()))
        self.version = saved.root.entries.get("ds_version")

    def saved(self, tensors: Mapping[str, tuple[DType, Shape]], whole: Collection[str] | None = None) -> Saved:
        """Return a file of model states with tensors of these dtypes and shapes; all are whole, or the named ones."""
        stored = {
            name: (dtype, shape if whole is None or name in whole else (0,)) for name, (dtype, shape) in tensors.items()
        }
        keys = dict(zip(stored, _free_keys(self._storages), strict=False))
        rebuilt = value_of(Items((name, rebuilding(*stored[name], keys[name])) for name in stored)).entries
        others = {name: value for name, value in self._module.entries.items() if name not in self._tensors}
        values = self._values | {_MODULE: self._module.with_entries(others | rebuilt)}
        frozen = self._values.get(_FROZEN)
        if isinstance(frozen, Made):
            names = frozen.entries.keys() & rebuilt.keys() if whole is None else ()
            values[_FROZEN] = frozen.with_entries({name: rebuilt[name] for name in names})
        sizes = {keys[name]: prod(shape) * dtype.itemsize for name, (dtype, shape) in stored.items()}
        return saved_storages(written(self._root.with_entries(values)), {**self._storages, **sizes})


class CarriedOptimizer:
    """The optimizer of a source, without the states of parameters: `zero/optimizer_state.pt`.

    DeepSpeed looks for other values at each stage of ZeRO. Stages 1 and 2 take hyper-parameters from `param_groups`, a
    dict for each group. Stage 3 takes those of the first group for all groups, from
    `optimizer_state_dict.param_groups`; so only those that are equal in all groups are there, and the training keeps
    its own for the others. Stage 3 also takes the step from `optimizer_state_dict.state[0].step`. All other values are
    carried as they are, but for the flat buffers.

    Attributes:
        has_groups: the source has the hyper-parameters.
    """

    def __init__(self, saved: SavedValues, *, universal: bool, groups: int, version: object) -> None:
        """Read the optimizer states of rank 0, or the optimizer's file of a Universal Checkpoint.

        The number of groups, and the version of DeepSpeed, are used if the file does not have them.

        Raises:
            SourceError: the file is not valid, or has values that cannot be carried.
        """
        root = saved.root if universal else saved.root.entries.get(_OF_TORCH)  # DeepSpeed's own, of the same name
        if not isinstance(root, Made):
            raise SourceError(f"{saved.file.path} has no {_OF_TORCH}", code="bad-value")
        values = root.entries
        of_torch = values.get(_OF_TORCH, values.get(_BASE))
        hyper = of_torch.entries.get(_GROUPS) if isinstance(of_torch, Made) else None  # a list if it is elastic
        self._root = root
        listed = values.get(_GROUPS, hyper)
        self._groups = [group for group in listed if isinstance(group, Made)] if isinstance(listed, list) else []
        self.has_groups = any(len(group.entries) > 1 for group in self._groups)
        self._groups = self._groups or [value_of({_PARAMS: [number]}) for number in range(groups)]
        self._values = {name: value for name, value in values.items() if name not in _OF_RANK}
        if version is not None:
            self._values.setdefault("ds_version", version)
        self._storages = saved.storages({**self._values, _GROUPS: self._groups})

    @property
    def free_key(self) -> str:
        """Return a key that no carried storage has."""
        return next(_free_keys(self._storages))

    def saved(self, step: object, storages: Mapping[str, bytes] | None = None) -> bytes:
        """Return the file, with a number of steps or a call that makes one, and the storage that it uses.

        The step is None if the optimizer does not count steps.
        """
        first = self._groups[0]
        contents = [{name: written(value) for name, value in group.entries.items()} for group in self._groups]
        shared = {
            name: value for name, value in first.entries.items()
            if name == _PARAMS or all(content.get(name) == contents[0][name] for content in contents)
        }  # fmt: skip
        state = value_of({0: {} if step is None else {"step": step}})
        of_torch = {"state": state, _GROUPS: [first.with_entries(shared)]}
        root = self._root.with_entries({**self._values, _OF_TORCH: of_torch, _GROUPS: self._groups})
        file = saved_storages(written(root), {**self._storages, **(storages or {})})
        return b"".join(content for _, content in file.literals)


def _is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, also of a kind that is not read."""
    return isinstance(value, Made) and isinstance(value.function, Name) and value.function.name.startswith("_rebuild_")


def _free_keys(storages: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys that no storage has."""
    return (key for number in count() if (key := str(number)) not in storages)

"""Read objects of PyTorch's distributed checkpoints, and Megatron-Core's other files, as bytes or plain data.

Each is a zip archive that `torch.save` wrote: stored records, with checksums unless these were turned off. A pickle
describes the object, and other records have the bytes of its tensors. `kits.torch.pickles` reads the pickle; it imports
and calls nothing.

Sources: PyTorch 2.13 `torch/serialization.py`, Megatron-LM `megatron/training/checkpointing.py`, and files that these
wrote (`tests/data/dcp`).
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

from reshard.core.layout.block import shape_text
from reshard.core.model.checkpoint import TensorSpec
from reshard.core.model.objects import Objects, contents
from reshard.core.storage.small import parse_json
from reshard.errors import SourceError
from reshard.kits.torch.archive import checked_records
from reshard.kits.torch.names import BACKEND, COMMON
from reshard.kits.torch.pickles import Name, Pairs, PickledObject, unpickled
from reshard.kits.torch.tensors import PickleBytes, rebuilt
from reshard.kits.training.arguments import known

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.facts import Object

_LONGEST = 160  # characters of one object
_MOST_VALUES = 1 << 20  # of an object; shared values count each time
_MOST_VALUES_SHOWN = 1 << 17  # of all objects that are shown
_LARGEST_KEY = 1 << 64  # integers beyond could be made to have equal hashes
_EXPECTED = "an object that torch.save stored"


class SavedObjects(Objects):
    """Objects that `torch.save` wrote, as plain data.

    Nothing is imported or called. A class or function is a `Name`, and another call or object a `PickledObject`. A
    tensor is a `TensorSpec`, and a `Namespace` a dict of its attributes.
    """

    def facts(self) -> Mapping[str, int | str]:
        """Return Megatron-Core's facts about the training: iteration, optimizer, vocabulary and parallelism."""
        return facts(self.checkpoint)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._plain: _Plain | None = None

    def value(self, name: str, content: bytes) -> Any:
        """See `Objects`."""
        return _value(name, self.entries[name], content, self._plain or _Plain(_MOST_VALUES))

    def text(self, value: object) -> str:
        """See `Objects`."""
        return text_of(value)

    def shown(self) -> dict[str, str]:
        """See `Objects`. Of all objects, a number of values is shown."""
        self._plain = _Plain(_MOST_VALUES_SHOWN)
        return super().shown()


def check_sums(content: bytes) -> None:
    """Verify the checksums of an object's archive; raise `SourceError` without the object's name."""
    for _ in checked_records(content):
        pass


def text_of(value: object) -> str:
    """Write a value as Python does, shortened.

    >>> text_of({"lr": [0.1, None], "kind": Name("torch", "float32")}), text_of(["word"] * 99)[-12:]
    ("{'lr': [0.1, None], 'kind': <torch.float32>}", "rd', 'word'…")
    """
    try:
        text = _written(value)
    except RecursionError:
        return "nested too deeply to be shown"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def facts(checkpoint: Checkpoint) -> dict[str, int | str]:
    """Return Megatron-Core's facts about the training: iteration, optimizer, vocabulary and parallelism."""
    common = _common(checkpoint)
    arguments, content = (_dict(common.get(key)) for key in ("args", "content_metadata"))
    candidates = [(word, values.get(key)) for word, values, key in (
        ("iteration", common, "iteration"),
        ("optimizer", content, "distrib_optim_sharding_type"),
        ("vocabulary", arguments, "vocab_size"),
        ("padded to", arguments, "padded_vocab_size"),
        ("tensor parallel", arguments, "tensor_model_parallel_size"),
        ("pipeline parallel", arguments, "pipeline_model_parallel_size"),
        ("expert parallel", arguments, "expert_model_parallel_size"),
    )]  # fmt: skip
    return {word: fact for word, fact in candidates if type(fact) is int or (type(fact) is str and len(fact) <= 60)}


def iteration(checkpoint: Checkpoint) -> int | None:
    """Return the number of training steps that Megatron-Core recorded, or None."""
    step = _common(checkpoint).get("iteration")
    return step if type(step) is int and step >= 0 else None


def arguments_in(beside: Mapping[str, Object], objects: Mapping[str, Object]) -> dict[str, object]:
    """Return what Megatron-LM states of the training, as plain data; {} if it states nothing that can be read."""
    return known(_dict(_common_in(beside, objects).get("args")))


def _common(checkpoint: Checkpoint) -> dict[Any, Any]:
    """Return Megatron-Core's common state from its file or object, or an empty dict."""
    return _common_in(checkpoint.extras.beside, checkpoint.extras.objects) if checkpoint.extras.beside else {}


def _common_in(beside: Mapping[str, Object], objects: Mapping[str, Object]) -> dict[Any, Any]:
    """Return Megatron-Core's common state from the sidecar files or the objects of a DCP, or an empty dict."""
    candidates = {COMMON: beside[COMMON]} if COMMON in beside else {}
    candidates |= {name: entry for name, entry in objects.items() if name.startswith("common_state/")}
    for name, entry in candidates.items():
        with suppress(SourceError):
            ((_, content),) = contents({name: entry})
            state = _value(name, entry, content, _Plain(_MOST_VALUES))
            return _dict(state[0] if isinstance(state, list) and len(state) == 1 else state)
    return {}


def _dict(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _value(name: str, entry: Object, content: bytes, plain: _Plain) -> Any:
    """Return an object as plain data; raise `SourceError` if it cannot be read."""
    if name == BACKEND:
        try:
            return parse_json(content, [])
        except ValueError as error:
            raise SourceError(f"is not JSON: {error}", code="not-json") from None
    pickled = next((record for path, record in checked_records(content) if path.endswith("/data.pkl")), None)
    if pickled is None:
        raise SourceError("is not an object of torch.save: it has no data.pkl", code="not-torch-save")
    try:
        return plain.of(unpickled(PickleBytes(entry.path, pickled), _EXPECTED, outside=True))
    except RecursionError:
        raise SourceError("is nested too deeply", code="too-large") from None


class _Plain:
    """Converts pickled values to plain data, up to a total number of values."""

    def __init__(self, room: int) -> None:
        self.room = room

    def of(self, value: object) -> Any:
        """Return a value as plain data."""
        self.room -= 1
        if self.room < 0:
            raise SourceError("has too many values", code="too-large")
        if isinstance(value, Pairs):
            return self._dict(value)
        if isinstance(value, PickledObject):
            return self._call_result(value)
        if isinstance(value, list | tuple) and not isinstance(value, Name):
            return type(value)(map(self.of, value))
        return value

    def _dict(self, pairs: Pairs) -> dict[Any, Any]:
        result = {}
        for key, item in pairs.items():
            plain = self.of(key)
            if not _is_key(plain):
                raise SourceError("has a dict with a key that is neither text nor a number", code="unsupported-object")
            result[plain] = self.of(item)
        return result

    def _call_result(self, record: PickledObject) -> Any:
        """Return the plain value that a call would create, or the record of an unsupported call."""
        result: object = record
        for item in (record, *(record.arguments if isinstance(record.arguments, tuple) else ())):
            if isinstance(item, PickledObject) and isinstance(item.made_by, Name) and not item.made_by.module:
                raise SourceError(f"has a value of the unsupported kind {item.name}", code="unsupported-object")
        match record.name, record.arguments:
            case "Namespace", _ if isinstance(record.state, Pairs):
                result = self._dict(record.state)
            case "OrderedDict", () if isinstance(items := record.items or Pairs(), Pairs):
                result = self._dict(items)
            case "Size", ((list() | tuple()) as items,):
                result = tuple(map(self.of, items))
            case (("set" | "frozenset"), ((list() | tuple()) as items,)):
                plain_items = list(map(self.of, items))
                result = set(plain_items) if all(map(_is_key, plain_items)) else record
            case "encode", (str() as text, "latin1"):  # as protocol 2 has bytes
                with suppress(UnicodeEncodeError):
                    result = text.encode("latin-1")
            case "bytes", ():
                result = b""
            case name, _ if name.startswith("_rebuild_"):
                with suppress(SourceError):
                    tensor = rebuilt(record)
                    result = TensorSpec("", tensor.dtype, tensor.shape)
        return result


def _is_key(value: object) -> bool:
    """Return whether a value can safely be hashed."""
    if type(value) is tuple:
        return all(map(_is_key, value))
    if type(value) is int:
        return abs(value) < _LARGEST_KEY
    return value is None or type(value) in {bool, str, bytes} or (type(value) is float and isfinite(value))


def _written(value: object) -> str:
    """Write a value as Python does; long texts and containers are cut."""
    if isinstance(value, PickledObject):
        value = value.made_by if isinstance(value.made_by, Name) else Name("", "record")
    if isinstance(value, Name):
        return f"<{value.module}.{value.name}>".replace("<.", "<")
    if isinstance(value, TensorSpec):
        return f"tensor {value.dtype} {shape_text(value.shape)}"
    if isinstance(value, dict):
        pairs = islice(value.items(), _LONGEST)
        return f"{{{', '.join(f'{_written(key)}: {_written(item)}' for key, item in pairs)}}}"
    if isinstance(value, list | tuple | set) and value:
        items = ", ".join(map(_written, islice(value, _LONGEST)))
        begin, end = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}")}[type(value)]
        return f"{begin}{items}{',' if type(value) is tuple and len(value) == 1 else ''}{end}"
    return repr(value[:_LONGEST] if isinstance(value, str | bytes) else value)

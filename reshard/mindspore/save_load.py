"""`load_checkpoint` and `save_checkpoint`: read and write one file in memory, in both formats, with CRC and encryption.

Source: MindSpore 2.10 `train/serialization.py`. Checks and kinds of errors are MindSpore's, and so are the bytes
written, unless a function says otherwise.
"""

from __future__ import annotations

import logging
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.model.entries import Content, wants
from reshard.core.storage.base import truncated
from reshard.core.storage.cipher import Cipher
from reshard.core.storage.local import local_store
from reshard.dtypes import STR
from reshard.errors import SourceError, UsageError, names
from reshard.kits.ckpt import MAP_PARAMETER, TRAILER, TRAILER_BYTES, map_parameters
from reshard.kits.files import by_name, index_file
from reshard.mindspore.network import load_param_into_net, parameters_of
from reshard.mindspore.parameter import Parameter, Tensor, as_parameter, as_tensor, is_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.model.entries import FileIndex, FileLayout, Runs
    from reshard.core.storage.base import RangeStore
    from reshard.dtypes import DType

Prefixes = str | list[str] | tuple[str, ...] | None

_log = logging.getLogger("reshard.mindspore")

PIECE_BYTES = 4 << 20  # most bytes read at once for a CRC
_MOST_ZEROS = 1 << 32  # above this MindSpore cannot make the zeros


def load_checkpoint(
    ckpt_file_name: str | os.PathLike[str] | BytesIO,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: Prefixes = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: Prefixes = None,
    choice_func: Callable[[str], bool] | None = None,
    crc_check: bool = False,
    remove_redundancy: bool = False,
    format: str = "ckpt",  # noqa: A002 -- MindSpore's signature
) -> dict[str, Any]:
    """Load one checkpoint file into memory.

    Unlike MindSpore's, it reads only the tensors that are loaded, never the file as one message; applies the prefixes
    to safetensors too; gives the parameters of a safetensors file their names; and returns the text entries of a
    safetensors file that was written here.

    Args:
        ckpt_file_name: the file, whose name must end with the format; or a BytesIO (safetensors only).
        net: a network to load the parameters into, as `load_param_into_net` does.
        strict_load: as for `load_param_into_net`.
        filter_prefix: skip names that begin with these.
        dec_key: the key of an encrypted `.ckpt` file.
        dec_mode: its cipher.
        specify_prefix: load only names that begin with these.
        choice_func: a function of a name that returns whether to load it; ignored if there are prefixes.
        crc_check: compare the CRC-32 that the file carries; the log reports a file without one.
        remove_redundancy: accepted and ignored; to fill in de-duplicated ranks, convert the set.
        format: `ckpt` or `safetensors`.

    Returns:
        The parameters by name, in the file's order (safetensors: by name); text entries are `str`.

    Raises:
        ValueError: a name that does not end with the format, nothing left to load, or a CRC that differs.

    >>> list(ms.load_checkpoint("src_checkpoints/rank_0/checkpoint_0.ckpt", specify_prefix="net.layer1"))
    ['net.layer1.weight', 'net.layer1.bias']
    """
    selects = name_filter(specify_prefix, filter_prefix, choice_func)
    cipher = cipher_of(dec_key, dec_mode, format, "dec")
    _expect("crc_check", crc_check, bool)
    _expect("remove_redundancy", remove_redundancy, bool)
    path, store = _opened(ckpt_file_name, format, cipher)
    index = index_file(path, store=store)
    if crc_check:
        _check_crc(path, index, store)
    if index.deduplicated:
        _log.warning("%s: is one of a de-duplicated set; it lacks what other ranks store for this one", path)
    loaded = read_entries(path, index, store, selects)
    if not loaded:
        raise UsageError(
            f"nothing is left to load of the {len(index.entries)} entries of {path}",
            code="no-tensors",
            facts=[f"it has {names(index.entries, most=3)}"],
            hint="check filter_prefix, specify_prefix and choice_func",
        )
    if net is not None:
        load_param_into_net(net, loaded, strict_load, remove_redundancy)
    return loaded


def load_checkpoint_async(
    ckpt_file_name: str | os.PathLike[str],
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: Prefixes = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: Prefixes = None,
    choice_func: Callable[[str], bool] | None = None,
) -> Future[dict[str, Any]]:
    """Call `load_checkpoint` in a thread and return a future; its `result()` raises the errors.

    The file's extension says the format.

    >>> len(ms.load_checkpoint_async("src_checkpoints/rank_0/checkpoint_0.ckpt").result())
    15
    """
    format = "safetensors" if os.fspath(ckpt_file_name).endswith(".safetensors") else "ckpt"  # noqa: A001 -- as above
    executor = ThreadPoolExecutor(1, thread_name_prefix="reshard-load")
    future = executor.submit(
        load_checkpoint, ckpt_file_name, net, strict_load, filter_prefix, dec_key, dec_mode, specify_prefix,
        choice_func, format=format,
    )  # fmt: skip
    executor.shutdown(wait=False)  # the thread ends with its work
    return future


def save_checkpoint(
    save_obj: Any,
    ckpt_file_name: str | os.PathLike[str],
    integrated_save: bool = True,
    async_save: bool | str = False,
    append_dict: Mapping[str, Any] | None = None,
    enc_key: bytes | None = None,
    enc_mode: str = "AES-GCM",
    choice_func: Callable[[str], bool] | None = None,
    crc_check: bool = False,
    format: str = "ckpt",  # noqa: A002 -- MindSpore's signature
    **kwargs: Any,
) -> None:
    """Save parameters to one file, which gets its name once it is complete and replaces an existing one.

    Unlike MindSpore's: safetensors take text entries too; the CRC of an encrypted file is inside the encryption, where
    MindSpore looks for it when it loads (it writes the CRC after the encrypted blocks, and cannot read that); a tensor
    without elements is kept; missing directories are created.

    Args:
        save_obj: a dict of name to Parameter, Tensor, array or text (as `load_checkpoint` returns); a list of
            Parameters or of `{"name": ..., "data": ...}`; a network: anything with `parameters_and_names()`, or a
            `torch.nn.Module`. Parameters and Tensors may be MindSpore's own.
        ckpt_file_name: the file; `.ckpt` or `.safetensors` is appended unless the name ends with the format.
        integrated_save: accepted; MindSpore gathers the slices of a parameter from the devices, here each is whole.
        async_save: accepted (a bool, `thread` or `process`); the file is written when this returns.
        append_dict: more entries: numbers, bools, text, Parameters, Tensors or arrays by name.
        enc_key: encrypt the file with this key (`ckpt` only).
        enc_mode: its cipher.
        choice_func: a function of a name of `save_obj` that returns whether to save it.
        crc_check: store the CRC-32 of the contents in the file.
        format: `ckpt` or `safetensors`.
        kwargs: `remove_redundancy` (a bool) marks a safetensors file as de-duplicated or not; `incremental` and
            `global_step_num` are accepted; they are for map parameters and a store that only devices have.

    Raises:
        TypeError: a value that a checkpoint cannot hold.
        ValueError: an unknown format or mode, a key of the wrong length, a key for safetensors.
        IsADirectoryError: the file is a directory.

    >>> ms.save_checkpoint([{"name": "w", "data": ms.Tensor([1.0, 2.0])}], "one.ckpt")
    >>> ms.load_checkpoint("one.ckpt")["w"].asnumpy()
    array([1., 2.], dtype=float32)
    """
    path = _target_path(save_obj, ckpt_file_name, format)
    _expect("integrated_save", integrated_save, bool, TypeError)
    _expect("async_save", async_save, (bool, str), TypeError)
    if isinstance(async_save, str) and async_save not in {"process", "thread"}:
        raise UsageError(
            f"save_checkpoint: async_save is {async_save!r}; expected a bool, 'process' or 'thread'", code="bad-value"
        )
    cipher = cipher_of(enc_key, enc_mode, format, "enc")
    _expect("crc_check", crc_check, bool)
    remove_redundancy = kwargs.pop("remove_redundancy", None)
    _expect("remove_redundancy", remove_redundancy, (bool, type(None)))
    unknown = set(kwargs) - {"incremental", "global_step_num"}
    if unknown:
        _log.warning("save_checkpoint: no argument is called %s; ignored", names(sorted(unknown)))

    values = _values_by_name(save_obj)
    saved = {name: value for name, value in values.items() if choice_func is None or choice_func(name)}
    saved.update(_appended(append_dict))
    tensors = {name: as_tensor(value, name) for name, value in saved.items() if not isinstance(value, str)}
    contents = [
        Content(name, tensors[name].kind, tensors[name].shape) if name in tensors else Content(name, STR, (), value)
        for name, value in saved.items()
    ]
    metadata = {"format": "ms"} if contents else {}
    if remove_redundancy is not None:
        metadata["remove_redundancy"] = str(remove_redundancy)
    raw = {name: tensor.array.reshape(-1).view("u1").data for name, tensor in tensors.items()}
    if crc_check and format == "safetensors":
        metadata["crc_num"] = str(_named_crc((name, t.kind, t.shape, [raw[name]]) for name, t in tensors.items()))
    layout = by_name(format).lay_out(contents, metadata)
    _write(path, layout, raw, crc=crc_check and format == "ckpt", cipher=cipher)


def _write(path: str, layout: FileLayout, raw: Mapping[str, memoryview], *, crc: bool, cipher: Cipher | None) -> None:
    """Write a file in the order of its bytes, as a CRC and a cipher need it; remove it on a failure.

    With `crc` it ends with the CRC-32 of all bytes before, as `.ckpt` files may; the CRC is encrypted with the rest.
    """
    parts: list[tuple[int, bytes | memoryview]] = list(layout.literals)
    for content in layout.contents:
        if content.text is None:
            parts += [(offset, piece) for _, offset, piece in wants(path, content.runs, 0, raw[content.name])]
    parts.sort(key=itemgetter(0))
    if crc:
        parts.append((layout.size, TRAILER + _crc(part for _, part in parts).to_bytes(10, "big")))
    size = layout.size + crc * TRAILER_BYTES
    store = local_store()
    digest = sha256(path.encode(errors="surrogateescape")).hexdigest()
    unfinished = store.unfinished(path, digest)  # a name that no other program uses
    sink = store.create(unfinished, size if cipher is None else cipher.encrypted_size(size))
    try:
        if cipher is not None:
            sink = cipher.sink(sink)
        for offset, part in parts:
            sink.write_at(offset, part)
        sink.finish(durable=True)
        store.publish(unfinished, path, durable=True)
    except BaseException:
        store.discard(unfinished)
        raise


def _pieces(path: str, runs: Runs, store: RangeStore) -> Iterator[memoryview]:
    """Yield bytes of a file, a few MB at a time; a piece is valid until the next one."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    for offset, nbytes in runs:
        for start in range(0, nbytes, PIECE_BYTES):
            view = buffer[: min(PIECE_BYTES, nbytes - start)]
            store.read_into(path, offset + start, view)
            yield view


def _crc(pieces: Iterable[bytes | memoryview], crc: int = 0) -> int:
    """Return the CRC-32 of bytes in pieces, continued from that of the bytes before."""
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def _named_crc(
    tensors: Iterable[tuple[str, DType, Shape, Iterable[bytes | memoryview]]], *, as_mindspore: bool = True
) -> int:
    """Return the CRC-32 over names and contents in name order, as safetensors metadata have it.

    MindSpore has Python make bytes of every array. An integer array without dimensions becomes as many zeros as its
    value says (`bytes(np.array(5))` is five zeros), and MindSpore's CRC covers those. MindSpore compares the same
    bytes when it loads, so a file for MindSpore must carry this CRC.

    Args:
        tensors: name, dtype, shape and contents of each.
        as_mindspore: treat integers without dimensions as MindSpore does; else by their bytes, like all others.
    """
    crc = 0
    for name, dtype, shape, pieces in sorted(tensors, key=itemgetter(0)):
        contents = pieces
        if as_mindspore and not shape and dtype.name.startswith(("int", "uint")):
            number = b"".join(map(bytes, pieces))
            zeros = int.from_bytes(number, "little", signed=dtype.name.startswith("int"))
            if 0 <= zeros <= _MOST_ZEROS:
                contents = (bytes(min(PIECE_BYTES, zeros - n)) for n in range(0, zeros, PIECE_BYTES))
            else:  # MindSpore cannot make bytes of these
                contents = [number]
        crc = _crc(contents, zlib.crc32(name.encode(), crc))
    return crc


def _check_format(function: str, value: object) -> None:
    if value not in ("ckpt", "safetensors"):
        raise UsageError(f"{function}: format is {value!r}; expected 'ckpt' or 'safetensors'", code="unknown-format")


class _InMemory:
    """A store of one file, a BytesIO."""

    def __init__(self, content: BytesIO) -> None:
        self._content = content

    def size(self, path: str) -> int:  # noqa: ARG002 -- as `RangeStore` has it
        return self._content.getbuffer().nbytes

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        with self._content.getbuffer() as content:  # not kept: Python cannot close a BytesIO in use
            if offset + len(buffer) > len(content):
                raise truncated(path, len(content), offset + len(buffer))
            buffer[:] = content[offset : offset + len(buffer)]


def _opened(file: object, format: str, cipher: Cipher | None) -> tuple[str, RangeStore]:  # noqa: A002 -- as above
    """Check the file's name, and return it with a store that reads it."""
    _check_format("load_checkpoint", format)
    if isinstance(file, BytesIO):
        if format == "ckpt":
            raise TypeError("load_checkpoint: a BytesIO can be loaded with format='safetensors' only")
        return "<BytesIO>", _InMemory(file)
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f"load_checkpoint: ckpt_file_name is a {type(file).__name__}; expected a path")
    path: str = os.fspath(file)
    if not path.endswith(format):
        raise UsageError(
            f"load_checkpoint: {path} does not end with {format!r}",
            code="wrong-extension",
            hint="give format= as its name ends",
        )
    if not Path(path).exists():
        raise SourceError(f"{path} does not exist", code="not-found")
    return os.path.realpath(path), local_store() if cipher is None else cipher.store()


def read_entries(path: str, index: FileIndex, store: RangeStore, selects: Callable[[str], bool]) -> dict[str, Any]:
    """Read the entries whose names are selected: Parameters and text."""
    for name in map_parameters(path, index, selects):
        _log.warning("%s: %r %s; it is left out", path, name, MAP_PARAMETER)
    order = index.entries if index.format == "ckpt" else sorted(index.entries)
    values: dict[str, Any] = {}
    for name, entry in [(name, index.entries[name]) for name in order if selects(name)]:
        if entry.text is not None:
            values[name] = entry.text
            continue
        raw = np.empty(entry.nbytes, np.uint8)
        for want in wants(path, entry.runs, 0, raw.data):
            store.read_into(*want)
        array = raw.view(entry.dtype.numpy()).reshape(entry.shape)
        values[name] = Parameter.over(Tensor.of_kind(array, entry.dtype), name)
    return values


def _check_crc(path: str, index: FileIndex, store: RangeStore) -> None:
    """Compare the CRC of a file's contents with the CRC in the file."""
    if index.crc is None:
        _log.warning("%s: carries no CRC to check", path)
        return
    if index.format == "ckpt":
        summed = ((0, store.size(path) - TRAILER_BYTES),)
        crcs = iter([_crc(_pieces(path, summed, store))])
    else:
        entries = [(name, entry) for name, entry in index.entries.items() if entry.text is None]
        crcs = (
            _named_crc(
                ((name, entry.dtype, entry.shape, _pieces(path, entry.runs, store)) for name, entry in entries),
                as_mindspore=as_mindspore,
            )
            for as_mindspore in (True, False)
        )
    if index.crc not in crcs:
        raise SourceError(
            f"the contents of {path} do not have the CRC that it carries ({index.crc})", code="wrong-checksum"
        )


def _prefixes(value: object, argument: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    prefixes = (value,) if isinstance(value, str) else value
    if not isinstance(prefixes, list | tuple) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise TypeError(f"load_checkpoint: {argument} is {value!r:.60}; expected a string, or a list of strings")
    if not prefixes or "" in prefixes:
        raise UsageError(
            f"load_checkpoint: {argument} is empty or holds an empty string; expected beginnings of names",
            code="empty-value",
        )
    return tuple(prefixes)


def name_filter(
    specify_prefix: object, filter_prefix: object, choice_func: Callable[[str], bool] | None
) -> Callable[[str], bool]:
    """Return a predicate on names; a prefix takes precedence over `choice_func`."""
    specified, filtered = _prefixes(specify_prefix, "specify_prefix"), _prefixes(filter_prefix, "filter_prefix")
    if specified is None and filtered is None:
        return choice_func or (lambda _: True)
    return lambda name: name.startswith(specified or "") and not name.startswith(filtered or ())


def cipher_of(key: object, mode: object, format: str, which: str) -> Cipher | None:  # noqa: A002 -- as above
    """Return the cipher for a key, else None; `which` is `enc` or `dec`."""
    _expect(f"{which}_key", key, (bytes, type(None)))
    _expect(f"{which}_mode", mode, str)
    if format == "safetensors" and (key is not None or mode != "AES-GCM"):
        raise UsageError(
            "safetensors files are not encrypted",
            code="not-encryptable",
            hint=f"leave {which}_key and {which}_mode out",
        )
    return Cipher(mode, key) if isinstance(key, bytes) and isinstance(mode, str) else None


def _expect(argument: str, value: object, kinds: type | tuple[type, ...], error: type[Exception] = UsageError) -> None:
    """Check an argument's type; MindSpore raises ValueError for most, TypeError for some."""
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise error(f"{argument} is a {type(value).__name__}; expected {expected}")


def _target_path(save_obj: object, ckpt_file_name: object, format: str) -> str:  # noqa: A002 -- as above
    _check_format("save_checkpoint", format)
    if isinstance(save_obj, str | bytes | int | float | None):
        raise TypeError(f"save_checkpoint: save_obj is {type(save_obj).__name__}; expected a dict, a list or a network")
    if not isinstance(ckpt_file_name, str | os.PathLike):
        raise TypeError(f"save_checkpoint: ckpt_file_name is a {type(ckpt_file_name).__name__}; expected a path")
    path: str = os.path.realpath(ckpt_file_name)
    if Path(path).is_dir():
        raise IsADirectoryError(f"save_checkpoint: {path} is a directory; expected the name of a file")
    return path if path.endswith(format) else f"{path}.{format}"


def _values_by_name(save_obj: Any) -> dict[str, Any]:
    """Return the values to save by name."""
    values: dict[Any, Any] = {}
    if not isinstance(save_obj, list | tuple):
        values = parameters_of(save_obj, "save_obj")
    else:
        for number, item in enumerate(save_obj):
            argument = f"save_checkpoint: save_obj[{number}]"
            if not isinstance(item, dict):
                parameter = as_parameter(item, argument)
                values[parameter.name] = parameter
            elif {"name", "data"} <= set(item):
                values[item["name"]] = item["data"]
            else:
                raise TypeError(f"{argument} is a dict without 'name' and 'data'; expected both")
    for name in values:
        if not isinstance(name, str):
            raise TypeError(f"save_checkpoint: a name is a {type(name).__name__} ({name!r}); expected a string")
    return values


def _appended(append_dict: Any) -> dict[str, Any]:
    """Return the entries of `append_dict` as they are saved."""
    if not isinstance(append_dict, dict | None):
        raise TypeError(f"save_checkpoint: append_dict is a {type(append_dict).__name__}; expected a dict")
    entries: dict[str, Any] = {}
    for name, value in (append_dict or {}).items():
        if not isinstance(name, str) or not (isinstance(value, int | float | str) or is_array(value)):
            raise TypeError(
                f"save_checkpoint: append_dict[{name!r}] is a {type(value).__name__}; expected names as strings and "
                "numbers, bools, strings, Parameters or Tensors"
            )
        if name != "__exception_save__":  # MindSpore's own marker between its parts
            entries[name] = value if isinstance(value, str) else Tensor(value)
    return entries

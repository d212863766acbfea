"""`load_checkpoint` and `save_checkpoint`: read and write one file in memory, in both formats, with CRC and encryption.

Source: MindSpore 2.10 `train/serialization.py`. Checks and kinds of errors are MindSpore's, and so are the bytes
written, unless a function says otherwise.
"""

from __future__ import annotations

import logging
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from hashlib import sha256
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.model.entries import Content, wants
from reshard.core.storage.cipher import Cipher
from reshard.core.storage.crc import crc32, crc_of_range
from reshard.core.storage.local import local_store
from reshard.dtypes import BY_NAME, STR
from reshard.errors import SourceError, UsageError, names
from reshard.kits.ckpt import MAP_PARAMETER, TRAILER, TRAILER_BYTES, map_parameters
from reshard.kits.files import by_name, index_file
from reshard.mindspore.network import load_param_into_net, parameters_of
from reshard.mindspore.parameter import Parameter, Tensor, as_parameter, as_tensor, dtype_of, is_array
from reshard.mindspore.strategy import path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.core.model.entries import FileIndex, FileLayout
    from reshard.core.storage.base import RangeStore

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
    """Load one checkpoint file into memory; only the tensors that are loaded are read.

    Args:
        ckpt_file_name: the file, whose name must end with the format; or a BytesIO, which is
            written to a temporary file.
        net: a network to load the parameters into, as `load_param_into_net` does.
        strict_load: as for `load_param_into_net`.
        filter_prefix: skip names that begin with these.
        dec_key: the key of an encrypted `.ckpt` file.
        dec_mode: its cipher.
        specify_prefix: load only names that begin with these.
        choice_func: a function of a name that returns whether to load it; ignored if there are prefixes.
        crc_check: compare the CRC-32 that the file carries; the log reports a file without one.
        remove_redundancy: accepted; to fill in de-duplicated ranks, convert the set.
        format: `ckpt` or `safetensors`.

    Returns:
        The parameters by name, in the file's order (safetensors: by name); text entries are `str`.

    Raises:
        ValueError: a name that does not end with the format, nothing left to load, or a CRC that differs.

    >>> list(ms.load_checkpoint("src_checkpoints/rank_0/checkpoint_0.ckpt", specify_prefix="net.layer1"))
    ['net.layer1.weight', 'net.layer1.bias']
    """
    if isinstance(ckpt_file_name, BytesIO):
        with NamedTemporaryFile(suffix=f".{format}") as file:
            file.write(ckpt_file_name.getbuffer())
            file.flush()
            return load_checkpoint(
                file.name, net, strict_load, filter_prefix, dec_key, dec_mode, specify_prefix, choice_func, crc_check,
                remove_redundancy, format,
            )  # fmt: skip
    selects = name_filter(specify_prefix, filter_prefix, choice_func)
    cipher = cipher_of(dec_key, dec_mode, format)
    path = path_of("ckpt_file_name", ckpt_file_name)
    by_name(format)
    if not path.name.endswith(format):
        raise UsageError(f"format is {format!r}, and {path} does not end with it", code="wrong-extension")
    if not path.exists():
        raise SourceError(f"{path} does not exist", code="not-found")
    loaded = load_files([path], cipher, selects, crc_check=crc_check)
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
    integrated_save: bool = True,  # noqa: ARG001 -- accepted, see below
    async_save: bool | str = False,  # noqa: ARG001 -- as above
    append_dict: Mapping[str, Any] | None = None,
    enc_key: bytes | None = None,
    enc_mode: str = "AES-GCM",
    choice_func: Callable[[str], bool] | None = None,
    crc_check: bool = False,
    format: str = "ckpt",  # noqa: A002 -- MindSpore's signature
    **kwargs: Any,
) -> None:
    """Save parameters to one file, which gets its name once it is complete and replaces an existing one.

    Args:
        save_obj: a dict of name to Parameter, Tensor, array or text (as `load_checkpoint` returns); a list of
            Parameters or of `{"name": ..., "data": ...}`; or a network, which has `parameters_and_names()`. Parameters
            and Tensors may be MindSpore's own.
        ckpt_file_name: the file; `.ckpt` or `.safetensors` is appended unless the name ends with the format. Its
            directory is created.
        integrated_save: accepted; MindSpore gathers the slices of a parameter from the devices, here each is whole.
        async_save: accepted; the file is written when this returns.
        append_dict: more entries: numbers, bools, text, Parameters, Tensors or arrays by name.
        enc_key: encrypt the file with this key (`ckpt` only).
        enc_mode: its cipher.
        choice_func: a function of a name of `save_obj` that returns whether to save it.
        crc_check: store the CRC-32 of the contents in the file.
        format: `ckpt` or `safetensors`.
        kwargs: `remove_redundancy` (a bool) marks a safetensors file as de-duplicated or not; others are accepted.

    Raises:
        TypeError: a value that a checkpoint cannot hold.
        ValueError: an unknown format or mode, a key of the wrong length, a key for safetensors.
        IsADirectoryError: the file is a directory.

    >>> ms.save_checkpoint([{"name": "w", "data": ms.Tensor([1.0, 2.0])}], "one.ckpt")
    >>> ms.load_checkpoint("one.ckpt")["w"].asnumpy()
    array([1., 2.], dtype=float32)
    """
    by_name(format)
    path = os.path.realpath(path_of("ckpt_file_name", ckpt_file_name))
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a directory; expected the name of a file")
    path += "" if path.endswith(format) else f".{format}"
    cipher = cipher_of(enc_key, enc_mode, format)
    values = _values_by_name(save_obj)
    saved = {name: value for name, value in values.items() if choice_func is None or choice_func(name)}
    saved.update(_appended(append_dict))
    tensors = {name: as_tensor(value, name) for name, value in saved.items() if not isinstance(value, str)}
    contents = [
        Content(name, STR, (), value)
        if isinstance(value, str)
        else Content(name, BY_NAME[tensors[name].dtype.name], tensors[name].shape)
        for name, value in saved.items()
    ]
    metadata = {"format": "ms"} if contents else {}
    if kwargs.get("remove_redundancy") is not None:
        metadata["remove_redundancy"] = str(kwargs["remove_redundancy"])
    if crc_check and format == "safetensors":
        metadata["crc_num"] = str(_named_crc(tensors))
    layout = by_name(format).lay_out(contents, metadata)
    raw = {name: _raw(tensor) for name, tensor in tensors.items()}
    _write(path, layout, raw, crc=crc_check and format == "ckpt", cipher=cipher)


def _raw(tensor: Tensor) -> memoryview:
    return tensor.array.reshape(-1).view(np.uint8).data


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
        number = reduce(lambda crc, part: zlib.crc32(part[1], crc), parts, 0)
        parts.append((layout.size, TRAILER + number.to_bytes(10, "big")))
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


def _named_crc(tensors: Mapping[str, Tensor]) -> int:
    """Return the CRC-32 over names and contents in name order, as safetensors metadata have it.

    MindSpore has Python make bytes of every array: of an integer without dimensions as many zeros as its value says
    (`bytes(np.array(5))` is five zeros). It compares the same when it loads, so files for it must carry this CRC.
    """
    crc = 0
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(name.encode(), crc)
        array = tensor.asnumpy()
        zeros = int(array) if array.shape == () and array.dtype.kind in "iu" else -1
        if 0 <= zeros <= _MOST_ZEROS:
            for start in range(0, zeros, PIECE_BYTES):
                crc = zlib.crc32(bytes(min(PIECE_BYTES, zeros - start)), crc)
        else:
            crc = zlib.crc32(_raw(tensor), crc)
    return crc


def load_files(
    files: list[Path], cipher: Cipher | None, selects: Callable[[str], bool], *, crc_check: bool = False
) -> dict[str, Any]:
    """Load the entries of files whose names are selected, Parameters and text, as those of one file."""
    store = local_store() if cipher is None else cipher.store()
    loaded: dict[str, Any] = {}
    for path in map(os.path.realpath, files):
        index = index_file(path, store=store)
        if index.deduplicated:
            _log.warning("%s: is one of a de-duplicated set; it lacks what other ranks store for this one", path)
        part = _read_entries(path, index, store, (lambda _: True) if crc_check else selects)
        if crc_check:
            _check_crc(path, index, store, part)
            part = {name: value for name, value in part.items() if selects(name)}
        different = [name for name in part if name in loaded and _content(part[name]) != _content(loaded[name])]
        if different:
            raise SourceError(
                f"{names(map(repr, different))} of {path} differ from those of another file",
                code="files-disagree",
                hint="move away files of others, or choose with specify_prefix, filter_prefix or choice_func",
            )
        loaded |= part
    if not loaded:
        raise UsageError(
            f"nothing is left to load of {names(map(str, files))}",
            code="no-tensors",
            hint="check filter_prefix, specify_prefix and choice_func",
        )
    return loaded


def _content(value: Any) -> object:
    return value if isinstance(value, str) else (value.dtype, value.shape, value.array.tobytes())


def _read_entries(path: str, index: FileIndex, store: RangeStore, selects: Callable[[str], bool]) -> dict[str, Any]:
    for name in map_parameters(path, index, selects):
        _log.warning("%s: %r %s; it is left out", path, name, MAP_PARAMETER)
    order = index.entries if index.format == "ckpt" else sorted(index.entries)
    values: dict[str, Any] = {}
    for name, entry in [(name, index.entries[name]) for name in order if selects(name)]:
        if entry.text is not None:
            values[name] = entry.text
            continue
        if entry.dtype.bits:
            raise SourceError(f"{path}: {name!r} is {entry.dtype}; numpy has no such dtype", code="unsupported-dtype")
        raw = np.empty(entry.nbytes, np.uint8)
        for want in wants(path, entry.runs, 0, raw.data):
            store.read_into(*want)
        values[name] = Parameter.over(raw.view(dtype_of(entry.dtype)).reshape(entry.shape), name)
    return values


def _check_crc(path: str, index: FileIndex, store: RangeStore, entries: Mapping[str, Any]) -> None:
    """Compare the CRC of a file's contents with the CRC in the file."""
    if index.crc is None:
        _log.warning("%s: carries no CRC to check", path)
        return
    if index.format == "ckpt":
        crc = crc_of_range(store, path, 0, store.size(path) - TRAILER_BYTES, crc32)
    else:
        crc = _named_crc({name: value for name, value in entries.items() if not isinstance(value, str)})
    if index.crc != crc:
        raise SourceError(
            f"the contents of {path} do not have the CRC that it carries ({index.crc})", code="wrong-checksum"
        )


def _prefixes(value: Prefixes, argument: str) -> tuple[str, ...] | None:
    prefixes = (value,) if isinstance(value, str) else None if value is None else tuple(value)
    if prefixes is not None and (not prefixes or "" in prefixes):
        raise UsageError(f"{argument} is empty, or holds an empty string", code="empty-value")
    return prefixes


def name_filter(
    specify_prefix: Prefixes, filter_prefix: Prefixes, choice_func: Callable[[str], bool] | None
) -> Callable[[str], bool]:
    """Return a predicate on names; a prefix takes precedence over `choice_func`."""
    specified, filtered = _prefixes(specify_prefix, "specify_prefix"), _prefixes(filter_prefix, "filter_prefix")
    if specified is None and filtered is None:
        return choice_func or (lambda _: True)
    return lambda name: name.startswith(specified or "") and not name.startswith(filtered or ())


def cipher_of(key: bytes | None, mode: str, format: str) -> Cipher | None:  # noqa: A002 -- as above
    """Return the cipher for a key, else None."""
    if key is not None and format == "safetensors":
        raise UsageError("safetensors files are not encrypted", code="not-encryptable", hint="leave the key out")
    return None if key is None else Cipher(mode, key)


def _values_by_name(save_obj: Any) -> dict[str, Any]:
    """Return the values to save by name."""
    if not isinstance(save_obj, list | tuple):
        return parameters_of(save_obj, "save_obj")
    values: dict[str, Any] = {}
    for number, item in enumerate(save_obj):
        if isinstance(item, dict):
            values[item["name"]] = item["data"]
        else:
            parameter = as_parameter(item, f"save_obj[{number}]")
            values[parameter.name] = parameter
    return values


def _appended(append_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries of `append_dict` as they are saved."""
    entries: dict[str, Any] = {}
    for name, value in (append_dict or {}).items():
        if not (isinstance(value, int | float | str) or is_array(value)):
            raise TypeError(f"append_dict[{name!r}] is a {type(value).__name__}; expected a number or a Parameter")
        if name != "__exception_save__":  # MindSpore's own marker between its parts
            entries[name] = value if isinstance(value, str) else Tensor(value)
    return entries

"""`load_checkpoint` and `save_checkpoint`: one file, whole, in memory; both formats, with CRC and encryption.

Sources: MindSpore 2.10 `train/serialization.py`, whose checks and kinds of errors these are; the bytes written are
the same, save where a function says otherwise.
"""

from __future__ import annotations

import logging
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.dtypes import INT4, STR
from reshard.errors import SourceError, UsageError, names
from reshard.formats import by_name, index_file
from reshard.formats.entries import Content
from reshard.mindspore.network import load_param_into_net, parameters_of
from reshard.mindspore.parameter import Parameter, Tensor, as_parameter, as_tensor, is_array, qint4x2
from reshard.storage.cipher import Cipher
from reshard.storage.local import local_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from reshard.formats.entries import Entry, FileIndex, FileLayout, Runs
    from reshard.storage.base import Readable

_log = logging.getLogger("reshard.mindspore")

_FORMATS = ("ckpt", "safetensors")
_TRAILER_BYTES = 17
_MOST_ZEROS = 1 << 32

PIECE_BYTES = 4 << 20
"""How much of a file is held at once to sum it up."""


def load_checkpoint(
    ckpt_file_name: str | os.PathLike[str] | BytesIO,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: str | list[str] | tuple[str, ...] | None = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: str | list[str] | tuple[str, ...] | None = None,
    choice_func: Callable[[str], bool] | None = None,
    crc_check: bool = False,
    remove_redundancy: bool = False,
    format: str = "ckpt",  # noqa: A002 -- MindSpore's signature
) -> dict[str, Any]:
    """Load one checkpoint file into memory.

    Unlike MindSpore's, it reads only the tensors that are asked for, never the file as one message; applies the
    prefixes to safetensors too; gives the parameters of a safetensors file their names; and gives back the text
    entries of a safetensors file that was written here.

    Args:
        ckpt_file_name: the file, whose name must end with the format; or a BytesIO (safetensors only).
        net: what to load the parameters into, as `load_param_into_net` does.
        strict_load: as for `load_param_into_net`.
        filter_prefix: leave out the names that begin with this; `choice_func` is not asked where a prefix is given.
        dec_key: the key of an encrypted `.ckpt` file, with the `crypto` extra.
        dec_mode: `AES-GCM`, `AES-CBC` or `SM4-CBC`.
        specify_prefix: load only the names that begin with this.
        choice_func: called with a name; returns whether to load it.
        crc_check: compare the CRC-32 that the file carries; a file without one is reported in the log.
        remove_redundancy: accepted. MindSpore fetches what a de-duplicated file lacks from the other devices; here
            those parameters stay unloaded and are listed. Convert the whole set to have every rank's file complete.
        format: `ckpt` or `safetensors`.

    Returns:
        The parameters by name, in the file's order (safetensors: by name); text entries are `str`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: no such file, a name that does not end with the format, nothing left to load, a file that is
            corrupt, encrypted, or not with this key, a CRC that differs.
    """
    is_wanted = _choice(specify_prefix, filter_prefix, choice_func)
    cipher = _cipher(dec_key, dec_mode, format, "dec")
    _expect("crc_check", crc_check, bool)
    _expect("remove_redundancy", remove_redundancy, bool)
    path, store = _opened(ckpt_file_name, format, cipher)
    index = index_file(path, store=store)
    if crc_check:
        _check_crc(path, index, store)
    if index.deduplicated:
        _log.warning("%s: is one of a de-duplicated set; it lacks what other ranks store for this one", path)
    loaded = _loaded(path, index, store, is_wanted)
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


def load_parts(
    paths: Iterable[str | os.PathLike[str]],
    filter_prefix: str | list[str] | tuple[str, ...] | None = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: str | list[str] | tuple[str, ...] | None = None,
    choice_func: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """Load the files that a rank's parameters are spread over, of either format.

    A file may have nothing that is wanted, or nothing at all. Arguments and errors are those of `load_checkpoint`.

    Raises:
        SourceError: two files have different contents of one name; they are two checkpoints, not parts of one.
    """
    is_wanted = _choice(specify_prefix, filter_prefix, choice_func)
    store = _source_store(_cipher(dec_key, dec_mode, "ckpt", "dec"))
    loaded: dict[str, Any] = {}
    found_in: dict[str, str] = {}
    for path in [os.fspath(path) for path in paths]:
        if Path(path).stat().st_size:
            index = index_file(path, store=store)
            part = _loaded(path, index, store, is_wanted)
            for name in part:
                if name in loaded and not _are_same(loaded[name], part[name]):
                    raise SourceError(
                        f"{name!r} in {path} differs from that in {found_in[name]}",
                        code="files-disagree",
                        facts=["expected parts of one checkpoint"],
                        hint="move away files of others, or choose with specify_prefix, filter_prefix or choice_func",
                    )
            loaded |= part
            found_in |= dict.fromkeys(part, path)
    return loaded


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two entries, text or parameters, are equal bit for bit."""
    if isinstance(one, str) or isinstance(other, str):
        return bool(type(one) is type(other) and one == other)
    return (one.kind, one.shape) == (other.kind, other.shape) and one.array.tobytes() == other.array.tobytes()


def load_checkpoint_async(
    ckpt_file_name: str | os.PathLike[str],
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: str | list[str] | tuple[str, ...] | None = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: str | list[str] | tuple[str, ...] | None = None,
    choice_func: Callable[[str], bool] | None = None,
) -> ParamDictFuture:
    """Load one checkpoint file in a thread; its `result()` waits and returns what `load_checkpoint` returns.

    The end of the name says the format. Arguments and errors are those of `load_checkpoint`; errors come from
    `result()`.
    """
    format = "safetensors" if os.fspath(ckpt_file_name).endswith(".safetensors") else "ckpt"  # noqa: A001 -- as above
    executor = ThreadPoolExecutor(1, thread_name_prefix="reshard-load")
    future = executor.submit(
        load_checkpoint, ckpt_file_name, net, strict_load, filter_prefix, dec_key, dec_mode, specify_prefix,
        choice_func, format=format,
    )  # fmt: skip
    executor.shutdown(wait=False)  # the thread ends with its work
    return ParamDictFuture(future)


class ParamDictFuture:
    """A checkpoint that is being loaded."""

    def __init__(self, future: Future[dict[str, Any]]) -> None:
        self._future = future

    def result(self) -> dict[str, Any]:
        """Wait, and return the parameters by name; raise what `load_checkpoint` raises."""
        return self._future.result()


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
    """Save parameters to one file, which gets its name when it is complete and replaces one of that name.

    Unlike MindSpore's: text entries can be saved to safetensors too; a CRC of an encrypted file is inside the
    encryption, where MindSpore finds it when it loads (its own is behind it, and it cannot read that); a tensor
    without elements is kept; directories are made where they are missing.

    Args:
        save_obj: a dict of name to Parameter, Tensor, array or text (what `load_checkpoint` returns); a list of
            Parameters or of `{"name": ..., "data": ...}`; a network: anything with `parameters_and_names()`, or a
            `torch.nn.Module`. Parameters and Tensors may be MindSpore's own.
        ckpt_file_name: the file; `.ckpt` or `.safetensors` is appended unless the name ends with the format.
        integrated_save: accepted; MindSpore gathers the slices of a parameter from the devices, here each is whole.
        async_save: accepted (a bool, `thread` or `process`); the file is there when this returns.
        append_dict: more entries: numbers, bools, text, Parameters, Tensors or arrays by name.
        enc_key: encrypt the file with this key (`ckpt` only), with the `crypto` extra.
        enc_mode: `AES-GCM`, `AES-CBC` or `SM4-CBC`.
        choice_func: called with a name of `save_obj`; returns whether to save it.
        crc_check: store the CRC-32 of the contents in the file.
        format: `ckpt` or `safetensors`.
        kwargs: `remove_redundancy` (a bool) marks a safetensors file as de-duplicated or not; `incremental` and
            `global_step_num` are accepted, they are for map parameters and a store that only devices have.

    Raises:
        TypeError: an argument of the wrong type, or a value that no checkpoint holds.
        ValueError: an unknown format or mode, a key of the wrong length, a key for safetensors.
        IsADirectoryError: the file is a directory.
    """
    path = _target_path(save_obj, ckpt_file_name, format)
    _expect("integrated_save", integrated_save, bool, TypeError)
    _expect("async_save", async_save, (bool, str), TypeError)
    if isinstance(async_save, str) and async_save not in {"process", "thread"}:
        raise UsageError(
            f"save_checkpoint: async_save is {async_save!r}; expected a bool, 'process' or 'thread'", code="bad-value"
        )
    cipher = _cipher(enc_key, enc_mode, format, "enc")
    _expect("crc_check", crc_check, bool)
    remove_redundancy = kwargs.pop("remove_redundancy", None)
    _expect("remove_redundancy", remove_redundancy, (bool, type(None)))
    unknown = set(kwargs) - {"incremental", "global_step_num"}
    if unknown:
        _log.warning("save_checkpoint: no argument is called %s; ignored", names(sorted(unknown)))

    saved = {name: value for name, value in _named(save_obj) if choice_func is None or choice_func(name)}
    saved.update(_appended(append_dict))
    texts = {name: value for name, value in saved.items() if isinstance(value, str)}
    tensors = {name: as_tensor(value, name) for name, value in saved.items() if name not in texts}
    contents = [
        Content(name, STR, (), texts[name]) if name in texts else Content(name, tensors[name].kind, tensors[name].shape)
        for name in saved
    ]
    metadata = {"format": "ms"} if contents else {}
    if remove_redundancy is not None:
        metadata["remove_redundancy"] = str(remove_redundancy)
    raw = {name: tensor.array.reshape(-1).view("u1").data for name, tensor in tensors.items()}
    if crc_check and format == "safetensors":
        listed = [(content, [raw[content.name]]) for content in contents if content.text is None]
        metadata["crc_num"] = str(_named_crc(listed))
    layout = by_name(format).lay_out(contents, metadata)
    _write(path, layout, raw, crc=crc_check and format == "ckpt", cipher=cipher)


def _write(path: str, layout: FileLayout, raw: Mapping[str, memoryview], *, crc: bool, cipher: Cipher | None) -> None:
    """Write a file from its first byte to its last, as a CRC and a cipher need it; a failure leaves nothing.

    Args:
        path: the file, which gets its name when it is on the disk, and is replaced if it is there.
        layout: where everything goes.
        raw: the contents of the tensors.
        crc: end the file with the CRC-32 of all before it, as `.ckpt` files may (inside the encryption).
        cipher: encrypts the file.

    Raises:
        BudgetError: the disk is full.
        TargetError: the file cannot be written.
    """
    parts: list[tuple[int, bytes | memoryview]] = list(layout.literals)
    for content in layout.contents:
        begin = 0
        for offset, nbytes in content.runs:
            parts.append((offset, raw[content.name][begin : begin + nbytes]))
            begin += nbytes
    pieces: Iterable[bytes | memoryview] = [part for _, part in sorted(parts, key=itemgetter(0))]
    size = layout.size
    if crc:
        pieces = _with_trailer(pieces)
        size += _TRAILER_BYTES
    if cipher is not None:
        pieces = cipher.encrypt(pieces)
        size = cipher.encrypted_size(size)
    store = local_store()
    unfinished = store.unfinished(path, sha256(path.encode(errors="surrogateescape")).hexdigest())  # no other program's
    sink = store.create(unfinished, size)
    try:
        position = 0
        for piece in pieces:
            sink.write_at(position, piece)
            position += len(piece)
        sink.finish(durable=True)
        store.publish(unfinished, path, durable=True)
    except BaseException:
        store.discard(unfinished)
        raise


def _with_trailer(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
        yield piece
    yield b"crc_num" + crc.to_bytes(10, "big")


def _pieces(path: str, runs: Runs, store: Readable) -> Iterator[memoryview]:
    """Yield some bytes of a file, a few MB at a time; a piece is good until the next one is asked for."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    for offset, nbytes in runs:
        for start in range(0, nbytes, PIECE_BYTES):
            view = buffer[: min(PIECE_BYTES, nbytes - start)]
            store.read_into(path, offset + start, view)
            yield view


def _named_crc(tensors: Iterable[tuple[Content, Iterable[memoryview]]], *, as_mindspore: bool = True) -> int:
    """Return the CRC-32 over names and contents in name order, which safetensors files carry in their metadata.

    MindSpore has Python make bytes of every array. Of an integer array without dimensions that makes as many zeros as
    the number says (`bytes(np.array(5))` is five zeros), so that is what its CRC covers; and as it compares the same
    wrong thing when it loads, so must a file that it shall load.

    Args:
        tensors: the tensors, each with its contents in pieces.
        as_mindspore: take integers without dimensions as MindSpore does; else by their bytes, like all others.
    """
    crc = 0
    for tensor, contents in sorted(tensors, key=lambda one: one[0].name):
        crc = zlib.crc32(tensor.name.encode(), crc)
        pieces = contents
        if as_mindspore and not tensor.shape and tensor.dtype.name.startswith(("int", "uint")):
            number = b"".join(contents)
            zeros = int.from_bytes(number, "little", signed=tensor.dtype.name.startswith("int"))
            if 0 <= zeros <= _MOST_ZEROS:  # of others MindSpore cannot make bytes
                pieces = (memoryview(bytes(min(PIECE_BYTES, zeros - n))) for n in range(0, zeros, PIECE_BYTES))
            else:
                pieces = [memoryview(number)]
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
    return crc


def _source_store(cipher: Cipher | None) -> Readable:
    """Return what reads a file: as it is, or decrypted."""
    return local_store() if cipher is None else cipher.store()


class _InMemory:
    """The one file that a BytesIO is."""

    def __init__(self, content: BytesIO) -> None:
        self._content = content.getbuffer()

    def size(self, path: str) -> int:  # noqa: ARG002 -- there is one
        return len(self._content)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > len(self._content):
            raise SourceError(
                f"{path} ends at byte {len(self._content)}; expected {len(buffer)} bytes from {offset}",
                code="truncated",
            )
        buffer[:] = self._content[offset : offset + len(buffer)]


def _opened(file: object, format: str, cipher: Cipher | None) -> tuple[str, Readable]:  # noqa: A002 -- as above
    """Check the file's name, and return it with what reads it."""
    if format not in _FORMATS:
        raise UsageError(
            f"load_checkpoint: format is {format!r}; expected 'ckpt' or 'safetensors'", code="unknown-format"
        )
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
    return os.path.realpath(path), _source_store(cipher)


def _loaded(path: str, index: FileIndex, store: Readable, is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Read the entries that are wanted: Parameters, and text."""
    for name, reason in index.unreadable:
        _log.warning("%s: %r %s; it is left out", path, name, reason)
    return {
        name: entry.text if entry.text is not None else Parameter.over(_tensor(path, entry, store), name)
        for name in (index.entries if index.format == "ckpt" else sorted(index.entries))
        if is_wanted(name)
        for entry in [index.entries[name]]
    }


def _tensor(path: str, entry: Entry, store: Readable) -> Tensor:
    """Read a tensor."""
    raw = np.empty(entry.nbytes, np.uint8)
    position = 0
    for offset, nbytes in entry.runs:
        store.read_into(path, offset, raw[position : position + nbytes].data)
        position += nbytes
    dtype = qint4x2 if entry.dtype is INT4 else entry.dtype.numpy()
    return Tensor.from_numpy(raw.view(dtype).reshape(entry.shape))


def _check_crc(path: str, index: FileIndex, store: Readable) -> None:
    """Compare the CRC that a file carries with that of its contents."""
    if index.crc is None:
        _log.warning("%s: carries no CRC to check", path)
        return
    if index.format == "ckpt":
        found = 0
        for piece in _pieces(path, ((0, store.size(path) - _TRAILER_BYTES),), store):
            found = zlib.crc32(piece, found)
        is_right = found == index.crc
    else:
        is_right = any(
            index.crc
            == _named_crc(
                (
                    (Content(name, entry.dtype, entry.shape), _pieces(path, entry.runs, store))
                    for name, entry in index.entries.items()
                    if entry.text is None
                ),
                as_mindspore=way,
            )
            for way in (True, False)
        )
    if not is_right:
        raise SourceError(
            f"the contents of {path} do not have the CRC that it carries ({index.crc})", code="wrong-checksum"
        )


def _prefixes(given: object, argument: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, str | list | tuple):
        raise TypeError(f"load_checkpoint: {argument} is a {type(given).__name__}; expected strings")
    prefixes = (given,) if isinstance(given, str) else tuple(given)
    for prefix in prefixes:
        if not isinstance(prefix, str):
            raise TypeError(f"load_checkpoint: {argument} holds a {type(prefix).__name__}; expected strings")
    if not prefixes or "" in prefixes:
        raise UsageError(
            f"load_checkpoint: {argument} is empty or holds an empty string; expected beginnings of names",
            code="empty-value",
        )
    return prefixes


def _choice(
    specify_prefix: object, filter_prefix: object, choice_func: Callable[[str], bool] | None
) -> Callable[[str], bool]:
    """Return what says of a name whether it is loaded; `choice_func` is not asked where a prefix is given."""
    specified, filtered = _prefixes(specify_prefix, "specify_prefix"), _prefixes(filter_prefix, "filter_prefix")
    if specified is None and filtered is None:
        return choice_func or (lambda _: True)
    return lambda name: name.startswith(specified or "") and not name.startswith(filtered or ())


def _cipher(key: object, mode: object, format: str, which: str) -> Cipher | None:  # noqa: A002 -- as above
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
        wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise error(f"{argument} is a {type(value).__name__}; expected {wanted}")


def _target_path(save_obj: object, ckpt_file_name: object, format: str) -> str:  # noqa: A002 -- as above
    if format not in _FORMATS:
        raise UsageError(
            f"save_checkpoint: format is {format!r}; expected 'ckpt' or 'safetensors'", code="unknown-format"
        )
    if isinstance(save_obj, str | bytes | int | float | None):
        raise TypeError(
            f"save_checkpoint: save_obj is a {type(save_obj).__name__}; expected a dict, a list or a network"
        )
    if not isinstance(ckpt_file_name, str | os.PathLike):
        raise TypeError(f"save_checkpoint: ckpt_file_name is a {type(ckpt_file_name).__name__}; expected a path")
    path: str = os.path.realpath(ckpt_file_name)
    if Path(path).is_dir():
        raise IsADirectoryError(f"save_checkpoint: {path} is a directory; expected the name of a file")
    return path if path.endswith(format) else f"{path}.{format}"


def _named(save_obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of what is to be saved."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(save_obj, list | tuple):
        items = [_item(number, item) for number, item in enumerate(save_obj)]
    else:
        items = parameters_of(save_obj, "save_obj").items()
    for name, value in items:
        if not isinstance(name, str):
            raise TypeError(f"save_checkpoint: a name is a {type(name).__name__} ({name!r}); expected a string")
        yield name, value


def _item(number: int, item: Any) -> tuple[Any, Any]:
    if isinstance(item, dict) and {"name", "data"} <= set(item):
        return item["name"], item["data"]
    if isinstance(item, dict):
        raise TypeError(f"save_checkpoint: save_obj[{number}] is a dict without 'name' and 'data'; expected both")
    parameter = as_parameter(item, f"save_checkpoint: save_obj[{number}]")
    return parameter.name, parameter


def _appended(append_dict: Any) -> dict[str, Any]:
    """Return the entries of `append_dict` as what is saved."""
    if append_dict is None:
        return {}
    if not isinstance(append_dict, dict):
        raise TypeError(f"save_checkpoint: append_dict is a {type(append_dict).__name__}; expected a dict")
    found: dict[str, Any] = {}
    for name, value in append_dict.items():
        if not isinstance(name, str) or not (isinstance(value, int | float | str) or is_array(value)):
            raise TypeError(
                f"save_checkpoint: append_dict[{name!r}] is a {type(value).__name__}; expected names as strings and "
                "numbers, bools, strings, Parameters or Tensors"
            )
        if name != "__exception_save__":  # MindSpore's own sign between its parts
            found[name] = value if isinstance(value, str) else Tensor(value)
    return found

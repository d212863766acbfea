"""`reshard.write`, and the tensors of `Checkpoint.assign`: dask and numpy arrays as tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isnan
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
from dask.base import is_dask_collection

from reshard.api.choices import carried_out
from reshard.api.formats import target_options
from reshard.api.jobs import job, with_format
from reshard.api.options import RunKeywords, taken
from reshard.arguments import checked
from reshard.core.format import options_refused
from reshard.core.listing import OpenOptions
from reshard.core.model.checkpoint import Checkpoint
from reshard.core.model.facts import ARRAYS, Computation, Opening
from reshard.core.open import open as open_checkpoint
from reshard.core.plan.inputs import Selection
from reshard.core.run.settings import RunOptions
from reshard.core.storage.places import as_place
from reshard.core.storage.urls.s3.options import use_options
from reshard.dtypes import BY_NAME, INT4, STR
from reshard.errors import Faults, UsageError
from reshard.expressions.assigned import FromArray
from reshard.expressions.computed import computed
from reshard.view.arrays import low as _  # noqa: F401 -- it teaches dask the names of ml_dtypes

if TYPE_CHECKING:
    from typing import Unpack

    from reshard.api.options import WriteOptions
    from reshard.core.format import Format
    from reshard.core.run.settings import Report
    from reshard.core.storage.places import AnyName
    from reshard.strategy.strategy import Strategy


_OTHER = {INT4.name, STR.name, *(name for name, dtype in BY_NAME.items() if dtype.bits)}
"""The dtypes that numpy does not have."""


def assign(source: Checkpoint, arrays: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint with arrays as tensors, in place of those of the same names.

    Raises:
        UsageError: an array has a dtype that no checkpoint has, or chunks of unknown sizes; all at once.
    """
    if not isinstance(arrays, Mapping):
        raise UsageError(f"arrays is a {type(arrays).__name__}; expected arrays by name", code="wrong-type")
    if not arrays:
        raise UsageError("there are no arrays to assign", code="no-tensors")
    faults = Faults("arrays")
    expressions = {}
    for name, value in arrays.items():
        try:
            expressions[name] = _from_array(name, value)
        except UsageError as error:
            faults.add(f"array {name!r}", error)
    faults.raise_if_any(UsageError)
    return _assigned(source, expressions)


def _assigned(source: Checkpoint, expressions: Mapping[str, FromArray]) -> Checkpoint:
    result = computed(source, expressions)
    unreadable = {name: why for name, why in source.unreadable.items() if name not in expressions}
    computation = Computation("assign", {"names": sorted(expressions)}, (source,))
    opening = replace(source.opening, computation=computation, elsewhere=source.opening.elsewhere - expressions.keys())
    extras = source.extras.without(expressions.keys())
    return replace(result, unreadable=unreadable, opening=opening, extras=extras, origin=None)


def directory_of(value: object, format_: Format) -> str:
    """Return the directory of what a format's own library has opened, to write to.

    Raises:
        UsageError: it is not in a local directory.
    """
    path = format_.path_of(value)
    if path is None:
        raise UsageError(f"{value} is not a local directory", code="wrong-type", hint="give a directory or a URL")
    return path


def open_value(value: object, format_: Format, options: Mapping[str, Any]) -> Checkpoint:
    """Open what a format's own library has opened: by its path if it is local; if not, by the arrays of the library.

    Args:
        value: what was opened.
        format_: the format.
        options: as for `core.open.open`.

    Raises:
        SourceError: as opening the path does; notes of this program are damaged.
        UsageError: it has no array that a checkpoint may have; it is not local, and there are options.
    """
    root = format_.path_of(value)
    if root is not None:
        return open_checkpoint(root, **options)
    told = {name for name, given in options.items() if given is not None and given is not False}
    if told - {"contents", "rank_pattern"}:
        raise options_refused(value)
    arrays, reasons = format_.arrays_of(value)
    expressions, unreadable = {}, dict(reasons)
    for name, array in arrays.items():
        try:
            expressions[name] = _from_array(name, array)
        except UsageError as error:
            unreadable[name] = error.message
    if not expressions:
        raise UsageError(f"{value} has no array that a checkpoint may have", code="no-tensors")
    return replace(
        _assigned(Checkpoint(ARRAYS, {}, (), (), opening=Opening(by_file=True)), expressions), unreadable=unreadable
    )


def _from_array(name: Any, value: Any) -> FromArray:
    """Return an array as an expression.

    Raises:
        UsageError: it is masked, has a dtype that no checkpoint has, or chunks of unknown sizes; its name is no text.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"has the name {name!r}; expected a text", code="bad-array")
    if is_dask_collection(value):
        value = getattr(value, "data", value)  # of a DataArray, which numpy would compute whole
    try:
        array = value if isinstance(value, da.Array) else np.asanyarray(value, order="C")
    except ValueError as error:  # rows of different lengths
        raise UsageError(f"is no array: {error}", code="bad-array") from None
    if isinstance(getattr(array, "_meta", array), np.ma.MaskedArray):
        hint = "fill it with a value, by its filled() or by dask.array.ma.filled"
        raise UsageError("is masked, and a checkpoint has no masks", code="bad-array", hint=hint)
    dtype = BY_NAME.get(array.dtype.name)
    if dtype is None or dtype.name in _OTHER:
        known = ", ".join(each for each in BY_NAME if each not in _OTHER)
        raise UsageError(f"is {array.dtype}", code="bad-array", facts=[f"expected {known}"])
    if any(isnan(extent) for extent in array.shape):
        raise UsageError("has chunks of unknown sizes", code="bad-array", hint="call compute_chunk_sizes() first")
    if not isinstance(array, da.Array):
        array = da.from_array(np.asarray(array), chunks="auto" if array.size else -1)
    array = array.astype(array.dtype.newbyteorder("="))  # a copy only if it is big-endian
    return FromArray.of(name, array, dtype)


@checked
def write(
    arrays: Mapping[str, Any],
    target: AnyName,
    *,
    to: str | None = None,
    target_strategy: Strategy | AnyName | None = None,
    **options: Unpack[WriteOptions],
) -> Report:
    """Write dask or numpy arrays as a checkpoint of any layout and format.

    The chunks of a dask array are computed by the tasks that write them: on a local file system in the same graph,
    chunks of the same rows together; elsewhere whenever a file needs them.

    Args:
        arrays: the arrays by name.
        target: a directory, or one file if it is called `*.ckpt` or `*.safetensors`; a local path, or a URL.
        to: as in `reshard.convert`; by default the format that the target's name implies, else `safetensors` with a
            strategy, and a set for Hugging Face (`hf`) without.
        target_strategy: which rank holds which block: a strategy, a strategy file, or rules (`.yaml`); None for whole
            tensors.
        options: as in `help(reshard.api.options)`: `ranks`, `target_stage`, `remove_redundancy`, `target_cipher`;
            `memory` (beside arrays that are in memory already; it counts the chunks of the same rows three times for
            each thread, but not what dask needs to compute them), `threads`, `client`, `overwrite`, `restart`,
            `progress`, `storage_options`; and those of the format.

    Raises:
        reshard.UsageError: an array has a dtype that no checkpoint has, or chunks of unknown sizes; options that
            contradict each other or the format.
        reshard.BudgetError: `memory` is too little for chunks of the same rows; the error says how to rechunk.
        reshard.StrategyError, reshard.SourceError, reshard.TargetError: as `reshard.plan` and `Plan.run` do.

    >>> import numpy as np
    >>> report = reshard.write({"w": np.arange(6.0).reshape(2, 3)}, "arrays", to="hf")
    >>> report.files
    ('model-00001-of-00001.safetensors', 'model.safetensors.index.json')
    >>> reshard.open("arrays")["w"][1].compute()
    array([3., 4., 5.])
    """
    if not arrays:
        raise UsageError("there are no arrays to write", code="no-tensors")
    given: dict[str, Any] = {**options}
    how = taken(given, RunKeywords)
    use_options(how.pop("storage_options", None), target)
    progress, threads = how.pop("progress", None), given.get("threads")
    source = assign(Checkpoint(ARRAYS, {}, (), (), opening=Opening(by_file=True)), arrays)
    wanted = target_options(given, "write", to=to, target_strategy=target_strategy)
    path = as_place(target)
    wanted = with_format(wanted, path, "safetensors" if target_strategy is not None else "hf")
    conversion = job(source, path, OpenOptions(), wanted, Selection(), threads=threads)
    return carried_out(conversion, path, RunOptions(threads=threads, **how), progress)

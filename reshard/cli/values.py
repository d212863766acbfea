"""Types of options, and callbacks that parse their values."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from stat import S_IROTH, S_ISREG
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.commands import INPUTS, KEY_FILES, OUTPUTS, STRATEGIES, WARNINGS, typed
from reshard.core.format import targets, written
from reshard.core.layout.block import LONGEST_NAME
from reshard.core.run.clusters.names import is_address, is_word
from reshard.core.storage.cipher import Cipher, read_key
from reshard.core.storage.places import as_place
from reshard.core.storage.small import is_text, parse_json, pointed, read_small
from reshard.dtypes import by_name
from reshard.errors import Faults, UsageError
from reshard.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence


_MOST_RANKS = 1 << 20
_LARGEST_NAME_MAP = 1 << 26
_MOST_KEY = 1 << 20
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_WEIGHT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(%?)")


def rank_list(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Parse a list of ranks such as `0,3-5`."""
    if value is None:
        return None
    ranks: set[int] = set()
    for part in value.split(","):
        match = _RANGE.fullmatch(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not low <= high < _MOST_RANKS:
            raise click.BadParameter(f"{part!r} is not a rank or range of ranks, such as 0,3-5", param=param)
        ranks.update(range(low, high + 1))
    return tuple(sorted(ranks))


def layout_rules(_ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parse layout rules such as `embedding.*=split:0`."""
    rules: dict[str, str] = {}
    for value in values:
        name, equals, rule = value.rpartition("=")
        if rules.get(name, rule) != rule:
            raise click.BadParameter(f"{name} cannot be both {rules[name]} and {rule}", param=param)
        if not (name and equals and rule):
            raise click.BadParameter(f"{value!r} is not NAME=RULE, such as 'embedding.*=split:0'", param=param)
        rules[name] = rule
    return rules


def dtype_casts(_ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parse casts such as `float32=bfloat16`, as old to new dtypes."""
    casts: dict[str, str] = {}
    for value in values:
        old, equals, new = value.partition("=")
        if not (old and equals and new):
            raise click.BadParameter(f"{value!r} is not OLD=NEW, such as float32=bfloat16", param=param)
        try:
            before, after = by_name(old, UsageError).name, by_name(new, UsageError).name
        except UsageError as error:
            raise error.about("--cast") from None
        if casts.setdefault(before, after) != after:
            raise click.BadParameter(f"{before} cannot become both {casts[before]} and {after}", param=param)
    return casts


def dequantized_dtype(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Return the name of the dtype of dequantized weights, given a name or a short one."""
    if value is None:
        return None
    from reshard.expressions.quantized.dequantize import result_dtype  # seldom

    return result_dtype(value).name


def numbers(_ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, int]:
    """Parse numbers such as `heads=32`, by name."""
    result: dict[str, int] = {}
    for value in values:
        word, _, number = value.partition("=")
        if not word.isidentifier() or not number.isascii() or not number.isdigit():
            raise click.BadParameter(f"{value!r} is not WORD=N, such as heads=32", param=param)
        result[word] = int(number)
    return result


def size(_ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse a size such as `4GB` (decimal) or `512MiB` (binary); only 0 needs no unit."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except UsageError as error:
        raise click.BadParameter(error.message, param=param) from None


def read_name_map(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> dict[str, str]:
    """Read a JSON object of old names to new names.

    Raises:
        UsageError: it is not such an object; all faults at once.
    """
    if path is None:
        return {}
    faults = Faults(f"name map {path}")
    repeated: list[str] = []
    raw = read_small(path, "name map", _LARGEST_NAME_MAP, UsageError)
    try:
        content = parse_json(raw, repeated)
    except json.JSONDecodeError as error:
        pointer = pointed(error.doc, error.lineno - 1, error.colno - 1)
        message = f"name map {path} is not JSON: line {error.lineno}: {error.msg}{pointer}"
        raise UsageError(message, code="bad-name-map") from None
    except ValueError as error:
        raise UsageError(f"name map {path} is not JSON: {error}", code="bad-name-map") from None
    if not isinstance(content, dict):
        raise UsageError(
            f"name map {path} is a JSON {type(content).__name__}, not an object", code="bad-name-map",
            hint='write {"old name": "new name"}',
        )  # fmt: skip
    if not content:
        raise UsageError(f"name map {path} has no names", code="no-effect", hint='write {"old name": "new name"}')
    for old in repeated:
        faults.add(f"name {old!r}", "is there twice")
    for old, new in content.items():
        if not isinstance(new, str):
            faults.add(f"name {old!r}", f"becomes a JSON {type(new).__name__}; expected the new name")
        elif not is_text(new) or not 1 <= len(new.encode()) <= LONGEST_NAME:
            faults.add(
                f"name {old!r:.300}", f"becomes {new!r:.60}; expected text of 1 to {LONGEST_NAME} bytes in UTF-8"
            )
    faults.raise_if_any(UsageError, code="bad-name-map")
    return content


def cluster_address(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check the address or the file of a cluster, or the word for a scheduler of dask."""
    if value is not None and not (is_word(value) or is_address(value) or Path(value).is_file()):
        raise click.BadParameter(
            f"{value!r} is not a cluster, such as tcp://10.0.0.1:8786, dask.json, local:4 or threads", param=param
        )
    return value


_KNOBS = {"fsync", "drop-cache", "server-copy"}
_SWITCH = {"yes": True, "no": False}


def tuned(_ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, bool]:
    """Parse knobs such as `fsync=no`; return fields of `RunOptions`."""
    result = {}
    for value in values:
        name, _, text = value.partition("=")
        if name not in _KNOBS or text not in _SWITCH:
            raise click.BadParameter(
                f"{value!r} is not NAME=yes or NAME=no of {', '.join(sorted(_KNOBS))}", param=param
            )
        result[name.replace("-", "_")] = _SWITCH[text]
    return result


def share(_ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse a share such as `5%` or `0.05`."""
    if value is None:
        return None
    match = _SHARE.fullmatch(value.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise click.BadParameter(f"{value!r} is not a share, such as 5%", param=param)
    return share


def read_cipher(ctx: click.Context, param: click.Parameter, path: Path | None) -> Cipher | None:
    """Return the key in a file, or in the environment variable named after the option.

    The file may be a pipe, so that a program can supply the key: --key-file <(vault ...).
    """
    variable = str(param.envvar).removesuffix("_FILE")
    if path is None:
        text = os.environ.get(variable)
        return Cipher(None, read_key(os.fsencode(text), variable), required=False) if text else None
    is_typed = typed(str(param.name))
    which = f"key file {path}" if is_typed else f"{param.envvar}: key file {path}"
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(_MOST_KEY)
    except OSError as error:
        raise UsageError(f"cannot read {which}: {error.strerror}", code="bad-key") from None
    if S_ISREG(mode) and mode & S_IROTH:
        text = f"{which} can be read by every user of this machine: chmod 600 {path}"
        ctx.meta.setdefault(WARNINGS, []).append(text)
    if is_typed:
        ctx.meta.setdefault(KEY_FILES, {})[param.name] = path if S_ISREG(mode) else "FILE"
    return Cipher(None, read_key(content, which), required=is_typed)


class PathType(click.Path):
    """A path with its role in the command.

    A command refuses to write a file that it reads (`commands.Command`).

    An empty path is refused: an unset shell variable would mean the current directory.

    Args:
        role: `INPUTS` for a path that is read, `STRATEGIES` for strategy files and directories of them, `OUTPUTS` for
            a file that is written, None for a target directory.
        remote: whether it may be a URL.
    """

    def __init__(self, role: str | None, *, remote: bool = False) -> None:
        super().__init__(path_type=Path)
        self.role, self.remote = role, remote

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path or URL as a `Place`."""
        if value == "":
            self.fail("the path is empty", param, ctx)
        path = as_place(value)
        if not self.remote and not isinstance(path, Path):
            self.fail(f"{value} is a URL, not a path on this machine", param, ctx)
        if ctx is not None and self.role is not None:
            ctx.meta.setdefault(self.role, []).append(path)
        return path


class WeightedType(PathType):
    """A path or URL, and a weight after its last colon: `step-100:0.25`."""

    def __init__(self) -> None:
        super().__init__(INPUTS, remote=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the `Place` and the weight, or None."""
        if isinstance(value, tuple):
            return value
        path, weight = split_weight(str(value))
        if weight is None and isinstance(whole := as_place(value), Path) and not whole.exists():
            name, _, number = str(value).rpartition(":")
            if name and Path(name).exists():
                raise UsageError(
                    f"{value}: {number!r} is not a number", code="bad-weight", hint=f"write a weight such as {name}:0.5"
                )
        return super().convert(path, param, ctx), weight


def split_weight(text: str) -> tuple[str, float | None]:
    """Return a path, and the weight after its last colon or None.

    >>> split_weight("step-100:0.25"), split_weight("a:b")
    (('step-100', 0.25), ('a:b', None))
    """
    path, _, number = text.rpartition(":")
    return (path, float(number)) if path and _WEIGHT.fullmatch(number) else (text, None)


class ToType(click.Choice[str]):
    """The format of a target."""

    def __init__(self) -> None:
        super().__init__([each.name for each in targets()])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the format for a word."""
        try:
            return written(str(value).lower()).name
        except UsageError:
            return super().convert(value, param, ctx)


READ, READ_PLACE, WEIGHTED_PLACE = PathType(INPUTS), PathType(INPUTS, remote=True), WeightedType()
STRATEGY, STRATEGY_PLACE = PathType(STRATEGIES), PathType(STRATEGIES, remote=True)
WRITE, WRITE_PLACE = PathType(OUTPUTS), PathType(OUTPUTS, remote=True)
TARGET, TARGET_PLACE = PathType(None), PathType(None, remote=True)

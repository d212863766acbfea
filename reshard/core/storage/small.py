"""Small files that fit in memory: strategy files, indexes, manifests and saved plans.

Reading accepts untrusted regular files, up to a size limit, and reports duplicate keys of JSON. Writing is atomic. An
output never replaces one of its inputs, under any of its names; that also holds for checkpoints (`refuse_inputs`).
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path
from posixpath import normpath
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any

from reshard.core.storage.base import read_error, stem_of_unfinished, unfinished_path, unfinished_stem
from reshard.core.storage.handles import open_regular
from reshard.core.storage.local import write_error
from reshard.core.storage.page_cache import sync_file
from reshard.core.storage.places import AnyName, RemotePath, as_place
from reshard.core.storage.urls.remote import remote_store
from reshard.errors import GoneError, Option, TargetError, Text, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.core.storage.places import Place
    from reshard.errors import Faults, ReshardError

_COLUMNS, _COLUMNS_BEFORE = 72, 48  # the part of a line that is shown
_LARGEST_YAML = 1 << 20  # PyYAML takes some 10 s for this size
_ALIAS = "has an alias; write out what it stands for, and put a name that begins with * in quotes"
_LONGEST_SCALAR = 2000  # also keeps numbers below 4,300 digits, Python's limit
_SCHEMES = {"s3a": "s3", "gcs": "gs"}  # aliases


def refuse_existing(path: AnyName, *, overwrite: bool) -> None:
    """Raise `TargetError` if a file exists and may not be replaced, or is not a regular file."""
    location = as_place(path)
    location.refresh()
    _refuse_irregular(location)
    if location.is_there() and not overwrite:
        raise TargetError(
            f"{path} already exists",
            code="already-exists",
            hint=Text("choose another name, or replace it with ", Option("overwrite")),
        )


def refuse_inputs(
    outputs: Iterable[AnyName],
    inputs: Iterable[AnyName],
    kind: str = "read by this command",
    advice: str = "choose another",
) -> None:
    """Raise an error if an output is also an input, even by another spelling or through links.

    An input may not have the name of an output's unfinished file either: a run removes such files first, then creates
    one.

    Args:
        outputs: the files to write.
        inputs: the files that are read for them.
        kind: describes the inputs, for the message.
        advice: the hint of the error.

    Raises:
        TargetError: an output is an input.
    """
    read: dict[object, AnyName] = {}
    unfinished: dict[str, AnyName] = {}
    for path in inputs:
        identities = _identities(path)
        read |= dict.fromkeys(identities, path)
        names = [name for name in (str(path), *identities) if isinstance(name, str)]
        unfinished |= {os.path.realpath(stem): path for name in names if (stem := stem_of_unfinished(name))}
    for output in outputs if read else ():
        for name in (output, f"{output}.partial"):
            for path in (read[identity] for identity in _identities(name) if identity in read):
                called = "" if os.path.abspath(str(path)) == os.path.abspath(str(name)) else f", {path}"
                first = "" if name is output else f"written under the temporary name {name}, which is "
                raise TargetError(f"{output} is {first}{kind}{called}", code="target-is-source", hint=advice)
        if unfinished and (begun := unfinished.get(unfinished_stem(os.path.realpath(str(output))))):
            raise TargetError(
                f"{begun} is {kind}, and has the name of an unfinished file of {output}",
                code="target-is-source",
                hint=advice,
            )


def is_within(path: AnyName, directory: AnyName) -> bool:
    """Return whether a path is a directory or below it, with links resolved."""
    location, above = as_place(path), as_place(directory)
    if isinstance(location, RemotePath) or isinstance(above, RemotePath):
        return f"{_url_of(location)}/".startswith(f"{_url_of(above)}/")
    real = Path(os.path.realpath(location))
    identities = _identities(above)
    return any(not identities.isdisjoint(_identities(ancestor)) for ancestor in (real, *real.parents))


def _identities(path: AnyName) -> set[object]:
    """Return a file's identifiers, shared by all its names: real path, device and inode."""
    location = as_place(path)
    if isinstance(location, RemotePath):
        return {_url_of(location)}
    identities: set[object] = {os.path.realpath(location)}
    with suppress(OSError, ValueError):  # it does not exist, or is not a valid path
        status = location.stat()
        identities.add((status.st_dev, status.st_ino))
    return identities


def _url_of(location: Place) -> str:
    scheme, _, rest = str(location).rpartition("://")
    return f"{_SCHEMES.get(scheme, scheme)}:{normpath(rest.strip('/'))}"


def write_whole(path: AnyName, content: bytes | Iterable[bytes]) -> None:
    """Write a small file atomically: it appears under its name only when it is complete.

    Args:
        path: the path or URL.
        content: the contents, whole or in pieces.

    Raises:
        TargetError: it cannot be written, or the path is a directory, a device or a pipe.
        BudgetError: the disk is full.
    """
    location = as_place(path)
    _refuse_irregular(location)
    if isinstance(location, RemotePath):
        remote_store().put(str(location), content if isinstance(content, bytes) else b"".join(content))
        return
    unfinished = Path(unfinished_path(str(location), uuid.uuid4().hex))  # unique
    try:
        location.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("xb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            sync_file(file.fileno())  # or the file may have its name but no contents after a power failure
        unfinished.replace(location)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise write_error(str(location), error, 0) from None


def _refuse_irregular(location: Place) -> None:
    if isinstance(location, RemotePath):
        if location.is_dir():
            raise TargetError(f"{location} is a directory; expected the name of a file", code="not-a-file")
        return
    try:
        mode = location.stat().st_mode
    except OSError:  # it does not exist, or writing will report the error
        return
    if S_ISDIR(mode):
        raise TargetError(f"{location} is a directory; expected the name of a file", code="not-a-file")
    if not S_ISREG(mode):
        raise TargetError(f"{location} is a pipe or a device", code="not-a-file", hint="choose another name")


def read_small(path: AnyName, kind: str, most: int, error: type[ReshardError]) -> bytes:
    """Return the contents of a small regular file.

    Args:
        path: the path or URL.
        kind: the expected kind of file, for messages.
        most: the size limit, in bytes.
        error: the class of errors.

    Raises:
        ReshardError: of class `error`: as for `open_regular`, or the file is larger than the limit.
    """
    if isinstance(path, RemotePath):
        try:
            nbytes = path.status().nbytes
        except GoneError:
            path.require_bucket()
            raise
        if nbytes > most:
            raise error(f"{path} has more than {most} bytes, which no {kind} has", code="too-large")
        return path.read_bytes()
    try:
        with os.fdopen(open_regular(path, error), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            large = size > most
            content = b"" if large else file.read(size + 1)  # not `most`: `read` would allocate that much at once
            while not large and len(content) <= most and (piece := file.read(1 << 20)):
                content += piece  # files of /proc report no size
    except OSError as failed:
        raise read_error(error, path, failed) from None
    if large or len(content) > most:
        raise error(f"{path} has more than {most} bytes, which no {kind} has", code="too-large")
    return content


def parse_json(content: bytes, repeated: list[str]) -> Any:
    """Parse JSON in UTF-8.

    Args:
        content: the JSON.
        repeated: receives duplicate names of objects; some parsers take the first value, others the last.

    Raises:
        ValueError: it is not JSON, not UTF-8, too deep, or has a number of thousands of digits.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            repeated.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return members

    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError("it has a number of thousands of digits") from None


def pointed(text: str, line: int, column: int) -> str:
    r"""Return a line of a text with a caret below a column, for a message; both count from 0.

    >>> print("is wrong" + pointed("a: 1\nb: [2", 1, 5))
    is wrong
        b: [2
             ^
    """
    first = max(0, column - _COLUMNS_BEFORE)
    whole = dict(enumerate(text.splitlines())).get(line, "")  # the end of a text may be a line of its own
    excerpt = "".join(char if char.isprintable() else " " for char in whole[first : first + _COLUMNS])
    return "" if excerpt.isspace() or not excerpt else f"\n    {excerpt}\n    {' ' * (column - first)}^"


def is_text(text: str) -> bool:
    r"""Return whether UTF-8 can encode a string: JSON may contain half of a surrogate pair.

    >>> is_text("größe"), is_text("\ud800")
    (True, False)
    """
    return text.isascii() or text.encode(errors="replace").decode() == text


def read_yaml(path: Place, kind: str, faults: Faults) -> Any:
    """Parse a YAML file.

    Args:
        path: the file.
        kind: the expected kind of file, for messages.
        faults: receives duplicate keys; YAML takes the last value.

    Raises:
        UsageError: it cannot be read, is not YAML, or has aliases.
    """
    import yaml  # used by no other command

    class Loader(yaml.SafeLoader):
        """A YAML loader that rejects aliases ("billion laughs")."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            mark: Any = event.start_mark
            if isinstance(event, yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem=_ALIAS, problem_mark=mark)
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > _LONGEST_SCALAR:
                raise yaml.MarkedYAMLError(problem=f"has a text of {len(event.value)} characters", problem_mark=mark)
            return super().compose_node(parent, index)

    content = read_small(path, kind, _LARGEST_YAML, UsageError)
    loader = None
    try:
        loader = Loader(content)
        node = loader.get_single_node()
        for key in _repeated(node):
            mark = key.start_mark
            faults.add(f"line {mark.line + 1}, key {key.value!r}", "is a duplicate", code="duplicate-key")
        top = loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        facts = _where(error, content.decode(errors="replace")).splitlines()
        raise UsageError(f"{path} is not YAML", code="not-yaml", facts=facts) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{path} is not YAML", code="not-yaml", facts=[" ".join(str(error).split())]) from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply for YAML", code="too-deep") from None
    except (LookupError, TypeError, AttributeError):  # raised by PyYAML itself
        raise UsageError(
            f"{path} is not YAML", code="not-yaml", facts=["a value does not fit the tag before it"]
        ) from None
    finally:
        if loader:
            loader.dispose()
    return top


def _where(error: Any, text: str) -> str:
    """Describe an error of PyYAML: line number, problem, and the line with a caret."""
    mark, begun = error.problem_mark, error.context_mark
    if error.context == "while scanning an alias":
        problem, mark = _ALIAS, begun
    else:
        since = f" that begins in line {begun.line + 1}" if begun and begun.line != mark.line else ""
        problem = f"{error.context}{since}, {error.problem}" if error.context else error.problem
    return f"line {mark.line + 1}: {problem}{pointed(text, mark.line, mark.column)}"


def _repeated(node: Any) -> Iterator[Any]:
    """Yield the duplicate keys of all mappings below a YAML node."""
    if getattr(node, "id", "") == "sequence":
        for item in node.value:
            yield from _repeated(item)
    if getattr(node, "id", "") == "mapping":
        names: set[str] = set()
        for key, value in node.value:
            if isinstance(key.value, str) and key.value in names:
                yield key
            names.add(str(key.value))
            yield from _repeated(value)

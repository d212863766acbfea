"""The words of `--to` and `format`, and the options that each takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.api.asked import TargetOptions
from reshard.api.options import unexpected
from reshard.core.format import named, targets, written
from reshard.core.options import option_fields, takers
from reshard.core.storage.places import as_place
from reshard.errors import Option, Text, UsageError, joined
from reshard.sizes import size_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reshard.core.format import Format
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.options import OptionField, Options
    from reshard.core.storage.places import AnyName, Place

CUT = ("target_strategy", "ranks", "target_stage", "remove_redundancy")
"""Options for the ranks of the target, which formats of whole tensors do not take."""

_COMMON = ("ranks", "target_stage", "remove_redundancy", "same_ranks", "target_cipher")
"""Options of a target that do not belong to one format."""

_FOREIGN = {".npz", ".npy", ".pt", ".pth", ".bin", ".h5", ".pkl", ".json", ".gguf", ".onnx", ".zip", ".tar", ".gz"}
"""Extensions of files that are not written."""

_KINDS = {"size": "int | str", "count": "int", "text": "str", "flag": "bool"}


def named_format(target: AnyName) -> tuple[Format, str] | None:
    """Return the format implied by the name of a target, and the reason; or None."""
    path = as_place(target)
    for each in targets():
        if each.extension and path.suffix == f".{each.extension}":
            if not each.one_file:
                return each, f"as {path.name} is the name of {each.called}"
            if not path.is_dir():
                return each, f"as {path.name} is the name of such a file"
    return None


def is_file_name(target: AnyName) -> bool:
    """Return whether a target has the name of a single file, and is not a directory."""
    named = named_format(target)
    return named is not None and named[0].one_file


def refuse_foreign_name(target: Place) -> None:
    """Refuse a target whose name has the extension of a format that is not written.

    Raises:
        UsageError: it has such an extension, and is not an existing directory.
    """
    if target.suffix in _FOREIGN and not target.is_dir():
        raise UsageError(
            f"{target.name} is the name of a {target.suffix} file, which reshard does not write", code="unknown-format",
            hint="name a directory, or a file that ends with .safetensors or .ckpt",
        )  # fmt: skip


def like(checkpoint: Checkpoint) -> Format:
    """Return the format of a target like a checkpoint; files of ranks if its own is only read."""
    own = named(checkpoint.word)
    return own if own.options is not None else written("safetensors")


def takes(format_: Format, option: str) -> bool:
    """Return whether a target of a format takes an option, by the name of the option."""
    if option in CUT:
        return not format_.whole
    if option == "same_ranks":
        return format_.one_file
    return any(each.option == option for each in option_fields(format_.options))


def only_taker(options: Iterable[str]) -> Format | None:
    """Return the format that alone takes one of some options; None if there is none."""
    by_option = takers(targets())
    found = (by_option[name] for name in options if len(by_option.get(name, ())) == 1)
    return next((each for ((each, _),) in found), None)


def check_options(format_: Format, options: Collection[str]) -> None:
    """Check that a target accepts options.

    Args:
        format_: the format of the target.
        options: the names of the options.

    Raises:
        UsageError: the target does not accept an option.
    """
    wrong = [name for name in options if not takes(format_, name)]
    if not wrong:
        return
    code = "option-of-another-format"
    if format_.whole and (cut := [name for name in wrong if name in CUT]):
        listed = joined(", ", [Text(Option(name)) for name in cut])
        raise UsageError(f"{format_.whole} holds whole tensors", code=code, hint=Text("leave ", listed, " out"))
    listed = joined(", ", [Text(Option(name)) for name in wrong])
    first, *others = [each.name for each in targets(packages=True) if takes(each, wrong[0])]
    raise UsageError(
        Text(listed, f" does not go with the format {format_.name}"), code=code,
        hint=Text("leave ", listed, " out, or choose ", Option("to", first), *(f" or {other}" for other in others)),
    )  # fmt: skip


def options_of(format_: Format, values: Mapping[str, Any], name: str | None = None) -> Options:
    """Return the options of a target.

    Args:
        format_: its format.
        values: the values that were given, by option.
        name: the name of the target, if it is one file.
    """
    kind: Any = format_.options
    given = {each.field: values[each.option] for each in option_fields(kind) if each.option in values}
    result: Options = kind(**given) if name is None else kind(**given, name=name)
    return result


def target_options(given: dict[str, Any], function: str, **more: Any) -> TargetOptions:
    """Return the options of a target.

    Args:
        given: the keywords that are left, of all formats and of single ones.
        function: the name of the function that was called, for messages.
        more: further fields.
    """
    own = {name: given[name] for name in _COMMON if name in given}
    of_format = {name: value for name, value in given.items() if name not in {*_COMMON, "memory", "threads"}}
    return TargetOptions(
        memory=size_of(given.get("memory"), "memory"), of_format=given_options(of_format, function), **own, **more
    )


def given_options(keywords: Mapping[str, Any], function: str) -> dict[str, Any]:
    """Return the values of keywords that are options of formats, checked; those that are None are left out.

    Args:
        keywords: the keywords, by name in Python.
        function: the name of the function that was called.

    Raises:
        TypeError: no format has such an option.
        UsageError: a value is of another type.
    """
    from reshard.arguments import argument

    known = {option: fields[0][1] for option, fields in takers(targets(packages=True)).items()}
    result = {}
    for name, value in keywords.items():
        if name not in known:
            raise unexpected(function, name)
        field = known[name]
        if value is not None:
            plain = argument(name, _KINDS[field.kind], value)
            result[field.option] = size_of(plain, name) if field.kind == "size" else plain
    return {name: value for name, value in result.items() if value is not False}


def help_of(field: OptionField) -> str:
    """Return the help of an option of a format."""
    return f"{field.text}  [default: {field.default}]" if field.default else field.text

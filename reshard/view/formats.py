"""The list of formats, and the options of each as a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.core.format import Format, faulty_formats, formats, named
from reshard.core.options import option_fields
from reshard.view.text import table_lines

if TYPE_CHECKING:
    from collections.abc import Iterator


def formats_data() -> list[dict[str, Any]]:
    """Return the formats as plain data, in the order in which they are asked; those that cannot be loaded come last."""
    rows = [
        {
            "name": each.name, "title": each.title, "about": _about(each),
            "read": _is_read(each), "write": each.options is not None, "package": _package(each), "needs": "",
            "options": [
                {"name": field.option.replace("_", "-"), "help": field.text, "default": field.default}
                for field in option_fields(each.options)
            ],
        }
        for each in _shown()
    ]  # fmt: skip
    empty = {"title": "", "about": "", "read": False, "write": False, "package": "", "options": []}
    return rows + [{**empty, "name": name, "needs": why} for name, why in faulty_formats().items()]


def formats_text(width: int | None) -> str:
    """Return the formats as a table."""
    rows = [
        (row["name"], row["about"], "read" if row["read"] else "", "write" if row["write"] else "",
         row["needs"] or row["package"])
        for row in formats_data()
    ]  # fmt: skip
    header = ("format", "what it is", "read", "write", "package")
    lines = (
        table_lines(header, rows, width)
        if any(row[-1] for row in rows)
        else table_lines(header[:-1], [row[:-1] for row in rows], width)
    )
    return "\n".join(lines)


def options_text(name: str, width: int | None) -> str:
    """Return a format and its options as a target.

    Raises:
        UsageError: there is no such format.
    """
    chosen = named(name)
    uses = [use for use, is_one in (("read", _is_read(chosen)), ("written", chosen.options is not None)) if is_one]
    rows = [
        (f"--{field.option.replace('_', '-')}", field.text, field.default) for field in option_fields(chosen.options)
    ]
    lines = [f"{chosen.name}: {_about(chosen)}; {' and '.join(uses)}"]
    return "\n".join([*lines, "", *table_lines(("option", "help", "default"), rows, width)] if rows else lines)


def _shown() -> Iterator[Format]:
    return (each for each in formats(packages=True) if "step" not in each.takes)  # the directory of a run is none


def _is_read(format_: Format) -> bool:
    return type(format_).open is not Format.open


def _about(format_: Format) -> str:
    return (type(format_).__doc__ or format_.title).partition("\n")[0].rstrip(".")


def _package(format_: Format) -> str:
    module = type(format_).__module__.partition(".")[0]
    return "" if module == "reshard" else module

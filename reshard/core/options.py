"""Options of a target of one format: a dataclass in the folder of the format.

Its fields are the options of `--to NAME` on the command line and the keywords in Python, with their help; the reference
page; and the record in plan files.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from reshard.core.format import Format

Kind = Literal["size", "count", "text", "flag"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a target of one format."""

    def __reduce__(self) -> tuple[Any, ...]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return _unpickled, (type(self).__module__, type(self).__name__, values)

    @property
    def is_one_file(self) -> bool:
        """Return whether the target is one file, in a directory that belongs to others."""
        return False

    def path_of_rank(self, extension: str) -> str:  # noqa: ARG002 -- subclasses use it
        """Return the path of the file of each rank, in which `{rank}` is its number; empty if it is not the same."""
        return ""

    def of_stage(self, stage: int) -> Self:  # noqa: ARG002 -- subclasses use it
        """Return the options for a target that is one stage of a pipeline."""
        return self


def _unpickled(module: str, name: str, values: dict[str, Any]) -> Options:
    """Return options; on a worker of a cluster that does not have their class, none, since they are for planning."""
    try:
        kind: type[Options] = getattr(import_module(module), name)
    except ImportError:
        return Options()
    return kind(**values)


class OptionField(NamedTuple):
    """A field that is an option.

    Attributes:
        option: its name: the keyword in Python, and with hyphens the flag.
        field: the name of the field.
        kind: a size in bytes, such as "4GB"; a number from 0 on; a text; or whether it is given.
        text: the help.
        default: the help of the default.
        metavar: what stands for the value in the help.
        whole: it is for targets of whole tensors only.
        alone: it goes with no other option of the target.
    """

    option: str
    field: str
    kind: Kind
    text: str
    default: str
    metavar: str
    whole: bool
    alone: bool


def option(
    text: str,
    kind: Kind,
    *,
    default: Any = None,
    shown: str = "",
    name: str = "",
    metavar: str = "",
    whole: bool = False,
    alone: bool = False,
) -> Any:
    """Return a field of `Options` that is an option for users.

    Args:
        text: the help, a sentence.
        kind: as in `OptionField`.
        default: its value if it is not given.
        shown: the help of the default; by default none.
        name: its name if it is not the name of the field.
        metavar: what stands for the value in the help; by default SIZE or N.
        whole: it is for targets of whole tensors only.
        alone: it goes with no other option of the target.
    """
    metadata = {
        "text": text, "kind": kind, "shown": shown, "name": name, "metavar": metavar, "whole": whole, "alone": alone,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def option_fields(kind: type[Options] | None) -> list[OptionField]:
    """Return the options among the fields of a class; [] for None."""
    result = []
    for each in fields(kind) if kind else ():
        if its := each.metadata if "kind" in each.metadata else None:
            metavar = its["metavar"] or {"size": "SIZE", "count": "N"}.get(its["kind"], "")
            names = its["name"] or each.name, each.name
            result.append(
                OptionField(*names, its["kind"], its["text"], its["shown"], metavar, its["whole"], its["alone"])
            )
    return result


def takers(formats: Sequence[Format]) -> Mapping[str, Sequence[tuple[Format, OptionField]]]:
    """Return the formats that take each option, with its field."""
    result: dict[str, list[tuple[Format, OptionField]]] = {}
    for each in formats:
        for its in option_fields(each.options):
            result.setdefault(its.option, []).append((each, its))
    return result

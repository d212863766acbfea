"""Refuse a file that is one rank's part of a model, by the files next to it.

The files of ranks differ in one number of their names, or of their directory's names. So do those of steps:

1. A number after a word for a step (`epoch_2`, `step-100`) is a step, as `runs` lists it.
2. A number after a word for a rank (`rank_0`, `tp_rank_00`, `shard1`) is a rank if the numbers begin near 0, without
   large gaps, or with 0, whatever is in the files.
3. Others are undecided if the numbers begin near 0, without large gaps, and the files have the same tensors, in shapes
   that differ along one axis at most: the user has to say that a file is whole.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.listing import STEP_NAME
from reshard.core.rank_files import EXTENSIONS, Step
from reshard.errors import Option, ReshardError, SourceError, Text, names
from reshard.kits.files import is_save
from reshard.kits.torch.names import SAVE_EXTENSIONS, TRAINER_FILES
from reshard.siblings import keeping_siblings, siblings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import Place
    from reshard.siblings import Alike

_STEP = re.compile(rf"{STEP_NAME}|(?:.*[-_.=\d])?(?:ba|batch|v|version)[-_.=]?\d+", re.IGNORECASE | re.DOTALL)
_DECIMAL = re.compile(r".*\d\.\d+", re.DOTALL)
_RANK = re.compile(r".*(?:rank|shard|(?<![a-z])(?:part|tp|mp|pp|dp|fsdp))[-_.=]*\d+", re.IGNORECASE | re.DOTALL)
_NUMBER = re.compile(r"(?P<number>\d{1,18})")
_MOST_ASKED = 3  # of the siblings


class _Family(NamedTuple):
    """Names in a directory that differ in one number from a name that is looked at.

    Attributes:
        begin: the name that is looked at, up to the end of the number.
        pattern: the names, with `{rank}` for the number.
        number: the number of the name that is looked at.
        alike: the names, by number.
    """

    begin: str
    pattern: str
    number: int
    alike: Alike

    @property
    def others(self) -> list[str]:
        """Return the other names."""
        return [name for number, name in self.alike.names.items() if number != self.number]

    @property
    def others_count(self) -> int:
        """Return the number of other names; a directory may have many."""
        return len(self.alike.names) - (self.number in self.alike.names)

    @property
    def is_of_steps(self) -> bool:
        """Return whether the number is a step, or the digits of a fraction."""
        return bool(_STEP.fullmatch(self.begin) or _DECIMAL.fullmatch(self.begin))

    @property
    def is_of_ranks(self) -> bool:
        """Return whether the number is a rank; that of a LoRA adapter (`lora_rank_8`) is not counted, nor 0."""
        return bool(_RANK.fullmatch(self.begin)) and (self.is_counted or self.number == 0 or 0 in self.alike.names)

    @property
    def is_counted(self) -> bool:
        """Return whether the numbers begin near 0, without large gaps."""
        return max(self.number, self.alike.highest) < 2 * (self.others_count + 1)

    def nearest(self) -> Iterator[str]:
        """Yield the other names, those with the nearest numbers first."""
        names = self.alike.names
        for distance in range(1, max(self.number, self.alike.highest) + 1):
            for number in (self.number - distance, self.number + distance):
                if number in names:
                    yield names[number]


def refuse_one_of_ranks(path: Place) -> None:
    """Raise an error if a file is one rank's part of a model, by its name and those next to it.

    Raises:
        SourceError: it is.
    """
    for file in _with_target(path):
        directory = file.parent
        for family in _families(directory) if _RANK.search(directory.name) else []:
            beside = [f"{other}/{file.name}" for other in islice(family.others, _MOST_ASKED)]
            if family.is_of_ranks and (others := [each for each in beside if (directory.parent / each).is_file()]):
                raise _error(file, others, "")
        _refuse_by_name(file)


def refuse_parts_of_ranks(directory: Place) -> None:
    """Raise an error if a directory has files that are one rank's part of a model each, by their names."""
    with keeping_siblings():
        for file in (directory.absolute() / name for name in sorted(directory.names())):
            if file.suffix in SAVE_EXTENSIONS | EXTENSIONS and not TRAINER_FILES.fullmatch(file.name):
                _refuse_by_name(file)


def _refuse_by_name(file: Place) -> None:
    for family in _families(file) if _RANK.search(file.name) else []:
        if family.is_of_ranks:
            raise _error(file, family.others, family.pattern)


def one_of_ranks(path: Place, shapes: Callable[[Place], Mapping[str, Shape]]) -> str:
    """Return why a file may be one rank's part of a model, or "".

    Args:
        path: the file.
        shapes: returns the shape of each tensor in a file.
    """
    for file in _with_target(path):
        for family in _families(file):
            undecided = family.is_counted and not family.is_of_steps and Step.of([file]) is None
            if undecided and (other := _alike(file, family, shapes)):
                return Text(
                    f"{file}: may be one rank's part of a model, as {other} next to it has another number and the same "
                    "tensors; expected whole tensors; open it with ",
                    Option("layout", "*", "whole"),
                    " if it has all of a model",
                )
    return ""


def _with_target(path: Place) -> list[Place]:
    """Return a path, and the target of a link."""
    path = path.absolute()
    return [path, *([path.real()] if path.is_symlink() else [])]


def _families(path: Place) -> list[_Family]:
    """Return the names next to a path that differ in one number, for each number of its name that has others."""
    families = []
    siblings = siblings_of(path.parent)
    for match in _NUMBER.finditer(path.name):
        before, after = path.name[: match.start()], path.name[match.end() :]
        family = _Family(
            before + match[0], f"{before}{{rank}}{after}", int(match[0]), siblings.alike(_NUMBER, before, after)
        )
        if family.others_count:
            families.append(family)
    return families


def _alike(path: Place, family: _Family, shapes: Callable[[Place], Mapping[str, Shape]]) -> str | None:
    """Return the name of a sibling with the same tensors, whose shapes differ along one axis at most."""
    for other in islice(family.nearest(), _MOST_ASKED):
        with suppress(ReshardError, OSError):  # to open the file itself says why
            own, others = shapes(path), shapes(path.parent / other)
            if own and own.keys() == others.keys() and all(_is_cut(own[name], others[name]) for name in own):
                return other
    return None


def _is_cut(shape: Shape, other: Shape) -> bool:
    return len(shape) == len(other) and sum(a != b for a, b in zip(shape, other, strict=True)) <= 1


def _error(path: Place, others: Collection[str], pattern: str) -> SourceError:
    """Return the error for one rank's file; `pattern` matches the names of all if they are in one directory."""
    whole = Text(Option("layout", "*", "whole"), " if it has all of the model")
    hint = Text("put the files together with the program that saved them; or give ", whole)
    if pattern and path.suffix in EXTENSIONS and not is_save(str(path)):
        ranks = Text(Option("rank_pattern", pattern), " and ", Option("strategy"))
        hint = Text(f"open {quote(str(path.parent))} with ", ranks, "; or give ", whole)
    return SourceError(
        f"{path} is one rank's part of a model, by its name", code="one-of-several",
        facts=[f"{names(others, most=3)} next to it {'is' if len(others) == 1 else 'are'} of others"],
        hint=hint,
    )  # fmt: skip

"""Find the words that a misspelled one may have been meant to be."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from reshard.errors import MissingNameError

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_ALIKE = 1000  # words that are compared, which is slow


def nearest(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known words that are nearest to a misspelled one, whatever their case.

    >>> nearest("Flaot32", ["float16", "float32"]), nearest("x", ["float32"])
    (['float32'], [])
    """
    from difflib import get_close_matches  # on errors only

    by_lower = {each.lower(): each for each in islice(known, _MOST_ALIKE)}
    return [by_lower[match] for match in get_close_matches(word.lower(), by_lower, n=most, cutoff=cutoff)]


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """Return a hint with the known words nearest to a misspelled one, or "".

    >>> did_you_mean("dpc", ["dcp", "zarr"])
    'did you mean dcp?'
    """
    words = nearest(word, known, most=most)
    return f"did you mean {' or '.join(words)}?" if words else ""


def missing_name(name: object, known: Iterable[str], message: str, choice: str = "") -> MissingNameError:
    """Return the error of a mapping without a name.

    Args:
        name: the name.
        known: the names that it has.
        message: the message, but for the name.
        choice: what to type if the name is a glob or a list; "" if the mapping has nothing that takes these.

    >>> missing_name("wo", ["wq"], "ckpt has no tensor").message
    "ckpt has no tensor 'wo'"
    """
    hint = did_you_mean(name, known, most=3) if isinstance(name, str) else ""
    if choice and isinstance(name, str) and any(sign in name for sign in "*?["):
        hint = f"{choice} takes globs"
    if choice and isinstance(name, list):
        hint = f"{choice.replace('[', '*[')} takes several names"
    return MissingNameError(f"{message} {name!r:.200}", code="no-such-tensor", hint=hint)

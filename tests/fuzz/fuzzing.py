"""What the fuzzers of this folder have in common: the seed of the day, the budget of time, and what they find.

    pytest -m slow tests/fuzz

* `test_fuzz_differential` makes random models, layouts and options, and compares what the commands write with numpy
  slices of the whole tensors.
* `test_fuzz_flips` flips bits of what is written: every way to verify notices, or says that it does not look.
* `test_fuzz_rules` goes forth and back by random rules, through files of every kind.

`reference` has the models, the rules of layouts and the files, written and read without anything of the package but
the descriptions of protobuf messages.

RESHARD_FUZZ_SEED is the seed; by default it is the date, so that every day tries others. RESHARD_FUZZ_SECONDS is how
long all fuzzers take together; each does some hundreds of cases in any case. A failure names seed and case:
RESHARD_FUZZ_SEED=... RESHARD_FUZZ_CASE=... does that case alone, and RESHARD_FUZZ_KEEP=DIRECTORY keeps its files.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from commands import call
from refusals import reported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result

SECONDS = float(os.environ.get("RESHARD_FUZZ_SECONDS", "180"))
SEED = int(os.environ.get("RESHARD_FUZZ_SEED") or f"{datetime.now(UTC):%Y%m%d}")
CASE = os.environ.get("RESHARD_FUZZ_CASE")
KEEP = os.environ.get("RESHARD_FUZZ_KEEP")
_SHOWN = 12

CODES = {0, 2, 3, 4, 5, 6}
"""What a command may end with, unless it is stopped; 1 is a fault of the machine or of the program."""


class WrongError(AssertionError):
    """Something is not as it must be."""


def require(claim: object, told: str) -> None:
    """Raise `WrongError` unless a claim is true."""
    if not claim:
        raise WrongError(told)


@dataclass
class Fuzzer:
    """One fuzzer: does cases until its time is over, and reports all that went wrong at its end.

    Attributes:
        name: what a case is called by, next to its number.
        share: its part of the time.
        least: how many cases it does however long they take.
    """

    name: str
    share: float
    least: int
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, one: Callable[[random.Random, Path, Counter[str]], None]) -> None:
        """Do cases, and fail with those that failed, one of each kind."""
        kinds: dict[str, list[str]] = {}
        began = time.monotonic()
        number = -1
        while True:
            number += 1
            if CASE is not None and number:
                break
            if number >= self.least and time.monotonic() - began > SECONDS * self.share:
                break
            chosen = number if CASE is None else int(CASE)
            with directory(f"{self.name}-{chosen}") as place:
                try:
                    one(random.Random(f"{SEED} {self.name} {chosen}"), place, self.counts)  # noqa: S311 -- examples
                except WrongError as error:
                    told = str(error).replace(str(place), "…")
                except Exception:
                    told = traceback.format_exc().replace(str(place), "…")
                else:
                    continue
            kind = re.sub(r"\d+|'[^']*'", "#", told.splitlines()[0] if told else "")
            kinds.setdefault(kind, []).append(
                f"RESHARD_FUZZ_SEED={SEED} RESHARD_FUZZ_CASE={chosen} pytest -m slow -k {self.name}\n{told}"
            )
        self.counts["cases"] = number
        print(f"{self.name}: seed {SEED}, {time.monotonic() - began:.0f} s, {dict(sorted(self.counts.items()))}")
        failed = sum(map(len, kinds.values()))
        shown = "\n\n".join(f"[{len(some)} times] {some[0]}" for some in list(kinds.values())[:_SHOWN])
        assert not kinds, f"{failed} of {number} cases in {len(kinds)} kinds:\n{shown}"


@contextmanager
def directory(name: str) -> Iterator[Path]:
    """A directory in memory, where there is one; it is kept where that is asked for."""
    if KEEP:
        place = Path(KEEP) / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        yield place
        return
    shared = Path("/dev/shm")  # noqa: S108 -- below it, a directory of our own
    place = Path(tempfile.mkdtemp(prefix="reshard-fuzz-", dir=shared if shared.is_dir() else None))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def reshard(*words: str | Path) -> Result:
    """Run a command in this process; whatever it does, it ends with an exit code and one error at most."""
    with reported() as errors:
        result = call(*words)
    result.codes = [code for error in errors for code in getattr(error, "codes", ())]  # type: ignore[attr-defined]
    said = f"{result.output}{'' if result.stderr in result.output else result.stderr}"
    command = " ".join(map(str, words))
    clean = isinstance(result.exception, SystemExit | type(None))
    require(clean, f"{result.exception!r} gets through\n$ reshard {command}")
    fault = re.search(r"unexpected \w+.*internal error.*", said)
    require(fault is None and "Traceback" not in said, f"{fault[0] if fault else said}\n$ reshard {command}")
    if result.exit_code not in CODES:
        raise WrongError(f"exit code {result.exit_code}: {error_of(result)}\n$ reshard {command}")
    if result.exit_code not in {0, 3}:
        require(error_of(result), f"exit code {result.exit_code} without a word\n$ reshard {command}\n{said}")
    return result


def is_unclear(result: Result) -> bool:
    """Return whether a command refused a JSON strategy of which files of several shapes may be."""
    codes: list[str] = result.codes  # type: ignore[attr-defined]
    return result.exit_code == 4 and "unknown-shape" in codes


def error_of(result: Result) -> str:
    """Return what a command says is wrong."""
    lines = result.stderr.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("error: ")), len(lines))
    return "\n".join(lines[first:])


def done(*words: str | Path) -> Result:
    """Run a command that must succeed."""
    result = reshard(*words)
    if result.exit_code:
        told = error_of(result) or result.output
        raise WrongError(f"exit code {result.exit_code}: {told}\n$ reshard {' '.join(map(str, words))}")
    return result

"""The environment variables of the program, and the refusal of others that look like them."""

from __future__ import annotations

import os
import re
import sys

from reshard.errors import UsageError
from reshard.sizes import size_of
from reshard.spelling import did_you_mean

_PREFIX = "RESHARD_"
_OF_SERVICES = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_[A-Z]+(_PROTO|_PORT|_ADDR)?)?)")
OF_LIBRARIES = re.compile(r"RESHARD_[A-Z]+_PYTHON")
"""The variables that name a Python with another library."""
_MOST_DIGITS = 6  # of a number of threads

MEMORY, THREADS, STALL_SECONDS = "RESHARD_MEMORY", "RESHARD_THREADS", "RESHARD_STALL_SECONDS"
"""The variables that are read in Python, too; the others are of the command line."""

VARIABLES = {
    MEMORY: "Most memory to use, such as 8GB; where it has no use, it is not regarded.",
    THREADS: "Number of threads.",
    "RESHARD_CLUSTER": "Address or file of a dask scheduler, or a word such as `local:4` or `threads`.",
    "RESHARD_TUNE": "Values of --tune, such as `fsync=no drop-cache=yes`.",
    "RESHARD_DEBUG": "Whether an error shows its traceback: 1, 0, true or false.",
    "RESHARD_KEY": "Key of encrypted files of SOURCE.",
    "RESHARD_KEY_FILE": "File that has the key of SOURCE.",
    "RESHARD_TARGET_KEY": "Key of encrypted files of TARGET.",
    "RESHARD_TARGET_KEY_FILE": "File that has the key of TARGET.",
    STALL_SECONDS: "Seconds without progress after which a request to a store fails, such as 30.",
}
"""What each variable sets."""

OF_TESTS = {
    "RESHARD_NAME_PYTHON": "A Python with another library, such as `RESHARD_TORCH_PYTHON`, which tests run beside.",
    "RESHARD_FUZZ_SECONDS": "How long the differential test tries random conversions.",
    "RESHARD_FUZZ_SEED": "Seed of its random choices.",
    "RESHARD_FUZZ_CASE": "Number of the one case to run again.",
    "RESHARD_FUZZ_KEEP": "Directory in which its files stay.",
}
"""What each variable sets that only the project's own tests read."""


AGENTS = ("AI_AGENT", "CLAUDECODE", "CODEX_SANDBOX")
"""Variables that agents set for the programs that they run."""


def is_agent() -> bool:
    """Return whether an agent reads the output: a variable declares it, and stdout is not a terminal."""
    return any(os.environ.get(name) for name in AGENTS) and not sys.stdout.isatty()


def refuse_unknown() -> None:
    """Refuse variables of the environment that begin as ours and are none of them.

    Kubernetes sets some in each pod beside a service that is called `reshard`, or `reshard-` and more.

    Raises:
        UsageError: there is one.
    """
    for name in os.environ:
        if name.startswith(_PREFIX) and not (
            name in VARIABLES
            or name in OF_TESTS
            or OF_LIBRARIES.fullmatch(name)
            or _OF_SERVICES.fullmatch(name, len(_PREFIX))
        ):
            raise UsageError(
                f"{name} is no environment variable of reshard", code="unknown-variable",
                hint=did_you_mean(name, VARIABLES) or "unset it; `reshard help environment` lists those that are",
            )  # fmt: skip


def memory(given: int | None) -> int | None:
    """Return the most memory to use in bytes: what is given, or what the environment says; None for no limit.

    Raises:
        UsageError: the variable is not a size.
    """
    return size_of(os.environ.get(MEMORY) or None, MEMORY) if given is None else given


def threads(given: int | None) -> int | None:
    """Return a number of threads: what is given, or what the environment says; None if neither says it.

    Raises:
        UsageError: the variable is not a number of threads.
    """
    text = os.environ.get(THREADS, "")
    if given is not None or not text:
        return given
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise UsageError(f"{THREADS}: {text!r:.60} is not a number of threads, such as 4", code="bad-value")
    return int(text)

"""Where the command begins, `reshard` and `python -m reshard`: what is seen to before anything slow is imported.

1. An interrupt ends it with one line, at any moment. Before this module is loaded Python itself starts, and ends with
   a traceback of its own if it must.
2. A system that is not supported gets one line, too.
3. Without room for the files that are to be opened it says so: Python's imports are the first that need some.

So this imports nothing that takes time: `_signal` is what `signal` makes enumerations of.
"""

from __future__ import annotations

import os
import sys
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]  # typeshed lacks it

from reshard.cli import stop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

DESCRIPTORS = 16
"""How many files are open at once, at least: those that are read and written, the one that is imported, pipes."""


def main() -> NoReturn:
    """Run the command line and exit."""
    if getsignal(SIGINT) is default_int_handler:  # and whoever ignores it goes on ignoring it
        signal(SIGINT, stop)
    _check_system()
    _check_descriptors()
    from reshard.cli.main import main as run

    run()


def _check_system() -> None:
    """Exit with a sentence on a system that is not supported."""
    try:
        import reshard.core.storage  # noqa: F401 -- it raises there
    except ImportError as error:
        os.write(2, f"error: {error}\n".encode())
        sys.exit(1)


def _check_descriptors() -> None:
    """Exit with a sentence where too few files may be opened."""
    opened: list[int] = []
    try:
        opened += os.pipe()
        while len(opened) < DESCRIPTORS:
            opened.append(os.dup(opened[0]))
    except OSError as error:
        text = f"error: only {len(opened)} more files can be opened ({error.strerror}); expected at least {DESCRIPTORS}"
        os.write(2, f"{text}; raise the limit, such as by `ulimit -n 256`\n".encode())
        sys.exit(1)
    finally:
        for descriptor in opened:
            os.close(descriptor)


if __name__ == "__main__":
    main()

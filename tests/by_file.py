"""Commands whose runs write files from first byte to last, as `Plan.run(..., partition="file")`; no option asks for it.

`python by_file.py transform …` is such a command.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from reshard.core.run import run as running

if TYPE_CHECKING:
    from reshard.core.run.settings import RunOptions


def by_file(patch: pytest.MonkeyPatch) -> None:
    """Have plans run by file from now on, but for stores, which have no such way on a disk."""
    run = running.run

    def run_by_file(plan: Any, directory: Any, options: RunOptions, **others: Any) -> Any:
        partition = options.partition or (None if plan.shape == "store" else "file")
        return run(plan, directory, replace(options, partition=partition), **others)

    patch.setattr(running, "run", run_by_file)


if __name__ == "__main__":
    from reshard.cli.main import main

    by_file(pytest.MonkeyPatch())
    main()

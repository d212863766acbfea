"""Commands whose runs write files from first byte to last, as `Plan.run(..., partition="file")`; no option asks for it.

`python by_file.py transform …` is such a command.
"""

from __future__ import annotations

from typing import Any

import pytest

from reshard.run import run as running


def by_file(patch: pytest.MonkeyPatch) -> None:
    """Have plans run by file from now on, but for stores, which have no such way on a disk."""
    run = running.run

    def run_by_file(plan: Any, *arguments: Any, **options: Any) -> Any:
        partition = options.pop("partition", None) or (None if plan.exclusive else "file")
        return run(plan, *arguments, **options, partition=partition)

    patch.setattr(running, "run", run_by_file)


if __name__ == "__main__":
    from reshard.cli.main import main

    by_file(pytest.MonkeyPatch())
    main()

"""Commands whose runs write files from first byte to last, as `Plan.run(..., partition="file")`; no option asks for it.

`python by_file.py transform …` is such a command.
"""

from __future__ import annotations

from typing import Any

import pytest

from reshard.plan.plan import Plan


def by_file(patch: pytest.MonkeyPatch) -> None:
    """Have plans run by file from now on, but for stores, which have no such way on a disk."""
    run = Plan.run

    def run_by_file(plan: Plan, *arguments: Any, **options: Any) -> Any:
        return run(plan, *arguments, **options, partition=None if plan.exclusive else "file")

    patch.setattr(Plan, "run", run_by_file)


if __name__ == "__main__":
    from reshard.cli.main import main

    by_file(pytest.MonkeyPatch())
    main()

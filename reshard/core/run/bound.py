"""Bind a plan to its target: partition it for the storage there, and look once at what is there already."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.catalog import paths_below
from reshard.core.plan.partition import partitioned
from reshard.core.run.state.beside import neighbours, older_files, refuse_other_ranks
from reshard.core.run.state.preflight import check_target
from reshard.core.storage.places import as_place, is_url
from reshard.errors import Option, SourceError, TargetError, Text, names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.plan.plan import Plan
    from reshard.core.run.settings import RunOptions
    from reshard.core.run.state.beside import Older
    from reshard.core.storage.places import AnyName, Place


class Bound(NamedTuple):
    """A plan, and the target where it is carried out.

    Attributes:
        plan: with the tasks that suit the storage of the target.
        root: the target, a URL or a local path without links in it.
        older: files of earlier runs that the run removes, by their paths below the root.
    """

    plan: Plan
    root: str
    older: Mapping[str, Older]


def refuse_run(plan: Plan, target: Place) -> None:
    """Refuse a local directory that has checkpoints below it, such as that of a run: the target would hide them.

    `reshard runs` would name the target as the newest, and readers of the directory would take it.

    Raises:
        TargetError: there are checkpoints below the directory.
    """
    is_step = any(file.publish == "pointer" for file in plan.files)  # the plan writes a step of its own
    if plan.shape != "directory" or is_step or is_url(str(target)) or not target.is_dir():
        return
    below: list[str] = []
    with suppress(SourceError, OSError):  # a directory that cannot be listed does not keep a run from writing
        below = paths_below(target)
    if below:
        raise TargetError(
            f"{target} has checkpoints below it: {names(below, most=3)}",
            code="other-checkpoint",
            facts=["a target in that directory itself would be taken for the newest of them"],
            hint=Text(
                f"name a directory of its own, such as {target}/new; ",
                Option("overwrite"),
                " writes there all the same",
            ),
        )


def bind(plan: Plan, target: AnyName, options: RunOptions, *, is_whole: bool = False) -> Bound:
    """Return a plan with its target; nothing is changed there.

    Args:
        plan: a plan by tensor.
        target: the directory of the target files.
        options: how the plan is carried out.
        is_whole: the user named the directory, so that other files in it are looked at, too.

    Raises:
        TargetError: no run may write there (`check_target`, `neighbours`, `refuse_run`, `refuse_other_ranks`).
        SourceError: the storage of the target cannot be reached.
        UsageError: the storage does not support the partition of the options.
        BudgetError: the memory of the plan is too little to send files.
    """
    place = as_place(target)
    root = str(place.real())
    older = older_files(plan, root) if options.starts_over else {}
    if is_whole:
        plan = replace(plan, warnings=(*plan.warnings, *neighbours(plan, place, older)))
        if not options.starts_over:
            refuse_run(plan, place)
    if not options.ledger:
        older = {}
    plan = partitioned(plan, options.partition, root, server_copy=options.server_copy)
    check_target(plan, root, older)
    if options.ledger and options.starts_over:
        refuse_other_ranks(plan, root, older)
    return Bound(plan, root, older)

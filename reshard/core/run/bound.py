"""Bind a plan to its target: partition it for the storage there, and look once at what is there already."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.plan.partition import partitioned
from reshard.core.run.state.beside import neighbours, older_files, refuse_other_ranks
from reshard.core.run.state.preflight import check_target
from reshard.core.storage.places import as_place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.plan.plan import Plan
    from reshard.core.run.settings import RunOptions
    from reshard.core.run.state.beside import Older
    from reshard.core.storage.places import AnyName


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


def bind(plan: Plan, target: AnyName, options: RunOptions, *, is_whole: bool = False) -> Bound:
    """Return a plan with its target; nothing is changed there.

    Args:
        plan: a plan by tensor.
        target: the directory of the target files.
        options: how the plan is carried out.
        is_whole: the user named the directory, so that other files in it are looked at, too.

    Raises:
        TargetError: no run may write there (`check_target`, `neighbours`, `refuse_other_ranks`).
        SourceError: the storage of the target cannot be reached.
        UsageError: the storage does not support the partition of the options.
        BudgetError: the memory of the plan is too little to send files.
    """
    place = as_place(target)
    root = str(place.real())
    older = older_files(plan, root) if options.starts_over else {}
    if is_whole:
        plan = replace(plan, warnings=(*plan.warnings, *neighbours(plan, place, older)))
    if not options.ledger:
        older = {}
    plan = partitioned(plan, options.partition, root, server_copy=options.server_copy)
    check_target(plan, root, older)
    if options.ledger and options.starts_over:
        refuse_other_ranks(plan, root, older)
    return Bound(plan, root, older)

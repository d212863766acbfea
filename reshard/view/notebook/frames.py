"""Checkpoints, plans and lists of checkpoints as `pandas.DataFrame`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from reshard.compute.frames import attributes_frame, frame
from reshard.core.model.checkpoint import Sharding
from reshard.core.plan.select import kinds
from reshard.view.words import cut_words, sharding_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.catalog import StoredCheckpoint
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan


def checkpoint_frame(checkpoint: Checkpoint) -> Any:
    """Return the tensors of a checkpoint; see `reshard.Checkpoint.to_dataframe`."""
    kind_of = kinds(checkpoint)
    rows = (
        (name, tensor.spec.dtype.name, tensor.spec.shape, tensor.spec.nbytes, kind_of[name],
         cut_words(checkpoint, tensor), len(tensor.sharding.blocks))
        for name, tensor in checkpoint.tensors.items()
    )  # fmt: skip
    return frame(("name", "dtype", "shape", "nbytes", "kind", "cut", "blocks"), rows)


def plan_frame(plan: Plan) -> Any:
    """Return the transfers of a plan; see `reshard.Plan.to_dataframe`."""
    source, kind_of = plan.source, kinds(plan.source)
    rows = []
    for transfer in plan.transfers:
        route, recipe = transfer.route, transfer.recipe
        nbytes = prod(recipe.shape) * transfer.target_dtype.itemsize
        rows.append(
            (transfer.name, transfer.target_dtype.name, recipe.shape, nbytes, kind_of[transfer.source_name],
             sharding_words(Sharding(recipe.targets, route.writes), recipe.shape), len(recipe.targets),
             transfer.source_name, transfer.dtype.name, cut_words(source, source.tensors[transfer.source_name]))
        )  # fmt: skip
    columns = ("name", "dtype", "shape", "nbytes", "kind", "cut", "blocks", "source_name", "source_dtype", "source_cut")
    return frame(columns, rows)


def runs_frame(runs: Sequence[StoredCheckpoint]) -> Any:
    """Return the checkpoints below a directory; see `Runs.to_dataframe`."""
    columns = ("path", "step", "format", "ranks", "files", "nbytes", "modified", "state", "newest", "last", "reason")
    result = attributes_frame(columns, runs)
    from pandas import to_datetime  # it is there

    result["modified"] = to_datetime(result["modified"].where(result["modified"] > 0), unit="s", utc=True)
    return result

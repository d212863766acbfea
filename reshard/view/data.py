"""What is shown, as plain data for JSON. Nothing is folded there."""

from __future__ import annotations

from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING

from reshard.plan.changes import changes_of
from reshard.source.reshape import stacked_axes
from reshard.view.tables import objects_of, totals
from reshard.view.words import layouts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.rank_dirs import Step
    from reshard.layout.layout import Layout
    from reshard.plan.plan import Plan
    from reshard.run.run import Report
    from reshard.source.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.strategy.strategy import Strategy
    from reshard.verify.difference import Difference
    from reshard.verify.verification import Verification


def layout_data(layout: Layout) -> dict[str, object]:
    """Return a layout in the words of a JSON strategy file; the entries of the map are lists of axes."""
    return {
        "dev_matrix": list(layout.dev_matrix),
        "tensor_map": [list(axes) for axes in layout.tensor_map],
        "opt_weight_shard_size": layout.opt_weight_shard_size,
        "opt_weight_shard_step": layout.opt_weight_shard_step,
        "param_split_shape": list(layout.param_split_shape),
        "field": layout.field,
    }


def strategy_data(strategy: Strategy) -> dict[str, object]:
    """Return a strategy as plain data; a tensor has one item for each stage that holds it."""
    return {
        "ranks": list(strategy.ranks),
        "stages": list(strategy.stages),
        "devices_per_stage": strategy.devices,
        "merged": strategy.merged,
        "tensors": [
            {"name": name, "stage": placed.stage, "layout": layout_data(placed.layout)}
            for name, places in strategy.tensors.items()
            for placed in places
        ],
    }


def checkpoint_data(checkpoint: Checkpoint) -> dict[str, object]:
    """Return a checkpoint as plain data; nothing is folded there."""
    ranks = checkpoint.ranks
    facts, shown = objects_of(checkpoint)
    replicas: dict[Sharding, list[dict[str, object]]] = {}
    return {
        **_files_data([checkpoint]),
        "nbytes": checkpoint.nbytes,
        "warnings": list(checkpoint.warnings),
        "sampled": checkpoint.opening.looked and checkpoint.opening.looked._asdict(),
        "unreadable": dict(checkpoint.unreadable),
        "bound": dict(checkpoint.extras.bound),
        "objects": shown,
        "training": facts,
        "totals": [total._asdict() for total in totals(checkpoint)],
        "tensors": [
            {
                **_tensor_data(tensor),
                "stacked": list(stacked_axes(tensor)),
                "layouts": [
                    {"stage": stage, **layout_data(layout)} for stage, layout in layouts_of(checkpoint, tensor)
                ],
                "shards": _shards_data(tensor.sharding, ranks, replicas),
            }
            for tensor in checkpoint.tensors.values()
        ],
    }


def _tensor_data(tensor: Tensor) -> dict[str, object]:
    name, dtype, shape = tensor.spec
    return {"name": name, "dtype": dtype.name, "shape": list(shape), "nbytes": tensor.spec.nbytes}


def _shards_data(
    sharding: Sharding, ranks: Sequence[int], known: dict[Sharding, list[dict[str, object]]]
) -> list[dict[str, object]]:
    if sharding not in known:
        known[sharding] = [
            {"start": list(block.start), "stop": list(block.stop), "ranks": [ranks[at.file] for at in replicas]}
            for block, replicas in zip(sharding.blocks, sharding.replicas, strict=True)
        ]
    return known[sharding]


def _files_data(parts: Sequence[Checkpoint]) -> dict[str, object]:
    found = [(rank, file) for part in parts for rank, file in zip(part.ranks, part.files, strict=True)]
    return {
        "source": parts[0].root,
        "step": _step_data(parts[0].opening.step),
        "ranks": sorted({rank for rank, _ in found}),
        "files": [
            {"rank": rank, "path": file.path, "format": file.index.format, "nbytes": file.nbytes}
            for rank, file in sorted(found, key=itemgetter(0))
        ],
    }


def _step_data(step: Step | None) -> dict[str, object] | None:
    return step and step._asdict()


def rank_files_data(parts: Sequence[Checkpoint], warnings: Sequence[str]) -> dict[str, object]:
    """Return what each rank's files hold, as plain data; the parts are those of `tables.rank_parts`."""
    return {
        **_files_data(parts),
        "warnings": list(warnings),
        "groups": [
            {
                "ranks": sorted(set(part.ranks)),
                "totals": [total._asdict() for total in totals(part)],
                "unreadable": dict(part.unreadable),
                "tensors": [_tensor_data(tensor) for tensor in part.tensors.values()],
            }
            for part in parts
        ],
    }


def plan_data(plan: Plan, directory: str, report: Report | None = None) -> dict[str, object]:
    """Return a plan, and what came of it, as plain data: the same keys before a run (`seconds` is null) and after."""
    stats = plan.stats._asdict()
    if report is not None:
        stats["bytes_read"] = report.bytes_read
    return {
        "dry_run": report is None,
        "source": plan.source.root,
        "step": _step_data(plan.source.opening.step),
        "target": directory,
        "format": plan.format,
        "encryption": plan.cipher and plan.cipher.mode,
        "ranks": list(plan.ranks),
        **stats,
        "partition": "file" if plan.by_file else "tensor",
        "read_amplification": plan.stats.read_amplification,
        "seconds": None if report is None else report.seconds,
        "dropped": list(plan.dropped),
        "missing": list(plan.missing),
        "left_out": list(plan.left_out),
        "changes": [one._asdict() for one in changes_of(plan)],
        "warnings": list(plan.warnings),
        "sampled": plan.source.opening.looked and plan.source.opening.looked._asdict(),
        "files": [{"rank": file.rank, "path": file.path, "nbytes": plan.size_of(file)} for file in plan.files],
    }


def report_data(
    plan: Plan, directory: str, report: Report | None = None, verify: str | None = None, check: str | None = None
) -> dict[str, object]:
    """Return a plan and the report of its run as plain data; the keys are the same before a run (null) and after.

    The two commands are those of `report_text`.
    """
    data = plan_data(plan, directory, report)
    data["replicas"] = plan.replicas
    data["links"] = sum(file.link is not None for file in plan.files)
    data["measured_memory"] = report and report.peak_memory
    data["checksums"] = report and _checksums_data(report)
    data["resumed"] = report and report.resumed
    data["finished"] = report and report.finished
    data["removed"] = report and list(report.removed)
    data["verify"] = report and verify
    data["manifest"] = report and check
    return data


def _checksums_data(report: Report) -> dict[str, dict[str, str]] | None:
    if report.checksums is None:
        return None
    return {
        path: {name: f"{checksum:08x}" for name, checksum in tensors.items()}
        for path, tensors in report.checksums.items()
    }


def verdict_data(found: Verification) -> dict[str, object]:
    """Return what was verified as plain data."""
    return {
        "target": found.target,
        "against": found.against,
        "step": _step_data(found.step),
        "against_step": _step_data(found.against_step),
        "equal": found.equal,
        "changes": [one._asdict() for one in found.changes],
        "note": found.note,
        "absent": found.absent,
        "complete": found.complete and found.equal,
        "ranks": list(found.ranks),
        "files": found.files,
        "tensors": found.tensors,
        "copies": found.copies,
        "bytes_read": found.bytes_read,
        "total_bytes": found.total_bytes,
        "sample": found.sample,
        "seed": found.seed,
        "seconds": found.seconds,
        "dropped": list(found.dropped),
        "left_out": list(found.left_out),
        "warnings": list(found.warnings),
        "unchecked": list(found.unchecked),
        "independent": found.independent,
        "differences": [_difference_data(one) for one in found.differences],
    }


def _difference_data(one: Difference) -> dict[str, object]:
    return {
        "kind": one.kind,
        "text": one.text,
        "tensor": one.name,
        "side": one.side,
        "rank": one.rank,
        "path": one.path,
        "block": None if one.block is None else {"start": list(one.block.start), "stop": list(one.block.stop)},
        "index": None if one.index is None else list(one.index),
        "index_in_block": None if one.index_in_block is None else list(one.index_in_block),
        "count": one.count,
        "found": one.found,
        "expected": one.expected,
        "reference": one.reference,
        "dtype": one.dtype,
        "largest": one.largest if one.largest is not None and isfinite(one.largest) else None,
        "nans": one.nans,
    }

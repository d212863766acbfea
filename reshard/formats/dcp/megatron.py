"""The sidecar files that Megatron-Core looks for next to a distributed checkpoint, if it carries none over."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from reshard.errors import Option, Text
from reshard.kits.torch.names import BACKEND, COMMON
from reshard.kits.torch.saved_tensors import saved_object

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.errors import Faults

SIDE = "mcore"
"""The name of Megatron-Core's side in rules."""

HOW_TO_LOAD = (
    "Megatron loads this with --dist-ckpt-strictness log_all --finetune: it has no _extra_state, and no optimizer that "
    "could go on"
)

_BACKENDS = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip
_CHECKPOINT_VERSION = 3.0
_OF_ONE_LAYER = re.compile(r"(?:.*\.)?(?:decoder|encoder)\.layers\.\d+\.", re.DOTALL)
_OBJECT = re.compile(r"[^/]+/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")


def is_for_megatron(source: Checkpoint, step: int | None = None) -> bool:
    """Return whether a DCP made from a source is for Megatron-Core.

    It is if rules mapped the tensors to Megatron's, or if it goes to the directory of an iteration. A DCP of nested
    dicts is PyTorch's, also if Megatron-LM wrote it (`--ckpt-format torch_dcp`), and stays so.
    """
    if source.origin is not None and source.origin.side == SIDE:
        return True
    return step is not None and all(len(path) == 1 for path in (source.extras.paths or {}).values())


def files_beside(step: int | None, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of both files, by name.

    Args:
        step: the iteration; None for a model that was not trained here, which is iteration 0.
        names: the names of the tensors.
    """
    common: dict[str, object] = {"iteration": step or 0, "checkpoint_version": _CHECKPOINT_VERSION}
    if any(map(_OF_ONE_LAYER.match, names)):
        common["content_metadata"] = {"non_homogeneous_layers": True}
    return {COMMON: saved_object(common), BACKEND: json.dumps(_BACKENDS).encode()}


def check_objects(objects: Iterable[tuple[str, str]], faults: Faults) -> None:
    """Add a fault for each object whose name Megatron-Core cannot parse.

    Args:
        objects: the old and the new name of each object.
        faults: collects the faults found.
    """
    for old, new in objects:
        if not _OBJECT.fullmatch(new):
            faults.add(
                f"object {old!r}", "is not a tensor, and Megatron-Core loads no such object", code="unsupported-object",
                hint=Text("to leave it out, give ", Option("exclude", old)),
            )  # fmt: skip

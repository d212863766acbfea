"""The files that Megatron-Core has next to the tensors of a DCP: found, or made if there are none."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from reshard.core.model.facts import Object
from reshard.core.storage.places import any_store
from reshard.core.target import TargetFile, literal
from reshard.errors import Option, SourceError, Text, names
from reshard.kits.torch.names import BACKEND, COMMON
from reshard.kits.torch.saved_tensors import saved_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.base import Status
    from reshard.core.storage.places import Place
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


def find_sidecars(directory: Place, listing: Sequence[str]) -> dict[str, Object]:
    """Return the sidecar files in a directory; none if another program saved the tensors."""
    paths_of = {name: [path for path in listing if path.rpartition("/")[2] == name] for name in (COMMON, BACKEND)}
    sidecars = {}
    for name, paths in paths_of.items() if paths_of[BACKEND] else ():
        try:
            if len(paths) == 1:
                path = directory.absolute() / paths[0]
                sidecars[name] = Object(str(path), 0, status_of(path).nbytes)
            elif paths:
                sidecars[name] = Object(problem=f"is not read: {names(paths)} are two of a kind")
        except SourceError as error:
            sidecars[name] = Object(problem=f"is not read: {error.message}")
    return sidecars


def status_of(path: Place) -> Status:
    """Return the state of a file; evict an older file of this name that is held open."""
    any_store().size(str(path))
    return path.status()


def arguments_of(sidecars: Mapping[str, Object], objects: Mapping[str, Object]) -> dict[str, object]:
    """Return what Megatron-LM states of the training; {} if another program saved the tensors."""
    if not sidecars:
        return {}
    from reshard.kits.torch.objects import arguments_in  # not on every start

    return arguments_in(sidecars, objects)


def is_for_megatron(source: Checkpoint, step: int | None) -> bool:
    """Return whether a DCP made from a source is for Megatron-Core.

    It is if rules mapped the tensors to Megatron's, or if it goes to the directory of an iteration. A DCP of nested
    dicts is PyTorch's, also if Megatron-LM wrote it (`--ckpt-format torch_dcp`), and stays so.
    """
    if source.origin is not None and source.origin.side == SIDE:
        return True
    return step is not None and all(len(path) == 1 for path in (source.extras.paths or {}).values())


def new_sidecars(step: int | None, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of both files, by name.

    Args:
        step: the iteration; None for a model that was not trained here, which is iteration 0.
        names: the names of the tensors.
    """
    common: dict[str, object] = {"iteration": step or 0, "checkpoint_version": _CHECKPOINT_VERSION}
    if any(map(_OF_ONE_LAYER.match, names)):
        common["content_metadata"] = {"non_homogeneous_layers": True}
    return {COMMON: saved_object(common), BACKEND: json.dumps(_BACKENDS).encode()}


def target_files(rank: int, directory: str, contents: Mapping[str, bytes]) -> list[TargetFile]:
    """Return the sidecar files and the metadata of a target, which get their names last, in this order."""
    return [
        TargetFile(rank, f"{directory}{name}", literal(content), publish="index") for name, content in contents.items()
    ]


def check_objects(objects: Iterable[tuple[str, str]], faults: Faults) -> None:
    """Add a fault for each object, by old and new name, that Megatron-Core cannot parse."""
    for old, new in objects:
        if not _OBJECT.fullmatch(new):
            faults.add(
                f"object {old!r}", "is not a tensor, and Megatron-Core loads no such object", code="unsupported-object",
                hint=Text("to leave it out, give ", Option("exclude", old)),
            )  # fmt: skip

"""Data that a distributed checkpoint carries over from another.

These are objects, Megatron-Core's sidecar files, and paths in nested dicts and lists.

The bytes of objects are kept in memory from planning on, and are literals in the target files, like the metadata. They
are checked against their own checksums. They describe the state as it was saved, and are not changed.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from reshard.core.model.objects import LARGEST, contents, problems
from reshard.errors import Option, SourceError, Text, bytes_text, names
from reshard.formats.dcp.metadata import BACKEND, COMMON
from reshard.formats.dcp.written_metadata import check_nesting, followed, without_gaps
from reshard.kits.torch.objects import check_sums, iteration
from reshard.kits.torch.saved_tensors import saved_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.facts import Object
    from reshard.errors import Faults
    from reshard.formats.dcp.metadata import KeyPath


_WITH_PARAMETER_NAMES = re.compile(r"(?:.*\.)?param_groups(?:\.\d+\.params)?", re.DOTALL)


class Carried:
    """Objects and files that are carried byte for byte.

    Attributes:
        objects: the bytes of each object, by name in the target.
        beside: the bytes of each sidecar file, by name.
        names: the names of objects and sidecar files in the source.
        paths: the paths of tensors and objects in nested dicts and lists; empty for checkpoints of Megatron, which
            have no paths.
    """

    def __init__(
        self, source: Checkpoint, tensors: Mapping[str, str], objects: Mapping[str, str], faults: Faults
    ) -> None:
        """Read the objects and files.

        Args:
            source: the checkpoint.
            tensors: new names to old names.
            objects: old names to new names.
            faults: collects the faults found.
        """
        self._source, self._tensors = source, tensors
        self.beside = read_carried(source.extras.beside, faults)
        contents_of = read_carried({name: source.extras.objects[name] for name in objects}, faults)
        self.objects = {objects[name]: content for name, content in contents_of.items()}
        self.names = {*self.beside, *contents_of}
        self.paths: dict[str, KeyPath] = {}
        if source.extras.paths is not None:
            old_of = {**tensors, **{objects[name]: name for name in contents_of}}
            paths = source.extras.paths
            self.paths = {new: followed(paths.get(old, (old,)), old, new) for new, old in old_of.items()}
        check_nesting(self.paths, faults)
        self.paths = without_gaps(self.paths)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in memory."""
        return sum(len(content) for group in (self.objects, self.beside) for content in group.values())

    def warnings(self, step: int | None) -> Iterator[str]:
        """Yield warnings about carried data with old tensor names or another step."""
        yield from old_names(self._source, self._tensors, self.names)
        source_step = None if step is None else iteration(self._source)
        if source_step not in {None, step}:
            yield f"{self._source.root}: says iteration {source_step}, and is carried so to iteration {step}"


def old_names(source: Checkpoint, tensors: Mapping[str, str], carried: Iterable[str]) -> Iterator[str]:
    """Yield warnings about copied metadata that still uses old tensor names.

    Args:
        source: the checkpoint.
        tensors: new names to old names of the target's tensors.
        carried: the old names of carried objects and files, which may contain tensor names.
    """
    if bound := sorted(old for new, old in tensors.items() if old in source.extras.bound and new != old):
        yield f"{names(bound, most=3)}: has another name in the target, by which no training looks for it"
    old = sorted(filter(_WITH_PARAMETER_NAMES.fullmatch, carried))
    if old and not {*source.tensors, *source.left_out} - source.extras.objects.keys() <= set(tensors):
        yield f"{names(old, most=3)}: carried as it is, with the names that parameters had in the source"


def read_carried(objects: Mapping[str, Object], faults: Faults) -> dict[str, bytes]:
    """Read objects and verify their checksums; unreadable objects are left out."""
    wrong = problems(objects)
    readable = {name: entry for name, entry in objects.items() if name not in wrong}
    total = sum(entry.nbytes for entry in readable.values())
    if total > LARGEST:
        largest = max(readable, key=lambda name: readable[name].nbytes)
        faults.add(
            "objects", f"have {bytes_text(total)}; expected {bytes_text(LARGEST)} at most", code="too-large",
            hint=Text("to leave some out, give ", Option("exclude", largest)),
        )  # fmt: skip
        return {}
    result = {}
    for name, content in contents(readable):
        try:
            if name != BACKEND:
                check_sums(content)
            result[name] = content
        except SourceError as error:
            hint = Text("to leave it out, give ", Option("exclude", name))
            fault = SourceError(error.message, code=error.code, facts=error.facts, hint=hint)
            faults.add(f"object {name!r}", fault)
    return result


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

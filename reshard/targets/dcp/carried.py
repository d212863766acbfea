"""What a distributed checkpoint gets of another as it is: objects, Megatron-Core's files beside, and how all is nested.

The bytes of objects are held from the plan on, and are in its files as the metadata are. Each is compared with the
checksums that it has; what it says is of the state that was saved, and nothing of it is changed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.errors import Option, SourceError, Text, bytes_text, names
from reshard.readers.dcp import BACKEND
from reshard.readers.dcp.objects import LARGEST, check_sums, contents, iteration, problems
from reshard.targets.dcp.nesting import check_nesting, followed, without_gaps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reshard.errors import Faults
    from reshard.readers.dcp.metadata import KeyPath
    from reshard.source.checkpoint import Checkpoint, Object

_OF_NAMES = re.compile(r"(?:.*\.)?param_groups(?:\.\d+\.params)?", re.DOTALL)


class Carried:
    """What is carried byte for byte.

    Attributes:
        objects: the bytes of each object, by its name in the target.
        beside: those of each file beside, by its name.
        names: of both, in the source.
        paths: where tensors and objects are in nested dicts and lists; nothing of Megatron's, which does without.
    """

    def __init__(
        self, source: Checkpoint, tensors: Mapping[str, str], objects: Mapping[str, str], faults: Faults
    ) -> None:
        """Read what is carried.

        Args:
            source: the checkpoint.
            tensors: new names to old ones.
            objects: old names to new ones.
            faults: gets what is wrong with it.
        """
        self._source, self._tensors = source, tensors
        self.beside = read_carried(source.extras.beside, faults)
        held = read_carried({name: source.extras.objects[name] for name in objects}, faults)
        self.objects = {objects[name]: content for name, content in held.items()}
        self.names = {*self.beside, *held}
        self.paths: dict[str, KeyPath] = {}
        if source.extras.paths is not None:
            every = {**tensors, **{objects[name]: name for name in held}}
            paths = source.extras.paths
            self.paths = {new: followed(paths.get(old, (old,)), old, new) for new, old in every.items()}
        check_nesting(self.paths, faults)
        self.paths = without_gaps(self.paths)

    @property
    def nbytes(self) -> int:
        """How many bytes are held."""
        return sum(len(content) for some in (self.objects, self.beside) for content in some.values())

    def warnings(self, step: int | None) -> Iterator[str]:
        """Yield where what is carried has old names of tensors, or another step than the target."""
        yield from old_names(self._source, self._tensors, self.names)
        said = None if step is None else iteration(self._source)
        if said not in {None, step}:
            yield f"{self._source.root}: says iteration {said}, and is carried so to iteration {step}"


def old_names(source: Checkpoint, tensors: Mapping[str, str], carried: Iterable[str]) -> Iterator[str]:
    """Yield warnings about copied metadata that still uses old tensor names.

    Args:
        source: the checkpoint.
        tensors: the new names of what the target has of it to old ones.
        carried: the old names of what is carried as it is, which may have names of tensors in it.
    """
    if bound := sorted(old for new, old in tensors.items() if old in source.extras.bound and new != old):
        yield f"{names(bound, most=3)}: has another name in the target, by which no training looks for it"
    old = sorted(filter(_OF_NAMES.fullmatch, carried))
    if old and not {*source.tensors, *source.left_out} - source.extras.objects.keys() <= set(tensors):
        yield f"{names(old, most=3)}: carried as it is, with the names that parameters had in the source"


def read_carried(objects: Mapping[str, Object], faults: Faults) -> dict[str, bytes]:
    """Return the bytes of objects, whose checksums are right; what cannot be read is not carried."""
    wrong = problems(objects)
    some = {name: one for name, one in objects.items() if name not in wrong}
    total = sum(one.nbytes for one in some.values())
    if total > LARGEST:
        largest = max(some, key=lambda name: some[name].nbytes)
        faults.add(
            "objects", f"have {bytes_text(total)}; expected {bytes_text(LARGEST)} at most", code="too-large",
            hint=Text("to leave some out, give ", Option("exclude", largest)),
        )  # fmt: skip
        return {}
    held = {}
    for name, content in contents(some):
        try:
            if name != BACKEND:
                check_sums(content)
            held[name] = content
        except SourceError as error:
            hint = Text("to leave it out, give ", Option("exclude", name))
            fault = SourceError(error.message, code=error.code, facts=error.facts, hint=hint)
            faults.add(f"object {name!r}", fault)
    return held

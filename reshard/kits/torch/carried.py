"""What a checkpoint carries over from another that PyTorch or Megatron-Core saved: objects, files, paths, buckets.

The bytes of objects are kept in memory from planning on, and are literals in the target files, like the metadata. They
are checked against their own checksums. They describe the state as it was saved, and are not changed.
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from reshard.core.model.objects import LARGEST, contents, problems
from reshard.errors import Option, SourceError, Text, bytes_text, names
from reshard.kits.torch.names import BACKEND

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.facts import Object
    from reshard.errors import Faults

KeyPath = tuple[str | int, ...]
"""The path of a value in nested dicts and lists: keys and indices."""

BUCKET = (
    "is a bucket of Megatron's optimizer (dp_reshardable): its contents are not described, so it can only be copied to "
    "another DCP and resumed with the same layout"
)
BUCKETS = "optimizer.distributed.dp_group_idx_"

_WITH_PARAMETER_NAMES = re.compile(r"(?:.*\.)?param_groups(?:\.\d+\.params)?", re.DOTALL)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


class Carried:
    """Objects and files that are carried byte for byte.

    Attributes:
        objects: the bytes of each object, by name in the target.
        beside: the bytes of each sidecar file, by name.
        names: the names of objects and sidecar files in the source.
        paths: the paths of tensors and objects in nested dicts and lists; None if those of the source are not known.
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
        self.paths: dict[str, KeyPath] | None = None
        if source.extras.paths is not None:
            old_of = {**tensors, **{objects[name]: name for name in contents_of}}
            paths = source.extras.paths
            self.paths = {new: followed(paths.get(old, (old,)), old, new) for new, old in old_of.items()}

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in memory."""
        return sum(len(content) for group in (self.objects, self.beside) for content in group.values())

    def warnings(self, step: int | None = None) -> Iterator[str]:
        """Yield warnings about carried data with old tensor names or another step."""
        yield from old_names(self._source, self._tensors, self.names)
        if step is None:
            return
        from reshard.kits.torch.objects import iteration  # not on every start

        source_step = iteration(self._source)
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
    from reshard.kits.torch.objects import check_sums  # not on every start

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


def followed(path: KeyPath, old: str, new: str) -> KeyPath:
    """Return the path for a new name.

    >>> followed(("optim", "state", "layers.0.w", "step"), "optim.state.layers.0.w.step", "optim.state.w.step")
    ('optim', 'state', 'w', 'step')
    >>> followed(("model", "w"), "model.w", "w"), followed(("w",), "w", "model.w")
    (('w',), ('model.w',))
    >>> followed(("list", 1, "w"), "list.1.w", "list.7.w"), followed(("a", "b", "w"), "a.b.w", "x.w")
    (('list', 7, 'w'), ('x', 'w'))
    """
    keys = list(map(str, path))
    if new == old or ".".join(keys) != old:
        return path if new == old else (new,)
    begin, end, rest = 0, len(keys), new
    while begin < end - 1 and rest.startswith(f"{keys[begin]}."):
        rest = rest.removeprefix(f"{keys[begin]}.")
        begin += 1
    while begin < end - 1 and rest.endswith(f".{keys[end - 1]}"):
        rest = rest.removesuffix(f".{keys[end - 1]}")
        end -= 1
    if begin < end - 1 and rest == keys[end - 1]:
        return (*path[:begin], *path[end - 1 :])
    between = _split(rest, [key.count(".") + 1 for key in keys[begin:end]])
    before_keys = path[begin:end] if len(between) == end - begin else between
    return (*path[:begin], *(_like(key, before) for key, before in zip(between, before_keys, strict=True)), *path[end:])


def _split(text: str, sizes: list[int]) -> list[str]:
    """Split a text into keys with `sizes` words each; the last key gets the rest.

    Return a single key if no words are left for the last.

    >>> _split("net.blocks.0.w", [1, 2]), _split("net", [1, 1])
    (['net', 'blocks.0.w'], ['net'])
    """
    words = text.split(".")
    if len(words) <= sum(sizes[:-1]):
        return [text]
    ends = [*accumulate(sizes[:-1]), len(words)]
    return [".".join(words[begin:end]) for begin, end in pairwise([0, *ends])]


def _like(key: str, before: str | int) -> str | int:
    """Return a key, as a list index if it replaces a list index."""
    return int(key) if isinstance(before, int) and _NUMBER.fullmatch(key) else key


def nested(paths: Mapping[str, KeyPath], faults: Faults) -> dict[str, KeyPath]:
    """Check that paths can be in nested dicts and lists, and return them with lists numbered without gaps."""
    tree: dict[KeyPath, tuple[type | None, str]] = {}  # at a path: the type of keys, None for a value
    for name, path in paths.items():
        for depth in range(len(path) + 1):
            kind = type(path[depth]) if depth < len(path) else None
            known_kind, other_name = tree.setdefault(path[:depth], (kind, name))
            if other_name != name and (kind is None or kind is not known_kind):
                faults.add(
                    f"names {name!r} and {other_name!r}", "cannot both be in nested dicts and lists",
                    code="conflicting-names" if kind is not known_kind else "duplicate-name",
                    hint="choose other names",
                )  # fmt: skip
                break
    return _without_gaps(paths)


def _without_gaps(paths: Mapping[str, KeyPath]) -> dict[str, KeyPath]:
    """Renumber list indexes from 0, since PyTorch cannot rebuild a list with gaps.

    >>> _without_gaps({"l.1.w": ("l", 1, "w"), "l.3.w": ("l", 3, "w"), "a": ("a",)})
    {'l.1.w': ('l', 0, 'w'), 'l.3.w': ('l', 1, 'w'), 'a': ('a',)}
    """
    indexes: dict[KeyPath, set[int]] = {}
    for path in paths.values():
        for depth, key in enumerate(path):
            if isinstance(key, int):
                indexes.setdefault(path[:depth], set()).add(key)
    numbers = {above: {key: number for number, key in enumerate(sorted(keys))} for above, keys in indexes.items()}
    return {
        name: tuple(numbers[path[:n]][key] if isinstance(key, int) else key for n, key in enumerate(path))
        for name, path in paths.items()
    }

"""Groups of a checkpoint's tensors: how many there are, how large, and of which dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import UsageError, bytes_text, names
from reshard.source.checkpoint import Checkpoint
from reshard.strategy.names import group_members
from reshard.view.text import printable, table_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.source.checkpoint import Tensor

_KEYS: dict[str, Callable[[str, Tensor], str]] = {
    "prefix": lambda name, _: name.partition(".")[0],
    "dtype": lambda _, tensor: tensor.spec.dtype.name,
}


@dataclass(frozen=True, slots=True, eq=False)
class Groups(Mapping[str, Checkpoint]):
    """The tensors of a checkpoint in groups: a mapping of each group's name to a checkpoint of its tensors.

    Attributes:
        checkpoint: of which the tensors are.
        by: what they are grouped by.
        members: for each group, the names of its tensors.
    """

    checkpoint: Checkpoint
    by: str
    members: Mapping[str, tuple[str, ...]]

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors each group has."""
        return {group: len(members) for group, members in self.members.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each group's whole tensors, replicas counted once, in bytes."""
        tensors = self.checkpoint.tensors
        return {group: sum(tensors[name].spec.nbytes for name in some) for group, some in self.members.items()}

    @property
    def dtypes(self) -> dict[str, tuple[str, ...]]:
        """The dtypes in each group, by name."""
        tensors = self.checkpoint.tensors
        return {
            group: tuple(dict.fromkeys(tensors[name].spec.dtype.name for name in some))
            for group, some in self.members.items()
        }

    def __getitem__(self, group: str) -> Checkpoint:
        return self.checkpoint.sel(*self.members[group])

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, group: object) -> bool:
        return group in self.members

    def __repr__(self) -> str:
        return f"<Groups of {printable(self.checkpoint.root)} by {self.by}: {len(self)}>"

    def __str__(self) -> str:
        counts, sizes, dtypes = self.counts, self.sizes, self.dtypes
        rows = [
            (printable(group), f"{counts[group]:,}", bytes_text(sizes[group]), ", ".join(dtypes[group]))
            for group in self
        ]
        return "\n".join(table_lines((self.by, "count", "bytes", "dtype"), rows))

    def _repr_html_(self) -> str:
        from reshard.view.html import groups_html

        return groups_html(self)


def groups(checkpoint: Checkpoint, by: str = "name") -> Groups:
    """Group the tensors of a checkpoint.

    Args:
        checkpoint: of which the tensors are.
        by: `name`, where names that differ in numbers only are one group (`layers.{0-31}.wq.weight`), `prefix`, what
            stands before the first dot, or `dtype`.

    Raises:
        UsageError: tensors cannot be grouped by that.
    """
    found: dict[str, list[str]] = {}
    if by == "name":
        for group, _, members in group_members((name, None) for name in checkpoint):
            found.setdefault(group, []).extend(members)
    elif by in _KEYS:
        for name, tensor in checkpoint.tensors.items():
            found.setdefault(_KEYS[by](name, tensor), []).append(name)
    else:
        raise UsageError(f"tensors cannot be grouped by {by!r}; expected {names(['name', *_KEYS])}")
    return Groups(checkpoint, by, {group: tuple(members) for group, members in found.items()})

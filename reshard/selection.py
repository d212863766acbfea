"""Which tensors a target gets, of those that the source has and those that the two strategies name.

| in the files | source strategy | target strategy | a target rank gets |
|---|---|---|---|
| yes | any | names it | its block, if its stage holds the tensor |
| yes | names it | does not | nothing: dropped; a weight must be covered by a pattern |
| yes | does not | does not | a copy |
| no | any | names it | nothing: missing; a weight must be covered by a pattern |

Optimizer states that are dropped or missing are reported and no error. Without a source strategy the source is one
rank of whole tensors; without a target strategy the target is.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from reshard.errors import Faults, SourceError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from reshard.checkpoint import Checkpoint
    from reshard.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors go to a target.

    Attributes:
        kept: names of the tensors that are converted or copied, in the order of the target's files.
        dropped: names that the source has and the target does not.
        missing: names that the target has and the source does not.
    """

    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    missing: tuple[str, ...]


def select(
    source: Checkpoint, target: Strategy | None, *, drop: Collection[str] = (), allow_missing: Collection[str] = ()
) -> Selection:
    """Apply the table above.

    Args:
        source: the checkpoint to convert.
        target: names the tensors wanted; None for all of them, whole.
        drop: globs of weights that may be dropped.
        allow_missing: globs of weights that may be missing.

    Raises:
        SourceError: weights would be dropped or are missing, and no pattern covers them; all at once.
    """
    strategy = source.strategy
    wanted = target.tensors if target else {}
    known = {**source.tensors, **(strategy.tensors if strategy else {}), **wanted}
    faults = Faults(source.root)
    dropped = [
        name for name, tensor in source.tensors.items() if target is not None and tensor.listed and name not in wanted
    ]
    for name in dropped:
        if not is_optimizer_state(name, known) and not matches(name, drop):
            faults.add(f"tensor {name!r}", f"is not in the target strategy; to leave it out give --drop '{name}'")
    for name, reason in source.unreadable.items():
        dropped.append(name)
        if not matches(name, drop):
            faults.add(f"tensor {name!r}", f"{reason}; to leave it out give --drop '{name}'")
    # The file of one stage of a pipeline says nothing of the tensors of the others.
    one_stage = strategy is not None and strategy.stages.start > 0
    missing = [] if one_stage else [name for name in wanted if name not in source.tensors]
    for name in missing:
        if not is_optimizer_state(name, known) and not matches(name, allow_missing):
            faults.add(
                f"tensor {name!r}",
                f"is in the target strategy and not in the source; to go on without it give --allow-missing '{name}'",
            )
    faults.raise_if_any(SourceError)
    return Selection(tuple(_in_message_order(source, wanted, set(dropped))), tuple(dropped), tuple(missing))


def _in_message_order(source: Checkpoint, wanted: Collection[str], dropped: set[str]) -> list[str]:
    """Return the tensors in the order in which MindSpore writes them.

    It takes the needed source ranks downwards, and puts those without a layout last.
    """
    found: dict[str, None] = {}
    seen: set[int] = set()
    for file in reversed(source.files):
        if id(file.index) not in seen:  # ranks with equal headers share one index
            seen.add(id(file.index))
            found.update(dict.fromkeys(file.index.entries))
    kept = [name for name in found if name in source.tensors and name not in dropped]
    laid_out = {name for name in kept if source.tensors[name].listed or name in wanted}
    return [name for name in kept if name in laid_out] + [name for name in kept if name not in laid_out]


def is_optimizer_state(name: str, known: Iterable[str]) -> bool:
    """Tell an optimizer state by its name: it ends with a dot and another tensor's name; `accu_grads.*` are, too.

    >>> is_optimizer_state("adam_m.layers.0.w", {"layers.0.w"}), is_optimizer_state("layers.0.w", {"layers.0.w"})
    (True, False)
    """
    if name.startswith("accu_grads."):
        return True
    known = known if isinstance(known, (set, frozenset, dict)) else set(known)
    dot = name.find(".")
    while dot >= 0:
        if name[dot + 1 :] in known:
            return True
        dot = name.find(".", dot + 1)
    return False


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether any glob matches a name.

    >>> matches("layers.3.w", ["layers.*"])
    True
    """
    return any(fnmatchcase(name, pattern) for pattern in patterns)

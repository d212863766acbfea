"""The files of a DeepSpeed checkpoint: find them, check that they are complete, and read their pickles.

`mp_rank_MM_model_states.pt` has the weights of a tensor-parallel part, and all that is not of the optimizer. With ZeRO
stage 3 each data-parallel rank has such a file, without weights: `zero_pp_rank_D_mp_rank_MM_model_states.pt`. Each
rank's part of the optimizer is in `zero_pp_rank_D_mp_rank_MM_optim_states.pt`, whose name begins with `bf16_` if the
training is in bfloat16.

A checkpoint that is written again with fewer ranks keeps the files of the others. So the number of files is compared
with the number of partitions in each file.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.core.storage.base import COPY_AGAIN
from reshard.core.storage.places import workers_at
from reshard.core.storage.threads import map_ordered
from reshard.errors import Faults, SourceError, names
from reshard.formats.deepspeed.names import EXPERT_STATES, MODEL_STATES, OPTIM_STATES
from reshard.kits.torch.file import TorchFile
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reshard.core.storage.places import Place

T = TypeVar("T")

_PIPELINE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_MOST_PARTS = 1 << 12
_MOST_NAMED = 64
EXPECTED = "a file of a DeepSpeed checkpoint"
"""The content of a file, for messages."""


class PartFiles(NamedTuple):
    """The names of the files of one tensor-parallel part.

    Attributes:
        model: the files of model states; of ZeRO stage 3, in the order of ranks.
        optim: the files of optimizer states, in the order of ranks.
        experts: the files of single experts.
    """

    model: tuple[str, ...]
    optim: tuple[str, ...]
    experts: tuple[str, ...]


def checkpoint_files(directory: Place, listing: Iterable[str], *, universal: bool = False) -> list[PartFiles]:
    """Return the files of each tensor-parallel part of a checkpoint.

    Args:
        directory: its directory.
        listing: the names in it.
        universal: expect a Universal Checkpoint: it has no files of optimizer states, and may have model states of
            both kinds.

    Raises:
        SourceError: a file is missing, or the checkpoint is pipeline-parallel.
    """
    listing = sorted(listing)
    if pipeline := next(filter(_PIPELINE.fullmatch, listing), None):
        raise SourceError(
            f"{directory} is of a pipeline-parallel training ({pipeline}), which is not supported",
            code="unsupported-layout",
        )
    whole = _by_part(directory, listing, MODEL_STATES, ranked=False)
    by_rank = _by_part(directory, listing, MODEL_STATES, ranked=True)
    optim = {} if universal else _by_part(directory, listing, OPTIM_STATES, ranked=True)
    if whole and by_rank and not universal:
        shown = [min(of_part.values()) for of_part in (*whole.values(), *by_rank.values())]
        raise SourceError(
            f"{directory} has model states of ZeRO stage 3 and of another stage", code="several-checkpoints",
            facts=[names(shown, most=3)], hint="move the files of one of them to another directory",
        )  # fmt: skip
    partitioned = not whole
    models = by_rank if partitioned else whole
    experts: dict[int, list[str]] = {}
    for match in filter(None, map(EXPERT_STATES.fullmatch, listing)):
        experts.setdefault(int(match["part"]), []).append(match[0])
    faults = Faults(str(directory))
    parts: list[PartFiles] = []
    for part in range(1 + max((*models, *optim, *experts), default=0)):
        of_model, of_optim = models.get(part, {}), optim.get(part, {})
        expected = range(1 + max((*of_optim, *(of_model if partitioned else ())), default=0))
        if not of_model:
            faults.add(f"mp_rank_{part:02d}", "has no file of model states", code="missing-file", hint=COPY_AGAIN)
        elif partitioned:
            _add_missing(faults, part, "model", expected, of_model)
        if of_optim or (partitioned and not universal):
            _add_missing(faults, part, "optimizer", expected, of_optim)
        if len(parts) == _MOST_PARTS:
            break
        parts.append(PartFiles(_ordered(of_model), _ordered(of_optim), tuple(experts.get(part, ()))))
    faults.raise_if_any(SourceError)
    return parts


def _by_part(
    directory: Place, listing: Iterable[str], pattern: re.Pattern[str], *, ranked: bool
) -> dict[int, dict[int, str]]:
    """Return the names of files by tensor-parallel part and rank; of files without a rank, the rank is 0."""
    result: dict[int, dict[int, str]] = {}
    for match in filter(None, map(pattern.fullmatch, listing)):
        if (match["rank"] is not None) == ranked:
            of_part = result.setdefault(int(match["part"]), {})
            other = of_part.setdefault(int(match["rank"] or 0), match[0])
            if other != match[0]:
                raise SourceError(
                    f"{directory} has {other} and {match[0]}, of two trainings", code="several-checkpoints",
                    hint="move the files of one of them to another directory",
                )  # fmt: skip
    return result


def _add_missing(faults: Faults, part: int, kind: str, expected: range, of_rank: Mapping[int, str]) -> None:
    """Add a fault if ranks have no file."""
    if missing := list(islice((rank for rank in expected if rank not in of_rank), _MOST_NAMED + 1)):
        more = " and more" if len(missing) > _MOST_NAMED else ""
        fault = f"has no file of {kind} states of {ranks_text(missing[:_MOST_NAMED])}{more}"
        faults.add(f"mp_rank_{part:02d}", fault, code="missing-ranks", hint=COPY_AGAIN)


def _ordered(of_rank: dict[int, str]) -> tuple[str, ...]:
    return tuple(name for _, name in sorted(of_rank.items()))


def read_files(
    directory: Place, file_names: Iterable[str], interpret: Callable[[TorchFile], T], *, with_value: bool = True
) -> dict[str, T]:
    """Read the pickles of files, several at once, and interpret them.

    Args:
        directory: the directory of the files.
        file_names: their names.
        interpret: returns the result for a file; it may raise an error.
        with_value: as in `TorchFile.read`.

    Raises:
        SourceError: a file is not complete, or not valid.
    """
    by_location = {directory / name: name for name in file_names}

    def read(location: Place) -> T:
        return interpret(TorchFile.read(location, EXPECTED, with_value=with_value))

    return dict(zip(by_location.values(), map_ordered(read, list(by_location), workers_at(by_location)), strict=True))

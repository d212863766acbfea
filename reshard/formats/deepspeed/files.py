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
from reshard.errors import Faults, SourceError
from reshard.formats.deepspeed.names import EXPERT_STATES, MODEL_STATES, OPTIM_STATES
from reshard.kits.torch.file import TorchFile
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reshard.core.storage.places import Place

T = TypeVar("T")

_PIPELINE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_MOST_NAMED = 64
_WHOLE = -1  # the rank of model states that are of all ranks
EXPECTED = "a file of a DeepSpeed checkpoint"
"""The content of a file, for messages."""


class PartFiles(NamedTuple):
    """The names of the files of one tensor-parallel part.

    Attributes:
        model: the files of model states; of ZeRO stage 3, in the order of ranks.
        optim: the files of optimizer states, in the order of ranks.
        experts: the files of single experts.
    """

    model: Sequence[str]
    optim: Sequence[str]
    experts: Sequence[str]


def checkpoint_files(directory: Place, listing: Iterable[str], *, universal: bool = False) -> list[PartFiles]:
    """Return the files of each tensor-parallel part of a checkpoint, given the names in its directory.

    A Universal Checkpoint has no files of optimizer states, and may have model states of both kinds.

    Raises:
        SourceError: a file is missing, or the checkpoint is pipeline-parallel.
    """
    listing = sorted(listing)
    if pipeline := next(filter(_PIPELINE.fullmatch, listing), None):
        raise SourceError(
            f"{directory} is of a pipeline-parallel training ({pipeline}), which is not supported",
            code="unsupported-layout",
        )
    models, optim = (_by_part(directory, pattern, listing) for pattern in (MODEL_STATES, OPTIM_STATES))
    experts: dict[int, list[str]] = {}
    for match in filter(None, map(EXPERT_STATES.fullmatch, listing)):
        experts.setdefault(int(match["part"]), []).append(match[0])
    faults = Faults(str(directory))
    parts = []
    for number, part in enumerate(sorted({*models, *optim, *experts})):
        if number not in models:
            faults.add(f"mp_rank_{number:02d}", "has no file of model states", code="missing-file", hint=COPY_AGAIN)
            break
        of_model, of_optim = models[part], {} if universal else optim.get(part, {})
        if whole := of_model.pop(_WHOLE, None):
            if of_model and not universal:
                _refuse_two(directory, whole, min(of_model.values()))
            of_model = {0: whole}
        else:
            _add_missing(faults, part, "model", of_model, of_optim)
        if of_optim or not (whole or universal):
            _add_missing(faults, part, "optimizer", of_optim, {} if whole else of_model)
        model, optimizer = ([of_rank[rank] for rank in sorted(of_rank)] for of_rank in (of_model, of_optim))
        parts.append(PartFiles(model, optimizer, experts.get(part, [])))
    faults.raise_if_any(SourceError)
    return parts


def _by_part(directory: Place, pattern: re.Pattern[str], listing: Iterable[str]) -> dict[int, dict[int, str]]:
    """Return the names of files by tensor-parallel part and rank."""
    result: dict[int, dict[int, str]] = {}
    for match in filter(None, map(pattern.fullmatch, listing)):
        rank = _WHOLE if match["rank"] is None else int(match["rank"])
        other = result.setdefault(int(match["part"]), {}).setdefault(rank, match[0])
        if other != match[0]:
            _refuse_two(directory, other, match[0])
    return result


def _refuse_two(directory: Place, file: str, other: str) -> None:
    raise SourceError(
        f"{directory} has {file} and {other}, of two trainings", code="several-checkpoints",
        hint="move the files of one of them to another directory",
    )  # fmt: skip


def _add_missing(
    faults: Faults, part: int, kind: str, of_rank: Mapping[int, str], of_others: Mapping[int, str]
) -> None:
    """Add a fault if ranks have no file."""
    expected = range(1 + max((*of_rank, *of_others), default=0))
    if missing := list(islice((rank for rank in expected if rank not in of_rank), _MOST_NAMED)):
        fault = f"has no file of {kind} states of {ranks_text(missing)}"
        faults.add(f"mp_rank_{part:02d}", fault, code="missing-ranks", hint=COPY_AGAIN)


def read_files(
    directory: Place,
    file_names: Iterable[str],
    numbers: Mapping[str, int],
    interpret: Callable[[TorchFile, int], T],
    *,
    with_value: bool = True,
) -> list[T]:
    """Read files, several at once, and return what `interpret` makes of each and of its number in the checkpoint.

    Raises:
        SourceError: a file is not complete, or not valid; what `interpret` raises does not name the file.
    """
    by_location = {directory / name: numbers[name] for name in file_names}

    def read(location: Place) -> T:
        file = TorchFile.read(location, EXPECTED, with_value=with_value)
        try:
            return interpret(file, by_location[location])
        except SourceError as error:
            raise error.about(file.path) from None

    return list(map_ordered(read, list(by_location), workers_at(by_location)))

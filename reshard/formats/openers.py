"""Find the opener of a checkpoint that describes its own blocks: a store, a distributed checkpoint, or their runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial as applied
from importlib import import_module
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.errors import Option, SourceError, Text, UsageError, joined
from reshard.formats.directories import (
    BLOCKS,
    CHECKPOINT2,
    CONSOLIDATED,
    DCP,
    DEEPSPEED,
    MEGATRON_RANKS,
    MODEL_STATES,
    SAVED_SET,
    SAVES,
    parts_below,
    refuse_one_of_several,
    release_below,
    saved_parts,
)
from reshard.formats.orbax.steps import shown_orbax
from reshard.formats.ranks.directories import RANK_PATTERN
from reshard.formats.runs import checkpoint_of, iteration_of, newer, run_at
from reshard.formats.sets.names import set_indexes
from reshard.formats.torch_save.single import is_single_save, lone_save
from reshard.formats.zarr.files import is_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.formats.directories import DirectoryFormat, RunFormat


class Opener(NamedTuple):
    """Opens a directory.

    Attributes:
        root: the directory, for messages.
        opens: returns its checkpoint.
        format: the name of the format.
        is_deep: its files are in subdirectories, too.
        takes_rules: the format does not say how tensor-parallel parts are cut, so that the user may.
        file: the only file, if it has whole tensors.
    """

    root: Place
    opens: Callable[..., Checkpoint]
    format: str
    is_deep: bool = False
    takes_rules: bool = False
    file: Place | None = None

    def __call__(self, *, contents: bool | Literal["blocks"], rules: Mapping[str, str] | None = None) -> Checkpoint:
        """Return the checkpoint; `contents` is as for `open`, `rules` as `rules_over_parts` returns them."""
        if rules is None:
            return self.opens(contents=contents)
        if not self.takes_rules:
            raise options_refused(self.root)
        return self.opens(contents=contents, rules=rules)


def options_refused(path: object) -> UsageError:
    """Return the error for options that say how a checkpoint is cut, if it says that itself."""
    return UsageError(
        f"{path} describes its own blocks",
        code="self-described",
        hint="leave the strategy, layout, stage, suffix, pattern, key and partial out",
    )


def refuse_options_of_ranks(
    path: Place,
    listing: Sequence[str],
    *,
    rank_pattern: str = RANK_PATTERN,
    suffix: str | None = None,
    layouts: Mapping[str, str] | None = None,
    stage: object = None,
    partial: bool = False,
) -> None:
    """Refuse options for files of ranks, as for `reshard.open`, if a source is one file or a set: they have no effect.

    Args:
        path: the source, which does not describe its own blocks.
        listing: the names of its entries; empty if it is a file.
        rank_pattern: the paths of the files of a rank.
        suffix: the end of the names of the files; it has an effect if there are several sets.
        layouts: how tensors are cut; that all are whole is no contradiction to a set.
        stage: the stage of the pipeline.
        partial: whether ranks may be missing.

    Raises:
        UsageError: such an option was given.
    """
    indexes = set_indexes(listing)
    given = {
        "rank_pattern": rank_pattern != RANK_PATTERN,
        "suffix": suffix is not None and len(indexes) < 2,
        "layout": bool(indexes and layouts and {*layouts.values()} != {"whole"}),
        "stage": bool(indexes) and isinstance(stage, int),
        "partial": bool(indexes) and partial,
    }
    options = [Text(Option(name)) for name, is_given in given.items() if is_given]
    if options and (indexes or not listing) and path.is_there():
        what = "a set of whole tensors" if indexes else "one file"
        raise UsageError(
            Text(f"{path} is {what}, and has no use for ", joined(" and ", options)),
            code="no-effect",
            hint="leave it out" if len(options) == 1 else "leave them out",
        )


def self_described(root: Place, iteration: int | None = None, listing: Sequence[str] | None = None) -> Opener | None:
    """Return the opener of a checkpoint that describes its own blocks, else None.

    Args:
        root: a zarr store, a distributed checkpoint, the directory of a run of those, or files of `torch.save`.
        iteration: which checkpoint of a run; by default the one that the run names as the last.
        listing: the names of its entries, if known.
    """
    listing = root.names() if listing is None else listing
    if is_store(listing) and iteration is None:
        from reshard.formats.zarr.reader import open_store  # not on every start

        return Opener(root, applied(open_store, root), ZARR_LABEL, is_deep=True)
    run = run_at(root, listing)
    if run is not None:
        opens = applied(_open_iteration, root, listing, run, iteration)
        return Opener(root, opens, "run", is_deep=True, takes_rules=True)
    if not listing and is_single_save(root):
        refuse_one_of_several(root)
        if CONSOLIDATED.files.fullmatch(root.name):
            from reshard.formats.torch_save.consolidated import open_only as opens_file  # not on every start
        else:
            from reshard.formats.torch_save.saves import open_save as opens_file
        opens = applied(opens_file, root)
        return Opener(root, opens, TORCH_SAVE_LABEL, file=root)
    opener = described(root, listing) or _of_lone_save(root, listing)
    if opener is not None and iteration not in {None, iteration_of(root, numbered=True)}:
        raise SourceError(
            f"{root} is one checkpoint, not a run with iteration {iteration}",
            code="no-such-iteration",
            hint="open the directory of the run",
        )
    return opener


def _of_lone_save(directory: Place, listing: Sequence[str]) -> Opener | None:
    """Return the opener of a directory with one file of `torch.save`, else None."""
    name = lone_save(directory, listing)
    if name is None:
        return None
    refuse_one_of_several(directory / name)
    from reshard.formats.torch_save.saves import open_only  # not on every start

    return Opener(directory, applied(open_only, directory, name), TORCH_SAVE_LABEL, file=directory / name)


def _shown(kind: DirectoryFormat, directory: Place, listing: Sequence[str]) -> Sequence[str]:
    """Return `listing` if the directory is of a format, else ()."""
    return listing if kind.shown_by(directory, listing) else ()


def _shown_blocks(directory: Place, listing: Sequence[str]) -> Sequence[str]:
    """Return `listing` if it has blocks that PyTorch saved for Hugging Face and no index of whole tensors, else ()."""
    return () if set_indexes(listing) else _shown(BLOCKS, directory, listing)


def _shown_universal(_directory: Place, listing: Sequence[str]) -> Sequence[str]:
    """Return `listing` if it is of a Universal Checkpoint of DeepSpeed, else ()."""
    return listing if "zero" in listing and any(map(MODEL_STATES.fullmatch, listing)) else ()


CHECKPOINT2_LABEL, DCP_LABEL, ORBAX_LABEL = "Checkpoint 2.0", "DCP", "Orbax"
TORCH_SAVE_LABEL, UNIVERSAL_LABEL, ZARR_LABEL = "torch.save", "DeepSpeed Universal", "zarr"
"""The formats in tables, for users."""


class _Distributed(NamedTuple):
    """A distributed format.

    Attributes:
        finds: returns the names of its files in a directory, if any.
        module, opener: the opener, imported when it is needed.
        format, is_deep, takes_rules: as in `Opener`.
    """

    finds: Callable[[Place, Sequence[str]], Collection[str]]
    module: str
    opener: str
    format: str
    is_deep: bool = False
    takes_rules: bool = False


_FORMATS = (
    _Distributed(
        applied(_shown, CHECKPOINT2), "reshard.formats.checkpoint2.reader", "open_checkpoint2", CHECKPOINT2_LABEL
    ),
    _Distributed(applied(_shown, DCP), "reshard.formats.dcp.reader", "open_dcp", DCP_LABEL),
    _Distributed(applied(_shown, SAVES), "reshard.formats.torch_save.saves", "open_saves", TORCH_SAVE_LABEL),
    _Distributed(
        _shown_universal, "reshard.formats.deepspeed.universal", "open_universal", UNIVERSAL_LABEL, is_deep=True
    ),
    _Distributed(
        applied(_shown, DEEPSPEED),
        "reshard.formats.deepspeed.zero_checkpoint",
        "open_zero",
        "DeepSpeed",
        takes_rules=True,
    ),
    _Distributed(_shown_blocks, "reshard.formats.dcp.hf_blocks", "open_blocks", "DCP in safetensors"),
    _Distributed(shown_orbax, "reshard.formats.orbax.reader", "open_orbax", ORBAX_LABEL, is_deep=True),
    _Distributed(parts_below, "reshard.formats.dcp.reader", "open_dcp", DCP_LABEL, is_deep=True),
    _Distributed(applied(saved_parts, SAVED_SET), "reshard.formats.torch_save.bin_sets", "open_set", TORCH_SAVE_LABEL),
    _Distributed(
        applied(saved_parts, CONSOLIDATED),
        "reshard.formats.torch_save.consolidated",
        "open_consolidated",
        TORCH_SAVE_LABEL,
        takes_rules=True,
    ),
    _Distributed(
        applied(saved_parts, MEGATRON_RANKS),
        "reshard.formats.megatron.reader",
        "open_megatron",
        "Megatron",
        is_deep=True,
        takes_rules=True,
    ),
    _Distributed(
        release_below,
        "reshard.formats.megatron.reader",
        "open_release",
        "Megatron",
        is_deep=True,
        takes_rules=True,
    ),
)
"""The distributed formats; the first that finds files opens them."""


def described(directory: Place, listing: Sequence[str]) -> Opener | None:
    """Return the opener of a distributed checkpoint with these files, else None."""
    for each in _FORMATS:
        if files := each.finds(directory, listing):
            opener = getattr(import_module(each.module), each.opener)
            return Opener(directory, applied(opener, directory, files), each.format, each.is_deep, each.takes_rules)
    return None


def _open_iteration(
    root: Place,
    listing: Sequence[str],
    run: RunFormat,
    iteration: int | None,
    *,
    contents: bool | Literal["blocks"],
    rules: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open a checkpoint of a run, by its iteration."""
    directory = checkpoint_of(root, listing, run, iteration)
    checkpoint = _open_distributed(directory, contents=contents, rules=rules)
    warnings = newer(root, listing, run, directory) if iteration is None else []
    return replace(checkpoint, warnings=(*warnings, *checkpoint.warnings))


def _open_distributed(
    directory: Place, *, contents: bool | Literal["blocks"], rules: Mapping[str, str] | None = None
) -> Checkpoint:
    opener = described(directory, directory.names())
    if opener is None:
        raise SourceError(
            f"{directory} has no file of a distributed checkpoint", code="not-a-checkpoint",
            facts=["the checkpoints of a run are DCPs, Checkpoint 2.0 or DeepSpeed's"], hint="open it by its own path",
        )  # fmt: skip
    return opener(contents=contents, rules=rules)

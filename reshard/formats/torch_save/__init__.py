"""State dicts that `torch.save` wrote."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from reshard.core.format import Format, Found, options_refused
from reshard.core.listing import RANK_DIRECTORY, Listing
from reshard.core.rank_files import EXTENSIONS
from reshard.errors import SourceError
from reshard.formats.ranks.one_of_several import refuse_one_of_several
from reshard.formats.torch_save.names import CONSOLIDATED, PARTS, SAVED_SET, SAVES
from reshard.kits.files import is_known, is_save
from reshard.kits.parts.cuts import rules_over_parts
from reshard.kits.torch.names import SAVE_EXTENSIONS, TRAINER_FILES, is_beside_readable, with_trainer_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.core.layout.block import Shape
    from reshard.core.listing import Contents, OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Candidate, Directory, Findings
    from reshard.core.storage.places import Place

_SAVES, _SET, _CONSOLIDATED, _FILE = "saves", "set", "consolidated", "file"
_WHOLE = {"*": "whole"}


class TorchSave(Format):
    """State dicts: one file of each rank, sets, Meta's parts, and single files."""

    name = "torch-save"
    title = "torch.save"
    extends = ("ranks",)
    parts = (SAVES, SAVED_SET, PARTS)
    takes = frozenset({"strategy", "layouts"})

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        if not here.names:
            return Found(self, here, (here.place.name,), _FILE) if _is_save(here) else None
        if SAVES.shown_by(here):
            return Found(self, here, here.names, _SAVES)
        if not is_beside_readable(here.names):
            for names, variant in ((SAVED_SET, _SET), (CONSOLIDATED, _CONSOLIDATED)):
                if names.shown_by(here):
                    return Found(self, here, here.names, variant)
        name = _lone_save(here)
        return Found(self, here, (name,), _FILE) if name else None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:
        """See `Format`. Rules are for Meta's parts; or they say that a file has whole tensors."""
        from reshard.formats.torch_save import consolidated, saves

        rules = rules_over_parts(options)
        if found.variant == _CONSOLIDATED:
            return consolidated.open_consolidated(found.place, found.files, contents=contents, rules=rules)
        if found.variant == _FILE:
            return _of_file(found, rules, contents=contents)
        if rules is not None:
            raise options_refused(found.place)
        opens = saves.open_saves if found.variant == _SAVES else saves.open_set
        return opens(found.place, found.files, contents=contents)

    def listed(self, tree: Directory) -> Iterator[tuple[Candidate, Iterable[str]]]:
        """See `Format`. Single files are listed by their own paths."""
        found = self.find(Listing(tree.place, tree.names))
        if found is not None and found.variant != _FILE:
            yield from super().listed(tree)

    def complete(self, found: Found, tree: Directory) -> Findings:
        """See `Format`."""
        return with_trainer_files(tree, partial(super().complete, found, tree))


def _is_save(here: Listing) -> bool:
    """Return whether a file is of `torch.save`: by its first bytes, or damaged, by its name."""
    if not here.is_file:
        return False
    path = here.place
    return is_save(str(path)) or (path.suffix in SAVE_EXTENSIONS and not is_known(str(path)))


def _lone_save(here: Listing) -> str | None:
    """Return the name of the file of `torch.save` in a directory without another checkpoint, or None."""
    names = [name for name in here.names if PurePath(name).suffix in SAVE_EXTENSIONS | EXTENSIONS]
    weights = [name for name in names if not TRAINER_FILES.fullmatch(name)]
    if len(weights) != 1 or any(map(RANK_DIRECTORY.fullmatch, here.names)):
        return None
    with suppress(SourceError, OSError):  # a directory of this name
        return weights[0] if is_save(str(here.place / weights[0])) else None
    return None


def _of_file(found: Found, rules: object, *, contents: Contents) -> Checkpoint:
    """Open a file of whole tensors; refuse one that is one rank's part of a model."""
    from reshard.formats.ranks.one_of_ranks import one_of_ranks, refuse_one_of_ranks
    from reshard.formats.torch_save.consolidated import open_only
    from reshard.formats.torch_save.saves import open_save

    is_named = not found.here.names
    file = found.place if is_named else found.place / found.files[0]
    refuse_one_of_several(file)
    if rules is None:
        refuse_one_of_ranks(file)
    elif rules != _WHOLE:
        raise options_refused(found.place)
    if is_named and CONSOLIDATED.files.fullmatch(file.name):
        checkpoint = open_only(file, contents=contents)
    else:
        checkpoint = open_save(file, root=found.place, contents=contents)
    if rules is not None:
        return replace(checkpoint, opening=replace(checkpoint.opening, rules=_WHOLE))
    if reason := one_of_ranks(file, _shapes):
        warnings = (*checkpoint.warnings, reason)
        return replace(checkpoint, warnings=warnings, opening=replace(checkpoint.opening, numbered=reason))
    return checkpoint


def _shapes(path: Place) -> dict[str, Shape]:
    """Return the shapes of the tensors in a file."""
    from reshard.formats.torch_save.saves import open_save

    return {name: tensor.spec.shape for name, tensor in open_save(path, contents=False).tensors.items()}


FORMATS = (TorchSave(),)

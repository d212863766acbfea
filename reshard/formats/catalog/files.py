"""Single files of a directory, each a checkpoint by itself."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from reshard.core.model.findings import Candidate, Findings, by_opening, of_error
from reshard.errors import SourceError
from reshard.formats.open import open as open_checkpoint
from reshard.formats.parts import refuse_directory
from reshard.formats.ranks.completeness import strategies_at
from reshard.formats.ranks.directories import is_checkpoint_name
from reshard.formats.ranks.names import EXTENSIONS
from reshard.kits.files import is_save
from reshard.kits.torch.names import SAVE_EXTENSIONS, TRAINER_FILES, faulty_trainer_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.core.model.findings import Directory
    from reshard.core.storage.places import Place

_SAVE = "torch.save"


def single_files(directory: Directory) -> Iterator[Candidate]:
    """Yield the checkpoints in the files of one directory, each by itself; or that they are useful together only."""
    root = directory.place
    files = sorted(name for name in directory.files if is_checkpoint_name(root / name))
    if any(name.endswith(".ckpt") for name in files):  # strategies of MindSpore are, too
        strategies = strategies_at(str(root))
        files = [name for name in files if str(root / name) not in strategies]
    if not files:
        saved = [name for name in directory.files if (root / name).suffix in SAVE_EXTENSIONS]
        files = sorted(name for name in saved if not TRAINER_FILES.fullmatch(name))
    try:
        refuse_directory(root, files, "alone", *(["others"] if len(files) == 1 else []))
    except SourceError as error:
        yield Candidate(root, "set", "", [*directory.files.values()], partial(of_error, error, root))
        return
    trainer_files = cache(partial(faulty_trainer_file, directory))
    for name in files:
        suffix = (root / name).suffix
        kind = _SAVE if suffix not in EXTENSIONS or _is_save(root / name) else suffix.removeprefix(".")
        path = root if len(files) == 1 and kind != _SAVE else root / name
        states = [*directory.files.values()] if path == root else [directory.files[name]]
        opens = partial(open_checkpoint, root / name, contents=False)
        yield Candidate(path, kind, "", states, partial(_with, trainer_files, partial(by_opening, opens, root)))


def _is_save(path: Place) -> bool:
    """Return whether `torch.save` wrote a file; opening says why another one cannot be read."""
    try:
        return is_save(str(path))
    except (SourceError, OSError):
        return False


def _with(trainer_files: Callable[[], Findings | None], examine: Callable[[], Findings]) -> Findings:
    findings = examine()
    return (trainer_files() or findings) if findings.state == "complete" else findings

"""Files of ranks, which do not describe their blocks, and single files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.format import Format, Found
from reshard.core.listing import RANK_DIRECTORY
from reshard.formats.ranks.names import EXTENSIONS
from reshard.formats.ranks.one_of_several import FOREIGN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.core.listing import Contents, Listing, OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Candidate, Directory
    from reshard.core.options import Options
    from reshard.core.target import Target

TAKEN = frozenset({"strategy", "rank_pattern", "suffix", "layouts", "stage", "partial", "cipher"})


class Ranks(Format):
    """Files of ranks in either encoding; a strategy says which rank holds which block."""

    name = "ranks"
    title = "ranks"
    parts = FOREIGN
    takes = TAKEN
    describes = False

    def find(self, here: Listing) -> Found | None:
        """See `Format`. It is the last resort: files of ranks have any names that a pattern matches."""
        return Found(self, here)

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:
        """See `Format`."""
        from reshard.formats.ranks.opening import open_ranks

        return open_ranks(found.place, options, names=found.here.names, contents=contents)

    def word_of(self, checkpoint: Checkpoint) -> str:
        """See `Format`. It is the encoding of the files, if all have the same."""
        formats = {file.index.format for file in checkpoint.files}
        word = formats.pop() if len(formats) == 1 else ""
        return word if f".{word}" in EXTENSIONS else "safetensors"

    def listed(self, tree: Directory) -> Iterator[tuple[Candidate, Iterable[str]]]:
        """See `Format`. Each step, or other name that ranks share, is a checkpoint."""
        from reshard.formats.ranks.completeness import ranked

        names = [name for name in tree.below if RANK_DIRECTORY.fullmatch(name)]
        yield from ((candidate, names) for candidate in ranked(tree))


class Encoding(Format):
    """Files of ranks, or one file, to be written in one encoding."""

    describes = False
    one_file = True

    def __init__(self, name: str, title: str) -> None:
        self.name = self.encoding = self.extension = name
        self.title = title

    @property
    def options(self) -> type[Options]:
        """See `Format`."""
        from reshard.formats.ranks.options import RankFiles

        return RankFiles

    def target(self, options: Options) -> type[Target]:  # noqa: ARG002 -- all are of one kind
        """See `Format`."""
        from reshard.formats.ranks.writer import Ranks as RanksTarget

        return RanksTarget


FORMATS = (Encoding("safetensors", "safetensors"), Encoding("ckpt", "MindSpore .ckpt"), Ranks())

"""Files of ranks, which do not describe their blocks, and single files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.format import Format, Found
from reshard.core.listing import RANK_DIRECTORY
from reshard.core.rank_files import EXTENSIONS
from reshard.formats.ranks.one_of_several import FOREIGN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.listing import Contents, Listing, OpenOptions
    from reshard.core.model.checkpoint import Checkpoint, IndexedFiles
    from reshard.core.model.findings import Candidate, Directory
    from reshard.core.options import Options
    from reshard.core.storage.places import Place
    from reshard.core.target import Target


class AnyFiles(Format):
    """Files that do not describe their blocks: of ranks, of a set, or one of whole tensors."""

    takes = frozenset({"strategy", "rank_pattern", "suffix", "layouts", "stage", "partial", "cipher"})
    describes = False

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:
        """See `Format`."""
        from reshard.formats.ranks.opening import open_ranks

        return open_ranks(found.source, options, names=found.here.names, contents=contents)

    def headers(self, found: Found, options: OpenOptions) -> IndexedFiles:
        """See `Format`."""
        from reshard.formats.ranks.opening import read_files

        return read_files(found.source, options, found.here.names)


class Ranks(AnyFiles):
    """Files of ranks in either encoding; a strategy says which rank holds which block."""

    name = "ranks"
    title = "ranks"
    parts = FOREIGN

    def find(self, here: Listing) -> Found | None:
        """See `Format`. It is the last resort: files of ranks have any names that a pattern matches."""
        return Found(self, here)

    def files_by_rank(self, found: Found, options: OpenOptions) -> Mapping[int, Sequence[Place]]:
        """See `Format`."""
        from reshard.formats.ranks.directories import rank_files

        return rank_files(found.place, options.rank_pattern, options.suffix, [])[0]

    def word_of(self, checkpoint: Checkpoint) -> str:
        """See `Format`. It is the encoding of the files, if all have the same."""
        formats = {file.index.format for file in checkpoint.files}
        word = formats.pop() if len(formats) == 1 else ""
        return word if f".{word}" in EXTENSIONS else "safetensors"

    def listed(self, tree: Directory) -> Iterator[tuple[Candidate, Iterable[str]]]:
        """See `Format`. Each step, or other name that ranks share, is a checkpoint; or else each file."""
        from reshard.formats.ranks.completeness import ranked, single_files

        names = [name for name in tree.below if RANK_DIRECTORY.fullmatch(name)]
        if of_ranks := [*ranked(tree)]:
            yield from ((candidate, names) for candidate in of_ranks)
        else:
            yield from ((candidate, ()) for candidate in single_files(tree))


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

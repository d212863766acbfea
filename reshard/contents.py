"""What headers cannot tell: tensors that are split though no strategy lists them, and listed ones that are whole.

Either would make a wrong whole-model file, which is the worst that this tool could write. So small tensors are
compared whole between the ranks when a checkpoint is opened, and of larger ones three pieces of a page each.

* MindSpore's default `only_trainable_params=True` leaves frozen weights out of the strategy though they are split: a
  tensor without a layout whose bytes differ between ranks.
* `integrated_save=True` stores whole tensors though they are listed: distinct blocks that are all equal. Constant
  tensors (zeros, ones) look so too and tell nothing, unless nothing else is known to be split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.checkpoint import ranges
from reshard.errors import Faults, SourceError, names
from reshard.join import UNLISTED
from reshard.remote import is_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.checkpoint import SourceFile, Tensor
    from reshard.remote_store import AnyStore, Range

_SMALL = 64 * 1024  # tensors up to this size are compared whole
_SAMPLE = 4096  # of larger ones, this much at the beginning, in the middle and at the end
_MOST_COMPARED = 64  # how many large listed tensors are looked at; `integrated_save` makes all of them whole


def compare_contents(
    root: str,
    files: Sequence[SourceFile],
    ranks: Sequence[int],
    tensors: Mapping[str, Tensor],
    ruled: Mapping[str, str],
    notices: list[str],
    store: AnyStore,
) -> dict[str, Tensor]:
    """Look at the contents of tensors; return them, with `varies` set on those whose copies differ.

    Args:
        root: for messages.
        files: the files of the checkpoint.
        ranks: the rank of each.
        tensors: as the headers and the strategy say.
        ruled: the rules of the tensors whose layouts the user gave.
        notices: gets what is no error.
        store: reads the files.

    Raises:
        SourceError: a tensor is split but not listed, or listed but whole, or a rule cannot be right; all at once.
    """
    look = _Look(files, ranks, Faults(root), notices, store)
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor if tensor.listed else look.copies(tensor, own_values=ruled.get(name) == "copy")
        if name in ruled and tensor.listed:
            look.replicas(tensor)
    listed = [tensor for name, tensor in tensors.items() if tensor.listed and name not in ruled]
    look.blocks(listed, some_whole="whole" in ruled.values())
    look.announce(())  # what was fetched is not needed any more
    look.faults.raise_if_any(SourceError)
    return found


def own_value(tensor: Tensor, ruled: Mapping[str, str]) -> Tensor:
    """Return a tensor without looking at it: `varies` is set where its copies may be values of their ranks' own."""
    is_own = not tensor.listed and (is_single(tensor) or ruled.get(tensor.spec.name) == "copy")
    return tensor._replace(varies=True) if is_own and tensor.text is None else tensor


def is_single(tensor: Tensor) -> bool:
    """Tell whether a tensor is one number, or text, which ranks may have values of their own of; but not the step."""
    single = tensor.text is not None or tensor.spec.nbytes <= tensor.spec.dtype.itemsize
    return single and tensor.spec.name != "global_step"


class _Look:
    """Compares contents, collecting faults and notices."""

    def __init__(
        self, files: Sequence[SourceFile], ranks: Sequence[int], faults: Faults, notices: list[str], store: AnyStore
    ) -> None:
        self.files, self.ranks, self.faults, self.notices, self.store = files, ranks, faults, notices, store
        self.remote = any(is_url(file.path) for file in files)

    def copies(self, tensor: Tensor, *, own_values: bool) -> Tensor:
        """Compare what the ranks have of a tensor that no strategy names."""
        name, holders = tensor.spec.name, tensor.shards[0].holders
        differs = tensor.varies
        if tensor.text is None and len(holders) > 1:
            self.announce((number, name) for number in holders)
            first = self.sample(holders[0], name)
            differs = any(self.sample(number, name) != first for number in holders[1:])
        if not differs:
            return tensor
        if name == "global_step":
            self.faults.add(
                "global_step", "differs between the ranks, which are of different steps; choose the files with --suffix"
            )
        elif is_single(tensor) or own_values:
            self.notices.append(
                f"{names([name])} differs between the ranks; each target rank gets that of one source rank"
            )
        else:
            self.faults.add(
                f"tensor {name!r}",
                f"differs between the ranks and no strategy lists it; {UNLISTED.format(name=name)}",
            )
        return tensor._replace(varies=True)

    def replicas(self, tensor: Tensor) -> None:
        """Look whether a layout given by hand makes replicas of what differs."""
        name = tensor.spec.name
        for shard in tensor.shards:
            self.announce((number, name) for number in shard.holders)
            samples = [(number, self.sample(number, name)) for number in shard.holders]
            different = [number for number, sample in samples if sample != samples[0][1]]
            if different:
                self.faults.add(
                    f"tensor {name!r}",
                    f"block {shard.block} differs between rank {self.ranks[samples[0][0]]} and rank "
                    f"{self.ranks[different[0]]}, which --layout says hold the same; give another rule",
                )
                return

    def blocks(self, listed: Sequence[Tensor], *, some_whole: bool) -> None:
        """Look for listed tensors whose distinct blocks are all equal."""
        split = [t for t in listed if len(t.shards) > 1 and t.spec.nbytes and all(shard.holders for shard in t.shards)]
        small = [tensor for tensor in split if tensor.spec.nbytes <= _SMALL][: _MOST_COMPARED * 4]
        large = [tensor for tensor in split if tensor.spec.nbytes > _SMALL]
        alike: list[str] = []
        constant: list[str] = []
        proven_split = False
        compared = small + large[:: len(large) // _MOST_COMPARED + 1]
        self.announce((shard.holders[0], tensor.spec.name) for tensor in compared for shard in tensor.shards[:2])
        for tensor in compared:
            name, width = tensor.spec.name, tensor.spec.dtype.itemsize
            first = self.sample(tensor.shards[0].holders[0], name)
            if any(self.sample(shard.holders[0], name) != first for shard in tensor.shards[1:]):
                proven_split = True
            else:
                (constant if first == first[:width] * (len(first) // width) else alike).append(name)
        if not proven_split and (alike or (some_whole and constant)):
            self.faults.add(
                f"tensor {names([repr(name) for name in alike + constant], most=3)}",
                "is split by the strategy, and every rank holds the same bytes: whole tensors, saved with "
                "integrated_save=True? Then give --layout '*=whole'; else the layout as a rule",
            )
        elif alike:
            self.notices.append(f"all blocks of {names(alike, most=3)} are equal, though the strategy splits it")

    def announce(self, wanted: Iterable[tuple[int, str]]) -> None:
        """Have the samples of tensors in files fetched at once, where a request takes long."""
        if not self.remote:
            return
        self.store.fetch([each for number, name in wanted for each in self.pieces(number, name)])

    def sample(self, number: int, name: str) -> bytes:
        """Return the contents of a small tensor in one file, or pieces of a large one."""
        found = []
        for path, offset, nbytes in self.pieces(number, name):
            piece = bytearray(nbytes)
            self.store.read_into(path, offset, memoryview(piece))
            found.append(piece)
        return b"".join(found)

    def pieces(self, number: int, name: str) -> list[Range]:
        """Return where a sample is."""
        entry = self.files[number].index.entries[name]
        nbytes = entry.nbytes
        wanted = [(0, nbytes)]
        if nbytes > _SMALL:
            middle = nbytes // 2 // entry.dtype.itemsize * entry.dtype.itemsize
            wanted = [(0, _SAMPLE), (middle, _SAMPLE), (nbytes - _SAMPLE, _SAMPLE)]
        return [
            (self.files[number].path, offset, stop - start)
            for begin, length in wanted
            for offset, start, stop in ranges(entry.runs, begin, length)
        ]

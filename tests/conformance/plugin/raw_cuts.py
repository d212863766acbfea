"""Raw blocks: `cuts.json` says which bytes of which file are which block of which tensor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.formats import (
    Block,
    BlockList,
    Content,
    FileLayout,
    Format,
    Found,
    Options,
    Target,
    TargetBlocks,
    TargetFile,
    literal,
    option,
)  # fmt: skip

if TYPE_CHECKING:
    from reshard.formats import Listing

INDEX = "cuts.json"


@dataclass(frozen=True)
class RawOptions(Options):
    """The options of `--to raw-cuts`."""

    align: int = option("Begin tensors at multiples of this number of bytes.", "count", default=64, shown="64")


class RawTarget(Target):
    """Whole tensors in one file, and the table of their places, which gets its name last."""

    format = "raw-cuts"
    ranks = (0,)

    def __init__(self, inputs: Any) -> None:
        self._align = max(inputs.request.files.align, 1)

    def blocks_of(self, item: Any) -> TargetBlocks:
        """Return the blocks of a tensor, each with the numbers of the files that get it."""
        return TargetBlocks((Block.whole(item.tensor.spec.shape),), ((0,),))

    def files(self, assigned: Any, texts: Any) -> tuple[TargetFile, ...]:  # noqa: ARG002 -- it has no texts
        """Return every file: its size, the places of tensors in it, and all other bytes."""
        contents, table, end = [], {}, 0
        for item, _ in assigned:
            shape, begin = item.tensor.spec.shape, -(-end // self._align) * self._align
            end = begin + Block.whole(shape).size * item.dtype.itemsize
            contents.append(Content(item.name, item.dtype, shape, runs=((begin, end - begin),)))
            block = {"offset": [0] * len(shape), "size": shape, "file": "data.raw", "begin": begin, "end": end}
            table[item.name] = {"dtype": item.dtype.name, "shape": shape, "blocks": [block]}
        data = TargetFile(0, "data.raw", FileLayout(end, (), tuple(contents)))
        return data, TargetFile(0, INDEX, literal(json.dumps(table).encode()), publish="index")


class RawCuts(Format):
    """Raw blocks, and a table of their places."""

    name = "raw-cuts"
    title = "raw cuts"
    encoding = "raw-cuts"
    whole = called = "a directory of raw cuts"

    @property
    def options(self) -> type[Options]:
        """See `Format`."""
        return RawOptions

    def target(self, options: Options) -> type[Target]:  # noqa: ARG002 -- all are of one kind
        """See `Format`."""
        return RawTarget

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        return Found(self, here) if INDEX in here.names else None

    def open(self, found: Found, options: Any, *, contents: Any) -> Any:  # noqa: ARG002 -- it takes no options
        """See `Format`."""
        table = BlockList(found)
        for name, tensor in json.loads((found.place / INDEX).read_bytes()).items():
            for block in tensor["blocks"]:
                place = [(block["begin"], block["end"] - block["begin"])]
                table.add(name, tensor["dtype"], tensor["shape"], block["offset"], block["size"], block["file"], place)
        return table.checkpoint(described_by=INDEX)


RAW_CUTS = RawCuts()

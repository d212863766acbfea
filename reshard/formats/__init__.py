"""The formats of checkpoints: a folder for each, and the list of them.

They are asked in order, and the first that finds a checkpoint opens it. To add a format, make an object of a subclass
of `Format`, and name it in the entry point group `reshard.formats` of a package, or pass it to `register`.

>>> from reshard import formats
>>> [each.name for each in formats.formats()][:3], formats.named("dcp").title
(['zarr', 'run', 'checkpoint2'], 'DCP')
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.core.format import Format, Found, find, formats, named, register
    from reshard.core.layout.block import Block
    from reshard.core.listing import FileNames, Listing, OpenOptions, RunLayout
    from reshard.core.model.entries import Content, Crc, FileLayout, RangeReader
    from reshard.core.model.table import BlockList
    from reshard.core.options import Options, option
    from reshard.core.target import Target, TargetBlocks, TargetFile, TargetInputs, TargetTensor, literal

__all__ = [
    "Block", "BlockList", "Content", "Crc", "FileLayout", "FileNames", "Format", "Found", "Listing", "OpenOptions",
    "Options", "RangeReader", "RunLayout", "Target", "TargetBlocks", "TargetFile", "TargetInputs", "TargetTensor",
    "find", "formats", "literal", "named", "option", "register",
]  # fmt: skip

BUILT_IN = (
    "formats.zarr", "core.runs", "formats.checkpoint2", "formats.dcp", "formats.deepspeed", "formats.orbax",
    "formats.megatron", "formats.torch_save", "formats.sets", "formats.ranks",
)  # fmt: skip
"""The modules of formats, in the order in which they are asked: stores before runs, since the names of their arrays may
be numbers; files of ranks last, since they describe nothing."""

_HOMES = {
    "BlockList": "core.model.table",
    **dict.fromkeys(("Format", "Found", "find", "formats", "named", "register"), "core.format"),
    **dict.fromkeys(("FileNames", "Listing", "OpenOptions", "RunLayout"), "core.listing"),
    **dict.fromkeys(("Target", "TargetBlocks", "TargetFile", "TargetInputs", "TargetTensor", "literal"), "core.target"),
    **dict.fromkeys(("Options", "option"), "core.options"),
    **dict.fromkeys(("Content", "Crc", "FileLayout", "RangeReader"), "core.model.entries"),
    "Block": "core.layout.block",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"reshard.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

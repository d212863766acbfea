"""A distributed checkpoint (DCP) of PyTorch that links another's data files.

Only `.metadata` is rewritten; sidecar files are copied.

Names are only in `.metadata`, so tensors and objects can be renamed, left out, or combined from several DCPs; this
takes time independent of the data size. Carried items are not decoded: zstd streams, objects, buckets of Megatron's
optimizer. A file is linked if any of its items is carried.

Source: PyTorch 2.13 `distributed/checkpoint/filesystem.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.listing import Listing
from reshard.core.model.entries import FileLayout
from reshard.core.model.holdings import leave_out
from reshard.core.model.objects import problems
from reshard.core.storage.places import as_place, can
from reshard.core.target import Target, TargetFile
from reshard.dtypes import BY_NAME
from reshard.errors import Option, SourceError, Text, UsageError, bytes_text
from reshard.formats.dcp.metadata import WHOLE_SHAPE, DCPMetadata
from reshard.formats.dcp.names import DCP_FILES, DCP_INDEX, DCP_ITEMS, rank_of
from reshard.formats.dcp.sidecars import target_files
from reshard.formats.dcp.writer import DCPTarget, ListedTensor, metadata
from reshard.kits.torch.carried import followed, nested, old_names, read_carried
from reshard.kits.torch.saved_tensors import torch_dtype
from reshard.strategy.names import matches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.budget import Share
    from reshard.core.plan.plan import Request
    from reshard.core.storage.places import Place
    from reshard.core.target import TargetInputs
    from reshard.formats.dcp.metadata import Item
    from reshard.kits.torch.carried import KeyPath

_ITEM_BYTES = 2000  # resident memory of an item: metadata read twice, and written
_COPY = "make a copy, without links"


class Relinked(Target):
    """A DCP that links to another DCP, or to several that were opened as one.

    Attributes:
        dropped: source names that cannot be carried, and that the selection allows to drop.
    """

    format = "dcp"
    links = True

    def __init__(self, inputs: TargetInputs) -> None:
        """Find the files to link, and make the metadata.

        `objects` maps old names of tensors and objects to new names.

        Raises:
            UsageError: it is not a DCP of PyTorch, not on this machine, or has safetensors files, which hold names.
            SourceError: it changed since it was opened, or the faults, all at once.
        """
        source, request, _, _, objects, faults = inputs
        directory, source_metadata = _metadata_of(source)
        if not objects.keys() <= source_metadata.tensors.keys() | source_metadata.objects.keys():
            raise _changed(directory / source_metadata.described_by)
        carried, dropped = {}, []
        for old, new in objects.items():
            if old in source.unreadable and matches(old, request.selection.drop):
                dropped.append(old)
            else:
                carried[new] = old
                if fault := _fault(old, source_metadata, source.unreadable.get(old)):
                    faults.add(f"tensor {old!r}" if old in source_metadata.tensors else f"object {old!r}", fault)
        if not carried:
            raise UsageError("everything chosen is dropped; the target would be empty", code="no-tensors")
        old_paths = source_metadata.paths
        new_paths = {new: followed(old_paths[old], old, new) for new, old in carried.items() if old in old_paths}
        paths = nested(new_paths, faults)
        sidecars = read_carried(source.extras.beside, faults)
        faults.raise_if_any(SourceError)
        files = _Links(source, directory)
        entries = [_listed_tensor(new, old, source_metadata, paths.get(new), files) for new, old in carried.items()]
        flat_shapes = source_metadata.flat
        flat = {new: {WHOLE_SHAPE: flat_shapes[old]} for new, old in carried.items() if old in flat_shapes}
        content = metadata(entries, {"mcore_data": flat} if flat else {})
        last_files = target_files(0, "", {**sidecars, DCP_INDEX: content})
        self.dropped = tuple(dropped)
        self.ranks = tuple(sorted({link.rank for link in files.links.values()}))
        self.memory: tuple[Share, ...] = (
            ("metadata", _ITEM_BYTES * sum(len(file.index.entries) for file in source.files)),
        )
        self._files = (*files.links.values(), *last_files)
        self._warnings = (files.shared(), *_warnings(source, carried))

    @classmethod
    def settled(cls, request: Request, source: Checkpoint) -> Request:
        """Return the request; raise `UsageError` if linked files cannot satisfy it."""
        for asked, option, kept in (
            (request.target, "the target strategy or pattern", "blocks"),
            (request.selection.cast, "the cast", "dtypes"),
            (request.selection.rules, "the rules", "shapes"),
            (source.lora, "the adapter", "bytes"),
        ):
            if asked:
                hint = f"leave {option} out, or the links"
                raise UsageError(f"linked files keep their {kept}", code="not-linkable", hint=hint)
        if any(file.inputs is not None for file in source.files):
            raise UsageError("computed tensors are in no file", code="not-linkable", hint=_COPY)
        return DCPTarget.settled(request, source)

    def files(self, *_: object) -> tuple[TargetFile, ...]:
        """Return the links, the copied sidecar files, and `.metadata`."""
        return self._files

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about the linked files and carried data."""
        return self._warnings


def _metadata_of(source: Checkpoint) -> tuple[Place, DCPMetadata]:
    """Return a source's directory and metadata; raise `UsageError` if not linkable."""
    directory = as_place(source.root)
    if not can(source.root).positioned:
        raise UsageError(f"no file can be linked at a URL such as {directory}", code="not-linkable", hint=_COPY)
    if source.file_format != DCP_ITEMS:
        problem = f"has {source.file_format} files, which hold names" if source.extras.described_by else "is not a DCP"
        facts = ["links need a DCP as PyTorch writes it by default"]
        raise UsageError(f"{directory} {problem}", code="not-a-dcp", facts=facts, hint=_COPY)
    found = source.format.find(Listing(directory)) if source.format else None
    if found is None:
        raise _changed(directory)
    return directory, DCPMetadata(directory, found.files)


class _Links:
    """The linked files, collected as they are needed.

    Attributes:
        links: the links, by path below the source's root.
    """

    def __init__(self, source: Checkpoint, directory: Place) -> None:
        self._sizes = {file.path: file.nbytes for file in source.files}
        self._root = directory
        self._linked_bytes = 0
        self._names: set[str] = set()
        self.links: dict[str, TargetFile] = {}

    def linked(self, item: Item) -> Item:
        """Link the file of an item, and return the item in the target."""
        link = self.links.get(item.file) or self._link(item.file)
        self._linked_bytes += item.nbytes
        return item._replace(file=link.path)

    def _link(self, file: str) -> TargetFile:
        path = str(self._root.absolute() / file)
        if path not in self._sizes:
            raise _changed(path)
        name = file.replace("/", "")  # includes the directory if there are several DCPs, so that names are unique
        if name in self._names or not DCP_FILES["_StorageInfo"].fullmatch(name) or not name.isprintable():
            raise SourceError(
                f"{file} in {self._root} cannot be linked as {name!r}", code="bad-name",
                hint="rename the directory that it is in",
            )  # fmt: skip
        self._names.add(name)
        self.links[file] = link = TargetFile(rank_of(file), name, FileLayout(self._sizes[path], ()), link=path)
        return link

    def shared(self) -> str:
        """Return the warning that linked files share their bytes with the source."""
        size = sum(link.layout.size for link in self.links.values())
        idle = size - self._linked_bytes
        unused = f"; {bytes_text(idle)} of their {bytes_text(size)} belong to no listed tensor or object"
        return (
            f"data files are links: what is changed in place in {self._root} is changed in the target, too, unless "
            f"the file system made copy-on-write clones{unused if idle > 0 else ''}"
        )


def _changed(path: object) -> SourceError:
    return SourceError(f"{path} changed since it was opened", code="source-changed", hint="run the command again")


def _fault(name: str, source_metadata: DCPMetadata, reason: str | None) -> SourceError | None:
    """Return an error if a tensor or object cannot be carried, or None.

    Args:
        name: its name in the source.
        source_metadata: the source's metadata.
        reason: why it is not readable, or None.
    """
    if reason is not None:
        return SourceError(reason, code="unreadable-tensor", hint=leave_out(name, reason))
    if name in source_metadata.objects:
        return None if source_metadata.items.get(name) else SourceError("is in no file", code="missing-object")
    tensor = source_metadata.tensors[name]
    if not tensor.dtype:
        return SourceError("has an unknown dtype", code="unknown-dtype", hint=leave_out(name, ""))
    if len(dict(tensor.boxes)) < len(tensor.boxes):
        fault = "has boxes of several sizes at one offset, which cannot be told apart"
        hint = Text(f"{_COPY}, or leave it out with ", Option("exclude", name))
        return SourceError(fault, code="ambiguous-boxes", hint=hint)
    return None


def _listed_tensor(
    new: str, old: str, source_metadata: DCPMetadata, path: KeyPath | None, files: _Links
) -> ListedTensor:
    """Return the new metadata of a tensor or an object."""
    items = source_metadata.items[old]
    if old in source_metadata.objects:
        return ListedTensor(new, None, (), [(files.linked(items[0]), ())], path)
    tensor = source_metadata.tensors[old]
    first: dict[Shape, Item] = {}  # ranks with separate metadata may list the same box
    for item in items:
        first.setdefault(item.offsets, item)
    extents = dict(tensor.boxes)
    parts = [(files.linked(item), extents[offsets]) for offsets, item in first.items()]
    return ListedTensor(new, torch_dtype(old, BY_NAME[tensor.dtype]), tensor.shape, parts, path)


def _warnings(source: Checkpoint, carried: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings about carried data; `carried` maps new names to old names."""
    for name, problem in problems(source.extras.beside).items():
        yield f"{name} {problem}, and left out"
    yield from old_names(source, carried, carried.values())

"""What a zarr store carries of its source that is not a tensor, so that a conversion from the store has it, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.dcp.carried import old_names, read_carried
from reshard.formats.dcp.written_metadata import followed
from reshard.formats.sets.sidecars import Sidecars, shard_size
from reshard.formats.zarr.carried import CarriedBytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.core.target import TargetInputs


class Carried:
    """Files beside the weights of a set, and objects, files and paths of a distributed checkpoint.

    Attributes:
        stored: the bytes.
        names: the names of objects and of files of a distributed checkpoint, in the source.
        files: the names of files beside the weights of a set, with those that a warning names.
    """

    def __init__(self, inputs: TargetInputs) -> None:
        """Read them.

        Raises:
            SourceError: a file cannot be read.
        """
        source, extras, objects = inputs.source, inputs.source.extras, inputs.objects
        self._source, self._tensors = source, {item.name: item.tensor.spec.name for item in inputs.items}
        self._sidecars = Sidecars(source, inputs.request.files, inputs.items)
        beside = read_carried(extras.beside, inputs.faults)
        contents = read_carried({name: extras.objects[name] for name in objects}, inputs.faults)
        self.names = {*beside, *contents}
        self.files = self._sidecars.names
        paths = extras.paths
        if paths is not None:
            old_of = {**self._tensors, **{objects[name]: name for name in contents}}
            new = {name: followed(paths.get(old, (old,)), old, name) for name, old in old_of.items()}
            paths = {name: path for name, path in new.items() if path != (name,)}
        renamed = {objects[name]: content for name, content in contents.items()}
        self.stored = CarriedBytes(
            {"files": self._sidecars.contents, "objects": renamed, "beside": beside}, paths, shard_size(source)
        )

    def warnings(self) -> Iterator[str]:
        """Yield warnings about files that are left out, and carried data with old tensor names."""
        yield from self._sidecars.warnings()
        yield from old_names(self._source, self._tensors, self.names)

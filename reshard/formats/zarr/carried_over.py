"""What a zarr store carries of its source that is not a tensor, so that a conversion from the store has it, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.sets.sidecars import Sidecars, shard_size
from reshard.formats.zarr.carried import CarriedBytes
from reshard.kits.torch.carried import Carried as CarriedData

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
        source, tensors = inputs.source, {item.name: item.tensor.spec.name for item in inputs.items}
        self._sidecars = Sidecars(source, inputs.items)
        self._data = CarriedData(source, tensors, inputs.objects, inputs.faults)
        self.names, self.files = self._data.names, self._sidecars.names
        paths = self._data.paths
        if paths is not None:
            paths = {name: path for name, path in paths.items() if path != (name,)}
        contents = {"files": self._sidecars.contents, "objects": self._data.objects, "beside": self._data.beside}
        self.stored = CarriedBytes(contents, paths, shard_size(source))

    def warnings(self) -> Iterator[str]:
        """Yield warnings about files that are left out, and carried data with old tensor names."""
        yield from self._sidecars.warnings()
        yield from self._data.warnings()

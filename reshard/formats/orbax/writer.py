"""A checkpoint of Orbax, for JAX: a zarr store of whole tensors, with the metadata that Orbax reads.

Orbax calls it an item of zarr 3 without OCDBT: the directory of an array is named by its path in the tree, joined by
dots. Its arrays have the dtypes of TensorStore, such as bfloat16, which zarr-python does not read.

Source: orbax-checkpoint 0.12.8, which loads it in `tests/targets/test_write_orbax.py`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from reshard.core.target import TargetFile, literal
from reshard.dtypes import INT4
from reshard.errors import UsageError
from reshard.formats.orbax.steps import COMMITTED, METADATA, STEP_METADATA
from reshard.formats.zarr.layout import escaped
from reshard.formats.zarr.writer import ZarrStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.target import Assigned, TargetTensor
    from reshard.formats.zarr.layout import Array

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_SEQUENCE, _DICT = 1, 2  # types of keys
_FINISHED = 1  # a time: files do not depend on when they are written


class OrbaxItem(ZarrStore):
    """The files of one item, which is a step, too."""

    carries = False
    consolidates = False  # zarr-python, which reads such metadata, lacks its dtypes

    def files(self, assigned: Sequence[Assigned], texts: Sequence[TargetTensor]) -> tuple[TargetFile, ...]:
        """Lay out the store, and make Orbax's metadata, which get their names last.

        Raises:
            UsageError: names do not make a tree.
        """
        *files, group = super().files(assigned, texts)
        metadata = {
            "tree_metadata": _tree({name: array.shape for name, array in self.arrays.items()}),
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        step = {
            "item_handlers": _HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": _FINISHED,
            "commit_timestamp_nsecs": _FINISHED,
            "custom_metadata": {},
        }
        contents = {METADATA: json.dumps(metadata), STEP_METADATA: json.dumps(step), COMMITTED: "reshard wrote it"}
        made = (TargetFile(0, name, literal(text.encode()), publish="index") for name, text in contents.items())
        return (*files, *made, group)

    def metadata_of(self, array: Array, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of the `zarr.json` of an array as Orbax writes it, with dtypes of TensorStore."""
        data_type = None if array.dtype is INT4 or array.dtype.bits else array.dtype.name
        metadata = array.metadata(attributes, data_type)
        metadata.pop("dimension_names", None)
        return metadata


def _tree(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the records of arrays, by the text of their path in the tree."""
    paths = {name: tuple(name.split(".")) for name in shapes}
    keys: dict[tuple[str, ...], set[str]] = {}
    for name, path in paths.items():
        if escaped(name) != name:
            raise UsageError(
                f"{name!r} is not the name of a directory, as Orbax needs it", code="bad-name",
                hint="rename it with a name map",
            )  # fmt: skip
        for depth, key in enumerate(path):
            keys.setdefault(path[:depth], set()).add(key)
    both = next((name for name, path in paths.items() if path in keys), None)
    if both is not None:
        raise UsageError(
            f"{both!r} is a tensor, and the first part of other names, which a tree of Orbax cannot have",
            code="colliding-names", hint="rename it with a name map",
        )  # fmt: skip
    sequences = {path for path, names in keys.items() if names == set(map(str, range(len(names))))}
    return {
        str(path): {
            "key_metadata": [
                {"key": key, "key_type": _SEQUENCE if path[:depth] in sequences else _DICT}
                for depth, key in enumerate(path)
            ],
            "value_metadata": {
                "value_type": "np.ndarray",
                "skip_deserialize": False,
                "write_shape": list(shapes[name]),
            },
        }
        for name, path in paths.items()
    }

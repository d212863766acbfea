"""Read the arguments of a training with Megatron-LM from a pickled `argparse.Namespace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import SourceError
from reshard.kits.torch.pickles import Pairs, PickledObject, describe
from reshard.kits.training.arguments import NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_ARGUMENTS = 1 << 14
_MOST_ITEMS = 1 << 10


def stated_in(namespace: object) -> dict[str, object]:
    """Return the arguments in a pickled `Namespace` that `kits.training.arguments` knows, as plain data.

    Raises:
        SourceError: it is not a namespace. The message does not name the file.
    """
    state = namespace.state if isinstance(namespace, PickledObject) and namespace.name == "Namespace" else None
    if not isinstance(state, Pairs) or len(state) > 2 * _MOST_ARGUMENTS:
        raise SourceError("has no args, which say how it is cut", code="no-layout")
    return known({key: value for key, value in state.items() if isinstance(key, str) and key in NAMES})


def known(values: Mapping[Any, object]) -> dict[str, object]:
    """Return the arguments that `kits.training.arguments` knows; a value that is not plain becomes its description."""
    return {name: _plain(value) for name, value in values.items() if isinstance(name, str) and name in NAMES}


def _plain(value: object) -> object:
    is_list = isinstance(value, list) and len(value) <= _MOST_ITEMS
    items = value if isinstance(value, list) and is_list else [value]
    if all(item is None or isinstance(item, bool | float | str | int) for item in items):
        return value
    return (describe(value),)

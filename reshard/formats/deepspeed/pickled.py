"""Take dicts, shapes and tensors out of pickled values, with short errors."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from reshard.core.layout.block import LONGEST_NAME, is_possible, shape_text
from reshard.errors import SourceError
from reshard.kits.torch.dtensors import is_tensor
from reshard.kits.torch.pickles import Pairs, PickledObject, describe, numbers
from reshard.kits.torch.tensors import rebuilt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.layout.block import Shape
    from reshard.kits.torch.tensors import Rebuilt

_MOST_NAMES = 1 << 20
_LARGEST = 1 << 62  # of a number of steps, or another single number


def table(value: object, name: str) -> dict[str, Any]:
    """Return the values of a dict whose keys are texts; other keys are left out.

    Args:
        value: a pickled dict or OrderedDict.
        name: its name, for messages.

    Raises:
        SourceError: it is another value, or a key is too long. The message does not name the file.
    """
    pairs = (value.items or Pairs()) if isinstance(value, PickledObject) and value.name == "OrderedDict" else value
    if not isinstance(pairs, Pairs) or len(pairs) > 2 * _MOST_NAMES:
        raise SourceError(f"has {describe(value)} for {name}; expected a dict", code="bad-value")
    result = {key: item for key, item in pairs.items() if isinstance(key, str)}
    if long := next((key for key in result if len(key.encode()) > LONGEST_NAME), None):
        raise SourceError(f"has {long!r:.60} in {name}; expected at most {LONGEST_NAME} bytes", code="bad-name")
    return result


def optional_table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a dict among values; empty if there is none. Errors as for `table`."""
    value = values.get(name)
    return {} if value is None else table(value, name)


def numbered(value: object, name: str) -> list[Any]:
    """Return the values of a list, or of a dict whose keys are 0, 1 and so on; None for each that is absent.

    Raises:
        SourceError: it is another value.
    """
    if isinstance(value, Pairs):
        items = {key: item for key, item in value.items() if type(key) is int and 0 <= key < len(value)}
        if 2 * len(items) != len(value):
            raise SourceError(f"has {name} that are not numbered from 0", code="bad-value")
        return [items.get(number) for number in range(max(items, default=-1) + 1)]
    if isinstance(value, list | tuple):
        return list(value)
    raise SourceError(f"has {describe(value)} for {name}; expected a list", code="bad-value")


def shapes(value: object, name: str) -> dict[str, Shape]:
    """Return shapes by the names of their tensors.

    Raises:
        SourceError: it is another value, or a shape is impossible.
    """
    result = {}
    for key, size in table(value, name).items():
        shape = numbers(size)
        if not is_possible(shape):
            raise SourceError(f"has the shape {shape_text(shape)} for {key!r:.60} in {name}", code="bad-shape")
        result[key] = shape
    return result


def flat(value: object, name: str) -> Rebuilt:
    """Return a tensor of one dimension without gaps; raise `SourceError` for other values."""
    try:
        tensor = rebuilt(value)
    except SourceError as error:
        raise SourceError(f"has a value for {name} that {error.message}", code=error.code) from None
    if len(tensor.shape) != 1 or (tensor.shape[0] > 1 and tensor.strides != (1,)):
        raise SourceError(
            f"has {name} of shape {shape_text(tensor.shape)}; expected a flat tensor without gaps", code="wrong-shape"
        )
    return tensor


def scalar(value: object) -> Rebuilt | float | None:
    """Return a tensor of one element, or a number; None for other values."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if abs(value) <= _LARGEST else None
    if is_tensor(value):
        try:
            tensor = rebuilt(value)
        except SourceError:
            return None
        return tensor if prod(tensor.shape) == 1 else None
    return None


def whole_number(value: object) -> int | None:
    """Return a number from 0, which may be of an enumeration; None for other values."""
    if isinstance(value, PickledObject) and isinstance(value.arguments, tuple) and len(value.arguments) == 1:
        (value,) = value.arguments
    return value if type(value) is int and 0 <= value < 1 << 31 else None

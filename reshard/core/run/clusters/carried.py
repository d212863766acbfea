"""Send values to workers with the assigned arrays in them, of which these are given no chunks."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.core.plan.plan import Plan


class WithArrays:
    """A value that is unpickled as itself, with its assigned arrays; otherwise these are pickled without their data.

    Attributes:
        value: the value; use `contents`, since workers of the same process get this object.

    Raises:
        SourceError: an array cannot be pickled.
    """

    def __init__(self, value: Any) -> None:
        from reshard.expressions.assigned import carrying  # it brings numpy

        self.value = value
        with carrying():
            self._pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)


def contents(value: Any) -> Any:
    """Return the value in a `WithArrays`; any other value is returned as it is."""
    return value.value if isinstance(value, WithArrays) else value


def carries_arrays(plan: Plan, *, by_file: bool) -> bool:
    """Return whether tasks need more of the assigned arrays than the chunks that they are given."""
    if all(file.inputs is None for file in plan.source.files):
        return False
    from reshard.expressions.assigned import not_given  # rarely needed

    return bool(not_given(plan, by_file=by_file))

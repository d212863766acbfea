"""Everything public can be sent to other processes, as dask and concurrent.futures do."""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

import pytest
from distributed.protocol.pickle import dumps, loads

import reshard
import reshard.core.plan
import reshard.core.verify


@pytest.mark.parametrize("name", [None, *reshard.__all__])
def test_what_a_function_names_is_pickled(name: str | None) -> None:
    """A function of a notebook carries what it names, by value: the package, or a name of it."""
    scope: dict[str, Any] = {"reshard": reshard, "__name__": "__main__"}
    if name:
        scope["taken"] = getattr(reshard, name)
    exec(f"def function(): return {'taken' if name else 'reshard'}", scope)  # noqa: S102
    taken = loads(dumps(scope["function"]))()
    assert taken is (scope["taken"] if name else reshard)


def test_functions_are_not_hidden_by_folders() -> None:
    assert not [name for name in reshard.__all__ if isinstance(getattr(reshard, name), ModuleType)]
    assert loads(pickle.dumps(reshard.plan)) is reshard.plan

"""The `config.json` of a model, for a Hugging Face set of computed tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard.core.storage.places import as_place
from reshard.core.storage.small import parse_json, read_small
from reshard.errors import SourceError
from reshard.kits.indexes import MODEL_CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.dtypes import DType

QUANTIZATION = ("quantization_config", "compression_config")
"""The keys of how weights are quantized."""

_DTYPES = ("torch_dtype", "dtype")
_LARGEST = 1 << 22


def config_path(source: Checkpoint) -> Place:
    """Return the path of a model's configuration; the file may be absent."""
    root = as_place(source.root)
    return (root.parent if root.is_file() else root) / MODEL_CONFIG


def read_config(path: Place) -> Mapping[str, Any]:
    """Read the configuration of a model.

    Raises:
        SourceError: it cannot be read, or is not a JSON object.
    """
    try:
        content = parse_json(read_small(path, "model configuration", _LARGEST, SourceError), [])
    except ValueError as error:
        raise SourceError(f"{path} is not JSON", code="not-json", facts=[str(error)]) from None
    if not isinstance(content, dict):
        raise SourceError(f"{path} is a {type(content).__name__}; expected a JSON object", code="wrong-type")
    return content


def quantizations(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the descriptions of a quantization in a configuration and in its parts, such as `text_config`.

    >>> [*quantizations({"text_config": {"quantization_config": {"bits": 4}}})]
    [{'bits': 4}]
    """
    yield from (config[key] for key in QUANTIZATION if isinstance(config.get(key), Mapping))
    for key, part in config.items():
        if key not in QUANTIZATION and isinstance(part, Mapping):
            yield from quantizations(part)


def written_config(config: Mapping[str, Any], dtype: DType) -> bytes:
    """Return a configuration as text, without its quantization, and with a dtype."""
    return _as_text(_plain(config, dtype))


def _as_text(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def without_quantization(content: bytes) -> bytes:
    """Return Mistral's `params.json` without its quantization; other content as it is.

    >>> print(without_quantization(b'{"dim": 4, "quantization": {}}').decode(), end="")
    {
      "dim": 4
    }
    """
    try:
        config = parse_json(content, [])
    except ValueError:
        return content
    if not isinstance(config, dict) or "quantization" not in config:
        return content
    return _as_text({key: value for key, value in config.items() if key != "quantization"})


def with_dtypes(content: bytes, dtypes: Mapping[str, str]) -> bytes:
    """Return a configuration with the dtypes that tensors become; as it is if that changes nothing.

    Args:
        content: the configuration.
        dtypes: the new name of each dtype of the tensors.

    >>> print(with_dtypes(b'{"torch_dtype": "float32"}', {"float32": "bfloat16"}).decode(), end="")
    {
      "torch_dtype": "bfloat16"
    }
    """
    try:
        config = parse_json(content, [])
    except ValueError:
        return content
    changed = _mapped(config, dtypes) if isinstance(config, dict) else config
    return content if changed == config else _as_text(changed)


def config_of_average(first: Checkpoint, dtype: DType | None) -> bytes:
    """Return the configuration of an average, given its first checkpoint; empty if it is not a Hugging Face set.

    Args:
        first: the first checkpoint.
        dtype: the dtype of all averages; None if it is that of the first.

    Raises:
        SourceError: the configuration cannot be read.
    """
    content = first.extras.model_config
    if not content:
        is_set = not (first.strategy or first.extras.described_by or (first.origin and first.origin.rules))
        if not is_set or any(file.index.format != "safetensors" for _, file in first.stored_files):
            return b""
        path = config_path(first)
        if not path.is_file():
            return b""
        if dtype is None:
            return read_small(path, "model configuration", _LARGEST, SourceError)
        return written_config(read_config(path), dtype)
    return content if dtype is None else written_config(json.loads(content), dtype)


def _plain(config: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
    """Return a configuration without its quantization, and with a dtype in each part that names one."""
    result = {key: value for key, value in config.items() if key not in QUANTIZATION}
    for key, value in result.items():
        if key in _DTYPES and isinstance(value, str):
            result[key] = dtype.name
        elif isinstance(value, Mapping):
            result[key] = _plain(value, dtype)
    return result


def _mapped(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration with other dtypes in each part that names one; what is quantized stays so."""
    result = dict(config)
    for key, value in config.items():
        if key in _DTYPES and isinstance(value, str):
            result[key] = dtypes.get(value, value)
        elif isinstance(value, Mapping) and key not in QUANTIZATION:
            result[key] = _mapped(value, dtypes)
    return result

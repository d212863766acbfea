"""Chunks in an encoding that zarr decodes: it opens an array of one chunk in memory.

zstd alone is not decoded so: zarr takes 0.5 ms longer for each chunk, and allocates as much memory as a damaged chunk
declares.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_BLOSC_HEADER = 16  # bytes


@dataclass(frozen=True, slots=True)
class ZarrCodec:
    """Decodes chunks; see `kits.chunks.Decode`.

    Attributes:
        metadata: the metadata of an array of one such chunk.
        file: the name of the file of such metadata.
        key: the name of the chunk of that array.
        by_blosc: chunks begin with a header of blosc.
    """

    metadata: bytes
    file: str
    key: str
    by_blosc: bool

    def __call__(self, encoded: bytes | bytearray, nbytes: int) -> memoryview:
        """Return the contents of a chunk; raise `ValueError` if it is damaged."""
        import numpy as np

        try:
            files, array = _opened(self, threading.get_ident())
            if self.by_blosc:
                _check_blosc(encoded)
            files[self.key] = _buffer(encoded)
            content = np.ascontiguousarray(array[...], array.dtype.newbyteorder("<"))
        except MemoryError:
            raise
        except Exception as error:  # zarr's codecs may raise anything
            raise ValueError(str(error) or type(error).__name__) from error
        if content.nbytes != nbytes:
            raise ValueError(f"it has {content.nbytes:,} bytes; the metadata says {nbytes:,}")
        return content.reshape(-1).view(np.uint8).data


@lru_cache(256)
def _opened(codec: ZarrCodec, _thread: int) -> tuple[dict[str, Any], Any]:
    """Return the files of the array of one chunk, and the array, which one thread uses."""
    import zarr

    files = {codec.file: _buffer(codec.metadata)}
    store = zarr.storage.MemoryStore(files)
    return files, zarr.open_array(store, mode="r", zarr_format=json.loads(codec.metadata)["zarr_format"])


def _buffer(content: bytes | bytearray) -> Any:
    """Return bytes as zarr keeps them."""
    from zarr.core.buffer import default_buffer_prototype

    return default_buffer_prototype().buffer.from_bytes(content)


def _check_blosc(encoded: bytes | bytearray) -> None:
    """Raise `ValueError` if a chunk is shorter or longer than its header says: blosc reads on past its end.

    Bytes 12 to 16 of the header are the size of the chunk with its header (c-blosc, README_CHUNK_FORMAT).
    """
    said = int.from_bytes(encoded[12:16], "little")
    if len(encoded) < _BLOSC_HEADER or len(encoded) != said:
        raise ValueError(f"it has {len(encoded):,} bytes; blosc noted {said:,}")

"""The jobs of `objects.py` by obstore alone, as an engineer writes them who knows these files.

    python tests/bench/objects_peer.py rows SOURCE TARGET      # or columns, compare

Source and target are directories or `s3://` URLs of rank files in safetensors, with matrices cut along their rows and
vectors that every rank has. `rows` writes files of half as many ranks, `columns` of as many ranks that have columns,
`compare` compares what `rows` wrote with its source. Local sources are mapped, so that they count as resident memory.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import traceback
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import obstore
from obstore.store import from_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

CHUNK = 8 << 20
IN_FLIGHT = 24
RANKS = 8
DTYPES = {"F32": 4, "BF16": 2}


class Part(NamedTuple):
    """Bytes of a source file that go to an offset of a target file."""

    source: int
    start: int
    target: int
    at: int
    nbytes: int


class Directory:
    """Rank files in a local directory or at a URL."""

    def __init__(self, place: str) -> None:
        url = place.startswith("s3://")
        self.path = Path(place)
        self.store: Any = from_url(place, client_options={"allow_http": True}) if url else None
        self._maps: dict[int, memoryview] = {}

    def read(self, rank: int, start: int, nbytes: int) -> Any:
        if self.store:
            return obstore.get_range(self.store, name_of(rank), start=start, length=nbytes)
        if rank not in self._maps:
            with (self.path / name_of(rank)).open("rb") as file:
                self._maps[rank] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._maps[rank][start : start + nbytes]

    def header(self, rank: int) -> tuple[int, dict[str, Any]]:
        """Return where the contents begin, and the tensors."""
        start = bytes(self.read(rank, 0, 1 << 16))
        nbytes = int.from_bytes(start[:8], "little")
        if 8 + nbytes > len(start):
            start = bytes(self.read(rank, 0, 8 + nbytes))
        header = json.loads(start[8 : 8 + nbytes])
        header.pop("__metadata__", None)
        return 8 + nbytes, header

    def put(self, rank: int, contents: Iterable[Any]) -> None:
        """Upload a file from its contents in order; an error ends the process, since others wait for this file."""
        try:
            obstore.put(
                self.store, name_of(rank), iter(contents), use_multipart=True, chunk_size=CHUNK, max_concurrency=12
            )
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def name_of(rank: int) -> str:
    return f"rank_{rank}/checkpoint_{rank}.safetensors"


def head_of(shapes: dict[str, tuple[str, list[int]]]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file, and at which offset each tensor begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + DTYPES[dtype] * product(shape)
        offsets[name] = begin
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + at for name, at in offsets.items()}


def product(shape: Sequence[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def in_rows(headers: list[tuple[int, dict[str, Any]]]) -> tuple[list[bytes], list[Part]]:
    """Return the heads of the target files, and the parts of each in order."""
    heads, parts = [], []
    for target in range(RANKS // 2):
        sources = (2 * target, 2 * target + 1)
        shapes = {}
        for name, tensor in headers[0][1].items():
            rows, *rest = tensor["shape"]
            shapes[name] = (tensor["dtype"], [rows * 2, *rest] if rest else [rows])
        head, offsets = head_of(shapes)
        heads.append(head)
        for name, at in offsets.items():
            for number, source in enumerate(sources if len(shapes[name][1]) > 1 else sources[:1]):
                data_start, tensors = headers[source]
                begin, end = tensors[name]["data_offsets"]
                parts.append(Part(source, data_start + begin, target, at + number * (end - begin), end - begin))
    return heads, parts


def split(parts: Iterable[Part], position: Callable[[Part], int]) -> Iterator[Part]:
    """Split parts where a position passes a multiple of the chunk."""
    for part in parts:
        first = position(part)
        edges = [first, *range((first // CHUNK + 1) * CHUNK, first + part.nbytes, CHUNK), first + part.nbytes]
        for begin, end in pairwise(edges):
            skip = begin - first
            yield Part(part.source, part.start + skip, part.target, part.at + skip, end - begin)


def download(source: Directory, target: Directory, heads: list[bytes], parts: list[Part], pool: Any) -> None:
    """Read each source file in chunks, and write what a chunk contains to where it belongs."""
    files = []
    for rank, head in enumerate(heads):
        path = target.path / name_of(rank)
        path.parent.mkdir(parents=True)
        files.append(os.open(path, os.O_WRONLY | os.O_CREAT))
        os.pwrite(files[rank], head, 0)
    chunks = defaultdict(list)
    for part in split(parts, lambda part: part.start):
        chunks[part.source, part.start // CHUNK].append(part)

    def fetch(chunk: list[Part]) -> None:
        first = min(part.start for part in chunk)
        nbytes = max(part.start + part.nbytes for part in chunk) - first
        contents = memoryview(source.read(chunk[0].source, first, nbytes))
        for part in chunk:
            os.pwrite(files[part.target], contents[part.start - first :][: part.nbytes], part.at)

    list(pool.map(fetch, chunks.values()))


def upload(source: Directory, target: Directory, heads: list[bytes], parts: list[Part], pool: Any) -> None:
    """Upload all target files at once; the reads of each are some chunks ahead."""

    def contents(rank: int) -> Iterator[Any]:
        yield heads[rank]
        waiting: deque[Any] = deque()
        for part in split((part for part in parts if part.target == rank), lambda _: 0):
            waiting.append(pool.submit(source.read, part.source, part.start, part.nbytes))
            if len(waiting) >= IN_FLIGHT // len(heads):
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()

    threads = [Thread(target=target.put, args=(rank, contents(rank))) for rank in range(len(heads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def columns(source: Directory, target: Directory, headers: list[tuple[int, dict[str, Any]]], pool: Any) -> None:
    """Read the whole blocks of a tensor, and the next one's meanwhile; gather the columns of each rank."""
    import numpy as np

    tensors = headers[0][1]
    shapes = {
        name: (tensor["dtype"], [tensor["shape"][0] * RANKS, tensor["shape"][1] // RANKS])
        if len(tensor["shape"]) > 1
        else (tensor["dtype"], tensor["shape"])
        for name, tensor in tensors.items()
    }
    head, _ = head_of(shapes)
    queues: list[Queue[Any]] = [Queue(2) for _ in range(RANKS)]
    threads = [Thread(target=target.put, args=(rank, iter(queue.get, None))) for rank, queue in enumerate(queues)]
    for thread in threads:
        thread.start()
    for queue in queues:
        queue.put(head)

    def blocks_of(name: str) -> list[Any]:
        sources = range(RANKS if len(tensors[name]["shape"]) > 1 else 1)
        places = [(rank, headers[rank][0], headers[rank][1][name]["data_offsets"]) for rank in sources]
        return [pool.submit(source.read, rank, start + begin, end - begin) for rank, start, (begin, end) in places]

    names = list(tensors)
    ahead = deque([blocks_of(names[0])])
    for number, name in enumerate(names):
        if number + 1 < len(names):
            ahead.append(blocks_of(names[number + 1]))
        shape, dtype = tensors[name]["shape"], f"u{DTYPES[tensors[name]['dtype']]}"
        blocks = [np.frombuffer(future.result(), dtype).reshape(shape) for future in ahead.popleft()]
        for rank, queue in enumerate(queues):
            cut = slice(rank * shape[-1] // RANKS, (rank + 1) * shape[-1] // RANKS)
            gathered = np.concatenate([block[:, cut] for block in blocks]) if len(shape) > 1 else blocks[0]
            queue.put(memoryview(gathered).cast("B"))
    for queue in queues:
        queue.put(None)
    for thread in threads:
        thread.join()


def compare(source: Directory, target: Directory, parts: list[Part], pool: Any) -> bool:
    """Read each target file in chunks, and compare each with its parts of source files."""
    targets = [target.header(rank) for rank in range(RANKS // 2)]
    heads = [min(part.at for part in parts if part.target == rank) for rank in range(len(targets))]
    moved = [part._replace(at=part.at - heads[part.target] + targets[part.target][0]) for part in parts]
    chunks = defaultdict(list)
    for part in split(moved, lambda part: part.at):
        chunks[part.target, part.at // CHUNK].append(part)

    def equal(chunk: list[Part]) -> bool:
        first, nbytes = chunk[0].at, sum(part.nbytes for part in chunk)
        contents = target.read(chunk[0].target, first, nbytes)
        return all(
            contents[part.at - first : part.at - first + part.nbytes]
            == source.read(part.source, part.start, part.nbytes)
            for part in chunk
        )

    return all(pool.map(equal, chunks.values()))


def main() -> None:
    """Do one job."""
    job, source, target = sys.argv[1], Directory(sys.argv[2]), Directory(sys.argv[3])
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        headers = list(pool.map(source.header, range(RANKS)))
        if job == "columns":
            columns(source, target, headers, pool)
            return
        heads, parts = in_rows(headers)
        if job == "compare":
            sys.exit(not compare(source, target, parts, pool))
        move = upload if target.store else download
        move(source, target, heads, parts, pool)


if __name__ == "__main__":
    main()

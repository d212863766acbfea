"""How fast and in how much memory a checkpoint of Orbax becomes a Hugging Face set, beside `cp` and decoding alone.

    python tests/bench/from_orbax.py                          # 10 GB, 5 rounds
    python tests/bench/from_orbax.py --only zstd,rules --size 2e9

The checkpoint is synthetic: a Llama as MaxText has it, random numbers in float32, each kernel cut over a mesh of 4 x 2.
Arms alternate, each in a process of its own, and the first round is thrown away. Medians are reported. Before each arm
the sources are evicted from the page cache, and the cache is filled with pages of another file: a virtual machine may
have to get free memory from its host, which takes longer than copying into it.

* `plain`: uncompressed chunks, each layer under a name of its own. `cp -r` of these files, followed by `sync -f`, is
  the peer of all arms.
* `zstd`: the same, compressed as Orbax does by default; `decode` decodes all chunks in two threads, and writes nothing.
* `rules`: uncompressed, all layers in one tensor along its second axis, to the names and shapes of Hugging Face.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from measure import RESHARD, measured, report
from orbax_files import Database, add_array, write_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN, INNER, VOCABULARY, HEADS, GROUPS, HEAD = 2048, 8192, 32000, 16, 8, 128
LAYER = {
    "self_attention.query.kernel": (HIDDEN, HEADS, HEAD), "self_attention.key.kernel": (HIDDEN, GROUPS, HEAD),
    "self_attention.value.kernel": (HIDDEN, GROUPS, HEAD), "self_attention.out.kernel": (HEADS, HEAD, HIDDEN),
    "mlp.wi_0.kernel": (HIDDEN, INNER), "mlp.wi_1.kernel": (HIDDEN, INNER), "mlp.wo.kernel": (INNER, HIDDEN),
    "pre_self_attention_layer_norm.scale": (HIDDEN,), "post_self_attention_layer_norm.scale": (HIDDEN,),
}  # fmt: skip
WHOLE = {
    "token_embedder.embedding": (VOCABULARY, HIDDEN), "decoder.logits_dense.kernel": (HIDDEN, VOCABULARY),
    "decoder.decoder_norm.scale": (HIDDEN,),
}  # fmt: skip
CONFIG = (
    f'{{"num_attention_heads": {HEADS}, "num_key_value_heads": {GROUPS}, "head_dim": {HEAD}, "hidden_size": {HIDDEN}}}'
)
DECODE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from numcodecs import zstd
from reshard.formats.zarr.files import StoreFiles
from reshard.formats.orbax.ocdbt import Database
from reshard.core.storage.places import as_place
place = as_place(sys.argv[1])
values = Database(place, StoreFiles(place)).values
def decode(value):
    with open(value.path, "rb", buffering=0) as file:
        file.seek(value.offset)
        zstd.decompress(file.read(value.nbytes))
with ThreadPoolExecutor(2) as pool:
    list(pool.map(decode, (value for value in values.values() if value.content is None)))
"""


def shapes(nbytes: float, *, scanned: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of arrays of about so many bytes."""
    yield from ((f"params.params.{name}", shape) for name, shape in WHOLE.items())
    layers = max(1, round((nbytes / 4 - sum(map(prod, WHOLE.values()))) / sum(map(prod, LAYER.values()))))
    for name, shape in LAYER.items():
        if scanned:
            yield f"params.params.decoder.layers.{name}", (shape[0], layers, *shape[1:])
        for number in () if scanned else range(layers):
            yield f"params.params.decoder.layers_{number}.{name}", shape


def write(root: Path, nbytes: float, *, scanned: bool, level: int | None) -> None:
    """Write a checkpoint."""
    random = np.random.default_rng(0).standard_normal(1 << 24, np.float32)
    store = Database(root, file_bytes=2 << 30)
    names = []
    for number, (name, shape) in enumerate(shapes(nbytes, scanned=scanned)):
        first, last = (4, 2) if len(shape) > 1 else (1, 1)
        chunk = (shape[0] // first, *shape[1:])
        chunk = (*chunk[:-1], chunk[-1] // last)
        array = np.broadcast_to(np.float32(0), shape)
        part = np.resize(np.roll(random, 7919 * number), chunk)
        add_array(store, name, array, chunk, level=level, contents=part)
        names.append(name.split("."))
    store.finish()
    write_tree(root, names)
    (root / "config.json").write_text(CONFIG)


def fill_cache(root: Path) -> None:
    """Evict all files below a directory from the page cache, and fill it with pages of a file without contents."""
    for path in filter(Path.is_file, root.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    filler = root / "filler"
    with filler.open("wb") as file:
        file.truncate(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with filler.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def main() -> None:
    """Run the arms and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=10e9, help="bytes of the checkpoint")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="plain,zstd,rules", help="arms, with commas between")
    parser.add_argument("--directory", type=Path, help="a directory on the disk to be measured")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        target = root / "target"
        commands: dict[str, list[str]] = {
            "cp": ["sh", "-c", f"cp -r {root / 'plain'} {target} && sync -f {target}"],
        }
        write(root / "plain", options.size, scanned=False, level=None)
        for arm in options.only.split(","):
            run = root / arm
            if arm != "plain":
                write(run, options.size, scanned=arm.startswith("rules"), level=1 if arm.endswith("zstd") else None)
            rules = ["--rules", "maxtext-hf"] if arm.startswith("rules") else []
            if arm == "zstd":
                commands["decode"] = [sys.executable, "-c", DECODE, str(run)]
            commands[arm] = [*RESHARD, "convert", str(run), str(target), "--to", "hf", *rules]
        results: dict[str, list[tuple[float, int]]] = {name: [] for name in commands}
        for number in range(options.runs + 1):
            for name, command in commands.items():
                os.sync()
                fill_cache(root)
                result = measured(*command)
                if result.code:
                    raise SystemExit(result.err)
                shutil.rmtree(target, ignore_errors=True)
                if number:
                    results[name].append((result.seconds, result.peak))
        report(results, "cp")
    finally:
        shutil.rmtree(root)
        subprocess.run(["sync"], check=True)


if __name__ == "__main__":
    main()

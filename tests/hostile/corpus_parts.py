"""Hostile sets and tensor-parallel parts of `torch.save`: names and sizes that lie, or take what they like."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from corpus_dcp import COMMANDS
from item import Item
from makers import tree
from saves_files import Made, tensor, write_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
W, NORM = tensor(ROWS), tensor(ROWS[0])
BIN = "pytorch_model-0000{}-of-00002.bin"
INDEX = "pytorch_model.bin.index.json"
SIZES = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}

parts = partial(Item, commands=COMMANDS, headroom=100_000_000, seconds=2, file="bad", code=4)

# fmt: off


def saved(state: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        write_save(path, state)

    return make


def a_set(weight_map: Any) -> Callable[[Path], None]:
    """A set of two files, each of a tensor, with an index."""
    index = json.dumps({"weight_map": weight_map}).encode()
    return tree({BIN.format(1): saved({"v": W}), BIN.format(2): saved({"w": W}), INDEX: index})


def llama(state: Any, params: Any = None, count: int = 1) -> Callable[[Path], None]:
    files: dict[str, bytes | Callable[[Path], None]] = {f"consolidated.{n:02d}.pth": saved(state) for n in range(count)}
    return tree(files | ({} if params is None else {"params.json": json.dumps(params).encode()}))


def megatron(model: Any, args: Any = (), **top: Any) -> Callable[[Path], None]:
    namespace = Made("Namespace", state=SIZES | dict(args), module="argparse")
    return tree({"mp_rank_00/model_optim_rng.pt": saved({"args": namespace, "model": model, **top})})


NAMES = [f"{'x.' * (n % 7)}{n}" for n in range(8_000)]

PARTS = [
    parts("a set with nothing wrong", a_set({"v": BIN.format(1), "w": BIN.format(2)}), "", code=0),
    parts("an index that leads out", a_set({"v": "../valid/file.ckpt", "w": BIN.format(2)}), "bad-name"),
    parts("an index with a name for a terminal", a_set({"v": "\x1b[2J\nerror: no", "w": BIN.format(2)}), "bad-name|not-found"),
    parts("an index of 50,000 files", a_set({str(n): f"{n}.bin" for n in range(50_000)}), "not-found"),
    parts("the number of files is 999,999,999", tree({"m-00001-of-999999999.bin": b""}), "missing-shards"),

    parts("a part with nothing wrong", llama({"tok_embeddings.weight": W, "norm.weight": NORM}), "", code=0),
    parts("the number of parts is 999,999,999", tree({"consolidated.999999999.pth": b""}), "missing-ranks"),
    parts("sizes that are deep", tree({"consolidated.00.pth": saved({"w": W}), "params.json": b"[" * 100_000}), "not-json"),
    parts("2**60 layers", llama({"tok_embeddings.weight": W, "layers.999999999.w": W}, {"n_layers": 1 << 60}), "missing-layers"),
    parts("sizes for a terminal", llama({"w": W}, {"dim": "\x1b[2J\nerror: no"}), "bad-value"),
    parts("8,000 embeddings", llama({f"{name}.tok_embeddings.weight": W for name in NAMES}, count=2), "no-tensors"),
    parts("8,000 layers, each of a model", llama({f"layers.{n}.tok_embeddings.weight": W for n in range(8_000)}), "", code=0),

    parts("a rank with nothing wrong", megatron({"w": W}), "", code=0),
    parts("2**60 parts", megatron({"w": W}, {"tensor_model_parallel_size": 1 << 60}), "missing-ranks"),
    parts("2**60 virtual stages", megatron({"w": W}, {"virtual_pipeline_model_parallel_size": 1 << 60}), "files-disagree"),
    parts("layer 999,999,999", megatron({"decoder.layers.999999999.w": W}), "missing-layers"),
    parts("8,000 stacks of layers", megatron({f"{name}.layers.0.w": W for name in NAMES}), "", code=0),
    parts("8,000 models", tree({"mp_rank_00/model_optim_rng.pt": saved({f"model{n}": {} for n in range(8_000)})}), "no-layout"),
    parts("a layer's name for a terminal", megatron({"\x1b[2J\nerror: no.layers.7.w": W}), "missing-layers"),
    parts("a key for a terminal", megatron({"w": W}, **{"\x1b[2J\nerror: no": 7}), "", code=0),
    parts("args that call", tree({"mp_rank_00/model_optim_rng.pt": saved({"args": Made("system", "touch called", module="os"), "model": {"w": W}})}), "no-layout"),
    parts("an iteration of 10**30", megatron({"w": W}, iteration=10**30), "", code=0),
    parts("300 ranks of names of their own", tree({f"mp_rank_{n:03d}/model_optim_rng.pt": saved({
        "args": Made("Namespace", state=SIZES | {"tensor_model_parallel_size": 300}, module="argparse"),
        "model": {f"{n}.{k}": NORM for k in range(20)}}) for n in range(300)}), "no-tensors"),
]

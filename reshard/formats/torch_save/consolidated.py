"""Open Meta's checkpoints of Llama: `consolidated.NN.pth`, one file of each tensor-parallel part.

The files do not say how tensors are cut; the table `cuts.LLAMA` does. Llama 1 and 2 cut the embedding along its second
axis, Llama 3 along the first: the shape of its parts shows which, as `norm.weight` has the size of the model. The sizes
in `params.json` are compared with the tensors. Without that file, the heads of a layer together are taken to be as
large as the model, which shows whether the last parts are missing, and the number of layers is unknown.

Sources: Meta's `llama/model.py` of Llama 1, 2 and 3, and their `params.json`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Literal

from reshard.core.storage.base import COPY_AGAIN
from reshard.core.storage.small import parse_json, read_small
from reshard.errors import SourceError
from reshard.formats.torch_save.names import CONSOLIDATED
from reshard.formats.torch_save.saves import File, read_files
from reshard.kits.parts.cuts import COLUMNS, LLAMA, ROWS, Cuts, rule_in
from reshard.kits.parts.joining import check_shapes, join, opened
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.storage.places import Place
    from reshard.formats.torch_save.saves import Contents
    from reshard.kits.torch.file import FileTensor

_EMBEDDING, _NORM = "tok_embeddings.weight", "norm.weight"
_PARAMS = "params.json"
_LARGEST_PARAMS = 1 << 20
_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size")
_OF_LAYER = re.compile(r"layers\.(0|[1-9]\d{0,8})\.")


def open_consolidated(
    directory: Place,
    listing: Sequence[str],
    *,
    contents: bool | Literal["blocks"] = True,
    rules: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open the files of all parts.

    Args:
        directory: the directory.
        listing: the names of the files in it.
        contents: compare samples of replicas.
        rules: the user's rules, in place of the table.

    Raises:
        SourceError: a part has no file, a file is not valid, sizes disagree, or replicas differ.
        StrategyError: a rule does not fit.
    """
    names = _file_names(directory, listing)
    files = read_files([File(directory / name, part, "") for part, name in enumerate(names)], len(names))
    sizes = _sizes(directory / _PARAMS) if _PARAMS in listing else {}
    parts, unreadable = _parts(files)
    cuts = Cuts(lambda name: _rule(name, parts, len(files), sizes), rules, [*parts, *unreadable])
    joined = join({name: [of_name] for name, of_name in parts.items()}, len(files), cuts.of)
    prefix = next((name.removesuffix(_EMBEDDING) for name in parts if f".{name}".endswith(f".{_EMBEDDING}")), "")
    _check_layers(directory, [*parts, *unreadable], prefix, sizes)
    by_table = {name: tensor for name, tensor in joined.tensors.items() if not cuts.is_ruled(name)}
    _check_sizes(directory, by_table, prefix, sizes)
    joined.unreadable.update(unreadable)
    return opened(
        directory, [read.file for read in files], joined,
        objects={name: kind for read in files for name, kind in read.objects.items()}, rules=rules, contents=contents,
    )  # fmt: skip


def open_only(location: Place, *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open the only file of a model; refuse it if its shapes show that there were others. Arguments as above."""
    directory = location.absolute().parent
    checkpoint = open_consolidated(directory, [location.name, *directory.existing([_PARAMS])], contents=contents)
    return replace(checkpoint, root=str(location))


def _file_names(directory: Place, listing: Sequence[str]) -> list[str]:
    """Return the names of the files in the order of the parts; refuse a missing part."""
    by_part: dict[int, str] = {}
    for match in filter(None, map(CONSOLIDATED.files.fullmatch, sorted(listing))):
        part = int(match["part"])
        if part in by_part:
            raise SourceError(f"{directory} has {by_part[part]} and {match[0]}", code="duplicate-rank")
        by_part[part] = match[0]
    if missing := list(islice((part for part in range(max(by_part)) if part not in by_part), 64)):
        raise SourceError(f"{directory} has no file of {ranks_text(missing)}", code="missing-ranks", hint=COPY_AGAIN)
    return [by_part[part] for part in range(len(by_part))]


def _sizes(path: Place) -> dict[str, int]:
    """Return the known sizes in `params.json`; those below 1 count as unknown."""
    raw = read_small(path, "file of sizes", _LARGEST_PARAMS, SourceError)
    try:
        content = parse_json(raw, [])
    except ValueError as error:
        raise SourceError(f"{path} is not JSON", code="not-json", facts=[str(error)]) from None
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    values = {key: content.get(key) for key in _SIZES} if isinstance(content, dict) else {"": content}
    for key, value in values.items():
        if value is not None and (type(value) is not int or abs(value) >= 1 << 63):
            raise SourceError(f"{path}: {key} is {value!r:.60}; expected a number", code="bad-value")
    return {key: value for key, value in values.items() if value is not None and value > 0}


def _parts(files: Sequence[Contents]) -> tuple[dict[str, dict[int, FileTensor]], dict[str, str]]:
    """Return the parts of each tensor, and the reasons why others cannot be read."""
    unreadable: dict[str, str] = {}
    parts: dict[str, dict[int, FileTensor]] = {}
    for number, read in enumerate(files):
        tensors, refused = read.parts(number)
        unreadable = refused | unreadable
        for name, tensor in tensors.items():
            parts.setdefault(name, {})[number] = tensor
    return {name: of_name for name, of_name in parts.items() if name not in unreadable}, unreadable


def _rule(name: str, parts: Mapping[str, Mapping[int, FileTensor]], count: int, sizes: Mapping[str, int]) -> str | None:
    """Return the rule of a tensor by the table, or of an embedding by its shape."""
    before = name.removesuffix(_EMBEDDING)
    if before == name:
        return rule_in(LLAMA, name)
    embedding, norm = (parts.get(each, {}).get(0) for each in (name, before + _NORM))
    dim = norm.shape[0] if norm and norm.shape else sizes.get("dim")
    if embedding is None or len(embedding.shape) != 2 or dim is None:
        return None
    columns = embedding.shape[1]
    return COLUMNS if columns == dim else ROWS if columns * count == dim else None


def _check_layers(directory: Place, names: Iterable[str], prefix: str, sizes: Mapping[str, int]) -> None:
    """Compare the numbers of layers with `params.json`."""
    layers = {
        int(match[1]) for name in names if name.startswith(prefix) if (match := _OF_LAYER.match(name, len(prefix)))
    }
    count = sizes.get("n_layers", len(layers))
    if len(layers) != count or max(layers, default=-1) != count - 1:
        raise SourceError(
            f"{directory} has {len(layers)} layers, and n_layers in {_PARAMS} is {count}", code="missing-layers"
        )


def _check_sizes(directory: Place, tensors: Mapping[str, Tensor], prefix: str, sizes: Mapping[str, int]) -> None:
    """Compare the tensors of a model, whose names begin with `prefix`, with the sizes, which shows missing parts."""
    dim = sizes.get("dim") or _extent(tensors, prefix + _NORM)
    heads, vocabulary = sizes.get("n_heads"), sizes.get("vocab_size")
    width = sizes.get("head_dim") or (dim // heads if dim and heads else None)
    key_heads = sizes.get("n_kv_heads") or heads
    queries = heads * width if heads and width else dim
    keys = key_heads * width if key_heads and width else None
    shapes = {
        _EMBEDDING: (vocabulary, dim), "output.weight": (vocabulary, dim), _NORM: (dim,),
        "attention.wq.weight": (queries, dim), "attention.wk.weight": (keys, dim), "attention.wv.weight": (keys, dim),
        "attention.wo.weight": (dim, queries), "feed_forward.w1.weight": (None, dim),
        "feed_forward.w2.weight": (dim, None), "feed_forward.w3.weight": (None, dim),
    }  # fmt: skip
    expected: dict[str, tuple[int | None, ...]] = {}
    for name in tensors:
        match = _OF_LAYER.match(name, len(prefix)) if name.startswith(prefix) else None
        if shape := shapes.get(name[match.end() :] if match else name.removeprefix(prefix)):
            expected[name] = shape
    check_shapes(directory, tensors, expected, _PARAMS if sizes else prefix + _NORM)


def _extent(tensors: Mapping[str, Tensor], name: str) -> int | None:
    """Return the first extent of a tensor, or None."""
    shape = tensors[name].spec.shape if name in tensors else ()
    return shape[0] if shape else None

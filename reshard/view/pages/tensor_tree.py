"""A checkpoint's tensors as HTML: a tree by the parts of their names, with the cut of each, and a bar of the dtypes."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.errors import bytes_text
from reshard.strategy.names import group_members
from reshard.view import words
from reshard.view.pictures.pens import tensor_picture
from reshard.view.pictures.thumbnails import Thumbnails
from reshard.view.sections import MOST_ROWS, note, searched
from reshard.view.svg import Markup, colour, join, tag
from reshard.view.text import count_text

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from reshard.core.model.checkpoint import Checkpoint, Tensor

_CODE = (".picture(NAME)", ".hist(NAME)", "[NAME]")
"""What to type about a tensor: a page is made of headers alone, and has no values."""

_PARTS = re.compile(r"\.(?![^{}]*\})")  # dots outside braces: `{0,2,4,...}` has dots, too


def dtypes_bar(checkpoint: Checkpoint) -> Markup:
    """Show the shares of dtypes in the bytes, as a bar with a legend."""
    nbytes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        nbytes[tensor.spec.dtype.name] += tensor.spec.nbytes
        counts[tensor.spec.dtype.name] += 1
    total = sum(nbytes.values()) or 1
    bar, legend = [], []
    for number, (name, size) in enumerate(nbytes.most_common()):
        fill = colour(number, len(nbytes))
        text = tag("span", f"{count_text(counts[name], 'tensor')}, {bytes_text(size)}", class_="more")
        bar.append(tag("span", style=f"background:{fill};width:{100 * size / total:.3f}%"))
        legend.append(tag("span", tag("i", style=f"background:{fill}"), f"{name} ", text))
    return join([tag("div", *bar, class_="bar"), tag("div", *legend, class_="legend")])


@dataclass(slots=True)
class _Branch:
    """A node of the tree of names, with its child nodes and its tensors."""

    below: dict[str, _Branch] = field(default_factory=dict)
    tensors: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0


def tree(checkpoint: Checkpoint) -> Markup:
    """Show the tensors as a tree of the parts of their names, repeated layers folded."""
    rows = group_members((name, _row_key(checkpoint, tensor)) for name, tensor in checkpoint.tensors.items())
    root = _Branch()
    for name, _, members in rows[:MOST_ROWS]:
        tensors = [checkpoint.tensors[member] for member in members]
        *parents, last = _PARTS.split(name)
        branch = root
        for part in parents:
            branch = branch.below.setdefault(part, _Branch())
            branch.count += len(tensors)
            branch.nbytes += sum(tensor.spec.nbytes for tensor in tensors)
        branch.tensors.append((last, tensors))
    thumbnails = Thumbnails()
    lines = _branch(checkpoint, root, 0, thumbnails, opened=len(rows) <= 40)
    titles = [("name", "name"), ("dtype", ""), ("shape", ""), ("bytes", "size"), ("layout", "")]
    head = tag("div", *(tag("span", title, class_=kind) for title, kind in titles), class_="row top")
    shown = [tag("div", head, *lines, class_="tree")]
    if rest := sum(len(members) for _, _, members in rows[MOST_ROWS:]):
        shown.append(
            note(f"and {count_text(rest, 'more tensor')}: look at some with .sel(glob), or at .groups('prefix')")
        )
    found = searched(shown, [title for title, _ in titles], _single_rows(checkpoint, rows, thumbnails), code=_CODE)
    return join([thumbnails.symbols(), found])


def _single_rows(
    checkpoint: Checkpoint, rows: Sequence[tuple[str, Hashable, Sequence[str]]], thumbnails: Thumbnails
) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each tensor, with its picture; those of a folded row have most of them in common."""
    for _, _, members in rows:
        tensor = checkpoint.tensors[members[0]]
        shape = words.extents_text(tensor) if tensor.text is None else "text"
        cells = tensor.spec.dtype.name, shape, bytes_text(tensor.spec.nbytes), words.cut_words(checkpoint, tensor)
        for member in members:
            picture = _picture(checkpoint, checkpoint.tensors[member], thumbnails)
            yield (member, *cells, " ".join(f"{part}" for part in picture))


def _picture(checkpoint: Checkpoint, tensor: Tensor, thumbnails: Thumbnails) -> tuple[str, float, float]:
    """Return the id, width and height of the picture of a tensor; "" if there is nothing to draw, or no room."""
    if not _is_cut(checkpoint, tensor):
        return "", 0.0, 0.0
    layouts = tuple(words.layouts_of(checkpoint, tensor))
    key = tensor.spec.shape, tensor.sharding, layouts, words.is_computed(checkpoint, tensor)
    return thumbnails.picture(key, lambda: tensor_picture(checkpoint, tensor))


def _branch(
    checkpoint: Checkpoint, branch: _Branch, depth: int, thumbnails: Thumbnails, *, opened: bool
) -> list[Markup]:
    """Return the lines below a branch; a part with a single child shares its line."""
    lines = []
    for first, child in branch.below.items():
        name, node = first, child
        while len(node.below) == 1 and not node.tensors:
            ((part, node),) = node.below.items()
            name += f".{part}"
        if not node.below and len(node.tensors) == 1:
            ((part, tensors),) = node.tensors
            lines.append(_leaf(checkpoint, f"{name}.{part}", tensors, depth, thumbnails))
            continue
        summary = tag(
            "summary",
            tag("span", name, tag("span", f"  {count_text(node.count, 'tensor')}", class_="count"), class_="name"),
            tag("span"), tag("span"),
            tag("span", bytes_text(node.nbytes), class_="size"),
            class_="row", style=f"--depth:{depth}",
        )  # fmt: skip
        inside = _branch(checkpoint, node, depth + 1, thumbnails, opened=opened)
        attributes = {"open": "open"} if opened or (depth == 0 and len(branch.below) <= 4) else {}
        lines.append(tag("details", summary, *inside, class_="branch", **attributes))
    return lines + [_leaf(checkpoint, name, tensors, depth, thumbnails) for name, tensors in branch.tensors]


def _row_key(checkpoint: Checkpoint, tensor: Tensor) -> Hashable:
    """Return the properties that tensors of one row share; their stages may differ."""
    layouts = tuple(layout for _, layout in words.layouts_of(checkpoint, tensor))
    return (
        tensor.spec.dtype,
        tensor.spec.shape,
        tensor.text is None,
        layouts,
        words.shard_counts(tensor.sharding),
        words.is_computed(checkpoint, tensor),
    )


def _is_cut(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Return whether there is anything to draw: blocks, or copies on several ranks."""
    return words.cut_words(checkpoint, tensor) != "whole" or len(set(checkpoint.ranks)) > 1


def _leaf(checkpoint: Checkpoint, name: str, tensors: Sequence[Tensor], depth: int, thumbnails: Thumbnails) -> Markup:
    tensor, count = tensors[0], len(tensors)
    cut = words.cut_words(checkpoint, tensor)
    counts = f"{' x '.join(words.shard_counts(tensor.sharding))} blocks x copies in the files"
    rule = "; ".join(filter(None, [words.layouts_text(checkpoint, tensors), counts]))
    drawn = thumbnails.of_tensor(checkpoint, tensor, cut) if _is_cut(checkpoint, tensor) else ""
    shape = words.extents_text(tensor) if tensor.text is None else "text"
    times = [tag("span", f"  x {count:,}", class_="count")] if count > 1 else []
    row = tag(
        "summary",
        tag("span", name, *times, class_="name", title=tensor.spec.name),
        tag("span", tensor.spec.dtype.name),
        tag("span", shape, title=shape),
        tag("span", bytes_text(tensor.spec.nbytes * count), class_="size"),
        tag("span", drawn, tag("span", cut), class_="layout", title=rule),
        class_="row leaf", style=f"--depth:{depth}",
    )  # fmt: skip
    picture, width, height = _picture(checkpoint, tensor, thumbnails)
    enlarged = [tag("svg", tag("use", href=f"#{picture}"), width=width, height=height)] if picture else []
    code = (tag("code", text.replace("NAME", json.dumps(tensor.spec.name, ensure_ascii=False))) for text in _CODE)
    return tag("details", row, tag("div", *enlarged, *code, class_="detail"))

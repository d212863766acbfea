"""A checkpoint as a page: its sizes, a table of its tensors with the cut of each, its files and its problems."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reshard.errors import bytes_text
from reshard.strategy.names import group_members
from reshard.view import words
from reshard.view.pictures.pens import tensor_picture
from reshard.view.pictures.thumbnails import Thumbnails
from reshard.view.sections import MOST_ROWS, Facts, Reasons, Table, page, warnings_of
from reshard.view.svg import ranks_range, tag
from reshard.view.tables import checkpoint_text, group_rows, objects_of, totals_table, troubles

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.view.sections import Section
    from reshard.view.tables import Groups

_TYPED = (".picture(NAME)", ".hist(NAME)", "[NAME]")
"""What to type about a tensor: a page is made of headers alone, and has no values."""


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """Show a checkpoint."""
    files, left_out = checkpoint.stored_files, len(checkpoint.left_out)
    formats = ", ".join(sorted({file.index.format for _, file in files}))
    rows = [
        (f"{rank}", file.path, file.index.format, f"{len(file.index.entries):,}", bytes_text(file.nbytes))
        for rank, file in files
    ]
    facts, objects = described = objects_of(checkpoint)
    sections: list[Section] = [
        Facts([
            ("tensors", f"{len(checkpoint.tensors):,}", f"{left_out:,} left out" if left_out else ""),
            ("whole tensors", bytes_text(checkpoint.nbytes), "replicas once"),
            ("files", f"{len(files):,}", f"{formats}, {bytes_text(sum(file.nbytes for _, file in files))}"),
            _ranks_fact(checkpoint),
            _stages_fact(checkpoint),
        ]),
        totals_table(checkpoint),
        _tensors(checkpoint),
        Table("Files", ("rank", "file", "format", "tensors", "bytes"), rows, "file", wrap="file"),
        Reasons("Training", {word: str(fact) for word, fact in facts.items()}, ("name", "value"), "value"),
        *troubles(checkpoint, objects),
        *warnings_of(checkpoint),
    ]  # fmt: skip
    return page(("Checkpoint", checkpoint.title), sections, checkpoint_text(checkpoint, described=described))


def groups_html(groups: Groups) -> str:
    """Show sizes, counts and dtypes by group."""
    table = Table("", ("group", "tensors", "bytes", "dtype"), group_rows(groups), "group", most=MOST_ROWS)
    title = "Groups", groups.checkpoint.title, f"by {groups.by}", bytes_text(sum(groups.sizes.values()))
    return page(title, [table], str(groups))


def _ranks_fact(checkpoint: Checkpoint) -> tuple[str, str, str]:
    """Return the ranks of the files, or the devices of the training if its files are of no rank."""
    arrangement, ranks = checkpoint.extras.arrangement, sorted(set(checkpoint.ranks))
    if arrangement and ranks == [0] and len(arrangement.ranks) > 1:
        return "devices", f"{len(arrangement.ranks):,}", "of the training; files are of no rank"
    if checkpoint.opening.computation:
        return "ranks", "none", "computed"
    return "ranks", f"{len(ranks):,}", ranks_range(ranks)


def _stages_fact(checkpoint: Checkpoint) -> tuple[str, str, str]:
    if checkpoint.strategy:
        return "stages", f"{len(checkpoint.strategy.stages)}", ""
    return "stages", "1", "layouts of its own" if checkpoint.extras.has_layouts else "no strategy"


# --- tensors ----------------------------------------------------------------------------------------------------


def _tensors(checkpoint: Checkpoint) -> Table:
    """Return a table of the tensors, repeated layers folded; a row opens the picture of its first tensor."""
    folded = group_members((name, _key(checkpoint, tensor)) for name, tensor in checkpoint.tensors.items())
    thumbnails = Thumbnails()
    rows = [
        _row(checkpoint, name, [checkpoint.tensors[member] for member in members], thumbnails)
        for name, _, members in folded[:MOST_ROWS]
    ]
    single = [
        (member, *_cells(checkpoint.tensors[member]), words.cut_words(checkpoint, checkpoint.tensors[member]),
         " ".join(f"{part}" for part in _picture(checkpoint, checkpoint.tensors[member], thumbnails)))
        for _, _, members in folded
        for member in members
    ]  # fmt: skip
    return Table(
        "Tensors", ("tensor", "count", "dtype", "shape", "bytes", "layout"), rows + [()] * (len(folded) - len(rows)),
        most=MOST_ROWS, more=f"{len(checkpoint.tensors):,}", opened=True, beside=thumbnails.symbols(),
        found=(("tensor", "dtype", "shape", "bytes", "layout"), single), typed=_TYPED,
    )  # fmt: skip


def _key(checkpoint: Checkpoint, tensor: Tensor) -> Hashable:
    """Return the properties that tensors of one row share; their stages may differ."""
    layouts = tuple(layout for _, layout in words.layouts_of(checkpoint, tensor))
    counts, is_computed = words.shard_counts(tensor.sharding), words.is_computed(checkpoint, tensor)
    return tensor.spec.dtype, tensor.spec.shape, tensor.text is None, layouts, counts, is_computed


def _cells(tensor: Tensor, count: int = 1) -> tuple[str, str, str]:
    """Return the dtype and shape of a tensor, and the size of all of its row."""
    shape = words.extents_text(tensor) if tensor.text is None else "text"
    return tensor.spec.dtype.name, shape, bytes_text(tensor.spec.nbytes * count)


def _row(checkpoint: Checkpoint, name: str, tensors: Sequence[Tensor], thumbnails: Thumbnails) -> Sequence[str]:
    tensor, cut = tensors[0], words.cut_words(checkpoint, tensors[0])
    counts = f"{' x '.join(words.shard_counts(tensor.sharding))} blocks x copies in the files"
    rule = "; ".join(filter(None, [words.layouts_text(checkpoint, tensors), counts]))
    drawn = thumbnails.of_tensor(checkpoint, tensor, cut) if _is_cut(checkpoint, tensor) else ""
    picture, width, height = _picture(checkpoint, tensor, thumbnails)
    enlarged = [tag("svg", tag("use", href=f"#{picture}"), width=width, height=height)] if picture else []
    code = (tag("code", text.replace("NAME", json.dumps(tensor.spec.name, ensure_ascii=False))) for text in _TYPED)
    opened = tag("details", tag("summary", name), tag("div", *enlarged, *code, class_="detail"))
    layout = tag("span", drawn, tag("span", cut), class_="layout", title=rule)
    return opened, f"{len(tensors):,}", *_cells(tensor, len(tensors)), layout


def _picture(checkpoint: Checkpoint, tensor: Tensor, thumbnails: Thumbnails) -> tuple[str, float, float]:
    """Return the id, width and height of the picture of a tensor; "" if there is nothing to draw, or no room."""
    if not _is_cut(checkpoint, tensor):
        return "", 0.0, 0.0
    layouts = tuple(words.layouts_of(checkpoint, tensor))
    key = tensor.spec.shape, tensor.sharding, layouts, words.is_computed(checkpoint, tensor)
    return thumbnails.picture(key, lambda: tensor_picture(checkpoint, tensor))


def _is_cut(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Return whether there is anything to draw: blocks, or copies on several ranks."""
    return words.cut_words(checkpoint, tensor) != "whole" or len(set(checkpoint.ranks)) > 1

"""Showing layouts, strategies, checkpoints, plans and reports: words, data for `--json`, HTML and pictures.

Pure functions: they open no file and print nothing. Names come from files that nobody vouches for: in words each goes
through `printable`, in HTML and SVG through `markup.tag` too.

1. `folding`, `words`: pieces of text; by subject `strategies`, `checkpoints`, `plans`, which the command line prints.
2. `markup`, `picture`: pieces of HTML and SVG; `blocks` draws which rank holds which block, `flow` what a plan moves.
3. `notebook` puts both together for the `_repr_html_` of each type; it is imported where that is asked for.
"""

from reshard.show.checkpoints import (
    checkpoint_data,
    checkpoint_text,
    files_text,
    looked_text,
    rank_files_data,
    rank_files_text,
)
from reshard.show.folding import fold, ranges_text
from reshard.show.plans import plan_data, plan_text
from reshard.show.strategies import LEGEND, layout_data, layout_text, strategy_data, strategy_text
from reshard.show.words import bytes_text, count_text, list_text, printable

__all__ = [
    "LEGEND",
    "bytes_text",
    "checkpoint_data",
    "checkpoint_text",
    "count_text",
    "files_text",
    "fold",
    "layout_data",
    "layout_text",
    "list_text",
    "looked_text",
    "plan_data",
    "plan_text",
    "printable",
    "ranges_text",
    "rank_files_data",
    "rank_files_text",
    "strategy_data",
    "strategy_text",
]

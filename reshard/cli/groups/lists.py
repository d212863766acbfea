"""`reshard runs` and `reshard formats`: list the checkpoints below a directory, and the formats."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from reshard.cli.commands import Command, option
from reshard.cli.options import json_option
from reshard.cli.terminal import print_json, print_text, say_warnings, width
from reshard.cli.values import READ_PLACE

if TYPE_CHECKING:
    from reshard.core.storage.places import Place


@click.command(
    cls=Command,
    epilog="""
Examples:

  reshard runs output
  reshard runs s3://bucket/run --json
  reshard convert "$(reshard runs output --newest)" weights --to hf
""",
    details="""
A checkpoint is unknown if names and headers cannot tell whether it is complete,
as of rank files without a strategy file next to them. Values are not read.

Within a directory, the newest is the one of the highest step; among several
directories, the one whose files changed last.

The object of --json has the keys source, newest (the path of the newest
complete one, or null), and checkpoints: path, step (a text, or empty), format,
ranks (how many, or null), files (how many), nbytes, modified (seconds since
1970, 0 if unknown), state (complete, incomplete, unknown), reason (why it is
not complete), newest, last (whether the run names it as its last), and hint
(the command that resumes an unfinished target, or empty). With --newest it has
source and newest alone; newer ones that are unknown are named in a warning.
""",
    short_help="List the checkpoints below a directory, and which are complete.",
)
@click.argument("source", metavar="DIR", type=READ_PLACE)
@option(
    "--newest",
    under="Output",
    in_short_help=True,
    is_flag=True,
    help="Print only the path of the newest complete checkpoint. Exit with 4 if there is none.",
)
@json_option
def runs(source: Place, newest: bool, as_json: bool) -> None:
    """List the checkpoints below the directory DIR, of any format, with their sizes, ages and states.

    Only names, sizes and headers are read, at an object store with one listing. The newest complete one is marked.
    """
    from reshard.core.catalog import newest_complete, stored_checkpoints
    from reshard.view.pages.runs_view import Runs, runs_data, runs_text

    if newest:
        record, doubtful = newest_complete(source)
        say_warnings([f"{each.path} is newer, and it is unknown whether it is complete" for each in doubtful])
        path = f"./{record.path}" if record.path.startswith("-") else record.path  # no option of the next command
        if as_json:
            print_json({"source": str(source), "newest": path})
        elif sys.stdout.isatty():
            print_text(path)
        else:
            click.echo(os.fsencode(path))  # nothing is escaped, so that a script can open it
        return
    listed = Runs(str(source), stored_checkpoints(source))
    if as_json:
        newest_path = listed.newest.path if listed.newest else None
        print_json({"source": listed.root, "newest": newest_path, "checkpoints": runs_data(listed)})
    else:
        print_text(runs_text(listed, width=width()))


@click.command(
    cls=Command,
    epilog="""
Examples:

  reshard formats
  reshard formats hf
""",
    details="""
A package adds a format by the entry point group reshard.formats.

The object of --json has the key formats: name (the word of --to), title, about
(what it is), read and write (true or false), package (that it comes from; empty for those of
reshard), options (of --to: name, help, default), and needs (why it cannot be
loaded, or empty).
""",
    short_help="List the formats: which are read, which are written, with which options.",
)
@click.argument("name", required=False)
@json_option
def formats(name: str | None, as_json: bool) -> None:
    """List the formats; or with NAME the options of one."""
    from reshard.view.formats import formats_data, formats_text, options_text

    if as_json:
        chosen = [row for row in formats_data() if name in {None, row["name"]}]
        print_json({"formats": chosen})
    elif name is None:
        print_text(formats_text(width=width()))
    else:
        print_text(options_text(name, width=width()))

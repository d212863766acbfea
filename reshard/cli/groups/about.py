"""`reshard help`, `completion` and `version`: about the program itself."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import get_completion_class

import reshard
from reshard.cli.commands import Command, option
from reshard.cli.terminal import paint, print_text, wrapped, wrapped_page
from reshard.errors import UsageError, printable
from reshard.spelling import nearest
from reshard.view.progress import columns_of

DOCS = (Path(reshard.__file__).with_name("docs"), Path(reshard.__file__).parents[1] / "docs")
"""The directories that may have the pages: of an installation, and of a clone of the repository."""

_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*(?:; *extra == '(.*)')?")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


class Page(NamedTuple):
    """A page of the documentation: the topic to type, its title and its file."""

    topic: str
    title: str
    path: Path


def pages() -> dict[str, Page]:
    """Return the pages by their topics, the guides first.

    A topic is the name of a file. If a guide and a page of the reference have the same name, the topic of the latter
    begins with its folder.
    """
    result: dict[str, Page] = {}
    root = next((directory for directory in DOCS if directory.is_dir()), None)
    if root is not None:
        for folder in (root / "guides", root / "reference", root):
            for path in sorted(folder.glob("*.md")):
                if path.stem != "README":
                    topic = f"{folder.name}/{path.stem}" if path.stem in result else path.stem
                    heading = _HEADING.search(path.read_text(encoding="utf-8"))
                    result[topic] = Page(topic, heading[1] if heading else path.stem, path)
    return result


@click.command(
    "help",
    cls=Command,
    epilog="""
Examples:

  reshard help
  reshard help layouts
  reshard help convert
""",
    short_help="Show a guide, a page of the reference, or a command.",
)
@click.argument("topic", required=False)
@click.pass_context
def help_command(ctx: click.Context, topic: str | None) -> None:
    """Show the guide, the page of the reference or the command TOPIC; without TOPIC, list the pages."""
    topics = pages()
    if topic is None:
        width = max(map(len, topics), default=0)
        columns = columns_of(sys.stdout)
        for page in topics.values():
            print_text(wrapped(f"{page.topic:<{width}}  {page.title}", columns, width + 2))
        print_text("\nreshard help NAME prints one.")
        return
    if topic in topics:
        text = _COMMENT.sub("", topics[topic].path.read_text(encoding="utf-8"))
        text = wrapped_page(text, columns_of(sys.stdout))
        text = _HEADING.sub(lambda heading: paint(heading[0], bold=True), printable(text, keep="\n").rstrip())
        (click.echo_via_pager if sys.stdout.isatty() else click.echo)(text)
        return
    group = ctx.parent.command if ctx.parent else None
    command = group.get_command(ctx, topic) if isinstance(group, click.Group) else None
    if command is not None:
        with command.context_class(command, info_name=topic, parent=ctx.parent) as of_command:
            click.echo(command.get_help(of_command), color=ctx.color)
        return
    near = nearest(topic, topics)
    raise UsageError(
        f"no page is called {topic!r}", code="no-such-topic",
        hint=f"reshard help {near[0]}" if near else "`reshard help` lists the pages",
    )  # fmt: skip


@click.command(
    cls=Command,
    epilog="""
Examples:

  eval "$(reshard completion bash)"                in ~/.bashrc
  eval "$(reshard completion zsh)"                 in ~/.zshrc
  reshard completion fish > ~/.config/fish/completions/reshard.fish
""",
    short_help="Print the script that completes commands with Tab.",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and paths with Tab in SHELL."""
    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"no completion is known for {shell}", code="unknown-shell")
    click.echo(kind(ctx.find_root().command, {}, "reshard", "_RESHARD_COMPLETE").source())


@click.command(cls=Command, short_help="Show the version.")
@option(
    "-v",
    "--verbose",
    under="Output",
    in_short_help=True,
    is_flag=True,
    help="Of Python and the libraries too, for bug reports.",
)
def version(verbose: bool) -> None:
    """Show the version."""
    print_versions(verbose=verbose)


def print_versions(*, verbose: bool) -> None:
    """Print the version; if verbose, also of Python and of each installed dependency."""
    click.echo(f"reshard, version {reshard.__version__}")
    if not verbose:
        return
    import platform
    from importlib.metadata import PackageNotFoundError, requires
    from importlib.metadata import version as version_of

    click.echo(f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}")
    matches = (_REQUIREMENT.match(each.replace('"', "'")) for each in requires("reshard") or ())
    needed = {each[1] for each in matches if each and each[2] not in {"test", "docs"}}
    for name in sorted({*needed, "distributed"}, key=str.lower):
        with suppress(PackageNotFoundError):
            click.echo(f"{name} {version_of(name)}")

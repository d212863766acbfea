"""What stands between a command and the terminal: errors, signals, talk and progress.

Texts of the core get the words of the command line here (`OPTIONS`), and nowhere else. So does every error become one
sentence and an exit code: 0 done, 1 failure, 2 usage, 3 verify mismatch,
4 source or strategy incomplete or corrupt, 5 memory or disk, 6 target exists or source changed, 130 interrupted,
143 terminated.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import click

from reshard.cli import stop as stop_at_once
from reshard.errors import BudgetError, ReshardError, Text, joined, spelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from reshard.errors import Words


INPUTS, STRATEGIES, OUTPUTS = "reshard.inputs", "reshard.strategies", "reshard.outputs"
"""Where click's context keeps the paths that a command was given: what it reads, and the files that it writes."""

WARNINGS, KEY_FILES = "reshard.warnings", "reshard.key_files"
"""Where it keeps what is to be said of a command's options before it runs, and the key files that were typed."""

_KEY, _TARGET_KEY = "--key-file or RESHARD_KEY", "--target-key-file or RESHARD_TARGET_KEY"

OPTIONS: Words = {
    "allow_missing": ("--allow-missing '{}'",),
    "client": ("--cluster",),
    "deduplicated": ("--deduplicated",),
    "drop": ("--drop '{}'",),
    "exclude": ("--exclude", "--exclude {}"),
    "include": ("--include", "--include {}"),
    "iteration": ("--iteration", "--iteration {}"),
    "key": (_KEY, "--key-file FILE"),
    "layout": ("--layout '{}={}'",),
    "memory": ("--memory", "--memory {1}"),
    "name_map": ("--name-map",),
    "overwrite": ("--overwrite",),
    "partial": ("--partial",),
    "rank_pattern": ("--rank-pattern",),
    "restart": ("--restart",),
    "seed": ("--seed {}",),
    "source": ("--source DIRECTORY",),
    "source_key": (_KEY, "--key-file FILE"),
    "source_strategy": ("--source-strategy",),
    "stage": ("--stage {}",),
    "strategy": ("--source-strategy",),
    "suffix": ("--suffix", "--suffix {}"),
    "target_cipher": (_TARGET_KEY, "--target-key-file FILE"),
    "target_key": (_TARGET_KEY, "--target-key-file FILE"),
    "target_iteration": ("--target-iteration", "--target-iteration {}"),
    "target_layout": ("--target-layout '{}={}'",),
    "target_partial": ("--target-partial",),
    "target_rank_pattern": ("--target-rank-pattern",),
    "target_stage": ("--target-stage {}",),
    "target_strategy": ("--target-strategy",),
    "target_suffix": ("--target-suffix", "--target-suffix {}"),
    "weights_only": ("--weights-only",),
}
"""How the command line writes the options that texts refer to."""

Heading = Literal["Source", "Target", "Tensors", "Running", "Output"]
"""What the options of a command are about; its help has them in this order."""

_MORE = re.compile(r"(?<=\.) (?=[A-Z]).*?(?=  \[|$)")
"""What follows the first sentence about an option, up to its default."""

_WIDE = 28  # columns for the names of options; longer ones have a line of their own
_ADVICE = {
    "check compare diff": "`reshard verify TARGET --against SOURCE` compares checkpoints, `reshard strategy diff` "
    "strategies",
    "combine gather join merge": "`reshard unify` merges shards into whole tensors, `reshard strategy merge` the "
    "strategy files of a pipeline",
    "continue resume": "type the same command again; it resumes what was begun",
    "dtype": "--cast float32=bfloat16 converts one dtype to another",
    "help": "`reshard --help` lists the commands, `reshard COMMAND --help` the options of one",
    "info list ls show": "`reshard inspect` shows a checkpoint, `reshard strategy show` a strategy",
    "make": "`reshard strategy make` makes a strategy file",
    "reshard shard split": "`reshard transform` with --target-strategy cuts tensors",
}
_ADVICE_ON = {word: advice for words, advice in _ADVICE.items() for word in words.split()}
"""What to type for commands and options of other tools."""

_DESTRUCTIVE = frozenset({"--overwrite", "--restart"})  # not proposed to who typed something else
_COLORS = {"auto": None, "always": True, "never": False}
_ALL = "reshard.all"
_DEBUG = "reshard.debug"
_WROTE = "reshard.wrote"
_EXAMPLE = re.compile(r"^Examples?:$", re.MULTILINE)
_NUMBER = re.compile(r"[0-9]+")
_LABEL = re.compile(r"(error|warning):")
_LONGEST_LINE = 8000  # a name may have 4,096 characters, and a message a few of them


# --- the border: errors and signals -----------------------------------------------------------------------------


class _Stopped(KeyboardInterrupt):
    """A signal asked to stop. Raised in the main thread, so that `run` cleans up as after any failure."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def _stopping() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `_Stopped`; whoever ignores one (nohup) continues to."""
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    stopped: list[_Stopped] = []

    def stop(signum: int, _frame: FrameType | None) -> NoReturn:
        for number in before:  # a second one must disturb neither the cleaning up nor the exit code
            signal.signal(number, signal.SIG_IGN)
        stopped.append(_Stopped(signum))
        raise stopped[0]

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in caught}
        before = {number: old for number, old in handlers.items() if old not in {signal.SIG_IGN, None}}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    except Exception as error:
        if not stopped:
            raise
        before.clear()
        # What was imported, or a library's own callback, made something else of it.
        for note in getattr(error, "__notes__", ()):
            stopped[0].add_note(note)
        raise stopped[0] from error
    except _Stopped:
        before.clear()
        raise
    finally:
        for number, old in before.items():  # what is to be said at once is not true any more
            signal.signal(number, signal.SIG_DFL if old is stop_at_once else old)


def wrote() -> None:
    """Remember that the command wrote something, so that an interrupt from now on does not deny it."""
    click.get_current_context().meta[_WROTE] = True


class GroupedOption(click.Option):
    """An option with its place in the help of a command.

    Args:
        under: what it is about.
        first: `--help` has it too, with the first sentence about it; `--help-all` has every option, in full.
    """

    def __init__(self, *args: Any, under: Heading, first: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.under, self.first = under, first


def option(*names: str, under: Heading, first: bool = False, **given: Any) -> Callable[[Any], Any]:
    """Return the decorator that adds a `GroupedOption`."""
    return click.option(*names, cls=GroupedOption, under=under, first=first, **given)


class _Formatter(click.HelpFormatter):
    """Writes help with its headings in bold."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, prefix or paint("Usage:", bold=True) + " ")

    def write_heading(self, heading: str) -> None:
        super().write_heading(paint(heading, bold=True))


class _Context(click.Context):
    formatter_class = _Formatter


class Command(click.Command):
    """A command that knows `--debug`, and whose help has its options in groups.

    Its epilog is shown as it is written: examples must not be wrapped.

    Args:
        details: what only `--help-all` has, below the epilog, such as the keys of `--json`.
    """

    context_class = _Context
    allow_extra_args = True  # which click would refuse, and `parse_args` can say why

    def __init__(self, *args: Any, details: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.details = details
        self.params += [_debug_option(), _color_option(), _help_all_option()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments of the command, and refuse what is too many."""
        given = tuple(args)
        extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            raise click.UsageError(_too_many(ctx, given, extra[0]), ctx)
        return extra

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, unless a file that it writes is one that it reads; `refuse_to_write` knows of more."""
        refuse_to_write([path for path in ctx.meta.get(OUTPUTS, ()) if not path.is_dir()])  # which has its own error
        if not ctx.params.get("quiet"):
            say_warnings(ctx.meta.get(WARNINGS, ()))
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups, those that matter first or all."""
        groups: dict[Heading, list[tuple[str, str]]] = {heading: [] for heading in get_args(Heading)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record and (_ALL in ctx.meta or getattr(param, "first", True)):  # click's own is -h
                text = record[1] if _ALL in ctx.meta else _MORE.sub("", record[1])
                groups[getattr(param, "under", "Output")].append((record[0], text))
        for heading, rows in groups.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([(names.ljust(_WIDE), text) for names, text in rows], col_max=_WIDE)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog below the options."""
        _write_lines(self.epilog, formatter)
        _write_lines(self.details if _ALL in ctx.meta else None, formatter)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command
    context_class = _Context

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that is asked for; where there is none, the error says which one may be meant."""
        if not ctx.resilient_parsing and args[0][:1] != "-" and self.get_command(ctx, args[0]) is None:
            meant = _meant(args[0], self.list_commands(ctx), ctx)
            raise click.UsageError(f"{args[0]}: not a command of {ctx.command_path}; {meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog below the commands."""
        _write_lines(self.epilog, formatter)


def refuse_to_write(outputs: Sequence[Any]) -> None:
    """Refuse to write what the command was given to read: files, or strategy files in a directory.

    Which files of a checkpoint's directory are read is known when it is opened (`readers.open.files_read`).

    Raises:
        TargetError: an output is an input.
    """
    if outputs:
        from reshard.storage.small import refuse_inputs  # not on every start
        from reshard.strategy.files import strategy_files

        given = click.get_current_context().meta
        some = [strategy_files(path) if path.is_dir() else [path] for path in given.get(STRATEGIES, ())]
        refuse_inputs(outputs, [*given.get(INPUTS, ()), *(file for files in some for file in files)])


def _write_lines(text: str | None, formatter: click.HelpFormatter) -> None:
    if text:
        formatter.write_paragraph()
        formatter.write(_EXAMPLE.sub(lambda found: paint(found[0], bold=True), text.strip("\n") + "\n"))


def _debug_option() -> GroupedOption:
    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_DEBUG] = True

    return GroupedOption(
        ["--debug"],
        under="Output",
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Show the traceback of an error, as RESHARD_DEBUG=1 does.",
    )


def _help_all_option() -> GroupedOption:
    def show(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return GroupedOption(
        ["--help-all"],
        under="Output",
        first=True,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show every option, in full.",
    )


def _color_option() -> GroupedOption:
    def remember(ctx: click.Context | None, _param: click.Parameter, value: str | None) -> None:
        while value and ctx:  # errors are reported in the context of the outermost group
            ctx.color, ctx = _COLORS[value], ctx.parent

    return GroupedOption(
        ["--color"],
        under="Output",
        type=click.Choice(list(_COLORS)),
        is_eager=True,
        expose_value=False,
        callback=remember,
        help="Colour in what is printed.  [default: auto, in a terminal if NO_COLOR is not set]",
    )


class Border(Group):
    """The outermost group, behind which no traceback gets through.

    Attributes:
        homes: where a command is that is imported when it is asked for, as `module:name`, by its own name.
    """

    group_class = Group

    def __init__(self, *args: Any, homes: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.homes = homes
        self.params += [_debug_option(), _color_option()]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *self.homes})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        if cmd_name in self.homes and cmd_name not in self.commands:
            module, _, name = self.homes[cmd_name].partition(":")
            self.add_command(getattr(import_module(module), name))
        return super().get_command(ctx, cmd_name)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse what stands in front of the command."""
        with _usage_reported():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; its errors become a sentence and an exit code."""
        try:
            with _stopping(), _usage_reported():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click knows what to do with these
        except (Exception, KeyboardInterrupt) as error:
            if ctx.meta.get(_DEBUG) or os.environ.get("RESHARD_DEBUG", "0") not in {"", "0"}:
                import traceback

                say(traceback.format_exc())
            if isinstance(error, KeyboardInterrupt) and not (ctx.meta.get(_WROTE) or hasattr(error, "__notes__")):
                error.add_note("nothing was written")
            message, code = _message(error)
            say(message)
            ctx.exit(code)


@contextmanager
def _usage_reported() -> Iterator[None]:
    """Report wrong usage as every other error is; click would print a block of lines, and `Error:`."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            raise
        say(f"error: {_usage_message(error)}")
        raise click.exceptions.Exit(error.exit_code) from None


def _usage_message(error: click.UsageError) -> str:
    """Return what is wrong with a command, and what to type."""
    if isinstance(error, click.BadOptionUsage):
        return error.message.replace(f"Option {error.option_name!r} ", f"{error.option_name}: ").removesuffix(".")
    ctx = error.ctx
    if ctx is None:
        return error.format_message()
    if isinstance(error, click.NoSuchOption):
        params = [param for param in ctx.command.get_params(ctx) if isinstance(param, click.Option)]
        known = [name for param in params for name in (*param.opts, *param.secondary_opts)]
        return f"{error.option_name}: not an option of {ctx.command_path}; {_meant(error.option_name, known, ctx)}"
    param = error.param if isinstance(error, click.BadParameter) else None
    if param is None:
        said = error.format_message()
        return f"{said[0].lower()}{said[1:-1]}; see {ctx.command_path} --help" if said.endswith(".") else said
    name = max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name
    if isinstance(error, click.MissingParameter):
        needed = (param.get_help_record(ctx) or [name])[0]
        return f"{name}: is missing; expected {needed if isinstance(param, click.Option) else _usage(ctx)}"
    return f"{name}: {error.message.removesuffix('.')}"


def _usage(ctx: click.Context) -> str:
    return " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])


def _meant(word: str, known: Sequence[str], ctx: click.Context) -> str:
    """Return what to do about a word that is not known: other tools have it, or it is nearly another."""
    if advice := _ADVICE_ON.get(word.lstrip("-")):
        return advice
    from difflib import get_close_matches

    bare = {name.lstrip("-"): name for name in known}
    near = [bare[name] for name in get_close_matches(word.lstrip("-"), bare, n=2)]
    safe = list(takewhile(lambda name: name not in _DESTRUCTIVE or name.startswith(word), near))
    return f"did you mean {' or '.join(safe)}?" if safe else f"see {ctx.command_path} --help"


def _too_many(ctx: click.Context, given: Sequence[str], extra: str) -> str:
    """Return what is wrong where there are too many arguments: it may be that a shell made several of one glob."""
    for one, two in pairwise(given):
        glob = _NUMBER.sub("*", one)
        if one < two and glob == _NUMBER.sub("*", two) and Path(one).is_file() and Path(two).is_file():
            return f"{glob}: are several files; expected one; for a pipeline give the directory of its strategy files"
    return f"{extra}: is one argument too many; expected {_usage(ctx)}"


def _message(error: BaseException) -> tuple[str, int]:
    """Return what to say of an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        number = signal.Signals(getattr(error, "signum", signal.SIGINT))
        kind = "interrupted" if number is signal.SIGINT else f"stopped by {number.name}"
        return joined("; ", [kind, *getattr(error, "__notes__", ())]), 128 + number
    if isinstance(error, ReshardError):
        sentence = Text("error: ", error.text)
        return joined("; ", [sentence, *getattr(error, "__notes__", ())]), error.exit_code
    if isinstance(error, MemoryError):
        return "error: memory does not suffice", BudgetError.exit_code
    if isinstance(error, OSError) and error.strerror:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return f"error: {where}{error.strerror}", BudgetError.exit_code if full else 1
    kind = f"{type(error).__name__}: {error}".splitlines()[0]
    advice = "internal error, please report with `reshard --version --verbose`; add --debug to see where"
    return f"error: unexpected {kind} ({advice})", 1


def say(text: str) -> None:
    """Write talk to stderr, with what a terminal would obey escaped."""
    from reshard.view.text import printable

    lines = spelled(text, OPTIONS).split("\n")
    lines = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…" for line in lines]
    shown = printable("\n".join(lines), keep="\n")
    if label := _LABEL.match(shown):
        shown = paint(label[0], bold=True, fg="red" if label[1] == "error" else "yellow") + shown[label.end() :]
    click.echo(shown, err=True)


def paint(text: str, **style: Any) -> str:
    """Return a text in a colour or in bold, which `click.echo` takes out again of what goes to a pipe or a file."""
    ctx = click.get_current_context(silent=True)
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if unwanted and not (ctx and ctx.color) else click.style(text, **style)


def say_warnings(warnings: Sequence[str]) -> None:
    """Report on stderr what a user should know though it is not an error."""
    for warning in warnings:
        say(Text("warning: ", warning))


def print_text(text: str) -> None:
    """Write a result to stdout, with the options that it names as the command line writes them."""
    click.echo(spelled(text, OPTIONS))


def print_json(data: dict[str, object]) -> None:
    """Write the one JSON object of `--json` to stdout."""
    sys.stdout.writelines(_json_pieces(data, "\n", 2))
    sys.stdout.write("\n")
    sys.stdout.flush()  # a reader that went away shows here, where it is not an error, rather than at the exit


def _json_pieces(value: object, newline: str, levels: int) -> Iterator[str]:
    """Yield JSON with the items of so many levels on lines of their own: with all of them it would be slow and long."""
    import json

    if not (levels and value and isinstance(value, dict | list)):
        if isinstance(value, dict):  # a difference, whose sentence may name options; no deeper value does
            value = {key: spelled(item, OPTIONS) if isinstance(item, str) else item for key, item in value.items()}
        yield json.dumps(spelled(value, OPTIONS) if isinstance(value, str) else value)
        return
    is_object = isinstance(value, dict)
    separator = "{" if is_object else "["
    for item in value:
        yield f"{separator}{newline}  {f'{json.dumps(item)}: ' if is_object else ''}"
        yield from _json_pieces(value[item] if is_object else item, f"{newline}  ", levels - 1)
        separator = ","
    yield f"{newline}{'}' if is_object else ']'}"


_FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # noqa: RUF001 -- what spreadsheets take for the beginning of one


def print_csv(rows: Iterable[Sequence[str | int]]) -> None:
    """Write rows to stdout as RFC 4180 has them.

    A text that a spreadsheet would take for a formula gets an apostrophe in front. What a terminal would obey is
    escaped on one; in a pipe a name is what it is.
    """
    import csv

    from reshard.view.text import printable

    shown = printable if sys.stdout.isatty() else str
    csv.writer(sys.stdout).writerows(
        [f"'{cell}" if str(cell).startswith(_FORMULA) else shown(cell) for cell in row] for row in rows
    )
    sys.stdout.flush()


def width() -> int | None:
    """Return how many columns a table may have on stdout: the terminal's, else COLUMNS; None for any number."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def called_as() -> str:
    """Return what to type for `reshard`: the name alone where the shell finds it, else how it was called."""
    called = Path(sys.argv[0]).absolute()
    if called.parts[-2:] == ("reshard", "__main__.py"):
        return shlex.join([sys.executable, "-m", "reshard"])
    if called.name == "dask":
        return "dask reshard"
    if called.name == "reshard" and Path(shutil.which("reshard") or "").resolve() != called.resolve():
        return shlex.quote(str(called))
    return "reshard"


@contextmanager
def cluster_client(cluster: str | None, threads: int | None, *, quiet: bool) -> Iterator[Any]:
    """Give a client of the cluster that is asked for; None where there is none."""
    if cluster is None:
        yield None
        return
    from reshard.run.executor import connected

    with connected(cluster, threads) as client:
        if not quiet:
            workers = len(client.scheduler_info(n_workers=-1)["workers"])
            say(f"cluster: {workers} worker{'s' * (workers != 1)}; dashboard: {client.dashboard_link}")
        yield client

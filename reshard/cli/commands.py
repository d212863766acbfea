"""Commands with grouped options, help that fits on one screen, and advice on wrong usage.

Every option names its group (`option`), so that the help of each command lists it there. A misspelled option or command
is answered with the nearest one, and a word of another tool with its equivalent here.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from click.core import ParameterSource

from reshard import former
from reshard.cli.terminal import (
    DEBUG,
    JSON,
    WROTE,
    ErrorReport,
    error_report,
    paint,
    report_error,
    say,
    say_warnings,
    stopping,
    wrapped_page,
)
from reshard.environment import refuse_unknown
from reshard.errors import StrategyError, UsageError
from reshard.spelling import did_you_mean, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

INPUTS, STRATEGIES, OUTPUTS = "reshard.inputs", "reshard.strategies", "reshard.outputs"
"""Keys in `meta` of click's context for the paths of a command: inputs, strategies, and files that it writes."""

TYPED = "reshard.typed"
"""Key for the words of the command, which a later run needs to resume it."""

WARNINGS, KEY_FILES = "reshard.warnings", "reshard.key_files"
"""Keys for warnings about options, which are printed before the command runs, and for the key files that were typed."""

Heading = Literal["Source", "Target", "Tensors", "Running", "Output"]
"""The groups of options, in the order of the help."""

_MORE = re.compile(r"(?<=\.) (?=[A-Z]).*?(?=  \[|$)")
"""Matches the help of an option after its first sentence, up to its default."""

_HYPHEN = "\N{NON-BREAKING HYPHEN}"
_WIDE = 28  # columns for the names of options; longer ones have a line of their own
_ADVICE = {
    "check compare": "`reshard verify TARGET --against SOURCE` compares checkpoints bit by bit, `reshard diff` as "
    "numbers, `reshard strategy diff` strategies",
    "combine gather join merge": "`reshard convert SOURCE TARGET --to hf` merges shards into whole tensors, `reshard "
    "strategy merge` the strategy files of a pipeline",
    "continue resume": "type the same command again; it resumes what was begun",
    "dec-key dec_key": "--key-file FILE names the file that has the key of SOURCE; RESHARD_KEY in the environment is "
    "the key itself",
    "dec-mode dec_mode": "encrypted files say their mode themselves; leave it out",
    "dtype": "--cast float32=bfloat16 converts one dtype to another",
    "enc-key enc_key": "--target-key-file FILE names the file that has the key of TARGET; RESHARD_TARGET_KEY in the "
    "environment is the key itself",
    "enc-mode enc_mode": "--encryption MODE is the mode of an encrypted TARGET, with --target-key-file",
    "format output-format": "--to FORMAT is the format of TARGET",
    "force": "--overwrite replaces files that are in TARGET, --restart what an earlier run left",
    "info list ls show": "`reshard inspect` shows a checkpoint, `reshard strategy show` a strategy",
    "key": "--key-file FILE names the file that has the key of SOURCE, --target-key-file FILE that of TARGET; in the "
    "environment RESHARD_KEY and RESHARD_TARGET_KEY are the keys themselves",
    "layer name tensor": "--match GLOB names tensors to look at, --include GLOB those to convert",
    "make": "`reshard strategy make` makes a strategy file",
    "source": "SOURCE is an argument; of `reshard verify` it is --against SOURCE",
    "weight weights": "a weight stands behind its checkpoint, such as step-100:0.5",
    "reshard shard split": "`reshard convert` with --target-strategy cuts tensors",
}
_ADVICE |= former.OPTIONS
_ADVICE_ON = {word: advice for words, advice in _ADVICE.items() for word in words.split()}
"""Advice for commands and options of other tools."""

_DESTRUCTIVE = frozenset({"--overwrite", "--restart"})  # not proposed for another word
_ABOUT = frozenset({"completion", "help", "version"})  # commands that answer whatever the environment has
_COLORS = {"auto": None, "always": True, "never": False}
_ALL, _TO, _OF_TO = "reshard.all", "reshard.to", "reshard.options of to"
_ANYWHERE = {"-q", "--quiet", "-v", "--verbose", "--json", "--color", "--debug"}
_EXAMPLE = re.compile(r"^Examples?:$", re.MULTILINE)
_NUMBER = re.compile(r"[0-9]+")
_RANK = re.compile(r"rank_[0-9]+")
_SECRETS = re.compile(r"(://[^/:@]*):[^/]*@|\?[^?/]*=.*", re.DOTALL)  # a password in a URL, or its query
_UNIT = re.compile(r"[kMGTP]i?B?", re.IGNORECASE)
_NOT_ONE = re.compile(r"'([^']+)' is not one of")


class UsageErrorWithHint(click.UsageError):
    """Wrong usage, with a hint for the right one."""

    def __init__(self, message: str, hint: str, ctx: click.Context) -> None:
        super().__init__(message, ctx)
        self.hint = hint


class GroupedOption(click.Option):
    """An option with its group in the help of a command; as a decorator, it adds itself to one.

    Args:
        under: its group.
        in_short_help: whether `--help` shows it, with its first sentence; `--help-all` shows every option in full.
        of_formats: the help of an option that only some formats take, by the format; shown with `--to` that format.
        more: of `--to`: returns the options of a format of another package.
    """

    def __init__(
        self,
        *args: Any,
        under: Heading,
        in_short_help: bool = False,
        of_formats: Mapping[str, str] = MappingProxyType({}),
        more: Callable[[str], Sequence[GroupedOption]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.under, self.in_short_help, self.of_formats, self.more = under, in_short_help, of_formats, more

    def __call__(self, command: Any) -> Any:
        """Add the option to a command, as a decorator."""
        add: Callable[[Any], Any] = click.option(cls=lambda *_names: self)  # type: ignore[arg-type]  # what makes it
        return add(command)


def option(*names: str, under: Heading, in_short_help: bool = False, **attrs: Any) -> GroupedOption:
    """Return an option, to be added to commands as a decorator."""
    return GroupedOption(names, under=under, in_short_help=in_short_help, **attrs)


def typed(name: str) -> bool:
    """Return whether an option of the command was typed; it may also come from the environment."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def record(argument: str, make: Callable[..., Any], *options: GroupedOption) -> Callable[[Any], Any]:
    """Return a decorator that adds options, and passes them to the command as one argument.

    Args:
        argument: the argument.
        make: called with the options' values; returns the argument.
        options: the options, in the order of the help.
    """
    names = [str(option.name) for option in options]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def gathering(**values: Any) -> Any:
            value = make(**{name: values.pop(name) for name in names})
            return command(**{argument: value}, **values)

        function: Callable[..., Any] = gathering
        for option in reversed(options):
            function = option(function)
        return function

    return add


class _Formatter(click.HelpFormatter):
    """Writes help with its headings in bold, and breaks no line inside `--target-strategy`."""

    def write(self, string: str) -> None:
        super().write(string.replace(_HYPHEN, "-"))

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: Any, **kwargs: Any) -> None:
        super().write_dl([(names, text.replace("-", _HYPHEN)) for names, text in rows], *args, **kwargs)

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, prefix or paint("Usage:", bold=True) + " ")

    def write_heading(self, heading: str) -> None:
        super().write_heading(paint(heading, bold=True))


class _Context(click.Context):
    formatter_class = _Formatter


class Command(click.Command):
    """A command with `--debug`, whose help groups its options.

    Its epilog is shown as it is written: examples must not be wrapped.

    Args:
        details: a text below the epilog that only `--help-all` shows, such as the keys of `--json`.
    """

    context_class = _Context
    allow_extra_args = True  # `parse_args` refuses them, with a better hint than click's

    def __init__(self, *args: Any, details: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.details = details
        self.params += [_debug_option(hidden=True), _color_option(hidden=True), _help_all_option()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments of the command, and refuse surplus ones."""
        arguments = tuple(args)
        if "--json" in arguments and any("--json" in param.opts for param in self.params):
            ctx.meta[JSON] = True  # also if an option before it is refused
        ctx.meta[_TO] = _given(arguments).get("--to", "")
        ours = [param for param in self.params if isinstance(param, GroupedOption)]
        ctx.meta[_OF_TO] = [each for param in ours if param.more for each in param.more(ctx.meta[_TO])]
        words = [*ctx.command_path.rpartition("reshard")[2].split(), *arguments]
        ctx.meta[TYPED] = tuple(_without_secrets(word) for word in words if word not in _DESTRUCTIVE)
        extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            raise UsageErrorWithHint(*_too_many(ctx, arguments, extra[0]), ctx)
        return extra

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with those of the package's format that `--to` names."""
        return [*super().get_params(ctx), *ctx.meta.get(_OF_TO, ())]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, unless it would write one of its inputs (`refuse_to_write`), or a variable is misspelled."""
        if self.name not in _ABOUT:
            refuse_unknown()
        refuse_to_write([path for path in ctx.meta.get(OUTPUTS, ()) if not path.is_dir()])  # a directory fails later
        if not ctx.params.get("quiet"):
            say_warnings(ctx.meta.get(WARNINGS, ()))
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups: those of the short help, or all."""
        format_ = ctx.meta.get(_TO, "")
        groups: dict[str, list[tuple[str, str]]] = {}
        for heading in get_args(Heading):
            groups[heading] = []
            if heading == "Target":
                groups[_of(format_)] = []
        for param in self.get_params(ctx):
            of_formats = getattr(param, "of_formats", {})
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record and of_formats:
                if format_ in of_formats:
                    groups[_of(format_)].append((record[0], of_formats[format_]))
            elif record and (_ALL in ctx.meta or getattr(param, "in_short_help", True)):  # click's own is -h
                text = record[1] if _ALL in ctx.meta else _MORE.sub("", record[1])
                groups[getattr(param, "under", "Output")].append((record[0], text))
        for heading, rows in groups.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([(names.ljust(_WIDE), text) for names, text in rows], col_max=_WIDE)
        if not format_ and any(getattr(param, "of_formats", None) for param in self.params):
            formatter.write_paragraph()
            formatter.write_text(f"Options of one format: {ctx.command_path} --to FORMAT --help")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog below the options."""
        _write_lines(self.epilog, formatter)
        _write_lines(self.details if _ALL in ctx.meta else None, formatter)


def _of(format_: str) -> str:
    """Return the heading of the options that a format takes."""
    return f"Target, --to {format_}"


class Group(click.Group):
    """A group of `Command`s."""

    command_class = Command
    context_class = _Context

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; options of every command may stand before it, too."""
        rest, moved = [*args], []
        while rest and rest[0].partition("=")[0] in _ANYWHERE:
            moved.append(rest.pop(0))
            if moved[-1] == "--color":
                moved += rest[:1]
                del rest[:1]
        if rest and not rest[0].startswith("-"):
            args = [rest[0], *moved, *rest[1:]]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the requested command; the error for an unknown one has a hint."""
        if not ctx.resilient_parsing and args[0][:1] != "-" and self.get_command(ctx, args[0]) is None:
            meant = _meant(args[0], self.list_commands(ctx), ctx)
            raise UsageErrorWithHint(
                f"no such command: {' '.join([*ctx.command_path.split()[1:], args[0]])}", meant, ctx
            )
        return super().resolve_command(ctx, args)

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog below the commands."""
        _write_lines(self.epilog, formatter)


def refuse_to_write(outputs: Sequence[Any]) -> None:
    """Refuse to write the command's inputs: files, and strategy files in a directory.

    The files of a checkpoint are known only when it is opened (`core.open.files_read`).

    Raises:
        TargetError: an output is an input.
    """
    if outputs:
        from reshard.core.storage.small import refuse_inputs  # not on every start
        from reshard.strategy.files import strategy_files

        meta = click.get_current_context().meta
        inputs = [*meta.get(INPUTS, ())]
        for path in meta.get(STRATEGIES, ()):
            with suppress(StrategyError):  # a checkpoint that says how it is cut has no such files
                inputs += strategy_files(path) if path.is_dir() else [path]
        refuse_inputs(outputs, inputs)


def _write_lines(text: str | None, formatter: click.HelpFormatter) -> None:
    if text:
        formatter.write_paragraph()
        if max(map(len, text.splitlines())) > formatter.width:
            text = wrapped_page(text, formatter.width)
        formatter.write(_EXAMPLE.sub(lambda match: paint(match[0], bold=True), text.strip("\n") + "\n"))


def _debug_option(*, hidden: bool = False) -> GroupedOption:
    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[DEBUG] = True

    return GroupedOption(
        ["--debug"],
        under="Output",
        hidden=hidden,
        is_flag=True,
        expose_value=False,
        callback=remember,
        envvar="RESHARD_DEBUG",
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
        in_short_help=True,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show every option, in full.",
    )


def _color_option(*, hidden: bool = False) -> GroupedOption:
    def remember(ctx: click.Context | None, _param: click.Parameter, value: str | None) -> None:
        if value == "never":
            os.environ["NO_COLOR"] = "1"  # for the bar
        while value and ctx:  # errors are reported in the context of the outermost group
            ctx.color, ctx = _COLORS[value], ctx.parent

    return GroupedOption(
        ["--color"],
        under="Output",
        hidden=hidden,
        type=click.Choice(list(_COLORS)),
        is_eager=True,
        expose_value=False,
        callback=remember,
        help="Colour in what is printed.  [default: auto, in a terminal if NO_COLOR is not set]",
    )


class RootGroup(Group):
    """The outermost group, which turns exceptions into messages and exit codes.

    Attributes:
        homes: the commands that are imported on demand, by name, as `module:name`.
        sections: the names of the commands that the help lists, by their heading.
    """

    group_class = Group

    def __init__(
        self, *args: Any, homes: Mapping[str, str], sections: Mapping[str, Sequence[str]], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.homes, self.sections = homes, sections
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their sections."""
        for heading, names in self.sections.items():
            commands = [(name, command) for name in names if (command := self.get_command(ctx, name))]
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(10), command.get_short_help_str(80)) for name, command in commands])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments before the command."""
        with _usage_reported():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command, turning its errors into a sentence and an exit code."""
        try:
            with stopping(), _usage_reported():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click handles these
        except (Exception, KeyboardInterrupt) as error:
            if ctx.meta.get(DEBUG):
                import traceback

                say(traceback.format_exc())
            if isinstance(error, KeyboardInterrupt) and not (ctx.meta.get(WROTE) or hasattr(error, "__notes__")):
                error.add_note("nothing was written")
            report_error(report := error_report(error), ctx)
            ctx.exit(report.exit_code)


@contextmanager
def _usage_reported() -> Iterator[None]:
    """Report wrong usage like any other error, in place of click's own block of lines."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            raise
        message, hint = _usage_message(error)
        report_error(ErrorReport(message, (), hint, UsageError.code, error.exit_code), error.ctx)
        raise click.exceptions.Exit(error.exit_code) from None


def _usage_message(error: click.UsageError) -> tuple[str, str]:
    """Return the message and the hint for wrong usage."""
    ctx = error.ctx
    if isinstance(error, UsageErrorWithHint) or ctx is None:
        return error.format_message(), getattr(error, "hint", "")
    if isinstance(error, click.BadOptionUsage):
        needs = "takes no value" if "not take" in error.message else "needs a value"
        return f"{error.option_name} {needs}", ""
    if isinstance(error, click.NoSuchOption):
        params = [param for param in ctx.command.get_params(ctx) if isinstance(param, click.Option)]
        names = [name for param in params if not param.hidden for name in (*param.opts, *param.secondary_opts)]
        return f"{ctx.command_path} has no option {error.option_name}", _meant(error.option_name, names, ctx)
    param = error.param if isinstance(error, click.BadParameter) else None
    if param is None:
        text = error.format_message().removesuffix(".")
        return f"{text[0].lower()}{text[1:]}", f"{ctx.command_path} --help"
    name = max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name
    if ctx.get_parameter_source(param.name or "") is ParameterSource.ENVIRONMENT:
        name = str(param.envvar)
    if isinstance(error, click.MissingParameter):
        needed = (param.get_help_record(ctx) or [name])[0]
        return f"{name} is missing", f"add {needed}" if isinstance(param, click.Option) else _usage(ctx)
    value = _NOT_ONE.match(error.message)
    choices = param.type.choices if isinstance(param.type, click.Choice) else ()
    hint = (_ADVICE_ON.get(value[1].lower()) or did_you_mean(value[1], choices)) if value else ""
    message = error.message.removesuffix(".")
    if isinstance(param.type, click.types.BoolParamType):
        message = f"{message.partition(' is not ')[0]} is not 1, 0, true or false"
    return f"{name}: {message}", hint


def _usage(ctx: click.Context) -> str:
    return " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])


def _meant(word: str, candidates: Sequence[str], ctx: click.Context) -> str:
    """Return the hint for an unknown word: an equivalent, a similar word, or `--help`."""
    if advice := _ADVICE_ON.get(word.lstrip("-")):
        return advice
    bare = {name.lstrip("-"): name for name in candidates}
    near = [bare[name] for name in nearest(word.lstrip("-"), bare, most=2)]
    safe = list(takewhile(lambda name: name not in _DESTRUCTIVE or name.startswith(word), near))
    return f"did you mean {' or '.join(safe)}?" if safe else f"{ctx.command_path} --help"


def _given(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of long options as they are typed."""
    apart = {name: value for name, value in pairwise(arguments) if name.startswith("--")}
    return apart | {name: value for name, equals, value in (word.partition("=") for word in arguments) if equals}


def _without_secrets(word: str) -> str:
    """Return a word of a command without the password and the query of a URL in it.

    >>> _without_secrets("ftp://me:hush@host/run"), _without_secrets("https://host/run?sig=hush")
    ('ftp://me:***@host/run', 'https://host/run?***')
    """
    return _SECRETS.sub(lambda match: f"{match[1]}:***@" if match[1] else "?***", word) if "://" in word else word


def _too_many(ctx: click.Context, arguments: Sequence[str], extra: str) -> tuple[str, str]:
    """Return message and hint for surplus arguments, such as an expanded glob."""
    for first, second in pairwise(arguments):
        if extra in {first, second} and first.replace(".", "", 1).isdigit() and _UNIT.fullmatch(second):
            return f"unexpected argument {extra!r}", f"write a size as one word: {first}{second}"
        glob = _NUMBER.sub("*", first)
        if first < second and glob == _NUMBER.sub("*", second) and Path(first).exists() and Path(second).exists():
            if rank := next((path for path in (Path(first), *Path(first).parents) if _RANK.fullmatch(path.name)), None):
                ranks = rank.with_name("rank_*")
                return f"{ranks} are several directories", f"give the directory of all ranks, {rank.parent}"
            if Path(first).is_file() and Path(second).is_file():
                return f"{glob} are several files", "for a pipeline give the directory of its strategy files"
    return f"unexpected argument {extra!r}", f"expected {_usage(ctx)}"

"""Connect a command to the terminal: errors, signals, messages, JSON and CSV.

Only here do option names in texts of the core get the spelling of the command line (`OPTIONS`). Errors become a
message, facts, a hint and an exit code: 0 done, 1 failure, 2 usage, 3 verify mismatch, 4 source or strategy incomplete
or corrupt, 5 memory or disk, 6 target exists or source changed, 129 hangup, 130 interrupted, 143 terminated.
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
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from reshard.cli import stop as stop_at_once
from reshard.environment import is_agent
from reshard.errors import BudgetError, ReshardError, Text, Words, joined, printable, spelled
from reshard.view.progress import columns_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from reshard.errors import Option
    from reshard.view.pictures.characters import Canvas


def _flag(option: Option) -> str:
    value = "" if option.value is None else f" {option.rule or option.value}"
    return f"--{option.name.replace('_', '-')}{value}"


_KEY = ("--key-file or RESHARD_KEY", "--key-file FILE")
_TARGET_KEY = ("--target-key-file or RESHARD_TARGET_KEY", "--target-key-file FILE")

OPTIONS = Words(
    _flag,
    {
        "against": ("--against SOURCE",),
        "allow_missing": ("--allow-missing", "--allow-missing '{}'"),
        "cast": ("--cast", "--cast {}={}"),
        "client": ("--cluster", "--cluster {}"),
        "drop": ("--drop '{}'",),
        "key": _KEY,
        "layout": ("--layout", "--layout '{}={}'"),
        "let": ("--let {}=N",),
        "lora_alpha": ("--lora-alpha N",),
        "lora_tied": ("reshard.LoRA(DIR, tied={!r}) in Python",),
        "no_server_copy": ("--tune server-copy=no",),
        "model_config": ("--model-config config.json",),
        "rules": ("--rules NAME, of reshard rules list",),
        "source": ("--source DIRECTORY",),
        "source_key": _KEY,
        "stage_ranks": ("--ranks LIST", "--ranks {1}"),
        "strategy": ("--source-strategy", "--source-strategy {1}"),
        "target_cipher": _TARGET_KEY,
        "target_key": _TARGET_KEY,
        "target_layout": ("--target-layout '{}={}'",),
    },
)
"""How the command line writes the options that texts refer to."""

OWN_PROCESS = "reshard.own"
"""The `obj` of click's context if the process runs the command alone."""
DEBUG = "reshard.debug"
WROTE = "reshard.wrote"
ON_CLUSTER = "reshard.cluster"
"""Whether workers of a cluster execute the command."""
JSON, ANSWERED = "reshard.json", "reshard.answered"
"""Whether a JSON object was requested, and whether it was printed."""
REPORTED = "reshard.reported"
"""Whether a command already printed its error on stdout."""
SCHEMA = 1  # of the objects of --json; raised when a key is removed or changes meaning
_LABEL = re.compile(r"^(error|warning|hint):", re.MULTILINE)
_START = re.compile(r"(?:(?:error|warning|hint):)?\s*")
_ITEM = re.compile(r"\s*(?:[*-]|[0-9]+\.)\s+")
_COMMAND = re.compile(r"(\s*)(?:\$ )?reshard [^'\"#]*$")
_COLORS = {"error": "red", "warning": "yellow", "hint": "cyan"}
_LONGEST_LINE = 8000  # a name may have 4,096 characters, and a message a few of them


class _Stopped(KeyboardInterrupt):
    """A signal requested a stop.

    It is raised in the main thread, so that `run` cleans up as after any failure.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def stopping() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `_Stopped`.

    A signal that is ignored (nohup) stays ignored.
    """
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    stopped: list[_Stopped] = []

    def stop(signum: int, _frame: FrameType | None) -> NoReturn:
        ctx = click.get_current_context(silent=True)
        on_cluster = ctx is not None and ON_CLUSTER in ctx.meta
        for number in before:  # a second signal must not disturb the cleanup or the exit code
            signal.signal(number, _end_at_once if on_cluster else signal.SIG_IGN)
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
        # An imported module, or a library's callback, replaced the exception.
        for note in getattr(error, "__notes__", ()):
            stopped[0].add_note(note)
        raise stopped[0] from error
    except _Stopped:
        before.clear()
        raise
    finally:
        for number, old in before.items():  # `stop_at_once` says "nothing was written", which may be false by now
            signal.signal(number, signal.SIG_DFL if old is stop_at_once else old)


def _end_at_once(signum: int, _frame: FrameType | None) -> NoReturn:
    """End the process, whose cleanup waits for a worker that may never answer."""
    os.write(2, b"ended without waiting for the workers; the same command resumes\n")
    os._exit(128 + signum)


def wrote() -> None:
    """Record that the command wrote something.

    A later interrupt then does not report that nothing was written.
    """
    click.get_current_context().meta[WROTE] = True


class ErrorReport(NamedTuple):
    """The report of an error: lines on stderr, and with `--json` an object on stdout."""

    message: str
    facts: Sequence[str]
    hint: str
    code: str
    exit_code: int

    @property
    def text(self) -> str:
        """Return the lines for a person: the message, indented facts, and the hint."""
        label = "" if self.code == "interrupted" else "error: "
        lines = [Text(label, self.message), *(Text("       ", fact) for fact in self.facts)]
        return joined("\n", [*lines, *([Text("hint:  ", self.hint)] if self.hint else [])])

    def data(self) -> dict[str, object]:
        """Return the object of `--json`."""
        return {
            "error": {
                "code": self.code,
                "exit_code": self.exit_code,
                "message": spelled(self.message, OPTIONS),
                "facts": [spelled(fact, OPTIONS) for fact in self.facts],
                "hint": spelled(self.hint, OPTIONS),
            }
        }


def error_report(error: BaseException) -> ErrorReport:
    """Return the report of an error, with the exit code."""
    notes = tuple(getattr(error, "__notes__", ()))
    if isinstance(error, KeyboardInterrupt):
        number = signal.Signals(getattr(error, "signum", signal.SIGINT))
        kind = "interrupted" if number is signal.SIGINT else f"stopped by {number.name}"
        return ErrorReport(joined("; ", [kind, *notes]), (), "", "interrupted", 128 + number)
    if isinstance(error, ReshardError):
        return ErrorReport(error.message, (*error.facts, *notes), error.hint, error.code, error.exit_code)
    if isinstance(error, MemoryError):
        return ErrorReport("out of memory", (), "", BudgetError.code, BudgetError.exit_code)
    if isinstance(error, OSError) and error.strerror:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        prefix = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        code, exit_code = (BudgetError.code, BudgetError.exit_code) if full else (ReshardError.code, 1)
        return ErrorReport(f"{prefix}{error.strerror}", (), "", code, exit_code)
    text = f"unexpected {type(error).__name__}: {error}".splitlines()[0]
    advice = "internal error; please report it with `reshard version --verbose`; --debug shows where it is"
    return ErrorReport(text, (), advice, "internal", 1)


def say(text: str) -> None:
    """Write a message to stderr, with control characters escaped, and lines that a terminal shows unbroken."""
    lines = _near(spelled(text, OPTIONS)).split("\n")
    lines = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…" for line in lines]
    columns = columns_of(sys.stderr)
    escaped = "\n".join(wrapped(printable(line), columns) for line in lines)
    click.echo(_LABEL.sub(lambda label: paint(label[0], bold=True, fg=_COLORS[label[1]]), escaped), err=True)


def wrapped(line: str, columns: int | None, hang: int | None = None) -> str:
    """Break a line at spaces, so that it fits a terminal; `columns` None leaves it as it is.

    Args:
        line: the text.
        columns: the width of the terminal.
        hang: how far the lines after the first are indented; by default as far as the text behind `error: `.

    >>> print(wrapped("hint:  pass --overwrite to replace it", 24))
    hint:  pass --overwrite
           to replace it
    """
    if columns is None or len(line) <= columns:
        return line
    import textwrap  # few messages are long

    if hang is None:
        start = _START.match(line)
        hang = len(start[0]) if start else 0
    indent = " " * min(hang, columns // 2)
    lines = textwrap.wrap(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return "\n".join(lines)


def wrapped_page(text: str, columns: int | None) -> str:
    r"""Return a page whose paragraphs, items and rows of tables and commands are broken at spaces; other code is not.

    >>> print(wrapped_page("A paragraph of\ntwo lines.\n* an item that is long\n```sh\nreshard run a b\n```", 16))
    A paragraph of
    two lines.
    * an item that
      is long
    ```sh
    reshard run a b
    ```
    """
    if columns is None:
        return text
    result: list[str] = []
    paragraph: list[str] = []

    def end_paragraph() -> None:
        if paragraph:
            marker = _ITEM.match(paragraph[0])
            line = " ".join([paragraph[0].rstrip(), *(line.strip() for line in paragraph[1:])])
            result.append(wrapped(line, columns, len(marker[0]) if marker else 0))
            paragraph.clear()

    is_code = False
    for line in text.split("\n"):
        is_fence, is_item = line.lstrip().startswith("```"), bool(_ITEM.match(line))
        is_example = line.startswith(" ") and not paragraph and not is_item
        if is_fence or is_code or is_example or not line.strip() or line.startswith(("#", "|")):
            end_paragraph()
            result.append(wrapped(line, columns, 2) if line.startswith("|") else _wrapped_command(line, columns))
            is_code ^= is_fence
            continue
        if is_item:
            end_paragraph()
        paragraph.append(line)
    end_paragraph()
    return "\n".join(result)


def _wrapped_command(line: str, columns: int) -> str:
    r"""Break a command at spaces with backslashes; leave other lines of code as they are.

    >>> print(_wrapped_command("  reshard convert source target", 24))
      reshard convert \
          source target
    """
    command = _COMMAND.match(line)
    if len(line) <= columns or command is None:
        return line
    return wrapped(line, columns - 2, len(command[1]) + 4).replace("\n", " \\\n")


def _near(text: str) -> str:
    """Make paths below the current directory relative to it."""
    with suppress(OSError):  # it may be gone
        here = str(Path.cwd())
        return text if here == "/" else re.sub(rf"(?<![^\s'\"=(]){re.escape(here)}/(?=[^\s/])", "", text)
    return text


def paint(text: str, **style: Any) -> str:
    """Return a text in colour or bold, which `click.echo` strips for pipes and files."""
    ctx = click.get_current_context(silent=True)
    return text if _colourless() and not (ctx and ctx.color) else click.style(text, **style)


def _colourless() -> bool:
    """Return whether the environment asks for no colours."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or is_agent()


def say_warnings(warnings: Sequence[str]) -> None:
    """Write warnings to stderr."""
    for warning in warnings:
        say(printable(spelled(Text("warning: ", warning), OPTIONS)))  # one line, even if names have line breaks


def print_text(text: str) -> None:
    """Write a result to stdout, with options as typed and control characters escaped.

    For an agent, what to type next goes to stderr.
    """
    text = printable(spelled(text, OPTIONS), keep="\n")
    if is_agent():
        lines = text.split("\n")
        hints = [line for line in lines if line.startswith("next: ")]
        text = "\n".join(line for line in lines if line not in hints)
        for hint in hints:
            say(hint)
    click.echo(text)


def print_picture(draw: Callable[[Canvas], str]) -> None:
    """Write a picture to stdout, in colours and characters that it can show."""
    from reshard.view.pictures.characters import Canvas

    ctx = click.get_current_context()
    in_colour = sys.stdout.isatty() and not _colourless() if ctx.color is None else ctx.color
    try:
        "░▓…×".encode(sys.stdout.encoding)
    except UnicodeError:
        is_ascii = True
    else:
        is_ascii = False

    def paint(text: str, background: int, ink: int) -> str:
        return click.style(text, bg=background, fg=ink)

    click.echo(draw(Canvas(width() or Canvas().width, paint if in_colour else None, is_ascii)), color=in_colour)


def print_json(data: dict[str, object], error: ReshardError | None = None) -> None:
    """Write the object of `--json` to stdout, with its schema version and any error."""
    failure = error_report(error).data() if error else {}
    click.get_current_context().meta[ANSWERED] = True
    sys.stdout.writelines(_json_pieces({"schema": SCHEMA} | failure | data, "\n", 2))
    sys.stdout.write("\n")
    sys.stdout.flush()  # a closed pipe must show here, where it is not an error, and not at the exit


def report_error(error: ErrorReport, ctx: click.Context | None) -> None:
    """Report an error on stderr, and with `--json` on stdout, unless already done."""
    meta = ctx.meta if ctx else {}
    if not meta.get(REPORTED):
        say(error.text)
    if meta.get(JSON) and not meta.get(ANSWERED):
        with ctx or nullcontext():
            print_json(error.data())


def _json_pieces(value: object, newline: str, levels: int) -> Iterator[str]:
    """Yield JSON with an item per line in the first levels; deeper levels stay on one line, for speed."""
    import json

    if not (levels and value and isinstance(value, dict | list)):
        if isinstance(value, dict):  # a difference, whose text may name options; deeper values have none
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


_FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # noqa: RUF001 -- spreadsheets take these for the start of a formula


def print_csv(rows: Iterable[Sequence[str | int]]) -> None:
    """Write rows to stdout as CSV (RFC 4180).

    A text that a spreadsheet would take for a formula gets an apostrophe in front. Control characters are escaped on
    a terminal, but not in a pipe.
    """
    import csv

    escape = printable if sys.stdout.isatty() else str
    csv.writer(sys.stdout).writerows(
        ["'" * str(cell).startswith(_FORMULA) + escape(str(cell)) for cell in row] for row in rows
    )
    sys.stdout.flush()


def width() -> int | None:
    """Return COLUMNS if set, else the terminal's width; None (unlimited) in a pipe without COLUMNS."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def called_as() -> str:
    """Return the command that runs `reshard`: its name if on PATH, else as called."""
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
    """Yield where to run, as `client` of `reshard.Plan.run`.

    The scheduler that dask's environment variable names is the current client, which a command may do without.
    """
    if not requested_cluster(cluster):
        yield None
        return
    from reshard.core.run.clusters.where import located

    with located(requested_cluster(cluster), threads) as where:
        if where.client is None:
            yield where
            return
        click.get_current_context().meta[ON_CLUSTER] = True
        if not quiet:
            workers = len(where.client.nthreads())
            say(f"cluster: {workers} worker{'s' * (workers != 1)}; dashboard: {where.client.dashboard_link}")
        with nullcontext() if cluster else where.client.as_current():
            yield where if cluster else None


def requested_cluster(cluster: str | None) -> str | None:
    """Return the cluster of the option, else of dask's environment variable."""
    return cluster or os.environ.get("DASK_SCHEDULER_ADDRESS") or None

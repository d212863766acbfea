"""The generated pages of `docs/`: commands, Python's names, environment variables, error codes.

python tests/docs_made.py   # writes them again
"""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.testing import CliRunner

import reshard
import reshard.mindspore
from reshard import environment, errors
from reshard.cli.carry import KEYS
from reshard.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parent.parent / "docs"
PACKAGE = Path(reshard.__file__).parent
KINDS = {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if name.endswith("Error")}
MOST_LETTERS = 48
FEWEST_WORDS = 4
EVERYWHERE = {"--json", "--help-all", "-v", "-q", "--threads", "--cluster", "--memory"}
OPENING = ("--rank-pattern", "--suffix", "--layout", "--stage", "--step", "--partial", "--key-file")


def commands_page() -> str:
    """Return the page of all commands: what `--help-all` prints, without the options of a conversion."""
    head = (
        "# Commands\n\nMade by `python tests/docs_made.py` from the help of the program. Options that `convert` has, "
        "too, are named after\nthe others, but for `-q`, `-v`, `--json`, `--memory`, `--threads` and `--cluster`; "
        "[options of a conversion](options.md) explains\nthem. `--help-all` has the keys of a command's `--json`.\n"
    )
    parts = [head]
    shared = {record[0]: record for _, record in _records(_command("convert"), ("convert",))}
    for path, command in below(cli, ()):
        shown = _shown([*path, "--help" if isinstance(command, click.Group) else "--help-all"])
        shown = re.sub(r"(?m)^The object of --json has (?:.|\n)*?(?=^\S.*:$|^[A-Z]|\Z)", "", shown)
        shown = re.sub(r"(?m)^  -h, --help  +Show this message and exit\.\n?", "", f"{shown}\n").rstrip("\n")
        if path == ("convert",):
            shown = re.sub(r"(?ms)^(Source|Target|Tensors|Running|Output):$.*?(?=^\S|\Z)", "", shown)
        elif path and not isinstance(command, click.Group):
            shown = _without(shown, [names for names, text in _own(command, path, shared)])
        parts.append(f"## {' '.join(['reshard', *path])}\n\n```text\n{shown}\n```\n")
    return "\n".join(parts)


def options_page() -> str:
    """Return the page of the options of `convert`: those of every conversion, then those of each format."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for param, record in _records(_command("convert"), ("convert",)):
        groups.setdefault(param.under, []).append(record)
    head = (
        "# Options of a conversion\n\nMade by `python tests/docs_made.py`. `reshard convert` has all of them; `plan` "
        "and `average` have those of\nSource, Target and Tensors, `run` those of Running, and `verify` and `diff` "
        "those by which a checkpoint is opened.\n"
    )
    parts = [head]
    for heading, rows in groups.items():
        parts.append(f"## {heading}\n\n| option | |\n|---|---|\n" + "\n".join(_row(*row) for row in rows) + "\n")
    parts.append("## Of one format\n\nWith `--to FORMAT`:\n\n| option | format | |\n|---|---|---|")
    for param in _command("convert").params:
        texts: dict[str, list[str]] = {}
        for name, text in getattr(param, "of_formats", {}).items():
            texts.setdefault(text, []).append(name)
        record = param.get_help_record(click.Context(_command("convert"))) if texts else None
        parts += [f"| `{record[0]}` | {', '.join(names)} | {_cell(text)} |" for text, names in texts.items() if record]
    return "\n".join(parts) + "\n"


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command
    return command


def _records(command: click.Command, path: tuple[str, ...]) -> list[tuple[Any, tuple[str, str]]]:
    """Return the options that a command shows, with their names and help."""
    context = click.Context(command, info_name=path[-1])
    found = [(param, param.get_help_record(context)) for param in command.params if isinstance(param, click.Option)]
    return [(param, record) for param, record in found if record and not getattr(param, "of_formats", {})]


def _own(command: click.Command, path: tuple[str, ...], shared: dict[str, tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the options of a command that mean what they mean for `convert`."""
    return [record for _, record in _records(command, path) if shared.get(record[0]) == record]


def _without(shown: str, names: list[str]) -> str:
    """Return a help without some options, which are named at the end."""
    for name in names:
        shown = re.sub(rf"(?m)^  {re.escape(name)}(?: .*)?\n(?:   +\S.*\n?)*", "", f"{shown}\n").rstrip("\n")
    shown = re.sub(r"(?m)^(?:Source|Target|Tensors|Running|Output):\n(?=\n|\Z|[A-Z])", "", shown)
    shown = re.sub(r"\n{3,}", "\n\n", shown).rstrip("\n")
    shown = shown.replace(KEYS.strip(), "The object of --json has the keys that it has for convert.")
    own = [name.split(" ")[0].rstrip(",") for name in names]
    own = [flag for flag in own if flag not in EVERYWHERE]
    if set(OPENING) <= set(own):
        own = ["those of Source", *(flag for flag in own if flag not in {*OPENING, "--source-strategy"})]
    flags = ", ".join(own)
    return f"{shown}\n\n{textwrap.fill(f'As for convert: {flags}', 100, break_on_hyphens=False)}" if flags else shown


def _row(names: str, text: str) -> str:
    return f"| `{names}` | {_cell(text)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("] [", "; ").replace("|", "\\|")


def _shown(arguments: list[str]) -> str:
    """Return what a command prints, at 100 columns."""
    shown = CliRunner().invoke(cli, arguments, prog_name="reshard", env={"COLUMNS": "100"}, terminal_width=100)
    assert shown.exit_code == 0, shown.output
    return "\n".join(line.rstrip() for line in shown.output.strip("\n").split("\n"))


def below(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield a command and those below it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner and not inner.hidden:
                yield from below(inner, (*path, name))


def api_page() -> str:
    """Return the page of all names for Python, each with its summary and its example."""
    names = {name: getattr(reshard, name) for name in reshard.__all__}
    of_mindspore = {name: getattr(reshard.mindspore, name) for name in reshard.mindspore.__all__}
    constants = {name: value for name, value in of_mindspore.items() if not documented(value)}
    sections = {
        "Functions": {name: value for name, value in names.items() if not inspect.isclass(value)},
        "Classes": {name: value for name, value in names.items() if inspect.isclass(value) and name not in KINDS},
        "Errors": {name: value for name, value in names.items() if name in KINDS},
        "MindSpore's functions": {name: value for name, value in of_mindspore.items() if name not in constants},
    }
    parts = [
        """# Python

Made by `python tests/docs_made.py` from the docstrings; `help(reshard.open)` has the arguments and the errors.

The examples run in the folder that `reshard demo` makes, after

```pycon
>>> import reshard
>>> import reshard.mindspore as ms
>>> from reshard import *
```
"""
    ]
    for title, members in sections.items():
        parts.append(f"## {title}\n")
        module = "reshard.mindspore" if members.keys() <= of_mindspore.keys() else "reshard"
        if module == "reshard":
            parts += [
                f"### `{module}.{name}`\n\n{summary(value)}\n\n```pycon\n{example(value)}```\n"
                for name, value in members.items()
            ]
        else:
            parts += [
                "`help(reshard.mindspore.NAME)` has an example of each.\n\n| name | |\n|---|---|",
                *(f"| `{name}` | {_cell(summary(value))} |" for name, value in members.items()),
            ]
    parts.append("\n## MindSpore's constants\n\n| name | value |\n|---|---|\n")
    rows = "".join(f"| `reshard.mindspore.{name}` | `{value}` |\n" for name, value in constants.items())
    return "\n".join(parts) + rows


def documented(value: object) -> bool:
    """Return whether a public name is a class or a function, which has a docstring."""
    return inspect.isclass(value) or inspect.isfunction(value)


def summary(value: Any) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def example(value: Any) -> str:
    """Return the examples of a docstring, as they are typed and answered."""
    lines = []
    for each in doctest.DocTestParser().get_examples(inspect.cleandoc(value.__doc__ or "")):
        first, *rest = each.source.rstrip("\n").split("\n")
        lines += [f">>> {first}", *(f"... {line}".rstrip() for line in rest), *each.want.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def errors_page() -> str:
    """Return the page of all error codes: a list for each exit code, each code with a message that has it."""
    codes: dict[str, tuple[set[str], list[str]]] = {}
    for kind in KINDS.values():
        codes.setdefault(kind.code, (set(), []))[0].add(str(kind.exit_code))
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            for code in codes_of(call):
                exits, messages = codes.setdefault(code, (set(), []))
                name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
                if name in KINDS:
                    exits.add(str(KINDS[name].exit_code))
                message = message_of(call)
                if len(re.findall(r"\w+", message)) >= FEWEST_WORDS and message not in messages:
                    messages.append(message)
    lists: dict[str, list[str]] = {}
    for code, (exits, messages) in sorted(codes.items()):
        title = f"Exit code {', '.join(sorted(exits))}" if exits else "Exit code of the error that lists them"
        lists.setdefault(title, []).append(f"{code:<24} {cut(messages[0]) if messages else ''}".rstrip())
    head = (
        "# Errors\n\nMade by `python tests/docs_made.py` from the source. A code names a cause and stays the same when "
        "the wording\nchanges; `--json` and `error.code` in Python have it. `…` stands for what varies.\n"
    )
    return "\n".join(
        [head, *(f"## {title}\n\n```text\n" + "\n".join(rows) + "\n```\n" for title, rows in sorted(lists.items()))]
    )


def codes_of(node: ast.AST) -> list[str]:
    """Return the codes that a call gives to an error or a fault."""
    if not isinstance(node, ast.Call):
        return []
    values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
    constants = [one.value for value in values for one in ast.walk(value) if isinstance(one, ast.Constant)]
    return [each for each in constants if isinstance(each, str) and re.fullmatch(r"[a-z][a-z0-9-]*", each)]


def message_of(call: Any) -> str:
    """Return the message of an error, or of a fault, with `…` for what is put in."""
    place = 1 if isinstance(call.func, ast.Attribute) else 0  # faults.add(where, what)
    if len(call.args) <= place:
        return ""
    text = re.sub(r"\s+", " ", words(call.args[place])).strip()
    text = re.sub(r"(… ?)+", "… ", text).strip()
    return re.sub(r"… ([;,:.)\]])", r"…\1", text)


def cut(text: str) -> str:
    """Return the beginning of a message, up to a whole word."""
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS].rpartition(' ')[0]} …"


def words(node: ast.AST) -> str:
    """Return the literal text of an expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(words(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Text":
        return "".join(words(value) for value in node.args)
    return "…"


def environment_page() -> str:
    """Return the page of all environment variables, each with its options."""
    options = variables()
    rows = [f"| `{name}` | {options.get(name, '')} | {text} |" for name, text in environment.VARIABLES.items()]
    of_tests = [f"| `{name}` | {text} |" for name, text in environment.OF_TESTS.items()]
    return f"""# Environment variables

Made by `python tests/docs_made.py` from `reshard/environment.py`.

What holds for a machine, and not for one conversion, may be set in the environment. An option that is typed, or an
argument in Python, comes before the variable; an empty variable is not set. A value that is wrong is an error that
names the variable. The command line refuses a variable that begins with `RESHARD_` and is not on this page
(`unknown-variable`), except those that Kubernetes sets for a service called `reshard`, such as `.._SERVICE_HOST` and
`.._PORT_80_TCP`.

| variable | option | what it sets |
|---|---|---|
{chr(10).join(rows)}

`{environment.MEMORY}`, `{environment.THREADS}` and `{environment.STALL_SECONDS}` are read in Python, too.
The others are of the command line.

Of others are `NO_COLOR`, `TERM=dumb` and `COLUMNS`, for what is printed; and the variables of object stores, such as
`AWS_PROFILE` and `HF_TOKEN` ([clusters and S3](../guides/clusters-and-s3.md)).

## For the tests of the project

| variable | what it names |
|---|---|
{chr(10).join(of_tests)}
"""


def variables() -> dict[str, str]:
    """Return the options that a variable stands for, from all commands."""
    options = {environment.MEMORY: "`--memory`", environment.THREADS: "`--threads`"}
    for _, command in below(cli, ()):
        for param in command.params:
            if param.envvar:
                options[str(param.envvar)] = " ".join(f"`{flag}`" for flag in (*param.opts, *param.secondary_opts))
    for name, file in tuple(options.items()):
        if name.endswith("_KEY_FILE"):
            options[name.removesuffix("_FILE")] = file
    return options


PAGES = {
    "reference/api.md": api_page,
    "reference/commands.md": commands_page,
    "reference/options.md": options_page,
    "reference/environment.md": environment_page,
    "reference/errors.md": errors_page,
}

if __name__ == "__main__":
    for place, make in PAGES.items():
        (DOCS / place).write_text(make())

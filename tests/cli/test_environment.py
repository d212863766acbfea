"""Environment variables: what they set, what comes before them, and that an unknown or a wrong one is an error."""

from __future__ import annotations

import re
from pathlib import Path

import click
import docs_made
import pytest
from commands import Case, call, done
from refusals import failed, refused

import reshard
from reshard import environment
from reshard.cli.main import cli
from reshard.environment import OF_LIBRARIES, OF_TESTS, VARIABLES

TESTS = Path(__file__).parent.parent
NAME = re.compile(r"(?<![A-Z_])RESHARD_[A-Z_]+[A-Z]")

WRONG = {
    "RESHARD_MEMORY": ("3x", "bad-size"),
    "RESHARD_THREADS": ("none", "bad-value"),
    "RESHARD_CLUSTER": ("somewhere", "usage"),
    "RESHARD_FSYNC": ("maybe", "usage"),
    "RESHARD_DROP_CACHE": ("maybe", "usage"),
    "RESHARD_DEBUG": ("maybe", "usage"),
    "RESHARD_KEY": ("short", "bad-key"),
    "RESHARD_KEY_FILE": ("missing", "bad-key"),
    "RESHARD_TARGET_KEY": ("short", "bad-key"),
    "RESHARD_TARGET_KEY_FILE": ("missing", "bad-key"),
    "RESHARD_STALL_SECONDS": ("soon", "bad-value"),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_wrong_value_names_its_variable(
    name: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, code = WRONG[name]
    source = "s3://bucket/run" if name == environment.STALL_SECONDS else case.source
    monkeypatch.setenv(name, value)
    failed(
        2,
        code,
        "convert",
        source,
        tmp_path / "out",
        *case.strategies,
        places=(name,) if code == "bad-key" else (name, value),
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("RESHARD_THREDS", "RESHARD_THREADS"), ("RESHARD_TARGETKEY", "RESHARD_TARGET_KEY"), ("RESHARD_X1", "environment")],
)
def test_an_unknown_variable_is_refused(name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    failed(2, "unknown-variable", "runs", tmp_path, places=(name, meant))
    assert "unknown-variable" in failed(2, "unknown-variable", "runs", tmp_path, "--json").stdout
    for command in (["version"], ["help", "environment"], ["runs", "--help"]):
        done(*command)


def test_variables_of_kubernetes_services_are_not_regarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are those of the Kubernetes documentation, for the services `reshard` and `reshard-scheduler`."""
    ends = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_PROTO",
            "PORT_80_TCP_PORT", "PORT_80_TCP_ADDR", "PORT_53_UDP"]  # fmt: skip
    for name in ("RESHARD", "RESHARD_SCHEDULER"):
        for end in ends:
            monkeypatch.setenv(f"{name}_{end}", "tcp://10.0.0.1:80")
    done("runs", tmp_path)
    for wrong in ("RESHARD_PORTS", "RESHARD_PORT_TCP", "RESHARD_SERVICE", "RESHARD_HOST"):
        with monkeypatch.context() as patch:
            patch.setenv(wrong, "1")
            failed(2, "unknown-variable", "runs", tmp_path, places=(wrong,))


def test_the_lists_are_complete() -> None:
    """Both ways: options, sources and tests name no other variable, and each has its use."""
    assert set(docs_made.variables()) | {environment.STALL_SECONDS} == set(VARIABLES)
    package = Path(reshard.__file__).parent
    named = set(NAME.findall("".join(path.read_text() for path in package.rglob("*.py"))))
    assert {name for name in named if not OF_LIBRARIES.fullmatch(name)} | set(OF_TESTS) == set(VARIABLES) | set(
        OF_TESTS
    )
    read = "".join(path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__))
    others = {name for name in OF_TESTS if not OF_LIBRARIES.fullmatch(name)}
    assert {name for name in NAME.findall(read) if not OF_LIBRARIES.fullmatch(name)} - set(VARIABLES) == others
    page = (TESTS.parent / "docs" / "reference" / "environment.md").read_text()
    assert (
        set(VARIABLES) | set(OF_TESTS)
        <= set(NAME.findall(page))
        <= set(VARIABLES) | set(OF_TESTS) | {"RESHARD_TORCH_PYTHON"}
    )


def options_of(name: str) -> list[click.Option]:
    return [
        param
        for _, command in docs_made.below(cli, ())
        for param in command.params
        if isinstance(param, click.Option) and name in param.opts
    ]


@pytest.mark.parametrize(("flag", "variable"), [("--cluster", "RESHARD_CLUSTER"), ("--fsync", "RESHARD_FSYNC")])
def test_a_variable_is_of_every_command_that_has_the_option(flag: str, variable: str) -> None:
    options = options_of(flag)
    assert len(options) > 2
    assert {param.envvar for param in options} == {variable}


def test_memory_and_threads_are_limits_of_plans(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python as on the command line; what is given comes first."""
    source = reshard.open(case.source, strategy=case.source_strategy)
    assert reshard.plan(source, case.target_strategy)._record.threads == 4
    monkeypatch.setenv("RESHARD_THREADS", "1")
    assert reshard.plan(source, case.target_strategy)._record.threads == 1
    assert reshard.plan(source, case.target_strategy, threads=3)._record.threads == 3
    monkeypatch.setenv("RESHARD_THREADS", "9" * 5000)  # more digits than `int` takes
    with refused(reshard.UsageError, "bad-value", "RESHARD_THREADS"):
        reshard.plan(source, case.target_strategy)
    monkeypatch.delenv("RESHARD_THREADS")
    monkeypatch.setenv("RESHARD_MEMORY", "3MB")
    with refused(reshard.BudgetError, "not-enough-memory", "3.0 MB"):
        reshard.plan(source, case.target_strategy)
    with refused(reshard.BudgetError, "not-enough-memory", "3.0 MB"):
        reshard.verify(case.source, case.source_strategy, against=case.source, source_strategy=case.source_strategy)
    with refused(reshard.BudgetError, "not-enough-memory", "3.0 MB"):
        source.stats()
    with refused(reshard.BudgetError, "not-enough-memory", "3.0 MB"):
        reshard.diff(source, source)
    command = ("convert", case.source, tmp_path / "out", *case.strategies)
    failed(5, "not-enough-memory", *command, places=("3.0 MB",))
    done(*command, "--memory", "1GB")


def test_a_variable_that_has_no_use_is_no_error(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option is one: who types it expects something of it."""
    target, manifest = tmp_path / "out", tmp_path / "sums.json"
    done("convert", case.source, target, *case.strategies, "--write-manifest", manifest)
    monkeypatch.setenv("RESHARD_MEMORY", "1GB")
    monkeypatch.setenv("RESHARD_CLUSTER", "tcp://127.0.0.1:1")
    done("verify", target, "--manifest", manifest)
    failed(2, "needs-source", "verify", target, "--manifest", manifest, "--cluster", "tcp://127.0.0.1:1")
    failed(2, "needs-source", "verify", target, "--manifest", manifest, "--memory", "1GB")
    monkeypatch.delenv("RESHARD_CLUSTER")
    done("convert", target, tmp_path / "same", "--same-ranks", "--to", "safetensors")


def test_what_is_typed_comes_before_the_variable(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without syncing there are no checksums in the ledger, by which it is seen here."""

    def checksummed(name: str, *options: str) -> bool:
        return "checksummed" in done("convert", case.source, tmp_path / name, *case.strategies, *options).stdout

    assert checksummed("default")
    monkeypatch.setenv("RESHARD_FSYNC", "false")
    assert not checksummed("variable")
    assert checksummed("typed", "--fsync")
    monkeypatch.setenv("RESHARD_FSYNC", "")
    assert checksummed("empty")


def test_debug_is_a_boolean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, shown in (("1", True), ("true", True), ("0", False), ("false", False), ("", False)):
        monkeypatch.setenv("RESHARD_DEBUG", value)
        assert ("Traceback" in call("inspect", tmp_path / "missing").stderr) == shown

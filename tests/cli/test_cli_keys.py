"""Encrypted `.ckpt` files from the command line: keys in files and in the environment, in every command that reads."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import helpers
import pytest
from checkpoints import tree
from commands import Case, call, done
from refusals import failed, refused

from reshard.core.storage import cipher as cipher_module
from reshard.core.storage.cipher import Cipher, read_key
from reshard.core.storage.decryption import MAGICS
from reshard.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("cryptography")

KEY = b"sixteen-bytes-ok"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other"
    path.write_text("ab" * 32 + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def plain(case: Case, tmp_path: Path) -> Path:
    """The target's ranks, as they are without a key."""
    done("transform", case.source, tmp_path / "plain", *case.strategies)
    return tmp_path / "plain"


@pytest.fixture
def sealed(case: Case, tmp_path: Path, key: Path) -> Path:
    """The same, encrypted."""
    done("transform", case.source, tmp_path / "sealed", *case.strategies, "--target-key-file", key)
    return tmp_path / "sealed"


def files(root: Path) -> dict[str, bytes]:
    """Return what a run wrote, but for its ledger."""
    return {name: content for name, content in tree(root).items() if ".reshard" not in name}


def mode_of(path: Path) -> str:
    return MAGICS[int.from_bytes(path.read_bytes()[:4], "little")]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (None, ["--remove-redundancy"]),
        ("AES-GCM", ["--link-replicas", "--cast", "float32=bfloat16"]),
        ("AES-CBC", []),
        ("SM4-CBC", ["--link-replicas"]),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_there_and_back_in_every_mode(
    case: Case, tmp_path: Path, key: Path, other: Path, mode: str | None, options: list[str]
) -> None:
    encryption = ["--encryption", mode] if mode else []
    again = ["--target-key-file", other if mode != "SM4-CBC" else key, *encryption]
    done("transform", case.source, tmp_path / "plain", *case.strategies, *options)
    done("transform", case.source, tmp_path / "out", *case.strategies, *options, "--target-key-file", key, *encryption)
    done("transform", case.source, tmp_path / "again", *case.strategies, *options, *again)
    for name, content in files(tmp_path / "plain").items():
        path = tmp_path / "out" / name
        assert mode_of(path) == (mode or "AES-GCM")
        store = Cipher(mode, KEY).store()
        found = bytearray(store.size(str(path)))
        store.read_into(str(path), 0, memoryview(found))
        assert found == content
        assert path.read_bytes() != (tmp_path / "again" / name).read_bytes()
    if "--remove-redundancy" not in options:  # which a .ckpt file cannot say
        back = ["--source-strategy", case.target_strategy, "--target-strategy", case.source_strategy]
        done("transform", tmp_path / "out", tmp_path / "back", *back, "--key-file", key)
        done("transform", tmp_path / "plain", tmp_path / "back plain", *back)
        assert files(tmp_path / "back") == files(tmp_path / "back plain")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.core.storage.cipher.BLOCK_BYTES", 1000)  # many blocks, and none that fits


def test_every_command_that_reads_takes_the_key(
    case: Case, tmp_path: Path, sealed: Path, plain: Path, key: Path
) -> None:
    strategy = ["--source-strategy", case.target_strategy]
    for command in (["inspect"], ["inspect", "--json"], ["inspect", *strategy]):
        found = done(*command, sealed, "--key-file", key).stdout
        expected = done(*command, plain).stdout
        assert len(found.splitlines()) == len(expected.splitlines()) > 5
    for number, command in enumerate(
        (
            ["unify", *strategy],
            ["unify", *strategy, "--format", "zarr"],
            ["transform", *strategy],
            ["transform", *strategy, "--via-zarr", tmp_path / "store"],
            ["convert", "--format", "safetensors"],
        )
    ):
        name, *options = command
        result = done(name, sealed, tmp_path / f"from sealed {number}", *options, "--key-file", key)
        assert "sealed is encrypted, and what is written is not" in result.stderr
        direct = options[: options.index("--via-zarr")] if "--via-zarr" in options else options
        done(name, plain, tmp_path / f"from plain {number}", *direct)
        found, expected = (files(tmp_path / f"from {which} {number}") for which in ("sealed", "plain"))
        assert sorted(found) == sorted(expected) != []
        assert found == expected or "zarr" in options  # whose attributes name the source's sizes


def test_convert_encrypts_and_decrypts(tmp_path: Path, plain: Path, sealed: Path, key: Path, other: Path) -> None:
    same = "--same-ranks"
    done("convert", sealed, tmp_path / "st", "--to", "safetensors", "--key-file", key, same)
    done("convert", tmp_path / "st", tmp_path / "ckpt", "--to", "ckpt", "--target-key-file", other, same)
    again = done("convert", tmp_path / "ckpt", tmp_path / "plain again", "--to", "ckpt", "--key-file", other, same)
    assert "--target-key-file encrypts it" in again.stderr
    for rank in range(4):
        place = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert mode_of(tmp_path / "ckpt" / place) == "AES-GCM"
        assert helpers.read_rank_file(tmp_path / "plain again" / place) == helpers.read_rank_file(plain / place)
    assert "ranks 0-3: each 15 tensors" in done("inspect", tmp_path / "ckpt", "--key-file", other).stdout
    for command in (
        ["verify", tmp_path / "ckpt", "--target-key-file", other],
        ["verify", tmp_path / "ckpt", "--target-key-file", other, "--against", sealed, "--key-file", key],
        ["verify", tmp_path / "st", "--key-file", key],
    ):
        assert "every bit of 15 tensors" in done(*command).stdout
    one = ["convert", sealed / "rank_0" / "checkpoint_0.ckpt", tmp_path / "one.safetensors", "--format", "safetensors"]
    done(*one, "--key-file", key)
    assert (tmp_path / "one.safetensors").is_file()


def test_verify_by_the_ledger_against_a_source_and_of_structure(
    case: Case, tmp_path: Path, sealed: Path, key: Path, other: Path
) -> None:
    target = ["--target-strategy", case.target_strategy]
    by_ledger = ["verify", sealed, "--target-key-file", key]
    for command in (
        by_ledger,
        [*by_ledger, *target],
        [*by_ledger, *target, "--against", case.source, "--source-strategy", case.source_strategy],
        [*by_ledger, "--against", sealed, "--key-file", key],
    ):
        done(*command)
    # Both encrypted: each with its own key.
    done(
        "transform", sealed, tmp_path / "both", "--key-file", key, "--target-key-file", other, "--source-strategy",
        case.target_strategy, "--target-strategy", case.source_strategy,
    )  # fmt: skip
    both = ["verify", tmp_path / "both", "--key-file", key, "--target-key-file", other]
    assert "every bit of 15 tensors" in done(*both).stdout
    path = tmp_path / "both" / "rank_1" / "checkpoint_1.ckpt"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    failed(4, "wrong-key", *both, places=("rank_1/checkpoint_1.ckpt",))


def test_a_saved_plan_takes_the_keys_when_it_is_run(
    case: Case, tmp_path: Path, sealed: Path, plain: Path, key: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    strategies = ["--source-strategy", case.target_strategy, "--target-strategy", case.source_strategy]
    planned = ["plan", sealed, *strategies, "--key-file", key, "-o"]
    encryption = ["--target-key-file", other, "--encryption", "AES-CBC"]
    assert "encrypted by AES-CBC" in done(*planned, "sealed.json", *encryption).stdout
    done(*planned, "open.json")
    done("run", "sealed.json", "a", "--key-file", key, "--target-key-file", key)  # another key than was planned with
    assert mode_of(tmp_path / "a" / "rank_0" / "checkpoint_0.ckpt") == "AES-CBC"
    done("verify", "a", "--key-file", key, "--target-key-file", key)
    done("run", "open.json", "b", "--key-file", key)
    done("transform", plain, "c", *strategies)
    assert files(tmp_path / "b") == files(tmp_path / "c")
    for command, exit_code, code, said in (
        (["sealed.json", "d", "--key-file", key], 2, "no-key", " --target-key-file FILE"),
        (["sealed.json", "d", "--target-key-file", key], 2, "no-key", " --key-file or RESHARD_KEY"),
        (["open.json", "d", "--key-file", key, "--target-key-file", key], 2, "not-encrypted", "open.json"),
        (["open.json", "d", "--key-file", other], 4, "wrong-key", "rank_0/checkpoint_0.ckpt"),
    ):  # fmt: skip
        failed(exit_code, code, "run", *command, places=(said,))
        assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("words", "exit_code", "code", "said"),
    [
        ("inspect SEALED", 4, "encrypted", "--key-file FILE"),
        ("inspect SEALED --key-file OTHER", 4, "wrong-key", "rank_0/checkpoint_0.ckpt"),
        ("inspect PLAIN --key-file KEY", 4, "not-encrypted", "--key-file or RESHARD_KEY"),
        ("inspect SEALED --key-file nothing", 2, "bad-key", "key file nothing"),
        ("inspect SEALED --key-file SHORT", 2, "bad-key", "openssl rand 32"),
        ("inspect SM4 --key-file OTHER", 2, "bad-key", "SM4-CBC"),
        ("verify SEALED", 2, "no-key", "--target-key-file"),
        ("verify SEALED --target-key-file OTHER", 4, "wrong-key", "rank_0/checkpoint_0.ckpt"),
        ("verify SEALED --against PLAIN", 4, "encrypted", "--target-key-file FILE"),
        ("verify PLAIN --against SEALED", 4, "encrypted", "--key-file FILE"),
        ("verify PLAIN --target-key-file KEY", 4, "not-encrypted", "--target-key-file"),
        ("verify SEALED --target-key-file KEY --deduplicated --key-file KEY", 2, "needs-source", "RESHARD_KEY"),
        ("verify PLAIN --key-file KEY --write-manifest m", 2, "not-encryptable", "--key-file"),
        ("convert PLAIN x --format safetensors --target-key-file KEY", 2, "not-encryptable", "ckpt"),
        ("convert PLAIN x --format ckpt --encryption AES-GCM", 2, "no-key", "--target-key-file FILE"),
        ("plan PLAIN --style huggingface --target-key-file KEY", 2, "not-encryptable", "ckpt"),
        ("convert PLAIN x --format ckpt --target-key-file KEY --write-manifest m", 2, "no-manifest", "x "),
        ("verify SEALED --write-manifest m", 2, "encrypted", "sealed "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(
    case: Case, tmp_path: Path, sealed: Path, plain: Path, key: Path, other: Path,
    monkeypatch: pytest.MonkeyPatch, words: str, exit_code: int, code: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_bytes(b"secret words")
    names = {"SEALED": sealed, "PLAIN": plain, "KEY": key, "OTHER": other, "SHORT": tmp_path / "short"}
    if "SM4" in words.split():
        names["SM4"] = tmp_path / "sm4"
        sm4 = ["--target-key-file", key, "--encryption", "SM4-CBC"]
        done("transform", case.source, names["SM4"], *case.strategies, *sm4)
    before = tree(tmp_path)
    command = [str(names.get(word, word)) for word in words.split()]
    result = failed(exit_code, code, *command, places=(said,))
    assert "secret words" not in result.output
    assert tree(tmp_path) == before


def test_another_key_does_not_go_on_where_one_ended(case: Case, sealed: Path, key: Path, other: Path) -> None:
    command = ["transform", case.source, sealed, *case.strategies, "--target-key-file"]
    before = tree(sealed)
    assert "nothing is left to do" in done(*command, key).output
    failed(6, "other-run", *command, other, places=("rank_0/checkpoint_0.ckpt",))
    assert "made by another plan, with another key or from other sources" in call(*command, other, "--dry-run").stderr
    assert call(*command[:-1]).exit_code == 6
    (sealed / "rank_2" / "checkpoint_2.ckpt").unlink()
    done(*command, key)
    after = tree(sealed)
    for rank in (0, 1, 3):
        name = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert after[name] == before[name]
    done(*command, other, "--restart")
    done("verify", sealed, "--target-key-file", other)


def test_keys_from_the_environment(case: Case, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_TARGET_KEY", KEY.decode())
    written = done("transform", case.source, tmp_path / "out", *case.strategies)
    assert "--target-key-file" not in written.output
    assert mode_of(tmp_path / "out" / "rank_0" / "checkpoint_0.ckpt") == "AES-GCM"
    done("verify", tmp_path / "out")
    monkeypatch.setenv("RESHARD_KEY_FILE", str(key))
    monkeypatch.setenv("RESHARD_KEY", "ab" * 24)  # the file comes first
    done("inspect", tmp_path / "out")
    monkeypatch.delenv("RESHARD_KEY_FILE")
    assert call("inspect", tmp_path / "out").exit_code == 4
    done("inspect", tmp_path / "out", "--key-file", key)  # and what is typed before all
    monkeypatch.setenv("RESHARD_KEY", "nonsense")
    refused = failed(2, "bad-key", "inspect", tmp_path / "out", places=("RESHARD_KEY",))
    assert "nonsense" not in refused.stderr
    monkeypatch.setenv("RESHARD_KEY", "")
    failed(4, "encrypted", "inspect", tmp_path / "out", places=("rank_0/checkpoint_0.ckpt",))
    monkeypatch.setenv("RESHARD_KEY_FILE", "nothing")
    failed(2, "bad-key", "inspect", tmp_path / "out", places=("RESHARD_KEY_FILE", "nothing"))


SOURCE_KEYS = {"RESHARD_KEY": KEY.decode()}
EVERY_KEY = {**SOURCE_KEYS, "RESHARD_TARGET_KEY": KEY.decode()}


def export(monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], key: Path, *, files: bool) -> None:
    """Put keys into the environment: themselves, or the file that has them."""
    for name, text in keys.items():
        monkeypatch.setenv(*((f"{name}_FILE", str(key)) if files else (name, text)))


def test_with_exported_keys_plain_files_are_read_as_ever(
    case: Case, tmp_path: Path, plain: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.yaml").write_text("mesh: {dp: 4}\nrules: {'*.weight': [dp]}\n")
    there = ["--source-strategy", case.target_strategy]
    back = [*there, "--target-strategy", case.source_strategy]
    commands: list[list[str | Path]] = [
        ["inspect", plain],
        ["inspect", plain, "--json", *there],
        ["inspect", plain / "rank_0"],
        ["inspect", plain / "rank_0" / "checkpoint_0.ckpt"],
        ["transform", plain, "back", *back],
        ["transform", plain, "through", *back, "--via-zarr", "store"],
        ["transform", "store", "from_store", "--format", "ckpt", "--target-strategy", case.source_strategy],
        ["inspect", "store"],
        ["unify", plain, "ms", *there],
        ["unify", plain, "hf", *there, "--style", "huggingface"],
        ["inspect", "hf"],
        ["unify", plain, "zarr", *there, "--format", "zarr"],
        ["convert", plain, "st", "--format", "safetensors"],
        ["convert", plain / "rank_0" / "checkpoint_0.ckpt", "one.safetensors", "--format", "safetensors"],
        ["plan", plain, *back, "-o", "plan.json"],
        ["plan", plain, *there, "--style", "mindspore"],
        ["run", "plan.json", "planned"],
        ["strategy", "check", case.target_strategy, plain],
        ["strategy", "make", "rules.yaml", "--like", plain, *there, "-o", "made.ckpt"],
    ]
    checks: list[list[str | Path]] = [
        ["verify", "back"],
        ["verify", "back", "--target-strategy", case.source_strategy],
        ["verify", "back", "--target-strategy", case.source_strategy, "--against", plain, *there],
        ["verify", "store", "--against", plain, *there],
        ["verify", plain / "rank_0" / "checkpoint_0.ckpt"],
        ["verify", "st", "--against", plain],
        ["verify", "back", "--write-manifest", "back.json"],
        ["verify", "back", "--manifest", "back.json"],
        ["verify", "hf"],
    ]
    results = []
    for name in ("without", "with"):
        place = tmp_path / name
        place.mkdir()
        (place / "rules.yaml").write_bytes((tmp_path / "rules.yaml").read_bytes())
        monkeypatch.chdir(place)
        for keys, some in ((SOURCE_KEYS, commands), (EVERY_KEY, checks)):
            if name == "with":
                export(monkeypatch, keys, key, files=True)
            for command in some:
                result = done(*command)
                assert not [word for word in ("--key", "RESHARD", "crypt") if word in result.output]
        results.append({path: content for path, content in tree(place).items() if ".reshard" not in path})
    assert results[0] == results[1]


def test_what_is_plain_needs_no_cryptography(
    case: Case, plain: Path, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    cipher_module._coded.cache_clear()
    monkeypatch.setenv("RESHARD_KEY", KEY.decode())
    done("inspect", plain)
    failed(1, "library-missing", "inspect", sealed, places=("reshard[crypto]",))


@pytest.mark.parametrize(
    "words",
    [
        "unify PLAIN out",
        "unify PLAIN out --style huggingface --dry-run",
        "unify PLAIN out --format zarr",
        "convert PLAIN out --format safetensors",
        "transform PLAIN out --format safetensors",
        "plan PLAIN --style mindspore",
        "run plan.json out",
    ],
)
def test_what_cannot_be_encrypted_is_not_written_plain_where_the_key_of_the_target_is_exported(
    case: Case, tmp_path: Path, plain: Path, key: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    there = ["--source-strategy", case.target_strategy]
    done("plan", plain, *there, "--format", "safetensors", "-o", "plan.json")
    command: list[str | Path] = [plain if word == "PLAIN" else word for word in words.split()]
    command += there if command[0] in {"unify", "transform", "plan"} else []
    code, said = ("not-encrypted", "plan.json") if words.startswith("run") else ("not-encryptable", "ckpt")
    typed = failed(2, code, *command, "--target-key-file", key, places=(said,))
    export(monkeypatch, {"RESHARD_TARGET_KEY": KEY.decode()}, key, files=True)
    before = tree(tmp_path)
    refused = failed(2, code, *command, places=(said, "--target-key-file or RESHARD_TARGET_KEY"))
    assert refused.stderr == typed.stderr
    assert tree(tmp_path) == before
    monkeypatch.delenv("RESHARD_TARGET_KEY_FILE")
    done(*command)


@pytest.fixture
def mixed(tmp_path: Path, sealed: Path, plain: Path) -> Path:
    """Encrypted files, one of which somebody has replaced."""
    path = tmp_path / "mixed"
    shutil.copytree(sealed, path, ignore=shutil.ignore_patterns(".reshard*"))
    shutil.copy(plain / "rank_2" / "checkpoint_2.ckpt", path / "rank_2" / "checkpoint_2.ckpt")
    return path


@pytest.mark.parametrize("way", ["typed", "exported"])
def test_a_plain_file_among_encrypted_ones_is_refused(
    case: Case, tmp_path: Path, mixed: Path, plain: Path, key: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    there = ["--source-strategy", case.target_strategy]
    source, target = (["--key-file", key], ["--target-key-file", key]) if way == "typed" else ([], [])
    if way != "typed":
        export(monkeypatch, EVERY_KEY, key, files=True)
    command: list[str | Path]
    for command in (
        ["inspect", mixed, *source],
        ["inspect", mixed, *there, *source],
        ["transform", mixed, "out", *there, *source],
        ["convert", mixed, "out", "--format", "ckpt", *source],
        ["plan", mixed, *there, *source],
        ["strategy", "check", case.target_strategy, mixed, *source],
        ["verify", mixed, *target],
        ["verify", mixed, "--target-strategy", case.target_strategy, *target],
        ["verify", mixed, "--target-strategy", case.target_strategy, "--against", plain, *there, *target],
        ["verify", plain, "--target-strategy", case.target_strategy, "--against", mixed, *there, *source],
    ):
        two = ("mixed/rank_2/checkpoint_2.ckpt", "mixed/rank_0/checkpoint_0.ckpt")
        failed(4, "mixed-encryption", *command, places=two)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["typed", "exported"])
def test_plain_files_where_the_ledger_says_that_they_were_encrypted_are_refused(
    sealed: Path, plain: Path, key: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for rank in range(4):
        name = f"rank_{rank}/checkpoint_{rank}.ckpt"
        shutil.copy(plain / name, sealed / name)
    if way == "exported":
        export(monkeypatch, EVERY_KEY, key, files=False)
    failed(
        4, "not-encrypted", "verify", sealed, *(["--target-key-file", key] if way == "typed" else []),
        places=("checkpoint_0.ckpt",),
    )  # fmt: skip


def test_a_program_may_hand_the_key_over(sealed: Path) -> None:
    command = f"{sys.executable} -m reshard inspect {sealed} --key-file <(printf {KEY.decode()})"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "net.layer1.weight" in shown.stdout
    assert "warning" not in shown.stderr


@pytest.mark.skipif(os.name != "posix", reason="rights are POSIX's")
def test_a_key_file_that_everybody_may_read_is_warned_of(case: Case, sealed: Path, key: Path, tmp_path: Path) -> None:
    assert "warning" not in done("inspect", sealed, "--key-file", key).stderr
    key.chmod(0o644)
    warned = done("inspect", sealed, "--key-file", key)
    assert f"warning: key file {key} can be read by every user of this machine: chmod 600 {key}" in warned.stderr
    quiet = done("transform", case.source, tmp_path / "q", *case.strategies, "--target-key-file", key, "-q")
    assert not quiet.stderr


def test_no_file_is_written_over_a_key(plain: Path, key: Path) -> None:
    inside = plain / "one.ckpt"
    inside.write_bytes(KEY)
    target = ["convert", plain / "rank_0" / "checkpoint_0.ckpt", inside, "--format", "ckpt", "--overwrite"]
    refused = call(*target, "--target-key-file", inside)
    assert refused.exit_code == 6, refused.output
    assert inside.read_bytes() == KEY


@pytest.mark.parametrize("nbytes", [16, 24, 32])
def test_a_key_is_bytes_or_digits_with_or_without_a_newline(nbytes: int) -> None:
    key = bytes(range(128, 128 + nbytes))
    digits = [key.hex().encode(), key.hex().upper().encode()]
    for end in (b"", b"\n", b"\r\n"):
        for content in (key, *(digits if nbytes > 16 else ())):
            assert read_key(content + end, "k") == key
        if nbytes == 16:  # of 32 digits nobody knows whether they are the key
            with refused(UsageError, "ambiguous-key", "k has 32 hexadecimal digits"):
                read_key(digits[0] + end, "k")
    ends = key[:-1] + b"\n"
    assert read_key(ends, "k") == ends
    assert read_key(b"0123456789ABCDEF", "k") == b"0123456789ABCDEF"  # too few digits for a key
    for wrong in (key + b" ", b"", key[:-1], key.hex().encode() + b"0", b"\n" + key, base64.b64encode(key)):
        if len(wrong) not in {16, 24, 32}:  # which text may be, too
            with refused(UsageError, "bad-key", "k is not a key", f"found {len(wrong)} bytes"):
                read_key(wrong, "k")


def test_through_zarr_what_is_plain_is_said(case: Case, sealed: Path, key: Path, tmp_path: Path) -> None:
    options = ["--target-strategy", case.target_strategy, "--key-file", key]
    said = done("transform", sealed, tmp_path / "out", *options, "--via-zarr", tmp_path / "st.zarr", "--json")
    assert f"is encrypted, and what is written is not: {tmp_path / 'st.zarr'} and {tmp_path / 'out'}" in said.stderr


def test_verify_by_the_ledger_with_an_exported_key_that_is_wrong_or_of_no_use(
    case: Case, tmp_path: Path, sealed: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategies = ["--source-strategy", case.target_strategy, "--target-strategy", case.source_strategy]
    done("transform", sealed, tmp_path / "open", *strategies, "--key-file", key)
    by_ledger = ["verify", tmp_path / "open"]
    monkeypatch.setenv("RESHARD_KEY", "ab" * 24)
    failed(4, "wrong-key", *by_ledger, places=("checkpoint_0.ckpt",))
    monkeypatch.setenv("RESHARD_KEY", KEY.decode())
    assert "every bit of 15 tensors" in done(*by_ledger).stdout
    shutil.rmtree(sealed)
    found = done(*by_ledger)
    assert "compared with the sizes and checksums that its ledger has" in found.stderr
    monkeypatch.delenv("RESHARD_KEY")
    assert "compared with the sizes and checksums that its ledger has" in done(*by_ledger).stderr
    failed(4, "not-found", *by_ledger, "--key-file", key, places=("checkpoint_0.ckpt",))

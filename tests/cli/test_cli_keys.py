"""Encrypted `.ckpt` files from the command line: keys in files and in the environment, in every command that reads."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import helpers
import pytest
from checkpoints import tree
from commands import Case, call, done, proposed

from reshard.errors import UsageError
from reshard.storage.cipher import MAGICS, Cipher, read_key

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


@pytest.mark.parametrize("mode", [None, "AES-GCM", "AES-CBC", "SM4-CBC"])
@pytest.mark.parametrize("options", [[], ["--remove-redundancy"], ["--link-replicas", "--cast", "float32=bfloat16"]])
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
    monkeypatch.setattr("reshard.storage.cipher.BLOCK_BYTES", 1000)  # many blocks, and none that fits


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
    done("convert", sealed, tmp_path / "st", "--format", "safetensors", "--key-file", key)
    done("convert", tmp_path / "st", tmp_path / "ckpt", "--format", "ckpt", "--target-key-file", other)
    again = done("convert", tmp_path / "ckpt", tmp_path / "plain again", "--format", "ckpt", "--key-file", other)
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
        assert "equal to" in done(*command).stdout
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
    assert "equal to" in done(*both).stdout
    path = tmp_path / "both" / "rank_1" / "checkpoint_1.ckpt"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    changed = call(*both)
    assert changed.exit_code == 4
    assert "rank_1/checkpoint_1.ckpt: cannot be decrypted with this key; it is wrong, or the file was changed" in (
        changed.stderr
    )


def test_what_the_report_proposes_works(case: Case, sealed: Path, tmp_path: Path, key: Path) -> None:
    result = done("transform", case.source, sealed, *case.strategies, "--target-key-file", key)
    assert f"verify {sealed} --target-key-file {key}" in result.stdout
    done(*proposed(result))
    (look,) = [line for line in result.stderr.splitlines() if line.startswith("to look at it: ")]
    assert done(*shlex.split(look.removeprefix("to look at it: "))[1:]).stdout
    shown = json.loads(
        done("transform", case.source, tmp_path / "x", *case.strategies, "--target-key-file", key, "--json").stdout
    )
    assert shown["encryption"] == "AES-GCM"
    for file in shown["files"]:
        assert (tmp_path / "x" / file["path"]).stat().st_size == file["nbytes"]
    assert shown["target_bytes"] == sum(file["nbytes"] for file in shown["files"])


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
    for command, code, said in (
        (["sealed.json", "d", "--key-file", key], 2, "the target is to be encrypted, and a plan file holds no key"),
        (["sealed.json", "d", "--target-key-file", key], 2, "the source is encrypted, and a plan file holds no key"),
        (["open.json", "d", "--key-file", key, "--target-key-file", key], 2, "the target was planned plain"),
        (["open.json", "d", "--key-file", other], 4, "cannot be decrypted with this key"),
    ):  # fmt: skip
        refused = call("run", *command)
        assert refused.exit_code == code, refused.stderr
        assert said in refused.stderr
        assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("inspect SEALED", 4, "is encrypted (AES-GCM); open it with its key: --key-file FILE"),
        ("inspect SEALED --key-file OTHER", 4, "cannot be decrypted with this key; it is wrong, or the file was"),
        ("inspect PLAIN --key-file KEY", 4, "is not encrypted; leave the key out (--key-file or RESHARD_KEY)"),
        ("inspect SEALED --key-file nothing", 2, "key file nothing: cannot be read: No such file or directory"),
        ("inspect SEALED --key-file .", 2, "key file .: cannot be read: Is a directory"),
        ("inspect SEALED --key-file SHORT", 2, "is not a key; expected 16, 24 or 32 bytes (openssl rand 32), or 48"),
        ("inspect SM4 --key-file OTHER", 2, "is encrypted in mode SM4-CBC: the key has 32 bytes; SM4-CBC takes 16"),
        ("verify SEALED", 2, "the target is encrypted, and a ledger holds no key; give it: --target-key-file"),
        ("verify SEALED --key-file KEY", 2, "the target is encrypted, and a ledger holds no key; give it: --targ"),
        ("verify SEALED --target-key-file OTHER", 4, "cannot be decrypted with this key"),
        ("verify SEALED --against PLAIN", 4, "is encrypted (AES-GCM); open it with its key: --target-key-file FILE"),
        ("verify PLAIN --against SEALED", 4, "is encrypted (AES-GCM); open it with its key: --key-file FILE"),
        ("verify PLAIN --target-key-file KEY", 4, "is not encrypted; leave the key out (--target-key-file or"),
        ("verify SEALED --target-key-file KEY --deduplicated --key-file KEY", 2, "RESHARD_KEY is only for"),
        ("verify SEALED --target-key-file KEY --write-manifest m", 2, "a manifest is of files that are not encrypted"),
        ("convert PLAIN x --format safetensors --target-key-file KEY", 2, "safetensors files are not encrypted"),
        ("unify PLAIN x --key-file KEY", 4, "is not encrypted"),
        ("convert SEALED x --format ckpt", 4, "is encrypted (AES-GCM); open it with its key: --key-file FILE"),
        ("convert PLAIN x --format ckpt --encryption AES-GCM", 2, "give its key too: --target-key-file FILE"),
        ("convert PLAIN x --format ckpt --target-key-file OTHER --encryption SM4-CBC", 2, "SM4-CBC takes 16"),
        ("convert PLAIN x --format ckpt --target-key-file KEY --write-manifest m", 2, "is only for plain checkpoint files, and x is encrypted"),
        ("plan PLAIN --style huggingface --target-key-file KEY", 2, "safetensors files are not encrypted"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(
    case: Case, tmp_path: Path, sealed: Path, plain: Path, key: Path, other: Path,
    monkeypatch: pytest.MonkeyPatch, words: str, code: int, said: str,
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
    result = call(*command)
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert "secret words" not in result.output
    assert tree(tmp_path) == before


def test_another_key_does_not_go_on_where_one_ended(case: Case, sealed: Path, key: Path, other: Path) -> None:
    command = ["transform", case.source, sealed, *case.strategies, "--target-key-file"]
    before = tree(sealed)
    assert "nothing is left to do" in done(*command, key).output
    refused = call(*command, other)
    assert refused.exit_code == 6
    assert "were written by a run of another plan, or with another key" in refused.stderr
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
    refused = call("inspect", tmp_path / "out")
    assert refused.exit_code == 2
    assert "RESHARD_KEY: is not a key" in refused.stderr
    assert "nonsense" not in refused.stderr
    monkeypatch.setenv("RESHARD_KEY", "")
    assert "is encrypted" in call("inspect", tmp_path / "out").stderr


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
    assert f"warning: key file {key}: every user of this machine may read it; chmod 600 {key}" in warned.stderr
    quiet = done("transform", case.source, tmp_path / "q", *case.strategies, "--target-key-file", key, "-q")
    assert not quiet.stderr


def test_no_file_is_written_over_a_key(plain: Path, key: Path) -> None:
    inside = plain / "one"
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
            with pytest.raises(UsageError, match="k: has 32 hexadecimal digits, which may be a key of as many bytes"):
                read_key(digits[0] + end, "k")
    ends = key[:-1] + b"\n"
    assert read_key(ends, "k") == ends
    assert read_key(b"0123456789ABCDEF", "k") == b"0123456789ABCDEF"  # too few digits for a key
    for wrong in (key + b" ", b"", key[:-1], key.hex().encode() + b"0", b"\n" + key, base64.b64encode(key)):
        if len(wrong) not in {16, 24, 32}:  # which text may be, too
            with pytest.raises(UsageError, match=rf"k: is not a key; .* found {len(wrong)} bytes"):
                read_key(wrong, "k")


def test_through_zarr_what_is_plain_is_said(case: Case, sealed: Path, key: Path, tmp_path: Path) -> None:
    options = ["--target-strategy", case.target_strategy, "--key-file", key]
    said = done("transform", sealed, tmp_path / "out", *options, "--via-zarr", tmp_path / "st.zarr", "--json")
    assert f"is encrypted, and what is written is not: {tmp_path / 'st.zarr'} and {tmp_path / 'out'}" in said.stderr


def test_a_strategy_is_checked_with_an_encrypted_checkpoint(case: Case, sealed: Path, key: Path) -> None:
    done("strategy", "check", case.target_strategy, sealed, "--key-file", key)

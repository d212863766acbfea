"""The promises of the documentation, and tests of those that no other file tests.

`promises.md` lists each promise with the tests that try to break it; a test that is gone fails here.
"""

from __future__ import annotations

import ast
import base64
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import assert_rank_files, blocks, numbers, plan_with, tree, write_file, write_ranks
from commands import call, done
from faulty import IMPORTED, Faults, raising
from refusals import failed

import reshard
from reshard import Layout, Strategy
from reshard.core.layout.block import Block
from reshard.core.plan import budget
from reshard.core.storage.base import PARTIAL
from reshard.dtypes import BY_NAME
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

HERE = Path(__file__).parent
PROMISES = re.findall(r"^\| (.+?) \| (`.+`) \|$", (HERE / "promises.md").read_text(), re.MULTILINE)


@cache
def functions_of(name: str) -> set[str]:
    """The test functions of a file."""
    body = ast.parse((HERE / name).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_promises_are_listed() -> None:
    assert len(PROMISES) >= 75


@pytest.mark.parametrize(("promise", "tests"), PROMISES, ids=[promise[:60] for promise, _ in PROMISES])
def test_the_tests_of_a_promise_exist(promise: str, tests: str) -> None:
    for test in re.findall(r"`([^`]+)`", tests):
        name, _, function = test.partition("::")
        assert function in functions_of(name) if function else functions_of(name), f"{test} is not there any more"


# --- what was lacking --------------------------------------------------------------------------------------------

FULL = numbers({"w": (48, 16), "adam_m.w": (48, 16), "b": (24,), "c": (6, 4, 8)})
FULL["h"] = numbers({"h": (16, 8)}, "uint16")["h"]  # stands for bfloat16
SOURCE = Strategy.of(
    {
        "w": Layout.of([4], [0, -1]), "adam_m.w": Layout.of([2, 2], [1, -1], -1), "b": Layout.of([4], [-1]),
        "c": Layout.of([2, 2], [-1, 1, 0]), "h": Layout.of([2, 2], [(1, 0), -1]),
    }
)  # fmt: skip
TARGET = Strategy.of(
    {
        "w": Layout.of([3], [-1, -1], -1), "adam_m.w": Layout.of([3], [0, -1]), "b": Layout.of([3], [0]),
        "c": Layout.of([3], [0, -1, -1]), "h": Layout.of([3], [-1, -1]),
    }
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A source of 4 ranks, and strategies of it and of a target of 3."""
    write_ranks(tmp_path / "src", FULL, SOURCE)
    reshard.write_strategy(SOURCE, tmp_path / "source.ckpt")
    reshard.write_strategy(TARGET, tmp_path / "target.ckpt")
    return tmp_path


def words(folder: Path, out: str, *more: str) -> list[str]:
    """The command that writes the target."""
    strategies = [f"--source-strategy={folder / 'source.ckpt'}", f"--target-strategy={folder / 'target.ckpt'}"]
    return ["convert", str(folder / "src"), str(folder / out), *strategies, *more]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands and tasks so small that a small model has many."""
    monkeypatch.setattr(budget, "BAND_BYTES", 128)
    monkeypatch.setattr(budget, "TASK_BYTES", 512)


class Watched:
    """What is read of sources and written to targets: path, offset, bytes."""

    def __init__(self, faults: Faults) -> None:
        self.read: list[tuple[str, int, int]] = []
        self.written: list[tuple[str, int, int]] = []
        for name, seen in (("read_into", self.read), ("write_at", self.written)):
            faults.every(lambda call, seen=seen: seen.append(call[1:]), name)  # type: ignore[misc]


def test_no_framework_is_needed(folder: Path) -> None:
    """Nothing that would bring one is even looked for, in none of the commands."""
    code = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"mindspore", "torch", "tensorflow", "jax", "transformers", "paddle", "pandas"}:
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Refusing())
import reshard.mindspore
from reshard.cli.main import cli
for line in sys.argv[1:]:
    cli.main(line.split(), standalone_mode=False)
"""
    source = f"--source-strategy={folder / 'source.ckpt'}"
    lines = [
        " ".join(words(folder, "out", "--to=ckpt")),
        f"verify {folder / 'out'} --target-strategy={folder / 'target.ckpt'} --against {folder / 'src'} {source}",
        f"convert {folder / 'src'} {folder / 'set'} {source} --to=hf --cast=float32=bfloat16",
        f"convert {folder / 'src'} {folder / 'store.zarr'} {source} --to=zarr --compression=zstd",
        f"inspect {folder / 'store.zarr'}",
    ]
    subprocess.run([sys.executable, "-c", code, *lines], check=True, capture_output=True, text=True)
    assert_rank_files(folder / "out", FULL, TARGET)


@pytest.mark.usefixtures("small")
def test_each_byte_is_read_once_and_written_once(folder: Path, faults: Faults) -> None:
    plan = reshard.plan(reshard.open(folder / "src", strategy=SOURCE), TARGET)
    seen = Watched(faults)
    plan.run(folder / "out", threads=2)
    read = covered(seen.read)
    assert sum(map(len, read.values())) == sum(array.nbytes for array in FULL.values()), "of each tensor every byte"
    written = covered(seen.written)
    for path, places in written.items():
        assert places == set(range(Path(path).stat().st_size)), "of each file every byte"
    assert len(written) == 3


def covered(ranges: Iterable[tuple[str, int, int]]) -> dict[str, set[int]]:
    """The bytes of each file, of which none may be there twice."""
    found: dict[str, set[int]] = defaultdict(set)
    for path, offset, nbytes in ranges:
        places = set(range(offset, offset + nbytes))
        assert not found[path] & places, f"{path}: bytes {offset} to {offset + nbytes} are there twice"
        found[path] |= places
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("files", [None, MindSporeSet(3000), HuggingFaceSet(), ZarrGroup(100)])
def test_nothing_is_held_that_is_larger_than_a_band(folder: Path, faults: Faults, partition: str, files: Any) -> None:
    """Not even a row: the widest is of 64 bytes, and of three dimensions 128; headers are not tensors."""
    if isinstance(files, ZarrGroup) and partition == "file":
        pytest.skip("local stores are written by tensor")
    target = TARGET if files is None else None
    plan = plan_with(reshard.open(folder / "src", strategy=SOURCE), target, files=files)
    seen = Watched(faults)
    plan.run(folder / "out", partition=partition)
    assert max(nbytes for _, _, nbytes in seen.read) <= 128
    begin = {
        str(folder / "out" / file.path): min(offset for content in file.layout.contents for offset, _ in content.runs)
        for file in plan._record.files
        if file.layout.contents
    }
    own = {
        (str(folder / "out" / file.path), offset) for file in plan._record.files for offset, _ in file.layout.literals
    }
    contents = [
        nbytes
        for path, offset, nbytes in seen.written
        if path in begin and offset >= begin[path] and (path, offset) not in own  # such as the index of a shard
    ]
    assert contents
    assert max(contents) <= 128


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_every_dtype_of_a_format_moves_bit_for_bit(tmp_path: Path, format: str) -> None:
    """Every bit pattern that fits: of wide dtypes a spread of them, infinities and NaNs with their payloads too."""
    from format_files import contents_of, message, st_file

    kinds = [dtype for dtype in BY_NAME.values() if (dtype.mindspore if format == "ckpt" else dtype.safetensors)]
    kinds = [dtype for dtype in kinds if dtype.name not in {"str", *(["int4"] if format == "safetensors" else [])}]
    kinds = [dtype for dtype in kinds if not dtype.bits]  # whose shapes count otherwise: test_formats_narrow
    names = {dtype.name: Layout.of([2], [0]) for dtype in kinds}
    every = {
        dtype.name: b"".join(bytes((byte + turn) % 256 for byte in range(256)) for turn in range(dtype.itemsize))
        for dtype in kinds
    }
    for rank in range(2):
        half = {name: data[len(data) // 2 :] if rank else data[: len(data) // 2] for name, data in every.items()}
        path = tmp_path / f"src/rank_{rank}/a.{format}"
        path.parent.mkdir(parents=True)
        if format == "ckpt":
            path.write_bytes(b"".join(message(d.name, d.mindspore or "", [128], half[d.name]) for d in kinds))
        else:
            place, header = 0, {}
            for dtype in kinds:
                end = place + len(half[dtype.name])
                header[dtype.name] = {"dtype": dtype.safetensors, "shape": [128], "data_offsets": [place, end]}
                place = end
            path.write_bytes(st_file(header, b"".join(half.values())))
    source = reshard.open(tmp_path / "src", strategy=Strategy.of(names))
    reshard.plan(source, Strategy.of({name: Layout.of([4], [0]) for name in names})).run(tmp_path / "four")
    four = reshard.open(tmp_path / "four", strategy=Strategy.of({name: Layout.of([4], [0]) for name in names}))
    reshard.plan(four).run(tmp_path / "whole")
    (path,) = (tmp_path / "whole" / "rank_0").iterdir()
    found = contents_of(path, reshard.open(path)._record.files[0].index)
    assert found == {dtype.name: (dtype.name, (256,), every[dtype.name]) for dtype in kinds}


class StoppedError(Exception):
    """What ends a run at one of its writes."""


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("partition", ["tensor", "file"])
def test_stopped_at_any_write_nothing_half_written_has_a_final_name(
    folder: Path, faults: Faults, partition: str
) -> None:
    """And the same plan goes on: what had its name is not written again, and all is as an undisturbed run makes it."""
    source = reshard.open(folder / "src", strategy=SOURCE)
    plan = reshard.plan(source, TARGET)
    seen = Watched(faults)
    plan.run(folder / "undisturbed", partition=partition)
    expected, count = tree(folder / "undisturbed"), len(seen.written)
    assert count > 60
    for number in range(0, count, 7 if partition == "tensor" else 3):
        out = folder / f"out{number}"
        with stopping(faults, number), pytest.raises(StoppedError):
            plan.run(out, partition=partition, threads=1)
        finished = {path: content for path, content in tree(out).items() if not path.endswith(PARTIAL)}
        assert finished.items() <= expected.items()
        seen.written.clear()
        plan.run(out, partition=partition)
        assert tree(out) == expected
        again = {str(Path(path).relative_to(out)) for path, _, _ in seen.written}
        assert again.isdisjoint(finished)


def stopping(faults: Faults, number: int) -> AbstractContextManager[None]:
    """Have a write fail, and all that come after it."""
    return faults.broken(number, raising(StoppedError()), "write_at", after=True)


@pytest.mark.usefixtures("small")
def test_stopped_at_any_write_a_store_has_no_group(folder: Path, faults: Faults) -> None:
    plan = reshard.plan(reshard.open(folder / "src", strategy=SOURCE), to="zarr", chunk_size=500)
    seen = Watched(faults)
    plan.run(folder / "undisturbed.zarr")
    expected, count = tree(folder / "undisturbed.zarr"), len(seen.written)
    for number in range(0, count, 5):
        out = folder / f"out{number}.zarr"
        with stopping(faults, number), pytest.raises(StoppedError):
            plan.run(out, threads=1)
        assert not (out / "zarr.json").exists()
        assert call("inspect", out).exit_code == 4
        plan.run(out)
        assert tree(out) == expected


def start(folder: Path, out: str, *more: str) -> subprocess.Popen[str]:
    """Begin the command in a process of its own, with writes that take their time."""
    code = """
import sys, time
from reshard.core.plan import budget
from faulty import Faults, MonkeyPatch, install
budget.BAND_BYTES, budget.TASK_BYTES = 128, 512
faults = Faults()
faults.every(lambda call: time.sleep(0.001), "write_at")
install(faults, MonkeyPatch())
from reshard.cli.main import main
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", IMPORTED + code, *words(folder, out, *more)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_processes_write_other_ranks_into_one_directory_at_the_same_time(folder: Path) -> None:
    done(*words(folder, "undisturbed"))
    running = [start(folder, "out", f"--ranks={rank}") for rank in range(3)]
    for process in running:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert tree(folder / "out") == tree(folder / "undisturbed")
    assert "nothing is left to do" in call(*words(folder, "out")).output


def test_processes_that_write_the_same_files_are_kept_apart(folder: Path) -> None:
    done(*words(folder, "undisturbed"))
    running = [start(folder, "out") for _ in range(3)]
    ended = []
    for process in running:
        _, said = process.communicate(timeout=60)
        ended.append(process.returncode)
        assert process.returncode in {0, 6}, said
        assert process.returncode == 0 or "another run writes" in said
    assert 0 in ended
    assert tree(folder / "out") == tree(folder / "undisturbed")


def test_the_key_of_encrypted_files_is_in_no_file_that_is_written(tmp_path: Path, faults: Faults) -> None:
    """Neither in the plan, nor in the ledger of a run that was stopped or is done, nor in a manifest or a report.

    Nor in what a cluster shows of the graph, nor in anything that a command says or writes, whatever goes wrong.
    """
    pytest.importorskip("cryptography")
    key, target_key = b"0123456789ABCDEF", b"a key of thirty-two bytes of text"[:32]
    cipher, target_cipher = reshard.Cipher("AES-GCM", key), reshard.Cipher("AES-CBC", target_key)
    for path in write_ranks(tmp_path / "src", FULL, SOURCE, "ckpt").rglob("*.ckpt"):
        path.write_bytes(b"".join(cipher.encrypt([path.read_bytes()])))
    source = reshard.open(tmp_path / "src", strategy=SOURCE, cipher=cipher)
    made = tmp_path / "made"
    made.mkdir()
    plan = reshard.plan(source, TARGET)
    plan.save(made / "plan.json")
    encrypting = reshard.plan(source, TARGET, to="ckpt", target_cipher=target_cipher)
    encrypting.save(made / "encrypting.json")
    with stopping(faults, 5), pytest.raises(StoppedError):
        encrypting.run(made / "encrypted and stopped", threads=1)
    written = encrypting.run(made / "encrypted")
    said = commands_with_keys(tmp_path, made, key, target_key)
    with stopping(faults, 5), pytest.raises(StoppedError):
        plan.run(made / "stopped", threads=1)
    report = plan.run(made / "out")
    report.write_manifest(made / "manifest.json")
    source.to_zarr(made / "store.zarr")
    spelled = [
        text.encode() if isinstance(text, str) else text
        for one in (key, target_key)
        for text in (one, one.hex(), one.hex().upper(), base64.b64encode(one), repr(one)[2:-1], str(list(one))[1:-1])
    ]
    files = [path for path in made.rglob("*") if path.is_file()]
    assert any(".reshard" in path.parts for path in files)
    for path in files:
        content = path.read_bytes()
        assert not any(text in content for text in spelled), path
    graph = dict(encrypting.graph(made / "never").dask)
    told = (
        f"{plan!r} {report!r} {source!r} {cipher!r} {encrypting!r} {encrypting._record.request!r} {written!r} {graph!r}"
    )
    told += f"{encrypting._repr_html_()} {written._repr_html_()} {encrypting.picture()._repr_html_()} {said}"
    assert "Cipher" in told
    assert len(said) > 10_000
    told = told.encode()
    assert not any(text in told for text in spelled)


def commands_with_keys(tmp_path: Path, made: Path, key: bytes, target_key: bytes) -> str:
    """Type commands with keys that are right, wrong and no keys; return all that they say."""
    reshard.write_strategy(SOURCE, tmp_path / "source.ckpt")
    reshard.write_strategy(TARGET, tmp_path / "target.ckpt")
    keys = {"right": key, "other": target_key, "longer": key.hex().encode() + target_key.hex().encode()}
    for name, content in keys.items():
        (tmp_path / name).write_bytes(content)
    right, other = ("--key-file", tmp_path / "right"), ("--target-key-file", tmp_path / "other")
    strategies = ["--source-strategy", tmp_path / "source.ckpt", "--target-strategy", tmp_path / "target.ckpt"]
    typed = ["convert", tmp_path / "src", made / "typed", *strategies, *right, *other]
    found = ""
    for command, code in (
        (["plan", *typed[1:], "-o", made / "typed.json", "--json"], 2),  # a plan file takes no target of elsewhere
        (["plan", *typed[1:2], *typed[3:], "-o", made / "typed.json", "--json"], 0),
        ([*typed, "--dry-run"], 0),
        ([*typed, "--json"], 0),
        (["verify", made / "typed", *right, *other, "--json"], 0),
        (["inspect", made / "typed", "--key-file", tmp_path / "other"], 0),
        (["inspect", made / "typed", "--key-file", tmp_path / "right"], 4),
        (["inspect", made / "typed", "--key-file", tmp_path / "longer"], 2),
        (["run", made / "typed.json", made / "run", *right, *other, "--json"], 0),
        (["run", made / "typed.json", made / "run", *right], 2),
        (["convert", *typed[1:], "--encryption", "SM4-CBC"], 2),
        ([*typed[:-2], "--target-key-file", tmp_path / "right"], 6),
    ):
        result = call(*command, "--debug")
        assert result.exit_code == code, result.output
        found += result.stdout + result.stderr
    return found


@pytest.mark.parametrize("shape", [(4096, 4096), (3, 1 << 23), (5000, 7, 1000), (1 << 24,), (2, 3, 1 << 21)])
@pytest.mark.parametrize("chunk_bytes", [None, 16 << 20])
def test_compressed_chunks_are_4_mib_at_most(shape: tuple[int, ...], chunk_bytes: int | None) -> None:
    array = ZarrGroup(chunk_bytes, compression="zstd").array(shape, BY_NAME["float32"], [Block.whole(shape)])
    assert prod(array.chunk) * 4 <= (chunk_bytes or 4 << 20)


REFUSED = {
    "a missing rank": ("missing-ranks", "rank 3"),
    "a header that contradicts the strategy": ("wrong-shape", "'w'"),
    "mixed steps": ("no-common-checkpoint", "net-2_10.safetensors"),
    "split but not listed": ("unlisted-tensor", "'c'"),
    "listed but whole": ("saved-whole", "'w', 'h'"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_refused_is_refused_by_every_command(tmp_path: Path, fault: str) -> None:
    """By `convert` in each form, `plan` and `inspect`; nothing is written."""
    full, strategy = dict(FULL), SOURCE
    if fault == "listed but whole":
        full = {name: FULL[name] for name in ("w", "h")}
    if fault == "split but not listed":
        strategy = Strategy.of({name: placed[0].layout for name, placed in SOURCE.tensors.items() if name != "c"})
    root = write_ranks(tmp_path / "src", full, SOURCE)
    if fault == "a missing rank":
        (root / "rank_3/checkpoint_3.safetensors").unlink()
    elif fault == "a header that contradicts the strategy":
        other = {**blocks(full, SOURCE, 2), "w": full["w"][:6]}  # ranks 0, 1 and 3 have 12 rows
        write_file(root / "rank_2/checkpoint_2.safetensors", other)
    elif fault == "mixed steps":
        for rank in range(4):
            path = root / f"rank_{rank}/checkpoint_{rank}.safetensors"
            path.rename(path.with_stem(f"net-{1 + rank // 2}_10"))
    elif fault == "listed but whole":
        for rank in range(4):
            write_file(root / f"rank_{rank}/checkpoint_{rank}.safetensors", full)
        strategy = Strategy.of({name: SOURCE.tensors[name][0].layout for name in full})
    reshard.write_strategy(strategy, tmp_path / "source.ckpt")
    source = [tmp_path / "src", f"--source-strategy={tmp_path / 'source.ckpt'}"]
    for command in (
        ["convert", *source, tmp_path / "out"],
        ["convert", "--to=mindspore", *source, tmp_path / "out"],
        ["convert", *source, tmp_path / "out", "--to=hf"],
        ["convert", *source, tmp_path / "out", "--to=zarr"],
        ["plan", *source, "-o", tmp_path / "out"],
        ["inspect", *source],
    ):
        code, place = REFUSED[fault]
        failed(4, code, *command, places=(place,))
        assert not (tmp_path / "out").exists()


def test_exit_codes_are_those_of_the_readme(folder: Path) -> None:
    source = f"--source-strategy={folder / 'source.ckpt'}"
    target = f"--target-strategy={folder / 'target.ckpt'}"
    assert call(*words(folder, "out")).exit_code == 0
    assert call(*words(folder, "new", "--ranks=7")).exit_code == 2
    assert call(*words(folder, "new", "--no-such-option")).exit_code == 2
    verify = ["verify", folder / "out", target, "--against", folder / "src", source]
    assert call(*verify).exit_code == 0
    path = folder / "out/rank_1/checkpoint_1.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert call(*verify).exit_code == 3
    assert call("strategy", "diff", folder / "source.ckpt", folder / "target.ckpt").exit_code == 3
    path.write_bytes(content[:-1])
    assert call(*verify).exit_code == 4
    (folder / "cut.ckpt").write_bytes((folder / "target.ckpt").read_bytes()[:-3])
    assert call("strategy", "show", folder / "cut.ckpt").exit_code == 4
    assert call(*words(folder, "new", "--memory=1MB")).exit_code == 5
    (folder / "somebody/rank_0").mkdir(parents=True)
    (folder / "somebody/rank_0/checkpoint_0.safetensors").write_bytes(b"theirs")
    assert call(*words(folder, "somebody")).exit_code == 6
    assert done("convert", folder / "src", folder / "store.zarr", source, "--to=zarr").exit_code == 0
    assert call("convert", folder / "src", folder / "store.zarr", source, "--to=zarr").exit_code == 0
    (folder / "store.zarr/mine").write_bytes(b"theirs")
    assert call("convert", folder / "src", folder / "store.zarr", source, "--to=zarr").exit_code == 6
    assert (folder / "somebody/rank_0/checkpoint_0.safetensors").read_bytes() == b"theirs"
    assert not (folder / "new").exists()

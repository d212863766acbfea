"""Run the tutorial's example on real MindSpore files: convert 8 ranks to 4 with optimizer parallel, check every byte.

The check is independent of plans: protobuf parses the target files, and each tensor is compared with a numpy slice of
the whole tensors that MindSpore put into the network (`api/demos/README.md` gives the origin of the files).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.api.demos import MARK
from reshard.api.demos import demo as write_demo
from reshard.api.formats import options_of
from reshard.core.format import written
from reshard.core.open import open as open_checkpoint
from reshard.core.plan.make import plan
from reshard.core.run.run import run
from reshard.core.run.settings import RunOptions
from reshard.dtypes import BY_NAME
from reshard.errors import VerifyError, bytes_text, names
from reshard.strategy.files import read_strategy
from reshard.strategy.proto import message_class
from reshard.view.text import count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.core.run.settings import Report

Array = np.ndarray[Any, np.dtype[Any]]
Stored = tuple[str, tuple[int, ...], bytes]  # the type's MindSpore name, the shape, the contents


@dataclass(frozen=True, slots=True)
class Checked:
    """The numbers of target files, tensors and bytes that were compared."""

    files: int
    tensors: int
    nbytes: int


def demo(name: str, directory: Path | None, say: Callable[[str], object] = print, command: str = "reshard") -> None:
    """Make a demo in a folder, and print what is in it; convert and check that of MindSpore.

    Args:
        name: the name of the demo.
        directory: the folder; it may be a demo's already. None: `reshard-demo`, or `reshard-demo-NAME` of others.
        say: called with each line.
        command: how the user runs `reshard`.

    Raises:
        UsageError: there is no such demo.
        TargetError: the folder exists and is not a demo's.
        VerifyError: a byte of the result is wrong.
    """
    if name == "mindspore":
        _convert_and_check(directory or Path("reshard-demo"), say, command)
        return
    folder = write_demo(name, directory)
    say(f"In {folder}:")
    for line in (folder / MARK).read_text(encoding="utf-8").splitlines()[2:]:
        say(f"  {line}")


def _convert_and_check(directory: Path, say: Callable[[str], object], command: str) -> None:
    """Make the demo of MindSpore, convert it, check every byte, and print next commands."""
    write_demo("mindspore", directory)
    nbytes = sum(path.stat().st_size for path in directory.glob("src_checkpoints/*/*"))
    say(f"In {directory}:")
    say(f"  src_checkpoints/   a checkpoint of 8 ranks, from MindSpore 2.10: 8 files, {bytes_text(nbytes)}")
    say("  src_strategy.ckpt  which rank of the 8 holds which block of each tensor")
    say("  dst_strategy.ckpt  the same network over 4 ranks, with optimizer parallel")
    say("  full.npz           the whole tensors, to check against")
    say("")
    report = convert(directory)
    say(
        f"Converted 8 ranks to 4 in {report.seconds:.2f} s: read {bytes_text(report.bytes_read)}, wrote "
        f"{count_text(len(report.files), 'file')} below {directory / 'dst_checkpoints'}."
    )
    checked = check(directory)
    say(
        f"Checked {count_text(checked.files, 'file')}: all {checked.nbytes:,} bytes of their {checked.tensors} tensors "
        "are equal to numpy slices of the whole tensors."
    )
    written = check_library(directory)
    say(
        f"Wrote {written.tensors} whole tensors below {directory / 'hf'}, and read them with Hugging Face's library "
        f"safetensors: all {written.nbytes:,} bytes are equal."
    )
    say("")
    say(_next(directory, command))


def convert(directory: Path) -> Report:
    """Convert the demo's checkpoint, as `reshard convert` does."""
    source = open_checkpoint(directory / "src_checkpoints", strategy=directory / "src_strategy.ckpt")
    target = read_strategy(directory / "dst_strategy.ckpt")
    return run(plan(source, target), directory / "dst_checkpoints", RunOptions(overwrite=True))


def check_library(directory: Path) -> Checked:
    """Write a Hugging Face set, and compare it, read by the safetensors library, with numpy.

    Raises:
        VerifyError: something differs.
    """
    from safetensors import safe_open

    source = open_checkpoint(directory / "src_checkpoints", strategy=directory / "src_strategy.ckpt")
    report = run(
        plan(source, format="safetensors", files=options_of(written("hf"), {})),
        directory / "hf",
        RunOptions(overwrite=True),
    )
    with np.load(directory / "full.npz", allow_pickle=False) as arrays:
        whole: dict[str, Array] = {name: arrays[name] for name in arrays.files}
    count = nbytes = 0
    for name in report.files:
        if not name.endswith(".safetensors"):
            continue
        with safe_open(str(directory / "hf" / name), framework="numpy") as file:
            for tensor in whole.keys() & {*file.keys()}:
                read, expected = file.get_tensor(tensor), whole[tensor]
                if (read.shape, read.tobytes()) != (expected.shape, expected.tobytes()):
                    raise VerifyError(f"{name}: tensor {tensor!r} differs in the safetensors library", code="demo")
                count, nbytes = count + 1, nbytes + read.nbytes
    if count != len(whole):
        raise VerifyError(f"{directory / 'hf'} has {count} of {len(whole)} tensors", code="demo")
    return Checked(len(report.files), count, nbytes)


def check(directory: Path) -> Checked:
    """Compare every tensor of every target rank with a slice of the whole tensor.

    Tensors that no strategy names (`global_step` and so on) are compared with source rank 0.

    Raises:
        VerifyError: something differs; the message names the first byte.
    """
    target = read_strategy(directory / "dst_strategy.ckpt")
    with np.load(directory / "full.npz", allow_pickle=False) as arrays:
        whole: dict[str, Array] = {name: arrays[name] for name in arrays.files}
    blocks = {name: target.grid(name, array.shape).by_rank() for name, array in whole.items()}
    first = _parsed(directory / "src_checkpoints" / "rank_0" / "checkpoint_0.ckpt")
    copies = {name: stored for name, stored in first.items() if name not in whole}
    tensors = nbytes = 0
    for rank in target.ranks:
        path = directory / "dst_checkpoints" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        expected = dict(copies)
        for name, array in whole.items():
            block = blocks[name][rank]
            expected[name] = _stored(array[tuple(map(slice, block.start, block.stop))])
        actual = _parsed(path)
        _compare(path, actual, expected)
        tensors += len(actual)
        nbytes += sum(len(content) for _, _, content in actual.values())
    return Checked(len(target.ranks), tensors, nbytes)


def _parsed(path: Path) -> dict[str, Stored]:
    """Parse a `.ckpt` file by protobuf alone, without `reshard.formats`."""
    message: Any = message_class("Checkpoint")()
    try:
        message.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError, or a missing file
        raise VerifyError(f"cannot read {path} back", code="cannot-read", facts=[str(error)]) from error
    return {
        value.tag: (value.tensor.tensor_type, tuple(value.tensor.dims), value.tensor.tensor_content)
        for value in message.value
    }


def _stored(array: Array) -> Stored:
    little = array.dtype.newbyteorder("<")
    return BY_NAME[array.dtype.name].mindspore or "", array.shape, array.astype(little).tobytes()


def _compare(path: Path, actual: Mapping[str, Stored], expected: Mapping[str, Stored]) -> None:
    if actual.keys() != expected.keys():
        raise VerifyError(
            f"{path} does not hold the tensors it should",
            code="missing-tensor",
            facts=[f"only in one of the two: {names(sorted(actual.keys() ^ expected.keys()))}"],
        )
    for name, (kind, shape, content) in expected.items():
        if actual[name][:2] != (kind, shape) or len(actual[name][2]) != len(content):
            raise VerifyError(
                f"tensor {name!r} of {path} is {actual[name][:2]}; expected {(kind, shape)}", code="wrong-shape"
            )
        if actual[name][2] != content:
            at = next(i for i, (a, b) in enumerate(zip(actual[name][2], content, strict=True)) if a != b)
            raise VerifyError(
                f"tensor {name!r} of {path} differs from its slice of the whole tensor",
                code="not-equal",
                facts=[f"byte {at} is {actual[name][2][at]:#04x}, expected {content[at]:#04x}"],
                hint="if nobody changed the files meanwhile, reshard is at fault: please report it",
            )


def _next(directory: Path, command: str) -> str:
    """Return the text that proposes commands to try next."""

    def quoted(name: str) -> str:
        return shlex.quote(str(directory / name))

    source = f"{quoted('src_checkpoints')} --source-strategy {quoted('src_strategy.ckpt')}"
    both = f"--source-strategy {quoted('src_strategy.ckpt')} --target-strategy {quoted('dst_strategy.ckpt')}"
    return f"""\
What to type next:

  # the tensors of the source, and how they are cut
  {command} inspect {source}
  {command} strategy show {quoted("dst_strategy.ckpt")}

  # what a conversion would read and write; then do it, as safetensors
  {command} convert {quoted("src_checkpoints")} {quoted("dst_safetensors")} --to safetensors {both} --dry-run
  {command} convert {quoted("src_checkpoints")} {quoted("dst_safetensors")} --to safetensors {both}

  # is every bit as it was?
  {command} verify {quoted("dst_safetensors")}

  # whole tensors for Hugging Face: leave the target strategy out
  {command} convert {quoted("dst_safetensors")} {quoted("weights")} --to hf --weights-only

The same from Python:

  import reshard
  source = reshard.open({str(directory / "src_checkpoints")!r}, strategy={str(directory / "src_strategy.ckpt")!r})
  source["net.layer1.weight"]            # a lazy dask array, one chunk a source shard
  target = reshard.read_strategy({str(directory / "dst_strategy.ckpt")!r})
  plan = reshard.plan(source, target)    # nothing is read yet
  plan.rank(3)["net.layer1.weight"].compute()
  plan.run({str(directory / "dst_again")!r})"""

"""Runs the commands of hostile items in one process, and prints a line of JSON for each.

Every command runs with so much address space above what the process has and no more, and is stopped after some
seconds. The directory of the item, a target apart, must be the same after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

import corpus
from item import Item
from makers import proto, strategy
from refusals import reported

import reshard
from reshard import mindspore
from reshard.cli.main import cli
from reshard.cli.terminal import OPTIONS
from reshard.errors import spelled

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = reshard.Cipher("AES-GCM", bytes(16))

API: dict[str, Callable[..., object]] = {
    "open": reshard.open,
    "open_rank": lambda path: reshard.open({0: path}),
    "load_checkpoint": lambda path: mindspore.load_checkpoint(path, format=path.rpartition(".")[2]),
    "open_with_key": lambda path: reshard.open(path, cipher=KEY),
    "load_with_key": lambda path: mindspore.load_checkpoint(path, dec_key=KEY.key),
    "transform_with_prefix": lambda source, out, strategy, prefix: mindspore.transform_checkpoints(
        source, out, prefix, strategy, strategy
    ),
    "convert_file": lambda path, out: {
        ".ckpt": mindspore.ckpt_to_safetensors,
        ".safetensors": mindspore.safetensors_to_ckpt,
    }[Path(path).suffix](path, out),
    "read_strategy": reshard.read_strategy,
    "rank_list_for_transform": lambda source, target: mindspore.rank_list_for_transform(0, source, target),
    "merge_pipeline_strategys": mindspore.merge_pipeline_strategys,
    "get_parameter_redundancy": mindspore.get_parameter_redundancy,
}


def main(groups: list[str], *, slow: bool, every: int) -> None:
    """Run the items of some groups in the current directory."""
    faulthandler.enable()
    without_privileges()
    signal.signal(signal.SIGALRM, too_long)
    signal.signal(signal.SIGPROF, too_long)
    sound = make_sound(Path("valid").absolute())
    warm_up(sound)
    for group, item, commands in corpus.chosen(groups, slow=slow, every=every):
        directory = Path("item").absolute()
        bad = prepare(item, directory)
        names = sound | {"bad": bad, "set": directory / "set", "dir": directory / "dir", "out": directory / "out"}
        for command in commands:
            if item.file == "out" and not os.path.lexists(bad):
                item.make(directory)
            before, target = snapshot(directory), snapshot(names["out"])
            began = time.monotonic()
            code, codes, said, shown = run(command, {name: str(path) for name, path in names.items()}, item)
            after = snapshot(names["out"])
            found = {
                "item": (group, item.name, command), "code": code, "codes": codes,
                "said": said.replace(str(Path.cwd()), ""), "shown": shown,
                "seconds": time.monotonic() - began, "disturbed": snapshot(directory) != before,
                "left": sorted(path for path, state in after.items() - target.items() if S_ISREG(state[1])),
            }  # fmt: skip
            print(json.dumps(found), flush=True)
            remove(names["out"])
        for path in directory.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(directory)


def prepare(item: Item, directory: Path) -> Path:
    """Make the item, two rank directories that both have it, and a directory that has it alone."""
    (directory / "outside").mkdir(parents=True)
    (directory / "outside/keep").write_text("kept")
    bad = item.make(directory)
    for name in ("set/rank_0", "set/rank_1", "dir"):
        (directory / name).mkdir(parents=True)
        (directory / name / bad.name).symlink_to(bad)
    return bad


def make_sound(directory: Path) -> dict[str, Path]:
    """Make what commands need next to the item."""
    for rank in range(2):
        (directory / f"ranks/rank_{rank}").mkdir(parents=True)
        (directory / f"ranks/rank_{rank}/a.ckpt").write_bytes(proto(content=b"abcdefgh"[4 * rank :][:4]))
    (directory / "file.ckpt").write_bytes(proto())
    (directory / "strategy.ckpt").write_bytes(strategy(w=([2], [0])).SerializeToString())
    (directory / "strategies").mkdir()
    (directory / "strategies/a.ckpt").write_bytes(strategy(w=([2], [0])).SerializeToString())
    (directory / "rules.yaml").write_text("mesh: {mp: 2}\nrules: {w: [mp]}\n")
    return {
        "ranks": directory / "ranks", "file": directory / "file.ckpt", "strategy": directory / "strategy.ckpt",
        "rules": directory / "rules.yaml", "strategies": directory / "strategies",
    }  # fmt: skip


def warm_up(sound: dict[str, Path]) -> None:
    """Import what commands import, which is not a memory that an item takes."""
    out = Path("warm").absolute()
    names = {name: str(path) for name, path in sound.items()} | {"out": str(out)}
    for command in (
        "inspect {file}", "convert {ranks} {out} --source-strategy {strategy}", "strategy show {strategy}",
        "strategy diff {strategy} {strategy}", "strategy make {rules} --like {file} -o {out}/made",
        ".load_checkpoint {file}", "verify {file} --against {file}", "plan {file}",
        "verify {file} --write-manifest {out}/m.json", "verify {file} --manifest {out}/m.json",
        "plan {ranks} -o {out}/plan.json --source-strategy {strategy}", "run {out}/plan.json {out}/planned",
    ):  # fmt: skip
        code, _, said, _ = run(command, names, Item("", b"", "", headroom=1 << 34))
        assert code == 0, said
    shutil.rmtree(out)


def run(command: str, names: dict[str, str], item: Item) -> tuple[int, tuple[str, ...], str, str]:
    """Run a command; return its exit code, the codes of its error, what it said on stderr, and showed on stdout."""
    words = [word.format(**names) for word in command.split()]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    errors: list[BaseException] = []
    codes: tuple[str, ...] = ()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    faulthandler.dump_traceback_later(6 * item.seconds, exit=True)  # for a loop in C, which no signal ends
    signal.setitimer(signal.ITIMER_PROF, item.seconds)  # of processor time, which a busy machine does not lengthen
    signal.setitimer(signal.ITIMER_REAL, 4 * item.seconds)  # for what waits
    resource.setrlimit(resource.RLIMIT_AS, (used + item.headroom, limit))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), reported() as errors:
            if words[0].startswith("."):
                API[words[0][1:]](*words[1:])
            else:
                cli.main(words, prog_name="reshard")
    except SystemExit as done:
        code = int(done.code or 0)
        codes = tuple(each for error in errors for each in getattr(error, "codes", ("failed",)))
    except reshard.ReshardError as error:
        code, codes = error.exit_code, error.codes
        err.write(f"error: {spelled(error.text, OPTIONS)}\n")
    except BaseException as error:
        code = -1
        err.write(f"unexpected {type(error).__name__}: {error}\n")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    return code, codes, err.getvalue(), out.getvalue()[:1_000_000]


def too_long(_signum: int, _frame: object) -> None:
    raise RuntimeError("not done in time")


def snapshot(directory: Path) -> dict[str, tuple[int, ...]]:
    """Everything below a directory that is not a target, with what changes when it is written."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.relative_to(directory).parts[0] not in {
            "out",
            ".reshard",
        }:  # ledgers are next to a target that is a file
            status = path.lstat()
            found[str(path)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for directory in path.glob(".reshard"):
            if not directory.is_symlink():
                directory.chmod(0o700)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def without_privileges() -> None:
    """Have root obey the permissions of files, as every user does: drop the two capabilities that pass over them."""
    if os.geteuid():
        return
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # linux/capability.h, version 3
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    libc = ctypes.CDLL(None, use_errno=True)
    libc.capget(header, sets)
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    place, which, step, *names = sys.argv[1:]
    os.chdir(place)
    main(names, slow=which == "slow", every=int(step))

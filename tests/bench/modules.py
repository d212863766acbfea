"""Count the modules of reshard that take part in a command, and those that are on the way of its bytes.

    python tests/bench/modules.py                   # safetensors of 4 ranks to 2 ranks, which it makes
    python tests/bench/modules.py convert SRC DST --source-strategy ...

A module takes part if one of its functions runs. It is on the way of a byte if it is on the stack when bytes of a
checkpoint are read or written.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import reshard
from reshard.cli.main import main

if TYPE_CHECKING:
    from types import FrameType

PACKAGE = f"{Path(reshard.__file__).parent}/"
CALLS = {os.preadv, os.pread, os.pwrite, os.pwritev}
FUNCTION = 1  # CO_OPTIMIZED, which the body of a class or module is not


class Trace:
    """The functions that ran, by module, and the modules on the way of bytes."""

    def __init__(self) -> None:
        self.ran: dict[str, Counter[str]] = defaultdict(Counter)
        self.on_the_way: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_flags & FUNCTION and (module := _module(frame)):
            self.ran[module][frame.f_code.co_qualname] += 1
        elif event == "c_call" and argument in CALLS:
            main_frame = sys._current_frames()[threading.main_thread().ident or 0]
            for start in {frame, main_frame}:
                on_stack = start
                while on_stack is not None:
                    if module := _module(on_stack):
                        self.on_the_way[module] += 1
                    on_stack = on_stack.f_back  # type: ignore[assignment]


def _module(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else ""


def _example(root: Path) -> list[str]:
    """Write the files of 4 ranks and two strategies; return a command."""
    import numpy as np
    from safetensors.numpy import save_file

    for rank in range(4):
        directory = root / "src" / f"rank_{rank}"
        directory.mkdir(parents=True)
        tensors = {f"layer{n}.weight": np.full((4, 8), 10 * rank + n, np.float32) for n in range(4)}
        save_file(tensors, directory / f"checkpoint_{rank}.safetensors")
    command = ["convert", str(root / "src"), str(root / "dst")]
    for option, layout in (("source", ([4], [0, -1])), ("target", ([2], [-1, 0]))):
        path = root / f"{option}.json"
        layouts = {f"layer{n}.weight": reshard.Layout.of(*layout) for n in range(4)}
        reshard.write_strategy(reshard.Strategy.of(layouts), path)
        command += [f"--{option}-strategy", str(path)]
    return command


def traced(command: list[str]) -> Trace:
    """Run a command of the command line, and return what ran."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        main(command)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed
    return trace


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        trace = traced(sys.argv[1:] or _example(Path(temporary)))
    for module, functions_by_name in sorted(trace.ran.items()):
        mark = "*" if module in trace.on_the_way else " "
        print(f"{mark} {module}: {', '.join(f'{name} {count}' for name, count in functions_by_name.items())}")
    functions = sum(map(len, trace.ran.values()))
    print(f"{len(trace.ran)} modules, {functions} functions; on the way of bytes {len(trace.on_the_way)} modules (*)")

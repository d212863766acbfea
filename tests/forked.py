"""A `reshard` that starts at once: a process that has imported what commands import forks itself for each command.

What a command has of its own stays its own: arguments, working directory, environment, standard streams, exit code.
Only the imports are shared, which are most of what a short command takes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPORTED = ("dask.array", "dask.threaded", "ml_dtypes", "yaml", "zarr", "google.protobuf.message", "reshard.cli.main")

# Gives what it was started with to the process that has the imports, and ends as what that made of it does.
_CLIENT = """#!{python} -ISE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    asked = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(connection, [len(asked).to_bytes(4)], [0, 1, 2])
    connection.sendall(asked)
    answer = b""
    while content := connection.recv(16):
        answer += content
os._exit(int(answer))
"""


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for PATH that has a `reshard` as `reshard` is, but for its imports."""
    folder = tmp_path_factory.mktemp("forked")
    address = folder / "socket"
    (folder / "reshard").write_text(_CLIENT.format(python=sys.executable, address=str(address)))
    (folder / "reshard").chmod(0o700)
    process = subprocess.Popen(  # whose streams are pipes, as those of a command whose output is looked at
        [sys.executable, __file__, str(address)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        while not address.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield folder
    finally:
        process.kill()
        process.communicate()


def serve(address: str) -> None:
    """Fork for each that connects; return in the child, as the command that was asked for."""
    for name in IMPORTED:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")
        listening.listen()
        Path(f"{address}.new").rename(address)  # there when it is heard
        while True:
            connection, _ = listening.accept()
            if not os.fork():
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as asked:
        sys.argv, folder, environment = json.loads(asked.read(int.from_bytes(length)))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    from reshard.__main__ import main

    code = 1
    try:
        main()
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(bool(done.code))
        raise
    finally:
        connection.sendall(str(code).encode())
        connection.detach()  # closed when the process has ended, and all is written


if __name__ == "__main__":
    serve(sys.argv[1])

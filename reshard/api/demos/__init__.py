"""`reshard.demo`: small checkpoints to try things on, for notebooks, guides and the command `reshard demo`."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.api.demos.examples import seventy_billion, torchtitan, training, unpack_mindspore, write_large
from reshard.arguments import checked
from reshard.core.records.logs import DIRECTORY
from reshard.core.records.made import made_of
from reshard.core.storage.places import as_place
from reshard.errors import ReshardError, TargetError, UsageError

if TYPE_CHECKING:
    import os

MARK = "reshard-demo.txt"
"""The name of the file by which a folder is known as a demo's."""

_NOTE = "`reshard demo` made these files, and replaces them when it is run again:\n\n"

_DEMOS = {
    "mindspore": (
        unpack_mindspore,
        """\
src_checkpoints/   8 ranks as MindSpore 2.10 saved them
src_strategy.ckpt  which rank of these holds which block
dst_strategy.ckpt  the same network over 4 ranks, with optimizer parallel
full.npz           the whole tensors
dst_checkpoints/   what `reshard demo` makes: 4 ranks
hf/                what `reshard demo` makes: whole tensors in safetensors files
""",
    ),
    "large": (
        write_large,
        """\
src_checkpoints/   a model of 537 MB over 8 ranks, cut by rows
src_strategy.ckpt  which rank of these holds which block
dst_strategy.ckpt  the same model over 4 ranks, cut by columns
""",
    ),
    "70b": (
        seventy_billion,
        """\
src_checkpoints/   a model of 70 billion parameters on 512 ranks; its numbers are holes, which take no space
src_strategy.ckpt  which rank of these holds which block
dst_strategy.ckpt  the same model over 64 ranks
""",
    ),
    "torchtitan": (
        torchtitan,
        """\
step-1000/         a distributed checkpoint of 8 ranks, as torchtitan saves it
model.safetensors  the same tensors, whole
""",
    ),
    "training": (
        training,
        """\
step-1000/         a model over 8 ranks, in safetensors files
step-2000/         the same model later, as a distributed checkpoint of PyTorch, with a NaN
step-3000/         the same model at the end, as a set for Hugging Face
step-100/          a smaller model over 4 ranks, as a distributed checkpoint of PyTorch
step-200/          the same model later
step-300/          the same model at the end
crashed/           a run whose last step was interrupted, and an older run
""",
    ),
}


@checked
def demo(name: str = "mindspore", directory: str | os.PathLike[str] | None = None) -> Path:
    """Write a small checkpoint to try things on, and return its folder.

    | name | files |
    |---|---|
    | `mindspore` | `src_checkpoints` of 8 ranks, by MindSpore; `src_strategy.ckpt`; `dst_strategy.ckpt` for 4 ranks |
    | `large` | the same, 537 MB |
    | `70b` | the same, 70 billion parameters on 512 ranks and for 64; 20 MB of disk, with holes for numbers |
    | `torchtitan` | `step-1000`, a distributed checkpoint of 8 ranks with Adam; `model.safetensors`, the same whole |
    | `training` | `step-1000` to `step-3000` in three formats, one with a NaN; `step-100` to `step-300`; `crashed` |

    The tensors of a name are always the same.

    Args:
        name: which checkpoint.
        directory: the folder; by default `reshard-demo-NAME` in the current directory. If a demo is in it, the demo's
            files are replaced, and what reshard made of them is removed; other files stay.

    Raises:
        reshard.UsageError: there is no such checkpoint.
        reshard.TargetError: the folder has files, and is not a demo's; or it cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     home = demo("mindspore", folder)
    ...     sorted(path.name for path in home.iterdir())
    ['dst_strategy.ckpt', 'full.npz', 'reshard-demo.txt', 'src_checkpoints', 'src_strategy.ckpt']
    """
    if name not in _DEMOS:
        raise UsageError(
            f"there is no demo {name!r}", code="unknown-demo", hint=f"the demos are {', '.join(_DEMOS)}"
        )  # fmt: skip
    write, note = _DEMOS[name]
    folder = Path(f"reshard-demo-{name}" if directory is None else directory).expanduser()
    try:
        _empty(folder)
        (folder / MARK).write_text(_NOTE + note, encoding="utf-8")
        write(folder)
    except OSError as error:
        raise TargetError(f"cannot write {error.filename or folder}: {error.strerror}", code="not-writable") from error
    return folder


def _empty(folder: Path) -> None:
    """Make a folder, or remove the files of an earlier demo from it.

    Raises:
        TargetError: the folder has files and is not a demo's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = list(folder.iterdir())
    if paths and not (folder / MARK).is_file():
        raise TargetError(
            f"{folder} already exists, and `reshard demo` did not make it", code="already-exists",
            hint="name another folder",
        )  # fmt: skip
    for path in [path for path in paths if path.name in _own_names() or _is_made_here(path)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _own_names() -> set[str]:
    """Return the names of the files and folders of all demos."""
    lines = [line for _, note in _DEMOS.values() for line in note.splitlines()]
    return {MARK, DIRECTORY, *(line.split()[0].rstrip("/") for line in lines)}


def _is_made_here(path: Path) -> bool:
    """Return whether reshard made a path, or the ledger of one, from a checkpoint in the same folder."""
    target = path.with_name(path.name.removesuffix(DIRECTORY))
    made = None
    if not path.is_symlink():
        with suppress(ReshardError):
            made = made_of(as_place(str(target)))
    return made is not None and path.parent.absolute() in Path(made.provenance.source.root).parents

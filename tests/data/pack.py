"""Pack a folder of other programs' files into the archives next to this script.

    python tests/data/pack.py FOLDER

One `<name>.tar.xz` a sub-folder; the same files always give the same bytes (sorted, no times, no owners).
"""

from __future__ import annotations

import lzma
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = (
    "averages",
    "cases",
    "checkpoint2",
    "checkpoint2_more",
    "dcp",
    "deduplicated",
    "deepspeed",
    "deepspeed_parts",
    "directories",
    "encrypted",
    "megatron_legacy",
    "merged",
    "orbax",
    "peft",
    "quantized",
    "real",
    "strategies",
)


def pack(folder: Path, archive: Path) -> None:
    """Write every file of a folder into an archive, under the folder's name."""
    with (
        lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            member = tarfile.TarInfo(path.relative_to(folder.parent).as_posix())
            member.size = path.stat().st_size
            member.mode = 0o644
            with path.open("rb") as content:
                tar.addfile(member, content)


if __name__ == "__main__":
    for name in FOLDERS:
        target = HERE / f"{name}.tar.xz"
        pack(Path(sys.argv[1]) / name, target)
        sys.stdout.write(f"{target.stat().st_size:>8} {target.name}\n")

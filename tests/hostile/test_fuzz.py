"""Fuzzing for a bounded time: RESHARD_FUZZ_SECONDS in all, by default 60. What it finds goes into the corpus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("RESHARD_FUZZ_SECONDS", "60")) / len(fuzz.CHECKS)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 120)
@pytest.mark.parametrize("kind", fuzz.CHECKS)
def test_whatever_the_bytes_are(kind: str, record_property: pytest.RecordProperty) -> None:
    """In a process of its own, because of the limits of memory and time."""
    done = subprocess.run(
        [sys.executable, str(HERE / "fuzz.py"), kind, str(SECONDS)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))},
    )
    assert not done.returncode, done.stderr[-5000:]
    counts = json.loads(done.stdout)
    print(counts)
    for name, count in counts.items():
        record_property(name, count)
    assert min(counts["accepted"], counts["refused"]) > counts["executions"] / 100, "changes too few, or too many"

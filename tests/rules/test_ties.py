"""Tensors that rules make one are compared by samples in a run, which says so, and by `verify` to the last element."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from checkpoints import write_file
from commands import call, done
from refusals import refused

import reshard
from reshard import Rules, Selection
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array

CONTENT = {
    "reshard-rules": 1,
    "sides": ["a", "b"],
    "rules": [{"a": ["emb", "head"], "b": {"tie": "shared"}}, {"a": "w", "b": "v"}],
}
TIE = Rules.of(CONTENT)
PLACE = (1234, 77)  # no sample is there


def tensors(*, same: bool, rows: int = 4096) -> dict[str, Array]:
    """Two tensors of 4 MiB, which are the same but for one element."""
    emb = np.random.default_rng(26).standard_normal((rows, 256)).astype(np.float32)
    head = emb.copy()
    if not same:
        head[PLACE[0] % rows, PLACE[1]] += 1
    return {"emb": emb, "head": head, "w": np.ones((2, 2), np.float32)}


def written(tmp_path: Path, **arrays: Array) -> list[str | Path]:
    """The words that convert a file of these by the rules."""
    (tmp_path / "source").mkdir()
    write_file(tmp_path / "source" / "model.safetensors", arrays)
    (tmp_path / "rules.yaml").write_text(json.dumps(CONTENT))
    return [tmp_path / "source", tmp_path / "out", "--rules", tmp_path / "rules.yaml"]


def test_one_element_is_found_by_verify(tmp_path: Path) -> None:
    """Against the source by its name, and by the ledger; in JSON with its place."""
    source, out, *words = written(tmp_path, **tensors(same=False))
    ran = done("unify", source, out, *words)
    assert "samples" in ran.stderr
    for ways in ([], ["--against", source, *words]):
        told = call("verify", out, *ways, "--json")
        assert told.exit_code == 3
        (difference,) = json.loads(told.stdout)["differences"]
        assert (difference["kind"], difference["tensor"], difference["side"]) == ("values", "head", "source")
        assert (difference["index"], difference["count"]) == (list(PLACE), 1)
        text = call("verify", out, *ways)
        assert text.exit_code == 3
        assert "'emb'" in text.stdout
    done("unify", source, tmp_path / "less", *words, "--exclude", "shared")
    done("verify", tmp_path / "less", "--against", source, *words, "--exclude", "shared")


def test_equal_ones(tmp_path: Path) -> None:
    """All of both is read, and all that is read is counted."""
    source, out, *words = written(tmp_path, **tensors(same=True))
    assert "samples" in done("unify", source, out, *words).stderr
    told = json.loads(done("verify", out, "--json").stdout)
    assert told["bytes_read"] >= 4 * 4096 * 256 * 4
    assert reshard.verify(out, against=source, selection=Selection(rules=TIE), sample=0.1).equal


def test_small_ones_are_compared_whole(tmp_path: Path) -> None:
    source, out, *words = written(tmp_path, **tensors(same=True, rows=64))
    assert "samples" not in done("unify", source, out, *words).stderr
    with refused(SourceError, "not-equal", "'emb'", "'head'"):
        reshard.open(write_file(tmp_path / "other.safetensors", tensors(same=False, rows=64))).derive(TIE)

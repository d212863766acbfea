"""Two checkpoints whose ledgers know how they were made: compared by their paths; and what the target is said to be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from adapters import matrices, save
from checkpoints import numbers, write_ranks
from commands import call, done
from refusals import failed, refused
from samples import sampled
from test_made import say_instead

import reshard
from reshard import Layout, LoRA, Rules, Selection, Strategy
from reshard.errors import UsageError

if TYPE_CHECKING:
    from reshard.core.plan.plan import Plan

NAMES = ("a.weight", "b.weight", "c", "moments.a.weight")
FULL = numbers({"a.weight": (48, 16), "b.weight": (12, 8), "c": (24,), "moments.a.weight": (48, 16)})
SOURCE = Strategy.of({name: Layout.of([4], [0, *[-1] * (FULL[name].ndim - 1)]) for name in NAMES})
TARGET = Strategy.of({name: Layout.of([2], [*[-1] * (FULL[name].ndim - 1), 0]) for name in NAMES})
RULES = Rules.of({
    "reshard-rules": 1,
    "sides": ["trained", "served"],
    "rules": [
        {"trained": "a.weight", "served": {"transpose": "attention.a"}},
        {"trained": "b.weight", "served": "attention.b"},
        {"trained": "c", "served": "bias"},
    ],
})  # fmt: skip
CAST = {"float32": "bfloat16"}

ASKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "cast": ({"cast": CAST}, ["cast"]),
    "renamed": ({"name_map": {"*.weight": "model.*.weight"}}, ["names"]),
    "included": ({"include": ("a.*", "c")}, ["selection"]),
    "excluded": ({"exclude": ("c",)}, ["selection"]),
    "weights": ({"weights_only": True}, ["selection"]),
    "rules": ({"rules": RULES}, ["rules"]),
    "adapter": ({"lora": ...}, ["lora"]),
    "all": (
        {"lora": ..., "rules": RULES, "name_map": {"bias": "new"}, "cast": CAST, "exclude": ("attention.b",)},
        ["lora", "rules", "names", "cast", "selection"],
    ),
}
KINDS: dict[str, tuple[Strategy | None, dict[str, Any]]] = {
    "ranks": (TARGET, {}),
    "ckpt, each replica once": (TARGET, {"to": "ckpt", "remove_redundancy": True}),
    "a set": (None, {"to": "hf"}),
    "zarr": (None, {"to": "zarr"}),
    "DCP": (None, {"to": "dcp"}),
    "DCP of blocks": (TARGET, {"to": "dcp"}),
    "checkpoint2": (TARGET, {"to": "checkpoint2", "target_step": 7}),
}
OFTEN = ["nothing", "cast", "all"]


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return write_ranks(tmp_path / "src", FULL, SOURCE, "ckpt")


@pytest.fixture
def adapter(tmp_path: Path) -> LoRA:
    return save(tmp_path / "lora", matrices(FULL, ("a", "b")))


def select(asked: str, adapter: LoRA) -> Selection:
    options = ASKED[asked][0]
    return Selection(**{**options, **({"lora": adapter} if "lora" in options else {})})


def write(src: Path, target: Path, kind: str, selection: Selection | None = None) -> Plan:
    """Write a checkpoint of some kind."""
    strategy, options = KINDS[kind]
    source = reshard.open(src, strategy=SOURCE) if src.name.startswith("src") else reshard.open(src)
    if strategy is not None and selection is not None and (selection.name_map or selection.rules or selection.include):
        tensors = source
        if selection.lora:
            tensors = tensors.merge_lora(selection.lora)
        if selection.rules:
            tensors = tensors.derive(selection.rules)
        new = selection.renamed(list(tensors.tensors))
        strategy = Strategy.of({
            new[name]: Layout.of([2], [0, *[-1] * (len(tensor.spec.shape) - 1)])
            for name, tensor in tensors.tensors.items()
        })  # fmt: skip
    lenient = {"drop": ("*",), "allow_missing": ("*",)} if strategy is not None else {}
    plan = reshard.plan(source, strategy, selection=selection, **options, **lenient)
    plan.run(target, fsync=False)
    return plan._record


def spoil(root: Path, plan: Plan, name: str = "") -> None:
    """Change one bit of a tensor; by default of the last in the files."""
    *_, (file, (offset, nbytes)) = [
        (file, content.runs[-1])
        for file in plan.files
        for content in file.layout.contents
        if content.runs and not file.link and content.name.startswith(name)
    ]
    content = bytearray((root / file.path).read_bytes())
    content[offset + nbytes - 1] ^= 1
    (root / file.path).write_bytes(content)


def kinds_of(found: reshard.Verification) -> list[str]:
    return [change.kind for change in found.changes]


CASES = [(asked, kind) for asked in ASKED for kind in KINDS if asked in OFTEN or kind in {"ranks", "a set"}]


@pytest.mark.parametrize(("asked", "kind"), sampled(CASES, 4))
def test_a_target_is_compared_with_its_source_either_way(
    src: Path, adapter: LoRA, tmp_path: Path, asked: str, kind: str
) -> None:
    """By paths alone, with the source or a copy of it; and every bit counts."""
    out = tmp_path / "out"
    plan = write(src, out, kind, select(asked, adapter))
    copy = shutil.copytree(src, tmp_path / "copy")
    changed = ASKED[asked][1]
    for first, second in ((out, src), (src, out), (out, copy)):
        found = reshard.verify(first, against=second)
        assert found, found.differences
        assert kinds_of(found) == changed
        assert found.target.startswith(str(out))  # of a run, the iteration
        assert found.against == str(copy if second == copy else src)
        assert found.tensors == len({each.name for each in plan.transfers})
        assert not found.left_out
    assert kinds_of(reshard.verify(out)) == changed
    for which in ("", plan.transfers[0].name):
        spoil(out, plan, which)
        for first, second in ((out, src), (src, out), (out, copy)):
            found = reshard.verify(first, against=second)
            assert not found
            assert {one.kind for one in found.differences} == {"values"}
            assert call("verify", first, "--against", second).exit_code == 3
        spoil(out, plan, which)


@pytest.mark.parametrize(
    ("asked", "kind"),
    sampled([(a, k) for a in ("nothing", "cast", "renamed", "weights", "rules", "adapter", "all") for k in KINDS], 3),
)
def test_two_that_are_made_of_one_source_are_compared(
    src: Path, adapter: LoRA, tmp_path: Path, asked: str, kind: str
) -> None:
    """One as it was, the other changed; the one that was changed is the target, whichever is named first."""
    plain, other = tmp_path / "plain", tmp_path / "other"
    plan = write(src, plain, kind)
    write(src, other, "a set", select(asked, adapter))
    for first, second in ((plain, other), (other, plain)):
        found = reshard.verify(first, against=second)
        assert found, found.differences
        assert kinds_of(found) == ASKED[asked][1]
        if asked != "nothing":
            assert found.target == str(other)
            assert str(other) in found.note
    spoil(plain, plan, "a.weight")
    for first, second in ((plain, other), (other, plain)):
        assert not reshard.verify(first, against=second)


def test_through_a_store_between(src: Path, adapter: LoRA, tmp_path: Path) -> None:
    """Each ledger names the checkpoint before it; one change is taken to its end, of two nothing is made up."""
    store, out, again = tmp_path / "store", tmp_path / "out", tmp_path / "again"
    write(src, store, "zarr", select("adapter", adapter))
    plan = write(store, out, "ranks")
    assert kinds_of(reshard.verify(out, against=src)) == ["lora"]
    assert kinds_of(reshard.verify(out, against=store)) == []
    assert reshard.verify(src, against=out)
    write(out, again, "a set", Selection(cast=CAST))
    found = reshard.verify(again, against=src)
    assert not found
    assert "were changed in different ways" in found.note
    assert reshard.verify(again, against=store)
    spoil(out, plan)
    for other in (src, store, again):
        assert not reshard.verify(out, against=other)


def test_two_that_were_changed_differently(src: Path, adapter: LoRA, tmp_path: Path) -> None:
    """Nothing is made up, and it is said in one line what to do."""
    one, two = tmp_path / "one", tmp_path / "two"
    write(src, one, "ranks", select("adapter", adapter))
    write(src, two, "a set", Selection(cast=CAST, weights_only=True))
    result = call("verify", one, "--against", two)
    assert result.exit_code == 3
    note = result.stdout.splitlines()[1]
    assert "were changed in different ways" in note
    assert "3 tensors are float32 in the target, bfloat16 in the source" in note
    assert note.endswith("exchange the two and give --cast float32=bfloat16")
    assert result.stdout.count("c: is float32") == 1, "one line for all"
    found = json.loads(call("verify", one, "--against", two, "--json").stdout)
    assert [one["kind"] for one in found["differences"]].count("dtype") == 3


def test_options_that_are_given_count(src: Path, adapter: LoRA, tmp_path: Path) -> None:
    """Not the ledger's; layouts are still known, in Python too."""
    out = tmp_path / "out"
    plan = write(src, out, "ranks", select("adapter", adapter))
    assert not reshard.verify(out, against=src, selection=Selection())
    assert reshard.verify(out, against=src, selection=Selection(lora=adapter))
    assert kinds_of(reshard.verify(out, against=reshard.open(src, strategy=SOURCE).merge_lora(adapter))) == ["lora"]
    assert reshard.verify(out, against=reshard.open(src, strategy=SOURCE))
    assert call("verify", out, "--against", src, "--include", "c").exit_code == 0
    assert call("verify", out, "--against", src, "--include", "a.*").exit_code == 3
    spoil(out, plan)
    assert not reshard.verify(out, against=src, selection=Selection(lora=adapter))


@pytest.mark.parametrize("option", [{"cast": CAST}, {"rules": RULES}, {"name_map": {"c": "d"}}, {"weights_only": True}])
def test_a_selection_without_a_source_is_refused(src: Path, tmp_path: Path, option: dict[str, Any]) -> None:
    write(src, tmp_path / "out", "ranks")
    with refused(UsageError, "needs-source", "against=..."):
        reshard.verify(tmp_path / "out", selection=Selection(**option))
    assert call("verify", tmp_path / "out", "--cast", "float32=bfloat16").exit_code == 2


def test_what_the_target_is(src: Path, adapter: LoRA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In text, JSON and notebooks; by the run, the plan and the verification alike."""
    monkeypatch.chdir(tmp_path)
    done("convert", src, "dst", "--source-strategy", strategy_file(SOURCE, tmp_path / "s.ckpt"),
         "--target-strategy", strategy_file(TARGET, tmp_path / "t.ckpt"), "--tune=fsync=no")  # fmt: skip
    how = ["--lora", "lora", "--cast", "float32=bfloat16", "--weights-only"]
    changed = 'LoRA adapter "lora" merged into 2 weights, cast to bfloat16'
    for more in (["--dry-run"], ["--tune=fsync=no"], ["--tune=fsync=no"]):  # the last time nothing is left to do
        assert changed in done("convert", "--to=mindspore", "dst", "lo", *how, *more).stdout
    changes = json.loads(done("convert", "--to=mindspore", "dst", "again", *how, "--tune=fsync=no", "--json").stdout)[
        "changes"
    ]
    assert [(one["kind"], one["tensors"]) for one in changes] == [("lora", 2), ("cast", 3), ("selection", 3)]
    assert [one["detail"] for one in changes[:2]] == [str(tmp_path / "lora"), "float32=bfloat16"]
    for command in (["verify", "lo"], ["verify", "lo", "--against", "dst"], ["verify", "lo", "--against", "dst", *how]):
        assert done(*command).stdout.startswith(f"verified: lo = dst after changes ({changed})")
        assert json.loads(done(*command, "--json").stdout)["changes"] == changes
    of_notebooks = (reshard.verify("lo"), reshard.plan(reshard.open("dst"), selection=Selection(lora=adapter)))
    assert all("LoRA adapter &quot;lora&quot; merged into 2 weights" in shown._repr_html_() for shown in of_notebooks)
    content = bytearray(Path("lo/part0.safetensors").read_bytes())
    content[-1] ^= 1
    Path("lo/part0.safetensors").write_bytes(content)
    result = call("verify", "lo")
    assert result.exit_code == 3
    assert "every bit" not in result.output
    assert f"after changes ({changed})" in result.stdout


def test_as_they_are_whatever_ledgers_say(src: Path, tmp_path: Path) -> None:
    """Two whose ledgers connect them are equal after a cast, and differ as they are."""
    write(src, tmp_path / "half", "a set", Selection(cast=CAST))
    write(src, tmp_path / "full", "a set")
    one, other = tmp_path / "half", tmp_path / "full"
    assert "--as-is compares without" in done("verify", one, "--against", other).stdout
    assert reshard.verify(one, against=other)
    found = reshard.verify(one, against=other, as_is=True)
    assert {difference.kind for difference in found.differences} == {"dtype"}
    assert not found.changes
    assert call("verify", one, "--against", other, "--as-is").exit_code == 3
    assert reshard.verify(other, against=src, as_is=True)
    for options, code in ((["--as-is"], "needs-source"), (["--as-is", "--against", other, "--cast", "float32=bfloat16"],
                                                          "conflicting-options")):  # fmt: skip
        failed(2, code, "verify", one, *options)


def test_what_was_not_compared_is_not_called_equal(src: Path, tmp_path: Path) -> None:
    """Tensors that were not asked for, and blocks that no file has."""
    out = tmp_path / "out"
    write(src, out, "ranks")
    said = done("verify", out, "--against", src, "--weights-only").stdout.splitlines()[0]
    assert said.endswith("every bit of 3 tensors (weights only, 1 tensor left out)")
    assert json.loads(done("verify", out, "--against", src, "--weights-only", "--json").stdout)["left_out"]
    reshard.plan(reshard.open(src, strategy=SOURCE), TARGET, ranks=[1]).run(tmp_path / "one", fsync=False)
    found = reshard.verify(tmp_path / "one", against=src)
    assert found
    assert found.absent == len(NAMES)
    assert "except 4 blocks that no file has" in done("verify", tmp_path / "one", "--against", src).stdout


def test_a_ledger_that_names_itself(src: Path, tmp_path: Path) -> None:
    """Lineages end, whatever ledgers say."""
    out, other = tmp_path / "out", tmp_path / "other"
    write(src, out, "ranks")
    write(out, other, "ranks")
    say_instead(out / ".reshard", f'"root":"{src}"', f'"root":"{other}"')
    assert reshard.verify(other, against=out)
    assert reshard.verify(out, against=other)


def strategy_file(strategy: Strategy, path: Path) -> Path:
    reshard.write_strategy(strategy, path)
    return path

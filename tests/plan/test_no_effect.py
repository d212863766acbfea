"""What changes nothing is refused: adapters, casts, name maps and patterns, in commands and in Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from adapters import matrices, save
from checkpoints import write_file, write_ranks
from commands import done
from refusals import failed, refused

import reshard
from reshard import Layout, Selection, Strategy
from reshard.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

MODEL = {"a.0.weight": (4, 4), "a.1.weight": (4, 4), "norm.weight": (4,)}
RULES = {
    "reshard-rules: 1": "",
    "sides": "[x, y]",
    "rules": "[{x: 'a.{i}.weight', y: 'b.{i}'}, {x: norm.weight, y: n}, {x: bias, y: c, optional: true}]",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`model` and `other` of three tensors in float32, `lora` over a.0, `rules.yaml`, and name maps; the directory."""
    model = {name: np.arange(np.prod(shape), dtype="f4").reshape(shape) for name, shape in MODEL.items()}
    for name in ("model", "other"):
        write_file(tmp_path / name / "model.safetensors", model)
    save(tmp_path / "lora", matrices(model, ("a.0",)))
    text = "\n".join(f"{key}: {value}" if value else key for key, value in RULES.items())
    (tmp_path / "rules.yaml").write_text(text)
    for name, content in {"empty": {}, "same": {"norm.weight": "norm.weight"}, "norm": {"norm.*": "n.*"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    return tmp_path


LORA, WITH_RULES = ("--lora", "lora"), ("--rules", "rules.yaml")
UNUSED: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
    ((*LORA, "--include", "norm.*"), "no-effect", ("--lora", "a.0.weight")),
    ((*LORA, "--exclude", "a.0.*"), "no-effect", ("--lora", "a.0.weight")),
    ((*LORA, *WITH_RULES, "--include", "b.1"), "no-effect", ("--lora", "b.0")),
    ((*LORA, "--lora-alpha", "0"), "no-effect", ("lora", "--lora-alpha")),
    (("--cast", "float16=bfloat16"), "no-effect", ("--cast float16=bfloat16", "float32")),
    (("--cast", "float32=float32"), "no-effect", ("--cast float32=float32",)),
    (("--cast", "float32=bfloat16", "--cast", "float64=float32"), "no-effect", ("--cast float64=float32",)),
    (("--name-map", "empty.json"), "no-effect", ("empty.json",)),
    (("--name-map", "same.json"), "no-effect", ("--name-map", "norm.weight")),
    (("--name-map", "norm.json", "--include", "a.*"), "no-effect", ("--name-map", "a.0.weight")),
    (("--include", "a.*", "--exclude", "norm.*"), "no-effect", ("--exclude", "norm.*")),
    ((*WITH_RULES, "--let", "heads=3"), "no-effect", ("rules.yaml", "'heads'")),
]


@pytest.mark.parametrize(("options", "code", "places"), UNUSED)
@pytest.mark.parametrize("verb", ["convert", "plan", "verify"])
@pytest.mark.usefixtures("root")
def test_options(verb: str, options: tuple[str, ...], code: str, places: tuple[str, ...]) -> None:
    command = {
        "convert": ("model", "out", "--to", "hf"),
        "plan": ("model", "out", "--to", "hf"),
        "verify": ("other", "--against", "model"),
    }
    failed(2, code, verb, *command[verb], *options, places=places)


@pytest.mark.parametrize(
    ("options", "code", "place"),
    [
        (("--drop", "absent"), "no-match", "'absent'"),
        (("--drop", "norm.*"), "no-effect", "--exclude"),
        (("--allow-missing", "absent"), "no-effect", "'absent'"),
        (("--allow-missing", "norm.weight"), "no-effect", "'norm.weight'"),
    ],
)
def test_patterns_that_allow_nothing(root: Path, options: tuple[str, ...], code: str, place: str) -> None:
    failed(2, code, "convert", "model", "out", "--to", "hf", *options, places=(place,))
    failed(2, code, "average", "model", "other", "out", "--to", "hf", *options, places=(place,))
    assert not (root / "out").exists()


@pytest.mark.parametrize("option", ["--drop", "--allow-missing"])
@pytest.mark.usefixtures("root")
def test_unknown_patterns_of_a_comparison(option: str) -> None:
    failed(2, "no-match", "verify", "other", "--against", "model", option, "absent", places=("'absent'", "norm.weight"))
    done("verify", "other", "--against", "model", option, "norm.*")


@pytest.mark.parametrize(
    "options",
    [
        ("--drop", "*", "--allow-missing", "*"),
        (*LORA, "--include", "a.*"),
        WITH_RULES,
        (*LORA, *WITH_RULES, "--include", "b.0"),
        ("--name-map", "norm.json", "--exclude", "a.1.*"),
        ("--include", "*"),
        ("--weights-only",),
    ],
)
@pytest.mark.usefixtures("root")
def test_what_remains_allowed(options: tuple[str, ...]) -> None:
    """Optional rules, guards such as `--drop '*'`, and options of which a part has an effect."""
    done("convert", "model", "out", "--to", "hf", *options, "--tune=fsync=no")
    done("verify", "out")


def test_patterns_of_strategies(tmp_path: Path) -> None:
    """A pattern has an effect if it covers one tensor that the target lacks, or the source."""
    model = {name: np.ones(4, "f4") for name in ("w", "old")}
    one, two = (Strategy.of({name: Layout.of([2], [0]) for name in names}) for names in (("w", "old"), ("w", "new")))
    source = reshard.open(write_ranks(tmp_path / "src", model, one), strategy=one)
    assert reshard.plan(source, two, drop=["o*"], allow_missing=["n*"]).dropped == ("old",)
    with refused(UsageError, "no-effect", "drop='w'", "exclude='w'"):
        reshard.plan(source, two, drop=["o*", "w"], allow_missing=["n*"])
    with refused(UsageError, "no-effect", "allow_missing='w'", "new"):
        reshard.plan(source, two, drop=["o*"], allow_missing=["n*", "w"])


@pytest.mark.parametrize(
    ("call", "code", "place"),
    [
        (lambda it: it.sel("norm.*").merge_lora("lora"), "no-effect", "a.0.weight"),
        (lambda it: reshard.plan(it, lora="lora", include="norm.*"), "no-effect", "a.0.weight"),
        (lambda it: reshard.convert(it, "out", to="hf", lora="lora", include="norm.*"), "no-effect", "a.0.weight"),
        (lambda it: reshard.plan(it, cast={"float16": "bfloat16"}), "no-effect", "float32"),
        (lambda it: reshard.plan(it, selection=Selection(cast={"f16": "bf16"})), "no-effect", "float32"),
        (lambda it: it.to_zarr("z.zarr", selection=Selection(cast={"f16": "bf16"})), "no-effect", "float32"),
        (lambda it: reshard.verify("other", against=it, cast={"f16": "bf16"}), "no-effect", "float32"),
        (lambda it: reshard.plan(it, name_map={"norm.weight": "norm.weight"}), "no-effect", "name_map"),
        (lambda it: it.scale("norm.*"), "no-effect", "factor"),
        (lambda it: it.scale(factor=2), "no-effect", "scale"),
        (lambda it: it.assign({}), "no-tensors", "arrays"),
        (lambda it: it.derive(reshard.Rules.read("rules.yaml", let={"heads": 3})), "no-effect", "'heads'"),
    ],
)
def test_in_python(root: Path, call: Any, code: str, place: str) -> None:
    with refused(UsageError, code, place):
        call(reshard.open(root / "model"))
    assert not (root / "out").exists()
    assert not (root / "z.zarr").exists()


def test_dequantized_weights_that_are_left_out(tmp_path: Path) -> None:
    weights = {
        "w.weight": np.ones((2, 2), ml_dtypes.float8_e4m3fn), "w.weight_scale_inv": np.ones((1, 1), "f4"),
        "norm.weight": np.ones(2, "f4"),
    }  # fmt: skip
    write_file(tmp_path / "q" / "model.safetensors", weights)
    command = ("convert", tmp_path / "q", tmp_path / "out", "--to", "hf", "--dequantize", "bfloat16")
    failed(2, "no-effect", *command, "--include", "norm.*", places=("--dequantize",))
    with refused(UsageError, "no-effect", "dequantize"):
        reshard.convert(tmp_path / "q", tmp_path / "out", to="hf", dequantize="bfloat16", include="norm.*")
    done(*command, "--include", "w.*", "--tune=fsync=no")


SET, FILE = "set", "model/model.safetensors"
OF_RANKS = [("--suffix", "x"), ("--rank-pattern", "node{rank}/*"), ("--rank-pattern", "foo")]


@pytest.fixture
def whole(root: Path) -> Path:
    """`set`, of two files by hand, with an index and a configuration."""
    index = {name: f"part-{number}.safetensors" for number, name in enumerate(("a.0.weight", "norm.weight"))}
    for name, file in index.items():
        write_file(root / SET / file, {name: np.ones(MODEL[name], "f4")})
    (root / SET / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (root / SET / "config.json").write_text(json.dumps({"model_type": "x"}))
    return root


@pytest.mark.parametrize(("source", "option"), [(SET, OF_RANKS[0]), (FILE, OF_RANKS[1]), (SET, OF_RANKS[2])])
@pytest.mark.usefixtures("whole")
def test_options_for_files_of_ranks(source: str, option: tuple[str, str]) -> None:
    for command in ("inspect", "stats"):
        failed(2, "no-effect", command, source, *option, places=(option[0],))
    failed(2, "no-effect", "convert", source, "out", "--to", "dcp", *option, places=(option[0],))
    failed(2, "no-effect", "average", source, source, "out", "--to", "hf", *option, places=(option[0],))


@pytest.mark.usefixtures("whole")
def test_other_options_for_files_of_ranks() -> None:
    failed(2, "no-effect", "verify", SET, "--target-layout", "*=split:0", places=("--target-layout",))
    for target in (SET, FILE):
        failed(2, "no-effect", "verify", target, "--deduplicated", places=("--deduplicated",))
        failed(2, "no-effect", "verify", target, "--against", target, "--deduplicated", places=("--deduplicated",))
    failed(2, "no-effect", "average", SET, SET, "out", "--to", "hf", "--source-strategy", "absent")
    failed(2, "needs-strategy", "convert", FILE, "out", "--to", "ckpt", "--same-ranks", "--source-strategy", "absent")
    for keyword in ({"suffix": "x"}, {"rank_pattern": "x{rank}"}, {"partial": True}, {"layout": {"*": "copy"}}):
        with refused(UsageError, "no-effect", *keyword):
            reshard.open(SET, **keyword)  # type: ignore[arg-type]
    done("convert", SET, "dcp", "--to", "dcp")
    for keyword in ({"suffix": "x"}, {"partial": True}):
        with refused(UsageError, "self-described"):
            reshard.open("dcp", **keyword)  # type: ignore[arg-type]


def test_a_suffix_chooses_one_of_two_sets(whole: Path) -> None:
    (whole / SET / "model.safetensors.index.json").rename(whole / SET / "model.safetensors.index.one.json")
    (whole / SET / "model.safetensors.index.two.json").write_text(
        json.dumps({"weight_map": {"norm.weight": "part-1.safetensors"}})
    )
    assert {*reshard.open(SET, suffix="one").tensors} == {"a.0.weight", "norm.weight"}
    assert {*reshard.open(SET, suffix="two").tensors} == {"norm.weight"}


def test_whole_tensors_that_are_called_whole_keep_what_is_beside_them(whole: Path) -> None:
    (whole / "model" / "config.json").write_text("{}")
    for number, (source, layout) in enumerate([(SET, "*=whole"), (SET, "a.*=whole"), ("model", "norm.weight=whole")]):
        done("convert", source, f"out{number}", "--to", "hf", "--layout", layout)
        assert json.loads((whole / f"out{number}" / "config.json").read_text()) == json.loads(
            (whole / source / "config.json").read_text()
        )
    for source in (SET, "model", FILE):
        failed(2, "no-effect", "convert", source, "cut", "--to", "hf", "--layout", "a.*=split:0", places=("--layout",))


@pytest.mark.usefixtures("whole")
def test_options_of_the_target_are_named_as_they_are_typed() -> None:
    for command in (("verify", "model"), ("diff", "model", "model")):
        failed(2, "missing-strategy", *command, "--target-stage", "3", places=("--target-strategy",))


def test_a_strategy_of_no_tensor_is_not_written(root: Path) -> None:
    strategy = Strategy.of({"w": Layout.of([2], [0, -1])})
    write_ranks(root / "ranks", {"w": np.ones((4, 4), "f4")}, strategy, "ckpt")
    reshard.plan(reshard.open(root / "ranks", strategy=strategy), strategy).run(root / "again")
    failed(2, "no-tensors", "strategy", "make", "--like", "again", "-o", "x.ckpt", "--drop", "*", places=("again",))
    assert not (root / "x.ckpt").exists()


@pytest.mark.usefixtures("root")
def test_verify_overwrites_manifests_alone() -> None:
    failed(2, "no-effect", "verify", "model", "--overwrite", places=("--overwrite",))
    failed(2, "no-effect", "verify", "model", "--against", "other", "--overwrite", places=("--overwrite",))


@pytest.mark.usefixtures("root")
def test_options_of_verify_and_average_alone() -> None:
    failed(2, "no-effect", "verify", "model", "--drop", "norm.weight", places=("--drop", "norm.weight"))
    failed(2, "no-effect", "average", "model", "other", "mean", "--states", places=("--states",))
    with refused(UsageError, "no-effect", "states="):
        reshard.average([reshard.open("model"), reshard.open("other")], states=True)


@pytest.mark.parametrize("command", ["verify", "diff"])
def test_the_strategy_of_a_target_that_exists_is_no_rules(command: str) -> None:
    """Rules make a strategy for a target that is written."""
    assert "rules (.yaml) of the target" not in " ".join(done(command, "--help-all").stdout.split())
    assert "rules (.yaml) of the target" in " ".join(done("convert", "--help-all").stdout.split())

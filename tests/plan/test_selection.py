"""Which tensors a target gets, under which names and dtypes: compared with numpy's and ml_dtypes' own `astype`."""

from __future__ import annotations

import re
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import Array, assert_rank_files, numbers, places, write_file, write_ranks
from commands import done
from hypothesis import given
from hypothesis import strategies as st
from refusals import failed, refused
from safetensors.numpy import load_file, save_file

import reshard
from reshard import Layout, Selection, Strategy
from reshard.core.plan.inputs import _Globs
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError, UsageError
from reshard.strategy.names import State, optimizer_states

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ROWS = Layout.of([2], [0, -1])
WEIGHTS = ["layers.0.wq", "layers.0.wo", "layers.1.wq", "layers.1.wo", "embed"]
NAMES = [*WEIGHTS, *(f"adam_m.{name}" for name in WEIGHTS)]
FULL = numbers(dict.fromkeys(NAMES, (4, 4)))
ALSO: dict[str, Array | str] = {
    "global_step": np.array([7], np.int32), "learning_rate": np.array(0.1, np.float32), "run": "seven",
}  # fmt: skip
STRATEGY = Strategy.of(dict.fromkeys(NAMES, ROWS))


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, STRATEGY, also=ALSO), strategy=STRATEGY)


def kept(source: reshard.Checkpoint, selection: Selection, target: Strategy | None = None) -> set[str]:
    plan = reshard.plan(source, target, selection=selection)
    return {*plan._record.blocks(0), *plan._record.texts}


def test_include_and_exclude_are_globs_of_source_names(source: reshard.Checkpoint) -> None:
    assert kept(source, Selection(include=("layers.*.wq", "embed"))) == {"layers.0.wq", "layers.1.wq", "embed"}
    assert kept(source, Selection(exclude=("adam_m.*", "layers.*"))) == {"embed", *ALSO}
    assert kept(source, Selection(include=("layers.*",), exclude=("*.wo",))) == {"layers.0.wq", "layers.1.wq"}
    assert kept(source, Selection(include=("layers.[0-9].w?",), exclude=("layers.1.*",))) == {
        "layers.0.wq", "layers.0.wo",
    }  # fmt: skip


def test_a_pattern_may_say_how_many_it_matches(source: reshard.Checkpoint) -> None:
    assert len(kept(source, Selection(include=("layers.*@4",)))) == 4
    places = ("include='layers.*@5'", "expected 5", "include='nothing.*'", "exclude='embed@2'")
    with refused(UsageError, "wrong-count", *places) as caught:
        reshard.plan(source, selection=Selection(include=("layers.*@5", "nothing.*"), exclude=("embed@2",)))
    assert caught.value.exit_code == 2
    assert caught.value.codes == ("wrong-count", "no-match")


def test_a_name_that_ends_like_a_count_is_a_name(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.safetensors", {"w@2": np.ones(2, np.float32), "w": np.ones(2, np.float32)})
    assert kept(reshard.open(path), Selection(include=("w@2",))) >= {"w@2"}


def test_weights_only_leaves_out_all_that_only_training_needs(source: reshard.Checkpoint) -> None:
    assert kept(source, Selection(weights_only=True)) == set(WEIGHTS)
    target = Strategy.of(dict.fromkeys(NAMES, ROWS))
    plan = reshard.plan(source, target, selection=Selection(weights_only=True))
    assert set(plan._record.blocks(1)) == set(WEIGHTS)
    assert (plan.dropped, plan.missing) == ((), ())  # asked for, so nothing to report


def test_weights_only_keeps_weights_whose_names_end_like_others(tmp_path: Path) -> None:
    names = ["fc", "conv", "backbone.fc", "backbone.conv1", "backbone.conv2", "adam_m.fc", "adam_m.conv",
             "adam_m.backbone.fc", "adam_m.backbone.conv1", "adam_m.backbone.conv2", "scale"]  # fmt: skip
    tensors = {name: np.ones((), np.float32) for name in names}
    opened = reshard.open(write_file(tmp_path / "x.safetensors", tensors))
    assert kept(opened, Selection(weights_only=True)) == {
        "fc", "conv", "backbone.fc", "backbone.conv1", "backbone.conv2", "scale",
    }  # fmt: skip


def test_gradients_being_accumulated_are_states_without_their_weights_too() -> None:
    assert optimizer_states(["accu_grads.x", "y"]) == {"accu_grads.x": State("x", "accu_grads.")}


def test_the_longest_weight_counts() -> None:
    assert optimizer_states(["m.a.w", "a.w", "m.w", "w"])["m.a.w"].weight == "a.w"


def test_what_is_left_out_is_neither_dropped_nor_missing(source: reshard.Checkpoint) -> None:
    target = Strategy.of({"embed": ROWS, "extra": ROWS})
    selection = Selection(include=("embed",))
    plan = reshard.plan(source, target, selection=selection)
    assert (plan.dropped, plan.missing) == ((), ())
    with refused(SourceError, "missing-tensor", "'extra'"):
        reshard.plan(source, target, drop=["*"])


def test_nothing_left_is_an_error(source: reshard.Checkpoint) -> None:
    with refused(UsageError, "no-tensors"):
        reshard.plan(source, selection=Selection(exclude=("*",)))


def test_drop_and_allow_missing_are_part_of_it(source: reshard.Checkpoint) -> None:
    target = Strategy.of({"embed": ROWS, "extra": ROWS})
    plan = reshard.plan(source, target, selection=Selection(drop=("layers.*",), allow_missing=("extra",)))
    assert plan.missing == ("extra",)
    assert {name for name in plan.dropped if not name.startswith("adam_m")} == {n for n in WEIGHTS if n != "embed"}


def renamed(new_names: dict[str, str], names: Iterable[str] = NAMES) -> dict[str, str]:
    found = Selection(name_map=new_names).renamed(list(names))
    return {old: new for old, new in found.items() if old != new}


STATES_OF_TWO = ["w", "v", "adam_m.w", "adam_m.v", "accu_grads.w", "accu_grads.v"]
RENAMES: dict[str, tuple[dict[str, str], list[str], dict[str, str]]] = {
    "a weight and its state": ({"embed": "tok"}, ["embed"], {"embed": "tok", "adam_m.embed": "adam_m.tok"}),
    "a glob": (
        {"layers.*.wq": "h.*.q"}, ["wq"],
        {
            "layers.0.wq": "h.0.q", "layers.1.wq": "h.1.q",
            "adam_m.layers.0.wq": "adam_m.h.0.q", "adam_m.layers.1.wq": "adam_m.h.1.q",
        },
    ),
    "a glob that begins with a star": (
        {"*.wq": "model.*.q"}, ["0.wq"],
        {"layers.0.wq": "model.layers.0.q", "adam_m.layers.0.wq": "adam_m.model.layers.0.q"},
    ),
    "all": ({"*": "model.*"}, ["embed"], {"embed": "model.embed", "adam_m.embed": "adam_m.model.embed"}),
    "states alone": ({"adam_m.*": "exp_avg.*"}, ["embed"], {"adam_m.embed": "exp_avg.embed"}),
    "states otherwise": (
        {"embed": "tok", "adam_m.*": "exp_avg.*", "adam_m.layers.0.wq": "x"}, ["embed", "0.wq"],
        {"embed": "tok", "adam_m.embed": "exp_avg.embed", "adam_m.layers.0.wq": "x"},
    ),
    "states behind all": (
        {"*": "a.*", "adam_m.*": "m.*"}, ["0.wq"],
        {"layers.0.wq": "a.layers.0.wq", "adam_m.layers.0.wq": "m.layers.0.wq"},
    ),
    "exact names first, then the first glob": (
        {"layers.0.*": "b.*", "layers.*": "a.*", "layers.1.wq": "c"}, ["layers.1"],
        {
            "layers.1.wq": "c", "layers.1.wo": "a.1.wo",
            "adam_m.layers.1.wq": "adam_m.c", "adam_m.layers.1.wo": "adam_m.a.1.wo",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RENAMES)
def test_optimizer_states_follow_their_weights(kind: str) -> None:
    names, ends, expected = RENAMES[kind]
    found = renamed(names)
    assert {old: new for old, new in found.items() if any(end in old for end in ends)} == expected


@pytest.mark.parametrize(
    ("names", "of", "expected"),
    [
        ({"w": "x"}, STATES_OF_TWO, {"w": "x", "adam_m.w": "adam_m.x", "accu_grads.w": "accu_grads.x"}),
        ({"fc": "head"}, ["fc", "conv", "backbone.fc", "backbone.conv1", "backbone.conv2"], {"fc": "head"}),
        ({"a[0].*": "x.*", "b+.w": "y"}, ["a[0].w", "a0.w", "b+.w"], {"a[0].w": "x.w", "b+.w": "y"}),
    ],
    ids=["gradients of states", "weights that look like states", "no patterns but the star"],
)
def test_names_of_other_models(names: dict[str, str], of: list[str], expected: dict[str, str]) -> None:
    assert renamed(names, of) == expected


@pytest.mark.parametrize(
    ("names", "hidden"),
    [
        ({"layers.*": "a.*", "layers.0.*": "b.*"}, "layers.0.*"),
        ({"layers.0.wo": "x", "layers.0.wq": "y", "layers.0.*": "b.*"}, "layers.0.*"),
    ],
)
def test_a_glob_whose_tensors_other_names_take_is_refused(names: dict[str, str], hidden: str) -> None:
    with refused(UsageError, "unused-pattern", hidden):
        renamed(names)


def test_a_typo_in_a_name_map_is_answered_with_the_name_of_the_selection() -> None:
    chosen = ["layers.0.wq", "layers.1.wq"]
    with refused(UsageError, "no-match", "did you mean 'layers.1.wq'?"):
        Selection(name_map={"layers.1.wk": "x"}).renamed(chosen, [*chosen, "layers.1.wkk"])
    with refused(UsageError, "no-match", "there are layers.0.wq, layers.1.wq"):
        Selection(name_map={"zz": "x"}).renamed(chosen, [*chosen, "embed", "norm"])


def test_maps_apply_at_once_so_that_a_swap_is_legal(source: reshard.Checkpoint, tmp_path: Path) -> None:
    swap = {"layers.0.wq": "layers.1.wq", "layers.1.wq": "layers.0.wq"}
    plan = reshard.plan(source, STRATEGY, selection=Selection(name_map=swap, include=("*layers.*.wq",)))
    plan.run(tmp_path / "out")
    found = reshard.open(tmp_path / "out", strategy=STRATEGY, partial=True)
    for old, new in swap.items():
        for prefix in ("", "adam_m."):
            assert np.array_equal(found[prefix + new].compute(), FULL[prefix + old])


def test_collisions_are_told_all_at_once() -> None:
    places = ("name map has 4 faults", "'q'", "layers.0.wq, layers.1.wq", "'embed'")  # the states collide too
    with refused(UsageError, "duplicate-name", *places):
        renamed({"layers.*.wq": "q", "layers.0.wo": "embed"})


def test_a_collision_with_a_tensor_that_is_left_out_is_none(source: reshard.Checkpoint) -> None:
    selection = Selection(name_map={"layers.0.wo": "embed"}, include=("layers.0.wo",))
    assert kept(source, selection) == {"embed"}


def test_names_that_are_not_there_are_reported() -> None:
    with refused(UsageError, "no-match", "'gone'"):
        renamed({"gone": "a", "x.*": "y.*"})


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"a": "b.*"}, ("bad-pattern",)),
        ({"a.*": "b.*.*"}, ("bad-pattern",)),
        ({"a": ""}, ("bad-name",)),
    ],
)
def test_maps_that_cannot_be_meant(names: dict[str, str], told: tuple[str, ...]) -> None:
    with refused(UsageError, *told):
        Selection(name_map=names)


def test_a_tensor_without_a_name_gets_one_from_a_map(tmp_path: Path) -> None:
    values = np.arange(3, dtype=np.float32)
    save_file({"": values, "w": values + 1}, tmp_path / "e.safetensors")
    failed(2, "bad-name", "convert", tmp_path / "e.safetensors", tmp_path / "out", "--to", "hf", places=("--name-map",))
    (tmp_path / "names.json").write_text('{"": "bias"}')
    done(
        "convert", tmp_path / "e.safetensors", tmp_path / "out", "--to", "hf", "--name-map", tmp_path / "names.json"
    )  # fmt: skip
    written = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert written["bias"].tobytes() == values.tobytes()


@given(st.permutations(WEIGHTS))
def test_any_permutation_is_a_map_and_back(order: list[str]) -> None:
    there = dict(zip(WEIGHTS, order, strict=True))
    back = {new: old for old, new in there.items()}
    first = Selection(name_map=there).renamed(NAMES)
    second = Selection(name_map=back).renamed(list(first.values()))
    assert {old: second[new] for old, new in first.items()} == {name: name for name in NAMES}


def test_the_target_strategy_goes_by_the_new_names(source: reshard.Checkpoint, tmp_path: Path) -> None:
    columns = Layout.of([2], [-1, 0])
    target = Strategy.of({f"model.{name}": columns for name in WEIGHTS})
    selection = Selection(weights_only=True, name_map={name: f"model.{name}" for name in WEIGHTS})
    reshard.plan(source, target, selection=selection).run(tmp_path / "out")
    assert_rank_files(tmp_path / "out", {f"model.{name}": FULL[name] for name in WEIGHTS}, target)


def bits(array: Array) -> tuple[str, bytes]:
    return array.dtype.name, array.tobytes()


def numpy_dtype(name: str) -> np.dtype[Any]:
    return BY_NAME[name].numpy()


SPECIAL = np.array(
    [0.0, -0.0, 1.0, 1 / 3, -2.5, 65504, 65520, 1e5, 3.4e38, 448, 449, 480, 57344, 61440, 1e-8, 2**-24, 2**-25, 2**-149,
     np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 2**-7, 1 + 3 * 2**-8, 1.0625, 1.1875],
    np.float32,
)  # fmt: skip
RNG = np.random.default_rng(0)
VALUES = np.concatenate([SPECIAL, RNG.normal(size=486).astype(np.float32)]).reshape(16, 32)
CASTS = [
    ("float32", "bfloat16"), ("float32", "float16"), ("float32", "float8_e4m3fn"), ("float32", "float8_e5m2"),
    ("float32", "float64"), ("float32", "float8_e4m3fnuz"), ("bfloat16", "float32"), ("float16", "bfloat16"),
    ("float8_e5m2", "float32"), ("float64", "bfloat16"), ("int32", "float32"), ("int64", "bfloat16"),
    ("int8", "float16"), ("bool", "float32"), ("int64", "int32"), ("int32", "int64"), ("uint8", "float8_e4m3fn"),
]  # fmt: skip


def values(name: str) -> Array:
    """Numbers of a dtype that a cast could get wrong."""
    if name == "bool":
        return VALUES > 0
    if "int" in name:
        info = np.iinfo(name)
        drawn = RNG.integers(info.min, info.max, 512, dtype=np.int64, endpoint=True).astype(name)
        drawn[:4] = [info.min, info.max, 0, 1]
        return drawn.reshape(16, 32)
    with np.errstate(over="ignore"):
        return VALUES.astype(numpy_dtype(name))


def write_as(path: Path, name: str, value: Array, dtype: str) -> Path:
    """Write one tensor of any dtype."""
    from reshard.core.model.entries import Content
    from reshard.kits import safetensors

    layout = safetensors.lay_out([Content(name, BY_NAME[dtype], value.shape)], {})
    ((offset, nbytes),) = places(layout)[name]
    content = value.tobytes()
    assert len(content) == nbytes
    path.write_bytes(layout.literals[0][1] + content)
    assert path.stat().st_size == offset + nbytes
    return path


@pytest.mark.parametrize(("old", "new"), CASTS)
def test_a_cast_is_what_astype_does(tmp_path: Path, old: str, new: str) -> None:
    """Cut by columns, so that the cast works on rows that are put together and begin anywhere."""
    value = values(old)
    source = reshard.open(write_as(tmp_path / "x.safetensors", "w", value, old))
    target = Strategy.of({"w": Layout.of([4], [-1, 0])})
    plan = reshard.plan(source, target, selection=Selection(cast={old: new}))
    plan.run(tmp_path / "out")
    with np.errstate(over="ignore", invalid="ignore"):
        expected = value.astype(numpy_dtype(new))
    found = reshard.open(tmp_path / "out", strategy=target)
    assert found.tensors["w"].spec.dtype.name == new
    assert bits(found["w"].real.compute()) == bits(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy mentions an overflow where a user looks at arrays
        assert bits(plan.rank(1)["w"].real.compute()) == bits(expected[:, 8:16])
    assert plan.stats.bytes_written == expected.nbytes
    assert plan.stats.bytes_read == value.nbytes


def test_only_the_named_dtype_is_cast(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, STRATEGY, selection=Selection(cast={"float32": "bfloat16"}))
    plan.run(tmp_path / "out")
    found = reshard.open(tmp_path / "out", strategy=STRATEGY)
    kinds = {name: tensor.spec.dtype.name for name, tensor in found.tensors.items()}
    assert kinds.pop("global_step") == "int32"
    assert kinds.pop("run") == "str"
    assert set(kinds.values()) == {"bfloat16"}


@pytest.mark.parametrize("cast", ["float32=bfloat16", ["f32=bf16"], {"float32": "bfloat16"}])
def test_casts_as_the_command_line_has_them(source: reshard.Checkpoint, tmp_path: Path, cast: Any) -> None:
    reshard.convert(source, tmp_path / "out", to="hf", include="layers.*", cast=cast)
    found = reshard.open(tmp_path / "out")
    assert {tensor.spec.dtype.name for tensor in found.tensors.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("keywords", "code", "place"),
    [
        ({"cast": "float32"}, "bad-value", "'float32'"),
        ({"cast": ["=bf16"]}, "bad-value", "'=bf16'"),
        ({"cast": "a=b"}, "unknown-dtype", "'a'"),
        ({"name_map": "names.json"}, "bad-argument", "'names.json'"),
    ],
)
def test_selections_of_wrong_types(source: reshard.Checkpoint, keywords: dict[str, Any], code: str, place: str) -> None:
    with refused(UsageError, code, place):
        reshard.plan(source, STRATEGY, **keywords)


@pytest.mark.parametrize(
    ("cast", "told"),
    [
        ({"float32": "bf17"}, ("unknown-dtype", "'bf17'")),
        ({"fp33": "bfloat16"}, ("unknown-dtype", "'fp33'")),
        ({"float32": "bf16", "fp32": "fp16"}, ("conflicting-options", "float32", "bfloat16", "float16")),
        ({"float32": "str"}, ("unsupported-cast", "float32=str")),
        ({"float32": "int32"}, ("unsupported-cast", "float32=int32")),
        ({"complex64": "float32"}, ("unsupported-cast", "complex64=float32")),
        ({"int32": "bool"}, ("unsupported-cast", "int32=bool")),
        ({"int8": "int4"}, ("unsupported-cast", "int8=int4")),
        ({"float32": "int32", "float16": "str"}, ("unsupported-cast", "2 faults")),
    ],
)
def test_casts_that_cannot_be_meant(cast: dict[str, str], told: tuple[str, ...]) -> None:
    with refused(UsageError, *told):
        Selection(cast=cast)


@given(st.lists(st.text("ab*", min_size=1, max_size=6), max_size=8, unique=True), st.text("ab", min_size=1, max_size=6))
def test_globs_are_found_as_if_each_were_tried(globs: list[str], name: str) -> None:
    """In their order, whatever they begin and end with."""
    expected = [old for old in globs if re.fullmatch(".*".join(map(re.escape, old.split("*"))), name)]
    assert [old for old, _ in _Globs(globs).matching(name)] == expected


def test_a_map_of_thousands_of_globs_takes_time_with_their_number() -> None:
    def seconds(count: int, old: str) -> float:
        names = [f"model.layers.{number}.mlp.weight" for number in range(count)]
        selection = Selection(name_map={old.format(number): f"new.{number}.*" for number in range(count)})
        began = time.process_time()
        renamed = selection.renamed(names)
        assert renamed[names[-1]].startswith(f"new.{count - 1}.")
        return time.process_time() - began

    for old in ("model.layers.{}.mlp.*", "*.{}.mlp.weight"):
        few = min(seconds(1000, old) for _ in range(3))
        assert min(seconds(4000, old) for _ in range(3)) < 9 * few, old  # with the square it is 16 times

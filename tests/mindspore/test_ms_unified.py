"""`unified_safetensors` and `load_distributed_checkpoint`, in all their forms."""

from __future__ import annotations

import json
import logging
import shutil
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import blocks, numbers, tree, write_file, write_ranks
from ms_files import refused_as_mindspore, wrong_key
from refusals import refused

import reshard
import reshard.mindspore as ms
from reshard.core.layout.layout import Layout
from reshard.errors import UsageError
from reshard.mindspore.network import NetworkError
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from checkpoints import Array

KEY = b"0123456789ABCDEF"

WEIGHTS = numbers({"net.w": (8, 12), "net.b": (8,), "net.v": (4, 4)})
STATES = numbers({"adam_m.net.w": (8, 12)})
FULL = {**WEIGHTS, **STATES}
STEP = {"global_step": np.array(7, np.int32)}
SOURCE = Strategy.of(
    {
        "net.w": Layout.of([2, 2], [1, 0]),
        "net.b": Layout.of([2, 2], [1]),
        "net.v": Layout.of([4], [-1, -1], -1),
        "adam_m.net.w": Layout.of([4], [0, -1]),
        "accu_grads.net.b": Layout.of([4], [0]),
    }
)
PREDICT = Strategy.of({name: Layout.of([2], [0, -1][: value.ndim]) for name, value in WEIGHTS.items()})
UNIFIED = ["hyper_param.safetensors", "param_name_map.json", "part0.safetensors"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_ranks(tmp_path / "src", {**FULL, "accu_grads.net.b": FULL["net.b"]}, SOURCE, also=STEP)


@pytest.fixture
def unified(source: Path, tmp_path: Path) -> Path:
    ms.unified_safetensors(source, SOURCE, tmp_path / "unified")
    return tmp_path / "unified"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "reshard.mindspore"):
        yield lambda: [record.message for record in caplog.records]


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_rank(rank: int) -> None:
        monkeypatch.setenv("RANK_ID", str(rank))
        monkeypatch.setenv("RANK_SIZE", "16")

    return set_rank


def network(slices: Mapping[str, Array]) -> dict[str, ms.Parameter]:
    return {name: ms.Parameter(np.zeros_like(value), name) for name, value in slices.items()}


def contents(*paths: Path) -> dict[str, bytes]:
    return {name: content for path in paths for name, (_, _, content) in helpers.read_rank_file(path).items()}


def raw(tensors: Mapping[str, Array]) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(value).tobytes() for name, value in tensors.items()}


def values(parameters: Mapping[str, Any]) -> dict[str, bytes]:
    return raw({name: parameter.asnumpy() for name, parameter in parameters.items()})


# --- unified_safetensors ---


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_whole_tensors_hyper_parameters_and_a_map(tmp_path: Path, format: str) -> None:
    """Accumulated gradients are left out; MindSpore makes a hyper-parameter of rank 0's slice of them."""
    root = write_ranks(tmp_path / "src", {**FULL, "accu_grads.net.b": FULL["net.b"]}, SOURCE, format, STEP)
    ms.unified_safetensors(str(root), SOURCE, str(tmp_path / "out"))
    assert sorted(tree(tmp_path / "out")) == UNIFIED
    assert contents(tmp_path / "out" / "part0.safetensors") == raw(FULL)
    assert contents(tmp_path / "out" / "hyper_param.safetensors") == raw(STEP)
    assert json.loads((tmp_path / "out" / "param_name_map.json").read_text()) == {
        "metadata": {
            "total_size": sum(value.nbytes for value in FULL.values()),
            "hyper_param": "hyper_param.safetensors",  # what MindSpore's index does not say
        },
        "weight_map": dict.fromkeys(
            sorted(FULL, key=lambda name: (-FULL[name].nbytes, list(FULL).index(name))), "part0.safetensors"
        ),
    }


def test_hyper_parameters_come_from_all_ranks(tmp_path: Path) -> None:
    """MindSpore takes what rank 0 has."""
    root = write_ranks(tmp_path / "src", FULL, SOURCE)
    write_file(
        root / "rank_3" / "checkpoint_3.safetensors",
        {**blocks(FULL, SOURCE, 3), "epoch_num": np.array(3), "note": "text"},
    )
    ms.unified_safetensors(root, SOURCE, tmp_path / "out")
    # Next to the index it is one of several, and refused by itself.
    found = reshard.open((tmp_path / "out" / "hyper_param.safetensors").rename(tmp_path / "own.safetensors"))
    assert set(found) == {"epoch_num", "note"}
    assert found.tensors["note"].text == "text"


def test_a_function_filters_and_renames(source: Path, tmp_path: Path) -> None:
    """It is not asked about hyper-parameters, as in MindSpore; what it leaves out is nowhere, unlike there."""
    asked = []

    def choice(name: str) -> bool | str:
        asked.append(name)
        return {"net.w": "net.b", "net.b": "net.w", "net.v": False}.get(name, True)  # type: ignore[return-value]

    ms.unified_safetensors(source, SOURCE, tmp_path / "out", choice_func=choice)
    assert set(asked) == set(FULL)
    assert contents(*(tmp_path / "out").glob("*.safetensors")) == raw(
        {"net.b": FULL["net.w"], "net.w": FULL["net.b"], **STATES, **STEP}
    )
    assert set(json.loads((tmp_path / "out" / "param_name_map.json").read_text())["weight_map"]) == {
        "net.b", "net.w", "adam_m.net.w",
    }  # fmt: skip
    with refused(UsageError, "duplicate-name", "'same'", "net.b, net.w"):
        ms.unified_safetensors(
            source, SOURCE, tmp_path / "no", choice_func=lambda n: "same" if n in {"net.w", "net.b"} else n
        )
    with pytest.raises(TypeError, match=r"choice_func\('.*'\) .*int"):
        ms.unified_safetensors(source, SOURCE, tmp_path / "no", choice_func=lambda _: 1)
    assert not (tmp_path / "no").exists()


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Strategy, dict[str, Array]]:
    """Seven tensors that make five parts: a part begins with each begun 400 bytes."""
    monkeypatch.setattr("reshard.mindspore.unified.PART_BYTES", 400)
    full = numbers({f"w{number}": (4, 8 + 4 * number) for number in range(7)})
    strategy = Strategy.of({name: Layout.of([4], [0, -1]) for name in full})
    return write_ranks(tmp_path / "src", full, strategy, also=STEP), strategy, full


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
def test_processes_share_the_parts(
    many: tuple[Path, Strategy, dict[str, Array]], tmp_path: Path, processes: int
) -> None:
    root, strategy, full = many
    ms.unified_safetensors(root, strategy, tmp_path / "alone")
    wrote = []
    for number in range(processes, 0, -1):
        before = set(tree(tmp_path / "shared"))
        ms.unified_safetensors(root, strategy, tmp_path / "shared", split_dst_file=(number, processes))
        wrote.append(sorted(set(tree(tmp_path / "shared")) - before))
    assert tree(tmp_path / "shared") == tree(tmp_path / "alone")
    total = sum(value.nbytes for value in full.values())
    parts = -(-total // 400)
    assert len(list((tmp_path / "alone").glob("part*.safetensors"))) == parts
    every = [f"part{number}.safetensors" for number in range(parts)]
    size, rest = divmod(parts, processes)
    expected = [every[size * n + min(n, rest) :][: size + (n < rest)] for n in range(processes)]
    expected[0] = [*UNIFIED[:2], *expected[0]]
    assert wrote[::-1] == expected
    assert contents(*(tmp_path / "shared").glob("*.safetensors")) == raw({**full, **STEP})


def test_deduplicated_and_other_checkpoints(mindspore_data: Path, tmp_path: Path) -> None:
    strategy = mindspore_data / "real" / "tut_src8" / "strategy_0.ckpt"
    full = mindspore_data / "real" / "tut_src8" / "safetensors"
    ms.unified_safetensors(full, strategy, tmp_path / "full")
    ms.unified_safetensors(
        mindspore_data / "deduplicated" / "tut_src8", strategy, tmp_path / "few", merge_with_redundancy=False
    )
    assert contents(*(tmp_path / "few").glob("*.safetensors")) == contents(*(tmp_path / "full").glob("*.safetensors"))
    ms.unified_safetensors(full, strategy, tmp_path / "suffix", file_suffix="net", max_process_num=1)
    assert tree(tmp_path / "suffix") == tree(tmp_path / "full")


def test_what_unified_safetensors_refuses(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = Layout.of([2], [0, -1])
    pipeline = Strategy.of({"w": {0: rows}, "v": {1: rows}})
    stages = write_ranks(tmp_path / "stages", numbers({"w": (4, 2), "v": (2, 2)}), pipeline)
    shutil.copytree(source, tmp_path / "lost")
    (tmp_path / "lost/rank_1/checkpoint_1.safetensors").unlink()
    for code, place, arguments in [
        ("", "src_dir", (5, SOURCE, out)),
        ("", "src_strategy_file", (source, 5, out)),
        ("", "dst_dir", (source, SOURCE, 5)),
        ("not-a-directory", "src_dir", (source / "rank_0" / "checkpoint_0.safetensors", SOURCE, out)),
        ("one-stage", "stage 0", (stages, pipeline.of_stage(0), out)),
        ("missing-ranks", "rank 1", (tmp_path / "lost", SOURCE, out)),
        ("out-of-range", "max_process_num", (source, SOURCE, out, True, None, 0)),
        ("out-of-range", "split_dst_file", (source, SOURCE, out, True, None, 1, None, (0, 2))),
        ("out-of-range", "split_dst_file", (source, SOURCE, out, True, None, 1, None, (3, 2))),
    ]:
        with refused_as_mindspore(ValueError if code else TypeError, code, place):
            ms.unified_safetensors(*arguments)  # type: ignore[arg-type]
    assert not out.exists()


# --- load_distributed_checkpoint: from a unified directory to files ---


@pytest.mark.parametrize("output_format", ["ckpt", "safetensors"])
def test_files_of_all_ranks(
    unified: Path, tmp_path: Path, warnings: Callable[[], list[str]], output_format: str
) -> None:
    """Weights that the strategy does not name are left out; hyper-parameters are copied."""
    done = ms.load_distributed_checkpoint(
        None, predict_strategy=PREDICT, format="safetensors", unified_safetensors_dir=str(unified),
        dst_safetensors_dir=str(tmp_path / "out"), output_format=output_format,
    )  # fmt: skip
    assert done is True
    assert sorted(tree(tmp_path / "out")) == [f"rank_{rank}/net.{output_format}" for rank in range(2)]
    for rank in range(2):
        found = contents(tmp_path / "out" / f"rank_{rank}" / f"net.{output_format}")
        assert found == raw({**blocks(WEIGHTS, PREDICT, rank), **STEP})
    (warning,) = warnings()
    assert "adam_m.net.w" in warning


def test_files_of_one_rank_or_whole(unified: Path, tmp_path: Path) -> None:
    def to_files(folder: str, predict: Strategy | None, rank: int | None) -> list[str]:
        ms.load_distributed_checkpoint(
            None, predict_strategy=predict, format="safetensors", unified_safetensors_dir=unified,
            dst_safetensors_dir=tmp_path / folder, rank_id=rank,
        )  # fmt: skip
        return sorted(tree(tmp_path / folder))

    assert to_files("one", PREDICT, 1) == ["rank_1/net.safetensors"]
    assert contents(tmp_path / "one/rank_1/net.safetensors") == raw({**blocks(WEIGHTS, PREDICT, 1), **STEP})
    assert to_files("one", PREDICT, 0) == ["rank_0/net.safetensors", "rank_1/net.safetensors"]
    assert to_files("one", PREDICT, 0) == ["rank_0/net.safetensors", "rank_1/net.safetensors"]  # replaced
    assert to_files("whole", None, None) == ["rank_0/net.safetensors"]
    assert contents(tmp_path / "whole/rank_0/net.safetensors") == raw({**FULL, **STEP})
    assert to_files("third", None, 3) == ["rank_3/net.safetensors"]
    with refused(UsageError, "no-such-rank", "rank 2", "ranks 0 to 1"):
        to_files("none", PREDICT, 2)


def test_every_kind_of_unified_directory(source: Path, tmp_path: Path) -> None:
    opened = reshard.open(source, strategy=SOURCE)
    reshard.plan(opened, to="hf", max_shard_size=300).run(tmp_path / "face")
    write_file(tmp_path / "single" / "model.safetensors", {**FULL, **STEP})
    for folder in ("face", "single"):
        ms.load_distributed_checkpoint(
            None, predict_strategy=PREDICT, format="safetensors", unified_safetensors_dir=tmp_path / folder,
            dst_safetensors_dir=tmp_path / f"{folder}_out",
        )  # fmt: skip
        for rank in range(2):  # nothing says there what a hyper-parameter is
            path = tmp_path / f"{folder}_out" / f"rank_{rank}" / "net.safetensors"
            assert contents(path) == raw(blocks(WEIGHTS, PREDICT, rank))


def test_names_of_the_network_for_names_in_the_files(
    unified: Path, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """`name_map` goes from the network to the files; two may be swapped, and states follow their weights."""
    named = {
        "model.w": FULL["net.w"],
        "net.v": FULL["net.b"],
        "net.b": FULL["net.v"],
        "adam_m.model.w": FULL["adam_m.net.w"],
    }
    predict = Strategy.of({name: Layout.of([2], [0, -1][: value.ndim]) for name, value in named.items()})
    ms.load_distributed_checkpoint(
        None, predict_strategy=predict, format="safetensors", unified_safetensors_dir=unified,
        dst_safetensors_dir=tmp_path / "out",
        name_map={"model.w": "net.w", "net.b": "net.v", "net.v": "net.b", "model.lost": "net.lost"},
    )  # fmt: skip
    for rank in range(2):
        found = contents(tmp_path / "out" / f"rank_{rank}" / "net.safetensors")
        assert found == raw({**blocks(named, predict, rank), **STEP})
    assert warnings() == ["name_map: no file has 'net.lost'"]
    with refused(UsageError, "duplicate-name", "name_map"):
        ms.load_distributed_checkpoint(
            None, predict_strategy=predict, format="safetensors", unified_safetensors_dir=unified,
            dst_safetensors_dir=tmp_path / "no", name_map={"a": "net.w", "b": "net.w"},
        )  # fmt: skip


# --- into a network ---


def test_into_the_network_of_each_rank(unified: Path, as_rank: Callable[[int], None]) -> None:
    for rank in range(2):
        as_rank(rank)
        net = network({**blocks(WEIGHTS, PREDICT, rank), "head.w": np.zeros(3)})
        found = ms.load_distributed_checkpoint(
            net, predict_strategy=PREDICT, format="safetensors", unified_safetensors_dir=unified
        )
        assert found == (["head.w"], ["adam_m.net.w", "global_step"])
        del net["head.w"]
        assert values(net) == raw(blocks(WEIGHTS, PREDICT, rank))


def test_whole_tensors_into_a_network_by_the_ends_of_their_names(unified: Path, as_rank: Callable[[int], None]) -> None:
    as_rank(5)  # without a strategy every process has everything
    net = network({"w": FULL["net.w"], "net.b": FULL["net.b"]})
    assert ms.load_distributed_checkpoint(net, format="safetensors", unified_safetensors_dir=unified)[0] == []  # type: ignore[index]
    assert values(net) == raw({"w": FULL["net.w"], "net.b": FULL["net.b"]})


def test_only_the_parameters_are_returned(unified: Path, as_rank: Callable[[int], None]) -> None:
    as_rank(1)
    net = network(WEIGHTS)
    found = ms.load_distributed_checkpoint(
        net, predict_strategy=PREDICT, format="safetensors", unified_safetensors_dir=unified, return_param_dict=True
    )
    assert isinstance(found, dict)
    assert all(isinstance(parameter, ms.Parameter) and parameter.name == name for name, parameter in found.items())
    assert values(found) == raw({**blocks(WEIGHTS, PREDICT, 1), **STEP})
    assert not any(parameter.asnumpy().any() for parameter in net.values())  # nothing was loaded


@pytest.mark.parametrize("encrypted", [False, True])
def test_from_the_files_of_all_ranks(tmp_path: Path, as_rank: Callable[[int], None], encrypted: bool) -> None:
    """The ckpt form: a strategy of training, one of prediction, a key."""
    key: dict[str, Any] = {"dec_key": KEY, "dec_mode": "AES-CBC"} if encrypted else {}
    files = []
    for rank in SOURCE.ranks:
        files.append(str(tmp_path / f"{rank}.ckpt"))
        held = {**blocks({**FULL, "accu_grads.net.b": FULL["net.b"]}, SOURCE, rank), **STEP}
        ms.save_checkpoint(held, files[-1], **({"enc_key": KEY, "enc_mode": "AES-CBC"} if encrypted else {}))
    reshard.write_strategy(SOURCE, tmp_path / "train.ckpt")
    layouts = {name: ([2], [0, -1][: value.ndim]) for name, value in WEIGHTS.items()}
    reshard.write_strategy(PREDICT, tmp_path / "predict.ckpt")
    for rank in range(2):
        as_rank(rank)
        for predict in (
            PREDICT,
            layouts,
            tmp_path / "predict.ckpt",
            ms.build_searched_strategy(tmp_path / "predict.ckpt"),
        ):
            net = network(blocks(WEIGHTS, PREDICT, rank))
            assert ms.load_distributed_checkpoint(net, files, predict, str(tmp_path / "train.ckpt"), **key) is True
            assert values(net) == raw(blocks(WEIGHTS, PREDICT, rank))
    whole = network(WEIGHTS)
    assert ms.load_distributed_checkpoint(whole, files, None, SOURCE, True, **key) is True
    assert values(whole) == raw(WEIGHTS)
    found = ms.load_distributed_checkpoint({}, files, None, SOURCE, return_param_dict=True, **key)
    assert isinstance(found, dict)
    assert set(found) == {*FULL, *STEP, "accu_grads.net.b"}
    if encrypted:
        with wrong_key(tmp_path, "AES-CBC"):
            ms.load_distributed_checkpoint(whole, files, None, SOURCE, dec_key=KEY[::-1], dec_mode="AES-CBC")


@pytest.mark.parametrize(
    ("code", "place", "options"),
    [
        ("unknown-format", "'npz'", {"format": "npz"}),
        ("unknown-format", "'npz'", {"output_format": "npz"}),
        ("", "unified_safetensors_dir", {"unified_safetensors_dir": None}),
        ("", "dst_safetensors_dir", {"network": None}),
        ("", "rank_id", {"network": None, "dst_safetensors_dir": "no", "rank_id": "1"}),
        ("out-of-range", "rank_id", {"network": None, "dst_safetensors_dir": "no", "rank_id": -1}),
        ("other-strategy", "encoder", {"predict_strategy": Strategy.of({"encoder": Layout.of([2], [0])})}),
        ("no-tensors", "no tensor", {"network": {"encoder.q": ms.Parameter(np.zeros(3), "encoder.q")}}),
        ("no-such-rank", "rank 2", {"predict_strategy": PREDICT}),
        ("", "network", {"network": None, "format": "ckpt"}),
        ("", "checkpoint_filenames", {"format": "ckpt"}),
        ("not-found", "nowhere.ckpt", {"format": "ckpt", "checkpoint_filenames": ["nowhere.ckpt"]}),
    ],
)
def test_what_load_distributed_refuses(
    unified: Path,
    as_rank: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    place: str,
    options: dict[str, Any],
) -> None:
    monkeypatch.chdir(unified.parent)
    as_rank(2)
    call = {"network": network(WEIGHTS), "format": "safetensors", "unified_safetensors_dir": unified, **options}
    with refused_as_mindspore(ValueError if code else TypeError, code, place):
        ms.load_distributed_checkpoint(**call)
    assert "no" not in [path.name for path in unified.parent.iterdir()]


def test_files_and_networks_that_do_not_fit_are_refused(unified: Path, source: Path) -> None:
    files = [str(source / f"rank_{rank}" / f"checkpoint_{rank}.safetensors") for rank in range(4)]
    net = network({"net.w": np.zeros((3, 3), np.float32)})
    with refused(NetworkError, "wrong-shape", "'net.w'", "(3, 3)", "(8, 12)"):
        ms.load_distributed_checkpoint(net, format="safetensors", unified_safetensors_dir=unified)
    with refused(ValueError, "missing-ranks", "rank 3"):
        ms.load_distributed_checkpoint(net, files[:3], None, SOURCE)
    with refused(ValueError, "no-layout", "ranks"):
        ms.load_distributed_checkpoint(net, files)
    with refused(ValueError, "unknown-count", "'a-group'", "[4, 12]"):
        ms.load_distributed_checkpoint(net, files, {"net.w": ([2], [0, -1], [4, 12], 0, True, "a-group")}, SOURCE)

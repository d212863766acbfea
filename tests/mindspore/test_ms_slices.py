"""`merge_sliced_parameter`, and the flow of MindSpore r1.5: integrate by hand, then divide again."""

from __future__ import annotations

import re
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import checkpoints
import helpers
import ml_dtypes
import numpy as np
import pytest
from generators import laid_out
from hypothesis import given
from refusals import refused

import reshard
import reshard.mindspore as ms
from reshard.core.layout.layout import Layout
from reshard.strategy.proto import message_class
from reshard.strategy.proto.messages import to_protobuf

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.layout.block import Shape

Array = np.ndarray[Any, np.dtype[Any]]


def counted(shape: Shape, dtype: Any = np.float32) -> Array:
    """A tensor in which every element is another number."""
    return np.arange(prod(shape)).astype(dtype).reshape(shape)


def places(layout: Layout, shape: Shape) -> list[tuple[slice, ...]]:
    """Where every rank's slice is, by the oracle."""
    side = {
        "dev_matrix": layout.dev_matrix,
        "tensor_map": [list(axes) or -1 for axes in layout.tensor_map],
        "opt_weight_shard_size": layout.opt_weight_shard_size,
    }
    return [helpers.slices(side, shape, rank) for rank in range(layout.devices)]


def cut(full: Array, layout: Layout) -> list[Array]:
    """Every rank's slice."""
    return [full[where] for where in places(layout, full.shape)]


def parameters(slices: list[Array], name: str = "w") -> list[ms.Parameter]:
    return [ms.Parameter(ms.Tensor(part), name) for part in slices]


def merged(slices: list[Array], layout: Layout) -> Array:
    """The slices put together, the layout in MindSpore's terms."""
    message: Any = message_class("mindspore.straspb.ParallelStrategyMap")()
    message.ParseFromString(to_protobuf(reshard.Strategy.of({"w": layout})))
    strategy = {"w": message.parallel_layout_item[0].parallel_layouts}
    found: Array = ms.merge_sliced_parameter(parameters(slices), strategy).asnumpy()
    return found


def same(one: Array, other: Array) -> bool:
    """Equal in dtype, shape and bits."""
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


# Without a strategy.


def test_without_a_strategy_slices_are_joined_along_the_rows() -> None:
    full = counted((8, 3))
    whole = ms.merge_sliced_parameter(parameters(np.split(full, 4)))
    assert same(whole.asnumpy(), full)
    assert same(ms.merge_sliced_parameter(parameters([full[:1], full[1:]]), {}).asnumpy(), full)


def test_the_result_is_like_the_first_slice() -> None:
    first = ms.Parameter(ms.Tensor(np.ones(2, np.float16)), "w", requires_grad=False, layerwise_parallel=True)
    second = ms.Parameter(ms.Tensor(np.ones(2, np.float16)), "w")
    whole = ms.merge_sliced_parameter([first, second])
    assert (whole.name, whole.requires_grad, whole.layerwise_parallel) == ("w", False, True)
    assert (whole.shape, whole.dtype) == ((4,), np.float16)
    assert first.shape == (2,)


# With one.


def test_a_tensor_without_dimensions_is_that_of_every_rank() -> None:
    whole = merged([np.float32(2), np.float32(2)], Layout.of([2], []))  # type: ignore[list-item]
    assert whole == 2
    assert whole.shape == ()


def test_replicas_that_differ_are_refused() -> None:
    """MindSpore takes the last one's; slices in another order than the layout's look like this."""
    full = counted((4, 2))
    layout = Layout.of([2, 2], [1, -1])
    right = cut(full, layout)
    assert same(merged(right, layout), full)
    with refused(ValueError, "replicas-differ", "parameter 'w'", "slices 0 and 1", layout):
        merged([right[0], right[2], right[1], right[3]], layout)
    nan = np.full((2, 2), np.nan, np.float32)
    assert same(merged([nan, nan], Layout.of([2], [-1, -1])), nan)


@given(laid_out())
def test_every_layout_is_undone(pair: tuple[Layout, Shape]) -> None:
    layout, shape = pair
    full = counted(shape)
    assert same(merged(cut(full, layout), layout), full)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "bool", "int8", "uint64"])
def test_bits_are_kept(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    patterns = np.arange(256, dtype=np.uint8) if dtype != "bool" else np.arange(256, dtype=np.uint8) % 2
    full = patterns.view(kind).reshape(8, -1)
    assert same(merged(np.split(full, 4), Layout.of([4], [0, -1])), full)
    assert same(ms.merge_sliced_parameter(parameters(np.split(full, 4))).asnumpy(), full)


def test_a_strategy_file_is_read_by_name(tmp_path: Path) -> None:
    full = counted((4, 4))
    nested = Layout.of([2, 2], [-1, (1, 0)])
    reshard.write_strategy(reshard.Strategy.of({"w": nested}), tmp_path / "strategy.ckpt")
    searched = ms.build_searched_strategy(str(tmp_path / "strategy.ckpt"))
    assert same(ms.merge_sliced_parameter(parameters(cut(full, nested)), searched).asnumpy(), full)


# Uneven slices.


@pytest.mark.parametrize(
    ("layout", "code", "places"),
    [
        (Layout.of([2], [0, -1], param_split_shape=[3]), "wrong-sizes", ["[3]"]),
        (Layout.of([2, 2], [1, 0], param_split_shape=[3, 4, 3, 4]), "wrong-shape", ["slice 1", "[4, 2]", "[3, 2]"]),
        (Layout.of([2], [0, -1], param_split_shape=[4, 3]), "wrong-shape", ["slice 0", "[3, 2]", "[4, 2]"]),
        (Layout.of([2], [0, -1]), "wrong-shape", ["slice 1", "[4, 2]", "[3, 2]"]),
        (Layout.of([2, 2], [1, -1], -1, param_split_shape=[3, 4]), "wrong-sizes", ["[3, 4]"]),
        (Layout.of([2], [0, -1], field=1), "unsupported-layout", ["field"]),
    ],
)
def test_uneven_rows_that_the_layout_does_not_describe_are_refused(
    layout: Layout, code: str, places: list[str]
) -> None:
    full = counted((7, 2))
    slices = [full[:3], full[3:]] * (layout.devices // 2)
    with refused(ValueError, code, "parameter 'w'", *places):
        merged(slices, layout)


# What is refused.


@pytest.mark.parametrize(
    ("given", "kind", "places"),
    [
        ("w", TypeError, "sliced_parameters .*str"),
        ([], ValueError, "sliced_parameters"),
        ([*parameters([np.ones(2)]), ms.Tensor([1.0])], TypeError, r"sliced_parameters\[1\] .*Tensor"),
        (parameters([np.ones(2)]) + parameters([np.ones(2)], "v"), ValueError, r"sliced_parameters\[1\] "),
        (parameters([np.ones(2), np.ones((2, 1))]), ValueError, r"sliced_parameters\[1\] "),
        (parameters([np.ones(2), np.ones(2, np.float16)]), ValueError, r"sliced_parameters\[1\] "),
        (parameters([np.array(1.0)]), ValueError, "zero-dimensional"),
    ],
)  # fmt: skip
def test_what_are_no_slices_of_a_parameter_is_refused(given: Any, kind: type[Exception], places: str) -> None:
    with pytest.raises(kind, match=places):
        ms.merge_sliced_parameter(given)


def test_strategies_that_do_not_fit_are_refused() -> None:
    slices = parameters(np.split(counted((4, 2)), 2))
    with pytest.raises(TypeError, match="^strategy .*str"):
        ms.merge_sliced_parameter(slices, "strategy.ckpt")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="parameter 'w'"):
        ms.merge_sliced_parameter(slices, {"v": Layout.of([2], [0, -1])})
    with refused(ValueError, "wrong-count", "parameter 'w'", "2 slices", "4 devices"):
        ms.merge_sliced_parameter(slices, {"w": Layout.of([4], [0, -1])})
    with refused(ValueError, "wrong-dimensions", "parameter 'w'", "2 dimensions", "tensor_map [0]"):
        ms.merge_sliced_parameter(slices, {"w": Layout.of([2], [0])})
    with refused(ValueError, "wrong-type", "SimpleNamespace", "tensor_map"):
        ms.merge_sliced_parameter(slices, {"w": SimpleNamespace(dev_matrix=[])})


# The page of r1.5: four devices' [2, 8] to [8, 8] to two devices' [4, 8].

# As printed for four devices. The page's merged `weight` holds rows that no device has; its merged and its new
# `moments.weight` are these rows.
WEIGHT = """
[[0.87537426 1.0448935 0.86736983 0.8836905 0.77354026 0.69588304 0.9183654 0.7792076]
 [0.87224025 0.8726848 0.771446 0.81967723 0.88974726 0.7988162 0.72919345 0.7677011]]
[[0.9210751 0.9050457 0.9827775 0.920396 0.9240526 0.9750359 1.0275179 1.0819869]
 [0.73605865 0.84631145 0.9746683 0.9386582 0.82902765 0.83565056 0.9702136 1.0514659]]
[[1.0108461 0.8689414 0.91719437 0.8805056 0.7994629 0.8999671 0.7585804 1.0287056 ]
 [0.90653455 0.60146594 0.7206475 0.8306303 0.8364681 0.89625114 0.7354735 0.8447268]]
[[0.7147005 0.9168278 0.80178416 0.6258351 0.8413766 0.5909515 0.696347 0.71359116]
 [0.20506378 0.03691584 0.2454556 0.12978578 0.19065076 0.23904312 0.27509746 0.34614682]]
"""
MOMENTS = """
[[0.2567724 -0.07485991 0.282002 0.2456022 0.454939 0.619168 0.18964815 0.45714882]
 [0.25946522 0.24344791 0.45677605 0.3611395 0.23378398 0.41439137 0.5312468 0.4696194]]
[[0.2417504 0.28193963 0.06713893 0.21510397 0.23380603 0.11424308 0.0218009 -0.11969765]
 [0.45955992 0.22664294 0.01990281 0.0731914 0.27125207 0.27298513 -0.01716102 -0.15327111]]
[[0.03440702 0.41419312 0.24817684 0.30765256 0.48516113 0.24904746 0.57791173 0.00955463]
 [0.13458519 0.6690533 0.49259356 0.28319967 0.25951773 0.16777472 0.45696738 0.24933104]]
[[0.14152306 0.5040985 0.24455397 0.10907605 0.11319532 0.19538902 0.01208619 0.40430856]
 [-0.7773164 -0.47611716 -0.6041424 -0.6144473 -0.2651842 -0.31909415 -0.4510405 -0.12860501]]
"""


def printed(text: str) -> Array:
    """The numbers of the page, rows of eight."""
    return np.array(re.findall(r"-?\d+\.\d+", text), np.float32).reshape(-1, 8)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page begins with, where its script looks for them."""
    monkeypatch.chdir(tmp_path)
    rates = {"learning_rate": np.array([0.01], np.float32), "momentum": np.array([0.9], np.float32)}
    for rank in range(4):
        rows = slice(2 * rank, 2 * rank + 2)
        tensors = {"weight": printed(WEIGHT)[rows], **rates, "moments.weight": printed(MOMENTS)[rows]}
        checkpoints.write_file(tmp_path / f"node{rank}/CKP_1-4_32.ckpt", tensors, "ckpt")
    split = Layout.of([4], [0, -1])
    reshard.write_strategy(
        reshard.Strategy.of({"weight": split, "moments.weight": split}), tmp_path / "strategy_train.ckpt"
    )
    return tmp_path


def integrate(rank_size: int) -> None:
    """The page's `integrate_ckpt_file`, without the network that the parameters only pass through."""
    param_dicts = [ms.load_checkpoint(f"./node{i}/CKP_1-4_32.ckpt") for i in range(rank_size)]
    strategy = ms.build_searched_strategy("./strategy_train.ckpt")
    param_dict = {}
    for paramname in ["weight", "moments.weight"]:
        sliced_parameters = []
        for i in range(rank_size):
            parameter = param_dicts[i].get(paramname)
            sliced_parameters.append(parameter)
        merged_parameter = ms.merge_sliced_parameter(sliced_parameters, strategy)
        param_dict[paramname] = merged_parameter
    param_list = []
    for key, value in param_dict.items():
        each_param: dict[str, Any] = {}
        each_param["name"] = key
        if isinstance(value.data, ms.Tensor):  # noqa: SIM108 -- as the page has it
            param_data = value.data
        else:
            param_data = ms.Tensor(value.data)
        each_param["data"] = param_data
        param_list.append(each_param)
    ms.save_checkpoint(param_list, "./CKP-Integrated_1-4_32.ckpt")


def divide() -> dict[str, ms.Parameter]:
    """The page's `train_mindspore_impl_fc` up to the network."""
    param_dict: dict[str, ms.Parameter] = ms.load_checkpoint("./CKP-Integrated_1-4_32.ckpt")
    for paramname in ["weight", "moments.weight"]:
        new_param = param_dict[paramname]
        slice_list = np.split(new_param.data.asnumpy(), 2, axis=0)
        rank = ms.get_rank()
        tensor_slice = ms.Tensor(slice_list[rank])
        new_param.set_data(tensor_slice, True)
    return param_dict


def test_the_page_of_r1_5(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    integrate(4)
    whole = helpers.read_rank_file(page / "CKP-Integrated_1-4_32.ckpt")
    assert whole == {
        "weight": ("float32", (8, 8), printed(WEIGHT).tobytes()),  # by the rule, see above
        "moments.weight": ("float32", (8, 8), printed(MOMENTS).tobytes()),
    }
    for rank in range(2):
        monkeypatch.setenv("RANK_ID", str(rank))
        rows = slice(4 * rank, 4 * rank + 4)
        new = divide()
        assert same(new["moments.weight"].asnumpy(), printed(MOMENTS)[rows])
        assert same(new["weight"].asnumpy(), printed(WEIGHT)[rows])


# Uneven rows.


@pytest.mark.parametrize("sizes", [(3, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("beside", [1, 2])
def test_uneven_rows(sizes: tuple[int, int], beside: int) -> None:
    """MindSpore lists a size for every slice, also for slices next to each other."""
    full = counted((sum(sizes), 4))
    layout = Layout.of([2, beside], [1, 0], param_split_shape=[size for size in sizes for _ in range(beside)])
    slices = [part for rows in np.split(full, [sizes[0]]) for part in np.split(rows, beside, axis=1)]
    assert same(merged(slices, layout), full)

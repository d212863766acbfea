"""`Tensor`, `Parameter` and who-am-I of `reshard.mindspore`: what the tutorials' scripts do with them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from refusals import refused

import reshard.mindspore as ms
from reshard.errors import UsageError
from reshard.mindspore import Parameter, Tensor
from reshard.mindspore.communication import LAUNCHERS, get_group_size, get_rank, init

WEIGHT = np.arange(16, dtype=np.float32).reshape(2, 8)


def test_a_parameter_shows_itself_as_mindspores_does() -> None:
    parameter = Parameter(Tensor(WEIGHT.astype(ml_dtypes.bfloat16)), name="w", requires_grad=False)
    assert repr(parameter) == str(parameter) == "Parameter (name=w, shape=(2, 8), dtype=BFloat16, requires_grad=False)"
    assert repr(Tensor(True)) == "Tensor(shape=[], dtype=Bool, value=True)"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1, "int64"), (2.5, "float32"), (True, "bool"), (np.float64(3), "float64"), ([1, 2], "int64"),
     ([1.5, 2], "float32"), (np.zeros(2), "float64"), (np.zeros(2, ">i4"), "int32"),
     (np.zeros(2, ml_dtypes.float8_e5m2), "float8_e5m2")],
)  # fmt: skip
def test_dtypes_are_those_that_mindspore_gives(value: object, dtype: str) -> None:
    assert Tensor(value).dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert Parameter(3).dtype == ms.int32


def test_mindspores_dtype_names_are_there_and_compare() -> None:
    assert Tensor(WEIGHT).dtype == ms.float32 == "float32"
    assert Tensor(WEIGHT, ms.bfloat16).dtype == ms.bfloat16 == ml_dtypes.bfloat16
    assert Tensor(WEIGHT).astype(ms.float16).asnumpy().dtype == np.float16
    assert Tensor([1, 0], ms.bool_).asnumpy().tolist() == [True, False]


def test_int4_keeps_its_bits() -> None:
    tensor = Tensor(np.array([1, -2, 119], np.int8), ms.qint4x2)
    assert (tensor.dtype, tensor.asnumpy().dtype) == (ms.qint4x2, np.int8)
    assert [each.asnumpy().tolist() for each in (tensor, tensor[:], Tensor(tensor))] == [[1, -2, 119]] * 3
    assert "Int4" in repr(Parameter(tensor, "q"))


def test_tensors_copy_what_they_are_made_of_and_from_numpy_shares() -> None:
    array = np.zeros(3, np.float32)
    copied, shared = Tensor(array), Tensor.from_numpy(array)
    array[0] = 1
    assert copied.asnumpy().tolist() == [0, 0, 0]
    assert shared.asnumpy().tolist() == [1, 0, 0]
    parameter = Parameter(shared, "p")
    assert parameter.data.asnumpy() is parameter.asnumpy()
    assert not np.shares_memory(parameter.asnumpy(), array)
    strided = Tensor.from_numpy(WEIGHT.T)
    assert strided.asnumpy().flags.c_contiguous
    assert (strided.asnumpy() == WEIGHT.T).all()


def test_numpy_takes_tensors_for_arrays() -> None:
    tensor = Tensor(WEIGHT)
    assert np.concatenate([tensor, tensor]).shape == (4, 8)
    assert np.asarray(tensor) is tensor.asnumpy()
    assert np.array(tensor, dtype=np.float64).dtype == np.float64
    assert np.array(tensor) is not tensor.asnumpy()
    assert (tensor == WEIGHT).all()
    assert not (tensor != Tensor(WEIGHT)).any()
    assert (len(tensor), tensor.size, tensor.ndim) == (2, 16, 2)
    assert (2 * tensor + 1 == 2 * WEIGHT + 1).all()
    assert (tensor[1, 2].shape, float(tensor[1, 2]), int(tensor[1, 2]), bool(tensor[1, 2])) == ((), 10.0, 10, True)
    with pytest.raises(TypeError):  # as Python has it of an array without dimensions
        len(tensor[1, 2])


def test_a_parameter_has_a_name_whatever_happens() -> None:
    unnamed = Parameter(WEIGHT)
    assert unnamed.name.startswith("Parameter#")
    assert unnamed.name != Parameter(WEIGHT).name
    unnamed.name = " w "
    assert unnamed.name == "w"
    with pytest.raises(ValueError, match="name .*int 3"):
        Parameter(WEIGHT, 3)  # type: ignore[arg-type]


def test_set_data_keeps_the_dtype() -> None:
    parameter = Parameter(np.zeros(2, np.int32), "i")
    assert parameter.set_data(Tensor([1.5, 2.5])) is parameter
    assert (parameter.dtype, parameter.asnumpy().tolist(), parameter.sliced) == (ms.int32, [1, 2], False)
    parameter.set_data(4)
    assert (parameter.shape, int(parameter)) == ((), 4)
    with pytest.raises(TypeError, match=r"'i' .*int32.*float 4\.5"):
        parameter.set_data(4.5)
    assert parameter.set_data(np.zeros(2)).asnumpy().tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("text", "dtype str"),
        (np.array(["a"]), "dtype str"),
        (np.array([None]), "dtype object"),
        ([{}], "dtype object"),
        (np.zeros(2, "M8[s]"), r"dtype datetime64\[s\]"),
    ],
)
def test_what_no_checkpoint_holds_is_refused(value: object, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        Tensor(value)


# --- launch ---


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a launcher."""
    for pair in LAUNCHERS:
        for variable in pair:
            monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def test_without_a_launcher_there_is_one_process(launched: pytest.MonkeyPatch) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL)
    ms.context.set_context(mode=ms.context.PYNATIVE_MODE)
    init("hccl")
    assert (get_rank(), get_group_size()) == (0, 1)
    assert (ms.get_rank, ms.communication.get_rank) == (get_rank, get_rank)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK_ID": "3", "RANK_SIZE": "4"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, (5, 8)),
        ({"RANK": "1", "WORLD_SIZE": "8"}, (1, 8)),
        # mpirun inside a Slurm job, where every child inherits the script's own number
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4)),
        # RANK_SIZE set for all in an image, the rank by mpirun
        ({"RANK_SIZE": "8", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4)),
        ({"RANK_SIZE": "8"}, (0, 8)),
        ({"RANK_ID": "3"}, (3, 1)),  # as MindSpore has it
    ],
)
def test_the_launcher_says_who_this_is(
    launched: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    for variable, value in environment.items():
        launched.setenv(variable, value)
    assert (get_rank(), get_group_size()) == expected


def test_a_senseless_environment_is_refused(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("RANK_ID", "first")
    with refused(UsageError, "bad-number", "RANK_ID", "'first'"):
        get_rank()


def test_every_name_is_there_and_only_on_demand() -> None:
    for name in ms.__all__:
        assert getattr(ms, name) is not None
    assert {"Parameter", "load_checkpoint", "communication"} <= set(dir(ms))
    assert "Model" not in dir(ms)


def test_what_belongs_to_training_says_where_it_is() -> None:
    for name in ("Model", "nn"):
        assert not hasattr(ms, name)
        with pytest.raises(AttributeError, match=rf"^reshard\.mindspore .*'{name}'.* mindspore$"):
            getattr(ms, name)


def test_the_names_are_in_mindspores_modules_too() -> None:
    """MindSpore's own pages write `ms.parallel.rank_list_for_transform`."""
    for name in ms.__all__:
        assert getattr(ms.parallel, name) is getattr(ms, name)
    for module in (ms.communication, ms.context):
        for name in module.__all__:
            assert getattr(module, name) is getattr(ms, name)

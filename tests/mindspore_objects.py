"""What is done with MindSpore's objects here: `PYTHON mindspore_objects.py FOLDER`, with one that has MindSpore."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import reshard.mindspore as ms

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3) + 1


def weight(m: Any, name: str = "w", value: Any = ROWS) -> Any:
    return m.Parameter(m.Tensor(value), name=name)


def half(m: Any, name: str = "b", value: Any = ROWS) -> Any:
    return m.Parameter(m.Tensor(value, m.bfloat16), name=name)


def raised(kind: type[Exception], action: Any) -> str:
    """The error's text."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def check_every_dtype_comes_as_itself(m: Any, folder: Path) -> None:
    for name in ("bool_", "int8", "int32", "int64", "uint16", "float16", "float32", "float64", "complex64", "bfloat16",
                 "float8_e5m2", "float8_e4m3fn"):  # fmt: skip
        dtype = getattr(ms, name)
        values = np.array([[0, 1], [1, 0]]).astype(dtype)
        given = (
            m.Tensor(values.astype(np.float32), getattr(m, name))
            if dtype.kind == "V" or "8_" in name
            else m.Tensor(values)
        )
        tensor = ms.Tensor(given)
        assert (tensor.dtype, tensor.shape, tensor.array.tobytes()) == (dtype, (2, 2), values.tobytes()), name
        assert ms.Tensor([[0, 1], [1, 0]], getattr(m, name)).array.tobytes() == values.tobytes(), name
        assert ms.Tensor(values).astype(getattr(m, name)).dtype == dtype, name
        assert np.asarray(tensor == given).all(), name
        assert not np.asarray(tensor != given).any(), name
        assert ms.Parameter(given, "p").dtype == dtype, name
    four = ms.Tensor(m.Tensor(np.array([1, -8, 119], np.int8), dtype=m.qint4x2))
    assert (four.dtype, four.asnumpy().tolist()) == (ms.qint4x2, [1, -8, 119])
    text = raised(TypeError, lambda: ms.Tensor(m.Tensor(np.zeros(2, np.complex128))))
    assert "no checkpoint holds elements of dtype complex128" in text
    raised(TypeError, lambda: ms.Tensor([1], m.complex128))


def check_set_data_takes_them_and_keeps_its_own_memory(m: Any, folder: Path) -> None:
    parameter, given = ms.Parameter(np.zeros((2, 3), np.float32), "w"), weight(m)
    assert parameter.set_data(given) is parameter
    assert (parameter.asnumpy() == ROWS).all()
    parameter.asnumpy()[...] = 0
    assert (given.asnumpy() == ROWS).all()
    for other in (given, given.data, half(m)):
        parameter.set_data(other, True)
        assert (parameter.dtype, parameter.sliced) == (ms.float32, True)
        assert (parameter.asnumpy() == ROWS).all()
    low = ms.Parameter(np.zeros((2, 3), ml_dtypes.bfloat16), "b")
    assert (low.set_data(half(m)).asnumpy() == ROWS).all()
    assert low.dtype == ms.bfloat16


def check_slices_are_merged(m: Any, folder: Path) -> None:
    from reshard import Layout

    for make, dtype in ((weight, ms.float32), (half, ms.bfloat16)):
        slices = [make(m, "w", part) for part in np.split(ROWS, 3, axis=1)]
        slices[0].requires_grad = False
        whole = ms.merge_sliced_parameter(slices, {"w": Layout.of([3], [-1, 0])})
        assert type(whole) is ms.Parameter
        assert (whole.name, whole.dtype, whole.requires_grad, whole.layerwise_parallel) == ("w", dtype, False, False)
        assert (whole.asnumpy() == ROWS).all()
    ours = ms.Parameter(ROWS[:1], "w")
    assert (ms.merge_sliced_parameter([ours, weight(m, "w", ROWS[1:])]).asnumpy() == ROWS).all()
    four = [m.Parameter(m.Tensor(np.array([n], np.int8), dtype=m.qint4x2), name="q") for n in (1, -8)]
    assert ms.merge_sliced_parameter(four).dtype == ms.qint4x2
    text = raised(TypeError, lambda: ms.merge_sliced_parameter([m.Tensor(ROWS)]))
    assert "sliced_parameters[0] is Tensor; expected a Parameter, here or MindSpore's" in text


def check_they_are_saved_as_ours_are(m: Any, folder: Path) -> None:
    four = m.Parameter(m.Tensor(np.array([1, -8], np.int8), dtype=m.qint4x2), name="q")
    ours = {"w": ROWS, "b": ROWS.astype(ml_dtypes.bfloat16), "q": ms.Tensor([1, -8], ms.qint4x2)}
    theirs = {"w": weight(m), "b": half(m), "q": four}
    for format in ("ckpt", "safetensors"):
        ms.save_checkpoint(ours, folder / "ours", format=format, append_dict={"n": ROWS})
        expected = (folder / f"ours.{format}").read_bytes()
        for given in (
            theirs, list(theirs.values()), tuple(theirs.values()), Net(m, *theirs.values()),
            [{"name": name, "data": value} for name, value in theirs.items()],
        ):  # fmt: skip
            ms.save_checkpoint(given, folder / "theirs", format=format, append_dict={"n": m.Tensor(ROWS)})
            assert (folder / f"theirs.{format}").read_bytes() == expected, (format, given)
    table = m.experimental.MapParameter(name="t", key_dtype=m.int32, value_dtype=m.float32, value_shape=(3,))
    text = raised(TypeError, lambda: ms.save_checkpoint({"t": table}, folder / "table"))
    assert "'t': a MapParameter has no array of values" in text


def check_they_are_loaded_into_whatever_has_parameters(m: Any, folder: Path) -> None:
    ms.save_checkpoint({"w": ROWS, "b": ROWS.astype(ml_dtypes.bfloat16)}, folder / "x")
    loaded = ms.load_checkpoint(folder / "x.ckpt")
    low = ROWS.astype(ml_dtypes.bfloat16)

    def places() -> tuple[dict[str, Any], Any]:
        net = Net(m, weight(m, "w", ROWS * 0), half(m, "b", ROWS * 0))
        return {parameter.name: parameter for _, parameter in net.parameters_and_names()}, net

    sources = [loaded, {"w": weight(m), "b": half(m)}, {"w": m.Tensor(ROWS), "b": m.Tensor(ROWS, m.bfloat16)},
               {"w": ROWS, "b": low}, {"w": half(m, "w"), "b": weight(m, "b")}]  # fmt: skip
    for source in sources:
        mapping, net = places()
        for target in (net, mapping):
            for parameter in mapping.values():
                parameter.set_data(m.Tensor(ROWS * 0, parameter.dtype))
            assert ms.load_param_into_net(target, {**source, "more": loaded["w"]}) == ([], ["more"])
            for name, parameter in mapping.items():
                assert isinstance(parameter, m.Parameter)
                assert str(parameter.dtype) == {"w": "Float32", "b": "BFloat16"}[name]
                assert (ms.Tensor(parameter).asnumpy() == ROWS).all(), name
        ours = {"w": ms.Parameter(ROWS * 0, "w"), "b": ms.Parameter(low * 0, "b")}
        assert ms.load_param_into_net(ours, source) == ([], [])
        assert all((parameter.asnumpy() == ROWS).all() for parameter in ours.values())
        assert (ours["w"].dtype, ours["b"].dtype) == (ms.float32, ms.bfloat16)
    given = weight(m)
    ms.load_param_into_net(ours, {"w": given})
    ours["w"].asnumpy()[...] = 0
    assert (given.asnumpy() == ROWS).all()
    mapping, net = places()
    assert ms.load_param_into_net(net, {"net.w": loaded["w"]}) == (["b"], [])
    assert (mapping["w"].asnumpy() == ROWS).all()


def check_a_cell_is_checked_whole_before_it_is_changed(m: Any, folder: Path) -> None:
    w, b = weight(m, "w", ROWS * 0), half(m, "b", ROWS * 0)
    text = raised(
        RuntimeError, lambda: ms.load_param_into_net(Net(m, w, b), {"w": ROWS, "b": ms.Parameter(ROWS[:1], "b")})
    )
    assert "'b' has shape (2, 3) in the network and (1, 3) in the checkpoint" in text
    assert not w.asnumpy().any()
    text = raised(RuntimeError, lambda: ms.load_param_into_net(Net(m, w), {"w": ROWS.astype(np.int32)}))
    assert "'w' is float32 in the network and int32 in the checkpoint" in text


def check_ours_are_made_theirs_as_the_readme_says(m: Any, folder: Path) -> None:
    raised(TypeError, lambda: m.Parameter(ms.Parameter(ROWS, "w")))
    for array in (ROWS, ROWS.astype(ml_dtypes.bfloat16)):
        p = ms.Parameter(array, "w")
        theirs = m.Parameter(m.Tensor(p.asnumpy()), name=p.name)
        assert (ms.Tensor(theirs).dtype, ms.Tensor(theirs).array.tobytes()) == (p.dtype, array.tobytes())


def Net(m: Any, *parameters: Any) -> Any:  # noqa: N802 -- a class of MindSpore's
    """A Cell with these parameters."""
    cell = m.nn.Cell()
    for parameter in parameters:
        cell.insert_param_to_cell(parameter.name, parameter)
    return cell


CHECKS = {name: check for name, check in globals().copy().items() if name.startswith("check_")}

if __name__ == "__main__":
    import mindspore

    for check in CHECKS.values():
        check(mindspore, Path(sys.argv[1]))
    print("RESULT", len(CHECKS))

"""Adapters of embeddings and heads, as PEFT saves them: its merges, bit for bit, of recorded files and of new ones.

RESHARD_TORCH_PYTHON=torch/bin/python pytest -m torch  (with transformers and peft)
"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import peft_adapters
import pytest
from adapters import ALPHA, RANK, assert_arrays, cut, matrices, product, save, weights, written
from adapters import merged as plain_merge
from checkpoints import tree, write_file, write_ranks
from commands import done
from deepspeed_files import values, write_zero
from refusals import failed, refused
from saves_files import Storage, dtensor, mesh, shard, tensor, write_rank, write_save

import reshard
from reshard import LoRA, Selection
from reshard.core.plan import budget
from reshard.errors import ChangedError, SourceError, UsageError
from reshard.rules.lora import low_rank

if TYPE_CHECKING:
    from helpers import Array


PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")
UNTIED = ("untied_float32", "untied_float16", "untied_bfloat16", "trained_wider", "not_targeted")
TIED = ("tied_head", "tied_embedding", "tied_both")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(
    scope="session", params=["recorded", pytest.param("new", marks=[pytest.mark.torch, pytest.mark.timeout(600)])]
)
def peft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mindspore_data: Path) -> Path:
    """The cases of `peft_adapters`."""
    if request.param == "recorded":
        return mindspore_data / "peft"
    found = "import importlib.util as u; raise SystemExit(u.find_spec('peft') is None)"
    if not PYTHON or subprocess.run([PYTHON, "-c", found], check=False).returncode:
        pytest.skip("RESHARD_TORCH_PYTHON names no Python that has PyTorch and peft")
    root = tmp_path_factory.mktemp("peft")
    subprocess.run([PYTHON, Path(peft_adapters.__file__), root], check=True, capture_output=True)
    return root


def arrays(path: Path) -> dict[str, Array]:
    """All tensors of a file or a set."""
    return {name: np.asarray(value) for name, value in reshard.open(path).items()}


def merged(case: Path, result: str = "merged") -> dict[str, Array]:
    """What PEFT made of the set of a case."""
    return {**arrays(case / "base"), **arrays(case / f"{result}.safetensors")}


# --- copies


@pytest.mark.parametrize("name", UNTIED)
def test_copies_of_embeddings(tmp_path: Path, peft: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every dtype, as default options save them, and whole ones: PEFT's bits; and in bands of a few elements."""
    case = peft / name
    lora = LoRA(str(case / "adapter"))
    assert_arrays(reshard.open(case / "base").merge_lora(lora), merged(case))
    monkeypatch.setattr(budget, "BAND_BYTES", 96)
    monkeypatch.setattr(budget, "TASK_BYTES", 800)
    monkeypatch.setattr(low_rank, "_COPY_BYTES", 100)
    done("convert", case / "base", tmp_path / "set", "--to", "hf", "--lora", lora.root, "--tune=fsync=no")
    assert_arrays(reshard.open(tmp_path / "set"), merged(case))
    done("verify", tmp_path / "set")


@pytest.mark.parametrize("how", ["rows", "columns", "both"])
def test_copies_and_ranks(tmp_path: Path, peft: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a weight are compared with their part of the copy."""
    case = peft / "untied_bfloat16"
    model = arrays(case / "base")
    source = cut(model, how)
    opened = reshard.open(write_ranks(tmp_path / "src", written(model), source, "safetensors"), strategy=source)
    monkeypatch.setattr(low_rank, "_COPY_BYTES", 100)
    assert_arrays(opened.merge_lora(LoRA(str(case / "adapter"))), merged(case))
    model[EMBEDDING][17, 11] += 1
    opened = reshard.open(write_ranks(tmp_path / "other", written(model), source, "safetensors"), strategy=source)
    with refused(SourceError, "different-model", "model.embed_tokens.weight"):
        opened.merge_lora(LoRA(str(case / "adapter")))[EMBEDDING].compute()


def changed(case: Path, into: Path, name: str, at: tuple[int, ...], value: Array | None = None) -> Path:
    """The base of a case, one element of one tensor being another, or all of the tensor."""
    model = arrays(case / "base")
    if value is None:
        model[name] = model[name].copy()
        model[name][at] += 1
    else:
        model[name] = value
    into.mkdir()
    return write_file(into / "model.safetensors", written(model))


@pytest.mark.parametrize("case", ["untied_bfloat16", "trained_wider", "not_targeted"])
@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
@pytest.mark.parametrize("at", [(0, 0), (31, 15)])
def test_another_embedding(tmp_path: Path, peft: Path, case: str, name: str, at: tuple[int, ...]) -> None:
    base = changed(peft / case, tmp_path / "base", name, at)
    command = ("convert", base, tmp_path / "out", "--to", "hf", "--lora", peft / case / "adapter")
    failed(4, "different-model", *command, places=(name, base))
    assert not tree(tmp_path / "out")


def test_an_element_in_the_middle(tmp_path: Path) -> None:
    """It is not in the samples that are compared first; the run fails, and leaves no file with a final name."""
    model = weights("float32", {"lm_head.weight": (512, 64), "w": (4, 4)})
    copy = {"base_model.model.lm_head.base_layer.weight": model["lm_head.weight"].copy()}
    copy["base_model.model.lm_head.base_layer.weight"][256, 33] += 1
    lora = save(tmp_path / "lora", matrices(model, ("lm_head",)) | copy)
    plan = reshard.plan(reshard.open(write_file(tmp_path / "base.safetensors", model)), selection=Selection(lora=lora))
    with refused(SourceError, "different-model", "lm_head.weight", "base.safetensors"):
        plan.run(tmp_path / "out")
    assert not [name for name in tree(tmp_path / "out") if name.endswith(".safetensors")]
    save(tmp_path / "lora", matrices(model, ("lm_head",)) | {name: one + 1 for name, one in copy.items()})
    with refused(ChangedError, "source-changed", "adapter_model.safetensors"):
        plan.run(tmp_path / "again")


def test_copies_of_biases_and_other_names(tmp_path: Path) -> None:
    model = weights("float32", {"lm_head.weight": (32, 16), "lm_head.bias": (32,), "norm.weight": (16,)})
    prefix = "base_model.model"
    copies = {f"{prefix}.lm_head.base_layer.bias": model["lm_head.bias"], f"{prefix}.norm.weight": model["norm.weight"]}
    pairs = matrices(model, ("lm_head",))
    base = reshard.open(write_file(tmp_path / "base.safetensors", model))
    expected = base.merge_lora(save(tmp_path / "lora", pairs))
    assert_arrays(
        base.merge_lora(save(tmp_path / "copies", pairs | copies)), {n: np.asarray(v) for n, v in expected.items()}
    )
    for number, name in enumerate(copies):
        other = {**copies, name: -copies[name]}
        with refused(SourceError, "different-model", name.removeprefix(f"{prefix}.").replace("base_layer.", "")):
            base.merge_lora(save(tmp_path / f"other{number}", pairs | other))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lm_head.base_layer.weight", np.ones((34, 16), np.float32), ("different-model", "float32", "[32, 16]")),
        ("lm_head.base_layer.weight", np.ones((32, 16), np.int8), ("wrong-dtype", "int8", "bfloat16", "float32")),
        ("absent.base_layer.weight", np.ones((32, 16), np.float32), ("no-match", "absent.base_layer.weight")),
        ("lm_head.base_layer.lora_C.weight", np.ones((32, 16), np.float32), ("unexpected-tensor", "lora_A", "lora_B")),
        ("lm_head.base_layer.other", np.ones((32, 16), np.float32), ("unexpected-tensor", "lora_A", "lora_B")),
    ],
)  # fmt: skip
def test_copies_that_are_refused(tmp_path: Path, name: str, value: Array, expected: tuple[str, ...]) -> None:
    model = weights("float32", {"lm_head.weight": (32, 16)})
    base = reshard.open(write_file(tmp_path / "base.safetensors", model))
    with refused(SourceError, *expected):
        base.merge_lora(save(tmp_path / "lora", {**matrices(model, ("lm_head",)), f"base_model.model.{name}": value}))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_that_was_trained_in_another_dtype(tmp_path: Path, dtype: str) -> None:
    """The copy is the weight as that dtype has it; what is merged into is the weight."""
    model = weights("float32", {"lm_head.weight": (32, 16)})
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    pairs = matrices(model, ("lm_head",))
    copy = {"base_model.model.lm_head.base_layer.weight": model["lm_head.weight"].astype(kind)}
    base = reshard.open(write_file(tmp_path / "base.safetensors", model))
    found = base.merge_lora(save(tmp_path / "lora", pairs | copy))
    assert_arrays(found, plain_merge(model, pairs))


# --- tied weights


def untied(case: Path) -> dict[str, Array]:
    """What PEFT made of a case after its weights were untied."""
    model = arrays(case / "base")
    return {**model, HEAD: model[EMBEDDING], **arrays(case / "untied.safetensors")}


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("base", ["base", "base.bin"])
def test_tied_weights(tmp_path: Path, peft: Path, name: str, base: str) -> None:
    """Of a set without the head, and of a file of torch.save with both: nothing without a choice; PEFT's bits with."""
    case = peft / name
    source = reshard.open(case / base)
    adapter = case / "adapter"
    with refused(UsageError, "tied-weights", HEAD, EMBEDDING, "tied='untie' to reshard.LoRA", "tied='both'"):
        source.merge_lora(LoRA(str(adapter)))

    command = ("convert", case / base, tmp_path / "no", "--to", "hf", "--lora", adapter)
    failed(2, "tied-weights", *command, places=(HEAD, EMBEDDING, "tied='untie'", "tied='both'"))
    assert not (tmp_path / "no").exists()

    both = merged(case)
    if base == "base":
        del both[HEAD]
    for choice, expected in (("both", both), ("untie", untied(case))):
        assert_arrays(source.merge_lora(LoRA(str(adapter), tied=choice)), expected)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            reshard.convert(case / base, tmp_path / choice, to="hf", lora=LoRA(str(adapter), tied=choice))
        assert any("tie_word_embeddings" in str(each.message) for each in said) == (choice == "untie")
        assert_arrays(reshard.open(tmp_path / choice), expected)
        done("verify", tmp_path / choice)
    assert not reshard.verify(tmp_path / "both", against=case / base, lora=LoRA(str(adapter), tied="untie"))


def test_tied_adapters_ask_nothing(peft: Path) -> None:
    """Both weights have one product (ensure_weight_tying): it is added once, which PEFT does not."""
    case = peft / "tied_ensured"
    lora = LoRA(str(case / "adapter"))
    once = arrays(case / "untied.safetensors")[EMBEDDING]
    assert_arrays(reshard.open(case / "base").merge_lora(lora), {**arrays(case / "base"), EMBEDDING: once})
    whole = {**arrays(case / "base.bin"), EMBEDDING: once, HEAD: once}
    assert_arrays(reshard.open(case / "base.bin").merge_lora(lora), whole)
    assert not np.array_equal(arrays(case / "merged.safetensors")[EMBEDDING], once)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_both_are_stored(tmp_path: Path, peft: Path, config: dict[str, object]) -> None:
    """And the model's configuration ties them; without it, nothing does."""
    case = peft / "tied_head"
    model = arrays(case / "base.bin")
    (tmp_path / "base").mkdir()
    source = reshard.open(write_file(tmp_path / "base" / "model.safetensors", written(model)).parent)
    lora = LoRA(str(case / "adapter"))
    assert_arrays(source.merge_lora(lora), untied(case))
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with refused(UsageError, "tied-weights", EMBEDDING, HEAD):
        source.merge_lora(lora)
    assert_arrays(source.merge_lora(LoRA(lora.root, tied="untie")), untied(case))
    assert_arrays(source.merge_lora(LoRA(lora.root, tied="both")), merged(case))
    assert_arrays(source.sel(HEAD).merge_lora(lora), {HEAD: untied(case)[HEAD]})


def test_a_plan_file_has_the_choice(tmp_path: Path, peft: Path) -> None:
    case = peft / "tied_head"
    lora = LoRA(str(case / "adapter"), tied="untie")
    reshard.plan(reshard.open(case / "base"), lora=lora).save(tmp_path / "plan.json")
    done("run", tmp_path / "plan.json", tmp_path / "out", "--tune=fsync=no")
    assert_arrays(reshard.open(tmp_path / "out"), untied(case))
    with refused(UsageError, "bad-value", "'x'"):
        LoRA("adapter", tied="x")


def test_other_layers_of_tied_models_ask_nothing(tmp_path: Path, peft: Path) -> None:
    case = peft / "tied_head"
    model = arrays(case / "base")
    layers = ("model.layers.0.mlp.down_proj",)
    lora = save(tmp_path / "lora", matrices(model, layers))
    for base in ("base", "base.bin"):
        found = {name: np.asarray(one) for name, one in reshard.open(case / base).merge_lora(lora).items()}
        before = arrays(case / base)
        assert [name for name in before if not np.array_equal(found[name], before[name])] == [f"{layers[0]}.weight"]


def test_tied_dtensors(tmp_path: Path) -> None:
    """One storage in the file of each rank."""
    model = weights("float32", {HEAD: (32, 16), "w.weight": (8, 4)})
    for rank in range(2):
        half = Storage(np.ascontiguousarray(model[HEAD][16 * rank : 16 * rank + 16]).reshape(-1))
        local = tensor(model[HEAD][16 * rank : 16 * rank + 16], storage=half)
        tied = dtensor(local, (32, 16), [shard(0)], mesh((2,), rank))
        write_rank(tmp_path / "src", rank, 2, {EMBEDDING: tied, HEAD: tied, "w.weight": tensor(model["w.weight"])})
    source = reshard.open(tmp_path / "src")
    lora = save(tmp_path / "lora", matrices(model, ("lm_head",)))
    with refused(UsageError, "tied-weights", EMBEDDING, f"only {HEAD}"):
        source.merge_lora(lora)
    after = plain_merge(model, matrices(model, ("lm_head",)))
    for tied, embedding in (("both", after[HEAD]), ("untie", model[HEAD])):
        selection = Selection(lora=LoRA(lora.root, tied=tied))
        reshard.plan(source, to="safetensors", selection=selection).run(tmp_path / tied, fsync=False)
        assert_arrays(reshard.open(tmp_path / tied), {**after, EMBEDDING: embedding})
        assert reshard.verify(tmp_path / tied).equal


VIEWS: dict[str, tuple[tuple[int, ...], int, tuple[int, ...]]] = {
    "flat": ((384,), 0, (1,)), "transposed": ((48, 8), 0, (1, 48)), "columns": ((8, 16), 16, (48, 1)),
    "rows": ((4, 48), 96, (48, 1)),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_weight_can_only_be_untied(tmp_path: Path, view: str) -> None:
    model = weights("float32", {"w.weight": (8, 48)})
    storage = Storage(model["w.weight"].reshape(-1))
    shape, first, strides = VIEWS[view]
    elements = np.lib.stride_tricks.as_strided(storage.elements[first:], shape, [4 * stride for stride in strides])
    views = {
        "w.weight": tensor(model["w.weight"], storage=storage),
        "view": tensor(elements, storage=storage, first=first, strides=strides),
    }
    pairs = matrices(model, ("w",))
    lora, source = save(tmp_path / "lora", pairs), reshard.open(write_save(tmp_path / "views.pt", views))
    with refused(SourceError, "unsupported-strides", "view", "untie"):
        source.merge_lora(LoRA(lora.root, tied="both"))
    after = {**plain_merge(model, pairs), "view": np.ascontiguousarray(elements)}
    assert_arrays(source.merge_lora(LoRA(lora.root, tied="untie")), after)


# --- Adapters of trainings: the float32 masters that optimizers have of a merged weight are merged, too ---

LAYERS = ("l.0.q_proj", "l.0.up")
GROUPS = [{"l.0.q_proj.weight": (8, 8), "l.0.up.weight": (12, 8)}, {"norm.weight": (8,)}]
NAMES = [name for group in GROUPS for name in group]


def with_adapter(full: dict[str, Array], pairs: dict[str, Array], prefixes: tuple[str, ...]) -> dict[str, Array]:
    """What numpy makes of weights and their masters."""
    result = dict(full)
    for name in (f"{prefix}{layer}.weight" for layer in LAYERS for prefix in prefixes):
        layer = name.removesuffix(".weight").rpartition("l.0")[1:]
        total = full[name].astype("f4") + np.float32(ALPHA / RANK) * product(pairs, "".join(layer))
        result[name] = total.astype(full[name].dtype)
    return result


def assert_same(found: reshard.Checkpoint, expected: dict[str, Array]) -> None:
    for name in found:
        assert np.asarray(found[name]).tobytes() == expected[name].tobytes(), name


def run_of(root: Path, stage: int, dtype: str) -> dict[str, Array]:
    """Write a run of ZeRO; its weights are in bfloat16 or float32."""
    full = values(GROUPS)
    if dtype == "bfloat16":
        return write_zero(root, GROUPS, stage=stage, full=full)
    full |= {name: full[f"fp32.{name}"] for name in NAMES}
    module = {name: tensor(np.zeros(0, "f4") if stage == 3 else full[name]) for name in NAMES}

    def model(states: dict[str, Any]) -> None:
        states["module"] = OrderedDict(module)

    return write_zero(root, GROUPS, stage=stage, full=full, model=model)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_zero(tmp_path: Path, stage: int, dtype: str) -> None:
    full = run_of(tmp_path / "run", stage, dtype)
    pairs = matrices({name: np.zeros(shape) for name, shape in GROUPS[0].items()}, LAYERS)
    lora = save(tmp_path / "lora", pairs)
    expected = with_adapter(full, pairs, ("", "fp32."))
    opened = reshard.open(tmp_path / "run")
    assert_same(opened.merge_lora(lora), expected)
    assert_same(opened.sel("fp32.*").merge_lora(lora), expected)
    command = ("convert", tmp_path / "run", "--to", "hf", "--lora", lora.root, "--tune=fsync=no")
    for number, options in enumerate((("--include", "fp32.*"), ("--weights-only",), ())):
        out = tmp_path / f"out{number}"
        done(*command[:2], out, *command[2:], *options)
        assert_same(reshard.open(out), expected)
        done("verify", out)
    assert set(reshard.open(tmp_path / "out0")) == {f"fp32.{name}" for name in NAMES}
    failed(2, "no-effect", *command[:2], tmp_path / "no", *command[2:], "--include", "exp_avg.*", places=("--lora",))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "master", ["optimizer.state.fp32_param.{}", "optimizer.state.param.{}", "optim.state.{}.master_param", "fp32.{}"]
)
def test_masters_by_other_names(tmp_path: Path, master: str) -> None:
    """Megatron's, PyTorch's and DeepSpeed's; moments stay, and are merged into nothing."""
    rng = np.random.default_rng(5)
    model = {f"{layer}.weight": rng.standard_normal((8, 8)).astype(ml_dtypes.bfloat16) for layer in LAYERS}
    states = {master.format(name): rng.standard_normal((8, 8)).astype("f4") for name in model}
    moments = {f"exp_avg.{name}": rng.standard_normal((8, 8)).astype("f4") for name in model}
    full: dict[str, Array] = model | states | moments
    written = {name: one.view(np.uint16) if name in model else one for name, one in full.items()}
    pairs = matrices(model, LAYERS)
    source = reshard.open(write_file(tmp_path / "model.safetensors", written))
    found = source.merge_lora(save(tmp_path / "lora", pairs))
    expected = with_adapter(model, pairs, ("",)) | moments
    for layer in LAYERS:
        name = master.format(f"{layer}.weight")
        expected[name] = states[name] + np.float32(ALPHA / RANK) * product(pairs, layer)
    assert set(found) == set(expected)
    assert_same(found, expected)


def test_masters_of_another_shape_are_named(tmp_path: Path) -> None:
    model = {"l.0.q_proj.weight": np.ones((8, 8), "f4"), "fp32.l.0.q_proj.weight": np.ones(64, "f4")}
    source = reshard.open(write_file(tmp_path / "model.safetensors", model))
    found = source.merge_lora(save(tmp_path / "lora", matrices(model, ("l.0.q_proj",))))
    assert np.array_equal(np.asarray(found["fp32.l.0.q_proj.weight"]), model["fp32.l.0.q_proj.weight"])
    assert any("fp32.l.0.q_proj.weight" in warning for warning in found.warnings)


def test_views_of_one_storage(tmp_path: Path) -> None:
    """A fused weight and its parts: each part may have an adapter, and the fused weight stays what it was."""
    fused = weights("float32", {"qkv.weight": (48, 16)})["qkv.weight"]
    storage = Storage(fused.reshape(-1))
    model = {f"{name}.weight": fused[16 * at : 16 * at + 16] for at, name in enumerate("qkv")}
    parts = {f"{n}.weight": tensor(model[f"{n}.weight"], storage=storage, first=256 * i) for i, n in enumerate("qkv")}
    write_save(tmp_path / "apart.pt", parts)
    write_save(tmp_path / "fused.pt", {**parts, "qkv.weight": tensor(fused, storage=storage)})
    pairs = matrices(model, ("q", "v"))
    after, lora = plain_merge(model, pairs), save(tmp_path / "lora", pairs)
    assert_arrays(reshard.open(tmp_path / "apart.pt").merge_lora(lora), after)
    source = reshard.open(tmp_path / "fused.pt")
    with refused(UsageError, "tied-weights", "q.weight", "k.weight", "v.weight", "qkv.weight"):
        source.merge_lora(lora)
    assert_arrays(source.merge_lora(LoRA(lora.root, tied="untie")), {**after, "qkv.weight": fused})
    with refused(SourceError, "unsupported-strides", "untie"):
        source.merge_lora(LoRA(lora.root, tied="both"))

"""LoRA adapters in the weights of a checkpoint: what numpy makes of the whole matrices, however they are cut."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from adapters import (
    ALPHA,
    BF16,
    CUTS,
    EXPECTED,
    RANK,
    assert_arrays,
    cut,
    matrices,
    merged,
    save,
    weights,
    written,
)
from checkpoints import assert_rank_files, plan_with, tree, write_file, write_ranks
from commands import call, done, least_memory
from refusals import failed, refused
from samples import slow

import reshard
from reshard import Cipher, Layout, LoRA, Rules, Selection, Strategy
from reshard.core.plan import budget
from reshard.core.storage.cipher import store_of
from reshard.errors import BudgetError, ChangedError, SourceError, TargetError, UsageError
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), slow("float32")])
@pytest.mark.parametrize("how", CUTS)
def test_ranks_to_ranks(tmp_path: Path, dtype: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows, of columns and of both, to others: all of numpy's bits; so do bands of a few elements."""
    model = weights(dtype)
    pairs = matrices(model)
    full, lora = merged(model, pairs), save(tmp_path / "lora", pairs)
    format = "ckpt" if how == "rows" else "safetensors"
    source = cut(model, how)
    opened = reshard.open(write_ranks(tmp_path / "src", written(model), source, format), strategy=source)
    assert_arrays(opened.merge_lora(lora), full)
    target = cut(model, "columns" if how == "rows" else "rows")
    for at, band in (("default", budget.BAND_BYTES), ("small", 96)):
        monkeypatch.setattr(budget, "BAND_BYTES", band)
        monkeypatch.setattr(budget, "TASK_BYTES", 8 * band)
        reshard.plan(opened, target, selection=Selection(lora=lora)).run(tmp_path / at, fsync=False)
        assert_rank_files(tmp_path / at, written(full), target)
        assert reshard.verify(tmp_path / at).equal, "by what the ledger says that it was made from"
    assert reshard.verify(tmp_path / "small", target, against=opened).equal
    assert not reshard.verify(tmp_path / "small", target, against=opened, selection=Selection()).equal


@pytest.mark.parametrize("rank", [8, 64])
def test_an_element_is_the_same_however_it_is_read(tmp_path: Path, rank: int) -> None:
    """Of a weight of many tiles, in any box. numpy's product of whole matrices may differ in the last bit: the order in
    which its library sums depends on the processor.
    """
    model = weights("float32", {"w.weight": (208, 1200)})
    pairs = matrices(model, ("w",), rank)
    opened = reshard.open(write_file(tmp_path / "base.safetensors", model))
    found = opened.merge_lora(save(tmp_path / "lora", pairs, r=rank))["w.weight"]
    full = found.compute()
    np.testing.assert_allclose(full, merged(model, pairs, ALPHA / rank)["w.weight"], rtol=1e-4, atol=1e-5)
    rng = np.random.default_rng(3)
    for _ in range(20):
        (top, bottom), (left, right) = (sorted(rng.choice(extent + 1, 2, replace=False)) for extent in full.shape)
        assert found[top:bottom, left:right].compute().tobytes() == full[top:bottom, left:right].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_matrices_of_every_dtype_and_name(tmp_path: Path, base: reshard.Checkpoint, dtype: str) -> None:
    kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    pairs = {name: one.astype(kind) for name, one in matrices(weights()).items()}
    named = {name.replace(".weight", ".default.weight"): one for name, one in pairs.items()}
    assert_arrays(base.merge_lora(save(tmp_path / "lora", named)), merged(weights(), pairs))


def test_scales(tmp_path: Path, base: reshard.Checkpoint) -> None:
    """alpha / r, alpha / sqrt(r), by patterns as PEFT matches them, and as given."""
    pairs = matrices(weights())
    some = {name: one for name, one in pairs.items() if "k_proj" not in name}
    wide = matrices(weights(), ("model.layers.0.k_proj",), 9)
    every = {**some, **wide}
    model = weights()
    by_rank = {"rank_pattern": {"k_proj": 9}}
    cases: list[tuple[dict[str, Any], float | None, tuple[float, float]]] = [
        (by_rank, None, (ALPHA / RANK, ALPHA / 9)),
        ({**by_rank, "use_rslora": True}, None, (ALPHA / 2, ALPHA / 3)),
        ({**by_rank, "alpha_pattern": {r".*\.k_proj": 27, "k_proj": 1}}, None, (ALPHA / RANK, 3)),
        ({**by_rank, "alpha_pattern": {r"^model.layers.0.k_pro": 27}}, None, (ALPHA / RANK, ALPHA / 9)),
        ({**by_rank, "lora_alpha": ...}, 8, (2, 8 / 9)),
        (by_rank, 8, (2, 8 / 9)),
    ]
    for number, (config, alpha, (scale, other)) in enumerate(cases):
        lora = LoRA(save(tmp_path / f"lora{number}", every, **config).root, alpha)
        name = "model.layers.0.k_proj.weight"
        expected = {**merged(model, some, scale), name: merged(model, wide, other)[name]}
        assert_arrays(base.merge_lora(lora), expected)


def test_embeddings_and_transposed_layers(tmp_path: Path, base: reshard.Checkpoint) -> None:
    model, rng = weights(), np.random.default_rng(4)
    a, b = rng.standard_normal((RANK, 48), dtype=np.float32), rng.standard_normal((32, RANK), dtype=np.float32)
    name = "model.embed_tokens"
    prefix = f"base_model.model.{name}"
    total = model[f"{name}.weight"].astype(np.float32) + np.float32(ALPHA / RANK) * (b @ a).T
    expected = {**model, f"{name}.weight": total.astype(BF16)}
    embedding = {f"{prefix}.lora_embedding_A": a, f"{prefix}.lora_embedding_B.default": b}
    assert_arrays(base.merge_lora(save(tmp_path / "embedding", embedding)), expected)
    layer = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    of_layer = base.merge_lora(save(tmp_path / "layer", layer, fan_in_fan_out=True))
    assert_arrays(of_layer, expected)
    assert of_layer[f"{name}.weight"][7:11, 3:9].compute().tobytes() == expected[f"{name}.weight"][7:11, 3:9].tobytes()


RULES = {
    "reshard-rules": 1,
    "sides": ["hf", "other"],
    "rules": [
        {
            "hf": ["model.layers.{n}.q_proj.weight", "model.layers.{n}.k_proj.weight"],
            "other": {"concat": "{n}.qk", "sizes": [64, 16]},
        },
        {"hf": "model.layers.{n}.down_proj.weight", "other": {"transpose": "{n}.down"}},
        {"hf": "model.layers.{n}.norm.weight", "other": "{n}.norm"},
        {"hf": "model.embed_tokens.weight", "other": None},
    ],
}


def test_rules_come_after(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    """Fused and transposed of what is merged; a plan of it, sharded, and what its ledger and its plan file say."""
    layer = "model.layers.0"
    expected = {
        "0.qk": np.concatenate([EXPECTED[f"{layer}.{one}_proj.weight"] for one in "qk"]),
        "0.down": np.ascontiguousarray(EXPECTED[f"{layer}.down_proj.weight"].T),
        "0.norm": EXPECTED[f"{layer}.norm.weight"],
    }
    rules = Rules.of(RULES)
    both = base.merge_lora(lora).derive(rules)
    assert_arrays(both, expected)
    assert both._record.opened.tensors == base.tensors
    target = cut(expected, "rows")
    plan = reshard.plan(base, target, selection=Selection(rules=rules, lora=lora))
    plan.run(tmp_path / "out", fsync=False)
    assert_rank_files(tmp_path / "out", written(expected), target)
    assert reshard.verify(tmp_path / "out").equal
    # Of a checkpoint that was derived in Python the plan file and the ledger say the same.
    some = reshard.plan(both.sel("0.qk", "0.norm"))
    some.save(tmp_path / "plan.json")
    again = reshard.read_plan(tmp_path / "plan.json")
    again.run(tmp_path / "again", fsync=False)
    assert set(helpers.read_rank_file(tmp_path / "again" / "rank_0" / "checkpoint_0.safetensors")) == {"0.qk", "0.norm"}
    assert reshard.verify(tmp_path / "again").equal
    with refused(UsageError, "already-derived", base.root):
        both.merge_lora(lora)


def test_zarr_encrypted_and_dcp_sources(
    tmp_path: Path, base: reshard.Checkpoint, lora: LoRA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is around that which decodes or decrypts; and what comes may be a zarr store."""
    files = ZarrGroup(chunk_size=512, compression="zstd")
    plan_with(base, files=files).run(tmp_path / "base.zarr", fsync=False)
    encoded = reshard.open(tmp_path / "base.zarr")
    assert_arrays(encoded.merge_lora(lora), EXPECTED)
    with monkeypatch.context() as patch:
        patch.setattr(budget, "TASK_BYTES", 2000)
        patch.setattr(budget, "BAND_BYTES", 500)
        plan = reshard.plan(encoded, to="safetensors", selection=Selection(lora=lora))
        assert plan.stats.tasks > 5  # and the source of later ones is prefetched
        plan.run(tmp_path / "tasks", threads=1, fsync=False)
    assert_arrays(reshard.open(tmp_path / "tasks"), EXPECTED)
    cipher = Cipher("AES-GCM", bytes(16))
    reshard.plan(base, to="ckpt", target_cipher=cipher).run(tmp_path / "sealed", fsync=False)
    sealed = reshard.open(tmp_path / "sealed", cipher=cipher)
    assert_arrays(sealed.merge_lora(lora), EXPECTED)
    assert sealed.merge_lora(lora)._record.cipher is not None
    reshard.plan(base, to="dcp").run(tmp_path / "dcp", fsync=False)
    saved = reshard.open(tmp_path / "dcp")
    assert_arrays(saved.merge_lora(lora), EXPECTED)
    reshard.plan(saved, to="dcp", selection=Selection(lora=lora)).run(tmp_path / "other", fsync=False)
    assert_arrays(reshard.open(tmp_path / "other"), EXPECTED)
    assert reshard.verify(tmp_path / "other").equal
    with refused(UsageError, "not-linkable", "adapter"):
        reshard.plan(saved, to="dcp", link=True, selection=Selection(lora=lora))
    base.merge_lora(lora).to_zarr(tmp_path / "out.zarr", compression="zstd")
    assert_arrays(reshard.open(tmp_path / "out.zarr"), EXPECTED)
    assert reshard.verify(tmp_path / "out.zarr").equal


def test_replicas_are_merged_each(tmp_path: Path, lora: LoRA) -> None:
    model = weights()
    twice = Strategy.of({name: Layout.of([2, 2], [0] + [-1] * (one.ndim - 1)) for name, one in model.items()})
    source = reshard.open(write_ranks(tmp_path / "src", written(model), twice), strategy=twice)
    reshard.plan(source, selection=Selection(lora=lora)).run(tmp_path / "out", fsync=False)
    assert reshard.verify(tmp_path / "out").equal, "which reads all of them"


def test_casts_round_once_or_are_refused(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    model = weights("float32")
    pairs = matrices(model)
    source = reshard.open(write_file(tmp_path / "wide.safetensors", model))
    selection = Selection(cast={"float32": "bfloat16"}, lora=lora)
    reshard.plan(source, to="hf", selection=selection).run(tmp_path / "out")
    expected = {name: one.astype(BF16) for name, one in merged(model, pairs).items()}
    assert_arrays(reshard.open(tmp_path / "out"), expected)
    for cast in ({"bf16": "f16"}, {"bf16": "f32"}):
        with refused(UsageError, "rounds-twice", "bfloat16=float"):
            reshard.plan(base, selection=Selection(cast=cast, lora=lora))
        with refused(UsageError, "rounds-twice", "bfloat16=float"):
            reshard.plan(base.merge_lora(lora), selection=Selection(cast=cast))


# --- what it was made of ----------------------------------------------------------------------------------------


def test_a_plan_file_has_the_adapter(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    plan = reshard.plan(base, selection=Selection(lora=LoRA(lora.root, 8)))
    plan.save(tmp_path / "plan.json")
    reshard.read_plan(tmp_path / "plan.json").run(tmp_path / "out", fsync=False)
    expected = merged(weights(), matrices(weights()), 8 / RANK)
    assert_rank_files(tmp_path / "out", written(expected), None)
    config = tmp_path / "lora" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 4, "use_rslora": true'))
    with refused(SourceError, "different-adapter", lora.root):
        reshard.read_plan(tmp_path / "plan.json")
    config.unlink()
    with refused(SourceError, "not-an-adapter", lora.root, "adapter_config.json"):
        reshard.read_plan(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    for bad in ({"root": "a\nb", "alpha": 1, "digest": ""}, {"root": "a", "alpha": "x", "digest": ""}, 3):
        content["provenance"]["selection"]["lora"] = bad
        (tmp_path / "bad.json").write_text(json.dumps(content))
        with refused(SourceError, "not-a-plan", "bad.json", "$.provenance.selection.lora"):
            reshard.read_plan(tmp_path / "bad.json")


def test_a_target_of_another_adapter_is_refused(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    reshard.plan(base, selection=Selection(lora=lora)).run(tmp_path / "out", fsync=False)
    again = reshard.plan(base, selection=Selection(lora=lora)).run(tmp_path / "out", fsync=False)
    assert again.finished == 1
    for other in (Selection(), Selection(lora=LoRA(lora.root, 7))):
        with refused(TargetError, "other-run", tmp_path / "out", "rank_0/checkpoint_0.safetensors"):
            reshard.plan(base, selection=other).run(tmp_path / "out", fsync=False)


def test_verify_without_the_adapter(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    """Sizes and checksums are compared, and what is gone, or other than it was, is said."""
    reshard.plan(base, selection=Selection(lora=lora)).run(tmp_path / "out")
    assert reshard.verify(tmp_path / "out").equal
    assert reshard.verify(tmp_path / "out", against=base).equal
    assert not reshard.verify(tmp_path / "out", against=base, selection=Selection()).equal
    assert reshard.verify(tmp_path / "out", against=base.merge_lora(lora)).equal
    assert reshard.verify(tmp_path / "out", against=base, selection=Selection(lora=lora)).equal
    pairs = {name: -one for name, one in matrices(weights()).items()}
    save(tmp_path / "lora", pairs)
    found = reshard.verify(tmp_path / "out")
    assert (found.equal, found.by_checksums) == (True, True)
    assert lora.root in found.warnings[0]
    (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    found = reshard.verify(tmp_path / "out")
    assert (found.equal, found.by_checksums) == (True, True)
    assert "in full" not in found.warnings[0]
    found = reshard.verify(tmp_path / "out", sample=0.5)
    assert found.by_checksums
    assert "compared in full" in found.warnings[0]
    assert "adapter_model.safetensors" in found.warnings[0]


def test_an_adapter_that_changes_before_a_run(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    plan = reshard.plan(base, selection=Selection(lora=lora))
    save(tmp_path / "lora", {name: -one for name, one in matrices(weights()).items()})
    with refused(ChangedError, "source-changed", "adapter_model.safetensors"):
        plan.run(tmp_path / "out")
    assert not tree(tmp_path / "out")


def test_memory_is_counted(base: reshard.Checkpoint, lora: LoRA) -> None:
    plain, more = (reshard.plan(base, selection=Selection(lora=one)) for one in (None, lora))
    of_pairs = sum(one.nbytes for one in matrices(weights()).values())
    fetching = [dict(plan._record.memory)["coding and fetching"] for plan in (plain, more)]
    assert fetching[1] >= fetching[0] + of_pairs
    with refused(BudgetError, "not-enough-memory", "memory=") as raised:
        reshard.plan(base, selection=Selection(lora=lora), memory=1 << 20)
    least = least_memory(raised.value)
    assert reshard.plan(base, selection=Selection(lora=lora), memory=least).stats.peak_memory <= least


# --- commands ---------------------------------------------------------------------------------------------------


def test_commands(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    out, plan = tmp_path / "out", tmp_path / "plan.json"
    merged_text = 'LoRA adapter "lora" merged into 3 weights'
    assert f"\n  changed: {merged_text}\n" in done("plan", base.root, "--lora", lora.root).output
    assert (
        f"\n  changed: {merged_text}\n"
        in done("convert", base.root, out, "--to", "dcp", "--lora", lora.root, "--tune=fsync=no").output
    )
    assert_arrays(reshard.open(out), EXPECTED)
    for options in ([], ["--against", base.root], ["--against", base.root, "--lora", lora.root]):
        assert (
            f" = {base.root} after changes ({merged_text}); every bit of 5 tensors\n"
            in done("verify", out, *options).output
        )
    done("plan", base.root, "--to", "hf", "--lora", lora.root, "--lora-alpha", "8", "-o", plan)
    done("run", plan, tmp_path / "ran", "--tune=fsync=no")
    assert_arrays(reshard.open(tmp_path / "ran"), merged(weights(), matrices(weights()), 8 / RANK))
    done("convert", base.root, tmp_path / "set", "--to", "hf", "--lora", lora.root, "--tune=fsync=no")
    assert_arrays(reshard.open(tmp_path / "set"), EXPECTED)
    failed(
        2,
        "missing-option",
        "convert",
        base.root,
        tmp_path / "no",
        "--lora-alpha",
        "8",
        places=("--lora-alpha", "--lora"),
    )  # fmt: skip


def test_alpha_is_never_guessed(tmp_path: Path, base: reshard.Checkpoint) -> None:
    lora = save(tmp_path / "lora", matrices(weights()), lora_alpha=...)
    with refused(SourceError, "missing-alpha", "lora_alpha", "alpha=... to reshard.LoRA"):
        base.merge_lora(lora)
    command = ("convert", base.root, tmp_path / "out", "--to", "hf", "--lora", lora.root, "--dry-run")
    failed(4, "missing-alpha", *command, places=("lora_alpha", "--lora-alpha"))
    for bad in (float("nan"), float("inf"), 1e300, 10**400, "16", True):
        with refused(UsageError, "bad-value", "alpha"):
            LoRA(lora.root, bad)  # type: ignore[arg-type]
    assert (
        call("convert", base.root, tmp_path / "out", "--to", "hf", "--lora", lora.root, "--lora-alpha", "nan").exit_code
        == 2
    )


def travelled(what: Any) -> Any:
    return pickle.loads(pickle.dumps(what))  # noqa: S301 -- our own


def test_a_store_travels(base: reshard.Checkpoint, lora: LoRA) -> None:
    """Without matrices: to the workers of a cluster."""
    found = base.merge_lora(lora)
    coding = travelled(found._record.coding)
    name = "model.layers.0.q_proj.weight"
    ((at,),) = [shard.replicas for shard in found.tensors[name].shards]
    for store in (store_of(coding), travelled(coding.store())):
        content = bytearray(EXPECTED[name].nbytes)
        store.read_into(found._record.files[0].path, at.runs[0][0], memoryview(content))
        assert content == EXPECTED[name].tobytes()


# --- Adapters that are refused: what their files, their configuration or the weights say does not go toge ---


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"peft_type": "LOHA"}, ("not-lora", "peft_type", "'LOHA'")),
        ({"use_dora": True}, ("unsupported-adapter", "use_dora")),
        ({"bias": "lora_only"}, ("unsupported-adapter", "bias", "'lora_only'")),
        ({"lora_bias": True}, ("unsupported-adapter", "lora_bias")),
        ({"modules_to_save": ["lm_head"]}, ("unsupported-adapter", "modules_to_save", "'lm_head'")),
        ({"target_parameters": ["experts.gate_up_proj"]}, ("unsupported-adapter", "target_parameters")),
        ({"layer_replication": [[0, 4], [2, 5]]}, ("unsupported-adapter", "layer_replication")),
        ({"init_lora_weights": "pissa_niter_4"}, ("unsupported-init", "init_lora_weights", "'pissa_niter_4'")),
        ({"r": 10**9}, ("bad-value", "r", "1000000000", "1 to")),
        ({"r": ...}, ("missing-key", "r")),
        ({"r": 5}, ("wrong-shape", "[5, in]", "[out, 5]", "adapter_config.json")),
        ({"rank_pattern": {"q_proj": 8}}, ("wrong-shape", "[4, 32]", "[64, 4]", "[8, in]")),
        ({"rank_pattern": {"(a|a)*b": 8}}, ("bad-value", "rank_pattern")),
        ({"alpha_pattern": {"q_proj": float("nan")}}, ("bad-value", "alpha_pattern")),
        ({"lora_alpha": float("nan")}, ("bad-value", "lora_alpha")),
        ({"use_rslora": "yes"}, ("bad-value", "use_rslora", "'yes'")),
        ({"rank_pattern": {"[z-a]": 8}}, ("bad-value", "rank_pattern")),
    ],
)
def test_configurations(
    tmp_path: Path, base: reshard.Checkpoint, config: dict[str, Any], expected: tuple[str, ...]
) -> None:
    with refused(SourceError, *expected):
        base.merge_lora(save(tmp_path / "lora", matrices(weights()), **config))


def renamed(old: str, new: str) -> dict[str, Array]:
    return {name.replace(old, new): one for name, one in matrices(weights()).items()}


Q = "base_model.model.model.layers.0.q_proj"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({f"{Q}.lora_B.weight": None}, ("missing-tensor", "'model.layers.0.q_proj'", "lora_B")),
        (
            {f"{Q}.lora_magnitude_vector": np.ones(4, np.float32)},
            ("unexpected-tensor", "lora_magnitude_vector", "lora_A"),
        ),
        ({f"{Q}.bias": np.ones(4, np.float32)}, ("unexpected-tensor", "q_proj.bias", "lora_A", "lora_B")),
        ({f"{Q}.lora_A.default.weight": np.ones((4, 32), np.float32)}, ("duplicate-name", "model.layers.0.q_proj")),
        ({f"{Q}.lora_A.weight": np.ones((4, 32), np.int8)}, ("wrong-dtype", "lora_A.weight", "int8", "bfloat16")),
        ({f"{Q}.lora_A.weight": np.ones((4, 32), np.float64)}, ("wrong-dtype", "lora_A.weight", "float64", "bfloat16")),
        ({f"{Q}.lora_A.weight": np.ones((4, 8, 3, 3), np.float32)}, ("wrong-shape", "[4, 8, 3, 3]", "[64, 4]")),
        ({f"{Q}.lora_B.weight": np.ones((64, 3), np.float32)}, ("wrong-shape", "[4, 32]", "[64, 3]", "[4, in]")),
        ({f"{Q}.lora_B.weight": np.ones((65, 4), np.float32)}, ("wrong-shape", "bfloat16", "[64, 32]", "[65, 32]")),
        (
            {
                f"{Q}.lora_embedding_A": np.ones((4, 64), np.float32),
                f"{Q}.lora_embedding_B": np.ones((32, 4), np.float32),
            },
            ("duplicate-name", "'model.layers.0.q_proj.weight'"),
        ),
        (
            {
                "base_model.model.../../etc.lora_A.weight": np.ones((4, 64), np.float32),
                "base_model.model.../../etc.lora_B.weight": np.ones((32, 4), np.float32),
            },
            ("no-match", "'../../etc.weight'"),
        ),
    ],
)
def test_matrices(
    tmp_path: Path, base: reshard.Checkpoint, change: dict[str, Array | None], expected: tuple[str, ...]
) -> None:
    pairs = {name: one for name, one in {**matrices(weights()), **change}.items() if one is not None}
    with refused(SourceError, *expected):
        base.merge_lora(save(tmp_path / "lora", pairs))


def test_weights(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    """Those that are not there, with the nearest; quantised ones; and everything at once."""
    with refused(SourceError, "no-match", "3 faults", "'model.layers.0.down_proj.weight'"):
        base.merge_lora(save(tmp_path / "other", renamed("layers.0", "layers.7")))
    model = {**written(weights()), "model.layers.0.q_proj.weight": np.ones((64, 32), np.int8)}
    quantised = reshard.open(write_file(tmp_path / "int8.safetensors", model))
    with refused(SourceError, "wrong-dtype", "int8", "[64, 32]", "bfloat16", "float32"):
        quantised.merge_lora(lora)


def test_what_is_no_adapter(tmp_path: Path, base: reshard.Checkpoint) -> None:
    with refused(SourceError, "not-an-adapter", "adapter_config.json"):
        base.merge_lora(LoRA(str(tmp_path / "none")))
    lora = save(tmp_path / "lora", matrices(weights()))
    weights_file, config = (tmp_path / "lora" / name for name in ("adapter_model.safetensors", "adapter_config.json"))
    weights_file.rename(tmp_path / "lora" / "adapter_model.bin")
    with refused(SourceError, "unsupported-pickle", "adapter_model.bin", "adapter_model.safetensors"):
        base.merge_lora(lora)
    write_file(weights_file, {})
    with refused(SourceError, "no-tensors", "lora_A", "lora_B"):
        base.merge_lora(lora)
    weights_file.write_bytes(b"\xff" * 100)
    with refused(SourceError, "not-a-checkpoint", "adapter_model.safetensors"):
        base.merge_lora(lora)
    contents = {"[1]": "wrong-type", "{": "not-json", '{"r": 1, "r": 2}': "duplicate-key", "\xff": "not-json"}
    for content, code in {**contents, "[" * 100_000: "not-json"}.items():
        config.write_text(content, encoding="latin-1")
        with refused(SourceError, code, "adapter_config.json"):
            base.merge_lora(lora)


def test_one_stage_of_a_pipeline(tmp_path: Path, lora: LoRA) -> None:
    model = weights()
    stages = Strategy.of(
        {name: {int("q_proj" in name): Layout.of([1], [-1] * one.ndim)} for name, one in model.items()}
    )
    source = reshard.open(write_ranks(tmp_path / "src", written(model), stages), strategy=stages, stage=1)
    with refused(UsageError, "one-stage"):
        source.merge_lora(lora)

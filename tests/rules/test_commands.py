"""Rules on the command line: from a DCP of Megatron's to a Hugging Face set and back, by an example's name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import call, done
from refusals import failed
from safetensors.numpy import load_file, save_file
from truths import assert_arrays, truth

import reshard

LLAMA = ["--rules", "llama-hf-mcore"]
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 13}


def test_forth_and_back(mindspore_data: Path, tmp_path: Path) -> None:
    case = truth(mindspore_data, "mcore_tp2_pp2")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = [*LLAMA, "--model-config", config, "--let", "divisor=16"]
    done("unify", case.checkpoint, tmp_path / "hf", "--style", "huggingface", *words)
    assert_arrays(reshard.open(tmp_path / "hf"), case.hf)
    done("verify", tmp_path / "hf")
    done("verify", tmp_path / "hf", "--against", case.checkpoint, *words)
    shutil.copy(config, tmp_path / "hf")  # where a set of Hugging Face has it
    done("unify", tmp_path / "hf", tmp_path / "back", "--format", "dcp", *LLAMA, "--let", "divisor=16")
    assert_arrays(reshard.open(tmp_path / "back"), case.back)
    (tmp_path / "back" / "__0_0.distcp").write_bytes(
        (tmp_path / "back" / "__0_0.distcp")
        .read_bytes()
        .replace(case.back["decoder.final_layernorm.weight"].tobytes(), bytes(32))
    )
    assert call("verify", tmp_path / "back").exit_code == 3, (
        "what the ledger says that it was made from is something else"
    )


def test_a_saved_plan(mindspore_data: Path, tmp_path: Path) -> None:
    case = truth(mindspore_data, "mcore_tp2_pp2")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = [*LLAMA, "--model-config", tmp_path / "config.json", "--weights-only"]
    done("plan", case.checkpoint, *words, "-o", tmp_path / "plan.json")
    (tmp_path / "config.json").unlink()  # the plan has its numbers
    done("run", tmp_path / "plan.json", tmp_path / "out")
    weights = {name: value for name, value in case.hf.items() if not name.startswith("optimizer.")}
    assert_arrays(reshard.open(tmp_path / "out"), weights)
    done("verify", tmp_path / "out")


def test_what_is_said_of_wrong_options(mindspore_data: Path, tmp_path: Path) -> None:
    case = truth(mindspore_data, "mcore_tp2_pp2")
    failed(4, "unknown-number", "unify", case.checkpoint, tmp_path / "out", *LLAMA, places=("config.vocab_size",))
    for code, words, place in (
        ("not-found", ["--rules", "lama-hf-mcore"], "lama-hf-mcore"),
        ("missing-option", ["--let", "heads=4"], "--rules FILE"),
        ("usage", [*LLAMA, "--let", "heads=four"], "heads=four"),
    ):
        failed(2, code, "unify", case.checkpoint, tmp_path / "out", *words, places=(place,))
    assert not (tmp_path / "out").exists()


def test_names_beside_rules_are_those_that_they_make(mindspore_data: Path, tmp_path: Path) -> None:
    """--include, --exclude and --name-map, in a run and in its verification; names before the rules are told so."""
    case = truth(mindspore_data, "mcore_tp2_pp2")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = [*LLAMA, "--model-config", tmp_path / "config.json", "--weights-only"]
    (tmp_path / "names.json").write_text(json.dumps({"model.layers.*.mlp.*_proj.weight": "h.*.*"}))
    chosen = ["--include", "model.layers.*", "--exclude", "*.self_attn.*", "--name-map", tmp_path / "names.json"]
    done("unify", case.checkpoint, tmp_path / "out", *words, *chosen)
    expected = {
        name.replace("model.layers.", "h.").replace(".mlp.", ".").replace("_proj.weight", "") if "_proj" in name
        else name: value
        for name, value in case.hf.items()
        if name.startswith("model.layers.") and ".self_attn." not in name
    }  # fmt: skip
    assert len(expected) == 2 * 5 or expected
    assert_arrays(reshard.open(tmp_path / "out"), expected)
    done("verify", tmp_path / "out", "--against", case.checkpoint, *words, *chosen)
    for option, name in (("--include", "decoder.layers.*"), ("--exclude", "decoder.final_layernorm.weight")):
        before = failed(2, "no-match", "unify", case.checkpoint, tmp_path / "other", *words, option, name)
        neither = failed(2, "no-match", "unify", case.checkpoint, tmp_path / "other", *words, option, "x")
        assert ("rules" in before.stderr, "rules" in neither.stderr) == (True, False)
    (tmp_path / "names.json").write_text(json.dumps({"decoder.final_layernorm.weight": "norm"}))
    words += ["--name-map", tmp_path / "names.json"]
    failed(2, "no-match", "unify", case.checkpoint, tmp_path / "other", *words, places=("decoder.final", "rules"))


def test_tensors_without_a_rule_are_left_out_by_drop(tmp_path: Path) -> None:
    """By their names in the source; a tensor with a rule is kept. Verification and a resumed run drop them, too."""
    arrays = {name: np.full((2, 3), number, np.float32) for number, name in enumerate(("a.w", "mtp.0.e", "mtp.0.w"))}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "rules.yaml").write_text("reshard-rules: 1\nsides: [x, y]\nrules:\n- {x: a.w, y: b.w}\n")
    words = ["convert", tmp_path / "model.safetensors", "--to", "hf", "--rules", tmp_path / "rules.yaml"]
    failed(4, "unmatched-tensor", *words, tmp_path / "out", places=("mtp.0.e", "mtp.0.w"))
    failed(4, "unmatched-tensor", *words, tmp_path / "out", "--drop", "mtp.*.e", places=("mtp.0.w",))
    told = done(*words, tmp_path / "out", "--drop", "mtp.*", "--drop", "a.w")
    assert "mtp.0.w" in told.stderr
    assert {name: float(value[0, 0]) for name, value in _load(tmp_path / "out").items()} == {"b.w": 0.0}
    done("verify", tmp_path / "out")
    done(*words, tmp_path / "out", "--drop", "mtp.*", "--drop", "a.w")
    done("plan", *words[1:], "--drop", "mtp.*", "-o", tmp_path / "plan.json")
    done("run", tmp_path / "plan.json", tmp_path / "again")
    assert set(_load(tmp_path / "again")) == {"b.w"}


def _load(folder: Path) -> dict[str, Any]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_built_in_rules_are_listed_and_printed(tmp_path: Path) -> None:
    listed = done("rules", "list").stdout
    every = [path.stem for path in (Path(reshard.__file__).parent / "rules" / "examples").glob("*.yaml")]
    assert len(every) > 10
    assert {line.split(" ")[0] for line in listed.splitlines()} == set(every)
    printed = done("rules", "list", "llama-hf-mcore").stdout
    (tmp_path / "mine.yaml").write_text(printed)
    assert reshard.Rules.read(tmp_path / "mine.yaml", config=CONFIG).rules


@pytest.mark.parametrize(
    ("typed", "meant"), [("llama", "llama-hf-mcore"), ("qwen", "qwen3-hf-mcore"), ("x", "and 7 more")]
)
def test_a_name_that_is_nearly_one(typed: str, meant: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    failed(2, "not-found", "convert", source, tmp_path / "dst", "--to", "hf", "--rules", typed, places=(typed, meant))
    failed(2, "not-found", "rules", "list", typed, places=(typed, meant))


def test_numbers_that_are_missing_name_the_option(mindspore_data: Path, tmp_path: Path) -> None:
    case = truth(mindspore_data, "mcore_tp2_pp2")
    command = ["convert", case.checkpoint, tmp_path / "hf", "--to", "hf", *LLAMA]
    failed(4, "unknown-number", *command, places=("--model-config",))
    noted = done(*command[:-2], "--dry-run").stderr
    assert "--rules" in noted, "the names are Megatron's"

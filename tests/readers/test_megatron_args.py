"""What Megatron-LM's older files state of the training is compared with the files, and None is not False."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import assert_equal
from refusals import refused
from saves_files import Made, tensor, write_save
from tensor_parallel import megatron, part_of, random, write_megatron

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from checkpoints import Array

FULL = megatron()
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
OUT = "left out"


def write_files(root: Path, models: Mapping[str, list[dict[str, Array]]], **args: Any) -> Path:
    """Write the file of each directory, with its virtual stages."""
    for directory, of_rank in models.items():
        many = len(of_rank) > 1
        value: dict[str, Any] = {"args": Made("Namespace", state=dict(args), module="argparse"), "iteration": 5}
        value["checkpoint_version"] = 3.0
        for chunk, model in enumerate(of_rank):
            value[f"model{chunk}" if many else "model"] = {name: tensor(array) for name, array in model.items()}
        write_save(root / directory / "model_optim_rng.pt", value)
    return root


# --- the order of stages ---

PLACES = {(0, 0): [0, 1], (0, 1): [6, 7], (1, 0): [2, 3], (1, 1): [4, 5]}  # of DualPipeV, by stage and virtual stage
LAYERS = random({f"decoder.layers.{n}.self_attention.linear_proj.weight": (8, 8) for n in range(8)})
ENDS = random({"embedding.word_embeddings.weight": (16, 8), "decoder.final_layernorm.weight": (8,)})
HEAD = random({"output_layer.weight": (16, 8)})


def write_v(root: Path, ends: Mapping[str, Array], **args: Any) -> Path:
    models: dict[str, list[dict[str, Array]]] = {}
    for (stage, _), numbers in PLACES.items():
        model = {
            f"decoder.layers.{i}.self_attention.linear_proj.weight": LAYERS[
                f"decoder.layers.{n}.self_attention.linear_proj.weight"
            ]
            for i, n in enumerate(numbers)
        }
        models.setdefault(f"mp_rank_00_{stage:03d}", []).append(model)
    for name, array in ends.items():
        models["mp_rank_00_000"]["embedding" not in name][name] = array
    return write_files(
        root, models, tensor_model_parallel_size=1, pipeline_model_parallel_size=2, num_layers=8,
        **({"virtual_pipeline_model_parallel_size": 2} | args),
    )  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        {"schedules_method": "dualpipev"}, {"schedule_method": "dualpipev"},
        {"schedules_method": "dualpipev", "virtual_pipeline_model_parallel_size": None},
    ],
)  # fmt: skip
def test_stages_that_run_backwards(tmp_path: Path, args: dict[str, Any]) -> None:
    assert_equal(reshard.open(write_v(tmp_path, ENDS | HEAD, **args)), LAYERS | ENDS | HEAD)


@pytest.mark.parametrize("ends", [ENDS, ENDS | HEAD, HEAD])
def test_a_head_that_is_not_behind_all_layers(tmp_path: Path, ends: dict[str, Array]) -> None:
    with refused(SourceError, "files-disagree", "schedules_method"):
        reshard.open(write_v(tmp_path, ends))
    with refused(SourceError, "unsupported-layout", "schedules_method vhalf"):
        reshard.open(write_v(tmp_path / "other", ends, schedules_method="vhalf"))


def test_stages_in_turn_that_args_call_backwards(tmp_path: Path) -> None:
    """An embedding, too, has to be before all layers."""
    layers = [[1, 1], [1, 1]]
    with refused(SourceError, "files-disagree", "dualpipev"):
        reshard.open(write_megatron(tmp_path, FULL, layers, 1, args={"schedules_method": "dualpipev"}))

    def swap(stage: int, _part: int, value: dict[str, Any]) -> None:
        value["model"].pop("embedding.word_embeddings.weight", None)
        if stage:
            value["model"]["embedding.word_embeddings.weight"] = tensor(FULL["embedding.word_embeddings.weight"])

    with refused(SourceError, "files-disagree", "word_embeddings"):
        reshard.open(write_megatron(tmp_path / "swapped", FULL, [[2, 2]], 1, change=swap))


VIRTUAL = "virtual_pipeline_model_parallel_size"
PLACED: dict[str, tuple[dict[str, Any], list[list[int]], str]] = {
    "nothing said of two models": ({VIRTUAL: None}, [[1, 1], [1, 1]], ""),
    "virtual stages that are not there": ({VIRTUAL: 4}, [[1, 1], [1, 1]], "files-disagree"),
    "a first stage": ({"decoder_first_pipeline_num_layers": 3}, [[3, 1]], ""),
    "a layout of virtual stages": (
        {"pipeline_model_parallel_layout": "Et*2|t|t|L", VIRTUAL: None}, [[2, 1], [1, 0]], "",
    ),
    "layers that do nothing": ({"noop_layers": [1]}, [[2, 2]], "unsupported-layout"),
    "no layers that do nothing": ({"noop_layers": None}, [[2, 2]], ""),
    "tensor parallelism of two dimensions": ({"tp_2d": True}, [[2, 2]], "unsupported-layout"),
    "experts in more parts": ({"expert_tensor_parallel_size": 2}, [[2, 2]], "unsupported-layout"),
    "layers behind": ({"mtp_num_layers": 1}, [[2, 2]], "missing-layers"),
    "no layers behind": ({"mtp_num_layers": 0}, [[2, 2]], ""),
    "stages, though none are said": ({"pipeline_model_parallel_size": None}, [[2, 2]], "no-such-rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_numbers_of_layers_in_args_and_files(tmp_path: Path, name: str) -> None:
    args, layers, code = PLACED[name]
    root = write_megatron(tmp_path, FULL, layers, 1, args=args)
    if not code:
        assert_equal(reshard.open(root), FULL)
        return
    with refused(SourceError, code):
        reshard.open(root)


# --- shapes ---

STATED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"swiglu {value}": ({"swiglu": value, "ffn_hidden_size": OUT}, code) for value, code in
       ((None, ""), (OUT, ""), (False, ""), (True, ""), ("silu", ""))},
    "quick_geglu": ({"swiglu": False, "quick_geglu": True}, ""),
    "a gated unit": ({"swiglu": OUT, "gated_linear_unit": True}, ""),
    "heads of another program": ({"group_query_attention": False, "num_key_value_heads": 2}, ""),
    "other heads of it": ({"group_query_attention": OUT, "num_key_value_heads": 4}, "wrong-shape"),
    "groups, and no flag": ({"group_query_attention": None}, ""),
    "other groups, and no flag": ({"group_query_attention": OUT, "num_query_groups": 4}, "wrong-shape"),
    "no groups": ({"group_query_attention": False}, "wrong-shape"),
    "other heads": ({"num_attention_heads": 2}, "wrong-shape"),
    "another width of heads": ({"kv_channels": 4}, "wrong-shape"),
    "another vocabulary": ({"padded_vocab_size": 13}, "wrong-shape"),
    "another inner size": ({"ffn_hidden_size": 24}, "wrong-shape"),
    "nothing said of groups": ({"group_query_attention": OUT, "num_query_groups": None}, ""),
    "a gate of attention": ({"attention_output_gate": True}, "wrong-shape"),
    "no gate of attention": ({"attention_output_gate": None}, ""),
    "a latent attention": ({"multi_latent_attention": True, "v_head_dim": 4}, "wrong-shape"),
    "parts by the name of before": ({"tensor_model_parallel_size": OUT, "model_parallel_size": 2}, ""),
    "two names": ({"model_parallel_size": 4}, ""),
    "nothing said of ties": ({"untie_embeddings_and_output_weights": None}, ""),
    "layers of other shapes": ({"heterogeneous_layers_config_path": "a.json", "ffn_hidden_size": 99}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_sizes_and_flags(tmp_path: Path, name: str) -> None:
    args, code = STATED[name]

    def change(_stage: int, _part: int, value: dict[str, Any]) -> None:
        state = value["args"].reduced[2]
        state.update(args)
        for key in [key for key, stated in state.items() if stated == OUT]:
            del state[key]

    root = write_megatron(tmp_path, FULL, [[4]], 2, change=change)
    if not code:
        assert_equal(reshard.open(root), FULL)
        return
    with refused(SourceError, code):
        reshard.open(root)


@pytest.mark.parametrize("swiglu", [OUT, None, True])
def test_an_mlp_without_a_gate(tmp_path: Path, swiglu: object) -> None:
    """The shapes show it, whatever is stated."""
    full = megatron(gated=False)

    def change(_stage: int, _part: int, value: dict[str, Any]) -> None:
        value["args"].reduced[2].update({"swiglu": swiglu, "ffn_hidden_size": None})
        if swiglu == OUT:
            del value["args"].reduced[2]["swiglu"]

    assert_equal(reshard.open(write_megatron(tmp_path, full, [[4]], 2, args={"swiglu": False}, change=change)), full)


def test_a_first_layer_whose_gate_nothing_shows(tmp_path: Path) -> None:
    """It is refused by name."""

    def change(_stage: int, _part: int, value: dict[str, Any]) -> None:
        del value["args"].reduced[2]["swiglu"]
        for name in [name for name in value["model"] if "linear_fc2" in name]:
            del value["model"][name]

    source = reshard.open(write_megatron(tmp_path, FULL, [[4]], 2, change=change))
    assert set(source.unreadable) == {f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(4)}


# --- experts ---

EXPERTS = 4
DENSE = random({
    "embedding.word_embeddings.weight": (16, 8), "decoder.layers.0.mlp.router.weight": (EXPERTS, 8),
    "decoder.layers.0.self_attention.linear_proj.weight": (8, 8),
    "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": (24, 8),
    "decoder.layers.0.mlp.shared_experts.linear_fc2.weight": (8, 12),
    "decoder.final_layernorm.weight": (8,),
})  # fmt: skip
SIZES = {
    "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "swiglu": True, "num_experts": EXPERTS,
    "moe_ffn_hidden_size": 12, "padded_vocab_size": 16, "moe_layer_freq": 1,
}  # fmt: skip


def of_experts(*, grouped: bool) -> dict[str, Array]:
    name = "{layer}.weight{e}" if grouped else "local_experts.{e}.{layer}.weight"
    return random({
        "decoder.layers.0.mlp.experts." + name.format(layer=layer, e=e): shape
        for e in range(EXPERTS)
        for layer, shape in (("linear_fc1", (24, 8)), ("linear_fc2", (8, 12)))
    })  # fmt: skip


def write_experts(
    root: Path, *, parts: int, ranks: int, cut: int, stages: int = 1, grouped: bool = False, per: int = 0, **args: Any
) -> tuple[Path, dict[str, Array]]:
    """Write expert-parallel ranks, with experts in `cut` tensor-parallel parts; return the whole tensors."""
    experts = of_experts(grouped=grouped)
    per = per or EXPERTS // ranks
    models: dict[str, list[dict[str, Array]]] = {}
    for world in range(parts * cut * ranks):  # as megatron-core places ranks: tensor parts first
        part, expert, expert_part = world % parts, world // cut % ranks, world % cut
        model = {}
        for name, array in DENSE.items():
            axis = next((axis for key, axis in {"fc1": 0, "fc2": 1, "proj": 1, "word": 0}.items() if key in name), None)
            model[name] = part_of(array, axis, part, parts, gated="fc1" in name)
        for name, array in experts.items():
            number = int(name.rpartition("weight")[2] if grouped else name.split(".")[6])
            if number // per == expert:
                axis, local = int("fc2" in name), number - expert * per
                new = name.replace(f"weight{number}", f"weight{local}").replace(
                    f"_experts.{number}", f"_experts.{local}"
                )
                model[new] = part_of(array, axis, expert_part, cut, gated=not axis)
        if stages == 1:
            models[f"mp_rank_{part:02d}_{expert:03d}"] = [model]
        else:
            models[f"mp_rank_{part:02d}_000_{expert:03d}"] = [
                {name: array for name, array in model.items() if "final" not in name}
            ]
            models[f"mp_rank_{part:02d}_001_{expert:03d}"] = [
                {name: array for name, array in model.items() if "final" in name}
            ]
    sizes = {
        "tensor_model_parallel_size": parts, "pipeline_model_parallel_size": stages,
        "expert_model_parallel_size": ranks, "expert_tensor_parallel_size": cut,
    }  # fmt: skip
    write_files(root, models, **(SIZES | sizes | args))
    return root, DENSE | experts


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("parts", "ranks", "cut", "stages"),
    [(1, 2, 1, 1), (1, 4, 1, 2), (2, 2, 2, 1), (2, 2, 1, 1), (2, 1, 1, 1), (4, 2, 2, 2), (2, 4, 1, 1)],
)
def test_experts_of_all_ranks(tmp_path: Path, parts: int, ranks: int, cut: int, stages: int, grouped: bool) -> None:
    """They have their numbers in the whole model."""
    root, full = write_experts(tmp_path, parts=parts, ranks=ranks, cut=cut, stages=stages, grouped=grouped)
    source = reshard.open(root)
    assert_equal(source, full)
    assert not source.unreadable


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "more experts": ({"num_experts": 8}, "missing-experts", "num_experts 8"),
    "fewer experts": ({"per": 1}, "missing-experts", "num_experts 4"),
    "another width": ({"moe_ffn_hidden_size": 24}, "wrong-shape", "experts"),
    "another width by another name": (
        {"moe_ffn_hidden_size": None, "moe_intermediate_size": 24},
        "wrong-shape",
        "experts",
    ),
    "another width of shared ones": ({"moe_shared_expert_intermediate_size": 6}, "wrong-shape", "shared_experts"),
    "no gate": ({"swiglu": False}, "wrong-shape", "linear_fc1"),
    "other ranks": ({"expert_model_parallel_size": 4}, "missing-ranks", "expert-parallel rank 2"),
    "fewer ranks": ({"expert_model_parallel_size": 1}, "no-such-rank", "stage 1"),
    "no number of ranks": ({"expert_model_parallel_size": None}, "no-such-rank", "stage 1"),
    "experts over tensor parts": ({"moe_tp_extend_ep": True}, "unsupported-layout", "moe_tp_extend_ep"),
    "dense layers": ({"moe_layer_freq": [0]}, "missing-experts", "moe_layer_freq"),
    "dense layers before": ({"first_k_dense_replace": 1}, "missing-experts", "moe_layer_freq"),
    "ranks without end": ({"expert_model_parallel_size": 1 << 40}, "missing-ranks", "expert-parallel rank 2"),
    "experts in fewer parts": ({"expert_tensor_parallel_size": 1, "parts": 2, "cut": 2}, "wrong-shape", "experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_args_contradict(tmp_path: Path, name: str) -> None:
    args, code, place = REFUSED[name]
    root, _ = write_experts(tmp_path, **({"parts": 1, "ranks": 2, "cut": 1} | args))
    with refused(SourceError, code, place):
        reshard.open(root)


@pytest.mark.parametrize("name", ["mp_rank_{:02d}", "tp_rank_{:02d}_pp_rank_000"])
def test_ranks_of_nemo_1(tmp_path: Path, name: str) -> None:
    for part in range(2):
        write_save(tmp_path / name.format(part) / "model_weights.ckpt", {"w": tensor(HEAD["output_layer.weight"])})
    with refused(SourceError, "no-checkpoint", "NeMo"):
        reshard.open(tmp_path)
    with refused(SourceError, "one-of-several", tmp_path):
        reshard.open(tmp_path / name.format(0) / "model_weights.ckpt")

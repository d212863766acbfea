"""Each promise of the README, and the tests that try to break it.

`PROMISES` quotes the README; the tests named there are in other files, but for those below, which were lacking. A
promise that is no longer in the README, and a test that is no longer there, fail.
"""

from __future__ import annotations

import ast
import base64
import subprocess
import sys
from collections import defaultdict
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import assert_rank_files, blocks, numbers, tree, write_file, write_ranks
from commands import call, done
from faulty import IMPORTED, Faults, raising

import reshard
from reshard import Layout, Strategy, ZarrGroup
from reshard.dtypes import BY_NAME
from reshard.layout.block import Block
from reshard.plan import budget
from reshard.storage.base import PARTIAL

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

HERE = Path(__file__).parent
README = " ".join((HERE.parent / "README.md").read_text().split())

PROMISES = {
    # --- the first screen ---
    "turns them into the files of N devices, any M and N": [
        "run/test_run.py::test_any_model_goes_there_and_back",
        "run/test_run.py::test_64_ranks_to_56",
        "fuzz/test_fuzz_differential.py::test_fuzz_differential",
        "fuzz/test_fuzz_chains.py::test_fuzz_chains",
    ],
    "from the files alone: no framework, no accelerator": ["test_promises.py::test_no_framework_is_needed"],
    "each byte read once and written once": [
        "test_promises.py::test_each_byte_is_read_once_and_written_once",
        "plan/test_bands.py::test_any_grid_becomes_any_other",
        "storage/test_remote.py::test_only_ranges_are_read_each_once",
    ],
    "no tensor ever whole in memory": [
        "test_promises.py::test_nothing_is_held_that_is_larger_than_a_band",
        "run/test_run.py::test_one_tensor_of_16_gb_within_512_mb",
        "run/test_memory.py::test_the_peak_does_not_grow_with_the_bytes",
    ],
    "(8 ranks become 4, with optimizer parallel; every byte is checked)": [
        "cli/test_demo.py::test_a_changed_byte_is_found_wherever_it_is",
        "cli/test_cli_demo.py::test_demo_exits_3_when_a_byte_is_wrong",
    ],
    "multiples or not; tensor, optimizer and pipeline parallel on either side; nested layouts; another device matrix": [
        "plan/test_plan.py::test_every_rank_gets_its_blocks_and_no_others",
        "mindspore/test_mindspore_cases.py::test_every_recorded_case_converts_to_slices_and_back",
        "fuzz/test_fuzz_differential.py::test_fuzz_differential",
    ],
    "Checkpoint 2.0; distributed checkpoints (DCP) of PyTorch and Megatron-Core, also to be written, and of": [
        "targets/test_write_checkpoint2.py::test_to_another_mesh_and_back_is_what_mindformers_writes",
        "readers/test_torch_dcp.py::test_real_ones_are_their_whole_tensors",
        "readers/test_dcp.py::test_they_are_converted_and_verified",
        "targets/test_write_dcp_torch.py::test_fsdp_and_tensor_parallel_meshes",
    ],
    "what `torch.save` made of whole tensors, or of DTensors on each rank": [
        "readers/test_saves.py",
        "readers/test_saves_torch.py",
    ],
    "Objects (learning rates and the like) and Megatron's `common.pt` are shown by `inspect`, given by"
    " `reshard.read_object`, and carried byte for byte from one DCP to another": [
        "readers/test_dcp_objects.py",
        "targets/test_write_dcp_objects.py",
    ],
    "`--link` writes new metadata and links the data files, in the same time for any size": [
        "targets/test_link_dcp_files.py::test_time_does_not_depend_on_size",
        "targets/test_link_dcp.py::test_every_real_one_is_renamed_and_back",
        "targets/test_link_dcp_files.py::test_stopped_halfway",
    ],
    "Tensors in any strides are read: transposed, channels last, expanded": ["readers/test_strides.py"],
    "go to another DCP as they are, whatever the cast": ["targets/test_write_dcp_objects.py"],
    "what has tensors in it and cannot be read is refused by name": ["readers/test_saves.py"],
    "`verify` alone looks at the CRC-32 of every record, which PyTorch writes and never reads (in items that are zstd"
    " streams, too), at headers against each other, coverage, overlaps and replicas": [
        "verify/test_carried_streams.py",
        "verify/test_carried.py::test_any_bit_of_any_item_is_seen_and_its_name_said",
        "verify/test_carried.py::test_every_byte_of_real_ones_is_under_a_checksum",
        "verify/test_carried.py::test_boxes_that_lack_and_overlap",
        "verify/test_carried.py::test_replicas_are_compared_byte_by_byte",
    ],
    "in one YAML file for both ways": ["rules/test_verbs.py::test_both_ways", "rules/test_recorded.py"],
    "States of optimizers and scales of quantised weights follow their weights": [
        "rules/test_verbs.py::test_what_follows_a_weight",
        "rules/test_verbs.py::test_scales_whose_blocks_would_be_cut",
    ],
    "each tensor must be in one rule or dropped by name, each number without a hole, each size must add up": [
        "rules/test_verbs.py::test_what_does_not_add_up",
        "rules/test_verbs.py::test_rules_that_are_in_each_others_way",
        "rules/test_rules_file.py::test_a_rule_that_is_refused",
    ],
    "Shipped as examples, each with a test": ["rules/test_examples.py::test_as_numpy_does_it_both_ways"],
    "`W + alpha / r · B A` in float32, rounded once": [
        "rules/test_lora.py::test_ranks_to_ranks",
        "rules/test_lora.py::test_an_element_is_the_same_however_it_is_read",
        "rules/test_lora.py::test_alpha_is_never_guessed",
    ],
    "zarr v3 stores; unified sets, MindSpore's and Hugging Face's": [
        "formats/test_formats_byte_for_byte.py::test_ckpt_files_come_out_byte_for_byte_as_mindspore_wrote_them",
        "formats/test_formats_byte_for_byte.py::test_safetensors_are_written_byte_for_byte_as_the_library_does",
        "formats/test_zarr_foreign.py::test_stores_that_zarr_wrote",
        "formats/test_unified.py::test_mindspores_sets_are_read_and_ours_have_its_names",
        "fuzz/test_fuzz_chains.py::test_fuzz_chains",
    ],
    "all of both formats, including bfloat16, float8 and `Int4`, moved as bits": [
        "run/test_run.py::test_every_width_moves_as_bits",
        "test_promises.py::test_every_dtype_of_a_format_moves_bit_for_bit",
        "formats/test_zarr.py::test_every_dtype_survives",
    ],
    "reports bytes to read and write, files and memory, and what is dropped or missing; a weight that is dropped"
    " or missing is an error": [
        "view/test_report.py::test_it_counts_what_was_written",
        "run/test_memory.py::test_the_peak_is_what_was_predicted_or_less",
        "plan/test_plan.py::test_not_in_the_target_a_weight_is_an_error_unless_a_pattern_covers_it",
        "plan/test_plan.py::test_not_in_the_source_likewise",
        "cli/test_cli.py::test_a_dry_run_refuses_what_a_run_does",
    ],
    "one dask graph of few, large tasks, on threads or on a dask cluster, with the same bytes": [
        "plan/test_plan.py::test_tasks_are_few_and_fat",
        "run/test_run.py::test_the_bytes_are_the_same_on_every_scheduler",
        "cli/test_cli.py::test_how_it_runs_does_not_change_a_byte",
        "run/test_cluster.py::test_a_collection_computed_on_a_cluster",
        "plan/test_partition.py::test_any_model",
    ],
    "nothing half-written under a final name": [
        "test_promises.py::test_stopped_at_any_write_nothing_half_written_has_a_final_name",
        "run/test_remote_resume.py::test_a_run_that_fails_at_any_write_is_gone_on_with",
        "faults/test_faults.py::test_faults",
    ],
    "whatever stops a run, the same command resumes it": [
        "test_promises.py::test_stopped_at_any_write_nothing_half_written_has_a_final_name",
        "run/test_resume.py::test_only_what_is_not_there_is_written_again",
        "formats/test_zarr_unfinished.py::test_a_run_goes_on_where_one_was_killed",
        "faults/test_faults.py::test_faults",
        "faults/test_faults.py::test_small_disks",
    ],
    "a report with checksums and measured memory": [
        "view/test_report.py::test_memory_is_measured",
        "run/test_resume.py::test_checksums_are_of_what_is_there",
    ],
    "Every tensor is a lazy dask array of its real dtype, one chunk per source shard, from headers only": [
        "view/test_arrays.py::test_chunks_are_the_source_shards",
        "view/test_arrays.py::test_every_dtype_comes_back_from_a_file",
        "source/test_source.py::test_contents_are_not_read",
    ],
    "missing ranks; headers that contradict the strategy; mixed steps; tensors that are split but not listed, or listed"
    " but whole": [
        "source/test_source.py::test_a_missing_rank_is_refused_though_replicas_have_all_it_held",
        "source/test_source.py::test_all_faults_at_once",
        "source/test_source.py::test_ranks_without_a_step_in_common",
        "source/test_source.py::test_global_steps_must_agree",
        "source/test_source.py::test_a_frozen_weight_that_is_split_but_not_listed_is_refused",
        "source/test_source.py::test_listed_tensors_that_every_rank_holds_whole_are_refused",
        "test_promises.py::test_what_is_refused_is_refused_by_every_command",
        "fuzz/test_fuzz_flips.py::test_fuzz_flips",
    ],
    "gives the same tensors, dtypes, shapes and bytes in 425": [
        "mindspore/test_ms_recorded.py::test_transform_checkpoints"
    ],
    # --- "How to" ---
    "Run a MindSpore script without MindSpore Change one import": [
        "mindspore/test_tutorials.py::test_a_directory_at_once"
    ],
    "what is written and still matches its checksum is kept, and over a finished target nothing is left to do": [
        "run/test_resume.py::test_what_is_verified_is_not_written_again",
        "run/test_existing_targets.py::test_over_a_finished_target_nothing_is_left_to_do",
    ],
    "A source or plan that has changed is refused; `--restart` starts over": [
        "run/test_changed_sources.py::test_a_source_that_changes_during_the_run",
        "run/test_changed_sources.py::test_a_source_with_another_header_is_another",
        "run/test_existing_targets.py::test_a_changed_plan_is_refused",
        "run/test_existing_targets.py::test_a_restart_that_is_stopped_may_be_typed_again",
    ],
    "Runs may write different ranks into one directory at the same time": [
        "test_promises.py::test_processes_write_other_ranks_into_one_directory_at_the_same_time",
        "run/test_existing_targets.py::test_other_ranks_may_be_written_into_the_same_target",
        "run/test_locks.py::test_two_runs_of_one_process",
    ],
    "its `.reshard` holds a ledger of the target and a lock for each file": [
        "test_promises.py::test_processes_that_write_the_same_files_are_kept_apart",
        "run/test_locks.py::test_locks_of_another_process",
        "run/test_ledger_hostile.py",
    ],
    "only finished files are kept, and none after a restart of the machine": [
        "run/test_resume.py::test_a_finished_file_that_was_not_synced_is_made_again_after_a_power_cut",
    ],
    "compares every bit with the source, whatever the two layouts and formats, and replicas with each other": [
        "verify/test_verify.py::test_a_replica_that_differs",
        "verify/test_verify.py::test_a_replica_in_the_source_that_no_conversion_reads",
        "fuzz/test_fuzz_flips.py::test_fuzz_flips",
    ],
    "What differs is reported by tensor, rank, file and index": [
        "cli/test_cli_verify.py::test_a_difference_is_told_on_one_screen",
        "verify/test_verify.py::test_one_flipped_bit_is_found_where_it_is",
    ],
    "compares random rows": ["verify/test_verify.py::test_a_sample_reads_less_and_is_the_same_again"],
    "makes the manifest from the checksums of the run, without reading anything again": [
        "verify/test_run_manifest.py::test_it_is_that_of_the_files_and_nothing_is_read",
        "verify/test_run_manifest.py::test_of_any_model",
    ],
    "Where the files were copied to, `--manifest FILE` compares checksums of every bit": [
        "verify/test_manifest.py::test_any_flipped_bit_of_a_file_is_found",
        "fuzz/test_fuzz_flips.py::test_fuzz_flips",
    ],
    "The index of a set comes last": [
        "formats/test_unified.py::test_the_index_gets_its_name_last",
        "formats/test_unified.py::test_a_file_larger_than_all_buffers_is_written_in_bands",
        "run/test_two_steps.py::test_a_set_that_is_replaced_is_without_its_index_until_all_is_new",
    ],
    "The plan is a small JSON file without weights or keys. A run does what was planned, or nothing": [
        "plan/test_plan_file.py::test_it_holds_nothing_of_the_weights",
        "plan/test_plan_file.py::test_a_plan_of_many_tensors_is_small",
        "plan/test_plan_file.py::test_any_change_is_refused_or_harmless",
        "cli/test_cli_plan.py::test_what_is_planned_is_what_transform_does",
        "fuzz/test_fuzz_flips.py::test_fuzz_flips",
    ],
    "by size, by everything in their headers and by some pages of their contents, not by time": [
        "plan/test_plan_file.py::test_a_file_of_another_size",
        "plan/test_plan_file.py::test_a_file_with_another_header",
        "plan/test_plan_file.py::test_a_file_of_another_step",
        "plan/test_plan_file.py::test_times_do_not_count",
    ],
    "a small JSON file without weights or keys": [
        "plan/test_plan_file.py::test_an_encrypted_source_needs_its_key_again",
        "test_promises.py::test_the_key_of_encrypted_files_is_in_no_file_that_is_written",
    ],
    "a model of 19 GB goes through 71 MB, under a cap of 512 MiB": [
        "formats/test_zarr_memory.py::test_a_model_forty_times_the_memory",
    ],
    "bfloat16 and float8 are stored as integers, with the dtype's name in the attributes": [
        "formats/test_zarr.py::test_every_dtype_survives",
    ],
    "does not bind their order: whoever can write the file can exchange two blocks of one length": [
        "storage/test_cipher.py::test_the_order_of_blocks_is_bound_by_nothing",
    ],
    "Chunks follow the source's blocks, or `--chunk-size`; compressed ones are at most 4 MiB": [
        "formats/test_zarr.py::test_chunks_are_the_source_blocks",
        "test_promises.py::test_compressed_chunks_are_4_mib_at_most",
    ],
    "The group's `zarr.json` comes last, so that an unfinished store has no group": [
        "formats/test_zarr_unfinished.py::test_the_group_is_there_when_all_is",
        "formats/test_zarr_unfinished.py::test_a_store_that_is_written_anew_has_no_group_meanwhile",
        "formats/test_zarr_remote.py::test_a_failure_leaves_nothing_that_is_taken_for_a_store",
        "test_promises.py::test_stopped_at_any_write_a_store_has_no_group",
    ],
    "typed again, resumes from a finished store, even if the source is gone": [
        "formats/test_zarr_cli.py::test_via_zarr_and_again_without_the_source",
    ],
    "(a finished zarr store is refused without `--overwrite`)": [
        "test_promises.py::test_exit_codes_are_those_of_the_readme",
        "run/test_resume.py::test_a_store_at_a_url_that_is_finished_is_in_the_way",
    ],
    "globs of source names, with `@COUNT` exactly that many": [
        "plan/test_selection.py::test_a_pattern_may_say_how_many_it_matches",
    ],
    "optimizer states follow their weights": [
        "plan/test_selection.py::test_optimizer_states_follow_their_weights",
    ],
    "a map applies at once, so that names may be swapped": [
        "plan/test_selection.py::test_maps_apply_at_once_so_that_a_swap_is_legal",
        "plan/test_selection.py::test_any_permutation_is_a_map_and_back",
    ],
    "another format, file by file, without a strategy": [
        "cli/test_cli_convert.py::test_convert_there_and_back",
    ],
    "every block once in each stage, on one of the ranks that share it": [
        "layout/test_redundancy.py::test_every_block_is_stored_once_in_each_stage_by_a_rank_that_holds_it",
        "run/test_run.py::test_replicas_stored_once",
    ],
    "Optimizer parallel goes by MindSpore's own conditions": [
        "strategy/test_rules.py::test_every_compiled_file_block_for_block"
    ],
    "low-precision means are accumulated in float32": ["view/test_arrays.py::test_a_million_ones"],
    "the plan and receipts travel, no tensor does": ["run/test_cluster.py::test_only_receipts_and_the_plan_travel"],
    "a lost worker's tasks run again elsewhere, with the same bytes": [
        "run/test_cluster.py::test_a_worker_is_killed_in_the_middle",
        "faults/test_faults.py::test_a_worker_is_killed",
    ],
    "only the ranges that are needed are read, and files are written as streams": [
        "storage/test_remote.py::test_only_ranges_are_read_each_once",
        "storage/test_remote.py::test_a_large_file_is_sent_in_parts",
        "plan/test_partition.py::test_files_are_written_from_first_byte_to_last",
    ],
    "files are written as streams. What is finished stays": [
        "run/test_remote_resume.py::test_the_index_of_a_set_is_there_when_all_is",
        "storage/test_remote.py::test_a_failure_leaves_nothing_unfinished",
    ],
    "What is finished stays when a run is stopped or fails": [
        "run/test_remote_resume.py::test_finished_files_are_not_written_again",
    ],
    "a weight that the target strategy does not name": ["cli/test_cli.py::test_a_weight_is_dropped_only_when_told_to"],
    "one that the source lacks": ["cli/test_cli.py::test_a_weight_is_missing_only_when_told_to"],
    "Optimizer states are dropped or missing without an error, and reported": [
        "plan/test_plan.py::test_not_in_the_target_an_optimizer_state_is_dropped_and_reported",
    ],
    "several checkpoints in the rank directories": [
        "source/test_source.py::test_a_restarted_run_beside_the_first_must_be_chosen",
        "source/test_source.py::test_both_formats_of_one_checkpoint_must_be_chosen_between",
    ],
    "missing ranks, if others have their blocks or only others' blocks are wanted: `--partial`": [
        "source/test_source.py::test_some_ranks_may_be_enough_for_some",
    ],
    "0 done, 1 failure, 2 usage, 3 checkpoints or strategies differ, 4 source or strategy incomplete or corrupt, 5"
    " memory or disk, 6 target exists, 130 interrupted, 143 terminated": [
        "test_promises.py::test_exit_codes_are_those_of_the_readme",
        "cli/test_cli_processes.py::test_a_stopped_run_leaves_no_unfinished_file_and_can_be_typed_again",
        "cli/test_cli_errors.py::test_a_full_disk_is_5",
    ],
}


@cache
def functions_of(name: str) -> set[str]:
    """The test functions of a file."""
    body = ast.parse((HERE / name).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[:60])
def test_a_promise_is_in_the_readme_and_its_tests_are_there(promise: str) -> None:
    assert " ".join(promise.split()) in README, "the README does not promise this any more; change the table"
    for test in PROMISES[promise]:
        name, _, function = test.partition("::")
        assert function in functions_of(name) if function else functions_of(name), f"{test} is not there any more"


# --- what was lacking --------------------------------------------------------------------------------------------

FULL = numbers({"w": (48, 16), "adam_m.w": (48, 16), "b": (24,), "c": (6, 4, 8)})
FULL["h"] = numbers({"h": (16, 8)}, "uint16")["h"]  # stands for bfloat16
SOURCE = Strategy.of(
    {
        "w": Layout.of([4], [0, -1]), "adam_m.w": Layout.of([2, 2], [1, -1], -1), "b": Layout.of([4], [-1]),
        "c": Layout.of([2, 2], [-1, 1, 0]), "h": Layout.of([2, 2], [(1, 0), -1]),
    }
)  # fmt: skip
TARGET = Strategy.of(
    {
        "w": Layout.of([3], [-1, -1], -1), "adam_m.w": Layout.of([3], [0, -1]), "b": Layout.of([3], [0]),
        "c": Layout.of([3], [0, -1, -1]), "h": Layout.of([3], [-1, -1]),
    }
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A source of 4 ranks, and strategies of it and of a target of 3."""
    write_ranks(tmp_path / "src", FULL, SOURCE)
    reshard.write_strategy(SOURCE, tmp_path / "source.ckpt")
    reshard.write_strategy(TARGET, tmp_path / "target.ckpt")
    return tmp_path


def words(folder: Path, out: str, *more: str) -> list[str]:
    """The command that writes the target."""
    strategies = [f"--source-strategy={folder / 'source.ckpt'}", f"--target-strategy={folder / 'target.ckpt'}"]
    return ["transform", str(folder / "src"), str(folder / out), *strategies, *more]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands and tasks so small that a small model has many."""
    monkeypatch.setattr(budget, "BAND_BYTES", 128)
    monkeypatch.setattr(budget, "TASK_BYTES", 512)


class Watched:
    """What is read of sources and written to targets: path, offset, bytes."""

    def __init__(self, faults: Faults) -> None:
        self.read: list[tuple[str, int, int]] = []
        self.written: list[tuple[str, int, int]] = []
        for name, seen in (("read_into", self.read), ("write_at", self.written)):
            faults.every(lambda call, seen=seen: seen.append(call[1:]), name)  # type: ignore[misc]


def test_no_framework_is_needed(folder: Path) -> None:
    """Nothing that would bring one is even looked for, in none of the commands."""
    code = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"mindspore", "torch", "tensorflow", "jax", "transformers", "paddle", "pandas"}:
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Refusing())
import reshard.mindspore
from reshard.cli.main import cli
for line in sys.argv[1:]:
    cli.main(line.split(), standalone_mode=False)
"""
    source = f"--source-strategy={folder / 'source.ckpt'}"
    lines = [
        " ".join(words(folder, "out", "--format=ckpt")),
        f"verify {folder / 'out'} --target-strategy={folder / 'target.ckpt'} --against {folder / 'src'} {source}",
        f"unify {folder / 'src'} {folder / 'set'} {source} --style=huggingface --cast=float32=bfloat16",
        f"unify {folder / 'src'} {folder / 'store.zarr'} {source} --format=zarr --compression=zstd",
        f"inspect {folder / 'store.zarr'}",
    ]
    subprocess.run([sys.executable, "-c", code, *lines], check=True, capture_output=True, text=True)
    assert_rank_files(folder / "out", FULL, TARGET)


@pytest.mark.usefixtures("small")
def test_each_byte_is_read_once_and_written_once(folder: Path, faults: Faults) -> None:
    plan = reshard.plan(reshard.open(folder / "src", strategy=SOURCE), TARGET)
    seen = Watched(faults)
    plan.run(folder / "out", threads=2)
    read = covered(seen.read)
    assert sum(map(len, read.values())) == sum(array.nbytes for array in FULL.values()), "of each tensor every byte"
    written = covered(seen.written)
    for path, places in written.items():
        assert places == set(range(Path(path).stat().st_size)), "of each file every byte"
    assert len(written) == 3


def covered(ranges: Iterable[tuple[str, int, int]]) -> dict[str, set[int]]:
    """The bytes of each file, of which none may be there twice."""
    found: dict[str, set[int]] = defaultdict(set)
    for path, offset, nbytes in ranges:
        places = set(range(offset, offset + nbytes))
        assert not found[path] & places, f"{path}: bytes {offset} to {offset + nbytes} are there twice"
        found[path] |= places
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("files", [None, reshard.MindSporeSet(3000), reshard.HuggingFaceSet(), ZarrGroup(100)])
def test_nothing_is_held_that_is_larger_than_a_band(folder: Path, faults: Faults, partition: str, files: Any) -> None:
    """Not even a row: the widest is of 64 bytes, and of three dimensions 128; headers are not tensors."""
    if isinstance(files, ZarrGroup) and partition == "file":
        pytest.skip("local stores are written by tensor")
    target = TARGET if files is None else None
    plan = reshard.plan(reshard.open(folder / "src", strategy=SOURCE), target, files=files)
    seen = Watched(faults)
    plan.run(folder / "out", partition=partition)
    assert max(nbytes for _, _, nbytes in seen.read) <= 128
    begin = {
        str(folder / "out" / file.path): min(offset for content in file.layout.contents for offset, _ in content.runs)
        for file in plan._record.files
        if file.layout.contents
    }
    own = {
        (str(folder / "out" / file.path), offset) for file in plan._record.files for offset, _ in file.layout.literals
    }
    contents = [
        nbytes
        for path, offset, nbytes in seen.written
        if path in begin and offset >= begin[path] and (path, offset) not in own  # such as the index of a shard
    ]
    assert contents
    assert max(contents) <= 128


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_every_dtype_of_a_format_moves_bit_for_bit(tmp_path: Path, format: str) -> None:
    """Every bit pattern that fits: of wide dtypes a spread of them, infinities and NaNs with their payloads too."""
    from format_files import contents_of, message, st_file

    kinds = [dtype for dtype in BY_NAME.values() if (dtype.mindspore if format == "ckpt" else dtype.safetensors)]
    kinds = [dtype for dtype in kinds if dtype.name not in {"str", *(["int4"] if format == "safetensors" else [])}]
    names = {dtype.name: Layout.of([2], [0]) for dtype in kinds}
    every = {
        dtype.name: b"".join(bytes((byte + turn) % 256 for byte in range(256)) for turn in range(dtype.itemsize))
        for dtype in kinds
    }
    for rank in range(2):
        half = {name: data[len(data) // 2 :] if rank else data[: len(data) // 2] for name, data in every.items()}
        path = tmp_path / f"src/rank_{rank}/a.{format}"
        path.parent.mkdir(parents=True)
        if format == "ckpt":
            path.write_bytes(b"".join(message(d.name, d.mindspore or "", [128], half[d.name]) for d in kinds))
        else:
            place, header = 0, {}
            for dtype in kinds:
                end = place + len(half[dtype.name])
                header[dtype.name] = {"dtype": dtype.safetensors, "shape": [128], "data_offsets": [place, end]}
                place = end
            path.write_bytes(st_file(header, b"".join(half.values())))
    source = reshard.open(tmp_path / "src", strategy=Strategy.of(names))
    reshard.plan(source, Strategy.of({name: Layout.of([4], [0]) for name in names})).run(tmp_path / "four")
    four = reshard.open(tmp_path / "four", strategy=Strategy.of({name: Layout.of([4], [0]) for name in names}))
    reshard.plan(four).run(tmp_path / "whole")
    (path,) = (tmp_path / "whole" / "rank_0").iterdir()
    found = contents_of(path, reshard.open(path)._record.files[0].index)
    assert found == {dtype.name: (dtype.name, (256,), every[dtype.name]) for dtype in kinds}


class StoppedError(Exception):
    """What ends a run at one of its writes."""


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("partition", ["tensor", "file"])
def test_stopped_at_any_write_nothing_half_written_has_a_final_name(
    folder: Path, faults: Faults, partition: str
) -> None:
    """And the same plan goes on: what had its name is not written again, and all is as an undisturbed run makes it."""
    source = reshard.open(folder / "src", strategy=SOURCE)
    plan = reshard.plan(source, TARGET)
    seen = Watched(faults)
    plan.run(folder / "undisturbed", partition=partition)
    expected, count = tree(folder / "undisturbed"), len(seen.written)
    assert count > 60
    for number in range(0, count, 7 if partition == "tensor" else 3):
        out = folder / f"out{number}"
        with stopping(faults, number), pytest.raises(StoppedError):
            plan.run(out, partition=partition, threads=1)
        finished = {path: content for path, content in tree(out).items() if not path.endswith(PARTIAL)}
        assert finished.items() <= expected.items()
        seen.written.clear()
        plan.run(out, partition=partition)
        assert tree(out) == expected
        again = {str(Path(path).relative_to(out)) for path, _, _ in seen.written}
        assert again.isdisjoint(finished)


def stopping(faults: Faults, number: int) -> AbstractContextManager[None]:
    """Have a write fail, and all that come after it."""
    return faults.broken(number, raising(StoppedError()), "write_at", after=True)


@pytest.mark.usefixtures("small")
def test_stopped_at_any_write_a_store_has_no_group(folder: Path, faults: Faults) -> None:
    plan = reshard.plan(reshard.open(folder / "src", strategy=SOURCE), files=ZarrGroup(500))
    seen = Watched(faults)
    plan.run(folder / "undisturbed.zarr")
    expected, count = tree(folder / "undisturbed.zarr"), len(seen.written)
    for number in range(0, count, 5):
        out = folder / f"out{number}.zarr"
        with stopping(faults, number), pytest.raises(StoppedError):
            plan.run(out, threads=1)
        assert not (out / "zarr.json").exists()
        assert call("inspect", out).exit_code == 4
        plan.run(out)
        assert tree(out) == expected


def start(folder: Path, out: str, *more: str) -> subprocess.Popen[str]:
    """Begin the command in a process of its own, with writes that take their time."""
    code = """
import sys, time
from reshard.plan import budget
from faulty import Faults, MonkeyPatch, install
budget.BAND_BYTES, budget.TASK_BYTES = 128, 512
faults = Faults()
faults.every(lambda call: time.sleep(0.001), "write_at")
install(faults, MonkeyPatch())
from reshard.cli.main import main
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", IMPORTED + code, *words(folder, out, *more)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_processes_write_other_ranks_into_one_directory_at_the_same_time(folder: Path) -> None:
    done(*words(folder, "undisturbed"))
    running = [start(folder, "out", f"--ranks={rank}") for rank in range(3)]
    for process in running:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert tree(folder / "out") == tree(folder / "undisturbed")
    assert "nothing is left to do" in call(*words(folder, "out")).output


def test_processes_that_write_the_same_files_are_kept_apart(folder: Path) -> None:
    done(*words(folder, "undisturbed"))
    running = [start(folder, "out") for _ in range(3)]
    ended = []
    for process in running:
        _, said = process.communicate(timeout=60)
        ended.append(process.returncode)
        assert process.returncode in {0, 6}, said
        assert process.returncode == 0 or "another run writes" in said
    assert 0 in ended
    assert tree(folder / "out") == tree(folder / "undisturbed")


def test_the_key_of_encrypted_files_is_in_no_file_that_is_written(tmp_path: Path, faults: Faults) -> None:
    """Neither in the plan, nor in the ledger of a run that was stopped or is done, nor in a manifest or a report.

    Nor in what a cluster shows of the graph, nor in anything that a command says or writes, whatever goes wrong.
    """
    pytest.importorskip("cryptography")
    key, target_key = b"0123456789ABCDEF", b"a key of thirty-two bytes of text"[:32]
    cipher, target_cipher = reshard.Cipher("AES-GCM", key), reshard.Cipher("AES-CBC", target_key)
    for path in write_ranks(tmp_path / "src", FULL, SOURCE, "ckpt").rglob("*.ckpt"):
        path.write_bytes(b"".join(cipher.encrypt([path.read_bytes()])))
    source = reshard.open(tmp_path / "src", strategy=SOURCE, cipher=cipher)
    made = tmp_path / "made"
    made.mkdir()
    plan = reshard.plan(source, TARGET)
    plan.save(made / "plan.json")
    encrypting = reshard.plan(source, TARGET, format="ckpt", target_cipher=target_cipher)
    encrypting.save(made / "encrypting.json")
    with stopping(faults, 5), pytest.raises(StoppedError):
        encrypting.run(made / "encrypted and stopped", threads=1)
    written = encrypting.run(made / "encrypted")
    said = commands_with_keys(tmp_path, made, key, target_key)
    with stopping(faults, 5), pytest.raises(StoppedError):
        plan.run(made / "stopped", threads=1)
    report = plan.run(made / "out")
    report.write_manifest(made / "manifest.json")
    source.to_zarr(made / "store.zarr")
    spelled = [
        text.encode() if isinstance(text, str) else text
        for one in (key, target_key)
        for text in (one, one.hex(), one.hex().upper(), base64.b64encode(one), repr(one)[2:-1], str(list(one))[1:-1])
    ]
    files = [path for path in made.rglob("*") if path.is_file()]
    assert any(".reshard" in path.parts for path in files)
    for path in files:
        content = path.read_bytes()
        assert not any(text in content for text in spelled), path
    graph = dict(encrypting.graph(made / "never").dask)
    told = (
        f"{plan!r} {report!r} {source!r} {cipher!r} {encrypting!r} {encrypting._record.request!r} {written!r} {graph!r}"
    )
    told += f"{encrypting._repr_html_()} {written._repr_html_()} {encrypting.picture()._repr_html_()} {said}"
    assert "Cipher" in told
    assert len(said) > 10_000
    told = told.encode()
    assert not any(text in told for text in spelled)


def commands_with_keys(tmp_path: Path, made: Path, key: bytes, target_key: bytes) -> str:
    """Type commands with keys that are right, wrong and no keys; return all that they say."""
    reshard.write_strategy(SOURCE, tmp_path / "source.ckpt")
    reshard.write_strategy(TARGET, tmp_path / "target.ckpt")
    keys = {"right": key, "other": target_key, "longer": key.hex().encode() + target_key.hex().encode()}
    for name, content in keys.items():
        (tmp_path / name).write_bytes(content)
    right, other = ("--key-file", tmp_path / "right"), ("--target-key-file", tmp_path / "other")
    strategies = ["--source-strategy", tmp_path / "source.ckpt", "--target-strategy", tmp_path / "target.ckpt"]
    typed = ["transform", tmp_path / "src", made / "typed", *strategies, *right, *other]
    found = ""
    for command, code in (
        (["plan", *typed[1:], "-o", made / "typed.json", "--json"], 2),  # a plan file takes no target of elsewhere
        (["plan", *typed[1:2], *typed[3:], "-o", made / "typed.json", "--json"], 0),
        ([*typed, "--dry-run"], 0),
        ([*typed, "--json"], 0),
        (["verify", made / "typed", *right, *other, "--json"], 0),
        (["inspect", made / "typed", "--key-file", tmp_path / "other"], 0),
        (["inspect", made / "typed", "--key-file", tmp_path / "right"], 4),
        (["inspect", made / "typed", "--key-file", tmp_path / "longer"], 2),
        (["run", made / "typed.json", made / "run", *right, *other, "--json"], 0),
        (["run", made / "typed.json", made / "run", *right], 2),
        (["transform", *typed[1:], "--encryption", "SM4-CBC"], 2),
        ([*typed[:-2], "--target-key-file", tmp_path / "right"], 6),
    ):
        result = call(*command, "--debug")
        assert result.exit_code == code, result.output
        found += result.stdout + result.stderr
    return found


@pytest.mark.parametrize("shape", [(4096, 4096), (3, 1 << 23), (5000, 7, 1000), (1 << 24,), (2, 3, 1 << 21)])
@pytest.mark.parametrize("chunk_bytes", [None, 16 << 20])
def test_compressed_chunks_are_4_mib_at_most(shape: tuple[int, ...], chunk_bytes: int | None) -> None:
    array = ZarrGroup(chunk_bytes, compression="zstd").array(shape, BY_NAME["float32"], [Block.whole(shape)])
    assert prod(array.chunk) * 4 <= (chunk_bytes or 4 << 20)


REFUSED = {
    "a missing rank": "rank 3",
    "a header that contradicts the strategy": "'w'",
    "mixed steps": "step",
    "split but not listed": "no strategy lists it",
    "listed but whole": "integrated_save",
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_refused_is_refused_by_every_command(tmp_path: Path, fault: str) -> None:
    """By `transform`, `unify` in each form, `plan` and `inspect`; nothing is written."""
    full, strategy = dict(FULL), SOURCE
    if fault == "listed but whole":
        full = {name: FULL[name] for name in ("w", "h")}
    if fault == "split but not listed":
        strategy = Strategy.of({name: placed[0].layout for name, placed in SOURCE.tensors.items() if name != "c"})
    root = write_ranks(tmp_path / "src", full, SOURCE)
    if fault == "a missing rank":
        (root / "rank_3/checkpoint_3.safetensors").unlink()
    elif fault == "a header that contradicts the strategy":
        other = {**blocks(full, SOURCE, 2), "w": full["w"][:6]}  # ranks 0, 1 and 3 have 12 rows
        write_file(root / "rank_2/checkpoint_2.safetensors", other)
    elif fault == "mixed steps":
        for rank in range(4):
            path = root / f"rank_{rank}/checkpoint_{rank}.safetensors"
            path.rename(path.with_stem(f"net-{1 + rank // 2}_10"))
    elif fault == "listed but whole":
        for rank in range(4):
            write_file(root / f"rank_{rank}/checkpoint_{rank}.safetensors", full)
        strategy = Strategy.of({name: SOURCE.tensors[name][0].layout for name in full})
    reshard.write_strategy(strategy, tmp_path / "source.ckpt")
    source = [tmp_path / "src", f"--source-strategy={tmp_path / 'source.ckpt'}"]
    for command in (
        ["transform", *source, tmp_path / "out"],
        ["unify", *source, tmp_path / "out"],
        ["unify", *source, tmp_path / "out", "--style=huggingface"],
        ["unify", *source, tmp_path / "out", "--format=zarr"],
        ["plan", *source, "-o", tmp_path / "out"],
        ["inspect", *source],
    ):
        result = call(*command)
        assert result.exit_code == 4, (command, result.output)
        assert REFUSED[fault] in result.stderr or fault == "mixed steps"
        assert not (tmp_path / "out").exists()


def test_exit_codes_are_those_of_the_readme(folder: Path) -> None:
    source = f"--source-strategy={folder / 'source.ckpt'}"
    target = f"--target-strategy={folder / 'target.ckpt'}"
    assert call(*words(folder, "out")).exit_code == 0
    assert call(*words(folder, "new", "--ranks=7")).exit_code == 2
    assert call(*words(folder, "new", "--no-such-option")).exit_code == 2
    verify = ["verify", folder / "out", target, "--against", folder / "src", source]
    assert call(*verify).exit_code == 0
    path = folder / "out/rank_1/checkpoint_1.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert call(*verify).exit_code == 3
    assert call("strategy", "diff", folder / "source.ckpt", folder / "target.ckpt").exit_code == 3
    path.write_bytes(content[:-1])
    assert call(*verify).exit_code == 4
    (folder / "cut.ckpt").write_bytes((folder / "target.ckpt").read_bytes()[:-3])
    assert call("strategy", "show", folder / "cut.ckpt").exit_code == 4
    assert call(*words(folder, "new", "--memory=1MB")).exit_code == 5
    (folder / "somebody/rank_0").mkdir(parents=True)
    (folder / "somebody/rank_0/checkpoint_0.safetensors").write_bytes(b"theirs")
    assert call(*words(folder, "somebody")).exit_code == 6
    assert done("unify", folder / "src", folder / "store.zarr", source, "--format=zarr").exit_code == 0
    assert call("unify", folder / "src", folder / "store.zarr", source, "--format=zarr").exit_code == 6
    assert (folder / "somebody/rank_0/checkpoint_0.safetensors").read_bytes() == b"theirs"
    assert not (folder / "new").exists()

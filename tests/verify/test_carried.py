"""Verifying a checkpoint alone: by the checksums that its files carry, and by replicas."""

from __future__ import annotations

import json
import shutil
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, write_file, write_ranks
from commands import call, done
from dcp_files import item, record_places, without_sums, write_torch, zip_records
from measure import RESHARD, measured
from refusals import failed, refused
from remotes import put
from samples import sampled, slow
from saves_files import tensor, write_save

import reshard
import reshard.mindspore as ms
from reshard import Layout, Strategy
from reshard.errors import UsageError
from reshard.kits.ckpt import Trailer
from reshard.kits.torch.archive import Archives, ZipPart

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcp_files import Box
    from remotes import Requests


CASES = [
    "files", "fsdp2_bf16", "fsdp2_tp2d", "fsdp2_uneven", "hsdp", "kinds", "mcore_flat", "mcore_layers_apart",
    "mcore_moe_ep2", "mcore_tp2_pp2", "moe", "pp_tp", "rank_local", "tp",
]  # fmt: skip
FULL = numbers({"w": (6, 4), "b": (5,), "large": (300, 250)})
WHOLE: dict[str, Box] = {name: ((0,) * value.ndim, value.shape) for name, value in FULL.items()}


@pytest.fixture
def case(mindspore_data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a case, to be spoilt; returns its directory."""
    return lambda name: shutil.copytree(mindspore_data / "dcp" / name / "checkpoint", tmp_path / name)


def items_of(root: Path) -> list[tuple[Path, ZipPart]]:
    """Every item of a checkpoint, and its file."""
    return [
        (root / file.path, part)
        for file in reshard.open(root)._record.files
        if isinstance(file.index.sums, Archives)
        for part in file.index.sums.parts
    ]


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("name", CASES)
def test_every_byte_of_real_ones_is_under_a_checksum(mindspore_data: Path, name: str) -> None:
    root = mindspore_data / "dcp" / name / "checkpoint"
    found = reshard.verify(root)
    assert found.equal
    files = [path.stat().st_size for path in root.glob("*.distcp")]
    assert (found.files, found.bytes_read) == (len(files), sum(files))
    *beside, unchecked = found.unchecked
    assert unchecked.endswith("which carries no checksum of itself")
    assert beside == (["common.pt, metadata.json beside the tensors"] if name.startswith("mcore") else [])
    shown = done("verify", root).stdout
    assert "complete and valid; its contents have the checksums that its files carry" in shown
    assert str(found) in repr(found)
    assert "checksums" in found._repr_html_()


@pytest.mark.parametrize("name", sampled([(name,) for name in CASES], 2))
def test_any_bit_of_any_item_is_seen_and_its_name_said(case: Callable[[str], Path], name: str) -> None:
    """In the contents and in how they are rebuilt; of tensors and of objects."""
    root = case(name)
    random = Random(name)  # noqa: S311 -- an example
    every = items_of(root)
    for path, part in random.sample(every, min(8, len(every))):
        places = record_places(path.read_bytes()[part.begin :][: part.nbytes])
        at = part.begin + random.choice(places)
        bit = random.randrange(8)
        flip(path, at, bit)
        result = call("verify", root)
        assert result.exit_code in {3, 4}, (part, at, bit)
        said = result.stdout + result.stderr
        assert part.name in said, (part, at, bit, said)
        if result.exit_code == 3:
            assert path.name in said
            assert "differs from what it carries of itself (checksums, replicas): 1 of " in result.stdout
        flip(path, at, bit)
    assert reshard.verify(root).equal


def test_what_nothing_names_is_said(case: Callable[[str], Path]) -> None:
    """Files of another save, and bytes behind the items: neither is read by anybody, and both are there."""
    root = case("fsdp2_bf16")
    shutil.copy(root / "__1_0.distcp", root / "__9_0.distcp")
    (root / ".metadata.tmp").write_bytes(b"")
    result = done("verify", root)
    assert "warning: .metadata does not name __9_0.distcp, which is not read" in result.stderr
    assert "warning: .metadata.tmp is there: saving another checkpoint here was interrupted" in result.stderr
    assert json.loads(done("verify", root, "--json").stdout)["warnings"]
    with (root / "__1_0.distcp").open("ab") as file:
        file.write(bytes(77))
    assert "not compared: 77 B of the files, which have no checksums" in done("verify", root, "-v").stdout


def test_boxes_that_lack_and_overlap(tmp_path: Path) -> None:
    w = FULL["w"]
    halves: list[tuple[str, Box, bytes]] = [
        ("w", ((0, 0), (3, 4)), item(w[:3])), ("w", ((3, 0), (3, 4)), item(w[3:])), ("b", WHOLE["b"], item(FULL["b"])),
    ]  # fmt: skip
    assert reshard.verify(write_torch(tmp_path / "a", FULL, {0: halves})).equal
    lacking = write_torch(tmp_path / "b", FULL, {0: halves[1:]})
    failed(4, "unreadable-tensor", "verify", lacking, places=("tensor 'w'", "[6, 4]", "12 of 24"))
    over: tuple[str, Box, bytes] = ("w", ((2, 0), (3, 4)), item(w[2:5]))
    twice = write_torch(tmp_path / "c", FULL, {0: halves, 1: [over]})
    failed(4, "unreadable-tensor", "verify", twice, places=("tensor 'w'", "[0:3, 0:4]", "[2:5, 0:4]"))


def test_replicas_are_compared_byte_by_byte(tmp_path: Path) -> None:
    """Each has its own checksum right, and they differ: of two steps of a training."""
    large = FULL["large"].copy()
    large[299, 7] += 1
    ranks: dict[int, list[tuple[str, Box, bytes]]] = {
        rank: [("large", WHOLE["large"], item(FULL["large"])), ("b", ((0,), (5,)), item(FULL["b"]))]
        for rank in range(3)
    }
    same = reshard.verify(write_torch(tmp_path / "same", FULL, ranks))
    assert same.equal
    items = sum(len(content) for some in ranks.values() for _, _, content in some)
    assert same.bytes_read == items + 3 * (FULL["large"].nbytes + FULL["b"].nbytes)  # each copy once
    ranks[2][0] = ("large", WHOLE["large"], item(large))
    root = write_torch(tmp_path / "other", FULL, ranks)
    found = reshard.verify(root)
    (one,) = found.differences
    assert (one.kind, one.name, one.rank, one.count, one.index) == ("values", "large", 2, 1, (299, 7))
    assert one.path == str(root / "__2_0.distcp")
    assert one.reference == str(root / "__0_0.distcp")
    result = call("verify", root)
    assert result.exit_code == 3
    assert "1 of 75,000 elements" in result.stdout
    turned = item(FULL["w"], strides=(1, 6), storage=np.ascontiguousarray(FULL["w"].T).reshape(-1))
    alike = {0: [("w", WHOLE["w"], turned)], 1: [("w", WHOLE["w"], item(FULL["w"]))]}  # of other checksums, too
    assert reshard.verify(write_torch(tmp_path / "turned", FULL, alike)).equal


def test_items_without_sums_are_not_others(tmp_path: Path) -> None:
    made = [(name, WHOLE[name], without_sums(item(FULL[name]))) for name in FULL]
    found = reshard.verify(write_torch(tmp_path / "bare", FULL, {0: made}))
    assert found.equal
    assert found.bytes_read == 0
    assert found.unchecked[:2] == (
        "contents",
        "contents of w, b, large, which were saved without checksums",
    )
    assert "contents were not read" in done("verify", tmp_path / "bare").stdout
    made[0] = ("w", WHOLE["w"], item(FULL["w"]))
    root = write_torch(tmp_path / "some", FULL, {0: made})
    found = reshard.verify(root)
    assert found.bytes_read == len(made[0][2])
    rest = sum(len(one) for _, _, one in made[1:])
    assert found.unchecked[0] == f"{rest / 1000:.1f} kB of the files, which have no checksums"
    path, part = items_of(root)[0]
    flip(path, part.begin + part.nbytes // 2)
    assert not reshard.verify(root).equal


def test_files_of_whole_state_dicts(mindspore_data: Path, tmp_path: Path) -> None:
    """As each rank saved its own: of any bit that is another it is said where, or the file is not opened."""
    root = shutil.copytree(mindspore_data / "dcp" / "verl_like" / "checkpoint", tmp_path / "src")
    paths = sorted(root.iterdir())
    sizes = [path.stat().st_size for path in paths]
    found = reshard.verify(root)
    assert (found.equal, found.files, found.unchecked) == (True, len(paths), ())
    assert found.bytes_read >= sum(sizes)  # and replicas, once more
    random = Random(7)  # noqa: S311 -- an example
    seen = set()
    for number in range(40):
        path = paths[number % len(paths)]
        at, bit = random.choice(record_places(path.read_bytes())), random.randrange(8)
        flip(path, at, bit)
        result = call("verify", root)
        seen.add(result.exit_code)
        assert result.exit_code in {3, 4}, (path, at, bit)
        assert result.exit_code == 4 or path.name in result.stdout
        flip(path, at, bit)
    assert seen == {3, 4}
    content = paths[1].read_bytes()
    (record,) = (record for name, record in zip_records(content).items() if name.endswith("/data/0"))
    flip(paths[1], content.index(record, content.index(b"/data/0")))
    (one,) = reshard.verify(root).differences
    assert (one.kind, one.rank, one.path) == ("checksum", 1, str(paths[1]))
    assert one.text.startswith("data/0 in the file has ")


def test_files_of_state_dicts_without_checksums(tmp_path: Path) -> None:
    path = write_save(tmp_path / "model.pt", {name: tensor(value) for name, value in FULL.items()})
    assert reshard.verify(path).bytes_read == path.stat().st_size
    path.write_bytes(without_sums(path.read_bytes()))
    found = reshard.verify(path)
    assert (found.equal, found.bytes_read) == (True, 0)
    assert found.unchecked[1] == "contents of model.pt, which were saved without checksums"


def test_files_without_checksums_are_not_read(mindspore_data: Path) -> None:
    for root in (
        mindspore_data / "dcp" / "safetensors_format" / "checkpoint",
        mindspore_data / "checkpoint2" / "dcp_fsdp2_tp2" / "global_step_4",  # hyper-parallel's
    ):
        found = reshard.verify(root)
        assert (found.equal, found.bytes_read, found.unchecked[0]) == (True, 0, "contents")
        with refused(UsageError, "needs-source", "client=..."):
            reshard.verify(root, client=object())


def test_mindspores_own_crc(mindspore_data: Path, tmp_path: Path) -> None:
    """Of a file that MindSpore wrote, and inside the encryption of one."""
    path = tmp_path / "crc.ckpt"
    shutil.copy(mindspore_data / "encrypted" / "crc.ckpt", path)
    key = b"0123456789abcdef"
    ms.save_checkpoint(
        ms.load_checkpoint(str(path)), str(tmp_path / "encrypted.ckpt"), crc_check=True, enc_key=key, enc_mode="AES-CBC"
    )
    for file, cipher in ((path, None), (tmp_path / "encrypted.ckpt", reshard.Cipher("AES-CBC", key))):
        checkpoint = reshard.open(file, cipher=cipher, contents=False)
        assert isinstance(checkpoint._record.files[0].index.sums, Trailer)
        assert reshard.verify(checkpoint).equal
        assert reshard.verify(checkpoint).bytes_read >= path.stat().st_size
        largest = max(checkpoint._record.files[0].index.entries.values(), key=lambda entry: entry.nbytes)
        flip(file, largest.runs[0][0] + largest.nbytes // 2)
        (one,) = reshard.verify(checkpoint).differences
        assert (one.kind, one.name, one.path) == ("checksum", None, str(file))


@pytest.mark.parametrize("name", ["fsdp2_tp2d", slow("moe")])
def test_against_anything(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    """Another mesh's checkpoint, a Hugging Face set, rank files, a zarr store: equal, and not with one bit other."""
    root = mindspore_data / "dcp" / name / "checkpoint"
    source = reshard.open(root)
    rows = Strategy.of({
        key: Layout.of([2], [-1 if tensor.spec.shape[0] % 2 else 0, *[-1] * (len(tensor.spec.shape) - 1)])
        for key, tensor in source.tensors.items() if tensor.spec.shape
    })  # fmt: skip
    done("convert", root, tmp_path / "dcp", "--to", "dcp")
    reshard.plan(source, to="hf").run(tmp_path / "hf", fsync=False)
    reshard.plan(source, rows).run(tmp_path / "rows", fsync=False)
    source.to_zarr(tmp_path / "zarr", fsync=False)
    copy = shutil.copytree(root, tmp_path / "copy")
    victim = max(source.tensors, key=lambda key: source.tensors[key].spec.nbytes)
    number, ((begin, _), *_), _ = source.tensors[victim].shards[-1].replicas[0]
    for against, strategy in ((root, None), ("dcp", None), ("hf", None), ("rows", rows), ("zarr", None)):
        given = tmp_path / against
        found = reshard.verify(copy, against=given, source_strategy=strategy)
        assert (found.equal, found.tensors) == (True, len(source)), against
        if strategy is None:
            assert done("verify", given, "--against", copy).exit_code == 0
        flip(copy / source._record.files[number].path.rpartition("/")[2], begin)
        (one,) = reshard.verify(copy, against=given, source_strategy=strategy).differences
        assert (one.kind, one.name, one.count) == ("values", victim, 1)
        flip(copy / source._record.files[number].path.rpartition("/")[2], begin)


def test_at_a_url_items_are_asked_for_together(root: str, tmp_path: Path, asked: Requests) -> None:
    """Sixty items of two files, and two large ones: not one by one."""
    names = {f"layers.{i}": numbers({"w": (6, 4)})["w"] + i for i in range(60)}
    ranks = {
        rank: [
            *((name, WHOLE["w"], item(names[name])) for name in list(names)[rank::2]),
            ("large", ((150 * rank, 0), (150, 250)), item(FULL["large"][150 * rank : 150 * rank + 150])),
        ]
        for rank in range(2)
    }
    put(write_torch(tmp_path / "src", {**names, **FULL}, ranks), root)
    checkpoint = reshard.open(root, contents=False)
    asked.ranges.clear()
    assert reshard.verify(checkpoint).equal
    assert (
        0 < len(asked.ranges) <= 2 * 5
    )  # of each file the items, the end and the headers of the large one, its contents


@pytest.mark.slow
def test_memory_is_that_of_bands(tmp_path: Path) -> None:
    large = np.zeros((1 << 20, 64), np.float32)
    root = write_torch(tmp_path, {"w": large}, {0: [("w", ((0, 0), large.shape), item(large))]})
    found = measured(*RESHARD, "verify", str(root), "--threads", "2")
    assert found.code == 0
    assert found.peak < 80 << 20 < large.nbytes


LARGE = numbers({"w": (64, 1024), "v": (32, 8)}) | {"global_step": np.array([7], np.int32)}
ROWS = Strategy.of({"w": Layout.of([2, 2], [0, -1]), "v": Layout.of([2, 2], [-1, -1])})
"""On each half of four ranks the same; a block of `w` is too large to be sampled whole."""


def of_step(place: Path, step: int) -> Path:
    """Write a Checkpoint 2.0 on four ranks, of some step."""
    full = {name: value + value.dtype.type(step) for name, value in LARGE.items()}
    source = reshard.open(write_file(place.parent / f"step_{step}.safetensors", full))
    reshard.plan(source, ROWS, to="checkpoint2", target_step=7).run(place, fsync=False)
    shutil.rmtree(place / ".reshard")  # as MindSpore Transformers would have written it
    return place / "iteration_00000007"


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A Checkpoint 2.0 whose rank 3 has files of another step."""
    place, other = of_step(tmp_path / "run", 0), of_step(tmp_path / "other", 1)
    done("verify", place.parent)
    for path in other.glob("*-0000003-*.safetensors"):
        shutil.copy(path, place)
    return place


def differences(*words: Any) -> list[dict[str, Any]]:
    result = call("verify", *words, "--json")
    assert result.exit_code == 3, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["differences"]
    return found


def test_of_a_checkpoint_2(torn: Path, tmp_path: Path) -> None:
    for place in (torn, torn.parent):
        found = {one["tensor"]: one for one in differences(place)}
        assert set(found) == set(LARGE)
        assert all((one["kind"], one["rank"]) == ("values", 3) for one in found.values())
        assert all("-0000003-" in one["path"] for one in found.values())
        assert all("rank 3" in one["text"] for one in found.values())
    shown = call("verify", torn)
    assert "differs between rank 1 and rank 3" in shown.stdout
    assert call("convert", "--to=mindspore", torn, tmp_path / "u").exit_code == 4
    assert not reshard.verify(torn).equal


def test_of_a_step_alone(torn: Path) -> None:
    """A rank whose weights are right and whose count of steps is not."""
    model = "checkpoint-model-0000003-0000004.safetensors"
    shutil.copy(torn / model.replace("0000003-", "0000001-"), torn / model)
    assert [one["tensor"] for one in differences(torn)] == ["global_step"]


def test_of_ranks_with_a_strategy(tmp_path: Path) -> None:
    root = write_ranks(tmp_path / "ranks", {name: LARGE[name] for name in ("w", "v")}, ROWS)
    reshard.write_strategy(ROWS, tmp_path / "rows.ckpt")
    words = [root, "--target-strategy", tmp_path / "rows.ckpt"]
    assert "but for samples of 5 of 5 replicas" in done("verify", *words, "-v").stdout
    later = {"w": LARGE["w"][:32] + np.float32(1), "v": LARGE["v"]}
    write_file(next((root / "rank_2").iterdir()), later)
    (one,) = differences(*words)
    assert (one["tensor"], one["rank"], one["block"]) == ("w", 2, {"start": [0, 0], "stop": [32, 1024]})


def test_values_of_each_rank_s_own_are_no_difference(tmp_path: Path) -> None:
    for rank in range(2):
        own = {"w": LARGE["w"], "learning_rate": np.array(rank, np.float32)}
        write_file(tmp_path / f"ranks/rank_{rank}/a.safetensors", own)
    reshard.write_strategy(Strategy.of({"w": Layout.of([2], [-1, -1])}), tmp_path / "s.ckpt")
    done("verify", tmp_path / "ranks", "--target-strategy", tmp_path / "s.ckpt")

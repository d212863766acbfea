"""Train a small model under DeepSpeed on CPU processes; run by a Python that has DeepSpeed.

    python deepspeed_training.py jobs.json

Each job is a dict: `config` (of DeepSpeed), `ranks`, `model` (options of `Net`), `steps`, and maybe `load` (a directory
and a tag), `save` (a directory), `convert` (save's tag becomes a Universal Checkpoint there, by DeepSpeed's converter),
and `result`, an `.npz` of losses, weights and states. DeepSpeed is imported once, and each job's ranks are forked.

A job with `folder` loads the states of parameters as each of `parts` tensor-parallel ranks does, given the `shapes` of
their parts.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # each rank imports it, in 5 seconds, unless it is there
import numpy as np
import torch
from deepspeed.checkpoint import ds_to_universal, universal_checkpoint
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, which takes a compiler and time

VOCABULARY, HIDDEN, LENGTH, BATCH = 23, 10, 7, 6


class Net(nn.Module):
    """A net of odd sizes, with buffers, maybe with tied and with frozen parameters."""

    def __init__(self, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.up = nn.Linear(HIDDEN, 17)
        self.norm = nn.LayerNorm(17)
        self.down = nn.Linear(17, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.register_buffer("positions", torch.arange(LENGTH))
        self.register_buffer("running", torch.full((5,), 0.25, dtype=torch.float32))
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.up.weight.requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(self.norm(torch.tanh(self.up(x))))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(1, -1).flatten())


def groups_of(net: nn.Module, *, count: int, decay: float) -> list[dict[str, Any]]:
    """One group of parameters, or two: matrices, and others with another decay."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if count == 1:
        return [{"params": trained, "weight_decay": 0.1}]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    rest = [parameter for parameter in trained if parameter.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": decay}]


def tokens_of(step: int, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of the batch of a step."""
    every = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    return every[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]


def loaded_states(engine: Any) -> dict[str, Any]:
    """The masters and moments of all trained parameters, which the ranks gather together."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"loaded.fp32.{name}"] = safe_get_full_fp32_param(parameter)
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"loaded.{kind}.{name}"] = safe_get_full_optimizer_state(parameter, kind)
    return found


def flat_states(engine: Any, rank: int, ranks: int) -> dict[str, Any]:
    """The flat buffers of the optimizers of all ranks; empty on other ranks than the first."""
    own = {}
    for number, (master, state) in enumerate(engine.optimizer.optimizer.state.items()):
        for kind, value in {"fp32": master, **state}.items():
            own[f"flat.{rank}.{number}.{kind}"] = plain(value)
    every: list[Any] = [None] * ranks
    torch.distributed.gather_object(own, every if rank == 0 else None)
    return {name: value for each in every if each for name, value in each.items()}


def weights(engine: Any, found: dict[str, Any]) -> None:
    """Add the weights and buffers."""
    net = engine.module
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        for name, tensor in net.state_dict().items():
            found[name] = tensor.detach().clone()


def work(rank: int, job: dict[str, Any], meeting: str) -> None:
    """Do a job as one of its ranks."""
    torch.set_num_threads(1)
    ranks = job["ranks"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    deepspeed.init_distributed("gloo", dist_init_required=False)
    torch.manual_seed(7)
    options = dict(job["model"])
    groups, decay = options.pop("groups", 2), options.pop("decay", 0.0)
    net = Net(**options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(-0.5, 0.5)
    optimizer = torch.optim.AdamW(groups_of(net, count=groups, decay=decay), lr=0.01)
    config = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // ranks, **job["config"]}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    found: dict[str, Any] = {"client": ""}
    if "load" in job:
        path, client = engine.load_checkpoint(job["load"], tag=job.get("tag"))
        assert path is not None
        found["client"] = json.dumps({key: client[key] for key in ("note", "iteration") if key in client})
        found["loaded_lr"] = [group["lr"] for group in engine.optimizer.param_groups]
        found |= loaded_states(engine)
    losses = []
    for step in range(engine.global_steps, engine.global_steps + job["steps"]):
        loss = engine(tokens_of(step, rank, ranks))
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / ranks)
        if "save" in job and step + 1 == job["save_at"]:
            engine.save_checkpoint(job["save"], client_state={"note": "a client's own", "iteration": step + 1})
    found["losses"] = losses
    found["global_steps"], found["skipped_steps"] = engine.global_steps, engine.skipped_steps
    found["scheduler"] = engine.lr_scheduler.last_batch_iteration if engine.lr_scheduler else -1
    found["scale"] = getattr(engine.optimizer, "cur_scale", 0)
    for key, kind in (("lr", "lr"), ("decay", "weight_decay")):
        found[key] = [group[kind] for group in engine.optimizer.param_groups]
    found |= flat_states(engine, rank, ranks)
    weights(engine, found)
    if rank == 0 and "result" in job:
        np.savez(job["result"], **{name: plain(value) for name, value in found.items()})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def plain(value: Any) -> Any:
    """An array; of bfloat16, its bits."""
    if not torch.is_tensor(value):
        return np.array(value)
    return (value.detach().view(torch.int16) if value.dtype is torch.bfloat16 else value.detach()).cpu().numpy()


def load_parts(job: dict[str, Any]) -> None:
    """Load states as each tensor-parallel rank does."""
    found = {}
    for part in range(job["parts"]):
        for name, shape in job["shapes"].items():
            parameter = nn.Parameter(torch.zeros(shape))
            master = torch.zeros(parameter.numel())
            address = fragment_address(numel=parameter.numel(), start=0)
            parameter._hp_mapping = SimpleNamespace(lp_fragment_address=address, get_hp_fragment=lambda: master)  # noqa: B023
            universal_checkpoint.load_hp_checkpoint_state(parameter, f"{job['folder']}/{name}", part, job["parts"])
            states = {"fp32": master, **parameter._hp_mapping.optim_fragment}
            found |= {f"{part}.{kind}.{name}": plain(state.reshape(shape)) for kind, state in states.items()}
    np.savez(job["result"], **found)


def convert(source: str, target: str) -> None:
    """Convert with DeepSpeed's own program."""
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(SimpleNamespace(
            input_folder=source, output_folder=target, inject_missing_state=True, **options
        ))  # fmt: skip


def main() -> None:
    logging.disable(logging.WARNING)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        if "folder" in job:
            load_parts(job)
            continue
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.start_processes(
                work, (job, f"{directory}/meeting"), nprocs=job["ranks"], start_method="fork"
            )
        if "convert" in job:
            convert(str(Path(job["save"]) / f"global_step{job['save_at']}"), job["convert"])


if __name__ == "__main__":
    main()

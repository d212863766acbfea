"""Loads checkpoints with mindformers' own `load_checkpoint`, and compares every parameter with the whole tensors.

A Python that has mindformers runs it: mindformers_job.py CASE DIRECTORY... CASE is one of tests/data/checkpoint2, whose
model and mesh it says; the checkpoints of the directories are loaded on its mesh and on others. It prints a JSON list:
for each directory and mesh the number of parameters that are right, and the names of others, by rank.

One process plays the ranks in turn. Replaced are rank, group size, barriers and the layouts that a compiler or DTensors
would give; `hyper_parallel`, which mindformers imports and no registry has, is a stand-in of empty classes.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np

MODULES = [
    "utils",
    "checkpoint",
    "sharded_tensor",
    "fully_parallel",
    "reshard",
    "layout_adapter",
    "metadata",
    "broadcast",
]
STATE = {"rank": 0, "size": 1, "layouts": {}}
TARGETS = {
    "graph": [{"axes": {"dp": 1}}, {"axes": {"dp": 1, "tp": 2}}, {"axes": {"dp": 2, "tp": 2}, "opt": -1}],
    "pynative": [{"axes": {"fsdp": 2}}, {"axes": {"fsdp": 4, "tp": 2}}, {"axes": {"fsdp": 2}, "stages": 2}],
}
STATES = ("adam_m", "adam_v", "main_param")


class Empty:
    def __init__(self, *_arguments, **_options):
        pass


class StandIn:
    """What mindformers imports of hyper_parallel."""

    class SkipDTensorDispatch:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return False

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("hyper_parallel") else None
        )

    def create_module(self, spec):  # noqa: ARG002
        return None

    def exec_module(self, module):
        empty = {}
        module.SkipDTensorDispatch = self.SkipDTensorDispatch
        module.get_current_layout = current_layout
        module.__getattr__ = lambda name: (
            None if name.startswith("__") else empty.setdefault(name, type(name, (Empty,), {}))
        )


def current_layout(cell):
    found = {}
    for parameter in cell.get_parameters():
        layout, dtype, shape = STATE["layouts"][STATE["rank"]][parameter.name]
        found[parameter.name] = {"type": dtype, "full_shape": tuple(shape)}
        if layout is not None:
            keys = ("device_matrix", "tensor_map", "alias_name", "rank_list")
            found[parameter.name] |= {key: tuple(layout.to_dict()[key]) for key in keys} | {
                "interleaved_parallel": False
            }
    return {str(STATE["rank"]): found}


def install(pynative):
    values = {
        "get_real_rank": lambda: STATE["rank"],
        "get_real_group_size": lambda: STATE["size"],
        "get_group_size": lambda: STATE["size"],
        "barrier_world": lambda *_a, **_k: None,
        "synchronize": lambda *_a, **_k: None,
        "get_strategy_metadata": lambda _net: STATE["layouts"],
    }
    modules = [importlib.import_module(f"mindformers.checkpoint.{name}") for name in MODULES]
    for module in modules:
        for name, value in values.items():
            if name in vars(module):
                setattr(module, name, value)
    adapter = importlib.import_module("mindformers.checkpoint.layout_adapter")
    adapter.get_current_layout = current_layout
    adapter.LayoutAdapter.is_pynative_mode = staticmethod(lambda: pynative)


def layout_of(meta, target, name, shape, stage):
    """How a tensor of the model lies on a mesh: by its kind, as the cases were made."""
    import mindspore as ms

    axes = target["axes"]
    size = prod(axes.values())
    ranks = list(range(stage * size, (stage + 1) * size))
    columns = any(part in name for part in ("embedding", "linear_qkv", "linear_fc1", "output_layer"))
    rows = any(part in name for part in ("linear_proj", "linear_fc2"))
    if meta["mode"] == "pynative":
        fsdp, tp = axes.get("fsdp", 1), axes.get("tp", 1)
        ep = meta["options"]["ep"]
        if "experts" in name and ep and not size % ep:
            layout = ms.Layout((1, size // ep, ep), ("dp_replicate", "efsdp", "ep"), ranks)
            return layout("ep", "efsdp", "None")
        layout = ms.Layout((1, fsdp, tp), ("dp_replicate", "fsdp", "tp"), ranks)
        rest = ["None"] * (len(shape) - 1)
        if columns or "experts" in name:
            return layout(("tp", "fsdp"), *rest) if columns else layout("fsdp", *rest)
        return layout("fsdp", "tp", *rest[1:]) if rows else layout("fsdp", *rest)
    from mindspore.parallel.strategy import _NetStrategyInfo

    number = {axis: len(axes) - 1 - place for place, axis in enumerate(axes) if axes[axis] > 1}
    dims = [[] for _ in shape]
    tensor, expert = ([number[axis]] if axis in number else [] for axis in ("tp", "ep"))
    if columns:
        dims[0] = tensor
    elif rows:
        dims[1] = tensor
    elif "experts" in name:
        first = name.endswith("weight1")
        dims[0], dims[1] = (expert, tensor) if first else (expert + tensor, [])
    extents = list(axes.values())
    used = prod(extents[len(axes) - 1 - axis] for dim in dims for axis in dim)
    ways = prod(extents[len(axes) - 1 - axis] for axis in dims[0])
    optimizer = target.get("opt", 0)
    if optimizer and (used == size or shape[0] % (ways * (size // used))):
        optimizer = 0
    info = SimpleNamespace(
        dev_matrix=extents, tensor_map=[dim or [-1] for dim in dims], tensor_shape=list(shape), tensor_type="Float32",
        rank_list=ranks, opt_weight_shard_size=optimizer,
    )  # fmt: skip
    return _NetStrategyInfo.__new__(_NetStrategyInfo)._layout_process(info)[0]


def block(layout, rank, shape):
    """The slices of the whole tensor that a rank holds."""
    if layout is None:
        return tuple(slice(0, extent) for extent in shape)
    said = layout.to_dict()
    mesh = said["device_matrix"]
    at = np.unravel_index(list(said["rank_list"]).index(rank), mesh)
    found = []
    for extent, axes in zip(shape, said["tensor_map"], strict=True):
        parts, index = 1, 0
        for axis in axes if isinstance(axes, tuple | list) else (axes,):
            if axis != -1:
                size = mesh[len(mesh) - 1 - axis]
                parts, index = parts * size, index * size + int(at[len(mesh) - 1 - axis])
        assert extent % parts == 0, (shape, said)
        found.append(slice(extent // parts * index, extent // parts * (index + 1)))
    return tuple(found)


def weights_of(meta, full, stage, stages):
    """The weights of a stage: layers in equal parts, what comes before them in the first, the rest in the last."""
    layers = 1 + max(int(name.split(".")[2]) for name in full if name.startswith("decoder.layers."))
    for name, value in full.items():
        if name.split(".")[0] in (*STATES, "global_step"):
            continue
        own = 0 if name.startswith("embedding") else stages - 1
        if name.startswith("decoder.layers."):
            own = int(name.split(".")[2]) * stages // layers
        if own == stage:
            yield name, value.shape, meta["dtypes"][name]


def build(meta, full, target):
    """Return network and optimizer of each rank."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, nn

    class Net(nn.Cell):
        def __init__(self, parts):
            super().__init__()
            for number, (name, (shape, dtype)) in enumerate(parts.items()):
                parameter = Parameter(Tensor(np.zeros(shape, np.float32), getattr(ms, dtype)), name=name)
                self.insert_param_to_cell(f"p{number}", parameter, False)

    pynative = meta["mode"] == "pynative"
    optimizers = importlib.import_module(
        "mindformers.pynative.optimizer.adamw" if pynative else "mindformers.core.optim"
    )
    stages = target.get("stages", 1)
    size = stages * prod(target["axes"].values())
    nets, layouts = [], {}
    for rank in range(size):
        stage = rank * stages // size
        listed, parts = {}, {}
        for other in [stage] if pynative else sorted(range(stages), key=lambda one: one != stage):
            for name, shape, dtype in weights_of(meta, full, other, stages):
                parts[name] = (shape, dtype)
                if other == stage:
                    layout = None if size == 1 else layout_of(meta, target, name, shape, stage)
                    listed[name] = [layout, {"float32": "Float32", "bfloat16": "BFloat16"}[dtype], list(shape)]
                    parts[name] = (tuple(one.stop - one.start for one in block(layout, rank, shape)), dtype)
        net = Net(parts)
        optimizer = None
        if any(name.startswith("adam_m.") for name in full):
            optimizer = optimizers.AdamW(net.trainable_params(), learning_rate=nn.CosineDecayLR(0.0, 1e-3, 100))
            for parameter in optimizer.get_parameters():
                head, _, weight = parameter.name.partition(".")
                if head in STATES and weight in listed:
                    listed[parameter.name] = [listed[weight][0], str(parameter.dtype), listed[weight][2]]
                elif pynative and parameter.name not in listed and head not in STATES:
                    listed[parameter.name] = [None, str(parameter.dtype), list(parameter.shape)]
        nets.append((net, optimizer))
        layouts[rank] = listed
    STATE.update(size=size, layouts=layouts)
    return nets


def read(full, directory, target, nets):
    import mindspore as ms
    from mindformers.checkpoint.checkpoint import load_checkpoint
    from mindspore import Tensor

    right, wrong = 0, []
    layouts = STATE["layouts"]
    for rank, (net, optimizer) in enumerate(nets):
        STATE["rank"] = rank
        every = {one.name: one for cell in (net, optimizer) if cell is not None for one in cell.get_parameters()}
        for one in every.values():
            one.set_data(Tensor(np.zeros(one.shape, np.float32), one.dtype))
        load_checkpoint(str(directory), net, optimizer)
        for name, one in every.items():
            head, _, weight = name.partition(".")
            ours = name in layouts[rank] or (head in STATES and weight in layouts[rank]) or name == "global_step"
            if name not in full or not ours:
                continue
            layout, _, shape = layouts[rank].get(name, [None, None, list(one.shape)])
            value = np.ascontiguousarray((one.float() if one.dtype == ms.bfloat16 else one).asnumpy())
            if one.dtype == ms.bfloat16:
                value = (value.view(np.uint32) >> 16).astype(np.uint16)
            expected = full[name][block(layout, rank, shape)]
            if (value.shape, value.tobytes()) == (expected.shape, expected.tobytes()):
                right += 1
            else:
                wrong.append(f"{rank}:{name}")
    return {"directory": directory.name, "target": target, "right": right, "wrong": wrong}


def main(case, *directories):
    sys.meta_path.append(StandIn())
    meta = json.loads((case / "meta.json").read_text())
    full = dict(np.load(case / "full.npz"))
    import mindspore as ms

    ms.set_device("CPU")
    install(meta["mode"] == "pynative")
    ms.set_context(mode=ms.PYNATIVE_MODE if meta["mode"] == "pynative" else ms.GRAPH_MODE)
    own = {"axes": meta["axes"], "stages": meta["stages"], "opt": meta["options"]["opt"]}
    targets = [own, *TARGETS[meta["mode"]]]
    found = {}
    for target in targets:
        nets = build(meta, full, target)
        found |= {(one, str(target)): read(full, one, target, nets) for one in directories}
    print("RESULT" + json.dumps([found[one, str(target)] for one in directories for target in targets]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""Host memory of loading and of exporting a model whose weights the ranks share.

    python tools/bench/loading.py [--layout 2x1x2] [--zero 3] [--dtype bfloat16] [--layers 16]

Makes a random Qwen2 of about 1 B parameters in a temporary folder (about 4 safetensors files,
written tensor by tensor), starts the ranks of a layout (data x sequence x tensor) on gloo, and
measures on each

loading      from an empty process to a network whose parameters hold this rank's part
optimizer    DeepSpeed's own copies (float32 master weights, flat buffers); with --optimizer only
export       the weights as a Hugging Face checkpoint, written by all ranks

The peak of a phase is the largest anonymous memory (/proc/self/statm, read by a thread every few
milliseconds) in it, beyond that before loading, after all imports. Mapped files are not in it,
since their pages are the system's cache. The bar of loading and export is this rank's own part +
the largest tensor + 300 MB; of a peak during export that rank's optimizer state is taken off, where
there is one. The exit status is 1 where a rank is over the bar or the export differs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from common import Args, Lines, qwen2, run_tool, table, write_config
from launch_ranks import launch, ready
from layouts import layout

SLACK_BYTES = 300 * 10**6
FILE_SHARE = 0.3
"""Largest file, as a share of the model: about 4 files."""
DTYPES = ("bfloat16", "float32")
OPTIONS = {
    "--layout": ("2x1x2", "data x sequence x tensor", layout),
    "--zero": (3, "DeepSpeed ZeRO stage"),
    "--dtype": ("bfloat16", "in memory", DTYPES),
    "--stored": ("", "dtype in the files; default: that in memory", ("", *DTYPES)),
    "--optimizer": (False, "set up the optimizer as well"),
    "--layers": (16, "layers of the model"),
    "--hidden": (2048, "hidden size"),
    "--vocab": (64000, "vocab size"),
}


def make_model(folder: Path, args: Args) -> dict[str, Any]:
    """Write a random model into `folder`, one tensor in memory at a time; returns what it is."""
    import torch

    from megarl.checkpoints.export import INDEX, safetensors_header, split_outputs
    from megarl.parallel.tensor import whole_shapes
    from megarl.settings.training import ModelConfig
    from megarl.trainer.loading import empty_model

    stored = args.stored or args.dtype
    dtype = getattr(torch, stored)
    inner, heads = args.hidden * 43 // 16, (args.hidden // 128, args.hidden // 512)
    sizes = args.vocab, args.hidden, inner, args.layers, *heads
    write_config(folder, qwen2(*sizes, max_position_embeddings=4096, dtype=stored))
    shapes = whole_shapes(empty_model(ModelConfig(path=str(folder))), {})
    dtypes, sizes = dict.fromkeys(shapes, dtype), [math.prod(shape) for shape in shapes.values()]
    file_bytes = int(FILE_SHARE * sum(sizes) * dtype.itemsize)
    outputs, index = split_outputs(folder, shapes, dtypes, file_bytes)
    for output in outputs:
        with output.path.open("wb") as file:
            file.write(safetensors_header(output, dtypes))
            for size in output.owned.sizes.values():
                drawn = torch.empty(size, dtype=dtype).normal_(std=0.02)
                file.write(drawn.view(torch.uint8).numpy().data)
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    itemsize = max(dtype.itemsize, getattr(torch, args.dtype).itemsize)
    return {
        "parameters": sum(sizes),
        "bytes": sum(sizes) * dtype.itemsize,
        "largest_tensor_bytes": max(sizes) * itemsize,
        "files": len(outputs),
        "file_bytes": file_bytes,
    }


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One rank: load, set up the optimizer if asked, export."""
    from peak_memory import Sampled, own_bytes

    from megarl.checkpoints.export import WeightExport
    from megarl.checkpoints.rank_files import RankFiles
    from megarl.parallel.collectives import barrier
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.parallel.reshard.owned import training_owned
    from megarl.parallel.tensor import whole_shapes
    from megarl.settings.training import ModelConfig, TrainingConfig
    from megarl.trainer.build import DTYPES, build_network
    from megarl.trainer.zero import TrainEngine

    training = TrainingConfig(zero_stage=task["zero"], precision=task["dtype"])
    layout = Layout(*task["layout"])
    with ready(600) as device, ProcessMesh(layout, timeout_s=600) as mesh:
        barrier(mesh.world)
        with Sampled(own_bytes) as loading:
            network = build_network(ModelConfig(path=task["model"]), training, mesh, device, seed=0)
        barrier(mesh.world)
        settings = {"total_steps": 1, "trains": task["optimizer"]}
        with Sampled(own_bytes) as optimizer:
            engine = TrainEngine(network, training, mesh, device, **settings)
        own, dtype = engine.owned(), DTYPES[training.precision]
        shapes = whole_shapes(network.model, network.shards)
        owned = training_owned(shapes, network.shards, mesh.layout, training.zero_stage)
        barrier(mesh.world)
        with Sampled(own_bytes) as export:
            weights = WeightExport(owned, shapes, dtype, file_bytes=task["file_bytes"])
            files = RankFiles(Path(task["out"]))
            weights.write(files.folder, own, mesh.world, files)
            files.finish()
        part = sum(values.numel() for values in own.values()) * dtype.itemsize
        engine.destroy()
    state = max(0, optimizer.end - loading.end)
    return {
        "part": part,
        "bar": part + task["largest_tensor_bytes"] + SLACK_BYTES,
        "loading": loading.most - loading.begin,
        "optimizer": optimizer.most - loading.begin,
        "export": export.most - loading.begin - state,
    }


def measure(args: Args) -> dict[str, Any]:
    """All of it, in a temporary folder."""
    from megarl.checkpoints.store import open_whole

    model, out = args.work / "model", args.work / "out"
    model.mkdir()
    out.mkdir()
    about = make_model(model, args)
    task = vars(args) | about | {"model": str(model), "out": str(out)}
    ranks = launch(__file__, task, math.prod(args.layout))
    one, other = open_whole(model), open_whole(out)
    equal = one.shapes == other.shapes and all(
        (one.flat(name).to(other.dtypes[name]) == other.flat(name)).all() for name in one.shapes
    )
    within = all(max(rank["loading"], rank["export"]) <= rank["bar"] for rank in ranks)
    problem = "" if within and equal else f"within the bar: {within}; export equal: {equal}"
    return {"model": about, "ranks": ranks, "problem": problem}


def show(result: dict[str, Any]) -> Lines:
    """As a table, in MB."""
    about = result["model"]
    yield (
        f"{about['parameters']:,} parameters, {about['bytes'] / 1e6:,.0f} MB in {about['files']}"
        f" files, largest tensor {about['largest_tensor_bytes'] / 1e6:,.0f} MB"
    )
    names = ("part", "bar", "loading", "optimizer", "export")
    columns = "; ".join(f"{name} MB={name}*1e-6 ,.0f" for name in names)
    yield from table(result["ranks"], columns)


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show, work)

"""Host memory of loading and of exporting a model whose weights the ranks share.

    python tools/bench/loading.py [--layout 2x1x2] [--zero 3] [--dtype bfloat16] [--layers 16]
    python tools/bench/loading.py --way whole      what loading was before: every rank the model

Makes a random Qwen2 of about 1 B parameters in a temporary folder (about 4 safetensors files,
written tensor by tensor), starts the ranks of a layout (data x sequence x tensor) on gloo, and
measures on each

loading      from an empty process to a network whose parameters hold this rank's part
optimizer    DeepSpeed's own copies (float32 master weights, flat buffers); with --optimizer only
export       the weights as a Hugging Face checkpoint, written by all ranks

The peak of a phase is the largest RssAnon (/proc/self/status, read by a thread every few
milliseconds) in it, beyond RssAnon before loading, after all imports. RssAnon is anonymous memory:
mapped files are not in it, since their pages are the system's cache. The bar of loading and export
is this rank's own part + the largest tensor + 300 MB; of a peak during export that rank's optimizer
state is taken off, where there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch_ranks import answer, launch, rank_task

SLACK_BYTES = 300 * 10**6
FILE_SHARE = 0.3
"""Largest file, as a share of the model: about 4 files."""
EVERY_S = 0.004


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def peak_of(phase: str, found: dict[str, dict[str, float]]) -> Iterator[None]:
    """Put the peak of anonymous memory within the block, and its seconds, into `found[phase]`."""
    highest, done = [anonymous_bytes()], threading.Event()

    def sample() -> None:
        while not done.wait(EVERY_S):
            highest.append(max(highest.pop(), anonymous_bytes()))

    thread, started_at = threading.Thread(target=sample, daemon=True), time.perf_counter()
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found[phase] = {
            "peak_bytes": max(highest[0], anonymous_bytes()),
            "end_bytes": anonymous_bytes(),
            "seconds": time.perf_counter() - started_at,
        }


def make_model(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Write a random model into `folder`, one tensor in memory at a time; returns what it is."""
    import torch
    import transformers

    from megarl.checkpoints.checkpoint_files import INDEX, split_outputs, write_safetensors
    from megarl.parallel.tensor import whole_shapes
    from megarl.trainer.config import ModelConfig
    from megarl.trainer.loading import empty_model

    dtype = getattr(torch, args.stored or args.dtype)
    config = transformers.Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 43 // 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=args.hidden // 512,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
        dtype=args.stored or args.dtype,
    )
    config.save_pretrained(folder)
    shapes = whole_shapes(empty_model(ModelConfig(path=str(folder))), {})
    dtypes = dict.fromkeys(shapes, dtype)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    outputs, index = split_outputs(folder, shapes, dtypes, int(FILE_SHARE * total * dtype.itemsize))
    for output in outputs:
        drawn = (
            torch.empty(size, dtype=dtype).normal_(std=0.02) for size in output.owned.sizes.values()
        )
        write_safetensors(output, dtypes, drawn)
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    return {
        "parameters": total,
        "bytes": total * dtype.itemsize,
        "largest_tensor_bytes": max(torch.Size(s).numel() for s in shapes.values())
        * max(dtype.itemsize, getattr(torch, args.dtype).itemsize),
        "files": len(outputs),
    }


def load_whole(path: str, training: Any, mesh: Any) -> Any:
    """What loading was before: every rank loads the model, DeepSpeed cuts it."""
    import deepspeed
    import transformers

    from megarl.parallel.mesh import DeepSpeedView
    from megarl.trainer.attention import ATTENTION
    from megarl.trainer.build import DTYPES
    from megarl.trainer.model import RoleModel
    from megarl.trainer.zero import deepspeed_config

    dtype = DTYPES[training.precision]
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=ATTENTION
    )
    network = RoleModel(whole, mesh, training)
    if training.zero_stage == 3:
        view = DeepSpeedView(mesh)
        deepspeed.init_distributed(
            dist_init_required=False, auto_mpi_discovery=False, verbose=False
        )
        deepspeed.zero.Init(
            module=network,
            data_parallel_group=view.get_data_parallel_group(),
            config_dict_or_path=deepspeed_config(training, mesh.gradient.size),
            dtype=dtype,
            mpu=view,
        )
    return network


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One rank: load, set up the optimizer if asked, export."""
    import torch

    from megarl.checkpoints.export import WeightExport
    from megarl.checkpoints.rank_files import RankFiles
    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.collectives import barrier
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.parallel.reshard.owned import training_owned
    from megarl.parallel.tensor import whole_shapes
    from megarl.trainer.build import DTYPES, build_network
    from megarl.trainer.config import ModelConfig, TrainingConfig
    from megarl.trainer.zero import TrainEngine

    torch.set_num_threads(1)
    device, found = mesh_module.initialise(timeout_s=600), {}
    config = ModelConfig(path=task["model"], from_scratch=task["way"] == "random")
    training = TrainingConfig(zero_stage=task["zero"], precision=task["dtype"])
    dtype = DTYPES[training.precision]
    with ProcessMesh(Layout(*task["layout"]), timeout_s=600) as mesh:
        barrier(mesh.world)
        base = anonymous_bytes()
        with peak_of("loading", found):
            if task["way"] == "whole":
                network = load_whole(config.path, training, mesh)
            else:
                network = build_network(config, training, mesh, device, seed=0)
        barrier(mesh.world)
        with peak_of("optimizer", found):
            engine = TrainEngine(
                network, training, mesh, device, total_steps=1, trains=task["optimizer"]
            )
        own = engine.owned()
        shapes = whole_shapes(network.model, network.shards)
        owned = training_owned(shapes, network.shards, mesh.layout, training.zero_stage)
        barrier(mesh.world)
        with peak_of("export", found):
            export = WeightExport(owned, shapes, dtype, file_bytes=task["file_bytes"])
            files = RankFiles(Path(task["out"]))
            export.write(files.folder, own, mesh.world, files)
            files.finish()
        part = sum(values.numel() for values in own.values()) * dtype.itemsize
        engine.destroy()
    mesh_module.finalise()
    return {"base_bytes": base, "part_bytes": part, **found}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All of it, in a temporary folder."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        model, out = Path(name) / "model", Path(name) / "out"
        model.mkdir()
        out.mkdir()
        about = make_model(model, args)
        task = {
            "model": str(model),
            "out": str(out),
            "layout": args.layout,
            "zero": args.zero,
            "dtype": args.dtype,
            "way": args.way,
            "optimizer": args.optimizer,
            "file_bytes": int(FILE_SHARE * about["bytes"]),
        }
        num_ranks = args.layout[0] * args.layout[1] * args.layout[2]
        ranks = launch(__file__, task, num_ranks=num_ranks, deadline_s=args.deadline_s)
        exported = compare(model, out) if args.way != "random" else None
    bar = [rank["part_bytes"] + about["largest_tensor_bytes"] + SLACK_BYTES for rank in ranks]
    rows = []
    for rank, limit in zip(ranks, bar, strict=True):
        state = rank["optimizer"]["end_bytes"] - rank["loading"]["end_bytes"]
        loading = rank["loading"]["peak_bytes"] - rank["base_bytes"]
        export = rank["export"]["peak_bytes"] - rank["base_bytes"] - max(0, state)
        rows.append(
            {
                "part": rank["part_bytes"],
                "bar": limit,
                "loading": loading,
                "optimizer": rank["optimizer"]["peak_bytes"] - rank["base_bytes"],
                "export": export,
                "loading_s": rank["loading"]["seconds"],
                "export_s": rank["export"]["seconds"],
            }
        )
    within = all(max(row["loading"], row["export"]) <= row["bar"] for row in rows)
    return {"model": about, "ranks": rows, "within": within, "export_equal": exported}


def compare(model: Path, out: Path) -> bool:
    """Whether the export has the tensors of the model, value by value, in the export's dtype."""
    from megarl.checkpoints.store import open_whole

    one, other = open_whole(model), open_whole(out)
    return one.shapes == other.shapes and all(
        (one.flat(name).to(other.dtypes[name]) == other.flat(name)).all() for name in one.shapes
    )


def main() -> int:
    """The command line; exit status 1 where a rank is over the bar or the export differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="2x1x2", help="data x sequence x tensor")
    parser.add_argument("--zero", type=int, default=3, choices=range(4))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--stored", choices=("bfloat16", "float32"), help="dtype in the files")
    parser.add_argument("--way", default="sharded", choices=("sharded", "whole", "random"))
    parser.add_argument("--optimizer", action="store_true", help="set up the optimizer as well")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=64000)
    parser.add_argument("--folder", help="where the temporary folder is made")
    parser.add_argument("--deadline-s", type=float, default=900.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.layout = [int(degree) for degree in args.layout.split("x")]
    found = measure(args)
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return int(args.way == "sharded" and not (found["within"] and found["export_equal"]))


def show(found: dict[str, Any]) -> None:
    """As a table, in MB."""
    about = found["model"]
    print(
        f"{about['parameters']:,} parameters, {about['bytes'] / 1e6:,.0f} MB in {about['files']}"
        f" files, largest tensor {about['largest_tensor_bytes'] / 1e6:,.0f} MB"
    )
    print(f"{'rank':>4} {'own part':>9} {'bar':>9} {'loading':>9} {'optimizer':>9} {'export':>9}")
    for number, row in enumerate(found["ranks"]):
        sizes = [row[name] / 1e6 for name in ("part", "bar", "loading", "optimizer", "export")]
        print(
            f"{number:4} "
            + " ".join(f"{size:9,.0f}" for size in sizes)
            + f"   {row['loading_s']:.1f} s, {row['export_s']:.1f} s"
        )
    print(f"within the bar: {found['within']}; export equal bit by bit: {found['export_equal']}")


if __name__ == "__main__":
    task = rank_task()
    if task is not None:
        answer(work(task))
    else:
        sys.exit(main())

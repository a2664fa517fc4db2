"""Dry run of a publication from a training layout to engines, from a config.json: no weights, no
network.

    python tools/reshard_plan.py CONFIG.json --source "data 8 tensor 8 zero 3" --engines 8

Prints what every rank holds on either side, the copies between them, each element counted, and the
time that a link of `--link-gb-s` would take where every rank sends and receives at once. `naive` is
what a plan is for: all weights gathered on one trainer rank, and sent whole to every engine rank.
Of a training layout (data, sequence, tensor, expert, zero) what is not named is 1, zero 0.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from common import command_line

from megarl.engines.plan import check_engine_tensor
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.boxes import ZEROS, Owned
from megarl.parallel.reshard.owned import training_owned
from megarl.parallel.reshard.plan import Plan, make_plan
from megarl.trainer.experts import expert_shards, refuse_expert_layout
from megarl.trainer.sharding import refuse_tensor, shard_model
from megarl.weights.parameters import engine_owned
from megarl.weights.published import fused_tensors, whole_published
from megarl.weights.recorded_table import recorded_table


def gb(count: int) -> str:
    return f"{count / 1e9:,.3f} GB"


class Degrees(NamedTuple):
    """A training layout with its ZeRO stage."""

    layout: Layout
    zero_stage: int


def parse_degrees(text: str) -> Degrees:
    """data 8 tensor 8 zero 3 -> Layout(data=8, tensor=8) under ZeRO 3. What is not named is 1, and
    the stage 0. Raises `ValueError`.
    """
    words = text.split()
    found = {name: int(word) for name, word in zip(words[::2], words[1::2], strict=False)}
    one = r"(zero [0-3]|(data|sequence|tensor|expert) [1-9]\d*)"
    if not re.fullmatch(rf"{one}( {one})*", " ".join(words)) or len(found) * 2 != len(words):
        raise ValueError(f'the layout is {text!r}; set one such as "data 2 tensor 1 zero 3"')
    stage = found.pop("zero", 0)
    return Degrees(Layout(**found), stage)


@dataclass(frozen=True)
class Model:
    """What a config.json says of a model."""

    config: dict[str, Any]
    settings: transformers.PretrainedConfig

    def empty(self) -> transformers.PreTrainedModel:
        """The model without memory for weights."""
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(self.settings)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return whole_published(self.empty())

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def owned(self, degrees: Degrees) -> list[Owned]:
        """What each rank of a training layout holds; raises `ValueError` where it cannot be cut
        so.
        """
        layout, whole = degrees.layout, self.empty()
        refuse_tensor(self.settings, layout.tensor)
        refuse_expert_layout(self.settings, layout.expert, layout.tensor, is_autotp=False)
        axis = Axis("tensor", layout.tensor, 0, tuple(range(layout.tensor)), None)
        shards = expert_shards(whole, layout.expert * layout.tensor)
        shards |= shard_model(self.empty(), axis)
        fused = fused_tensors(whole)
        return training_owned(self.shapes, shards, layout, degrees.zero_stage, fused)

    def engine(self, tensor: int) -> list[Owned]:
        """What each rank of an engine holds; raises `ValueError` where it cannot be cut so."""
        check_engine_tensor(self.settings, tensor)
        on_cpu = not torch.cuda.is_available()
        with tempfile.TemporaryDirectory() as folder:
            self.settings.save_pretrained(folder)
            table = recorded_table(folder, self.config, tensor, on_cpu=on_cpu)
        return engine_owned(table, tensor)


def load_model(path: Path) -> Model:
    """From a config.json, or the folder it is in. Raises `ValueError` for another file."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); name a model's config.json or its folder"
        ) from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(
            f"{path} does not say model_type, so it is no model's config.json; name one that is"
        )
    try:
        model = Model(config, transformers.AutoConfig.for_model(**config))
        _ = model.shapes
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} contradicts itself: {str(error).splitlines()[-1].strip()}; fetch it again"
        ) from None
    return model


def plan_of(args: argparse.Namespace) -> dict[str, Any]:
    """The dry run."""
    model, itemsize = load_model(args.model), getattr(torch, args.dtype).itemsize
    sources = model.owned(args.source)
    destinations = model.engine(args.engine_tensor) * args.engines
    target = f"{args.engines} engines x tensor {args.engine_tensor}"
    count = min(len(sources), len(destinations)) if args.colocated else 0
    started, whole = time.perf_counter(), model.parameters
    plan = make_plan(sources, destinations, {rank: rank for rank in range(count)})
    planned_s = time.perf_counter() - started
    return {
        "model": {"type": model.config["model_type"], "tensors": len(model.shapes)}
        | {"parameters": whole},
        "dtype": args.dtype,
        "source": {"layout": "{}, ZeRO {}".format(*args.source), **owned_bytes(sources, itemsize)},
        "target": {"layout": target, **owned_bytes(destinations, itemsize)},
        "planned_s": planned_s,
        "link_gb_s": args.link_gb_s,
        **traffic(plan, itemsize, args.link_gb_s * 1e9),
        "coverage": coverage(plan),
        "naive_bytes": naive(sources, len(destinations), whole) * itemsize,
    }


def owned_bytes(owned: list[Owned], itemsize: int) -> dict[str, int]:
    """Bytes that ranks hold; padding is counted as the weights it lies among."""
    each = [sum(one.sizes.values()) * itemsize for one in owned]
    return {
        "ranks": len(owned),
        "smallest_rank_bytes": min(each),
        "largest_rank_bytes": max(each),
        "bytes": sum(each),
    }


def traffic(plan: Plan, itemsize: int, bytes_per_s: float) -> dict[str, Any]:
    """What goes from where to where."""
    links, sent, received = plan.links(itemsize), Counter[int](), Counter[int]()
    for (source, destination), count in links.items():
        sent[source] += count
        received[destination] += count
    return {
        "copies": len(plan.copies),
        "local_copies": sum(plan.is_local(copy) for copy in plan.copies),
        "moved_bytes": links.total(),
        "minimum_bytes": plan.minimum(itemsize),
        "links": len(links),
        "most_sent_bytes": max(sent.values(), default=0),
        "most_received_bytes": max(received.values(), default=0),
        "predicted_s": plan.seconds(itemsize, bytes_per_s=bytes_per_s),
    }


def coverage(plan: Plan) -> dict[str, int]:
    """Elements that destinations want, that copies write, and padding that nothing fills; unequal
    is an error of ours.
    """
    pieces = [piece for owned in plan.destinations for piece in owned.pieces]
    wanted = sum(piece.box.area for piece in pieces if piece.tensor != ZEROS)
    written = sum(copy.area for copy in plan.copies)
    assert wanted == written, (wanted, written)
    padding = sum(piece.box.area for piece in pieces if piece.tensor == ZEROS)
    return {"wanted_elements": wanted, "written_elements": written, "padding_elements": padding}


def naive(sources: list[Owned], destinations: int, whole: int) -> int:
    """Elements sent where rank 0 gathers what it lacks, and sends all of it to every destination
    rank.
    """
    return whole - sum(piece.box.area for piece in sources[0].pieces) + whole * destinations


def show_plan(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A dry run as rows of a table."""
    model, cover = found["model"], found["coverage"]
    sizes = f"{model['parameters']:,} parameters in {model['tensors']:,} tensors"
    yield "model", f"{model['type']}, {sizes}, {found['dtype']}"
    for name in ("source", "target"):
        side = found[name]
        each = f"{gb(side['smallest_rank_bytes'])} to {gb(side['largest_rank_bytes'])} each"
        yield name, f"{side['layout']}: {side['ranks']} ranks, {each}, {gb(side['bytes'])} in all"
    local = f"{found['local_copies']:,} within a memory; planned in {found['planned_s']:.1f} s"
    yield "copies", f"{found['copies']:,}, {local}"
    written = f"{cover['written_elements']:,} of {cover['wanted_elements']:,} elements, each once"
    yield "coverage", f"{written}; {cover['padding_elements']:,} of padding"
    yield "moved", f"{gb(found['moved_bytes'])}; the minimum is {gb(found['minimum_bytes'])}"
    naive = gb(found["naive_bytes"])
    yield "naive", f"{naive}: gathered on one rank, sent whole to every target rank"
    most = gb(found["most_sent_bytes"]), gb(found["most_received_bytes"])
    yield "a rank", "sends {} at most, receives {}".format(*most)
    yield "links", f"{found['links']:,}"
    speed = f"{found['link_gb_s']:g} GB/s a rank, each way"
    yield "predicted", f"{found['predicted_s']:.3f} s at {speed}"


OPTIONS = {
    "model": (Path, "a config.json, or its folder"),
    "--source": ("data 1", 'training layout, such as "data 8 tensor 8 zero 3"', parse_degrees),
    "--engines": (1, "number of engines"),
    "--engine-tensor": (1, "tensor ranks of each engine"),
    "--colocated": (False, "trainer rank n and engine rank n share a memory"),
    "--dtype": ("bfloat16", "of the weights", ("bfloat16", "float16", "float32")),
    "--link-gb-s": (45.0, "GB (1e9 bytes) a second of a rank, each way"),
    "--json": (False, "print one JSON object"),
}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = command_line(__doc__, OPTIONS).parse_args(argv)
    try:
        found = plan_of(args)
    except ValueError as error:
        print(f"reshard_plan: {error}", file=sys.stderr)
        return 1
    lines = (f"{name:10} {text}" for name, text in show_plan(found))
    print(json.dumps(found) if args.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

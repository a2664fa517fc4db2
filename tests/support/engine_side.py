"""One real vLLM engine in Ray, and a trainer's side: a plain Hugging Face model whose weights a test
changes at will.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch

from megarl.engines.pool import EngineManager, EngineStarts
from megarl.parallel import mesh as mesh_module
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.rollout.ray_cluster import Cluster
from megarl.settings.rollout import PLAIN, EngineConfig
from megarl.settings.weight_sync import WeightSyncConfig
from megarl.system.placement import own_seats
from megarl.system.process_env import engine_environment, own_cluster_token, prepare_environment
from megarl.types import Samples, Segment
from megarl.weights.engine_client import EngineClient
from megarl.weights.probe import Probe
from megarl.weights.publisher import Publisher
from megarl.weights.recorded_table import recorded_table
from support.tiny import VOCABULARY

BOUND = 1e-4
"""Largest difference of log-probs between engine and trainer, in float32."""


class PlainPolicy:
    """A Hugging Face model on one rank, whose weights we change at will."""

    zero_stage, shards, fused = 0, {}, {}

    def __init__(self, folder: Path, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        # transformers' other attentions leave out soft caps.
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).to(device)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}

    def owned(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data.view(-1) for name, parameter in self.model.named_parameters()}

    def logprobs(self, samples: Samples, temperature: float = 1.0) -> torch.Tensor:
        (length,) = samples.lengths
        tokens = torch.from_numpy(samples.token_ids).long()
        with torch.no_grad():
            made = self.model(tokens[None].to(self.model.device)).logits
            logits = made[0, :-1].double().cpu() / temperature
        return logits.log_softmax(-1).gather(1, tokens[1:, None])[: length - 1, 0]


class Side:
    """Trainer's side of one engine."""

    def __init__(
        self,
        folder: Path,
        group: Engines,
        mesh: ProcessMesh,
        device: torch.device,
        dtype: str,
        probe_tolerance: float = BOUND,
    ) -> None:
        """`dtype`: that of the engine; the trainer's is float32, of which is `probe_tolerance`."""
        self.folder, self.dtype, self._mesh = folder, dtype, mesh
        self._on_cpu = device.type == "cpu"
        self.probe_tolerance = probe_tolerance if dtype == "float32" else 0.0
        self.policy, self.engines, self.version = PlainPolicy(folder, device), group, -1
        self.model = self.policy.model
        self.publisher = self.make_publisher()

    def make_publisher(self, **settings: Any) -> Publisher:
        """Its buckets hold one module each: the small model travels in as many steps as a large
        one.
        """
        publisher = Publisher(
            WeightSyncConfig(probe_tolerance=self.probe_tolerance, **settings),
            table=recorded_table(
                str(self.folder), self.model.config.to_dict(), 1, on_cpu=self._on_cpu
            ),
            policy=self.policy,
            engines=self.engines,
            num_engines=1,
            engine_tensor=1,
            mesh=self._mesh,
            dtype=self.dtype,
            probe=Probe.random(
                dtypes=(self.dtype, "float32"),
                vocab_size=VOCABULARY,
                max_tokens=96,
                seed=0,
                tolerance=self.probe_tolerance,
            ),
        )
        return publisher

    def shake(self, seed: int) -> None:
        """Other weights, every one of them."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                change = torch.randn(parameter.shape, generator=draw) * 0.05
                parameter.add_(change.to(parameter.device))

    def publish(self) -> dict[str, float]:
        self.version += 1
        return self.publisher.publish(self.version)

    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        return self.policy.logprobs(Samples.one(0, tokens), temperature).tolist()

    def start(self, prompt: list[int], count: int, **settings: Any) -> list[Any]:
        """Begin to sample `count` responses, whose seeds are their numbers."""
        (handle,) = self.engines.handles
        usual: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "sampling": PLAIN}
        asked = usual | settings
        return [handle.generate.remote(prompt, seed=seed, **asked) for seed in range(count)]

    def sample(self, prompt: list[int], count: int, **settings: Any) -> list[Segment]:
        return ray.get(self.start(prompt, count, **settings), timeout=90)


class Engines(EngineClient):
    """Engines whose manager has an actor of its own, without a rollout service."""

    @property
    def handles(self) -> list[Any]:
        """The Ray actors of the engines."""
        return [actor for actor, _ in ray.get(self._service.actors.remote())]

    def pids(self, number: int) -> list[int]:
        """Process ids of an engine: its Ray actor first, then vLLM's processes."""
        _, processes = ray.get(self._service.actors.remote())[number]
        return [pid for _, pid, _ in processes]


def engines_in(
    cluster: Cluster,
    folder: Path,
    config: EngineConfig,
    max_tokens: int,
    *,
    count: int = 1,
    on_cpu: bool = True,
    **more: Any,
) -> Engines:
    """`count` engines of the model in `folder`, which begin to start. `max_tokens`: of a request,
    prompt and response. `more`: further arguments of the engines.
    """
    seats = own_seats(count, tensor=config.tensor, gpus=not on_cpu, timeout_s=60)
    arguments: dict[str, Any] = dict(
        load=False,
        adapter_rank=0,
        recording=None,
        model=str(folder),
        config=config,
        max_tokens=max_tokens,
        stop_token_ids=[1],
        trust_remote_code=False,
        seed=0,
        environment=engine_environment(on_cpu=on_cpu, num_threads=1, kv_cache_gib=1),
    )
    starts = EngineStarts(seats, arguments | more, 200 if on_cpu else 300, 600).begin()

    class Manager:
        """Within the function, so that Ray sends its code along."""

        def __init__(self, starts: EngineStarts) -> None:
            async def fail(reason: str) -> None:
                pass

            self.make = lambda: EngineManager(starts, use=lambda *_: None, fail=fail)
            self.manager: Any = None

        async def engine_call(self, method: str, *arguments: Any) -> Any:
            self.manager = self.manager or self.make()
            return await getattr(self.manager, method)(*arguments)

        async def actors(self) -> list[tuple[Any, Any]]:
            return [(engine.handle, engine.processes) for engine in self.manager.engines]

        async def stop(self) -> None:
            await self.manager.close()

    actor = ray.remote(Manager).options(num_cpus=0, max_concurrency=100).remote(starts)
    cluster._owned.append(actor)
    return Engines(actor, starts.timeout_s)


@contextlib.contextmanager
def opened(
    folder: Path,
    config: EngineConfig,
    *,
    on_cpu: bool = True,
    max_tokens: int = 240,
    probe_tolerance: float = BOUND,
    adapter_rank: int = 0,
    load: bool = False,
    sleeps: bool = False,
) -> Iterator[Side]:
    """An engine of the model in `folder`, and its trainer, on the CPU or both on the first GPU.

    `max_tokens`: of a request, prompt and response. `probe_tolerance`: see `WeightSyncConfig`.
    `adapter_rank`: above 0 the engine takes adapters, and begins with the model's weights, as with
    `load`. `sleeps`: it can free its memory on a GPU.
    """
    prepare_environment(1)
    device = mesh_module.initialise(timeout_s=120)
    assert on_cpu == (device.type == "cpu")
    more = {
        "tokenizer": str(folder),
        "load": load or adapter_rank > 0,
        "adapter_rank": adapter_rank,
        "sleeps": sleeps,
    }
    with (
        ProcessMesh(Layout(), timeout_s=120) as mesh,
        Cluster(namespace=f"test-{os.getpid()}", token=own_cluster_token()) as cluster,
    ):
        group = engines_in(cluster, folder, config, max_tokens, on_cpu=on_cpu, **more)
        group.wait()
        made = Side(folder, group, mesh, device, config.dtype, probe_tolerance)
        yield made
        made.publisher.close()
    mesh_module.finalise()


def gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def mean_gap(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def publish_five_times(side: Side, distance: Any, bound: float) -> None:
    """Each version makes the engine's log-probs the trainer's, which were others before."""
    tokens = torch.randint(
        0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    for seed in range(5):
        before = side.logprobs(tokens)
        side.shake(seed)
        side.publish()
        (found,) = side.engines.score(tokens, timeout_s=60)
        assert distance(found, side.logprobs(tokens)) < bound
        assert distance(found, before) > max(0.01, 2 * bound), (
            "the new weights say the same as the old ones: this test would prove nothing"
        )

"""`megarl eval`: the recipe's held-out problems, answered by `model.path` as it is."""

from __future__ import annotations

import json
import os

from megarl.cluster.process_env import own_cluster_token
from megarl.cluster.ray_cluster import Cluster, RolloutClient
from megarl.cluster.rollouts import start_engines, start_service
from megarl.config import RunConfig, patience_s
from megarl.parallel import mesh
from megarl.trainer.context import RunInputs


def main(config: RunConfig, inputs: RunInputs) -> int:
    """Generate and score one response to each held-out problem; prints the metrics as one JSON
    object.
    """
    on_cpu = mesh.local_device().type == "cpu"
    with Cluster(namespace=f"megarl-{os.getpid()}", token=own_cluster_token()) as cluster:
        engines = start_engines(cluster, config, inputs.stop_token_ids, on_cpu=on_cpu, load=True)
        start_service(config, cluster, engines, inputs, first_step=0, first_ordinal=0)
        engines.wait()
        cluster.wait_for_service(config.rollout.engine.start_timeout_s)
        client = RolloutClient(0, deadline_s=patience_s(config, len(inputs.held_out or ())))
        metrics, _ = client.evaluate(config.evaluation.temperature, "eval")
    print(json.dumps({"model": config.model.path, **metrics, "seed": config.seed}), flush=True)
    return 0

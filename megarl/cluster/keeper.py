"""Engines that stay from one run to the next (`megarl.KeptEngines`): the process that keeps Ray for
these runs until it is told to end, and how a run finds the engines of an earlier one.

    python -m megarl.cluster.keeper COMMAND RECIPE.yaml

Once Ray runs it prints, as one JSON object, the environment variables by which runs find Ray and
the engines that stay there (`process_env.KEPT_ENGINES`). The runs start these engines, and Ray's
end is theirs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from megarl import config as configs
from megarl import signals
from megarl.activity.recording import Recording
from megarl.cluster.process_env import KEPT_ENGINES, own_cluster_token, prepare_environment
from megarl.config import RunConfig
from megarl.private_folder import MARK, run_folder

END_WITHIN_S = 30.0
"""Seconds that Ray and the engines have to end."""


def main() -> None:
    """Start Ray for runs of the recipe that the command line names, and keep it until SIGINT,
    SIGTERM or SIGHUP, at which it ends Ray and all engines and exits.
    """
    signals.handle()
    signals.guard(END_WITHIN_S)
    command, recipe = sys.argv[1:]
    kind = next(kind for kind, name in configs.COMMANDS.items() if name == command)
    config = configs.read(kind, recipe)
    assert isinstance(config, RunConfig)
    prepare_environment(1)
    from megarl.cluster.ray_cluster import Cluster, object_store_bytes

    namespace, token = f"megarl-engines-{os.getpid()}", own_cluster_token()
    os.environ.pop("RAY_ADDRESS", None)
    with (
        run_folder(),
        Cluster(
            namespace=namespace,
            token=token,
            object_store_bytes=object_store_bytes(config.rollout),
            hidden=config.environment.remote.token_variable,
        ) as cluster,
    ):
        found = {"RAY_ADDRESS": cluster.address, "RAY_AUTH_TOKEN": token, KEPT_ENGINES: namespace}
        print(json.dumps(found | {MARK: os.environ[MARK]}), flush=True)
        signal.pause()


def kept_engines(recording: Recording | None) -> dict[int, Any]:
    """{engine number: Ray actor} of the engines that earlier runs have left for this one (see
    `megarl.KeptEngines`), which from now on record what they do in `recording`.
    """
    import ray  # here: it reads variables that `main` sets

    namespace, found = os.environ.get(KEPT_ENGINES), dict[int, Any]()
    for one in ray.util.list_named_actors(all_namespaces=True) if namespace else ():
        if one["namespace"] == namespace:
            number = int(one["name"].partition("-")[0])
            found[number] = ray.get_actor(one["name"], namespace)
            found[number].record.remote(recording)
    return found


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt as caught:
        sys.exit(128 + signals.ending(caught).number)

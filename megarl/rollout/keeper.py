"""Keeps Ray for the runs of one `megarl.KeptEngines`: python -m megarl.rollout.keeper run
RECIPE.yaml

It prints, as one JSON object, the environment variables by which runs find Ray and its engines.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from megarl.errors import UserError
from megarl.settings import config as configs
from megarl.settings.config import RunConfig
from megarl.system import console, signals
from megarl.system.private_folder import MARK, run_folder
from megarl.system.process_env import KEPT_ENGINES, own_cluster_token, prepare_environment


def main() -> None:
    """Start Ray for runs of the recipe `sys.argv[-1]`, print as JSON the variables by which they
    find it, and wait for a signal.
    """
    signals.handle()
    signals.guard(30.0)  # for the end of Ray and the engines
    recipe = sys.argv[-1]
    config = configs.read(configs.task_class(configs.written_tree(recipe), recipe), recipe)
    assert isinstance(config, RunConfig)
    prepare_environment(1)
    from megarl.rollout.ray_cluster import Cluster, object_store_bytes

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
        env = {"RAY_ADDRESS": cluster.address, "RAY_AUTH_TOKEN": token, KEPT_ENGINES: namespace}
        print(json.dumps(env | {MARK: os.environ[MARK]}), flush=True)
        signal.pause()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        console.say(f"megarl: error: {error}")
        sys.exit(2)
    except KeyboardInterrupt as caught:
        sys.exit(128 + signals.ending(caught).number)

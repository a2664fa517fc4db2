"""The environment that OpenEnv gives its users to begin with (`openenv init`), behind its server.

    python echo_server.py FOLDER PORT MOST_ENVIRONMENTS [ignores_seeds]

With the last word, every episode begins with another text.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.documented import block


def main(folder: str, port: str, most: str, *more: str) -> None:
    """Write the environment to `folder` and serve it as docs/howto/environments_of_others.md does."""
    import uvicorn

    template = (
        Path(str(importlib.import_module("openenv").__file__)).parent
        / "cli"
        / "templates"
        / "openenv_env"
    )
    for source in (template / "models.py", *(template / "server").glob("*_environment.py")):
        text = source.read_text()
        for mark, name in {"CLASS_NAME": "Echo", "TITLE_NAME": "Echo", "NAME": "echo"}.items():
            text = text.replace(f"__ENV_{mark}__", name)
        (Path(folder) / source.name.replace("__ENV_NAME__", "echo")).write_text(text)
    sys.path.insert(0, folder)
    environment: Any = importlib.import_module("echo_environment")
    models: Any = importlib.import_module("models")
    named = {"EchoEnvironment": environment.EchoEnvironment}
    named |= {name: getattr(models, name) for name in ("EchoAction", "EchoObservation")}
    if more:
        begun = itertools.count()
        reset = environment.EchoEnvironment.reset

        def numbered(self: Any) -> Any:
            found = reset(self)
            found.echoed_message += f" {next(begun)}"
            return found

        environment.EchoEnvironment.reset = numbered
    exec(block("python openenv_server").replace("256", most), named)  # noqa: S102
    server = uvicorn.Server(uvicorn.Config(named["app"], port=int(port), log_level="warning"))
    print("serving", flush=True)
    server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])

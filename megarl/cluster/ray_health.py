"""Whether Ray itself lives: its head (GCS), and the raylet of this machine, without which no actor
can be started. Ray ends every process a minute after its head has died, without a reason.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

ANSWER_S = 20.0
"""Seconds that Ray's head has to list the cluster's nodes."""

ASK_EVERY_S = 3.0
"""Seconds between two questions."""


class RayHealth:
    """Asks Ray's head for the state of this machine's node, in threads of its own, since the
    question may never be answered.
    """

    def __init__(self) -> None:
        self._node: str = ray.get_runtime_context().get_node_id()
        self._asked_at = -ASK_EVERY_S
        self._thread: threading.Thread | None = None
        self._found: dict[str, Any] = {}

    def problem(self) -> str:
        """Why Ray cannot be relied on; empty if it is well, as far as is known. Does not wait."""
        now = time.monotonic()
        if self._thread is not None and self._thread.is_alive():
            silent_s = now - self._asked_at
            if silent_s < ANSWER_S:
                return ""
            return f"Ray's head (GCS) has not answered for {silent_s:.0f} s"
        found, self._found = self._found, {}
        if now - self._asked_at >= ASK_EVERY_S:
            self._asked_at = now
            self._thread = threading.Thread(target=self._ask, name="Ray's health", daemon=True)
            self._thread.start()
        return self._judge(found)

    def _judge(self, found: dict[str, Any]) -> str:
        if "error" in found:
            return f"Ray's head (GCS) cannot be reached: {found['error']}"
        alive = {node["NodeID"]: node["Alive"] for node in found.get("nodes", ())}
        if alive.get(self._node) is False:
            return "Ray's node of this machine is dead: its raylet was ended, or hangs"
        return ""

    def _ask(self) -> None:
        try:
            self._found = {"nodes": ray.nodes()}
        except Exception as error:
            self._found = {"error": str(error).splitlines()[0] if str(error) else repr(error)}

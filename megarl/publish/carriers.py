"""The carriers by name. Each is one file with both ends; `megarl.publish.carrier` says what they owe."""

from __future__ import annotations

from typing import Any

from megarl.publish import shared_memory

SENDERS: dict[str, Any] = {"shared_memory": shared_memory.Sender}
"""Name -> a trainer rank's end: (route, world axis, `publish.folder`)."""

RECEIVERS: dict[str, Any] = {"shared_memory": shared_memory.Receiver}
"""Name -> an engine rank's end: (route, engine number, its tensor rank, the sender's invitation)."""

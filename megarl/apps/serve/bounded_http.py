"""uvicorn's HTTP protocol with a time limit on the head of a request.

uvicorn bounds neither the time nor, with its faster parser, the size of a request's headers, which
arrive before the token can be looked at. h11, the parser used here, bounds their size (64 KiB).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

LATE = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedProtocol(H11Protocol):
    """One connection to a server, which is closed if the head of a request does not arrive in
    time.
    """

    def __init__(self, *args: Any, head_limit_s: float, **settings: Any) -> None:
        """`head_limit_s`: seconds from the opening of the connection, or from the first byte of a
        further request, to the end of the request's headers. The other arguments are uvicorn's.
        """
        super().__init__(*args, **settings)
        self._head_limit_s = head_limit_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            self._wait_for_head()
        super().data_received(data)
        if not self._is_idle:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is under way: what arrives belongs to the head of the next one."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._head_limit_s, self._close_late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()

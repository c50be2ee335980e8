"""Connections of slow clients, which must not remain open for long."""

import asyncio
from typing import cast

from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

UNREAD_SECONDS = 30


class TimedConnection(H11Protocol):
    """An HTTP/1.1 connection that is closed if no request has begun within the keep-alive timeout.

    uvicorn closes a connection only if nothing at all arrives between two requests: the first request, and one whose head
    arrives byte by byte, could take forever. Here the timer stops when the head of a request is complete.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Process what has arrived. `handle_events` stops the timer when a request begins."""
        self.conn.receive_data(data)
        try:
            self.handle_events()
        except LocalProtocolError:  # not HTTP, after the response: there is no other to give
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, even if the client does not read its response."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

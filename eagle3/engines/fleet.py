"""Which of several servers gets the next request, which of them is out of rotation, and when it is no use to go on."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from eagle3.errors import EngineError

log = logging.getLogger(__name__)

OUT_AFTER = 5  # failures in a row, beyond the requests in flight that may still succeed, take a server out of rotation
TRY_AGAIN_S = 10.0  # one request in this time finds out whether it is back
START_PATIENCE_S = 30.0  # all servers out, and not one answer yet
MAX_LOST_IN_A_ROW = 20  # prompts, beyond those in flight, whose turn may still come out well


@dataclass(eq=False)
class Fault(Exception):
    """One attempt that brought no answer."""

    kind: str
    message: str
    may_pass: bool = True
    retry_after_s: float | None = None
    is_servers: bool = False  # speaks against the server, not against the prompt or the moment


@dataclass
class Server:
    url: str
    in_flight: int = 0
    num_sent: int = 0
    num_failed: int = 0  # in a row
    is_out: bool = False  # of rotation, but for one request from time to time
    try_again_at: float = 0.0
    client: Any = None
    provenance: dict[str, Any] = field(default_factory=dict)


class Fleet:
    """Chooses a server for each attempt, and knows when it is no use to go on."""

    def __init__(self, servers: list[Server], patience_s: float) -> None:
        self.servers, self.patience_s = servers, patience_s
        self.num_lost = 0  # prompts that failed for good since the last answer
        self.last_sign: float | None = None  # when the last answer came, before it the first attempt
        self.has_answered = False

    async def choose(self) -> Server:
        """The least busy server in rotation, or one that is due to be tried again; waits while there is none."""
        while True:
            now = time.monotonic()
            self.last_sign = self.last_sign or now
            usable = [server for server in self.servers if not server.is_out or server.try_again_at <= now]
            if usable:
                server = min(usable, key=lambda server: (server.in_flight, server.num_sent))
                server.try_again_at = now + TRY_AGAIN_S
                server.in_flight += 1
                server.num_sent += 1
                return server
            await asyncio.sleep(0.1)

    def answered(self, server: Server) -> None:
        server.num_failed = self.num_lost = 0
        server.is_out = False
        self.last_sign, self.has_answered = time.monotonic(), True

    def failed(self, server: Server, fault: Fault, is_last: bool) -> None:
        """Count a failed attempt, the last one of its prompt or not; it is no longer in flight.

        Raises:
            EngineError: all servers have been out for longer than there is patience for, or prompt after prompt is lost.
        """
        if fault.is_servers:
            server.num_failed += 1
            if not server.is_out and server.num_failed >= OUT_AFTER + server.in_flight:
                server.is_out, server.try_again_at = True, time.monotonic() + TRY_AGAIN_S
                log.warning("%s is left out after %d failures in a row (%s: %s)", server.url, server.num_failed, fault.kind, fault.message)
        self.num_lost += is_last
        silent_s = time.monotonic() - (self.last_sign or 0.0)
        patience_s = self.patience_s if self.has_answered else min(self.patience_s, START_PATIENCE_S)
        if all(server.is_out for server in self.servers) and silent_s >= patience_s:
            reason = f"no server has answered for {silent_s:.0f} s"
        elif self.num_lost >= MAX_LOST_IN_A_ROW + sum(server.in_flight for server in self.servers):
            reason = f"{self.num_lost} prompts failed in a row"
        else:
            return
        raise EngineError(f"{reason}; the last failure, at {server.url}, was {fault.kind}: {fault.message}. Mend it and run again: what is answered is kept.")

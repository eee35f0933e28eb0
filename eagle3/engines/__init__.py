"""Where answers come from: one method, whatever runs the target."""
from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from eagle3.conversation import Answer, Failure, Request


class Engine(Protocol):
    """Answers requests in any order; each request yields exactly one `Answer` or `Failure`."""

    def answer(self, requests: Sequence[Request]) -> AsyncIterator[Answer | Failure]: ...

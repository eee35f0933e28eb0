"""Where answers come from: one method, whatever runs the target."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from eagle3.conversation import Answer, Failure, Request


@dataclass(frozen=True)
class Sampling:
    """How the target's tokens are drawn and where an answer ends; the same for every engine."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    max_completion_tokens: int = 8192
    max_seq_len: int = 16384  # prompt and completion together
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


class Engine(Protocol):
    """Answers requests in any order; each request yields exactly one `Answer` or `Failure`."""

    def answer(self, requests: Iterable[Request]) -> AsyncIterator[Answer | Failure]: ...

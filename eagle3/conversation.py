"""From messages to token ids and back to supervised rows: the only module that knows tokens of a conversation."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """One turn to be answered: the ids the target reads, generation prompt included."""

    prompt_id: str
    turn: int
    prompt_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """What the target said to one request, as exact ids (`completion_ids` holds the end token if one was sampled)."""

    prompt_id: str
    turn: int
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str  # "stop" or "length"
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A request that got no answer, with the kind and the text of its error."""

    prompt_id: str
    turn: int
    kind: str
    message: str


@dataclass(frozen=True)
class Row:
    """One answered turn: what the target saw and wrote, with 1 in `loss_mask` on each token it wrote."""

    id: str
    prompt_id: str
    turn: int
    input_ids: list[int]
    loss_mask: list[int]
    category: str = ""

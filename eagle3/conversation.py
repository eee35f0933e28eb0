"""From messages to token ids and back to supervised rows: the only module that knows tokens of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
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


def encode_turn(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Ids of a conversation that ends with a user's turn, with the header of the answer: what the target reads."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def answer_text(tokenizer: Any, answer: Answer) -> str:
    """The text of an answer, as the next turn of the conversation will show it to the target."""
    text: str = tokenizer.decode(answer.completion_ids, skip_special_tokens=True)
    return text


def to_row(answer: Answer, category: str = "") -> Row:
    """One supervised row. The mask comes from where the prompt's ids end, so no text inside a prompt can change it."""
    return Row(
        id=row_id(answer.prompt_id, answer.turn),
        prompt_id=answer.prompt_id,
        turn=answer.turn,
        input_ids=[*answer.prompt_ids, *answer.completion_ids],
        loss_mask=[0] * len(answer.prompt_ids) + [1] * len(answer.completion_ids),
        category=category,
    )


def row_id(prompt_id: str, turn: int) -> str:
    return f"{prompt_id}-{turn}"

"""From messages to token ids and back to supervised rows: the only module that knows tokens of a conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3.errors import TargetError

THINK_TOKENS = ("<think>", "</think>")
USER_MARK, ANSWER_MARK = "\u241fUSER\u241f", "\u241fANSWER\u241f"


@dataclass(frozen=True)
class Request:
    """One turn to be answered: the ids the target reads, generation prompt included.

    With `messages`, a server is asked to chat, and renders them by its own template; without, it continues exactly `prompt_ids`.
    """

    prompt_id: str
    turn: int
    prompt_ids: list[int]
    messages: tuple[dict[str, str], ...] = ()


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
    provenance: dict[str, Any] = field(default_factory=dict)  # of its answer: engine, server, sampling, whether the ids are exact


def encode_turn(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Ids of a conversation that ends with a user's turn, with the header of the answer: what the target reads."""
    return _encode(tokenizer, render(tokenizer, messages, add_generation_prompt=True))


def render(tokenizer: Any, messages: Sequence[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """A conversation as text, by the target's chat template.

    Raises:
        TargetError: the target has no template, or its template refuses the conversation.
    """
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TargetError(f"the target's chat template can't write a conversation of {roles} ({reason}): check chat_template.jinja in its folder.") from None
    return text


def answer_message(tokenizer: Any, answer: Answer, form: AnswerForm) -> dict[str, str]:
    """An answer as the conversation's next message, its thought apart, so that the template keeps or drops it as the target was taught."""
    thought: list[int] = []
    said = answer.completion_ids
    if form.think:
        opening, closing = form.think
        if closing in said:
            cut = said.index(closing)
            thought, said = said[:cut], said[cut + 1 :]
        elif opening in said or form.opens_thought(answer.prompt_ids):
            thought, said = said, []
        thought = [token for token in thought if token != opening]
    message = {"role": "assistant", "content": tokenizer.decode(said, skip_special_tokens=True)}
    return message | ({"reasoning_content": tokenizer.decode(thought, skip_special_tokens=True)} if thought else {})


@dataclass(frozen=True)
class AnswerForm:
    """What a target's chat template puts around an answer."""

    header: tuple[int, ...]  # between the last user's turn and the answer
    end_id: int  # ends the answer
    think: tuple[int, int] | None = None  # opens and closes a thought
    think_text: tuple[str, str] = THINK_TOKENS

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the header at the end of a prompt leaves a thought open. Text of the user, before it, can't."""
        return self._last_mark(prompt_ids) == 0

    def expects_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the target may still think: not if the header at the end of the prompt has opened a thought and closed it."""
        return self._last_mark(prompt_ids) != 1

    def _last_mark(self, prompt_ids: Sequence[int]) -> int | None:
        tail = prompt_ids[len(prompt_ids) - len(self.header) :]
        return next((self.think.index(token) for token in reversed(tail) if token in self.think), None) if self.think else None


def read_answer_form(tokenizer: Any, think_tokens: Sequence[str | int] | None = None) -> AnswerForm:
    """Read from the target's template how an answer begins and ends, by rendering a conversation of marks.

    Args:
        think_tokens: the two tokens around a thought, by name or id; None takes <think> and </think> if the vocabulary has them.

    Raises:
        TargetError: `think_tokens` are not two single tokens of the vocabulary.
    """
    asked = [{"role": "user", "content": USER_MARK}]
    before, prompt = render(tokenizer, asked), render(tokenizer, asked, add_generation_prompt=True)
    answered = render(tokenizer, [*asked, {"role": "assistant", "content": ANSWER_MARK}])
    header = _encode(tokenizer, prompt[len(before) :]) if prompt.startswith(before) else []
    ending = _encode(tokenizer, answered.partition(ANSWER_MARK)[2])
    think = [_token_id(tokenizer, token) for token in think_tokens or THINK_TOKENS]
    if think_tokens is not None and (len(think) != 2 or None in think):
        raise TargetError(
            f"target.think_tokens={list(think_tokens)} are not two tokens of the target's vocabulary: give the names or ids that open and close a thought."
        )
    first, last = think[0], think[-1]
    end_id = ending[0] if ending else tokenizer.eos_token_id
    if first is None or last is None:
        return AnswerForm(tuple(header), end_id)
    return AnswerForm(tuple(header), end_id, (first, last), (tokenizer.decode([first]), tokenizer.decode([last])))


def rebuild_completion(
    tokenizer: Any, form: AnswerForm, prompt_ids: Sequence[int], reasoning: str | None, content: str | None, finish_reason: str
) -> list[int]:
    """Ids of an answer that a server gave as text alone: one open think token and one close around its thought, the end token behind it.

    The open one is left out if the prompt ends with it, the close one if the answer was cut inside its thought. A thought that the server left in
    `content` is found by its close token. Text that looks like a special token stays text.

    Raises:
        TargetError: there is a thought, and the target's think tokens are not known.
    """
    opened = form.opens_thought(prompt_ids)
    if not reasoning and content and form.think:
        reasoning, content = _split_thought(content, form, opened and finish_reason == "length")
    ids: list[int] = []
    if reasoning or opened:
        if form.think is None:
            raise TargetError("the server returns thoughts, and the vocabulary has no <think> and </think>: name the two tokens in target.think_tokens.")
        ids += ([] if opened else [form.think[0]]) + _encode_plain(tokenizer, reasoning or "", form)
        if content or finish_reason == "stop":
            ids.append(form.think[1])
    ids += _encode_plain(tokenizer, content or "", form)
    return [*ids, form.end_id] if finish_reason == "stop" else ids


def _split_thought(content: str, form: AnswerForm, cut_inside: bool) -> tuple[str | None, str | None]:
    """The thought and the rest of a text that may still hold both."""
    opening, closing = form.think_text
    thought, closed, rest = content.partition(closing)
    if not closed and not cut_inside and not content.lstrip().startswith(opening):
        return None, content
    return (thought.lstrip().removeprefix(opening) if thought.lstrip().startswith(opening) else thought), rest if closed else None


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _encode_plain(tokenizer: Any, text: str, form: AnswerForm) -> list[int]:
    """Ids of text in which the names of special tokens are ordinary characters."""
    pieces = [text]
    for name in form.think_text if form.think else ():  # often added tokens that are not special, so they are broken up by hand
        within = f"(?<={re.escape(name[:1])})(?={re.escape(name[1:])})"
        pieces = [half for piece in pieces for half in re.split(within, piece)]
    return [token for piece in pieces if piece for token in tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]]


def _token_id(tokenizer: Any, token: str | int) -> int | None:
    """The id of a token given by name or id (as a number or in digits), or None if the vocabulary has no such token."""
    if isinstance(token, int) or token.isdigit():
        # By the token and not by the vocabulary's size: ids may have holes, and special ones lie above them.
        return int(token) if int(token) < len(tokenizer) or tokenizer.convert_ids_to_tokens(int(token)) is not None else None
    found: int | None = tokenizer.convert_tokens_to_ids(token)
    return found if found is not None and tokenizer.convert_ids_to_tokens(found) == token else None


def to_row(answer: Answer, category: str = "") -> Row:
    """One supervised row. The mask comes from where the prompt's ids end, so no text inside a prompt can change it."""
    return Row(
        id=row_id(answer.prompt_id, answer.turn),
        prompt_id=answer.prompt_id,
        turn=answer.turn,
        input_ids=[*answer.prompt_ids, *answer.completion_ids],
        loss_mask=[0] * len(answer.prompt_ids) + [1] * len(answer.completion_ids),
        category=category,
        provenance=answer.provenance,
    )


def row_id(prompt_id: str, turn: int) -> str:
    return f"{prompt_id}-{turn}"

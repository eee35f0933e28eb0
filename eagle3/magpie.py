"""Prompts that the target writes itself: given only the header of a user's turn, it goes on as a user (Magpie, arXiv:2406.08464)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from eagle3.conversation import Answer, Request, render
from eagle3.engines import Engine
from eagle3.errors import DataError
from eagle3.progress import progress
from eagle3.prompts import Prompt, new_prompt
from eagle3.store import KeyedLog

CHUNK = 128  # prompts written at once: enough to fill a batch, few enough that a small run writes few in vain
MARK = "\u241fMAGPIE\u241f"


def written_prompts(tokenizer: Any, engine: Engine, pool: KeyedLog) -> Iterator[Prompt]:
    """Prompts in the order of their numbers, without end; those of earlier runs come from the pool, new ones go into it.

    Raises:
        DataError: a whole chunk brought nothing new, so asking on would never end.
    """
    header = opening_ids(tokenizer)
    seen: set[str] = set()
    start = 0
    while True:
        numbers = [f"magpie-{number}" for number in range(start, start + CHUNK)]
        missing = [Request(number, 0, header) for number in numbers if number not in pool]
        if missing:
            with progress(f"prompts {start + 1} to {start + CHUNK}", len(missing), "prompts") as update:
                asyncio.run(_write(tokenizer, engine.answer(missing), pool, update))
        before = len(seen)
        for number in numbers:
            if text := pool.read(number)["text"]:
                prompt = new_prompt([{"role": "user", "content": text}])
                seen.add(prompt.id)
                yield prompt
        if len(seen) == before:
            raise DataError(f"the target writes no new prompts after {before}: raise dataset.temperature, or use dataset=jsonl with a file of prompts.")
        start += CHUNK


async def _write(tokenizer: Any, outcomes: AsyncIterator[Any], pool: KeyedLog, update: Any) -> None:
    """Put what was written into the pool; a prompt that was cut or failed is put there empty, so it is not written again."""
    done = 0
    async for outcome in outcomes:
        finished = isinstance(outcome, Answer) and outcome.finish_reason == "stop"
        text = tokenizer.decode(outcome.completion_ids, skip_special_tokens=True).strip() if finished else ""
        pool.append(outcome.prompt_id, {"text": text})
        done += 1
        update(done, "")


def opening_ids(tokenizer: Any) -> list[int]:
    """Ids of everything in the target's template that comes before the text of a first user's turn.

    Raises:
        DataError: the template does not put the user's text into the conversation as it is.
    """
    rendered = render(tokenizer, [{"role": "user", "content": MARK}])
    if MARK not in rendered:
        raise DataError("dataset=magpie needs a chat template that shows the user's text as it is; this target's does not, so use dataset=jsonl.")
    ids: list[int] = tokenizer(rendered.split(MARK)[0], add_special_tokens=False)["input_ids"]
    return ids

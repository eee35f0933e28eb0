"""Rows from an engine: every prompt is answered once, kept in a pool that outlives any run, and ends in exactly one bin."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3.conversation import Answer, AnswerForm, Failure, Request, Row, answer_message, encode_turn, read_answer_form, row_id, to_row
from eagle3.engines import Engine
from eagle3.errors import DataError
from eagle3.progress import progress
from eagle3.prompts import Prompt
from eagle3.store import KeyedLog
from eagle3.tracking import StageTracker

log = logging.getLogger(__name__)


def generate(
    prompts: Sequence[Prompt],
    new_engine: Callable[[], Engine],
    new_tokenizer: Callable[[], Any],
    pool: KeyedLog,
    path: Path,
    track: StageTracker,
    name: str,
    *,
    min_completion_tokens: int,
    truncated: str,
    think_tokens: Sequence[str | int] | None = None,
) -> dict[str, Any]:
    """Answer what the pool has no answer for, then write the rows of all `prompts` to `path`.

    Args:
        new_engine, new_tokenizer: called only if something is left to answer, so that a run that finds all in its pool loads no model.

    Returns:
        How every turn ended (see `collect_rows`), `answered_now`, `failures_now` by kind, and how many of those `may_pass` when asked again.
    """
    missing = [prompt for prompt in prompts if any(row_id(prompt.id, turn) not in pool for turn in range(len(prompt.user_turns)))]
    failures: Counter[str] = Counter()
    num_answered = 0
    if missing:
        log.info("%s: %d of %d prompts are answered already", name, len(prompts) - len(missing), len(prompts))
        total = sum(len(prompt.user_turns) for prompt in missing)
        with progress(name, total, "answers") as update:
            meter = Meter(total, update, track)
            failures = asyncio.run(answer_prompts(missing, new_engine(), new_tokenizer(), pool, meter.count, think_tokens))
            num_answered = meter.num_answered
        for kind, number in failures.items():
            log.warning("%s: %d turns failed with %s; %s", name, number, kind, "left out" if is_final(kind) else "the same command tries them again")
    return collect_rows(prompts, pool, path, min_completion_tokens, truncated) | {
        "answered_now": num_answered,
        "failures_now": dict(failures),
        "may_pass": sum(number for kind, number in failures.items() if not is_final(kind)),
    }


def is_final(kind: str) -> bool:
    """Whether a failure speaks of the prompt, so that asking again brings the same; all others may pass."""
    return kind in ("too_long", "empty") or kind.startswith(("finish_", "http_4"))


class Meter:
    """Counts what comes back, shows it, and logs it once a second."""

    def __init__(self, total: int, update: Callable[[int, str], None], track: StageTracker) -> None:
        self.total, self.update, self.track = total, update, track
        self.num_answered = self.num_failed = self.num_tokens = 0
        self._began = self._logged = time.monotonic()

    def count(self, outcome: Answer | Failure) -> None:
        if isinstance(outcome, Answer):
            self.num_answered += 1
            self.num_tokens += len(outcome.completion_ids)
        else:
            self.num_failed += 1
        done, now = self.num_answered + self.num_failed, time.monotonic()
        seconds = now - self._began
        self.update(done, f"{self.num_tokens / seconds:.0f} tokens/s, {self.num_failed} failed")
        if now - self._logged >= 1 or done == self.total:
            self._logged = now
            counts = {"answered": self.num_answered, "failed": self.num_failed, "tokens": self.num_tokens, "seconds": seconds}
            self.track.log({"step": done, **{f"generate/{key}": value for key, value in counts.items()}, "generate/tokens_per_s": self.num_tokens / seconds})


async def answer_prompts(
    prompts: Sequence[Prompt],
    engine: Engine,
    tokenizer: Any,
    pool: KeyedLog,
    progress: Callable[[Answer | Failure], None],
    think_tokens: Sequence[str | int] | None = None,
) -> Counter[str]:
    """Answer what the pool has no answer for, turn by turn on the target's own words; each answer is in the pool before the next is awaited.

    Returns:
        Failures of this run by kind. A prompt whose turn failed has no later turns, and is tried again by the next run that needs it.

    Raises:
        EngineError: the engine is broken as a whole.
    """
    failures: Counter[str] = Counter()
    form = read_answer_form(tokenizer, think_tokens)
    for turn in range(max((len(prompt.user_turns) for prompt in prompts), default=0)):
        # A generator, so that prompts are rendered as the engine takes them and never lie in memory all at once.
        requests = (request for prompt in prompts if (request := _next_request(prompt, turn, tokenizer, form, pool)) is not None)
        async for outcome in engine.answer(requests):
            if isinstance(outcome, Answer):
                pool.append(row_id(outcome.prompt_id, outcome.turn), vars(outcome))
            else:
                failures[outcome.kind] += 1
            progress(outcome)
    return failures


def _next_request(prompt: Prompt, turn: int, tokenizer: Any, form: AnswerForm, pool: KeyedLog) -> Request | None:
    """The request for one turn, or None if the prompt has no such turn, its answer is there, or an earlier turn has none."""
    if turn >= len(prompt.user_turns) or row_id(prompt.id, turn) in pool or (turn and row_id(prompt.id, turn - 1) not in pool):
        return None
    messages: list[dict[str, str]] = []
    num_users = 0
    for message in prompt.messages:
        messages.append(message)
        if message["role"] == "user":
            if num_users == turn:
                break
            messages.append(answer_message(tokenizer, _read(pool, row_id(prompt.id, num_users)), form))
            num_users += 1
    return Request(prompt.id, turn, encode_turn(tokenizer, messages), tuple(messages))


def _read(pool: KeyedLog, key: str) -> Answer:
    record = pool.read(key)
    return Answer(**{f.name: record[f.name] for f in dataclasses.fields(Answer)})


def collect_rows(prompts: Sequence[Prompt], pool: KeyedLog, path: Path, min_completion_tokens: int, truncated: str) -> dict[str, Any]:
    """Write the rows of these prompts, in their order, and account for every turn asked.

    Returns:
        Bins that add up to `turns`: kept, too_short, truncated_dropped, failed; beside them truncated_kept, the tokens of the rows, how all answers
        finished, and how many are of which length (by the lower edge of bins that double).

    Raises:
        DataError: no row is left.
    """
    bins = Counter(turns=0, kept=0, too_short=0, truncated_dropped=0, failed=0, truncated_kept=0, tokens=0, completion_tokens=0)
    finish_reasons: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            for turn in range(len(prompt.user_turns)):
                bins["turns"] += 1
                key = row_id(prompt.id, turn)
                if key not in pool:
                    bins["failed"] += 1
                    continue
                answer = _read(pool, key)
                finish_reasons[answer.finish_reason] += 1
                lengths[1 << max(len(answer.completion_ids).bit_length() - 1, 0)] += 1
                verdict = _verdict(answer, min_completion_tokens, truncated)
                bins[verdict] += 1
                if verdict == "kept":
                    row = to_row(answer, prompt.category)
                    bins["truncated_kept"] += answer.finish_reason == "length"
                    bins["tokens"] += len(row.input_ids)
                    bins["completion_tokens"] += len(answer.completion_ids)
                    file.write(json.dumps(dataclasses.asdict(row), ensure_ascii=False, separators=(",", ":")) + "\n")
    if not bins["kept"]:
        counted = ", ".join(f"{key} {bins[key]}" for key in ("too_short", "truncated_dropped", "failed"))
        raise DataError(f"no row is left of {bins['turns']} answers ({counted}): lower generation.min_completion_tokens, or see the failures above.")
    return {**bins, "finish_reasons": dict(finish_reasons), "answer_lengths": {str(edge): lengths[edge] for edge in sorted(lengths)}}


def _verdict(answer: Answer, min_completion_tokens: int, truncated: str) -> str:
    if len(answer.completion_ids) < max(min_completion_tokens, 1):
        return "too_short"
    return "truncated_dropped" if answer.finish_reason == "length" and truncated == "drop" else "kept"


def load_rows(path: Path) -> Iterator[Row]:
    """Rows as `collect_rows` left them."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield Row(**json.loads(line))

"""One arm live: real prompts to a vLLM server, its own counters before and after, and the times at which tokens came.

At one request in flight the counters are read around every request, so there are counts for each prompt, and with them intervals. At more, the
counters are those of the whole pass. Warm-up comes first, prompts go out in the same order to every arm, and no pass finds the prompts of another
in the server's prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.conversation import Row
from eagle3.engines import Sampling
from eagle3.errors import EngineError
from eagle3.evaluation.report import AcceptanceReport, RowCounts
from eagle3.evaluation.streaming import StreamClient, TimedAnswer, ask_all
from eagle3.serving.metrics import Counters
from eagle3.store import write_json

LIVE_FILE = "live.json"
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class LiveReport:
    """One arm at one k and one concurrency; `answers` are in the order of the rows that were asked. k is 0 without speculation."""

    arm: str
    k: int
    concurrency: int
    temperature: float
    answers: tuple[TimedAnswer, ...]
    counters: Counters
    counters_by_row: tuple[Counters, ...]  # one for each answer at concurrency 1, else none
    seconds: float  # of the whole pass; at concurrency 1 without the reading of counters

    @property
    def num_tokens(self) -> int:
        """Tokens answered, the end tokens included."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """What the server put out."""
        return self.num_tokens / self.seconds

    @property
    def mean_first_s(self) -> float:
        """Mean time to the first token (TTFT)."""
        return sum(answer.first_s for answer in self.answers) / len(self.answers)

    @property
    def token_s(self) -> float | None:
        """Time per token behind the first ones (TPOT), pooled over answers; None when no answer has a second chunk."""
        num = sum(answer.num_tokens - answer.num_first for answer in self.answers)
        return self._decode_s / num if num else None

    @property
    def num_steps(self) -> int:
        """Decoding steps of all requests, also those in which nothing was proposed.

        A drafter proposes in every step, so its steps are the server's drafts. For `ngram`, which often proposes nothing, the steps follow from the
        tokens: each makes one, and one more for each accepted draft. Accepted tokens past an answer's end make that at most k too few per answer.
        """
        return sum(_steps(answer, counters) for answer, counters in self._counted())

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per decoding step, over all steps: what arms can be compared by. None when nothing was decoded."""
        steps = self.num_steps
        return (self.num_tokens - len(self.answers)) / steps if steps else None

    @property
    def step_s(self) -> float | None:
        """Seconds that a request waits for one decoding step; None when nothing was decoded."""
        return self._decode_s / self.num_steps if self.num_steps else None

    @property
    def _decode_s(self) -> float:
        return sum(answer.seconds - answer.first_s for answer in self.answers)

    def _counted(self) -> list[tuple[int, Counters]]:
        """(tokens behind the first, counters) of each answer where they were read apart, else of all together."""
        if self.counters_by_row:
            return [(answer.num_tokens - 1, counters) for answer, counters in zip(self.answers, self.counters_by_row, strict=True)]
        return [(self.num_tokens - len(self.answers), self.counters)]

    def acceptance(self, rows: Sequence[Row]) -> AcceptanceReport | None:
        """The server's counts prompt by prompt, in the shape that a replay has; None without speculation, or where they were not read apart.

        The server also counts accepted tokens past the end of an answer, which a replay leaves out (vllm#56101): up to k per answer.
        """
        if not self.k or not self.counters_by_row:
            return None
        counts = []
        for row, (num_tokens, counters) in zip(rows, self._counted(), strict=True):
            accepted = counters.accepted_at + (0,) * (self.k - len(counters.accepted_at))
            drafted = _drafted_at(counters, self.k)
            counts.append(RowCounts(row.id, row.prompt_id, row.category, _steps(num_tokens, counters), num_tokens, accepted, drafted))
        note = "live acceptance counts accepted tokens past an answer's end, as the server does; tokens per step do not"
        return AcceptanceReport(self.arm, self.k, self.temperature, "live", tuple(counts), self.seconds, (note,))


def measure(
    arm: str,
    k: int,
    base_url: str,
    model: str,
    rows: Sequence[Row],
    sampling: Sampling,
    concurrencies: Sequence[int],
    timeout_s: float,
) -> list[LiveReport]:
    """Ask a server that runs the prompts of `rows`, in their order, once for each number of requests in flight.

    Raises:
        EngineError: an answer failed, the server has no counters, speculates in another way, answers others too, or was restarted.
    """
    reports = []
    for concurrency in concurrencies:
        client = StreamClient(base_url, model, sampling, timeout_s, salt=f"{arm}-{k}-{concurrency}-{time.time_ns()}")
        answers, by_row, counters, seconds = asyncio.run(_pass(client, rows, concurrency))
        _check(base_url, k, counters, sum(answer.num_tokens for answer in answers))
        reports.append(LiveReport(arm, k, concurrency, sampling.temperature, tuple(answers), counters, tuple(by_row), seconds))
    return reports


async def _pass(client: StreamClient, rows: Sequence[Row], concurrency: int) -> tuple[list[TimedAnswer], list[Counters], Counters, float]:
    """Answers, counters by row (one request in flight only), counters of the pass and its seconds."""
    async with client.session() as session:
        found = (await client.counters(session)).num_generated
        warm = await ask_all(client, session, rows[: max(concurrency, 2)], concurrency, WARM_UP_TOKENS)
        before = start = await client.counters(session, found + sum(answer.num_tokens for answer in warm))
        if concurrency > 1:
            began = time.perf_counter()
            answers = await ask_all(client, session, rows, concurrency)
            seconds = time.perf_counter() - began
            total = sum(answer.num_tokens for answer in answers)
            return answers, [], (await client.counters(session, start.num_generated + total)).since(start), seconds
        answers, by_row = [], []
        for row in rows:
            answers.append(await client.ask(session, row))
            after = await client.counters(session, before.num_generated + answers[-1].num_tokens)
            by_row.append(after.since(before))
            before = after
        return answers, by_row, before.since(start), sum(answer.seconds for answer in answers)


def _check(base_url: str, k: int, counters: Counters, num_tokens: int) -> None:
    if counters.num_generated != num_tokens:
        others = counters.num_generated - num_tokens
        raise EngineError(f"{base_url} generated {others} tokens more than were asked for: it answers others too, so its counters and times are not ours.")
    if len(counters.accepted_at) != k:
        raise EngineError(f"{base_url} drafts {len(counters.accepted_at)} tokens per step, not {k}: start it with that k, or set evaluation.live_ks.")


def identical_share(report: LiveReport, plain: LiveReport) -> float:
    """The share of answers that are the same ids as without speculation. Greedy speculation must not change a text, but for rounding."""
    pairs = zip(report.answers, plain.answers, strict=True)
    return sum(mine.completion_ids == theirs.completion_ids for mine, theirs in pairs) / len(plain.answers)


def write_live(folder: Path, reports: Sequence[LiveReport]) -> None:
    """Leave the passes in a folder, with every answer and its times."""
    write_json(folder / LIVE_FILE, [asdict(report) for report in reports])


def read_live(folder: Path) -> list[LiveReport]:
    """The passes that `write_live` left."""
    return [_read_report(values) for values in json.loads((folder / LIVE_FILE).read_text(encoding="utf-8"))]


def _read_report(values: dict[str, Any]) -> LiveReport:
    answers = tuple(TimedAnswer(**answer | {"completion_ids": tuple(answer["completion_ids"])}) for answer in values["answers"])
    by_row = tuple(map(_read_counters, values["counters_by_row"]))
    return LiveReport(**values | {"answers": answers, "counters": _read_counters(values["counters"]), "counters_by_row": by_row})


def _steps(num_tokens: int, counters: Counters) -> int:
    return max(counters.num_drafts, num_tokens - counters.num_accepted)


def _drafted_at(counters: Counters, k: int) -> tuple[int, ...]:
    """Drafts by position. A server counts their tokens only in sum: full drafts first, one shorter draft for the rest, as a drafter makes them."""
    full = counters.num_draft_tokens // k
    return tuple(full + (position < counters.num_draft_tokens % k) for position in range(k))


def _read_counters(values: dict[str, Any]) -> Counters:
    return Counters(**values | {"accepted_at": tuple(values["accepted_at"])})

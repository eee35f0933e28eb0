"""Held-out prompts asked of a live vLLM server, each answer with its exact ids and the times at which its tokens came."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3.conversation import Row
from eagle3.engines import Sampling
from eagle3.errors import EngineError
from eagle3.serving.metrics import Counters, metrics_url, read_counters

if TYPE_CHECKING:
    import aiohttp

LINE_BYTES = 2**24  # the first chunk repeats the prompt's ids
SETTLE_S = 5.0  # counters are written a moment after the last token


@dataclass(frozen=True)
class TimedAnswer:
    """One answer as it came; seconds count from the sending of the request.

    Under speculation a chunk of the stream holds several tokens, so times per token rest on counts of ids, never on counts of chunks.
    """

    row_id: str
    prompt_id: str
    completion_ids: tuple[int, ...]
    first_s: float  # to the first chunk with tokens
    num_first: int  # tokens in it
    seconds: float  # to the last token

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)


class StreamClient:
    """Asks one server, whose every answer must come: a measurement with holes is none.

    Args:
        base_url: http://host:port/v1.
        model: the served name.
        timeout_s: deadline of one request.
        salt: keeps prompts of another pass from being found in the server's prefix cache.
        api_key_env: environment variable that holds the server's key.
    """

    def __init__(self, base_url: str, model: str, sampling: Sampling, timeout_s: float, salt: str, api_key_env: str = "OPENAI_API_KEY") -> None:
        self.base_url, self.model, self.sampling, self.timeout_s, self.salt = base_url.rstrip("/"), model, sampling, timeout_s, salt
        self._key = os.environ.get(api_key_env)

    def session(self) -> aiohttp.ClientSession:
        """The connections of one pass, as a context."""
        import aiohttp

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(None), read_bufsize=LINE_BYTES)

    async def ask(self, session: aiohttp.ClientSession, row: Row, max_tokens: int | None = None) -> TimedAnswer:
        """Have the prompt of `row` answered anew.

        Raises:
            EngineError: no whole answer came.
        """
        import aiohttp

        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._stream(session, row, max_tokens or self.sampling.max_completion_tokens)
        except TimeoutError:
            raise EngineError(f"{self.base_url} gave no whole answer to {row.id} within generation.timeout_s={self.timeout_s:g} s.") from None
        except (aiohttp.ClientError, ValueError, LookupError) as error:
            raise EngineError(f"{self.base_url} broke off the answer to {row.id} ({type(error).__name__}: {error}): see the server's log.") from None

    async def _stream(self, session: aiohttp.ClientSession, row: Row, max_tokens: int) -> TimedAnswer:
        ids: list[int] = []
        first_s = last_s = 0.0
        num_first = 0
        began = time.perf_counter()
        async with session.post(f"{self.base_url}/completions", json=self._body(row, max_tokens)) as response:
            if response.status != 200:
                raise EngineError(f"{self.base_url} refuses to answer {row.id} (status {response.status}): {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise EngineError(f"{self.base_url} failed at {row.id}: {str(chunk['error'])[:300]}")
                new = [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                if new:
                    last_s = time.perf_counter() - began
                    if not ids:
                        first_s, num_first = last_s, len(new)
                    ids += new
                if (usage := chunk.get("usage")) and usage["completion_tokens"] != len(ids):
                    raise EngineError(
                        f"{self.base_url} counts {usage['completion_tokens']} tokens and streamed {len(ids)} ids: live evaluation needs vLLM 0.11 or newer."
                    )
        if not ids:
            raise EngineError(f"{self.base_url} answered {row.id} with no token.")
        return TimedAnswer(row.id, row.prompt_id, tuple(ids), first_s, num_first, last_s)

    def _body(self, row: Row, max_tokens: int) -> dict[str, Any]:
        prompt_ids = row.input_ids[: len(row.input_ids) - sum(row.loss_mask)]
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": min(max_tokens, sampling.max_seq_len - len(prompt_ids)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(sampling.stop_ids),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": self.salt,
        }
        if sampling.temperature:
            body["seed"] = int.from_bytes(hashlib.sha256(f"{sampling.seed}/{row.id}".encode()).digest()[:4])
        return body

    async def counters(self, session: aiohttp.ClientSession, at_least: int = 0) -> Counters:
        """What the server has counted, once that is `at_least` so many generated tokens.

        Raises:
            EngineError: the server shows no counters, or fewer tokens than it streamed.
        """
        import aiohttp

        url, deadline = metrics_url(self.base_url), time.monotonic() + SETTLE_S
        while True:
            try:
                async with session.get(url) as response:
                    response.raise_for_status()
                    read = read_counters(await response.text())
            except aiohttp.ClientError as error:
                raise EngineError(f"{url} can't be read ({error}): live evaluation needs the /metrics page of a vLLM server.") from None
            if read.num_generated >= at_least:
                return read
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{url} shows {read.num_generated} generated tokens where {at_least} were streamed: the server was restarted, or counts nothing."
                )
            await asyncio.sleep(0.005)


async def ask_all(
    client: StreamClient, session: aiohttp.ClientSession, rows: Sequence[Row], concurrency: int, max_tokens: int | None = None
) -> list[TimedAnswer]:
    """Answers to all prompts in the order of `rows`, `concurrency` of them in flight.

    Raises:
        EngineError: one of them got none.
    """
    waiting = iter(enumerate(rows))
    answers: dict[int, TimedAnswer] = {}

    async def work() -> None:
        for index, row in waiting:
            answers[index] = await client.ask(session, row, max_tokens)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [answers[index] for index in range(len(rows))]

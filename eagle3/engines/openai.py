"""Any number of servers that speak OpenAI's protocol (vLLM, SGLang, ...): always the same number of requests in flight, each with a deadline.

A request with messages is a chat, which the server renders by its own template and parses by its own reasoning parser; one without continues its
ids. Either way vLLM returns the exact ids it read and sampled, and these make the row. For servers that return text alone, `conversation.py`
rebuilds the ids.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from eagle3.conversation import Answer, Failure, Request, read_answer_form, rebuild_completion
from eagle3.engines import Sampling
from eagle3.engines.fleet import Fault, Fleet, Server
from eagle3.errors import EngineError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

RETRIED_STATUSES = frozenset({408, 409, 425, 429})  # and all 5xx
BACKOFF_S, MAX_BACKOFF_S, MAX_RETRY_AFTER_S = 1.0, 60.0, 300.0
PREFLIGHT_S = 10.0


class OpenAIEngine:
    """Answers requests by servers of one model, `concurrency` of them in flight over all servers.

    Args:
        base_urls: http://host:port/v1 of each server.
        tokenizer: the target's; it rebuilds ids where a server returns none, and knows where a thought opens.
        timeout_s: total time of one attempt, from the sending to the last byte.
        max_retries: attempts after the first, for faults that may pass; other faults fail the prompt at once.
        api_key_env: environment variable that holds the servers' key.
        think_tokens: the tokens around a thought, by name or id; given, the target is taken to think.
        patience_s: once anything was answered, how long the servers may all be gone before the run is given up.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        model: str,
        sampling: Sampling,
        tokenizer: Any,
        *,
        concurrency: int = 200,
        timeout_s: float = 1800.0,
        max_retries: int = 4,
        api_key_env: str = "OPENAI_API_KEY",
        think_tokens: Sequence[str | int] | None = None,
        patience_s: float = 300.0,
    ) -> None:
        self.model, self.sampling, self.tokenizer = model, sampling, tokenizer
        self.concurrency, self.timeout_s, self.max_retries, self.api_key_env = concurrency, timeout_s, max_retries, api_key_env
        self.form = read_answer_form(tokenizer, think_tokens)
        self.is_thinker = think_tokens is not None
        self.fleet = Fleet([Server(_with_path(url)) for url in base_urls], patience_s)
        self._is_checked = self._has_warned = False

    async def answer(self, requests: Iterable[Request]) -> AsyncIterator[Answer | Failure]:
        """Yield each request's outcome as it arrives; requests are taken one by one, as a place gets free.

        Raises:
            EngineError: a server can't be used as configured (before the first request is sent), or all of them are broken.
        """
        async with AsyncExitStack() as stack:
            for server in self.fleet.servers:
                server.client = await stack.enter_async_context(self._client(server.url))
            if not self._is_checked:
                await self._preflight()
            results: asyncio.Queue[Answer | Failure | Exception | None] = asyncio.Queue(maxsize=self.concurrency)
            waiting = iter(requests)
            workers = [asyncio.create_task(self._work(waiting, results)) for _ in range(self.concurrency)]
            stack.push_async_callback(_cancel, workers)
            num_working = len(workers)
            while num_working:
                outcome = await results.get()
                if outcome is None:
                    num_working -= 1
                elif isinstance(outcome, Exception):
                    raise outcome
                else:
                    yield outcome

    async def preflight(self) -> None:
        """Check address, key, model name and context length of every server, without spending a prompt.

        Raises:
            EngineError: one sentence on what is wrong with the first server that can't be used.
        """
        async with AsyncExitStack() as stack:
            for server in self.fleet.servers:
                server.client = await stack.enter_async_context(self._client(server.url))
            await self._preflight()

    async def _work(self, requests: Iterator[Request], results: asyncio.Queue[Answer | Failure | Exception | None]) -> None:
        try:
            for request in requests:
                await results.put(await self._answer_one(request))
            await results.put(None)
        except Exception as error:  # whatever it is, the consumer must hear of it and not wait for ever
            await results.put(error)

    async def _answer_one(self, request: Request) -> Answer | Failure:
        room = self.sampling.max_seq_len - len(request.prompt_ids)
        if room <= 0:
            message = f"the prompt has {len(request.prompt_ids)} tokens and leaves no room for an answer within {self.sampling.max_seq_len}"
            return Failure(request.prompt_id, request.turn, "too_long", message)
        path, body = self._body(request, min(room, self.sampling.max_completion_tokens))
        for attempt in range(self.max_retries + 1):
            server = await self.fleet.choose()
            try:
                async with asyncio.timeout(self.timeout_s):
                    text = await server.client.post(path, cast_to=str, body=body)
                answer = self._read(request, text, server)
            except Exception as error:
                fault = self._fault(error)
            else:
                self.fleet.answered(server)
                return answer
            finally:
                server.in_flight -= 1
            is_last = not fault.may_pass or attempt == self.max_retries
            self.fleet.failed(server, fault, is_last)
            if is_last:
                return Failure(request.prompt_id, request.turn, fault.kind, fault.message)
            # Full jitter: what failed together must not come back together.
            await asyncio.sleep(fault.retry_after_s or random.uniform(0, min(MAX_BACKOFF_S, BACKOFF_S * 2**attempt)))
        raise AssertionError("the last attempt returns")

    def _body(self, request: Request, max_tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body of one request. Everything that shapes the distribution is sent, since servers take defaults from the model's folder."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
        }
        if self.sampling.stop_ids:
            body["stop_token_ids"] = list(self.sampling.stop_ids)
        if self.sampling.temperature > 0:
            name = f"{self.sampling.seed}/{request.prompt_id}/{request.turn}"
            body["seed"] = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
        if request.messages:
            return "/chat/completions", body | {"messages": request.messages}
        return "/completions", body | {"prompt": request.prompt_ids}

    def _read(self, request: Request, text: str, server: Server) -> Answer:
        """The answer in a response's body; exact ids where the server gives them, rebuilt ones elsewhere."""
        try:
            body = json.loads(text)
            choice = body["choices"][0]
            message = choice.get("message") or {"content": choice.get("text")}
            finish = choice["finish_reason"]
            reasoning, content = message.get("reasoning") or message.get("reasoning_content"), message.get("content")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Fault("bad_json", f"not a completion in JSON: {text[:200]!r}", is_servers=True) from None
        if finish not in ("stop", "length"):
            raise Fault(f"finish_{finish}", f"the server ended the answer with finish_reason={finish}")
        # vLLM puts the prompt's ids beside the choices of a chat, and into the choice of a completion.
        read_ids: list[int] | None = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
        written_ids: list[int] | None = choice.get("token_ids")
        if not (written_ids or reasoning or content):
            raise Fault("empty", "the server answered with no text and no tokens")
        prompt_ids = read_ids or request.prompt_ids
        completion_ids = written_ids or rebuild_completion(self.tokenizer, self.form, prompt_ids, reasoning, content, finish)
        is_exact = bool(written_ids and (read_ids or not request.messages))
        provenance = server.provenance | {"endpoint": "chat" if request.messages else "completions", "finish_reason": finish, "exact": is_exact}
        if self._lacks_thought(prompt_ids, written_ids, reasoning, content):
            provenance["reasoning"] = "missing"
            self._warn_once(server)
        return Answer(request.prompt_id, request.turn, prompt_ids, completion_ids, finish, provenance)

    def _lacks_thought(self, prompt_ids: Sequence[int], exact_ids: Sequence[int] | None, reasoning: str | None, content: str | None) -> bool:
        """Whether a target that is known to think has left no trace of a thought."""
        form, opened = self.form, self.form.opens_thought(prompt_ids)
        if form.think is None or not form.expects_thought(prompt_ids) or not (self.is_thinker or opened):
            return False
        if exact_ids:
            return not opened and not any(token in exact_ids for token in form.think)
        return not reasoning and not any(name in (content or "") for name in form.think_text)

    def _warn_once(self, server: Server) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "THE TARGET THINKS, BUT %s RETURNS NO REASONING: a drafter trained on such rows never sees a thought. "
                "Start the server with the model's --reasoning-parser and thinking on; the rows are marked reasoning=missing.",
                server.url,
            )

    def _fault(self, error: Exception) -> Fault:
        """What went wrong, as a short stable word with the server's own message; errors that are none of a server's are raised on."""
        import openai

        if isinstance(error, Fault):
            return error
        if isinstance(error, TimeoutError):
            return Fault("timeout", f"no whole answer within {self.timeout_s:g} s", is_servers=True)
        if isinstance(error, openai.APIStatusError):
            status = error.status_code
            wait = _retry_after(error.response.headers.get("retry-after"))
            return Fault(f"http_{status}", self._message(error), status in RETRIED_STATUSES or status >= 500, wait, is_servers=status >= 500)
        if isinstance(error, openai.APIConnectionError):  # its time-outs are those of connecting
            return Fault("connection", str(error.__cause__ or error) or "the connection broke", is_servers=True)
        raise error

    def _message(self, error: Any) -> str:
        """The server's own words, without the key should it repeat it."""
        body = error.body if isinstance(error.body, dict) else {}
        text = str(body.get("message") or error.response.text or error.message)[:500]
        key = os.environ.get(self.api_key_env)
        return text.replace(key, "***") if key else text

    def _client(self, url: str) -> AsyncOpenAI:
        import httpx2
        import openai

        timeout = openai.Timeout(None, connect=30.0)  # the deadline is ours, and total
        # This transport costs half the default one's time per request. A connection idle for longer than 2 s may be closed by the server any moment.
        limits = httpx2.Limits(max_connections=2 * self.concurrency, keepalive_expiry=2.0)
        http = openai.DefaultAioHttpClient(timeout=timeout, limits=limits)
        return openai.AsyncOpenAI(base_url=url, api_key=os.environ.get(self.api_key_env) or "none", max_retries=0, timeout=timeout, http_client=http)

    async def _preflight(self) -> None:
        for server in self.fleet.servers:
            version = await self._check(server)
            server.provenance = {"engine": "openai", "server": version, "model": self.model, "sampling": dict(vars(self.sampling))}
        self._is_checked = True

    async def _check(self, server: Server) -> str:
        """What runs behind a server's address, by its own word."""
        try:
            async with asyncio.timeout(PREFLIGHT_S):
                served = json.loads(await server.client.get("/models", cast_to=str))["data"]
                cards = {card["id"]: card for card in served}
        except (ValueError, LookupError, TypeError):
            raise EngineError(f"{server.url} does not answer as an OpenAI-compatible server: correct engine.base_urls (they usually end in /v1).") from None
        except Exception as error:
            raise EngineError(self._refusal(server, self._fault(error))) from None
        if self.model not in cards:
            raise EngineError(f"{server.url} does not serve {self.model!r} but {', '.join(map(repr, cards)) or 'nothing'}: set engine.model to a served name.")
        context = cards[self.model].get("max_model_len")
        if context is not None and context < self.sampling.max_seq_len:
            raise EngineError(
                f"{server.url} serves {self.model} with a context of {context} tokens, less than generation.max_seq_len={self.sampling.max_seq_len}: "
                f"lower that, or start the server with --max-model-len {self.sampling.max_seq_len}."
            )
        owner = cards[self.model].get("owned_by") or "unknown"
        try:
            async with asyncio.timeout(PREFLIGHT_S):
                return f"{owner} {json.loads(await server.client.get(urljoin(server.url, '/version'), cast_to=str))['version']}"
        except Exception as error:  # most servers but vLLM have no such page
            log.debug("%s tells no version: %s", server.url, error)
            return str(owner)

    def _refusal(self, server: Server, fault: Fault) -> str:
        if fault.kind in ("http_401", "http_403"):
            has_key = "the key in it" if os.environ.get(self.api_key_env) else "no key, as it is not set"
            return (
                f"{server.url} refuses the request ({fault.message}): put the server's key into the environment variable {self.api_key_env} (sent: {has_key})."
            )
        if fault.kind == "http_404":
            return f"{server.url} has no page /models: correct engine.base_urls (they usually end in /v1)."
        if fault.kind == "timeout":
            return f"{server.url} does not answer within {PREFLIGHT_S:g} s: wait until the server is up, or correct engine.base_urls."
        return f"no working server at {server.url} ({fault.kind}: {fault.message}): start it, or correct engine.base_urls."


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _with_path(url: str) -> str:
    """The base URL with /v1 behind it if only a host was given.

    Raises:
        EngineError: it is not an http address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EngineError(f"engine.base_urls has {url!r}, which is no address: write it like http://localhost:8000/v1.")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def _retry_after(header: str | None) -> float | None:
    """Seconds that a server asks to wait, given by it as a number or as a date."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)

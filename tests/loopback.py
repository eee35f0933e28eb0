"""A server on the loopback that answers as vLLM does, without a model, and fails on purpose.

In tests it runs in a thread (`with Loopback(...) as server`); as a process of its own, for measurements: python tests/loopback.py --num-tokens 200
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from aiohttp import web

THINK, CLOSE, END = 163606, 163607, 163586  # of Kimi-K2.5
FAULTS = ("reset", "429", "500", "bad_json", "empty", "hang")


class KimiTokenizer:
    """Kimi-K2.5's special ids and turns; other characters are their code points."""

    special: ClassVar = {"<|im_end|>": END, "<|im_user|>": 163587, "<|im_assistant|>": 163588, "<|im_middle|>": 163601, "<think>": THINK, "</think>": CLOSE}
    eos_token_id = 163585

    def __len__(self) -> int:
        return 163_840

    def apply_chat_template(self, messages: Iterable[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool = False) -> str:
        turns = (f"<|im_{message['role']}|>{message['role']}<|im_middle|>{message['content']}<|im_end|>" for message in messages)
        return "".join(turns) + ("<|im_assistant|>assistant<|im_middle|><think>" if add_generation_prompt else "")

    def __call__(self, text: str, *, split_special_tokens: bool = False, **_: Any) -> dict[str, list[int]]:
        pieces = text if split_special_tokens else re.findall("|".join(map(re.escape, self.special)) + "|.|\n", text)
        return {"input_ids": [self.special.get(piece) or ord(piece) for piece in pieces]}

    def convert_tokens_to_ids(self, name: str) -> int | None:
        return self.special.get(name)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return {value: name for name, value in self.special.items()}.get(token)

    def decode(self, ids: Iterable[int], **_: Any) -> str:
        return "".join(self.convert_ids_to_tokens(token) or chr(token) for token in ids)


@dataclass(frozen=True)
class Reply:
    """What the model says to one request; a server that is not `exact` keeps the ids to itself."""

    content: str | None
    reasoning: str | None = None
    finish_reason: str = "stop"
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def digits(num_tokens: int) -> Callable[[dict[str, Any]], Reply]:
    """Replies of `num_tokens` ids that depend on the prompt alone."""

    def reply(body: dict[str, Any]) -> Reply:
        asked = json.dumps(body.get("messages") or body["prompt"])
        start = int.from_bytes(hashlib.sha256(asked.encode()).digest()[:2])
        ids = [100 + (start + 7 * i) % 40_000 for i in range(num_tokens)]
        prompt_ids = body.get("prompt") or [1, 2, 3]
        return Reply(f"answer {start} " * (num_tokens // 3), prompt_ids=prompt_ids, token_ids=ids)

    return reply


def kimi(body: dict[str, Any]) -> Reply:
    """A thought and an answer with the ids of Kimi-K2.5: the template opens the thought, the target closes it."""
    said = digits(40)(body).token_ids
    header = [163588, 100, 163601, 163606]  # <|im_assistant|> assistant <|im_middle|> <think>
    return Reply("the answer", "a thought", prompt_ids=[163587, 101, 163601, 102, 163586, *header], token_ids=[*said[:30], 163607, *said[30:], 163586])


class Loopback:
    """An OpenAI-compatible server.

    Args:
        reply: what is said, from the body of the request.
        fault: name of a fault for the n-th request (from 0), or None; FAULTS, an HTTP status, or "stopped" (hangs up at once).
        fault_rate: instead of `fault`: this share of the requests fails, all kinds alike.
        reasoning_field: `reasoning` (vLLM) or `reasoning_content` (older vLLM, SGLang).
    """

    def __init__(
        self,
        reply: Callable[[dict[str, Any]], Reply] | None = None,
        *,
        fault: Callable[[int], str | None] | None = None,
        fault_rate: float = 0.0,
        model: str = "target",
        max_model_len: int = 16_384,
        delay_s: float = 0.0,
        exact: bool = True,
        reasoning_field: str = "reasoning",
        key: str | None = None,
        version: str | None = "0.32.0",
        num_tokens: int = 20,
    ) -> None:
        self.reply, self.model, self.max_model_len, self.delay_s = reply or digits(num_tokens), model, max_model_len, delay_s
        self.exact, self.reasoning_field, self.key, self.version = exact, reasoning_field, key, version
        draws = random.Random(0)
        self.fault = fault or (lambda _: draws.choice(FAULTS) if draws.random() < fault_rate else None)
        self.port, self.num_requests, self.in_flight, self.max_in_flight = 0, 0, 0, 0
        self.bodies: list[dict[str, Any]] = []  # the last hundred
        self.injected: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self, port: int = 0) -> web.AppRunner:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        if self.version:
            app.router.add_get("/version", self._version)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return runner

    def __enter__(self) -> Self:
        started = threading.Event()

        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            runner = await self.start()
            started.set()
            await self._stop.wait()
            await runner.cleanup()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, f"Unauthorized: {request.headers.get('Authorization')} is not a valid key")
        number = self.num_requests
        self.num_requests += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            body = json.loads(await request.read())
            self.bodies = [*self.bodies[-99:], body]
            if fault := self.fault(number):
                self.injected[fault] += 1
                return await self._fail(fault, request)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            return self._respond(body, self.reply(body))
        finally:
            self.in_flight -= 1

    async def _fail(self, fault: str, request: web.Request) -> web.StreamResponse:
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault in ("reset", "stopped"):
            assert request.transport is not None
            request.transport.abort()
        if fault == "bad_json":
            return web.Response(text='{"choices": [{"mess', content_type="application/json")
        if fault == "empty":
            return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}]})
        if fault == "429":
            return _error(429, "too many requests", {"Retry-After": "0.05"})
        return _error(int(fault) if fault.isdigit() else 500, f"injected {fault}")

    def _respond(self, body: dict[str, Any], reply: Reply) -> web.Response:
        ids = {"token_ids": reply.token_ids} if self.exact and body.get("return_token_ids") else {}
        prompt = {"prompt_token_ids": reply.prompt_ids} if ids else {}
        choice: dict[str, Any] = {"index": 0, "finish_reason": reply.finish_reason, "stop_reason": None, **ids}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": reply.content, self.reasoning_field: reply.reasoning}
        else:
            choice |= {"text": reply.content, **prompt}
        usage = {"prompt_tokens": len(reply.prompt_ids), "completion_tokens": len(reply.token_ids)}
        kind = "chat.completion" if "messages" in body else "text_completion"
        beside = prompt if "messages" in body else {}
        return web.json_response({"id": "cmpl-1", "object": kind, "created": 0, "model": self.model, "choices": [choice], "usage": usage, **beside})

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, f"Unauthorized: {request.headers.get('Authorization')} is not a valid key")
        card = {"id": self.model, "object": "model", "owned_by": "vllm", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "Error", "param": None, "code": status}}, status=status, headers=headers)


async def _serve(options: argparse.Namespace) -> None:
    server = Loopback(
        kimi if options.kimi else None,
        delay_s=options.delay_s,
        num_tokens=options.num_tokens,
        fault_rate=options.fault_rate,
        model=options.model,
        max_model_len=options.max_model_len,
    )
    await server.start(options.port)
    print(server.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="target")
    parser.add_argument("--max-model-len", type=int, default=16_384)
    parser.add_argument("--num-tokens", type=int, default=200)
    parser.add_argument("--delay-s", type=float, default=0.002)
    parser.add_argument("--fault-rate", type=float, default=0.0)
    parser.add_argument("--kimi", action="store_true", help="answer with a thought and the special ids of Kimi-K2.5")
    asyncio.run(_serve(parser.parse_args()))
